// Full audits: honest records match on every backend; whatever a cheating prover changes, and signs
// again, is a mismatch in the right place; what cannot be judged is never a match.
#include "verifier/audit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>

#include "attest/base/error.h"
#include "attest/base/leaf_hash.h"
#include "attest/keys.h"
#include "attest/log.h"
#include "kernels/sampler.h"
#include "prover/generate.h"
#include "tests/kernels/model/safetensors_writer.h"
#include "verifier/report.h"

namespace bitwitness {
namespace {

const std::string kModelDir = std::string(BW_TEST_DATA_DIR) + "/models/tiny-qwen3";

const ServedModel& served() {
  static const ServedModel model = ServedModel::load(kModelDir);
  return model;
}
const AuditModel& auditor() {
  static const AuditModel model = AuditModel::load(kModelDir);
  return model;
}

GenerationRequest sampled_request() {
  GenerationRequest request;
  request.prompt_ids = encode_prompt(served(), "First Citizen:\nBefore we proceed");
  request.max_tokens = 12;
  request.sampling = {0.8f, 40, 0.95f};
  request.seed = {1, 2, 3, 4};
  request.seed_provenance = SeedProvenance::kNonce;
  request.stop_ids = default_stop_ids(served());
  return request;
}

Generation run(const GenerationRequest& request, bool keep_rows = false) {
  const std::unique_ptr<Backend> backend = make_backend("cpu", 1);
  GenerationOptions options;
  options.keep_rows = keep_rows;
  return std::move(generate(served(), *backend, {&request, 1}, options).front());
}

Record honest_record(EvidenceLevel level = EvidenceLevel::kRows) {
  const std::unique_ptr<Backend> backend = make_backend("cpu", 1);
  return make_record(served(), run(sampled_request(), level == EvidenceLevel::kRows), level,
                     run_provenance(*backend));
}

AuditReport audit(const Record& record, const std::string& device = "ref",
                  const AuditOptions& options = {}) {
  // A record reaches the auditor as bytes: an ill-formed one would be refused here.
  const Record received = Record::parse(record.serialize(), "record under test");
  const std::unique_ptr<Backend> backend = make_backend(device, 2);
  return audit_record(received, auditor(), *backend, options);
}

TEST(Audit, HonestRecordsMatchOnEveryBackend) {
  const Record record = honest_record();
  for (const std::string& device : available_backends()) {
    const AuditReport report = audit(record, device);
    EXPECT_EQ(report.verdict, Verdict::kMatch) << device << report_text(report, "record");
    EXPECT_TRUE(report.findings.empty());
    EXPECT_EQ(report.computed_trace_root, record.claim.trace_root);
    EXPECT_EQ(report.cells, 4 * record.claim.trace_shape.positions);
    EXPECT_EQ(report.cells_checked, report.cells);
    EXPECT_EQ(report.ends_checked, report.ends);
    EXPECT_EQ(report.tokens_checked, 12u);
    EXPECT_EQ(exit_code(report.verdict), ExitCode::kOk);
  }
}

TEST(Audit, ReplayInSmallStepsMatchesToo) {
  AuditOptions options;
  options.max_rows = 3;
  EXPECT_EQ(audit(honest_record(), "cpu", options).verdict, Verdict::kMatch);
}

// Rebuilds evidence and trace root after a cheat changed the rows, as a cheating prover would.
void commit_to_rows(Record& record) {
  const TraceShape& shape = record.claim.trace_shape;
  std::vector<Digest> leaves = record.evidence.leaves;
  const auto rehash = [&](LeafType type, std::uint32_t layer, std::uint64_t position) {
    const auto range = evidence_row_range(shape, type, layer, position);
    const LeafPrefix prefix{type, static_cast<std::uint8_t>(Dtype::kFp32), layer, position};
    leaves[*Trace::leaf_index(shape, type, layer, position)] =
        leaf_digest(prefix, ByteView(record.evidence.rows.data() + range->offset, range->bytes));
  };
  for (std::uint64_t t = 0; t < shape.positions; ++t) {
    for (std::uint32_t l = 0; l <= shape.layers; ++l) rehash(LeafType::kRow, l, t);
    for (std::uint32_t l = 0; l < shape.layers; ++l) rehash(LeafType::kKeyValue, l, t);
    if (t >= shape.positions - shape.emitted) rehash(LeafType::kLogits, 0, t);
  }
  std::vector<std::uint32_t> ids = record.claim.prompt_ids;
  ids.insert(ids.end(), record.claim.emitted_ids.begin(), record.claim.emitted_ids.end());
  leaves[*Trace::leaf_index(shape, LeafType::kTokens, 0, 0)] = tokens_leaf(ids);
  const Trace trace = Trace::from_leaves(shape, leaves);
  record.claim.trace_root = trace.root();
  record.evidence = rows_evidence(trace, record.evidence.rows);
}

void flip_bit(Record& record, LeafType type, std::uint32_t layer, std::uint64_t position,
              std::uint64_t element) {
  const auto range = evidence_row_range(record.claim.trace_shape, type, layer, position);
  ASSERT_TRUE(range);
  record.evidence.rows[range->offset + 4 * element] ^= 1;
  commit_to_rows(record);
}

struct Place {
  LeafType type;
  std::uint32_t layer;
  std::uint64_t position;
  std::uint64_t element;
};

class OneBit : public ::testing::TestWithParam<Place> {};

TEST_P(OneBit, InOneCommittedElementIsFoundThere) {
  const Place& place = GetParam();
  Record record = honest_record();
  flip_bit(record, place.type, place.layer, place.position, place.element);
  const AuditReport report = audit(record);
  EXPECT_EQ(report.verdict, Verdict::kMismatch);
  ASSERT_TRUE(report.place) << report_text(report, "record");
  EXPECT_EQ(report.place->type, place.type);
  EXPECT_EQ(report.place->layer, place.layer);
  EXPECT_EQ(report.place->position, place.position);
  EXPECT_EQ(report.place->element, place.element);
  EXPECT_EQ(*report.place->claimed_bits ^ *report.place->computed_bits, 1u);
  EXPECT_EQ(exit_code(report.verdict), ExitCode::kMismatch);
}

INSTANTIATE_TEST_SUITE_P(Places, OneBit,
                         ::testing::Values(Place{LeafType::kRow, 0, 0, 0},
                                           Place{LeafType::kRow, 2, 5, 77},
                                           Place{LeafType::kRow, 4, 19, 127},
                                           Place{LeafType::kKeyValue, 0, 3, 0},
                                           Place{LeafType::kKeyValue, 3, 11, 255},
                                           Place{LeafType::kLogits, 0, 19, 2047}));

TEST(Audit, EvidenceLevelsLocateAsFarAsTheyShow) {
  Record rows = honest_record();
  flip_bit(rows, LeafType::kRow, 2, 5, 77);
  const Trace lying = Trace::from_leaves(rows.claim.trace_shape, rows.evidence.leaves);

  Record leaves = rows;
  leaves.evidence = leaves_evidence(lying);
  AuditReport report = audit(leaves);
  ASSERT_TRUE(report.place);
  EXPECT_EQ(report.place->layer, 2u);
  EXPECT_EQ(report.place->cell_layer(), 1u);
  EXPECT_EQ(report.place->position, 5u);
  EXPECT_FALSE(report.place->element);

  Record roots = rows;
  roots.evidence = roots_evidence(lying);
  report = audit(roots);
  ASSERT_TRUE(report.place);
  EXPECT_EQ(report.place->type, LeafType::kRow);
  EXPECT_EQ(report.place->layer, 2u);
  EXPECT_FALSE(report.place->position);

  Record none = rows;
  none.evidence = {};
  report = audit(none);
  EXPECT_EQ(report.verdict, Verdict::kMismatch);
  EXPECT_FALSE(report.place);
  EXPECT_FALSE(report.notes.empty());
}

// Cheats that keep the record well-formed. Each returns the record to audit.
struct Cheat {
  const char* name;
  std::function<void(Record&)> apply;
};

class Cheats : public ::testing::TestWithParam<Cheat> {};

TEST_P(Cheats, AreMismatches) {
  Record record = honest_record();
  GetParam().apply(record);
  const AuditReport report = audit(record);
  EXPECT_EQ(report.verdict, Verdict::kMismatch) << report_text(report, GetParam().name);
  EXPECT_FALSE(report.findings.empty());
}

void retell(Record& record) {
  std::string text;
  StreamDecoder decoder(*served().tokenizer, true);
  for (const std::uint32_t id : record.claim.emitted_ids) text += decoder.push(id);
  record.claim.text_digest = text_digest(record.claim.seed, text + decoder.flush());
}

INSTANTIATE_TEST_SUITE_P(
    All, Cheats,
    ::testing::Values(Cheat{"last_emitted_token_changed",
                            [](Record& r) {
                              r.claim.emitted_ids.back() = (r.claim.emitted_ids.back() + 1) % 2048;
                              if (r.claim.emitted_ids.back() <= 1) r.claim.emitted_ids.back() = 7;
                              retell(r);
                              commit_to_rows(r);
                            }},
                      Cheat{"prompt_token_changed",
                            [](Record& r) {
                              r.claim.prompt_ids[2] ^= 1;
                              commit_to_rows(r);
                            }},
                      Cheat{"seed_changed", [](Record& r) { r.claim.seed[0] ^= 1; }},
                      Cheat{"temperature_changed",
                            [](Record& r) { r.claim.sampling.temperature_bits = 0x40a00000u; }},
                      Cheat{"stop_tokens_of_its_own",
                            [](Record& r) {
                              r.claim.stop_ids = {1, r.claim.emitted_ids.back()};
                              std::sort(r.claim.stop_ids.begin(), r.claim.stop_ids.end());
                              r.claim.stop_reason = StopReason::kStopToken;
                              r.claim.max_tokens = 500;
                            }},
                      Cheat{"no_stop_tokens", [](Record& r) { r.claim.stop_ids.clear(); }},
                      Cheat{
                          "text_of_another_answer",
                          [](Record& r) { r.claim.text_digest = text_digest(r.claim.seed, "42"); }},
                      Cheat{"trace_root_of_nothing",
                            [](Record& r) {
                              r.claim.trace_root.bytes[31] ^= 1;
                              r.evidence = {};
                            }},
                      Cheat{"whole_key_value_prefix_zeroed",
                            [](Record& r) {
                              for (std::uint64_t at = 0; at < 4; ++at) {
                                const auto range = evidence_row_range(r.claim.trace_shape,
                                                                      LeafType::kKeyValue, 1, at);
                                std::memset(r.evidence.rows.data() + range->offset, 0,
                                            range->bytes);
                              }
                              commit_to_rows(r);
                            }}),
    [](const auto& param) { return param.param.name; });

TEST(Audit, AnotherModelsWeightsAreAMismatchThatNamesTheTensor) {
  const test::TempDir dir;
  const std::filesystem::path copy = dir.path() / "model";
  std::filesystem::copy(kModelDir, copy);
  std::filesystem::permissions(copy / "model.safetensors", std::filesystem::perms::owner_all);
  std::string bytes = test::read_file(copy / "model.safetensors");
  bytes[bytes.size() - 1] ^= 0x10;  // the last weight of the last tensor
  test::write_file(copy / "model.safetensors", bytes);

  const AuditModel tampered = AuditModel::load(copy.string());
  const std::unique_ptr<Backend> backend = make_backend("cpu", 1);
  const AuditReport report = audit_record(honest_record(), tampered, *backend, {});
  EXPECT_EQ(report.verdict, Verdict::kMismatch);
  EXPECT_THAT(report_text(report, "record"), ::testing::HasSubstr("model.norm.weight"));
  // The final norm feeds the head alone: the first difference is in the logits.
  ASSERT_TRUE(report.place);
  EXPECT_EQ(report.place->type, LeafType::kLogits);
}

TEST(Audit, ARecordAboutAnotherModelCannotBeJudged) {
  const AuditModel other = AuditModel::load(std::string(BW_TEST_DATA_DIR) + "/models/tiny-llama");
  const std::unique_ptr<Backend> backend = make_backend("cpu", 1);
  const AuditReport report = audit_record(honest_record(), other, *backend, {});
  EXPECT_EQ(report.verdict, Verdict::kCannotJudge);
  EXPECT_EQ(report.cells_checked, 0u);
  EXPECT_EQ(exit_code(report.verdict), ExitCode::kCannotJudge);
}

TEST(Audit, AnImpossibleShapeIsRefusedBeforeAnythingIsSizedByIt) {
  const auto verdict_of = [](const std::function<void(TraceShape&)>& change) {
    Record record = honest_record(EvidenceLevel::kNone);
    change(record.claim.trace_shape);
    try {
      const std::unique_ptr<Backend> backend = make_backend("cpu", 1);
      return audit_record(record, auditor(), *backend, {}).verdict;
    } catch (const Error&) {
      return Verdict::kMalformed;
    }
  };
  EXPECT_EQ(verdict_of([](TraceShape& shape) { shape.layers = 3; }), Verdict::kMismatch);
  EXPECT_EQ(verdict_of([](TraceShape& shape) { shape.layers = 60000; }), Verdict::kMismatch);
  EXPECT_EQ(verdict_of([](TraceShape& shape) { shape.hidden = 64; }), Verdict::kMismatch);
  EXPECT_EQ(verdict_of([](TraceShape& shape) { shape.kv_width = 1; }), Verdict::kMismatch);
  EXPECT_EQ(verdict_of([](TraceShape& shape) { shape.vocab = 4096; }), Verdict::kMismatch);
  EXPECT_EQ(verdict_of([](TraceShape& shape) { shape.row_dtype = Dtype::kBf16; }),
            Verdict::kMismatch);
  EXPECT_EQ(verdict_of([](TraceShape& shape) { shape.positions = 2000; }), Verdict::kMismatch);
}

TEST(Audit, WhatTheAuditorExpectsMustBeThere) {
  Record record = honest_record(EvidenceLevel::kLeaves);
  AuditOptions options;
  options.nonce = record.claim.seed;
  EXPECT_EQ(audit(record, "cpu", options).verdict, Verdict::kMatch);
  options.nonce = Bytes{9};
  EXPECT_EQ(audit(record, "cpu", options).verdict, Verdict::kMismatch);
  options.nonce.reset();

  const SigningKey key = SigningKey::generate("operator.example");
  options.operator_key = key.public_key();
  EXPECT_EQ(audit(record, "cpu", options).verdict, Verdict::kCannotJudge);
  record.sign(SigningKey::generate("operator.example"));  // the same name, another key
  EXPECT_EQ(audit(record, "cpu", options).verdict, Verdict::kCannotJudge);
  record.sign(key);
  EXPECT_EQ(audit(record, "cpu", options).verdict, Verdict::kMatch);
}

TEST(Audit, ReportsShowNoControlCharactersOfTheRecord) {
  Record record = honest_record(EvidenceLevel::kNone);
  record.provenance["backend"] = "\x1b[2J\nmatch  run.bwrec\nlog          entry 0 of x";
  record.claim.trace_root.bytes[0] ^= 1;
  const std::string text = report_text(audit(record), "name\nmatch  other");
  EXPECT_THAT(text, ::testing::StartsWith("mismatch  name match  other\n"));
  EXPECT_THAT(text, ::testing::Not(::testing::HasSubstr("\x1b")));
  EXPECT_THAT(text, ::testing::Not(::testing::HasSubstr("\nmatch")));
  EXPECT_THAT(text, ::testing::Not(::testing::HasSubstr("\nlog          entry")));
}

TEST(Audit, ProverChosenSeedIsNoted) {
  GenerationRequest request = sampled_request();
  request.seed_provenance = SeedProvenance::kProver;
  const std::unique_ptr<Backend> backend = make_backend("cpu", 1);
  const Record record =
      make_record(served(), run(request), EvidenceLevel::kLeaves, run_provenance(*backend));
  const AuditReport report = audit(record);
  EXPECT_EQ(report.verdict, Verdict::kMatch);
  ASSERT_FALSE(report.notes.empty());
  EXPECT_THAT(report.notes.front(), ::testing::HasSubstr("hidden data"));
}

class Receipts : public ::testing::Test {
 protected:
  void SetUp() override {
    key_.save(path("log.pem"));
    init_log(path("log"), key_);
  }
  std::string path(const std::string& name) const { return (dir_.path() / name).string(); }
  AuditReport audit_with(const Record& record, const std::optional<std::string>& receipt,
                         const PublicKey& key) const {
    AuditOptions options;
    options.log_key = key;
    options.receipt = receipt;
    return audit(record, "cpu", options);
  }
  test::TempDir dir_;
  SigningKey key_ = SigningKey::generate("log.example/test");
};

TEST_F(Receipts, ALoggedRecordMatches) {
  const Record record = honest_record(EvidenceLevel::kLeaves);
  const AppendResult logged = append_record(path("log"), path("log.pem"), record.digest());
  const AuditReport report = audit_with(record, logged.receipt, key_.public_key());
  EXPECT_EQ(report.verdict, Verdict::kMatch);
  EXPECT_EQ(report.log_state, AuditReport::LogState::kIncluded);
  EXPECT_EQ(report.log_index, 0u);
}

TEST_F(Receipts, NoReceiptOrAForeignKeyCannotBeJudged) {
  const Record record = honest_record(EvidenceLevel::kLeaves);
  EXPECT_EQ(audit_with(record, std::nullopt, key_.public_key()).verdict, Verdict::kCannotJudge);
  const AppendResult logged = append_record(path("log"), path("log.pem"), record.digest());
  const SigningKey other = SigningKey::generate("log.example/other");
  EXPECT_EQ(audit_with(record, logged.receipt, other.public_key()).verdict, Verdict::kCannotJudge);
}

TEST_F(Receipts, AReceiptForAnotherRecordIsAMismatch) {
  const Record first = honest_record(EvidenceLevel::kLeaves);
  const Record second = honest_record(EvidenceLevel::kLeaves);
  ASSERT_NE(first.digest(), second.digest());  // the nonce differs
  ASSERT_EQ(first.claim.digest(), second.claim.digest());
  const AppendResult logged = append_record(path("log"), path("log.pem"), first.digest());
  EXPECT_EQ(audit_with(second, logged.receipt, key_.public_key()).verdict, Verdict::kMismatch);
}

TEST_F(Receipts, ATamperedReceiptIsMalformed) {
  const Record record = honest_record(EvidenceLevel::kLeaves);
  AppendResult logged = append_record(path("log"), path("log.pem"), record.digest());
  const std::size_t at = logged.receipt.find("index 0");
  ASSERT_NE(at, std::string::npos);
  logged.receipt[at + 6] = '5';
  try {
    audit_with(record, logged.receipt, key_.public_key());
    FAIL() << "a tampered receipt was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kMalformed);
  }
}

}  // namespace
}  // namespace bitwitness
