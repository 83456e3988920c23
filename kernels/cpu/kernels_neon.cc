// The kernels for AArch64's Advanced SIMD, which every such processor has: no flags of its own.
//
// A vector is two registers, so that the 8 chains of a product are one vector, as on AVX2.
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/cpu_kernels.h"

namespace bitwitness {
namespace {

struct F {  // lanes 0 to 3, 4 to 7
  float32x4_t low, high;
};
struct I {
  uint32x4_t low, high;
};
using F8 = F;

constexpr int kWidth = 8;
constexpr int kPackRows = 1;      // rows of W in a vector of chains
constexpr int kPanelVectors = 2;  // 6 x 2 accumulators, 2 of W, 1 of x: 29 registers
constexpr int kTileRows = 6;
constexpr int kValueVectors = 2;

#define BW_INLINE inline __attribute__((always_inline))

BW_INLINE F zero() {
  return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
}
BW_INLINE F set1(float x) {
  return {vdupq_n_f32(x), vdupq_n_f32(x)};
}
BW_INLINE F broadcast(const float* p) {
  const float32x4_t x = vld1q_dup_f32(p);
  return {x, x};
}
BW_INLINE F load(const float* p) {
  return {vld1q_f32(p), vld1q_f32(p + 4)};
}
BW_INLINE void store(float* p, F x) {
  vst1q_f32(p, x.low);
  vst1q_f32(p + 4, x.high);
}
// The first `count` lanes; the others are +0 and their memory is not touched.
BW_INLINE F load_part(const float* p, int count) {
  if (count == kWidth) return load(p);
  float lanes[kWidth] = {};
  __builtin_memcpy(lanes, p, static_cast<std::size_t>(count) * sizeof(float));
  return load(lanes);
}
BW_INLINE void store_part(float* p, F x, int count) {
  if (count == kWidth) return store(p, x);
  float lanes[kWidth];
  store(lanes, x);
  __builtin_memcpy(p, lanes, static_cast<std::size_t>(count) * sizeof(float));
}
BW_INLINE float first_lane(F x) {
  return vgetq_lane_f32(x.low, 0);
}
BW_INLINE F add(F a, F b) {
  return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
}
BW_INLINE F sub(F a, F b) {
  return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)};
}
BW_INLINE F mul(F a, F b) {
  return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
}
BW_INLINE F div(F a, F b) {
  return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)};
}
BW_INLINE F fma(F a, F b, F c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
BW_INLINE F negate(F a) {
  return {vnegq_f32(a.low), vnegq_f32(a.high)};
}
// a > b ? a : b and a < b ? a : b (FMAX and FMIN treat zeros and NaN otherwise)
BW_INLINE F max_or_second(F a, F b) {
  return {vbslq_f32(vcgtq_f32(a.low, b.low), a.low, b.low),
          vbslq_f32(vcgtq_f32(a.high, b.high), a.high, b.high)};
}
BW_INLINE F min_or_second(F a, F b) {
  return {vbslq_f32(vcltq_f32(a.low, b.low), a.low, b.low),
          vbslq_f32(vcltq_f32(a.high, b.high), a.high, b.high)};
}
// One bit for each lane of all ones.
BW_INLINE unsigned bits_of_lanes(uint32x4_t low, uint32x4_t high) {
  constexpr std::uint32_t kLowBits[4] = {1, 2, 4, 8}, kHighBits[4] = {16, 32, 64, 128};
  return vaddvq_u32(
      vorrq_u32(vandq_u32(low, vld1q_u32(kLowBits)), vandq_u32(high, vld1q_u32(kHighBits))));
}
BW_INLINE unsigned equal_lanes(F a, F b) {
  return bits_of_lanes(vceqq_f32(a.low, b.low), vceqq_f32(a.high, b.high));
}
BW_INLINE unsigned non_finite_lanes(F x) {
  const uint32x4_t exponent = vdupq_n_u32(0x7f800000u);
  return bits_of_lanes(vceqq_u32(vandq_u32(vreinterpretq_u32_f32(x.low), exponent), exponent),
                       vceqq_u32(vandq_u32(vreinterpretq_u32_f32(x.high), exponent), exponent));
}
// The last step of exp32: p * 2^n in two exact scales, n from the bits of n + 1.5 * 2^23.
BW_INLINE float32x4_t scale_by_exponent(float32x4_t p, float32x4_t shifted) {
  const int32x4_t exponent = vsubq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(0x4b400000));
  const int32x4_t half = vshrq_n_s32(exponent, 1);
  const int32x4_t bias = vdupq_n_s32(127);
  const int32x4_t scale1 = vshlq_n_s32(vaddq_s32(half, bias), 23);
  const int32x4_t scale2 = vshlq_n_s32(vaddq_s32(vsubq_s32(exponent, half), bias), 23);
  return vmulq_f32(vmulq_f32(p, vreinterpretq_f32_s32(scale1)), vreinterpretq_f32_s32(scale2));
}
BW_INLINE F scale_by_exponent(F p, F shifted) {
  return {scale_by_exponent(p.low, shifted.low), scale_by_exponent(p.high, shifted.high)};
}

