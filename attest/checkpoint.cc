#include "attest/checkpoint.h"

#include <algorithm>
#include <charconv>

#include "attest/base/base64.h"
#include "attest/base/error.h"

namespace bitwitness {

std::string Checkpoint::body() const {
  std::string text =
      origin + "\n" + std::to_string(size) + "\n" + base64_encode(root.view()) + "\n";
  for (const std::string& line : extensions) text += line + "\n";
  return text;
}

Checkpoint Checkpoint::parse_body(std::string_view text, const std::string& document) {
  const auto fail = [&](const char* problem) {
    throw malformed_error(document + ": checkpoint: " + problem);
  };
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) fail("the last line does not end in a newline");
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  if (lines.size() < 3) fail("fewer than three lines (origin, size, root)");
  Checkpoint out;
  out.origin = std::string(lines[0]);
  if (out.origin.empty()) fail("line 1: the origin is empty");
  const std::string_view digits = lines[1];
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), out.size);
  if (error != std::errc() || end != digits.data() + digits.size() ||
      (digits.size() > 1 && digits[0] == '0')) {
    fail("line 2: the size is no plain decimal number below 2^64");
  }
  // Sizes and indices are doubled and shifted below; no log comes near this.
  if (out.size > std::uint64_t{1} << 62) fail("line 2: the size is not believable (over 2^62)");
  const std::optional<Bytes> root = base64_decode(lines[2]);
  if (!root || root->size() != 32) fail("line 3: the root is not 32 bytes of canonical base64");
  std::copy(root->begin(), root->end(), out.root.bytes.begin());
  for (std::size_t i = 3; i < lines.size(); ++i) {
    if (lines[i].empty()) fail("an extension line is empty");
    out.extensions.emplace_back(lines[i]);
  }
  return out;
}

std::string sign_checkpoint(const Checkpoint& checkpoint, const SigningKey& key) {
  return sign_note(checkpoint.body(), {&key});
}

Checkpoint parse_checkpoint(std::string_view note, const std::string& document) {
  return Checkpoint::parse_body(parse_note(note, document).text, document);
}

Checkpoint open_checkpoint(std::string_view note, const PublicKey& key,
                           const std::string& document) {
  const Note parsed = parse_note(note, document);
  const Checkpoint checkpoint = Checkpoint::parse_body(parsed.text, document);
  if (verify_note(parsed, {key}, document).empty()) {
    throw cannot_judge_error(document + ": checkpoint of " + checkpoint.origin +
                             ": not signed by the key given, " + key.vkey());
  }
  if (checkpoint.origin != key.name) {
    throw malformed_error(document + ": checkpoint: its origin '" + checkpoint.origin +
                          "' is not the name of the key that signed it, '" + key.name + "'");
  }
  return checkpoint;
}

}  // namespace bitwitness
