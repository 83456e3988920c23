// Attention of single rows over the paged cache.
//
// A team of head_dim threads takes one page of 64 positions at a time for up to four query heads
// that share a key-value head. All of the page is in flight in registers: a thread holds one chain
// of some keys (eight lanes a key) and one column of the values, and asks for the next page's as
// soon as it has used them. Chains meet in shared memory, a warp per head makes the probabilities,
// then every thread walks its column.
//
// A page's (maximum, sum, accumulators) depend on nothing else, so the pages of a row go to several
// teams and are merged ascending: within a thread-block cluster through its shared memory, or
// through device memory by a second kernel. With rows enough, one team walks a row's pages.
#include <algorithm>

#include "kernels/cuda/attention.cuh"

namespace bitwitness::cuda {
namespace {

using contract::add32;
using contract::attention_merge;
using contract::attention_merged;
using contract::AttentionMerge;
using contract::fma32;
using contract::kChains;
using contract::max32;
using contract::mul32;

constexpr int kPage = contract::kAttentionBlock;
constexpr int kMostHeads = 4;

enum class Mode {
  kWhole,     // one team a row; the result goes to `out`
  kPartials,  // pages go to `partials` in device memory, for merge_kernel
  kCluster,   // pages are merged in the cluster's shared memory
};

struct Arguments {
  PagedAttention attention;
  HeadGroups groups;
  int workers = 1;            // teams of a row and head group
  int teams = 1;              // of a thread block
  int local_pages = 1;        // most pages of a team, kCluster
  float* partials = nullptr;  // [units, pages, partial_floats], kPartials
  int pages = 0;              // upper bound of a row's pages
  int tile = 0;               // of attention_prefill, for rows_left_kernel
  // The step's rows have different slots: what the cache holds of earlier positions is not this
  // step's work and is read before the kernels in front have ended; the newest position apart.
  bool early = false;
  bool fused = false;  // `rope` is done here; early
  RopeStore rope = {};
};

// A page's result: accumulators [heads, head_dim], sums [heads], maxima [heads].
template <int kDim, int kHeads>
constexpr int partial_floats = (kHeads * (kDim + 2) + 3) / 4 * 4;

template <int kDim, int kHeads>
struct Layout {  // of shared memory, in floats
  static constexpr int kChainStride = kChains + 1;
  static constexpr int kQuery = kHeads * kDim;
  static constexpr int kNewKey = kDim;
  static constexpr int kShared = kQuery + kNewKey;
  // Per team.
  static constexpr int kChainSums = kHeads * kPage * kChainStride;
  static constexpr int kWeights = kPage * kHeads;  // [key, head]
  static constexpr int kColumns = kHeads * kPage;  // the same, [head, key]
  static constexpr int kFactors = 4 * kMostHeads;  // per head: running, block, sum
  static constexpr int kTeam = kChainSums + kWeights + kColumns + kFactors;
};

template <int kThreads>
__device__ __forceinline__ void team_barrier(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kThreads) : "memory");
}

// Element t + 32 e of a head is x[e] of lane t. RMS norm (contract.h section 4: lanes beyond
// head_dim are +0), if there is a weight, then RoPE.
template <int kDim>
__device__ __forceinline__ void norm_and_rotate(float (&x)[kDim / 32], const std::byte* weight,
                                                Dtype dtype, float eps, const float* cosines,
                                                const float* sines, std::int64_t position) {
  constexpr int kElements = kDim / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (weight != nullptr) {
    float sum[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) sum[e] = fma32(x[e], x[e], 0.0f);
#pragma unroll
    for (int width = kElements / 2; width >= 1; width /= 2) {
#pragma unroll
      for (int e = 0; e < width; ++e) sum[e] = add32(sum[e], sum[e + width]);
    }
    float total = sum[0];
#pragma unroll
    for (int width = 16; width >= 1; width /= 2) {
      total = add32(total, __shfl_down_sync(0xffffffffu, total, width));
    }
    total = __shfl_sync(0xffffffffu, total, 0);
    const float scale = contract::rms_scale(total, kDim, eps);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      x[e] = contract::rms_norm_element(x[e], scale,
                                        contract::load_weight(dtype, weight, lane + 32 * e));
    }
  }
#pragma unroll
  for (int e = 0; e < kElements / 2; ++e) {
    const std::int64_t at = position * (kDim / 2) + lane + 32 * e;
    const float cosine = cosines[at], sine = sines[at];
    const float first = x[e], second = x[e + kElements / 2];
    x[e] = contract::rope_first(first, second, cosine, sine);
    x[e + kElements / 2] = contract::rope_second(first, second, cosine, sine);
  }
}

// ---- Clusters (sm_90 and later)

__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n\t"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#endif
}

// Where the pages' results of one row and head group lie. Page b is taken by worker b % workers,
// which is team worker / blocks of block worker % blocks.
template <int kDim, int kHeads, Mode kMode>
struct PartialReader {
  static constexpr int kFloats = partial_floats<kDim, kHeads>;
  static constexpr int kSums = kHeads * kDim, kMaxima = kSums + kHeads;
  const float* base;  // kPartials: of the unit; kCluster: of this thread block, in shared memory
  int workers, blocks, local_pages;

