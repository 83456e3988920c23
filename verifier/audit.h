// Full audits: re-execute a record from its token ids and demand equal bits.
#pragma once

#include <cstdint>

#include "attest/base/progress.h"
#include "attest/record.h"
#include "kernels/backend.h"
#include "verifier/audit_model.h"
#include "verifier/audit_report.h"
#include "verifier/claim_checks.h"
#include "verifier/verdict.h"

namespace bitwitness {

struct AuditOptions : RecordExpectations {
  std::int64_t max_rows = 512;
  ProgressFn on_replay;
};

// Judges a parsed record (Record::parse has thrown malformed for an ill-formed one). Never throws
// for a difference; throws malformed for an ill-formed receipt, infrastructure for a failing
// device.
AuditReport audit_record(const Record& record, const AuditModel& model, Backend& backend,
                         const AuditOptions& options);

}  // namespace bitwitness
