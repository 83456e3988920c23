// y[M, N] = x[M, K] W[N, K]^T for few rows of x, bound by the reading of W (contract.h section 3).
//
// A warp takes 4 * kRows rows of W and one segment of K: lane = 8 * sub + c is chain c of rows sub,
// sub + 4,
// ..., so that eight neighbouring lanes read 64 consecutive weights. The chain sums of a segment
// are gathered by shuffles, ascending; the segments' warps meet in shared memory and one thread per
// output adds them, ascending. The method and its measurements: ARITHMETIC.md section 3.
#include <algorithm>

#include "kernels/cuda/context.h"
#include "kernels/cuda/matmul.cuh"

namespace bitwitness::cuda {
namespace {

using contract::add32;
using contract::fma32;
using contract::kChains;
using contract::kGroup;
using contract::kSegment;

constexpr int kMaxThreads = 512;
constexpr int kMaxSegmentWarps = kMaxThreads / 32;
constexpr int kStep = kChains * kGroup;  // consecutive k that one warp reads per row at once

// Weights are read once: keep them out of L1, which holds x.
__device__ __forceinline__ uint4 load_streaming(const void* p) {
  uint4 v;
#if __CUDA_ARCH__ >= 800
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
#else
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
#endif
  return v;
}

// Steps [k, k + kStep * kUnroll) of this lane's chain for kRows rows of W and kM rows of x.
template <Dtype kDtype, int kRows, int kM, int kUnroll, bool kStaged>
__device__ __forceinline__ void multiply_add(const std::byte* const (&w_row)[kRows],
                                             const float* const (&x_row)[kM], int k,
                                             float (&sum)[kRows][kM]) {
  WeightGroup<kDtype> w[kUnroll][kRows];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::byte* p = w_row[r] + (k + u * kStep) * kElementBytes<kDtype>;
#pragma unroll
      for (int i = 0; i < WeightGroup<kDtype>::kVectors; ++i)
        w[u][r].v[i] = load_streaming(p + 16 * i);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float4* p = reinterpret_cast<const float4*>(x_row[m] + k + u * kStep);
      const float4 a = kStaged ? p[0] : __ldg(p), b = kStaged ? p[1] : __ldg(p + 1);
      const float x[kGroup] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float t = sum[r][m];
#pragma unroll
        for (int i = 0; i < kGroup; ++i) t = fma32(x[i], w[u][r].at(i), t);
        sum[r][m] = t;
      }
    }
  }
}

