#include "verifier/cell_judge.h"

#include <algorithm>
#include <cstring>

#include "attest/base/error.h"
#include "verifier/claim_checks.h"

namespace bitwitness {
namespace {

constexpr std::uint32_t kNanBits = 0x7fc00000U;

struct Difference {
  std::uint64_t element;
  std::uint32_t claimed_bits, computed_bits;
};

std::optional<Difference> first_difference(ByteView claimed, std::span<const float> computed) {
  if (claimed.size() != computed.size_bytes()) {
    throw std::logic_error("cell_judge: rows of different sizes are compared");
  }
  if (std::memcmp(claimed.data(), computed.data(), claimed.size()) == 0) return std::nullopt;
  for (std::size_t i = 0; i < computed.size(); ++i) {
    float value = 0;
    std::memcpy(&value, claimed.data() + i * sizeof(float), sizeof value);
    const std::uint32_t a = comparable_bits(value), b = comparable_bits(computed[i]);
    if (a != b) return Difference{i, a, b};
  }
  return std::nullopt;
}

std::optional<Difference> first_difference(const std::vector<float>& claimed,
                                           const std::vector<float>& computed) {
  return first_difference(as_bytes(std::as_bytes(std::span(claimed))), computed);
}

void set_difference(MismatchPlace& place, const Difference& difference) {
  place.element = difference.element;
  place.claimed_bits = difference.claimed_bits;
  place.computed_bits = difference.computed_bits;
}

// The inputs of some cells of an opening, in host memory.
struct GatheredCells {
  GatheredCells(const LayerOpening& opening, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      positions.push_back(static_cast<std::int32_t>(opening.positions()[i]));
      const std::vector<float> row = payload_floats(opening.input(i));
      hidden.insert(hidden.end(), row.begin(), row.end());
    }
    // The key-values stand at the beginning of the part, position by position.
    const ByteView first = opening.key_value(0);
    inputs.prefix = std::int64_t{positions.back()} + 1;
    inputs.positions = positions;
    inputs.hidden = hidden;
    inputs.key_values = {reinterpret_cast<const float*>(first.data()),
                         static_cast<std::size_t>(inputs.prefix) * (first.size() / sizeof(float))};
  }
  std::vector<std::int32_t> positions;
  std::vector<float> hidden;
  CellInputs inputs;
};

std::span<const float> row_of(const std::vector<float>& rows, std::size_t m, std::size_t width) {
  return std::span(rows).subspan(m * width, width);
}

std::optional<MismatchPlace> cell_difference(const LayerOpening& opening, std::size_t index,
                                             std::span<const float> keys,
                                             std::span<const float> values,
                                             std::span<const float> hidden) {
  const std::uint64_t position = opening.positions()[index];
  const ByteView key_value = opening.key_value(position);
  MismatchPlace place;
  place.position = position;
  place.type = LeafType::kKeyValue;
  place.layer = opening.layer();
  if (const auto k = first_difference(key_value.first(keys.size_bytes()), keys)) {
    set_difference(place, *k);
    return place;
  }
  if (const auto v = first_difference(key_value.subspan(keys.size_bytes()), values)) {
    set_difference(place, *v);
    *place.element += keys.size();  // of the leaf: K row, then V row
    return place;
  }
  if (const auto h = first_difference(opening.output(index), hidden)) {
    place.type = LeafType::kRow;
    place.layer = opening.layer() + 1;
    set_difference(place, *h);
    return place;
  }
  return std::nullopt;
}

// Why the prover's operators do not count; empty if they do.
std::string operators_flaw(const LayerOpening& opening, std::size_t index,
                           const OperatorOutputs& computed, const CellOperators& claimed) {
  if (claimed.outputs.size() != computed.size()) return "their number is wrong";
  for (std::size_t i = 0; i < computed.size(); ++i) {
    if (claimed.outputs[i].name != computed[i].first) return "their names are wrong";
    if (claimed.outputs[i].values.size() != computed[i].second.size()) {
      return "the output of " + computed[i].first + " has the wrong size";
    }
  }
  const ByteView key_value = opening.key_value(opening.positions()[index]);
  const ByteView keys = key_value.first(key_value.size() / 2);
  const ByteView values = key_value.subspan(key_value.size() / 2);
  for (const OperatorOutput& output : claimed.outputs) {
    const ByteView committed = output.name == "k_rope"         ? keys
                               : output.name == "v_proj"       ? values
                               : output.name == "mlp_residual" ? opening.output(index)
                                                               : ByteView();
    if (!committed.empty() && first_difference(committed, output.values)) {
      return "the output of " + output.name + " is not what was committed";
    }
  }
  return {};
}

}  // namespace

std::uint32_t comparable_bits(float value) {
  return value != value ? kNanBits : contract::bits_of(value);
}

std::vector<RowDifference> judge_cells(const LayerOpening& opening, const ModelConfig& config,
                                       const LayerWeights& weights, CellRunner& runner,
                                       const std::function<void(std::size_t)>& progress) {
  const std::size_t width = static_cast<std::size_t>(config.kv_size());
  const std::size_t hidden = static_cast<std::size_t>(config.hidden_size);
  const std::size_t cells = opening.positions().size();
  constexpr std::size_t kPiece = static_cast<std::size_t>(CellRunner::kMaxRows);
  std::vector<RowDifference> out;
  for (std::size_t at = 0; at < cells; at += kPiece) {
    const std::size_t end = std::min(cells, at + kPiece);
    const GatheredCells gathered(opening, at, end);
    const CellOutputs computed = runner.run(weights, gathered.inputs);
    for (std::size_t i = at; i < end; ++i) {
      if (const auto place = cell_difference(opening, i, row_of(computed.keys, i - at, width),
                                             row_of(computed.values, i - at, width),
                                             row_of(computed.hidden, i - at, hidden))) {
        out.push_back({i, *place});
      }
    }
    if (progress) progress(end);
  }
  return out;
}

