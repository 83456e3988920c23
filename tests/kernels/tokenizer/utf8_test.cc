#include "kernels/tokenizer/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace bitwitness {
namespace {

std::string lossy(std::string_view bytes, std::size_t piece) {
  LossyUtf8 utf8;
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += piece) utf8.push(bytes.substr(i, piece), out);
  utf8.flush(out);
  return out;
}

// Unicode 16.0, tables 3-8 to 3-11: one U+FFFD for each maximal ill-formed subsequence.
TEST(LossyUtf8Test, ReplacesMaximalSubparts) {
  const std::string r = "\xEF\xBF\xBD";
  const std::pair<std::string, std::string> cases[] = {
      {"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", r + r + r + r + r + r + r + r + "A"},
      {"\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", r + r + r + r + r + r + r + r + "A"},
      {"\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", r + r + r + r + r + "A" + r + r + "B"},
      {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", r + r + r + r + "A"},
      {"a\xE2\x82", "a" + r},
      {"\xE2\x82\xAC", "\xE2\x82\xAC"},
      {"\xF0\x9F\x99\x82\xF0\x9F\x99", "\xF0\x9F\x99\x82" + r},
  };
  for (const auto& [bytes, expected] : cases) {
    for (std::size_t piece = 1; piece <= bytes.size(); ++piece) {
      EXPECT_EQ(lossy(bytes, piece), expected) << testing::PrintToString(bytes);
    }
  }
}

TEST(Utf8Test, EveryCharacterRoundTripsAndNothingElseIsValid) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    tok::append_utf8(c, text);
    std::size_t offset = 0;
    ASSERT_EQ(tok::first_invalid_utf8(text), std::nullopt);
    ASSERT_EQ(tok::next_char(text, offset), c);
    ASSERT_EQ(offset, text.size());
    text.pop_back();
    if (!text.empty()) {
      ASSERT_EQ(tok::first_invalid_utf8("ab" + text), 2u);
    }
  }
  for (const std::string bad : {"\xED\xA0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xF0\x8F\xBF\xBF",
                                "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\x80"}) {
    EXPECT_EQ(tok::first_invalid_utf8(bad), 0u) << testing::PrintToString(bad);
  }
}

TEST(Utf8Test, NamesInMessagesAreShortAndPrintable) {
  EXPECT_EQ(tok::quote_name("a\n\"b"), "\"a\\x0a\\x22b\"");
  EXPECT_EQ(tok::quote_name(std::string(1000, 'x')).size(), 64u + 5u);
}

}  // namespace
}  // namespace bitwitness
