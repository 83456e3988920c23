#include "kernels/model/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <string>

#include "tests/kernels/model/expect_error.h"
#include "tests/kernels/model/safetensors_writer.h"

namespace bitwitness {
namespace {

using Family = ModelConfig::Family;
using RopeKind = ModelConfig::RopeKind;
using test::expect_error;
using testing::ElementsAre;
using testing::Pair;

const std::filesystem::path kModels = std::filesystem::path(BW_TEST_DATA_DIR) / "models";

// A config.json as members that a test can replace or remove.
class ConfigText {
 public:
  static ConfigText llama() {
    ConfigText text;
    text.members_ = {{"architectures", "[\"LlamaForCausalLM\"]"},
                     {"model_type", "\"llama\""},
                     {"hidden_size", "64"},
                     {"intermediate_size", "160"},
                     {"num_hidden_layers", "3"},
                     {"num_attention_heads", "4"},
                     {"num_key_value_heads", "2"},
                     {"vocab_size", "320"},
                     {"max_position_embeddings", "512"},
                     {"rms_norm_eps", "1e-06"},
                     {"rope_theta", "500000.0"},
                     {"eos_token_id", "2"},
                     {"torch_dtype", "\"bfloat16\""}};
    return text;
  }
  static ConfigText mistral() {
    return llama()
        .set("architectures", "[\"MistralForCausalLM\"]")
        .set("model_type", "\"mistral\"");
  }
  static ConfigText qwen3() {
    return llama()
        .set("architectures", "[\"Qwen3ForCausalLM\"]")
        .set("model_type", "\"qwen3\"")
        .set("head_dim", "32");
  }

  ConfigText set(const std::string& key, const std::string& json) const {
    ConfigText copy = *this;
    copy.members_[key] = json;
    return copy;
  }
  ConfigText without(const std::string& key) const {
    ConfigText copy = *this;
    copy.members_.erase(key);
    return copy;
  }
  std::string json() const {
    std::string text;
    for (const auto& [key, value] : members_) {
      text += (text.empty() ? "\"" : ",\"") + key + "\":" + value;
    }
    return "{" + text + "}";
  }
  ModelConfig parse(std::string_view generation = {}) const {
    return parse_model_config(json(), generation, "dir");
  }

 private:
  std::map<std::string, std::string> members_;
};

void expect_refused(const ConfigText& text, std::initializer_list<std::string_view> parts) {
  expect_error(ErrorKind::kUsage, parts, [&] { text.parse(); });
  expect_error(ErrorKind::kUsage, {"dir/config.json"}, [&] { text.parse(); });
}

TEST(ModelConfig, TinyLlama) {
  const ModelConfig config = load_model_config(kModels / "tiny-llama");
  EXPECT_EQ(config.family, Family::kLlama);
  EXPECT_EQ(config.family_name(), "llama");
  EXPECT_EQ(config.hidden_size, 192);
  EXPECT_EQ(config.intermediate_size, 512);
  EXPECT_EQ(config.num_layers, 6);
  EXPECT_EQ(config.num_heads, 6);
  EXPECT_EQ(config.num_kv_heads, 2);
  EXPECT_EQ(config.head_dim, 32);
  EXPECT_EQ(config.vocab_size, 2048);
  EXPECT_EQ(config.max_positions, 1024);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(config.rms_norm_eps), 0x3727C5ACU);
  EXPECT_FALSE(config.qk_norm);
  EXPECT_FALSE(config.tied_head);
  EXPECT_EQ(config.rope_kind, RopeKind::kPlain);
  EXPECT_EQ(config.rope_theta, 500000.0);
  EXPECT_THAT(config.eos_ids, ElementsAre(1));
  EXPECT_EQ(config.bos_id, 0);
  EXPECT_EQ(config.declared_dtype, Dtype::kBf16);
}

TEST(ModelConfig, TinyQwen3) {
  const ModelConfig config = load_model_config(kModels / "tiny-qwen3");
  EXPECT_EQ(config.family, Family::kQwen3);
  EXPECT_EQ(config.hidden_size, 128);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(config.q_size(), 256);
  EXPECT_EQ(config.kv_size(), 128);
  EXPECT_TRUE(config.qk_norm);
  EXPECT_TRUE(config.tied_head);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(config.rms_norm_eps), 0x358637BDU);
  EXPECT_EQ(config.rope_theta, 1000000.0);
  EXPECT_THAT(config.canonical(),
              ElementsAre(Pair("activation", "silu"), Pair("eos_ids", "1"), Pair("head_dim", "64"),
                          Pair("hidden_size", "128"), Pair("intermediate_size", "384"),
                          Pair("max_positions", "1024"), Pair("num_heads", "4"),
                          Pair("num_kv_heads", "2"), Pair("num_layers", "4"),
                          Pair("qk_norm", "true"), Pair("rms_norm_eps", "0x1.0c6f7ap-20"),
                          Pair("rope_kind", "plain"), Pair("rope_theta", "0x1.e848p+19"),
                          Pair("tied_head", "true"), Pair("vocab_size", "2048")));
}

