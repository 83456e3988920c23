// The regular expressions of tokenizer.json, matched with PCRE2.
//
// The stock library matches them with Oniguruma. regex.cc translates the part of its syntax that
// tokenizers use into a PCRE2 pattern that matches the same strings, and refuses the rest by name.
// Where the two differ, and what is done:
//   \s, \S        White_Space, spelled out (PCRE2 adds U+180E)
//   \v            vertical tab (a class in PCRE2); \h, \R, \X, \w, \b, \K, \G: refused
//   \p{..}        general categories (Unicode 16.0, unicode_additions.h) and a few scripts
//   ^ $ .         lines end at LF only; ^ and $ match at every line
//   (?i: )        ASCII letters without a multi-character case folding
//   {n}+, {n}?    mean something else in Oniguruma: refused, like nested classes, && and (?i)
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace bitwitness::tok {

struct Match {
  std::size_t begin;
  std::size_t end;
};

// Immutable; find_all() may be called from several threads at once.
class Regex {
 public:
  // `where` names the pattern in errors (kUsage).
  Regex(std::string_view pattern, std::string where);

  // Every match in `text` (well-formed UTF-8) from left to right, as the stock library iterates:
  // an empty match directly after a match is passed over. Work is bounded: a pattern that
  // backtracks beyond the limits is an error, never a hang.
  void find_all(std::string_view text, std::vector<Match>& matches) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
  std::string where_;
};

// The PCRE2 spelling of an Oniguruma pattern; errors as for Regex.
std::string translate_pattern(std::string_view pattern, const std::string& where);

}  // namespace bitwitness::tok
