// contract.h and the reference backend against the oracle in integers: equal bytes, operator by
// operator, at every boundary of the order of a sum and for signed zeros, subnormals, wide
// exponents and cancellation.
#include <gtest/gtest.h>

#include <cstring>
#include <initializer_list>
#include <iomanip>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/contract.h"
#include "kernels/reference/reference_backend.h"
#include "tests/kernels/paged_cache.h"
#include "tests/oracle/oracle_float.h"
#include "tests/oracle/oracle_ops.h"

namespace bitwitness {
namespace {

using oracle::Bits;
using oracle::Row;

std::vector<float> floats(const Row& row) {
  std::vector<float> out(row.size());
  if (!row.empty()) std::memcpy(out.data(), row.data(), row.size() * sizeof(float));
  return out;
}

// Bytes, not values; the first mismatch is named.
testing::AssertionResult same_bits(const float* got, const Row& want) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    const Bits bits = contract::bits_of(got[i]);
    if (bits == want[i] || (oracle::is_nan(bits) && oracle::is_nan(want[i]))) continue;
    std::ostringstream text;
    text << "first mismatch at element " << i << " of " << want.size() << std::hex
         << std::setfill('0') << ": got " << std::setw(8) << bits << ", oracle " << std::setw(8)
         << want[i];
    return testing::AssertionFailure() << text.str();
  }
  return testing::AssertionSuccess();
}
testing::AssertionResult same_bits(float got, Bits want) {
  if (contract::bits_of(got) == want) return testing::AssertionSuccess();
  return same_bits(&got, Row{want});
}

constexpr float kPoison = 0x1.badbadp+100f;  // in outputs before an operator runs

// The kinds of input rows.
enum class Kind { kPrimeCycle, kNormal, kWide, kSubnormal, kSignedZeros, kCancelling };
constexpr Kind kKinds[] = {Kind::kPrimeCycle, Kind::kNormal,      Kind::kWide,
                           Kind::kSubnormal,  Kind::kSignedZeros, Kind::kCancelling};

class Inputs {
 public:
  explicit Inputs(std::uint64_t seed) : engine_(seed) {}

  Row row(std::size_t size, Kind kind) {
    Row out(size);
    for (std::size_t i = 0; i < size; ++i) out[i] = element(i, kind);
    if (kind == Kind::kCancelling) {  // pairs x, -x at distances that meet in different chains
      for (std::size_t i = 1; i < size; i += 2) {
        out[i] = oracle::negate(out[engine_() % 2 == 0 ? i - 1 : i / 2]);
      }
    }
    return out;
  }
  // Near `scale` * 2^[-2, 2): the magnitudes of activations.
  Bits moderate() { return finite(125, 128); }
  Bits finite(std::uint32_t low, std::uint32_t high) {
    const std::uint64_t r = engine_();
    return static_cast<Bits>(r & 0x80000000u) |
           static_cast<Bits>(low + (r >> 40) % (high - low + 1)) << 23 |
           static_cast<Bits>(r & 0x7fffffu);
  }
  std::uint64_t operator()() { return engine_(); }

 private:
  Bits element(std::size_t i, Kind kind) {
    switch (kind) {
      case Kind::kPrimeCycle:  // 251 distinct values, so that no period of the order hides a swap
        return oracle::sub(oracle::div(oracle::from_integer(i % 251 + 1), oracle::from_integer(97)),
                           oracle::kOne);
      case Kind::kNormal:
      case Kind::kCancelling:
        return finite(118, 130);
      case Kind::kWide:
        return finite(70, 180);
      case Kind::kSubnormal:
        return finite(0, engine_() % 4 == 0 ? 126 : 3);
      case Kind::kSignedZeros: {
        const std::uint64_t r = engine_() % 8;
        if (r < 3) return oracle::kPlusZero;
        if (r < 6) return oracle::kMinusZero;
        return r == 6 ? 0x80000001u : moderate();
      }
    }
    return oracle::kPlusZero;
  }

