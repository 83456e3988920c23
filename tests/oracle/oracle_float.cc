#include "tests/oracle/oracle_float.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace bitwitness::oracle {
namespace {

__extension__ typedef unsigned __int128 Wide;

// An interchange format: `precision` significant bits with the hidden one, `exponent_bits` of
// exponent.
struct Format {
  int precision;
  int exponent_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int least_exponent() const { return 2 - bias() - precision; }  // of the least subnormal
  std::uint32_t infinity() const { return ((1u << exponent_bits) - 1) << (precision - 1); }
  std::uint32_t sign() const { return 1u << (precision - 1 + exponent_bits); }
};

constexpr Format kBinary32{24, 8};
constexpr Format kBfloat16{8, 8};
constexpr Format kBinary16{11, 5};

int bit_length(Wide x) {
  const std::uint64_t high = static_cast<std::uint64_t>(x >> 64);
  if (high != 0) return 64 + static_cast<int>(std::bit_width(high));
  return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(x)));
}

bool is_infinite(Bits a) {
  return (a & 0x7fffffffu) == kPlusInfinity;
}
bool is_zero(Bits a) {
  return (a & 0x7fffffffu) == 0;
}
bool is_negative(Bits a) {
  return (a >> 31) != 0;
}
Bits signed_bits(bool negative, Bits magnitude) {
  return magnitude | (negative ? 0x80000000u : 0u);
}

// The one rounding: (significand + f) * 2^exponent, 0 < f < 1 if sticky.
std::uint32_t round_to(const Format& format, bool negative, Wide significand, int exponent,
                       bool sticky) {
  const std::uint32_t sign = negative ? format.sign() : 0;
  if (significand == 0) return sign;
  const int top = exponent + bit_length(significand) - 1;  // 2^top <= value < 2^(top + 1)
  // Exponent of the result's last place: `precision` bits, but never below the least subnormal.
  int unit = std::max(top - format.precision + 1, format.least_exponent());
  const int dropped = unit - exponent;
  Wide kept;
  if (dropped <= 0) {
    kept = significand << -dropped;
  } else if (dropped > 127) {
    kept = 0;  // below a quarter of the unit
  } else {
    kept = significand >> dropped;
    const Wide rest = significand - (kept << dropped);
    const Wide half = Wide{1} << (dropped - 1);
    if (rest > half || (rest == half && (sticky || (kept & 1) != 0))) kept += 1;
  }
  if (kept >> format.precision != 0) {  // rounded up to the next power of two
    kept >>= 1;
    unit += 1;
  }
  const std::uint32_t fraction = static_cast<std::uint32_t>(kept);
  const std::uint32_t hidden = 1u << (format.precision - 1);
  if (fraction < hidden) return sign | fraction;  // zero or subnormal
  const int biased = unit + format.precision - 1 + format.bias();
  if (biased >= (1 << format.exponent_bits) - 1) return sign | format.infinity();
  return sign | (static_cast<std::uint32_t>(biased) << (format.precision - 1)) |
         (fraction - hidden);
}

// A significand normalised to 24 bits; `a` is finite and not zero.
Decoded normalised(Bits a) {
  Decoded d = decode(a);
  const int shift = 24 - static_cast<int>(std::bit_width(d.significand));
  d.significand <<= shift;
  d.exponent -= shift;
  return d;
}

struct Term {
  bool negative;
  Wide significand;  // below 2^48
  int exponent;
};

