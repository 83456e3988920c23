// The verifier's view of a prover in a live audit: three calls that carry canonical bytes. The gRPC
// client (grpc_audit_channel.h) is one, provers inside tests are others.
#pragma once

#include <cstdint>
#include <string>

#include "attest/base/bytes.h"

namespace bitwitness {

// tlog-proofs, not judged yet.
struct CommitReceipts {
  std::string commitment;
  std::string record;
};

// As OpeningPart of proto/audit.proto numbers them.
enum class OpeningPartKind : std::uint8_t { kHeader = 1, kEnds = 2, kLayer = 3, kOperators = 4 };
constexpr std::uint64_t kMaxOpeningChunkBytes = std::uint64_t{256} << 10;

// Takes an opening as it arrives. Both throw malformed for what is not exactly expected next,
// before a byte of it is stored; the channel lets the error through and closes the stream.
class OpeningSink {
 public:
  virtual ~OpeningSink() = default;
  virtual void part(OpeningPartKind kind, std::uint32_t layer, std::uint64_t bytes) = 0;
  virtual void data(ByteView bytes) = 0;
};

// Errors of every call, by kind:
//   infrastructure  the prover cannot be reached, vanishes, fails, or is not done by the deadline:
//                   the same bytes may be sent again
//   cannot_judge    it refuses
//   malformed       what it sent is framed otherwise than proto/PROTOCOL.md allows
class AuditChannel {
 public:
  virtual ~AuditChannel() = default;
  virtual CommitReceipts commit(const Bytes& commitment) = 0;
  // Returns when the prover ended the stream well; whether all came is for the sink's owner to say.
  // `request`: OpenRequest.
  virtual void open(const Bytes& request, OpeningSink& sink) = 0;
  // `request`: OperatorsRequest. More than `max_bytes` is malformed.
  virtual Bytes operators(const Bytes& request, std::uint64_t max_bytes) = 0;
};

}  // namespace bitwitness
