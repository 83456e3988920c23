// What an audit checked and found.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attest/challenge.h"
#include "attest/checkpoint.h"
#include "attest/record.h"
#include "verifier/verdict.h"

namespace bitwitness {

// A bad cell or end: "layer 3, position 17", "embedding of position 2", "head of position 19".
struct BadCell {
  enum class Kind { kEmbedding, kCell, kHead };
  Kind kind = Kind::kCell;
  std::uint32_t layer = 0;  // kCell
  std::uint64_t position = 0;
  std::string text() const;
};

// How a live audit came to its sample, and what the sample says about the rest.
struct LiveCoverage {
  AuditPlan plan;
  std::optional<Digest> seed;            // absent before the prover had committed to a checkpoint
  std::optional<Checkpoint> checkpoint;  // that the seed is from
  bool log_key_from_prover = false;      // nobody but the prover says that this is the log

  std::vector<std::uint32_t> chosen_layers;  // that cells were drawn from
  std::vector<std::uint32_t> layers;         // with cells that were drawn
  std::uint64_t population = 0;              // cells of the chosen layers, drawn or not
  std::uint64_t all_layers = 0;              // of the model
  std::uint64_t embeddings_checked = 0, heads_checked = 0;
  std::uint64_t opened_bytes = 0;  // of the opening that was judged
  unsigned attempts = 0;           // how often the opening was asked for

  std::uint64_t bad_cells = 0, bad_ends = 0;  // all of them
  std::vector<BadCell> bad;                   // the first kMaxBadCells of them, in order
  static constexpr std::size_t kMaxBadCells = 100;

  // With a match only: at most so many are bad, at 99 % confidence (coverage.h), of `population`,
  // of the record's embeddings, of its heads, and of its layers (with a cell that is bad; when
  // whole layers were drawn).
  std::optional<std::uint64_t> bad_cells_at_most, bad_embeddings_at_most, bad_heads_at_most,
      bad_layers_at_most;
};

// Everything in it can be recomputed from the record, the opening and the model.
struct AuditReport {
  Verdict verdict = Verdict::kCannotJudge;
  // False: there was no well-formed record; only the findings below mean something.
  bool judged = true;
  std::vector<std::string> findings;  // why the verdict is not match, most telling first
  std::vector<std::string> notes;     // what a reader should know beside the verdict
  std::optional<MismatchPlace> place;

  Digest record_digest;
  Digest claim_digest;
  Digest claimed_trace_root;
  std::optional<Digest> computed_trace_root;  // absent if not everything was re-executed
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

  // Coverage: cells (layer, position), end cells (embeddings, heads), tokens (the sampler's
  // choice).
  std::uint64_t cells = 0, cells_checked = 0;
  std::uint64_t ends = 0, ends_checked = 0;
  std::uint64_t tokens = 0, tokens_checked = 0;
  std::optional<LiveCoverage> live;  // of an audit by openings

  enum class LogState {
    kNotAsked,  // no log key was given, or nothing came so far
    kNotShown,  // inclusion was asked for and is not shown; the findings say why
    kIncluded,
  };
  LogState log_state = LogState::kNotAsked;
  std::optional<std::uint64_t> log_index;
  std::optional<Checkpoint> checkpoint;
  std::optional<std::string> operator_key;  // vkey of a good operator signature in the record
  // Record and model alone show the mismatch, so anybody with both can see it again.
  bool record_shows_mismatch = false;
  std::optional<std::string> proof_file;  // where the mismatch was written
};

}  // namespace bitwitness
