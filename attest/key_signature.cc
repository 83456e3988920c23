#include "attest/key_signature.h"

#include <algorithm>

namespace bitwitness {
namespace {

Bytes message(std::string_view tag, const std::string& key_name, const Digest& digest) {
  Writer writer;
  writer.raw(as_bytes(tag));
  writer.str(key_name);
  writer.digest(digest);
  return writer.take();
}

}  // namespace

KeySignature KeySignature::sign(const SigningKey& key, std::string_view tag, const Digest& digest) {
  KeySignature out;
  out.key = key.public_key();
  out.signature = key.sign(message(tag, out.key.name, digest));
  return out;
}

bool KeySignature::good(std::string_view tag, const Digest& digest) const {
  return key.verify(message(tag, key.name, digest), signature);
}

void KeySignature::write(Writer& writer) const {
  writer.str(key.name);
  writer.u32(key.key_id());
  writer.raw(key.bytes);
  writer.raw(signature);
}

KeySignature KeySignature::read(Reader& reader) {
  KeySignature out;
  out.key.name = reader.str(255, "key name");
  if (!is_key_name(out.key.name)) reader.fail("key name", "not a key name");
  const std::uint32_t key_id = reader.u32("key id");
  const ByteView key = reader.raw(32, "public key");
  std::copy(key.begin(), key.end(), out.key.bytes.begin());
  if (key_id != out.key.key_id()) {
    reader.fail("public key", "the key id does not belong to the name and key");
  }
  const ByteView signature = reader.raw(64, "signature");
  std::copy(signature.begin(), signature.end(), out.signature.begin());
  return out;
}

}  // namespace bitwitness
