// y[M, N] = x[M, K] W[N, K]^T for tens of rows of x, bound by multiply-adds (contract.h section 3).
//
// A block keeps kM rows of x over one segment of K in shared memory, transposed; its warps, on
// their own, take tiles of 16 columns and stream the tiles' weights of that segment. A warp's lanes
// are the 8 chains times two halves of the rows times two halves of the columns, so that a step is
// 8 outer products per lane and every weight is upcast by one lane only. At the end of the segment
// the chain sums are exchanged among the lanes through shared memory and added, ascending; the
// segment's sums go to memory, and a second kernel adds them, ascending, and does the epilogue.
// Which block takes which tiles of which segment (and rows, if M > kM) is fixed by the shape: see
// Schedule.
#include <algorithm>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/context.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul.cuh"

namespace bitwitness::cuda {
namespace {

using contract::add32;
using contract::fma32;
using contract::kChains;
using contract::kGroup;
using contract::kSegment;

constexpr int kStep = kChains * kGroup;  // k that a warp takes at once
constexpr int kMaxSteps = kSegment / kStep;
constexpr int kMaxParts = 3;
constexpr int kQuad = 4;     // rows, or columns, of one 16-byte vector of binary32
constexpr int kColumns = 8;  // of a lane
constexpr int kTileN = 2 * kColumns;
constexpr int kTileQuads = kTileN / kQuad;
constexpr int kBarrierBytes = kMaxSteps * 8;
constexpr int kXAhead = 3;  // steps that x is copied before it is needed
#if __CUDA_ARCH__ >= 800
constexpr bool kAsynchronous = true;
#else
constexpr bool kAsynchronous = false;
#endif
// Weights of one step in binary32, per warp: [chains, kGroup, kTileN], a chain padded by 32 bytes.
constexpr int kWGroupBytes = kTileN * 4;
constexpr int kWChainBytes = kGroup * kWGroupBytes + 32;
constexpr int kWBytes = kChains * kWChainBytes;
// Chain sums are exchanged there too, kRoundRows rows at a time; then a lane adds those of a quad.
constexpr int kRoundRows = 32 / kTileQuads;
static_assert(kRoundRows * kChains * kTileQuads * 16 <= kWBytes);

// The shape of a block's work.
template <Dtype kDtype_, int kM_, int kWarps_>
struct Tile {
  static constexpr Dtype kDtype = kDtype_;
  static constexpr int kM = kM_, kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = kM / 2;                   // of a lane
  static constexpr int kRowSlots = kRows <= 8 ? 8 : 16;  // places for them in shared memory
  static constexpr int kRowQuads = kRowSlots / kQuad;
  static constexpr int kRounds = kM / kRoundRows;
  static_assert(kRows % kQuad == 0 && kRows <= kRowSlots && kM % kRoundRows == 0);
  // x: [steps, chains, kGroup, 2 * kRowSlots], a chain padded by 16 bytes and quads of rows
  // swizzled by k % kGroup, so that neither copies nor loads have conflicts.
  static constexpr int kXGroupBytes = 2 * kRowSlots * 4;
  static constexpr int kXChainBytes = kGroup * kXGroupBytes + 16;
  static constexpr int kXStepBytes = kChains * kXChainBytes;
  static constexpr int kXBytes = kMaxSteps * kXStepBytes;
  // Per warp: the weights of one step as they lie in memory, and two steps in binary32.
  static constexpr int kGroupBytes = kGroup * kElementBytes<kDtype>;
  static constexpr int kStageBytes = kTileN * kChains * kGroupBytes;
  static constexpr int kWarpBytes = kStageBytes + 2 * kWBytes;
  static constexpr std::size_t kSharedBytes = kXBytes + kWarps * kWarpBytes + kBarrierBytes;
  static_assert(kSharedBytes <= 227 * 1024);
};

// Units of work are (combination, tile): a combination is a segment of K and kM rows of x. The
// first `full` blocks of each combination take `quota` tiles each; the tiles that are left of all
// combinations are cut into equal shares for further blocks.
struct Schedule {
  int combinations = 0, row_tiles = 0, tiles = 0;
  int full = 0, quota = 0, share = 0;
  int blocks = 0;
};

struct Arguments {
  const float* x;
  float* partial;  // [segments, M, width]
  const std::byte* W[kMaxParts];
  std::int64_t N[kMaxParts];
  int first_tile[kMaxParts];  // of each part; of a part that is not there, the number of tiles
  std::int64_t K, width;
  int M;
  Schedule schedule;
};

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes to shared memory, or 16 zero bytes if not `valid` (`source` is not read then).
// Bypasses L1, so that what an earlier kernel wrote is seen.
__device__ __forceinline__ void copy16(unsigned char* target, const void* source, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(target)),
      "l"(source), "r"(valid ? 16 : 0)
      : "memory");
#else
  *reinterpret_cast<uint4*>(target) =
      valid ? __ldcg(static_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
#endif
}

// Copies 4 bytes to shared memory.
__device__ __forceinline__ void copy4(unsigned char* target, const void* source) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(target)), "l"(source)
               : "memory");
