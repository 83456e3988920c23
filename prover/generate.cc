#include "prover/generate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <list>

#include "attest/base/error.h"
#include "attest/base/leaf_hash.h"
#include "kernels/sampler.h"

namespace bitwitness {
namespace {

// One request while it is computed.
struct Sequence {
  std::size_t index = 0;  // of the request
  const GenerationRequest* request = nullptr;
  std::int32_t slot = 0;
  std::int64_t computed = 0;  // positions done
  std::vector<std::uint32_t> emitted;
  std::optional<StopReason> stopped;
  std::optional<StreamDecoder> decoder;
  std::optional<TraceBuilder> trace;
  Generation out;
  // Rows are kept by leaf until the number of positions is known.
  struct KeptRow {
    LeafType type;
    std::uint32_t layer;
    std::uint64_t position;
    Bytes payload;
  };
  std::vector<KeptRow> kept;

  std::int64_t prompt_length() const {
    return static_cast<std::int64_t>(request->prompt_ids.size());
  }
  std::uint32_t token_at(std::int64_t position) const {
    return position < prompt_length()
               ? request->prompt_ids[static_cast<std::size_t>(position)]
               : emitted[static_cast<std::size_t>(position - prompt_length())];
  }
};

}  // namespace

TraceShape trace_shape(const ModelConfig& config) {
  TraceShape shape;
  shape.layers = static_cast<std::uint32_t>(config.num_layers);
  shape.hidden = static_cast<std::uint32_t>(config.hidden_size);
  shape.kv_width = static_cast<std::uint32_t>(config.kv_size());
  shape.vocab = static_cast<std::uint32_t>(config.vocab_size);
  return shape;
}

std::int64_t positions_needed(const ServedModel& model, const GenerationRequest& request) {
  const std::int64_t prompt = static_cast<std::int64_t>(request.prompt_ids.size());
  const std::uint64_t room =
      static_cast<std::uint64_t>(model.model.config().max_positions - prompt);
  return prompt + static_cast<std::int64_t>(std::min(request.max_tokens - 1, room));
}

class GenerationBatch::Impl {
 public:
  Impl(const ServedModel& model, const PlacedWeights& weights, Backend& backend,
       std::int64_t capacity, const GenerationOptions& options, const GenerationObserver& observer)
      : model_(model),
        config_(model.model.config()),
        options_(options),
        observer_(observer),
        backend_(backend),
        engine_(config_, weights, backend, engine_options(capacity)) {
    for (std::int64_t slot = engine_.options().slots - 1; slot >= 0; --slot) {
      free_slots_.push_back(static_cast<std::int32_t>(slot));
    }
  }

  void add(std::size_t index, const GenerationRequest& request) {
    waiting_.push_back({index, &request});
    prompt_total_ += request.prompt_ids.size();
  }

  std::size_t size() const { return waiting_.size() + active_.size(); }

  std::vector<Finished> step() {
    drop_cancelled();
    admit();
    if (active_.empty()) return {};
    compute();
    return retire();
  }

 private:
  struct Waiting {
    std::size_t index;
    const GenerationRequest* request;
  };

  EngineOptions engine_options(std::int64_t capacity) const {
    EngineOptions out;
    out.slots = std::max<std::int64_t>(options_.max_slots, 1);
    out.capacity = capacity;
    out.defer_leaves = options_.commit;
    const std::int64_t most = options_.max_rows > 0 ? options_.max_rows : backend_.preferred_rows();
    out.max_rows = std::min(most, out.slots * out.capacity);
    return out;
  }

  void drop_cancelled() {
    if (!observer_.cancelled) return;
    std::erase_if(waiting_,
                  [&](const Waiting& waiting) { return observer_.cancelled(waiting.index); });
    std::vector<std::size_t> gone;
    for (const Sequence& sequence : active_) {
      if (observer_.cancelled(sequence.index)) gone.push_back(sequence.index);
    }
    if (gone.empty()) return;
    engine_.flush();  // leaves of theirs, too, may still be on their way
    std::erase_if(active_, [&](const Sequence& sequence) {
      if (std::find(gone.begin(), gone.end(), sequence.index) == gone.end()) return false;
      free_slot(sequence.slot);
      return true;
    });
  }

