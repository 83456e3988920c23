// Causal grouped-query attention in key blocks anchored at position 0 (contract.h section 7).
//
// A thread block takes one row and kHeads query heads that share a key-value head. Per block of
// keys: eight lanes per key, one for each chain of the dot product; then maxima and exponentials;
// then one thread per output dimension walks the keys, ascending. With few rows and a long context,
// key blocks go to different thread blocks and a second kernel merges their results, ascending: the
// same operations on the same values.
#include <algorithm>

#include "kernels/cuda/attention.cuh"

namespace bitwitness::cuda {
namespace {

using contract::add32;
using contract::attention_merge;
using contract::attention_merged;
using contract::AttentionMerge;
using contract::fma32;
using contract::kAttentionBlock;
using contract::kChains;
using contract::kGroup;
using contract::max32;
using contract::mul32;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kKeysPerWarp = 32 / kChains;

struct Arguments {
  const float* q;       // [M, heads, head_dim]
  const float* keys;    // [slots, capacity, kv_heads, head_dim]
  const float* values;  // the same
  const std::int32_t* slot;
  const std::int32_t* position;
  std::int64_t heads, kv_heads, capacity;
  int head_dim;
  float scale;
};

// What one thread block works on.
struct Place {
  std::int64_t head;  // m * heads + first query head: index of a row of head_dim in q and out
  std::int64_t last;  // position of the row
  const float* keys;  // of its slot and key-value head, position 0
  const float* values;
  std::int64_t stride;  // from one position to the next
};

template <int kHeads>
__device__ __forceinline__ Place place_of(const Arguments& a, std::int64_t unit) {
  const std::int64_t units_per_row = a.heads / kHeads;
  const std::int64_t m = unit / units_per_row, head = unit % units_per_row * kHeads;
  const std::int64_t kv_head = head / (a.heads / a.kv_heads);
  const std::int64_t stride = a.kv_heads * a.head_dim;
  const std::int64_t at = a.slot[m] * a.capacity * stride + kv_head * a.head_dim;
  return {m * a.heads + head, a.position[m], a.keys + at, a.values + at, stride};
}

// Shared memory: p[kAttentionBlock, kHeads], block_max[4], q[kHeads, head_dim], out[kHeads,
// head_dim].
template <int kHeads>
struct Workspace {
  float* p;
  float* block_max;
  float* q;
  float* out;
  __device__ Workspace(float4* shared, int head_dim)
      : p(reinterpret_cast<float*>(shared)),
        block_max(p + kAttentionBlock * kHeads),
        q(block_max + 4),
        out(q + kHeads * head_dim) {}
  static std::size_t bytes(int head_dim) {
    return static_cast<std::size_t>(kAttentionBlock * kHeads + 4 + 2 * kHeads * head_dim) *
           sizeof(float);
  }
};

template <int kHeads>
__device__ __forceinline__ void load_queries(const Arguments& a, const Place& place,
                                             const Workspace<kHeads>& work) {
  for (int i = static_cast<int>(threadIdx.x); i < kHeads * a.head_dim; i += kThreads) {
    work.q[i] = a.q[place.head * a.head_dim + i];
  }
  __syncthreads();
}

// Leaves p[j, h] = exp(score - maximum) of keys begin + j, j < count, and the maxima. Barrier at
// the end.
template <int kHeads, bool kVector>
__device__ __forceinline__ void probabilities(const Arguments& a, const Place& place,
                                              const Workspace<kHeads>& work, std::int64_t begin,
                                              int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int chain = lane % kChains, sub = lane / kChains;
#pragma unroll
  for (int first = 0; first < kAttentionBlock; first += kWarps * kKeysPerWarp) {
    const int j = first + warp * kKeysPerWarp + sub;
    float sum[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sum[h] = 0.0f;
    if (j < count) {
      const float* const key = place.keys + (begin + j) * place.stride;
      for (int group = chain * kGroup; group < a.head_dim; group += kChains * kGroup) {
        if constexpr (kVector) {
          const float4* const from = reinterpret_cast<const float4*>(key + group);
          const float4 low = from[0], high = from[1];
          const float k[kGroup] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            const float4* const q =
                reinterpret_cast<const float4*>(work.q + h * a.head_dim + group);
            const float4 q_low = q[0], q_high = q[1];
            const float x[kGroup] = {q_low.x,  q_low.y,  q_low.z,  q_low.w,
                                     q_high.x, q_high.y, q_high.z, q_high.w};
#pragma unroll
            for (int i = 0; i < kGroup; ++i) sum[h] = fma32(x[i], k[i], sum[h]);
          }
        } else {
          const int stop = group + kGroup < a.head_dim ? group + kGroup : a.head_dim;
          for (int i = group; i < stop; ++i) {
            const float k = key[i];
#pragma unroll
            for (int h = 0; h < kHeads; ++h) sum[h] = fma32(work.q[h * a.head_dim + i], k, sum[h]);
          }
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float t = __shfl_sync(0xffffffffu, sum[h], sub * kChains);
#pragma unroll
      for (int c = 1; c < kChains; ++c) {
        t = add32(t, __shfl_sync(0xffffffffu, sum[h], sub * kChains + c));
      }
      if (chain == 0 && j < count) work.p[j * kHeads + h] = mul32(t, a.scale);
    }
  }
  __syncthreads();
  static_assert(kAttentionBlock == 64 && kHeads <= 4, "two keys per lane; four maxima");
#pragma unroll
  for (int h = warp; h < kHeads; h += kWarps) {
    const int second = lane + 32;
    const float score0 = work.p[(lane < count ? lane : 0) * kHeads + h];
    const float score1 = work.p[(second < count ? second : 0) * kHeads + h];
    float maximum = max32(score0, score1);
#pragma unroll
    for (int distance = 16; distance >= 1; distance /= 2) {
      maximum = max32(maximum, __shfl_xor_sync(0xffffffffu, maximum, distance));
    }
    __syncwarp();  // every lane has its scores
    if (lane < count) work.p[lane * kHeads + h] = contract::attention_probability(score0, maximum);
    if (second < count)
      work.p[second * kHeads + h] = contract::attention_probability(score1, maximum);
    if (lane == 0) work.block_max[h] = maximum;
  }
  __syncthreads();
}

// Dimension i of the block's weighted sum of values, and the sums of its weights.
template <int kHeads>
__device__ __forceinline__ void weigh_values(const Place& place, const Workspace<kHeads>& work,
                                             std::int64_t begin, int count, int i,
                                             float (&accumulator)[kHeads], float (&sum)[kHeads]) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) accumulator[h] = sum[h] = 0.0f;
  const float* value = place.values + begin * place.stride + i;
#pragma unroll 8
  for (int j = 0; j < count; ++j) {
    const float v = value[j * place.stride];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float p = work.p[j * kHeads + h];
      accumulator[h] = fma32(p, v, accumulator[h]);
      sum[h] = add32(sum[h], p);
    }
  }
}

__device__ __forceinline__ int keys_in_block(std::int64_t begin, std::int64_t last) {
  return static_cast<int>(last - begin + 1 < kAttentionBlock ? last - begin + 1 : kAttentionBlock);
}

// One thread block per (row, kHeads heads); the longest rows, which come last, first.
template <int kHeads, bool kVector>
__global__ void __launch_bounds__(kThreads) attention_kernel(float* __restrict__ out, Arguments a) {
  extern __shared__ float4 shared_vectors[];
  const Workspace<kHeads> work(shared_vectors, a.head_dim);
  const Place place = place_of<kHeads>(a, std::int64_t{gridDim.x} - 1 - blockIdx.x);
  load_queries(a, place, work);
  float running_max[kHeads], running_sum[kHeads];
  for (std::int64_t begin = 0; begin <= place.last; begin += kAttentionBlock) {
    const int count = keys_in_block(begin, place.last);
    probabilities<kHeads, kVector>(a, place, work, begin, count);
    AttentionMerge merge[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float block_max = work.block_max[h];
      merge[h] = attention_merge(begin == 0 ? block_max : running_max[h], block_max);
      running_max[h] = merge[h].maximum;
    }
    float accumulator[kHeads], sum[kHeads];
    for (int i = static_cast<int>(threadIdx.x); i < a.head_dim; i += kThreads) {
      weigh_values<kHeads>(place, work, begin, count, i, accumulator, sum);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float& running = work.out[h * a.head_dim + i];  // of this thread alone
        running = begin == 0 ? accumulator[h] : attention_merged(merge[h], running, accumulator[h]);
      }
    }
    if (static_cast<int>(threadIdx.x) < a.head_dim) {  // those threads have the block's sums
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        running_sum[h] = begin == 0 ? sum[h] : attention_merged(merge[h], running_sum[h], sum[h]);
      }
    }
    __syncthreads();
  }
  for (int i = static_cast<int>(threadIdx.x); i < a.head_dim; i += kThreads) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      out[(place.head + h) * a.head_dim + i] =
          contract::div32(work.out[h * a.head_dim + i], running_sum[h]);
    }
  }
}

