// A random model of a Llama shape on disk, and how much memory a process holds: what benchmarks of
// runs and replays share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "kernels/contract.h"
#include "tests/kernels/model/safetensors_writer.h"

namespace bitwitness::bench {

struct ModelShape {
  std::int64_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab;

  // Multiply-adds of a layer's products for one row, which is the number of its matrices' elements.
  constexpr std::int64_t layer_products() const {
    return hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * intermediate;
  }
  // Multiply-adds of a layer's attention for a row at `position`.
  constexpr std::int64_t layer_attention(std::int64_t position) const {
    return 2 * heads * head_dim * (position + 1);
  }
};

// Writes config.json and model.safetensors (bf16) into `dir`, tensor by tensor, so that the
// generator needs no memory to speak of.
inline void write_model(const std::filesystem::path& dir, const ModelShape& shape) {
  test::write_file(
      dir / "config.json",
      "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_act\": "
      "\"silu\", "
      "\"hidden_size\": " +
          std::to_string(shape.hidden) +
          ", \"intermediate_size\": " + std::to_string(shape.intermediate) +
          ", \"num_hidden_layers\": " + std::to_string(shape.layers) +
          ", \"num_attention_heads\": " + std::to_string(shape.heads) +
          ", \"num_key_value_heads\": " + std::to_string(shape.kv_heads) + ", \"head_dim\": " +
          std::to_string(shape.head_dim) + ", \"vocab_size\": " + std::to_string(shape.vocab) +
          ", \"max_position_embeddings\": 4096, \"rms_norm_eps\": 1e-5, \"rope_theta\": 500000.0, "
          "\"tie_word_embeddings\": false, \"attention_bias\": false, \"mlp_bias\": false}");
  struct Tensor {
    std::string name;
    std::int64_t rows, cols;  // cols 0: a vector
  };
  const std::int64_t q = shape.heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim;
  std::vector<Tensor> tensors{{"lm_head.weight", shape.vocab, shape.hidden},
                              {"model.embed_tokens.weight", shape.vocab, shape.hidden},
                              {"model.norm.weight", shape.hidden, 0}};
  for (std::int64_t l = 0; l < shape.layers; ++l) {
    const std::string p = "model.layers." + std::to_string(l) + ".";
    tensors.insert(tensors.end(), {{p + "input_layernorm.weight", shape.hidden, 0},
                                   {p + "post_attention_layernorm.weight", shape.hidden, 0},
                                   {p + "self_attn.q_proj.weight", q, shape.hidden},
                                   {p + "self_attn.k_proj.weight", kv, shape.hidden},
                                   {p + "self_attn.v_proj.weight", kv, shape.hidden},
                                   {p + "self_attn.o_proj.weight", shape.hidden, q},
                                   {p + "mlp.gate_proj.weight", shape.intermediate, shape.hidden},
                                   {p + "mlp.up_proj.weight", shape.intermediate, shape.hidden},
                                   {p + "mlp.down_proj.weight", shape.hidden, shape.intermediate}});
  }
  std::string header = "{";
  std::int64_t at = 0;
  for (const Tensor& tensor : tensors) {
    const std::int64_t bytes = 2 * tensor.rows * std::max<std::int64_t>(tensor.cols, 1);
    header +=
        (at == 0 ? "\"" : ", \"") + tensor.name + "\": {\"dtype\": \"BF16\", \"shape\": [" +
        std::to_string(tensor.rows) + (tensor.cols == 0 ? "" : ", " + std::to_string(tensor.cols)) +
        "], \"data_offsets\": [" + std::to_string(at) + ", " + std::to_string(at + bytes) + "]}";
    at += bytes;
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  std::ofstream out(dir / "model.safetensors", std::ios::binary);
  const std::uint64_t length = header.size();
  out.write(reinterpret_cast<const char*>(&length), 8);
  out.write(header.data(), static_cast<std::streamsize>(header.size()));
  std::mt19937 random(1);
  for (const Tensor& tensor : tensors) {
    std::vector<std::uint16_t> row(
        static_cast<std::size_t>(std::max<std::int64_t>(tensor.cols, 1)));
    for (std::int64_t r = 0; r < tensor.rows; ++r) {
      for (std::uint16_t& value : row) {
        const float unit = static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f;
        value = contract::f32_to_bf16(tensor.cols == 0 ? 1.0f : 0.03f * unit);
      }
      out.write(reinterpret_cast<const char*>(row.data()),
                static_cast<std::streamsize>(row.size() * 2));
    }
  }
  if (!out.flush()) throw infrastructure_error("cannot write the model: " + dir.string());
}

// Memory of this process that no file backs, now.
inline double anonymous_megabytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("Anonymous:")) return std::atof(line.c_str() + 10) * 1024 / 1e6;
  }
  return 0;
}

}  // namespace bitwitness::bench
