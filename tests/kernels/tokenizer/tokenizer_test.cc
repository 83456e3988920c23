// The tokenizer against the stock library: its ids, its text, and what it does in odd cases.
#include "kernels/tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "attest/base/error.h"

namespace bitwitness {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<std::uint32_t>;

const std::filesystem::path kData = BW_TEST_DATA_DIR;

Json read_json(const std::filesystem::path& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  Json json;
  file >> json;
  return json;
}

Tokenizer from_json(const Json& json) {
  const std::string text = json.dump();
  return Tokenizer::from_json(std::as_bytes(std::span(text)), "test");
}

std::filesystem::path tiny(const std::string& name) {
  return kData / "models" / name / "tokenizer.json";
}

// The file scripts/fetch-tokenizers.sh puts in place, or an empty path.
std::filesystem::path real(const std::string& name) {
  const char* chosen = std::getenv("BITWITNESS_TOKENIZERS");
  const std::filesystem::path dir = chosen != nullptr ? chosen : BW_TOKENIZERS_DEFAULT_DIR;
  const std::filesystem::path path = dir / (name + ".json");
  return std::filesystem::exists(path) ? path : std::filesystem::path();
}

std::string missing(const std::string& name) {
  return "the real " + name + " tokenizer is absent: run scripts/fetch-tokenizers.sh " +
         BW_TOKENIZERS_DEFAULT_DIR + " (or set BITWITNESS_TOKENIZERS)";
}

std::string stream(const Tokenizer& tokenizer, const Ids& ids, bool skip_special) {
  StreamDecoder decoder(tokenizer, skip_special);
  std::string out;
  for (const std::uint32_t id : ids) out += decoder.push(id);
  return out + decoder.flush();
}

// One case of extra.json or of the vector files.
void check_case(const Tokenizer& tokenizer, const Json& item) {
  const auto text = item.at("text").get<std::string>();
  const auto ids = item.at("ids").get<Ids>();
  const auto bare = item.contains("ids_nospecial") ? item["ids_nospecial"].get<Ids>() : ids;
  const auto decoded = item.value("decoded", text);
  EXPECT_EQ(tokenizer.encode(text, true), ids) << item["text"];
  EXPECT_EQ(tokenizer.encode(text, false), bare) << item["text"];
  EXPECT_EQ(tokenizer.decode(ids, false), decoded) << item["text"];
  EXPECT_EQ(stream(tokenizer, ids, false), decoded) << item["text"];
  if (item.contains("decoded_skipping")) {
    EXPECT_EQ(tokenizer.decode(ids, true), item["decoded_skipping"].get<std::string>());
    EXPECT_EQ(stream(tokenizer, ids, true), item["decoded_skipping"].get<std::string>());
  }
}

class RealTokenizer : public testing::TestWithParam<std::string> {};

TEST_P(RealTokenizer, GivesTheStockIdsAndText) {
  const std::filesystem::path path = real(GetParam());
  if (path.empty()) GTEST_SKIP() << missing(GetParam());
  const Tokenizer tokenizer = Tokenizer::load(path);
  const Json vectors = read_json(kData / "tokenizers" / (GetParam() + ".json"));
  ASSERT_EQ(vectors.size(), 104u);
  for (const Json& item : vectors) check_case(tokenizer, item);
}

TEST_P(RealTokenizer, GivesTheStockIdsAndTextOfTheExtraCases) {
  const std::filesystem::path path = real(GetParam());
  if (path.empty()) GTEST_SKIP() << missing(GetParam());
  const Tokenizer tokenizer = Tokenizer::load(path);
  const Json extra = read_json(kData / "tokenizers" / "extra.json");
  std::size_t cases = 0;
  for (const Json& set : extra.at("sets")) {
    if (set.at("tokenizer") != GetParam()) continue;
    for (const Json& item : set.at("cases")) {
      check_case(tokenizer, item);
      ++cases;
    }
  }
  EXPECT_EQ(cases, 60u);
}

INSTANTIATE_TEST_SUITE_P(Npm, RealTokenizer, testing::Values("llama3", "qwen3"),
                         [](const auto& tested) { return tested.param; });

TEST(TokenizerTest, TinyTokenizersAndTheirVariantsGiveTheStockIdsAndText) {
  const Json extra = read_json(kData / "tokenizers" / "extra.json");
  std::size_t sets = 0;
  for (const Json& set : extra.at("sets")) {
    const auto name = set.at("tokenizer").get<std::string>();
    if (!name.starts_with("tiny-")) continue;
    Json json = read_json(tiny(name));
    for (const auto& [member, value] : set.at("patch").items()) json[member] = value;
    SCOPED_TRACE(set.at("patch").dump());
    const Tokenizer tokenizer = from_json(json);
    for (const Json& item : set.at("cases")) check_case(tokenizer, item);
    ++sets;
  }
  EXPECT_GE(sets, 40u);
}

TEST(TokenizerTest, ReferencePromptsAndContinuations) {
  for (const std::string name : {"tiny-llama", "tiny-qwen3"}) {
    SCOPED_TRACE(name);
    const Tokenizer tokenizer = Tokenizer::load(tiny(name));
    const Json reference = read_json(kData / "models" / name / "reference.json");
    std::size_t texts = 0;
    ASSERT_EQ(reference.size(), 4u);
    for (const auto& [prompt, entry] : reference.items()) {
      EXPECT_EQ(tokenizer.encode(prompt, true), entry.at("input_ids").get<Ids>());
      for (const auto& [key, run] : entry.items()) {
        if (!run.is_object() || !run.contains("greedy_ids") || !run.contains("text")) continue;
        EXPECT_EQ(tokenizer.decode(run["greedy_ids"].get<Ids>(), true),
                  run["text"].get<std::string>())
            << key;
        ++texts;
      }
      if (entry.contains("greedy_ids") && entry.contains("text")) {
        EXPECT_EQ(tokenizer.decode(entry["greedy_ids"].get<Ids>(), true),
                  entry["text"].get<std::string>());
        ++texts;
      }
    }
    EXPECT_GE(texts, 4u);
  }
}

TEST(TokenizerTest, LooksUpTokens) {
  const Tokenizer tokenizer = Tokenizer::load(tiny("tiny-llama"));
  EXPECT_EQ(tokenizer.token_to_id("<|begin_of_text|>"), 0u);
  EXPECT_EQ(tokenizer.id_to_token(0), "<|begin_of_text|>");
  EXPECT_TRUE(tokenizer.is_special(0));
  EXPECT_FALSE(tokenizer.is_special(2));
  EXPECT_EQ(tokenizer.token_to_id("no such token"), std::nullopt);
  EXPECT_EQ(tokenizer.id_to_token(1u << 20), std::nullopt);
  EXPECT_EQ(tokenizer.vocab_size(), tokenizer.id_limit());
  for (std::uint32_t id = 0; id < tokenizer.id_limit(); ++id) {
    ASSERT_EQ(tokenizer.token_to_id(tokenizer.id_to_token(id).value()), id);
  }
  EXPECT_THROW(tokenizer.decode(Ids{tokenizer.id_limit()}, true), Error);
  EXPECT_THROW(tokenizer.token_bytes(UINT32_MAX), Error);
}

TEST(TokenizerTest, RefusesTextThatIsNotUtf8AndNamesTheOffset) {
  const Tokenizer tokenizer = Tokenizer::load(tiny("tiny-llama"));
  for (const std::string bad :
       {"\x80", "\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE2\x82"}) {
    try {
      tokenizer.encode("abc" + bad, true);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_NE(std::string(error.what()).find("byte 3"), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(tokenizer.encode("", false), Ids());
  EXPECT_EQ(tokenizer.encode("", true), Ids{0});
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(std::string("a\0b", 3), true), true),
            std::string("a\0b", 3));
}

// A streamed character must not appear before its last byte, nor be lost.
TEST(StreamDecoderTest, HoldsBackUnfinishedCharacters) {
  const Tokenizer tokenizer = Tokenizer::load(tiny("tiny-llama"));
  const Ids ids = tokenizer.encode("\xF0\x9F\x99\x82", false);
  ASSERT_EQ(ids.size(), 4u) << "the tiny vocabulary has no token for this character";
  StreamDecoder decoder(tokenizer, true);
  EXPECT_EQ(decoder.push(ids[0]), "");
  EXPECT_EQ(decoder.push(ids[1]), "");
  EXPECT_EQ(decoder.push(ids[2]), "");
  EXPECT_EQ(decoder.push(ids[3]), "\xF0\x9F\x99\x82");
  EXPECT_EQ(decoder.flush(), "");
  decoder.push(ids[0]);
  decoder.push(ids[1]);
  EXPECT_EQ(decoder.push(0), "") << "a special token that is left out is no text";
  EXPECT_EQ(decoder.push(tokenizer.token_to_id("!").value()), "\xEF\xBF\xBD!");
  decoder.push(ids[0]);
  EXPECT_EQ(decoder.flush(), "\xEF\xBF\xBD");
  EXPECT_EQ(decoder.push(tokenizer.token_to_id("!").value()), "!");
}

TEST(StreamDecoderTest, PiecesOfAnyIdsJoinToTheirText) {
  const Tokenizer tokenizer = Tokenizer::load(tiny("tiny-qwen3"));
  std::uint64_t state = 1;
  for (int round = 0; round < 500; ++round) {
    Ids ids;
    for (int i = 0; i < 12; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      // mostly single bytes, so that ill-formed sequences are frequent
      const auto draw = static_cast<std::uint32_t>(state >> 33);
      ids.push_back(draw % (draw & 0x40000000u ? 258 : tokenizer.id_limit()));
    }
    for (const bool skip : {false, true}) {
      EXPECT_EQ(stream(tokenizer, ids, skip), tokenizer.decode(ids, skip));
    }
  }
}

// Texts of 1 MB, most of them one word: quadratic work would take minutes.
TEST(TokenizerTest, LongWordsTakeNearLinearTime) {
  std::vector<std::filesystem::path> paths = {tiny("tiny-llama")};
  for (const std::string name : {"llama3", "qwen3"}) {
    if (const auto path = real(name); !path.empty()) paths.push_back(path);
  }
  for (const auto& path : paths) {
    const Tokenizer tokenizer = Tokenizer::load(path);
    for (const std::string piece : {"a", " ", "\n", "ab", "\xE4\xBD\xA0", "!?", "7", " \r\n", "a ",
                                    "e\xCC\x8B", "<|end_of_text|", "'"}) {
      std::string text;
      while (text.size() < 1'000'000) text += piece;
      const auto start = std::chrono::steady_clock::now();
      const Ids ids = tokenizer.encode(text, false);
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60)) << piece;
      EXPECT_EQ(tokenizer.decode(ids, false), text);
    }
  }
}

}  // namespace
}  // namespace bitwitness