// What a key block leaves behind: partial[head, block] = accumulators [head_dim], sum, maximum.
constexpr int kPartialExtra = 2;

template <int kHeads, bool kVector>
__global__ void __launch_bounds__(kThreads)
    attention_block_kernel(float* __restrict__ partial, Arguments a) {
  extern __shared__ float4 shared_vectors[];
  const Workspace<kHeads> work(shared_vectors, a.head_dim);
  const Place place = place_of<kHeads>(a, blockIdx.x);
  const std::int64_t begin = std::int64_t{blockIdx.y} * kAttentionBlock;
  if (begin > place.last) return;
  load_queries(a, place, work);
  const int count = keys_in_block(begin, place.last);
  probabilities<kHeads, kVector>(a, place, work, begin, count);
  float accumulator[kHeads], sum[kHeads];
  for (int i = static_cast<int>(threadIdx.x); i < a.head_dim; i += kThreads) {
    weigh_values<kHeads>(place, work, begin, count, i, accumulator, sum);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float* const to =
          partial + ((place.head + h) * gridDim.y + blockIdx.y) * (a.head_dim + kPartialExtra);
      to[i] = accumulator[h];
      if (i == 0) {
        to[a.head_dim] = sum[h];
        to[a.head_dim + 1] = work.block_max[h];
      }
    }
  }
}

