#include "kernels/tokenizer/utf8.h"

#include <utf8proc.h>

#include <cstring>

namespace bitwitness {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

struct Lead {
  std::uint8_t missing;  // continuation bytes that follow
  std::uint8_t min;      // range of the first of them
  std::uint8_t max;
  bool valid;
};

// Table 3-7 of the Unicode standard: well-formed UTF-8 byte sequences.
constexpr Lead classify(std::uint8_t b) {
  if (b < 0x80) return {0, 0, 0, true};
  if (b < 0xC2) return {0, 0, 0, false};
  if (b < 0xE0) return {1, 0x80, 0xBF, true};
  if (b == 0xE0) return {2, 0xA0, 0xBF, true};
  if (b == 0xED) return {2, 0x80, 0x9F, true};
  if (b < 0xF0) return {2, 0x80, 0xBF, true};
  if (b == 0xF0) return {3, 0x90, 0xBF, true};
  if (b < 0xF4) return {3, 0x80, 0xBF, true};
  if (b == 0xF4) return {3, 0x80, 0x8F, true};
  return {0, 0, 0, false};
}

}  // namespace

void LossyUtf8::push(std::string_view bytes, std::string& out) {
  for (const char c : bytes) {
    const auto b = static_cast<std::uint8_t>(c);
    if (missing_ > 0) {
      if (b >= next_min_ && b <= next_max_) {
        pending_[pending_count_++] = c;
        next_min_ = 0x80;
        next_max_ = 0xBF;
        if (--missing_ == 0) {
          out.append(pending_, pending_count_);
          pending_count_ = 0;
        }
        continue;
      }
      flush(out);  // what came so far is one ill-formed subsequence; b begins anew
    }
    const Lead lead = classify(b);
    if (!lead.valid) {
      out.append(kReplacement);
    } else if (lead.missing == 0) {
      out.push_back(c);
    } else {
      pending_[0] = c;
      pending_count_ = 1;
      missing_ = lead.missing;
      next_min_ = lead.min;
      next_max_ = lead.max;
    }
  }
}

void LossyUtf8::flush(std::string& out) {
  if (missing_ > 0) out.append(kReplacement);
  missing_ = 0;
  pending_count_ = 0;
}

namespace tok {

std::optional<std::size_t> first_invalid_utf8(std::string_view text) {
  std::size_t i = 0;
  while (i < text.size()) {
    const Lead lead = classify(static_cast<std::uint8_t>(text[i]));
    if (!lead.valid || lead.missing > text.size() - i - 1) return i;
    for (std::size_t k = 1; k <= lead.missing; ++k) {
      const auto b = static_cast<std::uint8_t>(text[i + k]);
      const std::uint8_t min = k == 1 ? lead.min : std::uint8_t{0x80};
      const std::uint8_t max = k == 1 ? lead.max : std::uint8_t{0xBF};
      if (b < min || b > max) return i;
    }
    i += 1u + lead.missing;
  }
  return std::nullopt;
}

std::size_t char_length(char lead) {
  return 1u + classify(static_cast<std::uint8_t>(lead)).missing;
}

char32_t next_char(std::string_view text, std::size_t& offset) {
  const auto byte = [&](std::size_t k) {
    return static_cast<char32_t>(static_cast<std::uint8_t>(text[offset + k]));
  };
  const char32_t b = byte(0);
  char32_t c = b;
  switch (char_length(text[offset])) {
    case 1:
      break;
    case 2:
      c = (b & 0x1F) << 6 | (byte(1) & 0x3F);
      break;
    case 3:
      c = (b & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
      break;
    default:
      c = (b & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
      break;
  }
  offset += char_length(text[offset]);
  return c;
}

void append_utf8(char32_t c, std::string& out) {
  const auto put = [&](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6);
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3F));
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

bool is_white_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool is_word_char(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      // Join_Control, then the circled and squared letters: symbols that are Other_Alphabetic.
      return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
             (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
             (c >= 0x1F170 && c <= 0x1F189);
  }
}

std::string quote_name(std::string_view name) {
  constexpr std::size_t kMax = 64;
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : name.substr(0, kMax)) {
    const auto b = static_cast<std::uint8_t>(c);
    if (b < 0x20 || b == 0x7F || b == '"' || b == '\\') {
      out += {'\\', 'x', kHex[b >> 4], kHex[b & 15]};
    } else {
      out.push_back(c);
    }
  }
  out += name.size() > kMax ? "...\"" : "\"";
  return out;
}

}  // namespace tok
}  // namespace bitwitness
