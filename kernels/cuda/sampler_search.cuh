// The end of a search of the sampler, by one block per row: from the fine bin in which top_k or
// top_p ends to what they keep exactly (sampler.cu says how the kernels work together).
#pragma once

#include <cstdint>

#include "kernels/contract.h"
#include "kernels/cuda/sampler_rows.cuh"

namespace bitwitness::cuda::sampling {

// Lane l gets the sum over the warp of value[l / 2]: half of the values go to either half of the
// lanes, again and again.
template <int kCount, class T>
__device__ __forceinline__ T warp_sums(T (&value)[kCount]) {
  if constexpr (kCount == 1) {
    return value[0] + __shfl_xor_sync(kAllLanes, value[0], 1);
  } else {
    const bool upper = (static_cast<int>(threadIdx.x) & kCount) != 0;
    T half[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const T sent = upper ? value[i] : value[i + kCount / 2];
      const T kept = upper ? value[i + kCount / 2] : value[i];
      half[i] = kept + __shfl_xor_sync(kAllLanes, sent, kCount);
    }
    return warp_sums(half);
  }
}

inline constexpr int kSearchThreads = 512, kSearchWarps = kSearchThreads / 32;

// The keys of one fine bin lie in shared memory if there are no more than this.
inline constexpr int kStaged = 2048;

struct SearchState {
  BinParts<kSearchWarps> bins;
  std::uint32_t list_counts[kMostSlices * kWarps];
  std::uint32_t staged_before[kMostSlices + 1];  // in the slices before
  std::uint32_t staged_parts[kSearchWarps];
  std::uint32_t staged_key[kStaged];  // ascending in id
  std::uint64_t staged_weight[kStaged];
  std::uint32_t not_lowest[kSearchWarps], highest[kSearchWarps];
  std::uint64_t digit[2][kSearchWarps][16];
  // Per slice: the weight of keys above the threshold, and how many are above it and at it.
  std::uint64_t weight_above[kMostSlices];
  std::uint32_t count_above[kMostSlices], count_at[kMostSlices];
};

// The keys of one fine bin, for a block of kSearchThreads.
class Bucket {
 public:
  // `counts`: lane b has the row's count of fine bin b.
  __device__ __forceinline__ Bucket(SearchState& state, const Call& call, const RowFacts& facts,
                                    int coarse, int fine, std::uint32_t counts)
      : state_(state), call_(call), facts_(facts), position_(coarse * kBins + fine) {
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32, warp = thread / 32;
    count_ = __shfl_sync(kAllLanes, counts, fine);
    staged_ = count_ <= kStaged;
    for (int i = thread; i < call.slices * kWarps; i += kSearchThreads) {
      state.list_counts[i] = call.key_counts[call.row_slice(0) * kWarps + i];
    }
    static_assert(kMostSlices < kSearchThreads);
    const std::uint32_t own =
        thread < call.slices ? call.fine.counts[call.row_slice(thread) * kBins + fine] : 0;
    const std::uint32_t up_to = warp_inclusive_sum(own);
    if (lane == 31) state.staged_parts[warp] = up_to;
    __syncthreads();
    std::uint32_t before = up_to - own;
    for (int w = 0; w < warp; ++w) before += state.staged_parts[w];
    if (thread <= call.slices) state.staged_before[thread] = before;
    __syncthreads();
    if (!staged_) return;
    for (int s = warp; s < call.slices; s += kSearchWarps) {
      std::uint32_t at = state.staged_before[s];
      listed(s, [&](std::uint32_t key, bool in_bin) {
        const unsigned lanes = __ballot_sync(kAllLanes, in_bin);
        if (in_bin) {
          const std::uint32_t i = at + lanes_before(lanes);
          state.staged_key[i] = key;
          state.staged_weight[i] = weight_of(key);
        }
        at += static_cast<std::uint32_t>(__popc(static_cast<int>(lanes)));
      });
    }
    __syncthreads();
  }

