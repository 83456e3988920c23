#include "verifier/live_audit.h"

#include <algorithm>
#include <thread>

#include "attest/base/error.h"
#include "attest/base/random.h"
#include "attest/base/sha256.h"
#include "attest/log.h"
#include "attest/opening.h"
#include "kernels/cell.h"
#include "verifier/cell_judge.h"
#include "verifier/coverage.h"
#include "verifier/opening_receiver.h"

namespace bitwitness {
namespace {

using std::chrono::milliseconds;

// Text and signatures of a checkpoint; the challenge that it is in must stay small beside the
// opening that it asks for.
constexpr std::size_t kMaxCheckpointNoteBytes = std::size_t{16} << 10;

// The first bad cell or end of its kind, with what was opened of it.
struct Evidence {
  MismatchProof::Kind kind = MismatchProof::Kind::kCell;
  std::uint32_t layer = 0;
  std::uint64_t position = 0;
  std::uint64_t prefix = 0;
  Bytes opening;
  MismatchPlace place;
  Bytes operators;  // the prover's, if they tell the operator
};

class Auditor {
 public:
  Auditor(const Record& record, const OpenedModel& model, Backend& backend, AuditChannel& channel,
          const LiveAuditOptions& options)
      : record_(record),
        claim_(record.claim),
        shape_(record.claim.trace_shape),
        model_(model),
        config_(model.model().config()),
        backend_(backend),
        channel_(channel),
        options_(options),
        report_(begin_report(record, model.tokenizer(), backend)) {
    report_.live.emplace();
    live().plan = options.plan;
    live().log_key_from_prover = options.log_key_from_prover;
  }

  LiveAudit run() {
    if (!options_.log_key) throw std::logic_error("live_audit: no log key");
    const Manifest local = model_.manifest(record_.manifest);
    if (!check_model(record_, local, model_.model(), report_)) return done();
    check_expectations(options_, record_, report_);
    if (report_.verdict != Verdict::kMatch) return done();
    compare_weights(manifest_differences(record_.manifest, local));
    if (!check_replayable(claim_, model_.model(), report_)) {
      record_is_bad_ = report_.verdict == Verdict::kMismatch;
      if (record_is_bad_) make_proof(nullptr);
      return done();
    }
    options_.plan.check(shape_);
    const std::size_t findings = report_.findings.size();
    check_claim_text(claim_, model_.model(), model_.tokenizer(), report_);
    record_is_bad_ = report_.findings.size() > findings;
    try {
      commit();
      open();
    } catch (const Error& error) {
      give_up(error);
    }
    conclude();
    model_.model().check_unchanged();
    return done();
  }

 private:
  LiveCoverage& live() { return *report_.live; }

  // What the prover did not do, or did wrong. Once something was found against it that stays found.
  void give_up(const Error& error) {
    const bool about_prover = error.kind() == ErrorKind::kMalformed ||
                              error.kind() == ErrorKind::kCannotJudge ||
                              (error.kind() == ErrorKind::kInfrastructure && transport_failed_);
    const bool found = report_.verdict == Verdict::kMismatch;
    if (!about_prover || (!found && error.kind() == ErrorKind::kInfrastructure)) throw Error(error);
    if (found) {
      report_.notes.push_back(std::string("the audit ended early: ") + error.what());
      return;
    }
    report_.verdict =
        error.kind() == ErrorKind::kMalformed ? Verdict::kMalformed : Verdict::kCannotJudge;
    report_.findings.push_back(error.what());
  }

  // Makes a call of the channel, again after a failure of the transport.
  template <class Call>
  auto with_retries(Call call) {
    milliseconds wait = options_.retry_wait;
    for (unsigned failures = 0;; ++failures) {
      transport_failed_ = false;
      try {
        return call();
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kInfrastructure || own_failure_) throw;
        transport_failed_ = true;
        if (failures == options_.retries) throw;
      }
      std::this_thread::sleep_for(wait);
      wait *= 2;
    }
  }

