// Attention over the paged cache: which family of kernels takes a step, and the one that takes
// every shape. Causal grouped-query attention in key blocks anchored at position 0 (contract.h
// section 7).
#include "kernels/cuda/attention.cuh"

namespace bitwitness::cuda {
namespace {

using contract::add32;
using contract::attention_merge;
using contract::attention_merged;
using contract::AttentionMerge;
using contract::fma32;
using contract::kAttentionBlock;
using contract::max32;

constexpr int kGeneralThreads = 128;

__device__ __forceinline__ int keys_in_block(std::int64_t begin, std::int64_t last) {
  return static_cast<int>(last - begin + 1 < kAttentionBlock ? last - begin + 1 : kAttentionBlock);
}

// Fits every shape and alignment: a thread block per row and head.
__global__ void __launch_bounds__(kGeneralThreads)
    attention_general_kernel(const PagedAttention a) {
  extern __shared__ float shared[];
  float* const q = shared;                // [head_dim]
  float* const running = q + a.head_dim;  // [head_dim]
  __shared__ float p[kAttentionBlock];
  __shared__ float block_max;
  let_next_start();
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t unit = std::int64_t{gridDim.x} - 1 - blockIdx.x;  // the longest rows first
  const std::int64_t m = unit / a.heads;
  const int head = static_cast<int>(unit % a.heads);
  const std::int64_t column = std::int64_t{head / (a.heads / a.kv_heads)} * a.head_dim;
  const std::int64_t last = a.step.position[m];
  const float* const* const pages = a.cache.pages + a.step.slot[m] * a.cache.pages_per_slot;
  for (int i = thread; i < a.head_dim; i += kGeneralThreads) q[i] = a.q[unit * a.head_dim + i];
  __syncthreads();
  float running_max = 0.0f, running_sum = 0.0f;
  for (std::int64_t begin = 0; begin <= last; begin += kAttentionBlock) {
    const int count = keys_in_block(begin, last);
    const float* const page = pages[begin / kAttentionBlock];
    if (thread < count) {
      p[thread] = contract::attention_score(
          q, page + a.cache.key_offset + thread * a.cache.width + column, a.head_dim, a.scale);
    }
    __syncthreads();
    if (thread == 0) {
      float maximum = p[0];
      for (int j = 1; j < count; ++j) maximum = max32(maximum, p[j]);
      block_max = maximum;
    }
    __syncthreads();
    if (thread < count) p[thread] = contract::attention_probability(p[thread], block_max);
    __syncthreads();
    float sum = 0.0f;
    for (int j = 0; j < count; ++j) sum = add32(sum, p[j]);
    const AttentionMerge merge = attention_merge(begin == 0 ? block_max : running_max, block_max);
    running_max = merge.maximum;
    running_sum = begin == 0 ? sum : attention_merged(merge, running_sum, sum);
    const float* const values = page + a.cache.value_offset + column;
    for (int i = thread; i < a.head_dim; i += kGeneralThreads) {
      float accumulator = 0.0f;
      for (int j = 0; j < count; ++j) {
        accumulator = fma32(p[j], values[j * a.cache.width + i], accumulator);
      }
      running[i] = begin == 0 ? accumulator : attention_merged(merge, running[i], accumulator);
    }
    __syncthreads();
  }
  for (int i = thread; i < a.head_dim; i += kGeneralThreads) {
    a.out[unit * a.head_dim + i] = contract::div32(running[i], running_sum);
  }
}

void attention_general(Context& context, const PagedAttention& a) {
  const std::size_t shared_bytes = 2 * static_cast<std::size_t>(a.head_dim) * sizeof(float);
  launch_overlapping(context, attention_general_kernel,
                     dim3(static_cast<unsigned>(a.step.rows * a.heads)), dim3(kGeneralThreads),
                     shared_bytes, a);
}

PagedAttention paged_attention(float* out, const float* q, const KvPages& cache, std::int64_t heads,
                               std::int64_t kv_heads, int head_dim, const StepShape& step) {
  return {out,
          q,
          cache,
          step,
          static_cast<int>(heads),
          static_cast<int>(kv_heads),
          head_dim,
          contract::attention_scale(head_dim)};
}

// Steps with fewer rows are not worth tiles.
constexpr std::int64_t kLeastPrefillRows = 8;

}  // namespace

void attention(Context& context, float* out, const float* q, const KvPages& cache,
               std::int64_t heads, std::int64_t kv_heads, int head_dim, const StepShape& step) {
  const PagedAttention a = paged_attention(out, q, cache, heads, kv_heads, head_dim, step);
  if (!step.distinct_slots && step.rows >= kLeastPrefillRows &&
      attention_prefill_fits(context, a)) {
    return attention_prefill(context, a);
  }
  if (attention_decode_fits(context, a)) return attention_decode(context, a);
  attention_general(context, a);
}

bool attention_fused(Context& context, float* out, const RopeStore& rope, const KvPages& cache,
                     const StepShape& step) {
  const PagedAttention a = paged_attention(out, rope.q, cache, rope.heads, rope.kv_heads,
                                           static_cast<int>(rope.head_dim), step);
  if (cache.pages == nullptr || !attention_fused_fits(context, a)) return false;
  attention_decode_fused(context, a, rope);
  return true;
}

}  // namespace bitwitness::cuda
