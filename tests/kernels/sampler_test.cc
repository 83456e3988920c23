// The sampler (ARITHMETIC.md section 8): ties, limits, the distribution, the published draws, and
// equality with the definition by brute force in tests/oracle.
#include "kernels/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/oracle/oracle_ops.h"

namespace bitwitness {
namespace {

using contract::SamplingParams;

constexpr std::uint64_t kAllOnes = ~std::uint64_t{0};

std::int32_t draw_token(const std::vector<float>& logits, const SamplingParams& params,
                        std::uint64_t draw) {
  return sample_token(logits.data(), static_cast<std::int64_t>(logits.size()), params, draw);
}

std::vector<float> random_logits(std::size_t vocab, std::uint64_t seed, float spread) {
  std::mt19937_64 engine(seed);
  std::vector<float> out(vocab);
  for (float& x : out) x = spread * (static_cast<float>(engine() >> 40) * 0x1p-23f - 1.0f);
  return out;
}

TEST(Greedy, TheGreatestAndTheLowestIdAmongEquals) {
  for (const std::uint64_t draw : {std::uint64_t{0}, kAllOnes}) {
    EXPECT_EQ(draw_token({1.0f}, {}, draw), 0);
    EXPECT_EQ(draw_token({1.0f, 3.0f, 2.0f}, {}, draw), 1);
    EXPECT_EQ(draw_token({1.0f, 3.0f, 3.0f, 3.0f}, {}, draw), 1);
    EXPECT_EQ(draw_token({-5.0f, -4.0f, -4.0f}, {}, draw), 1);
    EXPECT_EQ(draw_token({-0.0f, 0.0f}, {}, draw), 0);
    EXPECT_EQ(draw_token({0.0f, -0.0f}, {}, draw), 0);
    EXPECT_EQ(draw_token({-0x1p-149f, -0.0f, 0.0f, -0.0f}, {}, draw), 1);
    EXPECT_EQ(draw_token({-0.0f, 0x1p-149f}, {}, draw), 1);
    const float highest = std::numeric_limits<float>::max();
    EXPECT_EQ(draw_token({-highest, highest, highest}, {}, draw), 1);
  }
  // -0 as a temperature is 0; top_k and top_p do not matter.
  EXPECT_EQ(draw_token({1.0f, 2.0f}, {-0.0f, 2, 0.5f}, kAllOnes), 1);
}

TEST(Sampler, TopKOneAndTinyTopPAreGreedy) {
  std::mt19937_64 engine(41);
  for (int i = 0; i < 200; ++i) {
    std::vector<float> logits = random_logits(97, 4100 + static_cast<std::uint64_t>(i), 8.0f);
    if (i % 2 == 0) {  // a tie at the top
      const std::size_t best =
          static_cast<std::size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
      logits[(best + 31) % logits.size()] = logits[best];
    }
    const std::int32_t greedy = draw_token(logits, {}, 0);
    for (const std::uint64_t draw :
         {std::uint64_t{0}, static_cast<std::uint64_t>(engine()), kAllOnes}) {
      for (const float temperature : {1e-4f, 0.7f, 1.0f, 50.0f}) {
        EXPECT_EQ(draw_token(logits, {temperature, 1, 1.0f}, draw), greedy);
        EXPECT_EQ(draw_token(logits, {temperature, 0, 1e-9f}, draw), greedy);
        EXPECT_EQ(draw_token(logits, {temperature, 0, 0x1p-149f}, draw), greedy);
        EXPECT_EQ(draw_token(logits, {temperature, 13, 1e-9f}, draw), greedy);
      }
    }
  }
}

// Equal logits: the draw's leading bits are the id, to the last bit.
TEST(Sampler, EqualLogitsDivideTheDrawExactly) {
  const std::vector<float> logits(4, 2.5f);
  const std::uint64_t quarter = std::uint64_t{1} << 62;
  for (const float temperature : {0x1p-149f, 1.0f, std::numeric_limits<float>::max()}) {
    for (std::uint64_t id = 0; id < 4; ++id) {
      EXPECT_EQ(draw_token(logits, {temperature, 0, 1.0f}, id * quarter),
                static_cast<std::int32_t>(id));
      EXPECT_EQ(draw_token(logits, {temperature, 0, 1.0f}, id * quarter + quarter - 1),
                static_cast<std::int32_t>(id));
    }
  }
  // top_k keeps the lowest ids among equals; top_p one half keeps two of four (B = 2/4 is not below
  // 1/2).
  EXPECT_EQ(draw_token(logits, {1.0f, 2, 1.0f}, kAllOnes), 1);
  EXPECT_EQ(draw_token(logits, {1.0f, 3, 1.0f}, kAllOnes), 2);
  EXPECT_EQ(draw_token(logits, {1.0f, 0, 0.5f}, kAllOnes), 1);
  EXPECT_EQ(draw_token(logits, {1.0f, 0, 0x1.000002p-1f}, kAllOnes), 2);
  EXPECT_EQ(draw_token(logits, {1.0f, 4, 0.25f}, kAllOnes), 0);
}

TEST(Sampler, TemperatureExtremes) {
  const std::vector<float> logits = {1.0f, 1.0f + 0x1p-23f, -3e38f, 3e38f};
  for (const std::uint64_t draw : {std::uint64_t{0}, kAllOnes}) {
    EXPECT_EQ(draw_token(logits, {0x1p-149f, 0, 1.0f}, draw), 3);  // everything else weighs nothing
    EXPECT_EQ(draw_token({1.0f, 1.0f + 0x1p-23f}, {0x1p-149f, 0, 1.0f}, draw), 1);
  }
  // A temperature far above the spread: nearly uniform, so the extremes of the draw reach the ends.
  const std::vector<float> close = random_logits(1000, 42, 5.0f);
  const float hot = std::numeric_limits<float>::max();
  EXPECT_EQ(draw_token(close, {hot, 0, 1.0f}, 0), 0);
  EXPECT_EQ(draw_token(close, {hot, 0, 1.0f}, kAllOnes), 999);
  EXPECT_EQ(draw_token(close, {hot, 0, 1.0f}, std::uint64_t{1} << 63), 500);
}

// Pearson's statistic of 20,000 draws of the published generator against exp(logit / T) of the C
// library. The seeds are fixed, so the test is too; the limits are the 1 - 10^-6 quantiles.
double chi_square(const std::vector<float>& logits, const SamplingParams& params,
                  const std::vector<double>& probability, std::uint8_t seed_byte) {
  constexpr int kDraws = 20'000;
  std::vector<int> seen(logits.size());
  const std::vector<std::uint8_t> seed(32, seed_byte);
  for (int i = 0; i < kDraws; ++i) {
    const std::int32_t id =
        draw_token(logits, params, sample_draw(seed, static_cast<std::uint64_t>(i)));
    ++seen[static_cast<std::size_t>(id)];
  }
  double statistic = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (probability[i] == 0) {
      EXPECT_EQ(seen[i], 0) << "token " << i << " must never be drawn";
      continue;
    }
    const double expected = probability[i] * kDraws;
    statistic += (seen[i] - expected) * (seen[i] - expected) / expected;
  }
  return statistic;
}

TEST(Sampler, Distribution) {
  const std::vector<float> logits = {0.5f, -1.0f, 2.0f,  1.5f,
                                     0.0f, 1.5f,  -0.5f, 1.0f};  // ranks 2 3 5 7 0 4 6 1
  const auto softmax = [&](double temperature, const std::vector<std::size_t>& kept) {
    std::vector<double> p(logits.size(), 0.0);
    double sum = 0;
    for (const std::size_t i : kept)
      sum += p[i] = std::exp(static_cast<double>(logits[i]) / temperature);
    for (double& x : p) x /= sum;
    return p;
  };
  const std::vector<std::size_t> all = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_LT(chi_square(logits, {1.0f, 0, 1.0f}, softmax(1.0, all), 1),
            40.5);  // 7 degrees of freedom
  EXPECT_LT(chi_square(logits, {0.7f, 0, 1.0f}, softmax(0.7, all), 2), 40.5);
  EXPECT_LT(chi_square(logits, {3.0f, 0, 1.0f}, softmax(3.0, all), 3), 40.5);
  EXPECT_LT(chi_square(logits, {1.0f, 3, 1.0f}, softmax(1.0, {2, 3, 5}), 4), 27.7);  // 2
  // Cumulative probabilities at T = 1: .339, .545, .750, .875, ...: 0.8 keeps the token that
  // crosses it.
  EXPECT_LT(chi_square(logits, {1.0f, 0, 0.8f}, softmax(1.0, {2, 3, 5, 7}), 5), 30.7);  // 3
  // Of the first three: .452, .726, 1: 0.5 keeps two.
  EXPECT_LT(chi_square(logits, {1.0f, 3, 0.5f}, softmax(1.0, {2, 3}), 6), 24.0);  // 1
  // And the statistic can fail: the draws of T = 1 are not those of T = 0.9.
  EXPECT_GT(chi_square(logits, {1.0f, 0, 1.0f}, softmax(0.9, all), 1), 40.5);
}

// The weights to their last bit: the least draw that gives the second of two tokens is ceil(2^102 /
// W) with W = 2^38 + w, w the weight of the second.
TEST(Sampler, WeightsToTheLastBit) {
  __extension__ typedef unsigned __int128 Wide;
  std::mt19937_64 engine(45);
  for (int i = 0; i < 2'000; ++i) {
    const float greatest = random_logits(1, engine(), 10.0f)[0];
    const float other = greatest - std::fabs(random_logits(1, engine(), 18.0f)[0]);
    const float temperature = 0.25f + std::fabs(random_logits(1, engine(), 2.0f)[0]);
    if (other == greatest) continue;
    namespace o = oracle;
    const o::Bits argument = o::div(o::sub(contract::bits_of(other), contract::bits_of(greatest)),
                                    contract::bits_of(temperature));
    const std::uint64_t weight = o::floor_scaled(o::exp(argument), 38);
    ASSERT_EQ(contract::sampler_weight(other, greatest, temperature), weight);
    if (weight == 0) continue;
    const Wide total = (Wide{1} << 38) + weight;
    const std::uint64_t boundary =
        static_cast<std::uint64_t>(((Wide{1} << 102) + total - 1) / total);
    EXPECT_EQ(draw_token({greatest, other}, {temperature, 0, 1.0f}, boundary - 1), 0);
    EXPECT_EQ(draw_token({greatest, other}, {temperature, 0, 1.0f}, boundary), 1);
  }
}

// The whole of section 8 by brute force, on the shapes that models produce.
TEST(Sampler, EqualsTheDefinition) {
  std::mt19937_64 engine(43);
  const float temperatures[] = {1e-4f, 0.3f, 0.7f, 1.0f, 1.3f, 2.0f, 30.0f};
  const std::uint32_t top_ks[] = {0, 1, 2, 5, 20, 50, 4095, 4096, 100'000};
  const float top_ps[] = {1.0f, 0.999f, 0.95f, 0.9f, 0.5f, 0.1f, 0x1.fffffep-1f, 1e-10f};
  for (int i = 0; i < 600; ++i) {
    const std::size_t vocab = i % 3 == 0 ? 4096 : 1 + engine() % 300;
    std::vector<float> logits = random_logits(vocab, engine(), i % 2 == 0 ? 6.0f : 20.0f);
    if (i % 4 == 1) {  // a coarse grid: many ties, at the cuts of top_k and top_p too
      for (float& x : logits) x = std::nearbyint(x);
    }
    const SamplingParams params{temperatures[engine() % 7], top_ks[engine() % 9],
                                top_ps[engine() % 8]};
    const std::uint64_t draw = engine();
    oracle::Row row(vocab);
    std::transform(logits.begin(), logits.end(), row.begin(), contract::bits_of);
    const std::uint32_t want = oracle::sample(row, contract::bits_of(params.temperature),
                                              params.top_k, contract::bits_of(params.top_p), draw);
    ASSERT_EQ(static_cast<std::uint32_t>(draw_token(logits, params, draw)), want)
        << "case " << i << ": vocab " << vocab << ", temperature " << params.temperature
        << ", top_k " << params.top_k << ", top_p " << params.top_p << ", draw " << draw;
  }
}

// A vocabulary of the size of Llama 3's and Qwen3's, and the largest allowed for the sums.
TEST(Sampler, LargeVocabularies) {
  std::vector<float> logits = random_logits(151'936, 44, 10.0f);
  const std::int32_t greedy = draw_token(logits, {}, 0);
  EXPECT_EQ(draw_token(logits, {0.6f, 1, 0.95f}, kAllOnes), greedy);
  const std::vector<float> equal(std::size_t{1} << 24, -1.0f);
  EXPECT_EQ(draw_token(equal, {1.0f, 0, 1.0f}, kAllOnes), (1 << 24) - 1);
}

// Vectors made with another SHA-256 implementation.
TEST(SampleDraw, PublishedVectors) {
  std::vector<std::uint8_t> counting(32);
  std::iota(counting.begin(), counting.end(), std::uint8_t{0});
  const std::string name = "bitwitness";
  const std::vector<std::uint8_t> named(name.begin(), name.end());
  EXPECT_EQ(sample_draw({}, 0), 0x0baae97c0c619c8eu);
  EXPECT_EQ(sample_draw(named, 1), 0x2b373227422ce13fu);
  EXPECT_EQ(sample_draw(counting, 0), 0xce2515c3f744eb05u);
  EXPECT_EQ(sample_draw(counting, 0x100000007u), 0x232fbcc008eb724au);
  EXPECT_EQ(sample_draw(std::vector<std::uint8_t>(300), kAllOnes), 0xb472f99c2a01fe25u);
}

}  // namespace
}  // namespace bitwitness
