// Weights in registers, for both families of matrix product.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attest/base/dtype.h"
#include "kernels/contract.h"

namespace bitwitness::cuda {

template <Dtype kDtype>
inline constexpr int kElementBytes = static_cast<int>(dtype_bytes(kDtype));

// The first word of a 16-byte vector is its lowest address. Indices are constants after unrolling.
__device__ __forceinline__ std::uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Exact upcast of an IEEE half; subnormals are kept (PTX: cvt.f32.f16 without .ftz).
__device__ __forceinline__ float half_bits_to_float(std::uint32_t h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<unsigned short>(h)));
  return x;
}

// Element i of the 16-bit elements packed in `word`, i in {0, 1}.
template <Dtype kDtype>
__device__ __forceinline__ float upcast16(std::uint32_t word, int i) {
  if constexpr (kDtype == Dtype::kBf16) {
    return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
  } else {
    return half_bits_to_float(i == 0 ? word & 0xffffu : word >> 16);
  }
}

// One group of kGroup = 8 consecutive weights as it lies in memory.
template <Dtype kDtype>
struct WeightGroup {
  static constexpr int kVectors = kDtype == Dtype::kFp32 ? 2 : 1;
  uint4 v[kVectors];

  __device__ __forceinline__ float at(int i) const {
    if constexpr (kDtype == Dtype::kFp32) {
      return __uint_as_float(word_of(v[i / 4], i % 4));
    } else {
      return upcast16<kDtype>(word_of(v[0], i / 2), i % 2);
    }
  }
};

// Whether rows of W[., K] and x[., K] can be read 16 bytes and whole groups at a time.
inline bool rows_are_vectors(const void* x, const void* W, std::int64_t K) {
  return K % contract::kGroup == 0 && reinterpret_cast<std::uintptr_t>(x) % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(W) % 16 == 0;
}

}  // namespace bitwitness::cuda
