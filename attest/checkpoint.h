// C2SP checkpoints (https://c2sp.org/tlog-checkpoint): the signed tree head of a log.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/keys.h"
#include "attest/note.h"

namespace bitwitness {

struct Checkpoint {
  std::string origin;  // name of the log
  std::uint64_t size = 0;
  Digest root;
  std::vector<std::string> extensions;  // further lines, rarely used

  std::string body() const;  // "origin\nsize\nbase64(root)\n" and extensions
  static Checkpoint parse_body(std::string_view text, const std::string& document);
  friend bool operator==(const Checkpoint&, const Checkpoint&) = default;
};

std::string sign_checkpoint(const Checkpoint& checkpoint, const SigningKey& key);

// Form of note and body, no signature checked. Malformed on any flaw.
Checkpoint parse_checkpoint(std::string_view note, const std::string& document);

// The checkpoint, if `key` signed it and its origin is the key's name. A bad signature by that key,
// or any flaw of form, is malformed; no signature by that key is cannot_judge.
Checkpoint open_checkpoint(std::string_view note, const PublicKey& key,
                           const std::string& document);

}  // namespace bitwitness