BW_INLINE F as_float(I x) {
  return {vreinterpretq_f32_u32(x.low), vreinterpretq_f32_u32(x.high)};
}
BW_INLINE I low_halves_up(I x) {
  return {vshlq_n_u32(x.low, 16), vshlq_n_u32(x.high, 16)};
}
BW_INLINE I high_halves(I x) {
  const uint32x4_t mask = vdupq_n_u32(0xffff0000u);
  return {vandq_u32(x.low, mask), vandq_u32(x.high, mask)};
}
// Exact, subnormals included: FPCR.FZ and FZ16 leave conversions from binary16 alone.
BW_INLINE float32x4_t half_to_float(uint16x4_t x) {
  return vcvt_f32_f16(vreinterpret_f16_u16(x));
}
// The low and the high binary16 half of every double word.
BW_INLINE void halves_to_float(I x, F& low, F& high) {
  low = {half_to_float(vmovn_u32(x.low)), half_to_float(vmovn_u32(x.high))};
  high = {half_to_float(vshrn_n_u32(x.low, 16)), half_to_float(vshrn_n_u32(x.high, 16))};
}
// Transposes 4 x 4 double words.
BW_INLINE void transpose4(uint32x4_t& z0, uint32x4_t& z1, uint32x4_t& z2, uint32x4_t& z3) {
  const uint64x2_t a = vreinterpretq_u64_u32(vzip1q_u32(z0, z1));
  const uint64x2_t b = vreinterpretq_u64_u32(vzip2q_u32(z0, z1));
  const uint64x2_t c = vreinterpretq_u64_u32(vzip1q_u32(z2, z3));
  const uint64x2_t d = vreinterpretq_u64_u32(vzip2q_u32(z2, z3));
  z0 = vreinterpretq_u32_u64(vzip1q_u64(a, c));
  z1 = vreinterpretq_u32_u64(vzip2q_u64(a, c));
  z2 = vreinterpretq_u32_u64(vzip1q_u64(b, d));
  z3 = vreinterpretq_u32_u64(vzip2q_u64(b, d));
}
// Transposes the 4 x 4 double words that the four vectors have in each 128 bits.
BW_INLINE void transpose4(I (&z)[4]) {
  transpose4(z[0].low, z[1].low, z[2].low, z[3].low);
  transpose4(z[0].high, z[1].high, z[2].high, z[3].high);
}
// 8 interleaved x.
BW_INLINE F load_chains(const float* x) {
  return load(x);
}

// 16 bytes of any alignment.
BW_INLINE uint32x4_t load16(const std::byte* p) {
  return vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(p)));
}
// 32 bytes of the row.
template <class Rows>
BW_INLINE I load_pair(const Rows& rows, std::int64_t offset) {
  return {load16(rows.row[0] + offset), load16(rows.row[0] + offset + 16)};
}
// 16 bytes at `offset` and 16 at `offset + step` of the row.
template <class Rows>
BW_INLINE I load_pieces(const Rows& rows, std::int64_t offset, int step) {
  return {load16(rows.row[0] + offset), load16(rows.row[0] + offset + step)};
}
// The ascending sum over the chains of four accumulators: lane i is accumulator i (the other lanes
// are not used).
BW_INLINE F add_chains(F (&acc)[4]) {
  I z[4];
  for (int i = 0; i < 4; ++i) {
    z[i] = {vreinterpretq_u32_f32(acc[i].low), vreinterpretq_u32_f32(acc[i].high)};
  }
  transpose4(z);  // z[i]: chains 2 i in the lower half, 2 i + 1 in the upper
  float32x4_t sum = as_float(z[0]).low;
  for (int i = 0; i < 4; ++i) {
    if (i != 0) sum = vaddq_f32(sum, as_float(z[i]).low);
    sum = vaddq_f32(sum, as_float(z[i]).high);
  }
  return {sum, vdupq_n_f32(0.0f)};
}

// ---- 8 x 8 blocks ----

// 8 weights at `p` (any alignment), upcast exactly.
template <Dtype kDtype>
BW_INLINE F8 load8(const std::byte* p) {
  if constexpr (kDtype == Dtype::kFp32) {
    return as_float({load16(p), load16(p + 16)});
  } else {
    const uint16x8_t halves = vreinterpretq_u16_u32(load16(p));
    if constexpr (kDtype == Dtype::kFp16) {
      return {half_to_float(vget_low_u16(halves)), half_to_float(vget_high_u16(halves))};
    } else {
      const uint16x8_t nothing = vdupq_n_u16(0);
      return as_float({vreinterpretq_u32_u16(vzip1q_u16(nothing, halves)),
                       vreinterpretq_u32_u16(vzip2q_u16(nothing, halves))});
    }
  }
}
BW_INLINE F8 zero8() {
  return zero();
}
BW_INLINE void store8(float* p, F8 x) {
  store(p, x);
}

BW_INLINE void transpose8(F8 (&a)[8]) {
  I upper[4], lower[4];  // rows 0 to 3 and 4 to 7, each a pair of 4 x 4 blocks
  for (int i = 0; i < 4; ++i) {
    upper[i] = {vreinterpretq_u32_f32(a[i].low), vreinterpretq_u32_f32(a[i].high)};
    lower[i] = {vreinterpretq_u32_f32(a[i + 4].low), vreinterpretq_u32_f32(a[i + 4].high)};
  }
  transpose4(upper);
  transpose4(lower);
  for (int i = 0; i < 4; ++i) {
    a[i] = as_float({upper[i].low, lower[i].low});
    a[i + 4] = as_float({upper[i].high, lower[i].high});
  }
}

// Fills one 64-block of weights of kElementBytes each with -0.
template <int kElementBytes>
BW_INLINE void fill_negative_zero(std::byte* block) {
  const uint8x16_t pattern =
      vreinterpretq_u8_u32(vdupq_n_u32(kElementBytes == 4 ? 0x80000000u : 0x80008000u));
  for (int i = 0; i < kDotBlock * kElementBytes; i += 16) {
    vst1q_u8(reinterpret_cast<std::uint8_t*>(block + i), pattern);
  }
}

#include "kernels/cpu/kernels_simd.h"

}  // namespace

extern const CpuKernels kCpuKernelsNeon;
constinit const CpuKernels kCpuKernelsNeon = table_of("neon");

}  // namespace bitwitness
