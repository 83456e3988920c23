// What the kernels of the sampler share: a call's memory, the facts of a row, the sums of its bins
// (sampler.cu says how they work together).
#pragma once

#include <cstdint>

#include "kernels/contract.h"
#include "kernels/cuda/context.h"

namespace bitwitness::cuda::sampling {

inline constexpr int kBins = 32;                  // of a level; a lane each
inline constexpr int kPositions = kBins * kBins;  // coarse bins of fine bins
inline constexpr int kThreads = 128, kWarps = 4;  // of a block that fills a slice's bins
inline constexpr int kMostSlices = 256;           // of a row
inline constexpr std::uint32_t kAllLanes = 0xffffffffu;

enum class Kind { kTopK, kTopP };

// Bins of every slice: weights and counts are [M, slices, kBins].
struct Bins {
  std::uint64_t* weights;
  std::uint32_t* counts;
};

// What top_k or top_p keeps: candidates with a key above `threshold`, and the first `ties` at it.
struct Kept {
  std::uint32_t threshold = 0;  // 0: all, since no finite logit has that key
  std::uint64_t ties = 0;
  std::uint64_t total = 0;  // the weight of all that is kept
};

// One call of sample(). A row is cut into slices, a slice into a share for each of kWarps warps.
struct Call {
  const float* logits;  // [M, vocab]
  const SampleRow* requests;
  SampleKinds kinds;
  int vocab;
  int slices, slice;          // how many, and candidates in each: a multiple of kThreads
  std::uint64_t* best;        // [M, slices]: key, then the complement of the id
  std::uint32_t* lowest;      // [M, slices]: the lowest key
  Bins coarse, fine;          // fine: of the coarse bin that the row's last search came to
  std::uint32_t* keys;        // [M, vocab]: the keys in that bin, at the start of each warp's share
  std::uint32_t* key_counts;  // [M, slices, kWarps]
  Kept* top_k;                // [M]: for rows with top_p as well