  // ---- Commit: the secret's hash goes into the log, and the checkpoint that comes back settles
  // the seed.
  void commit() {
    const Bytes secret = random_bytes(challenge_.secret.size());
    std::copy(secret.begin(), secret.end(), challenge_.secret.begin());
    AuditCommitment& commitment = challenge_.commitment;
    commitment.record = report_.record_digest;
    commitment.secret_hash = secret_hash(challenge_.secret);
    commitment.plan = options_.plan;
    commitment.sign(options_.key);
    const Bytes bytes = commitment.serialize();
    const CommitReceipts receipts = with_retries([&] { return channel_.commit(bytes); });

    const std::string of_commitment = options_.prover + ": receipt of the commitment";
    const std::string of_record = options_.prover + ": receipt of the record";
    report_.log_state = AuditReport::LogState::kNotShown;
    const ReceiptResult committed =
        verify_entry_receipt(receipts.commitment, *options_.log_key,
                             log_entry_for_audit(commitment.digest()), of_commitment);
    check_included(committed, of_commitment);
    const ReceiptResult recorded =
        verify_receipt(receipts.record, *options_.log_key, report_.record_digest, of_record);
    check_included(recorded, of_record);
    if (committed.checkpoint != recorded.checkpoint) {
      throw malformed_error(options_.prover +
                            ": the two receipts of a commitment are under different checkpoints");
    }
    report_.log_state = AuditReport::LogState::kIncluded;
    report_.log_index = recorded.index;
    report_.checkpoint = recorded.checkpoint;
    record_receipt_ = receipts.record;
    commitment_receipt_ = receipts.commitment;

    challenge_.checkpoint_note = checkpoint_note(receipts.commitment, of_commitment);
    checkpoint_note(receipts.record, of_record);
    // Any later head would do for a seed, too, and whoever could wait for one could choose.
    check_challenge_checkpoint(challenge_, receipts.commitment, options_.prover);
    challenge_.sign(options_.key);
    challenge_bytes_ = challenge_.serialize();
    challenge_digest_ = challenge_.digest();
    OpenRequest request;
    request.challenge = challenge_bytes_;
    request.sign(options_.key);
    open_request_ = request.serialize();
    live().seed = challenge_seed(challenge_.secret, committed.checkpoint, claim_.trace_root);
    live().checkpoint = committed.checkpoint;
    sample_ = draw_sample(options_.plan, shape_, *live().seed);
    describe_sample();
  }

  static std::string checkpoint_note(const std::string& receipt, const std::string& document) {
    std::string note = TlogProof::parse(receipt, document).checkpoint_note;
    if (note.size() > kMaxCheckpointNoteBytes) {
      throw malformed_error(document + ": a checkpoint of " + std::to_string(note.size()) +
                            " bytes; at most " + std::to_string(kMaxCheckpointNoteBytes) +
                            " are allowed");
    }
    return note;
  }

  void check_included(const ReceiptResult& result, const std::string& document) const {
    if (result.verdict == ReceiptVerdict::kUnknownLog) {
      throw cannot_judge_error(document + " is not by the log key " + options_.log_key->name +
                               ": the record is in another log than the one to be audited");
    }
    if (result.verdict == ReceiptVerdict::kOtherRecord) {
      throw malformed_error(document + " is good, but for another entry");
    }
  }

  void describe_sample() {
    live().chosen_layers = draw_layers(options_.plan, shape_, live().seed.value());
    live().population = live().chosen_layers.size() * shape_.positions;
    live().all_layers = shape_.layers;
    for (const LayerCells& cells : sample_.layers) live().layers.push_back(cells.layer);
  }

  // ---- Open: parts as they come, each checked and recomputed before the next one is taken.
  void open() {
    const std::vector<ExpectedPart> parts = expected_parts(shape_, sample_);
    const std::string document = "opening by " + options_.prover;
    const auto ask = [&] {
      ++live().attempts;
      OpeningReceiver receiver(parts, document,
                               [&](std::size_t index, const ExpectedPart& part, Bytes data) {
                                 take_part(index, part, std::move(data), document);
                               });
      try {
        channel_.open(open_request_, receiver);
        receiver.finish();
      } catch (...) {
        own_failure_ = receiver.failure() != nullptr;
        throw;
      }
    };
    try {
      with_retries(ask);
    } catch (const Error& error) {
      const bool vanished = error.kind() == ErrorKind::kInfrastructure && transport_failed_;
      const bool refused = error.kind() == ErrorKind::kCannotJudge && !own_failure_;
      if (!vanished && !refused) throw;
      // One that does so whenever its bad cells are drawn would pass all the audits that end.
      throw Error(
          error.kind(),
          std::string(error.what()) + "; it knew what it had to open (challenge " +
              challenge_digest_.hex() + ", commitment " + challenge_.commitment.digest().hex() +
              " in the log), and a new audit draws anew: a prover that often leaves challenges "
              "unanswered is not to be trusted");
    }
  }

