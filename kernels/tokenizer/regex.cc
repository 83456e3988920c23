#include "kernels/tokenizer/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>

#include "attest/base/error.h"
#include "kernels/tokenizer/unicode_additions.h"
#include "kernels/tokenizer/utf8.h"

#if PCRE2_MAJOR == 10 && PCRE2_MINOR < 40
#error "PCRE2 10.40 or later is needed: earlier versions know neither Unicode 14 nor \p{sc:..}"
#endif

namespace bitwitness::tok {
namespace {

constexpr std::size_t kPatternBytesMax = 16 * 1024;
constexpr std::uint32_t kMatchLimitMin = 10'000'000;  // backtracking steps from one start position
constexpr std::uint32_t kMatchLimitPerByte = 16;
constexpr std::uint32_t kDepthLimit = 1'000'000;
constexpr std::uint32_t kHeapLimitKib = 64 * 1024;
constexpr std::size_t kJitStackBytesMax = std::size_t{4} << 20;
constexpr std::size_t kStartsPerCall = 64;  // start positions between two looks at the clock
constexpr std::chrono::seconds kTimeMin{20};
constexpr std::chrono::microseconds kTimePerByte{20};

// White_Space and its complement as class items.
constexpr std::string_view kSpaceItems =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::string_view kNotSpaceItems =
    R"(\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff})"
    R"(\x{200b}-\x{2027}\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";

constexpr std::string_view kCategories[] = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "N",  "Nd", "Nl", "No", "P",  "Pc", "Pd",
    "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp"};
constexpr std::string_view kScripts[] = {"Han", "Hiragana", "Katakana", "Hangul", "Thai"};

// Two letters that Unicode folds together with one character (ss with U+00DF and so on): Oniguruma
// matches them caselessly as such, PCRE2 does not.
constexpr std::string_view kFoldingPairs[] = {"ss", "ff", "fi", "fl", "st"};

bool is_ascii_letter(char32_t c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}
bool is_ascii_digit(char32_t c) {
  return c >= '0' && c <= '9';
}

std::string code_point(char32_t c) {
  char buffer[16];
  std::snprintf(buffer, sizeof buffer, "\\x{%x}", static_cast<unsigned>(c));
  return buffer;
}

std::string literal(char32_t c) {
  if (is_ascii_letter(c) || is_ascii_digit(c)) return std::string(1, static_cast<char>(c));
  return code_point(c);
}

class Translator {
 public:
  Translator(std::string_view pattern, const std::string& where)
      : pattern_(pattern), where_(where) {}

  std::string run() {
    std::vector<bool> caseless;  // one entry for each open group
    bool repeatable = false;     // something a quantifier may follow
    while (!done()) {
      const std::size_t at = pos_;
      const char32_t c = take();
      const bool caseless_here = !caseless.empty() && caseless.back();
      caseless_ = caseless_here;
      if (c != '(' && c != ')' && !is_ascii_letter(c)) previous_letter_ = 0;
      switch (c) {
        case '(': {
          previous_letter_ = 0;
          bool inner = caseless_here;
          out_ += open_group(inner);
          caseless.push_back(inner);
          if (caseless.size() > 200) refuse(at, "more than 200 nested groups");
          repeatable = false;
          break;
        }
        case ')':
          previous_letter_ = 0;
          if (caseless.empty()) refuse(at, "an unmatched ')'");
          caseless.pop_back();
          out_ += ')';
          repeatable = true;
          break;
        case '|':
          out_ += '|';
          repeatable = false;
          break;
        case '[':
          char_class(at);
          repeatable = true;
          break;
        case '\\':
          escape(at);
          repeatable = true;
          break;
        case '.':
          out_ += "[^\\x{a}]";
          repeatable = true;
          break;
        case '^':
          out_ += "(?m:^)";
          repeatable = false;
          break;
        case '$':
          out_ += "(?m:$)";
          repeatable = false;
          break;
        case '*':
        case '+':
        case '?':
        case '{':
          if (!repeatable) refuse(at, "a quantifier with nothing to repeat");
          quantifier(at, c);
          repeatable = false;
          break;
        default:
          letter(at, c);
          out_ += literal(c);
          repeatable = true;
          break;
      }
    }
    if (!caseless.empty()) refuse(pattern_.size(), "an unclosed group");
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::size_t at, const std::string& what) const {
    throw usage_error(where_ + ": regular expression " + quote_name(pattern_) + ": " + what +
                      " at byte " + std::to_string(at) + " is not supported");
  }

  bool done() const { return pos_ >= pattern_.size(); }
  char32_t peek() const {
    std::size_t offset = pos_;
    return done() ? U'\0' : next_char(pattern_, offset);
  }
  char32_t take() { return next_char(pattern_, pos_); }
  bool take_if(std::string_view text) {
    if (!pattern_.substr(pos_).starts_with(text)) return false;
    pos_ += text.size();
    return true;
  }

