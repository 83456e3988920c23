// Live audits: commit, challenge, open, replay (proto/PROTOCOL.md). The verifier publishes the hash
// of a secret, the prover's log takes it in, the seed follows from both, and what the seed draws is
// opened, checked proof by proof and recomputed bit by bit. Nothing here knows the transport.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "attest/base/progress.h"
#include "attest/challenge.h"
#include "attest/keys.h"
#include "attest/mismatch_proof.h"
#include "attest/record.h"
#include "kernels/backend.h"
#include "verifier/audit_channel.h"
#include "verifier/audit_model.h"
#include "verifier/audit_report.h"
#include "verifier/claim_checks.h"

namespace bitwitness {

struct LiveAuditOptions : RecordExpectations {  // log_key is required; receipt is not looked at
  explicit LiveAuditOptions(SigningKey verifier_key) : key(std::move(verifier_key)) {}

  SigningKey key;  // the verifier's own
  AuditPlan plan;
  bool log_key_from_prover = false;  // log_key is only what the prover says it is
  std::string prover = "prover";     // its name in messages
  // How often a call is made again after a failure of the transport, with the same bytes: secret,
  // commitment and challenge are never drawn anew.
  unsigned retries = 2;
  std::chrono::milliseconds retry_wait{500};  // before the first retry; doubled every time
  ProgressFn on_replay;                       // cells done and to be done
};

struct LiveAudit {
  AuditReport report;                  // with `live`
  std::optional<MismatchProof> proof;  // signed; when the mismatch can be shown to others
};

// Judges `record` (parsed) by openings. What the prover refuses or does wrong is a verdict
// (cannot_judge, malformed) of the report; once a bad cell was seen, the verdict is mismatch
// whatever the prover does afterwards. Throws usage Errors for a plan that the record's shape does
// not allow and for files of one's own that do not belong together, infrastructure Errors when the
// transport keeps failing, and when the auditor's own machine fails.
//
// Memory: one part of the opening and one layer's weights (mapped) at a time.
LiveAudit live_audit(const Record& record, const OpenedModel& model, Backend& backend,
                     AuditChannel& channel, const LiveAuditOptions& options);

}  // namespace bitwitness
