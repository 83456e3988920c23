// Attention of many rows of one slot over the paged cache.
//
// A thread block takes 64 query rows: some consecutive positions, each with the query heads that
// share a key-value head. It walks the pages of 64 positions, ascending. Scores: a thread owns 8
// rows x 4 keys and takes one chain of the dot product after the other, so that a chain is one set
// of accumulators. Weights pass through shared memory; a thread then owns 8 rows x head_dim / 16
// elements of the page's accumulators and of the running state. Two blocks to a multiprocessor hide
// each other's barriers and copies.
#include <algorithm>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/attention.cuh"

namespace bitwitness::cuda {
namespace {

using contract::add32;
using contract::attention_merge;
using contract::AttentionMerge;
using contract::fma32;
using contract::kChains;
using contract::kGroup;
using contract::max32;
using contract::mul32;

constexpr int kPage = contract::kAttentionBlock;
constexpr int kRows = 64;      // query rows of a tile: positions x heads
constexpr int kThreads = 128;  // 8 groups of rows x 16 groups of keys or elements
constexpr int kRowsPerThread = kRows / 8;
constexpr int kKeysPerThread = kPage / 16;
constexpr int kMostHeads = 8;
constexpr int kWeightStride = kPage + 8;

struct Arguments {
  PagedAttention attention;
  HeadGroups groups;
  int tile = 1;  // positions of a tile
};

template <int kDim>
struct Layout {                             // of shared memory, in floats
  static constexpr int kStride = kDim + 4;  // of q and keys: eight rows meet no bank twice
  static constexpr int kQuery = kRows * kStride;
  static constexpr int kKeys = kPage * (kStride > kWeightStride ? kStride : kWeightStride);
  static constexpr int kValues = kPage * kDim;
  static constexpr int kFactors = 2 * kRows;
  static constexpr int kSums = kRows;
  static constexpr int kBytes = (kQuery + kKeys + kValues + kFactors + kSums) * 4;
};

__device__ __forceinline__ void copy16(float* to, const float* from) {
#if __CUDA_ARCH__ >= 800
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
#else
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
#endif
}
// Rows [0, count) of kDim floats, `width` apart in memory and kStride in shared memory.
template <int kDim, int kStride>
__device__ __forceinline__ void copy_rows(float* to, const float* from, std::int64_t width,
                                          int count) {
  constexpr int kVectors = kDim / 4, kRowsAtOnce = kThreads / kVectors;
  const int column = static_cast<int>(threadIdx.x) % kVectors * 4;
#pragma unroll 4
  for (int j = static_cast<int>(threadIdx.x) / kVectors; j < count; j += kRowsAtOnce) {
    copy16(to + j * kStride + column, from + j * width + column);
  }
  commit_copies();
}

__device__ __forceinline__ float component(const float4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 2) prefill_kernel(const Arguments a) {
  using Shape = Layout<kDim>;
  constexpr int kStride = Shape::kStride;
  constexpr int kVectors = kDim / 64;  // 16-byte vectors of elements of a thread
  extern __shared__ float4 shared_vectors[];
  float* const query = reinterpret_cast<float*>(shared_vectors);
  float* const keys = query + Shape::kQuery;
  float* const weights = keys;  // once the scores are in registers
  float* const values = keys + Shape::kKeys;
  float2* const factors = reinterpret_cast<float2*>(values + Shape::kValues);
  float* const sums = values + Shape::kValues + Shape::kFactors;

  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int column = lane % 8 + 8 * (warp % 2);     // of 16
  const int row_group = lane / 8 + 4 * (warp / 2);  // of 8: rows row_group + 8 i

  let_next_start();
  wait_for_previous();

  const StepShape& step = a.attention.step;
  const int kv = static_cast<int>(blockIdx.x) / a.groups.groups;
  const int group = static_cast<int>(blockIdx.x) % a.groups.groups;
  const int first_head = kv * a.groups.sharing + group * a.groups.group_heads;
  const int group_heads = a.groups.group_heads;
  const int heads = min(group_heads, (kv + 1) * a.groups.sharing - first_head);
  // The last tiles have the most keys: they go first.
  const std::int64_t tile_begin = std::int64_t{gridDim.y - 1 - blockIdx.y} * a.tile;
  const std::int64_t tile_end = tile_begin + a.tile < step.rows ? tile_begin + a.tile : step.rows;

  // Row r of the tile is position r / group_heads, head r % group_heads; those that do not exist
  // repeat another one.
  for (int at = thread; at < kRows * (kDim / 4); at += kThreads) {
    const int r = at / (kDim / 4), i = at % (kDim / 4) * 4;
    std::int64_t m = tile_begin + r / group_heads;
    m = m < tile_end ? m : tile_end - 1;
    const int head = first_head + min(r % group_heads, heads - 1);
    copy16(query + r * kStride + i, a.attention.q + (m * a.attention.heads + head) * kDim + i);
  }
  commit_copies();

  for (std::int64_t m = tile_begin; m < tile_end;) {
    const std::int64_t run_begin = m;
    for (++m; m < tile_end && step.slot[m] == step.slot[m - 1] &&
              step.position[m] == step.position[m - 1] + 1;) {
      ++m;
    }
    const std::int64_t run_end = m;
    if (!is_tile_run(run_end - run_begin, a.tile)) continue;
    // Positions of the run, as if it filled the tile.
    const int base = step.position[run_begin] - static_cast<int>(run_begin - tile_begin);
    const int lowest = step.position[run_begin];
    const int highest = base + static_cast<int>(run_end - 1 - tile_begin);
    const int pages = highest / kPage + 1;
    const float* const* const page_table =
        a.attention.cache.pages + step.slot[run_begin] * a.attention.cache.pages_per_slot;
    const std::int64_t width = a.attention.cache.width;
    const std::int64_t key_offset = a.attention.cache.key_offset + kv * kDim;
    const std::int64_t value_offset = a.attention.cache.value_offset + kv * kDim;

    float running[kRowsPerThread][4 * kVectors];
    float running_max = 0.0f, running_sum = 0.0f;  // of row thread / 2; of row thread
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
      for (int n = 0; n < 4 * kVectors; ++n) running[i][n] = 0.0f;
    }

    __syncthreads();  // the run before is done with shared memory
    copy_rows<kDim, kStride>(keys, page_table[0] + key_offset, width, min(kPage, highest + 1));
    for (int b = 0; b < pages; ++b) {
      const int begin = b * kPage;
      const int most = min(kPage, highest - begin + 1);  // keys of the page that any row sees
      copy_rows<kDim, kDim>(values, page_table[b] + value_offset, width, most);
      wait_for_copies<1>();
      __syncthreads();

      float score[kRowsPerThread][kKeysPerThread];
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kKeysPerThread; ++j) score[i][j] = -0.0f;  // -0 + x = x
      }
#pragma unroll 2
      for (int chain = 0; chain < kChains; ++chain) {
        float sum[kRowsPerThread][kKeysPerThread];
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
          for (int j = 0; j < kKeysPerThread; ++j) sum[i][j] = 0.0f;
        }
        const float* const q_chain = query + row_group * kStride + chain * kGroup;
        const float* const k_chain = keys + column * kStride + chain * kGroup;
#pragma unroll
        for (int n = 0; n < 2 * (kDim / 64); ++n) {
          const int at = n / 2 * (kChains * kGroup) + n % 2 * 4;
          float4 key[kKeysPerThread];
#pragma unroll
          for (int j = 0; j < kKeysPerThread; ++j) {
            key[j] = *reinterpret_cast<const float4*>(k_chain + 16 * j * kStride + at);
          }
#pragma unroll
          for (int i = 0; i < kRowsPerThread; ++i) {
            const float4 x = *reinterpret_cast<const float4*>(q_chain + 8 * i * kStride + at);
#pragma unroll
            for (int j = 0; j < kKeysPerThread; ++j) {
              sum[i][j] = fma32(x.x, key[j].x, sum[i][j]);
              sum[i][j] = fma32(x.y, key[j].y, sum[i][j]);
              sum[i][j] = fma32(x.z, key[j].z, sum[i][j]);
              sum[i][j] = fma32(x.w, key[j].w, sum[i][j]);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
          for (int j = 0; j < kKeysPerThread; ++j) score[i][j] = add32(score[i][j], sum[i][j]);
        }
      }
      __syncthreads();  // the keys are used
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kKeysPerThread; ++j) {
          weights[(row_group + 8 * i) * kWeightStride + column + 16 * j] =
              mul32(score[i][j], a.attention.scale);
        }
      }
      __syncthreads();