  // Literal characters inside (?i: ) must fold to single characters of their own.
  void letter(std::size_t at, char32_t c) {
    if (caseless_) {
      if (c >= 0x80) refuse(at, "a character beyond ASCII in a caseless group");
      if (is_ascii_letter(c)) {
        const char pair[] = {previous_letter_, static_cast<char>(c | 0x20)};
        const std::string_view both(pair, 2);
        if (std::find(std::begin(kFoldingPairs), std::end(kFoldingPairs), both) !=
            std::end(kFoldingPairs)) {
          refuse(at, "the letters " + quote_name(both) + " in a caseless group");
        }
      }
    }
    previous_letter_ = is_ascii_letter(c) ? static_cast<char>(c | 0x20) : '\0';
  }

  std::string open_group(bool& caseless) {
    const std::size_t at = pos_;
    if (!take_if("?")) return "(?:";
    for (const std::string_view kind : {":", "=", "!", ">", "<=", "<!"}) {
      if (take_if(kind)) return "(?" + std::string(kind);
    }
    if (take_if("i:")) {
      caseless = true;
      return "(?i:";
    }
    refuse(at, "the group " + quote_name("(" + std::string(pattern_.substr(at, 4))));
  }

  void quantifier(std::size_t at, char32_t c) {
    if (c != '{') {
      out_ += static_cast<char>(c);
      if (!done() && (peek() == '?' || peek() == '+')) out_ += static_cast<char>(take());
    } else {
      const std::size_t close = pattern_.find('}', pos_);
      if (close == std::string_view::npos) refuse(at, "an unescaped '{'");
      const std::string_view body = pattern_.substr(pos_, close - pos_);
      const std::size_t comma = body.find(',');
      const auto number = [](std::string_view s) {
        return !s.empty() && s.size() <= 4 &&
               std::all_of(s.begin(), s.end(), [](char d) { return d >= '0' && d <= '9'; });
      };
      const bool range = comma != std::string_view::npos;
      if (!number(body.substr(0, comma)) ||
          (range && comma + 1 < body.size() && !number(body.substr(comma + 1)))) {
        refuse(at, "the quantifier " + quote_name("{" + std::string(body) + "}"));
      }
      out_ += "{" + std::string(body) + "}";
      pos_ = close + 1;
      if (!done() && peek() == '?') {
        if (!range) refuse(pos_, "{n}?");
        out_ += static_cast<char>(take());
      }
    }
    if (!done() && (peek() == '*' || peek() == '+' || peek() == '?' || peek() == '{')) {
      refuse(pos_, "a quantifier on a quantifier");
    }
  }

  // The class items of \p{name}.
  std::string property(std::size_t at) {
    if (!take_if("{")) refuse(at, "\\p without braces");
    const std::size_t close = pattern_.find('}', pos_);
    if (close == std::string_view::npos) refuse(at, "an unclosed \\p{");
    const std::string_view name = pattern_.substr(pos_, close - pos_);
    pos_ = close + 1;
    std::string items;
    const auto add = [&](std::uint32_t first, std::uint32_t last) {
      items += code_point(first);
      if (last != first) items += "-" + code_point(last);
    };
    if (std::find(std::begin(kCategories), std::end(kCategories), name) != std::end(kCategories)) {
      if (caseless_ && (name == "Lu" || name == "Ll" || name == "Lt")) {
        refuse(at, "a case property in a caseless group");
      }
      items = "\\p{" + std::string(name) + "}";
      for (const PropertyRange& row : kCategoryAdditions) {
        if (std::string_view(row.name).starts_with(name)) add(row.first, row.last);
      }
      return items;
    }
    if (std::find(std::begin(kScripts), std::end(kScripts), name) != std::end(kScripts)) {
      items = "\\p{sc:" + std::string(name) + "}";
      for (const PropertyRange& row : kScriptAdditions) {
        if (std::string_view(row.name) == name) add(row.first, row.last);
      }
      return items;
    }
    refuse(at, "the property " + quote_name(name));
  }

  // The character of an escape that stands for one; `c` follows the backslash.
  char32_t escaped_char(std::size_t at, char32_t c) {
    switch (c) {
      case 'r':
        return '\r';
      case 'n':
        return '\n';
      case 't':
        return '\t';
      case 'f':
        return '\f';
      case 'v':
        return '\v';
      case 'a':
        return '\a';
      case 'e':
        return 0x1B;
      case 'x':
        if (take_if("{")) {
          const char32_t value = hex(at, 1, 6);
          if (!take_if("}")) refuse(at, "an unclosed \\x{");
          return value;
        } else {
          const char32_t value = hex(at, 2, 2);
          if (value >= 0x80) refuse(at, "\\xHH beyond 7f (a raw byte)");
          return value;
        }
      case 'u':
        return hex(at, 4, 4);
      default:
        if (c >= 0x80 || is_ascii_letter(c) || is_ascii_digit(c) || c < 0x20) {
          std::string name = "\\";
          append_utf8(c, name);
          refuse(at, "the escape " + name);
        }
        return c;
    }
  }