  __device__ std::uint64_t weight_of(std::uint32_t key) const {
    return facts_.weight(logit_of(key));
  }
  // visit(key, weight()) for every key, over the block.
  template <class Visit>
  __device__ __forceinline__ void all(const Visit& visit) const {
    if (staged_) {
      for (std::uint32_t i = threadIdx.x; i < count_; i += kSearchThreads) {
        visit(state_.staged_key[i], [&] { return state_.staged_weight[i]; });
      }
      return;
    }
    for (int s = static_cast<int>(threadIdx.x) / 32; s < call_.slices; s += kSearchWarps) {
      of_slice(s, visit);
    }
  }
  // The same for the keys of a slice, over a warp.
  template <class Visit>
  __device__ __forceinline__ void of_slice(int slice, const Visit& visit) const {
    if (staged_) {
      const std::uint32_t end = state_.staged_before[slice + 1];
      for (std::uint32_t i = state_.staged_before[slice] + threadIdx.x % 32; i < end; i += 32) {
        visit(state_.staged_key[i], [&] { return state_.staged_weight[i]; });
      }
      return;
    }
    listed(slice, [&](std::uint32_t key, bool in_bin) {
      if (in_bin) visit(key, [&] { return weight_of(key); });
    });
  }

 private:
  // visit(key, in_bin) for the keys that are listed for a slice, by all lanes at once.
  template <class Visit>
  __device__ __forceinline__ void listed(int slice, const Visit& visit) const {
    const std::uint32_t* const counts = state_.list_counts + slice * kWarps;
    std::uint32_t total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += counts[w];
    for (std::uint32_t base = 0; base < total; base += 32) {
      std::uint32_t i = base + threadIdx.x % 32;
      const bool exists = i < total;
      int share = 0;  // i becomes the place in it
#pragma unroll
      for (int w = 0; w < kWarps - 1; ++w) {
        if (share == w && i >= counts[w]) {
          i -= counts[w];
          share = w + 1;
        }
      }
      const std::uint32_t key =
          exists ? call_.row_keys()[call_.share_begin(slice, share) + static_cast<int>(i)] : 0;
      visit(key, exists && facts_.position(logit_of(key)) == position_);
    }
  }

  SearchState& state_;
  const Call& call_;
  const RowFacts& facts_;
  int position_;
  std::uint32_t count_;
  bool staged_;
};

// The greatest key T at which the goal is reached by `before` and the bucket's keys from T on. The
// bucket's keys are within [lowest, highest], both of them among them.
template <class T, class Value>
__device__ std::uint32_t key_of_goal(SearchState& state, const Bucket& bucket, const Goal& goal,
                                     std::uint64_t before, std::uint32_t lowest,
                                     std::uint32_t highest, const Value& value) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int digits = (32 - __clz(static_cast<int>(highest - lowest)) + 3) / 4;
  for (int d = digits - 1; d >= 0; --d) {
    const int shift = 4 * d;
    T sums[16];  // [i]: of keys whose digit is above i
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[i] = 0;
    bucket.all([&](std::uint32_t key, const auto& weight) {
      if (key < lowest || key > highest) return;
      const std::uint32_t digit = (key - lowest) >> shift;
      const T v = value(weight);
#pragma unroll
      for (int i = 0; i < 15; ++i) sums[i] += digit > static_cast<std::uint32_t>(i) ? v : 0;
    });
    const T sum = warp_sums(sums);
    if (lane % 2 == 0) state.digit[d % 2][warp][lane / 2] = sum;
    __syncthreads();  // the other half was read before
    std::uint64_t up_to = before;
#pragma unroll
    for (int w = 0; w < kSearchWarps; ++w) up_to += state.digit[d % 2][w][lane % 16];
    // Once the goal is not reached, it never is again.
    const int digit =
        __popc(static_cast<int>(__ballot_sync(kAllLanes, lane < 15 && goal.reached(up_to))));
    before = __shfl_sync(kAllLanes, up_to, digit);  // from the next digit on; [15]: no such
    lowest += static_cast<std::uint32_t>(digit) << shift;
    const std::uint32_t rest = (std::uint32_t{1} << shift) - 1;
    highest = highest - lowest > rest ? lowest + rest : highest;
  }
  return lowest;
}

