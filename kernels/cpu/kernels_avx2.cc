// The kernels for AVX2, FMA and F16C. Compiled with those flags: see cpu_kernels.h before adding a
// call.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/cpu_kernels.h"

namespace bitwitness {
namespace {

using F = __m256;
using I = __m256i;
using F8 = __m256;

constexpr int kWidth = 8;
constexpr int kPackRows = 1;      // rows of W in a vector of chains
constexpr int kPanelVectors = 2;  // 6 x 2 accumulators, 2 of W, 1 of x: 15 registers
constexpr int kTileRows = 6;
constexpr int kValueVectors = 2;

#define BW_INLINE inline __attribute__((always_inline))

#include "kernels/cpu/kernels_ymm.h"

BW_INLINE F zero() {
  return _mm256_setzero_ps();
}
BW_INLINE F set1(float x) {
  return _mm256_set1_ps(x);
}
BW_INLINE F broadcast(const float* p) {
  return _mm256_broadcast_ss(p);
}
BW_INLINE F load(const float* p) {
  return _mm256_loadu_ps(p);
}
BW_INLINE void store(float* p, F x) {
  _mm256_storeu_ps(p, x);
}
BW_INLINE I first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
// The first `count` lanes; the others are +0 and their memory is not touched.
BW_INLINE F load_part(const float* p, int count) {
  return _mm256_maskload_ps(p, first_lanes(count));
}
BW_INLINE void store_part(float* p, F x, int count) {
  _mm256_maskstore_ps(p, first_lanes(count), x);
}
BW_INLINE float first_lane(F x) {
  return _mm256_cvtss_f32(x);
}
BW_INLINE F add(F a, F b) {
  return _mm256_add_ps(a, b);
}
BW_INLINE F sub(F a, F b) {
  return _mm256_sub_ps(a, b);
}
BW_INLINE F mul(F a, F b) {
  return _mm256_mul_ps(a, b);
}
BW_INLINE F div(F a, F b) {
  return _mm256_div_ps(a, b);
}
BW_INLINE F fma(F a, F b, F c) {
  return _mm256_fmadd_ps(a, b, c);
}
BW_INLINE F negate(F a) {
  return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f));
}
// a > b ? a : b and a < b ? a : b
BW_INLINE F max_or_second(F a, F b) {
  return _mm256_max_ps(a, b);
}
BW_INLINE F min_or_second(F a, F b) {
  return _mm256_min_ps(a, b);
}
BW_INLINE unsigned equal_lanes(F a, F b) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
}
BW_INLINE unsigned non_finite_lanes(F x) {
  const I exponent = _mm256_set1_epi32(0x7f800000);
  const I equal = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(x), exponent), exponent);
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(equal)));
}
// The last step of exp32: p * 2^n in two exact scales, n from the bits of n + 1.5 * 2^23.
BW_INLINE F scale_by_exponent(F p, F shifted) {
  const I exponent = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4b400000));
  const I half = _mm256_srai_epi32(exponent, 1);
  const I bias = _mm256_set1_epi32(127);
  const I scale1 = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const I scale2 = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(exponent, half), bias), 23);
  return mul(mul(p, _mm256_castsi256_ps(scale1)), _mm256_castsi256_ps(scale2));
}

BW_INLINE F as_float(I x) {
  return _mm256_castsi256_ps(x);
}
BW_INLINE I low_halves_up(I x) {
  return _mm256_slli_epi32(x, 16);
}
BW_INLINE I high_halves(I x) {
  return _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
}
// The low and the high binary16 half of every double word.
BW_INLINE void halves_to_float(I x, F& low, F& high) {
  const I gather = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const I split = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x, gather), _MM_SHUFFLE(3, 1, 2, 0));
  low = _mm256_cvtph_ps(_mm256_castsi256_si128(split));
  high = _mm256_cvtph_ps(_mm256_extracti128_si256(split, 1));
}
// Transposes the 4 x 4 double words that the four vectors have in each 128 bits.
BW_INLINE void transpose4(I (&z)[4]) {
  const I a = _mm256_unpacklo_epi32(z[0], z[1]), b = _mm256_unpackhi_epi32(z[0], z[1]);
  const I c = _mm256_unpacklo_epi32(z[2], z[3]), d = _mm256_unpackhi_epi32(z[2], z[3]);
  z[0] = _mm256_unpacklo_epi64(a, c);
  z[1] = _mm256_unpackhi_epi64(a, c);
  z[2] = _mm256_unpacklo_epi64(b, d);
  z[3] = _mm256_unpackhi_epi64(b, d);
}
// 8 interleaved x.
BW_INLINE F load_chains(const float* x) {
  return _mm256_loadu_ps(x);
}

// 32 bytes of the row.
template <class Rows>
BW_INLINE I load_pair(const Rows& rows, std::int64_t offset) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(rows.row[0] + offset));
}
// 16 bytes at `offset` and 16 at `offset + step` of the row.
template <class Rows>
BW_INLINE I load_pieces(const Rows& rows, std::int64_t offset, int step) {
  const std::byte* p = rows.row[0] + offset;
  return _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(p))),
      _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(p + step)), 1);
}
// The ascending sum over the chains of four accumulators: lane i is accumulator i (the other lanes
// are not used).
BW_INLINE F add_chains(F (&acc)[4]) {
  I z[4];
  for (int i = 0; i < 4; ++i) z[i] = _mm256_castps_si256(acc[i]);
  transpose4(z);  // z[i]: chains 2 i in the lower half, 2 i + 1 in the upper
  F sum = as_float(z[0]);
  for (int i = 0; i < 4; ++i) {
    if (i != 0) sum = add(sum, as_float(z[i]));
    sum = add(sum, as_float(_mm256_permute2x128_si256(z[i], z[i], 1)));
  }
  return sum;
}

#include "kernels/cpu/kernels_simd.h"

}  // namespace

extern const CpuKernels kCpuKernelsAvx2;
constinit const CpuKernels kCpuKernelsAvx2 = table_of("avx2");

}  // namespace bitwitness