  char32_t hex(std::size_t at, std::size_t min, std::size_t max) {
    std::uint32_t value = 0;
    const std::size_t available = std::min(max, pattern_.size() - pos_);
    const char* begin = pattern_.data() + pos_;
    const auto [end, error] = std::from_chars(begin, begin + available, value, 16);
    const auto count = static_cast<std::size_t>(end - begin);
    if (error != std::errc{} || count < min || value > 0x10FFFF ||
        (value >= 0xD800 && value < 0xE000)) {
      refuse(at, "this hexadecimal escape");
    }
    pos_ += count;
    return value;
  }

  void escape(std::size_t at) {
    if (done()) refuse(at, "a trailing backslash");
    const char32_t c = take();
    switch (c) {
      case 's':
        out_ += "[" + std::string(kSpaceItems) + "]";
        return;
      case 'S':
        out_ += "[^" + std::string(kSpaceItems) + "]";
        return;
      case 'd':
      case 'D':
        out_ += (c == 'd' ? "[" : "[^") + digits() + "]";
        return;
      case 'p':
      case 'P': {
        bool negated = c == 'P';
        if (pattern_.substr(pos_).starts_with("{^")) refuse(at, "\\p{^");
        out_ += (negated ? "[^" : "[") + property(at) + "]";
        return;
      }
      case 'A':
      case 'z':
        out_ += "\\";
        out_ += static_cast<char>(c);
        return;
      default: {
        const char32_t value = escaped_char(at, c);
        previous_letter_ = 0;
        letter(at, value);
        out_ += literal(value);
      }
    }
  }

  std::string digits() {
    std::string items = "\\p{Nd}";
    for (const PropertyRange& row : kCategoryAdditions) {
      if (std::string_view(row.name) == "Nd") {
        items += code_point(row.first) + "-" + code_point(row.last);
      }
    }
    return items;
  }

  void char_class(std::size_t open) {
    out_ += '[';
    if (take_if("^")) out_ += '^';
    if (peek() == ']') refuse(pos_, "']' first in a class");
    for (;;) {
      if (done()) refuse(open, "an unclosed class");
      const std::size_t at = pos_;
      if (take_if("&&")) refuse(at, "&& in a class");
      const char32_t c = take();
      if (c == ']') break;
      if (c == '[') refuse(at, "a class within a class");
      char32_t first = c;
      if (c == '\\') {
        if (done()) refuse(at, "a trailing backslash");
        const char32_t e = take();
        std::string items;
        if (e == 's') items = kSpaceItems;
        if (e == 'S') items = kNotSpaceItems;
        if (e == 'd') items = digits();
        if (e == 'p') {
          if (peek() == '{' && pattern_.substr(pos_).starts_with("{^")) refuse(at, "\\p{^");
          items = property(at);
        }
        if (!items.empty()) {
          if (peek() == '-' && !pattern_.substr(pos_).starts_with("-]")) {
            refuse(pos_, "'-' after a class");
          }
          out_ += items;
          continue;
        }
        if (e == 'b') refuse(at, "\\b in a class");
        first = escaped_char(at, e);
      }
      char32_t last = first;
      if (peek() == '-' && !pattern_.substr(pos_).starts_with("-]")) {
        take();
        const std::size_t end_at = pos_;
        if (done()) refuse(open, "an unclosed class");
        last = take();
        if (last == '[') refuse(end_at, "a class within a class");
        if (last == '\\') {
          if (done()) refuse(end_at, "a trailing backslash");
          last = escaped_char(end_at, take());
        }
        if (last < first) refuse(at, "an empty range");
        if (caseless_ && last >= 0x80) refuse(at, "a range beyond ASCII in a caseless group");
        out_ += code_point(first) + "-" + code_point(last);
        continue;
      }
      if (caseless_ && first >= 0x80) refuse(at, "a character beyond ASCII in a caseless group");
      out_ += code_point(first);
    }
    out_ += ']';
  }

  std::string_view pattern_;
  const std::string& where_;
  std::size_t pos_ = 0;
  std::string out_;
  bool caseless_ = false;
  char previous_letter_ = 0;
};

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* p) const {
    Free(p);
  }
};
using CodePtr = std::unique_ptr<pcre2_code, Deleter<pcre2_code_free>>;
using CompileContextPtr =
    std::unique_ptr<pcre2_compile_context, Deleter<pcre2_compile_context_free>>;
