// NumPy array files (format version 1.0), for logits.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "attest/base/bytes.h"

namespace bitwitness {

// The bytes of an .npy file with a C-ordered little-endian float32 array [rows, cols];
// values.size() == rows * cols.
Bytes npy_float32(std::span<const float> values, std::uint64_t rows, std::uint64_t cols);

}  // namespace bitwitness
