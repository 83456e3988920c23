// IEEE-754 binary32 in integers: the scalar half of the oracle. Every operation works on bit
// patterns, forms the exact result (or the exact result with a sticky bit) in integers, and rounds
// it once to nearest, ties to even. No floating-point type occurs, and nothing of the code under
// test is included, so that an error of the compiler, the processor's mode or contract.h cannot
// hide here.
//
// A NaN result is kQuietNan: payloads are not defined by the arithmetic.
#pragma once

#include <cstdint>

namespace bitwitness::oracle {

using Bits = std::uint32_t;  // a binary32 as its bit pattern

inline constexpr Bits kPlusZero = 0x00000000u;
inline constexpr Bits kMinusZero = 0x80000000u;
inline constexpr Bits kOne = 0x3f800000u;
inline constexpr Bits kPlusInfinity = 0x7f800000u;
inline constexpr Bits kQuietNan = 0x7fc00000u;

Bits add(Bits a, Bits b);
Bits sub(Bits a, Bits b);
Bits mul(Bits a, Bits b);
Bits div(Bits a, Bits b);
Bits sqrt(Bits a);
Bits fma(Bits a, Bits b, Bits c);  // a * b + c with one rounding
Bits negate(Bits a);

bool is_nan(Bits a);
bool less(Bits a, Bits b);  // false if either is NaN; -0 and +0 are equal

Bits bf16_to_f32(std::uint16_t h);
Bits fp16_to_f32(std::uint16_t h);
std::uint16_t f32_to_bf16(Bits a);
std::uint16_t f32_to_fp16(Bits a);

// (-1)^negative * (significand + f) * 2^exponent rounded to binary32, where 0 < f < 1 if `sticky`
// and f = 0 otherwise. With `sticky`, the significand has at least 32 bits.
Bits round_to_f32(bool negative, std::uint64_t significand, int exponent, bool sticky = false);

// floor(a * 2^scale) of a finite a >= 0; the result is below 2^64.
std::uint64_t floor_scaled(Bits a, int scale);

// A finite binary32 as (-1)^negative * significand * 2^exponent.
struct Decoded {
  bool negative;
  std::uint32_t significand;
  int exponent;
};
Decoded decode(Bits a);

}  // namespace bitwitness::oracle