TEST(ModelConfig, ZooLlama31) {
  const ModelConfig config = load_model_config(kModels / "zoo" / "llama31-ropescale");
  EXPECT_EQ(config.family, Family::kLlama);
  EXPECT_EQ(config.rope_kind, RopeKind::kLlama3);
  EXPECT_EQ(config.rope_theta, 500000.0);
  EXPECT_EQ(config.rope_factor, 8.0);
  EXPECT_EQ(config.rope_low_freq_factor, 1.0);
  EXPECT_EQ(config.rope_high_freq_factor, 4.0);
  EXPECT_EQ(config.rope_original_max_positions, 64);
  const auto canonical = config.canonical();
  EXPECT_TRUE(std::is_sorted(canonical.begin(), canonical.end()));
  EXPECT_THAT(canonical,
              testing::IsSupersetOf({Pair("rope_kind", "llama3"), Pair("rope_factor", "0x1p+3"),
                                     Pair("rope_high_freq_factor", "0x1p+2"),
                                     Pair("rope_low_freq_factor", "0x1p+0"),
                                     Pair("rope_original_max_positions", "64")}));
}

TEST(ModelConfig, ZooModelsOfOtherComputationsAreRefusedByName) {
  const auto refused = [](const char* model, std::initializer_list<std::string_view> parts) {
    expect_error(ErrorKind::kUsage, parts, [&] { load_model_config(kModels / "zoo" / model); });
  };
  refused("mistral-sliding", {"mistral-sliding/config.json", "sliding_window = 16"});
  refused("qwen2-bias", {"qwen2-bias/config.json", "model_type = \"qwen2\""});
  refused("mixtral", {"mixtral/config.json", "model_type = \"mixtral\""});
}

TEST(ModelConfig, OldAndNewShapesAreTheSame) {
  const ConfigText base = ConfigText::llama();
  const auto canonical = base.parse().canonical();
  const ConfigText bare = base.without("rope_theta").without("torch_dtype");
  EXPECT_EQ(bare.set("rope_parameters", R"({"rope_theta":500000,"rope_type":"default"})")
                .set("dtype", "\"bfloat16\"")
                .parse()
                .canonical(),
            canonical);
  EXPECT_EQ(base.set("rope_scaling", "null").set("head_dim", "null").parse().canonical(),
            canonical);
  EXPECT_EQ(base.set("head_dim", "16").parse().canonical(), canonical);
  EXPECT_EQ(bare.set("dtype", "\"torch.float16\"").set("rope_theta", "1e4").parse().declared_dtype,
            Dtype::kFp16);

  const std::string scaling =
      R"("factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":64)";
  const auto scaled = base.set("rope_scaling", "{" + scaling + R"(,"rope_type":"llama3"})");
  const auto scaled_canonical = scaled.parse().canonical();
  EXPECT_NE(scaled_canonical, canonical);
  EXPECT_EQ(base.set("rope_scaling", "{" + scaling + R"(,"type":"llama3"})").parse().canonical(),
            scaled_canonical);
  const std::string parameters = "{" + scaling + R"(,"rope_type":"llama3","rope_theta":500000.0})";
  EXPECT_EQ(bare.set("rope_parameters", parameters).parse().canonical(), scaled_canonical);
  EXPECT_EQ(scaled.set("rope_parameters", parameters).parse().canonical(), scaled_canonical);

  // Both shapes that disagree.
  expect_refused(scaled.set("rope_parameters", R"({"rope_theta":500000.0,"rope_type":"default"})"),
                 {"rope_scaling"});
  expect_refused(base.set("rope_parameters", R"({"rope_theta":10000.0,"rope_type":"default"})"),
                 {"rope_theta"});
  expect_refused(base.set("dtype", "\"float16\""), {"dtype"});
}

