// y[M, N] = x[M, K] W[N, K]^T for many rows of x, bound by multiply-adds (contract.h section 3).
//
// Two kernels, in the order of prefill_variants():
//  - chains in turn: every thread holds one chain of 16 x 8 outputs at a time. The chains of a
//    segment follow one another; their sums meet in shared memory, in slots of the thread's own.
//  - sliced K: every warp of a block holds one of the eight chains of the same tile of outputs. It
//    takes any shape and alignment in 64 KiB of shared memory.
#include <algorithm>
#include <type_traits>

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

// ---- Copies to shared memory, asynchronous from sm_80 on ----

// Copies 16 bytes to shared memory, or 16 zero bytes if not `valid` (`source` is not read then).
__device__ __forceinline__ void copy16(unsigned char* target, const void* source, bool valid) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(target));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(source),
               "r"(bytes)
               : "memory");
#else
  *reinterpret_cast<uint4*>(target) =
      valid ? __ldg(static_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
#endif
}

// Copies four bytes to shared memory, or four zero bytes if not `valid`.
__device__ __forceinline__ void copy4(float* target, const float* source, bool valid) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(source),
               "r"(valid ? 4 : 0)
               : "memory");
#else
  *target = valid ? __ldg(source) : 0.0f;
#endif
}

// ---- Chains in turn ----
//
// A block computes tiles of outputs, by warps of 64 x 64 and threads of 16 x 8, from a ring of
// stages in shared memory. A stage holds two groups of one chain (those are 64 k apart), k by k, so
// that a thread reads four rows of x or W with one instruction. It is filled while the stage two
// before is used: rows of x are copied asynchronously and transposed on the way, weights pass
// through registers, where they are upcast once per block. A group beyond K holds x = +0 and
// w = -0, whose product leaves every sum as it is.
//
// At the end of a chain a thread adds its 128 sums to those of the segment, at the end of a segment
// these to the totals in device memory (in the L2 cache, in truth). K may be cut into runs of
// segments so that all multiprocessors have work; finish_kernel then adds the segments' sums.

constexpr int kThreadM = 16, kThreadN = 8, kWarpM = 64, kWarpN = 64;
constexpr int kSlots = kThreadM * kThreadN / 4;  // float4 per thread
constexpr int kRing = 4;                         // stages
constexpr int kUnroll = 4;                       // k; a longer loop waits for its instructions

constexpr int kWarpsM = 2, kWarpsN = 4, kChainThreads = 32 * kWarpsM * kWarpsN;
constexpr int kChainM = kWarpM * kWarpsM, kChainN = kWarpN * kWarpsN;
constexpr int kStageGroups = 2, kStageK = kStageGroups * kGroup;
constexpr int kStageWide = kChains * kStageK;                // k of a stage of all chains
constexpr int kPitchM = kChainM + 4, kPitchN = kChainN + 4;  // floats; the 4 keep banks apart
constexpr int kStageFloats = kStageK * (kPitchM + kPitchN);
constexpr std::size_t kChainBytes =
    kSlots * kChainThreads * sizeof(float4) + kRing * kStageFloats * sizeof(float) + 16;

struct ChainProduct {
  std::int64_t M, K;
  const float* x;
  const float* residual;
  const std::byte* W[3];
  float* y[3];
  std::int64_t N[3];
  unsigned part_end[3];  // tiles along N up to and including this part
  Epilogue epilogue;
  unsigned tiles_m, tiles_n, tiles;
  int segments, splits;  // each split of K is a run of segments
  bool vector_rows;      // rows of y and residual may be accessed 16 bytes at a time
  float4* sums;          // [grid or slabs * tiles, kSlots, kChainThreads]
};

// Tiles that run at the same time share their rows of x and W: bands of kBand tiles along M, in
// which M runs fastest.
constexpr unsigned kBand = 16;

struct TilePlace {
  int part;  // with kSwiglu 0: half of the tile's columns are rows of W[0], the others of W[1]
  std::int64_t m, n;
};

__device__ __forceinline__ TilePlace place_of(const ChainProduct& p, unsigned tile) {
  const unsigned band = tile / (kBand * p.tiles_n), in_band = tile - band * kBand * p.tiles_n;
  const unsigned rows = min(kBand, p.tiles_m - band * kBand);
  const unsigned tile_m = band * kBand + in_band % rows;
  unsigned tile_n = in_band / rows;
  TilePlace place{0, static_cast<std::int64_t>(tile_m) * kChainM, 0};
  if (p.epilogue == Epilogue::kSwiglu) {
    place.n = static_cast<std::int64_t>(tile_n) * (kChainN / 2);
    return place;
  }
  if (tile_n >= p.part_end[1]) {
    place.part = 2;
    tile_n -= p.part_end[1];
  } else if (tile_n >= p.part_end[0]) {
    place.part = 1;
    tile_n -= p.part_end[0];
  }
  place.n = static_cast<std::int64_t>(tile_n) * kChainN;
  return place;
}