  // Where page b's result lies, for the loads.
  __device__ __forceinline__ unsigned place_of(int b) const {
    unsigned place = static_cast<unsigned>(b) * static_cast<unsigned>(kFloats);
#if __CUDA_ARCH__ >= 900
    if constexpr (kMode == Mode::kCluster) {
      int worker = b, local = 0, block = b, team = 0;
      if (b >= blocks) {
        if (b >= workers) worker = b % workers, local = b / workers;
        block = worker % blocks, team = worker / blocks;
      }
      const unsigned here = static_cast<unsigned>(
          __cvta_generic_to_shared(base + (team * local_pages + local) * kFloats));
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(here), "r"(block));
    }
#endif
    return place;
  }
  __device__ __forceinline__ float load(unsigned place, int i) const {
    if constexpr (kMode == Mode::kPartials) return base[place + static_cast<unsigned>(i)];
    float value = 0.0f;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.f32 %0, [%1];"
                 : "=f"(value)
                 : "r"(place + 4 * static_cast<unsigned>(i)));
#endif
    return value;
  }
  __device__ __forceinline__ float4 load_vector(unsigned place, int i) const {
    if constexpr (kMode == Mode::kPartials) {
      return *reinterpret_cast<const float4*>(base + place + static_cast<unsigned>(i));
    }
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(place + 4 * static_cast<unsigned>(i)));
#endif
    return value;
  }
};

// How a page joins the running state, for one head.
struct alignas(16) Joining {
  float running, block;  // factors
  float sum;             // the page's sum times `block`; of page 0, its sum
  unsigned place;
};

constexpr int kFewPages = 8;            // merged without shared memory
constexpr int kMergeFloats = 32 * 256;  // of products in shared memory

// Merges at most kFewPages results; see merge_pages.
template <int kDim, int kHeads, Mode kMode>
__device__ __forceinline__ void merge_few(const PartialReader<kDim, kHeads, kMode>& partial,
                                          int pages, float* out, int heads, int first, int count) {
  using Reader = PartialReader<kDim, kHeads, kMode>;
  for (int e = first + static_cast<int>(threadIdx.x); e < first + count;
       e += static_cast<int>(blockDim.x)) {
    const int h = e / kDim;
    float maximum[kFewPages], sum[kFewPages], o[kFewPages];
#pragma unroll
    for (int b = 0; b < kFewPages; ++b) {
      if (b < pages) {
        const unsigned place = partial.place_of(b);
        maximum[b] = partial.load(place, Reader::kMaxima + h);
        sum[b] = partial.load(place, Reader::kSums + h);
        o[b] = partial.load(place, e);
      }
    }
    float running = o[0], running_sum = sum[0], running_max = maximum[0];
#pragma unroll
    for (int b = 1; b < kFewPages; ++b) {
      if (b < pages) {
        const AttentionMerge merge = attention_merge(running_max, maximum[b]);
        running = attention_merged(merge, running, o[b]);
        running_sum = attention_merged(merge, running_sum, sum[b]);
        running_max = merge.maximum;
      }
    }
    if (h < heads) out[e] = contract::div32(running, running_sum);
  }
}