TEST(ModelConfig, DefaultsOfOldLlamaFiles) {
  const ModelConfig config =
      ConfigText::llama().without("rope_theta").without("num_key_value_heads").parse();
  EXPECT_EQ(config.rope_theta, 10000.0);
  EXPECT_EQ(config.num_kv_heads, 4);
  EXPECT_EQ(config.head_dim, 16);
  // Where the stock default is another constant, the size must be written out.
  expect_refused(ConfigText::qwen3().without("rope_theta"), {"rope_theta"});
  expect_refused(ConfigText::qwen3().without("num_key_value_heads"), {"num_key_value_heads"});
  expect_refused(ConfigText::qwen3().without("head_dim"), {"head_dim"});
}

TEST(ModelConfig, MistralOnlyWithoutAWindow) {
  const ConfigText base = ConfigText::mistral();
  EXPECT_EQ(base.set("sliding_window", "null").parse().canonical(),
            ConfigText::llama().parse().canonical());
  EXPECT_NO_THROW(base.set("sliding_window", "512").parse());
  expect_refused(base.set("sliding_window", "511"), {"sliding_window = 511"});
  // Left out it means 4096, which does not bite below that length.
  EXPECT_NO_THROW(base.set("max_position_embeddings", "4096").parse());
  expect_refused(base.set("max_position_embeddings", "4097"), {"sliding_window", "4096"});
  EXPECT_NO_THROW(
      base.set("max_position_embeddings", "4097").set("sliding_window", "null").parse());
}

TEST(ModelConfig, Qwen3WindowActsOnlyWhenSwitchedOn) {
  const ConfigText base = ConfigText::qwen3().set("sliding_window", "128");
  EXPECT_NO_THROW(base.parse());
  EXPECT_NO_THROW(base.set("use_sliding_window", "false").set("max_window_layers", "1").parse());
  expect_refused(base.set("use_sliding_window", "true"), {"use_sliding_window = true"});
  const std::string full = "\"full_attention\"";
  EXPECT_NO_THROW(base.set("layer_types", "[" + full + "," + full + "," + full + "]").parse());
  expect_refused(base.set("layer_types", "[" + full + "," + full + "]"),
                 {"layer_types", "3 layers"});
  expect_refused(base.set("layer_types", "[" + full + ",\"sliding_attention\"," + full + "]"),
                 {"layer_types", "sliding_attention"});
}