      // Two threads a row, four keys in turn: maximum, weights, and what they do to the state.
      {
        const int row = thread / 2, half = thread % 2;
        const int count = base + row / group_heads - begin + 1;  // keys that the row sees
        float4* const from = reinterpret_cast<float4*>(weights + row * kWeightStride + 4 * half);
        float p[kPage / 2];
        float maximum = contract::float_of(0xff800000u);  // minus infinity
#pragma unroll
        for (int i = 0; i < kPage / 8; ++i) {
          const float4 s = from[2 * i];
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const float value = component(s, n);
            p[4 * i + n] = value;
            if (8 * i + 4 * half + n < count) maximum = max32(maximum, value);
          }
        }
        maximum = max32(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
#pragma unroll
        for (int i = 0; i < kPage / 8; ++i) {
          float w[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            w[n] = 8 * i + 4 * half + n < count
                       ? contract::attention_probability(p[4 * i + n], maximum)
                       : 0.0f;
          }
          from[2 * i] = make_float4(w[0], w[1], w[2], w[3]);
        }
        if (count > 0) {
          const AttentionMerge merge = attention_merge(b == 0 ? maximum : running_max, maximum);
          running_max = merge.maximum;
          if (half == 0) factors[row] = make_float2(merge.running, merge.block);
        }
      }
      wait_for_copies<0>();
      __syncthreads();

