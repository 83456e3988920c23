#include "kernels/model/json.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>

#include "tests/kernels/model/expect_error.h"

namespace bitwitness {
namespace {

using test::expect_error;

constexpr JsonLimits kLimits{1000, 4, 20};

JsonValue parse(std::string_view text) {
  return parse_json(text, kLimits, "file.json");
}

void expect_refused(std::string_view text, std::string_view part) {
  expect_error(ErrorKind::kUsage, {"file.json", part}, [&] { parse(text); });
}

TEST(Json, ReadsEveryType) {
  const JsonValue root =
      parse(R"({"s":"a\u00e9\n","n":null,"t":true,"f":false,"i":-7,"r":1.5e2,"a":[1,[2]],"o":{}})");
  EXPECT_EQ(root.find("s")->text(), "a\xC3\xA9\n");
  EXPECT_TRUE(root.find("n")->is_null());
  EXPECT_TRUE(root.find("t")->boolean());
  EXPECT_FALSE(root.find("f")->boolean());
  EXPECT_EQ(root.find("i")->integer(), -7);
  EXPECT_EQ(root.find("i")->unsigned_integer(), std::nullopt);
  EXPECT_EQ(root.find("r")->integer(), std::nullopt);
  EXPECT_EQ(root.find("r")->binary64(), 150.0);
  ASSERT_EQ(root.find("a")->items().size(), 2U);
  EXPECT_EQ(root.find("a")->items()[1].items()[0].integer(), 2);
  EXPECT_TRUE(root.find("o")->is_object());
  EXPECT_EQ(root.find("absent"), nullptr);
}

TEST(Json, IntegersKeepTheirFullRange) {
  EXPECT_EQ(parse("18446744073709551615").unsigned_integer(), 18446744073709551615U);
  EXPECT_EQ(parse("18446744073709551616").unsigned_integer(), std::nullopt);
  EXPECT_EQ(parse("9223372036854775807").integer(), 9223372036854775807);
  EXPECT_EQ(parse("9223372036854775808").integer(), std::nullopt);
  EXPECT_EQ(parse("-9223372036854775808").integer(), INT64_MIN);
  EXPECT_EQ(parse("1.0").integer(), std::nullopt);
  EXPECT_EQ(parse("\"1\"").integer(), std::nullopt);
}

TEST(Json, DecimalsAreRoundedOnce) {
  const auto bits = [](std::string_view text) {
    return std::bit_cast<std::uint32_t>(parse(text).binary32().value());
  };
  EXPECT_EQ(bits("1e-05"), 0x3727C5ACU);
  EXPECT_EQ(bits("1e-6"), 0x358637BDU);
  // 1 + 2^-24 + 2^-60: above the tie, but on it once rounded to binary64. Rounding twice gives 1.
  EXPECT_EQ(bits("1.000000059604644775390625867361737988403547205962240695953369140625"),
            0x3F800001U);
  EXPECT_EQ(bits("1.000000059604644775390625"), 0x3F800000U);  // the tie itself goes to even
  EXPECT_EQ(bits("1e-45"), 1U);                                // the smallest subnormal
  EXPECT_EQ(bits("1e-60"), 0U);
  EXPECT_EQ(bits("1e-4000"), 0U);
  EXPECT_EQ(parse("1e39").binary32(), std::nullopt);
  EXPECT_EQ(parse("1e308").binary64(), 1e308);
  expect_refused("1e999", "not valid JSON");
}

TEST(Json, LimitsHold) {
  EXPECT_NO_THROW(parse("[[[[1]]]]"));
  expect_refused("[[[[[1]]]]]", "nested deeper than 4");
  expect_refused(R"({"a":{"a":{"a":{"a":{"a":1}}}}})", "nested deeper than 4");
  expect_refused(std::string(900, '['), "nested deeper than 4");
  EXPECT_NO_THROW(parse("[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]"));
  expect_refused("[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "more than 20 values");
  EXPECT_NO_THROW(parse("1" + std::string(999, ' ')));
  expect_refused("1" + std::string(1000, ' '), "1001 bytes");
}

TEST(Json, DuplicateNamesAreRefusedByName) {
  expect_refused(R"({"x":1,"twin":1,"y":2,"twin":1})", "\"twin\"");
  expect_refused(R"({"o":{"twin":1,"\u0074win":null}})", "\"twin\"");  // equal after unescaping
  EXPECT_NO_THROW(parse(R"({"a":{"k":1},"b":{"k":1}})"));
}

TEST(Json, IllFormedTextIsRefused) {
  expect_refused("", "empty");
  for (const std::string_view text :
       {"{",          "}",        "[1,]",         "{\"a\":}",    "{\"a\" 1}", "{a:1}",   "NaN",
        "[Infinity]", "-",        "01",           "1 2",         "{} x",      "// c\n1", "'a'",
        "\"\x01\"",   "\"\xFF\"", "\"\xC0\xAF\"", "\"\\ud800\"", "\"abc",     "tru",     " "}) {
    expect_refused(text, "not valid JSON");
  }
}

TEST(Json, ZeroBytesAndByteOrderMarksAreRefused) {
  // Readers that stop at a zero byte would accept whatever follows it.
  expect_refused(std::string_view("{}\0", 3), "zero byte");
  expect_refused(std::string_view("{}\0{\"a\":1}", 10), "zero byte");
  expect_refused(std::string_view("\"a\0b\"", 5), "zero byte");
  expect_refused("\xEF\xBB\xBF{}", "byte order mark");
}

TEST(Json, MessagesCarryNoControlCharacters) {
  EXPECT_EQ(printable("a\xC2\x9B"
                      "b\xC2\xA9\x7F"),
            "a?b\xC2\xA9?");
  std::string long_text(199, 'x');
  long_text += "\xC3\xA9";  // a character that the cut would split
  EXPECT_EQ(printable(long_text), std::string(199, 'x') + "...");
  const std::string summary = parse("\"a\\u001b[31m\\n\"").summary();
  EXPECT_EQ(summary, "\"a?[31m?\"");
}

}  // namespace
}  // namespace bitwitness
