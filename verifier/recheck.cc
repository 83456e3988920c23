#include "verifier/recheck.h"

#include <algorithm>
#include <cstdio>

#include "attest/base/error.h"
#include "attest/log.h"
#include "kernels/cell.h"
#include "verifier/audit.h"
#include "verifier/cell_judge.h"

namespace bitwitness {
namespace {

std::string finding_text(const MismatchFinding& finding) {
  std::string out = finding.op;
  if (finding.element) {
    char text[96];
    std::snprintf(text, sizeof text, ", element %llu: claimed %08x, computed %08x",
                  static_cast<unsigned long long>(*finding.element), finding.claimed_bits,
                  finding.computed_bits);
    out += text;
  }
  return out;
}

class Rechecker {
 public:
  Rechecker(const MismatchProof& proof, const std::string& dir, Backend& backend,
            const RecheckOptions& options, const std::string& document)
      : proof_(proof), dir_(dir), backend_(backend), options_(options), document_(document) {}

  RecheckReport run() {
    opened_ = open_mismatch(proof_, document_);
    const Record& record = opened_.record;
    report_.kind = proof_.kind;
    report_.layer = proof_.layer;
    report_.position = proof_.position;
    report_.stated = proof_.finding;
    report_.stated_backend = proof_.backend;
    report_.backend = backend_.name();
    report_.device = backend_.device();
    report_.record_digest = record.digest();
    report_.accuser = proof_.verifier.key.vkey();
    if (record.signature) report_.accused = record.signature->key.vkey();
    try {
      check_parties();
      if (proof_.kind == MismatchProof::Kind::kRecord) {
        judge_record();
      } else {
        judge_opening();
      }
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kCannotJudge) throw;
      report_.verdict = Verdict::kCannotJudge;
      report_.findings.push_back(error.what());
    }
    return std::move(report_);
  }

 private:
  const Claim& claim() const { return opened_.record.claim; }
  [[noreturn]] void malformed(const std::string& problem) const {
    throw malformed_error(document_ + ": " + problem);
  }

  // Whom the proof is against, and whether the log says so, too.
  void check_parties() {
    const Record& record = opened_.record;
    if (options_.operator_key &&
        (!record.signature || record.signature->key != *options_.operator_key)) {
      throw cannot_judge_error("the record is not signed by the given operator key " +
                               options_.operator_key->name);
    }
    if (options_.log_key) {
      check_log();
    } else if (opened_.challenge) {
      report_.notes.push_back(
          "the log was not looked at: give its verifier key with --log-key to see that it signed "
          "the checkpoint that the seed is from, and holds the record");
    }
    if (record.signature && !options_.operator_key) {
      report_.notes.push_back("nobody vouched that the key shown is " + record.signature->key.name +
                              "'s own: give the one that you know with --operator-key");
    }
    // Cannot judge where neither an operator signed the record nor a log is named that holds it.
    const PublicKey signer = prover_key(record, options_.log_key);
    if (opened_.header && opened_.header->prover.key != signer) {
      malformed("the opening is signed by " + opened_.header->prover.key.name +
                ", but the one to answer for the record is " + signer.name);
    }
    report_.accused = signer.vkey();
  }

  void check_log() {
    const PublicKey& key = *options_.log_key;
    if (!proof_.receipt.empty()) {
      const ReceiptResult receipt =
          verify_receipt(proof_.receipt, key, report_.record_digest, document_ + ", receipt");
      if (receipt.verdict == ReceiptVerdict::kUnknownLog) {
        throw cannot_judge_error("the proof's receipt is not by the given log key " + key.name);
      }
      if (receipt.verdict == ReceiptVerdict::kOtherRecord) {
        malformed("its receipt is for another record");
      }
      report_.logged = true;
    } else if (opened_.challenge) {
      malformed("a challenge without the receipt of its record");
    } else {
      throw cannot_judge_error(
          "the proof has no receipt, so that it is not known whether the log " + key.name +
          " holds the record");
    }
    if (!opened_.challenge) return;
    // Throws cannot_judge when another log signed it.
    open_checkpoint(opened_.challenge->checkpoint_note, key, document_ + ", checkpoint");
  }

  // The accuser may hold up only what its own challenge drew. The shape is a possible one.
  void check_drawn() const {
    const Checkpoint checkpoint = opened_.challenge->checkpoint(document_ + ", checkpoint");
    const Digest seed = challenge_seed(opened_.challenge->secret, checkpoint, claim().trace_root);
    const AuditPlan& plan = opened_.challenge->commitment.plan;
    const TraceShape& shape = claim().trace_shape;
    for (const std::uint32_t layer : plan.layers.listed) {
      if (layer >= shape.layers) malformed("its challenge lists a layer that is not there");
    }
    const AuditSample sample = draw_sample(plan, shape, seed);
    const auto has = [&](const std::vector<std::uint64_t>& positions) {
      return std::binary_search(positions.begin(), positions.end(), proof_.position);
    };
    bool drawn = false;
    if (proof_.kind == MismatchProof::Kind::kCell) {
      for (const LayerCells& cells : sample.layers) {
        drawn = drawn || (cells.layer == proof_.layer && has(cells.positions));
      }
    } else {
      drawn = has(proof_.kind == MismatchProof::Kind::kHead ? sample.heads : sample.embeddings);
    }
    if (!drawn) malformed("its challenge did not draw this cell");
  }

