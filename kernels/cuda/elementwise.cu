// Operators that touch each element once: embedding, RMS norm, RoPE, cache rows, SwiGLU, residual,
// gather, and the search for non-finite values.
#include <algorithm>

#include "kernels/cuda/context.h"
#include "kernels/cuda/launch.cuh"

namespace bitwitness::cuda {
namespace {

using contract::add32;
using contract::fma32;
using contract::kAttentionBlock;
using contract::kLanes;

constexpr int kThreads = 256;

// Blocks for `count` elements in a grid-stride loop.
unsigned grid_for(const Context& context, std::int64_t count) {
  const std::int64_t most = std::int64_t{context.multiprocessors} * 16;
  return static_cast<unsigned>(
      std::clamp<std::int64_t>((count + kThreads - 1) / kThreads, 1, most));
}

__device__ __forceinline__ std::int64_t first_index() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ std::int64_t index_step() {
  return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
}

__global__ void embed_kernel(float* __restrict__ out, Dtype dtype,
                             const std::byte* __restrict__ embedding, std::int64_t width,
                             const std::int32_t* __restrict__ tokens, std::int64_t count) {
  for (std::int64_t i = first_index(); i < count; i += index_step()) {
    const std::int64_t row = tokens[i / width];
    out[i] = contract::load_weight(dtype, embedding, row * width + i % width);
  }
}

// Folds 32 lanes in halves; lane 0 has the result (contract.h section 4).
__device__ __forceinline__ float fold_warp(float lane_sum) {
#pragma unroll
  for (int width = 16; width >= 1; width /= 2) {
    lane_sum = add32(lane_sum, __shfl_down_sync(0xffffffffu, lane_sum, width));
  }
  return lane_sum;
}

// A block per row: thread i is lane i. May be in place. Rows of at most kRowRegisters * kLanes stay
// in registers, and their weights are read while others still compute.
constexpr int kRowRegisters = 32;
template <Dtype kDtype>
__global__ void __launch_bounds__(kLanes)
    rms_norm_block_kernel(float* out, const float* x, const std::byte* __restrict__ weight,
                          std::int64_t K, float eps) {
  __shared__ float lanes[kLanes];
  __shared__ float shared_scale;
  const int lane = static_cast<int>(threadIdx.x);
  const float* const row = x + blockIdx.x * K;
  const bool fits = K <= kRowRegisters * kLanes;
  float w[kRowRegisters], v[kRowRegisters];
  if (fits) {
#pragma unroll
    for (int j = 0; j < kRowRegisters; ++j) {
      const std::int64_t k = lane + j * kLanes;
      if (k < K) w[j] = contract::load_weight<kDtype>(weight, k);
    }
  }
  wait_for_previous();
  let_next_start();
  float sum = 0.0f;
  if (fits) {
#pragma unroll
    for (int j = 0; j < kRowRegisters; ++j) {
      const std::int64_t k = lane + j * kLanes;
      if (k < K) v[j] = row[k];
    }
#pragma unroll
    for (int j = 0; j < kRowRegisters; ++j) {
      if (lane + j * kLanes < K) sum = fma32(v[j], v[j], sum);
    }
  } else {
    for (std::int64_t k = lane; k < K; k += kLanes) sum = fma32(row[k], row[k], sum);
  }
  lanes[lane] = sum;
  __syncthreads();
  if (lane < 32) {  // lane[i] += lane[i + w] for w = 128, 64, 32, then within the warp
    float part[kLanes / 32];
#pragma unroll
    for (int j = 0; j < kLanes / 32; ++j) part[j] = lanes[lane + 32 * j];
#pragma unroll
    for (int width = kLanes / 64; width >= 1; width /= 2) {
#pragma unroll
      for (int j = 0; j < width; ++j) part[j] = add32(part[j], part[j + width]);
    }
    const float total = fold_warp(part[0]);
    if (lane == 0) shared_scale = contract::rms_scale(total, K, eps);
  }
  __syncthreads();
  const float scale = shared_scale;
  if (fits) {
#pragma unroll
    for (int j = 0; j < kRowRegisters; ++j) {
      const std::int64_t k = lane + j * kLanes;
      if (k < K) out[blockIdx.x * K + k] = contract::rms_norm_element(v[j], scale, w[j]);
    }
  } else {
    for (std::int64_t k = lane; k < K; k += kLanes) {
      out[blockIdx.x * K + k] =
          contract::rms_norm_element(row[k], scale, contract::load_weight<kDtype>(weight, k));
    }
  }
}

// A warp per row, for short rows: thread t is lanes t, t + 32, ..., t + 224. May be in place.
__global__ void __launch_bounds__(kThreads)
    rms_norm_warp_kernel(float* out, const float* x, Dtype dtype,
                         const std::byte* __restrict__ weight, std::int64_t K, float eps,
                         std::int64_t M) {
  constexpr int kPerThread = kLanes / 32;
  const int thread = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t m = first_index() / 32;
  wait_for_previous();
  if (m >= M) return;  // whole warps
  const float* const row = x + m * K;
  float sum[kPerThread];
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    sum[j] = 0.0f;
    for (std::int64_t k = thread + 32 * j; k < K; k += kLanes)
      sum[j] = fma32(row[k], row[k], sum[j]);
  }
#pragma unroll
  for (int width = kPerThread / 2; width >= 1; width /= 2) {
#pragma unroll
    for (int j = 0; j < width; ++j) sum[j] = add32(sum[j], sum[j + width]);
  }
  const float total = __shfl_sync(0xffffffffu, fold_warp(sum[0]), 0);
  const float scale = contract::rms_scale(total, K, eps);
  for (std::int64_t k = thread; k < K; k += 32) {
    out[m * K + k] =
        contract::rms_norm_element(row[k], scale, contract::load_weight(dtype, weight, k));
  }
}

__global__ void rope_kernel(float* x, std::int64_t heads, std::int64_t half,
                            const float* __restrict__ cosines, const float* __restrict__ sines,
                            const std::int32_t* __restrict__ position, std::int64_t count) {
  for (std::int64_t i = first_index(); i < count; i += index_step()) {
    const std::int64_t column = i % half, head = i / half, m = head / heads;
    const std::int64_t at = position[m] * half + column;
    float* const first = x + head * 2 * half + column;
    float* const second = first + half;
    const float a = *first, b = *second, cosine = cosines[at], sine = sines[at];
    *first = contract::rope_first(a, b, cosine, sine);
    *second = contract::rope_second(a, b, cosine, sine);
  }
}

__global__ void store_kv_kernel(KvPages cache, const float* __restrict__ k,
                                const float* __restrict__ v, StepShape step, std::int64_t count) {
  for (std::int64_t i = first_index(); i < count; i += index_step()) {
    const std::int64_t m = i / cache.width, t = step.position[m];
    float* const page = cache.pages[step.slot[m] * cache.pages_per_slot + t / kAttentionBlock];
    const std::int64_t at = t % kAttentionBlock * cache.width + i % cache.width;
    page[cache.key_offset + at] = k[i];
    page[cache.value_offset + at] = v[i];
  }
}

// `out` may be `gate` or `up`.
__global__ void swiglu_kernel(float* out, const float* gate, const float* up, std::int64_t count) {
  for (std::int64_t i = first_index(); i < count; i += index_step()) {
    out[i] = contract::swiglu_element(gate[i], up[i]);
  }
}

// `out` may be `x`.
__global__ void add_kernel(float* out, const float* x, const float* y, std::int64_t count) {
  for (std::int64_t i = first_index(); i < count; i += index_step()) out[i] = add32(x[i], y[i]);
}

__global__ void gather_rows_kernel(float* __restrict__ out, const float* __restrict__ x,
                                   std::int64_t width, const std::int32_t* __restrict__ index,
                                   std::int64_t count) {
  for (std::int64_t i = first_index(); i < count; i += index_step()) {
    out[i] = x[index[i / width] * width + i % width];
  }
}

// All who write the flag write the same.
__global__ void __launch_bounds__(kThreads)
    flag_non_finite_kernel(std::uint32_t* flag, const float* __restrict__ x, std::int64_t count) {
  bool bad = false;
  for (std::int64_t i = first_index(); i < count; i += index_step()) {
    bad = bad || !contract::is_finite(x[i]);
  }
  if (bad) *flag = 1;
}

// The least of the block's values, valid in thread 0. blockDim.x = kThreads.
__device__ std::uint64_t block_least(std::uint64_t value) {
  __shared__ std::uint64_t least[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  least[thread] = value;
  __syncthreads();
  for (int width = kThreads / 2; width >= 1; width /= 2) {
    if (thread < width && least[thread + width] < least[thread])
      least[thread] = least[thread + width];
    __syncthreads();
  }
  return least[0];
}

__global__ void __launch_bounds__(kThreads)
    non_finite_blocks_kernel(std::uint64_t* __restrict__ least, const float* __restrict__ x,
                             std::int64_t count) {
  std::uint64_t found = static_cast<std::uint64_t>(count);
  for (std::int64_t i = first_index(); i < count; i += index_step()) {
    if (!contract::is_finite(x[i])) {
      found = static_cast<std::uint64_t>(i);
      break;
    }
  }
  found = block_least(found);
  if (threadIdx.x == 0) least[blockIdx.x] = found;
}

__global__ void __launch_bounds__(kThreads)
    non_finite_kernel(std::uint64_t* __restrict__ out, const std::uint64_t* __restrict__ least,
                      unsigned blocks) {
  std::uint64_t found = least[0];
  for (unsigned i = threadIdx.x; i < blocks; i += kThreads)
    found = least[i] < found ? least[i] : found;
  found = block_least(found);
  if (threadIdx.x == 0) *out = found;
}

}  // namespace

void embed(Context& context, float* out, Dtype dtype, const std::byte* embedding,
           std::int64_t width, const std::int32_t* tokens, std::int64_t M) {
  const std::int64_t count = M * width;
  embed_kernel<<<grid_for(context, count), kThreads, 0, context.stream>>>(out, dtype, embedding,
                                                                          width, tokens, count);
  BW_CUDA_LAUNCHED("embed");
}

void rms_norm(Context& context, float* out, const float* x, Dtype dtype, const std::byte* weight,
              std::int64_t K, float eps, std::int64_t M) {
  constexpr std::int64_t kShortRow = 512;
  if (K <= kShortRow) {
    constexpr std::int64_t kRowsPerBlock = kThreads / 32;
    const auto grid = static_cast<unsigned>((M + kRowsPerBlock - 1) / kRowsPerBlock);
    launch_overlapping(context, rms_norm_warp_kernel, dim3(grid), dim3(kThreads), 0, out, x, dtype,
                       weight, K, eps, M);
  } else {
    const auto kernel = dtype == Dtype::kBf16   ? rms_norm_block_kernel<Dtype::kBf16>
                        : dtype == Dtype::kFp16 ? rms_norm_block_kernel<Dtype::kFp16>
                                                : rms_norm_block_kernel<Dtype::kFp32>;
    launch_overlapping(context, kernel, dim3(static_cast<unsigned>(M)), dim3(kLanes), 0, out, x,
                       weight, K, eps);
  }
}

void rope(Context& context, float* x, std::int64_t heads, std::int64_t head_dim,
          const float* cosines, const float* sines, const std::int32_t* position, std::int64_t M) {
  const std::int64_t half = head_dim / 2, count = M * heads * half;
  rope_kernel<<<grid_for(context, count), kThreads, 0, context.stream>>>(x, heads, half, cosines,
                                                                         sines, position, count);
  BW_CUDA_LAUNCHED("rope");
}

void store_kv(Context& context, const KvPages& cache, const float* k, const float* v,
              const StepShape& step) {
  const std::int64_t count = step.rows * cache.width;
  store_kv_kernel<<<grid_for(context, count), kThreads, 0, context.stream>>>(cache, k, v, step,
                                                                             count);
  BW_CUDA_LAUNCHED("store_kv");
}

void swiglu(Context& context, float* out, const float* gate, const float* up, std::int64_t count) {
  swiglu_kernel<<<grid_for(context, count), kThreads, 0, context.stream>>>(out, gate, up, count);
  BW_CUDA_LAUNCHED("swiglu");
}

void add(Context& context, float* out, const float* x, const float* y, std::int64_t count) {
  add_kernel<<<grid_for(context, count), kThreads, 0, context.stream>>>(out, x, y, count);
  BW_CUDA_LAUNCHED("add");
}

void gather_rows(Context& context, float* out, const float* x, std::int64_t width,
                 const std::int32_t* index, std::int64_t count) {
  const std::int64_t elements = count * width;
  gather_rows_kernel<<<grid_for(context, elements), kThreads, 0, context.stream>>>(out, x, width,
                                                                                   index, elements);
  BW_CUDA_LAUNCHED("gather_rows");
}

void flag_non_finite(Context& context, cudaStream_t stream, std::uint32_t* flag, const float* x,
                     std::int64_t count) {
  flag_non_finite_kernel<<<grid_for(context, count), kThreads, 0, stream>>>(flag, x, count);
  BW_CUDA_LAUNCHED("flag_non_finite");
}

void find_non_finite(Context& context, std::uint64_t* out, const float* x, std::int64_t count) {
  const unsigned blocks = grid_for(context, count);
  Scratch<std::uint64_t> least(context, blocks);
  non_finite_blocks_kernel<<<blocks, kThreads, 0, context.stream>>>(least.get(), x, count);
  BW_CUDA_LAUNCHED("find_non_finite");
  non_finite_kernel<<<1, kThreads, 0, context.stream>>>(out, least.get(), blocks);
  BW_CUDA_LAUNCHED("find_non_finite");
}

}  // namespace bitwitness::cuda
