#include "kernels/model/model.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/rope_tables.h"
#include "tests/kernels/model/expect_error.h"
#include "tests/kernels/model/safetensors_writer.h"

namespace bitwitness {
namespace {

using test::expect_error;
using test::RawTensor;

const std::filesystem::path kModels = std::filesystem::path(BW_TEST_DATA_DIR) / "models";

std::uint16_t element16(const std::byte* data, std::int64_t index) {
  return static_cast<std::uint16_t>(std::to_integer<unsigned>(data[2 * index]) |
                                    std::to_integer<unsigned>(data[2 * index + 1]) << 8);
}

// The first four and the last two bit patterns of a bf16 tensor, as read by another program.
void expect_elements(const std::byte* data, std::int64_t size, const std::vector<unsigned>& want) {
  ASSERT_EQ(want.size(), 6U);
  for (std::int64_t i = 0; i < 4; ++i)
    EXPECT_EQ(element16(data, i), want[static_cast<std::size_t>(i)]);
  EXPECT_EQ(element16(data, size - 2), want[4]);
  EXPECT_EQ(element16(data, size - 1), want[5]);
}
void expect_elements(const Matrix& matrix, const std::vector<unsigned>& want) {
  EXPECT_EQ(matrix.dtype, Dtype::kBf16);
  expect_elements(matrix.data, matrix.rows * matrix.cols, want);
}
void expect_elements(const Vector& vector, const std::vector<unsigned>& want) {
  EXPECT_EQ(vector.dtype, Dtype::kBf16);
  expect_elements(vector.data, vector.size, want);
}

std::vector<RawTensor> raw_tensors(const Model& model) {
  std::vector<RawTensor> result;
  for (const TensorView& view : model.tensors()) {
    const char* dtype = view.dtype == Dtype::kBf16   ? "BF16"
                        : view.dtype == Dtype::kFp16 ? "F16"
                                                     : "F32";
    result.push_back({view.name, dtype, view.shape,
                      std::string(reinterpret_cast<const char*>(view.data), view.bytes)});
  }
  return result;
}

void expect_same_description(const ModelDescription& a, const ModelDescription& b) {
  EXPECT_EQ(a.arithmetic, b.arithmetic);
  EXPECT_EQ(a.family, b.family);
  EXPECT_EQ(a.config, b.config);
  EXPECT_TRUE(std::ranges::equal(a.tokenizer_json, b.tokenizer_json));
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (std::size_t i = 0; i < a.tensors.size(); ++i) {
    EXPECT_EQ(a.tensors[i].name, b.tensors[i].name);
    EXPECT_EQ(a.tensors[i].dtype, b.tensors[i].dtype);
    EXPECT_EQ(a.tensors[i].shape, b.tensors[i].shape);
    EXPECT_TRUE(std::ranges::equal(a.tensors[i].bytes, b.tensors[i].bytes)) << a.tensors[i].name;
  }
}

RawTensor& named(std::vector<RawTensor>* tensors, std::string_view name) {
  const auto at = std::find_if(tensors->begin(), tensors->end(),
                               [&](const RawTensor& tensor) { return tensor.name == name; });
  if (at == tensors->end()) throw std::runtime_error("no tensor " + std::string(name));
  return *at;
}

TEST(Model, TinyLlama) {
  const Model model = Model::load(kModels / "tiny-llama");
  const ModelWeights& weights = model.weights();
  ASSERT_EQ(weights.layers.size(), 6U);
  EXPECT_EQ(weights.embedding.rows, 2048);
  EXPECT_EQ(weights.embedding.cols, 192);
  EXPECT_NE(weights.head.data, weights.embedding.data);
  expect_elements(weights.embedding, {0xBCAC, 0x3C9D, 0x3D79, 0x3CF8, 0x3C48, 0xBC94});
  expect_elements(weights.head, {0xBCA7, 0x3DB1, 0x3BE4, 0xBE0E, 0x3CE3, 0xBD52});
  expect_elements(weights.layers[5].down, {0x3C7F, 0xBC83, 0xBD3E, 0x3D36, 0xBC22, 0x3C08});
  expect_elements(weights.layers[3].k, {0xBC8D, 0xBC1F, 0xBC6E, 0x3D5B, 0xBD8C, 0xBAD7});
  expect_elements(weights.final_norm, {0x401F, 0x4014, 0x401D, 0x400B, 0x4023, 0x401C});
  for (const LayerWeights& layer : weights.layers) {
    EXPECT_EQ(layer.q.rows, 192);
    EXPECT_EQ(layer.k.rows, 64);
    EXPECT_EQ(layer.v.rows, 64);
    EXPECT_EQ(layer.o.cols, 192);
    EXPECT_EQ(layer.gate.rows, 512);
    EXPECT_EQ(layer.down.cols, 512);
    EXPECT_EQ(layer.input_norm.size, 192);
    EXPECT_FALSE(layer.q_norm.has_value());
    EXPECT_FALSE(layer.k_norm.has_value());
  }
  EXPECT_EQ(model.tokenizer_json().size(), 122702U);
  EXPECT_EQ(model.tensors().size(), 57U);
  model.prefetch_layer(5);
}

// Whether the page of this address is in the process's memory; nothing where the system does not
// tell.
std::optional<bool> is_resident(const std::byte* address) {
  const auto page = reinterpret_cast<std::uintptr_t>(address) /
                    static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  std::ifstream map("/proc/self/pagemap", std::ios::binary);
  map.seekg(static_cast<std::streamoff>(8 * page));
  std::array<char, 8> entry{};
  if (!map.read(entry.data(), 8)) return std::nullopt;
  return (static_cast<unsigned char>(entry[7]) & 0x80u) != 0;
}

TEST(Model, ReleasedLayersLeaveMemoryAndReadTheSame) {
  const Model model = Model::load(kModels / "tiny-llama");
  const std::vector<RawTensor> before = raw_tensors(model);
  const Matrix& down = model.weights().layers[2].down;
  const std::byte* const middle = down.data + down.rows * down.cols;
  const std::optional<bool> touched = is_resident(middle);
  for (std::int64_t layer = 0; layer < 6; ++layer) model.release_layer(layer);
  const std::optional<bool> released = is_resident(middle);
  const std::vector<RawTensor> after = raw_tensors(model);
  if (touched) {
    EXPECT_TRUE(*touched);
    EXPECT_FALSE(*released);
    EXPECT_EQ(is_resident(middle), true);
  }
  ASSERT_EQ(after.size(), before.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(after[i].data == before[i].data) << before[i].name;
  }
}

TEST(Model, TinyQwen3) {
  const Model model = Model::load(kModels / "tiny-qwen3");
  const ModelWeights& weights = model.weights();
  ASSERT_EQ(weights.layers.size(), 4U);
  EXPECT_EQ(weights.head.data, weights.embedding.data);
  EXPECT_EQ(weights.head.rows, 2048);
  expect_elements(weights.embedding, {0xBE00, 0xBD03, 0x3D89, 0x3D20, 0xBDBB, 0x3DAF});
  ASSERT_TRUE(weights.layers[0].q_norm && weights.layers[3].k_norm);
  EXPECT_EQ(weights.layers[0].q_norm->size, 64);
  expect_elements(*weights.layers[0].q_norm, {0x3FA1, 0x3FB4, 0x3FAA, 0x3FB5, 0x3F9C, 0x3FA0});
  expect_elements(*weights.layers[3].k_norm, {0x3FA3, 0x3F8D, 0x3F8D, 0x3F95, 0x3FA9, 0x3F9F});
  EXPECT_EQ(weights.layers[2].o.rows, 128);
  EXPECT_EQ(weights.layers[2].o.cols, 256);
  expect_elements(weights.layers[2].o, {0x3C9C, 0xBD1A, 0xBD21, 0x3CC9, 0xBD11, 0xBD48});
  expect_elements(weights.final_norm, {0x4000, 0x4006, 0x4009, 0x4009, 0x4006, 0x4008});
}

TEST(Model, ZooLlama31HasNoTokenizer) {
  const Model model = Model::load(kModels / "zoo" / "llama31-ropescale");
  expect_elements(model.weights().layers[2].gate, {0xBE0C, 0xBBC3, 0xBD8F, 0x3C45, 0x3DAA, 0xBE9D});
  expect_elements(model.weights().head, {0xBDF5, 0xBD6F, 0xBDCD, 0x3B96, 0xBE6F, 0x3DA3});
  EXPECT_TRUE(model.tokenizer_json().empty());
  EXPECT_TRUE(model.describe().tokenizer_json.empty());
}

TEST(Model, UnsupportedZooModelsAreRefusedByName) {
  const auto refused = [](const char* name, std::string_view part) {
    expect_error(ErrorKind::kUsage, {name, part}, [&] { Model::load(kModels / "zoo" / name); });
  };
  refused("mistral-sliding", "sliding_window = 16");
  refused("qwen2-bias", "\"qwen2\"");
  refused("mixtral", "\"mixtral\"");
}

TEST(Model, DescriptionIsSortedAndSurvivesAMove) {
  Model model = Model::load(kModels / "tiny-qwen3");
  const ModelDescription before = model.describe();
  EXPECT_EQ(before.arithmetic, "fma32");
  EXPECT_EQ(before.family, "qwen3");
  EXPECT_EQ(before.config, model.config().canonical());
  EXPECT_EQ(before.tables, rope_table_bytes(model.config()));
  EXPECT_EQ(before.tokenizer_json.size(), 122702U);
  EXPECT_EQ(before.tensors.size(), 46U);
  EXPECT_TRUE(std::is_sorted(before.tensors.begin(), before.tensors.end(),
                             [](const auto& a, const auto& b) { return a.name < b.name; }));
  const Model moved = std::move(model);
  expect_same_description(before, moved.describe());
  EXPECT_EQ(moved.weights().embedding.data, before.tensors[0].bytes.data());
}

// A writable copy of tiny-qwen3 that a test can bend.
class BentModel : public testing::Test {
 protected:
  BentModel()
      : original_(Model::load(kModels / "tiny-qwen3")),
        config_(test::read_file(kModels / "tiny-qwen3" / "config.json")),
        tensors_(raw_tensors(original_)) {
    std::filesystem::copy_file(kModels / "tiny-qwen3" / "tokenizer.json",
                               dir_.path() / "tokenizer.json");
  }
  void write() { test::write_model(dir_.path(), config_, tensors_); }
  void write_sharded(std::size_t shards) {
    test::write_sharded_model(dir_.path(), config_, tensors_, shards);
  }
  Model load() const { return Model::load(dir_.path()); }
  void expect_refused(std::initializer_list<std::string_view> parts) const {
    expect_error(ErrorKind::kUsage, parts, [&] { load(); });
  }
  std::filesystem::path index() const { return dir_.path() / "model.safetensors.index.json"; }

