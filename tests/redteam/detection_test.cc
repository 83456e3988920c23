// How often sampling finds what is bad: measured over many audits against a prover that has altered
// a known share of the cells, and compared with what drawing without replacement predicts.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "tests/redteam/lies.h"
#include "verifier/live_audit.h"

namespace bitwitness {
namespace {

constexpr std::uint64_t kPositions = 100;
constexpr std::uint64_t kSampled = 10;
constexpr int kAudits = 500;
const std::string kModelDir = std::string(BW_TEST_DATA_DIR) + "/models/tiny-qwen3";

// The chance that `sampled` of `population` cells hold at least one of `bad`.
double predicted(std::uint64_t population, std::uint64_t bad, std::uint64_t sampled) {
  double missed = 1;
  for (std::uint64_t i = 0; i < sampled; ++i) {
    missed *= static_cast<double>(population - bad - i) / static_cast<double>(population - i);
  }
  return 1 - missed;
}

test::KeptRun run_of_hundred(const ServedModel& model) {
  GenerationRequest request;
  for (std::uint32_t i = 0; i < kPositions - 3; ++i) {
    request.prompt_ids.push_back(2 + i * 37 % 2000);
  }
  request.max_tokens = 4;
  request.stop_ids = default_stop_ids(model);
  return test::run_model(model, request);
}

class Detection : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(Detection, RateIsWhatDrawingPredicts) {
  const std::uint64_t bad = GetParam();
  static const ServedModel model = ServedModel::load(kModelDir);
  static const OpenedModel auditor = OpenedModel::open(kModelDir);
  static const test::KeptRun honest = run_of_hundred(model);
  ASSERT_EQ(honest.claim.trace_shape.positions, kPositions);

  // The last layer's outputs feed nothing but the head, so exactly these cells are bad.
  test::KeptRun run = honest;
  const std::uint32_t last = run.claim.trace_shape.layers - 1;
  for (std::uint64_t i = 0; i < bad; ++i) {
    run.flip(LeafType::kRow, last + 1, (3 + i * 7) % kPositions, i);
  }
  run.commit();
  test::TestProver prover(model, std::move(run));
  const std::unique_ptr<Backend> backend = make_backend("cpu", 1);
  LiveAuditOptions options(SigningKey::generate("auditor.example"));
  options.plan.layers = LayerChoice::parse(std::to_string(last));
  options.plan.cells = kSampled;
  options.log_key = prover.log_key.public_key();

  int found = 0;
  for (int i = 0; i < kAudits; ++i) {
    const AuditReport report = live_audit(prover.record, auditor, *backend, prover, options).report;
    ASSERT_TRUE(report.verdict == Verdict::kMatch || report.verdict == Verdict::kMismatch);
    ASSERT_EQ(report.cells_checked, kSampled);
    if (report.verdict == Verdict::kMismatch) ++found;
  }
  const double p = predicted(kPositions, bad, kSampled);
  const double spread = std::sqrt(kAudits * p * (1 - p));
  std::printf(
      "detection | %2d %% bad | %d of %d audits | predicted %.1f, standard deviation %.1f\n",
      static_cast<int>(bad * 100 / kPositions), found, kAudits, kAudits * p, spread);
  // Five standard deviations: an honest sampler leaves them in fewer than 1 of 10^6 runs.
  EXPECT_NEAR(found, kAudits * p, 5 * spread);
}

INSTANTIATE_TEST_SUITE_P(BadCells, Detection, ::testing::Values(1, 5, 20),
                         [](const auto& param) { return std::to_string(param.param) + "of100"; });

}  // namespace
}  // namespace bitwitness