  void free_slot(std::int32_t slot) {
    engine_.release(slot);
    free_slots_.push_back(slot);
  }

  // Memory for the whole of the next request. False if it has to wait for that of others.
  bool reserve_for_next() {
    try {
      engine_.reserve(free_slots_.back(), positions_needed(model_, *waiting_.front().request));
      return true;
    } catch (const Error& error) {
      engine_.release(free_slots_.back());
      if (active_.empty() || error.kind() != ErrorKind::kInfrastructure) throw;
      return false;
    }
  }

  void admit() {
    while (!waiting_.empty() && !free_slots_.empty() && reserve_for_next()) {
      Sequence sequence;
      sequence.index = waiting_.front().index;
      sequence.request = waiting_.front().request;
      waiting_.pop_front();
      sequence.slot = free_slots_.back();
      free_slots_.pop_back();
      if (model_.tokenizer) sequence.decoder.emplace(*model_.tokenizer, /*skip_special=*/true);
      if (options_.commit) sequence.trace.emplace(trace_shape(config_));
      active_.push_back(std::move(sequence));
    }
  }

  void compute() {
    std::vector<StepRow> rows;
    std::vector<Sequence*> emitting;
    by_slot_.assign(static_cast<std::size_t>(engine_.options().slots), nullptr);
    std::uint64_t prompt_rows = 0;
    for (Sequence& sequence : active_) {
      by_slot_[static_cast<std::size_t>(sequence.slot)] = &sequence;
      const std::int64_t known =
          sequence.prompt_length() + static_cast<std::int64_t>(sequence.emitted.size());
      std::int64_t count = known - sequence.computed;
      if (options_.prefill_chunk > 0) count = std::min(count, options_.prefill_chunk);
      if (sequence.computed < sequence.prompt_length()) {
        prompt_rows += static_cast<std::uint64_t>(count);
      }
      if (sequence.trace) {
        sequence.trace->reserve(static_cast<std::uint64_t>(sequence.computed + count));
      }
      for (std::int64_t i = 0; i < count; ++i) {
        StepRow row;
        row.slot = sequence.slot;
        row.position = static_cast<std::int32_t>(sequence.computed + i);
        row.token = static_cast<std::int32_t>(sequence.token_at(row.position));
        row.emit = row.position + 1 == known;
        if (row.emit) {
          row.sample = {sequence.request->sampling,
                        sample_draw(sequence.request->seed, static_cast<std::uint64_t>(known))};
          emitting.push_back(&sequence);
        }
        rows.push_back(row);
      }
      sequence.computed += count;
    }
    StepObserver observer = step_observer();
    if (observer_.on_prefill && prompt_rows > 1) {
      observer.on_progress = [&](std::int64_t done, std::int64_t) {
        observer_.on_prefill(
            std::min(prompt_total_, prompt_done_ + static_cast<std::uint64_t>(done)),
            prompt_total_);
      };
    }
    const std::vector<std::int32_t> tokens = engine_.step(rows, observer);
    prompt_done_ += prompt_rows;
    for (std::size_t i = 0; i < emitting.size(); ++i) {
      take_token(*emitting[i], static_cast<std::uint32_t>(tokens[i]));
    }
  }

  StepObserver step_observer() {
    StepObserver observer;
    if (options_.commit) {
      observer.on_leaves = [this](LeafType type, std::uint32_t layer, const RowMap& rows,
                                  const Digest* digests) {
        for (std::int64_t m = 0; m < rows.rows; ++m) {
          by_slot_[static_cast<std::size_t>(rows.host_slot[m])]->trace->set(
              type, layer, static_cast<std::uint64_t>(rows.host_position[m]), digests[m]);
        }
      };
    }
    if (options_.keep_rows || options_.keep_logits) {
      observer.on_values = [this](LeafType type, std::uint32_t layer, const RowMap& rows,
                                  const float* first, std::int64_t first_width, const float* second,
                                  std::int64_t second_width) {
        for (std::int64_t m = 0; m < rows.rows; ++m) {
          keep(*by_slot_[static_cast<std::size_t>(rows.host_slot[m])], type, layer,
               static_cast<std::uint64_t>(rows.host_position[m]), first + m * first_width,
               first_width, second + m * second_width, second_width);
        }
      };
    }
    return observer;
  }

