// What a tokenizer.json says, after every check that needs no other part: plain data that loader.cc
// fills and tokenizer.cc builds the working parts from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace bitwitness::tok {

struct PatternSpec {
  bool is_regex = false;
  std::string text;
};

struct NormalizerStep {
  enum class Kind { kNfc, kNfd, kNfkc, kNfkd, kPrepend, kReplace };
  Kind kind = Kind::kNfc;
  PatternSpec pattern;  // kReplace
  std::string text;     // kPrepend, kReplace: what is put in
};

enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct PreTokenizerStep {
  enum class Kind { kSplit, kByteLevel };
  Kind kind = Kind::kSplit;
  PatternSpec pattern;  // kSplit
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;
  bool add_prefix_space = false;  // kByteLevel
  bool use_regex = false;         // kByteLevel
};

struct AddedToken {
  std::uint32_t id = 0;
  std::string content;
  bool single_word = false;
  bool lstrip = false;
  bool rstrip = false;
  bool normalized = false;
  bool special = false;
};

// One TemplateProcessing step: ids put before and after the text (several copies of it if it says
// so).
struct TemplateItem {
  bool is_text = false;
  std::vector<std::uint32_t> ids;
};
using Template = std::vector<TemplateItem>;

struct TokenizerSpec {
  std::vector<std::pair<std::string, std::uint32_t>> vocab;
  std::vector<std::pair<std::string, std::string>> merges;  // by rank
  bool ignore_merges = false;
  std::string unk_token;  // empty: none
  bool byte_fallback = false;
  std::vector<AddedToken> added_tokens;
  std::vector<NormalizerStep> normalizer;
  std::vector<PreTokenizerStep> pre_tokenizer;  // the last one is ByteLevel
  std::vector<Template> templates;              // none or one
};

// Parses and checks a tokenizer.json. `origin` begins every error message.
TokenizerSpec parse_tokenizer_json(std::span<const std::byte> json, const std::string& origin);

}  // namespace bitwitness::tok
