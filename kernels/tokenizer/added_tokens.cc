#include "kernels/tokenizer/added_tokens.h"

#include <algorithm>

#include "kernels/tokenizer/utf8.h"

namespace bitwitness::tok {
namespace {

char32_t char_before(std::string_view text, std::size_t end, std::size_t& begin) {
  begin = end - 1;
  while ((static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  std::size_t offset = begin;
  return next_char(text, offset);
}

}  // namespace

void AddedTokenMatcher::add(std::string_view text, const AddedToken& token) {
  std::uint32_t node = 0;
  for (const char c : text) {
    const std::uint64_t key = std::uint64_t{node} << 8 | static_cast<std::uint8_t>(c);
    const auto fresh = static_cast<std::uint32_t>(node_token_.size());
    const auto [edge, inserted] = edges_.try_emplace(key, fresh);
    if (inserted) node_token_.push_back(-1);
    node = edge->second;
  }
  if (node_token_[node] >= 0) return;
  node_token_[node] = static_cast<std::int32_t>(tokens_.size());
  tokens_.push_back(token);
  first_bytes_[static_cast<std::uint8_t>(text[0])] = true;
}

std::optional<AddedTokenMatcher::Found> AddedTokenMatcher::longest_at(std::string_view text,
                                                                      std::size_t begin) const {
  std::optional<Found> found;
  std::uint32_t node = 0;
  for (std::size_t i = begin; i < text.size(); ++i) {
    const auto edge = edges_.find(std::uint64_t{node} << 8 | static_cast<std::uint8_t>(text[i]));
    if (edge == edges_.end()) break;
    node = edge->second;
    if (node_token_[node] >= 0) found = Found{i + 1, node_token_[node]};
  }
  return found;
}

std::vector<Segment> AddedTokenMatcher::split(std::string_view text) const {
  std::vector<Segment> segments;
  std::size_t from = 0;  // end of the last segment
  struct {
    std::size_t begin = 0;
    std::size_t end = 0;
  } blanks;  // the last run of white space that rstrip skipped
  for (std::size_t at = 0; at < text.size() && !tokens_.empty();) {
    const auto found =
        first_bytes_[static_cast<std::uint8_t>(text[at])] ? longest_at(text, at) : std::nullopt;
    if (!found) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<std::size_t>(found->token)];
    std::size_t begin = at;
    std::size_t end = found->end;
    at = end;  // where the search goes on, whatever becomes of this match
    if (token.single_word) {
      std::size_t offset = 0;
      const bool word_before = begin > 0 && is_word_char(char_before(text, begin, offset));
      offset = end;
      const bool word_after = end < text.size() && is_word_char(next_char(text, offset));
      if (word_before || word_after) continue;
    }
    if (token.lstrip) {
      std::size_t start = begin;
      std::size_t previous = 0;
      while (start > from && is_white_space(char_before(text, start, previous))) start = previous;
      begin = std::max(start, from);
    }
    if (token.rstrip) {
      if (end < blanks.begin || end > blanks.end) {
        blanks = {end, end};
        for (std::size_t offset = end; offset < text.size();) {
          if (!is_white_space(next_char(text, offset))) break;
          blanks.end = offset;
        }
      }
      end = blanks.end;
    }
    // Nothing left: the rstrip of the token before took it. (Without lstrip the stock library
    // counts such a token once more, and so does this.)
    if (begin >= end) continue;
    if (from < begin) segments.push_back({text.substr(from, begin - from), std::nullopt});
    segments.push_back({{}, token.id});
    from = end;
  }
  if (from < text.size()) segments.push_back({text.substr(from), std::nullopt});
  return segments;
}

}  // namespace bitwitness::tok
