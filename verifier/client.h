// The verifier's end of the live exchange (proto/PROTOCOL.md). Nothing that comes from a prover is
// trusted: sizes are bounded, every call has a deadline, and a record is what was asked for or an
// Error. Protocol Buffers stay behind connection.h.
//
// Errors of every function here, by kind:
//   usage           the address, id or request is unusable (or the prover says so)
//   infrastructure  the prover cannot be reached, vanishes, fails, or is not done by the deadline
//   cannot_judge    the prover refuses, or has no such record
//   malformed       what it sent is not what PROTOCOL.md allows, or not what was asked for
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/keys.h"
#include "attest/record.h"
#include "verifier/prover_endpoint.h"

namespace bitwitness {

struct FetchOptions {
  std::chrono::milliseconds deadline{120'000};         // for the whole transfer
  std::uint64_t max_bytes = std::uint64_t{256} << 20;  // a larger record is cannot_judge
};

struct FetchedRecord {
  Bytes record;                        // as sent: a file of RECORD_FORMAT.md
  Record parsed;                       // from these bytes; its digest is the one asked for
  std::optional<std::string> receipt;  // tlog-proof text, not judged yet
};

// What a prover says about itself, as far as audits use it. It proves nothing.
struct ProverInfo {
  std::optional<PublicKey> log_key;  // absent: it keeps no log
  bool answers_audits = false;       // false: it answers no live audits
};
ProverInfo fetch_info(const ProverEndpoint& prover, std::chrono::milliseconds deadline);

// The record with digest `record_id` (64 hexadecimal digits).
FetchedRecord fetch_record(const ProverEndpoint& prover, const std::string& record_id,
                           const FetchOptions& options = {});

struct RemoteRequest {
  // Exactly one of them.
  std::optional<std::string> prompt;  // UTF-8
  std::optional<std::vector<std::uint32_t>> prompt_ids;

  std::uint64_t max_tokens = 0;
  float temperature = 0;  // 0: greedy
  std::uint32_t top_k = 0;
  float top_p = 1;
  Bytes nonce;  // at most kMaxSeedBytes; empty: none
  std::optional<EvidenceLevel> evidence;
};

struct RemoteGeneration {
  std::string text;  // as delivered
  FetchedRecord fetched;
};

// Sends a request, hands out tokens as they come (`on_token` may be empty), and fetches the record.
// The record's claim must be of this request (prompt ids where they were given, limits, sampling,
// nonce) and of exactly the tokens and the text that were delivered, else malformed.
// `deadline` bounds the generation, options.deadline the fetch that follows.
RemoteGeneration generate_remote(
    const ProverEndpoint& prover, const RemoteRequest& request, std::chrono::milliseconds deadline,
    const FetchOptions& options = {},
    const std::function<void(std::uint32_t token, std::string_view text)>& on_token = {});

}  // namespace bitwitness
