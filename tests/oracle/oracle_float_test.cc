// The oracle's scalar operations against the processor's: two implementations that share nothing
// check each other. Operands: all pairs and triples of special values, random bit patterns, and
// generators aimed at ties, cancellation, overflow and subnormal results.
#include "tests/oracle/oracle_float.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <iomanip>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace bitwitness::oracle {
namespace {

float value(Bits a) {
  float x;
  std::memcpy(&x, &a, sizeof x);
  return x;
}
Bits bits(float x) {
  Bits a;
  std::memcpy(&a, &x, sizeof a);
  return a;
}

Bits hardware_add(Bits a, Bits b) {
  return bits(value(a) + value(b));
}
Bits hardware_sub(Bits a, Bits b) {
  return bits(value(a) - value(b));
}
Bits hardware_mul(Bits a, Bits b) {
  return bits(value(a) * value(b));
}
Bits hardware_div(Bits a, Bits b) {
  return bits(value(a) / value(b));
}
Bits hardware_sqrt(Bits a) {
  return bits(std::sqrt(value(a)));
}
Bits hardware_fma(Bits a, Bits b, Bits c) {
  return bits(std::fma(value(a), value(b), value(c)));
}

bool equal(Bits a, Bits b) {
  return is_nan(a) ? is_nan(b) : a == b;
}

std::string text(const char* operation, std::initializer_list<Bits> operands, Bits got, Bits want) {
  std::ostringstream out;
  out << operation << '(' << std::hex << std::setfill('0');
  for (const Bits a : operands) out << ' ' << std::setw(8) << a;
  out << " ): oracle " << std::setw(8) << got << ", processor " << std::setw(8) << want;
  return out.str();
}

// Every operation on one triple; false, with a test failure, at the first difference.
bool check_binary(Bits a, Bits b) {
  const struct {
    const char* name;
    Bits got, want;
  } results[] = {{"add", add(a, b), hardware_add(a, b)},
                 {"sub", sub(a, b), hardware_sub(a, b)},
                 {"mul", mul(a, b), hardware_mul(a, b)},
                 {"div", div(a, b), hardware_div(a, b)}};
  for (const auto& r : results) {
    if (equal(r.got, r.want)) continue;
    ADD_FAILURE() << text(r.name, {a, b}, r.got, r.want);
    return false;
  }
  if (less(a, b) != (value(a) < value(b))) {
    ADD_FAILURE() << text("less", {a, b}, less(a, b), value(a) < value(b));
    return false;
  }
  return true;
}
bool check_fma(Bits a, Bits b, Bits c) {
  const Bits got = fma(a, b, c), want = hardware_fma(a, b, c);
  if (equal(got, want)) return true;
  ADD_FAILURE() << text("fma", {a, b, c}, got, want);
  return false;
}
bool check_sqrt(Bits a) {
  const Bits got = sqrt(a), want = hardware_sqrt(a);
  if (equal(got, want)) return true;
  ADD_FAILURE() << text("sqrt", {a}, got, want);
  return false;
}

std::vector<Bits> special_values() {
  std::vector<Bits> out;
  for (const Bits magnitude :
       {0x00000000u, 0x00000001u, 0x00000002u, 0x00000003u, 0x003fffffu, 0x00400000u,
        0x00400001u, 0x007ffffeu, 0x007fffffu, 0x00800000u, 0x00800001u, 0x00ffffffu,
        0x01000000u, 0x01000001u, 0x0b800000u, 0x0c000000u, 0x1a3504f3u, 0x1f800000u,
        0x20000000u, 0x33800000u, 0x33800001u, 0x34000000u, 0x34000001u, 0x3effffffu,
        0x3f000000u, 0x3f000001u, 0x3f7fffffu, 0x3f800000u, 0x3f800001u, 0x3f800002u,
        0x3fb504f3u, 0x3fc00000u, 0x3fffffffu, 0x40000000u, 0x40400000u, 0x4b000000u,
        0x4b7fffffu, 0x4b800000u, 0x4b800001u, 0x5f000000u, 0x5f7fffffu, 0x7e800000u,
        0x7effffffu, 0x7f000000u, 0x7f000001u, 0x7f7ffffeu, 0x7f7fffffu, 0x7f800000u,
        0x7fc00000u}) {
    out.push_back(magnitude);
    out.push_back(magnitude | 0x80000000u);
  }
  return out;
}

class Generator {
 public:
  explicit Generator(std::uint64_t seed) : engine_(seed) {}

  Bits any() { return static_cast<Bits>(engine_()); }
  // Biased exponent in [low, high], a fraction with few set bits as often as a full one: such
  // operands make ties, exact results and long runs of zeros and ones.
  Bits shaped(int low, int high) {
    const std::uint64_t r = engine_();
    const std::uint32_t exponent = static_cast<std::uint32_t>(
        low + static_cast<int>((r >> 40) % static_cast<std::uint64_t>(high - low + 1)));
    std::uint32_t fraction = static_cast<std::uint32_t>(r) & 0x7fffffu;
    switch ((r >> 24) & 7) {
      case 0:
        fraction = 0;
        break;
      case 1:
        fraction &= 0x7ff000u;
        break;
      case 2:
        fraction |= 0x000fffu;
        break;
      case 3:
        fraction = 1u << (fraction % 23);
        break;
      case 4:
        fraction = 0x7fffffu ^ (1u << (fraction % 23));
        break;
      default:
        break;
    }
    return static_cast<Bits>(r >> 63) << 31 | exponent << 23 | fraction;
  }
  // A few units in the last place from `a`.
  Bits near(Bits a) { return a + static_cast<Bits>(engine_() % 9) - 4; }

