// The sampler on the device (contract.h section 8, kernels/sampler.h): a block per row of logits.
//
// Candidates rank by key descending, then id ascending, so what top_k and top_p keep is always:
// every candidate whose key is above a threshold, and the first `ties` of those at it. Thresholds
// are found four bits at a time from block-wide integer sums; no order of summation exists.
#include "kernels/cuda/context.h"

namespace bitwitness::cuda {
namespace {

using contract::logit_key;
using contract::within_top_p;

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kDigits = 15;  // thresholds tried at once: digits 1 to 15 of four bits

struct SharedState {
  std::uint64_t warp_sum[kWarps][kDigits];
  std::uint64_t sum[kDigits];
};

// Sums over the block of kCount values per thread, in state.sum and visible to all. Callers may use
// the state again at once.
template <int kCount>
__device__ void block_sums(SharedState& state, std::uint64_t (&value)[kCount]) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int distance = 16; distance >= 1; distance /= 2) {
      value[i] += __shfl_down_sync(0xffffffffu, value[i], distance);
    }
  }
  __syncthreads();  // everyone has read the sums of before
  if (thread % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) state.warp_sum[thread / 32][i] = value[i];
  }
  __syncthreads();
  if (thread < kCount) {
    std::uint64_t sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += state.warp_sum[w][thread];
    state.sum[thread] = sum;
  }
  __syncthreads();
}

// The sum of `value` over the threads before this one.
__device__ std::uint64_t block_sum_before(SharedState& state, std::uint64_t value) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  std::uint64_t inclusive = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const std::uint64_t other = __shfl_up_sync(0xffffffffu, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  __syncthreads();
  if (lane == 31) state.warp_sum[thread / 32][0] = inclusive;
  __syncthreads();
  std::uint64_t before = inclusive - value;
  for (int w = 0; w < thread / 32; ++w) before += state.warp_sum[w][0];
  return before;
}

__device__ std::uint64_t block_greatest(SharedState& state, std::uint64_t value) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int distance = 16; distance >= 1; distance /= 2) {
    const std::uint64_t other = __shfl_down_sync(0xffffffffu, value, distance);
    value = other > value ? other : value;
  }
  __syncthreads();
  if (thread % 32 == 0) state.warp_sum[thread / 32][0] = value;
  __syncthreads();
  std::uint64_t greatest = 0;
  for (int w = 0; w < kWarps; ++w) {
    greatest = state.warp_sum[w][0] > greatest ? state.warp_sum[w][0] : greatest;
  }
  return greatest;
}

// The largest threshold T for which holds(sum of value(i) over keys >= T). `holds` is true at T = 0
// and changes to false at most once as T grows.
template <class Value, class Holds>
__device__ std::uint32_t search(SharedState& state, const float* logits, int vocab,
                                const Value& value, const Holds& holds) {
  std::uint32_t threshold = 0;
  for (int shift = 28; shift >= 0; shift -= 4) {
    std::uint64_t sums[kDigits];
#pragma unroll
    for (int d = 0; d < kDigits; ++d) sums[d] = 0;
    for (int i = static_cast<int>(threadIdx.x); i < vocab; i += kThreads) {
      const std::uint32_t key = logit_key(logits[i]);
      if (key < threshold) continue;
      const std::uint32_t digit = (key - threshold) >> shift;
      const std::uint64_t v = value(i);
#pragma unroll
      for (int d = 0; d < kDigits; ++d) sums[d] += digit > static_cast<std::uint32_t>(d) ? v : 0;
    }
    block_sums(state, sums);
    std::uint32_t digit = 0;
    while (digit < kDigits && holds(state.sum[digit])) ++digit;
    threshold += digit << shift;
  }
  return threshold;
}

