// The product's central claim: records made on a GPU are replayed here, on other hardware, with
// equal bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "attest/base/file.h"
#include "attest/mismatch_proof.h"
#include "prover/generate.h"
#include "verifier/audit.h"
#include "verifier/recheck.h"
#include "verifier/report.h"

namespace bitwitness {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> committed(const std::string& extension) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(fs::path(BW_TEST_DATA_DIR) / "records")) {
    if (entry.path().extension() == extension) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::string test_name(const ::testing::TestParamInfo<fs::path>& param) {
  std::string name = param.param.stem().string();
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// "<gpu>-<model>.bwrec" -> the model's directory.
std::string model_dir(const fs::path& record) {
  const std::string stem = record.stem().string();
  const std::string model = stem.substr(stem.find('-') + 1);
  const fs::path models = fs::path(BW_TEST_DATA_DIR) / "models";
  return (fs::exists(models / model) ? models / model : models / "zoo" / model).string();
}

class GpuRecords : public ::testing::TestWithParam<fs::path> {};

TEST_P(GpuRecords, AreReplayedWithEqualBitsOnEveryBackendHere) {
  const Record record = read_record(GetParam().string());
  ASSERT_EQ(record.provenance.at(provenance_key::kBackend), "cuda");
  ASSERT_TRUE(record.signature);
  const AuditModel model = AuditModel::load(model_dir(GetParam()));
  for (const std::string& device : available_backends()) {
    const std::unique_ptr<Backend> backend = make_backend(device, 2);
    const AuditReport report = audit_record(record, model, *backend, {});
    EXPECT_EQ(report.verdict, Verdict::kMatch) << device << "\n" << report_text(report, "record");
    EXPECT_EQ(report.cells_checked, report.cells);
    EXPECT_GT(report.cells, 100u);
  }
}

TEST_P(GpuRecords, TheSameRequestGivesTheSameClaimHere) {
  const Claim claim = read_record(GetParam().string()).claim;
  const ServedModel model = ServedModel::load(model_dir(GetParam()));
  GenerationRequest request;
  request.prompt_ids = claim.prompt_ids;
  request.max_tokens = claim.max_tokens;
  request.sampling.temperature = contract::float_of(claim.sampling.temperature_bits);
  request.sampling.top_k = claim.sampling.top_k;
  request.sampling.top_p = contract::float_of(claim.sampling.top_p_bits);
  request.seed = claim.seed;
  request.seed_provenance = claim.seed_provenance;
  request.stop_ids = claim.stop_ids;
  for (const std::string& device : available_backends()) {
    const std::unique_ptr<Backend> backend = make_backend(device, 2);
    const Claim here = generate(model, *backend, {&request, 1}, {}).front().claim;
    EXPECT_EQ(here.digest().hex(), claim.digest().hex())
        << device << ": " << ::testing::PrintToString(claim_differences(claim, here));
  }
}

INSTANTIATE_TEST_SUITE_P(Committed, GpuRecords, ::testing::ValuesIn(committed(".bwrec")),
                         test_name);

// Lies that a GPU computed, found by another machine's CPU: anybody sees the same, bit by bit.
class GpuProofs : public ::testing::TestWithParam<fs::path> {};

TEST_P(GpuProofs, AreConfirmedOnEveryBackendHere) {
  const std::string file = GetParam().string();
  const MismatchProof proof =
      MismatchProof::parse(read_file(file, {.max_bytes = kMaxMismatchProofBytes}), file);
  const Record record = Record::parse(proof.record, file);
  ASSERT_EQ(record.provenance.at(provenance_key::kBackend), "cuda");
  for (const std::string& device : available_backends()) {
    const std::unique_ptr<Backend> backend = make_backend(device, 2);
    const RecheckReport report =
        recheck(proof, BW_TEST_DATA_DIR "/models/tiny-qwen3", *backend, {}, file);
    EXPECT_EQ(report.verdict, Verdict::kMismatch) << device;
    ASSERT_TRUE(report.place) << device;
    EXPECT_EQ(report.place->op, proof.finding.op) << device;
    EXPECT_EQ(report.place->element, proof.finding.element) << device;
    EXPECT_EQ(report.place->claimed_bits, proof.finding.claimed_bits) << device;
    EXPECT_EQ(report.place->computed_bits, proof.finding.computed_bits) << device;
  }
}

INSTANTIATE_TEST_SUITE_P(Committed, GpuProofs, ::testing::ValuesIn(committed(".bwproof")),
                         test_name);

TEST(GpuRecordsCommitted, AreThere) {
  EXPECT_GE(committed(".bwrec").size(), 3u);
  EXPECT_GE(committed(".bwproof").size(), 3u);
}

}  // namespace
}  // namespace bitwitness
