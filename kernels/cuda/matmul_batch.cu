// y[M, N] = x[M, K] W[N, K]^T for tens of rows of x, bound by multiply-adds (contract.h section 3).
//
// A block keeps kM rows of x over one segment of K in shared memory; its warps, on their own, take
// tiles of columns and stream the tile's weights of that segment through rings of their own. A
// warp's lanes are the 8 chains times four parts of the tile, so that a weight is upcast by one
// lane only (or two) and meets all its rows there. At the end of the segment the chain sums are
// exchanged among the warp's lanes through shared memory and added, ascending; the segment's sums
// go to memory, and a second kernel adds them, ascending, and does the epilogue. Which block takes
// which tiles of which segment (and rows, if M > kM) is fixed by the shape: see Schedule.
#include <algorithm>

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
constexpr int kQuad = 4;                      // k, or columns, of one 16-byte vector of binary32
constexpr int kXRowBytes = kSegment * 4;      // of one row of x in shared memory
constexpr int kXStepBytes = kStep * 4;        // of them, one step
constexpr int kXHalfBytes = kXStepBytes / 2;  // first quads of all chains, then second quads
constexpr int kSumBytes = 32 * kChains * 16;  // exchange of chain sums, per warp
constexpr int kBarrierBytes = kMaxSteps * 8;