      if (thread < kRows) {  // sums ascending; absent weights are +0, and no sum is -0
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kPage; j += 4) {
          const float4 p = *reinterpret_cast<const float4*>(weights + thread * kWeightStride + j);
          sum = add32(add32(add32(add32(sum, p.x), p.y), p.z), p.w);
        }
        const float2 f = factors[thread];
        const float merged = fma32(running_sum, f.x, mul32(sum, f.y));
        if (base + thread / group_heads >= begin) running_sum = b == 0 ? sum : merged;
      }

      float o[kRowsPerThread][4 * kVectors];
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
        for (int n = 0; n < 4 * kVectors; ++n) o[i][n] = 0.0f;
      }
      const float* const row_weights = weights + row_group * kWeightStride;
      // Keys that every row of the run sees, by fours.
      const int common = max(0, min(kPage, lowest - begin + 1)) / 4 * 4;
#pragma unroll 1
      for (int j = 0; j < common; j += 4) {
        float4 p[kRowsPerThread];
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
          p[i] = *reinterpret_cast<const float4*>(row_weights + 8 * i * kWeightStride + j);
        }
#pragma unroll
        for (int s = 0; s < 4; ++s) {
#pragma unroll
          for (int n = 0; n < kVectors; ++n) {
            const float4 v =
                *reinterpret_cast<const float4*>(values + (j + s) * kDim + 64 * n + 4 * column);
#pragma unroll
            for (int i = 0; i < kRowsPerThread; ++i) {
              const float w = component(p[i], s);
              o[i][4 * n] = fma32(w, v.x, o[i][4 * n]);
              o[i][4 * n + 1] = fma32(w, v.y, o[i][4 * n + 1]);
              o[i][4 * n + 2] = fma32(w, v.z, o[i][4 * n + 2]);
              o[i][4 * n + 3] = fma32(w, v.w, o[i][4 * n + 3]);
            }
          }
        }
      }
      // The diagonal: a row takes the keys up to its own position, by selection.
