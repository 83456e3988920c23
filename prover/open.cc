#include "prover/open.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "attest/base/error.h"
#include "attest/base/leaf_hash.h"
#include "kernels/cell.h"
#include "kernels/engine.h"

namespace bitwitness {
namespace {

std::uint64_t ends_bytes(const TraceShape& shape, const AuditSample& sample) {
  return EndsOpening::bytes(shape, sample.embeddings, sample.heads);
}

Error too_large(const std::string& what, std::uint64_t bytes, std::uint64_t max_bytes,
                const std::string& instead) {
  return usage_error("the opening of " + what + " takes " + std::to_string(bytes) +
                     " bytes with the trace, more than the " + std::to_string(max_bytes) +
                     " that this prover holds at a time (--max-opening-mib): ask for " + instead +
                     ", or audit by re-execution (--level full), which needs no opening");
}

}  // namespace

std::vector<OpeningPass> plan_passes(const TraceShape& shape, const AuditSample& sample,
                                     std::uint64_t max_bytes) {
  const std::uint64_t trace = 32 * Trace::leaf_count(shape);
  std::vector<OpeningPass> passes(1);
  passes[0].memory = trace;
  if (!sample.embeddings.empty() || !sample.heads.empty()) {
    passes[0].ends = true;
    passes[0].bytes = ends_bytes(shape, sample);
    passes[0].memory += passes[0].bytes;
    if (passes[0].memory > max_bytes) {
      throw too_large("the ends", passes[0].memory, max_bytes, "fewer ends");
    }
  }
  for (std::size_t i = 0; i < sample.layers.size(); ++i) {
    const LayerCells& cells = sample.layers[i];
    const std::uint64_t bytes = LayerOpening::bytes(shape, cells);
    if (bytes + trace > max_bytes) {
      throw too_large("layer " + std::to_string(cells.layer) + " (" +
                          std::to_string(cells.positions.size()) + " cells, keys and values of " +
                          std::to_string(cells.positions.back() + 1) + " positions)",
                      bytes + trace, max_bytes, "fewer cells or a shorter run");
    }
    if (passes.back().memory > max_bytes - bytes) {
      passes.push_back({});
      passes.back().first_layer = i;
      passes.back().memory = trace;
    }
    ++passes.back().layer_count;
    passes.back().bytes += bytes;
    passes.back().memory += bytes;
  }
  return passes;
}

Rerun::Rerun(const ServedModel& model, const PlacedWeights& weights, Backend& backend,
             const Claim& claim, AuditSample sample, const OpeningPass& pass,
             const RerunOptions& options)
    : claim_(claim), sample_(std::move(sample)) {
  if (claim.manifest_digest != model.manifest.digest()) {
    throw std::logic_error("a run of another model cannot be opened with this one");
  }
  for (std::size_t i = 0; i < pass.layer_count; ++i) {
    const LayerCells& cells = sample_.layers.at(pass.first_layer + i);
    std::vector<std::uint64_t> prefix(cells.positions.back() + 1);
    for (std::uint64_t t = 0; t < prefix.size(); ++t) prefix[t] = t;
    want(LeafType::kKeyValue, cells.layer, std::move(prefix));
    want(LeafType::kRow, cells.layer, cells.positions);
    want(LeafType::kRow, cells.layer + 1, cells.positions);
  }
  if (pass.ends) {
    want(LeafType::kRow, 0, sample_.embeddings);
    want(LeafType::kRow, claim.trace_shape.layers, sample_.heads);
    want(LeafType::kLogits, 0, sample_.heads);
  }
  make_room();
  run(model, weights, backend, options);
  proofs_ = std::make_unique<TraceProofs>(*trace_);
}

void Rerun::want(LeafType type, std::uint32_t layer, std::vector<std::uint64_t> positions) {
  if (positions.empty()) return;
  Rows& rows = rows_[{type, layer}];
  std::vector<std::uint64_t> merged;
  std::set_union(rows.positions.begin(), rows.positions.end(), positions.begin(), positions.end(),
                 std::back_inserter(merged));
  rows.positions = std::move(merged);
}

void Rerun::make_room() {
  for (auto& [column, rows] : rows_) {
    rows.bytes.resize(rows.positions.size() * claim_.trace_shape.payload_bytes(column.first));
  }
}

void Rerun::keep(LeafType type, std::uint32_t layer, std::uint64_t position, const float* first,
                 std::int64_t first_width, const float* second, std::int64_t second_width) {
  Rows& rows = rows_.at({type, layer});
  const auto at = std::lower_bound(rows.positions.begin(), rows.positions.end(), position);
  if (at == rows.positions.end() || *at != position) return;
  const std::size_t first_bytes = static_cast<std::size_t>(first_width) * sizeof(float);
  const std::size_t second_bytes = static_cast<std::size_t>(second_width) * sizeof(float);
  std::uint8_t* to = rows.bytes.data() + static_cast<std::size_t>(at - rows.positions.begin()) *
                                             (first_bytes + second_bytes);
  std::memcpy(to, first, first_bytes);
  if (second_bytes != 0) std::memcpy(to + first_bytes, second, second_bytes);
}

void Rerun::run(const ServedModel& model, const PlacedWeights& weights, Backend& backend,
                const RerunOptions& options) {
  const TraceShape& shape = claim_.trace_shape;
  const std::vector<std::uint32_t> ids = sequence_ids(claim_);

  EngineOptions engine_options;
  engine_options.capacity = static_cast<std::int64_t>(shape.positions);
  engine_options.max_rows = std::min(
      options.max_rows > 0 ? options.max_rows : backend.preferred_rows(), engine_options.capacity);
  Engine engine(model.model.config(), weights, backend, engine_options);
  TraceBuilder builder(trace_shape(model.model.config()));
  builder.reserve(shape.positions);

  StepObserver observer;
  observer.on_leaves = [&](LeafType type, std::uint32_t layer, const RowMap& rows,
                           const Digest* digests) {
    for (std::int64_t m = 0; m < rows.rows; ++m) {
      builder.set(type, layer, static_cast<std::uint64_t>(rows.host_position[m]), digests[m]);
    }
  };
  observer.wants_values = [&](LeafType type, std::uint32_t layer) {
    return rows_.contains({type, layer});
  };
  observer.on_values = [&](LeafType type, std::uint32_t layer, const RowMap& rows,
                           const float* first, std::int64_t first_width, const float* second,
                           std::int64_t second_width) {
    for (std::int64_t m = 0; m < rows.rows; ++m) {
      keep(type, layer, static_cast<std::uint64_t>(rows.host_position[m]), first + m * first_width,
           first_width, second + m * second_width, second_width);
    }
  };

  try {
    std::vector<StepRow> rows;
    const std::uint64_t chunk = static_cast<std::uint64_t>(engine_options.max_rows);
    for (std::uint64_t at = 0; at < shape.positions; at += rows.size()) {
      if (options.cancelled && options.cancelled()) {
        throw infrastructure_error("the opening was cancelled");
      }
      rows.clear();
      for (std::uint64_t t = at; t < std::min(at + chunk, shape.positions); ++t) {
        StepRow row;
        row.position = static_cast<std::int32_t>(t);
        row.token = static_cast<std::int32_t>(ids[t]);
        row.emit = t >= shape.positions - shape.emitted;  // its draw is not looked at
        rows.push_back(row);
      }
      engine.step(rows, observer);
    }
  } catch (const NonFiniteError& error) {
    throw infrastructure_error(std::string("a recorded run cannot be repeated: ") + error.what());
  }
  builder.set(LeafType::kTokens, 0, 0, tokens_leaf(ids));
  trace_ = std::make_unique<Trace>(builder.finish(shape.positions, shape.emitted));
  if (trace_->root() != claim_.trace_root) {
    throw infrastructure_error(
        "a recorded run, repeated, has the trace root " + trace_->root().hex() +
        " instead of the recorded " + claim_.trace_root.hex() +
        ": this machine does not reproduce its own record; nothing was opened");
  }
}

ByteView Rerun::payload(LeafType type, std::uint32_t layer, std::uint64_t position) const {
  const auto column = rows_.find({type, layer});
  if (column != rows_.end()) {
    const Rows& rows = column->second;
    const auto at = std::lower_bound(rows.positions.begin(), rows.positions.end(), position);
    if (at != rows.positions.end() && *at == position) {
      const std::uint64_t size = claim_.trace_shape.payload_bytes(type);
      return ByteView(rows.bytes)
          .subspan(static_cast<std::size_t>(at - rows.positions.begin()) * size, size);
    }
  }
  throw std::logic_error("a row that was not captured was asked for");
}

Bytes Rerun::ends_part() {
  return EndsOpening::make(*proofs_, claim_.trace_shape, sample_,
                           [this](LeafType type, std::uint32_t layer, std::uint64_t position) {
                             return payload(type, layer, position);
                           });
}

Bytes Rerun::layer_part(std::size_t i) {
  const LayerCells& cells = sample_.layers.at(i);
  Bytes part =
      LayerOpening::make(*proofs_, claim_.trace_shape, cells,
                         [this](LeafType type, std::uint32_t layer, std::uint64_t position) {
                           return payload(type, layer, position);
                         });
  // Later parts are of later layers, whose first row is h[layer + 1].
  rows_.erase({LeafType::kKeyValue, cells.layer});
  rows_.erase({LeafType::kRow, cells.layer});
  return part;
}

CellOperators open_operators(const ServedModel& model, const PlacedWeights& weights,
                             Backend& backend, const Claim& claim, const Digest& challenge,
                             std::uint32_t layer, std::uint64_t position,
                             const RerunOptions& options) {
  AuditSample sample;
  sample.layers.push_back({layer, {position}});
  OpeningPass pass;
  pass.layer_count = 1;
  const Rerun rerun(model, weights, backend, claim, sample, pass, options);

  const std::int32_t positions[] = {static_cast<std::int32_t>(position)};
  const std::vector<float> hidden = payload_floats(rerun.payload(LeafType::kRow, layer, position));
  std::vector<float> key_values;
  for (std::uint64_t t = 0; t <= position; ++t) {
    const std::vector<float> row = payload_floats(rerun.payload(LeafType::kKeyValue, layer, t));
    key_values.insert(key_values.end(), row.begin(), row.end());
  }
  const std::int64_t prefix = static_cast<std::int64_t>(position) + 1;
  CellRunner runner(model.model.config(), backend, prefix);
  OperatorOutputs operators;
  const CellOutputs outputs = runner.run(weights.weights().layers.at(layer),
                                         {positions, hidden, key_values, prefix}, &operators);
  if (!std::ranges::equal(std::as_bytes(std::span(outputs.hidden)),
                          std::as_bytes(std::span<const std::uint8_t>(
                              rerun.payload(LeafType::kRow, layer + 1, position))))) {
    throw infrastructure_error("cell (layer " + std::to_string(layer) + ", position " +
                               std::to_string(position) +
                               ") computed alone differs from the run it is of: this machine does "
                               "not compute reproducibly");
  }
  CellOperators out;
  out.challenge = challenge;
  out.layer = layer;
  out.position = position;
  for (auto& [name, values] : operators) out.outputs.push_back({name, std::move(values)});
  return out;
}

std::uint64_t max_operators_bytes(const ModelConfig& config) {
  const auto width = [](std::int64_t elements) { return static_cast<std::uint64_t>(elements); };
  // Generously: no operator of a layer is wider than these, and none of them has more outputs.
  const std::uint64_t elements = 8 * width(config.hidden_size) + 4 * width(config.q_size()) +
                                 4 * width(config.kv_size()) + 4 * width(config.intermediate_size);
  return sizeof(float) * elements + 4096;
}

}  // namespace bitwitness