// Where a thread's outputs lie: rows row(i), i in [0, 16), columns column + 32 q + (0..3), q in
// {0, 1}, of the tile. A warp's reads of one row of a stage are then 64 and 128 contiguous bytes.
struct ThreadPlace {
  int m, n, warp_n;
  __device__ __forceinline__ explicit ThreadPlace(int thread) {
    const int warp = thread / 32, lane = thread % 32;
    warp_n = warp / kWarpsM;
    m = warp % kWarpsM * kWarpM + lane / 8 * 4;
    n = warp_n * kWarpN + lane % 8 * 4;
  }
  __device__ __forceinline__ int row(int i) const { return m + i / 4 * 16 + i % 4; }
};

__device__ __forceinline__ float4 add4(const float4& a, const float4& b) {
  return {add32(a.x, b.x), add32(a.y, b.y), add32(a.z, b.z), add32(a.w, b.w)};
}

// Slots hold the sums of neighbouring columns swapped. They move to and from registers four at a
// time, and so an odd column's sum lies in an even register, its weight in an odd one: an FFMA
// reads each from another bank.
__device__ __forceinline__ float4 unswapped(const float4& v) {
  return {v.y, v.x, v.w, v.z};
}

// Four outputs of a row, columns n to n + 3, of which those below N exist.
__device__ __forceinline__ void store_four(const ChainProduct& p, float* y, std::int64_t N,
                                           std::int64_t m, std::int64_t n, float4 v) {
  const bool with_residual = p.epilogue == Epilogue::kAdd;
  float* const to = y + m * N + n;
  const float* const residual = p.residual + m * N + n;
  if (p.vector_rows && n + 3 < N) {
    if (with_residual) v = add4(*reinterpret_cast<const float4*>(residual), v);
    *reinterpret_cast<float4*>(to) = v;
    return;
  }
  const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (n + e < N) to[e] = with_residual ? add32(residual[e], values[e]) : values[e];
  }
}

// Stores row(i) of a thread's dots: `a` are its first four columns, `b` the other four.
__device__ __forceinline__ void store_row(const ChainProduct& p, const TilePlace& tile,
                                          const ThreadPlace& place, int i, const float4& a,
                                          const float4& b) {
  const std::int64_t m = tile.m + place.row(i);
  if (m >= p.M) return;
  if (p.epilogue == Epilogue::kSwiglu) {
    const float4 v = {contract::swiglu_element(a.x, b.x), contract::swiglu_element(a.y, b.y),
                      contract::swiglu_element(a.z, b.z), contract::swiglu_element(a.w, b.w)};
    store_four(p, p.y[0], p.N[0], m, tile.n + place.n - place.warp_n * (kWarpN / 2), v);
    return;
  }
  store_four(p, p.y[tile.part], p.N[tile.part], m, tile.n + place.n, a);
  store_four(p, p.y[tile.part], p.N[tile.part], m, tile.n + place.n + 32, b);
}

// A barrier of the warps of a block whose arrival and waiting are apart (sm_80).
__device__ __forceinline__ void barrier_make(std::uint32_t barrier, int count) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 800
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
               : "memory");
#endif
}
// Waits for the end of a phase of the given parity. That before the first has parity 1.
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .pred done;\n"
      "again%=:\n mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n @!done bra again%=;\n}" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
#elif __CUDA_ARCH__ >= 800
  asm volatile(
      "{\n .reg .pred done;\n"
      "again%=:\n mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n @!done bra again%=;\n}" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// A read of shared memory that the assembler does not put off until right before its use.
__device__ __forceinline__ float4 load_early(const float* from) {
  float4 v;
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(from)))
               : "memory");
  return v;
}

