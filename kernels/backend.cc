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
