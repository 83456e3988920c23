// The pieces of kernels/contract.h alone: conversions (exhaustive), the accuracy of the elementary
// functions, the rule about padding with -0, the top_p comparison, and the known answers, which
// must also *fail* when the environment is broken.
#include "kernels/contract.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "attest/base/error.h"
#include "kernels/known_answers.h"
#include "tests/oracle/oracle_float.h"
#include "tests/oracle/oracle_ops.h"

namespace bitwitness {
namespace {

using contract::bits_of;
using contract::float_of;

bool is_nan16(std::uint16_t h, std::uint16_t infinity) {
  return (h & 0x7fffu) > infinity;
}

// ---- Conversions ----

TEST(Conversions, EveryBf16) {
  for (std::uint32_t u = 0; u < 0x10000u; ++u) {
    const std::uint16_t h = static_cast<std::uint16_t>(u);
    const float x = contract::bf16_to_f32(h);
    if (is_nan16(h, 0x7f80u)) {
      ASSERT_TRUE(std::isnan(x)) << u;
      ASSERT_TRUE(is_nan16(contract::f32_to_bf16(x), 0x7f80u)) << u;
      continue;
    }
    ASSERT_EQ(bits_of(x), oracle::bf16_to_f32(h)) << u;
    ASSERT_EQ(contract::f32_to_bf16(x), h);
  }
}

TEST(Conversions, EveryFp16) {
  for (std::uint32_t u = 0; u < 0x10000u; ++u) {
    const std::uint16_t h = static_cast<std::uint16_t>(u);
    const float x = contract::fp16_to_f32(h);
    if (is_nan16(h, 0x7c00u)) {
      ASSERT_TRUE(std::isnan(x)) << u;
      ASSERT_TRUE(is_nan16(contract::f32_to_fp16(x), 0x7c00u)) << u;
      continue;
    }
    ASSERT_EQ(bits_of(x), oracle::fp16_to_f32(h)) << u;
    ASSERT_EQ(contract::f32_to_fp16(x), h);
  }
}

// Around every 16-bit value and around every midpoint of two of them, both signs.
TEST(Conversions, DowncastsAtEveryBoundary) {
  const auto check = [](std::uint32_t bits) {
    const float x = float_of(bits);
    if (std::isnan(x)) return true;
    return contract::f32_to_bf16(x) == oracle::f32_to_bf16(bits) &&
           contract::f32_to_fp16(x) == oracle::f32_to_fp16(bits);
  };
  for (std::uint32_t u = 0; u < 0x10000u; ++u) {
    for (const std::uint32_t middle : {0u, 0x8000u}) {
      for (std::uint32_t offset = 0; offset < 5; ++offset) {
        const std::uint32_t bits = (u << 16 | middle) + offset - 2;
        ASSERT_TRUE(check(bits)) << std::hex << bits;
      }
    }
    const std::uint16_t h = static_cast<std::uint16_t>(u);
    if ((h & 0x7fffu) >= 0x7c00u) continue;
    // The fp16 value and the midpoint to its successor in magnitude: half a unit away, exact in
    // binary32.
    const std::uint32_t value = oracle::fp16_to_f32(h);
    const std::uint32_t next = (h & 0x7fffu) == 0x7bffu
                                   ? (value & 0x80000000u) | 0x47800000u
                                   : oracle::fp16_to_f32(static_cast<std::uint16_t>(h + 1));
    const std::uint32_t midpoint = oracle::mul(oracle::add(value, next), 0x3f000000u);
    for (std::uint32_t offset = 0; offset < 5; ++offset) {
      ASSERT_TRUE(check(value + offset - 2)) << std::hex << value;
      ASSERT_TRUE(check(midpoint + offset - 2)) << std::hex << midpoint;
    }
  }
  std::mt19937 engine(21);
  for (int i = 0; i < 1'000'000; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(engine());
    ASSERT_TRUE(check(bits)) << std::hex << bits;
  }
}

TEST(Conversions, NamedValues) {
  EXPECT_EQ(contract::f32_to_fp16(65504.0f), 0x7bffu);
  EXPECT_EQ(contract::f32_to_fp16(float_of(0x477fefffu)), 0x7bffu);  // just below 65520
  EXPECT_EQ(contract::f32_to_fp16(65520.0f), 0x7c00u);  // the midpoint becomes infinity
  EXPECT_EQ(contract::f32_to_fp16(-65520.0f), 0xfc00u);
  EXPECT_EQ(contract::f32_to_fp16(0x1p-25f), 0x0000u);  // tie to even: zero
  EXPECT_EQ(contract::f32_to_fp16(float_of(0x33000001u)), 0x0001u);
  EXPECT_EQ(contract::f32_to_fp16(-0x1p-25f), 0x8000u);
  EXPECT_EQ(contract::f32_to_bf16(float_of(0x7f7f7fffu)), 0x7f7fu);
  EXPECT_EQ(contract::f32_to_bf16(float_of(0x7f7f8000u)),
            0x7f80u);  // the midpoint becomes infinity
  EXPECT_EQ(contract::f32_to_bf16(float_of(0x3f808000u)), 0x3f80u);  // ties to even
  EXPECT_EQ(contract::f32_to_bf16(float_of(0x3f818000u)), 0x3f82u);
  EXPECT_EQ(contract::f32_to_bf16(float_of(0x00008000u)), 0x0000u);
}

TEST(Conversions, LoadWeightFromUnalignedMemory) {
  std::vector<unsigned char> bytes(1 + 3 * 4);
  const std::uint16_t halves[] = {0x3c00u, 0x0001u, 0xc000u};
  std::memcpy(bytes.data() + 1, halves, sizeof halves);
  EXPECT_EQ(contract::load_weight<Dtype::kFp16>(bytes.data() + 1, 1), 0x1p-24f);
  EXPECT_EQ(contract::load_weight(Dtype::kFp16, bytes.data() + 1, 2), -2.0f);
  EXPECT_EQ(contract::load_weight(Dtype::kBf16, bytes.data() + 1, 0), 0x1p-7f);
  const float full[] = {1.5f, -0.0f, 0x1p-149f};
  std::memcpy(bytes.data() + 1, full, sizeof full);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(bits_of(contract::load_weight(Dtype::kFp32, bytes.data() + 1, i)), bits_of(full[i]));
  }
}

// ---- Rule 4: padding ----

TEST(Padding, MinusZeroProductIsNeutralAndPlusZeroIsNot) {
  std::mt19937 engine(22);
  volatile float plus_zero = 0.0f, minus_zero = -0.0f;
  std::vector<std::uint32_t> values = {0x00000000u, 0x80000000u, 0x00000001u, 0x80000001u,
                                       0x007fffffu, 0x00800000u, 0x7f7fffffu, 0xff7fffffu,
                                       0x7f800000u, 0xff800000u};
  for (int i = 0; i < 100'000; ++i) values.push_back(static_cast<std::uint32_t>(engine()));
  for (const std::uint32_t a : values) {
    if (std::isnan(float_of(a))) continue;
    ASSERT_EQ(bits_of(contract::fma32(plus_zero, minus_zero, float_of(a))), a) << std::hex << a;
    ASSERT_EQ(bits_of(contract::fma32(minus_zero, plus_zero, float_of(a))), a) << std::hex << a;
  }
  EXPECT_EQ(bits_of(contract::fma32(plus_zero, plus_zero, minus_zero)), 0x00000000u);
}

// ---- exp ----

constexpr std::uint32_t kLowest = 0xc2d20000u;   // -105
constexpr std::uint32_t kHighest = 0x42b20000u;  // 89

struct Accuracy {
  double normal = 0;  // largest error in units of the last place of the exact value, normal results
  double subnormal = 0;  // the same in units of 2^-149, subnormal results
  std::uint32_t normal_at = 0, subnormal_at = 0;
  std::uint64_t incorrectly_rounded = 0, count = 0;
};

// The C library's binary64 exp serves as the measure of accuracy only (its error is below 2^-52
// relative, 2^-28 units of binary32); no result of ours depends on it.
void measure(std::uint32_t bits, Accuracy& accuracy) {
  const double exact = std::exp(static_cast<double>(float_of(bits)));
  const float got = contract::exp32(float_of(bits));
  ++accuracy.count;
  const float rounded = static_cast<float>(exact);
  if (bits_of(got) == bits_of(rounded)) {
    if (std::isinf(rounded)) return;
  } else {
    ++accuracy.incorrectly_rounded;
  }
  const bool subnormal = exact < 0x1p-126;
  const double unit = subnormal ? 0x1p-149 : std::ldexp(1.0, std::ilogb(exact) - 23);
  const double error = std::isinf(got) ? std::numeric_limits<double>::infinity()
                                       : std::fabs(static_cast<double>(got) - exact) / unit;
  double& worst = subnormal ? accuracy.subnormal : accuracy.normal;
  if (error > worst) {
    worst = error;
    (subnormal ? accuracy.subnormal_at : accuracy.normal_at) = bits;
  }
}

// The bounds are the errors measured over all binary32 arguments (BITWITNESS_EXHAUSTIVE=1), rounded
// up in the fourth place; ARITHMETIC.md section 6 states them. By default every 61st argument is
// measured.
constexpr double kExpNormalUlp = 0.9387;
constexpr double kExpSubnormalUlp = 0.8492;

TEST(Exp, AccuracyOverAllArguments) {
  const char* const exhaustive = std::getenv("BITWITNESS_EXHAUSTIVE");
  const std::uint32_t step = exhaustive != nullptr && *exhaustive == '1' ? 1 : 61;
  Accuracy accuracy;
  for (std::uint32_t bits = 0; bits <= kHighest; bits += step) measure(bits, accuracy);
  for (std::uint32_t bits = 0x80000000u; bits <= kLowest; bits += step) measure(bits, accuracy);
  std::printf(
      "exp32: %llu arguments; largest error %.6f ulp at %08x (normal results), %.6f ulp at %08x "
      "(subnormal); "
      "%llu not correctly rounded\n",
      static_cast<unsigned long long>(accuracy.count), accuracy.normal, accuracy.normal_at,
      accuracy.subnormal, accuracy.subnormal_at,
      static_cast<unsigned long long>(accuracy.incorrectly_rounded));
  EXPECT_LE(accuracy.normal, kExpNormalUlp) << std::hex << accuracy.normal_at;
  EXPECT_LE(accuracy.subnormal, kExpSubnormalUlp) << std::hex << accuracy.subnormal_at;
}

// Nothing is lost by clamping, and the limits are those that the text states.
TEST(Exp, Limits) {
  using contract::exp32;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(bits_of(exp32(0.0f)), 0x3f800000u);
  EXPECT_EQ(bits_of(exp32(-0.0f)), 0x3f800000u);
  EXPECT_EQ(bits_of(exp32(float_of(0x00000001u))), 0x3f800000u);
  EXPECT_EQ(bits_of(exp32(float_of(0x80000001u))), 0x3f800000u);
  for (const float x :
       {-105.0f, -105.5f, -1e6f, std::numeric_limits<float>::lowest(), -kInfinity}) {
    EXPECT_EQ(bits_of(exp32(x)), 0x00000000u) << x;
  }
  for (const float x : {89.0f, 89.5f, 1e6f, std::numeric_limits<float>::max(), kInfinity}) {
    EXPECT_EQ(exp32(x), kInfinity) << x;
  }
  EXPECT_EQ(exp32(float_of(0x42b17218u)), kInfinity);  // the least argument that overflows
  EXPECT_LT(exp32(float_of(0x42b17217u)), kInfinity);
  EXPECT_EQ(bits_of(exp32(float_of(0xc2cff1b4u))), 0x00000001u);  // e^x just above 2^-150
  EXPECT_EQ(bits_of(exp32(float_of(0xc2cff1b5u))), 0x00000000u);  // just below
  EXPECT_TRUE(std::isnan(exp32(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Silu, LimitsAndAccuracy) {
  using contract::silu32;
  EXPECT_EQ(bits_of(silu32(0.0f)), 0x00000000u);
  EXPECT_EQ(bits_of(silu32(-0.0f)), 0x80000000u);
  EXPECT_EQ(silu32(200.0f), 200.0f);
  EXPECT_EQ(bits_of(silu32(-200.0f)), 0x80000000u);  // -200 / inf
  EXPECT_EQ(silu32(std::numeric_limits<float>::max()), std::numeric_limits<float>::max());
  double worst = 0;
  for (float x = -80.0f; x < 80.0f; x += 0.00037f) {
    const double exact = static_cast<double>(x) / (1.0 + std::exp(-static_cast<double>(x)));
    if (exact == 0) continue;
    const double unit = std::ldexp(1.0, std::ilogb(exact) - 23);
    worst = std::max(worst, std::fabs(static_cast<double>(silu32(x)) - exact) / unit);
  }
  EXPECT_LE(worst, 2.324);  // measured: 2.3235 ulp
}

// ---- Integers of the sampler ----

TEST(SamplerIntegers, WideProductsAndComparison) {
  __extension__ typedef unsigned __int128 Wide;
  std::mt19937_64 engine(23);
  const auto number = [&] { return engine() >> (engine() % 64); };
  for (int i = 0; i < 200'000; ++i) {
    const std::uint64_t a = i == 0 ? ~std::uint64_t{0} : number();
    const std::uint64_t b = i <= 1 ? ~std::uint64_t{0} : number();
    ASSERT_EQ(contract::multiply_high(a, b), static_cast<std::uint64_t>((Wide{a} * b) >> 64));
    const std::uint64_t fraction = number() >> 32 | 1;
    // Exactly at, just below and just above the boundary as well as anywhere.
    const std::uint64_t at = static_cast<std::uint64_t>((Wide{a} * fraction) >> 32);
    for (const std::uint64_t before : {b, at, at + 1, at - 1}) {
      ASSERT_EQ(contract::within_top_p(before, a, fraction),
                (Wide{before} << 32) < Wide{a} * fraction)
          << before << ' ' << a << ' ' << fraction;
    }
  }
}

TEST(SamplerIntegers, LogitKeyOrdersAsTheNumbersDo) {
  std::mt19937 engine(24);
  std::vector<float> values = {0.0f, -0.0f, 0x1p-149f, -0x1p-149f, 1.0f, -1.0f};
  while (values.size() < 600) {
    const float x = float_of(static_cast<std::uint32_t>(engine()));
    if (std::isfinite(x)) values.push_back(x);
  }
  for (const float a : values) {
    for (const float b : values) {
      ASSERT_EQ(contract::logit_key(a) < contract::logit_key(b), a < b) << a << ' ' << b;
      ASSERT_EQ(contract::logit_key(a) == contract::logit_key(b), a == b) << a << ' ' << b;
    }
  }
}

// ---- Known answers ----

// The constants of known_answers.cc, once more, from integers.
TEST(KnownAnswers, AreTheOraclesAnswers) {
  namespace o = oracle;
  EXPECT_EQ(o::add(0x00000001u, 0x00000001u), 0x00000002u);
  EXPECT_EQ(o::mul(0x00800000u, 0x3f000000u), 0x00400000u);
  EXPECT_EQ(o::sub(0x00800000u, 0x00000001u), 0x007fffffu);
  EXPECT_EQ(o::fma(0x00800000u, 0x3f000001u, 0x00000001u), 0x00400002u);
  EXPECT_EQ(o::fma(0x3f800001u, 0x3f800001u, 0xbf800002u), 0x28800000u);
  EXPECT_EQ(o::sub(o::mul(0x3f800001u, 0x3f800001u), 0x3f800002u), 0x00000000u);
  EXPECT_EQ(o::add(0x3f800000u, 0x33800000u), 0x3f800000u);
  EXPECT_EQ(o::add(0x3f800001u, 0x33800000u), 0x3f800002u);
  EXPECT_EQ(o::div(0x3f800000u, 0x40400000u), 0x3eaaaaabu);
  EXPECT_EQ(o::sqrt(0x40000000u), 0x3fb504f3u);
  EXPECT_EQ(o::sqrt(0x00000001u), 0x1a3504f3u);
  EXPECT_EQ(o::exp(0x3f800000u), 0x402df854u);
  EXPECT_EQ(o::exp(0xc2c80000u), 0x0000001bu);
  EXPECT_EQ(o::silu(0x3f800000u), 0x3f3b26a8u);
  EXPECT_EQ(o::fp16_to_f32(0x0001u), 0x33800000u);
}

TEST(KnownAnswers, PassHere) {
  EXPECT_NO_THROW(check_known_answers("test thread"));
}

// Runs the check in a changed environment and restores the old one before anything else computes.
template <class Change, class Restore>
void expect_refused(const char* what, Change change, Restore restore) {
  std::string message;
  bool refused = false;
  change();
  try {
    check_known_answers("worker thread 3");
  } catch (const Error& error) {
    refused = error.kind() == ErrorKind::kInfrastructure;
    message = error.what();
  }
  restore();
  EXPECT_TRUE(refused) << what;
  EXPECT_NE(message.find("worker thread 3"), std::string::npos) << message;
  EXPECT_NO_THROW(check_known_answers("after " + std::string(what)));
}

TEST(KnownAnswers, RefuseOtherRoundingModes) {
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    expect_refused(
        "rounding mode", [mode] { std::fesetround(mode); }, [] { std::fesetround(FE_TONEAREST); });
  }
}

TEST(KnownAnswers, RefuseFlushToZero) {
#if defined(__x86_64__)
  constexpr unsigned kFlushToZero = 0x8000u, kDenormalsAreZero = 0x0040u;
  const unsigned saved = _mm_getcsr();
  for (const unsigned flags : {kFlushToZero, kDenormalsAreZero, kFlushToZero | kDenormalsAreZero}) {
    expect_refused(
        "MXCSR", [=] { _mm_setcsr(saved | flags); }, [=] { _mm_setcsr(saved); });
  }
#elif defined(__aarch64__)
  std::uint64_t saved;
  asm volatile("mrs %0, fpcr" : "=r"(saved));
  expect_refused(
      "FPCR", [=] { asm volatile("msr fpcr, %0" ::"r"(saved | (std::uint64_t{1} << 24))); },
      [=] { asm volatile("msr fpcr, %0" ::"r"(saved)); });
#else
  GTEST_SKIP() << "no way to set flush-to-zero is known here";
#endif
}

}  // namespace
}  // namespace bitwitness
