#include "kernels/tokenizer/pretokenizer.h"

#include <algorithm>

namespace bitwitness::tok {
namespace {

// What ByteLevel splits by when it says use_regex: the expression of GPT-2.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

struct Part {
  std::size_t begin;
  std::size_t end;
  bool matched;
};

// Cuts `size` bytes at the matches: matched and unmatched parts alternate over the whole text.
std::vector<Part> parts_of(std::size_t size, const std::vector<Match>& matches, bool invert) {
  std::vector<Part> parts;
  std::size_t from = 0;
  for (const Match& match : matches) {
    if (from != match.begin) parts.push_back({from, match.begin, invert});
    parts.push_back({match.begin, match.end, !invert});
    from = match.end;
  }
  if (from != size) parts.push_back({from, size, invert});
  return parts;
}

// A matched part joins the unmatched one before it; of two matched in a row the second stands
// alone.
void merge_with_previous(std::vector<Part>& parts) {
  std::vector<Part> out;
  bool previous = false;
  for (const Part& part : parts) {
    if (part.matched && !previous && !out.empty()) {
      out.back().end = part.end;
    } else {
      out.push_back(part);
    }
    previous = part.matched;
  }
  parts = std::move(out);
}

void merge_with_next(std::vector<Part>& parts) {
  std::vector<Part> out;
  bool previous = false;
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
    if (part->matched && !previous && !out.empty()) {
      out.back().begin = part->begin;
    } else {
      out.push_back(*part);
    }
    previous = part->matched;
  }
  std::reverse(out.begin(), out.end());
  parts = std::move(out);
}

void merge_runs(std::vector<Part>& parts) {
  std::vector<Part> out;
  bool previous = false;
  for (const Part& part : parts) {
    if (part.matched == previous && !out.empty()) {
      out.back().end = part.end;
    } else {
      out.push_back(part);
    }
    previous = part.matched;
  }
  parts = std::move(out);
}

}  // namespace

PreTokenizer::PreTokenizer(std::vector<PreTokenizerStep> steps, const std::string& origin) {
  const std::string where = origin + ": pre_tokenizer";
  for (PreTokenizerStep& spec : steps) {
    Step step;
    if (spec.kind == PreTokenizerStep::Kind::kByteLevel) {
      if (spec.use_regex) step.regex.emplace_back(kByteLevelPattern, where);
    } else if (spec.pattern.is_regex) {
      step.regex.emplace_back(spec.pattern.text, where);
    }
    step.spec = std::move(spec);
    steps_.push_back(std::move(step));
  }
}

void PreTokenizer::split(std::string_view text, Words& words) const {
  words.list.clear();
  words.owned.clear();
  if (text.empty()) return;
  words.list.push_back(text);
  std::vector<Match> matches;
  std::vector<std::string_view> next;
  for (const Step& step : steps_) {
    next.clear();
    for (std::string_view word : words.list) {
      if (step.spec.add_prefix_space && !word.starts_with(' ')) {
        word = words.owned.emplace_back(" " + std::string(word));
      }
      matches.clear();
      if (!step.regex.empty()) {
        step.regex.front().find_all(word, matches);
      } else if (step.spec.kind == PreTokenizerStep::Kind::kSplit) {
        const std::string& literal = step.spec.pattern.text;
        for (std::size_t at = word.find(literal); at != std::string_view::npos;
             at = word.find(literal, at + literal.size())) {
          matches.push_back({at, at + literal.size()});
        }
      }
      std::vector<Part> parts = parts_of(word.size(), matches, step.spec.invert);
      switch (step.spec.behavior) {
        case SplitBehavior::kRemoved:
          std::erase_if(parts, [](const Part& part) { return part.matched; });
          break;
        case SplitBehavior::kIsolated:
          break;
        case SplitBehavior::kMergedWithPrevious:
          merge_with_previous(parts);
          break;
        case SplitBehavior::kMergedWithNext:
          merge_with_next(parts);
          break;
        case SplitBehavior::kContiguous:
          merge_runs(parts);
          break;
      }
      for (const Part& part : parts) {
        if (part.begin != part.end) next.push_back(word.substr(part.begin, part.end - part.begin));
      }
    }
    words.list.swap(next);
  }
}

}  // namespace bitwitness::tok
