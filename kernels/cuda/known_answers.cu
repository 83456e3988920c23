// Known answers on the device: the rounding, the subnormals and the elementary functions of
// contract.h as compiled for, and executed by, this GPU. A build with fast-math or flush-to-zero
// flags fails here.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "kernels/cuda/context.h"

namespace bitwitness::cuda {
namespace {

using namespace contract;

enum class Op : std::uint32_t {
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kSquareRoot,
  kFma,
  kMultiplyThenSubtract,
  kExp,
  kSilu,
  kFromFp16,
  kToFp16,
  kToBf16,
};

BW_HD inline std::uint32_t evaluate(Op op, float a, float b, float c) {
  switch (op) {
    case Op::kAdd:
      return bits_of(add32(a, b));
    case Op::kSubtract:
      return bits_of(sub32(a, b));
    case Op::kMultiply:
      return bits_of(mul32(a, b));
    case Op::kDivide:
      return bits_of(div32(a, b));
    case Op::kSquareRoot:
      return bits_of(sqrt32(a));
    case Op::kFma:
      return bits_of(fma32(a, b, c));
    case Op::kMultiplyThenSubtract:
      return bits_of(sub32(mul32(a, b), c));
    case Op::kExp:
      return bits_of(exp32(a));
    case Op::kSilu:
      return bits_of(silu32(a));
    case Op::kFromFp16:
      return bits_of(fp16_to_f32(static_cast<std::uint16_t>(bits_of(a))));
    case Op::kToFp16:
      return f32_to_fp16(a);
    case Op::kToBf16:
      return f32_to_bf16(a);
  }
  return 0;
}

struct Case {
  const char* what;
  Op op;
  std::uint32_t a, b, c;  // bits of the operands
  std::uint32_t want;
};

// The same answers as kernels/known_answers.cc, plus conversions.
constexpr Case kPublished[] = {
    {"subnormal + subnormal", Op::kAdd, 0x00000001u, 0x00000001u, 0, 0x00000002u},
    {"least normal / 2", Op::kMultiply, 0x00800000u, 0x3f000000u, 0, 0x00400000u},
    {"least normal - least subnormal", Op::kSubtract, 0x00800000u, 0x00000001u, 0, 0x007fffffu},
    {"subnormal product in fma", Op::kFma, 0x00800000u, 0x3f000001u, 0x00000001u, 0x00400002u},
    {"fma rounds once", Op::kFma, 0x3f800001u, 0x3f800001u, 0xbf800002u, 0x28800000u},
    {"a * a - b is not fused", Op::kMultiplyThenSubtract, 0x3f800001u, 0x3f800001u, 0x3f800002u, 0},
    {"tie to even, down", Op::kAdd, 0x3f800000u, 0x33800000u, 0, 0x3f800000u},
    {"tie to even, up", Op::kAdd, 0x3f800001u, 0x33800000u, 0, 0x3f800002u},
    {"division", Op::kDivide, 0x3f800000u, 0x40400000u, 0, 0x3eaaaaabu},
    {"square root", Op::kSquareRoot, 0x40000000u, 0, 0, 0x3fb504f3u},
    {"square root of a subnormal", Op::kSquareRoot, 0x00000001u, 0, 0, 0x1a3504f3u},
    {"exp(1)", Op::kExp, 0x3f800000u, 0, 0, 0x402df854u},
    {"exp(-100)", Op::kExp, 0xc2c80000u, 0, 0, 0x0000001bu},
    {"silu(1)", Op::kSilu, 0x3f800000u, 0, 0, 0x3f3b26a8u},
    {"fp16 subnormal", Op::kFromFp16, 0x0001u, 0, 0, 0x33800000u},
    {"fma(+0, -0, -0) is -0", Op::kFma, 0x00000000u, 0x80000000u, 0x80000000u, 0x80000000u},
};

__global__ void evaluate_kernel(std::uint32_t* __restrict__ got, const Op* __restrict__ op,
                                const float* __restrict__ operands, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count)
    got[i] = evaluate(op[i], operands[3 * i], operands[3 * i + 1], operands[3 * i + 2]);
}

const char* name_of(Op op) {
  switch (op) {
    case Op::kAdd:
      return "add";
    case Op::kSubtract:
      return "subtract";
    case Op::kMultiply:
      return "multiply";
    case Op::kDivide:
      return "divide";
    case Op::kSquareRoot:
      return "square root";
    case Op::kFma:
      return "fma";
    case Op::kMultiplyThenSubtract:
      return "multiply then subtract";
    case Op::kExp:
      return "exp32";
    case Op::kSilu:
      return "silu32";
    case Op::kFromFp16:
      return "fp16 to binary32";
    case Op::kToFp16:
      return "binary32 to fp16";
    case Op::kToBf16:
      return "binary32 to bf16";
  }
  return "unknown operation";
}

}  // namespace

