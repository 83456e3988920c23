// The kernels for AVX-512 F, BW, DQ and VL. Compiled with those flags: see cpu_kernels.h before
// adding a call.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/cpu_kernels.h"

namespace bitwitness {
namespace {

using F = __m512;
using I = __m512i;
using F8 = __m256;

constexpr int kWidth = 16;
constexpr int kPackRows = 2;      // rows of W in a vector of chains
constexpr int kPanelVectors = 2;  // 14 x 2 accumulators, 2 of W, 1 of x: 31 registers
constexpr int kTileRows = 14;
constexpr int kValueVectors = 4;

#define BW_INLINE inline __attribute__((always_inline))

#include "kernels/cpu/kernels_ymm.h"

BW_INLINE F zero() {
  return _mm512_setzero_ps();
}
BW_INLINE F set1(float x) {
  return _mm512_set1_ps(x);
}
BW_INLINE F broadcast(const float* p) {
  return _mm512_set1_ps(*p);
}
BW_INLINE F load(const float* p) {
  return _mm512_loadu_ps(p);
}
BW_INLINE void store(float* p, F x) {
  _mm512_storeu_ps(p, x);
}
BW_INLINE __mmask16 first_lanes(int count) {
  return static_cast<__mmask16>((1u << static_cast<unsigned>(count)) - 1u);
}
// The first `count` lanes; the others are +0 and their memory is not touched.
BW_INLINE F load_part(const float* p, int count) {
  return _mm512_maskz_loadu_ps(first_lanes(count), p);
}
BW_INLINE void store_part(float* p, F x, int count) {
  _mm512_mask_storeu_ps(p, first_lanes(count), x);
}
BW_INLINE float first_lane(F x) {
  return _mm512_cvtss_f32(x);
}
BW_INLINE F add(F a, F b) {
  return _mm512_add_ps(a, b);
}
BW_INLINE F sub(F a, F b) {
  return _mm512_sub_ps(a, b);
}
BW_INLINE F mul(F a, F b) {
  return _mm512_mul_ps(a, b);
}
BW_INLINE F div(F a, F b) {
  return _mm512_div_ps(a, b);
}
BW_INLINE F fma(F a, F b, F c) {
  return _mm512_fmadd_ps(a, b, c);
}
BW_INLINE F negate(F a) {
  return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f));
}
// a > b ? a : b and a < b ? a : b
BW_INLINE F max_or_second(F a, F b) {
  return _mm512_max_ps(a, b);
}
BW_INLINE F min_or_second(F a, F b) {
  return _mm512_min_ps(a, b);
}
BW_INLINE unsigned equal_lanes(F a, F b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
BW_INLINE unsigned non_finite_lanes(F x) {
  const I exponent = _mm512_set1_epi32(0x7f800000);
  return _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(x), exponent), exponent);
}
// The last step of exp32: p * 2^n in two exact scales, n from the bits of n + 1.5 * 2^23.
BW_INLINE F scale_by_exponent(F p, F shifted) {
  const I exponent = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x4b400000));
  const I half = _mm512_srai_epi32(exponent, 1);
  const I bias = _mm512_set1_epi32(127);
  const I scale1 = _mm512_slli_epi32(_mm512_add_epi32(half, bias), 23);
  const I scale2 = _mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(exponent, half), bias), 23);
  return mul(mul(p, _mm512_castsi512_ps(scale1)), _mm512_castsi512_ps(scale2));
}

BW_INLINE F as_float(I x) {
  return _mm512_castsi512_ps(x);
}
BW_INLINE I low_halves_up(I x) {
  return _mm512_slli_epi32(x, 16);
}
BW_INLINE I high_halves(I x) {
  return _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
}
// The low and the high binary16 half of every double word.
BW_INLINE void halves_to_float(I x, F& low, F& high) {
  const I gather =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const I split = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
                                           _mm512_shuffle_epi8(x, gather));
  low = _mm512_cvtph_ps(_mm512_castsi512_si256(split));
  high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(split, 1));
}
// Transposes the 4 x 4 double words that the four vectors have in each 128 bits.
BW_INLINE void transpose4(I (&z)[4]) {
  const I a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
  const I c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
  z[0] = _mm512_unpacklo_epi64(a, c);
  z[1] = _mm512_unpackhi_epi64(a, c);
  z[2] = _mm512_unpacklo_epi64(b, d);
  z[3] = _mm512_unpackhi_epi64(b, d);
}
// 8 interleaved x, for both rows of the pack.
BW_INLINE F load_chains(const float* x) {
  return _mm512_broadcast_f32x8(_mm256_loadu_ps(x));
}

// 32 bytes of each row of the pack.
template <class Rows>
BW_INLINE I load_pair(const Rows& rows, std::int64_t offset) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(rows.row[0] + offset));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(rows.row[1] + offset));
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}
// 16 bytes at `offset` and 16 at `offset + step` of each row of the pack.
template <class Rows>
BW_INLINE I load_pieces(const Rows& rows, std::int64_t offset, int step) {
  __m256i half[2];
  for (int h = 0; h < 2; ++h) {
    const std::byte* p = rows.row[h] + offset;
    half[h] = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(p))),
        _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(p + step)), 1);
  }
  return _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
}
// The ascending sum over the chains of four accumulators: lane 8 h + i is row h of accumulator i
// (the other lanes are not used).
BW_INLINE F add_chains(F (&acc)[4]) {
  I z[4];
  for (int i = 0; i < 4; ++i) z[i] = _mm512_castps_si512(acc[i]);
  transpose4(z);  // z[i]: chains 2 i in lanes 0 to 3 and 8 to 11, 2 i + 1 in the others
  F sum = as_float(z[0]);
  for (int i = 0; i < 4; ++i) {
    if (i != 0) sum = add(sum, as_float(z[i]));
    sum = add(sum, as_float(_mm512_shuffle_i32x4(z[i], z[i], _MM_SHUFFLE(2, 3, 0, 1))));
  }
  return sum;
}

#include "kernels/cpu/kernels_simd.h"

}  // namespace

extern const CpuKernels kCpuKernelsAvx512;
constinit const CpuKernels kCpuKernelsAvx512 = table_of("avx512");

}  // namespace bitwitness