template <Dtype kDtype>
__global__ void __launch_bounds__(kChainThreads, 1)
    chain_kernel(const __grid_constant__ ChainProduct p) {
  constexpr int kThreads = kChainThreads;
  constexpr int kElement = kElementBytes<kDtype>;
  extern __shared__ float4 shared_vectors[];
  float4* const own = shared_vectors + threadIdx.x;  // slot s: own[s * kThreads]
  float* const stages = reinterpret_cast<float*>(shared_vectors + kSlots * kThreads);
  const int thread = static_cast<int>(threadIdx.x);
  const ThreadPlace place(thread);

  // What this thread copies of a stage. x: column x_column of each group, of the rows x_row +
  // kXStep r. W: group w_group of the rows w_row to w_row + kWRows - 1.
  constexpr int kXStep = kThreads / kGroup, kXRows = kChainM / kXStep;
  constexpr int kWThreads = kThreads / kStageGroups, kWRows = kChainN / kWThreads;
  static_assert(kXRows * kXStep == kChainM && kWRows == 2 && kWRows * kWThreads == kChainN);
  const int x_row = thread / kGroup, x_column = thread % kGroup;
  const int w_row = thread % kWThreads * kWRows, w_group = thread / kWThreads;

  const std::uint32_t barrier =
      static_cast<std::uint32_t>(__cvta_generic_to_shared(stages + kRing * kStageFloats));
  std::uint32_t parity = 0;  // of the phase that ends with this stage
  if (thread == 0) barrier_make(barrier, kThreads / 32);
  __syncthreads();

  wait_for_previous();
  for (unsigned unit = blockIdx.x; unit < p.tiles * static_cast<unsigned>(p.splits);
       unit += gridDim.x) {
    const unsigned tile_index = unit % p.tiles;
    const int split = static_cast<int>(unit / p.tiles);
    const TilePlace tile = place_of(p, tile_index);
    const int first_segment =
        static_cast<int>(static_cast<std::int64_t>(p.segments) * split / p.splits);
    const int end_segment =
        static_cast<int>(static_cast<std::int64_t>(p.segments) * (split + 1) / p.splits);

    // Outputs of rows that do not exist are not stored: of x they are zeros, of W the last row.
    const float* const x_from = p.x + (tile.m + x_row) * p.K + x_column;
    const int rows_m = static_cast<int>(min(p.M - tile.m, static_cast<std::int64_t>(kChainM)));
    const std::byte* w_from[kWRows];
#pragma unroll
    for (int r = 0; r < kWRows; ++r) {
      int part = tile.part;
      std::int64_t n = tile.n + w_row + r;
      if (p.epilogue == Epilogue::kSwiglu) {
        const int column = w_row + r;
        part = column / 32 % 2;
        n = tile.n + column / kWarpN * (kWarpN / 2) + column % 32;
      }
      n = min(n, p.N[part] - 1);
      w_from[r] = p.W[part] + (n * p.K + w_group * kChains * kGroup) * kElement;
    }

    // The stage to be read next.
    int next_segment = first_segment, next_chain = 0;
    const auto stages_of = [&](int segment) {
      const int left = static_cast<int>(p.K) - segment * kSegment;
      return left >= kSegment ? kSegment / kStageWide : (left + kStageWide - 1) / kStageWide;
    };
    int next_left = stages_of(first_segment), next_k = first_segment * kSegment;

    constexpr int kApart = kChains * kGroup;     // from one group of a chain to the next
    const bool whole_k = p.K % kStageWide == 0;  // no group of a stage lies beyond K
    WeightGroup<kDtype> w_read[kWRows];
    int read_k = 0;  // of what w_read holds
    const auto read_w = [&] {
      const int k = next_k, K = static_cast<int>(p.K);
      read_k = k;
      if (whole_k) {
#pragma unroll
        for (int r = 0; r < kWRows; ++r) {
          const uint4* const from = reinterpret_cast<const uint4*>(w_from[r] + k * kElement);
#pragma unroll
          for (int v = 0; v < WeightGroup<kDtype>::kVectors; ++v) w_read[r].v[v] = __ldg(from + v);
        }
      } else {
        constexpr unsigned kMinusZero = kDtype == Dtype::kFp32 ? 0x80000000u : 0x80008000u;
#pragma unroll
        for (int r = 0; r < kWRows; ++r) {
          const uint4* const from = reinterpret_cast<const uint4*>(w_from[r] + k * kElement);
#pragma unroll
          for (int v = 0; v < WeightGroup<kDtype>::kVectors; ++v) {
            w_read[r].v[v] = k + w_group * kApart < K
                                 ? __ldg(from + v)
                                 : uint4{kMinusZero, kMinusZero, kMinusZero, kMinusZero};
          }
        }
      }
      next_k += kStageGroups * kApart;
      if (--next_left == 0) {
        if (++next_chain == kChains) {
          next_chain = 0;
          ++next_segment;
        }
        next_left = stages_of(next_segment);
        next_k = next_segment * kSegment + next_chain * kGroup;
      }
    };
    // The weights that were read and their part of x go to a stage.
    const auto fill = [&](float* stage) {
      const int k = read_k, K = static_cast<int>(p.K);
      float* const x_to = stage + x_column * kPitchM + x_row;
      const float* from = x_from + k;
      if (whole_k && rows_m == kChainM) {
#pragma unroll
        for (int r = 0; r < kXRows; ++r) {
#pragma unroll
          for (int g = 0; g < kStageGroups; ++g) {
            copy4(x_to + g * kGroup * kPitchM + r * kXStep, from + g * kApart, true);
          }
          from += kXStep * p.K;
        }
      } else {
#pragma unroll
        for (int r = 0; r < kXRows; ++r) {
#pragma unroll
          for (int g = 0; g < kStageGroups; ++g) {
            const bool valid = k + g * kApart < K && x_row + r * kXStep < rows_m;
            copy4(x_to + g * kGroup * kPitchM + r * kXStep, valid ? from + g * kApart : p.x, valid);
          }
          from += kXStep * p.K;
        }
      }
      commit_copies();
      float* const w_to = stage + kStageK * kPitchM + w_group * kGroup * kPitchN + w_row;
#pragma unroll
      for (int e = 0; e < kGroup; ++e) {
        *reinterpret_cast<float2*>(w_to + e * kPitchN) = {w_read[0].at(e), w_read[1].at(e)};
      }
    };

    float x_at[2][kThreadM], w_at[2][kThreadN], sum[kThreadM][kThreadN];
    const auto load_w = [&](const float* from, int to) {
#pragma unroll
      for (int q = 0; q < kThreadN / 4; ++q) {
        const float4 v = load_early(from + q * 32);
        w_at[to][q * 4 + 0] = v.x, w_at[to][q * 4 + 1] = v.y;
        w_at[to][q * 4 + 2] = v.z, w_at[to][q * 4 + 3] = v.w;
      }
    };
    const auto load_x = [&](const float* from, int to, int q) {
      const float4 v = load_early(from + q * 16);
      x_at[to][q * 4 + 0] = v.x, x_at[to][q * 4 + 1] = v.y;
      x_at[to][q * 4 + 2] = v.z, x_at[to][q * 4 + 3] = v.w;
    };
    // Only the last segment may be short.
    int left =
        kChains * ((end_segment - first_segment - 1) * stages_of(0) + stages_of(end_segment - 1)) -
        2;            // stages to be filled after the first two
    __syncthreads();  // the tile before may still be read
    read_w();
    fill(stages);
    read_w();
    fill(stages + kStageFloats);
    read_w();  // there are at least eight stages
    wait_for_copies<0>();
    __syncthreads();
    int at = 0;  // stage of the ring
    const float* x_now = stages + place.m;
    const float* w_now = stages + kStageK * kPitchM + place.n;
    load_w(w_now, 0);
#pragma unroll
    for (int q = 0; q < kThreadM / 4; ++q) load_x(x_now, 0, q);

    for (int segment = first_segment; segment < end_segment; ++segment) {
      const int count = stages_of(segment);
#pragma unroll 1
      for (int chain = 0; chain < kChains; ++chain) {
#pragma unroll
        for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
          for (int j = 0; j < kThreadN; ++j) sum[i][j] = 0.0f;
        }

#pragma unroll 1
        for (int s = 0; s < count; ++s) {
          float* const to = stages + (at + 2) % kRing * kStageFloats;
          if (left > 0) {
            fill(to);
            if (left > 1) read_w();
          }
          --left;
          constexpr int kRounds = kStageK / kUnroll;
#pragma unroll 1
          for (int round = 0; round < kRounds; ++round) {
#pragma unroll
            for (int k = 0; k < kUnroll; ++k) {
              const float* x_next = x_now + (k + 1) * kPitchM;
              const float* w_next = w_now + (k + 1) * kPitchN;
              if (k + 1 == kUnroll) {
                x_now += kUnroll * kPitchM;
                w_now += kUnroll * kPitchN;
                if (round == kRounds - 1) {
                  // For the next stage all warps arrived while this one was used. Waiting comes
                  // first: after the arrival this phase may end, and the parity would mean the one
                  // after.
                  wait_for_copies<0>();
                  barrier_wait(barrier, parity ^ 1);
                  __syncwarp();
                  if (thread % 32 == 0) barrier_arrive(barrier);
                  parity ^= 1;
                  at = (at + 1) % kRing;
                  x_now = stages + at * kStageFloats + place.m;
                  w_now = stages + at * kStageFloats + kStageK * kPitchM + place.n;
                }
                x_next = x_now;
                w_next = w_now;
              }
              const int now = k % 2, next = (k + 1) % 2;
              load_w(w_next, next);
#pragma unroll
              for (int q = 0; q < kThreadM / 4; ++q) load_x(x_next, next, q);
                // To and fro, so that every FFMA has one operand of the one before.
#pragma unroll
              for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
                for (int e = 0; e < kThreadN; ++e) {
                  const int j = i % 2 == 0 ? e : kThreadN - 1 - e;
                  sum[i][j] = fma32(x_at[now][i], w_at[now][j], sum[i][j]);
                }
              }
            }
          }
        }
        // The chain joins the segment.
        const auto sums_at = [&](int slot) {
          const float* const v = &sum[slot / (kThreadN / 4)][slot % (kThreadN / 4) * 4];
          return float4{v[1], v[0], v[3], v[2]};  // see unswapped()
        };
        if (chain == 0) {
#pragma unroll
          for (int slot = 0; slot < kSlots; ++slot) own[slot * kThreads] = sums_at(slot);
        } else {
#pragma unroll
          for (int slot = 0; slot < kSlots; ++slot) {
            own[slot * kThreads] = add4(own[slot * kThreads], sums_at(slot));
          }
        }
      }
      // The segment joins the total. The first split of K adds up its segments, the further ones
      // keep each for finish_kernel.
      const std::int64_t slab =
          p.splits == 1
              ? blockIdx.x
              : static_cast<std::int64_t>(split == 0 ? 0 : segment) * p.tiles + tile_index;
      float4* const total = p.sums + slab * kSlots * kThreads + thread;
      if (split == 0 && segment != 0) {
        constexpr int kBatch = 16;
#pragma unroll
        for (int begin = 0; begin < kSlots; begin += kBatch) {
          float4 before[kBatch];
#pragma unroll
          for (int e = 0; e < kBatch; ++e) before[e] = total[(begin + e) * kThreads];
#pragma unroll
          for (int e = 0; e < kBatch; ++e) {
            float4* const slot = own + (begin + e) * kThreads;
            *slot = add4(before[e], *slot);
          }
        }
      }
      if (p.splits == 1 && segment + 1 == end_segment) {
#pragma unroll 2
        for (int i = 0; i < kThreadM; ++i) {
          store_row(p, tile, place, i, unswapped(own[(2 * i) * kThreads]),
                    unswapped(own[(2 * i + 1) * kThreads]));
        }
      } else {
#pragma unroll 8
        for (int slot = 0; slot < kSlots; ++slot) total[slot * kThreads] = own[slot * kThreads];
      }
    }
  }
}

