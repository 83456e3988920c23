#include <cuda_runtime.h>

#include <algorithm>

#include "tests/bench/cuda_ceilings.h"

namespace bitwitness::bench {
namespace {

constexpr int kThreads = 256, kChainsPerThread = 16, kRounds = 4096;

__global__ void multiply_add_kernel(float* out, float factor) {
  float sum[kChainsPerThread];
#pragma unroll
  for (int i = 0; i < kChainsPerThread; ++i) sum[i] = static_cast<float>(threadIdx.x + i);
#pragma unroll 4
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kChainsPerThread; ++i) sum[i] = __fmaf_rn(sum[i], factor, 0.5f);
  }
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kChainsPerThread; ++i) total = __fadd_rn(total, sum[i]);
  if (total == -1.0f) *out = total;  // never, but the compiler does not know
}

double median_of(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

double copy_bytes_per_second() {
  constexpr std::size_t kBytes = std::size_t{1} << 30;
  void *from = nullptr, *to = nullptr;
  double rate = 0;
  if (cudaMalloc(&from, kBytes) == cudaSuccess && cudaMalloc(&to, kBytes) == cudaSuccess &&
      cudaMemset(from, 0x5a, kBytes) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess) {
    rate = 2.0 * kBytes /
           median_of(time_batches(
               [&](int) { cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice); },
               [] { cudaDeviceSynchronize(); }));
  }
  cudaFree(from);
  cudaFree(to);
  return cudaGetLastError() == cudaSuccess ? rate : 0;
}

double multiply_add_operations_per_second() {
  int device = 0, multiprocessors = 0;
  float* out = nullptr;
  if (cudaGetDevice(&device) != cudaSuccess || cudaMalloc(&out, sizeof(float)) != cudaSuccess)
    return 0;
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int blocks = multiprocessors * 16;
  const double seconds = median_of(time_batches(
      [&](int) { multiply_add_kernel<<<static_cast<unsigned>(blocks), kThreads>>>(out, 0.999f); },
      [] { cudaDeviceSynchronize(); }));
  cudaFree(out);
  if (cudaGetLastError() != cudaSuccess) return 0;
  return 2.0 * blocks * kThreads * kChainsPerThread * kRounds / seconds;
}

}  // namespace bitwitness::bench
