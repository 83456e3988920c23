// Kernels of matrix products with few rows of x, bound by the reading of W (contract.h section 3).
//
// In both families eight lanes copy 128 bytes of a row of W at a time: the next groups of the eight
// chains. A warp copies what it will multiply itself, asynchronously, into its own part of shared
// memory: a queue of kDepth batches that runs on from row to row without barriers, and that is
// filled before the kernels in front have ended (launch.cuh). Beyond K, x is -0 and W +0, which
// leaves a chain as it is.
//
// row_kernel: one row of x, all of it in shared memory, through its RMS norm if there is one. A
// warp takes two rows of W (of one matrix, or one of gate and of up) over all of K, four segments
// at a time; its lanes are the chains of those segments.
//
// segment_kernel: up to sixteen rows of x, one segment of them in shared memory. A block takes that
// segment of its rows of W, a warp sixteen rows at a time, and writes the segments' sums;
// combine_kernel adds them, ascending.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/context.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul.cuh"

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
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
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
__device__ __forceinline__ uint4 load_shared(std::uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// The part that a task belongs to.
__device__ __forceinline__ const Part& part_of(const Arguments& a, int task) {
  int p = 0;
  if (a.part_count > 1 && task >= a.parts[1].first_task) p = 1;
  if (a.part_count > 2 && task >= a.parts[2].first_task) p = 2;
  return a.parts[p];
}

// The sum of the chains of this lane and the seven others of its row and segment, ascending.
__device__ __forceinline__ float sum_of_chains(float chain) {
  const int first = static_cast<int>(threadIdx.x) % 32 & ~(kChains - 1);
  float t = __shfl_sync(0xffffffffu, chain, first);
#pragma unroll
  for (int c = 1; c < kChains; ++c) t = add32(t, __shfl_sync(0xffffffffu, chain, first + c));
  return t;
}

// ---- row_kernel

inline constexpr int kRowRows = 2;  // of W that a lane takes at once
inline constexpr int kRowMaxThreads = 512;

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

inline constexpr int kAhead = 16;  // weights of the norm that a thread reads ahead

__device__ __forceinline__ float upcast(Dtype dtype, std::uint32_t word) {
  if (dtype == Dtype::kFp32) return __uint_as_float(word);
  return dtype == Dtype::kBf16 ? upcast16<Dtype::kBf16>(word, 0) : upcast16<Dtype::kFp16>(word, 0);
}

// The norm's weights of this thread's first elements, thread + i * threads, all loads under way.
__device__ __forceinline__ void read_ahead(const Arguments& a, std::uint32_t (&ready)[kAhead]) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int K = a.norm == nullptr ? 0 : a.K;
  if (a.norm_dtype == Dtype::kFp32) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = thread + i * threads;
      ready[i] = k < K ? reinterpret_cast<const std::uint32_t*>(a.norm)[k] : 0;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = thread + i * threads;
      ready[i] = k < K ? reinterpret_cast<const std::uint16_t*>(a.norm)[k] : 0;
    }
  }
}

