// What stands between the q, k, v products and attention: RMS norm per head, RoPE, and the rows'
// way into the paged cache, in one pass.
#include "kernels/cuda/context.h"
#include "kernels/cuda/launch.cuh"

namespace bitwitness::cuda {
namespace {

using contract::add32;
using contract::fma32;
using contract::kLanes;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The scale of the RMS norm of x[K]. Lane t of a warp is lanes t, t + 32, ... of contract.h.
__device__ __forceinline__ float head_scale(const float* x, int K, float eps, int lane) {
  constexpr int kPerThread = kLanes / 32;
  float sum[kPerThread];
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    sum[j] = 0.0f;
    for (int k = lane + 32 * j; k < K; k += kLanes) sum[j] = fma32(x[k], x[k], sum[j]);
  }
#pragma unroll
  for (int width = kPerThread / 2; width >= 1; width /= 2) {
#pragma unroll
    for (int j = 0; j < width; ++j) sum[j] = add32(sum[j], sum[j + width]);
  }
  float total = sum[0];
#pragma unroll
  for (int width = 16; width >= 1; width /= 2) {
    total = add32(total, __shfl_down_sync(0xffffffffu, total, width));
  }
  return contract::rms_scale(__shfl_sync(0xffffffffu, total, 0), K, eps);
}

struct Unit {  // a row's head of q, k or v
  std::int64_t m, position;
  int head;  // of q, then of k, then of v
  bool is_query, is_value;
  float* cached;  // this head's row in the cache, or null
};

__device__ __forceinline__ Unit unit_of(const RopeStore& a, const KvPages& cache,
                                        const StepShape& step, std::int64_t index) {
  const int heads = static_cast<int>(a.heads), kv_heads = static_cast<int>(a.kv_heads);
  const int per_row = heads + kv_heads + (cache.pages != nullptr ? kv_heads : 0);
  Unit unit{};
  unit.m = index / per_row;
  unit.head = static_cast<int>(index - unit.m * per_row);
  unit.position = step.position[unit.m];
  unit.is_query = unit.head < heads;
  unit.is_value = unit.head >= heads + kv_heads;
  if (!unit.is_query && cache.pages != nullptr) {
    float* const page = cache.pages[step.slot[unit.m] * cache.pages_per_slot +
                                    unit.position / contract::kAttentionBlock];
    const int kv = unit.is_value ? unit.head - heads - kv_heads : unit.head - heads;
    unit.cached = page + (unit.is_value ? cache.value_offset : cache.key_offset) +
                  unit.position % contract::kAttentionBlock * cache.width + kv * a.head_dim;
  }
  return unit;
}

// head_dim / 8 threads a unit, each with four pairs. kDim <= kLanes: an element is a lane.
template <int kDim>
__global__ void __launch_bounds__(kThreads)
    rope_store_vector_kernel(const RopeStore a, const KvPages cache, const StepShape step,
                             std::int64_t units) {
  constexpr int kGroup = kDim / 8, kHalf = kDim / 2;
  static_assert(kDim <= kLanes && kGroup <= 32);
  let_next_start();
  wait_for_previous();
  const std::int64_t index = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kGroup;
  const bool exists = index < units;
  const int i = static_cast<int>(threadIdx.x) % kGroup * 4;
  const Unit unit = unit_of(a, cache, step, exists ? index : units - 1);
  const std::int64_t heads = a.heads, kv_heads = a.kv_heads;
  const float* const from = unit.is_query ? a.q + (unit.m * heads + unit.head) * kDim
                            : unit.is_value
                                ? a.v + (unit.m * kv_heads + unit.head - heads - kv_heads) * kDim
                                : a.k + (unit.m * kv_heads + unit.head - heads) * kDim;
  float4 first = *reinterpret_cast<const float4*>(from + i);
  float4 second = *reinterpret_cast<const float4*>(from + i + kHalf);
  const float4 cosine = *reinterpret_cast<const float4*>(a.cosines + unit.position * kHalf + i);
  const float4 sine = *reinterpret_cast<const float4*>(a.sines + unit.position * kHalf + i);
  if (a.q_norm != nullptr || a.k_norm != nullptr) {  // all threads: the sums pass through shuffles
    float sum[4];
    sum[0] = add32(fma32(first.x, first.x, 0.0f), fma32(second.x, second.x, 0.0f));
    sum[1] = add32(fma32(first.y, first.y, 0.0f), fma32(second.y, second.y, 0.0f));
    sum[2] = add32(fma32(first.z, first.z, 0.0f), fma32(second.z, second.z, 0.0f));
    sum[3] = add32(fma32(first.w, first.w, 0.0f), fma32(second.w, second.w, 0.0f));
#pragma unroll
    for (int width = kGroup / 2; width >= 1; width /= 2) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        sum[n] = add32(sum[n], __shfl_down_sync(0xffffffffu, sum[n], width, kGroup));
      }
    }
    const float total =
        __shfl_sync(0xffffffffu, add32(add32(sum[0], sum[2]), add32(sum[1], sum[3])), 0, kGroup);
    const std::byte* const weight = unit.is_query ? a.q_norm : unit.is_value ? nullptr : a.k_norm;
    if (weight != nullptr) {
      const Dtype dtype = unit.is_query ? a.q_norm_dtype : a.k_norm_dtype;
      const float scale = contract::rms_scale(total, kDim, a.eps);
      const auto norm = [&](float& x, int at) {
        x = contract::rms_norm_element(x, scale, contract::load_weight(dtype, weight, at));
      };
      norm(first.x, i), norm(first.y, i + 1), norm(first.z, i + 2), norm(first.w, i + 3);
      norm(second.x, i + kHalf), norm(second.y, i + kHalf + 1);
      norm(second.z, i + kHalf + 2), norm(second.w, i + kHalf + 3);
    }
  }
  if (!exists) return;
  float4 low = first, high = second;
  if (!unit.is_value) {
    low = make_float4(contract::rope_first(first.x, second.x, cosine.x, sine.x),
                      contract::rope_first(first.y, second.y, cosine.y, sine.y),
                      contract::rope_first(first.z, second.z, cosine.z, sine.z),
                      contract::rope_first(first.w, second.w, cosine.w, sine.w));
    high = make_float4(contract::rope_second(first.x, second.x, cosine.x, sine.x),
                       contract::rope_second(first.y, second.y, cosine.y, sine.y),
                       contract::rope_second(first.z, second.z, cosine.z, sine.z),
                       contract::rope_second(first.w, second.w, cosine.w, sine.w));
    float* const to = const_cast<float*>(from);  // q or k, which are in place
    *reinterpret_cast<float4*>(to + i) = low;
    *reinterpret_cast<float4*>(to + i + kHalf) = high;
  }
  if (unit.cached != nullptr) {
    *reinterpret_cast<float4*>(unit.cached + i) = low;
    *reinterpret_cast<float4*>(unit.cached + i + kHalf) = high;
  }
}