// Adds what the splits of K left, ascending, and stores the outputs. Block (t, i) takes row i of
// the threads of tile t.
__global__ void __launch_bounds__(kChainThreads)
    finish_kernel(const __grid_constant__ ChainProduct p) {
  const int thread = static_cast<int>(threadIdx.x), i = static_cast<int>(blockIdx.y);
  const ThreadPlace place(thread);
  wait_for_previous();
  const float4* const sums =
      p.sums + (static_cast<std::int64_t>(blockIdx.x) * kSlots + 2 * i) * kChainThreads + thread;
  const std::int64_t slab = static_cast<std::int64_t>(p.tiles) * kSlots * kChainThreads;
  float4 a = sums[0], b = sums[kChainThreads];
  for (int s = p.segments / p.splits; s < p.segments; ++s) {
    a = add4(a, sums[s * slab]);
    b = add4(b, sums[s * slab + kChainThreads]);
  }
  store_row(p, place_of(p, blockIdx.x), place, i, unswapped(a), unswapped(b));
}

// In how many runs of segments K is cut, so that all multiprocessors have work. The time of a
// tile's segment is the unit; a segment's sums that pass through device memory cost kSlab of it,
// measured on an H200.
int best_splits(unsigned tiles, int segments, int resident, std::size_t slab_bytes) {
  constexpr double kSlab = 0.06;
  constexpr std::size_t kMostBytes = std::size_t{1} << 28;
  int best = 1;
  double best_time = 0;
  for (int splits = 1; splits <= segments; ++splits) {
    const std::int64_t rounds =
        (static_cast<std::int64_t>(tiles) * splits + resident - 1) / resident;
    double time = static_cast<double>(rounds) * ((segments + splits - 1) / splits);
    if (splits > 1) {
      if (static_cast<std::size_t>(segments) * tiles > kMostBytes / slab_bytes) break;
      time += kSlab * (segments - segments / splits + 1) * tiles / resident;
    }
    if (splits == 1 || time < best_time) best = splits, best_time = time;
  }
  return best;
}

