#include "kernels/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <cstdio>

#include "attest/base/error.h"
#include "kernels/tokenizer/byte_level.h"
#include "kernels/tokenizer/utf8.h"

namespace bitwitness::tok {
namespace {

// Finalizer of MurmurHash3: spreads the pair over the table.
std::uint64_t mix(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xFF51AFD7ED558CCDu;
  x ^= x >> 33;
  x *= 0xC4CEB9FE1A85EC53u;
  return x ^ x >> 33;
}

std::uint64_t pair_of(std::uint32_t left, std::uint32_t right) {
  return std::uint64_t{left} << 32 | right;
}

// Bytes that never occur in UTF-8 need no token.
bool occurs_in_utf8(unsigned b) {
  return b != 0xC0 && b != 0xC1 && b < 0xF5;
}

// Order of the heap: the top is the lowest rank, of equal ranks the leftmost.
bool after(const Bpe::Scratch::Candidate& a, const Bpe::Scratch::Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
}

}  // namespace

Bpe::Bpe(const TokenizerSpec& spec, const std::string& origin) : origin_(origin) {
  std::unordered_map<std::string_view, std::uint32_t> ids;
  ids.reserve(spec.vocab.size());
  for (const auto& [token, id] : spec.vocab) ids.emplace(token, id);
  const auto id_of = [&](const std::string& token, std::size_t rank) {
    const auto found = ids.find(token);
    if (found == ids.end()) {
      throw usage_error(origin + ": model.merges[" + std::to_string(rank) + "]: the token " +
                        quote_name(token) + " is not in model.vocab");
    }
    return found->second;
  };

  for (unsigned b = 0; b < 256; ++b) {
    std::string token;
    append_utf8(byte_char(static_cast<std::uint8_t>(b)), token);
    const auto found = ids.find(token);
    byte_ids_[b] = found == ids.end() ? kNone : found->second;
    if (byte_ids_[b] == kNone && occurs_in_utf8(b) &&
        (!spec.unk_token.empty() || spec.byte_fallback)) {
      throw usage_error(origin + ": model.vocab has no token for byte " + std::to_string(b) + " (" +
                        quote_name(token) + "), and " +
                        (spec.byte_fallback ? "byte_fallback" : "unk_token") + " is not supported");
    }
  }
  if (spec.ignore_merges) {
    word_ids_.reserve(spec.vocab.size());
    for (const auto& [token, id] : spec.vocab) {
      if (auto bytes = bytes_of_token(token)) word_ids_.emplace(std::move(*bytes), id);
    }
  }

  merges_.assign(std::bit_ceil(std::max<std::size_t>(16, spec.merges.size() * 2)),
                 Merge{0, 0, kNone});
  for (std::size_t rank = 0; rank < spec.merges.size(); ++rank) {
    const auto& [left, right] = spec.merges[rank];
    insert_merge({pair_of(id_of(left, rank), id_of(right, rank)), static_cast<std::uint32_t>(rank),
                  id_of(left + right, rank)});
  }
}

void Bpe::insert_merge(const Merge& merge) {
  const std::size_t mask = merges_.size() - 1;
  std::size_t slot = mix(merge.pair) & mask;
  while (merges_[slot].new_id != kNone && merges_[slot].pair != merge.pair)
    slot = (slot + 1) & mask;
  merges_[slot] = merge;  // of equal pairs the last counts, as in the stock library
}

const Bpe::Merge* Bpe::find_merge(std::uint32_t left, std::uint32_t right) const {
  const std::uint64_t pair = pair_of(left, right);
  const std::size_t mask = merges_.size() - 1;
  for (std::size_t slot = mix(pair) & mask; merges_[slot].new_id != kNone;
       slot = (slot + 1) & mask) {
    if (merges_[slot].pair == pair) return &merges_[slot];
  }
  return nullptr;
}

void Bpe::encode_word(std::string_view word, Scratch& scratch,
                      std::vector<std::uint32_t>& ids) const {
  if (!word_ids_.empty()) {
    const auto whole = word_ids_.find(std::string(word));
    if (whole != word_ids_.end()) {
      ids.push_back(whole->second);
      return;
    }
  }
  auto& symbols = scratch.symbols;
  auto& heap = scratch.heap;
  symbols.clear();
  heap.clear();
  const auto count = static_cast<std::int32_t>(word.size());
  for (std::int32_t i = 0; i < count; ++i) {
    const auto byte = static_cast<std::uint8_t>(word[static_cast<std::size_t>(i)]);
    if (byte_ids_[byte] == kNone) {
      throw usage_error(origin_ + ": the vocabulary has no token for byte " + std::to_string(byte) +
                        ", which occurs in this text");
    }
    symbols.push_back({byte_ids_[byte], i - 1, i + 1 < count ? i + 1 : -1, true});
  }
  const auto symbol = [&](std::int32_t i) -> Scratch::Symbol& {
    return symbols[static_cast<std::size_t>(i)];
  };
  const auto propose = [&](std::int32_t left, std::int32_t right) {
    if (const Merge* merge = find_merge(symbol(left).id, symbol(right).id)) {
      heap.push_back({merge->rank, left, merge->new_id});
      return true;
    }
    return false;
  };
  for (std::int32_t i = 0; i + 1 < count; ++i) propose(i, i + 1);
  std::make_heap(heap.begin(), heap.end(), after);
  while (!heap.empty()) {
    const Scratch::Candidate best = heap.front();
    std::pop_heap(heap.begin(), heap.end(), after);
    heap.pop_back();
    Scratch::Symbol& left = symbol(best.position);
    if (!left.alive || left.next < 0) continue;
    Scratch::Symbol& right = symbol(left.next);
    // The entry is stale if its pair has changed since: then it no longer makes this token.
    const Merge* merge = find_merge(left.id, right.id);
    if (merge == nullptr || merge->new_id != best.new_id) continue;
    left.id = best.new_id;
    left.next = right.next;
    right.alive = false;
    if (left.next >= 0) symbol(left.next).previous = best.position;
    if (left.previous >= 0 && propose(left.previous, best.position)) {
      std::push_heap(heap.begin(), heap.end(), after);
    }
    if (left.next >= 0 && propose(best.position, left.next)) {
      std::push_heap(heap.begin(), heap.end(), after);
    }
  }
  for (const Scratch::Symbol& s : symbols) {
    if (s.alive) ids.push_back(s.id);
  }
}

}  // namespace bitwitness::tok