  std::mt19937_64 engine_;
};

float contract_dot(const std::vector<float>& x, const std::vector<float>& w) {
  return contract::dot(
      static_cast<std::int64_t>(x.size()),
      [&](std::int64_t k) { return x[static_cast<std::size_t>(k)]; },
      [&](std::int64_t k) { return w[static_cast<std::size_t>(k)]; });
}

constexpr std::size_t kLengths[] = {
    1,    2,    7,    8,    9,    15,   16,   55,   56,   57,   63,   64,   65,   71,   72,
    73,   127,  128,  129,  130,  255,  256,  257,  511,  512,  513,  1023, 1024, 1025, 1031,
    1032, 1033, 1088, 2047, 2048, 2049, 2050, 3071, 3072, 3073, 4095, 4096, 4097};

TEST(Oracle, Dot) {
  Inputs inputs(11);
  for (const std::size_t K : kLengths) {
    for (const Kind x_kind : kKinds) {
      for (const Kind w_kind : kKinds) {
        const Row x = inputs.row(K, x_kind), w = inputs.row(K, w_kind);
        ASSERT_TRUE(same_bits(contract_dot(floats(x), floats(w)), oracle::dot(x, w)))
            << "K " << K << ", kinds " << static_cast<int>(x_kind) << ' '
            << static_cast<int>(w_kind);
      }
    }
  }
}

// If the order of one of these sums were different, most of these would differ: the inputs can
// tell.
TEST(Oracle, DotInputsTellOrders) {
  Inputs inputs(12);
  int different = 0, all = 0;
  for (const std::size_t K : {65u, 130u, 1025u, 2050u}) {
    for (int i = 0; i < 25; ++i) {
      const Row x = inputs.row(K, Kind::kNormal), w = inputs.row(K, Kind::kNormal);
      Bits ascending = oracle::kPlusZero;
      for (std::size_t k = 0; k < K; ++k) ascending = oracle::fma(x[k], w[k], ascending);
      different += ascending != oracle::dot(x, w);
      ++all;
    }
  }
  EXPECT_GT(different, all / 2);
}

// All-zero products: the sum starts at +0, so -0 products vanish and a whole row of them gives +0.
TEST(Oracle, DotOfSignedZeros) {
  for (const std::size_t K : kLengths) {
    for (const Bits a : {oracle::kPlusZero, oracle::kMinusZero}) {
      const Row x(K, a), w(K, oracle::kOne);
      ASSERT_EQ(oracle::dot(x, w), oracle::kPlusZero);
      ASSERT_TRUE(same_bits(contract_dot(floats(x), floats(w)), oracle::kPlusZero)) << K;
    }
  }
}

