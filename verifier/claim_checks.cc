#include "verifier/claim_checks.h"

#include <algorithm>

#include "attest/base/error.h"
#include "attest/base/leaf_hash.h"
#include "attest/base/merkle.h"
#include "attest/log.h"
#include "kernels/sampler.h"
#include "verifier/audit_model.h"

namespace bitwitness {
namespace {

// Whether a run of this model can have a trace of this shape at all; checked before anything is
// sized by it.
bool possible_shape(const TraceShape& shape, const ModelConfig& config) {
  return shape.layers == config.num_layers && shape.hidden == config.hidden_size &&
         shape.kv_width == config.kv_size() && shape.vocab == config.vocab_size &&
         shape.row_dtype == Dtype::kFp32 && shape.kv_dtype == Dtype::kFp32 &&
         shape.positions <= static_cast<std::uint64_t>(config.max_positions);
}

// The text that the emitted ids stand for, as the prover delivers it.
std::string delivered_text(const Tokenizer& tokenizer, const std::vector<std::uint32_t>& ids) {
  StreamDecoder decoder(tokenizer, /*skip_special=*/true);
  std::string text;
  for (const std::uint32_t id : ids) {
    if (tokenizer.id_to_token(id)) text += decoder.push(id);
  }
  return text + decoder.flush();
}

// Ids that the auditor's tokenizer knows, as text; others as <id>.
std::string spelled(const Tokenizer& tokenizer, const std::vector<std::uint32_t>& ids) {
  StreamDecoder decoder(tokenizer, /*skip_special=*/false);
  std::string text;
  for (const std::uint32_t id : ids) {
    if (tokenizer.id_to_token(id)) {
      text += decoder.push(id);
    } else {
      text += decoder.flush() + "<" + std::to_string(id) + ">";
    }
  }
  return text + decoder.flush();
}

}  // namespace

AuditReport begin_report(const Record& record, const std::optional<Tokenizer>& tokenizer,
                         const Backend& backend) {
  const Claim& claim = record.claim;
  AuditReport report;
  report.record_digest = record.digest();
  report.claim_digest = claim.digest();
  report.claimed_trace_root = claim.trace_root;
  if (const auto it = record.provenance.find(provenance_key::kBackend);
      it != record.provenance.end()) {
    report.claimed_backend = it->second;
  }
  report.backend = backend.name();
  report.device = backend.device();
  if (record.signature) report.operator_key = record.signature->key.vkey();
  report.max_tokens = claim.max_tokens;
  report.prompt_ids = claim.prompt_ids;
  report.emitted_ids = claim.emitted_ids;
  report.sampling = claim.sampling;
  report.stop_reason = claim.stop_reason;
  report.seed_provenance = claim.seed_provenance;
  if (tokenizer) {
    report.prompt_text = spelled(*tokenizer, claim.prompt_ids);
    report.output_text = spelled(*tokenizer, claim.emitted_ids);
  }
  const TraceShape& shape = claim.trace_shape;
  report.cells = shape.layers * shape.positions;
  report.ends = shape.positions + shape.emitted;
  report.tokens = shape.emitted;
  if (claim.seed_provenance == SeedProvenance::kProver) {
    report.notes.push_back(
        "the prover chose the sampling seed itself: the choice of tokens may carry hidden data");
  }
  return report;
}

void find_mismatch(AuditReport& report, const std::string& finding) {
  report.verdict = Verdict::kMismatch;
  report.findings.push_back(finding);
}

bool check_model(const Record& record, const Manifest& local, const Model& model,
                 AuditReport& report) {
  if (same_computation(record.manifest, local)) {
    report.verdict = Verdict::kMatch;
    return true;
  }
  report.verdict = Verdict::kCannotJudge;
  report.findings.push_back("the record is about another model than " + model.dir().string());
  const std::vector<std::string> differences = manifest_differences(record.manifest, local);
  report.findings.insert(report.findings.end(), differences.begin(), differences.end());
  return false;
}

void report_differences(const std::vector<std::string>& differences, const Model& model,
                        AuditReport& report) {
  if (differences.empty()) return;
  const std::string head = "the record's model is not the one in " + model.dir().string() + ":";
  if (std::find(report.findings.begin(), report.findings.end(), head) == report.findings.end()) {
    find_mismatch(report, head);
  }
  report.findings.insert(report.findings.end(), differences.begin(), differences.end());
}

void check_receipt(const RecordExpectations& expected, AuditReport& report) {
  if (!expected.log_key) {
    if (expected.receipt) {
      report.notes.push_back(
          "the receipt was not checked: give the log's verifier key with --log-key");
    }
    return;
  }
  report.log_state = AuditReport::LogState::kNotShown;
  if (!expected.receipt) {
    report.verdict = Verdict::kCannotJudge;
    report.findings.push_back(
        "a log key was given, but there is no receipt; give it with --receipt");
    return;
  }
  const ReceiptResult result = verify_receipt(*expected.receipt, *expected.log_key,
                                              report.record_digest, expected.receipt_name);
  switch (result.verdict) {
    case ReceiptVerdict::kIncluded:
      report.log_state = AuditReport::LogState::kIncluded;
      report.log_index = result.index;
      report.checkpoint = result.checkpoint;
      return;
    case ReceiptVerdict::kOtherRecord:
      report.verdict = Verdict::kMismatch;
      report.findings.push_back(
          "the receipt is good, but for another record" +
          (result.record ? " (" + result.record->hex() + ")" : std::string()));
      return;
    case ReceiptVerdict::kUnknownLog:
      report.verdict = Verdict::kCannotJudge;
      report.findings.push_back("the receipt's checkpoint is not signed by the given log key " +
                                expected.log_key->name);
      return;
  }
}

void check_expectations(const RecordExpectations& expected, const Record& record,
                        AuditReport& report) {
  if (expected.operator_key &&
      (!record.signature || record.signature->key != *expected.operator_key)) {
    report.verdict = Verdict::kCannotJudge;
    report.findings.push_back("the record is not signed by the given operator key " +
                              expected.operator_key->name);
  }
  if (expected.nonce && record.claim.seed != *expected.nonce) {
    find_mismatch(report, "the claim's seed is not the given nonce");
  }
}

bool check_replayable(const Claim& claim, const Model& model, AuditReport& report) {
  if (!possible_shape(claim.trace_shape, model.config())) {
    find_mismatch(report,
                  "no run of this model has a trace of the claimed shape (layers, widths, types or "
                  "positions)");
    return false;
  }
  if (claim.sampling.algorithm != contract::kSamplerVersion) {
    report.verdict = Verdict::kCannotJudge;
    report.findings.push_back("the claim uses sampler version " +
                              std::to_string(claim.sampling.algorithm) + "; this program knows " +
                              std::to_string(contract::kSamplerVersion));
    return false;
  }
  return true;
}

void check_claim_text(const Claim& claim, const Model& model,
                      const std::optional<Tokenizer>& tokenizer, AuditReport& report) {
  // The manifest binds the model's stop tokens; with others a prover could cut an answer short, or
  // go on.
  const std::vector<std::int32_t>& eos = model.config().eos_ids;
  if (!std::equal(claim.stop_ids.begin(), claim.stop_ids.end(), eos.begin(), eos.end())) {
    find_mismatch(report, "the claim's stop tokens are not those of the model's configuration");
  }
  if (claim.stop_reason == StopReason::kContext &&
      claim.trace_shape.positions != static_cast<std::uint64_t>(model.config().max_positions)) {
    find_mismatch(report, "the claim says that the context was full, but it has " +
                              std::to_string(claim.trace_shape.positions) + " of " +
                              std::to_string(model.config().max_positions) + " positions");
  }
  const std::string text =
      tokenizer ? delivered_text(*tokenizer, claim.emitted_ids) : std::string();
  if (text_digest(claim.seed, text) != claim.text_digest) {
    find_mismatch(report,
                  "the digest of the delivered text is not that of the emitted tokens' text");
  }
}

SampleRequest sample_request(const Claim& claim, std::uint64_t position) {
  contract::SamplingParams sampling;
  sampling.temperature = contract::float_of(claim.sampling.temperature_bits);
  sampling.top_k = claim.sampling.top_k;
  sampling.top_p = contract::float_of(claim.sampling.top_p_bits);
  return {sampling, sample_draw(claim.seed, position + 1)};
}

void check_tokens_root(const Digest& root, const Claim& claim, const std::string& document) {
  // The tree has one leaf, and the claim has what is in it.
  const Digest leaf = tokens_leaf(sequence_ids(claim));
  if (root != merkle_root(std::vector{merkle_leaf(leaf.view())})) {
    throw malformed_error(document +
                          ": the committed token ids are not those of the record's claim");
  }
}

}  // namespace bitwitness
