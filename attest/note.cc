#include "attest/note.h"

#include <set>
#include <stdexcept>
#include <utility>

#include "attest/base/base64.h"
#include "attest/base/canonical.h"
#include "attest/base/error.h"

namespace bitwitness {
namespace {

constexpr std::string_view kLinePrefix = "\xe2\x80\x94 ";  // em dash U+2014 and a space

// The first problem of a note's text, or null. Newline is the one control character allowed.
const char* text_problem(std::string_view text) {
  if (text.empty() || text.back() != '\n') return "the text does not end in a newline";
  if (!is_utf8(as_bytes(text))) return "not valid UTF-8";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 && c != '\n') return "a control character";
  }
  return nullptr;
}

}  // namespace

std::string sign_note(const std::string& text, const std::vector<const SigningKey*>& keys) {
  if (const char* problem = text_problem(text)) {
    throw std::invalid_argument(std::string("sign_note: ") + problem);
  }
  std::string note = text + "\n";
  for (const SigningKey* key : keys) {
    const std::uint32_t id = key->public_key().key_id();
    Bytes blob{static_cast<std::uint8_t>(id >> 24), static_cast<std::uint8_t>(id >> 16),
               static_cast<std::uint8_t>(id >> 8), static_cast<std::uint8_t>(id)};
    const auto signature = key->sign(as_bytes(text));
    blob.insert(blob.end(), signature.begin(), signature.end());
    note += kLinePrefix;
    note += key->public_key().name + " " + base64_encode(blob) + "\n";
  }
  return note;
}

Note parse_note(std::string_view note, const std::string& document) {
  const auto fail = [&](const std::string& problem) {
    throw malformed_error(document + ": signed note: " + problem);
  };
  if (note.size() > kMaxNoteBytes) fail("more than 1,000,000 bytes");
  if (const char* problem = text_problem(note)) fail(problem);
  // The last blank line ends the text: the text itself may have blank lines.
  const std::size_t split = note.rfind("\n\n");
  if (split == std::string_view::npos) fail("no blank line before the signatures");
  Note out;
  out.text = std::string(note.substr(0, split + 1));
  std::string_view lines = note.substr(split + 2);
  if (lines.empty()) fail("no signature");
  std::size_t number = 0;
  while (!lines.empty()) {
    const std::size_t end = lines.find('\n');
    std::string_view line = lines.substr(0, end);
    lines.remove_prefix(end + 1);
    const std::string where = "signature line " + std::to_string(++number) + ": ";
    if (number > kMaxNoteSignatures) fail("more than 100 signatures");
    if (!line.starts_with(kLinePrefix)) fail(where + "does not begin with an em dash and a space");
    line.remove_prefix(kLinePrefix.size());
    const std::size_t space = line.find(' ');
    if (space == std::string_view::npos) fail(where + "no space between name and signature");
    NoteSignature signature;
    signature.name = std::string(line.substr(0, space));
    if (!is_key_name(signature.name)) fail(where + "bad key name");
    const std::optional<Bytes> blob = base64_decode(line.substr(space + 1));
    if (!blob) fail(where + "not canonical base64");
    if (blob->size() < 5) fail(where + "too short");
    signature.key_id = std::uint32_t{(*blob)[0]} << 24 | std::uint32_t{(*blob)[1]} << 16 |
                       std::uint32_t{(*blob)[2]} << 8 | std::uint32_t{(*blob)[3]};
    signature.signature.assign(blob->begin() + 4, blob->end());
    out.signatures.push_back(std::move(signature));
  }
  return out;
}

std::vector<PublicKey> verify_note(const Note& note, const std::vector<PublicKey>& known,
                                   const std::string& document) {
  std::vector<PublicKey> good;
  std::set<std::pair<std::string, std::uint32_t>> seen;
  for (const NoteSignature& signature : note.signatures) {
    for (const PublicKey& key : known) {
      if (key.name != signature.name || key.key_id() != signature.key_id) continue;
      if (!key.verify(as_bytes(note.text), signature.signature)) {
        throw malformed_error(document + ": signed note: the signature by " + key.name +
                              " is not good: the text was altered, or the signature is forged");
      }
      if (seen.emplace(key.name, signature.key_id).second) good.push_back(key);
    }
  }
  return good;
}

}  // namespace bitwitness