// Merges `pages` results, ascending, for elements [first, first + count) of the heads of a unit;
// count is a multiple of 4 and at most kHeads times the threads, all of which call it. `scratch`
// has merge_scratch_floats(). `out` is the row's first head of the group; heads from `heads` on do
// not exist.
template <int kDim, int kHeads, Mode kMode>
__device__ __forceinline__ void merge_pages(const PartialReader<kDim, kHeads, kMode>& partial,
                                            int pages, float* scratch, float* out, int heads,
                                            int first, int count) {
  using Reader = PartialReader<kDim, kHeads, kMode>;
  if (pages <= kFewPages) return merge_few(partial, pages, out, heads, first, count);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int threads = static_cast<int>(blockDim.x);
  const int first_head = first / kDim, end_head = (first + count - 1) / kDim + 1;
  Joining* const table = reinterpret_cast<Joining*>(scratch);
  float* const products = scratch + 4 * (end_head - first_head) * pages;
  for (int h = first_head; h < end_head; ++h) {
    for (int b = thread; b < pages; b += threads) {
      const unsigned place = partial.place_of(b);
      table[(h - first_head) * pages + b] = {partial.load(place, Reader::kMaxima + h), 0.0f,
                                             partial.load(place, Reader::kSums + h), place};
    }
  }
  __syncthreads();
  // The running maximum is a prefix maximum: every page's factors at once. A lane takes
  // consecutive pages.
  for (int h = first_head + warp; h < end_head; h += threads / 32) {
    Joining* const joining = table + (h - first_head) * pages;
    const int each = (pages + 31) / 32;
    const int begin = lane * each, end = begin + each < pages ? begin + each : pages;
    float before = contract::float_of(0xff800000u);  // minus infinity
    for (int b = begin; b < end; ++b) before = max32(before, joining[b].running);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, before, distance);
      if (lane >= distance) before = max32(before, other);
    }
    before = __shfl_up_sync(0xffffffffu, before, 1);
    for (int b = begin; b < end; ++b) {
      const float block_max = joining[b].running;
      const AttentionMerge merge = attention_merge(b == 0 ? block_max : before, block_max);
      before = merge.maximum;
      joining[b].running = merge.running;
      joining[b].block = merge.block;
      if (b > 0) joining[b].sum = mul32(joining[b].sum, merge.block);
    }
  }
  __syncthreads();
  // What joins is multiplied by all threads; then a thread per element adds.
  float running[kHeads], running_sum[kHeads];
  const int quads = count / 4, chunk = kMergeFloats / count;
  for (int begin = 0; begin < pages; begin += chunk) {
    const int present = pages - begin < chunk ? pages - begin : chunk;
#pragma unroll 8
    for (int i = thread; i < present * quads; i += threads) {
      const int b = i / quads, e = first + (i - b * quads) * 4;
      const Joining& join = table[(e / kDim - first_head) * pages + begin + b];
      float4 o = partial.load_vector(join.place, e);
      if (begin + b > 0) {
        o.x = mul32(o.x, join.block), o.y = mul32(o.y, join.block);
        o.z = mul32(o.z, join.block), o.w = mul32(o.w, join.block);
      }
      *reinterpret_cast<float4*>(products + 4 * i) = o;
    }
    __syncthreads();
#pragma unroll
    for (int own = 0; own < kHeads; ++own) {
      const int e = own * threads + thread;
      if (e >= count) break;
      const Joining* const joining = table + ((first + e) / kDim - first_head) * pages + begin;
      int b = 0;
      if (begin == 0) running[own] = products[e], running_sum[own] = joining[0].sum, b = 1;
#pragma unroll 8
      for (; b < present; ++b) {
        running[own] = fma32(running[own], joining[b].running, products[b * count + e]);
        running_sum[own] = fma32(running_sum[own], joining[b].running, joining[b].sum);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int own = 0; own < kHeads; ++own) {
    const int e = own * threads + thread;
    if (e < count && (first + e) / kDim < heads) {
      out[first + e] = contract::div32(running[own], running_sum[own]);
    }
  }
}

// For `count` elements of a unit, which touch at most `heads` heads.
std::size_t merge_scratch_floats(int pages, int heads, int count) {
  const int chunk = std::min(pages, kMergeFloats / count);
  return static_cast<std::size_t>(4 * heads) * static_cast<std::size_t>(pages) +
         static_cast<std::size_t>(chunk) * static_cast<std::size_t>(count);
}

// ---- The pages of one team

template <int kDim, int kHeads, Mode kMode>
struct Team {
  static constexpr int kWarps = kDim / 32;
  static constexpr int kKeys = kPage / (4 * kWarps);  // of a thread: eight lanes a key
  static constexpr int kVectors = kDim / 32;          // 16-byte vectors of a chain
  static constexpr int kOwnHeads = (kHeads + kWarps - 1) / kWarps;
  using Shape = Layout<kDim, kHeads>;

  const Arguments& a;
  const float4* query;   // shared: [head, vector, chain]
  const float* new_key;  // shared: [kDim]
  float* chain_sums;
  float* weights;
  float* columns;
  float* factors;
  int team, thread, lane, warp, chain, sub;

  std::int64_t m, last;
  int pages, kv;
  const float* const* page_table;

  float4 k[kKeys][kVectors];
  float v[kPage];
  float o[kHeads];        // of the page, element `thread` of every head
  float running[kHeads];  // kWhole
  float running_max[kOwnHeads], running_sum[kOwnHeads];  // of heads warp, warp + kWarps, ...
  float page_sum[kOwnHeads];

  __device__ __forceinline__ int keys_in(int b) const {
    const std::int64_t left = last + 1 - std::int64_t{b} * kPage;
    return static_cast<int>(left < kPage ? left : kPage);
  }

  // Rows of the page that are read from the cache together: not the newest, where it is apart.
  __device__ __forceinline__ int cached_in(int b) const {
    return keys_in(b) - (a.early && b == pages - 1 ? 1 : 0);
  }

  __device__ __forceinline__ void load_keys(const float* page, int b) {
    const int count = cached_in(b);
    const float* const keys =
        page + a.attention.cache.key_offset + kv * kDim + chain * contract::kGroup;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int j = (i * kWarps + warp) * 4 + sub;
      if (j < count) {
        const float* const key = keys + j * a.attention.cache.width;
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
          k[i][n] = *reinterpret_cast<const float4*>(key + n / 2 * 64 + n % 2 * 4);
        }
      }
    }
  }

  // A value that does not exist is -0 and its weight +0: their product changes nothing.
  __device__ __forceinline__ void load_values(const float* page, int b) {
    const int count = cached_in(b);
    const float* const values = page + a.attention.cache.value_offset + kv * kDim + thread;
    if (count == kPage) {
#pragma unroll
      for (int j = 0; j < kPage; ++j) v[j] = values[j * a.attention.cache.width];
    } else {
#pragma unroll
      for (int j = 0; j < kPage; ++j)
        v[j] = j < count ? values[j * a.attention.cache.width] : -0.0f;
    }
  }

  // The newest key and value, where they are apart.
  __device__ __forceinline__ void take_new(float value) {
    const int newest = static_cast<int>(last % kPage);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if ((i * kWarps + warp) * 4 + sub == newest) {
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
          k[i][n] = *reinterpret_cast<const float4*>(new_key + chain * contract::kGroup +
                                                     n / 2 * 64 + n % 2 * 4);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kPage; ++j) v[j] = j == newest ? value : v[j];
  }

  // Leaves the keys' chains in shared memory; k is free afterwards.
  __device__ __forceinline__ void score_chains() {
    float sum[kKeys][kHeads];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) sum[i][h] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float4 x = query[(h * kVectors + n) * kChains + chain];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          const float4& key = k[i][n];
          sum[i][h] = fma32(x.x, key.x, sum[i][h]);
          sum[i][h] = fma32(x.y, key.y, sum[i][h]);
          sum[i][h] = fma32(x.z, key.z, sum[i][h]);
          sum[i][h] = fma32(x.w, key.w, sum[i][h]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int j = (i * kWarps + warp) * 4 + sub;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        chain_sums[(h * kPage + j) * Shape::kChainStride + chain] = sum[i][h];
      }
    }
  }

  __device__ __forceinline__ float score(int h, int j) const {
    const float* const chains = chain_sums + (h * kPage + j) * Shape::kChainStride;
    float sum = chains[0];
#pragma unroll
    for (int c = 1; c < kChains; ++c) sum = add32(sum, chains[c]);
    return mul32(sum, a.attention.scale);
  }

  // A warp per head: weights, and what the page's maximum does to the running state.
  __device__ __forceinline__ void probabilities(int count, bool first) {
#pragma unroll
    for (int own = 0; own < kOwnHeads; ++own) {
      const int h = own * kWarps + warp;
      if (h >= kHeads) break;  // whole warps
      const int second = lane + 32;
      const float score0 = score(h, lane < count ? lane : 0);
      const float score1 = score(h, second < count ? second : 0);
      float maximum = max32(score0, score1);
#pragma unroll
      for (int distance = 16; distance >= 1; distance /= 2) {
        maximum = max32(maximum, __shfl_xor_sync(0xffffffffu, maximum, distance));
      }
      const float p0 = lane < count ? contract::attention_probability(score0, maximum) : 0.0f;
      const float p1 = second < count ? contract::attention_probability(score1, maximum) : 0.0f;
      weights[lane * kHeads + h] = p0;
      weights[second * kHeads + h] = p1;
      columns[h * kPage + lane] = p0;
      columns[h * kPage + second] = p1;
      if constexpr (kMode == Mode::kWhole) {
        const AttentionMerge merge = attention_merge(first ? maximum : running_max[own], maximum);
        running_max[own] = merge.maximum;
        if (lane == 0) {
          factors[4 * h] = merge.running;
          factors[4 * h + 1] = merge.block;
        }
      } else {
        running_max[own] = maximum;
      }
    }
  }

  __device__ __forceinline__ void weigh_key(int j, float value) {
    float p[kHeads];
    if constexpr (kHeads == 4) {
      const float4 w = *reinterpret_cast<const float4*>(weights + 4 * j);
      p[0] = w.x, p[1] = w.y, p[2] = w.z, p[3] = w.w;
    } else if constexpr (kHeads == 2) {
      const float2 w = *reinterpret_cast<const float2*>(weights + 2 * j);
      p[0] = w.x, p[1] = w.y;
    } else {
      p[0] = weights[j];
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) o[h] = fma32(p[h], value, o[h]);
  }

  // Four more weights of each of the warp's heads. Absent ones are +0, and no sum is -0.
  __device__ __forceinline__ void sum_weights(int j) {
#pragma unroll
    for (int own = 0; own < kOwnHeads; ++own) {
      const int h = own * kWarps + warp < kHeads ? own * kWarps + warp : 0;
      const float4 p = *reinterpret_cast<const float4*>(columns + h * kPage + j);
      page_sum[own] = add32(add32(add32(add32(page_sum[own], p.x), p.y), p.z), p.w);
    }
  }

  // The page's accumulators and sums.
  __device__ __forceinline__ void weigh_values() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) o[h] = 0.0f;
