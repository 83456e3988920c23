#include "verifier/audit.h"

#include <algorithm>
#include <cstring>

#include "attest/base/error.h"
#include "attest/base/leaf_hash.h"
#include "kernels/engine.h"

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
    ids_ = sequence_ids(claim);
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
    std::vector<StepRow> rows(shape.positions);
    for (std::int64_t t = 0; t < positions; ++t) {
      StepRow& row = rows[static_cast<std::size_t>(t)];
      row.position = static_cast<std::int32_t>(t);
      row.token = static_cast<std::int32_t>(ids_[static_cast<std::size_t>(t)]);
      row.emit = t >= first_emitting;
      if (row.emit) row.sample = sample_request(claim_, static_cast<std::uint64_t>(t));
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
  check_claim_text(claim, model.model, model.tokenizer, report);
  if (replay.trace.root() != claim.trace_root) {
    find_mismatch(report, "re-execution gives another trace root");
  }
}

}  // namespace

AuditReport audit_record(const Record& record, const AuditModel& model, Backend& backend,
                         const AuditOptions& options) {
  const Claim& claim = record.claim;
  AuditReport report = begin_report(record, model.tokenizer, backend);
  if (!check_model(record, model.manifest, model.model, report)) return report;
  check_receipt(options, report);
  check_expectations(options, record, report);
  if (report.verdict != Verdict::kMatch) return report;

  const std::vector<std::string> differences =
      manifest_differences(record.manifest, model.manifest);
  report_differences(differences, model.model, report);
  const bool replayable = check_replayable(claim, model.model, report);
  report.record_shows_mismatch = report.verdict == Verdict::kMismatch && differences.empty();
  if (!replayable) return report;
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
  report.record_shows_mismatch = report.verdict == Verdict::kMismatch && differences.empty();
  model.model.check_unchanged();
  return report;
}

}  // namespace bitwitness
