#include "verifier/audit.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "attest/base/error.h"
#include "attest/base/leaf_hash.h"
#include "kernels/engine.h"
#include "kernels/sampler.h"

namespace bitwitness {
namespace {

// What one pass over the record's tokens gives.
struct Replay {
  Trace trace;
  std::vector<std::uint32_t> sampled;  // one for each emitted token
};

// The leaf whose values a second pass brings to the host.
struct Wanted {
  LeafPlace place;
  std::vector<float> values;
};

class Replayer {
 public:
  Replayer(const Claim& claim, const AuditModel& model, Backend& backend,
           const AuditOptions& options)
      : claim_(claim),
        options_(options),
        weights_(model.model.weights(), backend),
        engine_(model.model.config(), weights_, backend, engine_options()) {
    ids_ = claim.prompt_ids;
    ids_.insert(ids_.end(), claim.emitted_ids.begin(), claim.emitted_ids.end());
  }

  // Re-executes every position. With `wanted`, the values of that leaf are kept.
  Replay run(Wanted* wanted) {
    const TraceShape& shape = claim_.trace_shape;
    const std::int64_t positions = static_cast<std::int64_t>(shape.positions);
    const std::int64_t first_emitting = positions - static_cast<std::int64_t>(shape.emitted);
    TraceBuilder builder(shape);
    builder.reserve(shape.positions);
    StepObserver observer;
    observer.on_leaves = [&](LeafType type, std::uint32_t layer, const RowMap& rows,
                             const Digest* digests) {
      for (std::int64_t m = 0; m < rows.rows; ++m) {
        builder.set(type, layer, static_cast<std::uint64_t>(rows.host_position[m]), digests[m]);
      }
    };
    if (wanted != nullptr) observer.on_values = value_keeper(*wanted);
    if (options_.on_replay) {
      observer.on_progress = [&](std::int64_t done, std::int64_t total) {
        options_.on_replay(static_cast<std::uint64_t>(done), static_cast<std::uint64_t>(total));
      };
    }
    contract::SamplingParams sampling;
    sampling.temperature = contract::float_of(claim_.sampling.temperature_bits);
    sampling.top_k = claim_.sampling.top_k;
    sampling.top_p = contract::float_of(claim_.sampling.top_p_bits);

    std::vector<StepRow> rows(shape.positions);
    for (std::int64_t t = 0; t < positions; ++t) {
      StepRow& row = rows[static_cast<std::size_t>(t)];
      row.position = static_cast<std::int32_t>(t);
      row.token = static_cast<std::int32_t>(ids_[static_cast<std::size_t>(t)]);
      row.emit = t >= first_emitting;
      row.sample = {sampling, sample_draw(claim_.seed, static_cast<std::uint64_t>(t) + 1)};
    }
    const std::vector<std::int32_t> sampled = engine_.step(rows, observer);
    // The token leaf of the claim's own ids, not of the sampled ones: those are compared one by
    // one.
    builder.set(LeafType::kTokens, 0, 0, tokens_leaf(ids_));
    return {builder.finish(shape.positions, shape.emitted), {sampled.begin(), sampled.end()}};
  }

 private:
  EngineOptions engine_options() const {
    EngineOptions out;
    out.capacity = static_cast<std::int64_t>(claim_.trace_shape.positions);
    out.max_rows = std::min(std::max<std::int64_t>(options_.max_rows, 1), out.capacity);
    return out;
  }

  static decltype(StepObserver::on_values) value_keeper(Wanted& wanted) {
    return [&wanted](LeafType type, std::uint32_t layer, const RowMap& rows, const float* first,
                     std::int64_t first_width, const float* second, std::int64_t second_width) {
      if (type != wanted.place.type || layer != wanted.place.layer) return;
      for (std::int64_t m = 0; m < rows.rows; ++m) {
        if (static_cast<std::uint64_t>(rows.host_position[m]) != wanted.place.position) continue;
        wanted.values.assign(first + m * first_width, first + (m + 1) * first_width);
        wanted.values.insert(wanted.values.end(), second + m * second_width,
                             second + (m + 1) * second_width);
      }
    };
  }

