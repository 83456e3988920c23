// Full audits: re-execute a record from its token ids and demand equal bits.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "attest/log.h"
#include "attest/manifest.h"
#include "attest/record.h"
#include "kernels/backend.h"
#include "kernels/model/model.h"
#include "kernels/tokenizer/tokenizer.h"

namespace bitwitness {

enum class Verdict { kMatch, kMismatch, kCannotJudge, kMalformed };
const char* verdict_name(Verdict verdict);
ExitCode exit_code(Verdict verdict);

// The auditor's own copy of the model, hashed once and used for any number of records.
struct AuditModel {
  Model model;
  std::optional<Tokenizer> tokenizer;
  Manifest manifest;
  static AuditModel load(const std::string& dir, const ProgressFn& manifest_progress = {});
};

// The first place where re-execution and record differ, as exactly as the record's evidence allows.
struct MismatchPlace {
  LeafType type = LeafType::kRow;
  std::uint32_t layer = 0;
  std::optional<std::uint64_t> position;  // absent with evidence of level roots
  std::optional<std::uint64_t>
      element;  // evidence of level rows; for tokens the index in the sequence
  std::optional<std::uint32_t> claimed_bits;
  std::optional<std::uint32_t> computed_bits;
  // The layer whose computation gave the differing leaf (h[l] is the output of layer l - 1); absent
  // for embedding, head and tokens.
  std::optional<std::uint32_t> cell_layer() const;
  std::string text() const;  // for people: "layer 3, position 17, output h[4], element 5: ..."
};

// What was checked and found. Everything in it can be recomputed from the record and the model.
struct AuditReport {
  Verdict verdict = Verdict::kCannotJudge;
  bool judged =
      true;  // false: there was no well-formed record; only the findings below mean something
  std::vector<std::string> findings;  // why the verdict is not match, most telling first
  std::vector<std::string> notes;     // what a reader should know beside the verdict
  std::optional<MismatchPlace> place;

  Digest record_digest;
  Digest claim_digest;
  Digest claimed_trace_root;
  std::optional<Digest> computed_trace_root;  // absent if nothing was re-executed
  // What was claimed, for a reader: as the auditor's own tokenizer spells it (absent without one).
  std::optional<std::string> prompt_text;
  std::optional<std::string> output_text;
  std::uint64_t max_tokens = 0;
  std::vector<std::uint32_t> prompt_ids;
  std::vector<std::uint32_t> emitted_ids;
  SamplingParameters sampling;
  StopReason stop_reason = StopReason::kLength;
  SeedProvenance seed_provenance = SeedProvenance::kNone;
  std::string claimed_backend;  // provenance, self-reported
  std::string backend;          // that replayed
  std::string device;

  // Coverage: cells (layer, position), end cells (embeddings, heads), tokens.
  std::uint64_t cells = 0, cells_checked = 0;
  std::uint64_t ends = 0, ends_checked = 0;
  std::uint64_t tokens = 0, tokens_checked = 0;

  enum class LogState {
    kNotAsked,  // no log key was given, or nothing came so far
    kNotShown,  // inclusion was asked for and is not shown; the findings say why
    kIncluded,
  };
  LogState log_state = LogState::kNotAsked;
  std::optional<std::uint64_t> log_index;
  std::optional<Checkpoint> checkpoint;
  std::optional<std::string> operator_key;  // vkey of a good operator signature in the record
};

struct AuditOptions {
  std::optional<PublicKey> log_key;    // with it a receipt is required
  std::optional<std::string> receipt;  // tlog-proof text
  std::string receipt_name = "receipt";
  std::optional<PublicKey> operator_key;  // the record must be signed by it
  std::optional<Bytes> nonce;             // the claim's seed must be it
  std::int64_t max_rows = 512;
  ProgressFn on_replay;
};

// Judges a parsed record (Record::parse has thrown malformed for an ill-formed one). Never throws
// for a difference; throws malformed for an ill-formed receipt, infrastructure for a failing
// device.
AuditReport audit_record(const Record& record, const AuditModel& model, Backend& backend,
                         const AuditOptions& options);

}  // namespace bitwitness
