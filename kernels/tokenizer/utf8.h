// UTF-8 and the few character classes the tokenizer needs beside its regular expressions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace bitwitness {

// Turns bytes into well-formed UTF-8, whatever the pieces in which they arrive. Every maximal
// ill-formed subsequence (Unicode, section 3.9, "U+FFFD Substitution of Maximal Subparts") becomes
// one U+FFFD.
class LossyUtf8 {
 public:
  void push(std::string_view bytes, std::string& out);
  // Ends the text: an unfinished character becomes U+FFFD.
  void flush(std::string& out);

 private:
  char pending_[4] = {};
  std::uint8_t pending_count_ = 0;
  std::uint8_t missing_ = 0;      // continuation bytes still to come
  std::uint8_t next_min_ = 0x80;  // permitted range of the next byte
  std::uint8_t next_max_ = 0xBF;
};

namespace tok {

// Offset of the first byte that does not begin a well-formed character (surrogates, overlong forms
// and values above U+10FFFF are ill-formed), or nullopt.
std::optional<std::size_t> first_invalid_utf8(std::string_view text);

// The character at text[offset], which must begin a well-formed one; advances `offset` past it.
char32_t next_char(std::string_view text, std::size_t& offset);

// Length in bytes of the character that `lead` begins, in well-formed text.
std::size_t char_length(char lead);

void append_utf8(char32_t c, std::string& out);

// Unicode property White_Space.
bool is_white_space(char32_t c);

// \w of Unicode regular expressions: alphabetic, marks, decimal numbers, connectors, joiners.
bool is_word_char(char32_t c);

// `name` between quotes for an error message: at most 64 bytes, controls escaped.
std::string quote_name(std::string_view name);

}  // namespace tok
}  // namespace bitwitness
