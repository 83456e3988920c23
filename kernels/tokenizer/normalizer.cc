#include "kernels/tokenizer/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <new>

#include "attest/base/error.h"
#include "kernels/tokenizer/unicode_additions.h"
#include "kernels/tokenizer/utf8.h"

namespace bitwitness::tok {
namespace {

using Kind = NormalizerStep::Kind;

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

template <std::size_t N, typename Range>
bool contains(const Range (&ranges)[N], char32_t c) {
  const auto* next =
      std::upper_bound(std::begin(ranges), std::end(ranges), c,
                       [](char32_t x, const Range& range) { return x < range.first; });
  return next != std::begin(ranges) && c <= std::prev(next)->last;
}

// Characters that the stock library does not know to normalize.
bool is_inert(char32_t c) {
  return c > 0x7F && (contains(kNormalizationInert, c) || contains(kCategoryAdditions, c));
}

void append_form(std::string_view text, Kind kind, std::string& out) {
  if (is_ascii(text)) {
    out += text;
    return;
  }
  int options = UTF8PROC_STABLE;
  options |= kind == Kind::kNfc || kind == Kind::kNfkc ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (kind == Kind::kNfkc || kind == Kind::kNfkd) options |= UTF8PROC_COMPAT;
  utf8proc_uint8_t* raw = nullptr;
  const utf8proc_ssize_t size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                             static_cast<utf8proc_ssize_t>(text.size()), &raw,
                                             static_cast<utf8proc_option_t>(options));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(raw, &std::free);
  if (size == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
  if (size < 0) throw usage_error(std::string("Unicode normalization: ") + utf8proc_errmsg(size));
  out.append(reinterpret_cast<const char*>(raw), static_cast<std::size_t>(size));
}

// Inert characters neither change nor let anything pass: what lies between them is normalized
// alone.
std::string unicode_form(std::string_view text, Kind kind) {
  std::string out;
  out.reserve(text.size());
  std::size_t from = 0;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t at = i;
    if (!is_inert(next_char(text, i))) continue;
    append_form(text.substr(from, at - from), kind, out);
    out += text.substr(at, i - at);
    from = i;
  }
  append_form(text.substr(from), kind, out);
  return out;
}

std::string replace(std::string_view text, const std::vector<Match>& matches,
                    std::string_view content) {
  std::string out;
  std::size_t from = 0;
  for (const Match& match : matches) {
    out += text.substr(from, match.begin - from);
    out += content;
    from = match.end;
    if (out.size() > std::size_t{1} << 30) {
      throw usage_error("the normalizer makes more than 1 GiB of this text");
    }
  }
  out += text.substr(from);
  return out;
}

}  // namespace

Normalizer::Normalizer(std::vector<NormalizerStep> steps, const std::string& origin)
    : steps_(std::move(steps)) {
  for (const NormalizerStep& step : steps_) {
    if (step.kind == Kind::kReplace && step.pattern.is_regex) {
      patterns_.emplace_back(step.pattern.text, origin + ": normalizer");
    }
  }
}

std::string Normalizer::apply(std::string_view text) const {
  std::string current(text);
  std::vector<Match> matches;
  std::size_t next_pattern = 0;
  for (const NormalizerStep& step : steps_) {
    switch (step.kind) {
      case Kind::kNfc:
      case Kind::kNfd:
      case Kind::kNfkc:
      case Kind::kNfkd:
        current = unicode_form(current, step.kind);
        break;
      case Kind::kPrepend:
        if (!current.empty()) current.insert(0, step.text);
        break;
      case Kind::kReplace:
        if (step.pattern.is_regex) {
          patterns_[next_pattern++].find_all(current, matches);
        } else {
          matches.clear();
          const std::string& literal = step.pattern.text;
          for (std::size_t at = current.find(literal); at != std::string::npos;
               at = current.find(literal, at + literal.size())) {
            matches.push_back({at, at + literal.size()});
          }
        }
        current = replace(current, matches, step.text);
        break;
    }
  }
  return current;
}

}  // namespace bitwitness::tok