#pragma unroll
    for (int own = 0; own < kOwnHeads; ++own) page_sum[own] = 0.0f;
#pragma unroll
    for (int j = 0; j < kPage; ++j) {
      if (j % 4 == 0) sum_weights(j);
      weigh_key(j, v[j]);
    }
  }
};

constexpr int kMostThreads = 256;

// Row m's attention for key-value head and head group `within`. Block `rank` of those that share
// it.
template <int kDim, int kHeads, Mode kMode>
__device__ __forceinline__ void decode_unit(const Arguments& a, std::int64_t m, int within,
                                            int rank, float4* shared_vectors) {
  using Shape = Layout<kDim, kHeads>;
  float* const shared = reinterpret_cast<float*>(shared_vectors);
  const int thread = static_cast<int>(threadIdx.x);

  Team<kDim, kHeads, kMode> t{a};
  t.query = shared_vectors;
  float* const new_key = shared + Shape::kQuery;
  t.new_key = new_key;
  t.team = thread / kDim, t.thread = thread % kDim;
  float* const team_shared = shared + Shape::kShared + t.team * Shape::kTeam;
  t.chain_sums = team_shared;
  t.weights = t.chain_sums + Shape::kChainSums;
  t.columns = t.weights + Shape::kWeights;
  t.factors = t.columns + Shape::kColumns;
  t.lane = thread % 32, t.warp = t.thread / 32;
  t.chain = t.lane % kChains, t.sub = t.lane / kChains;

  t.m = m;
  t.kv = within / a.groups.groups;
  const int group = within % a.groups.groups;
  const int first_head = t.kv * a.groups.sharing + group * a.groups.group_heads;
  const int heads = min(a.groups.group_heads, (t.kv + 1) * a.groups.sharing - first_head);

  const std::int64_t slot = a.attention.step.slot[t.m];
  t.last = a.attention.step.position[t.m];
  t.pages = static_cast<int>(t.last / kPage) + 1;
  t.page_table = a.attention.cache.pages + slot * a.attention.cache.pages_per_slot;
  const int blocks = a.workers / a.teams;
  const int worker = t.team * blocks + rank;
  if (kMode != Mode::kCluster && rank >= t.pages) {
    wait_for_previous();
    return;
  }

  // The first page is on its way before the query is made ready.
  const float* page = nullptr;
  if (worker < t.pages) {
    page = t.page_table[worker];
    t.load_keys(page, worker);
    t.load_values(page, worker);
  }
  const int newest_worker = (t.pages - 1) % a.workers;
  const bool owns_newest = a.early && newest_worker % blocks == rank;
  const std::int64_t newest = (t.m * a.attention.kv_heads + t.kv) * kDim;  // in k and v
  float* new_key_row = nullptr;                                            // in the cache
  float* new_value_row = nullptr;
  if (owns_newest) {
    const std::int64_t at = t.last % kPage * a.attention.cache.width + t.kv * kDim;
    float* const newest_page = const_cast<float*>(t.page_table[t.pages - 1]);
    new_key_row = newest_page + a.attention.cache.key_offset + at;
    new_value_row = newest_page + a.attention.cache.value_offset + at;
  }
  if (a.early) wait_for_previous();
  float new_value = 0.0f;
  if (owns_newest && newest_worker / blocks == t.team) {
    new_value = a.fused ? a.rope.v[newest + t.thread] : new_value_row[t.thread];
  }
  const std::int64_t row_head = t.m * a.attention.heads + first_head;
  if (a.early) {
    constexpr int kElements = kDim / 32;
    const int warps = a.teams * (kDim / 32);
    for (int task = thread / 32; task < kHeads + (owns_newest ? 1 : 0); task += warps) {
      const bool is_key = task == kHeads;
      const float* const from = !is_key   ? a.attention.q + (row_head + min(task, heads - 1)) * kDim
                                : a.fused ? a.rope.k + newest
                                          : new_key_row;
      float x[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e) x[e] = from[t.lane + 32 * e];
      if (a.fused) {
        norm_and_rotate<kDim>(x, is_key ? a.rope.k_norm : a.rope.q_norm,
                              is_key ? a.rope.k_norm_dtype : a.rope.q_norm_dtype, a.rope.eps,
                              a.rope.cosines, a.rope.sines, t.last);
      }
      if (is_key) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          new_key[t.lane + 32 * e] = x[e];
          if (a.fused) a.rope.k[newest + t.lane + 32 * e] = new_key_row[t.lane + 32 * e] = x[e];
        }
      } else {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const int i = t.lane + 32 * e, n = i / 64 * 2 + i % 8 / 4;
          shared[((task * (kDim / 32) + n) * kChains + i / 8 % 8) * 4 + i % 4] = x[e];
        }
      }
    }
  } else {
    for (int at = thread; at < kHeads * kDim; at += a.teams * kDim) {
      const int h = at / kDim, i = at % kDim, n = i / 64 * 2 + i % 8 / 4;
      shared[((h * (kDim / 32) + n) * kChains + i / 8 % 8) * 4 + i % 4] =
          a.attention.q[(row_head + min(h, heads - 1)) * kDim + i];
    }
  }
  __syncthreads();

  const std::int64_t unit = m * a.attention.kv_heads * a.groups.groups + within;
  float* local_partial = nullptr;
  if constexpr (kMode == Mode::kCluster) {
    local_partial = shared + Shape::kShared + a.teams * Shape::kTeam;
  }
  bool first = true;
  for (int b = worker, local = 0; b < t.pages; b += a.workers, ++local) {
    const int next = b + a.workers;
    const float* next_page = next < t.pages ? t.page_table[next] : nullptr;
    if (a.early && b == t.pages - 1) {
      if (a.fused) new_value_row[t.thread] = new_value;
      t.take_new(new_value);
    }
    t.score_chains();
    if (next < t.pages) t.load_keys(next_page, next);
    team_barrier<kDim>(t.team);
    t.probabilities(t.keys_in(b), first);
    team_barrier<kDim>(t.team);
    t.weigh_values();
    if (next < t.pages) t.load_values(next_page, next);
    if constexpr (kMode == Mode::kWhole) {
#pragma unroll
      for (int own = 0; own < t.kOwnHeads; ++own) {
        const int h = own * t.kWarps + t.warp;
        if (h >= kHeads) break;
        const float sum = t.page_sum[own];
        t.running_sum[own] =
            first ? sum
                  : fma32(t.running_sum[own], t.factors[4 * h], mul32(sum, t.factors[4 * h + 1]));
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        t.running[h] =
            first ? t.o[h]
                  : fma32(t.running[h], t.factors[4 * h], mul32(t.o[h], t.factors[4 * h + 1]));
      }
    } else {
      constexpr int kFloats = partial_floats<kDim, kHeads>;
      float* const to = kMode == Mode::kCluster
                            ? local_partial + (t.team * a.local_pages + local) * kFloats
                            : a.partials + (unit * a.pages + b) * kFloats;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) to[h * kDim + t.thread] = t.o[h];
#pragma unroll
      for (int own = 0; own < t.kOwnHeads; ++own) {
        const int h = own * t.kWarps + t.warp;
        if (h >= kHeads) break;
        if (t.lane == 0) {
          to[kHeads * kDim + h] = t.page_sum[own];
          to[kHeads * kDim + kHeads + h] = t.running_max[own];
        }
      }
    }
    first = false;
  }

  float* const out = a.attention.out + row_head * kDim;
  if constexpr (kMode == Mode::kWhole) {
#pragma unroll
    for (int own = 0; own < t.kOwnHeads; ++own) {
      const int h = own * t.kWarps + t.warp;
      if (h < kHeads && t.lane == 0) t.factors[4 * h + 2] = t.running_sum[own];
    }
    team_barrier<kDim>(t.team);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < heads) {
        out[h * kDim + t.thread] = contract::div32(t.running[h], t.factors[4 * h + 2]);
      }
    }
  }
  if constexpr (kMode == Mode::kCluster) {
    cluster_barrier();
    const PartialReader<kDim, kHeads, kMode> reader{local_partial, a.workers, blocks,
                                                    a.local_pages};
    const int elements = kHeads * kDim / blocks;
    merge_pages<kDim, kHeads, kMode>(
        reader, t.pages, local_partial + a.teams * a.local_pages * partial_floats<kDim, kHeads>,
        out, heads, rank * elements, elements);
    cluster_barrier();  // nobody leaves while its shared memory is read
  }
}