template <Dtype kDtype>
void launch_chains(Context& context, const Product& product, int splits = 0) {
  const auto kernel = chain_kernel<kDtype>;
  const int resident = context.multiprocessors *
                       context.blocks_per_multiprocessor(reinterpret_cast<const void*>(kernel),
                                                         kChainThreads, kChainBytes);
  ChainProduct p{};
  p.M = product.M, p.K = product.K, p.x = product.x;
  p.epilogue = product.epilogue, p.residual = product.residual;
  p.vector_rows = reinterpret_cast<std::uintptr_t>(p.residual) % 16 == 0;
  p.segments = static_cast<int>((product.K + kSegment - 1) / kSegment);
  p.tiles_m = static_cast<unsigned>((product.M + kChainM - 1) / kChainM);
  const bool swiglu = product.epilogue == Epilogue::kSwiglu;
  const int columns = swiglu ? kChainN / 2 : kChainN;
  for (int part = 0; part < product.part_count; ++part) {
    const ProductPart& from = product.parts[part];
    p.W[part] = from.W, p.N[part] = from.N, p.y[part] = from.y;
    if (part == 0 || !swiglu) {
      p.tiles_n += static_cast<unsigned>((from.N + columns - 1) / columns);
      p.vector_rows =
          p.vector_rows && from.N % 4 == 0 && reinterpret_cast<std::uintptr_t>(from.y) % 16 == 0;
    }
    p.part_end[part] = p.tiles_n;
  }
  for (int part = product.part_count; part < 3; ++part) p.part_end[part] = p.tiles_n;
  p.tiles = p.tiles_m * p.tiles_n;
  p.splits = splits != 0 ? splits
                         : best_splits(p.tiles, p.segments, resident,
                                       kSlots * kChainThreads * sizeof(float4));
  const unsigned units = p.tiles * static_cast<unsigned>(p.splits);
  const unsigned grid = std::min(units, static_cast<unsigned>(resident));
  const std::size_t slabs = p.splits > 1     ? static_cast<std::size_t>(p.segments) * p.tiles
                            : p.segments > 1 ? grid
                                             : 1;
  const Scratch<float4> sums(context, slabs * kSlots * kChainThreads);
  p.sums = sums.get();
  launch_overlapping(context, kernel, dim3(grid), dim3(kChainThreads), kChainBytes, p);
  if (p.splits > 1) {
    launch_overlapping(context, finish_kernel, dim3(p.tiles, kThreadM), dim3(kChainThreads), 0, p);
  }
}

