// SHA-256 on the host, through OpenSSL (SHA extensions where the CPU has them).
#pragma once

#include <initializer_list>
#include <memory>
#include <string_view>

#include "attest/base/bytes.h"

namespace bitwitness {

// Any thread; each thread re-uses one context. Throws an infrastructure Error if OpenSSL fails.
Digest sha256(ByteView bytes);
Digest sha256(std::string_view text);
// SHA-256 of the concatenation of the parts.
Digest sha256(std::initializer_list<ByteView> parts);

// Incremental. One object belongs to one thread at a time. After finish() it is ready for a new
// message.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void update(ByteView bytes);
  void update(std::string_view text) { update(as_bytes(text)); }
  Digest finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bitwitness
