#include "kernels/engine.h"

#include <algorithm>
#include <cstddef>
#include <initializer_list>

namespace bitwitness {
namespace {

// Rows whose logits are computed together; bounds the memory of wide vocabularies.
constexpr std::int64_t kMaxEmitRows = 64;

// Steps of at most so many rows keep the rows of all layers, so that they are hashed together at
// the end; longer ones hash layer by layer.
constexpr std::int64_t kShortStepRows = 64;
static_assert(kShortStepRows <= kMaxEmitRows);

// rows * width * 4 bytes, refused before it can overflow.
std::size_t checked_bytes(std::initializer_list<std::int64_t> factors, const char* what) {
  std::size_t bytes = sizeof(float);
  for (const std::int64_t factor : factors) {
    if (factor < 0 || __builtin_mul_overflow(bytes, static_cast<std::size_t>(factor), &bytes)) {
      throw usage_error(std::string(what) +
                        " does not fit in memory; use fewer sequences or tokens");
    }
  }
  return bytes;
}

EngineOptions checked(EngineOptions options, const ModelConfig& config, const Backend& backend) {
  if (options.max_rows == 0) options.max_rows = backend.preferred_rows();
  if (options.slots < 1 || options.max_rows < 1 || options.capacity < 1) {
    throw usage_error("engine: sequences, rows and positions must be at least 1");
  }
  if (options.capacity > config.max_positions) {
    throw usage_error("the sequence would need " + std::to_string(options.capacity) +
                      " positions, but the model's context has " +
                      std::to_string(config.max_positions) +
                      "; shorten the prompt or ask for fewer tokens");
  }
  return options;
}

std::string non_finite_message(const std::string& op, std::int64_t layer, std::int32_t slot,
                               std::int32_t position, std::int64_t element) {
  return "a value that would be committed is not finite: layer " + std::to_string(layer) +
         ", operator " + op + ", position " + std::to_string(position) + ", element " +
         std::to_string(element) + " (sequence " + std::to_string(slot) +
         "). The run ends here; this model cannot be run on this prompt under this arithmetic";
}

// Rows kept at once: of all layers of a short step, of two layers of a long one, so that those of
// one are hashed while the next is computed.
struct StepRows {
  StepRows(const ModelConfig& config, std::int64_t max_rows) {
    const std::int64_t short_rows = std::min(max_rows, kShortStepRows);
    const std::int64_t long_rows = max_rows > kShortStepRows ? 2 * max_rows : 0;
    hidden = std::max((config.num_layers + 1) * short_rows, long_rows);
    key_values = std::max(config.num_layers * short_rows, long_rows);
  }
  std::int64_t hidden, key_values;
};

// Rows that a lane is made for.
std::int64_t lane_rows(const EngineOptions& options, std::int64_t lane) {
  return lane == 0 ? options.max_rows : std::min(options.max_rows, kShortStepRows);
}

// `pages`, rounded up to three significant bits: launches are sized by it, and a step is recorded
// anew when it changes.
std::int64_t rounded_pages(std::int64_t pages) {
  std::int64_t unit = 1;
  while (pages > 8 * unit) unit *= 2;
  return (pages + unit - 1) / unit * unit;
}

constexpr std::size_t align_up(std::size_t at, std::size_t alignment) {
  return (at + alignment - 1) / alignment * alignment;
}

}  // namespace

struct Engine::StepLayout {
  std::int64_t M, emitted;
  std::size_t slot, position, token, emit_index, emit_slot, emit_position, requests;
  std::size_t flag;  // the last input and the first output
  std::size_t rows, key_values, logits, tokens, end;