  test::TempDir dir_;
  Model original_;
  std::string config_;
  std::vector<RawTensor> tensors_;
};

TEST_F(BentModel, ShardingDoesNotChangeTheDescription) {
  for (const std::size_t shards : {1U, 3U, 46U}) {
    const test::TempDir dir;
    std::filesystem::copy_file(dir_.path() / "tokenizer.json", dir.path() / "tokenizer.json");
    test::write_sharded_model(dir.path(), config_, tensors_, shards);
    expect_same_description(Model::load(dir.path()).describe(), original_.describe());
  }
}

TEST_F(BentModel, OrderAndAlignmentInTheFileDoNotChangeTheDescription) {
  std::reverse(tensors_.begin(), tensors_.end());
  test::write_file(dir_.path() / "config.json", config_);
  for (std::size_t odd = 0; odd < 2; ++odd) {
    auto tensors = tensors_;
    // An ignored buffer of an odd number of bytes in front puts everything behind it off alignment.
    tensors.insert(tensors.begin(), RawTensor{"model.layers.0.self_attn.rotary_emb.inv_freq",
                                              "U8",
                                              {2 + odd},
                                              std::string(2 + odd, 'x')});
    std::filesystem::remove(dir_.path() / "model.safetensors");
    test::write_file(dir_.path() / "model.safetensors", test::safetensors_bytes(tensors));
    expect_same_description(load().describe(), original_.describe());
  }
}

TEST_F(BentModel, SymbolicLinksAreFollowed) {
  // Model caches hold links to blobs kept elsewhere.
  const test::TempDir blobs;
  test::write_model(blobs.path(), config_, tensors_);
  for (const char* name : {"config.json", "model.safetensors"}) {
    std::filesystem::create_symlink(blobs.path() / name, dir_.path() / name);
  }
  expect_same_description(load().describe(), original_.describe());
}

TEST_F(BentModel, ATensorEachMissingIsNamed) {
  const auto all = tensors_;
  for (std::size_t i = 0; i < all.size(); i += 5) {
    tensors_ = all;
    tensors_.erase(tensors_.begin() + static_cast<std::ptrdiff_t>(i));
    write();
    expect_refused({"\"" + all[i].name + "\"", "missing"});
  }
}

TEST_F(BentModel, ExtraTensorsAreNamed) {
  const auto all = tensors_;
  for (const char* name :
       {"model.layers.4.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias",
        "model.embed_tokens.bias", "model.layers.x.self_attn.rotary_emb.inv_freq", "inv_freq"}) {
    tensors_ = all;
    tensors_.push_back({name, "BF16", {1}, "xy"});
    write();
    expect_refused({std::string("\"") + name + "\"", "extra", "model.safetensors"});
  }
}

TEST_F(BentModel, MisShapedTensorsAreNamed) {
  const auto all = tensors_;
  const std::string q = "model.layers.1.self_attn.q_proj.weight";  // [256, 128]
  for (const std::vector<std::uint64_t>& shape :
       {std::vector<std::uint64_t>{128, 256}, {32768}, {256, 128, 1}, {1, 32768}}) {
    tensors_ = all;
    named(&tensors_, q).shape = shape;
    write();
    expect_refused({"\"" + q + "\"", "[256, 128]", "shape"});
  }
  tensors_ = all;
  RawTensor& norm = named(&tensors_, "model.norm.weight");
  norm.shape = {127};
  norm.data.resize(254);
  write();
  expect_refused({"\"model.norm.weight\"", "[127]", "[128]"});
}

TEST_F(BentModel, TypesOfWeights) {
  const auto all = tensors_;
  RawTensor& norm = named(&tensors_, "model.norm.weight");
  norm.dtype = "F32";
  norm.data = std::string(512, 'x');
  named(&tensors_, "model.layers.0.self_attn.k_norm.weight").dtype = "F16";
  write();
  const Model mixed = load();
  EXPECT_EQ(mixed.weights().final_norm.dtype, Dtype::kFp32);
  EXPECT_EQ(mixed.weights().layers[0].k_norm->dtype, Dtype::kFp16);
  tensors_ = all;
  named(&tensors_, "model.layers.2.mlp.up_proj.weight").dtype = "I16";
  std::filesystem::remove(dir_.path() / "model.safetensors");
  write();
  expect_refused({"\"model.layers.2.mlp.up_proj.weight\"", "I16"});
}

TEST_F(BentModel, AHeadBesideTiedEmbeddings) {
  RawTensor head = named(&tensors_, "model.embed_tokens.weight");
  head.name = "lm_head.weight";
  tensors_.push_back(head);
  write();
  expect_same_description(load().describe(), original_.describe());
  tensors_.back().data[4711] = static_cast<char>(tensors_.back().data[4711] ^ 1);
  std::filesystem::remove(dir_.path() / "model.safetensors");
  write();
  expect_refused({"lm_head.weight", "tie_word_embeddings"});
}

TEST_F(BentModel, AnUntiedModelNeedsItsHead) {
  const std::string tied = "\"tie_word_embeddings\": true";
  config_.replace(config_.find(tied), tied.size(), "\"tie_word_embeddings\": false");
  write();
  expect_refused({"lm_head.weight", "missing"});
}

TEST_F(BentModel, IndexNamesStayInTheDirectory) {
  for (const std::string name : {"../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".",
                                 "", "a\\\\b", "C:x", "a b", ".hidden", "a\\u0000b", "a\\nb"}) {
    test::write_file(dir_.path() / "config.json", config_);
    test::write_file(index(), R"({"weight_map":{"model.norm.weight":")" + name + "\"}}");
    expect_refused({"index.json", "\"model.norm.weight\"", "plain name"});
  }
}

TEST_F(BentModel, IndexAndShardsMustAgree) {
  write_sharded(3);
  const std::string text = test::read_file(index());
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    test::write_file(index(), changed);
  };
  const std::string first = "\"" + tensors_[0].name + "\":\"model-1-of-3.safetensors\"";
  replaced(first, "\"" + tensors_[0].name + "\":\"model-2-of-3.safetensors\"");
  expect_refused({tensors_[0].name});
  replaced(first, "\"" + tensors_[0].name + "\":7");
  expect_refused({tensors_[0].name, "7"});
  replaced(first + ",", "");
  expect_refused({"model-1-of-3.safetensors", tensors_[0].name, "does not map"});
  replaced(first, "\"ghost.weight\":\"model-1-of-3.safetensors\"," + first);
  expect_refused({"model-1-of-3.safetensors", "\"ghost.weight\"", "missing"});
  replaced(first, first + "," + first);
  expect_refused({tensors_[0].name, "twice"});
  replaced(first, "\"ghost.weight\":\"ghost.safetensors\"," + first);
  expect_refused({"ghost.safetensors", "shard is missing", "ghost.weight"});
  replaced("weight_map", "weight_mop");
  expect_refused({"weight_map"});
  for (const char* bad :
       {"", "[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{}})", "{\"weight_map\":{"}) {
    test::write_file(index(), bad);
    expect_refused({"index.json"});
  }
  test::write_file(index(), std::string(100000, '['));
  expect_refused({"index.json", "nested deeper"});
  test::write_file(index(), text);
  EXPECT_NO_THROW(load());
  std::filesystem::remove(dir_.path() / "model-2-of-3.safetensors");
  expect_refused({"model-2-of-3.safetensors", "shard is missing"});
}