  const Claim& claim_;
  const AuditOptions& options_;
  PlacedWeights weights_;
  Engine engine_;
  std::vector<std::uint32_t> ids_;
};

// Compares what the record shows beyond its root with the replayed trace.
std::optional<MismatchPlace> locate(const Record& record, const Trace& computed,
                                    Replayer& replayer) {
  const Evidence& evidence = record.evidence;
  const TraceShape& shape = record.claim.trace_shape;
  if (evidence.level == EvidenceLevel::kNone) return std::nullopt;
  MismatchPlace place;
  if (evidence.level == EvidenceLevel::kRoots) {
    // Trees in the order in which a run computes them: h[0], then key-values and h of each layer.
    const std::span<const Digest> roots = computed.tree_roots();
    const std::size_t L = shape.layers;
    const auto differs = [&](std::size_t i) { return roots[i] != evidence.tree_roots[i]; };
    for (std::size_t l = 0; l <= L; ++l) {
      if (l > 0 && differs(L + l)) {
        place.type = LeafType::kKeyValue;
        place.layer = static_cast<std::uint32_t>(l - 1);
        return place;
      }
      if (differs(l)) {
        place.type = LeafType::kRow;
        place.layer = static_cast<std::uint32_t>(l);
        return place;
      }
    }
    place.type = differs(2 * L + 1) ? LeafType::kLogits : LeafType::kTokens;
    return place;
  }
  const Trace claimed = Trace::from_leaves(shape, evidence.leaves);
  const std::optional<LeafPlace> leaf = first_difference(claimed, computed);
  if (!leaf) return std::nullopt;
  place.type = leaf->type;
  place.layer = leaf->layer;
  place.position = leaf->position;
  if (evidence.level != EvidenceLevel::kRows || leaf->type == LeafType::kTokens) return place;
  Wanted wanted{*leaf, {}};
  replayer.run(&wanted);
  const auto range = evidence_row_range(shape, leaf->type, leaf->layer, leaf->position);
  if (!range) return place;
  for (std::size_t i = 0; i < wanted.values.size() && 4 * i < range->bytes; ++i) {
    std::uint32_t claimed_bits = 0;
    std::memcpy(&claimed_bits, evidence.rows.data() + range->offset + 4 * i, 4);
    const std::uint32_t computed_bits = contract::bits_of(wanted.values[i]);
    if (claimed_bits == computed_bits) continue;
    place.element = i;
    place.claimed_bits = claimed_bits;
    place.computed_bits = computed_bits;
    break;
  }
  return place;
}

// Whether the claimed model computes something else than ours (configuration, tensors' shapes), as
// opposed to the same computation on other weights or tables.
bool same_computation(const Manifest& claimed, const Manifest& local) {
  if (claimed.arithmetic != local.arithmetic || claimed.family != local.family ||
      claimed.config != local.config || claimed.tensors.size() != local.tensors.size()) {
    return false;
  }
  for (std::size_t i = 0; i < local.tensors.size(); ++i) {
    const ManifestTensor &a = claimed.tensors[i], &b = local.tensors[i];
    if (a.name != b.name || a.dtype != b.dtype || a.shape != b.shape) return false;
  }
  return true;
}

// Whether a run of this model can have a trace of this shape at all; checked before anything is
// sized by it.
bool possible_shape(const TraceShape& shape, const ModelConfig& config) {
  return shape.layers == config.num_layers && shape.hidden == config.hidden_size &&
         shape.kv_width == config.kv_size() && shape.vocab == config.vocab_size &&
         shape.row_dtype == Dtype::kFp32 && shape.kv_dtype == Dtype::kFp32 &&
         shape.positions <= static_cast<std::uint64_t>(config.max_positions);
}

void check_receipt(const AuditOptions& options, const Digest& record_digest, AuditReport& report) {
  if (!options.log_key) {
    if (options.receipt) {
      report.notes.push_back(
          "the receipt was not checked: give the log's verifier key with --log-key");
    }
    return;
  }
  report.log_state = AuditReport::LogState::kNotShown;
  if (!options.receipt) {
    report.verdict = Verdict::kCannotJudge;
    report.findings.push_back(
        "a log key was given, but there is no receipt; give it with --receipt");
    return;
  }
  const ReceiptResult result =
      verify_receipt(*options.receipt, *options.log_key, record_digest, options.receipt_name);
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
                                options.log_key->name);
      return;
  }
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

// What the auditor says must be in the record.
void check_expectations(const AuditOptions& options, const Record& record, AuditReport& report) {
  if (options.operator_key &&
      (!record.signature || record.signature->key != *options.operator_key)) {
    report.verdict = Verdict::kCannotJudge;
    report.findings.push_back("the record is not signed by the given operator key " +
                              options.operator_key->name);
  }
  if (options.nonce && record.claim.seed != *options.nonce) {
    report.verdict = Verdict::kMismatch;
    report.findings.push_back("the claim's seed is not the given nonce");
  }
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

void describe_claim(const Claim& claim, const AuditModel& model, AuditReport& report) {
  report.max_tokens = claim.max_tokens;
  report.prompt_ids = claim.prompt_ids;
  report.emitted_ids = claim.emitted_ids;
  report.sampling = claim.sampling;
  report.stop_reason = claim.stop_reason;
  report.seed_provenance = claim.seed_provenance;
  if (model.tokenizer) {
    report.prompt_text = spelled(*model.tokenizer, claim.prompt_ids);
    report.output_text = spelled(*model.tokenizer, claim.emitted_ids);
  }
}

void check_claim_against_replay(const Record& record, const AuditModel& model, const Replay& replay,
                                AuditReport& report) {
  const Claim& claim = record.claim;
  for (std::size_t i = 0; i < claim.emitted_ids.size(); ++i) {
    if (replay.sampled[i] == claim.emitted_ids[i]) continue;
    report.verdict = Verdict::kMismatch;
    report.findings.push_back("emitted token " + std::to_string(i) + " (position " +
                              std::to_string(claim.prompt_ids.size() + i) + ") is " +
                              std::to_string(claim.emitted_ids[i]) +
                              " in the claim; the model and the sampler give " +
                              std::to_string(replay.sampled[i]));
    break;
  }
  // The manifest binds the model's stop tokens; with others a prover could cut an answer short, or
  // go on.
  const std::vector<std::int32_t>& eos = model.model.config().eos_ids;
  if (!std::equal(claim.stop_ids.begin(), claim.stop_ids.end(), eos.begin(), eos.end())) {
    report.verdict = Verdict::kMismatch;
    report.findings.push_back("the claim's stop tokens are not those of the model's configuration");
  }
  if (claim.stop_reason == StopReason::kContext &&
      claim.trace_shape.positions !=
          static_cast<std::uint64_t>(model.model.config().max_positions)) {
    report.verdict = Verdict::kMismatch;
    report.findings.push_back("the claim says that the context was full, but it has " +
                              std::to_string(claim.trace_shape.positions) + " of " +
                              std::to_string(model.model.config().max_positions) + " positions");
  }
  const std::string text =
      model.tokenizer ? delivered_text(*model.tokenizer, claim.emitted_ids) : std::string();
  if (text_digest(claim.seed, text) != claim.text_digest) {
    report.verdict = Verdict::kMismatch;
    report.findings.push_back(
        "the digest of the delivered text is not that of the emitted tokens' text");
  }
  if (replay.trace.root() != claim.trace_root) {
    report.verdict = Verdict::kMismatch;
    report.findings.push_back("re-execution gives another trace root");
  }
}

}  // namespace

const char* verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::kMatch:
      return "match";
    case Verdict::kMismatch:
      return "mismatch";
    case Verdict::kCannotJudge:
      return "cannot_judge";
    case Verdict::kMalformed:
      return "malformed";
  }
  return "cannot_judge";
}