// The shape of a block's work. A thread holds kM / kLaneRows rows times kColumns columns.
template <Dtype kDtype_, int kM_, int kLaneRows_, int kColumns_, int kWarps_, int kStages_>
struct Tile {
  static constexpr Dtype kDtype = kDtype_;
  static constexpr int kM = kM_, kLaneRows = kLaneRows_, kColumns = kColumns_, kWarps = kWarps_;
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kLaneColumns = 4 / kLaneRows;
  static constexpr int kRows = kM / kLaneRows;
  static constexpr int kN = kLaneColumns * kColumns;
  static constexpr int kStageBytes = kN * kStep * kElementBytes<kDtype>;
  static constexpr int kCopies = kStageBytes / 16 / 32;  // per lane and step
  static constexpr int kRowCopies = kStep * kElementBytes<kDtype> / 16;
  static constexpr int kWarpBytes = kStages * kStageBytes + kSumBytes;
  static constexpr int kXBytes = kM * kXRowBytes;
  static constexpr std::size_t kSharedBytes = kXBytes + kWarps * kWarpBytes + kBarrierBytes;
  // Chain sums are exchanged kRoundRows rows at a time; then a lane adds those of one quad.
  static constexpr int kQuads = kN / kQuad;
  static constexpr int kRoundRows = 32 / kQuads;
  static constexpr int kRounds = kM / kRoundRows;
  static_assert(kQuads * kRoundRows == 32 && kRounds * kRoundRows == kM);
  static_assert(kRoundRows % kLaneRows == 0 && kColumns % kQuad == 0);
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

__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
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

// Four consecutive k of one column as they lie in memory.
template <Dtype kDtype>
struct WeightQuad {
  uint2 v;
  __device__ __forceinline__ void load(const unsigned char* p) {
    v = *reinterpret_cast<const uint2*>(p);
  }
  __device__ __forceinline__ float at(int i) const {
    return upcast16<kDtype>(i < 2 ? v.x : v.y, i % 2);
  }
};
template <>
struct WeightQuad<Dtype::kFp32> {
  float4 v;
  __device__ __forceinline__ void load(const unsigned char* p) {
    v = *reinterpret_cast<const float4*>(p);
  }
  __device__ __forceinline__ float at(int i) const {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  }
};

// kAhead: rows of x that are in registers before they are needed. kUnroll: halves of a step in the
// body of the innermost loop.
template <class T, int kAhead, int kUnroll>
__global__ void __launch_bounds__(T::kThreads, 1)
    batch_kernel(const __grid_constant__ Arguments a) {
  static_assert(T::kRows % kAhead == 0);
  constexpr int kBytes = kElementBytes<T::kDtype>;
  extern __shared__ float4 shared_vectors[];
  unsigned char* const x_shared = reinterpret_cast<unsigned char*>(shared_vectors);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  unsigned char* const ring = x_shared + T::kXBytes + warp * T::kWarpBytes;
  unsigned char* const sums = ring + T::kStages * T::kStageBytes;
  const unsigned barriers = shared_address(x_shared + T::kXBytes + T::kWarps * T::kWarpBytes);
  if (thread < kMaxSteps) init_barrier(barriers + thread * 8, T::kThreads);

  // As a multiplier, this lane is a chain of rows lane_row * kRows + ... and columns
  // lane_column * kColumns + ... of the tile.
  const int chain = lane / 4, lane_row = lane % 4 / T::kLaneColumns;
  const int lane_column = lane % T::kLaneColumns;
  const unsigned char* const x_lane = x_shared + lane_row * T::kRows * kXRowBytes + chain * 16;
  // Of a stage: [kColumns, kLaneColumns, halves if binary32, chains] pieces of 16 bytes.
  const unsigned char* const w_lane = ring + lane_column * kStep * kBytes + chain * 16;
  constexpr int kWHalfBytes = kBytes == 4 ? kChains * 16 : kGroup * kBytes / 2;
  constexpr int kWColumnBytes = T::kLaneColumns * kStep * kBytes;

  // As a copier, this lane copies the same 16-byte piece of several columns of the tile.
  const int piece = lane % T::kRowCopies, copy_column = lane / T::kRowCopies;
  const int piece_k = piece * (16 / kBytes);
  const int piece_at = kBytes == 4 ? piece % 2 * kChains + piece / 2 : piece;
  constexpr int kCopyColumns = 32 / T::kRowCopies;
  unsigned char* const copy_target = ring + copy_column * kStep * kBytes + piece_at * 16;

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
    unsigned char* copy_slot = copy_target;
    const std::byte* source = nullptr;  // of the first column of the tile
    unsigned column_offset[T::kCopies];
    const auto start_tile = [&] {
      const int part = copy_tile < a.first_tile[1] ? 0 : copy_tile < a.first_tile[2] ? 1 : 2;
      const std::byte* const W = part == 0 ? a.W[0] : part == 1 ? a.W[1] : a.W[2];
      const std::int64_t N = part == 0 ? a.N[0] : part == 1 ? a.N[1] : a.N[2];
      const int first = part == 0 ? 0 : part == 1 ? a.first_tile[1] : a.first_tile[2];
      const std::int64_t base = static_cast<std::int64_t>(copy_tile - first) * T::kN;
      const int last = static_cast<int>(N - base < T::kN ? N - base : T::kN) - 1;
      source = W + (base * a.K + k_begin + piece_k) * kBytes;
#pragma unroll
      for (int i = 0; i < T::kCopies; ++i) {
        const int place =
            i * kCopyColumns + copy_column;  // = column % kColumns * kLaneColumns + ...
        const int n = place % T::kLaneColumns * T::kColumns + place / T::kLaneColumns;
        column_offset[i] =
            static_cast<unsigned>(min(n, last)) * static_cast<unsigned>(a.K * kBytes);
      }
    };
    const auto copy_next = [&] {
      if (copy_tile < tile_end) {
        if (copy_step == 0) start_tile();
        const bool valid = copy_step * kStep + piece_k < length;
#pragma unroll
        for (int i = 0; i < T::kCopies; ++i) {
          copy16(copy_slot + i * kCopyColumns * kStep * kBytes, source + column_offset[i], valid);
        }
        source += kStep * kBytes;
        if (++copy_step == steps) {
          copy_step = 0;
          copy_tile += T::kWarps;
        }
      }
      copy_slot += T::kStageBytes;
      if (copy_slot == copy_target + T::kStages * T::kStageBytes) copy_slot = copy_target;
      commit_copies();
    };

    __syncthreads();  // barriers are initialised; x of the run before is not needed any more
    for (int s = 0; s < T::kStages; ++s) copy_next();  // weights depend on no other kernel
    if (first_run) wait_for_previous();

    // x: rows beyond M repeat the last.
    if (length % kStep != 0) {
      for (int i = thread; i < T::kM * (kStep / kQuad); i += T::kThreads) {
        const int row = i / (kStep / kQuad), quad = i % (kStep / kQuad);
        if ((steps - 1) * kStep + quad * kQuad >= length) {
          *reinterpret_cast<float4*>(x_shared + row * kXRowBytes + (steps - 1) * kXStepBytes +
                                     quad % 2 * kXHalfBytes + quad / 2 * 16) =
              make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
        }
      }
    }
    for (int s = 0; s < steps; ++s) {
      for (int i = thread; i < T::kM * (kStep / kQuad); i += T::kThreads) {
        const int row = i / (kStep / kQuad), quad = i % (kStep / kQuad);
        const int k = s * kStep + quad * kQuad;
        const int m = min(row_begin + row, a.M - 1);
        if (k < length) {
          copy16(x_shared + row * kXRowBytes + s * kXStepBytes + quad % 2 * kXHalfBytes +
                     quad / 2 * 16,
                 a.x + m * a.K + k_begin + k, true);
        }
      }
      arrive_after_copies(barriers + s * 8);
    }
#if __CUDA_ARCH__ >= 800
    if (length % kStep != 0) __syncthreads();
#else
    __syncthreads();
#endif

    int slot = 0;
    bool first_tile = true;
    float sum[T::kRows][T::kColumns];
    float4 x_ahead[kAhead];
    WeightQuad<T::kDtype> w_ahead[T::kColumns];
    if (tile_begin + warp < tile_end) {
      wait_for_copies<T::kStages - 1>();
      __syncwarp();
      wait_barrier(barriers, phases & 1);
#pragma unroll
      for (int n = 0; n < T::kColumns; ++n) w_ahead[n].load(w_lane + n * kWColumnBytes);
#pragma unroll
      for (int m = 0; m < kAhead; ++m) {
        x_ahead[m] = *reinterpret_cast<const float4*>(x_lane + m * kXRowBytes);
      }
    }
    for (int tile = tile_begin + warp; tile < tile_end; tile += T::kWarps) {
#pragma unroll
      for (int m = 0; m < T::kRows; ++m) {
#pragma unroll
        for (int n = 0; n < T::kColumns; ++n) sum[m][n] = 0.0f;
      }
      const unsigned char* x_now = x_lane;
      for (int s = 0; s < steps; ++s) {
#pragma unroll kUnroll
        for (int half = 0; half < 2; ++half) {
          float w[T::kColumns][kQuad];
#pragma unroll
          for (int n = 0; n < T::kColumns; ++n) {
#pragma unroll
            for (int i = 0; i < kQuad; ++i) w[n][i] = w_ahead[n].at(i);
          }
          const unsigned char* x_next = x_now + kXHalfBytes;
          int w_offset = slot + kWHalfBytes;
          if (half == 1) {
            // The next step is there for all lanes, and all have read this one.
            wait_for_copies<T::kStages - 2>();
            __syncwarp();
            if (first_tile && s + 1 < steps)
              wait_barrier(barriers + (s + 1) * 8, phases >> (s + 1) & 1);
            copy_next();
            slot = slot + T::kStageBytes == T::kStages * T::kStageBytes ? 0 : slot + T::kStageBytes;
            w_offset = slot;
            if (s + 1 == steps) x_next = x_lane;
          }
#pragma unroll
          for (int n = 0; n < T::kColumns; ++n) {
            w_ahead[n].load(w_lane + w_offset + n * kWColumnBytes);
          }
#pragma unroll
          for (int begin = 0; begin < T::kRows; begin += kAhead) {
            float x[kAhead][kQuad];
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
              const float4 v = x_ahead[j];
              x[j][0] = v.x, x[j][1] = v.y, x[j][2] = v.z, x[j][3] = v.w;
              const int m = begin + kAhead + j;
              x_ahead[j] = *reinterpret_cast<const float4*>(
                  m < T::kRows ? x_now + m * kXRowBytes : x_next + (m - T::kRows) * kXRowBytes);
            }
            // To and fro, so that consecutive multiply-adds share a factor: three operands from
            // the two banks of registers take two cycles, two from different banks one.
#pragma unroll
            for (int i = 0; i < kQuad; ++i) {
#pragma unroll
              for (int p = 0; p < kAhead; ++p) {
                const int j = i % 2 == 0 ? p : kAhead - 1 - p;
#pragma unroll
                for (int q = 0; q < T::kColumns; ++q) {
                  const int n = (i * kAhead + p) % 2 == 0 ? q : T::kColumns - 1 - q;
                  sum[begin + j][n] = fma32(w[n][i], x[j][i], sum[begin + j][n]);
                }
              }
            }
          }
          x_now = x_next;
        }
      }
      first_tile = false;

      // Exchange: [kRoundRows, chains, kQuads] vectors, swizzled so that neither side has
      // conflicts.
      const int sum_row = lane / T::kQuads, sum_quad = lane % T::kQuads;
      const auto at = [&](int row, int c, int quad) {
        const int swizzled_chain = T::kQuads < 8 ? c ^ (row & 1) : c;
        const int swizzled_quad = T::kQuads < 8 ? quad : quad ^ (c & 1);
        return reinterpret_cast<float4*>(sums) + (row * kChains + swizzled_chain) * T::kQuads +
               swizzled_quad;
      };
      constexpr int kThreadRows = T::kRoundRows / T::kLaneRows;  // of a round
#pragma unroll
      for (int round = 0; round < T::kRounds; ++round) {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kThreadRows; ++j) {
#pragma unroll
          for (int q = 0; q < T::kColumns / kQuad; ++q) {
            const float* const s = sum[round * kThreadRows + j] + q * kQuad;
            *at(lane_row * kThreadRows + j, chain, lane_column * (T::kColumns / kQuad) + q) =
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
              static_cast<std::int64_t>(tile) * T::kN + sum_quad * kQuad) = t;
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

template <class T, int kAhead, int kUnroll>
void launch(Context& context, const Product& product) {
  Arguments a{};
  FinishArguments f{};
  const int segments = static_cast<int>((product.K + kSegment - 1) / kSegment);
  const int row_tiles = static_cast<int>((product.M + T::kM - 1) / T::kM);
  int tiles = 0;
  bool vectors = reinterpret_cast<std::uintptr_t>(product.residual) % 16 == 0;
  for (int p = 0; p < kMaxParts; ++p) {
    a.first_tile[p] = tiles;
    f.first_quad[p] = tiles * (T::kN / kQuad);
    if (p >= product.part_count) continue;
    const ProductPart& part = product.parts[p];
    a.W[p] = part.W;
    a.N[p] = f.N[p] = part.N;
    f.y[p] = part.y;
    tiles += static_cast<int>((part.N + T::kN - 1) / T::kN);
    if (product.epilogue == Epilogue::kSwiglu && p == 1) continue;
    vectors = vectors && part.N % kQuad == 0 && reinterpret_cast<std::uintptr_t>(part.y) % 16 == 0;
  }
  a.x = product.x;
  a.K = product.K;
  a.M = f.M = static_cast<int>(product.M);
  a.width = f.width = std::int64_t{tiles} * T::kN;
  a.schedule = make_schedule(segments * row_tiles, row_tiles, tiles, context.multiprocessors);
  Scratch<float> partial(context, static_cast<std::size_t>(segments * product.M * a.width));
  a.partial = partial.get();
  f.partial = partial.get();
  f.segments = segments;
  f.residual = product.residual;
  f.vectors = vectors;
  f.quads = (product.epilogue == Epilogue::kSwiglu ? f.first_quad[1] : tiles * (T::kN / kQuad));

  const auto kernel = batch_kernel<T, kAhead, kUnroll>;
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

template <Dtype kDtype>
using Tile32 = Tile<kDtype, 32, 1, 4, 8, kDtype == Dtype::kFp32 ? 2 : 4>;
template <Dtype kDtype>
using Tile24 = Tile<kDtype, 24, 1, 4, 8, kDtype == Dtype::kFp32 ? 2 : 4>;
template <Dtype kDtype>
using Tile16 = Tile<kDtype, 16, 1, 8, 8, kDtype == Dtype::kFp32 ? 2 : 4>;

template <Dtype kDtype>
void launch_batch(Context& context, const Product& product) {
  if (product.M <= 16) return launch<Tile16<kDtype>, 2, 1>(context, product);
  if (product.M <= 24 || (product.M > 32 && product.M <= 48)) {
    return launch<Tile24<kDtype>, 4, 1>(context, product);
  }
  launch<Tile32<kDtype>, 4, 1>(context, product);
}

bool fits_batch(const Context& context, const Product& product) {
  constexpr std::int64_t kMostTiles = 1 << 24;
  if (context.capability < 80 || Tile32<Dtype::kBf16>::kSharedBytes > context.shared_limit) {
    return false;
  }
  std::int64_t tiles = 0;
  for (int p = 0; p < product.part_count; ++p) {
    if (!rows_are_vectors(product.x, product.parts[p].W, product.K)) return false;
    tiles += product.parts[p].N / 16 + 1;
  }
  return product.M >= 9 && product.M <= 128 && tiles <= kMostTiles;
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