TEST_F(BentModel, TheSameTensorInTwoShardsIsRefused) {
  write_sharded(2);
  std::vector<RawTensor> second;
  for (std::size_t i = 1; i < tensors_.size(); i += 2) second.push_back(tensors_[i]);
  second.push_back(tensors_[0]);
  test::write_file(dir_.path() / "model-2-of-2.safetensors", test::safetensors_bytes(second));
  expect_refused({"model-2-of-2.safetensors", tensors_[0].name});
}

TEST_F(BentModel, DirectoriesThatAreNoModels) {
  expect_error(ErrorKind::kUsage, {"absent", "model directory"},
               [&] { Model::load(dir_.path() / "absent"); });
  expect_error(ErrorKind::kUsage, {"tokenizer.json", "not a directory"},
               [&] { Model::load(dir_.path() / "tokenizer.json"); });
  std::filesystem::create_symlink("loop", dir_.path() / "loop");
  expect_error(ErrorKind::kUsage, {"loop"}, [&] { Model::load(dir_.path() / "loop"); });
  expect_refused({"config.json"});
  test::write_file(dir_.path() / "config.json", config_);
  expect_refused({"neither", "model.safetensors"});
  std::filesystem::create_directory(dir_.path() / "model.safetensors");
  expect_refused({"model.safetensors", "directory"});
  std::filesystem::remove(dir_.path() / "model.safetensors");
  std::filesystem::create_symlink("nowhere", dir_.path() / "model.safetensors");
  expect_refused({"model.safetensors", "No such file"});
  std::filesystem::remove(dir_.path() / "model.safetensors");
  test::write_file(dir_.path() / "model.safetensors", "");
  expect_refused({"model.safetensors", "0 bytes"});
  test::write_file(index(), "{}");
  expect_refused({"both"});
}

}  // namespace
}  // namespace bitwitness
