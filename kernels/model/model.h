// A model directory as Hugging Face tools save it, opened read-only: config.json, model.safetensors
// or model.safetensors.index.json with its shards, and tokenizer.json when there is one.
//
// Every tensor that the configuration calls for must be there with exactly its shape, and nothing
// else: missing, mis-shaped and extra tensors are named. Two kinds of extra tensor are ignored by
// rule, and are no part of the description: `model.layers.N.self_attn.rotary_emb.inv_freq` buffers
// of old writers, and `lm_head.weight` beside a tied embedding when it has the embedding's type,
// shape and bytes.
//
// Weights stay in the file's type and pages (memory-mapped, loaded when touched). Files must not
// change while a Model lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <vector>

#include "attest/base/dtype.h"
#include "attest/base/model_description.h"
#include "kernels/model/mapped_file.h"
#include "kernels/model/model_config.h"
#include "kernels/model/safetensors.h"

namespace bitwitness {

// Views into the mapped files, little-endian, aligned to the element size (and no more than that).
struct Matrix {
  Dtype dtype = Dtype::kFp32;
  std::int64_t rows = 0;            // outputs
  std::int64_t cols = 0;            // inputs, the K of the dot products
  const std::byte* data = nullptr;  // [rows, cols] row major, no padding
};

struct Vector {
  Dtype dtype = Dtype::kFp32;
  std::int64_t size = 0;
  const std::byte* data = nullptr;  // [size]
};

// D = hidden_size, F = intermediate_size, Q = q_size(), KV = kv_size(), H = head_dim.
struct LayerWeights {
  Vector input_norm;             // [D]
  Vector post_attention_norm;    // [D]
  Matrix q;                      // [Q, D]
  Matrix k;                      // [KV, D]
  Matrix v;                      // [KV, D]
  Matrix o;                      // [D, Q]
  Matrix gate;                   // [F, D]
  Matrix up;                     // [F, D]
  Matrix down;                   // [D, F]
  std::optional<Vector> q_norm;  // [H], exactly when qk_norm
  std::optional<Vector> k_norm;  // [H], exactly when qk_norm
};

struct ModelWeights {
  Matrix embedding;                  // [vocab_size, D]
  std::vector<LayerWeights> layers;  // num_layers
  Vector final_norm;                 // [D]
  Matrix head;                       // [vocab_size, D]; the embedding itself when tied
};

class Model {
 public:
  // Throws Error: kUsage when the directory or a file in it is missing, ill-formed or unsupported
  // (file, tensor or key named), kInfrastructure when the system fails.
  static Model load(const std::filesystem::path& dir);

  Model(Model&&) = default;
  Model& operator=(Model&&) = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }

  // The tensors that take part in the computation, sorted by name.
  const std::vector<TensorView>& tensors() const { return tensors_; }

  // tokenizer.json as it is on disk; empty when there is none.
  std::span<const std::byte> tokenizer_json() const { return tokenizer_.bytes(); }
  const std::filesystem::path& dir() const { return dir_; }

  // What the manifest is computed from: arithmetic, canonical configuration, tokenizer, RoPE tables
  // and tensors. It depends on the tensors alone, not on how files hold them. Its spans point into
  // this model.
  ModelDescription describe() const;

  // Throws an infrastructure error naming the file if a weight file or the tokenizer was written to
  // since it was opened: what was computed meanwhile is no run of any model.
  void check_unchanged() const;

  // Asks the system to read ahead the weights of one layer. A hint only. 0 <= layer < num_layers.
  void prefetch_layer(std::int64_t layer) const;

  // Gives the memory of the weight matrices of one layer back to the system: a replay that goes
  // from layer to layer holds one at a time. What is touched again reads the same, from the file or
  // the page cache. 0 <= layer < num_layers.
  void release_layer(std::int64_t layer) const;

 private:
  Model() = default;

  std::filesystem::path dir_;
  ModelConfig config_;
  std::vector<SafetensorsFile> files_;
  MappedFile tokenizer_;
  std::vector<TensorView> tensors_;
  ModelWeights weights_;
};

}  // namespace bitwitness
