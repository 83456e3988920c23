#include "kernels/tokenizer/token_ids.h"

#include <algorithm>
#include <charconv>

#include "attest/base/error.h"

namespace bitwitness {

std::vector<std::uint32_t> parse_token_ids(const std::string& text) {
  std::vector<std::uint32_t> ids;
  std::size_t at = 0;
  while (true) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    std::string part = text.substr(at, comma - at);
    while (!part.empty() && part.front() == ' ') part.erase(0, 1);
    while (!part.empty() && part.back() == ' ') part.pop_back();
    std::uint32_t id = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), id);
    if (part.empty() || error != std::errc() || end != part.data() + part.size()) {
      throw usage_error("--token-ids: '" + part.substr(0, 40) +
                        "' is no token id; give decimal ids separated by commas, e.g. 1,2,3");
    }
    ids.push_back(id);
    if (comma == text.size()) return ids;
    at = comma + 1;
  }
}

}  // namespace bitwitness