TEST(Oracle, MatmulOfTheReferenceBackend) {
  ReferenceBackend backend;
  Inputs inputs(13);
  for (const std::size_t K : {1u, 9u, 64u, 130u, 1025u, 2050u}) {
    constexpr std::size_t M = 3, N = 5;
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
      const Row x = inputs.row(M * K, Kind::kNormal);
      std::vector<std::uint16_t> halves(N * K);
      std::vector<float> full(N * K);
      Row upcast(N * K);
      for (std::size_t i = 0; i < N * K; ++i) {
        // Finite 16-bit patterns, subnormals and signed zeros included.
        std::uint16_t h = static_cast<std::uint16_t>(inputs());
        if (dtype == Dtype::kBf16) h = static_cast<std::uint16_t>((h & 0x80ffu) | 0x3f00u);
        if (dtype == Dtype::kFp16 && (h & 0x7c00u) == 0x7c00u)
          h = static_cast<std::uint16_t>(h & 0x83ffu);
        halves[i] = h;
        upcast[i] = dtype == Dtype::kBf16   ? oracle::bf16_to_f32(h)
                    : dtype == Dtype::kFp16 ? oracle::fp16_to_f32(h)
                                            : inputs.finite(0, 140);
        full[i] = contract::float_of(upcast[i]);
      }
      Matrix W;
      W.data = dtype == Dtype::kFp32 ? reinterpret_cast<const std::byte*>(full.data())
                                     : reinterpret_cast<const std::byte*>(halves.data());
      W.dtype = dtype;
      W.rows = N;
      W.cols = static_cast<std::int64_t>(K);
      Row want(M * N);
      for (std::size_t m = 0; m < M; ++m) {
        const Row row(x.begin() + static_cast<std::ptrdiff_t>(m * K),
                      x.begin() + static_cast<std::ptrdiff_t>((m + 1) * K));
        for (std::size_t n = 0; n < N; ++n) {
          const Row w(upcast.begin() + static_cast<std::ptrdiff_t>(n * K),
                      upcast.begin() + static_cast<std::ptrdiff_t>((n + 1) * K));
          want[m * N + n] = oracle::dot(row, w);
        }
      }
      std::vector<float> y(M * N, kPoison);
      backend.matmul(y.data(), floats(x).data(), W, M);
      ASSERT_TRUE(same_bits(y.data(), want)) << "K " << K << ' ' << dtype_name(dtype);
    }
  }
}

TEST(Oracle, SumSquaresAndRmsNorm) {
  ReferenceBackend backend;
  Inputs inputs(14);
  const Bits epsilons[] = {0x3727c5acu /* 1e-5 */, 0x358637bdu /* 1e-6 */, oracle::kPlusZero,
                           0x00000001u};
  for (const std::size_t K : kLengths) {
    for (const Kind kind : kKinds) {
      Row x = inputs.row(K, kind);
      x[0] = inputs.moderate();  // eps 0 needs a row that is not all zero
      const Row weight = inputs.row(K, Kind::kNormal);
      const std::vector<float> x_floats = floats(x), weight_floats = floats(weight);
      ASSERT_TRUE(same_bits(contract::sum_squares(x_floats.data(), static_cast<std::int64_t>(K)),
                            oracle::sum_squares(x)))
          << K;
      Vector w;
      w.data = reinterpret_cast<const std::byte*>(weight_floats.data());
      w.dtype = Dtype::kFp32;
      w.size = static_cast<std::int64_t>(K);
      for (const Bits eps : epsilons) {
        std::vector<float> out(K, kPoison);
        backend.rms_norm(out.data(), x_floats.data(), w, contract::float_of(eps), 1);
        ASSERT_TRUE(same_bits(out.data(), oracle::rms_norm(x, weight, eps)))
            << "K " << K << ", kind " << static_cast<int>(kind) << ", eps bits " << eps;
      }
    }
  }
}

TEST(Oracle, Rope) {
  ReferenceBackend backend;
  Inputs inputs(15);
  for (const std::size_t dim : {2u, 16u, 64u, 80u, 128u, 256u}) {
    constexpr std::int64_t kHeads = 3, kRows = 4, kPositions = 9;
    const std::size_t half = dim / 2;
    const Row cosines = inputs.row(kPositions * half, Kind::kNormal);
    const Row sines = inputs.row(kPositions * half, Kind::kSignedZeros);
    const std::int32_t slot[kRows] = {0, 1, 0, 2}, position[kRows] = {8, 0, 3, 5};
    const RowMap rows{kRows, slot, position, slot, position};
    for (const Kind kind : kKinds) {
      const Row x = inputs.row(static_cast<std::size_t>(kRows * kHeads) * dim, kind);
      Row want;
      for (std::size_t at = 0; at < x.size(); at += dim) {
        const auto begin = static_cast<std::ptrdiff_t>(at);
        const auto table = static_cast<std::ptrdiff_t>(
            static_cast<std::size_t>(position[at / dim / kHeads]) * half);
        const auto end = table + static_cast<std::ptrdiff_t>(half);
        const Row head(x.begin() + begin, x.begin() + begin + static_cast<std::ptrdiff_t>(dim));
        const Row rotated = oracle::rope(head, Row(cosines.begin() + table, cosines.begin() + end),
                                         Row(sines.begin() + table, sines.begin() + end));
        want.insert(want.end(), rotated.begin(), rotated.end());
      }
      std::vector<float> got = floats(x);
      backend.rope(got.data(), kHeads, static_cast<std::int64_t>(dim), floats(cosines).data(),
                   floats(sines).data(), rows);
      ASSERT_TRUE(same_bits(got.data(), want)) << "head_dim " << dim;
    }
  }
}