TEST(ModelConfig, OptionsThatChangeTheComputationAreRefusedByNameAndValue) {
  const ConfigText base = ConfigText::llama();
  const std::pair<const char*, const char*> options[] = {
      {"attention_bias", "true"},
      {"mlp_bias", "true"},
      {"hidden_act", "\"gelu\""},
      {"pretraining_tp", "2"},
      {"partial_rotary_factor", "0.5"},
      {"logit_scale", "0.0625"},
      {"logits_scaling", "8.0"},
      {"residual_multiplier", "0.22"},
      {"embedding_multiplier", "12.0"},
      {"attention_multiplier", "0.0078125"},
      {"attn_logit_softcapping", "50.0"},
      {"final_logit_softcapping", "30.0"},
      {"num_experts", "8"},
      {"num_local_experts", "8"},
      {"is_encoder_decoder", "true"},
      {"rope_interleaved", "true"},
      {"tie_encoder_decoder", "true"},
      {"some_future_option", "7"},
      {"some_future_option", "false"},
      {"some_future_option", "\"x\""},
      {"some_future_option", "[]"},
      {"sliding_window", "64"},
      {"dtype", "\"float8_e4m3fn\""},
  };
  for (const auto& [key, value] : options) {
    expect_refused(base.set(key, value), {std::string(key) + " = " + value});
    EXPECT_NO_THROW(base.set(key, "null").parse()) << key;
  }
  expect_refused(base.set("quantization_config", R"({"bits":4})"), {"quantization_config"});
  expect_refused(base.set("auto_map", R"({"AutoModel":"x.Y"})"), {"auto_map"});
  expect_refused(base.set("pruned_heads", R"({"0":[1]})"), {"pruned_heads"});
  const std::pair<const char*, const char*> neutral[] = {
      {"attention_bias", "false"},  {"mlp_bias", "false"},     {"hidden_act", "\"silu\""},
      {"pretraining_tp", "1"},      {"logits_scaling", "1.0"}, {"partial_rotary_factor", "1"},
      {"attention_dropout", "0.1"}, {"use_cache", "true"},     {"num_experts", "0"},
      {"pad_token_id", "-1"},       {"pruned_heads", "{}"},    {"temperature", "0.7"},
      {"_name_or_path", "\"a/b\""},
  };
  for (const auto& [key, value] : neutral) {
    EXPECT_EQ(base.set(key, value).parse().canonical(), base.parse().canonical()) << key;
  }
}

TEST(ModelConfig, RopeScalingsAreRefusedByName) {
  const ConfigText base = ConfigText::llama();
  for (const std::string kind : {"linear", "dynamic", "yarn", "longrope", "su", "mrope"}) {
    expect_refused(base.set("rope_scaling", R"({"factor":2.0,"type":")" + kind + "\"}"),
                   {"rope_scaling", "\"" + kind + "\""});
    expect_refused(base.set("rope_parameters", R"({"factor":2.0,"rope_type":")" + kind + "\"}"),
                   {"rope_parameters", "\"" + kind + "\""});
  }
  expect_refused(base.set("rope_scaling", R"({"type":"default","rope_type":"llama3"})"), {"type"});
  expect_refused(base.set("rope_scaling", R"({"factor":2.0})"), {"rope_type"});
  expect_refused(base.set("rope_scaling", R"({"rope_type":"default","factor":2.0})"),
                 {"factor = 2.0"});
  expect_refused(base.set("rope_scaling", R"({"rope_type":"default","attention_factor":2.0})"),
                 {"attention_factor"});
  expect_refused(base.set("rope_scaling", "[1]"), {"rope_scaling"});
  expect_refused(base.set("rope_parameters", R"({"full_attention":{"rope_type":"default"}})"),
                 {"rope_parameters"});
  const auto llama3 = [&](const char* factor, const char* low, const char* high,
                          const char* original) {
    return base.set("rope_scaling", std::string(R"({"rope_type":"llama3","factor":)") + factor +
                                        ",\"low_freq_factor\":" + low +
                                        ",\"high_freq_factor\":" + high +
                                        ",\"original_max_position_embeddings\":" + original + "}");
  };
  EXPECT_NO_THROW(llama3("8", "1", "4", "64").parse());
  expect_refused(llama3("0.5", "1", "4", "64"), {"factor = 0.5"});
  expect_refused(llama3("8", "0", "4", "64"), {"low_freq_factor = 0"});
  expect_refused(llama3("8", "4", "4", "64"), {"high_freq_factor = 4"});
  expect_refused(llama3("8", "1", "4", "0"), {"original_max_position_embeddings = 0"});
  expect_refused(llama3("8", "1", "4", "null"), {"original_max_position_embeddings"});
}

