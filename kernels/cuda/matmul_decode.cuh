// Kernels of matrix products with few rows of x, bound by the reading of W (contract.h section 3).
//
// In both families eight lanes are the eight chains of one row of W in one segment of K, so that
// they read 64 consecutive weights at a time. Every lane copies what it will multiply itself,
// asynchronously, into its own slots of shared memory: a queue of kDepth batches that runs on from
// row to row without barriers, and that is filled before the kernels in front have ended
// (launch.cuh). Padding: x is -0 beyond K and W +0, which leaves a chain as it is.
//
// row_kernel: one or two rows of x, all of it in shared memory, its RMS norm included; a warp takes
// two rows of W (of one matrix, or one of gate and of up) over all of K, four segments at a time.
//
// segment_kernel: more rows of x, one segment of them in shared memory; a block takes that segment
// of its rows of W and writes the segments' sums; combine_kernel adds them, ascending.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/context.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul.cuh"

#ifndef BW_HINT
#define BW_HINT ".L2::128B"
#endif
namespace bitwitness::cuda::decode {

using contract::add32;
using contract::fma32;
using contract::kChains;
using contract::kGroup;
using contract::kSegment;

inline constexpr int kStep = kChains * kGroup;  // consecutive k of one row that are read at once
inline constexpr int kSteps = kSegment / kStep;
inline constexpr int kMaxParts = 3;

// One matrix; its rows are cut into tasks (what a warp takes at once), the first of which is
// `first_task` of the product.
struct Part {
  const std::byte* W;
  float* y;
  std::int64_t N;
  int first_task;
};

struct Arguments {
  const float* x;         // [M, K]
  const std::byte* norm;  // [K] or null
  const float* residual;  // [M, N] with kAdd
  float* partial;         // [segments, padded rows, kM], segment_kernel and combine_kernel
  Part parts[kMaxParts];
  std::int64_t partial_rows;  // rows of W of all parts, each padded to whole tasks
  int part_count;
  int tasks;
  int M;
  int K;
  int segments;
  int segment_lanes;  // row_kernel: how many segments a warp takes at once: 1, 2 or 4
  float eps;
  Dtype norm_dtype;
  Epilogue epilogue;
};

// Where element k of a row of x lies in shared memory: in each step first the first halves of the
// eight groups, then the second ones, so that eight chains read 128 consecutive bytes.
__device__ __forceinline__ int staged_index(int k) {
  return (k & ~(kStep - 1)) + ((k >> 2) & 1) * (kStep / 2) + ((k >> 3) & 7) * 4 + (k & 3);
}

// 16 bytes to shared memory, zeros where they are not present; done when wait_for_copies says so.
__device__ __forceinline__ void copy_async(std::uint32_t to, const std::byte* from, bool present) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global" BW_HINT " [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(present ? 16 : 0)
               : "memory");
#else
  uint4 v = make_uint4(0, 0, 0, 0);
  if (present) {
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
  }
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
#endif
}
__device__ __forceinline__ void end_of_batch() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until at most the kNewest latest batches of this thread are under way.
template <int kNewest>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
#endif
}

