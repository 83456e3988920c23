#include <cassert>
#include <cstdio>
#include <fstream>
#include <limits>
#include <utility>

#include "attest/base/error.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/cuda_backend.h"

namespace bitwitness {
namespace cuda {

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
  for (const auto& [data, size] : size_of_) cudaFree(data);  // the process may be ending: no check
}

void* DeviceMemory::allocate(std::size_t bytes) {
  // Few distinct sizes, so that scratch of similar sizes is re-used.
  constexpr std::size_t kSmall = 512, kLarge = std::size_t{1} << 20;
  const std::size_t unit = bytes < kLarge ? kSmall : kLarge;
  if (bytes > std::numeric_limits<std::size_t>::max() - unit) {
    throw infrastructure_error("CUDA: " + std::to_string(bytes) +
                               " bytes of device memory asked for");
  }
  const std::size_t size = bytes == 0 ? unit : (bytes + unit - 1) / unit * unit;
  if (const auto found = free_.find(size); found != free_.end()) {
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
  size_of_.emplace(data, size);
  return data;
}

void DeviceMemory::release(void* data) noexcept {
  const auto found = size_of_.find(data);
  if (found == size_of_.end()) return;  // nullptr
  free_[found->second].push_back(data);
}

void DeviceMemory::drop_free_blocks() noexcept {
  for (const auto& [size, blocks] : free_) {
    for (void* data : blocks) {
      cudaFree(data);  // waits for the kernels that use it
      size_of_.erase(data);
    }
  }
  free_.clear();
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

namespace {

int attribute(cudaDeviceAttr which, int ordinal) {
  int value = 0;
  BW_CUDA(cudaDeviceGetAttribute(&value, which, ordinal));
  return value;
}

std::string driver_version() {
  std::ifstream file("/sys/module/nvidia/version");
  std::string text;
  if (file >> text) return text;
  int version = 0;
  BW_CUDA(cudaDriverGetVersion(&version));
  return "for CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string describe_device(int ordinal) {
  cudaDeviceProp properties{};
  BW_CUDA(cudaGetDeviceProperties(&properties, ordinal));
  char uuid[37];
  const auto* u = reinterpret_cast<const unsigned char*>(properties.uuid.bytes);
  std::snprintf(uuid, sizeof uuid,
                "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
                u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14],
                u[15]);
  return std::string(properties.name) + ", compute capability " + std::to_string(properties.major) +
         "." + std::to_string(properties.minor) + ", driver " + driver_version() + ", UUID GPU-" +
         uuid;
}

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int ordinal) {
    context_.ordinal = ordinal;
    use_device();
    context_.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, ordinal);
    context_.shared_limit =
        static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal));
    device_ = describe_device(ordinal);
    BW_CUDA(cudaStreamCreateWithFlags(&context_.stream, cudaStreamNonBlocking));
    try {
      check_device_known_answers(context_);
    } catch (...) {
      cudaStreamDestroy(context_.stream);
      throw;
    }
  }

  ~CudaBackend() override {
    cudaSetDevice(context_.ordinal);
    cudaStreamSynchronize(context_.stream);
    cudaStreamDestroy(context_.stream);
  }

  std::string name() const override { return "cuda"; }
  std::string device() const override { return device_; }

  Buffer allocate(std::size_t bytes) override {
    use_device();
    return Buffer(this, context_.memory.allocate(bytes), bytes);
  }
  void release(void* data) noexcept override { context_.memory.release(data); }

  // Pageable host memory is staged before the call returns, so `host` may change afterwards.
  void to_device(void* destination, const void* host, std::size_t bytes) override {
    if (bytes == 0) return;
    use_device();
    BW_CUDA(cudaMemcpyAsync(destination, host, bytes, cudaMemcpyHostToDevice, context_.stream));
  }
  void to_host(void* host, const void* source, std::size_t bytes) override {
    use_device();
    if (bytes != 0) {
      BW_CUDA(cudaMemcpyAsync(host, source, bytes, cudaMemcpyDeviceToHost, context_.stream));
    }
    BW_CUDA(cudaStreamSynchronize(context_.stream));
  }
  void synchronize() override {
    use_device();
    BW_CUDA(cudaStreamSynchronize(context_.stream));
  }
  const std::byte* place(const std::byte* host, std::size_t bytes,
                         std::vector<Buffer>& owned) override {
    Buffer buffer = allocate(bytes);
    to_device(buffer.as<std::byte>(), host, bytes);
    const std::byte* const placed = buffer.as<std::byte>();
    owned.push_back(std::move(buffer));
    return placed;
  }

  void embed(float* out, const Matrix& embedding, const std::int32_t* tokens,
             std::int64_t M) override {
    if (M == 0) return;
    use_device();
    cuda::embed(context_, out, embedding.dtype, embedding.data, embedding.cols, tokens, M);
  }

  void rms_norm(float* out, const float* x, const Vector& weight, float eps,
                std::int64_t M) override {
    if (M == 0) return;
    use_device();
    cuda::rms_norm(context_, out, x, weight.dtype, weight.data, weight.size, eps, M);
  }

  void matmul(float* y, const float* x, const Matrix& W, std::int64_t M) override {
    if (M == 0) return;
    assert(W.cols >= 1 && W.cols < std::numeric_limits<std::int32_t>::max() - contract::kSegment);
    use_device();
    cuda::matmul(context_, y, x, W.dtype, W.data, W.rows, W.cols, M);
  }

  void rope(float* x, std::int64_t heads, std::int64_t head_dim, const float* cosines,
            const float* sines, const RowMap& rows) override {
    if (rows.rows == 0) return;
    assert(head_dim % 2 == 0);
    use_device();
    cuda::rope(context_, x, heads, head_dim, cosines, sines, rows.position, rows.rows);
  }

  void store_kv(const LayerKv& cache, const float* k, const float* v, const RowMap& rows) override {
    if (rows.rows == 0) return;
    use_device();
    cuda::store_kv(context_, cache.keys, cache.values, cache.capacity, cache.kv_width, k, v,
                   rows.slot, rows.position, rows.rows);
  }

  void attention(float* out, const float* q, const LayerKv& cache, std::int64_t heads,
                 std::int64_t kv_heads, std::int64_t head_dim, const RowMap& rows) override {
    if (rows.rows == 0) return;
    assert(heads % kv_heads == 0 && head_dim <= contract::kMaxHeadDim);
    assert(cache.kv_width == kv_heads * head_dim);
    use_device();
    std::int64_t last = 0;
    for (std::int64_t m = 0; m < rows.rows; ++m) {
      last = rows.host_position[m] > last ? rows.host_position[m] : last;
    }
    const cuda::AttentionShape shape{rows.rows,      heads, kv_heads, static_cast<int>(head_dim),
                                     cache.capacity, last};
    cuda::attention(context_, out, q, cache.keys, cache.values, shape, rows.slot, rows.position);
  }

  void swiglu(float* out, const float* gate, const float* up, std::int64_t count) override {
    if (count == 0) return;
    use_device();
    cuda::swiglu(context_, out, gate, up, count);
  }

  void add(float* x, const float* y, std::int64_t count) override {
    if (count == 0) return;
    use_device();
    cuda::add(context_, x, y, count);
  }

  void gather_rows(float* out, const float* x, std::int64_t width, const std::int32_t* index,
                   std::int64_t count) override {
    if (count == 0) return;
    use_device();
    cuda::gather_rows(context_, out, x, width, index, count);
  }

  void hash_rows(Digest* host_out, LeafType type, std::uint32_t layer, const float* first,
                 std::size_t first_bytes, const float* second, std::size_t second_bytes,
                 const RowMap& rows) override {
    if (rows.rows == 0) return;
    assert(first_bytes % 4 == 0 && second_bytes % 4 == 0);
    static_assert(sizeof(Digest) == 32);
    use_device();
    const auto count = static_cast<std::size_t>(rows.rows);
    cuda::Scratch<std::uint32_t> digests(context_, count * 8);
    cuda::hash_rows(context_, digests.get(), type, layer,
                    reinterpret_cast<const std::uint32_t*>(first), first_bytes / 4,
                    reinterpret_cast<const std::uint32_t*>(second), second_bytes / 4, rows.position,
                    rows.rows);
    to_host(host_out, digests.get(), count * sizeof(Digest));
  }

  NonFinite find_non_finite(const float* x, std::int64_t width, std::int64_t M) override {
    const std::int64_t count = width * M;
    if (count == 0) return {};
    use_device();
    cuda::Scratch<std::uint64_t> found(context_, 1);
    cuda::find_non_finite(context_, found.get(), x, count);
    std::uint64_t index = 0;
    to_host(&index, found.get(), sizeof index);
    const auto i = static_cast<std::int64_t>(index);
    if (i == count) return {};
    return {i / width, i % width};
  }

  void sample(std::int32_t* host_out, const float* logits, std::int64_t vocab,
              std::span<const SampleRequest> requests) override {
    if (requests.empty()) return;
    assert(vocab >= 1 && vocab <= (1 << 24));
    use_device();
    std::vector<cuda::SampleRow> rows;
    for (const SampleRequest& request : requests) {
      const contract::SamplingParams& p = request.params;
      rows.push_back({p.temperature, p.top_k,
                      p.top_p < 1.0f ? contract::top_p_fraction(p.top_p) : std::uint64_t{1} << 32,
                      request.draw});
    }
    cuda::Scratch<cuda::SampleRow> device_rows(context_, rows.size());
    cuda::Scratch<std::int32_t> tokens(context_, rows.size());
    to_device(device_rows.get(), rows.data(), rows.size() * sizeof(cuda::SampleRow));
    cuda::sample(context_, tokens.get(), logits, vocab, device_rows.get(),
                 static_cast<std::int64_t>(rows.size()));
    to_host(host_out, tokens.get(), rows.size() * sizeof(std::int32_t));
  }

 private:
  // The current device belongs to the calling thread.
  void use_device() const { BW_CUDA(cudaSetDevice(context_.ordinal)); }

  cuda::Context context_;
  std::string device_;
};

}  // namespace
}  // namespace cuda

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return count;
}

std::string cuda_unavailable_reason() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return std::string("no usable CUDA device: ") + cudaGetErrorString(error);
  }
  return count == 0 ? "no usable CUDA device: the driver lists none" : "";
}

std::unique_ptr<Backend> make_cuda_backend(int ordinal) {
  const int count = cuda_device_count();
  if (count == 0) {
    throw usage_error("device cuda: " + cuda_unavailable_reason() + "; choose another --device");
  }
  if (ordinal < 0 || ordinal >= count) {
    throw usage_error("device cuda:" + std::to_string(ordinal) +
                      " does not exist; there are cuda:0 to cuda:" + std::to_string(count - 1));
  }
  return std::make_unique<cuda::CudaBackend>(ordinal);
}

}  // namespace bitwitness