// One thread block per (row, head).
__global__ void __launch_bounds__(kThreads)
    attention_merge_kernel(float* __restrict__ out, const float* __restrict__ partial,
                           const std::int32_t* __restrict__ position, std::int64_t heads,
                           int head_dim, int blocks) {
  const std::int64_t last = position[blockIdx.x / heads];
  const int present = static_cast<int>(last / kAttentionBlock) + 1;
  const float* const from =
      partial + std::int64_t{blockIdx.x} * blocks * (head_dim + kPartialExtra);
  for (int i = static_cast<int>(threadIdx.x); i < head_dim; i += kThreads) {
    float running = from[i], running_sum = from[head_dim], running_max = from[head_dim + 1];
    for (int b = 1; b < present; ++b) {
      const float* const block = from + static_cast<std::int64_t>(b) * (head_dim + kPartialExtra);
      const AttentionMerge merge = attention_merge(running_max, block[head_dim + 1]);
      running = attention_merged(merge, running, block[i]);
      running_sum = attention_merged(merge, running_sum, block[head_dim]);
      running_max = merge.maximum;
    }
    out[std::int64_t{blockIdx.x} * head_dim + i] = contract::div32(running, running_sum);
  }
}

template <int kHeads, bool kVector>
void launch(Context& context, float* out, const Arguments& a, const AttentionShape& shape) {
  const std::int64_t units = shape.rows * (shape.heads / kHeads);
  const std::int64_t blocks = shape.last / kAttentionBlock + 1;
  const std::size_t shared_bytes = Workspace<kHeads>::bytes(a.head_dim);
  const std::int64_t partial_floats =
      shape.rows * shape.heads * blocks * (a.head_dim + kPartialExtra);
  constexpr std::int64_t kMostPartialFloats = std::int64_t{1} << 26;  // 256 MiB
  const bool split = blocks > 1 && blocks <= 65535 && units < 4 * context.multiprocessors &&
                     partial_floats <= kMostPartialFloats;
  if (!split) {
    attention_kernel<kHeads, kVector>
        <<<static_cast<unsigned>(units), kThreads, shared_bytes, context.stream>>>(out, a);
    BW_CUDA_LAUNCHED("attention");
    return;
  }
  Scratch<float> partial(context, static_cast<std::size_t>(partial_floats));
  const dim3 grid(static_cast<unsigned>(units), static_cast<unsigned>(blocks));
  attention_block_kernel<kHeads, kVector>
      <<<grid, kThreads, shared_bytes, context.stream>>>(partial.get(), a);
  BW_CUDA_LAUNCHED("attention (key blocks)");
  attention_merge_kernel<<<static_cast<unsigned>(shape.rows * shape.heads), kThreads, 0,
                           context.stream>>>(out, partial.get(), a.position, shape.heads,
                                             a.head_dim, static_cast<int>(blocks));
  BW_CUDA_LAUNCHED("attention (merge)");
}

template <bool kVector>
void launch(Context& context, float* out, const Arguments& a, const AttentionShape& shape) {
  const std::int64_t sharing = shape.heads / shape.kv_heads;
  if (sharing % 4 == 0) return launch<4, kVector>(context, out, a, shape);
  if (sharing % 2 == 0) return launch<2, kVector>(context, out, a, shape);
  launch<1, kVector>(context, out, a, shape);
}

}  // namespace

void attention(Context& context, float* out, const float* q, const float* keys, const float* values,
               const AttentionShape& shape, const std::int32_t* slot,
               const std::int32_t* position) {
  static_assert(contract::kMaxHeadDim <= contract::kSegment, "a score is one segment");
  const Arguments a{q,
                    keys,
                    values,
                    slot,
                    position,
                    shape.heads,
                    shape.kv_heads,
                    shape.capacity,
                    shape.head_dim,
                    contract::attention_scale(shape.head_dim)};
  const bool vectors =
      shape.head_dim % kGroup == 0 && reinterpret_cast<std::uintptr_t>(keys) % 16 == 0;
  if (vectors) return launch<true>(context, out, a, shape);
  launch<false>(context, out, a, shape);
}

// ---- Attention over the paged cache: the choice between the families, and what fits everything.

namespace {

constexpr int kGeneralThreads = 128;

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