__device__ __forceinline__ uint4 load_shared(std::uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void prefetch_to_l2(const std::byte* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Per multiprocessor: whether a block there is still asking for weights. Only a hint of when to ask
// for the next kernel's: early ones would leave memory idle while one kernel follows the other.
inline constexpr int kMostMultiprocessors = 1024;
__device__ unsigned asking[kMostMultiprocessors];

__device__ __forceinline__ volatile unsigned* asking_here() {
  unsigned id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return asking + id % kMostMultiprocessors;
}
// All threads of the block. Waits, but not for ever, until the block in front asks for no more.
__device__ __forceinline__ void wait_for_turn() {
  if (threadIdx.x == 0) {
    volatile unsigned* const here = asking_here();
    for (int i = 0; i < 256 && *here != 0; ++i) {
    }
    *here = 1;
  }
  __syncthreads();
}
__device__ __forceinline__ void end_of_turn() {
  if (threadIdx.x == 0) *asking_here() = 0;
}

// The part that a task belongs to.
__device__ __forceinline__ const Part& part_of(const Arguments& a, int task) {
  int p = 0;
  if (a.part_count > 1 && task >= a.parts[1].first_task) p = 1;
  if (a.part_count > 2 && task >= a.parts[2].first_task) p = 2;
  return a.parts[p];
}

// chain + the chains of the seven lanes that follow `first` at distance kStride, ascending.
template <int kStride>
__device__ __forceinline__ float sum_of_chains(float chain, int first) {
  float t = __shfl_sync(0xffffffffu, chain, first);
#pragma unroll
  for (int c = 1; c < kChains; ++c) {
    t = add32(t, __shfl_sync(0xffffffffu, chain, first + c * kStride));
  }
  return t;
}

// ---- row_kernel

inline constexpr int kRowRows = 2;  // of W that a lane takes at once
inline constexpr int kRowMaxThreads = 256;

// What this lane reads next. A task is kRowRows rows for each of 4 / segment_lanes row lanes; it
// goes over K in passes of segment_lanes segments.
template <Dtype kDtype>
struct RowStream {
  const std::byte* row[kRowRows];  // at the chain's next group
  int task;
  int pass;
  int k;       // of the next group, in the segment
  int length;  // of the segment; 0 if there is none
  int steps_left;

  __device__ __forceinline__ void locate(const Arguments& a) {
    if (task >= a.tasks) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int chain = lane % kChains, sub = lane / kChains;
    const int row_lanes = 4 / a.segment_lanes, row_lane = sub / a.segment_lanes;
    const Part& part = part_of(a, task);
    const std::int64_t local = task - part.first_task;
    const int begin = (pass * a.segment_lanes + sub % a.segment_lanes) * kSegment;
    length = begin < a.K ? (a.K - begin < kSegment ? a.K - begin : kSegment) : 0;
    const int longest = a.K - pass * a.segment_lanes * kSegment;
    steps_left = longest < kSegment ? (longest + kStep - 1) / kStep : kSteps;
    k = chain * kGroup;
    const std::int64_t column = begin < a.K ? begin + k : 0;
#pragma unroll
    for (int r = 0; r < kRowRows; ++r) {
      const bool pair = a.epilogue == Epilogue::kSwiglu;
      std::int64_t n =
          pair ? local * row_lanes + row_lane : (local * row_lanes + row_lane) * kRowRows + r;
      if (n >= part.N) n = part.N - 1;
      const std::byte* W = pair ? a.parts[r].W : part.W;
      row[r] = W + (n * a.K + column) * kElementBytes<kDtype>;
    }
  }

  __device__ __forceinline__ void advance(const Arguments& a, int steps, int task_step) {
    k += steps * kStep;
    steps_left -= steps;
#pragma unroll
    for (int r = 0; r < kRowRows; ++r) row[r] += steps * kStep * kElementBytes<kDtype>;
    if (steps_left > 0) return;
    ++pass;
    if (pass * a.segment_lanes >= a.segments) {
      pass = 0;
      task += task_step;
    }
    locate(a);
  }
};

// x[K] into shared memory, through its RMS norm if there is one. `lanes` are kLanes floats. `ready`
// holds the norm's weights of the first kAhead elements k = thread + i * threads, read before the
// kernels in front had ended. All threads of the block; the caller's barrier follows.
inline constexpr int kAhead = 16;

__device__ __forceinline__ void stage_row(float* staged, const float* x, const Arguments& a,
                                          float* lanes, const float (&ready)[kAhead]) {
  constexpr int kLanes = contract::kLanes;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int padded = a.segments * kSegment;
  if (a.norm == nullptr) {
    const std::uint32_t to = static_cast<std::uint32_t>(__cvta_generic_to_shared(staged));
    for (int k = thread * 4; k < padded; k += threads * 4) {
      if (k < a.K) {
        copy_async(to + static_cast<std::uint32_t>(staged_index(k)) * 4,
                   reinterpret_cast<const std::byte*>(x + k), true);
      } else {
        *reinterpret_cast<float4*>(staged + staged_index(k)) =
            make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
      }
    }
    end_of_batch();
    wait_for_copies<0>();
    return;
  }
  for (int lane = thread; lane < kLanes; lane += threads) {
    float sum = 0.0f;
    for (int base = lane; base < padded; base += kAhead * kLanes) {
      float v[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int k = base + i * kLanes;
        v[i] = k < a.K ? x[k] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int k = base + i * kLanes;
        sum = fma32(v[i], v[i], sum);
        if (k < padded) staged[staged_index(k)] = k < a.K ? v[i] : -0.0f;
      }
    }
    lanes[lane] = sum;
  }
  __syncthreads();
  // Every warp folds the lanes for itself: thread t of it has lanes t, t + 32, ..., t + 224.
  float sum[kLanes / 32];
#pragma unroll
  for (int i = 0; i < kLanes / 32; ++i) sum[i] = lanes[thread % 32 + 32 * i];
#pragma unroll
  for (int width = kLanes / 64; width >= 1; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) sum[i] = add32(sum[i], sum[i + width]);
  }
#pragma unroll
  for (int width = 16; width >= 1; width /= 2) {
    sum[0] = add32(sum[0], __shfl_down_sync(0xffffffffu, sum[0], width));
  }
  const float scale = contract::rms_scale(__shfl_sync(0xffffffffu, sum[0], 0), a.K, a.eps);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int k = thread + i * threads;
    if (k < a.K) {
      float* const p = staged + staged_index(k);
      *p = contract::rms_norm_element(*p, scale, ready[i]);
    }
  }
  for (int k = thread + kAhead * threads; k < a.K; k += threads) {
    float* const p = staged + staged_index(k);
    *p = contract::rms_norm_element(*p, scale, contract::load_weight(a.norm_dtype, a.norm, k));
  }
}

