#include "kernels/reference/reference_backend.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>

#include "attest/base/error.h"
#include "attest/base/leaf_hash.h"
#include "kernels/known_answers.h"
#include "kernels/sampler.h"

namespace bitwitness {
namespace {

using namespace contract;

constexpr std::size_t kAlignment = 64;

template <Dtype kDtype>
void matmul_reference(float* y, const float* x, const Matrix& W, std::int64_t M) {
  for (std::int64_t m = 0; m < M; ++m) {
    for (std::int64_t n = 0; n < W.rows; ++n) {
      y[m * W.rows + n] = matmul_element<kDtype>(W.cols, x + m * W.cols, W.data, n);
    }
  }
}

}  // namespace

ReferenceBackend::ReferenceBackend() {
  check_known_answers("main thread");
}

std::string ReferenceBackend::device() const {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) {
      const std::size_t colon = line.find(": ");
      if (colon != std::string::npos) return line.substr(colon + 2);
    }
  }
  return "unknown CPU";
}

Buffer ReferenceBackend::allocate(std::size_t bytes) {
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (rounded < bytes) throw std::bad_alloc();
  void* data = std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded);
  if (data == nullptr) {
    throw infrastructure_error("out of memory: " + std::to_string(bytes) +
                               " bytes asked for; use fewer or shorter sequences");
  }
  return Buffer(this, data, bytes);
}

void ReferenceBackend::release(void* data) noexcept {
  std::free(data);
}

void ReferenceBackend::to_device(void* destination, const void* host, std::size_t bytes) {
  if (bytes != 0) std::memcpy(destination, host, bytes);
}

void ReferenceBackend::to_host(void* host, const void* source, std::size_t bytes) {
  if (bytes != 0) std::memcpy(host, source, bytes);
}

const std::byte* ReferenceBackend::place(const std::byte* host, std::size_t, std::vector<Buffer>&) {
  return host;
}

void ReferenceBackend::embed(float* out, const Matrix& embedding, const std::int32_t* tokens,
                             std::int64_t M) {
  for (std::int64_t m = 0; m < M; ++m) {
    for (std::int64_t i = 0; i < embedding.cols; ++i) {
      out[m * embedding.cols + i] =
          load_weight(embedding.dtype, embedding.data, tokens[m] * embedding.cols + i);
    }
  }
}

void ReferenceBackend::rms_norm(float* out, const float* x, const Vector& weight, float eps,
                                std::int64_t M) {
  const std::int64_t K = weight.size;
  for (std::int64_t m = 0; m < M; ++m) {
    const float scale = rms_scale(sum_squares(x + m * K, K), K, eps);
    for (std::int64_t i = 0; i < K; ++i) {
      out[m * K + i] =
          rms_norm_element(x[m * K + i], scale, load_weight(weight.dtype, weight.data, i));
    }
  }
}

void ReferenceBackend::matmul(float* y, const float* x, const Matrix& W, std::int64_t M) {
  switch (W.dtype) {
    case Dtype::kBf16:
      return matmul_reference<Dtype::kBf16>(y, x, W, M);
    case Dtype::kFp16:
      return matmul_reference<Dtype::kFp16>(y, x, W, M);
    case Dtype::kFp32:
      return matmul_reference<Dtype::kFp32>(y, x, W, M);
  }
}

void ReferenceBackend::rope(float* x, std::int64_t heads, std::int64_t head_dim,
                            const float* cosines, const float* sines, const RowMap& rows) {
  const std::int64_t half = head_dim / 2;
  for (std::int64_t m = 0; m < rows.rows; ++m) {
    const float* c = cosines + rows.position[m] * half;
    const float* s = sines + rows.position[m] * half;
    for (std::int64_t h = 0; h < heads; ++h) {
      float* first = x + (m * heads + h) * head_dim;
      float* second = first + half;
      for (std::int64_t i = 0; i < half; ++i) {
        const float a = first[i], b = second[i];
        first[i] = rope_first(a, b, c[i], s[i]);
        second[i] = rope_second(a, b, c[i], s[i]);
      }
    }
  }
}

