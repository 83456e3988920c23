// Splitting a text into the words that byte-pair encoding works on.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/tokenizer/regex.h"
#include "kernels/tokenizer/spec.h"

namespace bitwitness::tok {

// Words of a text: views of it, or of `owned` where a space was put before one.
struct Words {
  std::vector<std::string_view> list;
  std::deque<std::string> owned;
};

class PreTokenizer {
 public:
  PreTokenizer() = default;
  PreTokenizer(std::vector<PreTokenizerStep> steps, const std::string& origin);

  // `text` must outlive `words`. No word is empty.
  void split(std::string_view text, Words& words) const;

 private:
  struct Step {
    PreTokenizerStep spec;
    std::vector<Regex> regex;  // none or one
  };
  std::vector<Step> steps_;
};

}  // namespace bitwitness::tok
