// The record: claim + provenance + manifest, with optional evidence and operator signature, as one
// file
// (.bwrec). RECORD_FORMAT.md is the specification of what record.cc writes and reads.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/claim.h"
#include "attest/key_signature.h"
#include "attest/manifest.h"
#include "attest/trace.h"

namespace bitwitness {

constexpr std::uint64_t kMaxRecordBytes = std::uint64_t{4} << 30;

// Free-form facts about the run that are not compared. Keys used by our programs; others are
// allowed.
using Provenance = std::map<std::string, std::string>;
namespace provenance_key {
inline constexpr const char* kNonce = "nonce";        // required: 32 random bytes as hex
inline constexpr const char* kBackend = "backend";    // e.g. "avx512"
inline constexpr const char* kDevice = "device";      // self-reported name
inline constexpr const char* kBuild = "build";        // version and compiler
inline constexpr const char* kOperator = "operator";  //
inline constexpr const char* kStarted = "started";    // RFC 3339 UTC
inline constexpr const char* kFinished = "finished";  // RFC 3339 UTC
}  // namespace provenance_key

// A provenance with a fresh nonce.
Provenance new_provenance();
// The present time as provenance writes it: RFC 3339, UTC, whole seconds.
std::string provenance_time_now();

enum class EvidenceLevel : std::uint8_t {
  kNone = 0,
  kRoots = 1,   // tree roots: a mismatch is located to the layer
  kLeaves = 2,  // all leaf digests: ... to layer and position
  kRows = 3,    // leaf digests and the committed rows themselves: ... to the element
};
const char* evidence_level_name(EvidenceLevel level);
// The level of that name, as flags give it. Throws a usage error that lists the names.
EvidenceLevel parse_evidence_level(std::string_view name);

// Not signed: it is checked against the trace root, which is.
struct Evidence {
  EvidenceLevel level = EvidenceLevel::kNone;
  std::vector<Digest> tree_roots;  // kRoots: Trace::tree_roots()
  std::vector<Digest> leaves;      // kLeaves, kRows: Trace::leaves()
  // kRows: the payloads of all leaves but tokens, in the order of Trace::leaves(), concatenated.
  Bytes rows;
  friend bool operator==(const Evidence&, const Evidence&) = default;
};

Evidence roots_evidence(const Trace& trace);
Evidence leaves_evidence(const Trace& trace);
// `rows` as in Evidence::rows; std::logic_error if its size does not fit the shape.
Evidence rows_evidence(const Trace& trace, Bytes rows);
// Size of Evidence::rows for a shape; nullopt when it exceeds kMaxRecordBytes.
std::optional<std::uint64_t> evidence_rows_bytes(const TraceShape& shape);
// The payload of one leaf within Evidence::rows as (offset, bytes); nullopt if there is no such
// leaf. Use it to write rows into place while a run goes on, and to read them back.
struct RowRange {
  std::uint64_t offset;
  std::uint64_t bytes;
};
std::optional<RowRange> evidence_row_range(const TraceShape& shape, LeafType type,
                                           std::uint32_t layer, std::uint64_t position);

using OperatorSignature = KeySignature;

struct Record {
  Claim claim;
  Provenance provenance;
  Manifest manifest;
  Evidence evidence;
  std::optional<OperatorSignature> signature;

  // What is logged and signed: SHA-256 over a domain tag and the digests of claim, manifest and
  // provenance. Evidence is not under it.
  Digest digest() const;
  void sign(const SigningKey& key);

  // Everything that can be checked without the model: claim rules, claim against manifest,
  // provenance limits and nonce, evidence against the trace root, signature. Throws malformed,
  // naming `document`.
  void check(const std::string& document) const;

  Bytes serialize() const;  // runs check(): an ill-formed record is never written
  // Limits, exact sections, file digest and check(). Any flaw is malformed.
  static Record parse(ByteView bytes, const std::string& document);
};

Digest provenance_digest(const Provenance& provenance);

// Reads and parses a file: absent is usage, ill-formed is malformed.
Record read_record(const std::string& path);
// Atomically; see write_file_atomic.
void write_record(const std::string& path, const Record& record);

}  // namespace bitwitness
