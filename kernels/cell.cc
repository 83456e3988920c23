#include "kernels/cell.h"

#include <algorithm>

#include "attest/base/error.h"
#include "kernels/rope_tables.h"

namespace bitwitness {
namespace {

std::size_t floats(std::int64_t rows, std::int64_t width) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(width) * sizeof(float);
}

std::int64_t checked(std::int64_t positions, const ModelConfig& config) {
  if (positions < 1 || positions > config.max_positions) {
    throw usage_error("cells of " + std::to_string(positions) +
                      " positions cannot be replayed: the model's context has " +
                      std::to_string(config.max_positions));
  }
  return positions;
}

}  // namespace

CellRunner::CellRunner(const ModelConfig& config, Backend& backend, std::int64_t positions)
    : config_(config),
      backend_(backend),
      positions_(checked(positions, config)),
      scratch_(backend, config, std::min(positions, kMaxRows)) {
  const RopeTables tables = rope_tables(rope_inverse_frequencies(config), positions);
  const std::size_t table_bytes = tables.cosines.size() * sizeof(float);
  cosines_ = backend.allocate(table_bytes);
  sines_ = backend.allocate(table_bytes);
  backend.to_device(cosines_.as<void>(), tables.cosines.data(), table_bytes);
  backend.to_device(sines_.as<void>(), tables.sines.data(), table_bytes);
  const std::int64_t rows = std::min(positions, kMaxRows);
  hidden_ = backend.allocate(floats(rows, config.hidden_size));
  next_hidden_ = backend.allocate(floats(rows, config.hidden_size));
  keys_ = backend.allocate(floats(rows, config.kv_size()));
  values_ = backend.allocate(floats(rows, config.kv_size()));
  request_ = backend.allocate(sizeof(SampleRequest));
  sampled_ = backend.allocate(sizeof(std::int32_t));
  slot_ = backend.allocate(static_cast<std::size_t>(kMaxRows) * sizeof(std::int32_t));
  position_ = backend.allocate(static_cast<std::size_t>(kMaxRows) * sizeof(std::int32_t));
  const std::vector<std::int32_t> zeros(kMaxRows, 0);
  backend.to_device(slot_.as<void>(), zeros.data(), zeros.size() * sizeof(std::int32_t));
}

// The given keys, then the given values, as the pages of one sequence.
LayerKv CellRunner::load_key_values(const CellInputs& inputs) {
  const std::int64_t width = config_.kv_size();
  const std::int64_t pages =
      (inputs.prefix + LayerKv::kPagePositions - 1) / LayerKv::kPagePositions;
  const std::int64_t page_floats = LayerKv::kPagePositions * width;
  if (cache_.bytes() < floats(2 * pages, page_floats)) {
    cache_ = backend_.allocate(floats(2 * pages, page_floats));
    pages_ = backend_.allocate(static_cast<std::size_t>(pages) * sizeof(float*));
    std::vector<float*> table;
    for (std::int64_t p = 0; p < pages; ++p) {
      table.push_back(cache_.as<float>() + p * page_floats);
    }
    backend_.to_device(pages_.as<void>(), table.data(), table.size() * sizeof(float*));
  }
  LayerKv cache;
  cache.pages = pages_.as<float*>();
  cache.pages_per_slot = pages;
  cache.value_offset = pages * page_floats;
  cache.kv_width = width;
  float* const cached_keys = cache_.as<float>();
  float* const cached_values = cached_keys + cache.value_offset;
  // In pieces, so that no second copy of a long prefix is made.
  std::vector<float> keys, values;
  for (std::int64_t at = 0; at < inputs.prefix; at += kMaxRows) {
    const std::int64_t count = std::min(kMaxRows, inputs.prefix - at);
    keys.clear();
    values.clear();
    for (std::int64_t t = at; t < at + count; ++t) {
      const auto row = inputs.key_values.subspan(static_cast<std::size_t>(2 * t * width),
                                                 static_cast<std::size_t>(2 * width));
      keys.insert(keys.end(), row.begin(), row.begin() + width);
      values.insert(values.end(), row.begin() + width, row.end());
    }
    backend_.to_device(cached_keys + at * width, keys.data(), floats(count, width));
    backend_.to_device(cached_values + at * width, values.data(), floats(count, width));
  }
  return cache;
}