// A last bit of the first coefficients reaches the result for about one argument in a million, so
// the arguments whose reduced part varies are sampled by the million.
TEST(Oracle, ExpOfManyOrdinaryArguments) {
  std::mt19937_64 engine(25);
  for (int i = 0; i < 6'000'000; ++i) {
    const std::uint64_t r = engine();
    const Bits x = static_cast<Bits>(r & 0x80000000u) |
                   static_cast<Bits>(124 + (r >> 40) % 10) << 23 | static_cast<Bits>(r & 0x7fffffu);
    ASSERT_TRUE(same_bits(contract::exp32(contract::float_of(x)), oracle::exp(x))) << std::hex << x;
  }
}

// Every sign and exponent with thousands of fractions, all arguments near the limits and the steps
// of n, and the whole range of subnormal results.
TEST(Oracle, ExpAndSilu) {
  std::mt19937_64 engine(16);
  const auto check = [](Bits x) {
    const float argument = contract::float_of(x);
    return same_bits(contract::exp32(argument), oracle::exp(x)) &&
           same_bits(contract::silu32(argument), oracle::silu(x));
  };
  for (std::uint32_t high = 0; high < 512; ++high) {
    const bool interesting = (high & 0xffu) >= 100 && (high & 0xffu) <= 134;
    for (int i = 0; i < (interesting ? 12'000 : 1'000); ++i) {
      const Bits x = high << 23 | static_cast<Bits>(engine() & 0x7fffffu);
      ASSERT_TRUE(check(x)) << std::hex << x;
    }
    for (const Bits fraction : {0x000000u, 0x000001u, 0x400000u, 0x7fffffu}) {
      ASSERT_TRUE(check(high << 23 | fraction)) << std::hex << (high << 23 | fraction);
    }
  }
  const auto check_around = [&](Bits centre, Bits distance) {
    for (Bits x = centre - distance; x <= centre + distance; ++x)
      ASSERT_TRUE(check(x)) << std::hex << x;
  };
  check_around(0xc2d20000u, 2000);        // -105
  check_around(0xc2aeac50u, 2000);        // -87.336: the least normal result
  check_around(0xc2cff1b5u, 2000);        // -103.972: the least subnormal result
  check_around(0x42b20000u, 2000);        // 89
  check_around(0x42b17218u, 2000);        // 88.723: the greatest finite result
  for (int k = -303; k <= 257; k += 2) {  // (k / 2) ln 2: where n steps
    const Bits x =
        oracle::mul(oracle::div(oracle::from_integer(static_cast<std::uint64_t>(k < 0 ? -k : k)),
                                oracle::from_integer(2)),
                    0x3f317218u);
    check_around(k < 0 ? oracle::negate(x) : x, 8);
  }
  for (Bits x = 0xc2ae0000u; x < 0xc2d20000u; x += 61) ASSERT_TRUE(check(x)) << std::hex << x;
}

