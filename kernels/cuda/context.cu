// Errors of CUDA calls, device memory and launch limits (context.h).
#include <limits>
#include <string>

#include "attest/base/error.h"
#include "kernels/cuda/context.h"

namespace bitwitness::cuda {

void throw_cuda_error(cudaError_t error, const char* call, const char* file, int line) {
  const char* advice =
      "see whether nvidia-smi lists the device as healthy, or choose another --device";
  switch (error) {
    case cudaErrorMemoryAllocation:
      advice =
          "the device is out of memory: use fewer or shorter sequences, or free it from other "
          "programs";
      break;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
      advice =
          "install an NVIDIA driver at least as new as this build's CUDA runtime, or use --device "
          "cpu";
      break;
    case cudaErrorNoKernelImageForDevice:
      advice =
          "this build has no code for this GPU: configure with -DCMAKE_CUDA_ARCHITECTURES=native, "
          "or "
          "use the preset all-archs";
      break;
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorMisalignedAddress:
      advice =
          "a kernel failed: the process has to be started again; if it repeats, report it with the "
          "command line";
      break;
    default:
      break;
  }
  throw infrastructure_error(std::string("CUDA: ") + call + " failed at " + file + ":" +
                             std::to_string(line) + ": " + cudaGetErrorName(error) + ", " +
                             cudaGetErrorString(error) + "; " + advice);
}

DeviceMemory::~DeviceMemory() {
  for (const auto& [data, block] : blocks_) cudaFree(data);  // the process may be ending: no check
}

void* DeviceMemory::allocate(std::size_t bytes, Kind kind) {
  // Few distinct sizes, so that blocks of similar sizes are re-used.
  constexpr std::size_t kSmall = 512, kLarge = std::size_t{1} << 20;
  const std::size_t unit = bytes < kLarge ? kSmall : kLarge;
  if (bytes > std::numeric_limits<std::size_t>::max() - unit) {
    throw infrastructure_error("CUDA: " + std::to_string(bytes) +
                               " bytes of device memory asked for");
  }
  const std::size_t size = bytes == 0 ? unit : (bytes + unit - 1) / unit * unit;
  if (const auto found = free_.find({kind, size}); found != free_.end()) {
    void* const data = found->second.back();
    found->second.pop_back();
    if (found->second.empty()) free_.erase(found);
    return data;
  }
  void* data = nullptr;
  cudaError_t error = cudaMalloc(&data, size);
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());  // not sticky
    drop_free_blocks();
    error = cudaMalloc(&data, size);
  }
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    std::size_t free_bytes = 0, total_bytes = 0;
    static_cast<void>(cudaMemGetInfo(&free_bytes, &total_bytes));
    throw infrastructure_error(
        "CUDA: out of device memory: " + std::to_string(size) + " bytes asked for, " +
        std::to_string(free_bytes) + " of " + std::to_string(total_bytes) +
        " free; use fewer or shorter sequences, a smaller model, or free the "
        "device from other programs");
  }
  if (error != cudaSuccess) throw_cuda_error(error, "cudaMalloc", __FILE__, __LINE__);
  blocks_.emplace(data, Block{size, kind});
  return data;
}

void DeviceMemory::release(void* data) noexcept {
  const auto found = blocks_.find(data);
  if (found == blocks_.end()) return;  // nullptr
  free_[{found->second.kind, found->second.size}].push_back(data);
}

std::size_t DeviceMemory::available() const {
  std::size_t free_bytes = 0, total_bytes = 0;
  BW_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  for (const auto& [key, blocks] : free_) free_bytes += key.second * blocks.size();
  return free_bytes;
}

void DeviceMemory::drop_free_blocks() noexcept {
  for (const auto& [key, blocks] : free_) {
    for (void* data : blocks) {
      cudaFree(data);  // waits for the kernels that use it
      blocks_.erase(data);
    }
  }
  free_.clear();
  ++generation_;
}

int Context::blocks_per_multiprocessor(const void* kernel, int threads, std::size_t shared_bytes) {
  const auto [entry, is_new] = occupancy_.try_emplace({kernel, threads, shared_bytes}, 1);
  if (is_new) {
    // The whole limit once and for all: configurations of one kernel alternate.
    BW_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_limit)));
    int blocks = 0;
    BW_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes));
    entry->second = blocks < 1 ? 1 : blocks;
  }
  return entry->second;
}

}  // namespace bitwitness::cuda