// Computes kM rows of outputs, of which M are stored. kVector: see rows_are_vectors. kStaged: x[kM,
// K] is copied to shared memory first. blockDim.x = 32 * segment_warps * row groups.
template <Dtype kDtype, int kRows, int kM, int kUnroll, bool kVector, bool kStaged>
__global__ void __launch_bounds__(kMaxThreads, kM == 1 ? 2 : 1)
    decode_kernel(float* __restrict__ y, const float* __restrict__ x,
                  const std::byte* __restrict__ W, int M, std::int64_t N, std::int64_t K,
                  int segment_warps) {
  extern __shared__ float4 shared_vectors[];
  constexpr int kGroupRows = 4 * kRows;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int threads = static_cast<int>(blockDim.x);
  const int chain = lane % kChains, sub = lane / kChains;
  const int groups = threads / 32 / segment_warps;
  const int segment_warp = warp % segment_warps, group = warp / segment_warps;
  const int block_outputs = groups * kM * kGroupRows;
  float* partial =
      reinterpret_cast<float*>(shared_vectors);  // [groups, segment_warps, kM, kGroupRows]
  float* total = partial + segment_warps * block_outputs;  // [groups, kM, kGroupRows]
  float* staged = total + block_outputs;                   // [kM, K]

  const float* x_row[kM];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    const float* source = x + static_cast<std::int64_t>(m < M ? m : M - 1) * K;
    if constexpr (kStaged) {
      float* target = staged + m * K;
      for (std::int64_t i = threadIdx.x * 4; i < K; i += threads * 4) {
        *reinterpret_cast<float4*>(target + i) = __ldg(reinterpret_cast<const float4*>(source + i));
      }
      x_row[m] = target;
    } else {
      x_row[m] = source;
    }
  }
  if constexpr (kStaged) __syncthreads();

  const int segments = static_cast<int>((K + kSegment - 1) / kSegment);
  const std::int64_t block_rows = static_cast<std::int64_t>(groups) * kGroupRows;
  for (std::int64_t base = blockIdx.x * block_rows; base < N; base += gridDim.x * block_rows) {
    for (int first = 0; first < segments; first += segment_warps) {
      const int segment = first + segment_warp;
      if (segment < segments) {
        const std::int64_t begin = static_cast<std::int64_t>(segment) * kSegment;
        const int length = static_cast<int>(K - begin < kSegment ? K - begin : kSegment);
        std::int64_t
            at[kRows];  // where this lane's chain begins in W; beyond N the last row is read
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const std::int64_t n = base + group * kGroupRows + 4 * r + sub;
          at[r] = (n < N ? n : N - 1) * K + begin + chain * kGroup;
        }
        const float* x_chain[kM];
#pragma unroll
        for (int m = 0; m < kM; ++m) x_chain[m] = x_row[m] + begin + chain * kGroup;
        float sum[kRows][kM];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int m = 0; m < kM; ++m) sum[r][m] = 0.0f;
        }
        if constexpr (kVector) {
          const std::byte* w_row[kRows];
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            w_row[r] = W + at[r] * kElementBytes<kDtype>;
          }
          int k = 0;
          for (; k + kUnroll * kStep <= length; k += kUnroll * kStep) {
            multiply_add<kDtype, kRows, kM, kUnroll, kStaged>(w_row, x_chain, k, sum);
          }
          for (; k + chain * kGroup < length; k += kStep) {
            multiply_add<kDtype, kRows, kM, 1, kStaged>(w_row, x_chain, k, sum);
          }
        } else {
          for (int k = 0; k + chain * kGroup < length; k += kStep) {
            const int left = length - k - chain * kGroup;
            const int count = left < kGroup ? left : kGroup;
            for (int i = 0; i < count; ++i) {
#pragma unroll
              for (int r = 0; r < kRows; ++r) {
                const float w = contract::load_weight<kDtype>(W, at[r] + k + i);
#pragma unroll
                for (int m = 0; m < kM; ++m) sum[r][m] = fma32(x_chain[m][k + i], w, sum[r][m]);
              }
            }
          }
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            float t = __shfl_sync(0xffffffffu, sum[r][m], sub * kChains);
#pragma unroll
            for (int c = 1; c < kChains; ++c) {
              t = add32(t, __shfl_sync(0xffffffffu, sum[r][m], sub * kChains + c));
            }
            if (chain == 0) {
              partial[((group * segment_warps + segment_warp) * kM + m) * kGroupRows + 4 * r +
                      sub] = t;
            }
          }
        }
      }
      __syncthreads();
      const int present = segments - first < segment_warps ? segments - first : segment_warps;
      for (int i = static_cast<int>(threadIdx.x); i < block_outputs; i += threads) {
        const int row = i % kGroupRows, m = i / kGroupRows % kM, g = i / kGroupRows / kM;
        const float* p = partial + (g * segment_warps * kM + m) * kGroupRows + row;
        float t = first == 0 ? p[0] : add32(total[i], p[0]);
        for (int s = 1; s < present; ++s) t = add32(t, p[s * kM * kGroupRows]);
        if (first + segment_warps < segments) {
          total[i] = t;
        } else {
          const std::int64_t n = base + g * kGroupRows + row;
          if (n < N && m < M) y[m * N + n] = t;
        }
      }
      __syncthreads();
    }
  }
}