// The rounded sum of two exact terms that are not both zero.
Bits round_sum(Term x, Term y) {
  if (x.significand == 0) return round_to(kBinary32, y.negative, y.significand, y.exponent, false);
  if (y.significand == 0) return round_to(kBinary32, x.negative, x.significand, x.exponent, false);
  if (x.exponent < y.exponent) std::swap(x, y);
  // Bring x down to the exponent of y, by at most 72 places (48 + 72 bits fit). If that is not
  // enough, y is below 2^48 units against at least 2^72: what it loses by moving up decides only on
  // which side of a rounding boundary the sum lies, which an odd last bit says as well.
  const int distance = x.exponent - y.exponent;
  const int down = std::min(distance, 72);
  x.significand <<= down;
  x.exponent -= down;
  if (const int up = distance - down; up > 0) {
    const Wide moved = up > 127 ? 0 : y.significand >> up;
    const bool lost = up > 127 || (moved << up) != y.significand;
    y.significand = moved | (lost ? 1u : 0u);
  }
  if (x.negative == y.negative) {
    return round_to(kBinary32, x.negative, x.significand + y.significand, x.exponent, false);
  }
  if (x.significand == y.significand) return kPlusZero;  // exact cancellation
  if (x.significand > y.significand) {
    return round_to(kBinary32, x.negative, x.significand - y.significand, x.exponent, false);
  }
  return round_to(kBinary32, y.negative, y.significand - x.significand, x.exponent, false);
}

Term term(const Decoded& d) {
  return {d.negative, d.significand, d.exponent};
}

Bits widen(const Format& format, std::uint32_t h) {
  const bool negative = (h & format.sign()) != 0;
  const std::uint32_t magnitude = h & (format.sign() - 1);
  if (magnitude > format.infinity()) return kQuietNan;
  if (magnitude == format.infinity()) return signed_bits(negative, kPlusInfinity);
  const std::uint32_t hidden = 1u << (format.precision - 1);
  const std::uint32_t biased = magnitude >> (format.precision - 1);
  const std::uint32_t fraction = magnitude & (hidden - 1);
  if (biased == 0) return round_to_f32(negative, fraction, format.least_exponent());
  return round_to_f32(negative, fraction | hidden,
                      format.least_exponent() + static_cast<int>(biased) - 1);
}

std::uint16_t narrow(const Format& format, Bits a) {
  const std::uint32_t sign = is_negative(a) ? format.sign() : 0;
  if (is_nan(a))
    return static_cast<std::uint16_t>(format.infinity() | (1u << (format.precision - 2)));
  if (is_infinite(a)) return static_cast<std::uint16_t>(sign | format.infinity());
  const Decoded d = decode(a);
  return static_cast<std::uint16_t>(round_to(format, d.negative, d.significand, d.exponent, false));
}

}  // namespace

Decoded decode(Bits a) {
  const std::uint32_t biased = (a >> 23) & 0xffu, fraction = a & 0x7fffffu;
  if (biased == 0) return {is_negative(a), fraction, -149};
  return {is_negative(a), fraction | 0x800000u, static_cast<int>(biased) - 150};
}

bool is_nan(Bits a) {
  return (a & 0x7fffffffu) > kPlusInfinity;
}

Bits negate(Bits a) {
  return a ^ 0x80000000u;
}

bool less(Bits a, Bits b) {
  if (is_nan(a) || is_nan(b)) return false;
  if (is_zero(a) && is_zero(b)) return false;
  if (is_negative(a) != is_negative(b)) return is_negative(a);
  return is_negative(a) ? a > b : a < b;
}

Bits round_to_f32(bool negative, std::uint64_t significand, int exponent, bool sticky) {
  return round_to(kBinary32, negative, significand, exponent, sticky);
}

Bits add(Bits a, Bits b) {
  if (is_nan(a) || is_nan(b)) return kQuietNan;
  if (is_infinite(a)) return is_infinite(b) && a != b ? kQuietNan : a;
  if (is_infinite(b)) return b;
  if (is_zero(a) && is_zero(b)) return a == b ? a : kPlusZero;
  return round_sum(term(decode(a)), term(decode(b)));
}

Bits sub(Bits a, Bits b) {
  return add(a, negate(b));
}