template <int kDim, int kHeads, Mode kMode>
__global__ void __launch_bounds__(kMostThreads) decode_kernel(const Arguments a) {
  extern __shared__ float4 shared_vectors[];
  let_next_start();
  if (!a.early) wait_for_previous();
  const int blocks = a.workers / a.teams;
  const int units_per_row = a.attention.kv_heads * a.groups.groups;
  // Blocks side by side read side by side: the heads of one page, unless a cluster holds a head.
  const int units = static_cast<int>(gridDim.x) / blocks, block = static_cast<int>(blockIdx.x);
  const int unit = kMode == Mode::kCluster ? block / blocks : block % units;
  const int rank = kMode == Mode::kCluster ? block % blocks : block / units;
  decode_unit<kDim, kHeads, kMode>(a, unit / units_per_row, unit % units_per_row, rank,
                                   shared_vectors);
}

// The rows of a step that attention_prefill leaves, dealt to the blocks in turn; a team a block.
template <int kDim, int kHeads>
__global__ void __launch_bounds__(kDim) rows_left_kernel(const Arguments a) {
  using Shape = Layout<kDim, kHeads>;
  constexpr int kWarps = kDim / 32;
  extern __shared__ float4 shared_vectors[];
  int* const rows = reinterpret_cast<int*>(shared_vectors) + Shape::kShared + Shape::kTeam;
  unsigned* const starts = reinterpret_cast<unsigned*>(rows + kDim);  // a bit per row: a run begins
  int* const counts = reinterpret_cast<int*>(starts + kWarps);
  let_next_start();
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int units_per_row = a.attention.kv_heads * a.groups.groups;
  const StepShape& step = a.attention.step;
  const int chunk = kDim / a.tile * a.tile;  // rows looked at together: whole tiles
  std::int64_t unit = 0;                     // of the rows found so far
  for (std::int64_t begin = 0; begin < step.rows; begin += chunk) {
    const std::int64_t m = begin + thread;
    const int present = static_cast<int>(step.rows - begin < chunk ? step.rows - begin : chunk);
    const bool exists = thread < present;
    bool start = false;
    if (exists) {
      start = thread % a.tile == 0 || step.slot[m] != step.slot[m - 1] ||
              step.position[m] != step.position[m - 1] + 1;
    }
    const unsigned warp_starts = __ballot_sync(0xffffffffu, start);
    if (lane == 0) starts[warp] = warp_starts;
    __syncthreads();
    bool left = false;
    if (exists) {
      int w = warp;
      unsigned bits = starts[w] & (0xffffffffu >> (31 - lane));
      while (bits == 0) bits = starts[--w];  // row 0 of the chunk begins a run
      const int first = 32 * w + 31 - __clz(static_cast<int>(bits));
      w = warp;
      bits = lane < 31 ? starts[w] & (0xffffffffu << (lane + 1)) : 0;
      while (bits == 0 && w + 1 < kWarps) bits = starts[++w];
      const int end = bits == 0 ? present : 32 * w + __ffs(static_cast<int>(bits)) - 1;
      left = !is_tile_run(end - first, a.tile);
    }
    const unsigned mask = __ballot_sync(0xffffffffu, left);
    if (lane == 0) counts[warp] = __popc(mask);
    __syncthreads();
    int before = 0, found = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += counts[w];
      found += counts[w];
    }
    if (found == 0) continue;  // the whole block; `starts` and `counts` are written alternately
    if (left) rows[before + __popc(mask & ((1u << lane) - 1))] = thread;
    __syncthreads();
    for (int i = 0; i < found * units_per_row; ++i, ++unit) {
      if (unit % gridDim.x != blockIdx.x) continue;
      decode_unit<kDim, kHeads, Mode::kWhole>(a, begin + rows[i / units_per_row], i % units_per_row,
                                              0, shared_vectors);
      __syncthreads();
    }
  }
}

