// Finding added tokens in a text.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernels/tokenizer/spec.h"

namespace bitwitness::tok {

// The longest an added token may be, so that a search stays linear in the text.
inline constexpr std::size_t kAddedTokenBytesMax = 1024;

struct Segment {
  std::string_view text;            // what lies between added tokens, if `id` is empty
  std::optional<std::uint32_t> id;  // an added token
};

// A set of strings searched leftmost first, of those that start there the longest.
class AddedTokenMatcher {
 public:
  // A string already present keeps its first token.
  void add(std::string_view text, const AddedToken& token);

  // Cuts `text`: segments in order; nothing for an empty text.
  std::vector<Segment> split(std::string_view text) const;

 private:
  struct Found {
    std::size_t end;
    std::int32_t token;
  };
  std::optional<Found> longest_at(std::string_view text, std::size_t begin) const;

  std::vector<AddedToken> tokens_;
  std::array<bool, 256> first_bytes_{};
  std::unordered_map<std::uint64_t, std::uint32_t> edges_;  // node << 8 | byte -> node
  std::vector<std::int32_t> node_token_ = {-1};             // token that ends at a node
};

}  // namespace bitwitness::tok