void ReferenceBackend::store_kv(const LayerKv& cache, const float* k, const float* v,
                                const RowMap& rows) {
  const std::int64_t width = cache.kv_width;
  const std::size_t bytes = static_cast<std::size_t>(width) * sizeof(float);
  for (std::int64_t m = 0; m < rows.rows; ++m) {
    std::memcpy(cache.key(rows.slot[m], rows.position[m]), k + m * width, bytes);
    std::memcpy(cache.value(rows.slot[m], rows.position[m]), v + m * width, bytes);
  }
}

void ReferenceBackend::attention(float* out, const float* q, const LayerKv& cache,
                                 std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim,
                                 const RowMap& rows) {
  for (std::int64_t m = 0; m < rows.rows; ++m) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t head_at = h / (heads / kv_heads) * head_dim;
      const auto key = [&](std::int64_t j) { return cache.key(rows.slot[m], j) + head_at; };
      const auto value = [&](std::int64_t j) { return cache.value(rows.slot[m], j) + head_at; };
      attention_row(q + (m * heads + h) * head_dim, key, value, rows.position[m],
                    static_cast<int>(head_dim), out + (m * heads + h) * head_dim);
    }
  }
}

void ReferenceBackend::swiglu(float* out, const float* gate, const float* up, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = swiglu_element(gate[i], up[i]);
}

void ReferenceBackend::add(float* out, const float* x, const float* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = add32(x[i], y[i]);
}

void ReferenceBackend::gather_rows(float* out, const float* x, std::int64_t width,
                                   const std::int32_t* index, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(out + i * width, x + index[i] * width,
                static_cast<std::size_t>(width) * sizeof(float));
  }
}

Digest ReferenceBackend::hash_row(LeafType type, std::uint32_t first_layer, std::int64_t index,
                                  const float* first, std::size_t first_bytes, const float* second,
                                  std::size_t second_bytes, const RowMap& rows) {
  const std::int64_t layer = index / rows.rows, m = index % rows.rows;
  const std::size_t row = static_cast<std::size_t>(index);
  const LeafPrefix prefix{type, static_cast<std::uint8_t>(Dtype::kFp32),
                          first_layer + static_cast<std::uint32_t>(layer),
                          static_cast<std::uint64_t>(rows.host_position[m])};
  const auto* a = reinterpret_cast<const std::uint8_t*>(first);
  const ByteView head(a + row * first_bytes, first_bytes);
  if (second_bytes == 0) return leaf_digest(prefix, head);
  const auto* b = reinterpret_cast<const std::uint8_t*>(second);
  return leaf_digest(prefix, head, ByteView(b + row * second_bytes, second_bytes));
}

void ReferenceBackend::hash_rows(Digest* out, std::uint32_t* non_finite, LeafType type,
                                 std::uint32_t first_layer, std::int64_t layers, const float* first,
                                 std::size_t first_bytes, const float* second,
                                 std::size_t second_bytes, const RowMap& rows) {
  const auto count = [&](std::size_t row_bytes) {
    return layers * rows.rows * static_cast<std::int64_t>(row_bytes / sizeof(float));
  };
  flag_non_finite(non_finite, first, count(first_bytes));
  if (second_bytes != 0) flag_non_finite(non_finite, second, count(second_bytes));
  for (std::int64_t i = 0; i < layers * rows.rows; ++i) {
    out[i] = hash_row(type, first_layer, i, first, first_bytes, second, second_bytes, rows);
  }
}

void ReferenceBackend::flag_non_finite(std::uint32_t* flag, const float* x, std::int64_t count) {
  if (find_non_finite(x, count, 1).row >= 0) *flag = 1;
}

NonFinite ReferenceBackend::find_non_finite(const float* x, std::int64_t width, std::int64_t M) {
  for (std::int64_t i = 0; i < width * M; ++i) {
    if (!is_finite(x[i])) return {i / width, i % width};
  }
  return {};
}

void ReferenceBackend::sample(std::int32_t* out, const float* logits, std::int64_t vocab,
                              const SampleRequest* requests, std::int64_t M, SampleKinds) {
  for (std::int64_t m = 0; m < M; ++m) {
    out[m] = sample_token(logits + m * vocab, vocab, requests[m].params, requests[m].draw);
  }
}

}  // namespace bitwitness