  void take_part(std::size_t index, const ExpectedPart& part, Bytes data,
                 const std::string& document) {
    // A part that was judged before the transport failed is not judged again, and may not change.
    const Digest digest = sha256(data);
    if (index < judged_.size()) {
      if (judged_[index] != digest) {
        throw malformed_error(document + ": " + part.text() +
                              " differs from what the same challenge was answered with before");
      }
      return;
    }
    live().opened_bytes += data.size();
    switch (part.kind) {
      case OpeningPartKind::kHeader:
        take_header(std::move(data), document);
        break;
      case OpeningPartKind::kEnds:
        take_ends(std::move(data), document);
        break;
      default:
        take_layer(part, std::move(data), document);
    }
    judged_.push_back(digest);
  }

  void take_header(Bytes data, const std::string& document) {
    header_ = OpeningHeader::parse(data, shape_, claim_.trace_root, challenge_digest_,
                                   document + ", header");
    const PublicKey signer = prover_key(record_, options_.log_key);
    if (header_.prover.key != signer) {
      throw malformed_error(document + " is signed by " + header_.prover.key.name +
                            ", but the one to answer for the record is " + signer.name);
    }
    check_tokens_root(header_.tree_roots.back(), claim_, document);
    header_bytes_ = std::move(data);
    // Only now is anything sized by the sample.
    runner_.emplace(config_, backend_, static_cast<std::int64_t>(shape_.positions));
    if (!sample_.layers.empty()) model_.model().prefetch_layer(sample_.layers.front().layer);
  }

  void take_ends(Bytes data, const std::string& document) {
    EndsOpening opening(shape_, sample_.embeddings, sample_.heads, std::move(data));
    opening.check(header_.tree_roots, document);
    const bool embeddings = !sample_.embeddings.empty(), heads = !sample_.heads.empty();
    compare_weights(model_.end_differences(record_.manifest, embeddings, heads));
    const PlacedEnds placed(model_.model().weights(), backend_);
    const auto bad_embeddings =
        judge_embeddings(opening, claim_, config_, placed.weights(), *runner_);
    const auto bad_heads = judge_heads(opening, claim_, config_, placed.weights(), *runner_);
    live().embeddings_checked = opening.embeddings().size();
    live().heads_checked = opening.heads().size();
    report_.ends_checked = live().embeddings_checked + live().heads_checked;
    report_.tokens_checked = live().heads_checked;
    live().bad_ends = bad_embeddings.size() + bad_heads.size();
    for (const RowDifference& bad : bad_embeddings) {
      list_bad({BadCell::Kind::kEmbedding, 0, bad.place.position.value()});
    }
    for (const RowDifference& bad : bad_heads) {
      list_bad({BadCell::Kind::kHead, 0, bad.place.position.value()});
    }
    if (!bad_embeddings.empty()) {
      const RowDifference& first = bad_embeddings.front();
      bad_embedding_ = Evidence{MismatchProof::Kind::kEmbedding,
                                0,
                                *first.place.position,
                                0,
                                opening.single_embedding(first.index),
                                first.place,
                                {}};
    }
    if (!bad_heads.empty()) {
      const RowDifference& first = bad_heads.front();
      bad_head_ = Evidence{MismatchProof::Kind::kHead,
                           0,
                           *first.place.position,
                           0,
                           opening.single_head(first.index),
                           first.place,
                           {}};
    }
    if (live().bad_ends != 0) report_.verdict = Verdict::kMismatch;
  }