#pragma unroll 1
      for (int j = common; j < most; ++j) {
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
          const float4 v =
              *reinterpret_cast<const float4*>(values + j * kDim + 64 * n + 4 * column);
#pragma unroll
          for (int i = 0; i < kRowsPerThread; ++i) {
            const float w = row_weights[8 * i * kWeightStride + j];
            const bool seen = begin + j <= base + (row_group + 8 * i) / group_heads;
            o[i][4 * n] = seen ? fma32(w, v.x, o[i][4 * n]) : o[i][4 * n];
            o[i][4 * n + 1] = seen ? fma32(w, v.y, o[i][4 * n + 1]) : o[i][4 * n + 1];
            o[i][4 * n + 2] = seen ? fma32(w, v.z, o[i][4 * n + 2]) : o[i][4 * n + 2];
            o[i][4 * n + 3] = seen ? fma32(w, v.w, o[i][4 * n + 3]) : o[i][4 * n + 3];
          }
        }
      }
      if (b == 0) {
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
          for (int n = 0; n < 4 * kVectors; ++n) running[i][n] = o[i][n];
        }
      } else {
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
          const int row = row_group + 8 * i;
          const float2 f = factors[row];
          const bool any = common > 0 || base + row / group_heads >= begin;  // a key of this page
#pragma unroll
          for (int n = 0; n < 4 * kVectors; ++n) {
            const float merged = fma32(running[i][n], f.x, mul32(o[i][n], f.y));
            running[i][n] = any ? merged : running[i][n];
          }
        }
      }
      __syncthreads();  // weights and values are used
      if (b + 1 < pages) {
        copy_rows<kDim, kStride>(keys, page_table[b + 1] + key_offset, width,
                                 min(kPage, highest - begin - kPage + 1));
      }
    }

    if (thread < kRows) sums[thread] = running_sum;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = row_group + 8 * i;
      const std::int64_t at = tile_begin + row / group_heads;
      const int h = row % group_heads;
      if (at < run_begin || at >= run_end || h >= heads) continue;
      const float sum = sums[row];
      float* const to = a.attention.out + (at * a.attention.heads + first_head + h) * kDim;
#pragma unroll
      for (int n = 0; n < kVectors; ++n) {
        *reinterpret_cast<float4*>(to + 64 * n + 4 * column) = make_float4(
            contract::div32(running[i][4 * n], sum), contract::div32(running[i][4 * n + 1], sum),
            contract::div32(running[i][4 * n + 2], sum),
            contract::div32(running[i][4 * n + 3], sum));
      }
    }
  }
}

template <int kDim>
void launch(Context& context, const Arguments& a) {
  const void* const kernel = reinterpret_cast<const void*>(&prefill_kernel<kDim>);
  context.blocks_per_multiprocessor(kernel, kThreads, Layout<kDim>::kBytes);
  const std::int64_t tiles = (a.attention.step.rows + a.tile - 1) / a.tile;
  launch_overlapping(context, prefill_kernel<kDim>,
                     dim3(static_cast<unsigned>(a.attention.kv_heads * a.groups.groups),
                          static_cast<unsigned>(tiles)),
                     dim3(kThreads), Layout<kDim>::kBytes, a);
}

int tile_positions(const HeadGroups& groups) {
  return kRows / groups.group_heads;
}

}  // namespace

bool attention_prefill_fits(const Context& context, const PagedAttention& attention) {
  const KvPages& cache = attention.cache;
  const HeadGroups groups(attention.heads, attention.kv_heads, kMostHeads);
  const bool dimension = attention.head_dim == 64 || attention.head_dim == 128;
  const std::size_t shared_bytes =
      attention.head_dim == 64 ? Layout<64>::kBytes : Layout<128>::kBytes;
  return dimension && shared_bytes <= context.shared_limit && cache.key_offset % 4 == 0 &&
         cache.value_offset % 4 == 0 && cache.width % 4 == 0 &&
         reinterpret_cast<std::uintptr_t>(attention.q) % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(attention.out) % 16 == 0 &&
         attention.step.rows / tile_positions(groups) < 65535 &&
         attention_decode_fits(context, attention);
}

void attention_prefill(Context& context, const PagedAttention& attention) {
  Arguments a{attention, HeadGroups(attention.heads, attention.kv_heads, kMostHeads)};
  a.tile = tile_positions(a.groups);
  if (attention.head_dim == 64) {
    launch<64>(context, a);
  } else {
    launch<128>(context, a);
  }
  attention_rows_left(context, attention, a.tile);
}

}  // namespace bitwitness::cuda
