#include "kernels/tokenizer/tokenizer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>
#include <unordered_map>
#include <unordered_set>

#include "attest/base/error.h"
#include "kernels/tokenizer/added_tokens.h"
#include "kernels/tokenizer/bpe.h"
#include "kernels/tokenizer/byte_level.h"
#include "kernels/tokenizer/normalizer.h"
#include "kernels/tokenizer/pretokenizer.h"
#include "kernels/tokenizer/spec.h"

namespace bitwitness {
namespace {

// Words are encoded once for each call; longer ones are rarely seen twice.
constexpr std::size_t kCachedWordBytesMax = 128;
constexpr std::size_t kCachedWordsMax = 1 << 16;

}  // namespace

struct Tokenizer::Impl {
  struct Token {
    std::string text;   // as the file spells it; a normalized added token: its normalized text
    std::string bytes;  // what it stands for
    bool special = false;
  };

  std::string origin;
  std::unordered_map<std::uint32_t, Token> tokens;
  std::unordered_map<std::string, std::uint32_t> ids;  // by the spelling in the file
  std::uint32_t id_limit = 0;
  tok::AddedTokenMatcher raw_added;         // matched in the text as given
  tok::AddedTokenMatcher normalized_added;  // matched in the normalized text
  tok::Normalizer normalizer;
  tok::PreTokenizer pre_tokenizer;
  tok::Bpe bpe;
  std::vector<tok::Template> templates;

  Impl(tok::TokenizerSpec spec, std::string origin_name) : origin(std::move(origin_name)) {
    tokens.reserve(spec.vocab.size() + spec.added_tokens.size());
    ids.reserve(spec.vocab.size() + spec.added_tokens.size());
    for (const auto& [text, id] : spec.vocab) add(id, text, text, false);

    bpe = tok::Bpe(spec, origin);
    normalizer = tok::Normalizer(std::move(spec.normalizer), origin);
    pre_tokenizer = tok::PreTokenizer(std::move(spec.pre_tokenizer), origin);
    // The stock library decodes a normalized token to its normalized text, and takes it for special
    // if that text is a special token's.
    std::unordered_set<std::string_view> special_texts;
    for (const tok::AddedToken& token : spec.added_tokens) {
      if (token.special) special_texts.insert(token.content);
    }
    // Special tokens come first: of equal strings the first one counts.
    for (const bool special : {true, false}) {
      for (const tok::AddedToken& token : spec.added_tokens) {
        if (token.special != special) continue;
        if (!token.normalized) {
          raw_added.add(token.content, token);
          add(token.id, token.content, token.content, token.special);
          continue;
        }
        const std::string text = normalizer.apply(token.content);
        if (text.empty()) {
          throw usage_error(origin + ": the added token " + tok::quote_name(token.content) +
                            " is empty after normalization");
        }
        if (text.size() > tok::kAddedTokenBytesMax) {
          throw usage_error(origin + ": the added token " + tok::quote_name(token.content) +
                            " is too long after normalization");
        }
        normalized_added.add(text, token);
        add(token.id, token.content, text, special_texts.contains(text));
      }
    }
    for (const tok::Template& items : spec.templates) {
      for (const tok::TemplateItem& item : items) {
        for (const std::uint32_t id : item.ids) {
          if (!tokens.contains(id)) {
            throw usage_error(origin + ": post_processor names id " + std::to_string(id) +
                              ", which no token has");
          }
        }
      }
    }
    templates = std::move(spec.templates);
  }

  void add(std::uint32_t id, const std::string& spelling, const std::string& text, bool special) {
    // A token with a character outside the byte-level alphabet stands for itself.
    tokens[id] = Token{text, tok::bytes_of_token(text).value_or(text), special};
    ids[spelling] = id;
    id_limit = std::max(id_limit, id + 1);
  }

  const Token& token(std::uint32_t id) const {
    const auto found = tokens.find(id);
    if (found == tokens.end()) {
      throw usage_error(origin + ": no token has id " + std::to_string(id) + " (ids end at " +
                        std::to_string(id_limit - 1) + ")");
    }
    return found->second;
  }
};

namespace {

// Words to ids, remembering short words within one call.
class WordEncoder {
 public:
  explicit WordEncoder(const tok::Bpe& bpe) : bpe_(bpe) {}

  void encode(std::string_view word, std::vector<std::uint32_t>& ids) {
    if (word.size() > kCachedWordBytesMax) {
      bpe_.encode_word(word, scratch_, ids);
      return;
    }
    key_.assign(word);
    const auto known = cache_.find(key_);
    if (known != cache_.end()) {
      ids.insert(ids.end(), known->second.begin(), known->second.end());
      return;
    }
    const std::size_t before = ids.size();
    bpe_.encode_word(word, scratch_, ids);
    if (cache_.size() < kCachedWordsMax) {
      cache_.emplace(key_, std::vector<std::uint32_t>(
                               ids.begin() + static_cast<std::ptrdiff_t>(before), ids.end()));
    }
  }