// x[K] into shared memory, through its RMS norm if there is one. `lanes` are kLanes floats. `ready`
// holds the norm's weights of the first kAhead elements k = thread + i * threads, read before the
// kernels in front had ended. All threads of the block; the caller's barrier follows.
__device__ __forceinline__ void stage_row(float* staged, const Arguments& a, float* lanes,
                                          const std::uint32_t (&ready)[kAhead]) {
  constexpr int kLanes = contract::kLanes;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int padded = a.segments * kSegment;
  if (a.norm == nullptr) {
    const float4* const from = reinterpret_cast<const float4*>(a.x);
    constexpr int kVectorsAtOnce = 8;
    const float4 absent = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
    for (int base = thread; base < padded / 4; base += kVectorsAtOnce * threads) {
      float4 v[kVectorsAtOnce];
#pragma unroll
      for (int i = 0; i < kVectorsAtOnce; ++i) {
        const int at = base + i * threads;
        v[i] = at * 4 < a.K ? from[at] : absent;
      }
#pragma unroll
      for (int i = 0; i < kVectorsAtOnce; ++i) {
        const int at = base + i * threads;
        if (at * 4 < padded) *reinterpret_cast<float4*>(staged + staged_index(at * 4)) = v[i];
      }
    }
    return;
  }
  for (int lane = thread; lane < kLanes; lane += threads) {
    float sum = 0.0f;
    for (int base = lane; base < padded; base += kAhead * kLanes) {
      float v[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int k = base + i * kLanes;
        v[i] = k < a.K ? a.x[k] : 0.0f;
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
      *p = contract::rms_norm_element(*p, scale, upcast(a.norm_dtype, ready[i]));
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

inline std::size_t row_kernel_shared_bytes(int segments, int threads, int depth) {
  return static_cast<std::size_t>(threads) * static_cast<std::size_t>(depth * kRowBatchBytes) +
         static_cast<std::size_t>(segments) * kSegment * sizeof(float) +
         contract::kLanes * sizeof(float);
}

// One row of x (M = 1). Any number of warps and blocks.
template <Dtype kDtype, int kDepth>
__global__ void __launch_bounds__(kRowMaxThreads, 1)
    row_kernel(const __grid_constant__ Arguments a) {
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
  float* const norm_lanes = staged + a.segments * kSegment;
  const std::uint32_t queue = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_vectors)) +
                              static_cast<std::uint32_t>(warp * kDepth * kSlotBytes + lane * 16);

  let_next_start();

  // Task t is taken by warp t / blocks of block t % blocks, so that blocks differ by one at most.
  const int blocks = static_cast<int>(gridDim.x);
  const int task_step = blocks * (threads / 32);
  RowStream<kDtype> stream;
  stream.task = warp * blocks + static_cast<int>(blockIdx.x);
  stream.pass = 0;
  stream.locate(a);
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
    }
    commit_copies();
  };
#pragma unroll 1
  for (int i = 0; i < kDepth; ++i) copy_batch(i);

  std::uint32_t ready[kAhead];
  read_ahead(a, ready);

  wait_for_previous();

  stage_row(staged, a, norm_lanes, ready);
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
    float residual[kRowRows];
#pragma unroll
    for (int r = 0; r < kRowRows; ++r) {
      const bool read = a.epilogue == Epilogue::kAdd && stores && first_n + r < part.N;
      residual[r] = read ? a.residual[first_n + r] : 0.0f;
    }
    float total[kRowRows];
    for (int first = 0; first < a.segments; first += a.segment_lanes) {
      const int segment = first + sub % a.segment_lanes;
      const float* x_chain =
          staged + (segment < a.segments ? segment : a.segments - 1) * kSegment + chain * 4;
      const int longest = a.K - first * kSegment;
      const int steps = longest < kSegment ? (longest + kStep - 1) / kStep : kSteps;
      float sum[kRowRows] = {};
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
          const float* const p = x_chain + (step + u) * kStep;
          const float4 first_half = *reinterpret_cast<const float4*>(p);
          const float4 second_half = *reinterpret_cast<const float4*>(p + kStep / 2);
          const float x[kGroup] = {first_half.x,  first_half.y,  first_half.z,  first_half.w,
                                   second_half.x, second_half.y, second_half.z, second_half.w};
#pragma unroll
          for (int i = 0; i < kGroup; ++i) {
#pragma unroll
            for (int r = 0; r < kRowRows; ++r) sum[r] = fma32(x[i], w[u][r].at(i), sum[r]);
          }
        }
        copy_batch(slot);
        slot = slot + 1 == kDepth ? 0 : slot + 1;
      }
#pragma unroll
      for (int r = 0; r < kRowRows; ++r) {
        const float t = sum_of_chains(sum[r]);
        for (int j = 0; j < a.segment_lanes; ++j) {
          const float of_segment =
              __shfl_sync(0xffffffffu, t, (row_lane * a.segment_lanes + j) * kChains);
          if (first + j == 0) {
            total[r] = of_segment;
          } else if (first + j < a.segments) {
            total[r] = add32(total[r], of_segment);
          }
        }
      }
    }
    if (stores && pair) {
      if (first_n < part.N) part.y[first_n] = contract::swiglu_element(total[0], total[1]);
    } else if (stores) {
#pragma unroll
      for (int r = 0; r < kRowRows; ++r) {
        if (first_n + r < part.N) {
          part.y[first_n + r] =
              a.epilogue == Epilogue::kAdd ? add32(residual[r], total[r]) : total[r];
        }
      }
    }
    __syncwarp();
  }
  wait_for_copies<0>();
}

