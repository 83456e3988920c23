// Token ids as people write them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bitwitness {

// "1,2,3": decimal ids separated by commas, spaces around them allowed. Usage error naming the
// offending part. Whether a model has the ids is not checked here.
std::vector<std::uint32_t> parse_token_ids(const std::string& text);

}  // namespace bitwitness