// ---- Sliced K ----
//
// All chains advance together through a slice of 64 k. At the end of a segment the chain sums meet
// in shared memory and one thread per output adds them, ascending. Tiles are copied to shared
// memory kStages - 1 slices ahead (asynchronously from sm_80 on).

constexpr int kThreads = 32 * kChains;
constexpr int kTileN = 64;
constexpr int kSlice = kChains * kGroup;
static_assert(kSlice == 64 && kThreads == 256 && kSegment % kSlice == 0);

// Rows of a stage are padded by 16 bytes so that neighbouring rows start in different banks.
constexpr int kXRowBytes = kSlice * 4 + 16;
template <Dtype kDtype>
constexpr int kWRowBytes = kSlice* kElementBytes<kDtype> + 16;
template <Dtype kDtype, int kTileM>
constexpr int kStageBytes = kTileM* kXRowBytes + kTileN* kWRowBytes<kDtype>;

// Four weights as they lie in shared memory, upcast.
template <Dtype kDtype>
__device__ __forceinline__ void load_four(const unsigned char* p, float (&w)[4]) {
  if constexpr (kDtype == Dtype::kFp32) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  } else {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    w[0] = upcast16<kDtype>(v.x, 0), w[1] = upcast16<kDtype>(v.x, 1);
    w[2] = upcast16<kDtype>(v.y, 0), w[3] = upcast16<kDtype>(v.y, 1);
  }
}

