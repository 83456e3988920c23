// An Ed25519 signature together with the public key that it is by, as it stands in our documents.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "attest/base/bytes.h"
#include "attest/base/canonical.h"
#include "attest/keys.h"

namespace bitwitness {

// What is signed is tag ‖ string key name ‖ digest; the tag names the purpose, so that a signature
// for one purpose is none for another.
struct KeySignature {
  PublicKey key;
  std::array<std::uint8_t, 64> signature{};

  static KeySignature sign(const SigningKey& key, std::string_view tag, const Digest& digest);
  bool good(std::string_view tag, const Digest& digest) const;

  // string name, u32 key id, 32 bytes of key, 64 bytes of signature. read() checks the form (a key
  // name, the key id of that name and key), not the signature; malformed otherwise.
  void write(Writer& writer) const;
  static KeySignature read(Reader& reader);
  friend bool operator==(const KeySignature&, const KeySignature&) = default;
};

}  // namespace bitwitness
