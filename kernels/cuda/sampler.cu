// The sampler on the device (contract.h section 8, kernels/sampler.h).
//
// Candidates rank by key descending, then id ascending, so what top_k and top_p keep is always:
// every candidate whose key is above a threshold, and the first `ties` of those at it. A row is cut
// into slices, a block each, and the threshold is found from integer sums, which have no order:
//
//   best_kernel      the greatest and the lowest logit of each slice;
//   coarse_kernel    each slice's weights and counts in 32 bins of equal width between the two;
//   fine_kernel      for the bin in which top_k (or top_p) ends: the same in 32 bins of that bin,
//                    and a list of the keys in it;
//   top_k_kernel     for rows with top_p as well: what top_k keeps exactly. A block per row
//   searches
//                    the keys of one fine bin, usually a few hundred, four bits at a time. Then
//                    fine_kernel again, for top_p;
//   draw_kernel      the same for the row's last search; then the walk, first over the sums of the
//                    slices, then in one slice.
//
// Every block works out from the sums of the kernel before which bin is next. Kernels that no
// request of the call can need are not launched; a row that does not need one passes through.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sampler_rows.cuh"
#include "kernels/cuda/sampler_search.cuh"

namespace bitwitness::cuda {
namespace {

using namespace sampling;
using contract::logit_key;
using contract::SamplingParams;

// visit(id, logit, exists) for the share of this warp in slice blockIdx.x; all lanes at once.
template <class Visit>
__device__ __forceinline__ void warp_share(const Call& call, const Visit& visit) {
  constexpr int kAtOnce = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const float* const logits = call.row_logits();
  const int begin = call.share_begin(static_cast<int>(blockIdx.x), warp);
  const int end = min(begin + call.slice / kWarps, call.vocab);
  for (int base = begin; base < end; base += 32 * kAtOnce) {
    float logit[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int id = base + 32 * i + lane;
      logit[i] = id < end ? logits[id] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int id = base + 32 * i + lane;
      visit(id, logit[i], id < end);
    }
  }
}

__global__ void __launch_bounds__(kThreads) best_kernel(Call call) {
  __shared__ std::uint64_t warp_best[kWarps];
  __shared__ std::uint32_t warp_not_lowest[kWarps];
  wait_for_previous();
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  // Ids ascend, so that the first of equal keys is the one with the lowest id.
  std::uint32_t best_key = 0, not_lowest = 0;
  int best_id = call.begin(static_cast<int>(blockIdx.x));
  warp_share(call, [&](int id, float logit, bool exists) {
    const std::uint32_t key = logit_key(logit);
    if (exists && key > best_key) {
      best_key = key;
      best_id = id;
    }
    if (exists && ~key > not_lowest) not_lowest = ~key;
  });
  const std::uint64_t best = warp_greatest(static_cast<std::uint64_t>(best_key) << 32 |
                                           ~static_cast<std::uint32_t>(best_id));
  not_lowest = warp_greatest(not_lowest);
  if (lane == 0) {
    warp_best[warp] = best;
    warp_not_lowest[warp] = not_lowest;
  }
  __syncthreads();
  if (warp == 0) {
    const std::int64_t at = call.row_slice(static_cast<int>(blockIdx.x));
    const std::uint64_t slice_best = warp_greatest(warp_best[lane % kWarps]);
    const std::uint32_t slice_not_lowest = warp_greatest(warp_not_lowest[lane % kWarps]);
    if (lane == 0) {
      call.best[at] = slice_best;
      call.lowest[at] = ~slice_not_lowest;
    }
  }
}

__global__ void __launch_bounds__(32) greedy_kernel(std::int32_t* out, Call call) {
  wait_for_previous();
  let_next_start();
  const RowFacts facts = row_facts(call, 0.0f);
  if (threadIdx.x == 0) out[Call::row()] = facts.greedy;
}

// A slice's bins: a column per thread, so that none of them waits for another, then their sums.
struct BinColumns {
  // A cell's weight is below 2^48: a thread has at most kMostSliceCandidates / kThreads candidates.
  static constexpr int kWeightBits = 48;
  std::uint64_t cell[kBins][kThreads];
  BinParts<kWarps> parts;