TEST(ModelConfig, SizesAreBounded) {
  const ConfigText base = ConfigText::llama();
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size", "max_position_embeddings", "head_dim"}) {
    for (const char* value : {"0", "-1", "99999999999", "18446744073709551617", "64.0", "\"64\"",
                              "true", "[64]", "{}"}) {
      expect_refused(base.set(key, value), {key});
    }
  }
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "vocab_size", "max_position_embeddings", "rms_norm_eps", "model_type", "architectures"}) {
    expect_refused(base.without(key), {key});
  }
  EXPECT_NO_THROW(base.set("hidden_size", "65536").set("head_dim", "16").parse());
  expect_refused(base.set("hidden_size", "65537"), {"hidden_size = 65537"});
  EXPECT_NO_THROW(base.set("num_hidden_layers", "1024").parse());
  expect_refused(base.set("num_hidden_layers", "1025"), {"num_hidden_layers"});
  EXPECT_NO_THROW(base.set("vocab_size", "16777216").parse());
  expect_refused(base.set("vocab_size", "16777217"), {"vocab_size"});
  expect_refused(base.set("head_dim", "15"), {"head_dim", "even"});
  expect_refused(base.set("head_dim", "1026"), {"head_dim"});
  expect_refused(base.set("hidden_size", "65"), {"head_dim", "65"});
  expect_refused(base.set("num_key_value_heads", "3"), {"num_key_value_heads = 3"});
  expect_refused(base.set("num_key_value_heads", "8"), {"num_key_value_heads = 8"});
}

TEST(ModelConfig, Reals) {
  const ConfigText base = ConfigText::llama();
  EXPECT_EQ(base.set("rms_norm_eps", "0").parse().rms_norm_eps, 0.0F);
  for (const char* value : {"-1e-6", "-0.0", "1e39", "\"1e-6\"", "true"}) {
    expect_refused(base.set("rms_norm_eps", value), {"rms_norm_eps"});
  }
  EXPECT_EQ(base.set("rope_theta", "10000").parse().rope_theta, 10000.0);
  for (const char* value : {"0", "-10000.0", "0.5", "\"1\"", "false"}) {
    expect_refused(base.set("rope_theta", value), {"rope_theta"});
  }
  for (const char* value : {"1e999", "NaN", "Infinity"}) {
    expect_refused(base.set("rope_theta", value), {"not valid JSON"});
  }
}

TEST(ModelConfig, FamilyMustBeNamedConsistently) {
  const ConfigText base = ConfigText::llama();
  for (const char* value :
       {"[\"Qwen3ForCausalLM\"]", "[\"LlamaForSequenceClassification\"]", "[]", "null",
        "[\"LlamaForCausalLM\",\"LlamaForCausalLM\"]", "\"LlamaForCausalLM\"", "[1]"}) {
    expect_refused(base.set("architectures", value), {"architectures"});
  }
  expect_refused(base.set("model_type", "\"gpt2\""), {"model_type = \"gpt2\""});
  expect_refused(base.set("model_type", "7"), {"model_type"});
}

TEST(ModelConfig, StopTokensOfBothFiles) {
  const ConfigText base = ConfigText::llama();
  EXPECT_THAT(base.parse(R"({"eos_token_id":[300,2,7],"temperature":0.6})").eos_ids,
              ElementsAre(2, 7, 300));
  EXPECT_THAT(base.parse(R"({"eos_token_id":null})").eos_ids, ElementsAre(2));
  EXPECT_THAT(base.without("eos_token_id").parse().eos_ids, ElementsAre());
  EXPECT_THAT(base.set("eos_token_id", "[5,3,5]").parse().eos_ids, ElementsAre(3, 5));
  EXPECT_EQ(base.parse().bos_id, std::nullopt);
  for (const char* value : {"320", "-1", "1.5", "\"2\"", "[2,320]", "[[2]]"}) {
    expect_refused(base.set("eos_token_id", value), {"eos_token_id"});
    expect_error(ErrorKind::kUsage, {"dir/generation_config.json", "eos_token_id"},
                 [&] { base.parse(std::string(R"({"eos_token_id":)") + value + "}"); });
  }
  expect_error(ErrorKind::kUsage, {"dir/generation_config.json"}, [&] { base.parse("[]"); });
}

