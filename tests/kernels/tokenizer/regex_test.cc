#include "kernels/tokenizer/regex.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "attest/base/error.h"

namespace bitwitness::tok {
namespace {

std::vector<std::string> matches(std::string_view pattern, std::string_view text) {
  std::vector<Match> found;
  Regex(pattern, "test").find_all(text, found);
  std::vector<std::string> out;
  for (const Match& m : found) out.emplace_back(text.substr(m.begin, m.end - m.begin));
  return out;
}

using testing::ElementsAre;

TEST(RegexTest, SpaceIsWhiteSpaceOnly) {
  EXPECT_THAT(matches("\\s", "a \xC2\x85\xE3\x80\x80"),
              ElementsAre(" ", "\xC2\x85", "\xE3\x80\x80"));
  EXPECT_THAT(matches("\\s", "\xE1\xA0\x8E"), ElementsAre()) << "U+180E is no white space";
  EXPECT_THAT(matches("[^\\S\\n]+", " \n\t"), ElementsAre(" ", "\t"));
}

TEST(RegexTest, PropertiesKnowUnicode16) {
  EXPECT_THAT(matches("\\p{Lu}", "A\xE1\xB2\x89"), ElementsAre("A", "\xE1\xB2\x89"));  // U+1C89
  EXPECT_THAT(matches("\\P{L}", "A\xE1\xB2\x89-"), ElementsAre("-"));
  EXPECT_THAT(matches("[^\\p{L}]", "\xF0\xB1\x8D\x90"), ElementsAre());  // U+31350
  EXPECT_THAT(matches("\\p{Han}+", "\xE4\xBD\xA0\xF0\xB1\x8D\x90z"),
              ElementsAre("\xE4\xBD\xA0\xF0\xB1\x8D\x90"));
}

TEST(RegexTest, CaselessGroupsFoldUnicode) {
  EXPECT_THAT(matches("(?i:'s)", "'S's'\xC5\xBF"), ElementsAre("'S", "'s", "'\xC5\xBF"));
  EXPECT_THAT(matches("(?i:a)b",
                      "Abab"
                      "aB"),
              ElementsAre("Ab", "ab"));
}

TEST(RegexTest, EmptyMatchesFollowTheStockIteration) {
  EXPECT_THAT(matches("a*", "baac"), ElementsAre("", "aa", ""));
  EXPECT_THAT(matches("", "\xC3\xA9x"), ElementsAre("", "", ""));
}

TEST(RegexTest, StartsFarApartAreFound) {
  std::string text(1000, 'x');
  for (const std::size_t at : {0, 63, 64, 65, 128, 129, 130, 999}) text[at] = 'y';
  EXPECT_EQ(matches("y", text).size(), 8u);
  std::string wide;
  for (int i = 0; i < 300; ++i) wide += "\xE4\xBD\xA0";
  EXPECT_THAT(matches("z", wide + "z"), ElementsAre("z"));
}

TEST(RegexTest, RefusesByNameWhatPcre2WouldReadDifferently) {
  for (const std::string pattern : {"\\h",
                                    "\\R",
                                    "\\X",
                                    "\\w",
                                    "\\W",
                                    "\\b",
                                    "\\B",
                                    "\\K",
                                    "\\G",
                                    "\\Z",
                                    "\\1",
                                    "\\k<a>",
                                    "(?i)a",
                                    "(?<n>a)",
                                    "(?P<n>a)",
                                    "(?#c)",
                                    "(?x: a)",
                                    "(?R)",
                                    "(*FAIL)",
                                    "a{,3}",
                                    "a{2}?",
                                    "a{2}+",
                                    "a{1,2}+",
                                    "a**",
                                    "[a&&b]",
                                    "[[:alpha:]]",
                                    "[a[b]]",
                                    "[]a]",
                                    "[\\w]",
                                    "[\\P{L}]",
                                    "\\p{^L}",
                                    "\\pL",
                                    "\\p{C}",
                                    "\\p{Cn}",
                                    "\\p{Foo}",
                                    "\\p{Mn}",
                                    "(?i:ss)",
                                    "(?i:stop)",
                                    "(?i:\xC3\xA9)",
                                    "(?i:\\p{Lu})",
                                    "\\xff",
                                    "\\Q",
                                    "\\",
                                    "(",
                                    ")",
                                    "[",
                                    "[a",
                                    "a{",
                                    "*a",
                                    "\\x{110000}",
                                    "\\x{d800}",
                                    "[z-a]",
                                    "[\\s-z]",
                                    "\\N",
                                    "\\cA",
                                    "\\M",
                                    "(?|a)",
                                    "[a-\\s]",
                                    "[\\b]"}) {
    EXPECT_THROW(Regex(pattern, "test"), Error) << pattern;
  }
}

TEST(RegexTest, HostilePatternsEndWithAnError) {
  const std::string text = std::string(5000, 'a') + "!";
  std::vector<Match> found;
  EXPECT_THROW(Regex("(a+)+$", "test").find_all(text + "b", found), Error);
  EXPECT_THROW(Regex("(a|a)*b", "test").find_all(text + "b", found), Error);
  EXPECT_THROW(Regex("(((a{999}){999}){999})", "test"), Error);
  EXPECT_THROW(Regex(std::string(1 << 20, 'a'), "test"), Error);
  EXPECT_THROW(Regex(std::string(5000, '('), "test"), Error);
}

}  // namespace
}  // namespace bitwitness::tok
