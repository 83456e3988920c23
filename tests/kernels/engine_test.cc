// The invariances of the engine: prefill = chunked prefill = decode; alone = in any batch at any
// slot; every backend = the reference. Compared by leaf digests of every committed row.
#include "kernels/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include "kernels/backend.h"
#include "kernels/model/model.h"
#include "tests/kernels/model/safetensors_writer.h"
#include "tests/kernels/reference_models.h"

namespace bitwitness {
namespace {

// Every committed leaf of one sequence, and its sampled tokens.
struct Committed {
  std::map<std::tuple<LeafType, std::uint32_t, std::int32_t>, Digest> leaves;
  std::vector<std::int32_t> sampled;
};

struct Prompt {
  std::int32_t slot;
  std::vector<std::int32_t> ids;
};

std::vector<std::int32_t> prompt_ids(std::int32_t length, std::int32_t seed, std::int64_t vocab) {
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < length; ++i) {
    ids.push_back(static_cast<std::int32_t>((std::int64_t{i} * 7919 + seed * 104729 + 11) % vocab));
  }
  return ids;
}

// Feeds the prompts together, at most `chunk` rows of each per step. Every row emits with
// temperature.
std::map<std::int32_t, Committed> run(const Model& model, const std::string& device,
                                      const std::vector<Prompt>& prompts, std::int64_t chunk,
                                      std::int64_t max_rows = 512, bool defer = false) {
  const std::unique_ptr<Backend> backend = make_backend(device, 2);
  const PlacedWeights weights(model.weights(), *backend);
  std::int64_t capacity = 1, slots = 1;
  for (const Prompt& prompt : prompts) {
    capacity = std::max(capacity, static_cast<std::int64_t>(prompt.ids.size()));
    slots = std::max<std::int64_t>(slots, prompt.slot + 1);
  }
  Engine engine(
      model.config(), weights, *backend,
      {.slots = slots, .capacity = capacity, .max_rows = max_rows, .defer_leaves = defer});
  std::map<std::int32_t, Committed> out;
  StepObserver observer;
  observer.on_leaves = [&](LeafType type, std::uint32_t layer, const RowMap& rows,
                           const Digest* digests) {
    for (std::int64_t m = 0; m < rows.rows; ++m) {
      out[rows.host_slot[m]].leaves[{type, layer, rows.host_position[m]}] = digests[m];
    }
  };
  for (std::int64_t begin = 0; begin < capacity; begin += chunk) {
    std::vector<StepRow> rows;
    for (const Prompt& prompt : prompts) {
      const std::int64_t end =
          std::min(begin + chunk, static_cast<std::int64_t>(prompt.ids.size()));
      for (std::int64_t t = begin; t < end; ++t) {
        StepRow row;
        row.slot = prompt.slot;
        row.position = static_cast<std::int32_t>(t);
        row.token = prompt.ids[static_cast<std::size_t>(t)];
        row.emit = true;
        row.sample.params = {0.9f, 50, 0.95f};
        row.sample.draw = 0x9e3779b97f4a7c15u * static_cast<std::uint64_t>(t + 1);
        rows.push_back(row);
      }
    }
    const std::vector<std::int32_t> sampled = engine.step(rows, observer);
    for (std::size_t i = 0; i < rows.size(); ++i) out[rows[i].slot].sampled.push_back(sampled[i]);
  }
  engine.flush();
  return out;
}

const Model& tiny(const std::string& name) {
  static std::map<std::string, Model> models;
  auto it = models.find(name);
  if (it == models.end()) it = models.emplace(name, Model::load(models_dir() / name)).first;
  return it->second;
}

void expect_equal(const Committed& got, const Committed& want, const std::string& what) {
  ASSERT_EQ(got.leaves.size(), want.leaves.size()) << what;
  for (const auto& [place, digest] : want.leaves) {
    const auto it = got.leaves.find(place);
    ASSERT_NE(it, got.leaves.end()) << what;
    ASSERT_EQ(it->second.hex(), digest.hex())
        << what << ": type " << static_cast<int>(std::get<0>(place)) << " layer "
        << std::get<1>(place) << " position " << std::get<2>(place);
  }
  EXPECT_EQ(got.sampled, want.sampled) << what;
}

class Invariance : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void SetUp() override {
    const std::vector<std::string> available = available_backends();
    if (std::find(available.begin(), available.end(), device()) == available.end()) {
      GTEST_SKIP() << "no " << device() << " on this machine";
    }
  }
  const Model& model() const { return tiny(std::get<0>(GetParam())); }
  std::string device() const { return std::get<1>(GetParam()); }
  std::vector<std::int32_t> ids(std::int32_t length, std::int32_t seed) const {
    return prompt_ids(length, seed, model().config().vocab_size);
  }
};