TEST(ModelConfig, EveryTruncationAndGarbageIsRefused) {
  const std::string text = test::read_file(kModels / "tiny-llama" / "config.json");
  const std::size_t end = text.rfind('}');
  for (std::size_t size = 0; size <= end; ++size) {
    expect_error(ErrorKind::kUsage, {"dir/config.json"},
                 [&] { parse_model_config(text.substr(0, size), {}, "dir"); });
  }
  for (const std::string& bad :
       {std::string("[]"), std::string("null"), std::string(64, '\0'), std::string(100000, '['),
        text + "x", "{\"a\":1," + text.substr(1, end)}) {
    expect_error(ErrorKind::kUsage, {"dir/config.json"},
                 [&] { parse_model_config(bad, {}, "dir"); });
  }
  expect_error(ErrorKind::kUsage, {"vocab_size", "twice"},
               [&] { parse_model_config("{\"vocab_size\":1," + text.substr(1), {}, "dir"); });
}

TEST(ModelConfig, FilesThatAreNotThere) {
  const test::TempDir dir;
  const auto load = [&] { load_model_config(dir.path()); };
  expect_error(ErrorKind::kUsage, {"config.json"}, load);
  std::filesystem::create_directory(dir.path() / "config.json");
  expect_error(ErrorKind::kUsage, {"config.json", "directory"}, load);
  std::filesystem::remove(dir.path() / "config.json");
  std::filesystem::create_symlink("config.json", dir.path() / "config.json");
  expect_error(ErrorKind::kUsage, {"config.json"}, load);
  std::filesystem::remove(dir.path() / "config.json");
  test::write_file(dir.path() / "config.json", "");
  expect_error(ErrorKind::kUsage, {"config.json", "empty"}, load);
  test::write_file(dir.path() / "config.json", std::string(5 << 20, ' '));
  expect_error(ErrorKind::kUsage, {"config.json", "larger"}, load);
  test::write_file(dir.path() / "config.json", ConfigText::llama().json());
  EXPECT_NO_THROW(load());
  test::write_file(dir.path() / "generation_config.json", "");
  expect_error(ErrorKind::kUsage, {"generation_config.json", "empty"}, load);
  std::filesystem::remove(dir.path() / "generation_config.json");
  std::filesystem::create_symlink("nowhere", dir.path() / "generation_config.json");
  expect_error(ErrorKind::kUsage, {"generation_config.json"}, load);
}

TEST(HexFloat, EqualsPrintfForNormalNumbers) {
  std::uint64_t state = 0x9E3779B97F4A7C15U;
  for (int i = 0; i < 10000; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const auto value = std::bit_cast<double>(state);
    if (!std::isnormal(value)) continue;
    char text[64];
    std::snprintf(text, sizeof text, "%a", value);
    EXPECT_EQ(hex_float(value), text);
  }
  EXPECT_EQ(hex_float(0.0), "0x0p+0");
  EXPECT_EQ(hex_float(-0.0), "-0x0p+0");
  EXPECT_EQ(hex_float(1.0), "0x1p+0");
  EXPECT_EQ(hex_float(-1.5), "-0x1.8p+0");
  EXPECT_EQ(hex_float(std::numeric_limits<double>::denorm_min()), "0x1p-1074");
  EXPECT_EQ(hex_float(0x1.8p-1073), "0x1.8p-1073");
  EXPECT_EQ(hex_float(static_cast<double>(std::numeric_limits<float>::denorm_min())), "0x1p-149");
  EXPECT_THROW(hex_float(std::numeric_limits<double>::infinity()), std::invalid_argument);
}

}  // namespace
}  // namespace bitwitness