TEST(Oracle, SwigluAndAdd) {
  ReferenceBackend backend;
  Inputs inputs(17);
  for (const Kind gate_kind : kKinds) {
    for (const Kind up_kind : kKinds) {
      const Row gate = inputs.row(1009, gate_kind), up = inputs.row(1009, up_kind);
      Row product(gate.size()), sum(gate.size());
      for (std::size_t i = 0; i < gate.size(); ++i) {
        product[i] = oracle::swiglu(gate[i], up[i]);
        sum[i] = oracle::add(gate[i], up[i]);
      }
      std::vector<float> out(gate.size(), kPoison);
      backend.swiglu(out.data(), floats(gate).data(), floats(up).data(), 1009);
      ASSERT_TRUE(same_bits(out.data(), product));
      out = floats(gate);
      backend.add(out.data(), out.data(), floats(up).data(), 1009);
      ASSERT_TRUE(same_bits(out.data(), sum));
    }
  }
}

// One head over `count` keys through the backend: two key-value heads of which the second is read,
// a slot that is not the first, and NaN in every row beyond the last position.
void check_attention(std::size_t dim, std::size_t count, Kind q_kind, Kind k_kind, Kind v_kind,
                     std::uint64_t seed) {
  ReferenceBackend backend;
  Inputs inputs(seed);
  const Row q = inputs.row(dim, q_kind);
  std::vector<Row> keys, values;
  for (std::size_t j = 0; j < count; ++j) {
    keys.push_back(inputs.row(dim, k_kind));
    values.push_back(inputs.row(dim, v_kind));
  }
  const std::size_t capacity = count + 3, width = 2 * dim;
  std::vector<float> k_cache(2 * capacity * width, contract::float_of(oracle::kQuietNan));
  std::vector<float> v_cache = k_cache;
  for (std::size_t j = 0; j < count; ++j) {
    const std::size_t at = (capacity + j) * width + dim;
    std::memcpy(&k_cache[at], keys[j].data(), dim * sizeof(float));
    std::memcpy(&v_cache[at], values[j].data(), dim * sizeof(float));
  }
  const test::PagedCache cache(backend, 2, static_cast<std::int64_t>(capacity),
                               static_cast<std::int64_t>(width), k_cache, v_cache);
  const std::int32_t slot = 1, position = static_cast<std::int32_t>(count) - 1;
  const RowMap rows{1, &slot, &position, &slot, &position};
  // Four query heads: heads 2 and 3 read key-value head 1. Head 3 holds q.
  std::vector<float> q_row(4 * dim, 0.0f), out(4 * dim, kPoison);
  std::memcpy(&q_row[3 * dim], q.data(), dim * sizeof(float));
  backend.attention(out.data(), q_row.data(), cache.layer(), 4, 2, static_cast<std::int64_t>(dim),
                    rows);
  ASSERT_TRUE(same_bits(&out[3 * dim], oracle::attention(q, keys, values)))
      << "head_dim " << dim << ", keys " << count << ", kinds " << static_cast<int>(q_kind)
      << static_cast<int>(k_kind) << static_cast<int>(v_kind);
}

TEST(Oracle, Attention) {
  std::uint64_t seed = 1800;
  for (const std::size_t dim : {16u, 64u, 80u, 128u}) {
    for (const std::size_t count : {1u, 2u, 63u, 64u, 65u, 127u, 128u, 129u, 192u, 193u, 200u}) {
      for (const Kind v_kind : {Kind::kNormal, Kind::kSignedZeros, Kind::kSubnormal}) {
        check_attention(dim, count, Kind::kNormal, Kind::kNormal, v_kind, ++seed);
      }
      check_attention(dim, count, Kind::kPrimeCycle, Kind::kNormal, Kind::kWide, ++seed);
      check_attention(dim, count, Kind::kNormal, Kind::kPrimeCycle, Kind::kPrimeCycle, ++seed);
      check_attention(dim, count, Kind::kSignedZeros, Kind::kSignedZeros, Kind::kCancelling,
                      ++seed);
      check_attention(dim, count, Kind::kSubnormal, Kind::kSubnormal, Kind::kNormal, ++seed);
    }
  }
}