template <Dtype kDtype>
inline constexpr int kRowBatchSteps = kDtype == Dtype::kFp32 ? 1 : 2;
inline constexpr int kRowBatchBytes = 2 * kRowRows * 16;  // of a lane

inline std::size_t row_kernel_shared_bytes(int rows, int segments, int threads, int depth) {
  return static_cast<std::size_t>(threads) * static_cast<std::size_t>(depth * kRowBatchBytes) +
         static_cast<std::size_t>(rows) * static_cast<std::size_t>(segments) * kSegment *
             sizeof(float) +
         contract::kLanes * sizeof(float);
}

// kWhen: when the next kernel may start: 0 at once, 1 when the last copies are under way.
template <Dtype kDtype, int kM, int kDepth, int kWhen = 2>
__global__ void __launch_bounds__(kRowMaxThreads, 2)
    row_kernel(const __grid_constant__ Arguments a, int prefetch_batches) {
  constexpr int kVectors = WeightGroup<kDtype>::kVectors;
  constexpr int kBatchSteps = kRowBatchSteps<kDtype>;
  static_assert(kVectors * kBatchSteps * kRowRows * 16 == kRowBatchBytes);
  extern __shared__ float4 shared_vectors[];
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = thread / 32;
  // [warps][kDepth][vectors of a batch][32 lanes] x 16 bytes, then x, then the norm's lanes.
  constexpr int kSlotBytes = kRowBatchBytes * 32;
  float* const staged =
      reinterpret_cast<float*>(shared_vectors) + threads * (kDepth * kRowBatchBytes / 4);
  const int padded = a.segments * kSegment;
  float* const norm_lanes = staged + kM * padded;
  const std::uint32_t queue = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_vectors)) +
                              static_cast<std::uint32_t>(warp * kDepth * kSlotBytes + lane * 16);

  if constexpr (kWhen != 1) let_next_start();
  if constexpr (kWhen == 2) wait_for_turn();

  // Task t is taken by warp t / blocks of block t % blocks, so that blocks differ by one at most.
  const int blocks = static_cast<int>(gridDim.x);
  const int task_step = blocks * (threads / 32);
  RowStream<kDtype> stream;
  stream.task = warp * blocks + static_cast<int>(blockIdx.x);
  stream.pass = 0;
  stream.locate(a);
  bool announced = false;
  const auto copy_batch = [&](int slot) {
    if (stream.task < a.tasks) {
      const std::uint32_t to = queue + static_cast<std::uint32_t>(slot * kSlotBytes);
#pragma unroll
      for (int u = 0; u < kBatchSteps; ++u) {
        const bool present = stream.k + u * kStep < stream.length;
#pragma unroll
        for (int r = 0; r < kRowRows; ++r) {
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            copy_async(to + ((u * kRowRows + r) * kVectors + i) * 512,
                       stream.row[r] + u * kStep * kElementBytes<kDtype> + 16 * i, present);
          }
        }
      }
      stream.advance(a, kBatchSteps, task_step);
    } else if (!announced) {
      announced = true;
      if constexpr (kWhen == 1) let_next_start();
      if constexpr (kWhen == 2) end_of_turn();
    }
    end_of_batch();
  };
