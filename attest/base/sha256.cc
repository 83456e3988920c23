#include "attest/base/sha256.h"

#include <openssl/evp.h>

#include "attest/base/error.h"

namespace bitwitness {
namespace {

[[noreturn]] void openssl_failed() {
  throw infrastructure_error(
      "SHA-256: OpenSSL refused to compute it; check that libcrypto's default provider is usable");
}

// Fetched once for the process: a fetch per hash costs more than the hash of a tree node.
const EVP_MD* fetched_sha256() {
  static EVP_MD* const md = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  if (md == nullptr) openssl_failed();
  return md;
}

struct Context {
  EVP_MD_CTX* ctx = EVP_MD_CTX_new();
  Context() {
    if (ctx == nullptr) openssl_failed();
  }
  ~Context() { EVP_MD_CTX_free(ctx); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  void begin() {
    if (EVP_DigestInit_ex2(ctx, fetched_sha256(), nullptr) != 1) openssl_failed();
  }
  void update(ByteView bytes) {
    if (EVP_DigestUpdate(ctx, bytes.data(), bytes.size()) != 1) openssl_failed();
  }
  Digest finish() {
    Digest digest;
    if (EVP_DigestFinal_ex(ctx, digest.bytes.data(), nullptr) != 1) openssl_failed();
    return digest;
  }
};

Context& thread_context() {
  thread_local Context context;
  return context;
}

}  // namespace

Digest sha256(std::initializer_list<ByteView> parts) {
  Context& context = thread_context();
  context.begin();
  for (const ByteView part : parts) context.update(part);
  return context.finish();
}

Digest sha256(ByteView bytes) {
  return sha256({bytes});
}

Digest sha256(std::string_view text) {
  return sha256({as_bytes(text)});
}

struct Sha256::State {
  Context context;
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  state_->context.begin();
}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(ByteView bytes) {
  state_->context.update(bytes);
}

Digest Sha256::finish() {
  const Digest digest = state_->context.finish();
  state_->context.begin();
  return digest;
}

}  // namespace bitwitness