// Scores so far apart that whole blocks weigh nothing, rising and falling maxima among them.
TEST(Oracle, AttentionWithFarMaxima) {
  for (const Kind k_kind : {Kind::kNormal, Kind::kCancelling}) {
    for (const std::uint32_t exponent : {4u, 6u, 9u}) {
      for (const bool rising : {false, true}) {
        Inputs inputs(1900 + exponent);
        constexpr std::size_t kDim = 16, kCount = 200;
        const Row q(kDim, oracle::from_integer(1));
        std::vector<Row> keys, values;
        std::vector<float> k_floats, v_floats;
        for (std::size_t j = 0; j < kCount; ++j) {
          Row key = inputs.row(kDim, k_kind);
          const std::size_t block = rising ? j / 64 : 3 - j / 64;
          key[0] = oracle::from_integer(block << exponent);
          keys.push_back(key);
          values.push_back(inputs.row(kDim, Kind::kNormal));
          for (const float x : floats(keys.back())) k_floats.push_back(x);
          for (const float x : floats(values.back())) v_floats.push_back(x);
        }
        std::vector<float> out(kDim, kPoison);
        contract::attention_row(
            floats(q).data(),
            [&](std::int64_t j) { return &k_floats[static_cast<std::size_t>(j) * kDim]; },
            [&](std::int64_t j) { return &v_floats[static_cast<std::size_t>(j) * kDim]; },
            kCount - 1, kDim, out.data());
        ASSERT_TRUE(same_bits(out.data(), oracle::attention(q, keys, values)))
            << exponent << rising;
      }
    }
  }
}

TEST(Oracle, Sampler) {
  ReferenceBackend backend;
  Inputs inputs(20);
  const Bits temperatures[] = {oracle::kPlusZero, oracle::kOne,           0x3f333333u /* 0.7 */,
                               0x00000001u,       0x38d1b717u /* 1e-4 */, 0x7f7fffffu,
                               0x42c80000u /* 100 */};
  const Bits top_ps[] = {oracle::kOne, 0x3f666666u /* 0.9 */,   0x3f7fffffu,
                         0x3f000000u,  0x2edbe6ffu /* 1e-10 */, 0x00000001u};
  for (const std::size_t vocab : {1u, 2u, 3u, 50u, 401u}) {
    for (const int shape : {0, 1, 2, 3}) {
      Row logits(vocab);
      for (Bits& x : logits) {
        switch (shape) {
          case 0:  // spread
            x = inputs.finite(120, 130);
            break;
          case 1:  // many ties
            x = oracle::from_integer(inputs() % 4);
            break;
          case 2:  // zeros of both signs and neighbours
            x = inputs() % 2 == 0 ? oracle::kPlusZero : oracle::kMinusZero;
            if (inputs() % 8 == 0) x = 0x80000001u;
            break;
          default:  // the extremes of the range
            x = inputs.finite(1, 254);
        }
      }
      const std::vector<float> values = floats(logits);
      for (const Bits temperature : temperatures) {
        for (const std::uint32_t top_k : {0u, 1u, 2u, 40u, 1000u}) {
          for (const Bits top_p : top_ps) {
            for (int i = 0; i < 3; ++i) {
              SampleRequest request;
              request.params = {contract::float_of(temperature), top_k, contract::float_of(top_p)};
              request.draw = i == 0 ? 0 : i == 1 ? ~std::uint64_t{0} : inputs();
              std::int32_t got = -1;
              backend.sample(&got, values.data(), static_cast<std::int64_t>(vocab), &request, 1,
                             {});
              ASSERT_EQ(static_cast<std::uint32_t>(got),
                        oracle::sample(logits, temperature, top_k, top_p, request.draw))
                  << "vocab " << vocab << ", shape " << shape << ", temperature bits "
                  << temperature << ", top_k " << top_k << ", top_p bits " << top_p << ", draw "
                  << request.draw;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace bitwitness
