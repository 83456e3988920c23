// Unpredictable bytes from the operating system, through OpenSSL.
#pragma once

#include <cstddef>

#include "attest/base/bytes.h"

namespace bitwitness {

Bytes random_bytes(std::size_t count);  // throws an infrastructure Error if there is no entropy

}  // namespace bitwitness