#pragma unroll 1
  for (int i = 0; i < kDepth; ++i) copy_batch(i);

  if (prefetch_batches > 0) {
    RowStream<kDtype> ahead = stream;
#pragma unroll 1
    for (int i = 0; i < prefetch_batches && ahead.task < a.tasks; ++i) {
      if (lane % kChains < 2 && ahead.k < ahead.length) {  // a batch is two lines of a row
#pragma unroll
        for (int r = 0; r < kRowRows; ++r) {
          prefetch_to_l2(ahead.row[r] + lane % kChains * (128 - kGroup * kElementBytes<kDtype>));
        }
      }
      ahead.advance(a, kBatchSteps, task_step);
    }
  }

  float ready[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int k = thread + i * threads;
    ready[i] = a.norm != nullptr && k < a.K ? contract::load_weight(a.norm_dtype, a.norm, k) : 0.0f;
  }

  wait_for_previous();

#pragma unroll
  for (int m = 0; m < kM; ++m) {
    if (m > 0) __syncthreads();  // norm_lanes are used again
    stage_row(staged + m * padded, a.x + static_cast<std::int64_t>(m < a.M ? m : 0) * a.K, a,
              norm_lanes, ready);
  }
  __syncthreads();

  const int chain = lane % kChains, sub = lane / kChains;
  const int row_lanes = 4 / a.segment_lanes, row_lane = sub / a.segment_lanes;
  const bool pair = a.epilogue == Epilogue::kSwiglu;
  int slot = 0;
  for (int task = warp * blocks + static_cast<int>(blockIdx.x); task < a.tasks; task += task_step) {
    const Part& part = part_of(a, task);
    const std::int64_t local = task - part.first_task;
    const std::int64_t first_n = (local * row_lanes + row_lane) * (pair ? 1 : kRowRows);
    const bool stores = lane % (kChains * a.segment_lanes) == 0;
    float residual[kRowRows][kM];
#pragma unroll
    for (int r = 0; r < kRowRows; ++r) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        residual[r][m] = 0.0f;
        if (a.epilogue == Epilogue::kAdd && stores && first_n + r < part.N && m < a.M) {
          residual[r][m] = a.residual[m * part.N + first_n + r];
        }
      }
    }
    float total[kRowRows][kM];
    for (int first = 0; first < a.segments; first += a.segment_lanes) {
      const int segment = first + sub % a.segment_lanes;
      const float* x_chain =
          staged + (segment < a.segments ? segment : a.segments - 1) * kSegment + chain * 4;
      const int longest = a.K - first * kSegment;
      const int steps = longest < kSegment ? (longest + kStep - 1) / kStep : kSteps;
      float sum[kRowRows][kM];
#pragma unroll
      for (int r = 0; r < kRowRows; ++r) {
#pragma unroll
        for (int m = 0; m < kM; ++m) sum[r][m] = 0.0f;
      }
#pragma unroll 1
      for (int step = 0; step < steps; step += kBatchSteps) {
        wait_for_copies<kDepth - 1>();
        const std::uint32_t from = queue + static_cast<std::uint32_t>(slot * kSlotBytes);
        WeightGroup<kDtype> w[kBatchSteps][kRowRows];
#pragma unroll
        for (int u = 0; u < kBatchSteps; ++u) {
#pragma unroll
          for (int r = 0; r < kRowRows; ++r) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
              w[u][r].v[i] = load_shared(from + ((u * kRowRows + r) * kVectors + i) * 512);
            }
          }
        }
