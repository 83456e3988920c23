#include <cassert>
#include <cstdio>
#include <fstream>
#include <functional>
#include <limits>
#include <unordered_map>
#include <unordered_set>
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

// Steps as CUDA graphs. A step runs plainly the first time, which makes what recording must not
// (scratch, kernel attributes, comparisons of variants), is recorded the second time, and replayed
// from then on.
class CudaRecordings final : public Recordings {
 public:
  explicit CudaRecordings(Context& context) : context_(context) {}
  ~CudaRecordings() override { clear(); }
  CudaRecordings(const CudaRecordings&) = delete;
  CudaRecordings& operator=(const CudaRecordings&) = delete;

  void run(std::uint64_t key, const std::function<void()>& step) override {
    if (context_.memory.generation() != generation_) {
      clear();
      generation_ = context_.memory.generation();
    }
    if (const auto found = graphs_.find(key); found != graphs_.end()) {
      if (found->second == nullptr) found->second = record(step);
      BW_CUDA(cudaGraphLaunch(found->second, context_.stream));
      return;
    }
    step();
    constexpr std::size_t kMostGraphs = 128;
    if (graphs_.size() >= kMostGraphs) clear();
    if (context_.memory.generation() == generation_) graphs_.emplace(key, nullptr);
  }

 private:
  cudaGraphExec_t record(const std::function<void()>& step) {
    cudaGraph_t graph = nullptr;
    // Relaxed: a step may look at the device's attributes.
    BW_CUDA(cudaStreamBeginCapture(context_.stream, cudaStreamCaptureModeRelaxed));
    try {
      step();
    } catch (...) {
      cudaStreamEndCapture(context_.stream, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      static_cast<void>(cudaGetLastError());
      throw;
    }
    BW_CUDA(cudaStreamEndCapture(context_.stream, &graph));
    cudaGraphExec_t executable = nullptr;
    const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    BW_CUDA(error);
    return executable;
  }

  void clear() noexcept {
    for (const auto& [key, graph] : graphs_) {
      if (graph != nullptr) cudaGraphExecDestroy(graph);
    }
    graphs_.clear();
  }

  Context& context_;
  std::uint64_t generation_ = 0;
  std::unordered_map<std::uint64_t, cudaGraphExec_t> graphs_;  // null: seen once
};

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int ordinal) {
    context_.ordinal = ordinal;
    use_device();
    context_.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, ordinal);
    context_.shared_limit =
        static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal));
    context_.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, ordinal) +
                          attribute(cudaDevAttrComputeCapabilityMinor, ordinal);
    context_.overlaps_launches = context_.capability >= 90;
    device_ = describe_device(ordinal);
    try {
      BW_CUDA(cudaStreamCreateWithFlags(&context_.stream, cudaStreamNonBlocking));
      // Digests take few threads for long: where there is room, they go first.
      int least = 0, greatest = 0;
      BW_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
      BW_CUDA(cudaStreamCreateWithPriority(&hashing_, cudaStreamNonBlocking, greatest));
      BW_CUDA(cudaEventCreateWithFlags(&computed_, cudaEventDisableTiming));
      BW_CUDA(cudaEventCreateWithFlags(&hashed_, cudaEventDisableTiming));
      check_device_known_answers(context_);
    } catch (...) {
      destroy();
      throw;
    }
  }

  ~CudaBackend() override {
    cudaSetDevice(context_.ordinal);
    cudaStreamSynchronize(context_.stream);
    hash_scratch_.clear();
    destroy();
  }

  std::string name() const override { return "cuda"; }
  std::string device() const override { return device_; }

  Buffer allocate(std::size_t bytes) override {
    use_device();
    return Buffer(this, context_.memory.allocate(bytes, DeviceMemory::Kind::kBuffer), bytes);
  }
  Buffer allocate_host(std::size_t bytes) override {
    use_device();
    void* data = nullptr;
    BW_CUDA(cudaMallocHost(&data, bytes == 0 ? 1 : bytes));
    pinned_.insert(data);
    return Buffer(this, data, bytes);
  }
  void release(void* data) noexcept override {
    if (pinned_.erase(data) != 0) {
      cudaFreeHost(data);
    } else {
      context_.memory.release(data);
    }
  }
  void require_memory(std::size_t bytes, std::string_view what) override {
    use_device();
    const std::size_t available = context_.memory.available();
    if (bytes <= available) return;
    throw infrastructure_error(std::string(what) + " need " + std::to_string(bytes >> 20) +
                               " MiB of device memory, and " + std::to_string(available >> 20) +
                               " MiB are free on " + device_ +
                               "; use a smaller model, fewer or shorter sequences or another "
                               "--device, or free the device from other programs");
  }
  std::int64_t preferred_rows() const override { return 2048; }
  std::unique_ptr<Recordings> make_recordings() override {
    return std::make_unique<CudaRecordings>(context_);
  }

  // Pageable host memory is staged before the call returns, so `host` may change afterwards; memory
  // of allocate_host may not before the device has been waited for.
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
    bitwitness::Product single;
    single.x = x;
    single.M = M;
    single.parts[0] = {"", &W, y};
    product(single);
  }

  void product(const bitwitness::Product& product) override {
    if (product.M == 0) return;
    const Matrix& first = *product.parts[0].W;
    assert(first.cols >= 1 && first.cols < std::numeric_limits<std::int32_t>::max() / 2);
    use_device();
    cuda::Product out;
    out.M = product.M;
    out.K = first.cols;
    out.x = product.x;
    if (product.norm != nullptr) {
      out.norm = product.norm->data;
      out.norm_dtype = product.norm->dtype;
      out.eps = product.eps;
    }
    out.dtype = first.dtype;
    out.epilogue = product.epilogue;
    out.residual = product.residual;
    out.part_count = product.part_count;
    for (int i = 0; i < product.part_count; ++i) {
      const Matrix& W = *product.parts[i].W;
      if (W.dtype != first.dtype) return compose(product, {});
      out.parts[i] = {W.data, W.rows, product.parts[i].y};
    }
    cuda::product(context_, out);
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
    cuda::store_kv(context_, pages_of(cache), k, v, shape_of(rows));
  }

  void rope_store(const bitwitness::RopeStore& arguments, const RowMap& rows) override {
    if (rows.rows == 0) return;
    assert(arguments.head_dim % 2 == 0);
    use_device();
    cuda::rope_store(context_, rope_of(arguments),
                     arguments.cache == nullptr ? KvPages{} : pages_of(*arguments.cache),
                     shape_of(rows));
  }

  void attend(float* out, const bitwitness::RopeStore& arguments, const LayerKv& cache,
              const RowMap& rows) override {
    if (rows.rows == 0) return;
    use_device();
    if (arguments.cache != nullptr &&
        cuda::attention_fused(context_, out, rope_of(arguments), pages_of(cache), shape_of(rows))) {
      return;
    }
    Backend::attend(out, arguments, cache, rows);
  }

  void attention(float* out, const float* q, const LayerKv& cache, std::int64_t heads,
                 std::int64_t kv_heads, std::int64_t head_dim, const RowMap& rows) override {
    if (rows.rows == 0) return;
    assert(heads % kv_heads == 0 && head_dim <= contract::kMaxHeadDim);
    assert(cache.kv_width == kv_heads * head_dim);
    use_device();
    cuda::attention(context_, out, q, pages_of(cache), heads, kv_heads, static_cast<int>(head_dim),
                    shape_of(rows));
  }

  void swiglu(float* out, const float* gate, const float* up, std::int64_t count) override {
    if (count == 0) return;
    use_device();
    cuda::swiglu(context_, out, gate, up, count);
  }

  void add(float* out, const float* x, const float* y, std::int64_t count) override {
    if (count == 0) return;
    use_device();
    cuda::add(context_, out, x, y, count);
  }

  void gather_rows(float* out, const float* x, std::int64_t width, const std::int32_t* index,
                   std::int64_t count) override {
    if (count == 0) return;
    use_device();
    cuda::gather_rows(context_, out, x, width, index, count);
  }

  void hash_rows(Digest* out, std::uint32_t* non_finite, LeafType type, std::uint32_t first_layer,
                 std::int64_t layers, const float* first, std::size_t first_bytes,
                 const float* second, std::size_t second_bytes, const RowMap& rows) override {
    if (rows.rows == 0) return;
    assert(first_bytes % 4 == 0 && second_bytes % 4 == 0);
    static_assert(sizeof(Digest) == 32);
    use_device();
    cuda::HashRows a;
    a.out = reinterpret_cast<std::uint32_t*>(out);
    a.non_finite = non_finite;
    a.type = type;
    a.first_layer = first_layer;
    a.layers = layers;
    a.first = reinterpret_cast<const std::uint32_t*>(first);
    a.first_words = first_bytes / 4;
    a.second = reinterpret_cast<const std::uint32_t*>(second);
    a.second_words = second_bytes / 4;
    a.position = rows.position;
    a.M = rows.rows;
    if (to_hash_.size() == cuda::kMostHashRows) start_hashing();
    to_hash_.push_back(a);
  }

  void start_hashing() override {
    if (to_hash_.empty()) return;
    use_device();
    std::vector<std::uint32_t*> scratch;
    for (const cuda::HashRows& a : to_hash_) {
      hash_scratch_.push_back(
          std::make_unique<cuda::Scratch<std::uint32_t>>(context_, cuda::hash_scratch_words(a)));
      scratch.push_back(hash_scratch_.back()->get());
    }
    begin_hashing();
    cuda::hash_rows(hashing_, to_hash_, scratch);
    to_hash_.clear();
  }

  void finish_hashing() override {
    start_hashing();
    if (!hashes_) return;
    use_device();
    BW_CUDA(cudaEventRecord(hashed_, hashing_));
    BW_CUDA(cudaStreamWaitEvent(context_.stream, hashed_));
    hash_scratch_.clear();
    hashes_ = false;
  }

  void flag_non_finite(std::uint32_t* flag, const float* x, std::int64_t count) override {
    if (count == 0) return;
    use_device();
    begin_hashing();
    cuda::flag_non_finite(context_, hashing_, flag, x, count);
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

  void sample(std::int32_t* out, const float* logits, std::int64_t vocab,
              const SampleRequest* requests, std::int64_t M,
              bitwitness::SampleKinds kinds) override {
    if (M == 0) return;
    assert(vocab >= 1 && vocab <= (1 << 24));
    static_assert(sizeof(cuda::SampleRow) == sizeof(SampleRequest));
    use_device();
    cuda::sample(context_, out, logits, vocab, reinterpret_cast<const cuda::SampleRow*>(requests),
                 M, {kinds.drawn, kinds.top_k, kinds.top_p});
  }

 private:
  // The current device belongs to the calling thread.
  void use_device() const { BW_CUDA(cudaSetDevice(context_.ordinal)); }

  // What follows in the stream `hashing_` runs after all operators so far, beside later ones.
  void begin_hashing() {
    BW_CUDA(cudaEventRecord(computed_, context_.stream));
    BW_CUDA(cudaStreamWaitEvent(hashing_, computed_));
    hashes_ = true;
  }

  static cuda::RopeStore rope_of(const bitwitness::RopeStore& arguments) {
    cuda::RopeStore out;
    out.q = arguments.q;
    out.k = arguments.k;
    out.v = arguments.v;
    if (arguments.q_norm != nullptr) {
      out.q_norm = arguments.q_norm->data;
      out.q_norm_dtype = arguments.q_norm->dtype;
    }
    if (arguments.k_norm != nullptr) {
      out.k_norm = arguments.k_norm->data;
      out.k_norm_dtype = arguments.k_norm->dtype;
    }
    out.eps = arguments.eps;
    out.cosines = arguments.cosines;
    out.sines = arguments.sines;
    out.heads = arguments.heads;
    out.kv_heads = arguments.kv_heads;
    out.head_dim = arguments.head_dim;
    return out;
  }
  static KvPages pages_of(const LayerKv& cache) {
    return {cache.pages, cache.pages_per_slot, cache.key_offset, cache.value_offset,
            cache.kv_width};
  }
  static StepShape shape_of(const RowMap& rows) {
    return {rows.rows, rows.slot, rows.position, rows.context, rows.distinct_slots};
  }

  void destroy() noexcept {
    if (computed_ != nullptr) cudaEventDestroy(computed_);
    if (hashed_ != nullptr) cudaEventDestroy(hashed_);
    if (hashing_ != nullptr) cudaStreamDestroy(hashing_);
    if (context_.stream != nullptr) cudaStreamDestroy(context_.stream);
  }

  cuda::Context context_;
  cudaStream_t hashing_ = nullptr;  // digests and checks, beside the operators
  cudaEvent_t computed_ = nullptr, hashed_ = nullptr;
  bool hashes_ = false;
  std::vector<cuda::HashRows> to_hash_;  // asked for and not started
  std::vector<std::unique_ptr<cuda::Scratch<std::uint32_t>>> hash_scratch_;  // in use there
  std::unordered_set<void*> pinned_;
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