OperatorOutputs cell_operators(const LayerOpening& opening, std::size_t index,
                               const LayerWeights& weights, CellRunner& runner) {
  const GatheredCells gathered(opening, index, index + 1);
  OperatorOutputs out;
  runner.run(weights, gathered.inputs, &out);
  return out;
}

std::vector<RowDifference> judge_embeddings(const EndsOpening& opening, const Claim& claim,
                                            const ModelConfig& config, const ModelWeights& weights,
                                            CellRunner& runner) {
  const std::vector<std::uint32_t> ids = sequence_ids(claim);
  std::vector<std::int32_t> tokens;
  for (const std::uint64_t t : opening.embeddings()) {
    tokens.push_back(static_cast<std::int32_t>(ids[t]));
  }
  std::vector<RowDifference> out;
  constexpr std::size_t kPiece = static_cast<std::size_t>(CellRunner::kMaxRows);
  const std::size_t hidden = static_cast<std::size_t>(config.hidden_size);
  for (std::size_t at = 0; at < tokens.size(); at += kPiece) {
    const std::size_t count = std::min(kPiece, tokens.size() - at);
    const std::vector<float> rows =
        runner.embed(weights.embedding, std::span(tokens).subspan(at, count));
    for (std::size_t m = 0; m < count; ++m) {
      const auto difference = first_difference(opening.embedding(at + m), row_of(rows, m, hidden));
      if (!difference) continue;
      MismatchPlace place;
      place.type = LeafType::kRow;
      place.position = opening.embeddings()[at + m];
      place.op = "embedding";
      set_difference(place, *difference);
      out.push_back({at + m, place});
    }
  }
  return out;
}

std::vector<RowDifference> judge_heads(const EndsOpening& opening, const Claim& claim,
                                       const ModelConfig& config, const ModelWeights& weights,
                                       CellRunner& runner) {
  const std::vector<std::uint32_t> ids = sequence_ids(claim);
  const std::size_t vocab = static_cast<std::size_t>(config.vocab_size);
  std::vector<RowDifference> out;
  constexpr std::size_t kPiece = static_cast<std::size_t>(CellRunner::kMaxHeads);
  for (std::size_t at = 0; at < opening.heads().size(); at += kPiece) {
    const std::size_t end = std::min(opening.heads().size(), at + kPiece);
    std::vector<float> hidden;
    std::vector<SampleRequest> samples;
    for (std::size_t i = at; i < end; ++i) {
      const std::vector<float> row = payload_floats(opening.last_row(i));
      hidden.insert(hidden.end(), row.begin(), row.end());
      samples.push_back(sample_request(claim, opening.heads()[i]));
    }
    const CellRunner::Heads heads = runner.heads(weights, hidden, samples);
    for (std::size_t i = at; i < end; ++i) {
      const std::uint64_t t = opening.heads()[i];
      MismatchPlace place;
      place.position = t;
      if (const auto difference =
              first_difference(opening.logits(i), row_of(heads.logits, i - at, vocab))) {
        place.type = LeafType::kLogits;
        place.op = "lm_head";
        set_difference(place, *difference);
        out.push_back({i, place});
        continue;
      }
      // Equal logits are finite (the opening was checked), so there is a token.
      const std::uint32_t token = static_cast<std::uint32_t>(heads.tokens[i - at].value());
      if (token == ids[t + 1]) continue;
      place.type = LeafType::kTokens;
      place.op = "sampler";
      set_difference(place, {t + 1, ids[t + 1], token});
      out.push_back({i, place});
    }
  }
  return out;
}

OperatorPlace place_operator(const MismatchPlace& difference, const LayerOpening& opening,
                             std::size_t index, const OperatorOutputs& computed,
                             const CellOperators* claimed) {
  OperatorPlace out;
  out.place = difference;
  const std::uint64_t kv_width = opening.key_value(0).size() / (2 * sizeof(float));
  if (difference.type == LeafType::kRow) {
    out.place.op = "mlp_residual";
  } else if (difference.element.value() < kv_width) {
    out.place.op = "k_rope";
  } else {
    out.place.op = "v_proj";
    *out.place.element -= kv_width;
  }
  if (claimed == nullptr) return out;
  out.unusable = operators_flaw(opening, index, computed, *claimed);
  if (!out.unusable.empty()) return out;
  for (std::size_t i = 0; i < computed.size(); ++i) {
    const auto found = first_difference(claimed->outputs[i].values, computed[i].second);
    if (!found) continue;
    out.place.op = computed[i].first;
    set_difference(out.place, *found);
    out.from_operators = true;
    break;
  }
  return out;
}

MismatchFinding finding_of(const MismatchPlace& place) {
  MismatchFinding out;
  out.op = place.op.value_or("record");
  if (place.element) {
    out.element = place.element;
    out.claimed_bits = place.claimed_bits.value_or(0);
    out.computed_bits = place.computed_bits.value_or(0);
  }
  return out;
}

}  // namespace bitwitness
