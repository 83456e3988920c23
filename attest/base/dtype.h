// Element types of weights and committed rows. The values are part of the public formats.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bitwitness {

enum class Dtype : std::uint8_t { kBf16 = 1, kFp16 = 2, kFp32 = 3 };

constexpr std::size_t dtype_bytes(Dtype dtype) {
  return dtype == Dtype::kFp32 ? 4 : 2;
}

constexpr const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return "bf16";
    case Dtype::kFp16:
      return "fp16";
    case Dtype::kFp32:
      return "fp32";
  }
  return "unknown";
}

}  // namespace bitwitness
