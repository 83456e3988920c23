#include "kernels/selftest.h"

#include <cstdint>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "attest/base/sha256.h"
#include "kernels/kv_cache.h"
#include "kernels/layer.h"
#include "kernels/rope_tables.h"

namespace bitwitness {
namespace {

// SHA-256 over everything that synthetic_run computes; the same on every backend, for ever (fma32
// v1).
constexpr char kPublishedDigest[] =
    "a3dc6a71d5c5ef8c0671376214b2f423ba12caae495b976b625edfc355c50996";

constexpr std::int64_t kPositions = 70;  // crosses an attention block

// Deterministic weights: a 64-bit linear congruential generator, upper bits scaled to about +-0.25.
class Weights {
 public:
  Matrix matrix(std::int64_t rows, std::int64_t cols) {
    return {Dtype::kBf16, rows, cols, fill(rows * cols, 0.25f, 0.0f)};
  }
  Vector vector(std::int64_t size) { return {Dtype::kBf16, size, fill(size, 0.25f, 1.0f)}; }

 private:
  const std::byte* fill(std::int64_t count, float scale, float offset) {
    std::vector<std::uint16_t>& out = storage_.emplace_back();
    for (std::int64_t i = 0; i < count; ++i) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      const std::int32_t upper = static_cast<std::int32_t>(state_ >> 40) - (1 << 23);
      const float unit = contract::mul32(static_cast<float>(upper), 0x1p-23f);
      out.push_back(contract::f32_to_bf16(contract::add32(offset, contract::mul32(scale, unit))));
    }
    return reinterpret_cast<const std::byte*>(out.data());
  }