// ---- segment_kernel and combine_kernel

// More threads have too few registers each, and a number of warps that is no multiple of four keeps
// some of the four schedulers waiting for the others.
constexpr int segment_max_threads(int rows) {
  return rows > 4 ? 256 : 384;
}
inline constexpr int kScratchFloats = 32 * 8;  // of a warp

template <Dtype kDtype>
inline constexpr int kSegmentRows = kDtype == Dtype::kFp32 ? 2 : 4;  // of W that a lane takes
inline constexpr int kSegmentStepBytes = 64;                         // of a lane

template <Dtype kDtype>
inline constexpr int kSegmentTaskRows = 4 * kSegmentRows<kDtype>;

inline std::size_t segment_kernel_shared_bytes(int rows, int threads, int depth, int batch_steps) {
  return static_cast<std::size_t>(threads) *
             static_cast<std::size_t>(depth * batch_steps * kSegmentStepBytes +
                                      kScratchFloats / 32 * 4) +
         static_cast<std::size_t>(rows) * kSegment * sizeof(float);
}

// What this lane copies next: of row lane / 8 of each four of the task, chain lane % 8.
template <Dtype kDtype>
struct SegmentStream {
  static constexpr int kRows = kSegmentRows<kDtype>;
  const std::byte* row[kRows];  // at the chain's next group
  int task;
  int k;  // of the next group, in the segment
  int steps_left;

  __device__ __forceinline__ void locate(const Arguments& a, int begin, int steps, int last_task) {
    if (task >= last_task) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int chain = lane % kChains, sub = lane / kChains;
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

// Which four rows of x and which k the index-th vector of staged x is, and where it lies.
template <int kQuads>
struct StagedPlace {
  int quad, k, at;

  __device__ __forceinline__ explicit StagedPlace(int index) {
    const int chain = index % 4 + index / 32 % 2 * 4, element = index / 4 % kGroup;
    const int rest = index / kStep, step = rest / kQuads;
    quad = rest % kQuads;
    k = step * kStep + chain * kGroup + element;
    at = (((step * kGroup + element) * kQuads + quad) * kChains + chain) * 4;
  }
};

// Multiplies kM rows of x, of which M exist, and stores the segment's sums in a.partial. Blocks:
// segments * the shares of the rows of W. The rows of x are the inner loop: they read one weight
// again and again, which then costs no read of a register.
template <Dtype kDtype, int kM, int kBatchSteps, int kDepth>
__global__ void __launch_bounds__(segment_max_threads(kM), 1)
    segment_kernel(const __grid_constant__ Arguments a) {
  constexpr int kVectors = WeightGroup<kDtype>::kVectors;
  constexpr int kRows = kSegmentRows<kDtype>;
  constexpr int kQuads = kM / 4;
  static_assert(kVectors * kRows * 16 == kSegmentStepBytes);
  extern __shared__ float4 shared_vectors[];
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = thread / 32;
  constexpr int kSlotBytes = kBatchSteps * kSegmentStepBytes * 32;
  // [warps][kDepth][vectors of a batch][32 lanes] x 16 bytes, then x, then the warps' scratch.
  float* const staged = reinterpret_cast<float*>(shared_vectors) +
                        threads * (kDepth * kBatchSteps * kSegmentStepBytes / 4);
  float* const scratch = staged + kM * kSegment + warp * kScratchFloats;
  const std::uint32_t queue = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_vectors)) +
                              static_cast<std::uint32_t>(warp * kDepth * kSlotBytes);
  // Eight lanes copy 128 bytes of a row of W; four neighbours multiply the same of x by four rows.
  // The chains' places are exchanged so that neither meets bank conflicts.
  const int chain = lane / 4, sub = lane % 4;
  const std::uint32_t queue_in =
      queue + static_cast<std::uint32_t>(lane / 8 * 128 + ((lane % 8) ^ (lane / 8 * 2)) * 16);
  const std::uint32_t queue_out =
      queue + static_cast<std::uint32_t>(sub * 128 + (chain ^ (sub * 2)) * 16);

