// What every audit checks of a record without re-executing anything: shared by full audits, live
// audits and rechecks.
#pragma once

#include <optional>
#include <string>

#include "attest/keys.h"
#include "attest/manifest.h"
#include "attest/record.h"
#include "kernels/backend.h"
#include "kernels/model/model.h"
#include "kernels/tokenizer/tokenizer.h"
#include "verifier/audit_report.h"

namespace bitwitness {

// What the auditor asks of a record beside its computation.
struct RecordExpectations {
  std::optional<PublicKey> log_key;    // with it a receipt is required
  std::optional<std::string> receipt;  // tlog-proof text
  std::string receipt_name = "receipt";
  std::optional<PublicKey> operator_key;  // the record must be signed by it
  std::optional<Bytes> nonce;             // the claim's seed must be it
};

// A report that describes the record and says cannot_judge: nothing was checked yet.
AuditReport begin_report(const Record& record, const std::optional<Tokenizer>& tokenizer,
                         const Backend& backend);

// Verdict mismatch, with the reason as a finding.
void find_mismatch(AuditReport& report, const std::string& finding);

// False: the record is about another computation than `local`'s, and the report (cannot_judge) says
// so. Otherwise the verdict is match from here on, unless something speaks against it.
bool check_model(const Record& record, const Manifest& local, const Model& model,
                 AuditReport& report);
// Differences between claimed and local manifest, as findings of a mismatch.
void report_differences(const std::vector<std::string>& differences, const Model& model,
                        AuditReport& report);

// Receipt against log key. Malformed Error for an ill-formed receipt.
void check_receipt(const RecordExpectations& expected, AuditReport& report);
// Operator key and nonce.
void check_expectations(const RecordExpectations& expected, const Record& record,
                        AuditReport& report);

// Whether a run of this model can have a trace of the claimed shape, and this program knows the
// sampler: before anything is sized or computed by the claim. False: the report says why not.
bool check_replayable(const Claim& claim, const Model& model, AuditReport& report);

// Stop tokens, context and text: what the claim says about its own tokens.
void check_claim_text(const Claim& claim, const Model& model,
                      const std::optional<Tokenizer>& tokenizer, AuditReport& report);

// The sampling of the token at index `position` + 1 of the sequence, whose logits are those of
// `position`.
SampleRequest sample_request(const Claim& claim, std::uint64_t position);

// Malformed unless `root`, of the tree of token ids in an opening, is of the claim's prompt and
// emitted ids.
void check_tokens_root(const Digest& root, const Claim& claim, const std::string& document);

}  // namespace bitwitness
