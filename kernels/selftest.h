// Known answers of the kernels: a small synthetic model on every backend of this machine.
#pragma once

#include <vector>

#include "attest/base/selftest.h"

namespace bitwitness {

// One result for each backend that can be made here: the digest of hidden rows, logits and sampled
// tokens of a fixed model over 70 positions, against the published value (kernels/selftest.cc).
// Under a second.
std::vector<SelftestResult> kernels_selftest();

}  // namespace bitwitness
