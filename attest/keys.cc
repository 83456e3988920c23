#include "attest/keys.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "attest/base/base64.h"
#include "attest/base/canonical.h"
#include "attest/base/file.h"
#include "attest/base/hex.h"
#include "attest/base/sha256.h"

namespace bitwitness {
namespace {

constexpr std::uint8_t kAlgorithmEd25519 = 0x01;  // C2SP signed-note, signature types
constexpr std::size_t kMaxNameBytes = 255;
constexpr std::uint64_t kMaxPemBytes = 16384;
constexpr std::uint64_t kMaxVkeyBytes = 1024;

struct PkeyFree {
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using Pkey = std::unique_ptr<EVP_PKEY, PkeyFree>;
struct MdCtxFree {
  void operator()(EVP_MD_CTX* ctx) const { EVP_MD_CTX_free(ctx); }
};
using MdCtx = std::unique_ptr<EVP_MD_CTX, MdCtxFree>;
struct BioFree {
  void operator()(BIO* bio) const { BIO_free(bio); }
};
using Bio = std::unique_ptr<BIO, BioFree>;

[[noreturn]] void openssl_failed(const char* what) {
  char reason[256] = "unknown reason";
  if (const unsigned long code = ERR_get_error()) ERR_error_string_n(code, reason, sizeof reason);
  ERR_clear_error();
  throw infrastructure_error(std::string(what) + " failed in OpenSSL: " + reason);
}

std::array<std::uint8_t, 32> raw_public_key(EVP_PKEY* key) {
  std::array<std::uint8_t, 32> bytes{};
  std::size_t size = bytes.size();
  if (EVP_PKEY_get_raw_public_key(key, bytes.data(), &size) != 1 || size != bytes.size()) {
    openssl_failed("reading an Ed25519 public key");
  }
  return bytes;
}

// A PEM file that wants a pass phrase must not make a program wait at a prompt.
int no_pass_phrase(char*, int, int, void*) {
  return -1;
}

std::string trim_newline(std::string text) {
  if (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

}  // namespace

bool is_key_name(std::string_view name) {
  if (name.empty() || name.size() > kMaxNameBytes || !is_utf8(as_bytes(name))) return false;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const auto c = static_cast<unsigned char>(name[i]);
    if (c <= 0x20 || c == 0x7f || c == '+') return false;
    const std::string_view rest = name.substr(i);
    // White space and controls beyond ASCII: U+0080-U+00A0, U+1680, U+2000-U+200A, U+2028, U+2029,
    // U+202F, U+205F, U+3000.
    if (c == 0xc2 && static_cast<unsigned char>(rest[1]) <= 0xa0) return false;
    for (const std::string_view space : {"\xe1\x9a\x80", "\xe2\x80\xa8", "\xe2\x80\xa9",
                                         "\xe2\x80\xaf", "\xe2\x81\x9f", "\xe3\x80\x80"}) {
      if (rest.starts_with(space)) return false;
    }
    if (rest.starts_with("\xe2\x80") && static_cast<unsigned char>(rest[2]) <= 0x8a) return false;
  }
  return true;
}

std::uint32_t PublicKey::key_id() const {
  const std::uint8_t separator[2] = {0x0a, kAlgorithmEd25519};
  const Digest digest = sha256({as_bytes(name), ByteView(separator), ByteView(bytes)});
  return std::uint32_t{digest.bytes[0]} << 24 | std::uint32_t{digest.bytes[1]} << 16 |
         std::uint32_t{digest.bytes[2]} << 8 | std::uint32_t{digest.bytes[3]};
}

std::string PublicKey::vkey() const {
  const std::uint32_t id = key_id();
  const std::uint8_t id_bytes[4] = {
      static_cast<std::uint8_t>(id >> 24), static_cast<std::uint8_t>(id >> 16),
      static_cast<std::uint8_t>(id >> 8), static_cast<std::uint8_t>(id)};
  Bytes typed{kAlgorithmEd25519};
  typed.insert(typed.end(), bytes.begin(), bytes.end());
  return name + "+" + to_hex(id_bytes) + "+" + base64_encode(typed);
}

bool PublicKey::verify(ByteView message, ByteView signature) const {
  if (signature.size() != 64) return false;
  const Pkey key(
      EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, bytes.data(), bytes.size()));
  const MdCtx ctx(EVP_MD_CTX_new());
  bool good = key && ctx &&
              EVP_DigestVerifyInit(ctx.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
              EVP_DigestVerify(ctx.get(), signature.data(), signature.size(), message.data(),
                               message.size()) == 1;
  ERR_clear_error();  // a bad signature is an answer, not a failure to report later
  return good;
}

PublicKey PublicKey::parse_vkey(std::string_view vkey, ErrorKind kind) {
  const auto fail = [&](const std::string& problem) {
    throw Error(kind, "verifier key: " + problem +
                          "; expected NAME+KEYID+BASE64 with an Ed25519 key, as in a .vkey file");
  };
  if (vkey.size() > kMaxVkeyBytes) fail("too long");
  const std::size_t first = vkey.find('+');
  const std::size_t second = first == std::string_view::npos ? first : vkey.find('+', first + 1);
  if (second == std::string_view::npos) fail("two '+' needed");
  PublicKey key;
  key.name = std::string(vkey.substr(0, first));
  if (!is_key_name(key.name)) fail("bad name");
  const std::optional<Bytes> id = from_hex(vkey.substr(first + 1, second - first - 1));
  const std::optional<Bytes> typed = base64_decode(vkey.substr(second + 1));
  if (!id || id->size() != 4) fail("the key id is not 8 lower-case hexadecimal digits");
  if (!typed) fail("the key is not canonical base64");
  if (typed->size() != 33 || (*typed)[0] != kAlgorithmEd25519) fail("not an Ed25519 key");
  std::copy(typed->begin() + 1, typed->end(), key.bytes.begin());
  const std::uint32_t id_value = std::uint32_t{(*id)[0]} << 24 | std::uint32_t{(*id)[1]} << 16 |
                                 std::uint32_t{(*id)[2]} << 8 | std::uint32_t{(*id)[3]};
  if (id_value != key.key_id()) fail("the key id does not belong to the name and key");
  return key;
}

PublicKey PublicKey::load_vkey(const std::string& text_or_path) {
  const bool looks_like_key = text_or_path.find('+') != std::string::npos;
  if (looks_like_key && !path_exists(text_or_path)) return parse_vkey(text_or_path);
  const Bytes bytes =
      read_file(text_or_path, {.max_bytes = kMaxVkeyBytes, .too_large = ErrorKind::kUsage});
  if (as_text(bytes).starts_with("-----BEGIN")) {
    throw usage_error(text_or_path + ": is a PEM key; give the verifier key, " + text_or_path +
                      ".vkey");
  }
  try {
    return parse_vkey(trim_newline(std::string(as_text(bytes))));
  } catch (const Error& error) {
    throw Error(error.kind(), text_or_path + ": " + error.what());
  }
}

struct SigningKey::Key {
  Pkey pkey;
};

SigningKey::SigningKey(std::string name, std::shared_ptr<const Key> key) : key_(std::move(key)) {
  if (!is_key_name(name)) {
    throw usage_error("key name '" + name +
                      "': must be 1 to 255 bytes of UTF-8 without white space or '+', for example "
                      "log.example.org/bitwitness");
  }
  public_key_.name = std::move(name);
  public_key_.bytes = raw_public_key(key_->pkey.get());
}

SigningKey SigningKey::generate(const std::string& name) {
  Pkey pkey(EVP_PKEY_Q_keygen(nullptr, nullptr, "ED25519"));
  if (!pkey) openssl_failed("generating an Ed25519 key");
  return SigningKey(name, std::make_shared<Key>(Key{std::move(pkey)}));
}

SigningKey SigningKey::from_seed(const std::string& name, ByteView seed) {
  if (seed.size() != 32) throw usage_error("Ed25519 seed: must have 32 bytes");
  Pkey pkey(EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, seed.data(), seed.size()));
  if (!pkey) openssl_failed("making an Ed25519 key from its seed");
  return SigningKey(name, std::make_shared<Key>(Key{std::move(pkey)}));
}

SigningKey SigningKey::load(const std::string& pem_path) {
  struct stat info {};
  if (::stat(pem_path.c_str(), &info) != 0) {
    throw usage_error(pem_path + ": cannot open the key file: " + std::strerror(errno));
  }
  if (!S_ISREG(info.st_mode)) throw usage_error(pem_path + ": not a regular file");
  if ((info.st_mode & 077) != 0) {
    throw usage_error(pem_path +
                      ": this private key is open to group or others and is not used; run chmod "
                      "600 on it, or make a new key if somebody may have read it");
  }
  Bytes pem = read_file(pem_path, {.max_bytes = kMaxPemBytes, .too_large = ErrorKind::kUsage});
  if (pem.empty()) throw usage_error(pem_path + ": is empty");
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  if (!bio) openssl_failed("reading a key file");
  Pkey pkey(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_pass_phrase, nullptr));
  ERR_clear_error();
  OPENSSL_cleanse(pem.data(), pem.size());
  if (!pkey) {
    throw usage_error(pem_path + ": no unencrypted PKCS#8 PEM private key in it");
  }
  if (EVP_PKEY_get_id(pkey.get()) != EVP_PKEY_ED25519) {
    throw usage_error(pem_path + ": not an Ed25519 key");
  }
  const std::string vkey_path = pem_path + ".vkey";
  if (!path_exists(vkey_path)) {
    throw usage_error(vkey_path + ": missing; it holds the name of the key in " + pem_path +
                      " and was written beside it");
  }
  const PublicKey expected = PublicKey::load_vkey(vkey_path);
  SigningKey key(expected.name, std::make_shared<Key>(Key{std::move(pkey)}));
  if (key.public_key() != expected) {
    throw usage_error(vkey_path + ": belongs to another key than " + pem_path);
  }
  return key;
}

void SigningKey::save(const std::string& pem_path, bool replace) const {
  const std::string vkey_path = pem_path + ".vkey";
  if (!replace) {
    for (const std::string& path : {pem_path, vkey_path}) {
      if (path_exists(path)) {
        throw usage_error(path + ": exists already; a key is never overwritten by accident");
      }
    }
  }
  const Bio bio(BIO_new(BIO_s_secmem()));
  if (!bio || PEM_write_bio_PKCS8PrivateKey(bio.get(), key_->pkey.get(), nullptr, nullptr, 0,
                                            nullptr, nullptr) != 1) {
    openssl_failed("writing a key as PEM");
  }
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  const IfExists if_exists = replace ? IfExists::kReplace : IfExists::kFail;
  write_file_atomic(pem_path, std::string_view(data, static_cast<std::size_t>(size)), 0600,
                    if_exists);
  write_file_atomic(vkey_path, public_key_.vkey() + "\n", 0644, if_exists);
}

std::array<std::uint8_t, 64> SigningKey::sign(ByteView message) const {
  std::array<std::uint8_t, 64> signature{};
  std::size_t size = signature.size();
  const MdCtx ctx(EVP_MD_CTX_new());
  if (!ctx || EVP_DigestSignInit(ctx.get(), nullptr, nullptr, nullptr, key_->pkey.get()) != 1 ||
      EVP_DigestSign(ctx.get(), signature.data(), &size, message.data(), message.size()) != 1 ||
      size != signature.size()) {
    openssl_failed("signing");
  }
  return signature;
}

}  // namespace bitwitness