 private:
  std::mt19937_64 engine_;
};

constexpr int kCount = 800'000;  // per generator

TEST(OracleFloat, SpecialPairs) {
  const std::vector<Bits> values = special_values();
  for (const Bits a : values) {
    ASSERT_TRUE(check_sqrt(a));
    for (const Bits b : values) ASSERT_TRUE(check_binary(a, b));
  }
}

TEST(OracleFloat, SpecialTriples) {
  const std::vector<Bits> values = special_values();
  for (const Bits a : values) {
    for (const Bits b : values) {
      for (const Bits c : values) ASSERT_TRUE(check_fma(a, b, c));
    }
  }
}

TEST(OracleFloat, AnyBits) {
  Generator g(1);
  for (int i = 0; i < kCount; ++i) {
    const Bits a = g.any(), b = g.any();
    ASSERT_TRUE(check_binary(a, b) && check_fma(a, b, g.any()) && check_sqrt(a & 0x7fffffffu));
  }
}

TEST(OracleFloat, NearExponents) {  // cancellation, ties, carries
  Generator g(2);
  for (int i = 0; i < kCount; ++i) {
    const Bits a = g.shaped(100, 150), b = g.shaped(100, 150);
    ASSERT_TRUE(check_binary(a, b) && check_binary(a, g.near(a)) &&
                check_binary(a, negate(g.near(a))));
    ASSERT_TRUE(check_fma(a, b, g.shaped(60, 190)) && check_sqrt(a & 0x7fffffffu));
  }
}

TEST(OracleFloat, Subnormals) {  // as operands and as results
  Generator g(3);
  for (int i = 0; i < kCount; ++i) {
    const Bits a = g.shaped(0, 2), b = g.shaped(0, 30), c = g.shaped(0, 130),
               d = g.shaped(100, 130);
    ASSERT_TRUE(check_binary(a, b) && check_binary(a, d) && check_binary(d, g.shaped(220, 254)));
    ASSERT_TRUE(check_binary(c, g.shaped(0, 130)) && check_sqrt(a & 0x7fffffffu));
    // Products around the least subnormal plus terms around it.
    const Bits e = g.shaped(50, 75), f = g.shaped(50, 75);
    ASSERT_TRUE(check_binary(e, f) && check_fma(e, f, a) && check_fma(a, d, b) &&
                check_fma(e, f, g.shaped(0, 60)));
  }
}

TEST(OracleFloat, NearOverflow) {
  Generator g(4);
  for (int i = 0; i < kCount; ++i) {
    const Bits a = g.shaped(253, 254), b = g.shaped(225, 254), d = g.shaped(120, 132);
    ASSERT_TRUE(check_binary(a, b) && check_binary(a, d) && check_binary(a, g.shaped(0, 10)));
    const Bits e = g.shaped(180, 200), f = g.shaped(180, 200);
    ASSERT_TRUE(check_binary(e, f) && check_fma(e, f, a) && check_fma(a, d, b));
  }
}

TEST(OracleFloat,
     FmaCancels) {  // c is within some ulp of -a * b: what remains is the product's error
  Generator g(5);
  for (int i = 0; i < kCount; ++i) {
    const Bits a = g.shaped(90, 160), b = g.shaped(90, 160);
    const Bits product = hardware_mul(a, b);
    ASSERT_TRUE(check_fma(a, b, negate(product)) && check_fma(a, b, negate(g.near(product))));
    // A far smaller addend that decides a tie of the product.
    ASSERT_TRUE(check_fma(a, b, g.shaped(1, 120)) && check_fma(a, b, g.shaped(130, 254)));
  }
}

TEST(OracleFloat, SqrtOfTwoBinades) {  // a dense stride over [1, 4): both parities of the exponent
  for (Bits a = 0x3f800000u; a < 0x40800000u; a += 5) ASSERT_TRUE(check_sqrt(a));
}

TEST(OracleFloat, RoundsIntegers) {
  std::mt19937_64 engine(6);
  for (int i = 0; i < kCount; ++i) {
    const std::uint64_t n = engine() >> (engine() % 64);
    ASSERT_EQ(round_to_f32(false, n, 0), bits(static_cast<float>(n))) << n;
    // Back: floor of a scaled value, where it fits.
    const float x = static_cast<float>(n >> 1);
    if (x < 0x1p+63f) {
      ASSERT_EQ(floor_scaled(bits(x), -3), static_cast<std::uint64_t>(std::floor(x / 8.0f))) << n;
    }
  }
  EXPECT_EQ(floor_scaled(0x00000001u, 149), 1u);
  EXPECT_EQ(floor_scaled(0x00000001u, 38), 0u);
}

}  // namespace
}  // namespace bitwitness::oracle