#else
  *reinterpret_cast<float*>(target) = __ldcg(static_cast<const float*>(source));
#endif
}

// Barriers on which a block's copies of x arrive, one per step. Before sm_80 copies are not
// asynchronous and the block synchronises instead.
__device__ __forceinline__ void init_barrier(unsigned barrier, unsigned arrivals) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

__device__ __forceinline__ void arrive_after_copies(unsigned barrier) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

__device__ __forceinline__ void wait_barrier(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 800
  unsigned done;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
#endif
  } while (done == 0);
#endif
}

// The groups of one chain of a quad of columns, which one lane copies and upcasts.
template <Dtype kDtype>
struct QuadGroups {
  WeightGroup<kDtype> column[kQuad];

  __device__ __forceinline__ void load(const unsigned char* stage) {
    constexpr int kVectors = WeightGroup<kDtype>::kVectors;
#pragma unroll
    for (int n = 0; n < kQuad; ++n) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        column[n].v[v] = *reinterpret_cast<const uint4*>(stage + (n * kChains * kVectors + v) * 16);
      }
    }
  }
  // Stores them in binary32, neighbouring columns swapped: see batch_kernel.
  __device__ __forceinline__ void store(unsigned char* target) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      *reinterpret_cast<float4*>(target + i * kWGroupBytes) =
          make_float4(column[1].at(i), column[0].at(i), column[3].at(i), column[2].at(i));
    }
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    batch_kernel(const __grid_constant__ Arguments a) {
  constexpr int kBytes = kElementBytes<T::kDtype>;
  extern __shared__ float4 shared_vectors[];
  unsigned char* const x_shared = reinterpret_cast<unsigned char*>(shared_vectors);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  unsigned char* const stage = x_shared + T::kXBytes + warp * T::kWarpBytes;
  unsigned char* const w_shared = stage + T::kStageBytes;
  const unsigned barriers = shared_address(x_shared + T::kXBytes + T::kWarps * T::kWarpBytes);
  if (thread < kMaxSteps) init_barrier(barriers + thread * 8, T::kThreads);

  // As a multiplier, this lane is a chain of rows lane_row * kRows + ... and of every second quad
  // of columns of the tile.
  const int chain = lane / 4, lane_row = lane / 2 % 2, lane_column = lane % 2;
  const unsigned char* const x_lane = x_shared + chain * T::kXChainBytes;
  const unsigned char* const w_lane = w_shared + chain * kWChainBytes + lane_column * 16;

  // As a copier of weights, it copies one chain's group of a quad of columns, which it later
  // upcasts: nobody else sees them before.
  const int copy_chain = lane % kChains, copy_quad = lane / kChains;
  unsigned char* const copy_target =
      stage + (copy_quad * kQuad * kChains + copy_chain) * T::kGroupBytes;
  unsigned char* const upcast_target = w_shared + copy_chain * kWChainBytes + copy_quad * 16;

  const Schedule& schedule = a.schedule;
  const int block = static_cast<int>(blockIdx.x);
  const int full_blocks = schedule.combinations * schedule.full;
  int unit = 0, unit_end = 1;  // of the tiles that are left
  const int left = schedule.tiles - schedule.full * schedule.quota;
  if (block >= full_blocks) {
    unit = (block - full_blocks) * schedule.share;
    unit_end = min(unit + schedule.share, left * schedule.combinations);
  }
  unsigned phases = 0;  // of the barriers
  for (bool first_run = true; unit < unit_end; first_run = false) {
    int combination, tile_begin, tile_end;
    if (block < full_blocks) {
      combination = block % schedule.combinations;
      tile_begin = block / schedule.combinations * schedule.quota;
      tile_end = tile_begin + schedule.quota;
      unit = unit_end;
    } else {
      combination = unit / left;
      const int first = unit % left, count = min(left - first, unit_end - unit);
      tile_begin = schedule.full * schedule.quota + first;
      tile_end = tile_begin + count;
      unit += count;
    }
    const int segment = combination / schedule.row_tiles;
    const int row_begin = combination % schedule.row_tiles * T::kM;
    const std::int64_t k_begin = static_cast<std::int64_t>(segment) * kSegment;
    const int length = static_cast<int>(a.K - k_begin < kSegment ? a.K - k_begin : kSegment);
    const int steps = (length + kStep - 1) / kStep;

    // What is copied next: step `copy_step` of tile `copy_tile`. Pieces beyond K are zero; x holds
    // -0 there, and the product, -0, leaves every sum as it is. Columns beyond N repeat the last.
    int copy_tile = tile_begin + warp, copy_step = 0;
    const std::byte* source = nullptr;  // of the first column of the tile
    unsigned column_offset[kQuad];
    const auto start_tile = [&] {
      const int part = copy_tile < a.first_tile[1] ? 0 : copy_tile < a.first_tile[2] ? 1 : 2;
      const std::byte* const W = part == 0 ? a.W[0] : part == 1 ? a.W[1] : a.W[2];
      const std::int64_t N = part == 0 ? a.N[0] : part == 1 ? a.N[1] : a.N[2];
      const int first = part == 0 ? 0 : part == 1 ? a.first_tile[1] : a.first_tile[2];
      const std::int64_t base = static_cast<std::int64_t>(copy_tile - first) * kTileN;
      const int last = static_cast<int>(N - base < kTileN ? N - base : kTileN) - 1;
      source = W + (base * a.K + k_begin + copy_chain * kGroup) * kBytes;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const int n = copy_quad * kQuad + i;
        column_offset[i] =
            static_cast<unsigned>(min(n, last)) * static_cast<unsigned>(a.K * kBytes);
      }
    };
    const auto copy_next = [&] {
      if (copy_tile < tile_end) {
        if (copy_step == 0) start_tile();
        const bool valid = copy_step * kStep + copy_chain * kGroup < length;
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
#pragma unroll
          for (int v = 0; v < T::kGroupBytes; v += 16) {
            copy16(copy_target + i * kChains * T::kGroupBytes + v, source + column_offset[i] + v,
                   valid);
          }
        }
        source += kStep * kBytes;
        if (++copy_step == steps) {
          copy_step = 0;
          copy_tile += T::kWarps;
        }
      }
      commit_copies();
    };

    __syncthreads();  // barriers are initialised; x of the run before is not needed any more
    copy_next();      // weights depend on no other kernel
    if (first_run) wait_for_previous();

    // x: rows beyond M repeat the last. Lane l copies k = l % kGroup of row l / kGroup.
    const auto x_place = [&](int row, int k) {
      const int slot = row / T::kRows * T::kRowSlots + row % T::kRows, i = k % kGroup;
      constexpr int kMask = 2 * T::kRowQuads - 1;
      return x_shared + k / kGroup * T::kXChainBytes + i * T::kXGroupBytes +
             ((slot / kQuad) ^ (i & kMask)) * 16 + slot % kQuad * 4;
    };
    if (length % kStep != 0) {
      for (int i = thread; i < T::kM * kStep; i += T::kThreads) {
        const int row = i / kStep, k = (steps - 1) * kStep + i % kStep;
        if (k >= length) *reinterpret_cast<float*>(x_place(row, k)) = -0.0f;
      }
    }
    // A warp copies one chain's group of four rows at a time.
    const int rows = a.M - row_begin;
    const auto copy_x = [&](int s) {
      constexpr int kMask = 2 * T::kRowQuads - 1;
      const int swizzle = lane % kGroup & kMask;
      if (T::kWarps == kChains && s * kStep + warp * kGroup < length) {
        const float* source = a.x + (row_begin + min(lane / kGroup, rows - 1)) * a.K + k_begin +
                              s * kStep + warp * kGroup + lane % kGroup;
        unsigned char* const target = x_shared + s * T::kXStepBytes + warp * T::kXChainBytes +
                                      lane % kGroup * T::kXGroupBytes + lane / kGroup * 4;
#pragma unroll
        for (int row = 0; row < T::kM; row += kQuad) {
          const int quad = (row / T::kRows * T::kRowSlots + row % T::kRows) / kQuad;
          copy4(target + (quad ^ swizzle) * 16, source);
          if (row + kQuad + lane / kGroup < rows) source += kQuad * a.K;
        }
      }
      if (T::kWarps != kChains) {
#pragma unroll 1
        for (int u = warp; u < kChains * T::kM / kQuad; u += T::kWarps) {
          const int row = u / kChains * kQuad + lane / kGroup;
          const int k = s * kStep + u % kChains * kGroup + lane % kGroup;
          if (k < length) {
            copy4(x_place(row, k), a.x + (row_begin + min(row, rows - 1)) * a.K + k_begin + k);
          }
        }
      }
      arrive_after_copies(barriers + s * 8);
    };
    // A warp with a tile copies the rest step by step, shortly before it is needed.
    const bool has_tile = tile_begin + warp < tile_end;
    const int ahead = kAsynchronous && has_tile ? min(kXAhead, steps) : steps;
    for (int s = 0; s < ahead; ++s) copy_x(s);
    if (!kAsynchronous || length % kStep != 0) __syncthreads();

    bool first_tile = true;
    float sum[T::kRows][kColumns];
    float x[2][T::kRows], w[2][kColumns];
    const auto load_x = [&](int i, const unsigned char* x_step, float(&xs)[T::kRows]) {
      const int row_slot = i / T::kRowQuads % 2 == 0 ? lane_row : 1 - lane_row;
#pragma unroll
      for (int q = 0; q < T::kRows / kQuad; ++q) {
        const float4 v = *reinterpret_cast<const float4*>(x_step + i * T::kXGroupBytes +
                                                          row_slot * (T::kRowSlots * 4) +
                                                          (q ^ (i % T::kRowQuads)) * 16);
        xs[q * 4] = v.x, xs[q * 4 + 1] = v.y, xs[q * 4 + 2] = v.z, xs[q * 4 + 3] = v.w;
      }
    };
    const auto load_w = [&](int i, const unsigned char* w_step, float(&ws)[kColumns]) {
#pragma unroll
      for (int q = 0; q < kColumns / kQuad; ++q) {
        const float4 v = *reinterpret_cast<const float4*>(w_step + i * kWGroupBytes + q * 2 * 16);
        ws[q * 4 + 1] = v.x, ws[q * 4] = v.y, ws[q * 4 + 3] = v.z, ws[q * 4 + 2] = v.w;
      }
    };
    int buffer = 0;  // byte offset of this step's weights
    if (has_tile) {
      wait_for_copies<0>();
      QuadGroups<T::kDtype> raw;
      raw.load(copy_target);
      raw.store(upcast_target);
      wait_barrier(barriers, phases & 1);
      load_x(0, x_lane, x[0]);
    }
    for (int tile = tile_begin + warp; tile < tile_end; tile += T::kWarps) {
#pragma unroll
      for (int m = 0; m < T::kRows; ++m) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) sum[m][n] = 0.0f;
      }
      const unsigned char* x_now = x_lane;
      for (int s = 0; s < steps; ++s) {
        // All that branches or synchronizes is here, between straight lines of multiply-adds.
        copy_next();
        if (first_tile) {
          if (kAsynchronous && s + kXAhead < steps) copy_x(s + kXAhead);
          if (s + 1 < steps) wait_barrier(barriers + (s + 1) * 8, phases >> (s + 1) & 1);
        }
        __syncwarp();  // this step's weights are there for all lanes; all are done with those
                       // before
        const unsigned char* const w_now = w_lane + buffer;
        const unsigned char* const x_next = s + 1 < steps ? x_now + T::kXStepBytes : x_lane;
        buffer = kWBytes - buffer;
        load_w(0, w_now, w[0]);
        // The next step's weights are upcast as late as it can be.
        constexpr int kStoreAt = kGroup - 2, kLoadAt = kStoreAt - (kBytes == 2 ? 1 : 0);
        QuadGroups<T::kDtype> raw;
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if (i + 1 < kGroup) {
            load_x(i + 1, x_now, x[(i + 1) % 2]);
            load_w(i + 1, w_now, w[(i + 1) % 2]);
          } else {
            load_x(0, x_next, x[0]);
          }
          if (i == kLoadAt) {
            wait_for_copies<0>();
            raw.load(copy_target);
          }
          if (i == kStoreAt) raw.store(upcast_target + buffer);
            // Registers are in two banks, even and odd, each of which gives one operand a cycle,
            // and an operand that the multiply-add before had too is not read again. Hence to and
            // fro over the columns: either x or w stays. Neighbouring columns of w are swapped in
            // shared memory: w[n] and sum[m][n], both in aligned quads, are then in different
            // banks.
#pragma unroll
          for (int m = 0; m < T::kRows; ++m) {
#pragma unroll
            for (int p = 0; p < kColumns; ++p) {
              const int n = (m + i * T::kRows) % 2 == 0 ? kColumns - 1 - p : p;
              sum[m][n] = fma32(x[i % 2][m], w[i % 2][n], sum[m][n]);
            }
          }
        }
        x_now = x_next;
      }
      first_tile = false;

      // Exchange, in the place of the step just done: [kRoundRows, chains, kTileQuads] vectors,
      // swizzled against conflicts.
      const int sum_row = lane / kTileQuads, sum_quad = lane % kTileQuads;
      const auto at = [&](int row, int c, int quad) {
        return reinterpret_cast<float4*>(w_shared + kWBytes - buffer) +
               (row * kChains + (c ^ (row & 1))) * kTileQuads + quad;
      };
      constexpr int kThreadRows = kRoundRows / 2;  // of a round
