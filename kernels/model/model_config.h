// The configuration of a model: config.json (and the stop tokens of generation_config.json) reduced
// to the parameters that take part in the computation.
//
// What is accepted, by rule:
// 1. Families: LlamaForCausalLM (llama), Qwen3ForCausalLM (qwen3), and MistralForCausalLM (mistral)
//    where it computes what Llama does, that is, where its window never bites. `architectures` must
//    name exactly one of them and agree with `model_type`. Any other is refused by name.
// 2. Old and new shapes of one option (`rope_theta` and `rope_scaling`, or `rope_parameters`;
//    `torch_dtype` or `dtype`). Where both are present they must say the same.
// 3. An option that changes the computation and is not supported is refused with file, key, value.
// 4. An option that leaves the computation alone whatever its value is ignored (kHarmlessKeys in
//    model_config.cc).
// 5. Any other key is refused by name unless its value is null, which means "not set" for every
//    option. `false` does not: an option unknown here may be true by default.
// 6. Sizes must be written out. Left out, only these are taken as the stock library takes them:
//    key-value heads (= heads) and rope_theta (= 10000) of Llama, the head size of Llama and
//    Mistral (= hidden / heads), the window of Mistral (= 4096), activation (silu), head (untied).
// 7. generation_config.json contributes stop tokens and nothing else: sampling is stated per
//    request.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attest/base/dtype.h"

namespace bitwitness {

struct ModelConfig {
  enum class Family { kLlama, kQwen3 };
  enum class RopeKind { kPlain, kLlama3 };

  // Upper bounds that hold for every configuration accepted; sizes are positive.
  static constexpr std::int64_t kMaxHiddenSize = 65536;
  static constexpr std::int64_t kMaxIntermediateSize = std::int64_t{1} << 20;
  static constexpr std::int64_t kMaxLayers = 1024;
  static constexpr std::int64_t kMaxHeads = 1024;
  static constexpr std::int64_t kMaxHeadDim = 1024;
  static constexpr std::int64_t kMaxVocabSize = std::int64_t{1} << 24;
  static constexpr std::int64_t kMaxPositions = std::int64_t{1} << 24;

  Family family = Family::kLlama;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_layers = 0;
  std::int64_t num_heads = 0;     // query heads; a multiple of num_kv_heads
  std::int64_t num_kv_heads = 0;  //
  std::int64_t head_dim = 0;      // even; num_heads * head_dim need not be hidden_size
  std::int64_t vocab_size = 0;
  std::int64_t max_positions = 0;  // positions 0 .. max_positions-1 may be computed
  float rms_norm_eps = 0;          // the decimal of config.json rounded once to binary32; >= 0
  bool qk_norm = false;            // RMSNorm per head on q and k before RoPE (Qwen3)
  bool tied_head = false;          // the output head is the embedding

  RopeKind rope_kind = RopeKind::kPlain;
  double rope_theta = 0;  // >= 1; the decimal rounded once to binary64, as are the next three
  // kLlama3 only, zero otherwise.
  double rope_factor = 0;            // >= 1
  double rope_low_freq_factor = 0;   // > 0
  double rope_high_freq_factor = 0;  // > rope_low_freq_factor
  std::int64_t rope_original_max_positions = 0;

  // Generation ends at any of these: config.json's and generation_config.json's together,
  // ascending, unique, each in [0, vocab_size). May be empty.
  std::vector<std::int32_t> eos_ids;
  std::optional<std::int32_t> bos_id;
  // What config.json declares. Information only: each tensor computes in the type that its file
  // gives.
  std::optional<Dtype> declared_dtype;

  std::int64_t q_size() const { return num_heads * head_dim; }      // rows of q_proj
  std::int64_t kv_size() const { return num_kv_heads * head_dim; }  // rows of k_proj and v_proj

  // "llama" or "qwen3".
  std::string family_name() const;

  // Every parameter above but family, bos_id and declared_dtype as ModelDescription::config wants
  // it: sorted by key, integers in decimal, reals as C99 hexadecimal floats of the exact value used
  // ("0x1.4f8b58p-17"), booleans "true"/"false", lists comma-separated. Keys of kLlama3 only appear
  // there.
  std::vector<std::pair<std::string, std::string>> canonical() const;
};

// Reads dir/config.json and, when present, dir/generation_config.json.
// Throws Error(kUsage) naming file, key and value; kInfrastructure if a file cannot be read.
ModelConfig load_model_config(const std::filesystem::path& dir);

// The same from text, for callers without a directory. `where` names the directory in messages;
// generation_config_json may be empty (absent).
ModelConfig parse_model_config(std::string_view config_json,
                               std::string_view generation_config_json, std::string_view where);

// C99 hexadecimal float of a finite value: sign, "0x1.", shortest hex fraction, "p", exponent; zero
// is "0x0p+0". Equal to printf's %a for normal numbers, and independent of locale and C library.
std::string hex_float(double value);

}  // namespace bitwitness