  let_next_start();

  const int segment = static_cast<int>(blockIdx.x) % a.segments;
  const int blocks = static_cast<int>(gridDim.x) / a.segments;
  const int begin = segment * kSegment;
  const int length = a.K - begin < kSegment ? a.K - begin : kSegment;
  const int steps = (length + kStep - 1) / kStep;
  const std::int64_t index = static_cast<int>(blockIdx.x) / a.segments;
  const int first_task = static_cast<int>(a.tasks * index / blocks) + warp;
  const int end_task = static_cast<int>(a.tasks * (index + 1) / blocks);
  const int task_step = threads / 32;

  SegmentStream<kDtype> stream;
  stream.task = first_task;
  stream.locate(a, begin, steps, end_task);
  const auto copy_batch = [&](int slot) {
    if (stream.task < end_task) {
      const std::uint32_t to = queue_in + static_cast<std::uint32_t>(slot * kSlotBytes);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int u = 0; u < kBatchSteps; ++u) {
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            copy_async(to + ((u * kRows + r) * kVectors + i) * 512,
                       stream.row[r] + u * kStep * kElementBytes<kDtype> + 16 * i,
                       stream.k + u * kStep < length);
          }
        }
        stream.row[r] += kBatchSteps * kStep * kElementBytes<kDtype>;
      }
      stream.k += kBatchSteps * kStep;
      stream.steps_left -= kBatchSteps;
      if (stream.steps_left <= 0) {
        stream.task += task_step;
        stream.locate(a, begin, steps, end_task);
      }
    }
    commit_copies();
  };
#pragma unroll 1
  for (int i = 0; i < kDepth; ++i) copy_batch(i);

  wait_for_previous();

  // x as [steps][kGroup][kQuads][kChains][4 rows of x]. A warp reads 32 consecutive elements of a
  // row; its lanes are ordered so that writing meets few bank conflicts.
  constexpr int kAtOnce = kQuads < 2 ? 4 : 8;
  for (int base = thread; base < kQuads * kSegment; base += kAtOnce * threads) {
    float v[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const StagedPlace<kQuads> place(base + i * threads);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int m = place.quad * 4 + j;
        v[i][j] = -0.0f;
        if (m < a.M && place.k < length) {
          v[i][j] = a.x[static_cast<std::int64_t>(m) * a.K + begin + place.k];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const StagedPlace<kQuads> place(base + i * threads);
      if (base + i * threads < kQuads * kSegment) {
        *reinterpret_cast<float4*>(staged + place.at) =
            make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
      }
    }
  }
  __syncthreads();

  int slot = 0;
  for (int task = first_task; task < end_task; task += task_step) {
    float sum[kRows * kM];  // [kRows, kM]
#pragma unroll
    for (int i = 0; i < kRows * kM; ++i) sum[i] = 0.0f;
    const float* x_chain = staged + chain * 4;
#pragma unroll 1
    for (int step = 0; step < steps; step += kBatchSteps) {
      wait_for_copies<kDepth - 1>();
      __syncwarp();
      const std::uint32_t from = queue_out + static_cast<std::uint32_t>(slot * kSlotBytes);
      WeightGroup<kDtype> w[kBatchSteps][kRows];
#pragma unroll
      for (int u = 0; u < kBatchSteps; ++u) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            w[u][r].v[i] = load_shared(from + ((u * kRows + r) * kVectors + i) * 512);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kBatchSteps; ++u) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          float x[kM];
#pragma unroll
          for (int q = 0; q < kQuads; ++q) {
            const float4 v = *reinterpret_cast<const float4*>(
                x_chain + ((u * kGroup + i) * kQuads + q) * kChains * 4);
            x[4 * q] = v.x;
            x[4 * q + 1] = v.y;
            x[4 * q + 2] = v.z;
            x[4 * q + 3] = v.w;
          }
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const float weight = w[u][r].at(i);
#pragma unroll
            for (int m = 0; m < kM; ++m) {
              sum[r * kM + m] = fma32(weight, x[m], sum[r * kM + m]);
            }
          }
        }
      }
      x_chain += kBatchSteps * kStep * kM;
      __syncwarp();
      copy_batch(slot);
      slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
    // Eight sums at a time: written per lane, read as one output per lane. Neighbours change places
    // in the vectors, so that a sum and its element of x, which is loaded as a vector, lie in
    // registers of different parity: two reads of one register bank would cost a cycle.
    float* const out = a.partial + (segment * a.partial_rows +
                                    static_cast<std::int64_t>(task) * kSegmentTaskRows<kDtype>)*kM;
