// The bound on what a sample may have missed, against the exact hypergeometric probability.
#include "verifier/coverage.h"

#include <gtest/gtest.h>

namespace bitwitness {
namespace {

// Whether C(N-B, n) > C(N, n) / 100, in integers: nothing overflows for populations of up to 60.
bool missed_above_one_percent(unsigned N, unsigned n, unsigned B) {
  if (B > N - n) return false;
  const auto choose = [](unsigned of, unsigned k) {
    std::uint64_t out = 1;
    for (unsigned i = 1; i <= k; ++i) out = out * (of - k + i) / i;
    return out;
  };
  return choose(N - B, n) * 100 > choose(N, n);
}

TEST(Coverage, IsTheExactHypergeometricBound) {
  for (unsigned N = 1; N <= 60; ++N) {
    for (unsigned n = 1; n <= N; ++n) {
      unsigned expected = 0;
      while (missed_above_one_percent(N, n, expected + 1)) ++expected;
      ASSERT_EQ(bad_at_most(N, n), expected) << n << " of " << N;
    }
  }
}

TEST(Coverage, Ends) {
  EXPECT_EQ(bad_at_most(1000, 1000), 0U);
  EXPECT_EQ(bad_at_most(1, 1), 0U);
  EXPECT_EQ(bad_at_most(1000, 0), 1000U);
  EXPECT_EQ(bad_at_most(0, 0), 0U);
  EXPECT_EQ(bad_at_most(100, 99), 0U) << "one bad cell would be missed with exactly 1 %";
  EXPECT_EQ(bad_at_most(100, 98), 1U);
}

TEST(Coverage, LargePopulations) {
  // 32 layers of 512 positions; the limit of a large population is 1 - 0.01^(1/n).
  EXPECT_NEAR(static_cast<double>(bad_at_most(16384, 32)) / 16384, 0.134, 0.001);
  EXPECT_NEAR(static_cast<double>(bad_at_most(1ULL << 28, 512)) / (1ULL << 28), 0.00895, 1e-4);
}

}  // namespace
}  // namespace bitwitness
