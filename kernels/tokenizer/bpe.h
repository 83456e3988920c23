// Byte-pair encoding of one word.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernels/tokenizer/spec.h"

namespace bitwitness::tok {

class Bpe {
 public:
  // Memory that encode_word() reuses from word to word.
  class Scratch {
   public:
    struct Symbol {
      std::uint32_t id;
      std::int32_t previous;
      std::int32_t next;  // -1: the last
      bool alive;
    };
    struct Candidate {
      std::uint32_t rank;
      std::int32_t position;
      std::uint32_t new_id;
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  Bpe() = default;
  // Refuses (kUsage) merges that name tokens the vocabulary does not have.
  Bpe(const TokenizerSpec& spec, const std::string& origin);

  // Appends the ids of `word` (raw bytes, at most 2^31 - 1) to `ids`. The pair of lowest rank
  // merges first, of equal ones the leftmost; a heap of candidates keeps this O(n log n).
  void encode_word(std::string_view word, Scratch& scratch, std::vector<std::uint32_t>& ids) const;

 private:
  struct Merge {
    std::uint64_t pair;  // left id << 32 | right id
    std::uint32_t rank;
    std::uint32_t new_id;  // kNone: an empty slot
  };
  static constexpr std::uint32_t kNone = UINT32_MAX;

  const Merge* find_merge(std::uint32_t left, std::uint32_t right) const;
  void insert_merge(const Merge& merge);

  std::array<std::uint32_t, 256> byte_ids_{};  // kNone: no token for this byte
  std::unordered_map<std::string, std::uint32_t>
      word_ids_;               // filled if merges are ignored for these
  std::vector<Merge> merges_;  // open addressing, at most half full
  std::string origin_;
};

}  // namespace bitwitness::tok
