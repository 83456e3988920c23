#include "kernels/backend.h"

#include <charconv>
#include <thread>

#include "attest/base/error.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/reference/reference_backend.h"

namespace bitwitness {
namespace {

std::unique_ptr<Backend> make_cuda(std::string_view device) {
  int ordinal = 0;
  if (const std::size_t colon = device.find(':'); colon != std::string_view::npos) {
    const std::string_view text = device.substr(colon + 1);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), ordinal);
    if (error != std::errc() || end != text.data() + text.size() || ordinal < 0) {
      throw usage_error("device '" + std::string(device) +
                        "': what follows 'cuda:' must be a number");
    }
  }
  const int count = cuda_device_count();
  if (count == 0) {
    throw usage_error("device '" + std::string(device) + "': no usable CUDA device: " +
                      cuda_unavailable_reason() + "; use --device cpu");
  }
  if (ordinal >= count) {
    throw usage_error("device '" + std::string(device) + "': this machine has " +
                      std::to_string(count) + " CUDA device(s), numbered from 0");
  }
  return make_cuda_backend(ordinal);
}

}  // namespace

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) owner_->release(data_);
    owner_ = std::exchange(other.owner_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Buffer::~Buffer() {
  if (data_ != nullptr) owner_->release(data_);
}

void Backend::require_memory(std::size_t, std::string_view) {}

namespace {

class NothingRecorded final : public Recordings {
 public:
  void run(std::uint64_t, const std::function<void()>& step) override { step(); }
};

}  // namespace

std::unique_ptr<Recordings> Backend::make_recordings() {
  return std::make_unique<NothingRecorded>();
}

void Backend::compose(const Product& product, const OperatorProbe& probe) {
  const std::int64_t M = product.M;
  const auto done = [&](std::string_view op, const float* x, std::int64_t width) {
    if (probe) probe(op, x, width);
  };
  const float* x = product.x;
  if (product.norm != nullptr) {
    rms_norm(product.normed, x, *product.norm, product.eps, M);
    done(product.norm_op, product.normed, product.norm->size);
    x = product.normed;
  }
  for (int i = 0; i < product.part_count; ++i) {
    const Product::Part& part = product.parts[i];
    float* const dots = product.epilogue == Epilogue::kAdd ? product.dots : part.y;
    matmul(dots, x, *part.W, M);
    done(part.op, dots, part.W->rows);
  }
  const Product::Part& first = product.parts[0];
  const std::int64_t width = first.W->rows;
  switch (product.epilogue) {
    case Epilogue::kStore:
      break;
    case Epilogue::kAdd:
      add(first.y, product.residual, product.dots, M * width);
      done(product.epilogue_op, first.y, width);
      break;
    case Epilogue::kSwiglu:
      swiglu(first.y, first.y, product.parts[1].y, M * width);
      done(product.epilogue_op, first.y, width);
      break;
  }
}

void Backend::compose(const RopeStore& arguments, const RowMap& rows, const OperatorProbe& probe) {
  const std::int64_t head_dim = arguments.head_dim;
  const auto done = [&](std::string_view op, const float* x, std::int64_t heads) {
    if (probe) probe(op, x, heads * head_dim);
  };
  const std::int64_t heads = arguments.heads, kv_heads = arguments.kv_heads;
  if (arguments.q_norm != nullptr) {
    rms_norm(arguments.q, arguments.q, *arguments.q_norm, arguments.eps, rows.rows * heads);
    done("q_norm", arguments.q, heads);
  }
  if (arguments.k_norm != nullptr) {
    rms_norm(arguments.k, arguments.k, *arguments.k_norm, arguments.eps, rows.rows * kv_heads);
    done("k_norm", arguments.k, kv_heads);
  }
  rope(arguments.q, heads, head_dim, arguments.cosines, arguments.sines, rows);
  done("q_rope", arguments.q, heads);
  rope(arguments.k, kv_heads, head_dim, arguments.cosines, arguments.sines, rows);
  done("k_rope", arguments.k, kv_heads);
  if (arguments.cache != nullptr) store_kv(*arguments.cache, arguments.k, arguments.v, rows);
}

std::vector<std::string> available_backends() {
  std::vector<std::string> names{"ref"};
  for (const char* isa : {"avx2", "avx512", "neon"}) {
    if (cpu_supports(isa)) names.emplace_back(isa);
  }
  if (cuda_device_count() > 0) names.emplace_back("cuda");
  return names;
}

std::unique_ptr<Backend> make_backend(std::string_view device, int threads) {
  if (threads <= 0) threads = static_cast<int>(std::thread::hardware_concurrency());
  if (threads < 1) threads = 1;
  if (device == "auto") device = cuda_device_count() > 0 ? "cuda" : "cpu";
  if (device == "cpu") {
    // Fastest first, reference last.
    device = cpu_supports("avx512") ? "avx512"
             : cpu_supports("avx2") ? "avx2"
             : cpu_supports("neon") ? "neon"
                                    : "ref";
  }
  if (device == "ref") return std::make_unique<ReferenceBackend>();
  if (device == "avx2" || device == "avx512" || device == "neon") {
    if (!cpu_supports(device)) {
      throw usage_error("device '" + std::string(device) +
                        "': this processor does not have it; use --device cpu");
    }
    return make_cpu_backend(device, threads);
  }
  if (device == "cuda" || device.starts_with("cuda:")) return make_cuda(device);
  std::string known;
  for (const std::string& name : available_backends()) known += ", " + name;
  throw usage_error("unknown device '" + std::string(device) + "'; this machine has: auto, cpu" +
                    known);
}

}  // namespace bitwitness