  void keep(Sequence& sequence, LeafType type, std::uint32_t layer, std::uint64_t position,
            const float* first, std::int64_t first_width, const float* second,
            std::int64_t second_width) const {
    if (options_.keep_logits && type == LeafType::kLogits) {
      sequence.out.logits.insert(sequence.out.logits.end(), first, first + first_width);
    }
    if (!options_.keep_rows) return;
    const std::size_t first_bytes = static_cast<std::size_t>(first_width) * sizeof(float);
    const std::size_t second_bytes = static_cast<std::size_t>(second_width) * sizeof(float);
    Bytes payload(first_bytes + second_bytes);
    std::memcpy(payload.data(), first, first_bytes);
    if (second_bytes != 0) std::memcpy(payload.data() + first_bytes, second, second_bytes);
    sequence.kept.push_back({type, layer, position, std::move(payload)});
  }

  void take_token(Sequence& sequence, std::uint32_t token) const {
    const GenerationRequest& request = *sequence.request;
    sequence.emitted.push_back(token);
    std::string piece;
    if (sequence.decoder && token < model_.tokenizer->id_limit() &&
        model_.tokenizer->id_to_token(token)) {
      piece = sequence.decoder->push(token);
    }
    const std::int64_t known =
        sequence.prompt_length() + static_cast<std::int64_t>(sequence.emitted.size());
    if (std::binary_search(request.stop_ids.begin(), request.stop_ids.end(), token)) {
      sequence.stopped = StopReason::kStopToken;
    } else if (sequence.emitted.size() >= request.max_tokens) {
      sequence.stopped = StopReason::kLength;
    } else if (known > config_.max_positions) {
      sequence.stopped = StopReason::kContext;
    }
    if (sequence.stopped && sequence.decoder) piece += sequence.decoder->flush();
    sequence.out.text += piece;
    if (observer_.on_token) observer_.on_token(sequence.index, token, piece);
  }

  std::vector<Finished> retire() {
    std::vector<Finished> out;
    const bool any = std::any_of(active_.begin(), active_.end(),
                                 [](const Sequence& sequence) { return sequence.stopped; });
    if (any) engine_.flush();
    for (auto it = active_.begin(); it != active_.end();) {
      if (!it->stopped) {
        ++it;
        continue;
      }
      finish(*it);
      free_slot(it->slot);
      out.push_back({it->index, std::move(it->out)});
      it = active_.erase(it);
    }
    return out;
  }

  void finish(Sequence& sequence) const {
    const GenerationRequest& request = *sequence.request;
    Claim& claim = sequence.out.claim;
    claim.arithmetic = model_.manifest.arithmetic;
    claim.manifest_digest = model_.manifest.digest();
    claim.prompt_ids = request.prompt_ids;
    claim.emitted_ids = sequence.emitted;
    claim.stop_reason = *sequence.stopped;
    claim.stop_ids = request.stop_ids;
    claim.max_tokens = request.max_tokens;
    claim.sampling.algorithm = contract::kSamplerVersion;
    claim.sampling.temperature_bits = contract::bits_of(request.sampling.temperature);
    claim.sampling.top_k = request.sampling.top_k;
    claim.sampling.top_p_bits = contract::bits_of(request.sampling.top_p);
    claim.seed = request.seed;
    claim.seed_provenance = request.seed_provenance;
    claim.text_digest = text_digest(request.seed, sequence.out.text);
    claim.trace_shape = trace_shape(config_);
    claim.trace_shape.positions = static_cast<std::uint64_t>(sequence.computed);
    claim.trace_shape.emitted = sequence.emitted.size();
    if (!options_.commit) return;

    std::vector<std::uint32_t> ids = request.prompt_ids;
    ids.insert(ids.end(), sequence.emitted.begin(), sequence.emitted.end());
    sequence.trace->set(LeafType::kTokens, 0, 0, tokens_leaf(ids));
    sequence.out.trace =
        sequence.trace->finish(claim.trace_shape.positions, claim.trace_shape.emitted);
    claim.trace_root = sequence.out.trace->root();
    if (options_.keep_rows) sequence.out.rows = joined_rows(sequence, claim.trace_shape);
  }