  __device__ const float* row_logits() const { return logits + row() * vocab; }
  __device__ std::uint32_t* row_keys() const { return keys + row() * vocab; }
  // Every grid is [slices or 1, M].
  __device__ static std::int64_t row() { return static_cast<std::int64_t>(blockIdx.y); }
  __device__ std::int64_t row_slice(int index) const { return row() * slices + index; }
  __device__ int begin(int index) const { return index * slice; }
  __device__ int share_begin(int index, int warp) const {
    return index * slice + warp * (slice / kWarps);
  }
  __device__ bool has_top_k(const contract::SamplingParams& params) const {
    return kinds.top_k && params.top_k != 0 && params.top_k < static_cast<std::uint32_t>(vocab);
  }
  __device__ bool has_top_p(const contract::SamplingParams& params) const {
    return kinds.top_p && params.top_p < 1.0f;
  }
};

__device__ __forceinline__ float logit_of(std::uint32_t key) {
  return contract::float_of((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

// How many of `lanes` are before this one.
__device__ __forceinline__ std::uint32_t lanes_before(unsigned lanes) {
  return static_cast<std::uint32_t>(
      __popc(static_cast<int>(lanes & ((1u << threadIdx.x % 32) - 1))));
}

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int distance = 16; distance >= 1; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

template <class T>
__device__ __forceinline__ T warp_greatest(T value) {
#pragma unroll
  for (int distance = 16; distance >= 1; distance /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

// A row's candidates stand at positions 0, 1, ... from the greatest logit down: a function of the
// logit that never decreases as it falls, so that a position's candidates rank next to each other.
// Positions share out the logits between the greatest and the lowest or, if that is nearer, the one
// from which on every weight is 0: e^-26.5 * 2^38 < 0.86. What stands at kPositions or beyond,
// infinities and NaNs among it, weighs nothing and can never be drawn: it is no candidate.
struct RowFacts {
  float maximum, temperature;
  float scale;  // positions per unit of the logit
  int greedy;

  __device__ int position(float logit) const {
    const float at = contract::mul32(contract::sub32(maximum, logit), scale);
    return at >= 0.0f && at < static_cast<float>(kPositions) ? static_cast<int>(at) : kPositions;
  }
  __device__ std::uint64_t weight(float logit) const {
    return contract::sampler_weight(logit, maximum, temperature);
  }
};

// The same in every warp.
__device__ __forceinline__ RowFacts row_facts(const Call& call, float temperature) {
  std::uint64_t best = 0;
  std::uint32_t not_lowest = 0;
  for (int s = static_cast<int>(threadIdx.x) % 32; s < call.slices; s += 32) {
    const std::uint64_t slice_best = call.best[call.row_slice(s)];
    const std::uint32_t other = ~call.lowest[call.row_slice(s)];
    best = slice_best > best ? slice_best : best;
    not_lowest = other > not_lowest ? other : not_lowest;
  }
  best = warp_greatest(best);
  not_lowest = warp_greatest(not_lowest);
  RowFacts facts;
  facts.maximum = logit_of(static_cast<std::uint32_t>(best >> 32));
  facts.temperature = temperature;
  facts.greedy = static_cast<int>(~static_cast<std::uint32_t>(best));
  // Slightly fewer positions than there are, so that rounding puts nothing beyond the last.
  const float spread = contract::sub32(facts.maximum, logit_of(~not_lowest));
  const float weighty = contract::mul32(26.5f, temperature);
  const float range = spread < weighty ? spread : weighty;
  const float scale = contract::div32(static_cast<float>(kPositions) - 1.0f, range);
  facts.scale = scale < 0x1p+127f ? scale : 0x1p+127f;  // and if the range is 0
  return facts;
}

// Sums over a row's slices. Lane b has those of bin b, in every warp. Every thread of a block of
// kBlockWarps warps calls it.
struct BinSums {
  std::uint64_t weight;
  std::uint32_t count;
};
template <int kBlockWarps>
struct BinParts {
  std::uint64_t weight[kBlockWarps][kBins];
  std::uint32_t count[kBlockWarps][kBins];
};
template <int kBlockWarps>
__device__ BinSums row_sums(BinParts<kBlockWarps>& parts, const Call& call, const Bins& bins) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  BinSums sums = {0, 0};
#pragma unroll 4
  for (int s = warp; s < call.slices; s += kBlockWarps) {
    sums.weight += bins.weights[call.row_slice(s) * kBins + lane];
    sums.count += bins.counts[call.row_slice(s) * kBins + lane];
  }
  __syncthreads();  // everyone has read the parts of before
  parts.weight[warp][lane] = sums.weight;
  parts.count[warp][lane] = sums.count;
  __syncthreads();
  sums = {0, 0};
#pragma unroll
  for (int w = 0; w < kBlockWarps; ++w) {
    sums.weight += parts.weight[w][lane];
    sums.count += parts.count[w][lane];
  }
  return sums;
}

// What a search looks for: the candidate with which the count reaches top_k or the weight goes
// beyond top_p.
struct Goal {
  Kind kind;
  std::uint64_t top_k, total, fraction;

  __device__ bool reached(std::uint64_t count_or_weight) const {
    return kind == Kind::kTopK ? count_or_weight >= top_k
                               : !contract::within_top_p(count_or_weight, total, fraction);
  }
  __device__ std::uint64_t measure(const BinSums& sums) const {
    return kind == Kind::kTopK ? sums.count : sums.weight;
  }
};

// The bin in which the goal is reached, kBins if it is not; `before` is what ranks above the bins,
// then above that bin. The same in every lane.
__device__ __forceinline__ int bin_of_goal(const Goal& goal, const BinSums& sums,
                                           std::uint64_t& before) {
  const std::uint64_t own = goal.measure(sums);
  const std::uint64_t up_to = before + warp_inclusive_sum(own);
  const unsigned reached = __ballot_sync(kAllLanes, goal.reached(up_to));
  if (reached == 0) return kBins;
  const int bin = __ffs(static_cast<int>(reached)) - 1;
  before = __shfl_sync(kAllLanes, up_to - own, bin);
  return bin;
}

}  // namespace bitwitness::cuda::sampling