constexpr int kMergeElements = 64;  // of a thread block of merge_kernel
constexpr int kMergeThreads = 256;

template <int kDim, int kHeads>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const Arguments a) {
  extern __shared__ float4 shared_vectors[];
  let_next_start();
  wait_for_previous();
  constexpr int kSlices = kHeads * kDim / kMergeElements;
  const std::int64_t unit = blockIdx.x / kSlices;
  const int slice = static_cast<int>(blockIdx.x % kSlices);
  const int units_per_row = a.attention.kv_heads * a.groups.groups;
  const std::int64_t m = unit / units_per_row;
  const int within = static_cast<int>(unit % units_per_row);
  const int kv = within / a.groups.groups, group = within % a.groups.groups;
  const int first_head = kv * a.groups.sharing + group * a.groups.group_heads;
  const int heads = min(a.groups.group_heads, (kv + 1) * a.groups.sharing - first_head);
  const int pages = a.attention.step.position[m] / kPage + 1;
  const PartialReader<kDim, kHeads, Mode::kPartials> reader{
      a.partials + unit * a.pages * partial_floats<kDim, kHeads>, 1, 1, 1};
  merge_pages<kDim, kHeads, Mode::kPartials>(
      reader, pages, reinterpret_cast<float*>(shared_vectors),
      a.attention.out + (m * a.attention.heads + first_head) * kDim, heads, slice * kMergeElements,
      kMergeElements);
}