#pragma unroll
        for (int u = 0; u < kBatchSteps; ++u) {
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            const float* const p = x_chain + m * padded + (step + u) * kStep;
            const float4 first_half = *reinterpret_cast<const float4*>(p);
            const float4 second_half = *reinterpret_cast<const float4*>(p + kStep / 2);
            const float x[kGroup] = {first_half.x,  first_half.y,  first_half.z,  first_half.w,
                                     second_half.x, second_half.y, second_half.z, second_half.w};
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
#pragma unroll
              for (int r = 0; r < kRowRows; ++r) {
                sum[r][m] = fma32(x[i], w[u][r].at(i), sum[r][m]);
              }
            }
          }
        }
        copy_batch(slot);
        slot = slot + 1 == kDepth ? 0 : slot + 1;
      }
#pragma unroll
      for (int r = 0; r < kRowRows; ++r) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const float t = sum_of_chains<1>(sum[r][m], lane & ~(kChains - 1));
          for (int j = 0; j < a.segment_lanes; ++j) {
            const float of_segment =
                __shfl_sync(0xffffffffu, t, (row_lane * a.segment_lanes + j) * kChains);
            if (first + j == 0) {
              total[r][m] = of_segment;
            } else if (first + j < a.segments) {
              total[r][m] = add32(total[r][m], of_segment);
            }
          }
        }
      }
    }
    if (stores) {
      if (pair) {
        if (first_n < part.N) {
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            if (m < a.M) {
              part.y[m * part.N + first_n] = contract::swiglu_element(total[0][m], total[1][m]);
            }
          }
        }
      } else {
#pragma unroll
        for (int r = 0; r < kRowRows; ++r) {
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            if (first_n + r < part.N && m < a.M) {
              part.y[m * part.N + first_n + r] =
                  a.epilogue == Epilogue::kAdd ? add32(residual[r][m], total[r][m]) : total[r][m];
            }
          }
        }
      }
    }
  }
  wait_for_copies<0>();
  if (kWhen == 1 && !announced) let_next_start();
  if (kWhen == 2 && !announced) end_of_turn();
}

// ---- segment_kernel and combine_kernel

inline constexpr int kSegmentMaxThreads = 256;
inline constexpr int kScratchFloats = 32 * 8;  // of a warp

template <Dtype kDtype>
inline constexpr int kSegmentRows = kDtype == Dtype::kFp32 ? 2 : 4;  // of W that a lane takes
inline constexpr int kSegmentBatchBytes = 64;                        // of a lane

template <Dtype kDtype>
inline constexpr int kSegmentTaskRows = 4 * kSegmentRows<kDtype>;

inline std::size_t segment_kernel_shared_bytes(int rows, int threads, int depth) {
  return static_cast<std::size_t>(threads) *
             (static_cast<std::size_t>(depth) * kSegmentBatchBytes + kScratchFloats / 32 * 4) +
         static_cast<std::size_t>(rows) * kSegment * sizeof(float);
}

template <Dtype kDtype>
struct SegmentStream {
  static constexpr int kRows = kSegmentRows<kDtype>;
  const std::byte* row[kRows];
  int task;
  int k;
  int steps_left;

  __device__ __forceinline__ void locate(const Arguments& a, int begin, int steps) {
    if (task >= a.tasks) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int chain = lane % 8, sub = lane / 8;
    const Part& part = part_of(a, task);
    const std::int64_t first_n =
        static_cast<std::int64_t>(task - part.first_task) * kSegmentTaskRows<kDtype> + sub;
    k = chain * kGroup;
    steps_left = steps;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t n = first_n + 4 * r < part.N ? first_n + 4 * r : part.N - 1;
      // A chain without elements reads nothing; its address stays within the row all the same.
      const int column = begin + k < a.K ? begin + k : begin;
      row[r] = part.W + (n * a.K + column) * kElementBytes<kDtype>;
    }
  }
};

