// y[M, N] = x[M, K] W[N, K]^T for many rows of x, bound by multiply-adds (contract.h section 3).
//
// Sliced K: each of the eight warps of a block owns one chain of the same tile of outputs, so that
// all chains advance together through a slice of 64 k. At the end of a segment the chain sums meet
// in shared memory and one thread per output adds them, ascending. Tiles are copied to shared
// memory kStages - 1 slices ahead (asynchronously from sm_80 on).
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/context.h"
#include "kernels/cuda/matmul.cuh"

namespace bitwitness::cuda {
namespace {

using contract::add32;
using contract::fma32;
using contract::kChains;
using contract::kGroup;
using contract::kSegment;

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
// / 8, lane % 8) holds outputs (i + 4 r, j + 8 s). kVector: see rows_are_vectors.
template <Dtype kDtype, int kTileM, int kStages, bool kVector>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(float* __restrict__ y, const float* __restrict__ x,
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
    if (m < M && n < N) y[m * N + n] = total[r];
  }
}

template <Dtype kDtype, int kTileM, int kStages, bool kVector>
void launch(Context& context, float* y, const float* x, const std::byte* W, std::int64_t N,
            std::int64_t K, std::int64_t M) {
  const auto kernel = prefill_kernel<kDtype, kTileM, kStages, kVector>;
  const std::size_t shared_bytes = kStages * kStageBytes<kDtype, kTileM>;
  context.blocks_per_multiprocessor(reinterpret_cast<const void*>(kernel), kThreads, shared_bytes);
  const std::int64_t tiles_m = (M + kTileM - 1) / kTileM, tiles_n = (N + kTileN - 1) / kTileN;
  kernel<<<static_cast<unsigned>(tiles_m * tiles_n), kThreads, shared_bytes, context.stream>>>(
      y, x, W, M, N, K, static_cast<unsigned>(tiles_m));
  BW_CUDA_LAUNCHED("matmul_prefill");
}

template <Dtype kDtype, int kTileM>
void launch(Context& context, float* y, const float* x, const std::byte* W, std::int64_t N,
            std::int64_t K, std::int64_t M) {
  if (!rows_are_vectors(x, W, K)) {
    return launch<kDtype, kTileM, 2, false>(context, y, x, W, N, K, M);
  }
  if (4 * kStageBytes<kDtype, kTileM> <= context.shared_limit) {
    return launch<kDtype, kTileM, 4, true>(context, y, x, W, N, K, M);
  }
  launch<kDtype, kTileM, 2, true>(context, y, x, W, N, K, M);
}

template <Dtype kDtype>
void launch(Context& context, float* y, const float* x, const std::byte* W, std::int64_t N,
            std::int64_t K, std::int64_t M) {
  // Two stages of the small tile are the least that is needed: sm_75 has 64 KiB.
  static_assert(2 * kStageBytes<kDtype, 32> <= 64 * 1024);
  const std::int64_t large_tiles = (M + 63) / 64 * ((N + kTileN - 1) / kTileN);
  if (M > 32 && large_tiles >= context.multiprocessors &&
      2 * kStageBytes<kDtype, 64> <= context.shared_limit) {
    return launch<kDtype, 64>(context, y, x, W, N, K, M);
  }
  launch<kDtype, 32>(context, y, x, W, N, K, M);
}

}  // namespace

void matmul_prefill(Context& context, float* y, const float* x, Dtype dtype, const std::byte* W,
                    std::int64_t N, std::int64_t K, std::int64_t M) {
  // A grid has at most 2^31 - 1 blocks; a chunk is a whole number of tiles.
  const std::int64_t tiles_n = (N + kTileN - 1) / kTileN;
  const std::int64_t most = std::max<std::int64_t>(1, 0x7fffffff / tiles_n) * 32 / 64 * 64;
  const std::int64_t chunk = std::max<std::int64_t>(64, most);
  for (std::int64_t m = 0; m < M; m += chunk) {
    const std::int64_t count = std::min(chunk, M - m);
    switch (dtype) {
      case Dtype::kBf16:
        launch<Dtype::kBf16>(context, y + m * N, x + m * K, W, N, K, count);
        break;
      case Dtype::kFp16:
        launch<Dtype::kFp16>(context, y + m * N, x + m * K, W, N, K, count);
        break;
      case Dtype::kFp32:
        launch<Dtype::kFp32>(context, y + m * N, x + m * K, W, N, K, count);
        break;
    }
  }
}

}  // namespace bitwitness::cuda
