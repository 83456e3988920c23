// Cells: every row of every layer of a run, recomputed from what the run committed, has the run's
// bits, in any company and on every backend; what is read is the committed prefix and nothing else.
#include "kernels/cell.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "attest/base/error.h"
#include "kernels/engine.h"
#include "tests/kernels/reference_models.h"

namespace bitwitness {
namespace {

constexpr std::int64_t kPositions = 131;  // three attention blocks, the last one short

const Model& tiny(const std::string& name) {
  static std::map<std::string, Model> models;
  auto it = models.find(name);
  if (it == models.end()) it = models.emplace(name, Model::load(models_dir() / name)).first;
  return it->second;
}

// The values that one run on the reference backend committed, by layer.
struct Rows {
  std::vector<std::int32_t> tokens;
  std::vector<std::vector<float>> hidden;      // [L + 1][T * hidden]
  std::vector<std::vector<float>> key_values;  // [L][T * 2 * kv_width]
  std::vector<float> logits;                   // [T * vocab]
  std::vector<SampleRequest> samples;
  std::vector<std::int32_t> sampled;
};

Rows run(const Model& model) {
  const ModelConfig& config = model.config();
  const std::unique_ptr<Backend> backend = make_backend("cpu", 2);
  const PlacedWeights weights(model.weights(), *backend);
  Engine engine(config, weights, *backend, {.slots = 1, .capacity = kPositions});
  Rows out;
  out.hidden.resize(static_cast<std::size_t>(config.num_layers) + 1);
  out.key_values.resize(static_cast<std::size_t>(config.num_layers));
  StepObserver observer;
  observer.on_values = [&](LeafType type, std::uint32_t layer, const RowMap& rows,
                           const float* first, std::int64_t first_width, const float* second,
                           std::int64_t second_width) {
    std::vector<float>& to = type == LeafType::kRow        ? out.hidden[layer]
                             : type == LeafType::kKeyValue ? out.key_values[layer]
                                                           : out.logits;
    for (std::int64_t m = 0; m < rows.rows; ++m) {
      to.insert(to.end(), first + m * first_width, first + (m + 1) * first_width);
      to.insert(to.end(), second + m * second_width, second + (m + 1) * second_width);
    }
  };
  std::vector<StepRow> rows;
  for (std::int32_t t = 0; t < kPositions; ++t) {
    StepRow row;
    row.position = t;
    row.token = static_cast<std::int32_t>((std::int64_t{t} * 7919 + 11) % config.vocab_size);
    row.emit = true;
    row.sample.params = {0.9f, 50, 0.95f};
    row.sample.draw = 0x9e3779b97f4a7c15u * static_cast<std::uint64_t>(t + 1);
    out.tokens.push_back(row.token);
    out.samples.push_back(row.sample);
    rows.push_back(row);
  }
  out.sampled = engine.step(rows, observer);
  return out;
}

const Rows& rows_of(const std::string& name) {
  static std::map<std::string, Rows> cache;
  auto it = cache.find(name);
  if (it == cache.end()) it = cache.emplace(name, run(tiny(name))).first;
  return it->second;
}

bool equal(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

std::span<const float> row(const std::vector<float>& rows, std::int64_t t, std::int64_t width) {
  return std::span(rows).subspan(static_cast<std::size_t>(t * width),
                                 static_cast<std::size_t>(width));
}

class Cell : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void SetUp() override {
    const std::vector<std::string> available = available_backends();
    if (std::find(available.begin(), available.end(), device()) == available.end()) {
      GTEST_SKIP() << "no " << device() << " on this machine";
    }
    backend_ = make_backend(device(), 2);
  }
  const Model& model() const { return tiny(std::get<0>(GetParam())); }
  const Rows& rows() const { return rows_of(std::get<0>(GetParam())); }
  std::string device() const { return std::get<1>(GetParam()); }
  std::int64_t hidden() const { return model().config().hidden_size; }
  std::int64_t kv() const { return model().config().kv_size(); }

  // Cells of a layer at some positions, over a prefix that may reach beyond the last one.
  CellOutputs replay(CellRunner& runner, std::size_t layer,
                     const std::vector<std::int32_t>& positions, std::int64_t prefix,
                     OperatorOutputs* operators = nullptr) {
    std::vector<float> inputs;
    for (const std::int32_t t : positions) {
      const auto in = row(rows().hidden[layer], t, hidden());
      inputs.insert(inputs.end(), in.begin(), in.end());
    }
    const PlacedLayer placed(model().weights().layers[layer], *backend_);
    CellInputs in;
    in.positions = positions;
    in.hidden = inputs;
    in.key_values =
        std::span(rows().key_values[layer]).first(static_cast<std::size_t>(prefix * 2 * kv()));
    in.prefix = prefix;
    return runner.run(placed.weights(), in, operators);
  }

  void expect_good(const CellOutputs& out, std::size_t layer,
                   const std::vector<std::int32_t>& positions) {
    for (std::size_t i = 0; i < positions.size(); ++i) {
      const std::int64_t m = static_cast<std::int64_t>(i);
      const auto key_value = row(rows().key_values[layer], positions[i], 2 * kv());
      EXPECT_TRUE(equal(row(out.keys, m, kv()), key_value.first(static_cast<std::size_t>(kv()))));
      EXPECT_TRUE(
          equal(row(out.values, m, kv()), key_value.subspan(static_cast<std::size_t>(kv()))));
      EXPECT_TRUE(equal(row(out.hidden, m, hidden()),
                        row(rows().hidden[layer + 1], positions[i], hidden())))
          << "layer " << layer << " position " << positions[i];
    }
  }

  std::unique_ptr<Backend> backend_;
};

TEST_P(Cell, EveryCellOfARunIsGood) {
  CellRunner runner(model().config(), *backend_, kPositions);
  std::vector<std::int32_t> all(kPositions);
  std::iota(all.begin(), all.end(), 0);
  for (std::size_t layer = 0; layer < model().weights().layers.size(); ++layer) {
    expect_good(replay(runner, layer, all, kPositions), layer, all);
  }
}

TEST_P(Cell, CompanyAndPrefixDoNotMatter) {
  CellRunner runner(model().config(), *backend_, kPositions);
  for (const std::vector<std::int32_t>& positions :
       std::vector<std::vector<std::int32_t>>{{0}, {1}, {63}, {64}, {130}, {0, 130}, {5, 64, 99}}) {
    for (const std::int64_t prefix : {std::int64_t{positions.back()} + 1, kPositions}) {
      expect_good(replay(runner, 1, positions, prefix), 1, positions);
    }
  }
}

TEST_P(Cell, OperatorsEndInTheCommittedRows) {
  CellRunner runner(model().config(), *backend_, kPositions);
  OperatorOutputs operators;
  replay(runner, 1, {70}, 71, &operators);
  const auto output = [&](const std::string& name) -> std::span<const float> {
    for (const auto& [op, values] : operators) {
      if (op == name) return values;
    }
    return {};
  };
  EXPECT_EQ(operators.front().first, "input_norm");
  EXPECT_EQ(operators.back().first, "mlp_residual");
  const auto key_value = row(rows().key_values[1], 70, 2 * kv());
  EXPECT_TRUE(equal(output("k_rope"), key_value.first(static_cast<std::size_t>(kv()))));
  EXPECT_TRUE(equal(output("v_proj"), key_value.subspan(static_cast<std::size_t>(kv()))));
  EXPECT_TRUE(equal(output("mlp_residual"), row(rows().hidden[2], 70, hidden())));
}

TEST_P(Cell, ReadsTheCommittedPrefixAndItsOwnCommittedRow) {
  CellRunner runner(model().config(), *backend_, kPositions);
  const PlacedLayer placed(model().weights().layers[0], *backend_);
  const std::vector<std::int32_t> position{70};
  // Every position up to the cell's own one counts; the one behind it does not.
  for (const std::int64_t changed : {0, 63, 69, 70, 71}) {
    std::vector<float> altered = rows().key_values[0];
    // A value that attention weighs, far from what it was.
    altered[static_cast<std::size_t>(changed * 2 * kv() + kv())] += 1000.0f;
    CellInputs in;
    in.positions = position;
    in.hidden = row(rows().hidden[0], 70, hidden());
    in.key_values = altered;
    in.prefix = kPositions;
    const CellOutputs out = runner.run(placed.weights(), in);
    EXPECT_EQ(equal(out.hidden, row(rows().hidden[1], 70, hidden())), changed > 70) << changed;
    EXPECT_TRUE(
        equal(out.values,
              row(rows().key_values[0], 70, 2 * kv()).subspan(static_cast<std::size_t>(kv()))))
        << "what the cell computes for itself does not depend on the cache";
  }
}

TEST_P(Cell, EndsOfARunAreGood) {
  CellRunner runner(model().config(), *backend_, kPositions);
  const PlacedEnds placed(model().weights(), *backend_);
  EXPECT_TRUE(equal(runner.embed(placed.weights().embedding, rows().tokens), rows().hidden[0]));
  const std::size_t last = rows().hidden.size() - 1;
  const CellRunner::Heads heads =
      runner.heads(placed.weights(), rows().hidden[last], rows().samples);
  EXPECT_TRUE(equal(heads.logits, rows().logits));
  ASSERT_EQ(heads.tokens.size(), rows().sampled.size());
  for (std::size_t t = 0; t < heads.tokens.size(); ++t) {
    EXPECT_EQ(heads.tokens[t], rows().sampled[t]);
  }
}

TEST_P(Cell, NonFiniteInputsComeBackAsSuch) {
  CellRunner runner(model().config(), *backend_, kPositions);
  const PlacedEnds placed(model().weights(), *backend_);
  std::vector<float> huge(static_cast<std::size_t>(hidden()), 0.0f);
  huge[0] = std::numeric_limits<float>::infinity();
  const CellRunner::Heads heads =
      runner.heads(placed.weights(), huge, std::span(rows().samples).first(1));
  EXPECT_FALSE(heads.tokens[0].has_value());
}

INSTANTIATE_TEST_SUITE_P(All, Cell,
                         ::testing::Combine(::testing::ValuesIn(supported_models()),
                                            ::testing::ValuesIn(tested_devices())),
                         [](const auto& param) {
                           return test_name(std::get<0>(param.param) + "_" +
                                            std::get<1>(param.param));
                         });

TEST(CellRunner, RefusesPositionsBeyondTheContext) {
  const std::unique_ptr<Backend> backend = make_backend("ref");
  const ModelConfig& config = tiny("tiny-qwen3").config();
  EXPECT_THROW(CellRunner(config, *backend, 0), Error);
  EXPECT_THROW(CellRunner(config, *backend, config.max_positions + 1), Error);
  EXPECT_NO_THROW(CellRunner(config, *backend, 1));
}

}  // namespace
}  // namespace bitwitness
