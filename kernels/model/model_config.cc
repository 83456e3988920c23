#include "kernels/model/model_config.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <system_error>

#include "attest/base/error.h"
#include "kernels/model/json.h"
#include "kernels/model/mapped_file.h"

namespace bitwitness {
namespace {

constexpr JsonLimits kConfigLimits{std::size_t{4} << 20, 16, 200'000};

// Options read below. Their values are checked where they are read.
constexpr std::string_view kUsedKeys[] = {
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "use_sliding_window",
    "vocab_size",
};

// Options that leave the logits of inference alone whatever their value: names and versions,
// training, the form of the stock library's return values, its choice of implementation, and
// defaults of its sampler (sampling is stated per request).
constexpr std::string_view kHarmlessKeys[] = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_flash_attn_2_enabled",
    "_name_or_path",
    "attention_dropout",  // training only
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",  // memory only
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "max_sequence_length",
    "max_window_layers",  // only read where use_sliding_window is true, which is refused
    "min_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
};

// Options that change the computation unless they have this one value. null is "not set" for each.
struct NeutralOption {
  std::string_view key;
  enum class Neutral { kNull, kFalse, kZero, kOne, kEmpty } neutral;
};
using Neutral = NeutralOption::Neutral;
constexpr NeutralOption kNeutralOptions[] = {
    {"add_cross_attention", Neutral::kFalse},
    {"attention_bias", Neutral::kFalse},
    {"attention_multiplier", Neutral::kNull},
    {"attn_logit_softcapping", Neutral::kNull},
    {"auto_map", Neutral::kNull},  // the checkpoint brings code of its own
    {"clip_qkv", Neutral::kNull},
    {"compression_config", Neutral::kNull},
    {"cross_attention_hidden_size", Neutral::kNull},
    {"embedding_multiplier", Neutral::kOne},
    {"final_logit_softcapping", Neutral::kNull},
    {"is_decoder", Neutral::kFalse},
    {"is_encoder_decoder", Neutral::kFalse},
    {"logit_scale", Neutral::kOne},
    {"logits_scaling", Neutral::kOne},
    {"mlp_bias", Neutral::kFalse},
    {"moe_intermediate_size", Neutral::kNull},
    {"num_experts", Neutral::kZero},
    {"num_experts_per_tok", Neutral::kZero},
    {"num_local_experts", Neutral::kZero},
    {"partial_rotary_factor", Neutral::kOne},
    {"pretraining_tp", Neutral::kOne},  // another value splits K into separate sums
    {"pruned_heads", Neutral::kEmpty},
    {"qkv_bias", Neutral::kFalse},
    {"quantization_config", Neutral::kNull},
    {"query_pre_attn_scalar", Neutral::kNull},
    {"residual_multiplier", Neutral::kOne},
    {"rope_interleaved", Neutral::kFalse},
    {"rotary_pct", Neutral::kOne},
    {"tie_encoder_decoder", Neutral::kFalse},
    {"use_mrope", Neutral::kFalse},
};

bool is_neutral(const JsonValue& value, Neutral neutral) {
  if (value.is_null()) return true;
  switch (neutral) {
    case Neutral::kNull:
      return false;
    case Neutral::kFalse:
      return value.is_bool() && !value.boolean();
    case Neutral::kZero:
      return value.is_number() && value.binary64() == 0.0;
    case Neutral::kOne:
      return value.is_number() && value.binary64() == 1.0;
    case Neutral::kEmpty:
      return (value.is_array() && value.items().empty()) ||
             (value.is_object() && value.members().empty());
  }
  return false;
}

const char* neutral_text(Neutral neutral) {
  switch (neutral) {
    case Neutral::kNull:
      return "null";
    case Neutral::kFalse:
      return "false";
    case Neutral::kZero:
      return "0";
    case Neutral::kOne:
      return "1";
    case Neutral::kEmpty:
      return "empty";
  }
  return "null";
}

struct Architecture {
  std::string_view name;        // in `architectures`
  std::string_view model_type;  //
  ModelConfig::Family family;
  bool explicit_sizes;  // the stock library's defaults for absent heads, head size, theta are
                        // constants
  bool has_window;      // sliding_window acts, and is 4096 when absent
};
constexpr Architecture kArchitectures[] = {
    {"LlamaForCausalLM", "llama", ModelConfig::Family::kLlama, false, false},
    {"MistralForCausalLM", "mistral", ModelConfig::Family::kLlama, true, true},
    {"Qwen3ForCausalLM", "qwen3", ModelConfig::Family::kQwen3, true, false},
};
constexpr std::int64_t kMistralDefaultWindow = 4096;

struct Rope {
  ModelConfig::RopeKind kind = ModelConfig::RopeKind::kPlain;
  double theta = 0;
  double factor = 0;
  double low_freq_factor = 0;
  double high_freq_factor = 0;
  std::int64_t original_max_positions = 0;