  void take_layer(const ExpectedPart& part, Bytes data, const std::string& document) {
    const LayerCells& cells = sample_.layers[part.layer_index];
    LayerOpening opening(shape_, cells, cells.positions.back() + 1, std::move(data));
    opening.check(header_.tree_roots, document);
    compare_weights(model_.layer_differences(record_.manifest, part.layer));
    const std::uint64_t total = sample_.cell_count(), before = report_.cells_checked;
    std::vector<RowDifference> bad;
    {
      const PlacedLayer placed(model_.model().weights().layers[part.layer], backend_);
      bad = judge_cells(opening, config_, placed.weights(), *runner_, [&](std::size_t done) {
        if (options_.on_replay) options_.on_replay(before + done, total);
      });
    }
    model_.model().release_layer(part.layer);
    if (part.layer_index + 1 < sample_.layers.size()) {
      model_.model().prefetch_layer(sample_.layers[part.layer_index + 1].layer);
    }
    report_.cells_checked += cells.positions.size();
    live().bad_cells += bad.size();
    for (const RowDifference& one : bad) {
      list_bad({BadCell::Kind::kCell, part.layer, one.place.position.value()});
    }
    if (bad.empty()) return;
    report_.verdict = Verdict::kMismatch;
    if (bad_cell_) return;  // layers come in ascending order
    const RowDifference& first = bad.front();
    bad_cell_ = Evidence{MismatchProof::Kind::kCell,
                         part.layer,
                         *first.place.position,
                         opening.prefix(),
                         opening.single(first.index),
                         first.place,
                         {}};
  }

  void list_bad(const BadCell& bad) {
    if (live().bad.size() < LiveCoverage::kMaxBadCells) live().bad.push_back(bad);
  }

  void compare_weights(const std::vector<std::string>& differences) {
    other_weights_ = other_weights_ || !differences.empty();
    report_differences(differences, model_.model(), report_);
  }

  // ---- Localisation: which operator of the first bad cell.
  void locate(Evidence& bad) {
    const LayerOpening opening(shape_, LayerCells{bad.layer, {bad.position}}, bad.prefix,
                               bad.opening);
    OperatorOutputs computed;
    {
      const PlacedLayer placed(model_.model().weights().layers[bad.layer], backend_);
      computed = cell_operators(opening, 0, placed.weights(), *runner_);
    }
    model_.model().release_layer(bad.layer);
    std::optional<CellOperators> claimed;
    std::string why_not;
    Bytes bytes;
    try {
      OperatorsRequest request;
      request.challenge = challenge_bytes_;
      request.layer = bad.layer;
      request.position = bad.position;
      request.sign(options_.key);
      const Bytes request_bytes = request.serialize();
      bytes =
          with_retries([&] { return channel_.operators(request_bytes, kMaxCellOperatorsBytes); });
      claimed = CellOperators::parse(bytes, challenge_digest_, bad.layer, bad.position,
                                     "operators by " + options_.prover);
      if (claimed->prover.key != header_.prover.key) {
        claimed.reset();
        why_not = "they are not signed by the key that signed the opening";
      }
    } catch (const Error& error) {
      why_not = error.what();
    }
    const OperatorPlace place =
        place_operator(bad.place, opening, 0, computed, claimed ? &*claimed : nullptr);
    bad.place = place.place;
    if (place.from_operators) {
      bad.operators = std::move(bytes);
      return;
    }
    if (claimed) why_not = place.unusable.empty() ? "they are all as recomputed" : place.unusable;
    report_.notes.push_back(
        "the prover's outputs of the single operators did not help (" + why_not +
        "), so the operator named is the one whose committed output differs; an earlier one may be "
        "the cause");
  }