template <Dtype kDtype, int kM, int kDepth, int kWhen = 2, int kMap = 1>
__global__ void __launch_bounds__(kSegmentMaxThreads, kM == 16 ? 1 : 2)
    segment_kernel(const __grid_constant__ Arguments a, int prefetch_steps) {
  constexpr int kVectors = WeightGroup<kDtype>::kVectors;
  constexpr int kRows = kSegmentRows<kDtype>;
  static_assert(kVectors * kRows * 16 == kSegmentBatchBytes);
  extern __shared__ float4 shared_vectors[];
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = thread / 32;
  const int chain = kMap == 1 ? lane / 4 : lane % 8, sub = kMap == 1 ? lane % 4 : lane / 8;
  constexpr int kSlotBytes = kSegmentBatchBytes * 32;
  float* const staged =
      reinterpret_cast<float*>(shared_vectors) + threads * (kDepth * kSegmentBatchBytes / 4);
  float* const scratch = staged + kM * kSegment + warp * kScratchFloats;
  const std::uint32_t queue = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_vectors)) +
                              static_cast<std::uint32_t>(warp * kDepth * kSlotBytes);
  // Copied as eight lanes a row, read as four lanes a chain; without bank conflicts either way.
  const std::uint32_t queue_in =
      queue + (kMap == 1 ? (lane & 24) * 16 + ((lane & 7) ^ (lane / 8 * 2)) * 16 : lane * 16);
  const std::uint32_t queue_out =
      queue + (kMap == 1 ? (sub * 8 + (chain ^ (sub * 2))) * 16 : lane * 16);

  if constexpr (kWhen != 1) let_next_start();
  if constexpr (kWhen == 2) wait_for_turn();

  const int segment = static_cast<int>(blockIdx.x) % a.segments;
  const int blocks = static_cast<int>(gridDim.x) / a.segments;
  const int begin = segment * kSegment;
  const int length = a.K - begin < kSegment ? a.K - begin : kSegment;
  const int steps = (length + kStep - 1) / kStep;
  const int task_step = blocks * (threads / 32);
  const int first_task = warp * blocks + static_cast<int>(blockIdx.x) / a.segments;

  SegmentStream<kDtype> stream;
  stream.task = first_task;
  stream.locate(a, begin, steps);
  bool announced = false;
  const auto copy_step = [&](int slot) {
    if (stream.task < a.tasks) {
      const std::uint32_t to = queue_in + static_cast<std::uint32_t>(slot * kSlotBytes);
      const bool present = stream.k < length;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          copy_async(to + (r * kVectors + i) * 512, stream.row[r] + 16 * i, present);
        }
        stream.row[r] += kStep * kElementBytes<kDtype>;
      }
      stream.k += kStep;
      if (--stream.steps_left == 0) {
        stream.task += task_step;
        stream.locate(a, begin, steps);
      }
    } else if (!announced) {
      announced = true;
      if constexpr (kWhen == 1) let_next_start();
      if constexpr (kWhen == 2) end_of_turn();
    }
    end_of_batch();
  };
#pragma unroll 1
  for (int i = 0; i < kDepth; ++i) copy_step(i);

  if (prefetch_steps > 0 && stream.task < a.tasks) {  // the rest of the task under way
    const int count = prefetch_steps < stream.steps_left ? prefetch_steps : stream.steps_left;
    for (int i = lane % 8; i < count; i += kChains) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        prefetch_to_l2(stream.row[r] + (i * kStep - lane % 8 * kGroup) * kElementBytes<kDtype>);
      }
    }
  }

  wait_for_previous();