// Block b computes tile (b % tiles_m, b / tiles_m) of kTileM x kTileN outputs. Lane (i, j) = (lane
// / 8, lane % 8) holds outputs (i + 4 r, j + 8 s). kVector: see rows_are_vectors. `residual`, where
// there is one, is [M, N] and may be y.
template <Dtype kDtype, int kTileM, int kStages, bool kVector>
__global__ void __launch_bounds__(kThreads, 1)
    sliced_kernel(float* y, const float* residual, const float* __restrict__ x,
                  const std::byte* __restrict__ W, std::int64_t M, std::int64_t N, std::int64_t K,
                  unsigned tiles_m) {
  extern __shared__ float4 shared_vectors[];
  unsigned char* const shared = reinterpret_cast<unsigned char*>(shared_vectors);
  constexpr int kR = kTileM / 4, kS = kTileN / 8;
  constexpr int kWBytes = kElementBytes<kDtype>;
  constexpr int kXBytes = kTileM * kXRowBytes;
  constexpr int kStage = kStageBytes<kDtype, kTileM>;
  static_assert(kStage >= kChains * kThreads * 4, "the chain sums use a stage");
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, chain = thread / 32;
  const int lane_i = lane / 8, lane_j = lane % 8;
  const std::int64_t tile_m = static_cast<std::int64_t>(blockIdx.x % tiles_m) * kTileM;
  const std::int64_t tile_n = static_cast<std::int64_t>(blockIdx.x / tiles_m) * kTileN;
  const int slices = static_cast<int>((K + kSlice - 1) / kSlice);

  // Copies slice `next` of both tiles to stage next % kStages and steps on. Rows beyond M or N hold
  // anything: their outputs are not stored. Groups beyond K are not read again; k beyond K inside a
  // group holds x = +0 and w = -0, whose product leaves every sum as it is.
  constexpr int kXVectors = kSlice * 4 / 16, kWVectors = kSlice * kWBytes / 16;
  constexpr int kXStep = kThreads / kXVectors,
                kWStep = kThreads / kWVectors;  // rows per round of copies
  const int rows_m = static_cast<int>(M - tile_m < kTileM ? M - tile_m : kTileM);
  const int rows_n = static_cast<int>(N - tile_n < kTileN ? N - tile_n : kTileN);
  const int x_row = thread / kXVectors, x_column = thread % kXVectors;
  const int w_row = thread / kWVectors, w_column = thread % kWVectors;
  const float* x_source = x + (tile_m + x_row) * K + x_column * 4;
  const std::byte* w_source = W + ((tile_n + w_row) * K + w_column * (16 / kWBytes)) * kWBytes;
  int next = 0;
  const auto load_next = [&] {
    if (next < slices) {
      unsigned char* const stage = shared + next % kStages * kStage;
      const int begin = next * kSlice;
      if constexpr (kVector) {
        unsigned char* const x_target = stage + x_row * kXRowBytes + x_column * 16;
        const bool x_inside = begin + x_column * 4 < K;
#pragma unroll
        for (int q = 0; q < kTileM / kXStep; ++q) {
          copy16(x_target + q * kXStep * kXRowBytes, x_source + q * kXStep * K,
                 x_inside && x_row + q * kXStep < rows_m);
        }
        unsigned char* const w_target =
            stage + kXBytes + w_row * kWRowBytes<kDtype> + w_column * 16;
        const bool w_inside = begin + w_column * (16 / kWBytes) < K;
#pragma unroll
        for (int q = 0; q < kTileN / kWStep; ++q) {
          copy16(w_target + q * kWStep * kWRowBytes<kDtype>, w_source + q * kWStep * K * kWBytes,
                 w_inside && w_row + q * kWStep < rows_n);
        }
        x_source += kSlice;
        w_source += kSlice * kWBytes;
      } else {
        for (int i = thread; i < kTileM * kSlice; i += kThreads) {
          const int row = i / kSlice, column = i % kSlice;
          *reinterpret_cast<float*>(stage + row * kXRowBytes + column * 4) =
              row < rows_m && begin + column < K ? x[(tile_m + row) * K + begin + column] : 0.0f;
        }
        using Bits = std::conditional_t<kDtype == Dtype::kFp32, std::uint32_t, std::uint16_t>;
        constexpr Bits kMinusZero = static_cast<Bits>(Bits{1} << (8 * kWBytes - 1));
        for (int i = thread; i < kTileN * kSlice; i += kThreads) {
          const int row = i / kSlice, column = i % kSlice;
          *reinterpret_cast<Bits*>(stage + kXBytes + row * kWRowBytes<kDtype> + column * kWBytes) =
              row < rows_n && begin + column < K
                  ? reinterpret_cast<const Bits*>(W)[(tile_n + row) * K + begin + column]
                  : kMinusZero;
        }
      }
    }
    ++next;
    commit_copies();
  };

  float sum[kR][kS], total[kR];
#pragma unroll
  for (int r = 0; r < kR; ++r) {
    total[r] = 0.0f;
#pragma unroll
    for (int s = 0; s < kS; ++s) sum[r][s] = 0.0f;
  }

  for (int stage = 0; stage < kStages - 1; ++stage) load_next();
  for (int slice = 0; slice < slices; ++slice) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // this slice is here; the stage of the one before is free
    load_next();
    unsigned char* const stage = shared + slice % kStages * kStage;
    if (slice * kSlice + chain * kGroup < K) {
      const unsigned char* const x_at = stage + lane_i * kXRowBytes + chain * kGroup * 4;
      const unsigned char* const w_at =
          stage + kXBytes + lane_j * kWRowBytes<kDtype> + chain * kGroup * kWBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float w[kS][4];
#pragma unroll
        for (int s = 0; s < kS; ++s) {
          load_four<kDtype>(w_at + s * 8 * kWRowBytes<kDtype> + half * 4 * kWBytes, w[s]);
        }
#pragma unroll
        for (int r = 0; r < kR; ++r) {
          const float4 v = *reinterpret_cast<const float4*>(x_at + r * 4 * kXRowBytes + half * 16);
#pragma unroll
          for (int s = 0; s < kS; ++s) {
            float t = sum[r][s];
            t = fma32(v.x, w[s][0], t);
            t = fma32(v.y, w[s][1], t);
            t = fma32(v.z, w[s][2], t);
            t = fma32(v.w, w[s][3], t);
            sum[r][s] = t;
          }
        }
      }
    }
    if ((slice + 1) % (kSegment / kSlice) == 0 || slice + 1 == slices) {
      // The stage just used holds the chain sums: nothing is copied to it before the next barrier
      // but one.
      float* const sums = reinterpret_cast<float*>(stage);
      const bool first = slice < kSegment / kSlice;
#pragma unroll
      for (int r = 0; r < kR; ++r) {
        __syncthreads();
#pragma unroll
        for (int s = 0; s < kS; ++s) {
          sums[chain * kThreads + s * 32 + lane] = sum[r][s];
          sum[r][s] = 0.0f;
        }
        __syncthreads();
        float t = sums[thread];
#pragma unroll
        for (int c = 1; c < kChains; ++c) t = add32(t, sums[c * kThreads + thread]);
        total[r] = first ? t : add32(total[r], t);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kR; ++r) {  // thread = 32 s + lane holds outputs (lane_i + 4 r, lane_j + 8 s)
    const std::int64_t m = tile_m + lane_i + 4 * r, n = tile_n + lane_j + 8 * chain;
    if (m >= M || n >= N) continue;
    const std::int64_t at = m * N + n;
    y[at] = residual == nullptr ? total[r] : add32(residual[at], total[r]);
  }
}

struct SlicedPart {
  float* y;
  const float* residual;
  const float* x;
  const std::byte* W;
  std::int64_t M, N, K;
};

template <Dtype kDtype, int kTileM, int kStages, bool kVector>
void launch_sliced(Context& context, const SlicedPart& p) {
  const auto kernel = sliced_kernel<kDtype, kTileM, kStages, kVector>;
  const std::size_t shared_bytes = kStages * kStageBytes<kDtype, kTileM>;
  context.blocks_per_multiprocessor(reinterpret_cast<const void*>(kernel), kThreads, shared_bytes);
  const std::int64_t tiles_m = (p.M + kTileM - 1) / kTileM, tiles_n = (p.N + kTileN - 1) / kTileN;
  kernel<<<static_cast<unsigned>(tiles_m * tiles_n), kThreads, shared_bytes, context.stream>>>(
      p.y, p.residual, p.x, p.W, p.M, p.N, p.K, static_cast<unsigned>(tiles_m));
  BW_CUDA_LAUNCHED("sliced_kernel");
}