void check_device_known_answers(Context& context) {
  std::vector<Case> cases(std::begin(kPublished), std::end(kPublished));
  // Beside them, the host's answers on bits from a fixed linear congruence: any exponent, any sign.
  std::uint32_t state = 1;
  const auto next_finite = [&] {
    state = state * 1664525u + 1013904223u;
    const std::uint32_t u = state ^ (state >> 15);
    return (u & 0x7f800000u) == 0x7f800000u ? u & 0xbfffffffu : u;
  };
  constexpr int kRandomPerOp = 256;
  for (std::uint32_t op = 0; op <= static_cast<std::uint32_t>(Op::kToBf16); ++op) {
    for (int i = 0; i < kRandomPerOp; ++i) {
      Case c{name_of(static_cast<Op>(op)),
             static_cast<Op>(op),
             next_finite(),
             next_finite(),
             next_finite(),
             0};
      if (c.op == Op::kSquareRoot) c.a &= 0x7fffffffu;
      if (c.op == Op::kFromFp16) c.a &= 0xfbffu;  // finite
      if (c.op == Op::kExp || c.op == Op::kSilu)
        c.a = (c.a & 0x83ffffffu) | 0x40000000u;  // |a| in [2, 512)
      c.want = evaluate(c.op, float_of(c.a), float_of(c.b), float_of(c.c));
      cases.push_back(c);
    }
  }

  const int count = static_cast<int>(cases.size());
  std::vector<Op> ops;
  std::vector<std::uint32_t> operands, got(cases.size());
  for (const Case& c : cases) {
    ops.push_back(c.op);
    operands.insert(operands.end(), {c.a, c.b, c.c});
  }
  Scratch<Op> device_ops(context, ops.size());
  Scratch<float> device_operands(context, operands.size());
  Scratch<std::uint32_t> device_got(context, got.size());
  BW_CUDA(cudaMemcpyAsync(device_ops.get(), ops.data(), ops.size() * sizeof(Op),
                          cudaMemcpyHostToDevice, context.stream));
  BW_CUDA(cudaMemcpyAsync(device_operands.get(), operands.data(), operands.size() * 4,
                          cudaMemcpyHostToDevice, context.stream));
  BW_CUDA(cudaMemsetAsync(device_got.get(), 0xff, got.size() * 4, context.stream));
  evaluate_kernel<<<static_cast<unsigned>((count + 127) / 128), 128, 0, context.stream>>>(
      device_got.get(), device_ops.get(), device_operands.get(), count);
  BW_CUDA_LAUNCHED("known answers");
  BW_CUDA(cudaMemcpyAsync(got.data(), device_got.get(), got.size() * 4, cudaMemcpyDeviceToHost,
                          context.stream));
  BW_CUDA(cudaStreamSynchronize(context.stream));
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    // NaNs compare as NaNs: their payloads are not part of the contract.
    const auto is_nan = [](std::uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; };
    const bool narrow = c.op == Op::kToFp16 || c.op == Op::kToBf16;
    if (got[i] == c.want || (!narrow && is_nan(got[i]) && is_nan(c.want))) continue;
    char text[200];
    std::snprintf(text, sizeof text,
                  "known answer '%s' of operands %08x %08x %08x: got bits %08x, want %08x", c.what,
                  c.a, c.b, c.c, got[i], c.want);
    throw infrastructure_error(
        "device cuda:" + std::to_string(context.ordinal) + ": " + text +
        ". The build or the device breaks the arithmetic contract (fast-math, flush-to-zero or "
        "contracted code; a faulty GPU); refusing to run. Rebuild with this project's flags, or "
        "choose "
        "another --device");
  }
}

}  // namespace bitwitness::cuda