  __device__ void clear() {
#pragma unroll
    for (int b = 0; b < kBins; ++b) cell[b][threadIdx.x] = 0;
  }
  __device__ void add(int bin, std::uint64_t weight) {
    cell[bin][threadIdx.x] += std::uint64_t{1} << kWeightBits | weight;
  }
  __device__ void store(const Call& call, const Bins& bins) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    __syncthreads();
    std::uint64_t weight = 0;
    std::uint32_t count = 0;
#pragma unroll 8
    for (int i = 0; i < 32; ++i) {  // every lane another bank
      const std::uint64_t sum = cell[lane][warp * 32 + (i + lane) % 32];
      weight += sum & ((std::uint64_t{1} << kWeightBits) - 1);
      count += static_cast<std::uint32_t>(sum >> kWeightBits);
    }
    parts.weight[warp][lane] = weight;
    parts.count[warp][lane] = count;
    __syncthreads();
    if (warp != 0) return;
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      weight += parts.weight[w][lane];
      count += parts.count[w][lane];
    }
    const std::int64_t at = call.row_slice(static_cast<int>(blockIdx.x)) * kBins + lane;
    bins.weights[at] = weight;
    bins.counts[at] = count;
  }
};
constexpr int kSliceCandidates = 1 << 16;  // what a slice is meant not to exceed ...
constexpr int kMostSliceCandidates = kSliceCandidates + kThreads;  // ... before it is rounded up
static_assert(kMostSliceCandidates / kThreads < 1 << 10, "a cell's weight, each at most 2^38");

// Rows without top_k and top_p have all of a slice in bin 0.
__global__ void __launch_bounds__(kThreads) coarse_kernel(Call call) {
  __shared__ BinColumns columns;
  columns.clear();  // a thread reads and writes only its own until they are summed
  wait_for_previous();
  let_next_start();
  const SamplingParams params = call.requests[Call::row()].params;
  if (params.temperature == 0.0f) return;
  const RowFacts facts = row_facts(call, params.temperature);
  const bool binned = call.has_top_k(params) || call.has_top_p(params);
  warp_share(call, [&](int, float logit, bool exists) {
    const int position = facts.position(logit);
    if (!exists || position == kPositions) return;
    columns.add(binned ? position / kBins : 0, facts.weight(logit));
  });
  columns.store(call, call.coarse);
}

// What a row looks for; `total` is the weight of all its candidates.
__device__ __forceinline__ Goal goal_of(const Call& call, const SamplingParams& params, Kind kind,
                                        std::uint64_t total) {
  if (kind == Kind::kTopK) return {kind, params.top_k, 0, 0};
  const bool after_top_k = call.has_top_k(params);
  return {kind, 0, after_top_k ? call.top_k[Call::row()].total : total,
          contract::top_p_fraction(params.top_p)};
}

template <Kind kKind>
__global__ void __launch_bounds__(kThreads) fine_kernel(Call call) {
  __shared__ BinColumns columns;
  columns.clear();
  wait_for_previous();
  let_next_start();
  const SamplingParams params = call.requests[Call::row()].params;
  if (params.temperature == 0.0f) return;
  if (kKind == Kind::kTopK ? !call.has_top_k(params) : !call.has_top_p(params)) return;

  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const RowFacts facts = row_facts(call, params.temperature);
  const BinSums sums = row_sums(columns.parts, call, call.coarse);
  std::uint64_t before = 0;
  const int coarse = bin_of_goal(goal_of(call, params, kKind, warp_sum(sums.weight)), sums, before);
  if (coarse == kBins) return;  // top_k keeps all

  const int slice = static_cast<int>(blockIdx.x);
  std::uint32_t* const keys = call.row_keys() + call.share_begin(slice, warp);
  std::uint32_t listed = 0;
  warp_share(call, [&](int, float logit, bool exists) {
    const int position = facts.position(logit);
    const bool in_bin = exists && position / kBins == coarse;
    const unsigned lanes = __ballot_sync(kAllLanes, in_bin);
    if (in_bin) {
      keys[listed + lanes_before(lanes)] = logit_key(logit);
      columns.add(position % kBins, facts.weight(logit));
    }
    listed += static_cast<std::uint32_t>(__popc(static_cast<int>(lanes)));
  });
  if (lane == 0) call.key_counts[call.row_slice(slice) * kWarps + warp] = listed;
  columns.store(call, call.fine);
}

