// Reports of audits, for people and for scripts. The verdict never depends on the format.
#pragma once

#include <string>

#include "verifier/audit.h"

namespace bitwitness {

// `name` is the record's path or its address at a prover.
std::string report_text(const AuditReport& report, const std::string& name);
std::string report_json(const AuditReport& report, const std::string& name);

// The report of evidence too ill-formed to be judged: verdict malformed, `why` its only finding.
AuditReport malformed_report(const std::string& why);

}  // namespace bitwitness
