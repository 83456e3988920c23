#include "tests/oracle/oracle_real.h"

#include <bit>

namespace bitwitness::oracle {
namespace {

// 2 atanh(numerator / denominator) = ln((d + n) / (d - n)), 0 <= n < d / 2.
Real two_atanh(std::uint32_t numerator, std::uint32_t denominator) {
  const Real z = Real(numerator).over(denominator);
  const Real z2 = z * z;
  Real power = z, sum;
  for (std::uint32_t k = 1; !power.is_zero(); k += 2) {
    sum = sum + power.over(k);
    power = power * z2;
  }
  return sum.times(2);
}

// atan(1 / n), alternating series.
Real atan_inverse(std::uint32_t n) {
  Real power = Real(1).over(n), sum;
  for (std::uint32_t k = 1; !power.is_zero(); k += 2) {
    sum = k % 4 == 1 ? sum + power.over(k) : sum - power.over(k);
    power = power.over(n).over(n);
  }
  return sum;
}

}  // namespace

Real::Real(std::uint64_t integer) {
  limb_[kFractionLimbs] = static_cast<std::uint32_t>(integer);
  limb_[kFractionLimbs + 1] = static_cast<std::uint32_t>(integer >> 32);
}

Real Real::from_bits(Bits a) {
  const Decoded d = decode(a);
  Real out = Real(d.significand);
  if (d.exponent >= 0) {
    out = Real(std::uint64_t{d.significand} << d.exponent);
  } else {
    out = out.halved(-d.exponent);
  }
  out.negative_ = d.negative;
  return out;
}

const Real& Real::pi() {
  // Machin: pi / 4 = 4 atan(1/5) - atan(1/239).
  static const Real value = atan_inverse(5).times(16) - atan_inverse(239).times(4);
  return value;
}

const Real& Real::ln2() {
  static const Real value = two_atanh(1, 3);
  return value;
}

int Real::compare(const Limbs& a, const Limbs& b) {
  for (int i = kLimbs - 1; i >= 0; --i) {
    if (a[static_cast<std::size_t>(i)] != b[static_cast<std::size_t>(i)]) {
      return a[static_cast<std::size_t>(i)] < b[static_cast<std::size_t>(i)] ? -1 : 1;
    }
  }
  return 0;
}

bool Real::is_zero() const {
  return compare(limb_, Limbs{}) == 0;
}

Real Real::operator-() const {
  Real out = *this;
  out.negative_ = !negative_;
  return out;
}

Real Real::operator+(const Real& b) const {
  Real out;
  if (negative_ == b.negative_) {
    std::uint64_t carry = 0;
    for (std::size_t i = 0; i < kLimbs; ++i) {
      carry += std::uint64_t{limb_[i]} + b.limb_[i];
      out.limb_[i] = static_cast<std::uint32_t>(carry);
      carry >>= 32;
    }
    out.negative_ = negative_;
    return out;
  }
  const bool swap = compare(limb_, b.limb_) < 0;
  const Limbs& large = swap ? b.limb_ : limb_;
  const Limbs& small = swap ? limb_ : b.limb_;
  std::uint64_t borrow = 0;
  for (std::size_t i = 0; i < kLimbs; ++i) {
    const std::uint64_t difference = std::uint64_t{large[i]} - small[i] - borrow;
    out.limb_[i] = static_cast<std::uint32_t>(difference);
    borrow = difference >> 63;
  }
  out.negative_ = swap ? b.negative_ : negative_;
  return out;
}

Real Real::operator-(const Real& b) const {
  return *this + -b;
}

Real Real::operator*(const Real& b) const {
  std::array<std::uint32_t, 2 * kLimbs> product{};
  for (std::size_t i = 0; i < kLimbs; ++i) {
    if (limb_[i] == 0) continue;
    std::uint64_t carry = 0;
    for (std::size_t j = 0; j < kLimbs; ++j) {
      carry += std::uint64_t{limb_[i]} * b.limb_[j] + product[i + j];
      product[i + j] = static_cast<std::uint32_t>(carry);
      carry >>= 32;
    }
    product[i + kLimbs] = static_cast<std::uint32_t>(carry);
  }
  Real out;
  for (std::size_t i = 0; i < kLimbs; ++i) out.limb_[i] = product[i + kFractionLimbs];
  out.negative_ = negative_ != b.negative_;
  return out;
}

// Long division, bit by bit: the quotient's bits from 2^63 down to 2^-256.
Real Real::operator/(const Real& b) const {
  const auto doubled = [](Limbs& limbs, std::uint32_t low) {
    for (std::size_t i = 0; i < kLimbs; ++i) {
      const std::uint32_t out = limbs[i] >> 31;
      limbs[i] = (limbs[i] << 1) | low;
      low = out;
    }
    return low;
  };
  Real out, rest, divisor = b;
  divisor.negative_ = false;
  for (int bit = 32 * (kLimbs + kFractionLimbs) - 1; bit >= 0; --bit) {
    // The dividend is limb_ * 2^256, most significant bit first.
    const int at = bit - 32 * kFractionLimbs;
    const std::uint32_t next =
        at < 0 ? 0 : (limb_[static_cast<std::size_t>(at / 32)] >> (at % 32)) & 1u;
    doubled(rest.limb_, next);
    const bool fits = compare(rest.limb_, divisor.limb_) >= 0;
    if (fits) rest = rest - divisor;
    doubled(out.limb_, fits ? 1u : 0u);
  }
  out.negative_ = negative_ != b.negative_;
  return out;
}

Real Real::times(std::uint32_t factor) const {
  Real out = *this;
  std::uint64_t carry = 0;
  for (std::uint32_t& limb : out.limb_) {
    carry += std::uint64_t{limb} * factor;
    limb = static_cast<std::uint32_t>(carry);
    carry >>= 32;
  }
  return out;
}

Real Real::over(std::uint32_t divisor) const {
  Real out = *this;
  std::uint64_t rest = 0;
  for (std::size_t i = kLimbs; i-- > 0;) {
    rest = (rest << 32) | limb_[i];
    out.limb_[i] = static_cast<std::uint32_t>(rest / divisor);
    rest %= divisor;
  }
  return out;
}

Real Real::halved(int times) const {
  Real out = *this;
  for (; times >= 31; times -= 31) out = out.over(0x80000000u);
  return out.over(1u << times);
}

bool Real::operator<(const Real& b) const {
  if (is_zero() && b.is_zero()) return false;
  if (negative_ != b.negative_) return negative_;
  const int order = compare(limb_, b.limb_);
  return negative_ ? order > 0 : order < 0;
}

std::uint64_t Real::integer_part() const {
  return limb_[kFractionLimbs] | (std::uint64_t{limb_[kFractionLimbs + 1]} << 32);
}

Bits Real::round(bool* decided) const {
  int top = 32 * kLimbs - 1;
  const auto bit = [&](int i) -> std::uint32_t {
    return i < 0 ? 0 : (limb_[static_cast<std::size_t>(i / 32)] >> (i % 32)) & 1u;
  };
  while (top >= 0 && bit(top) == 0) --top;
  if (top < 0) return negative_ ? kMinusZero : kPlusZero;
  std::uint64_t significand = 0;  // the leading 64 bits
  for (int i = 0; i < 64; ++i) significand = (significand << 1) | bit(top - i);
  bool sticky = false;
  for (int i = 0; i <= top - 64; ++i) sticky = sticky || bit(i) != 0;
  // Undecided if the 76 bits after the leading 24 are (nearly) those of a midpoint: 1000..0 or
  // 0111..1.
  bool all_opposite = true;
  for (int i = 25; i < 100; ++i) all_opposite = all_opposite && bit(top - i) != bit(top - 24);
  if (all_opposite) *decided = false;
  return round_to_f32(negative_, significand, top - 63 - 32 * kFractionLimbs, sticky);
}

Real ln(std::uint32_t x) {
  // x = 2^e m, m in [1, 2): ln x = e ln 2 + 2 atanh((x - 2^e) / (x + 2^e)).
  const int e = static_cast<int>(std::bit_width(x)) - 1;
  const std::uint32_t power = 1u << e;
  return Real::ln2().times(static_cast<std::uint32_t>(e)) + two_atanh(x - power, x + power);
}

Real exp_minus(const Real& y) {
  Real r = y;
  int n = 0;
  for (; !(r < Real::ln2()); ++n) r = r - Real::ln2();
  Real sum(1), t(1);
  for (std::uint32_t k = 1; !t.is_zero(); ++k) {
    t = (t * r).over(k);
    sum = k % 2 == 1 ? sum - t : sum + t;
  }
  return sum.halved(n);
}

void cos_sin(const Real& a, Real* cosine, Real* sine) {
  static const Real half_pi = Real::pi().halved(1);
  static const Real two_over_pi = Real(2) / Real::pi();
  const std::uint64_t n = (a * two_over_pi + Real(1).halved(1)).integer_part();
  const Real r = a - half_pi.times(static_cast<std::uint32_t>(n));
  const Real r2 = r * r;
  Real c(1), s = r, even(1), odd = r;
  for (std::uint32_t k = 1; !(even.is_zero() && odd.is_zero()); ++k) {
    even = (even * r2).over((2 * k - 1) * (2 * k));
    odd = (odd * r2).over((2 * k) * (2 * k + 1));
    c = k % 2 == 1 ? c - even : c + even;
    s = k % 2 == 1 ? s - odd : s + odd;
  }
  switch (n % 4) {
    case 0:
      *cosine = c, *sine = s;
      break;
    case 1:
      *cosine = -s, *sine = c;
      break;
    case 2:
      *cosine = -c, *sine = -s;
      break;
    default:
      *cosine = s, *sine = -c;
  }
}

Real rope_frequency(std::uint32_t theta, std::uint32_t head_dim, std::uint32_t i) {
  return exp_minus(ln(theta).times(2 * i).over(head_dim));
}

Real rope_llama3(const Real& frequency, const Llama3Scaling& scaling) {
  // context / wavelength = context * frequency / (2 pi), compared after multiplication by 2 pi.
  const Real two_pi = Real::pi().times(2);
  const Real turns = frequency.times(scaling.context);
  if (two_pi.times(scaling.high) < turns) return frequency;
  if (turns < two_pi.times(scaling.low)) return frequency.over(scaling.factor);
  const Real smooth =
      (turns - two_pi.times(scaling.low)) / two_pi.times(scaling.high - scaling.low);
  return (Real(1) - smooth) * frequency.over(scaling.factor) + smooth * frequency;
}

}  // namespace bitwitness::oracle