 private:
  const tok::Bpe& bpe_;
  tok::Bpe::Scratch scratch_;
  std::unordered_map<std::string, std::vector<std::uint32_t>> cache_;
  std::string key_;
};

}  // namespace

Tokenizer::Tokenizer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  std::error_code status_error;
  if (std::filesystem::is_directory(path, status_error)) {
    throw usage_error(path.string() + ": is a directory; name the tokenizer.json in it");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw usage_error(path.string() + ": cannot be opened: " + std::strerror(errno));
  }
  std::string content;
  std::vector<char> block(std::size_t{1} << 20);
  while (file.read(block.data(), static_cast<std::streamsize>(block.size())) || file.gcount() > 0) {
    content.append(block.data(), static_cast<std::size_t>(file.gcount()));
    if (content.size() > kTokenizerFileBytesMax) {
      throw usage_error(path.string() + ": larger than the " +
                        std::to_string(kTokenizerFileBytesMax) +
                        " bytes a tokenizer.json may have");
    }
  }
  if (file.bad()) {
    throw infrastructure_error(path.string() + ": reading failed: " + std::strerror(errno));
  }
  return from_json(std::as_bytes(std::span(content)), path.string());
}

Tokenizer Tokenizer::from_json(std::span<const std::byte> json, std::string_view origin) {
  const std::string name(origin);
  return Tokenizer(std::make_shared<const Impl>(tok::parse_tokenizer_json(json, name), name));
}

std::vector<std::uint32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  if (text.size() > kTokenizerTextBytesMax) {
    throw usage_error("text of " + std::to_string(text.size()) +
                      " bytes; the tokenizer takes at most " +
                      std::to_string(kTokenizerTextBytesMax));
  }
  if (const auto offset = tok::first_invalid_utf8(text)) {
    throw usage_error("the text is not UTF-8 at byte " + std::to_string(*offset));
  }
  std::vector<std::uint32_t> ids;
  WordEncoder encoder(impl_->bpe);
  tok::Words words;
  for (const tok::Segment& outer : impl_->raw_added.split(text)) {
    if (outer.id) {
      ids.push_back(*outer.id);
      continue;
    }
    std::string normalized;
    std::string_view part = outer.text;
    if (!impl_->normalizer.empty()) part = normalized = impl_->normalizer.apply(part);
    for (const tok::Segment& inner : impl_->normalized_added.split(part)) {
      if (inner.id) {
        ids.push_back(*inner.id);
        continue;
      }
      impl_->pre_tokenizer.split(inner.text, words);
      for (const std::string_view word : words.list) encoder.encode(word, ids);
    }
  }
  if (add_special_tokens) {
    for (const tok::Template& items : impl_->templates) {
      std::vector<std::uint32_t> wrapped;
      for (const tok::TemplateItem& item : items) {
        const std::vector<std::uint32_t>& source = item.is_text ? ids : item.ids;
        wrapped.insert(wrapped.end(), source.begin(), source.end());
      }
      ids = std::move(wrapped);
    }
  }
  return ids;
}

std::string Tokenizer::decode(std::span<const std::uint32_t> ids, bool skip_special) const {
  std::string out;
  LossyUtf8 utf8;
  for (const std::uint32_t id : ids) {
    const Impl::Token& token = impl_->token(id);
    if (!(skip_special && token.special)) utf8.push(token.bytes, out);
  }
  utf8.flush(out);
  return out;
}

std::string_view Tokenizer::token_bytes(std::uint32_t id) const {
  return impl_->token(id).bytes;
}

bool Tokenizer::is_special(std::uint32_t id) const {
  return impl_->token(id).special;
}

std::optional<std::uint32_t> Tokenizer::token_to_id(std::string_view token) const {
  const auto found = impl_->ids.find(std::string(token));
  if (found == impl_->ids.end()) return std::nullopt;
  return found->second;
}

std::optional<std::string_view> Tokenizer::id_to_token(std::uint32_t id) const {
  const auto found = impl_->tokens.find(id);
  if (found == impl_->tokens.end()) return std::nullopt;
  return found->second.text;
}

std::size_t Tokenizer::vocab_size() const {
  return impl_->tokens.size();
}

std::uint32_t Tokenizer::id_limit() const {
  return impl_->id_limit;
}

StreamDecoder::StreamDecoder(Tokenizer tokenizer, bool skip_special)
    : tokenizer_(std::move(tokenizer)), skip_special_(skip_special) {}

std::string StreamDecoder::push(std::uint32_t id) {
  std::string out;
  if (!(skip_special_ && tokenizer_.is_special(id))) utf8_.push(tokenizer_.token_bytes(id), out);
  return out;
}

std::string StreamDecoder::flush() {
  std::string out;
  utf8_.flush(out);
  return out;
}

}  // namespace bitwitness
