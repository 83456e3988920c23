// Generation: requests in, claims out. Runs any number of requests together on one engine, commits
// to every activation, and returns what a record is made of. Nothing here depends on flags or
// files.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attest/claim.h"
#include "attest/manifest.h"
#include "attest/record.h"
#include "attest/trace.h"
#include "kernels/backend.h"
#include "kernels/engine.h"
#include "kernels/model/model.h"
#include "kernels/tokenizer/tokenizer.h"

namespace bitwitness {

// A model with what a claim about it needs.
struct ServedModel {
  Model model;
  std::optional<Tokenizer> tokenizer;  // absent: token ids only, and the delivered text is empty
  Manifest manifest;

  // Loads the directory and hashes the weights. Errors as Model::load and Tokenizer::load.
  static ServedModel load(const std::string& dir, const ProgressFn& manifest_progress = {});
};

struct GenerationRequest {
  std::vector<std::uint32_t> prompt_ids;  // at least one
  std::uint64_t max_tokens = 0;           // at least one
  contract::SamplingParams sampling;      // temperature 0: greedy
  Bytes seed;                             // at most kMaxSeedBytes
  SeedProvenance seed_provenance = SeedProvenance::kNone;
  std::vector<std::uint32_t> stop_ids;  // ascending, unique; generation ends after one of them
};

// The request for `text`: encoded by the model's tokenizer with its special tokens, stop ids from
// the model's configuration. Usage errors: no tokenizer, text not UTF-8, no tokens.
std::vector<std::uint32_t> encode_prompt(const ServedModel& model, std::string_view text);
std::vector<std::uint32_t> default_stop_ids(const ServedModel& model);

struct Generation {
  Claim claim;
  std::optional<Trace> trace;  // absent without commit
  std::string text;            // delivered text
  std::vector<float> logits;   // [emitted, vocab] if asked for
  Bytes rows;                  // payloads in the order of Trace::leaves() if asked for
};

struct GenerationOptions {
  std::int64_t max_slots = 16;     // sequences computed together
  std::int64_t prefill_chunk = 0;  // prompt tokens of one sequence in one step; 0: all
  std::int64_t max_rows = 0;       // rows computed together; 0: what suits the backend
  bool commit = true;              // false: no trace, no claim root (benchmarks only)
  bool keep_logits = false;
  bool keep_rows = false;
};

struct GenerationObserver {
  // A token of request `index` and the text that became certain with it.
  std::function<void(std::size_t index, std::uint32_t token, std::string_view text)> on_token;
  // Prompt positions done and their number, over all requests.
  ProgressFn on_prefill;
  // Asked before every step about each request that is not done; true: nobody wants it any more. It
  // leaves, and its slot is free for another.
  std::function<bool(std::size_t index)> cancelled;
};

// Checks a request against the model before anything is allocated: usage errors name the field and
// the limit (prompt empty or longer than the context, id outside the vocabulary, temperature,
// top_p, seed).
void check_request(const ServedModel& model, const GenerationRequest& request);

// The shape of this model's traces, its counts (positions, emitted) left 0.
TraceShape trace_shape(const ModelConfig& config);

// Positions that a request may take: prompt and emitted tokens but the last, within the context.
std::int64_t positions_needed(const ServedModel& model, const GenerationRequest& request);

// Requests computed together; they may join and leave between steps. The bits of a result do not
// depend on the company, on the options or on the backend.
class GenerationBatch {
 public:
  // Room for options.max_slots requests of at most `capacity` positions each. `weights` are the
  // model's, placed on `backend`. All arguments but `options` must outlive the batch.
  GenerationBatch(const ServedModel& model, const PlacedWeights& weights, Backend& backend,
                  std::int64_t capacity, const GenerationOptions& options,
                  const GenerationObserver& observer);
  ~GenerationBatch();

  // A request, checked (check_request) and of at most `capacity` positions. It is computed as soon
  // as a slot is free, and must stay until it is finished or gone. `index` is what the observer and
  // step() call it.
  void add(std::size_t index, const GenerationRequest& request);
  std::size_t size() const;  // requests that are not done, waiting ones included

  struct Finished {
    std::size_t index;
    Generation generation;
  };
  // One step of every request; returns those that it finished. After an exception the batch is of
  // no use any more.
  std::vector<Finished> step();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Bytes that generating one sequence of `capacity` positions takes of the backend besides the
// weights: what PlacedWeights asks for before it copies anything.
std::size_t least_memory(const ServedModel& model, const Backend& backend,
                         const GenerationOptions& options, std::int64_t capacity);

// Runs all requests; result i belongs to request i. Without `weights` they are placed for this
// call. A request that is cancelled ends the call with an infrastructure error.
std::vector<Generation> generate(const ServedModel& model, const PlacedWeights& weights,
                                 Backend& backend, std::span<const GenerationRequest> requests,
                                 const GenerationOptions& options,
                                 const GenerationObserver& observer = {});
std::vector<Generation> generate(const ServedModel& model, Backend& backend,
                                 std::span<const GenerationRequest> requests,
                                 const GenerationOptions& options,
                                 const GenerationObserver& observer = {});

// The record of a generation, not yet signed. `evidence` kRows needs keep_rows.
Record make_record(const ServedModel& model, const Generation& generation, EvidenceLevel evidence,
                   Provenance provenance);

// Provenance of a run on `backend`: fresh nonce, backend, device, build.
Provenance run_provenance(const Backend& backend);

}  // namespace bitwitness
