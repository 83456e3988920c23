// Ed25519 keys through OpenSSL, named and identified as C2SP signed notes do.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "attest/base/bytes.h"
#include "attest/base/error.h"

namespace bitwitness {

struct PublicKey {
  std::string name;
  std::array<std::uint8_t, 32> bytes{};

  // First 4 bytes (big-endian) of SHA-256(name ‖ 0x0A ‖ 0x01 ‖ bytes).
  std::uint32_t key_id() const;
  // name+hex(key id)+base64(0x01 ‖ bytes)
  std::string vkey() const;
  // False also for signatures of any length but 64 and for keys that are no curve point.
  bool verify(ByteView message, ByteView signature) const;

  // Throws an Error of `kind` (usage for a flag, malformed for evidence).
  static PublicKey parse_vkey(std::string_view vkey, ErrorKind kind = ErrorKind::kUsage);
  // `text_or_path`: a verifier key string, or the path of a file that holds one.
  static PublicKey load_vkey(const std::string& text_or_path);
  friend bool operator==(const PublicKey&, const PublicKey&) = default;
};

// Key names: not empty, at most 255 bytes of UTF-8, no white space, no control characters, no '+'.
bool is_key_name(std::string_view name);

class SigningKey {
 public:
  static SigningKey generate(const std::string& name);  // usage Error for a bad name
  // From the 32-byte Ed25519 seed (RFC 8032 private key).
  static SigningKey from_seed(const std::string& name, ByteView seed);
  // `pem_path`: PKCS#8 PEM; its name comes from `pem_path`.vkey, which must belong to it. Refuses
  // (usage) a private key file that group or others may read or write.
  static SigningKey load(const std::string& pem_path);

  // Writes pem_path (mode 0600) and pem_path.vkey. Without `replace` neither may exist.
  void save(const std::string& pem_path, bool replace = false) const;

  const PublicKey& public_key() const { return public_key_; }
  std::array<std::uint8_t, 64> sign(ByteView message) const;

 private:
  struct Key;
  SigningKey(std::string name, std::shared_ptr<const Key> key);
  std::shared_ptr<const Key> key_;
  PublicKey public_key_;
};

}  // namespace bitwitness
