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

// Writes the proof and names it in the report.
void write_proof(const MismatchProof& proof, const std::string& path, AuditReport& report);

#if BITWITNESS_WITH_GRPC
// Levels cell and layer. `name` becomes the record's name for the report.
AuditReport audit_live(const AuditFlags& flags, std::string& name);
#endif

}  // namespace bitwitness