  static Bytes joined_rows(Sequence& sequence, const TraceShape& shape) {
    const std::optional<std::uint64_t> bytes = evidence_rows_bytes(shape);
    if (!bytes) {
      throw usage_error(
          "the committed rows of this run exceed what a record may hold; use --evidence leaves");
    }
    Bytes rows(*bytes);
    for (const Sequence::KeptRow& kept : sequence.kept) {
      const auto range = evidence_row_range(shape, kept.type, kept.layer, kept.position);
      std::memcpy(rows.data() + range->offset, kept.payload.data(), kept.payload.size());
    }
    sequence.kept.clear();
    return rows;
  }

  const ServedModel& model_;
  const ModelConfig& config_;
  const GenerationOptions options_;
  const GenerationObserver& observer_;
  Backend& backend_;
  Engine engine_;
  std::deque<Waiting> waiting_;
  std::list<Sequence> active_;
  std::vector<Sequence*> by_slot_;
  std::vector<std::int32_t> free_slots_;
  std::uint64_t prompt_total_ = 0;
  std::uint64_t prompt_done_ = 0;
};

GenerationBatch::GenerationBatch(const ServedModel& model, const PlacedWeights& weights,
                                 Backend& backend, std::int64_t capacity,
                                 const GenerationOptions& options,
                                 const GenerationObserver& observer)
    : impl_(std::make_unique<Impl>(model, weights, backend, capacity, options, observer)) {}
GenerationBatch::~GenerationBatch() = default;
void GenerationBatch::add(std::size_t index, const GenerationRequest& request) {
  impl_->add(index, request);
}
std::size_t GenerationBatch::size() const {
  return impl_->size();
}
std::vector<GenerationBatch::Finished> GenerationBatch::step() {
  return impl_->step();
}

ServedModel ServedModel::load(const std::string& dir, const ProgressFn& manifest_progress) {
  Model model = Model::load(dir);
  std::optional<Tokenizer> tokenizer;
  if (!model.tokenizer_json().empty()) {
    tokenizer = Tokenizer::from_json(model.tokenizer_json(), dir + "/tokenizer.json");
  }
  Manifest manifest = build_manifest(model.describe(), manifest_progress);
  return {std::move(model), std::move(tokenizer), std::move(manifest)};
}

std::vector<std::uint32_t> encode_prompt(const ServedModel& model, std::string_view text) {
  if (!model.tokenizer) {
    throw usage_error("the model in " + model.model.dir().string() +
                      " has no tokenizer.json; give the prompt as --token-ids");
  }
  std::vector<std::uint32_t> ids = model.tokenizer->encode(text, /*add_special_tokens=*/true);
  if (ids.empty()) throw usage_error("the prompt is empty: it has no tokens; give some text");
  return ids;
}

std::vector<std::uint32_t> default_stop_ids(const ServedModel& model) {
  const std::vector<std::int32_t>& eos = model.model.config().eos_ids;
  return {eos.begin(), eos.end()};
}

void check_request(const ServedModel& model, const GenerationRequest& request) {
  const ModelConfig& config = model.model.config();
  const std::int64_t prompt = static_cast<std::int64_t>(request.prompt_ids.size());
  if (prompt == 0)
    throw usage_error("the prompt is empty: it has no tokens; give some text or ids");
  if (prompt > config.max_positions) {
    throw usage_error("the prompt has " + std::to_string(prompt) +
                      " tokens, but the model's context has " +
                      std::to_string(config.max_positions) + "; shorten it");
  }
  for (std::size_t i = 0; i < request.prompt_ids.size(); ++i) {
    if (request.prompt_ids[i] >= static_cast<std::uint64_t>(config.vocab_size)) {
      throw usage_error("prompt token " + std::to_string(i) + " is " +
                        std::to_string(request.prompt_ids[i]) +
                        ", outside the model's vocabulary of " + std::to_string(config.vocab_size));
    }
  }
  if (request.max_tokens == 0) throw usage_error("max_tokens is 0; ask for at least one token");
  const contract::SamplingParams& sampling = request.sampling;
  if (!std::isfinite(sampling.temperature) || sampling.temperature < 0 ||
      std::signbit(sampling.temperature)) {
    throw usage_error("temperature must be 0 (greedy) or a finite positive number");
  }
  if (!(sampling.top_p > 0 && sampling.top_p <= 1)) {
    throw usage_error("top_p must be above 0 and at most 1");
  }
  if (sampling.temperature == 0 && (sampling.top_k != 0 || sampling.top_p != 1)) {
    throw usage_error(
        "top_k and top_p have no effect at temperature 0 (greedy); set a temperature or leave them "
        "out");
  }
  if (sampling.temperature != 0 && request.seed.empty()) {
    throw usage_error("sampling draws, but the seed is empty; give one or more bytes");
  }
  if (request.seed.size() > kMaxSeedBytes) {
    throw usage_error("the seed has " + std::to_string(request.seed.size()) + " bytes; at most " +
                      std::to_string(kMaxSeedBytes) + " are allowed");
  }
}

std::size_t least_memory(const ServedModel& model, const Backend& backend,
                         const GenerationOptions& options, std::int64_t capacity) {
  EngineOptions engine;
  engine.capacity = capacity;
  engine.max_rows = options.max_rows;
  engine.defer_leaves = options.commit;
  return Engine::least_memory(model.model.config(), engine, backend);
}

std::vector<Generation> generate(const ServedModel& model, const PlacedWeights& weights,
                                 Backend& backend, std::span<const GenerationRequest> requests,
                                 const GenerationOptions& options,
                                 const GenerationObserver& observer) {
  std::int64_t capacity = 0;
  for (const GenerationRequest& request : requests) {
    check_request(model, request);
    capacity = std::max(capacity, positions_needed(model, request));
  }
  if (requests.empty()) return {};
  GenerationOptions fitted = options;
  fitted.max_slots =
      std::min<std::int64_t>(options.max_slots, static_cast<std::int64_t>(requests.size()));
  GenerationBatch batch(model, weights, backend, capacity, fitted, observer);
  for (std::size_t i = 0; i < requests.size(); ++i) batch.add(i, requests[i]);
  std::vector<Generation> results(requests.size());
  std::size_t finished = 0;
  while (batch.size() != 0) {
    for (GenerationBatch::Finished& done : batch.step()) {
      results[done.index] = std::move(done.generation);
      ++finished;
    }
    if (finished + batch.size() < requests.size()) {
      throw infrastructure_error("generation was cancelled; nothing was recorded");
    }
  }
  return results;
}

std::vector<Generation> generate(const ServedModel& model, Backend& backend,
                                 std::span<const GenerationRequest> requests,
                                 const GenerationOptions& options,
                                 const GenerationObserver& observer) {
  std::int64_t capacity = 0;
  for (const GenerationRequest& request : requests) {
    check_request(model, request);
    capacity = std::max(capacity, positions_needed(model, request));
  }
  if (requests.empty()) return {};
  const PlacedWeights weights(model.model.weights(), backend,
                              least_memory(model, backend, options, capacity));
  return generate(model, weights, backend, requests, options, observer);
}

Record make_record(const ServedModel& model, const Generation& generation, EvidenceLevel evidence,
                   Provenance provenance) {
  Record record;
  record.claim = generation.claim;
  record.manifest = model.manifest;
  record.provenance = std::move(provenance);
  switch (evidence) {
    case EvidenceLevel::kNone:
      break;
    case EvidenceLevel::kRoots:
      record.evidence = roots_evidence(*generation.trace);
      break;
    case EvidenceLevel::kLeaves:
      record.evidence = leaves_evidence(*generation.trace);
      break;
    case EvidenceLevel::kRows:
      record.evidence = rows_evidence(*generation.trace, generation.rows);
      break;
  }
  return record;
}

Provenance run_provenance(const Backend& backend) {
  Provenance provenance = new_provenance();
  provenance[provenance_key::kBackend] = backend.name();
  provenance[provenance_key::kDevice] = backend.device();
  provenance[provenance_key::kBuild] = "bitwitness " BITWITNESS_VERSION ", " __VERSION__;
  return provenance;
}

}  // namespace bitwitness