  std::vector<std::vector<std::uint16_t>> storage_;
  std::uint64_t state_ = 2026;
};

ModelConfig synthetic_config() {
  ModelConfig config;
  config.hidden_size = 72;  // no multiple of a chain round of 64
  config.intermediate_size = 200;
  config.num_layers = 1;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 16;
  config.vocab_size = 131;
  config.max_positions = kPositions;
  config.rms_norm_eps = 1e-5f;
  config.qk_norm = true;
  config.rope_theta = 10000.0;
  return config;
}

std::string synthetic_run(Backend& backend) {
  const ModelConfig config = synthetic_config();
  Weights make;
  LayerWeights layer;
  layer.input_norm = make.vector(config.hidden_size);
  layer.post_attention_norm = make.vector(config.hidden_size);
  layer.q = make.matrix(config.q_size(), config.hidden_size);
  layer.k = make.matrix(config.kv_size(), config.hidden_size);
  layer.v = make.matrix(config.kv_size(), config.hidden_size);
  layer.o = make.matrix(config.hidden_size, config.q_size());
  layer.gate = make.matrix(config.intermediate_size, config.hidden_size);
  layer.up = make.matrix(config.intermediate_size, config.hidden_size);
  layer.down = make.matrix(config.hidden_size, config.intermediate_size);
  layer.q_norm = make.vector(config.head_dim);
  layer.k_norm = make.vector(config.head_dim);
  ModelWeights weights;
  weights.embedding = make.matrix(config.vocab_size, config.hidden_size);
  weights.layers = {layer};
  weights.final_norm = make.vector(config.hidden_size);
  weights.head = make.matrix(config.vocab_size, config.hidden_size);
  const PlacedWeights placed(weights, backend);

  std::vector<std::int32_t> slot(kPositions, 0), position, token;
  for (std::int32_t t = 0; t < kPositions; ++t) {
    position.push_back(t);
    token.push_back(t * 37 % 131);
  }
  const RopeTables tables = rope_tables(rope_inverse_frequencies(config), kPositions);
  const auto upload = [&](const auto& values) {
    const std::size_t bytes = values.size() * sizeof(values[0]);
    Buffer buffer = backend.allocate(bytes);
    backend.to_device(buffer.template as<void>(), values.data(), bytes);
    return buffer;
  };
  const Buffer slots = upload(slot), positions = upload(position), tokens = upload(token);
  const Buffer cosines = upload(tables.cosines), sines = upload(tables.sines);
  const auto floats = [&](std::int64_t count) {
    return backend.allocate(static_cast<std::size_t>(count) * sizeof(float));
  };
  KvCache cache(config, backend, 1, kPositions);
  cache.reserve(0, kPositions);
  cache.upload();
  const Buffer keys = floats(kPositions * config.kv_size());
  const Buffer values = floats(kPositions * config.kv_size());
  const Buffer embedded = floats(kPositions * config.hidden_size);
  const Buffer h = floats(kPositions * config.hidden_size);
  const Buffer logits = floats(kPositions * config.vocab_size);
  const RowMap rows{kPositions,  slots.as<std::int32_t>(), positions.as<std::int32_t>(),
                    slot.data(), position.data(),          kPositions,
                    false};
  LayerScratch scratch(backend, config, kPositions);

  backend.embed(embedded.as<float>(), placed.weights().embedding, tokens.as<std::int32_t>(),
                kPositions);
  layer_forward(backend, config, placed.weights().layers[0],
                {cosines.as<float>(), sines.as<float>()}, cache.layer(0), rows, scratch,
                {embedded.as<float>(), h.as<float>(), keys.as<float>(), values.as<float>()});
  head_forward(backend, config, placed.weights(), h.as<float>(), scratch, kPositions,
               logits.as<float>());

  Sha256 hash;
  std::vector<Digest> digests(kPositions);
  const Buffer device_digests = backend.allocate(digests.size() * sizeof(Digest));
  const Buffer non_finite = backend.allocate(sizeof(std::uint32_t));
  const auto add_rows = [&](LeafType type, const Buffer& buffer, std::int64_t width) {
    backend.hash_rows(device_digests.as<Digest>(), non_finite.as<std::uint32_t>(), type, 0, 1,
                      buffer.as<float>(), static_cast<std::size_t>(width) * sizeof(float), nullptr,
                      0, rows);
    backend.finish_hashing();
    backend.to_host(digests.data(), device_digests.as<void>(), device_digests.bytes());
    for (const Digest& digest : digests) hash.update(digest.view());
  };
  add_rows(LeafType::kRow, h, config.hidden_size);
  add_rows(LeafType::kLogits, logits, config.vocab_size);
  std::vector<SampleRequest> requests(kPositions);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].params.temperature = i % 3 == 0 ? 0.0f : 0.75f;
    requests[i].params.top_k = i % 3 == 1 ? 20 : 0;
    requests[i].params.top_p = i % 3 == 0 ? 1.0f : 0.875f;
    requests[i].draw = 0x9e3779b97f4a7c15u * (i + 1);
  }
  const Buffer device_requests = upload(requests), tokens_out = upload(slot);
  backend.sample(tokens_out.as<std::int32_t>(), logits.as<float>(), config.vocab_size,
                 device_requests.as<SampleRequest>(), kPositions, {});
  std::vector<std::int32_t> sampled(kPositions);
  backend.to_host(sampled.data(), tokens_out.as<void>(), tokens_out.bytes());
  for (const std::int32_t id : sampled) {
    const std::uint8_t bytes[2] = {static_cast<std::uint8_t>(id),
                                   static_cast<std::uint8_t>(id >> 8)};
    hash.update(ByteView(bytes));
  }
  return hash.finish().hex();
}

}  // namespace

std::vector<SelftestResult> kernels_selftest() {
  std::vector<SelftestResult> results;
  for (const std::string& name : available_backends()) {
    SelftestResult result{"kernels: synthetic model on " + name, false, ""};
    try {
      const std::unique_ptr<Backend> backend = make_backend(name);
      const std::string digest = synthetic_run(*backend);
      result.passed = digest == kPublishedDigest;
      if (!result.passed) result.detail = "digest " + digest + ", published " + kPublishedDigest;
    } catch (const Error& error) {
      result.detail = error.what();
    }
    results.push_back(std::move(result));
  }
  return results;
}

}  // namespace bitwitness