  bool operator==(const Rope&) const = default;
};

// One JSON object of options, with the file's name (and the object's, if nested) in every message.
// A member that is null counts as absent.
class Options {
 public:
  Options(const JsonValue& object, std::string where) : object_(object), where_(std::move(where)) {}

  [[noreturn]] void fail(std::string_view key, const std::string& why) const {
    const JsonValue* value = object_.find(key);
    throw usage_error(where_ + ": " + printable(key) + " = " +
                      (value == nullptr ? "(absent)" : value->summary()) + ": " + why);
  }

  const JsonValue* get(std::string_view key) const {
    const JsonValue* value = object_.find(key);
    return value == nullptr || value->is_null() ? nullptr : value;
  }
  bool has(std::string_view key) const { return get(key) != nullptr; }

  std::int64_t integer(std::string_view key, std::int64_t least, std::int64_t most) const {
    const JsonValue* value = get(key);
    if (value == nullptr) fail(key, "this size must be given");
    const auto number = value->integer();
    if (!number || *number < least || *number > most) {
      fail(key, "must be an integer from " + std::to_string(least) + " to " + std::to_string(most));
    }
    return *number;
  }

  double real(std::string_view key) const {
    const JsonValue* value = get(key);
    if (value == nullptr) fail(key, "this number must be given");
    const auto number = value->binary64();
    if (!number) fail(key, "must be a finite number");
    return *number;
  }

  bool flag(std::string_view key, bool when_absent) const {
    const JsonValue* value = get(key);
    if (value == nullptr) return when_absent;
    if (!value->is_bool()) fail(key, "must be true or false");
    return value->boolean();
  }

  const std::string& string(std::string_view key) const {
    const JsonValue* value = get(key);
    if (value == nullptr || !value->is_string()) fail(key, "must be a string");
    return value->text();
  }

  const std::vector<JsonValue::Member>& members() const { return object_.members(); }
  const std::string& where() const { return where_; }

