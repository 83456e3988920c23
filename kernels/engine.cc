#include "kernels/engine.h"

#include <algorithm>
#include <initializer_list>

namespace bitwitness {
namespace {

// Rows whose logits are computed together; bounds the memory of wide vocabularies.
constexpr std::int64_t kMaxEmitRows = 32;

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

EngineOptions checked(const EngineOptions& options, const ModelConfig& config) {
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
      options_(checked(options, config)),
      config_(config),
      weights_(weights.weights()),
      scratch_(backend, config, std::max(options_.max_rows, kMaxEmitRows)) {
  const RopeTables tables = rope_tables(rope_inverse_frequencies(config), options_.capacity);
  const std::size_t table_bytes = tables.cosines.size() * sizeof(float);
  cosines_ = backend.allocate(table_bytes);
  sines_ = backend.allocate(table_bytes);
  backend.to_device(cosines_.as<void>(), tables.cosines.data(), table_bytes);
  backend.to_device(sines_.as<void>(), tables.sines.data(), table_bytes);

  const std::size_t cache_bytes = checked_bytes(
      {config.num_layers, options_.slots, options_.capacity, config.kv_size()}, "the KV cache");
  keys_ = backend.allocate(cache_bytes);
  values_ = backend.allocate(cache_bytes);
  hidden_ =
      backend.allocate(checked_bytes({options_.max_rows, config.hidden_size}, "the hidden rows"));
  emitted_hidden_ =
      backend.allocate(checked_bytes({kMaxEmitRows, config.hidden_size}, "the hidden rows"));
  logits_ = backend.allocate(checked_bytes({kMaxEmitRows, config.vocab_size}, "the logits"));
  const std::size_t index_bytes =
      static_cast<std::size_t>(options_.max_rows) * sizeof(std::int32_t);
  for (Buffer* buffer : {&slot_, &position_, &token_, &emit_index_}) {
    *buffer = backend.allocate(index_bytes);
  }
}

LayerKv Engine::layer_kv(std::int64_t layer) const {
  const std::int64_t width = config().kv_size();
  const std::int64_t at = layer * options_.slots * options_.capacity * width;
  return {keys_.as<float>() + at, values_.as<float>() + at, options_.capacity, width};
}

RowMap Engine::upload_rows(std::span<const StepRow> rows) {
  host_slot_.clear();
  host_position_.clear();
  host_token_.clear();
  for (const StepRow& row : rows) {
    host_slot_.push_back(row.slot);
    host_position_.push_back(row.position);
    host_token_.push_back(row.token);
  }
  const std::size_t bytes = rows.size() * sizeof(std::int32_t);
  backend_.to_device(slot_.as<void>(), host_slot_.data(), bytes);
  backend_.to_device(position_.as<void>(), host_position_.data(), bytes);
  backend_.to_device(token_.as<void>(), host_token_.data(), bytes);
  return {static_cast<std::int64_t>(rows.size()), slot_.as<std::int32_t>(),
          position_.as<std::int32_t>(), host_slot_.data(), host_position_.data()};
}

std::vector<std::int32_t> Engine::step(std::span<const StepRow> rows,
                                       const StepObserver& observer) {
  for (const StepRow& row : rows) {
    if (row.token < 0 || row.token >= config().vocab_size) {
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

void Engine::commit(LeafType type, std::uint32_t layer, const RowMap& rows, const float* first,
                    std::int64_t first_width, const float* second, std::int64_t second_width,
                    const StepObserver& observer) {
  const std::size_t first_bytes = static_cast<std::size_t>(first_width) * sizeof(float);
  const std::size_t second_bytes = static_cast<std::size_t>(second_width) * sizeof(float);
  const std::size_t count = static_cast<std::size_t>(rows.rows);
  if (observer.on_leaves) {
    digests_.resize(count);
    backend_.hash_rows(digests_.data(), type, layer, first, first_bytes, second, second_bytes,
                       rows);
    observer.on_leaves(type, layer, rows, digests_.data());
  }
  if (observer.on_values && (!observer.wants_values || observer.wants_values(type, layer))) {
    host_first_.resize(count * static_cast<std::size_t>(first_width));
    host_second_.resize(count * static_cast<std::size_t>(second_width));
    backend_.to_host(host_first_.data(), first, count * first_bytes);
    if (second != nullptr) backend_.to_host(host_second_.data(), second, count * second_bytes);
    observer.on_values(type, layer, rows, host_first_.data(), first_width, host_second_.data(),
                       second_width);
  }
}

void Engine::run_layers(const RowMap& rows, const StepObserver& observer,
                        const OperatorProbe& probe) {
  const ModelConfig& config = config_;
  float* h = hidden_.as<float>();
  const RopeView rope{cosines_.as<float>(), sines_.as<float>()};
  const auto check = [&](const float* x, std::int64_t width) {
    if (!probe && backend_.find_non_finite(x, width, rows.rows).row >= 0) report_non_finite(rows);
  };
  backend_.embed(h, weights_.embedding, token_.as<std::int32_t>(), rows.rows);
  if (probe) probe("embedding", h, config.hidden_size);
  check(h, config.hidden_size);
  commit(LeafType::kRow, 0, rows, h, config.hidden_size, nullptr, 0, observer);
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    layer_forward(backend_, config, weights_.layers[static_cast<std::size_t>(layer)], rope,
                  layer_kv(layer), rows, scratch_, h, CacheUse::kStore, probe);
    check(scratch_.k.as<float>(), config.kv_size());
    check(scratch_.v.as<float>(), config.kv_size());
    check(h, config.hidden_size);
    const std::uint32_t l = static_cast<std::uint32_t>(layer);
    commit(LeafType::kKeyValue, l, rows, scratch_.k.as<float>(), config.kv_size(),
           scratch_.v.as<float>(), config.kv_size(), observer);
    commit(LeafType::kRow, l + 1, rows, h, config.hidden_size, nullptr, 0, observer);
  }
}

// Runs the rows of the failing step again, looking after each operator, to name the first one whose
// output is not finite. Cache rows are written again with the same bits.
void Engine::report_non_finite(const RowMap& rows) {
  std::int64_t layer = -1;  // the embedding counts as layer 0's input
  const OperatorProbe probe = [&](std::string_view op, const float* x, std::int64_t width) {
    if (op == "input_norm") ++layer;
    const NonFinite found = backend_.find_non_finite(x, width, rows.rows);
    if (found.row < 0) return;
    throw NonFiniteError(std::string(op), std::max<std::int64_t>(layer, 0),
                         rows.host_slot[found.row], rows.host_position[found.row], found.element);
  };
  run_layers(rows, {}, probe);
  throw infrastructure_error(
      "a non-finite value appeared and did not appear again when the step was repeated: the device "
      "does not compute reproducibly; do not trust it");
}

void Engine::step_chunk(std::span<const StepRow> rows, const StepObserver& observer,
                        std::vector<std::int32_t>& sampled) {
  const ModelConfig& config = config_;
  const RowMap map = upload_rows(rows);
  run_layers(map, observer, {});

  std::vector<std::int32_t> emitting;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].emit) emitting.push_back(static_cast<std::int32_t>(i));
  }
  for (std::size_t at = 0; at < emitting.size(); at += kMaxEmitRows) {
    const std::size_t count =
        std::min(static_cast<std::size_t>(kMaxEmitRows), emitting.size() - at);
    const std::int64_t M = static_cast<std::int64_t>(count);
    std::vector<StepRow> chunk;
    std::vector<SampleRequest> requests;
    for (std::size_t i = 0; i < count; ++i) {
      chunk.push_back(rows[static_cast<std::size_t>(emitting[at + i])]);
      requests.push_back(chunk.back().sample);
    }
    backend_.to_device(emit_index_.as<void>(), emitting.data() + at, count * sizeof(std::int32_t));
    backend_.gather_rows(emitted_hidden_.as<float>(), hidden_.as<float>(), config.hidden_size,
                         emit_index_.as<std::int32_t>(), M);
    float* logits = logits_.as<float>();
    head_forward(backend_, config, weights_, emitted_hidden_.as<float>(), scratch_, M, logits);
    const RowMap emitted = upload_rows(chunk);
    const NonFinite found = backend_.find_non_finite(logits, config.vocab_size, M);
    if (found.row >= 0) {
      throw NonFiniteError("lm_head", config.num_layers, emitted.host_slot[found.row],
                           emitted.host_position[found.row], found.element);
    }
    commit(LeafType::kLogits, 0, emitted, logits, config.vocab_size, nullptr, 0, observer);
    std::vector<std::int32_t> tokens(count);
    backend_.sample(tokens.data(), logits, config.vocab_size, requests);
    sampled.insert(sampled.end(), tokens.begin(), tokens.end());
  }
}

}  // namespace bitwitness