#pragma unroll 8
  for (int i = thread; i < kM * (kSegment / 4); i += threads) {
    const int m = i / (kSegment / 4), k = i % (kSegment / 4) * 4;
    const float4* const from =
        reinterpret_cast<const float4*>(a.x + static_cast<std::int64_t>(m) * a.K + begin + k);
    *reinterpret_cast<float4*>(staged + m * kSegment + staged_index(k)) =
        m < a.M && k < length ? *from : make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
  }
  __syncthreads();

  int slot = 0;
  for (int task = first_task; task < a.tasks; task += task_step) {
    float sum[kRows * kM];  // [kRows, kM]
#pragma unroll
    for (int i = 0; i < kRows * kM; ++i) sum[i] = 0.0f;
    const float* x_chain = staged + chain * 4;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_for_copies<kDepth - 1>();
      if constexpr (kMap == 1) __syncwarp();
      const std::uint32_t from = queue_out + static_cast<std::uint32_t>(slot * kSlotBytes);
      WeightGroup<kDtype> w[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          w[r].v[i] = load_shared(from + (r * kVectors + i) * 512);
        }
      }
      float weight[kRows][kGroup];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) weight[r][i] = w[r].at(i);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const float* const p = x_chain + m * kSegment;
        const float4 first_half = *reinterpret_cast<const float4*>(p);
        const float4 second_half = *reinterpret_cast<const float4*>(p + kStep / 2);
        const float x[kGroup] = {first_half.x,  first_half.y,  first_half.z,  first_half.w,
                                 second_half.x, second_half.y, second_half.z, second_half.w};
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            sum[r * kM + m] = fma32(x[i], weight[r][i], sum[r * kM + m]);
          }
        }
      }
      x_chain += kStep;
      if constexpr (kMap == 1) __syncwarp();
      copy_step(slot);
      slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
    // Eight sums at a time: written per lane, read as one output per lane.
    float* const out = a.partial + (segment * a.partial_rows +
                                    static_cast<std::int64_t>(task) * kSegmentTaskRows<kDtype>)*kM;
#pragma unroll
    for (int first = 0; first < kRows * kM; first += 8) {
      __syncwarp();
      float4* const to = reinterpret_cast<float4*>(scratch + (chain * 4 + sub) * 8);
      to[0] = make_float4(sum[first], sum[first + 1], sum[first + 2], sum[first + 3]);
      to[1] = make_float4(sum[first + 4], sum[first + 5], sum[first + 6], sum[first + 7]);
      __syncwarp();
      const int of_sub = lane / 8, index = first + lane % 8;
      const float* const chains = scratch + of_sub * 8 + lane % 8;
      float t = chains[0];
#pragma unroll
      for (int c = 1; c < kChains; ++c) t = add32(t, chains[c * 32]);
      const int r = index / kM, m = index % kM;
      out[(4 * r + of_sub) * kM + m] = t;
    }
  }
  wait_for_copies<0>();
  if (kWhen == 1 && !announced) let_next_start();
  if (kWhen == 2 && !announced) end_of_turn();
}

inline constexpr int kCombineThreads = 128;

// One thread for kQuad rows of x and one row of W (with kSwiglu, one of gate and of up).
template <int kM, int kTaskRows>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ Arguments a) {
  constexpr int kQuads = kM / 4;
  let_next_start();
  wait_for_previous();
  const int p = static_cast<int>(blockIdx.y);
  const Part& part = a.parts[p];
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x;
  const std::int64_t n = i / kQuads;
  const int quad = static_cast<int>(i % kQuads);
  if (n >= part.N) return;
  const bool pair = a.epilogue == Epilogue::kSwiglu;
  float4 total[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (j == 1 && !pair) break;
    const std::int64_t row =
        static_cast<std::int64_t>(a.parts[pair ? j : p].first_task) * kTaskRows + n;
    const float* from = a.partial + row * kM + quad * 4;
    float4 t = *reinterpret_cast<const float4*>(from);
#pragma unroll 8
    for (int s = 1; s < a.segments; ++s) {
      from += a.partial_rows * kM;
      const float4 v = *reinterpret_cast<const float4*>(from);
      t = make_float4(add32(t.x, v.x), add32(t.y, v.y), add32(t.z, v.z), add32(t.w, v.w));
    }
    total[j] = t;
  }
  const float first[4] = {total[0].x, total[0].y, total[0].z, total[0].w};
  const float second[4] = {total[1].x, total[1].y, total[1].z, total[1].w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int m = quad * 4 + j;
    if (m >= a.M) break;
    const std::int64_t at = m * part.N + n;
    float value = first[j];
    if (pair) value = contract::swiglu_element(first[j], second[j]);
    if (a.epilogue == Epilogue::kAdd) value = add32(a.residual[at], value);
    part.y[at] = value;
  }
}

}  // namespace bitwitness::cuda::decode