#pragma unroll
      for (int round = 0; round < T::kRounds; ++round) {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kThreadRows; ++j) {
#pragma unroll
          for (int q = 0; q < kColumns / kQuad; ++q) {
            const float* const s = sum[round * kThreadRows + j] + q * kQuad;
            *at(lane_row * kThreadRows + j, chain, q * 2 + lane_column) =
                make_float4(s[0], s[1], s[2], s[3]);
          }
        }
        __syncwarp();
        float4 t = *at(sum_row, 0, sum_quad);
#pragma unroll
        for (int c = 1; c < kChains; ++c) {
          const float4 u = *at(sum_row, c, sum_quad);
          t.x = add32(t.x, u.x);
          t.y = add32(t.y, u.y);
          t.z = add32(t.z, u.z);
          t.w = add32(t.w, u.w);
        }
        const int m = row_begin + sum_row / kThreadRows * T::kRows + round * kThreadRows +
                      sum_row % kThreadRows;
        if (m < a.M) {
          *reinterpret_cast<float4*>(
              a.partial + (static_cast<std::int64_t>(segment) * a.M + m) * a.width +
              static_cast<std::int64_t>(tile) * kTileN + sum_quad * kQuad) = t;
        }
      }
    }
    phases ^= (1u << steps) - 1;
  }
  let_next_start();
}