__global__ void __launch_bounds__(kThreads)
    sample_kernel(std::int32_t* __restrict__ out, std::uint64_t* all_weights,
                  const float* __restrict__ all_logits, int vocab,
                  const SampleRow* __restrict__ requests) {
  __shared__ SharedState state;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const float* const logits = all_logits + row * vocab;
  std::uint64_t* const weights = all_weights + row * vocab;
  const contract::SamplingParams request = requests[row].params;
  const std::uint64_t draw = requests[row].draw;
  const std::uint64_t fraction =
      request.top_p < 1.0f ? contract::top_p_fraction(request.top_p) : std::uint64_t{1} << 32;

  std::uint64_t best = 0;  // key, then the complement of the id: the lowest id wins
  for (int i = thread; i < vocab; i += kThreads) {
    const std::uint64_t candidate = static_cast<std::uint64_t>(logit_key(logits[i])) << 32 |
                                    (0xffffffffu - static_cast<std::uint32_t>(i));
    best = candidate > best ? candidate : best;
  }
  best = block_greatest(state, best);
  const std::int32_t greedy =
      static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(best));
  if (request.temperature == 0.0f) {
    if (thread == 0) out[row] = greedy;
    return;
  }

  const float maximum = logits[greedy];
  for (int i = thread; i < vocab; i += kThreads) {
    weights[i] = contract::sampler_weight(logits[i], maximum, request.temperature);
  }
  __syncthreads();
  const auto weight = [&](int i) { return weights[i]; };
  const auto one = [](int) { return std::uint64_t{1}; };
  // Sums over keys above `threshold`: of weights and of candidates; and the candidates at it.
  std::uint64_t weight_above, count_above, count_at;
  const auto sum_about = [&](std::uint32_t threshold) {
    std::uint64_t sums[3] = {0, 0, 0};
    for (int i = thread; i < vocab; i += kThreads) {
      const std::uint32_t key = logit_key(logits[i]);
      if (key > threshold) {
        sums[0] += weights[i];
        ++sums[1];
      } else if (key == threshold) {
        ++sums[2];
      }
    }
    block_sums(state, sums);
    weight_above = state.sum[0];
    count_above = state.sum[1];
    count_at = state.sum[2];
  };
  const auto weight_at = [&](std::uint32_t threshold) {
    const float logit =
        contract::float_of((threshold & 0x80000000u) ? threshold & 0x7fffffffu : ~threshold);
    return contract::sampler_weight(logit, maximum, request.temperature);
  };

  // Kept: keys above `threshold`, and the first `ties` at it. No finite logit has key 0.
  std::uint32_t threshold = 0;
  std::uint64_t ties = 0;
  if (request.top_k != 0 && request.top_k < static_cast<std::uint32_t>(vocab)) {
    threshold = search(state, logits, vocab, one,
                       [&](std::uint64_t count) { return count >= request.top_k; });
  }
  sum_about(threshold);
  if (threshold != 0) ties = request.top_k - count_above;
  std::uint64_t total = weight_above + (threshold != 0 ? ties * weight_at(threshold) : 0);

  if (fraction < (std::uint64_t{1} << 32)) {
    // Keys >= T weigh too much for top_p: true for every T at or below the threshold of top_k.
    const std::uint32_t lowest = search(state, logits, vocab, weight, [&](std::uint64_t sum) {
      return !within_top_p(sum, total, fraction);
    });
    sum_about(lowest);
    const std::uint64_t candidates = threshold != 0 && lowest == threshold ? ties : count_at;
    const std::uint64_t tie_weight = weight_at(lowest);
    // The first tie is kept; the largest count whose last one still is.
    std::uint64_t kept = 1, beyond = candidates + 1;
    while (beyond - kept > 1) {
      const std::uint64_t middle = kept + (beyond - kept) / 2;
      if (within_top_p(weight_above + (middle - 1) * tie_weight, total, fraction)) {
        kept = middle;
      } else {
        beyond = middle;
      }
    }
    threshold = lowest;
    ties = kept;
    total = weight_above + ties * tie_weight;
  }

  // The first kept id, ascending, at which the cumulative weight exceeds the target.
  const std::uint64_t target = contract::multiply_high(draw, total);
  const int share = (vocab + kThreads - 1) / kThreads;
  const int begin = thread * share < vocab ? thread * share : vocab;
  const int end = begin + share < vocab ? begin + share : vocab;
  std::uint64_t own_ties = 0;
  for (int i = begin; i < end; ++i) own_ties += logit_key(logits[i]) == threshold;
  const std::uint64_t ties_before = block_sum_before(state, own_ties);
  const auto walk = [&](const auto& visit) {
    std::uint64_t tie = ties_before;
    for (int i = begin; i < end; ++i) {
      const std::uint32_t key = logit_key(logits[i]);
      if (key > threshold || (key == threshold && tie++ < ties)) {
        if (!visit(i)) return;
      }
    }
  };
  std::uint64_t own_weight = 0;
  walk([&](int i) {
    own_weight += weights[i];
    return true;
  });
  std::uint64_t cumulative = block_sum_before(state, own_weight);
  if (target >= cumulative && target < cumulative + own_weight) {
    walk([&](int i) {
      cumulative += weights[i];
      if (cumulative <= target) return true;
      out[row] = i;
      return false;
    });
  }
}

}  // namespace

void sample(Context& context, std::int32_t* out, const float* logits, std::int64_t vocab,
            const SampleRow* requests, std::int64_t M) {
  Scratch<std::uint64_t> weights(context, static_cast<std::size_t>(M * vocab));
  sample_kernel<<<static_cast<unsigned>(M), kThreads, 0, context.stream>>>(
      out, weights.get(), logits, static_cast<int>(vocab), requests);
  BW_CUDA_LAUNCHED("sample");
}

}  // namespace bitwitness::cuda
