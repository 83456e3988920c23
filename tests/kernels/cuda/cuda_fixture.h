// What tests of the CUDA backend share: inputs with signs, zeros, subnormals and cancellation,
// poisoned outputs, and the first difference in words.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/contract.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/reference/reference_backend.h"

namespace bitwitness::test {

using contract::bits_of;
using contract::float_of;

inline constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32};

// A fixed sequence of 32-bit words (splitmix64).
class Words {
 public:
  explicit Words(std::uint64_t seed) : state_(seed) {}
  std::uint32_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<std::uint32_t>((z ^ (z >> 31)) >> 16);
  }
  // Signs, zeros, subnormals and exponents within 2^-`spread` to 2^`spread`.
  float value(int spread) {
    const std::uint32_t word = next();
    const std::uint32_t sign = word & 0x80000000u;
    if (word % 61 == 0) return float_of(sign);
    if (word % 59 == 0) return float_of(sign | (next() & 0x007fffffu));
    const auto exponent = static_cast<std::uint32_t>(127 - spread) +
                          next() % static_cast<std::uint32_t>(2 * spread + 1);
    return float_of(sign | exponent << 23 | (word & 0x007fffffu));
  }

 private:
  std::uint64_t state_;
};

inline std::vector<float> values(std::int64_t count, std::uint64_t seed, int spread = 4) {
  Words words(seed);
  std::vector<float> result(static_cast<std::size_t>(count));
  for (float& x : result) x = words.value(spread);
  return result;
}

// Weights of a type as bytes, preceded by `lead` elements that no one may read: misaligns the rows.
inline std::vector<std::byte> weights(Dtype dtype, std::int64_t count, std::uint64_t seed,
                                      int lead = 0, int spread = 4) {
  Words words(seed);
  const std::size_t size = dtype_bytes(dtype);
  std::vector<std::byte> result(static_cast<std::size_t>(count + lead) * size, std::byte{0xff});
  for (std::size_t i = static_cast<std::size_t>(lead); i < result.size() / size; ++i) {
    const float x = words.value(spread);
    if (dtype == Dtype::kFp32) {
      std::memcpy(&result[i * 4], &x, 4);
    } else {
      const std::uint16_t h =
          dtype == Dtype::kBf16 ? contract::f32_to_bf16(x) : contract::f32_to_fp16(x);
      std::memcpy(&result[i * 2], &h, 2);
    }
  }
  return result;
}

// The first element whose bytes differ, with its row and column; empty if there is none.
inline std::string first_difference(const std::vector<float>& got, const std::vector<float>& want,
                                    std::int64_t width) {
  if (got.size() != want.size()) return "sizes differ";
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &want[i], 4) == 0) continue;
    unsigned char a[4], b[4];
    std::memcpy(a, &got[i], 4);
    std::memcpy(b, &want[i], 4);
    std::size_t byte = 0;
    while (a[byte] == b[byte]) ++byte;
    char text[160];
    std::snprintf(text, sizeof text, "byte %zu, row %lld column %lld: got %08x, want %08x",
                  4 * i + byte, static_cast<long long>(static_cast<std::int64_t>(i) / width),
                  static_cast<long long>(static_cast<std::int64_t>(i) % width), bits_of(got[i]),
                  bits_of(want[i]));
    return text;
  }
  return "";
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device: " << cuda_unavailable_reason();
    static const std::unique_ptr<Backend> backend = make_cuda_backend(0);
    cuda_ = backend.get();
  }

  template <class T>
  Buffer upload(const std::vector<T>& host) {
    Buffer buffer = cuda_->allocate(host.size() * sizeof(T));
    cuda_->to_device(buffer.as<void>(), host.data(), host.size() * sizeof(T));
    return buffer;
  }
  // A buffer of NaNs: elements that are not written show.
  Buffer poisoned(std::int64_t count) {
    return upload(std::vector<float>(static_cast<std::size_t>(count), float_of(0x7fc0dead)));
  }
  std::vector<float> download(const Buffer& buffer, std::int64_t count) {
    std::vector<float> host(static_cast<std::size_t>(count));
    cuda_->to_host(host.data(), buffer.as<void>(), host.size() * sizeof(float));
    return host;
  }

  Backend* cuda_ = nullptr;
  ReferenceBackend reference_;
};

// Rows of a step in host and device memory.
class Rows {
 public:
  std::vector<std::int32_t> slot, position;
  Buffer device_slot, device_position;
  RowMap host() const {
    return {static_cast<std::int64_t>(slot.size()),
            slot.data(),
            position.data(),
            slot.data(),
            position.data(),
            context(),
            distinct()};
  }
  RowMap device() const {
    return {static_cast<std::int64_t>(slot.size()),
            device_slot.as<std::int32_t>(),
            device_position.as<std::int32_t>(),
            slot.data(),
            position.data(),
            context(),
            distinct()};
  }

 private:
  std::int64_t context() const { return *std::max_element(position.begin(), position.end()) + 1; }
  bool distinct() const {
    return std::set<std::int32_t>(slot.begin(), slot.end()).size() == slot.size();
  }
};

}  // namespace bitwitness::test