  void conclude() {
    LiveCoverage& coverage = live();
    if (bad_cell_) locate(*bad_cell_);
    const Evidence* const first = bad_embedding_ ? &*bad_embedding_
                                  : bad_cell_    ? &*bad_cell_
                                  : bad_head_    ? &*bad_head_
                                                 : nullptr;
    if (first != nullptr) {
      report_.place = first->place;
      report_.findings.insert(
          report_.findings.begin(),
          std::to_string(coverage.bad_cells) + " of " + std::to_string(report_.cells_checked) +
              " cells and " + std::to_string(coverage.bad_ends) + " of " +
              std::to_string(report_.ends_checked) + " ends are not what the model computes");
    }
    if (report_.verdict == Verdict::kMatch) {
      coverage.bad_cells_at_most = bad_at_most(coverage.population, report_.cells_checked);
      coverage.bad_embeddings_at_most = bad_at_most(shape_.positions, coverage.embeddings_checked);
      coverage.bad_heads_at_most = bad_at_most(shape_.emitted, coverage.heads_checked);
      if (options_.plan.level == AuditLevel::kLayer &&
          options_.plan.layers.kind != LayerChoice::Kind::kListed) {
        coverage.bad_layers_at_most = bad_at_most(shape_.layers, coverage.layers.size());
      }
      if (report_.cells_checked + report_.ends_checked == 0) {
        report_.verdict = Verdict::kCannotJudge;  // not reachable through a plan that was checked
        report_.findings.push_back("nothing was checked");
      }
    }
    if (options_.plan.ends == 0 && coverage.seed) {
      report_.notes.push_back(
          "no token, embedding or head was looked at (--ends 0): only that layers compute what "
          "they "
          "should from rows that may be anything");
    }
    if (options_.log_key_from_prover) {
      report_.notes.push_back(
          "the log's key is only what the prover says it is: give the one that you trust with "
          "--log-key");
    }
    if (!model_.knows_all_weights() && report_.cells_checked + report_.ends_checked != 0) {
      report_.notes.push_back(
          "of the weights, those of the layers and ends that were checked were compared with the "
          "record's manifest; of the others names, types and shapes only (all with --manifest)");
    }
    if (report_.verdict == Verdict::kMismatch) make_proof(first);
  }

  void make_proof(const Evidence* first) {
    if (other_weights_) {
      report_.notes.push_back(
          "no proof for others: this copy of the model is not the one of the record's manifest");
      return;
    }
    if (first == nullptr && !record_is_bad_) return;
    MismatchProof proof;
    if (first != nullptr) {
      Record record;  // all but its evidence: what was opened is the evidence here
      record.claim = claim_;
      record.provenance = record_.provenance;
      record.manifest = record_.manifest;
      record.signature = record_.signature;
      proof.record = record.serialize();
      proof.kind = first->kind;
      proof.layer = first->layer;
      proof.position = first->position;
      proof.prefix = first->prefix;
      proof.commitment_receipt = commitment_receipt_;
      proof.challenge = challenge_bytes_;
      proof.header = header_bytes_;
      proof.opening = first->opening;
      proof.operators = first->operators;
      proof.finding = finding_of(first->place);
    } else {
      proof.record = record_.serialize();
      proof.finding.op = "record";
    }
    proof.receipt = record_receipt_;
    proof.backend = backend_.name();
    proof.sign(options_.key);
    proof_ = std::move(proof);
  }

  LiveAudit done() { return {std::move(report_), std::move(proof_)}; }

  const Record& record_;
  const Claim& claim_;
  const TraceShape& shape_;
  const OpenedModel& model_;
  const ModelConfig& config_;
  Backend& backend_;
  AuditChannel& channel_;
  const LiveAuditOptions& options_;
  AuditReport report_;
  std::optional<MismatchProof> proof_;

  bool transport_failed_ = false;  // the last call of the channel did, for good
  bool own_failure_ = false;       // what ended it came from this side's judging
  bool other_weights_ = false;     // the local weights are not the manifest's
  bool record_is_bad_ = false;     // the claim alone shows a mismatch

  Challenge challenge_;
  Bytes challenge_bytes_;
  Digest challenge_digest_;
  Bytes open_request_;
  std::string record_receipt_, commitment_receipt_;
  AuditSample sample_;
  OpeningHeader header_;
  Bytes header_bytes_;
  std::vector<Digest> judged_;  // digests of the parts that were judged
  std::optional<CellRunner> runner_;
  std::optional<Evidence> bad_embedding_, bad_cell_, bad_head_;
};

}  // namespace

LiveAudit live_audit(const Record& record, const OpenedModel& model, Backend& backend,
                     AuditChannel& channel, const LiveAuditOptions& options) {
  return Auditor(record, model, backend, channel, options).run();
}

}  // namespace bitwitness