__global__ void __launch_bounds__(kSearchThreads, 1) top_k_kernel(Call call) {
  __shared__ SearchState state;
  wait_for_previous();
  let_next_start();
  const SamplingParams params = call.requests[Call::row()].params;
  if (params.temperature == 0.0f || !call.has_top_k(params) || !call.has_top_p(params)) return;
  const RowFacts facts = row_facts(call, params.temperature);
  const BinSums sums = row_sums(state.bins, call, call.coarse);
  const Kept kept =
      find_kept(state, call, facts, sums, true, goal_of(call, params, Kind::kTopK, 0), {});
  if (threadIdx.x == 0) call.top_k[Call::row()] = kept;
}

// The sum of `value` over the threads before this one, in a block of kSearchThreads.
__device__ std::uint64_t sum_before(std::uint64_t (&parts)[kSearchWarps], std::uint64_t value) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::uint64_t up_to = warp_inclusive_sum(value);
  if (lane == 31) parts[warp] = up_to;
  __syncthreads();
  std::uint64_t before = up_to - value;
  for (int w = 0; w < warp; ++w) before += parts[w];
  return before;
}

__global__ void __launch_bounds__(kSearchThreads, 1) draw_kernel(std::int32_t* out, Call call) {
  __shared__ SearchState state;
  __shared__ std::uint64_t tie_parts[kSearchWarps], weight_parts[kSearchWarps];
  __shared__ std::uint64_t slice_target, slice_ties;  // what the walk in the slice starts from
  __shared__ int slice, chosen;
  wait_for_previous();
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const SampleRow request = call.requests[Call::row()];
  const SamplingParams& params = request.params;
  const RowFacts facts = row_facts(call, params.temperature);
  if (params.temperature == 0.0f) {
    if (threadIdx.x == 0) out[Call::row()] = facts.greedy;
    return;
  }
  const bool top_k = call.has_top_k(params), top_p = call.has_top_p(params);
  const BinSums sums = row_sums(state.bins, call, call.coarse);
  const Goal goal = goal_of(call, params, top_p ? Kind::kTopP : Kind::kTopK, warp_sum(sums.weight));
  const Kept kept = find_kept(state, call, facts, sums, top_k || top_p, goal,
                              top_k && top_p ? call.top_k[Call::row()] : Kept{});
  const std::uint64_t tie_weight = kept.ties != 0 ? facts.weight(logit_of(kept.threshold)) : 0;
  const std::uint64_t target = contract::multiply_high(request.draw, kept.total);

  // The slice in which the running sum of weights exceeds the target.
  if (threadIdx.x == 0) {
    slice = -1;
    chosen = facts.greedy;  // stays only if the greatest logit is not finite
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    std::uint64_t weight = 0, ties = 0;  // before the slices of this round
    for (int first = 0; first < call.slices; first += 32) {
      const int s = first + lane;
      const std::uint64_t own_ties = s < call.slices ? state.count_at[s] : 0;
      const std::uint64_t ties_up_to = ties + warp_inclusive_sum(own_ties);
      const std::uint64_t ties_before = ties_up_to - own_ties;
      const std::uint64_t kept_ties = min(kept.ties, ties_up_to) - min(kept.ties, ties_before);
      const std::uint64_t own_weight =
          (s < call.slices ? state.weight_above[s] : 0) + kept_ties * tie_weight;
      const std::uint64_t weight_up_to = weight + warp_inclusive_sum(own_weight);
      const std::uint64_t weight_before = weight_up_to - own_weight;
      if (target >= weight_before && target < weight_up_to) {
        slice = s;
        slice_target = target - weight_before;
        slice_ties = ties_before;
      }
      weight = __shfl_sync(kAllLanes, weight_up_to, 31);
      ties = __shfl_sync(kAllLanes, ties_up_to, 31);
    }
  }
  __syncthreads();
  if (slice >= 0) {
    const float* const logits = call.row_logits();
    const int share = (call.slice + kSearchThreads - 1) / kSearchThreads;
    const int slice_end = min(call.begin(slice) + call.slice, call.vocab);
    const int begin = min(call.begin(slice) + static_cast<int>(threadIdx.x) * share, slice_end);
    const int end = min(begin + share, slice_end);
    std::uint64_t own_ties = 0;
    for (int i = begin; i < end; ++i) own_ties += logit_key(logits[i]) == kept.threshold;
    const std::uint64_t ties_before = slice_ties + sum_before(tie_parts, own_ties);
    // visit(id, weight) of the share's kept candidates until it returns false.
    const auto walk = [&](const auto& visit) {
      std::uint64_t tie = ties_before;
      for (int i = begin; i < end; ++i) {
        const std::uint32_t key = logit_key(logits[i]);
        if (key < kept.threshold || (key == kept.threshold && tie++ >= kept.ties)) continue;
        if (facts.position(logits[i]) != kPositions && !visit(i, facts.weight(logits[i]))) return;
      }
    };
    std::uint64_t own_weight = 0;
    walk([&](int, std::uint64_t weight) {
      own_weight += weight;
      return true;
    });
    std::uint64_t weight_before = sum_before(weight_parts, own_weight);
    if (slice_target >= weight_before && slice_target < weight_before + own_weight) {
      walk([&](int id, std::uint64_t weight) {
        weight_before += weight;
        if (weight_before <= slice_target) return true;
        chosen = id;
        return false;
      });
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) out[Call::row()] = chosen;
}

}  // namespace