template <Dtype kDtype, int kRows, int kM, int kUnroll, bool kVector, bool kStaged>
void launch(Context& context, float* y, const float* x, const std::byte* W, int M, std::int64_t N,
            std::int64_t K) {
  const std::int64_t segments = (K + kSegment - 1) / kSegment;
  const int segment_warps = static_cast<int>(std::min<std::int64_t>(segments, kMaxSegmentWarps));
  int groups = std::min(4, kMaxSegmentWarps / segment_warps);
  const auto blocks_for = [&](int g) { return (N + g * 4 * kRows - 1) / (g * 4 * kRows); };
  while (groups > 1 && blocks_for(groups) < context.multiprocessors) groups /= 2;
  const int threads = 32 * segment_warps * groups;
  std::size_t shared_floats =
      static_cast<std::size_t>((segment_warps + 1) * groups * kM * 4 * kRows);
  if constexpr (kStaged)
    shared_floats += static_cast<std::size_t>(kM) * static_cast<std::size_t>(K);
  const std::size_t shared_bytes = shared_floats * sizeof(float);

  const auto kernel = decode_kernel<kDtype, kRows, kM, kUnroll, kVector, kStaged>;
  const int resident = context.blocks_per_multiprocessor(reinterpret_cast<const void*>(kernel),
                                                         threads, shared_bytes);
  const std::int64_t grid =
      std::min<std::int64_t>(blocks_for(groups), std::int64_t{context.multiprocessors} * resident);
  kernel<<<static_cast<unsigned>(grid), threads, shared_bytes, context.stream>>>(y, x, W, M, N, K,
                                                                                 segment_warps);
  BW_CUDA_LAUNCHED("matmul_decode");
}

// kRows and kUnroll keep about eight 16-byte loads in flight per lane, as far as registers allow.
template <Dtype kDtype, bool kStaged>
void launch_vectors(Context& context, float* y, const float* x, const std::byte* W, int M,
                    std::int64_t N, std::int64_t K) {
  constexpr int kHalve = kDtype == Dtype::kFp32 ? 2 : 1;
  constexpr int kRowsOf8 = kStaged ? 4 : 2;
  if (M == 1) return launch<kDtype, 1, 1, 8 / kHalve, true, kStaged>(context, y, x, W, M, N, K);
  if (M == 2) return launch<kDtype, 2, 2, 4 / kHalve, true, kStaged>(context, y, x, W, M, N, K);
  if (M <= 4) return launch<kDtype, 4, 4, 2 / kHalve, true, kStaged>(context, y, x, W, M, N, K);
  launch<kDtype, kRowsOf8, 8, 2 / kHalve, true, kStaged>(context, y, x, W, M, N, K);
}

template <Dtype kDtype>
void launch(Context& context, float* y, const float* x, const std::byte* W, int M, std::int64_t N,
            std::int64_t K) {
  if (!rows_are_vectors(x, W, K)) {
    if (M == 1) return launch<kDtype, 1, 1, 1, false, false>(context, y, x, W, M, N, K);
    return launch<kDtype, 1, 8, 1, false, false>(context, y, x, W, M, N, K);
  }
  // Beside the rows of x there are sums: of 16 warps and 4 groups at most, 8 x 16 outputs each.
  const std::size_t rows = M == 1 ? 1 : M == 2 ? 2 : M <= 4 ? 4 : 8;
  const std::size_t staged_bytes = (rows * static_cast<std::size_t>(K) + (16 + 4) * 8 * 16) * 4;
  if (staged_bytes <= context.shared_limit) {
    return launch_vectors<kDtype, true>(context, y, x, W, M, N, K);
  }
  launch_vectors<kDtype, false>(context, y, x, W, M, N, K);
}

}  // namespace

void matmul_decode(Context& context, float* y, const float* x, Dtype dtype, const std::byte* W,
                   std::int64_t N, std::int64_t K, std::int64_t M) {
  constexpr std::int64_t kMost = 8;
  for (std::int64_t m = 0; m < M; m += kMost) {
    const int count = static_cast<int>(std::min(kMost, M - m));
    float* const y_part = y + m * N;
    const float* const x_part = x + m * K;
    switch (dtype) {
      case Dtype::kBf16:
        launch<Dtype::kBf16>(context, y_part, x_part, W, count, N, K);
        break;
      case Dtype::kFp16:
        launch<Dtype::kFp16>(context, y_part, x_part, W, count, N, K);
        break;
      case Dtype::kFp32:
        launch<Dtype::kFp32>(context, y_part, x_part, W, count, N, K);
        break;
    }
  }
}

void matmul(Context& context, float* y, const float* x, Dtype dtype, const std::byte* W,
            std::int64_t N, std::int64_t K, std::int64_t M) {
  // Two passes over W still cost less than a tile of 32 rows that is half empty.
  constexpr std::int64_t kDecodeRows = 16;
  if (M <= kDecodeRows) return matmul_decode(context, y, x, dtype, W, N, K, M);
  matmul_prefill(context, y, x, dtype, W, N, K, M);
}

}  // namespace bitwitness::cuda