TEST_P(Invariance, EqualsTheReferenceBackend) {
  const std::vector<Prompt> prompt{{0, ids(131, 3)}};
  expect_equal(run(model(), device(), prompt, 131)[0], run(model(), "ref", prompt, 131)[0],
               device() + " against ref");
}

TEST_P(Invariance, PrefillEqualsChunksEqualsDecode) {
  const std::vector<Prompt> prompt{{0, ids(131, 5)}};
  const Committed whole = run(model(), device(), prompt, 131)[0];
  ASSERT_EQ(whole.sampled.size(), 131u);
  for (const std::int64_t chunk : {1, 7, 64}) {
    expect_equal(run(model(), device(), prompt, chunk)[0], whole,
                 "chunks of " + std::to_string(chunk));
  }
  expect_equal(run(model(), device(), prompt, 131, 50)[0], whole, "steps cut at 50 rows");
  if (device() == "ref") return;  // slow, and has nothing to run beside
  for (const std::int64_t chunk : {1, 7, 131}) {
    expect_equal(run(model(), device(), prompt, chunk, 512, /*defer=*/true)[0], whole,
                 "leaves one step later, chunks of " + std::to_string(chunk));
  }
}

TEST_P(Invariance, AloneEqualsInABatchAtAnySlot) {
  for (const std::int32_t batch : {2, 5, 16}) {
    std::vector<Prompt> prompts;
    for (std::int32_t i = 0; i < batch; ++i) {
      // Slots in reverse, lengths all different and across an attention block for some.
      prompts.push_back({batch - 1 - i, ids(3 + 9 * i % 70, i)});
    }
    auto together = run(model(), device(), prompts, 24);
    for (const Prompt& prompt : prompts) {
      const Committed alone = run(model(), device(), {{0, prompt.ids}}, 1000)[0];
      expect_equal(together[prompt.slot], alone,
                   "batch of " + std::to_string(batch) + ", slot " + std::to_string(prompt.slot));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Invariance,
                         ::testing::Combine(::testing::ValuesIn(supported_models()),
                                            ::testing::ValuesIn(tested_devices())),
                         [](const auto& param) {
                           return test_name(std::get<0>(param.param) + "_" +
                                            std::get<1>(param.param));
                         });

// A model with one element of one matrix replaced by infinity.
class BrokenModel {
 public:
  BrokenModel(const Model& model, Matrix ModelWeights::*matrix, std::int64_t element)
      : weights_(model.weights()) {
    Matrix& broken = weights_.*matrix;
    EXPECT_EQ(broken.dtype, Dtype::kBf16);
    bytes_.assign(broken.data, broken.data + broken.rows * broken.cols * 2);
    const std::uint16_t infinity = 0x7f80;
    std::memcpy(&bytes_[static_cast<std::size_t>(2 * element)], &infinity, 2);
    broken.data = bytes_.data();
  }
  const ModelWeights& weights() const { return weights_; }

 private:
  ModelWeights weights_;
  std::vector<std::byte> bytes_;
};

TEST(Engine, WhatIsNotFiniteIsNamed) {
  const Model& model = tiny("tiny-llama");
  const std::int64_t hidden = model.config().hidden_size;
  struct Fault {
    Matrix ModelWeights::*matrix;
    const char* op;
    std::int64_t layer;
  };
  for (const std::string& device : available_backends()) {
    const std::unique_ptr<Backend> backend = make_backend(device, 2);
    for (const Fault& fault : {Fault{&ModelWeights::embedding, "embedding", 0},
                               Fault{&ModelWeights::head, "lm_head", model.config().num_layers}}) {
      // Row 7 is the embedding of token 7, or the logit of id 7.
      const BrokenModel broken(model, fault.matrix, 7 * hidden + 3);
      const PlacedWeights weights(broken.weights(), *backend);
      for (const bool defer : {false, true}) {
        Engine engine(model.config(), weights, *backend,
                      {.slots = 2, .capacity = 8, .defer_leaves = defer});
        std::size_t leaves = 0;
        StepObserver observer;
        observer.on_leaves = [&](LeafType, std::uint32_t, const RowMap& rows, const Digest*) {
          leaves += static_cast<std::size_t>(rows.rows);
        };
        StepRow good, bad;
        good.slot = 0;
        good.token = 5;
        bad.slot = 1;
        bad.token = 7;
        good.emit = bad.emit = true;
        try {
          const StepRow rows[] = {good, bad};
          engine.step(rows, observer);
          engine.flush();
          ADD_FAILURE() << device << ": a value that is not finite was committed";
        } catch (const NonFiniteError& error) {
          EXPECT_EQ(error.op, fault.op) << device;
          EXPECT_EQ(error.layer, fault.layer) << device;
          EXPECT_EQ(error.position, 0) << device;
          // Every row's logit 7 is infinite; the embedding only of token 7.
          EXPECT_EQ(error.slot, std::string(fault.op) == "embedding" ? 1 : 0) << device;
        }
        EXPECT_EQ(leaves, 0u) << device << ": nothing of such a step is delivered";
        if (!defer) continue;
        // It is said first, whatever the next step's rows are.
        Engine other(model.config(), weights, *backend,
                     {.slots = 2, .capacity = 8, .defer_leaves = true});
        other.step({&bad, 1}, observer);
        StepRow beyond = bad;
        beyond.position = 1;
        beyond.token = static_cast<std::int32_t>(model.config().vocab_size);
        EXPECT_THROW(other.step({&beyond, 1}, observer), NonFiniteError) << device;
      }
    }
  }
}

TEST(Engine, RefusesWhatIsOutOfRange) {
  const std::unique_ptr<Backend> backend = make_backend("ref");
  const Model& model = tiny("tiny-qwen3");
  const PlacedWeights weights(model.weights(), *backend);
  EXPECT_THROW(Engine(model.config(), weights, *backend, {.slots = 1, .capacity = 1025}), Error);
  EXPECT_THROW(Engine(model.config(), weights, *backend, {.slots = 0, .capacity = 8}), Error);
  EXPECT_THROW(Engine(model.config(), weights, *backend, {.slots = 1, .capacity = 0}), Error);
  Engine engine(model.config(), weights, *backend, {.slots = 2, .capacity = 8});
  const auto step = [&](std::int32_t slot, std::int32_t position, std::int32_t token) {
    StepRow row;
    row.slot = slot;
    row.position = position;
    row.token = token;
    engine.step({&row, 1}, {});
  };
  EXPECT_NO_THROW(step(1, 0, 2047));
  EXPECT_THROW(step(0, 0, 2048), Error);
  EXPECT_THROW(step(0, 0, -1), Error);
  EXPECT_THROW(step(0, 8, 1), Error);
  EXPECT_THROW(step(0, -1, 1), Error);
  EXPECT_THROW(step(2, 0, 1), Error);
}

}  // namespace
}  // namespace bitwitness
