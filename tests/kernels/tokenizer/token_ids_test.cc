#include "kernels/tokenizer/token_ids.h"

#include <gtest/gtest.h>

#include "attest/base/error.h"

namespace bitwitness {
namespace {

TEST(TokenIds, AreDecimalAndSeparatedByCommas) {
  EXPECT_EQ(parse_token_ids("1,2, 3"), (std::vector<std::uint32_t>{1, 2, 3}));
  for (const char* bad : {"", "1,", ",1", "1,,2", "x", "-1", "1 2", "4294967296", "0x10"}) {
    EXPECT_THROW(parse_token_ids(bad), Error) << bad;
  }
}

}  // namespace
}  // namespace bitwitness