using MatchContextPtr = std::unique_ptr<pcre2_match_context, Deleter<pcre2_match_context_free>>;
using MatchDataPtr = std::unique_ptr<pcre2_match_data, Deleter<pcre2_match_data_free>>;
using JitStackPtr = std::unique_ptr<pcre2_jit_stack, Deleter<pcre2_jit_stack_free>>;

std::string pcre2_message(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof buffer);
  const auto* bytes = buffer;
  std::string message;
  for (; *bytes != 0; ++bytes) message.push_back(static_cast<char>(*bytes));
  return message;
}

template <typename T>
T* checked(T* p) {
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

PCRE2_SPTR bytes_of(std::string_view s) {
  return reinterpret_cast<PCRE2_SPTR>(s.data());
}

}  // namespace

std::string translate_pattern(std::string_view pattern, const std::string& where) {
  if (pattern.size() > kPatternBytesMax) {
    throw usage_error(where + ": regular expression of " + std::to_string(pattern.size()) +
                      " bytes; the limit is " + std::to_string(kPatternBytesMax));
  }
  return Translator(pattern, where).run();
}

struct Regex::Code {
  CodePtr code;
  bool jit = false;
};

Regex::Regex(std::string_view pattern, std::string where) : where_(std::move(where)) {
  const std::string translated = translate_pattern(pattern, where_);
  const CompileContextPtr context(checked(pcre2_compile_context_create(nullptr)));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  auto code = std::make_shared<Code>();
  code->code.reset(pcre2_compile(bytes_of(translated), translated.size(),
                                 PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C |
                                     PCRE2_USE_OFFSET_LIMIT | PCRE2_NO_AUTO_CAPTURE,
                                 &error, &offset, context.get()));
  if (code->code == nullptr) {
    throw usage_error(where_ + ": regular expression " + quote_name(pattern) + ": " +
                      pcre2_message(error));
  }
  code->jit = pcre2_jit_compile(code->code.get(), PCRE2_JIT_COMPLETE) == 0;
  code_ = std::move(code);
}

void Regex::find_all(std::string_view text, std::vector<Match>& matches) const {
  matches.clear();
  const MatchContextPtr context(checked(pcre2_match_context_create(nullptr)));
  const MatchDataPtr data(checked(pcre2_match_data_create(1, nullptr)));
  const std::size_t scaled = std::min<std::size_t>(text.size() * kMatchLimitPerByte, UINT32_MAX);
  pcre2_set_match_limit(context.get(),
                        std::max(kMatchLimitMin, static_cast<std::uint32_t>(scaled)));
  pcre2_set_depth_limit(context.get(), kDepthLimit);
  pcre2_set_heap_limit(context.get(), kHeapLimitKib);
  JitStackPtr stack;
  if (code_->jit) {
    stack.reset(pcre2_jit_stack_create(32 * 1024, kJitStackBytesMax, nullptr));
    if (stack != nullptr) pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  }
  using Clock = std::chrono::steady_clock;
  const auto deadline =
      Clock::now() + kTimeMin + kTimePerByte * static_cast<std::int64_t>(text.size());

  std::size_t from = 0;                           // where the next search starts
  std::size_t last_end = std::string_view::npos;  // end of the last match taken
  std::size_t searches = 0;
  while (from <= text.size()) {
    if (++searches % 256 == 0 && Clock::now() > deadline) {
      throw usage_error(where_ + ": the regular expression takes too long on this text");
    }
    const std::size_t limit = std::min(text.size(), from + kStartsPerCall);
    pcre2_set_offset_limit(context.get(), limit);
    int rc = pcre2_match(code_->code.get(), bytes_of(text), text.size(), from, PCRE2_NO_UTF_CHECK,
                         data.get(), context.get());
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
      rc = pcre2_match(code_->code.get(), bytes_of(text), text.size(), from,
                       PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data.get(), context.get());
    }
    if (rc == PCRE2_ERROR_NOMATCH) {
      if (limit == text.size()) break;
      if (Clock::now() > deadline) {
        throw usage_error(where_ + ": the regular expression takes too long on this text");
      }
      from = limit + 1;  // every start up to `limit` has failed
      while (from < text.size() && (static_cast<unsigned char>(text[from]) & 0xC0) == 0x80) ++from;
      continue;
    }
    if (rc < 0) {
      throw usage_error(where_ + ": the regular expression gives up on this text near byte " +
                        std::to_string(from) + ": " + pcre2_message(rc));
    }
    const PCRE2_SIZE* found = pcre2_get_ovector_pointer(data.get());
    const Match match{found[0], found[1]};
    if (match.begin == match.end && match.end == last_end) {
      from += from < text.size() ? char_length(text[from]) : 1;
      continue;
    }
    matches.push_back(match);
    from = last_end = match.end;
  }
}

}  // namespace bitwitness::tok