 private:
  const JsonValue& object_;
  std::string where_;
};

template <std::size_t N>
bool contains(const std::string_view (&list)[N], std::string_view key) {
  return std::find(std::begin(list), std::end(list), key) != std::end(list);
}

const Architecture& read_architecture(const Options& options) {
  const std::string supported =
      "supported are LlamaForCausalLM (llama), MistralForCausalLM (mistral) without a sliding "
      "window "
      "and Qwen3ForCausalLM (qwen3)";
  const std::string& model_type = options.string("model_type");
  const auto* found =
      std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                   [&](const Architecture& known) { return known.model_type == model_type; });
  if (found == std::end(kArchitectures)) {
    options.fail("model_type", "this model family is not supported; " + supported);
  }
  const JsonValue* names = options.get("architectures");
  if (names == nullptr || !names->is_array() || names->items().size() != 1 ||
      !names->items()[0].is_string() || names->items()[0].text() != found->name) {
    options.fail("architectures", "must be exactly [\"" + std::string(found->name) +
                                      "\"] for model_type \"" + model_type + "\"; " + supported);
  }
  return *found;
}

void refuse_unsupported_options(const Options& options) {
  for (const auto& [key, value] : options.members()) {
    if (contains(kUsedKeys, key) || contains(kHarmlessKeys, key)) continue;
    const std::string_view name = key;
    const auto* option =
        std::find_if(std::begin(kNeutralOptions), std::end(kNeutralOptions),
                     [&](const NeutralOption& known) { return known.key == name; });
    if (option != std::end(kNeutralOptions)) {
      if (!is_neutral(value, option->neutral)) {
        options.fail(key, std::string("changes the computation and is not supported (only ") +
                              neutral_text(option->neutral) + " is)");
      }
    } else if (!value.is_null()) {
      options.fail(key,
                   "unknown option; it may change the computation, so it is refused unless null");
    }
  }
}

// At least 1, so that no frequency is above 1 and every angle is finite.
double read_theta(const Options& options) {
  const double theta = options.real("rope_theta");
  if (!(theta >= 1)) options.fail("rope_theta", "must be at least 1");
  return theta;
}

Rope read_rope_object(const Options& options, std::optional<double> outer_theta) {
  Rope rope;
  const bool has_type = options.has("type");
  const bool has_rope_type = options.has("rope_type");
  if (!has_type && !has_rope_type) options.fail("rope_type", "the kind of RoPE must be given");
  const std::string& kind = options.string(has_rope_type ? "rope_type" : "type");
  if (has_type && options.string("type") != kind) {
    options.fail("type", "differs from rope_type \"" + kind + "\"");
  }
  if (kind == "llama3") {
    rope.kind = ModelConfig::RopeKind::kLlama3;
  } else if (kind != "default") {
    options.fail(has_rope_type ? "rope_type" : "type",
                 "this RoPE scaling is not supported (only \"default\" and \"llama3\" are)");
  }
  for (const auto& [key, value] : options.members()) {
    if (value.is_null() || key == "type" || key == "rope_type" || key == "rope_theta") continue;
    if (key == "partial_rotary_factor" && is_neutral(value, Neutral::kOne)) continue;
    const bool of_llama3 = key == "factor" || key == "low_freq_factor" ||
                           key == "high_freq_factor" || key == "original_max_position_embeddings";
    if (rope.kind == ModelConfig::RopeKind::kLlama3 && of_llama3) continue;
    options.fail(key, "not supported for RoPE of type \"" + kind + "\"");
  }
  if (options.has("rope_theta")) {
    rope.theta = read_theta(options);
    if (outer_theta && *outer_theta != rope.theta) {
      options.fail("rope_theta", "differs from the rope_theta beside it");
    }
  } else if (outer_theta) {
    rope.theta = *outer_theta;
  } else {
    options.fail("rope_theta", "must be given");
  }
  if (rope.kind == ModelConfig::RopeKind::kLlama3) {
    rope.factor = options.real("factor");
    if (!(rope.factor >= 1)) options.fail("factor", "must be at least 1");
    rope.low_freq_factor = options.real("low_freq_factor");
    if (!(rope.low_freq_factor > 0)) options.fail("low_freq_factor", "must be above 0");
    rope.high_freq_factor = options.real("high_freq_factor");
    if (!(rope.high_freq_factor > rope.low_freq_factor)) {
      options.fail("high_freq_factor", "must be above low_freq_factor");
    }
    rope.original_max_positions =
        options.integer("original_max_position_embeddings", 1, ModelConfig::kMaxPositions);
  }
  return rope;
}

Rope read_rope(const Options& options, const Architecture& architecture) {
  std::optional<double> theta;
  if (options.has("rope_theta")) theta = read_theta(options);
  const JsonValue* scaling = options.get("rope_scaling");
  const JsonValue* parameters = options.get("rope_parameters");
  for (const std::string_view key : {"rope_scaling", "rope_parameters"}) {
    const JsonValue* value = options.get(key);
    if (value != nullptr && !value->is_object()) options.fail(key, "must be an object");
  }

  std::optional<Rope> rope;
  if (parameters != nullptr) {
    rope = read_rope_object(Options(*parameters, options.where() + ": rope_parameters"), theta);
    theta = rope->theta;
  } else if (!theta && !architecture.explicit_sizes) {
    theta = 10000.0;  // of the Llama configurations written before the option existed
  }
  if (scaling != nullptr) {
    const Rope old = read_rope_object(Options(*scaling, options.where() + ": rope_scaling"), theta);
    if (rope && *rope != old)
      options.fail("rope_scaling", "says something else than rope_parameters");
    rope = old;
  }
  if (!rope) {
    if (!theta) options.fail("rope_theta", "must be given for this model family");
    rope = Rope{.theta = *theta};
  }
  return *rope;
}

void refuse_windows(const Options& options, const Architecture& architecture,
                    const ModelConfig& config) {
  const std::string why =
      "attention within a sliding window is not supported (null, or at least "
      "max_position_embeddings, is)";
  if (options.flag("use_sliding_window", false)) options.fail("use_sliding_window", why);
  const bool ignored = config.family == ModelConfig::Family::kQwen3;  // use_sliding_window is false
  const bool absent = !options.has("sliding_window");
  if (!absent && !ignored) {
    const std::int64_t window =
        options.integer("sliding_window", 1, std::numeric_limits<std::int64_t>::max());
    if (window < config.max_positions) options.fail("sliding_window", why);
  }
  // Written as null there is no window; left out, the stock library assumes one.
  const bool left_out = std::none_of(
      options.members().begin(), options.members().end(),
      [](const JsonValue::Member& member) { return member.first == "sliding_window"; });
  if (architecture.has_window && left_out && config.max_positions > kMistralDefaultWindow) {
    options.fail("sliding_window", "left out, it means " + std::to_string(kMistralDefaultWindow) +
                                       " for this model family, and " + why +
                                       "; write null if there is none");
  }
  if (const JsonValue* types = options.get("layer_types")) {
    if (!types->is_array() ||
        types->items().size() != static_cast<std::size_t>(config.num_layers)) {
      options.fail("layer_types", "must list one type for each of the " +
                                      std::to_string(config.num_layers) + " layers");
    }
    for (const JsonValue& type : types->items()) {
      if (!type.is_string() || type.text() != "full_attention") {
        options.fail("layer_types",
                     type.summary() + " layers are not supported (only \"full_attention\" is)");
      }
    }
  }
}

std::optional<Dtype> read_dtype(const Options& options) {
  std::optional<Dtype> result;
  for (const std::string_view key : {"torch_dtype", "dtype"}) {
    if (!options.has(key)) continue;
    std::string_view name = options.string(key);
    if (name.starts_with("torch.")) name.remove_prefix(6);
    Dtype dtype = Dtype::kFp32;
    if (name == "bfloat16") {
      dtype = Dtype::kBf16;
    } else if (name == "float16") {
      dtype = Dtype::kFp16;
    } else if (name != "float32") {
      options.fail(key, "not supported (only bfloat16, float16 and float32 are)");
    }
    if (result && *result != dtype) options.fail(key, "differs from torch_dtype");
    result = dtype;
  }
  return result;
}

// The token ids of an option that is an integer or a list of them.
std::vector<std::int32_t> read_token_ids(const Options& options, std::string_view key,
                                         std::int64_t vocab_size) {
  std::vector<std::int32_t> ids;
  const JsonValue* value = options.get(key);
  if (value == nullptr) return ids;
  const auto add = [&](const JsonValue& item) {
    const auto id = item.integer();
    if (!id || *id < 0 || *id >= vocab_size) {
      options.fail(key, "must hold token ids from 0 to " + std::to_string(vocab_size - 1) +
                            " (vocab_size - 1)");
    }
    ids.push_back(static_cast<std::int32_t>(*id));
  };
  if (value->is_array()) {
    if (value->items().size() > 1024) options.fail(key, "lists more than 1024 token ids");
    for (const JsonValue& item : value->items()) add(item);
  } else {
    add(*value);
  }
  return ids;
}

JsonValue parse_object(std::string_view text, const std::string& file) {
  JsonValue root = parse_json(text, kConfigLimits, file);
  if (!root.is_object()) {
    throw usage_error(file + ": must be a JSON object, is " + root.type_name());
  }
  return root;
}

void read_sizes(const Options& options, const Architecture& architecture, ModelConfig* config) {
  using C = ModelConfig;
  config->hidden_size = options.integer("hidden_size", 1, C::kMaxHiddenSize);
  config->intermediate_size = options.integer("intermediate_size", 1, C::kMaxIntermediateSize);
  config->num_layers = options.integer("num_hidden_layers", 1, C::kMaxLayers);
  config->num_heads = options.integer("num_attention_heads", 1, C::kMaxHeads);
  config->vocab_size = options.integer("vocab_size", 1, C::kMaxVocabSize);
  config->max_positions = options.integer("max_position_embeddings", 1, C::kMaxPositions);

  if (options.has("num_key_value_heads")) {
    config->num_kv_heads = options.integer("num_key_value_heads", 1, C::kMaxHeads);
  } else if (architecture.explicit_sizes) {
    options.fail("num_key_value_heads", "must be given for this model family");
  } else {
    config->num_kv_heads = config->num_heads;
  }
  if (config->num_heads % config->num_kv_heads != 0) {
    options.fail("num_key_value_heads",
                 "must divide num_attention_heads = " + std::to_string(config->num_heads));
  }
  if (options.has("head_dim")) {
    config->head_dim = options.integer("head_dim", 1, C::kMaxHeadDim);
  } else {
    // The stock default of Qwen3 is a constant, not this quotient.
    if (config->family == C::Family::kQwen3) {
      options.fail("head_dim", "must be given for this model family");
    }
    if (config->hidden_size % config->num_heads != 0) {
      options.fail("head_dim", "left out, but hidden_size " + std::to_string(config->hidden_size) +
                                   " is no multiple of num_attention_heads " +
                                   std::to_string(config->num_heads));
    }
    config->head_dim = config->hidden_size / config->num_heads;
  }
  if (config->head_dim % 2 != 0 || config->head_dim > C::kMaxHeadDim) {
    options.fail("head_dim", "the head size " + std::to_string(config->head_dim) +
                                 " must be even (RoPE turns pairs) and at most " +
                                 std::to_string(C::kMaxHeadDim));
  }
}

void read_eps(const Options& options, ModelConfig* config) {
  const JsonValue* value = options.get("rms_norm_eps");
  if (value == nullptr) options.fail("rms_norm_eps", "must be given");
  const auto eps = value->binary32();
  if (!eps || std::signbit(*eps))
    options.fail("rms_norm_eps", "must be a finite number, 0 or more");
  config->rms_norm_eps = *eps;
}

}  // namespace

