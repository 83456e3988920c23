// Known answers of attest/: SHA-256, the hash tree, Merkle trees, Ed25519, canonical bytes.
#pragma once

#include <vector>

#include "attest/base/selftest.h"

namespace bitwitness {

// Runs all of them; quick (milliseconds). Every program calls it in its `selftest`.
std::vector<SelftestResult> attest_selftest();

}  // namespace bitwitness
