#include "prover/bench_model.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "attest/base/error.h"

namespace bitwitness {
namespace {

// Elements of a chunk: a prime, so that the rows of a matrix differ.
constexpr std::size_t kChunk = 4194301;

BenchShape shape(std::string name, std::int64_t hidden, std::int64_t intermediate,
                 std::int64_t layers, std::int64_t heads, std::int64_t kv_heads,
                 std::int64_t head_dim, std::int64_t vocab) {
  ModelConfig config;
  config.hidden_size = hidden;
  config.intermediate_size = intermediate;
  config.num_layers = layers;
  config.num_heads = heads;
  config.num_kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.vocab_size = vocab;
  config.max_positions = 16384;
  config.rms_norm_eps = 1e-5f;
  config.rope_theta = 500000;
  return {std::move(name), config};
}

// Sum of four uniform 16-bit numbers (SplitMix64), scaled to deviation 1.
float random_normal(std::uint64_t index) {
  std::uint64_t z = (index + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  const std::uint64_t sum = (z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48);
  return (static_cast<float>(sum) - 131070.0f) * (1.0f / 37837.0f);
}

}  // namespace

std::span<const BenchShape> bench_shapes() {
  static const std::vector<BenchShape> shapes{
      shape("llama3-8b", 4096, 14336, 32, 32, 8, 128, 128256),
      shape("llama3-1b", 2048, 8192, 16, 32, 8, 64, 128256),
      shape("small", 512, 1408, 4, 8, 4, 64, 4096),
      shape("tiny", 64, 160, 2, 4, 2, 16, 256),
  };
  return shapes;
}

const ModelConfig& bench_shape(const std::string& name) {
  std::string known;
  for (const BenchShape& shape : bench_shapes()) {
    if (shape.name == name) return shape.config;
    known += (known.empty() ? "" : ", ") + shape.name;
  }
  throw usage_error("unknown shape '" + name + "'; there are: " + known);
}

RandomNumbers::RandomNumbers(Backend& backend, Dtype dtype, float deviation)
    : backend_(backend), chunk_(backend.allocate_host(kChunk * dtype_bytes(dtype))) {
  for (std::size_t i = 0; i < kChunk; ++i) {
    const float value = deviation * random_normal(i);
    std::byte* const out = chunk_.as<std::byte>() + i * dtype_bytes(dtype);
    if (dtype == Dtype::kFp32) {
      std::memcpy(out, &value, sizeof value);
    } else {
      const std::uint16_t half =
          dtype == Dtype::kBf16 ? contract::f32_to_bf16(value) : contract::f32_to_fp16(value);
      std::memcpy(out, &half, sizeof half);
    }
  }
}

void RandomNumbers::fill(void* destination, std::size_t bytes) const {
  for (std::size_t at = 0; at < bytes; at += chunk_.bytes()) {
    backend_.to_device(static_cast<std::byte*>(destination) + at, chunk_.as<void>(),
                       std::min(chunk_.bytes(), bytes - at));
  }
  backend_.synchronize();
}

Buffer RandomNumbers::buffer(std::size_t bytes) const {
  Buffer out = backend_.allocate(bytes);
  fill(out.as<void>(), bytes);
  return out;
}

std::size_t weight_bytes(const ModelConfig& config) {
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t layer =
      hidden * (2 * config.q_size() + 2 * config.kv_size()) + 3 * hidden * config.intermediate_size;
  const std::int64_t ends = (config.tied_head ? 1 : 2) * config.vocab_size * hidden;
  return static_cast<std::size_t>(2 * (config.num_layers * layer + ends));
}

PlacedWeights random_weights(const ModelConfig& config, Backend& backend) {
  const RandomNumbers numbers(backend, Dtype::kBf16, kWeightDeviation);
  std::vector<Buffer> owned;
  const auto matrix = [&](std::int64_t rows, std::int64_t cols) {
    owned.push_back(
        numbers.buffer(static_cast<std::size_t>(rows * cols) * dtype_bytes(Dtype::kBf16)));
    return Matrix{Dtype::kBf16, rows, cols, owned.back().as<std::byte>()};
  };
  const std::int64_t hidden = config.hidden_size;
  const std::vector<std::uint16_t> ones(static_cast<std::size_t>(std::max(hidden, config.head_dim)),
                                        contract::f32_to_bf16(1.0f));
  owned.push_back(backend.allocate(ones.size() * sizeof ones[0]));
  const std::byte* const ones_placed = owned.back().as<std::byte>();
  backend.to_device(owned.back().as<void>(), ones.data(), ones.size() * sizeof ones[0]);
  const auto norm = [&](std::int64_t size) { return Vector{Dtype::kBf16, size, ones_placed}; };

  ModelWeights weights;
  weights.embedding = matrix(config.vocab_size, hidden);
  weights.head = config.tied_head ? weights.embedding : matrix(config.vocab_size, hidden);
  weights.final_norm = norm(hidden);
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    LayerWeights layer;
    layer.input_norm = norm(hidden);
    layer.post_attention_norm = norm(hidden);
    layer.q = matrix(config.q_size(), hidden);
    layer.k = matrix(config.kv_size(), hidden);
    layer.v = matrix(config.kv_size(), hidden);
    layer.o = matrix(hidden, config.q_size());
    layer.gate = matrix(config.intermediate_size, hidden);
    layer.up = matrix(config.intermediate_size, hidden);
    layer.down = matrix(hidden, config.intermediate_size);
    if (config.qk_norm) {
      layer.q_norm = norm(config.head_dim);
      layer.k_norm = norm(config.head_dim);
    }
    weights.layers.push_back(layer);
  }
  backend.synchronize();
  return PlacedWeights(weights, std::move(owned));
}

}  // namespace bitwitness