#pragma unroll
    for (int first = 0; first < kRows * kM; first += 8) {
      __syncwarp();
      float4* const to = reinterpret_cast<float4*>(scratch + (chain * 4 + sub) * 8);
      to[0] = make_float4(sum[first + 1], sum[first], sum[first + 3], sum[first + 2]);
      to[1] = make_float4(sum[first + 5], sum[first + 4], sum[first + 7], sum[first + 6]);
      __syncwarp();
      const int of_sub = lane / 8, index = first + (lane % 8 ^ 1);
      const float* const chains = scratch + of_sub * 8 + lane % 8;
      float t = chains[0];
#pragma unroll
      for (int c = 1; c < kChains; ++c) t = add32(t, chains[c * 32]);
      const int r = index / kM, m = index % kM;
      out[(4 * r + of_sub) * kM + m] = t;
    }
  }
  wait_for_copies<0>();
}

inline constexpr int kCombineThreads = 128;

// One thread adds the segments' sums of four rows of x and one row of W (with kSwiglu, one of gate
// and of up).
template <int kM, int kTaskRows>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ Arguments a) {
  constexpr int kQuads = kM / 4;
  constexpr int kAtOnce = 7;  // loads under way
  let_next_start();
  wait_for_previous();
  const int p = static_cast<int>(blockIdx.y);
  const Part& part = a.parts[p];
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x;
  const std::int64_t n = i / kQuads;
  const int quad = static_cast<int>(i % kQuads);
  if (n >= part.N) return;
  const bool pair = a.epilogue == Epilogue::kSwiglu;
  const std::int64_t step = a.partial_rows * kM;
  float residual[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int m = quad * 4 + j;
    residual[j] = a.epilogue == Epilogue::kAdd && m < a.M ? a.residual[m * part.N + n] : 0.0f;
  }
  float4 total[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (j == 1 && !pair) break;
    const std::int64_t row = std::int64_t{a.parts[pair ? j : p].first_task} * kTaskRows + n;
    const float* const from = a.partial + row * kM + quad * 4;
    float4 t = *reinterpret_cast<const float4*>(from);
    for (int first = 1; first < a.segments; first += kAtOnce) {
      float4 v[kAtOnce];
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        if (first + s < a.segments) {
          v[s] = *reinterpret_cast<const float4*>(from + (first + s) * step);
        }
      }
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        if (first + s < a.segments) {
          t = make_float4(add32(t.x, v[s].x), add32(t.y, v[s].y), add32(t.z, v[s].z),
                          add32(t.w, v[s].w));
        }
      }
    }
    total[j] = t;
  }
  const float first[4] = {total[0].x, total[0].y, total[0].z, total[0].w};
  const float second[4] = {total[1].x, total[1].y, total[1].z, total[1].w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int m = quad * 4 + j;
    if (m >= a.M) break;
    float value = first[j];
    if (pair) value = contract::swiglu_element(first[j], second[j]);
    if (a.epilogue == Epilogue::kAdd) value = add32(residual[j], value);
    part.y[m * part.N + n] = value;
  }
}

}  // namespace bitwitness::cuda::decode
