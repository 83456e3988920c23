// The claim: the device-independent part of a record (RECORD_FORMAT.md "Claim"). Two honest runs of
// the same request have equal claims, whatever they ran on.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/trace.h"

namespace bitwitness {

enum class StopReason : std::uint8_t { kStopToken = 1, kLength = 2, kContext = 3 };
const char* stop_reason_name(StopReason reason);

enum class SeedProvenance : std::uint8_t {
  kNone = 0,    // greedy: nothing was drawn, the seed is empty
  kNonce = 1,   // given by the client or the verifier
  kProver = 2,  // chosen by the prover: the sampler may be a covert channel
};
const char* seed_provenance_name(SeedProvenance provenance);

// Greedy is temperature 0 (bits 0x00000000), top_k 0, top_p 1 (bits 0x3f800000).
struct SamplingParameters {
  std::uint16_t algorithm = 1;             // version of the sampler in kernels/ARITHMETIC.md
  std::uint32_t temperature_bits = 0;      // binary32
  std::uint32_t top_k = 0;                 // 0: no limit
  std::uint32_t top_p_bits = 0x3f800000U;  // binary32
  bool greedy() const { return temperature_bits == 0; }
  friend bool operator==(const SamplingParameters&, const SamplingParameters&) = default;
};

constexpr std::size_t kMaxSeedBytes = 64;

struct Claim {
  std::string arithmetic;
  Digest manifest_digest;
  std::vector<std::uint32_t> prompt_ids;   // P >= 1
  std::vector<std::uint32_t> emitted_ids;  // E >= 1, the stop token included if there is one
  StopReason stop_reason = StopReason::kLength;
  std::vector<std::uint32_t> stop_ids;  // ascending, unique; may be empty
  std::uint64_t max_tokens = 0;         // E <= max_tokens
  SamplingParameters sampling;
  Bytes seed;  // 0 to 64 bytes
  SeedProvenance seed_provenance = SeedProvenance::kNone;
  Digest text_digest;  // text_digest(seed, delivered text)
  TraceShape trace_shape;
  Digest trace_root;

  // Throws malformed when the fields contradict each other; `document` names the claim in the
  // message. In particular T = P + E - 1, N = E, ids < vocab, stop reason agreeing with the ids.
  void check(const std::string& document) const;
  Bytes canonical_bytes() const;
  Digest digest() const;  // domain-tagged SHA-256 of the canonical bytes
  static Claim parse(ByteView bytes, const std::string& document);  // check() included
  friend bool operator==(const Claim&, const Claim&) = default;
};

// Prompt and emitted ids: what the tokens leaf commits to.
std::vector<std::uint32_t> sequence_ids(const Claim& claim);

// SHA-256("bitwitness/text/v1\n" ‖ salt ‖ text), salt = SHA-256("bitwitness/salt/v1\n" ‖ seed).
// `text` is the delivered UTF-8 text.
Digest text_digest(ByteView seed, std::string_view text);

// Differences in words (field: a against b), empty if and only if equal.
std::vector<std::string> claim_differences(const Claim& a, const Claim& b);

}  // namespace bitwitness