// Any head_dim and alignment: a warp per unit.
__global__ void __launch_bounds__(kThreads)
    rope_store_kernel(const RopeStore a, const KvPages cache, const StepShape step,
                      std::int64_t units) {
  let_next_start();
  wait_for_previous();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head_dim = static_cast<int>(a.head_dim), half = head_dim / 2;
  const std::int64_t index = std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (index >= units) return;  // whole warps
  const Unit unit = unit_of(a, cache, step, index);
  const std::int64_t m = unit.m, position = unit.position, heads = a.heads, kv_heads = a.kv_heads;
  if (unit.is_value) {
    const float* const v = a.v + (m * kv_heads + unit.head - heads - kv_heads) * head_dim;
    for (int i = lane; i < head_dim; i += 32) unit.cached[i] = v[i];
    return;
  }

  float* const x = unit.is_query ? a.q + (m * heads + unit.head) * head_dim
                                 : a.k + (m * kv_heads + unit.head - heads) * head_dim;
  const std::byte* const weight = unit.is_query ? a.q_norm : a.k_norm;
  const Dtype dtype = unit.is_query ? a.q_norm_dtype : a.k_norm_dtype;
  const float scale = weight != nullptr ? head_scale(x, head_dim, a.eps, lane) : 1.0f;
  for (int i = lane; i < half; i += 32) {  // a lane alone touches a pair
    float first = x[i], second = x[i + half];
    if (weight != nullptr) {
      first = contract::rms_norm_element(first, scale, contract::load_weight(dtype, weight, i));
      second =
          contract::rms_norm_element(second, scale, contract::load_weight(dtype, weight, i + half));
    }
    const float cosine = a.cosines[position * half + i], sine = a.sines[position * half + i];
    const float low = contract::rope_first(first, second, cosine, sine);
    const float high = contract::rope_second(first, second, cosine, sine);
    x[i] = low;
    x[i + half] = high;
    if (unit.cached != nullptr) {
      unit.cached[i] = low;
      unit.cached[i + half] = high;
    }
  }
}

}  // namespace

void rope_store(Context& context, const RopeStore& arguments, const KvPages& cache,
                const StepShape& step) {
  const std::int64_t units =
      step.rows * (arguments.heads + (cache.pages != nullptr ? 2 : 1) * arguments.kv_heads);
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  const bool vectors = aligned(arguments.q) && aligned(arguments.k) && aligned(arguments.v) &&
                       aligned(arguments.cosines) && aligned(arguments.sines) &&
                       cache.key_offset % 4 == 0 && cache.value_offset % 4 == 0 &&
                       cache.width % 4 == 0;
  const auto launch = [&](auto kernel, std::int64_t threads) {
    launch_overlapping(context, kernel,
                       dim3(static_cast<unsigned>((units * threads + kThreads - 1) / kThreads)),
                       dim3(kThreads), 0, arguments, cache, step, units);
  };
  if (vectors && arguments.head_dim == 64) return launch(rope_store_vector_kernel<64>, 8);
  if (vectors && arguments.head_dim == 128) return launch(rope_store_vector_kernel<128>, 16);
  if (vectors && arguments.head_dim == 256) return launch(rope_store_vector_kernel<256>, 32);
  launch(rope_store_kernel, 32);
}

}  // namespace bitwitness::cuda
