// fma32 against the stock library: greedy ids equal, logits within 5e-6 of the largest.
#include "tests/kernels/reference_models.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/backend.h"
#include "kernels/engine.h"
#include "kernels/model/model.h"

namespace bitwitness {
namespace {

// Relative to the largest magnitude of the stock logits (the bound of the project's acceptance).
constexpr double kTolerance = 5e-6;

void expect_close(const std::vector<float>& got, const std::vector<double>& want,
                  const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  double largest = 0, error = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::fabs(want[i]));
    error = std::max(error, std::fabs(static_cast<double>(got[i]) - want[i]));
  }
  EXPECT_LE(error, kTolerance * largest) << what << ": largest logit " << largest;
  ::testing::Test::RecordProperty("relative_error", std::to_string(error / largest));
}

class ReferenceModels : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(ReferenceModels, GreedyIdsAndLogitsEqualTheStockOnes) {
  const auto& [model_name, device] = GetParam();
  const std::vector<std::string> available = available_backends();
  if (std::find(available.begin(), available.end(), device) == available.end()) {
    GTEST_SKIP() << "no " << device << " on this machine";
  }
  const std::unique_ptr<Backend> backend = make_backend(device, 2);
  const Model model = Model::load(models_dir() / model_name);
  const PlacedWeights weights(model.weights(), *backend);
  for (const ReferenceCase& reference : reference_cases(model_name)) {
    SCOPED_TRACE(reference.name);
    Engine engine(model.config(), weights, *backend,
                  {.slots = 1, .capacity = static_cast<std::int64_t>(reference.greedy_ids.size())});
    std::vector<float> logits;
    StepObserver observer;
    observer.on_values = [&](LeafType type, std::uint32_t, const RowMap& rows, const float* first,
                             std::int64_t width, const float*, std::int64_t) {
      if (type == LeafType::kLogits) logits.assign(first, first + rows.rows * width);
    };
    std::vector<StepRow> rows;
    for (std::size_t t = 0; t < reference.input_ids.size(); ++t) {
      StepRow row;
      row.position = static_cast<std::int32_t>(t);
      row.token = reference.input_ids[t];
      row.emit = t + 1 == reference.input_ids.size() || (!reference.mid_logits.empty() && t == 20);
      rows.push_back(row);
    }
    std::vector<std::int32_t> sampled = engine.step(rows, observer);
    const std::size_t vocab = reference.last_logits.size();
    if (!reference.mid_logits.empty()) {
      expect_close({logits.begin(), logits.begin() + static_cast<std::ptrdiff_t>(vocab)},
                   reference.mid_logits, "position 20");
    }
    expect_close({logits.end() - static_cast<std::ptrdiff_t>(vocab), logits.end()},
                 reference.last_logits, "last position");

    std::vector<std::int32_t> ids = reference.input_ids;
    ids.push_back(sampled.back());
    while (ids.size() < reference.greedy_ids.size()) {
      StepRow row;
      row.position = static_cast<std::int32_t>(ids.size() - 1);
      row.token = ids.back();
      row.emit = true;
      ids.push_back(engine.step({&row, 1}, {}).front());
    }
    EXPECT_EQ(ids, reference.greedy_ids);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ReferenceModels,
                         ::testing::Combine(::testing::ValuesIn(supported_models()),
                                            ::testing::ValuesIn(tested_devices())),
                         [](const auto& param) {
                           return test_name(std::get<0>(param.param) + "_" +
                                            std::get<1>(param.param));
                         });

}  // namespace
}  // namespace bitwitness