Bits mul(Bits a, Bits b) {
  if (is_nan(a) || is_nan(b)) return kQuietNan;
  const bool negative = is_negative(a) != is_negative(b);
  if (is_infinite(a) || is_infinite(b)) {
    return is_zero(a) || is_zero(b) ? kQuietNan : signed_bits(negative, kPlusInfinity);
  }
  const Decoded x = decode(a), y = decode(b);
  return round_to(kBinary32, negative, Wide{x.significand} * y.significand, x.exponent + y.exponent,
                  false);
}

Bits div(Bits a, Bits b) {
  if (is_nan(a) || is_nan(b)) return kQuietNan;
  const bool negative = is_negative(a) != is_negative(b);
  if (is_infinite(a)) return is_infinite(b) ? kQuietNan : signed_bits(negative, kPlusInfinity);
  if (is_infinite(b)) return signed_bits(negative, kPlusZero);
  if (is_zero(b)) return is_zero(a) ? kQuietNan : signed_bits(negative, kPlusInfinity);
  if (is_zero(a)) return signed_bits(negative, kPlusZero);
  const Decoded x = normalised(a), y = normalised(b);
  const std::uint64_t numerator = std::uint64_t{x.significand} << 40;
  const std::uint64_t quotient = numerator / y.significand;  // 40 or 41 bits
  return round_to(kBinary32, negative, quotient, x.exponent - y.exponent - 40,
                  numerator % y.significand != 0);
}

Bits sqrt(Bits a) {
  if (is_nan(a)) return kQuietNan;
  if (is_zero(a)) return a;
  if (is_negative(a)) return kQuietNan;
  if (is_infinite(a)) return a;
  const Decoded x = normalised(a);
  // value = radicand * 2^exponent with an even exponent and a radicand of 63 or 64 bits.
  std::uint64_t radicand = std::uint64_t{x.significand} << 39;
  int exponent = x.exponent - 39;
  if (exponent % 2 != 0) {
    radicand <<= 1;
    exponent -= 1;
  }
  std::uint64_t root = 0;  // floor of the square root, bit by bit
  for (int bit = 31; bit >= 0; --bit) {
    const std::uint64_t trial = root | (std::uint64_t{1} << bit);
    if (trial * trial <= radicand) root = trial;
  }
  return round_to(kBinary32, false, root, exponent / 2, root * root != radicand);
}

Bits fma(Bits a, Bits b, Bits c) {
  if (is_nan(a) || is_nan(b) || is_nan(c)) return kQuietNan;
  const bool negative = is_negative(a) != is_negative(b);
  if (is_infinite(a) || is_infinite(b)) {
    if (is_zero(a) || is_zero(b)) return kQuietNan;
    return is_infinite(c) && is_negative(c) != negative ? kQuietNan
                                                        : signed_bits(negative, kPlusInfinity);
  }
  if (is_infinite(c)) return c;
  if ((is_zero(a) || is_zero(b)) && is_zero(c)) {
    return negative && is_negative(c) ? kMinusZero : kPlusZero;
  }
  const Decoded x = decode(a), y = decode(b);
  return round_sum({negative, Wide{x.significand} * y.significand, x.exponent + y.exponent},
                   term(decode(c)));
}

Bits bf16_to_f32(std::uint16_t h) {
  return widen(kBfloat16, h);
}
Bits fp16_to_f32(std::uint16_t h) {
  return widen(kBinary16, h);
}
std::uint16_t f32_to_bf16(Bits a) {
  return narrow(kBfloat16, a);
}
std::uint16_t f32_to_fp16(Bits a) {
  return narrow(kBinary16, a);
}

std::uint64_t floor_scaled(Bits a, int scale) {
  const Decoded d = decode(a);
  const int shift = d.exponent + scale;
  if (shift >= 0) return std::uint64_t{d.significand} << shift;
  return shift <= -64 ? 0 : std::uint64_t{d.significand} >> -shift;
}

}  // namespace bitwitness::oracle
