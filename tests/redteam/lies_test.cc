// Every lie of the red team gets the verdict that it deserves, at the right place; a mismatch is
// seen again by anybody who has the proof and the model. Prints the table of all cases.
#include "tests/redteam/lies.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "verifier/live_audit.h"
#include "verifier/recheck.h"
#include "verifier/report.h"

namespace bitwitness {
namespace {

using redteam::Lie;
using redteam::Stage;

const std::string kModelDir = std::string(BW_TEST_DATA_DIR) + "/models/tiny-qwen3";

Stage& stage() {
  static Stage made(kModelDir);
  return made;
}
const OpenedModel& auditor() {
  static const OpenedModel model = OpenedModel::open(kModelDir);
  return model;
}

std::string place_text(const std::optional<MismatchPlace>& place) {
  return place ? place->text() : "-";
}

void print_row(const std::string& lie, const std::string& verdict, const std::string& place) {
  std::printf("red team | %-24s | %-12s | %s\n", lie.c_str(), verdict.c_str(), place.c_str());
}

RecheckOptions options_of(const test::TestProver& prover) {
  RecheckOptions options;
  options.log_key = prover.log_key.public_key();
  return options;
}

class RedTeam : public ::testing::TestWithParam<Lie> {};

TEST_P(RedTeam, IsCaught) {
  const Lie& lie = GetParam();
  const std::unique_ptr<test::TestProver> prover = lie.make(stage());
  const std::unique_ptr<Backend> backend = make_backend("cpu", 1);
  LiveAuditOptions options(SigningKey::generate("auditor.example"));
  options.plan = lie.plan;
  options.log_key = prover->log_key.public_key();
  options.retry_wait = std::chrono::milliseconds(0);
  const LiveAudit judged = live_audit(prover->record, auditor(), *backend, *prover, options);
  const AuditReport& report = judged.report;
  print_row(lie.name, verdict_name(report.verdict), place_text(report.place));
  const std::string text = report_text(report, lie.name);
  ASSERT_EQ(report.verdict, lie.verdict) << text;
  EXPECT_EQ(report.findings.empty(), lie.verdict == Verdict::kMatch) << text;
  if (lie.verdict != Verdict::kMismatch) {
    EXPECT_FALSE(report.place) << text;
    EXPECT_FALSE(judged.proof);
    return;
  }
  ASSERT_TRUE(report.place) << text;
  EXPECT_EQ(report.place->cell_layer(), lie.layer) << text;
  if (lie.position) {
    EXPECT_EQ(report.place->position, lie.position) << text;
  }
  if (!lie.op.empty()) {
    EXPECT_EQ(report.place->op, lie.op) << text;
  }
  // Whoever has the file and the model sees the same, on every backend that there is here.
  ASSERT_EQ(judged.proof.has_value(), lie.provable());
  if (!judged.proof) return;
  const MismatchProof proof = MismatchProof::parse(judged.proof->serialize(), "proof");
  for (const std::string& device : available_backends()) {
    const std::unique_ptr<Backend> other = make_backend(device, 1);
    const RecheckReport again = recheck(proof, kModelDir, *other, options_of(*prover), lie.name);
    EXPECT_EQ(again.verdict, Verdict::kMismatch) << device;
    EXPECT_EQ(place_text(again.place), place_text(report.place)) << device;
  }
}

INSTANTIATE_TEST_SUITE_P(Lies, RedTeam, ::testing::ValuesIn(redteam::lies()),
                         [](const auto& param) {
                           std::string name = param.param.name;
                           for (char& c : name) {
                             if (c == '-') c = '_';
                           }
                           return name;
                         });

// The cell that is drawn is found bad because of a key that is not its own: as the auditor sees it,
// attention gives something else.
TEST(RedTeamPrefix, AnAlteredKeyOfAPositionThatWasNotDrawnIsSeenInAttention) {
  const auto& all = redteam::lies();
  const auto lie = std::find_if(all.begin(), all.end(),
                                [](const Lie& one) { return one.name == "altered-prefix-key"; });
  const std::unique_ptr<Backend> backend = make_backend("cpu", 1);
  for (int attempt = 0; attempt < 20; ++attempt) {
    const std::unique_ptr<test::TestProver> prover = lie->make(stage());
    LiveAuditOptions options(SigningKey::generate("auditor.example"));
    options.plan = lie->plan;
    options.log_key = prover->log_key.public_key();
    const AuditReport report =
        live_audit(prover->record, auditor(), *backend, *prover, options).report;
    ASSERT_EQ(report.verdict, Verdict::kMismatch);
    if (report.place->position == 0) continue;  // the altered key was drawn itself
    EXPECT_EQ(report.place->cell_layer(), 2u);
    EXPECT_EQ(report.live->bad_cells, 1u);
    return;
  }
  FAIL() << "position 0 was drawn twenty times in a row";
}

}  // namespace
}  // namespace bitwitness
