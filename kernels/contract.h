// The arithmetic contract `fma32`, version 1: the single source of every rounding of a run.
//
// Compiled by g++, clang and nvcc alike. It defines the conversions, the multiply-add order of a
// dot product, the reduction trees, the elementary functions as explicit sequences of IEEE
// operations, and one function per output element or row. The reference backend loops over these
// functions; tuned kernels keep the order and are tested for equal bytes. ARITHMETIC.md is the
// normative text, section numbers below are its. A change of any bit here is a new arithmetic
// version.
//
// Every function is pure, rounds to nearest even, keeps subnormals, and needs -ffp-contract=off
// (bw_flags). Non-finite inputs give non-finite outputs or are refused before (section 9); NaN
// payloads are not defined.
#pragma once

#include <cstdint>
#include <cstring>

#include "attest/base/dtype.h"
#include "attest/base/host_device.h"

#if !defined(__CUDA_ARCH__)
#include <cmath>
#endif

namespace bitwitness {
namespace contract {

inline constexpr char kArithmeticName[] = "fma32";
inline constexpr int kArithmeticVersion = 1;

// ---- 1. Scalars ----

BW_HD inline std::uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  std::uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
#endif
}

BW_HD inline float float_of(std::uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
#endif
}

// The five operations, each one IEEE-754 binary32 operation with one rounding.
#if defined(__CUDA_ARCH__)
BW_HD inline float add32(float a, float b) {
  return __fadd_rn(a, b);
}
BW_HD inline float sub32(float a, float b) {
  return __fsub_rn(a, b);
}
BW_HD inline float mul32(float a, float b) {
  return __fmul_rn(a, b);
}
BW_HD inline float div32(float a, float b) {
  return __fdiv_rn(a, b);
}
BW_HD inline float sqrt32(float a) {
  return __fsqrt_rn(a);
}
BW_HD inline float fma32(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
#else
BW_HD inline float add32(float a, float b) {
  return a + b;
}
BW_HD inline float sub32(float a, float b) {
  return a - b;
}
BW_HD inline float mul32(float a, float b) {
  return a * b;
}
BW_HD inline float div32(float a, float b) {
  return a / b;
}
BW_HD inline float sqrt32(float a) {
  return std::sqrt(a);
}
BW_HD inline float fma32(float a, float b, float c) {
  return std::fma(a, b, c);
}
#endif

BW_HD inline bool is_finite(float x) {
  return (bits_of(x) & 0x7f800000u) != 0x7f800000u;
}

// ---- 2. Conversions (exact upcasts; downcasts round to nearest even) ----

BW_HD inline float bf16_to_f32(std::uint16_t h) {
  return float_of(static_cast<std::uint32_t>(h) << 16);
}

BW_HD inline float fp16_to_f32(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1fu;
  const std::uint32_t fraction = h & 0x3ffu;
  if (exponent == 0x1fu) return float_of(sign | 0x7f800000u | (fraction << 13));
  if (exponent != 0) return float_of(sign | ((exponent + 112u) << 23) | (fraction << 13));
  // Zero or subnormal: fraction * 2^-24 is exact in binary32.
  const float magnitude = mul32(static_cast<float>(fraction), float_of(0x33800000u));
  return float_of(sign | bits_of(magnitude));
}

BW_HD inline std::uint16_t f32_to_bf16(float x) {
  const std::uint32_t u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
  return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

BW_HD inline std::uint16_t f32_to_fp16(float x) {
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  const std::uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // >= 65520
  if (magnitude < 0x38800000u) {
    // Result is subnormal or zero: adding 0.5 aligns the unit in the last place to 2^-24 and rounds
    // once.
    const std::uint32_t aligned = bits_of(add32(float_of(magnitude), 0.5f)) - 0x3f000000u;
    return static_cast<std::uint16_t>(sign | aligned);
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}

// Element `i` of a weight array of the given type, upcast exactly. `data` needs no alignment on the
// host.
template <Dtype kDtype>
BW_HD inline float load_weight(const void* data, std::int64_t i) {
#if defined(__CUDA_ARCH__)
  if constexpr (kDtype == Dtype::kFp32) return static_cast<const float*>(data)[i];
  const std::uint16_t h = static_cast<const std::uint16_t*>(data)[i];
#else
  const char* p =
      static_cast<const char*>(data) + i * static_cast<std::int64_t>(dtype_bytes(kDtype));
  if constexpr (kDtype == Dtype::kFp32) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  std::uint16_t h;
  std::memcpy(&h, p, sizeof h);
#endif
  if constexpr (kDtype == Dtype::kBf16) return bf16_to_f32(h);
  return fp16_to_f32(h);
}

BW_HD inline float load_weight(Dtype dtype, const void* data, std::int64_t i) {
  switch (dtype) {
    case Dtype::kBf16:
      return load_weight<Dtype::kBf16>(data, i);
    case Dtype::kFp16:
      return load_weight<Dtype::kFp16>(data, i);
    case Dtype::kFp32:
      return load_weight<Dtype::kFp32>(data, i);
  }
  return 0.0f;
}

// ---- 3. Dot product ----
//
// K is cut into contiguous segments of kSegment. In a segment, chain c of kChains takes the groups
// of kGroup consecutive k with (k / kGroup) % kChains == c, ascending, by fma from +0. Chain sums
// are added ascending (all kChains, an empty chain being +0), then segment sums ascending. A
// function of K alone.
//
// A tuned kernel may pad a chain with products equal to -0, e.g. (+0) * (-0): fma(+0, -0, a) == a
// for every a. It may not pad with +0: fma(+0, +0, -0) == +0.

inline constexpr int kSegment = 1024;
inline constexpr int kChains = 8;
inline constexpr int kGroup = 8;

// Sum over k in [0, K) of x(k) * w(k). The product's operands are exchangeable. K >= 1.
template <class X, class W>
BW_HD inline float dot(std::int64_t K, const X& x, const W& w) {
  float total = 0.0f;
  for (std::int64_t begin = 0; begin < K; begin += kSegment) {
    const std::int64_t end = begin + kSegment < K ? begin + kSegment : K;
    float segment = 0.0f;
    for (int c = 0; c < kChains; ++c) {
      float chain = 0.0f;
      for (std::int64_t group = begin + c * kGroup; group < end; group += kChains * kGroup) {
        const std::int64_t stop = group + kGroup < end ? group + kGroup : end;
        for (std::int64_t k = group; k < stop; ++k) chain = fma32(x(k), w(k), chain);
      }
      segment = c == 0 ? chain : add32(segment, chain);
    }
    total = begin == 0 ? segment : add32(total, segment);
  }
  return total;
}

// Row n of W[N, K] times x[K]: one output element of a matrix product.
template <Dtype kDtype>
BW_HD inline float matmul_element(std::int64_t K, const float* x, const void* W, std::int64_t n) {
  return dot(
      K, [x](std::int64_t k) { return x[k]; },
      [W, n, K](std::int64_t k) { return load_weight<kDtype>(W, n * K + k); });
}

// ---- 4. Sum of squares and RMS norm ----
//
// kLanes lanes: lane i takes x[i], x[i + kLanes], ... ascending by fma from +0; lanes are then
// folded in halves, lane[i] += lane[i + w] for w = kLanes/2, ..., 1. All terms are >= +0, so absent
// ones may be skipped or added as +0.

inline constexpr int kLanes = 256;

BW_HD inline float sum_squares(const float* x, std::int64_t K) {
  float lane[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    float sum = 0.0f;
    for (std::int64_t k = i; k < K; k += kLanes) sum = fma32(x[k], x[k], sum);
    lane[i] = sum;
  }
  for (int width = kLanes / 2; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) lane[i] = add32(lane[i], lane[i + width]);
  }
  return lane[0];
}

// 1 / sqrt(mean square + eps), from the sum of squares of a row of K (K < 2^24).
BW_HD inline float rms_scale(float sum_of_squares, std::int64_t K, float eps) {
  const float mean = div32(sum_of_squares, static_cast<float>(K));
  return div32(1.0f, sqrt32(add32(mean, eps)));
}

BW_HD inline float rms_norm_element(float x, float scale, float weight) {
  return mul32(weight, mul32(x, scale));
}

// ---- 5. Rotary position embedding ----
//
// Tables are made on the host (rope_tables.h). Element i of the first half pairs with i +
// head_dim/2.

BW_HD inline float rope_first(float first, float second, float cosine, float sine) {
  return fma32(first, cosine, -mul32(second, sine));
}
BW_HD inline float rope_second(float first, float second, float cosine, float sine) {
  return fma32(second, cosine, mul32(first, sine));
}

// ---- 6. Elementary functions ----

// e^x. Measured over all binary32 inputs: see ARITHMETIC.md section 6. exp(-0) = exp(+0) = 1;
// results below half the least subnormal are +0, above the largest finite value +inf.
BW_HD inline float exp32(float x) {
  const float lowest = -105.0f, highest = 89.0f;
  x = x < lowest ? lowest : x;  // NaN passes both selections
  x = x > highest ? highest : x;
  // n = round to nearest even of x * log2(e), by adding 1.5 * 2^23.
  const float magic = 0x1.8p+23f;
  const float shifted = fma32(x, 0x1.715476p+0f, magic);
  const float n = sub32(shifted, magic);
  // r = x - n ln2, ln2 split so that n * high is exact for |n| < 2^9.
  float r = fma32(n, -0x1.62e4p-1f, x);
  r = fma32(n, -0x1.7f7d1cp-20f, r);
  // Taylor coefficients 1/7!, ..., 1/2!, each rounded to binary32; |r| <= 0.3466.
  float p = 0x1.a01a02p-13f;
  p = fma32(p, r, 0x1.6c16c2p-10f);
  p = fma32(p, r, 0x1.111112p-7f);
  p = fma32(p, r, 0x1.555556p-5f);
  p = fma32(p, r, 0x1.555556p-3f);
  p = fma32(p, r, 0.5f);
  p = fma32(p, r, 1.0f);
  p = fma32(p, r, 1.0f);
  // p * 2^n in two exact-scale steps, so that a subnormal result is rounded once.
  const std::int32_t exponent = static_cast<std::int32_t>(bits_of(shifted) - 0x4b400000u);
  const std::int32_t half = exponent >> 1;
  const float scale1 = float_of(static_cast<std::uint32_t>(half + 127) << 23);
  const float scale2 = float_of(static_cast<std::uint32_t>(exponent - half + 127) << 23);
  return mul32(mul32(p, scale1), scale2);
}

// x / (1 + e^-x)
BW_HD inline float silu32(float x) {
  return div32(x, add32(1.0f, exp32(-x)));
}

// One element of the gated feed-forward layer.
BW_HD inline float swiglu_element(float gate, float up) {
  return mul32(silu32(gate), up);
}

// ---- 7. Attention ----
//
// One (query row, head). Key positions 0..last are walked in blocks of kAttentionBlock anchored at
// position 0. A block has a fresh maximum, sum and accumulator; blocks are merged ascending.
// Positions beyond `last` are skipped by selection, never multiplied.

inline constexpr int kAttentionBlock = 64;

// 1 / sqrt(head_dim)
BW_HD inline float attention_scale(int head_dim) {
  return div32(1.0f, sqrt32(static_cast<float>(head_dim)));
}

// q[head_dim] . k[head_dim] * scale
BW_HD inline float attention_score(const float* q, const float* k, int head_dim, float scale) {
  const float sum = dot(
      head_dim, [q](std::int64_t i) { return q[i]; }, [k](std::int64_t i) { return k[i]; });
  return mul32(sum, scale);
}

BW_HD inline float max32(float a, float b) {
  return b > a ? b : a;
}  // only differences to it matter

BW_HD inline float attention_probability(float score, float maximum) {
  return exp32(sub32(score, maximum));
}

// How a block with maximum `block_max` joins the running state with maximum `running_max`.
struct AttentionMerge {
  float maximum;  // the new running maximum
  float running;  // factor of the running sum and accumulators
  float block;    // factor of the block's
};
BW_HD inline AttentionMerge attention_merge(float running_max, float block_max) {
  const float maximum = max32(running_max, block_max);
  return {maximum, exp32(sub32(running_max, maximum)), exp32(sub32(block_max, maximum))};
}
// The same for the sum and for every accumulator.
BW_HD inline float attention_merged(const AttentionMerge& merge, float running, float block) {
  return fma32(running, merge.running, mul32(block, merge.block));
}

inline constexpr int kMaxHeadDim = 1024;

// out[head_dim] = softmax(q . K * scale) V over positions 0..last. key(j) and value(j) point to the
// head_dim elements of position j. `out` may not alias the inputs.
template <class Key, class Value>
BW_HD inline void attention_row(const float* q, const Key& key, const Value& value,
                                std::int64_t last, int head_dim, float* out) {
  const float scale = attention_scale(head_dim);
  float running_max = 0.0f, running_sum = 0.0f;
  for (std::int64_t begin = 0; begin <= last; begin += kAttentionBlock) {
    const int count =
        static_cast<int>(last - begin + 1 < kAttentionBlock ? last - begin + 1 : kAttentionBlock);
    float p[kAttentionBlock];
    float block_max = 0.0f;
    for (int j = 0; j < count; ++j) {
      p[j] = attention_score(q, key(begin + j), head_dim, scale);
      block_max = j == 0 ? p[j] : max32(block_max, p[j]);
    }
    float block_sum = 0.0f;  // ascending, from +0, as the accumulators below
    for (int j = 0; j < count; ++j) {
      p[j] = attention_probability(p[j], block_max);
      block_sum = add32(block_sum, p[j]);
    }
    const AttentionMerge merge = attention_merge(begin == 0 ? block_max : running_max, block_max);
    for (int i = 0; i < head_dim; ++i) {
      float accumulator = 0.0f;
      for (int j = 0; j < count; ++j) accumulator = fma32(p[j], value(begin + j)[i], accumulator);
      out[i] = begin == 0 ? accumulator : attention_merged(merge, out[i], accumulator);
    }
    running_sum = begin == 0 ? block_sum : attention_merged(merge, running_sum, block_sum);
    running_max = merge.maximum;
  }
  for (int i = 0; i < head_dim; ++i) out[i] = div32(out[i], running_sum);
}

// ---- 8. Sampler ----
//
// Fixed-point weights and 64-bit integer sums: the order of summation does not exist. Candidates
// rank by logit descending, then id ascending (-0 and +0 are one logit).

inline constexpr int kSamplerVersion = 1;
inline constexpr int kSamplerFractionBits = 38;  // vocabularies up to 2^24: sums stay below 2^63

struct SamplingParams {
  float temperature = 0.0f;  // 0: greedy
  std::uint32_t top_k = 0;   // 0: all
  float top_p = 1.0f;        // (0, 1]
};

// Total order of logits as unsigned integers.
BW_HD inline std::uint32_t logit_key(float logit) {
  const std::uint32_t u = bits_of(add32(logit, 0.0f));
  return (u & 0x80000000u) ? ~u : (u | 0x80000000u);
}

// floor(exp((logit - maximum) / temperature) * 2^kSamplerFractionBits)
BW_HD inline std::uint64_t sampler_weight(float logit, float maximum, float temperature) {
  const float e = exp32(div32(sub32(logit, maximum), temperature));
  return static_cast<std::uint64_t>(mul32(e, 0x1p+38f));
}

BW_HD inline std::uint64_t multiply_high(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t a0 = a & 0xffffffffu, a1 = a >> 32, b0 = b & 0xffffffffu, b1 = b >> 32;
  const std::uint64_t middle = a1 * b0 + ((a0 * b0) >> 32);
  return a1 * b1 + (middle >> 32) + (((middle & 0xffffffffu) + a0 * b1) >> 32);
}

// top_p as a fixed-point fraction of 2^32, at least 1.
BW_HD inline std::uint64_t top_p_fraction(float top_p) {
  const std::uint64_t fraction = static_cast<std::uint64_t>(mul32(top_p, 0x1p+32f));
  return fraction == 0 ? 1 : fraction;
}

// Whether a candidate is kept by top_p when `before` is the weight of all that rank above it and
// `total` that of all candidates: before / total < top_p, in exact integers.
BW_HD inline bool within_top_p(std::uint64_t before, std::uint64_t total, std::uint64_t fraction) {
  const std::uint64_t left_high = before >> 32, left_low = before << 32;
  const std::uint64_t right_high = multiply_high(fraction, total), right_low = fraction * total;
  return left_high < right_high || (left_high == right_high && left_low < right_low);
}

}  // namespace contract
}  // namespace bitwitness