ModelConfig parse_model_config(std::string_view config_json,
                               std::string_view generation_config_json, std::string_view where) {
  const std::string prefix = where.empty() ? std::string() : std::string(where) + "/";
  const JsonValue root = parse_object(config_json, prefix + "config.json");
  const Options options(root, prefix + "config.json");

  // The family first: in a model of another family its name is the message that helps.
  const Architecture& architecture = read_architecture(options);
  refuse_unsupported_options(options);
  ModelConfig config;
  config.family = architecture.family;
  config.qk_norm = config.family == ModelConfig::Family::kQwen3;
  read_sizes(options, architecture, &config);
  refuse_windows(options, architecture, config);
  if (options.has("hidden_act") && options.string("hidden_act") != "silu") {
    options.fail("hidden_act", "this activation is not supported (only \"silu\" is)");
  }
  read_eps(options, &config);
  config.tied_head = options.flag("tie_word_embeddings", false);
  const Rope rope = read_rope(options, architecture);
  config.rope_kind = rope.kind;
  config.rope_theta = rope.theta;
  config.rope_factor = rope.factor;
  config.rope_low_freq_factor = rope.low_freq_factor;
  config.rope_high_freq_factor = rope.high_freq_factor;
  config.rope_original_max_positions = rope.original_max_positions;
  config.declared_dtype = read_dtype(options);

  config.eos_ids = read_token_ids(options, "eos_token_id", config.vocab_size);
  if (options.has("bos_token_id")) {
    config.bos_id =
        static_cast<std::int32_t>(options.integer("bos_token_id", 0, config.vocab_size - 1));
  }
  if (!generation_config_json.empty()) {
    const std::string file = prefix + "generation_config.json";
    const JsonValue generation = parse_object(generation_config_json, file);
    const auto more = read_token_ids(Options(generation, file), "eos_token_id", config.vocab_size);
    config.eos_ids.insert(config.eos_ids.end(), more.begin(), more.end());
  }
  std::sort(config.eos_ids.begin(), config.eos_ids.end());
  config.eos_ids.erase(std::unique(config.eos_ids.begin(), config.eos_ids.end()),
                       config.eos_ids.end());
  return config;
}