  // ---- One cell or end.
  void judge_opening() {
    const OpenedModel model = OpenedModel::open(dir_);
    const Record& record = opened_.record;
    AuditReport said;  // the words of an audit, for what cannot be judged
    const Manifest local = model.manifest(record.manifest);
    if (check_model(record, local, model.model(), said)) {
      report_differences(manifest_differences(record.manifest, local), model.model(), said);
      if (said.verdict == Verdict::kMatch) check_replayable(claim(), model.model(), said);
    }
    if (said.verdict != Verdict::kMatch) {
      report_.verdict = Verdict::kCannotJudge;
      report_.findings = said.findings;
      return;
    }
    check_drawn();
    check_tokens_root(opened_.header->tree_roots.back(), claim(), document_);
    const bool cell = proof_.kind == MismatchProof::Kind::kCell;
    const bool head = proof_.kind == MismatchProof::Kind::kHead;
    const std::vector<std::string> differences =
        cell ? model.layer_differences(record.manifest, proof_.layer)
             : model.end_differences(record.manifest, !head, head);
    if (!differences.empty()) {
      throw cannot_judge_error("the model in " + dir_ +
                               " is not the one of the record: " + differences.front());
    }
    CellRunner runner(model.model().config(), backend_,
                      static_cast<std::int64_t>(claim().trace_shape.positions));
    const std::optional<MismatchPlace> place =
        cell ? judge_cell(model.model(), runner) : judge_end(model.model(), runner, head);
    model.model().check_unchanged();
    settle(place);
  }

  std::optional<MismatchPlace> judge_cell(const Model& model, CellRunner& runner) {
    const PlacedLayer placed(model.weights().layers[proof_.layer], backend_);
    const LayerOpening& opening = *opened_.cell;
    const std::vector<RowDifference> bad =
        judge_cells(opening, model.config(), placed.weights(), runner);
    if (bad.empty()) return std::nullopt;
    const CellOperators* const shown = opened_.operators ? &*opened_.operators : nullptr;
    const OperatorOutputs computed = cell_operators(opening, 0, placed.weights(), runner);
    const OperatorPlace found = place_operator(bad.front().place, opening, 0, computed, shown);
    if (shown != nullptr && !found.from_operators) {
      malformed("the prover's operators in it do not tell the operator" +
                (found.unusable.empty() ? std::string() : ": " + found.unusable));
    }
    return found.place;
  }

  std::optional<MismatchPlace> judge_end(const Model& model, CellRunner& runner, bool head) {
    const PlacedEnds placed(model.weights(), backend_);
    const std::vector<RowDifference> bad =
        head ? judge_heads(*opened_.ends, claim(), model.config(), placed.weights(), runner)
             : judge_embeddings(*opened_.ends, claim(), model.config(), placed.weights(), runner);
    if (bad.empty()) return std::nullopt;
    return bad.front().place;
  }

  void settle(const std::optional<MismatchPlace>& place) {
    if (!place) {
      report_.verdict = Verdict::kMatch;
      report_.findings.push_back(
          "the accusation does not hold: what was opened is what the model computes");
      return;
    }
    const MismatchFinding found = finding_of(*place);
    if (found != proof_.finding) {
      malformed("it states " + finding_text(proof_.finding) + ", but what is found is " +
                finding_text(found) + ": the accuser misstates");
    }
    report_.verdict = Verdict::kMismatch;
    report_.place = place;
    report_.findings.push_back("confirmed: the finding stated is the one found");
  }

  // ---- The whole record.
  void judge_record() {
    const AuditModel model = AuditModel::load(dir_, options_.on_hash);
    AuditOptions audit;
    audit.on_replay = options_.on_replay;
    const AuditReport judged = audit_record(opened_.record, model, backend_, audit);
    if (judged.verdict == Verdict::kMatch) {
      report_.verdict = Verdict::kMatch;
      report_.findings.push_back(
          "the accusation does not hold: the record is what the model computes");
      return;
    }
    if (judged.verdict != Verdict::kMismatch || !judged.record_shows_mismatch) {
      report_.verdict = Verdict::kCannotJudge;
      report_.findings = judged.findings;
      return;
    }
    MismatchFinding found;
    found.op = "record";
    if (judged.place) {
      found = finding_of(*judged.place);
      found.op = "record";
    }
    if (proof_.finding.op != "record" || (proof_.finding.element && found != proof_.finding)) {
      malformed("it states " + finding_text(proof_.finding) + ", but what is found is " +
                finding_text(found) + ": the accuser misstates");
    }
    report_.verdict = Verdict::kMismatch;
    report_.place = judged.place;
    report_.findings.push_back("confirmed by re-executing the whole record");
    report_.findings.insert(report_.findings.end(), judged.findings.begin(), judged.findings.end());
  }

  const MismatchProof& proof_;
  const std::string& dir_;
  Backend& backend_;
  const RecheckOptions& options_;
  const std::string& document_;
  OpenedMismatch opened_;
  RecheckReport report_;
};

}  // namespace

RecheckReport recheck(const MismatchProof& proof, const std::string& dir, Backend& backend,
                      const RecheckOptions& options, const std::string& document) {
  return Rechecker(proof, dir, backend, options, document).run();
}

}  // namespace bitwitness
