// Which kernel computes a product: one table for all devices, types and shapes. Before a variant is
// used for a shape its outputs are compared, on this device, with those of the contract's own
// functions; one that differs ends the run.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "kernels/cuda/context.h"

namespace bitwitness::cuda {
namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ float dot_of(const Product& p, int part, std::int64_t m,
                                        std::int64_t n) {
  const float* const x = p.x + m * p.K;
  const std::byte* const W = p.parts[part].W;
  switch (p.dtype) {
    case Dtype::kBf16:
      return contract::matmul_element<Dtype::kBf16>(p.K, x, W, n);
    case Dtype::kFp16:
      return contract::matmul_element<Dtype::kFp16>(p.K, x, W, n);
    case Dtype::kFp32:
      return contract::matmul_element<Dtype::kFp32>(p.K, x, W, n);
  }
  return 0.0f;
}

// Element (m, n) of the y of a part; the norm has been applied.
__device__ float element_of(const Product& p, int part, std::int64_t m, std::int64_t n) {
  const float dot = dot_of(p, part, m, n);
  switch (p.epilogue) {
    case Epilogue::kStore:
      return dot;
    case Epilogue::kAdd:
      return contract::add32(p.residual[m * p.parts[part].N + n], dot);
    case Epilogue::kSwiglu:
      return contract::swiglu_element(dot, dot_of(p, 1, m, n));
  }
  return 0.0f;
}

__global__ void __launch_bounds__(kThreads) plain_kernel(Product p, int part) {
  const std::int64_t N = p.parts[part].N, step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.M * N; i += step) {
    p.parts[part].y[i] = element_of(p, part, i / N, i % N);
  }
}

// Compares outputs first, first + stride, ... of a part's y with the contract's. NaNs are equal:
// their payloads are not defined.
__global__ void __launch_bounds__(kThreads)
    compare_kernel(std::uint32_t* different, Product p, int part, std::int64_t stride) {
  const std::int64_t N = p.parts[part].N;
  const std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * stride;
  if (i >= p.M * N) return;
  const float want = element_of(p, part, i / N, i % N), got = p.parts[part].y[i];
  const bool both_nan = want != want && got != got;
  if (!both_nan && contract::bits_of(want) != contract::bits_of(got)) *different = 1;
}

int stored_parts(const Product& p) {
  return p.epilogue == Epilogue::kSwiglu ? 1 : p.part_count;
}

// With the norm applied, in `normed`, if there is one.
Product without_norm(Context& context, const Product& p, float* normed) {
  Product out = p;
  if (p.norm == nullptr) return out;
  rms_norm(context, normed, p.x, p.norm_dtype, p.norm, p.K, p.eps, p.M);
  out.x = normed;
  out.norm = nullptr;
  return out;
}

void launch(Context& context, const ProductVariant& variant, const Product& p) {
  if (p.norm == nullptr || variant.fuses_norm) return variant.launch(context, p);
  const Scratch<float> normed(context, static_cast<std::size_t>(p.M * p.K));
  variant.launch(context, without_norm(context, p, normed.get()));
}

std::string shape_of(const Product& p) {
  constexpr const char* kEpilogues[] = {"", " + residual", ", swiglu"};
  std::string text = p.norm == nullptr ? "" : "norm, ";
  for (int i = 0; i < p.part_count; ++i) {
    if (i != 0) text.push_back('+');
    text.append(std::to_string(p.parts[i].N));
  }
  text.push_back('x');
  text.append(std::to_string(p.K)).append(" ").append(dtype_name(p.dtype));
  return text.append(kEpilogues[static_cast<int>(p.epilogue)]);
}

// Runs the variant on this very product, into outputs of its own that are poisoned first, and
// compares a sample of them that reaches every tile.
void admit(Context& context, const ProductVariant& variant, const Product& p) {
  constexpr std::int64_t kSamples = 16384;
  Product trial = p;
  std::vector<std::unique_ptr<Scratch<float>>> outputs;
  for (int i = 0; i < p.part_count; ++i) {
    const auto count = static_cast<std::size_t>(p.M * p.parts[i].N);
    outputs.push_back(std::make_unique<Scratch<float>>(context, count));
    trial.parts[i].y = outputs.back()->get();
    BW_CUDA(cudaMemsetAsync(trial.parts[i].y, 0xff, count * sizeof(float), context.stream));
  }
  launch(context, variant, trial);

  const Scratch<float> normed(context, static_cast<std::size_t>(p.M * p.K));
  const Product checked = without_norm(context, trial, normed.get());
  const Scratch<std::uint32_t> different(context, 1);
  BW_CUDA(cudaMemsetAsync(different.get(), 0, sizeof(std::uint32_t), context.stream));
  for (int i = 0; i < stored_parts(p); ++i) {
    const std::int64_t count = p.M * p.parts[i].N;
    // An odd stride meets every column and every lane.
    const std::int64_t stride = std::max<std::int64_t>(1, count / kSamples) | 1;
    const std::int64_t samples = (count + stride - 1) / stride;
    compare_kernel<<<static_cast<unsigned>((samples + kThreads - 1) / kThreads), kThreads, 0,
                     context.stream>>>(different.get(), checked, i, stride);
    BW_CUDA_LAUNCHED("comparison of a product");
  }
  std::uint32_t found = 0;
  BW_CUDA(cudaMemcpyAsync(&found, different.get(), sizeof found, cudaMemcpyDeviceToHost,
                          context.stream));
  BW_CUDA(cudaStreamSynchronize(context.stream));
  if (found == 0) return;
  throw infrastructure_error(std::string("CUDA: kernel ") + variant.name +
                             " does not give the contract's bits for " + std::to_string(p.M) +
                             " rows of " + shape_of(p) +
                             ": this device or this build does not compute right; run "
                             "`bw-prover selftest`, and do not trust the device");
}

const ProductVariant& plain_variant() {
  static constexpr ProductVariant kPlain = {
      "plain", [](const Context&, const Product&) { return true; }, false, product_plain};
  return kPlain;
}

const ProductVariant& variant_for(const Context& context, const Product& p) {
  for (const auto variants : {decode_variants(), batch_variants(), prefill_variants()}) {
    for (const ProductVariant& variant : variants) {
      if (variant.fits(context, p)) return variant;
    }
  }
  return plain_variant();
}

}  // namespace

void product_plain(Context& context, const Product& p) {
  for (int i = 0; i < stored_parts(p); ++i) {
    const std::int64_t blocks = (p.M * p.parts[i].N + kThreads - 1) / kThreads;
    plain_kernel<<<static_cast<unsigned>(std::min<std::int64_t>(blocks, 1 << 20)), kThreads, 0,
                   context.stream>>>(p, i);
    BW_CUDA_LAUNCHED("product (plain)");
  }
}

void product(Context& context, const Product& p) {
  const ProductVariant& variant = variant_for(context, p);
  if (variant.launch != product_plain) {
    // The number of rows is not part of the key: the tests go through it (cuda_test).
    const std::string key = variant.name + (": " + shape_of(p));
    if (!context.admitted_products.contains(key)) {
      admit(context, variant, p);
      context.admitted_products.insert(key);
    }
  }
  launch(context, variant, p);
}

}  // namespace bitwitness::cuda
