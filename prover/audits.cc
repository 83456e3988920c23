#include "prover/audits.h"

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <memory>

#include "attest/base/error.h"
#include "attest/log.h"
#include "attest/opening.h"
#include "prover/serve.h"

namespace bitwitness {
namespace {

using std::chrono::steady_clock;

Refusal refused(const std::string& message) {
  return {RefusalCode::kFailedPrecondition, message};
}

// The time that a provenance gives; nullopt for text of another form.
std::optional<std::chrono::system_clock::time_point> provenance_time(const std::string& text) {
  std::tm parts{};
  const char* const end = strptime(text.c_str(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  if (end == nullptr || *end != '\0') return std::nullopt;
  return std::chrono::system_clock::from_time_t(timegm(&parts));
}

// Runs `work`; an Error of it is the client's fault and becomes a Refusal with this code.
template <class Work>
auto blamed_on_client(RefusalCode code, const Work& work) {
  try {
    return work();
  } catch (const Error& error) {
    throw Refusal{code, error.what()};
  }
}

std::string sessions_dir(const ServeOptions& options) {
  if (options.records_dir.empty() || options.allow.empty()) return {};
  return (std::filesystem::path(options.records_dir) / "audits").string();
}

}  // namespace

// ---- Memory.

OpeningMemory::Part::Part(OpeningMemory& memory, std::uint64_t bytes, const GoneFn& gone)
    : memory_(memory), bytes_(bytes) {
  memory_.take(bytes_, gone);
}

OpeningMemory::Part::~Part() {
  memory_.give(bytes_);
}

void OpeningMemory::take(std::uint64_t bytes, const GoneFn& gone) {
  const std::uint64_t ticket = bytes;
  std::unique_lock lock(mutex_);
  waiting_.push_back(&ticket);
  while (waiting_.front() != &ticket || free_ < bytes) {
    changed_.wait_for(lock, std::chrono::milliseconds(50));
    if (gone()) {
      std::erase(waiting_, &ticket);
      changed_.notify_all();
      throw cancelled_by_client();
    }
  }
  waiting_.pop_front();
  free_ -= bytes;
  changed_.notify_all();
}

void OpeningMemory::give(std::uint64_t bytes) {
  const std::scoped_lock lock(mutex_);
  free_ += bytes;
  changed_.notify_all();
}

bool OpeningMemory::contended() const {
  const std::scoped_lock lock(mutex_);
  return !waiting_.empty();
}

// ---- Audits.

Audits::Audits(const ServedModel& model, const PlacedWeights& weights, Backend& backend,
               const ServeOptions& options, RecordStore& store, ProverLog* log, Worker& worker)
    : model_(model),
      weights_(weights),
      backend_(backend),
      options_(options),
      store_(store),
      log_(log),
      worker_(worker),
      quota_(options.quota_audits, options.quota_bytes),
      sessions_(sessions_dir(options), options.retention + std::chrono::hours(1)),
      memory_(options.max_opening_bytes) {}

void Audits::check_verifier(const PublicKey& verifier) const {
  if (std::find(options_.allow.begin(), options_.allow.end(), verifier) == options_.allow.end()) {
    throw Refusal{
        RefusalCode::kPermissionDenied,
        options_.allow.empty()
            ? std::string("this prover answers no audits: its operator allows no verifier")
            : "the verifier key " + verifier.vkey() +
                  " is not on this prover's list; ask its operator to --allow it"};
  }
  if (log_ == nullptr) {
    throw refused("this prover keeps no log, and without one nothing fixes the order of an audit");
  }
}

Audits::Kept Audits::find(const Digest& id) const {
  std::optional<StoredRecord> stored = store_.get(id);
  if (!stored) {
    throw Refusal{RefusalCode::kNotFound,
                  "no record " + id.hex() + " here (never made, or no longer kept)"};
  }
  if (stored->size_bytes() > options_.max_record_bytes) {
    throw refused("record " + id.hex() + " is larger than this prover's limit");
  }
  Bytes bytes(stored->size_bytes());
  stored->read(0, bytes);
  Kept out;
  const std::string document = "record " + id.hex() + " as kept here";
  out.record = Record::parse(bytes, document);
  if (out.record.digest() != id) throw infrastructure_error(document + ": is another record");

  const auto finished = out.record.provenance.find(provenance_key::kFinished);
  const std::optional<std::chrono::system_clock::time_point> claimed =
      finished == out.record.provenance.end() ? std::nullopt : provenance_time(finished->second);
  if (std::chrono::system_clock::now() - claimed.value_or(stored->stored_at()) >
      options_.retention) {
    throw refused("record " + id.hex() + " is older than the " +
                  std::to_string(options_.retention.count()) +
                  " s for which this prover answers audits; a full audit still works");
  }
  if (out.record.claim.manifest_digest != model_.manifest.digest()) {
    throw refused("record " + id.hex() + " is of another model than this prover serves now");
  }
  if (stored->receipt().empty()) {
    throw refused("record " + id.hex() + " is not in this prover's log");
  }
  out.log_index = TlogProof::parse(stored->receipt(), document + ", its receipt").index;
  if (!log_->has_record(id, out.log_index)) {
    throw refused("record " + id.hex() + " is not in this prover's log as it is now");
  }
  return out;
}

void Audits::check_plan(const AuditPlan& plan, const TraceShape& shape) const {
  blamed_on_client(RefusalCode::kInvalidArgument, [&] { plan.check(shape); });
  if (plan.level != AuditLevel::kLayer) return;
  // Every layer costs the same, so it is known beforehand that none can be opened.
  AuditSample one;
  one.layers.push_back({plan.layers.listed.empty() ? 0 : plan.layers.listed.front(), {}});
  for (std::uint64_t t = 0; t < shape.positions; ++t) one.layers[0].positions.push_back(t);
  blamed_on_client(RefusalCode::kOutOfRange,
                   [&] { plan_passes(shape, one, options_.max_opening_bytes); });
}

Audits::Receipts Audits::commit(ByteView bytes) {
  const AuditCommitment commitment = blamed_on_client(
      RefusalCode::kInvalidArgument, [&] { return AuditCommitment::parse(bytes, "commitment"); });
  const PublicKey& verifier = commitment.verifier.key;
  check_verifier(verifier);
  const auto used_up = [this] {
    return Refusal{RefusalCode::kResourceExhausted,
                   "this verifier has had its " + std::to_string(quota_.max_audits()) +
                       " audits of the last hour; try again later"};
  };
  const Digest digest = commitment.digest();
  std::optional<std::uint64_t> index = log_->find_audit(digest);
  if (!index && quota_.audits_left(verifier, steady_clock::now()) == 0) throw used_up();

  const Kept kept = find(commitment.record);
  signer(kept.record);
  check_plan(commitment.plan, kept.record.claim.trace_shape);
  if (!index) {
    const std::scoped_lock lock(commit_mutex_);
    index = log_->find_audit(digest);
    if (!index) {
      if (!quota_.take_audit(verifier, steady_clock::now())) throw used_up();
      index = log_->append_audit(digest);
    }
  }
  check_order(kept, *index);
  ProverLog::AuditReceipts receipts = log_->audit_receipts(*index, kept.log_index);
  return {std::move(receipts.commitment), std::move(receipts.record)};
}

// The seed's checkpoint is the head that ends with the commitment, so the record must be below.
void Audits::check_order(const Kept& kept, std::uint64_t commitment_index) {
  if (kept.log_index < commitment_index) return;
  throw refused("the record was logged, as entry " + std::to_string(kept.log_index) +
                ", after the commitment, which is entry " + std::to_string(commitment_index) +
                "; make a new commitment");
}

Audits::Accepted Audits::accept(ByteView bytes, const PublicKey& request_signer) {
  Accepted out;
  out.challenge = blamed_on_client(RefusalCode::kInvalidArgument,
                                   [&] { return Challenge::parse(bytes, "challenge"); });
  const AuditCommitment& commitment = out.challenge.commitment;
  const PublicKey& verifier = out.challenge.verifier.key;
  if (request_signer != verifier) {
    throw invalid("the request is signed by another key than its challenge");
  }
  check_verifier(verifier);
  out.digest = out.challenge.digest();

  // What costs least is checked first; reading the record and drawing come last.
  const Checkpoint checkpoint = blamed_on_client(RefusalCode::kInvalidArgument, [&] {
    return open_checkpoint(out.challenge.checkpoint_note, log_->key().public_key(),
                           "challenge, checkpoint");
  });
  const Digest digest = commitment.digest();
  const std::optional<std::uint64_t> index = log_->find_audit(digest);
  if (!index) throw refused("the commitment is not in this prover's log; send Commit first");
  const std::string receipt = log_->commitment_receipt(*index);
  blamed_on_client(RefusalCode::kInvalidArgument,
                   [&] { check_challenge_checkpoint(out.challenge, receipt, "challenge"); });
  if (sessions_.answers(digest) >= kMaxAnswers) throw answers_used_up();
  if (quota_.bytes_left(verifier, steady_clock::now()) == 0) throw bytes_used_up(1);

  out.kept = find(commitment.record);
  check_order(out.kept, *index);
  const TraceShape& shape = out.kept.record.claim.trace_shape;
  check_plan(commitment.plan, shape);
  out.sample = draw_sample(
      commitment.plan, shape,
      challenge_seed(out.challenge.secret, checkpoint, out.kept.record.claim.trace_root));
  return out;
}

Refusal Audits::answers_used_up() const {
  return {RefusalCode::kResourceExhausted, "this commitment has had all of its " +
                                               std::to_string(kMaxAnswers) +
                                               " answers; make a new one"};
}

Refusal Audits::bytes_used_up(std::uint64_t bytes) const {
  return {RefusalCode::kResourceExhausted, "with this opening of " + std::to_string(bytes) +
                                               " bytes or more the verifier would exceed the " +
                                               std::to_string(quota_.max_bytes()) +
                                               " bytes of an hour; try again later"};
}

void Audits::admit(const Accepted& accepted, ByteView challenge, std::uint64_t bytes) {
  const PublicKey& verifier = accepted.challenge.verifier.key;
  const Digest commitment = accepted.challenge.commitment.digest();
  if (bytes > quota_.max_bytes()) {
    throw Refusal{RefusalCode::kOutOfRange, "the opening has " + std::to_string(bytes) +
                                                " bytes, more than the " +
                                                std::to_string(quota_.max_bytes()) +
                                                " that a verifier gets in an hour; ask for less"};
  }
  const steady_clock::time_point now = steady_clock::now();
  if (!sessions_.tie(commitment, accepted.digest, challenge, now)) {
    throw refused(
        "this commitment has been challenged before, in other bytes: one seed, one use; make a new "
        "commitment");
  }
  if (!sessions_.take_answer(commitment, kMaxAnswers, now)) throw answers_used_up();
  if (!quota_.take_bytes(verifier, bytes, now)) {
    sessions_.return_answer(commitment);
    throw bytes_used_up(bytes);
  }
}

const SigningKey& Audits::signer(const Record& record) const {
  if (!record.signature) return log_->key();
  if (options_.operator_key && options_.operator_key->public_key() == record.signature->key) {
    return *options_.operator_key;
  }
  throw refused("the record is signed by the operator key " + record.signature->key.vkey() +
                ", which this prover does not have now");
}

RerunOptions Audits::rerun_options(const Worker::CancelledFn& cancelled) const {
  return {options_.max_rows, cancelled};
}

void Audits::open(ByteView bytes, const GoneFn& gone, const PartSink& sink) {
  const OpenRequest request = blamed_on_client(
      RefusalCode::kInvalidArgument, [&] { return OpenRequest::parse(bytes, "open request"); });
  const Accepted accepted = accept(request.challenge, request.verifier.key);
  const Claim& claim = accepted.kept.record.claim;
  const SigningKey& key = signer(accepted.kept.record);
  const std::vector<OpeningPass> passes = blamed_on_client(RefusalCode::kOutOfRange, [&] {
    return plan_passes(claim.trace_shape, accepted.sample, options_.max_opening_bytes);
  });
  std::uint64_t total = max_opening_header_bytes(claim.trace_shape);
  for (const OpeningPass& pass : passes) total += pass.bytes;
  admit(accepted, request.challenge, total);

  for (const OpeningPass& pass : passes) {
    const OpeningMemory::Part memory(memory_, pass.memory, gone);
    std::unique_ptr<Rerun> rerun;
    worker_.run(gone, [&](const Worker::CancelledFn& cancelled) {
      rerun = std::make_unique<Rerun>(model_, weights_, backend_, claim, accepted.sample, pass,
                                      rerun_options(cancelled));
    });
    if (&pass == passes.data()) {
      OpeningHeader header;
      header.challenge = accepted.digest;
      header.tree_roots.assign(rerun->trace().tree_roots().begin(),
                               rerun->trace().tree_roots().end());
      header.sign(key);
      sink(PartKind::kHeader, 0, header.serialize());
    }
    if (pass.ends) sink(PartKind::kEnds, 0, rerun->ends_part());
    for (std::size_t i = pass.first_layer; i < pass.first_layer + pass.layer_count; ++i) {
      sink(PartKind::kLayer, accepted.sample.layers[i].layer, rerun->layer_part(i));
    }
  }
}

void Audits::operators(ByteView bytes, const GoneFn& gone, const PartSink& sink) {
  const OperatorsRequest request = blamed_on_client(RefusalCode::kInvalidArgument, [&] {
    return OperatorsRequest::parse(bytes, "operators request");
  });
  const Accepted accepted = accept(request.challenge, request.verifier.key);
  const auto layer =
      std::find_if(accepted.sample.layers.begin(), accepted.sample.layers.end(),
                   [&](const LayerCells& cells) { return cells.layer == request.layer; });
  if (layer == accepted.sample.layers.end() ||
      !std::binary_search(layer->positions.begin(), layer->positions.end(), request.position)) {
    throw invalid("operators request: layer " + std::to_string(request.layer) + ", position " +
                  std::to_string(request.position) + " is no cell that the challenge drew");
  }
  const Claim& claim = accepted.kept.record.claim;
  const SigningKey& key = signer(accepted.kept.record);
  AuditSample cell;
  cell.layers.push_back({request.layer, {request.position}});
  const std::vector<OpeningPass> passes = blamed_on_client(RefusalCode::kOutOfRange, [&] {
    return plan_passes(claim.trace_shape, cell, options_.max_opening_bytes);
  });
  admit(accepted, request.challenge, max_operators_bytes(model_.model.config()));

  const OpeningMemory::Part memory(memory_, passes[0].memory, gone);
  CellOperators operators;
  worker_.run(gone, [&](const Worker::CancelledFn& cancelled) {
    operators = open_operators(model_, weights_, backend_, claim, accepted.digest, request.layer,
                               request.position, rerun_options(cancelled));
  });
  operators.sign(key);
  sink(PartKind::kOperators, request.layer, operators.serialize());
}

}  // namespace bitwitness
