// Text normalization before splitting.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/tokenizer/regex.h"
#include "kernels/tokenizer/spec.h"

namespace bitwitness::tok {

class Normalizer {
 public:
  Normalizer() = default;
  Normalizer(std::vector<NormalizerStep> steps, const std::string& origin);

  bool empty() const { return steps_.empty(); }
  // `text` is well-formed UTF-8, and so is the result.
  std::string apply(std::string_view text) const;

 private:
  std::vector<NormalizerStep> steps_;
  std::vector<Regex> patterns_;  // of the kReplace steps with a regular expression, in order
};

}  // namespace bitwitness::tok
