#include "kernels/known_answers.h"

#include <cstdint>
#include <cstdio>

#include "attest/base/error.h"
#include "kernels/contract.h"

namespace bitwitness {
namespace {

// Operands pass through volatile memory so that the processor, not the compiler, does the
// arithmetic.
float opaque(std::uint32_t bits) {
  volatile std::uint32_t copy = bits;
  return contract::float_of(copy);
}

void expect(const char* what, float got, std::uint32_t want, const std::string& where) {
  const std::uint32_t bits = contract::bits_of(got);
  if (bits == want) return;
  char text[160];
  std::snprintf(text, sizeof text, "known answer '%s': got bits %08x, want %08x", what, bits, want);
  throw infrastructure_error(
      where + ": " + text +
      ". The floating-point environment or the build breaks the arithmetic contract "
      "(flush-to-zero, "
      "another rounding mode, contracted or fast-math code); refusing to run");
}

}  // namespace

void check_known_answers(const std::string& where) {
  using namespace contract;
  const float one = opaque(0x3f800000u), ulp_up = opaque(0x3f800001u);
  const float least = opaque(0x00000001u), least_normal = opaque(0x00800000u);
  // Subnormals as operands and results.
  expect("subnormal + subnormal", add32(least, least), 0x00000002u, where);
  expect("least normal / 2", mul32(least_normal, opaque(0x3f000000u)), 0x00400000u, where);
  expect("subnormal - normal", sub32(least_normal, least), 0x007fffffu, where);
  expect("subnormal product in fma", fma32(least_normal, opaque(0x3f000001u), least), 0x00400002u,
         where);
  // One rounding in fma: (1 + 2^-23)^2 - (1 + 2^-22) = 2^-46, which two roundings lose.
  expect("fma rounds once", fma32(ulp_up, ulp_up, -opaque(0x3f800002u)), 0x28800000u, where);
  // No contraction: RN(RN(a * a) - b) is zero.
  expect("a * a - b is not fused", sub32(mul32(ulp_up, ulp_up), opaque(0x3f800002u)), 0x00000000u,
         where);
  // Round to nearest, ties to even.
  expect("tie to even, down", add32(one, opaque(0x33800000u)), 0x3f800000u, where);
  expect("tie to even, up", add32(ulp_up, opaque(0x33800000u)), 0x3f800002u, where);
  expect("division", div32(one, opaque(0x40400000u)), 0x3eaaaaabu, where);
  expect("square root", sqrt32(opaque(0x40000000u)), 0x3fb504f3u, where);
  expect("square root of a subnormal", sqrt32(least), 0x1a3504f3u, where);
  expect("exp(1)", exp32(one), 0x402df854u, where);
  expect("exp(-100)", exp32(opaque(0xc2c80000u)), 0x0000001bu, where);
  expect("silu(1)", silu32(one), 0x3f3b26a8u, where);
  expect("fp16 subnormal", fp16_to_f32(0x0001u), 0x33800000u, where);
}

}  // namespace bitwitness
