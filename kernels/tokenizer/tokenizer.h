// A byte-level BPE tokenizer read from a Hugging Face `tokenizer.json`.
//
// The ids are those of the stock `tokenizers` library, for every text. A file that asks for
// something this code does not do, and that could change an id or a decoded character, is refused
// by name when it is loaded; nothing is approximated. What is understood:
//   model           BPE; merges as "a b" or ["a", "b"]; ignore_merges
//   added_tokens    special or not, normalized, lstrip, rstrip, single_word
//   normalizer      NFC, NFD, NFKC, NFKD, Prepend, Replace, Sequence of these
//   pre_tokenizer   Split (every behavior), Digits, ByteLevel, Sequence of these; ByteLevel comes
//   last post_processor  TemplateProcessing, ByteLevel, Sequence of these decoder ByteLevel,
//   Sequence of ByteLevel and Fuse
//
// Records bind token ids, never text: two builds with different Unicode tables may disagree about
// a text with newly assigned characters, and no verdict depends on that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/tokenizer/utf8.h"

namespace bitwitness {

// Limits checked before anything is allocated from them.
inline constexpr std::size_t kTokenizerFileBytesMax = std::size_t{256} << 20;
inline constexpr std::size_t kTokenizerTextBytesMax = std::size_t{256} << 20;
inline constexpr std::uint32_t kTokenIdMax = (1u << 24) - 1;

// Immutable after loading; every member function may be called from several threads at once.
// Copies share the tables. All errors are ErrorKind::kUsage unless stated.
class Tokenizer {
 public:
  struct Impl;

  // Reads `path`. A file that cannot be opened is kUsage, a failing read kInfrastructure.
  static Tokenizer load(const std::filesystem::path& path);

  // `origin` names the bytes in error messages.
  static Tokenizer from_json(std::span<const std::byte> json, std::string_view origin);

  // The ids of `text`, which must be UTF-8 (the error names the first offending byte's offset).
  // Added tokens that occur in the text become their ids, special ones too, as in the stock
  // library. `add_special_tokens` applies the post-processor's template (for example a leading
  // BOS).
  std::vector<std::uint32_t> encode(std::string_view text, bool add_special_tokens) const;

  // The text of `ids`. Bytes that are not UTF-8 become U+FFFD, one per maximal ill-formed
  // subsequence. `skip_special` leaves special tokens out. An id without a token is an error.
  std::string decode(std::span<const std::uint32_t> ids, bool skip_special) const;

  // The bytes one token stands for, special or not: possibly a part of a character.
  std::string_view token_bytes(std::uint32_t id) const;

  bool is_special(std::uint32_t id) const;
  std::optional<std::uint32_t> token_to_id(std::string_view token) const;
  // The token as the file spells it (byte-level alphabet for vocabulary entries); an added token
  // with `normalized` in normalized form.
  std::optional<std::string_view> id_to_token(std::uint32_t id) const;

  // Number of tokens, added ones included.
  std::size_t vocab_size() const;
  // One past the highest id: what a model's vocabulary must at least hold.
  std::uint32_t id_limit() const;

 private:
  explicit Tokenizer(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

// Decodes a stream of ids for display. The pieces returned by push() and flush(), joined, equal
// Tokenizer::decode() of all the ids; a character split over several ids comes out with the last
// one.
class StreamDecoder {
 public:
  StreamDecoder(Tokenizer tokenizer, bool skip_special);

  // The text that became certain with `id`; possibly empty.
  std::string push(std::uint32_t id);
  // The rest (U+FFFD for an unfinished character). The decoder is then as new.
  std::string flush();

 private:
  Tokenizer tokenizer_;
  bool skip_special_;
  LossyUtf8 utf8_;
};

}  // namespace bitwitness