// What the row's last search keeps, for a block of kSearchThreads; `searched` is false if there was
// none: then all is kept. `top_k` is what top_k kept before a search for top_p. Fills the state's
// sums per slice, with respect to the threshold.
__device__ __forceinline__ Kept find_kept(SearchState& state, const Call& call,
                                          const RowFacts& facts, const BinSums& coarse_sums,
                                          bool searched, const Goal& goal, const Kept& top_k) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  Kept kept;
  std::uint64_t before = 0;
  int coarse = searched ? bin_of_goal(goal, coarse_sums, before) : kBins, fine = 0;
  BinSums fine_sums = {0, 0};
  if (coarse < kBins) {
    fine_sums = row_sums(state.bins, call, call.fine);
    fine = bin_of_goal(goal, fine_sums, before);
    // Nothing there: only with a greatest logit that is not finite.
    if (fine == kBins || __shfl_sync(kAllLanes, fine_sums.count, fine) == 0) coarse = kBins;
  }
  if (coarse == kBins) {
    for (int s = warp; s < call.slices; s += kSearchWarps) {
      const std::uint64_t weight = warp_sum(call.coarse.weights[call.row_slice(s) * kBins + lane]);
      if (lane == 0) {
        state.weight_above[s] = weight;
        state.count_at[s] = 0;
      }
    }
    __syncthreads();
    kept.total = warp_sum(coarse_sums.weight);
    return kept;
  }

  const Bucket bucket(state, call, facts, coarse, fine, fine_sums.count);
  std::uint32_t highest = 0, not_lowest = 0;
  bucket.all([&](std::uint32_t key, const auto&) {
    highest = key > highest ? key : highest;
    not_lowest = ~key > not_lowest ? ~key : not_lowest;
  });
  highest = warp_greatest(highest);
  not_lowest = warp_greatest(not_lowest);
  if (lane == 0) {
    state.highest[warp] = highest;
    state.not_lowest[warp] = not_lowest;
  }
  __syncthreads();
  highest = warp_greatest(state.highest[lane % kSearchWarps]);
  const std::uint32_t lowest = ~warp_greatest(state.not_lowest[lane % kSearchWarps]);
  kept.threshold = goal.kind == Kind::kTopK
                       ? key_of_goal<std::uint32_t>(state, bucket, goal, before, lowest, highest,
                                                    [](const auto&) { return std::uint32_t{1}; })
                       : key_of_goal<std::uint64_t>(state, bucket, goal, before, lowest, highest,
                                                    [](const auto& weight) { return weight(); });

  for (int s = warp; s < call.slices; s += kSearchWarps) {
    const std::int64_t at = call.row_slice(s) * kBins + lane;
    std::uint64_t weight_above = 0;
    std::uint32_t count_above = 0, count_at = 0;
    if (lane < coarse) {
      weight_above += call.coarse.weights[at];
      count_above += call.coarse.counts[at];
    }
    if (lane < fine) {
      weight_above += call.fine.weights[at];
      count_above += call.fine.counts[at];
    }
    bucket.of_slice(s, [&](std::uint32_t key, const auto& weight) {
      if (key > kept.threshold) {
        weight_above += weight();
        ++count_above;
      }
      count_at += key == kept.threshold;
    });
    weight_above = warp_sum(weight_above);
    count_above = warp_sum(count_above);
    count_at = warp_sum(count_at);
    if (lane == 0) {
      state.weight_above[s] = weight_above;
      state.count_above[s] = count_above;
      state.count_at[s] = count_at;
    }
  }
  __syncthreads();
  std::uint64_t count_above = 0, count_at = 0;
  for (int s = lane; s < call.slices; s += 32) {
    kept.total += state.weight_above[s];
    count_above += state.count_above[s];
    count_at += state.count_at[s];
  }
  kept.total = warp_sum(kept.total);
  count_above = warp_sum(count_above);
  count_at = warp_sum(count_at);
  const std::uint64_t tie_weight = bucket.weight_of(kept.threshold);
  if (goal.kind == Kind::kTopK) {
    kept.ties = goal.top_k - count_above;
  } else {
    // The first tie is kept; the largest count whose last one still is.
    const std::uint64_t candidates = kept.threshold == top_k.threshold ? top_k.ties : count_at;
    std::uint64_t beyond = candidates + 1;
    kept.ties = 1;
    while (beyond - kept.ties > 1) {
      const std::uint64_t middle = kept.ties + (beyond - kept.ties) / 2;
      if (contract::within_top_p(kept.total + (middle - 1) * tie_weight, goal.total,
                                 goal.fraction)) {
        kept.ties = middle;
      } else {
        beyond = middle;
      }
    }
  }
  kept.total += kept.ties * tie_weight;
  return kept;
}

}  // namespace bitwitness::cuda::sampling
