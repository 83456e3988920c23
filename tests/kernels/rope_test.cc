// The RoPE tables (ARITHMETIC.md section 5) against big-number arithmetic in integers: every
// inverse frequency is the correctly rounded one, cosines and sines are within one unit of the last
// place and almost always correctly rounded.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/contract.h"
#include "kernels/rope_tables.h"
#include "tests/oracle/oracle_float.h"
#include "tests/oracle/oracle_real.h"

namespace bitwitness {
namespace {

using contract::bits_of;
using contract::float_of;
using oracle::Bits;
using oracle::Real;

ModelConfig plain(std::uint32_t theta, std::int64_t head_dim) {
  ModelConfig config;
  config.head_dim = head_dim;
  config.rope_theta = theta;
  config.max_positions = 4096;
  return config;
}

ModelConfig llama3(std::uint32_t theta, std::int64_t head_dim,
                   const oracle::Llama3Scaling& scaling) {
  ModelConfig config = plain(theta, head_dim);
  config.rope_kind = ModelConfig::RopeKind::kLlama3;
  config.rope_factor = scaling.factor;
  config.rope_low_freq_factor = scaling.low;
  config.rope_high_freq_factor = scaling.high;
  config.rope_original_max_positions = scaling.context;
  return config;
}

void expect_correctly_rounded(const ModelConfig& config, const oracle::Llama3Scaling* scaling) {
  const std::vector<float> got = rope_inverse_frequencies(config);
  ASSERT_EQ(got.size(), static_cast<std::size_t>(config.head_dim / 2));
  for (std::size_t i = 0; i < got.size(); ++i) {
    Real exact = oracle::rope_frequency(static_cast<std::uint32_t>(config.rope_theta),
                                        static_cast<std::uint32_t>(config.head_dim),
                                        static_cast<std::uint32_t>(i));
    if (scaling != nullptr) exact = oracle::rope_llama3(exact, *scaling);
    bool decided = true;
    const Bits want = exact.round(&decided);
    ASSERT_TRUE(decided) << i;
    ASSERT_EQ(bits_of(got[i]), want)
        << "theta " << config.rope_theta << ", head_dim " << config.head_dim << ", i " << i;
  }
}

constexpr std::uint32_t kThetas[] = {10'000,    100'000,   150'000,    500'000,      1'000'000,
                                     5'000'000, 8'000'000, 10'000'000, 1'000'000'000};

TEST(RopeFrequencies, CorrectlyRounded) {
  for (const std::uint32_t theta : kThetas) {
    for (const std::int64_t head_dim : {2, 16, 32, 40, 48, 64, 80, 96, 112, 128, 192, 256}) {
      ASSERT_NO_FATAL_FAILURE(expect_correctly_rounded(plain(theta, head_dim), nullptr));
    }
  }
}

// Powers of two, whose frequencies are binary32 values exactly, and neighbours.
TEST(RopeFrequencies, ExactPowers) {
  for (const std::uint32_t theta : {2u, 4u, 65'536u, 65'537u, 1u << 30}) {
    for (const std::int64_t head_dim : {16, 32, 64, 120}) {
      ASSERT_NO_FATAL_FAILURE(expect_correctly_rounded(plain(theta, head_dim), nullptr));
    }
  }
  const std::vector<float> got = rope_inverse_frequencies(plain(65'536, 32));
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(bits_of(got[i]), (127u - static_cast<std::uint32_t>(i)) << 23);
  }
}

TEST(RopeFrequencies, Llama3Scaling) {
  const oracle::Llama3Scaling scalings[] = {{8, 1, 4, 8192}, {32, 1, 4, 8192}, {16, 1, 4, 8192},
                                            {8, 1, 8, 4096}, {4, 2, 3, 32},    {2, 1, 4, 1}};
  for (const auto& scaling : scalings) {
    for (const std::uint32_t theta : {10'000u, 500'000u, 1'000'000u}) {
      for (const std::int64_t head_dim : {16, 64, 80, 128}) {
        ASSERT_NO_FATAL_FAILURE(
            expect_correctly_rounded(llama3(theta, head_dim, scaling), &scaling));
      }
    }
  }
}

// The rule has three branches; a configuration that takes all of them.
TEST(RopeFrequencies, Llama3TakesAllBranches) {
  const oracle::Llama3Scaling scaling{8, 1, 4, 8192};
  const std::vector<float> base = rope_inverse_frequencies(plain(500'000, 128));
  const std::vector<float> scaled = rope_inverse_frequencies(llama3(500'000, 128, scaling));
  int kept = 0, divided = 0, between = 0;
  for (std::size_t i = 0; i < base.size(); ++i) {
    if (scaled[i] == base[i]) {
      ++kept;
    } else if (scaled[i] == base[i] / 8.0f) {
      ++divided;
    } else {
      ++between;
      EXPECT_GT(scaled[i], base[i] / 8.0f);
      EXPECT_LT(scaled[i], base[i]);
    }
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(divided, 0);
  EXPECT_GT(between, 0);
}

// ---- Cosines and sines ----

struct Count {
  std::uint64_t values = 0, off_by_one = 0;
};

// Distance in units of the last place of two binary32 of equal sign; zeros of both signs are one.
std::int64_t distance(Bits a, Bits b) {
  const auto order = [](Bits x) {
    const std::int64_t magnitude = x & 0x7fffffffu;
    return (x >> 31) != 0 ? -magnitude : magnitude;
  };
  const std::int64_t d = order(a) - order(b);
  return d < 0 ? -d : d;
}

void check_angle(Bits angle, Count& count) {
  Real cosine, sine;
  oracle::cos_sin(Real::from_bits(angle), &cosine, &sine);
  const CosSin got = rope_cos_sin(float_of(angle));
  const struct {
    const char* name;
    const Real& exact;
    Bits got;
  } parts[] = {{"cosine", cosine, bits_of(got.cosine)}, {"sine", sine, bits_of(got.sine)}};
  for (const auto& part : parts) {
    bool decided = true;
    const Bits want = part.exact.round(&decided);
    ASSERT_TRUE(decided) << part.name << " of bits " << std::hex << angle;
    const std::int64_t ulps = distance(part.got, want);
    ASSERT_LE(ulps, 1) << part.name << " of bits " << std::hex << angle << ": got " << part.got
                       << ", want " << want;
    ++count.values;
    count.off_by_one += static_cast<std::uint64_t>(ulps);
  }
}

// The angles that models meet: positions up to 2^17 times the frequencies of common configurations.
TEST(RopeCosSin, AnglesOfModels) {
  std::mt19937_64 engine(31);
  Count count;
  for (const std::uint32_t theta : kThetas) {
    for (const std::int64_t head_dim : {64, 128}) {
      for (const float frequency : rope_inverse_frequencies(plain(theta, head_dim))) {
        for (int i = 0; i < 120; ++i) {
          const std::uint64_t position =
              i == 0 ? 131'072 : engine() % (std::uint64_t{1} << (i % 2 == 0 ? 17 : 12));
          const Bits angle =
              oracle::mul(oracle::round_to_f32(false, position, 0), bits_of(frequency));
          ASSERT_NO_FATAL_FAILURE(check_angle(angle, count));
        }
      }
    }
  }
  RecordProperty("values", std::to_string(count.values));
  RecordProperty("off_by_one", std::to_string(count.off_by_one));
  EXPECT_EQ(count.off_by_one, 0u) << "of " << count.values;
}

// Whole positions (frequency 1), every exponent, and the binary32 nearest to multiples of pi/2:
// there the reduction cancels most.
TEST(RopeCosSin, HardAngles) {
  std::mt19937_64 engine(32);
  Count count;
  for (Bits exponent = 0; exponent <= 127 + 24; ++exponent) {
    if (exponent < 60 && exponent % 8 != 0) continue;
    for (int i = 0; i < 40; ++i) {
      const Bits angle = exponent << 23 | (i == 0 ? 0u : static_cast<Bits>(engine() & 0x7fffffu));
      if (exponent == 0 || oracle::Real::from_bits(angle).is_zero()) continue;
      ASSERT_NO_FATAL_FAILURE(check_angle(angle, count));
    }
  }
  for (std::uint32_t n = 1; n < (1u << 24); n += n < 512 ? 1 : n / 256) {
    bool decided = true;
    const Bits nearest = Real::pi().halved(1).times(n).round(&decided);
    for (Bits angle = nearest - 1; angle <= nearest + 1; ++angle) {
      ASSERT_NO_FATAL_FAILURE(check_angle(angle, count));
    }
  }
  for (int i = 0; i < 20'000; ++i) {
    ASSERT_NO_FATAL_FAILURE(
        check_angle(oracle::round_to_f32(false, engine() % (1u << 25), 0), count));
  }
  EXPECT_LE(count.off_by_one * 100'000, count.values) << count.off_by_one << " of " << count.values;
  EXPECT_EQ(bits_of(rope_cos_sin(0.0f).cosine), 0x3f800000u);
  EXPECT_EQ(bits_of(rope_cos_sin(0.0f).sine), 0x00000000u);
  // pi in binary32: sin = 0x1.777a5cp-24 with the sign of its excess.
  EXPECT_EQ(bits_of(rope_cos_sin(float_of(0x40490fdbu)).sine), 0xb3bbbd2eu);
}

// ---- Tables ----

TEST(RopeTables, LayoutAndAngles) {
  const std::vector<float> frequencies = rope_inverse_frequencies(plain(10'000, 16));
  const RopeTables tables = rope_tables(frequencies, 300);
  ASSERT_EQ(tables.cosines.size(), 300u * 8u);
  ASSERT_EQ(tables.sines.size(), 300u * 8u);
  for (std::uint32_t t = 0; t < 300; ++t) {
    for (std::uint32_t i = 0; i < 8; ++i) {
      const Bits angle = oracle::mul(oracle::round_to_f32(false, t, 0), bits_of(frequencies[i]));
      const CosSin value = rope_cos_sin(float_of(angle));
      ASSERT_EQ(bits_of(tables.cosines[t * 8 + i]), bits_of(value.cosine)) << t << ' ' << i;
      ASSERT_EQ(bits_of(tables.sines[t * 8 + i]), bits_of(value.sine)) << t << ' ' << i;
    }
  }
}

TEST(RopeTables, BytesThatTheManifestBinds) {
  for (const std::int64_t max_positions : {5, 4096}) {
    ModelConfig config = plain(10'000, 16);
    config.max_positions = max_positions;
    const std::size_t positions = max_positions == 5 ? 5 : 1024;
    const auto bytes = rope_table_bytes(config);
    ASSERT_EQ(bytes.size(), 2u);
    EXPECT_EQ(bytes[0].first, "rope.cosines_sines");
    EXPECT_EQ(bytes[1].first, "rope.inverse_frequencies");
    const std::vector<float> frequencies = rope_inverse_frequencies(config);
    const RopeTables tables = rope_tables(frequencies, static_cast<std::int64_t>(positions));
    ASSERT_EQ(bytes[0].second.size(), 2 * positions * 8 * 4);
    ASSERT_EQ(bytes[1].second.size(), 8u * 4);
    EXPECT_EQ(std::memcmp(bytes[0].second.data(), tables.cosines.data(), positions * 8 * 4), 0);
    EXPECT_EQ(std::memcmp(bytes[0].second.data() + positions * 8 * 4, tables.sines.data(),
                          positions * 8 * 4),
              0);
    EXPECT_EQ(std::memcmp(bytes[1].second.data(), frequencies.data(), 8 * 4), 0);
  }
}

// ---- The big numbers themselves ----

TEST(OracleReal, KnownConstants) {
  bool decided = true;
  EXPECT_EQ(Real::pi().round(&decided), 0x40490fdbu);
  EXPECT_EQ(Real::ln2().round(&decided), 0x3f317218u);
  EXPECT_EQ(oracle::ln(10).round(&decided), 0x40135d8eu);
  EXPECT_EQ(oracle::exp_minus(Real(1)).round(&decided), 0x3ebc5ab2u);
  EXPECT_TRUE(decided);
  // The first 160 bits after the point of pi, known from elsewhere: 3.243F6A88 85A308D3 13198A2E
  // 03707344 A4093822.
  Real pi = Real::pi();
  EXPECT_EQ(pi.integer_part(), 3u);
  for (const std::uint32_t word :
       {0x243F6A88u, 0x85A308D3u, 0x13198A2Eu, 0x03707344u, 0xA4093822u}) {
    pi = (pi - Real(pi.integer_part())).times(1u << 31).times(2);
    EXPECT_EQ(pi.integer_part(), word);
  }
}

TEST(OracleReal, Identities) {
  const auto near = [](const Real& a, const Real& b) {
    Real difference = a - b;
    if (difference.negative()) difference = -difference;
    return difference < Real(1).halved(230);
  };
  EXPECT_TRUE(near(Real(22) / Real(7), Real(22).over(7)));
  EXPECT_TRUE(near(Real::pi() / Real::ln2() * Real::ln2(), Real::pi()));
  for (const std::uint32_t x : {3u, 10'000u, 8'000'000u}) {
    EXPECT_TRUE(near(oracle::exp_minus(oracle::ln(x)).times(x), Real(1))) << x;
    EXPECT_TRUE(near(oracle::ln(x) + oracle::ln(5), oracle::ln(5 * x))) << x;
  }
  for (const std::uint32_t n : {0u, 1u, 2u, 3u, 100'000u, 33'554'431u}) {
    Real cosine, sine;
    oracle::cos_sin(Real(n) + Real(1).over(3), &cosine, &sine);
    EXPECT_TRUE(near(cosine * cosine + sine * sine, Real(1))) << n;
  }
  // 1 + 2^-24 and what lies within 2^-100 of it is a midpoint: undecided.
  bool decided = true;
  (Real(1) + Real(1).halved(24)).round(&decided);
  EXPECT_FALSE(decided);
  decided = true;
  EXPECT_EQ((Real(1) + Real(1).halved(24) + Real(1).halved(60)).round(&decided), 0x3f800001u);
  EXPECT_TRUE(decided);
}

}  // namespace
}  // namespace bitwitness