  StepLayout(std::int64_t rows_of_step, std::int64_t emitted_rows, std::int64_t layers)
      : M(rows_of_step), emitted(emitted_rows) {
    std::size_t at = 0;
    const auto take = [&](std::int64_t count, std::size_t bytes) {
      const std::size_t begin = at;
      at += static_cast<std::size_t>(count) * bytes;
      return begin;
    };
    slot = take(M, sizeof(std::int32_t));
    position = take(M, sizeof(std::int32_t));
    token = take(M, sizeof(std::int32_t));
    emit_index = take(emitted, sizeof(std::int32_t));
    emit_slot = take(emitted, sizeof(std::int32_t));
    emit_position = take(emitted, sizeof(std::int32_t));
    at = align_up(at, alignof(SampleRequest));
    requests = take(emitted, sizeof(SampleRequest));
    at = align_up(at, sizeof(Digest));
    flag = take(1, sizeof(Digest));
    rows = take((layers + 1) * M, sizeof(Digest));
    key_values = take(layers * M, sizeof(Digest));
    logits = take(emitted, sizeof(Digest));
    tokens = take(emitted, sizeof(std::int32_t));
    end = at;
  }
  std::size_t inputs_end() const { return flag + sizeof(Digest); }
};

struct Engine::Step {
  Lane* lane;
  StepLayout at;
  RowMap rows, emitted;
  bool emits_all = false;  // row m is the emitted row m
  SampleKinds kinds{false, false, false};
  std::uint64_t fetched = 0;  // of the backend: digests that are on their way
  decltype(StepObserver::on_leaves) on_leaves = {};
};

namespace {

template <class T>
T* part(const Buffer& buffer, std::size_t offset) {
  return reinterpret_cast<T*>(buffer.as<std::byte>() + offset);
}

}  // namespace

NonFiniteError::NonFiniteError(const std::string& op_name, std::int64_t at_layer,
                               std::int32_t at_slot, std::int32_t at_position,
                               std::int64_t at_element)
    : Error(ErrorKind::kUsage,
            non_finite_message(op_name, at_layer, at_slot, at_position, at_element)),
      op(op_name),
      layer(at_layer),
      slot(at_slot),
      position(at_position),
      element(at_element) {}

Engine::Engine(const ModelConfig& config, const PlacedWeights& weights, Backend& backend,
               const EngineOptions& options)
    : backend_(backend),
      options_(checked(options, config, backend)),
      config_(config),
      weights_(weights.weights()),
      scratch_(backend, config, std::max(options_.max_rows, kMaxEmitRows)),
      cache_(config, backend, options_.slots, options_.capacity) {
  const RopeTables tables = rope_tables(rope_inverse_frequencies(config), options_.capacity);
  const std::size_t table_bytes = tables.cosines.size() * sizeof(float);
  cosines_ = backend.allocate(table_bytes);
  sines_ = backend.allocate(table_bytes);
  backend.to_device(cosines_.as<void>(), tables.cosines.data(), table_bytes);
  backend.to_device(sines_.as<void>(), tables.sines.data(), table_bytes);

  emitted_hidden_ =
      backend.allocate(checked_bytes({kMaxEmitRows, config.hidden_size}, "the hidden rows"));
  const std::int64_t lanes = options_.defer_leaves ? 2 : 1;
  for (std::int64_t i = 0; i < lanes; ++i) {
    const std::int64_t max_rows = lane_rows(options_, i);
    const StepRows rows(config, max_rows);
    Lane& lane = lanes_[i];
    lane.hidden =
        backend.allocate(checked_bytes({rows.hidden, config.hidden_size}, "the hidden rows"));
    lane.keys = backend.allocate(checked_bytes({rows.key_values, config.kv_size()}, "the keys"));
    lane.values =
        backend.allocate(checked_bytes({rows.key_values, config.kv_size()}, "the values"));
    lane.logits = backend.allocate(checked_bytes({kMaxEmitRows, config.vocab_size}, "the logits"));
    const std::size_t step_bytes = StepLayout(max_rows, max_rows, config.num_layers).end;
    lane.host_step = backend.allocate_host(step_bytes);
    lane.step = backend.allocate(step_bytes);
  }
  recordings_ = backend.make_recordings();
}

Engine::~Engine() {
  try {
    backend_.wait_hashed(~std::uint64_t{0});  // what is on its way ends before its memory does
  } catch (const Error&) {
    // The device failed: whoever uses it next is told.
  }
}

std::size_t Engine::least_memory(const ModelConfig& config, const EngineOptions& asked,
                                 const Backend& backend) {
  const EngineOptions options = checked(asked, config, backend);
  const auto floats = [](std::int64_t count, std::int64_t width) {
    return checked_bytes({count, width}, "what a step computes with");
  };
  std::size_t bytes = LayerScratch::bytes(config, std::max(options.max_rows, kMaxEmitRows)) +
                      floats(kMaxEmitRows, config.hidden_size) +
                      floats(options.capacity, config.head_dim) +
                      static_cast<std::size_t>(options.slots) * KvCache::page_bytes(config);
  for (std::int64_t i = 0; i < (options.defer_leaves ? 2 : 1); ++i) {
    const std::int64_t max_rows = lane_rows(options, i);
    const StepRows rows(config, max_rows);
    bytes += floats(rows.hidden, config.hidden_size) +
             2 * floats(rows.key_values, config.kv_size()) +
             floats(kMaxEmitRows, config.vocab_size) +
             StepLayout(max_rows, max_rows, config.num_layers).end;
  }
  return bytes;
}

float* Engine::hidden_rows(const Lane& lane, std::int64_t layer, std::int64_t M) const {
  const std::int64_t group = M <= kShortStepRows ? layer : layer % 2;
  return lane.hidden.as<float>() + group * M * config_.hidden_size;
}

float* Engine::key_value_rows(const Buffer& buffer, std::int64_t layer, std::int64_t M) const {
  const std::int64_t group = M <= kShortStepRows ? layer : layer % 2;
  return buffer.as<float>() + group * M * config_.kv_size();
}

std::vector<std::int32_t> Engine::step(std::span<const StepRow> rows,
                                       const StepObserver& observer) {
  for (const StepRow& row : rows) {
    if (row.token < 0 || row.token >= config().vocab_size) {
      settle();  // what was wrong before, first: this token may come of it
      throw usage_error("token id " + std::to_string(row.token) + " at position " +
                        std::to_string(row.position) + " is outside the model's vocabulary of " +
                        std::to_string(config().vocab_size));
    }
    if (row.position < 0 || row.position >= options_.capacity || row.slot < 0 ||
        row.slot >= options_.slots) {
      throw usage_error("position " + std::to_string(row.position) + " of sequence " +
                        std::to_string(row.slot) + " is outside the engine's " +
                        std::to_string(options_.slots) + " sequences of " +
                        std::to_string(options_.capacity) + " positions");
    }
  }
  std::vector<std::int32_t> sampled;
  const std::size_t chunk = static_cast<std::size_t>(options_.max_rows);
  for (std::size_t at = 0; at < rows.size(); at += chunk) {
    const std::size_t count = std::min(chunk, rows.size() - at);
    step_chunk(rows.subspan(at, count), observer, sampled);
    if (observer.on_progress) {
      observer.on_progress(static_cast<std::int64_t>(at + count),
                           static_cast<std::int64_t>(rows.size()));
    }
  }
  return sampled;
}

// Inputs into the host's buffer, pages for every row.
Engine::Step Engine::prepare(std::span<const StepRow> rows, Lane& lane) {
  const std::int64_t M = static_cast<std::int64_t>(rows.size());
  const std::int64_t emitted =
      std::count_if(rows.begin(), rows.end(), [](const StepRow& row) { return row.emit; });
  Step step{
      .lane = &lane, .at = StepLayout(M, emitted, config_.num_layers), .rows = {}, .emitted = {}};
  const StepLayout& at = step.at;
  auto* slot = part<std::int32_t>(lane.host_step, at.slot);
  auto* position = part<std::int32_t>(lane.host_step, at.position);
  auto* token = part<std::int32_t>(lane.host_step, at.token);
  auto* emit_index = part<std::int32_t>(lane.host_step, at.emit_index);
  auto* emit_slot = part<std::int32_t>(lane.host_step, at.emit_slot);
  auto* emit_position = part<std::int32_t>(lane.host_step, at.emit_position);
  auto* requests = part<SampleRequest>(lane.host_step, at.requests);
  std::int64_t context = 0, e = 0;
  step.rows.distinct_slots = true;
  std::vector<bool> seen(static_cast<std::size_t>(options_.slots), false);
  for (std::int64_t m = 0; m < M; ++m) {
    const StepRow& row = rows[static_cast<std::size_t>(m)];
    cache_.reserve(row.slot, row.position + 1);
    slot[m] = row.slot;
    position[m] = row.position;
    token[m] = row.token;
    context = std::max<std::int64_t>(context, row.position + 1);
    if (seen[static_cast<std::size_t>(row.slot)]) step.rows.distinct_slots = false;
    seen[static_cast<std::size_t>(row.slot)] = true;
    if (!row.emit) continue;
    emit_index[e] = static_cast<std::int32_t>(m);
    emit_slot[e] = row.slot;
    emit_position[e] = row.position;
    requests[e++] = row.sample;
    const contract::SamplingParams& params = row.sample.params;
    step.kinds.drawn = step.kinds.drawn || params.temperature != 0.0f;
    step.kinds.top_k = step.kinds.top_k || params.top_k != 0;
    step.kinds.top_p = step.kinds.top_p || params.top_p < 1.0f;
  }
  step.emits_all = emitted == M;
  const std::int64_t pages = (context + LayerKv::kPagePositions - 1) / LayerKv::kPagePositions;
  step.rows.context = rounded_pages(pages) * LayerKv::kPagePositions;
  step.rows.rows = M;
  step.rows.slot = part<std::int32_t>(lane.step, at.slot);
  step.rows.position = part<std::int32_t>(lane.step, at.position);
  step.rows.host_slot = slot;
  step.rows.host_position = position;
  step.emitted = step.rows;
  step.emitted.rows = emitted;
  step.emitted.slot = part<std::int32_t>(lane.step, at.emit_slot);
  step.emitted.position = part<std::int32_t>(lane.step, at.emit_position);
  step.emitted.host_slot = emit_slot;
  step.emitted.host_position = emit_position;
  *part<Digest>(lane.host_step, at.flag) = {};
  return step;
}

void Engine::step_chunk(std::span<const StepRow> rows, const StepObserver& observer,
                        std::vector<std::int32_t>& sampled) {
  const std::int64_t M = static_cast<std::int64_t>(rows.size());
  const bool is_short = M <= kShortStepRows;
  if (!is_short || observer.on_values) settle();  // they want the first lane
  Lane& lane = pending_ && pending_->lane == &lanes_[0] ? lanes_[1] : lanes_[0];
  Step step = prepare(rows, lane);
  step.on_leaves = observer.on_leaves;
  const StepLayout& at = step.at;
  cache_.upload();
  backend_.to_device(lane.step.as<void>(), lane.host_step.as<void>(), at.inputs_end());
  if (is_short && step.rows.distinct_slots && step.emits_all && !observer.on_values) {
    std::uint64_t key = static_cast<std::uint64_t>(step.rows.context);
    key = key << 8 | static_cast<std::uint64_t>(M);
    for (const bool bit : {&lane == &lanes_[0], static_cast<bool>(observer.on_leaves),
                           step.kinds.drawn, step.kinds.top_k, step.kinds.top_p}) {
      key = key << 1 | (bit ? 1 : 0);
    }
    recordings_->run(key, [&] { compute(step, observer); });
  } else {
    compute(step, observer);
  }
  if (observer.on_leaves) {
    if (is_short) commit_short_step(step);
    step.fetched = backend_.fetch_hashed(part<void>(lane.host_step, at.flag),
                                         part<void>(lane.step, at.flag), at.tokens - at.flag);
  } else {
    backend_.to_host(part<void>(lane.host_step, at.flag), part<void>(lane.step, at.flag),
                     sizeof(Digest));
  }
  settle();  // of the step before, while this one is computed
  backend_.to_host(part<void>(lane.host_step, at.tokens), part<void>(lane.step, at.tokens),
                   static_cast<std::size_t>(at.emitted) * sizeof(std::int32_t));
  const auto* tokens = part<std::int32_t>(lane.host_step, at.tokens);
  sampled.insert(sampled.end(), tokens, tokens + at.emitted);
  pending_ = std::make_unique<Step>(step);
  if (!options_.defer_leaves || !is_short || observer.on_values) settle();
}

// The rows of a short step into the trace, all at once.
void Engine::commit_short_step(const Step& step) {
  const Lane& lane = *step.lane;
  const StepLayout& at = step.at;
  const std::int64_t M = at.M, layers = config_.num_layers;
  const std::size_t hidden_bytes = static_cast<std::size_t>(config_.hidden_size) * sizeof(float);
  const std::size_t kv_bytes = static_cast<std::size_t>(config_.kv_size()) * sizeof(float);
  auto* flag = part<std::uint32_t>(lane.step, at.flag);
  backend_.hash_rows(part<Digest>(lane.step, at.rows), flag, LeafType::kRow, 0, layers + 1,
                     hidden_rows(lane, 0, M), hidden_bytes, nullptr, 0, step.rows);
  backend_.hash_rows(part<Digest>(lane.step, at.key_values), flag, LeafType::kKeyValue, 0, layers,
                     key_value_rows(lane.keys, 0, M), kv_bytes, key_value_rows(lane.values, 0, M),
                     kv_bytes, step.rows);
  if (at.emitted != 0) {  // at most kMaxEmitRows: they are all there
    backend_.hash_rows(
        part<Digest>(lane.step, at.logits), flag, LeafType::kLogits, 0, 1, lane.logits.as<float>(),
        static_cast<std::size_t>(config_.vocab_size) * sizeof(float), nullptr, 0, step.emitted);
  }
  backend_.start_hashing();
}

// Delivers the step that is pending, if there is one.
void Engine::settle() {
  if (!pending_) return;
  const std::unique_ptr<Step> step = std::move(pending_);
  backend_.wait_hashed(step->fetched);
  if (*part<std::uint32_t>(step->lane->host_step, step->at.flag) != 0) report_non_finite(*step);
  deliver(*step);
}

void Engine::compute(const Step& step, const StepObserver& observer) {
  compute_layers(step, observer, {});
  compute_heads(step, observer);
  // The digests of short steps are made afterwards, out of recordings.
  if (step.at.M > kShortStepRows || !observer.on_leaves) backend_.finish_hashing();
}

void Engine::compute_layers(const Step& step, const StepObserver& observer,
                            const OperatorProbe& probe) {
  const ModelConfig& config = config_;
  const StepLayout& at = step.at;
  const std::int64_t M = at.M, layers = config.num_layers;
  const std::int64_t hidden = config.hidden_size, kv_width = config.kv_size();
  const Lane& lane = *step.lane;
  const RopeView rope{cosines_.as<float>(), sines_.as<float>()};
  const bool short_step = M <= kShortStepRows;
  auto* flag = part<std::uint32_t>(lane.step, at.flag);
  // Layers [first, first + count): where nothing is committed, whether all is finite; of a long
  // step the digests, too.
  const auto commit_rows = [&](std::int64_t first, std::int64_t count) {
    if (probe) return;
    const float* h = hidden_rows(lane, first, M);
    if (!observer.on_leaves) return backend_.flag_non_finite(flag, h, count * M * hidden);
    if (short_step) return;
    backend_.hash_rows(part<Digest>(lane.step, at.rows) + first * M, flag, LeafType::kRow,
                       static_cast<std::uint32_t>(first), count, h,
                       static_cast<std::size_t>(hidden) * sizeof(float), nullptr, 0, step.rows);
  };
  const auto commit_key_values = [&](std::int64_t first, std::int64_t count) {
    if (probe) return;
    const float* k = key_value_rows(lane.keys, first, M);
    const float* v = key_value_rows(lane.values, first, M);
    if (!observer.on_leaves) {
      backend_.flag_non_finite(flag, k, count * M * kv_width);
      backend_.flag_non_finite(flag, v, count * M * kv_width);
      return;
    }
    if (short_step) return;
    const std::size_t kv_bytes = static_cast<std::size_t>(kv_width) * sizeof(float);
    backend_.hash_rows(part<Digest>(lane.step, at.key_values) + first * M, flag,
                       LeafType::kKeyValue, static_cast<std::uint32_t>(first), count, k, kv_bytes,
                       v, kv_bytes, step.rows);
  };

  float* const embedded = hidden_rows(lane, 0, M);
  backend_.embed(embedded, weights_.embedding, part<std::int32_t>(lane.step, at.token), M);
  if (probe) probe("embedding", embedded, hidden);
  show(LeafType::kRow, 0, step.rows, embedded, hidden, nullptr, 0, observer);
  if (!short_step) commit_rows(0, 1);
  for (std::int64_t l = 0; l < layers; ++l) {
    const LayerRows rows{hidden_rows(lane, l, M), hidden_rows(lane, l + 1, M),
                         key_value_rows(lane.keys, l, M), key_value_rows(lane.values, l, M)};
    layer_forward(backend_, config, weights_.layers[static_cast<std::size_t>(l)], rope,
                  cache_.layer(l), step.rows, scratch_, rows, CacheUse::kStore, probe);
    const std::uint32_t layer = static_cast<std::uint32_t>(l);
    show(LeafType::kKeyValue, layer, step.rows, rows.k, kv_width, rows.v, kv_width, observer);
    show(LeafType::kRow, layer + 1, step.rows, rows.out, hidden, nullptr, 0, observer);
    if (short_step) continue;
    backend_.finish_hashing();  // of the layer before, whose rows the next one overwrites
    commit_key_values(l, 1);
    commit_rows(l + 1, 1);
    backend_.start_hashing();
  }
  if (!short_step) return;
  commit_rows(0, layers + 1);
  commit_key_values(0, layers);
}

void Engine::compute_heads(const Step& step, const StepObserver& observer) {
  const ModelConfig& config = config_;
  const StepLayout& at = step.at;
  const std::int64_t vocab = config.vocab_size;
  const Lane& lane = *step.lane;
  const float* const last = hidden_rows(lane, config.num_layers, at.M);
  float* const logits = lane.logits.as<float>();
  for (std::int64_t e = 0; e < at.emitted; e += kMaxEmitRows) {
    const std::int64_t count = std::min(kMaxEmitRows, at.emitted - e);
    const float* rows = last + e * config.hidden_size;
    if (!step.emits_all) {
      backend_.gather_rows(emitted_hidden_.as<float>(), last, config.hidden_size,
                           part<std::int32_t>(lane.step, at.emit_index) + e, count);
      rows = emitted_hidden_.as<float>();
    }
    if (e != 0) backend_.finish_hashing();  // logits are overwritten
    head_forward(backend_, config, weights_, rows, scratch_, count, logits);
    RowMap emitted = step.emitted;
    emitted.rows = count;
    emitted.slot += e;
    emitted.position += e;
    emitted.host_slot += e;
    emitted.host_position += e;
    auto* flag = part<std::uint32_t>(lane.step, at.flag);
    if (!observer.on_leaves) {
      backend_.flag_non_finite(flag, logits, count * vocab);
    } else if (at.M > kShortStepRows) {
      backend_.hash_rows(part<Digest>(lane.step, at.logits) + e, flag, LeafType::kLogits, 0, 1,
                         logits, static_cast<std::size_t>(vocab) * sizeof(float), nullptr, 0,
                         emitted);
      backend_.start_hashing();
    }
    backend_.sample(part<std::int32_t>(lane.step, at.tokens) + e, logits, vocab,
                    part<SampleRequest>(lane.step, at.requests) + e, count, step.kinds);
    show(LeafType::kLogits, 0, emitted, logits, vocab, nullptr, 0, observer);
  }
}

void Engine::show(LeafType type, std::uint32_t layer, const RowMap& rows, const float* first,
                  std::int64_t first_width, const float* second, std::int64_t second_width,
                  const StepObserver& observer) {
  if (!observer.on_values || (observer.wants_values && !observer.wants_values(type, layer))) return;
  const std::size_t count = static_cast<std::size_t>(rows.rows);
  host_first_.resize(count * static_cast<std::size_t>(first_width));
  host_second_.resize(count * static_cast<std::size_t>(second_width));
  backend_.to_host(host_first_.data(), first, host_first_.size() * sizeof(float));
  if (second != nullptr) {
    backend_.to_host(host_second_.data(), second, host_second_.size() * sizeof(float));
  }
  observer.on_values(type, layer, rows, host_first_.data(), first_width, host_second_.data(),
                     second_width);
}

void Engine::deliver(const Step& step) {
  if (!step.on_leaves) return;
  const StepLayout& at = step.at;
  const Buffer& host = step.lane->host_step;
  const auto* rows = part<Digest>(host, at.rows);
  const auto* key_values = part<Digest>(host, at.key_values);
  for (std::int64_t l = 0; l <= config_.num_layers; ++l) {
    const std::uint32_t layer = static_cast<std::uint32_t>(l);
    step.on_leaves(LeafType::kRow, layer, step.rows, rows + l * at.M);
    if (l == config_.num_layers) continue;
    step.on_leaves(LeafType::kKeyValue, layer, step.rows, key_values + l * at.M);
  }
  if (at.emitted == 0) return;
  step.on_leaves(LeafType::kLogits, 0, step.emitted, part<Digest>(host, at.logits));
}

// Runs the rows of the failing step again, looking after each operator, to name the first one whose
// output is not finite. Cache rows are written again with the same bits.
void Engine::report_non_finite(const Step& step) {
  std::int64_t layer = -1;  // the embedding counts as layer 0's input
  const RowMap& rows = step.rows;
  const OperatorProbe probe = [&](std::string_view op, const float* x, std::int64_t width) {
    if (op == "input_norm") ++layer;
    const NonFinite found = backend_.find_non_finite(x, width, rows.rows);
    if (found.row < 0) return;
    throw NonFiniteError(std::string(op), std::max<std::int64_t>(layer, 0),
                         rows.host_slot[found.row], rows.host_position[found.row], found.element);
  };
  compute_layers(step, {}, probe);
  StepObserver heads;
  heads.wants_values = [](LeafType type, std::uint32_t) { return type == LeafType::kLogits; };
  heads.on_values = [&](LeafType, std::uint32_t, const RowMap& emitted, const float* logits,
                        std::int64_t width, const float*, std::int64_t) {
    for (std::int64_t i = 0; i < emitted.rows * width; ++i) {
      if (contract::is_finite(logits[i])) continue;
      throw NonFiniteError("lm_head", config_.num_layers, emitted.host_slot[i / width],
                           emitted.host_position[i / width], i % width);
    }
  };
  compute_heads(step, heads);
  throw infrastructure_error(
      "a non-finite value appeared and did not appear again when the step was repeated: the device "
      "does not compute reproducibly; do not trust it");
}

}  // namespace bitwitness
