// Reports of audits, for people and for scripts. The verdict never depends on the format.
#pragma once

#include <string>

#include "verifier/audit_report.h"
#include "verifier/recheck.h"

namespace bitwitness {

// `name` is the record's path or its address at a prover.
std::string report_text(const AuditReport& report, const std::string& name);
std::string report_json(const AuditReport& report, const std::string& name);

std::string recheck_text(const RecheckReport& report, const std::string& name);
std::string recheck_json(const RecheckReport& report, const std::string& name);

// The report where no record came to be judged: kMalformed or kCannotJudge, `why` its only finding.
AuditReport unjudged_report(Verdict verdict, const std::string& why);

}  // namespace bitwitness