// ---- The choice of a way

struct Choice {
  Mode mode = Mode::kWhole;
  int blocks = 1;  // of a row and head group
  int teams = 1;   // of a thread block
};

template <int kDim, int kHeads>
std::size_t shared_floats(const Choice& choice, int pages) {
  using Shape = Layout<kDim, kHeads>;
  std::size_t floats = static_cast<std::size_t>(Shape::kShared + choice.teams * Shape::kTeam);
  if (choice.mode == Mode::kCluster) {
    const int workers = choice.blocks * choice.teams;
    const int local = (pages + workers - 1) / workers;
    const int heads_touched = std::max(1, kHeads / choice.blocks);
    floats += static_cast<std::size_t>(choice.teams * local) * partial_floats<kDim, kHeads> +
              merge_scratch_floats(pages, heads_touched, kHeads * kDim / choice.blocks);
  }
  return floats;
}

template <int kDim, int kHeads, Mode kMode>
cudaLaunchConfig_t decode_config(Context& context, const Arguments& a, const Choice& choice,
                                 cudaLaunchAttribute (&attributes)[3]) {
  const std::size_t shared_bytes = shared_floats<kDim, kHeads>(choice, a.pages) * sizeof(float);
  const int threads = choice.teams * kDim;
  const void* const kernel = reinterpret_cast<const void*>(&decode_kernel<kDim, kHeads, kMode>);
  context.blocks_per_multiprocessor(kernel, threads, shared_bytes);
  cudaLaunchConfig_t config{};
  const std::int64_t units = a.attention.step.rows * a.attention.kv_heads * a.groups.groups;
  config.gridDim = dim3(static_cast<unsigned>(units * choice.blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = context.stream;
  config.attrs = attributes;
  if (context.overlaps_launches) {
    auto& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (kMode == Mode::kCluster) {
    auto& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(choice.blocks);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    auto& policy = attributes[config.numAttrs++];
    policy.id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
    policy.val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicySpread;
    if (choice.blocks > 8) {
      BW_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    }
  }
  return config;
}

template <int kDim, int kHeads, Mode kMode>
void launch(Context& context, Arguments a, const Choice& choice) {
  a.teams = choice.teams;
  a.workers = choice.blocks * choice.teams;
  a.local_pages = (a.pages + a.workers - 1) / a.workers;
  cudaLaunchAttribute attributes[3]{};
  const cudaLaunchConfig_t config =
      decode_config<kDim, kHeads, kMode>(context, a, choice, attributes);
  BW_CUDA(cudaLaunchKernelEx(&config, decode_kernel<kDim, kHeads, kMode>,
                             static_cast<const Arguments>(a)));
}

template <int kDim, int kHeads>
void decode_with(Context& context, Arguments a, const Choice& choice) {
  switch (choice.mode) {
    case Mode::kWhole:
      return launch<kDim, kHeads, Mode::kWhole>(context, a, choice);
    case Mode::kCluster:
      return launch<kDim, kHeads, Mode::kCluster>(context, a, choice);
    case Mode::kPartials:
      break;
  }
  const std::int64_t units = a.attention.step.rows * a.attention.kv_heads * a.groups.groups;
  Scratch<float> partials(context,
                          static_cast<std::size_t>(units * a.pages) * partial_floats<kDim, kHeads>);
  a.partials = partials.get();
  launch<kDim, kHeads, Mode::kPartials>(context, a, choice);
  const std::size_t merge_bytes = merge_scratch_floats(a.pages, 1, kMergeElements) * sizeof(float);
  context.blocks_per_multiprocessor(reinterpret_cast<const void*>(&merge_kernel<kDim, kHeads>),
                                    kMergeThreads, merge_bytes);
  launch_overlapping(context, merge_kernel<kDim, kHeads>,
                     dim3(static_cast<unsigned>(units * (kHeads * kDim / kMergeElements))),
                     dim3(kMergeThreads), merge_bytes, a);
}

// How many clusters of this choice the device runs at once; 0: it takes none.
template <int kDim, int kHeads>
int clusters_at_once(Context& context, const Arguments& a, const Choice& choice) {
  cudaLaunchAttribute attributes[3]{};
  const cudaLaunchConfig_t config =
      decode_config<kDim, kHeads, Mode::kCluster>(context, a, choice, attributes);
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, decode_kernel<kDim, kHeads, Mode::kCluster>,
                                     &config) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return clusters;
}

// Two teams a multiprocessor keep the memory busy. As many workers a row and head group as that
// leaves, and as there are pages; in a cluster if the device runs all of them at once. Measured on
// an H200 (132 multiprocessors, head_dim 128, 8 key-value heads).
template <int kDim, int kHeads>
Choice choose(Context& context, const Arguments& a) {
  const std::int64_t units = a.attention.step.rows * a.attention.kv_heads * a.groups.groups;
  const std::int64_t teams_wanted = 2 * std::int64_t{context.multiprocessors};
  if (a.pages == 1 || 2 * units > teams_wanted) return {Mode::kWhole, 1, 1};
  constexpr int kMostTeams = kMostThreads / kDim, kMostBlocks = 16;
  if (context.capability >= 90) {
    int workers = kMostTeams * kMostBlocks;
    while (workers / 2 >= a.pages || workers * units > teams_wanted) workers /= 2;
    for (; workers >= 2; workers /= 2) {
      for (int blocks = std::min(workers, kMostBlocks); blocks >= 1; blocks /= 2) {
        const Choice choice{Mode::kCluster, blocks, workers / blocks};
        if (choice.teams > kMostTeams) break;
        if (shared_floats<kDim, kHeads>(choice, a.pages) * sizeof(float) > context.shared_limit) {
          break;
        }
        if (clusters_at_once<kDim, kHeads>(context, a, choice) < units) continue;
        // A second kernel costs less than half of the device idle for more than two rounds.
        if (4 * workers * units >= 3 * teams_wanted || a.pages <= 2 * workers) return choice;
        workers = 0;
        break;
      }
    }
  }
  if (merge_scratch_floats(a.pages, 1, kMergeElements) * sizeof(float) > context.shared_limit) {
    return {Mode::kWhole, 1, 1};
  }
  const std::int64_t most = std::max<std::int64_t>(1, teams_wanted / units);
  return {Mode::kPartials, static_cast<int>(std::min<std::int64_t>(most, a.pages)), 1};
}

template <int kDim>
void decode(Context& context, const Arguments& a) {
  switch (a.groups.group_heads) {
    case 1:
      return decode_with<kDim, 1>(context, a, choose<kDim, 1>(context, a));
    case 2:
      return decode_with<kDim, 2>(context, a, choose<kDim, 2>(context, a));
    default:
      return decode_with<kDim, 4>(context, a, choose<kDim, 4>(context, a));
  }
}

void decode(Context& context, const Arguments& a) {
  switch (a.attention.head_dim) {
    case 64:
      return decode<64>(context, a);
    case 128:
      return decode<128>(context, a);
    default:
      return decode<256>(context, a);
  }
}

template <int kDim, int kHeads>
void rows_left_with(Context& context, const Arguments& a) {
  const std::size_t shared_bytes =
      (shared_floats<kDim, kHeads>({Mode::kWhole, 1, 1}, a.pages) + kDim + kDim / 16) *
      sizeof(float);
  const int blocks = context.blocks_per_multiprocessor(
      reinterpret_cast<const void*>(&rows_left_kernel<kDim, kHeads>), kDim, shared_bytes);
  launch_overlapping(context, rows_left_kernel<kDim, kHeads>,
                     dim3(static_cast<unsigned>(blocks * context.multiprocessors)), dim3(kDim),
                     shared_bytes, a);
}

template <int kDim>
void rows_left(Context& context, const Arguments& a) {
  switch (a.groups.group_heads) {
    case 1:
      return rows_left_with<kDim, 1>(context, a);
    case 2:
      return rows_left_with<kDim, 2>(context, a);
    default:
      return rows_left_with<kDim, 4>(context, a);
  }
}

Arguments arguments_of(const PagedAttention& attention) {
  Arguments a{attention, HeadGroups(attention.heads, attention.kv_heads, kMostHeads)};
  a.pages = static_cast<int>((attention.step.context + kPage - 1) / kPage);
  a.early = attention.step.distinct_slots;
  return a;
}

}  // namespace

bool attention_decode_fits(const Context&, const PagedAttention& attention) {
  const bool dimension =
      attention.head_dim == 64 || attention.head_dim == 128 || attention.head_dim == 256;
  const KvPages& cache = attention.cache;
  return dimension && cache.key_offset % 4 == 0 && cache.width % 4 == 0 &&
         attention.step.rows * attention.kv_heads <= (std::int64_t{1} << 24);
}

void attention_decode(Context& context, const PagedAttention& attention) {
  decode(context, arguments_of(attention));
}

bool attention_fused_fits(const Context& context, const PagedAttention& attention) {
  return attention_decode_fits(context, attention) && attention.step.distinct_slots &&
         HeadGroups(attention.heads, attention.kv_heads, kMostHeads).groups == 1;
}

void attention_decode_fused(Context& context, const PagedAttention& attention,
                            const RopeStore& rope) {
  Arguments a = arguments_of(attention);
  a.fused = true;
  a.rope = rope;
  decode(context, a);
}

void attention_rows_left(Context& context, const PagedAttention& attention,
                         int positions_per_tile) {
  Arguments a = arguments_of(attention);
  a.tile = positions_per_tile;
  a.early = false;
  if (attention.head_dim == 64) {
    rows_left<64>(context, a);
  } else {
    rows_left<128>(context, a);
  }
}

}  // namespace bitwitness::cuda