ExitCode exit_code(Verdict verdict) {
  switch (verdict) {
    case Verdict::kMatch:
      return ExitCode::kOk;
    case Verdict::kMismatch:
      return ExitCode::kMismatch;
    case Verdict::kCannotJudge:
      return ExitCode::kCannotJudge;
    case Verdict::kMalformed:
      return ExitCode::kMalformed;
  }
  return ExitCode::kCannotJudge;
}

std::optional<std::uint32_t> MismatchPlace::cell_layer() const {
  if (type == LeafType::kKeyValue) return layer;
  if (type == LeafType::kRow && layer > 0) return layer - 1;
  return std::nullopt;
}

std::string MismatchPlace::text() const {
  std::string out;
  if (const auto cell = cell_layer()) out = "layer " + std::to_string(*cell) + ", ";
  if (position && type != LeafType::kTokens) out += "position " + std::to_string(*position) + ", ";
  switch (type) {
    case LeafType::kRow:
      out += layer == 0 ? "embedding" : "output h[" + std::to_string(layer) + "]";
      break;
    case LeafType::kKeyValue:
      out += "keys and values";
      break;
    case LeafType::kLogits:
      out += "logits";
      break;
    default:
      out += "token ids";
  }
  if (element) {
    char bits[96];
    std::snprintf(bits, sizeof bits, ", element %llu: claimed %08x, computed %08x",
                  static_cast<unsigned long long>(*element), claimed_bits.value_or(0),
                  computed_bits.value_or(0));
    out += bits;
  }
  return out;
}

