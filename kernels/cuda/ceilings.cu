// What the device can do at most (ceilings.h).
#include <algorithm>
#include <chrono>
#include <vector>

#include "kernels/cuda/context.h"
#include "kernels/cuda/cuda_backend.h"

namespace bitwitness {
namespace {

constexpr int kThreads = 256, kChains = 16, kRounds = 4096;

__global__ void multiply_add_kernel(float* out, float factor) {
  float sum[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) sum[i] = static_cast<float>(threadIdx.x + i);
#pragma unroll 32  // so that the loop itself costs nothing
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kChains; ++i) sum[i] = contract::fma32(sum[i], factor, 0.5f);
  }
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kChains; ++i) total = contract::add32(total, sum[i]);
  if (total == -1.0f) *out = total;  // never, but the compiler does not know
}

struct DeviceBytes {
  explicit DeviceBytes(std::size_t bytes) { BW_CUDA(cudaMalloc(&data, bytes)); }
  ~DeviceBytes() { cudaFree(data); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  void* data = nullptr;
};

// Median seconds of `launch`, over batches of about 20 ms.
template <class Launch>
double seconds_of(const Launch& launch) {
  using Clock = std::chrono::steady_clock;
  const auto batch = [&](int calls) {
    const auto begin = Clock::now();
    for (int i = 0; i < calls; ++i) launch();
    BW_CUDA(cudaDeviceSynchronize());
    return std::chrono::duration<double>(Clock::now() - begin).count() / calls;
  };
  batch(4);
  const int calls = std::clamp(static_cast<int>(0.02 / batch(4)), 1, 1000);
  std::vector<double> times;
  for (int i = 0; i < 9; ++i) times.push_back(batch(calls));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

Ceilings cuda_ceilings() {
  int device = 0, multiprocessors = 0, cache = 0;
  BW_CUDA(cudaGetDevice(&device));
  BW_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  BW_CUDA(cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device));
  Ceilings out;
  out.cache_bytes = static_cast<std::size_t>(cache);
  {
    constexpr std::size_t kBytes = std::size_t{1} << 30;
    const DeviceBytes from(kBytes), to(kBytes);
    BW_CUDA(cudaMemset(from.data, 0x5a, kBytes));
    out.bytes_per_second =
        2.0 * kBytes / seconds_of([&] {
          BW_CUDA(cudaMemcpyAsync(to.data, from.data, kBytes, cudaMemcpyDeviceToDevice));
        });
  }
  const DeviceBytes sink(sizeof(float));
  const int blocks = multiprocessors * 16;
  out.operations_per_second = 2.0 * blocks * kThreads * kChains * kRounds / seconds_of([&] {
                                multiply_add_kernel<<<static_cast<unsigned>(blocks), kThreads>>>(
                                    static_cast<float*>(sink.data), 0.999f);
                                BW_CUDA_LAUNCHED("multiply-adds");
                              });
  return out;
}

}  // namespace bitwitness
