// Files a tokenizer must refuse: each with an error that names the cause, never a crash.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "attest/base/error.h"
#include "kernels/tokenizer/tokenizer.h"

namespace bitwitness {
namespace {

using Json = nlohmann::json;

const std::filesystem::path kTiny =
    std::filesystem::path(BW_TEST_DATA_DIR) / "models/tiny-llama/tokenizer.json";

std::string tiny_text() {
  std::ifstream file(kTiny, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

Tokenizer load_text(std::string_view text) {
  return Tokenizer::from_json(std::as_bytes(std::span(text)), "origin.json");
}

// The message of the refusal; fails the test if `text` is accepted.
std::string refusal(std::string_view text) {
  try {
    load_text(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_EQ(std::string_view(error.what()).substr(0, 11), "origin.json") << error.what();
    EXPECT_LT(std::string_view(error.what()).size(), 500u) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << text.substr(0, 200);
  return "";
}

struct Change {
  std::string name;  // what the message must contain
  std::function<void(Json&)> apply;
};

TEST(TokenizerHostileTest, RefusesByNameWhatItDoesNotSupport) {
  const Json base = Json::parse(tiny_text());
  ASSERT_NO_THROW(load_text(base.dump()));
  const auto set = [](std::string pointer, Json value) {
    return [=](Json& json) { json[Json::json_pointer(pointer)] = value; };
  };
  const Json added = base["added_tokens"][0];
  const auto with = [](Json json, const char* member, Json value) {
    json[member] = std::move(value);
    return json;
  };
  const Json byte_level = base["pre_tokenizer"]["pretokenizers"][1];
  const Change changes[] = {
      {"chat", set("/chat", 1)},
      {"version", set("/version", "2.0")},
      {"truncation", set("/truncation", Json{{"max_length", 5}})},
      {"padding", set("/padding", Json::object())},
      {"WordPiece", set("/model/type", "WordPiece")},
      {"Unigram", set("/model/type", "Unigram")},
      {"dropout", set("/model/dropout", 0.1)},
      {"continuing_subword_prefix", set("/model/continuing_subword_prefix", "##")},
      {"end_of_word_suffix", set("/model/end_of_word_suffix", "</w>")},
      {"surprise", set("/model/surprise", true)},
      {"byte_fallback", set("/model/byte_fallback", "yes")},
      {"ignore_merges", set("/model/ignore_merges", 1)},
      {"vocab", [](Json& j) { j["model"].erase("vocab"); }},
      {"merges", [](Json& j) { j["model"].erase("merges"); }},
      {"model", [](Json& j) { j.erase("model"); }},
      {"model.vocab", set("/model/vocab", Json::object())},
      {"model.vocab", set("/model/vocab", Json::array())},
      {"out of range", set("/model/vocab/a", 1u << 24)},
      {"out of range", set("/model/vocab/a", UINT64_MAX)},
      {"token id", set("/model/vocab/a", -1)},
      {"token id", set("/model/vocab/a", 1.0)},
      {"token id", set("/model/vocab/a", "1")},
      {"token id", set("/model/vocab/a", nullptr)},
      {"same id", set("/model/vocab/a", 2)},
      {"nonsuch", set("/model/merges/0", Json{"a", "nonsuch"})},
      {"nonsuch", set("/model/merges/0", Json{"nonsuch", "a"})},
      {"not in model.vocab", set("/model/merges/0", Json{"<|end_of_text|>", "a"})},
      {"entry 1", set("/model/merges/1", Json{"a"})},
      {"entry 1", set("/model/merges/1", Json{"a", "b", "c"})},
      {"entry 1", set("/model/merges/1", Json{"a", 1})},
      {"entry 1", set("/model/merges/1", 7)},
      {"entry 1", set("/model/merges/1", "a b")},  // both shapes in one file
      {"entry 0", set("/model/merges", Json{"a b c"})},
      {"entry 0", set("/model/merges", Json{"ab"})},
      {"merges", set("/model/merges", "a b")},
      {"added_tokens", set("/added_tokens", 5)},
      {"occurs twice", set("/added_tokens/1", added)},
      {"says id 7", set("/added_tokens/0/id", 7)},
      {"says id 5000", set("/added_tokens/2", with(with(added, "content", "new"), "id", 5000))},
      {"empty", set("/added_tokens/0/content", "")},
      {"longer", set("/added_tokens/0/content", std::string(5000, 'x'))},
      {"lstrip", set("/added_tokens/0/lstrip", 0)},
      {"lstrip", [](Json& j) { j["added_tokens"][0].erase("lstrip"); }},
      {"extra", set("/added_tokens/0/extra", 0)},
      {"Precompiled", set("/normalizer", Json{{"type", "Precompiled"}})},
      {"Lowercase", set("/normalizer", Json{{"type", "Lowercase"}})},
      {"BertNormalizer", set("/normalizer", Json{{"type", "BertNormalizer"}})},
      {"type", set("/normalizer", Json::object())},
      {"normalizer", set("/normalizer", "NFC")},
      {"prepend", set("/normalizer", Json{{"type", "Prepend"}})},
      {"Metaspace", set("/pre_tokenizer", Json{{"type", "Metaspace"}})},
      {"Whitespace", set("/pre_tokenizer", Json{{"type", "Whitespace"}})},
      {"ByteLevel", set("/pre_tokenizer", nullptr)},
      {"after ByteLevel", set("/pre_tokenizer/pretokenizers/2", byte_level)},
      {"Sideways", set("/pre_tokenizer/pretokenizers/0/behavior", "Sideways")},
      {"invert", set("/pre_tokenizer/pretokenizers/0/invert", nullptr)},
      {"pattern", set("/pre_tokenizer/pretokenizers/0/pattern", Json::object())},
      {"empty pattern", set("/pre_tokenizer/pretokenizers/0/pattern", Json{{"String", ""}})},
      {"regular expression", set("/pre_tokenizer/pretokenizers/0/pattern/Regex", "(")},
      {"add_prefix_space",
       [](Json& j) { j["pre_tokenizer"]["pretokenizers"][1].erase("add_prefix_space"); }},
      {"BertProcessing", set("/post_processor", Json{{"type", "BertProcessing"}})},
      {"sequence A", set("/post_processor/single/1/Sequence/id", "B")},
      {"sequence A", set("/post_processor/single", Json::array())},
      {"99999", set("/post_processor/special_tokens/<|begin_of_text|>/ids", Json{99999})},
      {"missing", set("/post_processor/single/0/SpecialToken/id", "nonsuch")},
      {"Metaspace", set("/decoder", Json{{"type", "Metaspace"}})},
      {"ByteFallback", set("/decoder", Json{{"type", "ByteFallback"}})},
      {"Fuse", set("/decoder", Json{{"type", "Fuse"}})},
      {"decoder", set("/decoder", nullptr)},
  };
  for (const Change& change : changes) {
    Json json = base;
    change.apply(json);
    const std::string message = refusal(json.dump());
    EXPECT_NE(message.find(change.name), std::string::npos)
        << "wanted " << change.name << " in: " << message;
  }
  refusal("null");
  refusal("[]");
  refusal("3");
}

TEST(TokenizerHostileTest, MissingBytesAreNamed) {
  Json json = Json::parse(tiny_text());
  json["model"]["merges"] = Json::array();
  json["model"]["vocab"] = {{"a", 0}, {"b", 1}};
  json["added_tokens"] = Json::array();
  json["post_processor"] = nullptr;
  const Tokenizer tokenizer = load_text(json.dump());
  EXPECT_EQ(tokenizer.encode("abba", true), (std::vector<std::uint32_t>{0, 1, 1, 0}));
  EXPECT_THROW(tokenizer.encode("abc", true), Error);
  json["model"]["unk_token"] = "a";
  EXPECT_NE(refusal(json.dump()).find("unk_token"), std::string::npos);
  json["model"]["unk_token"] = nullptr;
  json["model"]["byte_fallback"] = true;
  EXPECT_NE(refusal(json.dump()).find("byte_fallback"), std::string::npos);
}

TEST(TokenizerHostileTest, BothShapesOfMergesMeanTheSame) {
  Json json = Json::parse(tiny_text());
  const Tokenizer pairs = load_text(json.dump());
  for (Json& merge : json["model"]["merges"]) {
    merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  }
  const Tokenizer strings = load_text(json.dump());
  const std::string text = "What light through yonder window breaks?";
  EXPECT_EQ(pairs.encode(text, true), strings.encode(text, true));
}

TEST(TokenizerHostileTest, RefusesDuplicateKeysAndDeepNesting) {
  EXPECT_NE(refusal(R"({"model": {"vocab": {"a": 1, "a": 2}}})").find("twice"), std::string::npos);
  EXPECT_NE(refusal(R"({"version": "1.0", "version": "1.0"})").find("twice"), std::string::npos);
  for (const char open : {'[', '{'}) {
    std::string deep;
    for (int i = 0; i < 1'000'000; ++i) deep += open == '[' ? "[" : "{\"a\":";
    EXPECT_NE(refusal(deep).find("deeper"), std::string::npos);
  }
  std::string many = "[";
  for (int i = 0; i < 13 << 20; ++i) many += "0,";
  EXPECT_NE(refusal(many).find("JSON values"), std::string::npos);
}

TEST(TokenizerHostileTest, RefusesEveryTruncation) {
  const std::string text = tiny_text();
  const std::size_t end = text.find_last_of('}');
  for (std::size_t size = 0; size < 300; ++size) refusal(text.substr(0, size));
  for (std::size_t size = 300; size <= end; size += 4999) refusal(text.substr(0, size));
  refusal(text.substr(0, end));
  refusal(text + "x");
  refusal(text.substr(0, 20) + std::string(1, '\0') + text.substr(20));
  refusal("\xFF\xFE{}");
  refusal("{\"a\xC3\": 1}");
  refusal("");
}

// Damaged bytes: whatever happens is an Error, or a tokenizer that works.
TEST(TokenizerHostileTest, SurvivesDamagedBytes) {
  const std::string text = tiny_text();
  std::uint64_t state = 7;
  const auto draw = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::size_t>(state >> 33);
  };
  constexpr std::string_view kBytes = "{}[]\",:0-\\ux9ae \xFF";
  int accepted = 0;
  for (int round = 0; round < 150; ++round) {
    std::string damaged = text;
    // the head of the file holds everything but the vocabulary
    for (int i = 0; i < 2; ++i) {
      const std::size_t at = draw() % (round % 2 == 0 ? 4000 : damaged.size());
      damaged[at] = kBytes[draw() % kBytes.size()];
    }
    try {
      const Tokenizer tokenizer = load_text(damaged);
      tokenizer.decode(tokenizer.encode("Thou art 42 times\n more caf\xC3\xA9", true), false);
      ++accepted;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    }
  }
  EXPECT_LT(accepted, 150);
}

TEST(TokenizerHostileTest, RefusesFilesThatAreNone) {
  const auto kind_of = [](const std::filesystem::path& path) {
    try {
      Tokenizer::load(path);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(path.string()), std::string::npos);
      return error.kind();
    }
    return ErrorKind::kMalformed;
  };
  EXPECT_EQ(kind_of(kTiny.parent_path() / "absent.json"), ErrorKind::kUsage);
  EXPECT_EQ(kind_of(kTiny.parent_path()), ErrorKind::kUsage);
  EXPECT_EQ(kind_of("/dev/zero"), ErrorKind::kUsage) << "endless";
}

TEST(TokenizerHostileTest, HostilePatternsGiveAnErrorNotAHang) {
  Json json = Json::parse(tiny_text());
  json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(\\p{L}+)+$";
  const Tokenizer tokenizer = load_text(json.dump());
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(tokenizer.encode(std::string(3000, 'a') + "!", true), Error);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

// White space around tokens that swallow it, many times over: still linear.
TEST(TokenizerHostileTest, StrippingTokensStayLinear) {
  Json json = Json::parse(tiny_text());
  const auto size = json["model"]["vocab"].size();
  json["added_tokens"].push_back({{"id", size},
                                  {"content", " \t"},
                                  {"single_word", false},
                                  {"lstrip", true},
                                  {"rstrip", true},
                                  {"normalized", false},
                                  {"special", false}});
  const Tokenizer tokenizer = load_text(json.dump());
  std::string text;
  while (text.size() < 1'000'000) text += " \t";
  const auto start = std::chrono::steady_clock::now();
  tokenizer.encode(text, false);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace
}  // namespace bitwitness