ModelConfig load_model_config(const std::filesystem::path& dir) {
  const std::string config = read_file_bounded(dir / "config.json", kConfigLimits.max_bytes);
  const std::filesystem::path generation_path = dir / "generation_config.json";
  std::string generation;
  std::error_code error;
  const auto status = std::filesystem::symlink_status(generation_path, error);
  if (std::filesystem::exists(status)) {
    generation = read_file_bounded(generation_path, kConfigLimits.max_bytes);
    if (generation.empty()) throw usage_error(generation_path.string() + ": the file is empty");
  }
  return parse_model_config(config, generation, dir.string());
}

std::string ModelConfig::family_name() const {
  return family == Family::kQwen3 ? "qwen3" : "llama";
}

std::vector<std::pair<std::string, std::string>> ModelConfig::canonical() const {
  const auto flag = [](bool value) { return std::string(value ? "true" : "false"); };
  std::string eos;
  for (const std::int32_t id : eos_ids) {
    if (!eos.empty()) eos += ',';
    eos += std::to_string(id);
  }
  std::vector<std::pair<std::string, std::string>> result = {
      {"activation", "silu"},
      {"eos_ids", eos},
      {"head_dim", std::to_string(head_dim)},
      {"hidden_size", std::to_string(hidden_size)},
      {"intermediate_size", std::to_string(intermediate_size)},
      {"max_positions", std::to_string(max_positions)},
      {"num_heads", std::to_string(num_heads)},
      {"num_kv_heads", std::to_string(num_kv_heads)},
      {"num_layers", std::to_string(num_layers)},
      {"qk_norm", flag(qk_norm)},
      {"rms_norm_eps", hex_float(static_cast<double>(rms_norm_eps))},
      {"rope_kind", rope_kind == RopeKind::kLlama3 ? "llama3" : "plain"},
      {"rope_theta", hex_float(rope_theta)},
      {"tied_head", flag(tied_head)},
      {"vocab_size", std::to_string(vocab_size)},
  };
  if (rope_kind == RopeKind::kLlama3) {
    result.emplace_back("rope_factor", hex_float(rope_factor));
    result.emplace_back("rope_high_freq_factor", hex_float(rope_high_freq_factor));
    result.emplace_back("rope_low_freq_factor", hex_float(rope_low_freq_factor));
    result.emplace_back("rope_original_max_positions", std::to_string(rope_original_max_positions));
  }
  std::sort(result.begin(), result.end());
  return result;
}

std::string hex_float(double value) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const bool negative = (bits >> 63) != 0;
  std::uint64_t fraction = bits & ((std::uint64_t{1} << 52) - 1);
  int exponent = static_cast<int>((bits >> 52) & 0x7FF);
  if (exponent == 0x7FF) throw std::invalid_argument("hex_float: the value is not finite");
  std::string text = negative ? "-0x" : "0x";
  if (exponent == 0 && fraction == 0) return text + "0p+0";
  if (exponent == 0) {
    // Subnormal: shift the leading one to where a normal number's implicit one is.
    exponent = 1;
    while ((fraction >> 52) == 0) {
      fraction <<= 1;
      --exponent;
    }
    fraction &= (std::uint64_t{1} << 52) - 1;
  }
  text += '1';
  if (fraction != 0) {
    text += '.';
    for (int shift = 48; shift >= 0 && fraction != 0; shift -= 4) {
      text += "0123456789abcdef"[fraction >> shift];
      fraction &= (std::uint64_t{1} << shift) - 1;
    }
  }
  exponent -= 1023;
  text += exponent < 0 ? "p-" : "p+";
  return text + std::to_string(exponent < 0 ? -exponent : exponent);
}

}  // namespace bitwitness
