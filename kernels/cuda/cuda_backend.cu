// The CUDA backend: operators as backend.h has them, onto the launch functions of context.h.
#include <cassert>
#include <cstdio>
#include <deque>
#include <fstream>
#include <functional>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "attest/base/error.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/recordings.h"

namespace bitwitness {
namespace cuda {

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
    cudaStreamSynchronize(hashing_);
    for (const Fetched& fetched : fetched_) cudaEventDestroy(fetched.event);
    for (const cudaEvent_t event : free_events_) cudaEventDestroy(event);
    fetched_.clear();
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
      hash_scratch_.push_back(std::make_unique<cuda::Scratch<std::uint32_t>>(
          context_, cuda::hash_scratch_words(a), DeviceMemory::Kind::kHashing));
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

  std::uint64_t fetch_hashed(void* host, const void* source, std::size_t bytes) override {
    start_hashing();
    use_device();
    begin_hashing();
    BW_CUDA(cudaMemcpyAsync(host, source, bytes, cudaMemcpyDeviceToHost, hashing_));
    Fetched fetched{++last_fetched_, nullptr, std::move(hash_scratch_)};
    hash_scratch_.clear();
    if (!free_events_.empty()) {
      fetched.event = free_events_.back();
      free_events_.pop_back();
    } else {
      BW_CUDA(cudaEventCreateWithFlags(&fetched.event, cudaEventDisableTiming));
    }
    fetched_.push_back(std::move(fetched));
    BW_CUDA(cudaEventRecord(fetched_.back().event, hashing_));
    return last_fetched_;
  }

  void wait_hashed(std::uint64_t number) override {
    use_device();
    while (!fetched_.empty() && fetched_.front().number <= number) {
      BW_CUDA(cudaEventSynchronize(fetched_.front().event));
      free_events_.push_back(fetched_.front().event);
      fetched_.pop_front();
    }
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
  // Copies to the host that follow digests, and the scratch that is in use until then.
  struct Fetched {
    std::uint64_t number;
    cudaEvent_t event;
    std::vector<std::unique_ptr<cuda::Scratch<std::uint32_t>>> scratch;
  };
  std::deque<Fetched> fetched_;
  std::uint64_t last_fetched_ = 0;
  std::vector<cudaEvent_t> free_events_;
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