template <Dtype kDtype, int kTileM>
void launch_sliced(Context& context, const SlicedPart& p) {
  if (!rows_are_vectors(p.x, p.W, p.K)) {
    return launch_sliced<kDtype, kTileM, 2, false>(context, p);
  }
  if (4 * kStageBytes<kDtype, kTileM> <= context.shared_limit) {
    return launch_sliced<kDtype, kTileM, 4, true>(context, p);
  }
  launch_sliced<kDtype, kTileM, 2, true>(context, p);
}

template <Dtype kDtype>
void launch_sliced(Context& context, const SlicedPart& p) {
  // Two stages of the small tile are the least that is needed: sm_75 has 64 KiB.
  static_assert(2 * kStageBytes<kDtype, 32> <= 64 * 1024);
  const std::int64_t large_tiles = (p.M + 63) / 64 * ((p.N + kTileN - 1) / kTileN);
  if (p.M > 32 && large_tiles >= context.multiprocessors &&
      2 * kStageBytes<kDtype, 64> <= context.shared_limit) {
    return launch_sliced<kDtype, 64>(context, p);
  }
  launch_sliced<kDtype, 32>(context, p);
}

void launch_sliced(Context& context, Dtype dtype, const SlicedPart& part) {
  // A grid has at most 2^31 - 1 blocks; a chunk is a whole number of tiles.
  const std::int64_t tiles_n = (part.N + kTileN - 1) / kTileN;
  const std::int64_t most = std::max<std::int64_t>(1, 0x7fffffff / tiles_n) * 32 / 64 * 64;
  const std::int64_t chunk = std::max<std::int64_t>(64, most);
  for (std::int64_t m = 0; m < part.M; m += chunk) {
    SlicedPart p = part;
    p.M = std::min(chunk, part.M - m);
    p.x += m * p.K;
    p.y += m * p.N;
    if (p.residual != nullptr) p.residual += m * p.N;
    switch (dtype) {
      case Dtype::kBf16:
        launch_sliced<Dtype::kBf16>(context, p);
        break;
      case Dtype::kFp16:
        launch_sliced<Dtype::kFp16>(context, p);
        break;
      case Dtype::kFp32:
        launch_sliced<Dtype::kFp32>(context, p);
        break;
    }
  }
}

__global__ void gate_kernel(float* gate, const float* up, std::int64_t count) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    gate[i] = contract::swiglu_element(gate[i], up[i]);
  }
}

void launch_sliced(Context& context, const Product& product) {
  const auto run = [&](const ProductPart& part, float* y, const float* residual) {
    launch_sliced(context, product.dtype,
                  {y, residual, product.x, part.W, product.M, part.N, product.K});
  };
  if (product.epilogue == Epilogue::kSwiglu) {
    const std::int64_t count = product.M * product.parts[0].N;
    const Scratch<float> up(context, static_cast<std::size_t>(count));
    run(product.parts[0], product.parts[0].y, nullptr);
    run(product.parts[1], up.get(), nullptr);
    constexpr int kGateThreads = 256;
    const std::int64_t blocks = (count + kGateThreads - 1) / kGateThreads;
    gate_kernel<<<static_cast<unsigned>(std::min<std::int64_t>(blocks, 1 << 20)), kGateThreads, 0,
                  context.stream>>>(product.parts[0].y, up.get(), count);
    BW_CUDA_LAUNCHED("gate_kernel");
    return;
  }
  for (int part = 0; part < product.part_count; ++part) {
    run(product.parts[part], product.parts[part].y,
        product.epilogue == Epilogue::kAdd ? product.residual : nullptr);
  }
}

// ---- The list ----

bool chains_fit(const Context& context, const Product& product) {
  // Up to 64 rows a tile of sliced_kernel wastes less.
  if (context.capability < 80 || kChainBytes > context.shared_limit || product.M <= 64) {
    return false;
  }
  // Tiles and splits are counted in 32 bits.
  constexpr std::int64_t kMostColumns = std::int64_t{1} << 24, kMostRows = std::int64_t{1} << 20;
  if (product.M > kMostRows || product.K > kMostColumns) return false;
  for (int part = 0; part < product.part_count; ++part) {
    const ProductPart& p = product.parts[part];
    if (p.N > kMostColumns || !rows_are_vectors(product.x, p.W, product.K)) return false;
  }
  return true;
}

void launch_chains(Context& context, const Product& product) {
  switch (product.dtype) {
    case Dtype::kBf16:
      return launch_chains<Dtype::kBf16>(context, product);
    case Dtype::kFp16:
      return launch_chains<Dtype::kFp16>(context, product);
    case Dtype::kFp32:
      return launch_chains<Dtype::kFp32>(context, product);
  }
}

constexpr ProductVariant kVariants[] = {
    {"prefill_chains", chains_fit, false, launch_chains},
    {"prefill_sliced", [](const Context&, const Product&) { return true; }, false, launch_sliced},
};

}  // namespace

std::span<const ProductVariant> prefill_variants() {
  return kVariants;
}

}  // namespace bitwitness::cuda