struct FinishArguments {
  const float* partial;  // [segments, M, width]
  const float* residual;
  float* y[kMaxParts];
  std::int64_t N[kMaxParts];
  int first_quad[kMaxParts];  // of each part; of a part that is not there, the number of quads
  int quads;                  // of a row of partial; with kSwiglu, of the gate only
  int segments, M;
  std::int64_t width;
  bool vectors;  // rows of y and residual can be accessed 16 bytes at a time
};

// The segments' sums of 4 columns, added ascending.
__device__ __forceinline__ float4 add_segments(const float* partial, std::int64_t stride,
                                               int segments) {
  constexpr int kBatch = 8;
  float4 total = make_float4(0, 0, 0, 0);
  for (int s = 0; s < segments; s += kBatch) {
    float4 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (s + i < segments) {
        v[i] = __ldcg(reinterpret_cast<const float4*>(partial + (s + i) * stride));
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (s + i == 0) {
        total = v[i];
      } else if (s + i < segments) {
        total.x = add32(total.x, v[i].x);
        total.y = add32(total.y, v[i].y);
        total.z = add32(total.z, v[i].z);
        total.w = add32(total.w, v[i].w);
      }
    }
  }
  return total;
}

constexpr int kFinishThreads = 256;

template <Epilogue kEpilogue>
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ FinishArguments a) {
  let_next_start();
  wait_for_previous();
  const std::int64_t index =
      static_cast<std::int64_t>(blockIdx.x) * kFinishThreads + static_cast<int>(threadIdx.x);
  const std::int64_t m = index / a.quads;
  const int quad = static_cast<int>(index % a.quads);
  if (m >= a.M) return;
  const std::int64_t stride = a.M * a.width;
  const float* const partial = a.partial + m * a.width + quad * kQuad;
  const float4 total = add_segments(partial, stride, a.segments);
  float dots[kQuad] = {total.x, total.y, total.z, total.w};
  if constexpr (kEpilogue == Epilogue::kSwiglu) {
    const float4 up = add_segments(partial + a.first_quad[1] * kQuad, stride, a.segments);
    const float ups[kQuad] = {up.x, up.y, up.z, up.w};
#pragma unroll
    for (int i = 0; i < kQuad; ++i) dots[i] = contract::swiglu_element(dots[i], ups[i]);
  }
  const int part = quad < a.first_quad[1] ? 0 : quad < a.first_quad[2] ? 1 : 2;
  float* const y = part == 0 ? a.y[0] : part == 1 ? a.y[1] : a.y[2];
  const std::int64_t N = part == 0 ? a.N[0] : part == 1 ? a.N[1] : a.N[2];
  const int first = part == 0 ? 0 : part == 1 ? a.first_quad[1] : a.first_quad[2];
  const std::int64_t n = static_cast<std::int64_t>(quad - first) * kQuad;
  if (n >= N) return;
  const std::int64_t at = m * N + n;
  if (a.vectors) {
    if constexpr (kEpilogue == Epilogue::kAdd) {
      const float4 r = __ldcg(reinterpret_cast<const float4*>(a.residual + at));
      dots[0] = add32(r.x, dots[0]);
      dots[1] = add32(r.y, dots[1]);
      dots[2] = add32(r.z, dots[2]);
      dots[3] = add32(r.w, dots[3]);
    }
    *reinterpret_cast<float4*>(y + at) = make_float4(dots[0], dots[1], dots[2], dots[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    if (n + i < N) {
      if constexpr (kEpilogue == Epilogue::kAdd)
        dots[i] = add32(__ldcg(a.residual + at + i), dots[i]);
      y[at + i] = dots[i];
    }
  }
}

// The least quota, in multiples of what keeps the four schedulers of a multiprocessor equally busy,
// for which the blocks suffice. Blocks that take tiles of several combinations load x anew for
// each, which kSwitch tiles stand for.
Schedule make_schedule(int combinations, int row_tiles, int tiles, int blocks) {
  constexpr int kEven = 4;
  constexpr int kSwitch = 2;
  const auto even = [](std::int64_t count) {
    return count <= kEven ? count : (count + kEven - 1) / kEven * kEven;
  };
  Schedule schedule;
  schedule.combinations = combinations;
  schedule.row_tiles = row_tiles;
  schedule.tiles = tiles;
  std::int64_t quota = even((std::int64_t{combinations} * tiles + blocks - 1) / blocks);
  for (;; quota = even(quota + 1)) {
    const std::int64_t full = tiles / quota, left = (tiles - full * quota) * combinations;
    const std::int64_t more = blocks - full * combinations;
    if (more < 0 || (more == 0 && left != 0)) continue;
    std::int64_t share = 0;
    if (left != 0) {
      share = even((left + more - 1) / more);
      const std::int64_t runs = (share - 1) / (tiles - full * quota) + 1;
      if (full != 0 && share + (runs > 1 ? runs * kSwitch : 0) > quota) continue;
    }
    schedule.full = static_cast<int>(full);
    schedule.quota = static_cast<int>(quota);
    schedule.share = static_cast<int>(share);
    schedule.blocks =
        static_cast<int>(full * combinations + (left == 0 ? 0 : (left + share - 1) / share));
    return schedule;
  }
}

template <class T>
void launch(Context& context, const Product& product) {
  Arguments a{};
  FinishArguments f{};
  const int segments = static_cast<int>((product.K + kSegment - 1) / kSegment);
  const int row_tiles = static_cast<int>((product.M + T::kM - 1) / T::kM);
  int tiles = 0;
  bool vectors = reinterpret_cast<std::uintptr_t>(product.residual) % 16 == 0;
  for (int p = 0; p < kMaxParts; ++p) {
    a.first_tile[p] = tiles;
    f.first_quad[p] = tiles * (kTileN / kQuad);
    if (p >= product.part_count) continue;
    const ProductPart& part = product.parts[p];
    a.W[p] = part.W;
    a.N[p] = f.N[p] = part.N;
    f.y[p] = part.y;
    tiles += static_cast<int>((part.N + kTileN - 1) / kTileN);
    if (product.epilogue == Epilogue::kSwiglu && p == 1) continue;
    vectors = vectors && part.N % kQuad == 0 && reinterpret_cast<std::uintptr_t>(part.y) % 16 == 0;
  }
  a.x = product.x;
  a.K = product.K;
  a.M = f.M = static_cast<int>(product.M);
  a.width = f.width = std::int64_t{tiles} * kTileN;
  a.schedule = make_schedule(segments * row_tiles, row_tiles, tiles, context.multiprocessors);
  Scratch<float> partial(context, static_cast<std::size_t>(segments * product.M * a.width));
  a.partial = partial.get();
  f.partial = partial.get();
  f.segments = segments;
  f.residual = product.residual;
  f.vectors = vectors;
  f.quads = (product.epilogue == Epilogue::kSwiglu ? f.first_quad[1] : tiles * (kTileN / kQuad));

  const auto kernel = batch_kernel<T>;
  context.blocks_per_multiprocessor(reinterpret_cast<const void*>(kernel), T::kThreads,
                                    T::kSharedBytes);
  launch_overlapping(context, kernel, dim3(static_cast<unsigned>(a.schedule.blocks)),
                     dim3(T::kThreads), T::kSharedBytes, a);
  BW_CUDA_LAUNCHED("matmul_batch");
  const dim3 grid(
      static_cast<unsigned>((product.M * f.quads + kFinishThreads - 1) / kFinishThreads));
  switch (product.epilogue) {
    case Epilogue::kStore:
      launch_overlapping(context, finish_kernel<Epilogue::kStore>, grid, dim3(kFinishThreads), 0,
                         f);
      break;
    case Epilogue::kAdd:
      launch_overlapping(context, finish_kernel<Epilogue::kAdd>, grid, dim3(kFinishThreads), 0, f);
      break;
    case Epilogue::kSwiglu:
      launch_overlapping(context, finish_kernel<Epilogue::kSwiglu>, grid, dim3(kFinishThreads), 0,
                         f);
      break;
  }
  BW_CUDA_LAUNCHED("matmul_batch, segments");
}

// Which tile computes M rows soonest. What one costs grows less than its rows: measured on an H200.
int tile_rows(std::int64_t M) {
  constexpr int kRows[] = {32, 24, 16}, kCosts[] = {32, 25, 20};
  int best = 0;
  std::int64_t least = 0;
  for (int i = 0; i < 3; ++i) {
    const std::int64_t cost = (M + kRows[i] - 1) / kRows[i] * kCosts[i];
    if (best == 0 || cost < least) {
      best = kRows[i];
      least = cost;
    }
  }
  return best;
}

// Weights in binary32 leave too little shared memory for the larger tiles.
template <Dtype kDtype>
using SmallTile = Tile<kDtype, 16, 12>;

template <Dtype kDtype>
void launch_batch(Context& context, const Product& product) {
  if constexpr (kDtype != Dtype::kFp32) {
    const int rows = tile_rows(product.M);
    if (rows == 32) return launch<Tile<kDtype, 32, 8>>(context, product);
    if (rows == 24) return launch<Tile<kDtype, 24, 8>>(context, product);
  }
  launch<SmallTile<kDtype>>(context, product);
}

bool fits_batch(const Context& context, const Product& product) {
  constexpr std::int64_t kLeastRows = 9, kMostRows = 128, kMostCombinations = 1 << 9,
                         kMostUnits = 1 << 20;
  constexpr std::size_t kSharedBytes =
      std::max(SmallTile<Dtype::kFp32>::kSharedBytes, Tile<Dtype::kBf16, 32, 8>::kSharedBytes);
  if (context.capability < 80 || kSharedBytes > context.shared_limit) return false;
  if (product.M < kLeastRows || product.M > kMostRows) return false;
  std::int64_t tiles = 0;
  for (int p = 0; p < product.part_count; ++p) {
    const ProductPart& part = product.parts[p];
    if (!rows_are_vectors(product.x, part.W, product.K) || part.N > kMostUnits * kTileN) {
      return false;
    }
    tiles += (part.N + kTileN - 1) / kTileN;
  }
  const std::int64_t combinations =
      ((product.K + kSegment - 1) / kSegment) * ((product.M + 15) / 16);
  return combinations <= kMostCombinations && tiles * combinations <= kMostUnits;
}

void launch_any(Context& context, const Product& product) {
  switch (product.dtype) {
    case Dtype::kBf16:
      return launch_batch<Dtype::kBf16>(context, product);
    case Dtype::kFp16:
      return launch_batch<Dtype::kFp16>(context, product);
    case Dtype::kFp32:
      return launch_batch<Dtype::kFp32>(context, product);
  }
}

constexpr ProductVariant kVariants[] = {{"batch", fits_batch, false, launch_any}};

}  // namespace

std::span<const ProductVariant> batch_variants() {
  return kVariants;
}
}  // namespace bitwitness::cuda