CellOutputs CellRunner::run(const LayerWeights& weights, const CellInputs& inputs,
                            OperatorOutputs* operators) {
  const std::int64_t M = static_cast<std::int64_t>(inputs.positions.size());
  const std::int64_t hidden = config_.hidden_size, width = config_.kv_size();
  const LayerKv cache = load_key_values(inputs);
  const RopeView rope{cosines_.as<float>(), sines_.as<float>()};
  const std::vector<std::int32_t> zeros(kMaxRows, 0);
  OperatorProbe probe;
  if (operators != nullptr) {
    operators->clear();
    probe = [&](std::string_view op, const float* x, std::int64_t values) {
      std::vector<float> out(static_cast<std::size_t>(values));
      backend_.to_host(out.data(), x, out.size() * sizeof(float));
      operators->emplace_back(op, std::move(out));
    };
  }
  CellOutputs out;
  out.keys.resize(static_cast<std::size_t>(M * width));
  out.values.resize(out.keys.size());
  out.hidden.resize(static_cast<std::size_t>(M * hidden));
  const LayerRows layer{hidden_.as<float>(), next_hidden_.as<float>(), keys_.as<float>(),
                        values_.as<float>()};
  for (std::int64_t at = 0; at < M; at += kMaxRows) {
    const std::int64_t count = std::min(kMaxRows, M - at);
    backend_.to_device(hidden_.as<void>(), inputs.hidden.data() + at * hidden,
                       floats(count, hidden));
    backend_.to_device(position_.as<void>(), inputs.positions.data() + at,
                       static_cast<std::size_t>(count) * sizeof(std::int32_t));
    const RowMap rows{count,        slot_.as<std::int32_t>(),     position_.as<std::int32_t>(),
                      zeros.data(), inputs.positions.data() + at, inputs.prefix,
                      count == 1};
    layer_forward(backend_, config_, weights, rope, cache, rows, scratch_, layer,
                  CacheUse::kReadOnly, probe);
    backend_.to_host(out.keys.data() + at * width, layer.k, floats(count, width));
    backend_.to_host(out.values.data() + at * width, layer.v, floats(count, width));
    backend_.to_host(out.hidden.data() + at * hidden, layer.out, floats(count, hidden));
  }
  return out;
}

std::vector<float> CellRunner::embed(const Matrix& embedding,
                                     std::span<const std::int32_t> tokens) {
  const std::int64_t hidden = config_.hidden_size;
  const std::int64_t M = static_cast<std::int64_t>(tokens.size());
  const std::int64_t most = std::min(positions_, kMaxRows);
  std::vector<float> out(static_cast<std::size_t>(M * hidden));
  for (std::int64_t at = 0; at < M; at += most) {
    const std::int64_t count = std::min(most, M - at);
    backend_.to_device(position_.as<void>(), tokens.data() + at,
                       static_cast<std::size_t>(count) * sizeof(std::int32_t));
    backend_.embed(hidden_.as<float>(), embedding, position_.as<std::int32_t>(), count);
    backend_.to_host(out.data() + at * hidden, hidden_.as<float>(), floats(count, hidden));
  }
  return out;
}

CellRunner::Heads CellRunner::heads(const ModelWeights& weights, std::span<const float> hidden,
                                    std::span<const SampleRequest> samples) {
  const std::int64_t width = config_.hidden_size, vocab = config_.vocab_size;
  const std::int64_t M = static_cast<std::int64_t>(samples.size());
  const std::int64_t most = std::min({positions_, kMaxRows, kMaxHeads});
  if (logits_.bytes() == 0) logits_ = backend_.allocate(floats(most, vocab));
  float* logits = logits_.as<float>();
  Heads out;
  out.logits.resize(static_cast<std::size_t>(M * vocab));
  for (std::int64_t at = 0; at < M; at += most) {
    const std::int64_t count = std::min(most, M - at);
    backend_.to_device(hidden_.as<void>(), hidden.data() + at * width, floats(count, width));
    head_forward(backend_, config_, weights, hidden_.as<float>(), scratch_, count, logits);
    backend_.to_host(out.logits.data() + at * vocab, logits, floats(count, vocab));
    for (std::int64_t m = 0; m < count; ++m) {
      // The sampler takes finite logits only.
      const float* row = logits + m * vocab;
      out.tokens.emplace_back();
      if (backend_.find_non_finite(row, vocab, 1).row >= 0) continue;
      std::int32_t token = 0;
      backend_.to_device(request_.as<void>(), &samples[static_cast<std::size_t>(at + m)],
                         sizeof(SampleRequest));
      backend_.sample(sampled_.as<std::int32_t>(), row, vocab, request_.as<SampleRequest>(), 1, {});
      backend_.to_host(&token, sampled_.as<void>(), sizeof token);
      out.tokens.back() = token;
    }
  }
  return out;
}

}  // namespace bitwitness
