// Real numbers for the RoPE tables, in integers: fixed point with 256 fractional bits. Far more
// than any rounding to binary32 needs, so that a result is the correctly rounded one or is reported
// as undecided.
#pragma once

#include <array>
#include <cstdint>

#include "tests/oracle/oracle_float.h"

namespace bitwitness::oracle {

// (-1)^negative * (sum of limb[i] * 2^(32 i)) * 2^-256; magnitudes stay below 2^64. Every operation
// is within one or two units of the last place (2^-256).
class Real {
 public:
  Real() = default;
  explicit Real(std::uint64_t integer);
  // A finite binary32, exactly if it is a multiple of 2^-256.
  static Real from_bits(Bits a);
  static const Real& pi();
  static const Real& ln2();

  Real operator-() const;
  Real operator+(const Real& b) const;
  Real operator-(const Real& b) const;
  Real operator*(const Real& b) const;
  Real operator/(const Real& b) const;
  Real times(std::uint32_t factor) const;
  Real over(std::uint32_t divisor) const;
  Real halved(int times) const;  // 2^-times of it
  bool operator<(const Real& b) const;
  bool is_zero() const;
  bool negative() const { return negative_; }
  std::uint64_t integer_part() const;  // of the magnitude

  // Rounded once to binary32. `decided` becomes false if an error of 2^-100 relative could change
  // it.
  Bits round(bool* decided) const;

 private:
  static constexpr int kLimbs = 10, kFractionLimbs = 8;
  using Limbs = std::array<std::uint32_t, kLimbs>;
  static int compare(const Limbs& a, const Limbs& b);

  Limbs limb_{};
  bool negative_ = false;
};

// ln x of an integer x in [1, 2^31).
Real ln(std::uint32_t x);
// e^-y of y in [0, 64).
Real exp_minus(const Real& y);
// Cosine and sine of a >= 0 below 2^31.
void cos_sin(const Real& a, Real* cosine, Real* sine);

// theta^(-2i/head_dim) (ARITHMETIC.md section 5, `default`).
Real rope_frequency(std::uint32_t theta, std::uint32_t head_dim, std::uint32_t i);
// The rule of `llama3` on such a frequency.
struct Llama3Scaling {
  std::uint32_t factor, low, high, context;
};
Real rope_llama3(const Real& frequency, const Llama3Scaling& scaling);

}  // namespace bitwitness::oracle
