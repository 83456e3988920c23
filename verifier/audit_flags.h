// The flags of bw-verifier audit, and what its two ways share: by re-execution (command_audit.cc)
// and by openings (command_audit_live.cc).
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "attest/mismatch_proof.h"
#include "kernels/backend.h"
#include "verifier/audit_report.h"
#include "verifier/claim_checks.h"
#if BITWITNESS_WITH_GRPC
#include "verifier/prover_flags.h"
#endif

namespace bitwitness {

// Where the proof of a mismatch goes without --proof-out.
inline constexpr const char* kDefaultProof = "mismatch.bwproof";

struct AuditFlags {
  std::optional<std::string> record_file, record_id;
  std::string model;
  std::string level = "full";
  std::optional<std::string> log_key, receipt, operator_key, nonce;
  std::optional<std::string> key, proof_out;
  std::string device = "cpu";
  int threads = 0;
  std::string format = "text";
  // Levels cell and layer.
  std::optional<std::uint64_t> cells;
  std::optional<std::uint64_t> ends;
  std::optional<std::string> layers, manifest;
  std::optional<unsigned> retries;
#if BITWITNESS_WITH_GRPC
  ProverFlags prover;
#endif
};

// From --log-key, --operator-key and --nonce.
void set_expectations(const AuditFlags& flags, RecordExpectations& expected);

// Evidence that is ill-formed or refused is a verdict; any other error is thrown on.
AuditReport verdict_of(const Error& error);

// Usage Errors for a name that a proof may not get: one that exists, a key's, another path of the
// command, one inside the model.
void check_proof_out(const AuditFlags& flags, const std::string& path);

// Writes the proof, readable to its owner only (it holds token ids and activations), and names it
// in the report. Where a file of that name is there by now it is left alone, and the proof becomes
// NAME-2, NAME-3, ... One that cannot be written is a note in the report, whose verdict stands.
void write_proof(const MismatchProof& proof, const std::string& path, AuditReport& report);

#if BITWITNESS_WITH_GRPC
// Levels cell and layer. `name` becomes the record's name for the report.
AuditReport audit_live(const AuditFlags& flags, std::string& name);
#endif

}  // namespace bitwitness