AuditModel AuditModel::load(const std::string& dir, const ProgressFn& manifest_progress) {
  Model model = Model::load(dir);
  std::optional<Tokenizer> tokenizer;
  if (!model.tokenizer_json().empty()) {
    tokenizer = Tokenizer::from_json(model.tokenizer_json(), dir + "/tokenizer.json");
  }
  Manifest manifest = build_manifest(model.describe(), manifest_progress);
  return {std::move(model), std::move(tokenizer), std::move(manifest)};
}

AuditReport audit_record(const Record& record, const AuditModel& model, Backend& backend,
                         const AuditOptions& options) {
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
  describe_claim(claim, model, report);
  const TraceShape& shape = claim.trace_shape;
  report.cells = shape.layers * shape.positions;
  report.ends = shape.positions + shape.emitted;
  report.tokens = shape.emitted;
  if (claim.seed_provenance == SeedProvenance::kProver) {
    report.notes.push_back(
        "the prover chose the sampling seed itself: the choice of tokens may carry hidden data");
  }

  const std::vector<std::string> differences =
      manifest_differences(record.manifest, model.manifest);
  if (!same_computation(record.manifest, model.manifest)) {
    report.findings.push_back("the record is about another model than " +
                              model.model.dir().string());
    report.findings.insert(report.findings.end(), differences.begin(), differences.end());
    return report;  // cannot_judge
  }

  report.verdict = Verdict::kMatch;
  check_receipt(options, report.record_digest, report);
  check_expectations(options, record, report);
  if (report.verdict != Verdict::kMatch) return report;

  if (!differences.empty()) {
    report.verdict = Verdict::kMismatch;
    report.findings.push_back("the record's model is not the one in " + model.model.dir().string() +
                              ":");
    report.findings.insert(report.findings.end(), differences.begin(), differences.end());
  }
  if (!possible_shape(shape, model.model.config())) {
    report.verdict = Verdict::kMismatch;
    report.findings.push_back(
        "no run of this model has a trace of the claimed shape (layers, widths, types or "
        "positions)");
    return report;
  }
  if (claim.sampling.algorithm != contract::kSamplerVersion) {
    report.verdict = Verdict::kCannotJudge;
    report.findings.push_back("the claim uses sampler version " +
                              std::to_string(claim.sampling.algorithm) + "; this program knows " +
                              std::to_string(contract::kSamplerVersion));
    return report;
  }
  try {
    Replayer replayer(claim, model, backend, options);
    const Replay replay = replayer.run(nullptr);
    report.computed_trace_root = replay.trace.root();
    report.cells_checked = report.cells;
    report.ends_checked = report.ends;
    report.tokens_checked = report.tokens;
    check_claim_against_replay(record, model, replay, report);
    if (replay.trace.root() != claim.trace_root) {
      report.place = locate(record, replay.trace, replayer);
      if (!report.place) {
        report.notes.push_back(
            "the record holds no evidence beyond its trace root, so the place of the difference is "
            "unknown; records made with --evidence leaves or rows name it");
      }
    }
  } catch (const NonFiniteError& error) {
    report.verdict = Verdict::kMismatch;
    report.findings.push_back(std::string("re-execution does not stay finite, so no honest run "
                                          "could have ended in this record: ") +
                              error.what());
  }
  model.model.check_unchanged();
  return report;
}

}  // namespace bitwitness