void sample(Context& context, std::int32_t* out, const float* logits, std::int64_t vocab,
            const SampleRow* requests, std::int64_t M, SampleKinds kinds) {
  if (M == 0) return;
  const auto round_up = [](std::int64_t n, std::int64_t unit) {
    return (n + unit - 1) / unit * unit;
  };
  // Some blocks for every multiprocessor; few slices otherwise, since every block reads the sums of
  // all of its row.
  constexpr std::int64_t kBlocks = 1024, kFew = 8, kMany = 64;
  std::int64_t slices = kBlocks / M < kFew ? kFew : kBlocks / M > kMany ? kMany : kBlocks / M;
  const std::int64_t least = round_up(vocab, kSliceCandidates) / kSliceCandidates;
  if (slices < least) slices = least;
  const std::int64_t slice = round_up((vocab + slices - 1) / slices, kThreads);
  slices = (vocab + slice - 1) / slice;

  const auto bins = static_cast<std::size_t>(M * slices * kBins);
  const bool searched = kinds.drawn && (kinds.top_k || kinds.top_p);
  Scratch<std::uint64_t> best(context, static_cast<std::size_t>(M * slices));
  Scratch<std::uint32_t> lowest(context, static_cast<std::size_t>(M * slices));
  Scratch<std::uint64_t> coarse_weights(context, kinds.drawn ? bins : 0);
  Scratch<std::uint32_t> coarse_counts(context, kinds.drawn ? bins : 0);
  Scratch<std::uint64_t> fine_weights(context, searched ? bins : 0);
  Scratch<std::uint32_t> fine_counts(context, searched ? bins : 0);
  Scratch<std::uint32_t> keys(context, searched ? static_cast<std::size_t>(M * vocab) : 0);
  Scratch<std::uint32_t> key_counts(context,
                                    searched ? static_cast<std::size_t>(M * slices * kWarps) : 0);
  Scratch<Kept> top_k(context, searched ? static_cast<std::size_t>(M) : 0);
  const Call call = {logits,
                     requests,
                     kinds,
                     static_cast<int>(vocab),
                     static_cast<int>(slices),
                     static_cast<int>(slice),
                     best.get(),
                     lowest.get(),
                     {coarse_weights.get(), coarse_counts.get()},
                     {fine_weights.get(), fine_counts.get()},
                     keys.get(),
                     key_counts.get(),
                     top_k.get()};

  const dim3 each_slice(static_cast<unsigned>(slices), static_cast<unsigned>(M));
  const dim3 each_row(1, static_cast<unsigned>(M));
  launch_overlapping(context, best_kernel, each_slice, dim3(kThreads), 0, call);
  if (!kinds.drawn) {
    launch_overlapping(context, greedy_kernel, each_row, dim3(32), 0, out, call);
  } else {
    launch_overlapping(context, coarse_kernel, each_slice, dim3(kThreads), 0, call);
    if (kinds.top_k) {
      launch_overlapping(context, fine_kernel<Kind::kTopK>, each_slice, dim3(kThreads), 0, call);
    }
    if (kinds.top_k && kinds.top_p) {
      launch_overlapping(context, top_k_kernel, each_row, dim3(kSearchThreads), 0, call);
    }
    if (kinds.top_p) {
      launch_overlapping(context, fine_kernel<Kind::kTopP>, each_slice, dim3(kThreads), 0, call);
    }
    launch_overlapping(context, draw_kernel, each_row, dim3(kSearchThreads), 0, out, call);
  }
  BW_CUDA_LAUNCHED("sample");
}

}  // namespace bitwitness::cuda
