// Mismatch proofs as a third party sees them: what is true is confirmed, what is not is refuted,
// and neither side can bend what it signed.
#include "verifier/recheck.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "attest/base/error.h"
#include "tests/verifier/test_prover.h"
#include "verifier/audit.h"
#include "verifier/live_audit.h"
#include "verifier/report.h"

namespace bitwitness {
namespace {

using test::KeptRun;
using test::TestProver;
using ::testing::HasSubstr;

const std::string kModelDir = std::string(BW_TEST_DATA_DIR) + "/models/tiny-qwen3";
const std::string kOtherDir = std::string(BW_TEST_DATA_DIR) + "/models/tiny-llama";

const ServedModel& served() {
  static const ServedModel model = ServedModel::load(kModelDir);
  return model;
}
Backend& backend() {
  static const std::unique_ptr<Backend> made = make_backend("cpu", 2);
  return *made;
}
const SigningKey& verifier_key() {
  static const SigningKey key = SigningKey::generate("auditor.example");
  return key;
}

const KeptRun& honest_run() {
  static const KeptRun run = [] {
    GenerationRequest request;
    request.prompt_ids = encode_prompt(served(), "Second Citizen:");
    request.max_tokens = 6;
    request.stop_ids = default_stop_ids(served());
    return test::run_model(served(), request);
  }();
  return run;
}

// A prover whose lie is one bit of a committed element, and the proof that an audit makes of it.
struct Caught {
  Caught(LeafType type, std::uint32_t layer, std::uint64_t position, std::uint64_t element,
         bool with_operator = true)
      : prover(served(), lying(type, layer, position, element), with_operator) {
    LiveAuditOptions options(verifier_key());
    options.plan.cells = options.plan.ends = 1'000'000;
    options.log_key = prover.log_key.public_key();
    LiveAudit judged =
        live_audit(prover.record, OpenedModel::open(kModelDir), backend(), prover, options);
    EXPECT_EQ(judged.report.verdict, Verdict::kMismatch);
    place = judged.report.place.value();
    proof = std::move(judged.proof).value();
  }
  static KeptRun lying(LeafType type, std::uint32_t layer, std::uint64_t position,
                       std::uint64_t element) {
    KeptRun run = honest_run();
    run.flip(type, layer, position, element);
    run.commit();
    return run;
  }
  RecheckOptions with_log() const {
    RecheckOptions options;
    options.log_key = prover.log_key.public_key();
    return options;
  }
  TestProver prover;
  MismatchPlace place;
  MismatchProof proof;
};

// As a file would come: through its bytes.
RecheckReport judge(const MismatchProof& proof, const RecheckOptions& options = {},
                    const std::string& dir = kModelDir) {
  const MismatchProof received = MismatchProof::parse(proof.serialize(), "proof");
  return recheck(received, dir, backend(), options, "proof");
}

void expect_malformed(const std::string& part, const std::function<void()>& work) {
  try {
    work();
    ADD_FAILURE() << "accepted where '" << part << "' was expected";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kMalformed) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(Recheck, EveryKindIsConfirmedOnEveryBackend) {
  const Caught caught[] = {
      {LeafType::kRow, 0, 4, 9},
      {LeafType::kRow, 2, 5, 77},
      {LeafType::kKeyValue, 0, 3, 0},
      {LeafType::kKeyValue, 3, 2, 200},
      {LeafType::kLogits, 0, honest_run().claim.trace_shape.positions - 1, 5},
  };
  for (const Caught& one : caught) {
    for (const std::string& device : available_backends()) {
      const std::unique_ptr<Backend> own = make_backend(device, 2);
      const RecheckReport report = recheck(one.proof, kModelDir, *own, one.with_log(), "proof");
      EXPECT_EQ(report.verdict, Verdict::kMismatch) << recheck_text(report, "proof");
      EXPECT_TRUE(report.logged);
      ASSERT_TRUE(report.place);
      EXPECT_EQ(report.place->text(), one.place.text());
      EXPECT_EQ(report.accused, one.prover.operator_key->public_key().vkey());
      EXPECT_EQ(report.accuser, verifier_key().public_key().vkey());
    }
    // Without the log's key as well: the operator signed.
    const RecheckReport report = judge(one.proof);
    EXPECT_EQ(report.verdict, Verdict::kMismatch);
    EXPECT_FALSE(report.logged);
    EXPECT_THAT(recheck_text(report, "proof"), HasSubstr("--log-key"));
    EXPECT_THAT(recheck_json(report, "proof"), HasSubstr("\"computed_bits\""));
  }
}

TEST(Recheck, ASampledTokenOfItsOwnIsConfirmed) {
  KeptRun run = honest_run();
  std::uint32_t& last = run.claim.emitted_ids.back();
  last = last == 7 ? 8 : 7;
  StreamDecoder decoder(*served().tokenizer, true);
  std::string text;
  for (const std::uint32_t id : run.claim.emitted_ids) text += decoder.push(id);
  run.claim.text_digest = text_digest(run.claim.seed, text + decoder.flush());
  run.commit();
  TestProver prover(served(), run);
  LiveAuditOptions options(verifier_key());
  options.plan.cells = 1;
  options.plan.ends = 1'000'000;
  options.log_key = prover.log_key.public_key();
  const LiveAudit judged =
      live_audit(prover.record, OpenedModel::open(kModelDir), backend(), prover, options);
  ASSERT_TRUE(judged.proof) << report_text(judged.report, "record");
  EXPECT_EQ(judged.proof->finding.op, "sampler");
  const RecheckReport report = judge(*judged.proof);
  EXPECT_EQ(report.verdict, Verdict::kMismatch) << recheck_text(report, "proof");
  EXPECT_THAT(report.place->text(), HasSubstr("sampler"));
}

TEST(Recheck, AnAccusationThatDoesNotHoldIsRefuted) {
  // The accuser signs a cell that is good.
  const Caught caught(LeafType::kRow, 2, 5, 77);
  TestProver honest(served(), honest_run());
  LiveAuditOptions options(verifier_key());
  options.plan = LiveAuditOptions(verifier_key()).plan;
  options.plan.level = AuditLevel::kLayer;
  options.log_key = honest.log_key.public_key();
  const LiveAudit judged =
      live_audit(honest.record, OpenedModel::open(kModelDir), backend(), honest, options);
  ASSERT_EQ(judged.report.verdict, Verdict::kMatch);
  MismatchProof proof = caught.proof;
  Record bare = honest.record;
  bare.evidence = {};
  proof.record = bare.serialize();
  proof.challenge = honest.challenges.at(0);
  const Challenge challenge = Challenge::parse(proof.challenge, "challenge");
  proof.commitment_receipt = honest.receipts(challenge.commitment).commitment;
  proof.header = honest.header(challenge);
  proof.layer = 1;
  proof.position = 3;
  proof.prefix = 4;
  proof.opening = honest.layer({1, {3}});
  proof.operators.clear();
  proof.receipt = honest.receipts(challenge.commitment).record;
  proof.sign(verifier_key());
  RecheckOptions with_log;
  with_log.log_key = honest.log_key.public_key();
  const RecheckReport report = judge(proof, with_log);
  EXPECT_EQ(report.verdict, Verdict::kMatch) << recheck_text(report, "proof");
  EXPECT_THAT(recheck_text(report, "proof"), HasSubstr("the accusation does not hold"));
  EXPECT_EQ(exit_code(report.verdict), ExitCode::kOk);
}

TEST(Recheck, AFindingOtherThanTheOneFoundIsMalformed) {
  const Caught caught(LeafType::kKeyValue, 1, 4, 3);
  const auto misstated = [&](const std::function<void(MismatchFinding&)>& change) {
    MismatchProof proof = caught.proof;
    change(proof.finding);
    proof.sign(verifier_key());
    expect_malformed("misstates", [&] { judge(proof); });
  };
  misstated([](MismatchFinding& f) { f.op = "q_proj"; });
  misstated([](MismatchFinding& f) { f.element = 4; });
  misstated([](MismatchFinding& f) { f.claimed_bits ^= 1; });
  misstated([](MismatchFinding& f) { f.computed_bits ^= 0x80000000U; });
  misstated([](MismatchFinding& f) {
    f.element.reset();
    f.claimed_bits = f.computed_bits = 0;
  });
}

// Sections that are somebody else's, or altered and the whole signed again by the accuser.
TEST(Recheck, AlteredSectionsAreMalformedThoughSignedAgain) {
  const Caught caught(LeafType::kRow, 2, 5, 77);
  ASSERT_FALSE(caught.proof.operators.empty());
  const auto sections = {&MismatchProof::record, &MismatchProof::challenge, &MismatchProof::header,
                         &MismatchProof::opening, &MismatchProof::operators};
  for (const auto section : sections) {
    const std::size_t size = (caught.proof.*section).size();
    for (std::size_t at = 0; at < size; at += 1 + size / 29) {
      MismatchProof proof = caught.proof;
      (proof.*section)[at] ^= 0x10;
      proof.sign(verifier_key());
      expect_malformed("proof", [&] { judge(proof, caught.with_log()); });
    }
  }
  MismatchProof proof = caught.proof;
  proof.receipt[proof.receipt.size() / 2] ^= 1;
  proof.sign(verifier_key());
  expect_malformed("proof", [&] { judge(proof, caught.with_log()); });
  proof.receipt.clear();
  proof.sign(verifier_key());
  expect_malformed("without the receipt", [&] { judge(proof, caught.with_log()); });
  for (std::size_t at = 0; at < caught.proof.commitment_receipt.size(); at += 7) {
    proof = caught.proof;
    proof.commitment_receipt[at] ^= 1;
    proof.sign(verifier_key());
    // The signature of the checkpoint is looked at in the challenge, not here.
    try {
      EXPECT_EQ(judge(proof, caught.with_log()).verdict, Verdict::kMismatch) << at;
      const auto body = [](const std::string& receipt) {
        const TlogProof parsed = TlogProof::parse(receipt, "receipt");
        return parse_checkpoint(parsed.checkpoint_note, "receipt").body();
      };
      EXPECT_EQ(body(proof.commitment_receipt), body(caught.proof.commitment_receipt)) << at;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kMalformed) << error.what();
    }
  }
}

// Verifier and prover could make up a head between them; only the log's key tells.
TEST(Recheck, ASeedFromAHeadThatTheLogDidNotSignCannotBeJudged) {
  Caught caught(LeafType::kRow, 2, 5, 77);
  MismatchProof proof = caught.proof;
  Challenge challenge = Challenge::parse(proof.challenge, "challenge");
  challenge.checkpoint_note =
      sign_checkpoint(challenge.checkpoint("challenge"), SigningKey::generate("log.example/test"));
  challenge.sign(verifier_key());
  proof.challenge = challenge.serialize();
  proof.header = caught.prover.header(challenge);
  proof.operators.clear();
  proof.sign(verifier_key());
  RecheckReport report = judge(proof, caught.with_log());
  EXPECT_EQ(report.verdict, Verdict::kCannotJudge) << recheck_text(report, "proof");
  report = judge(proof);
  EXPECT_EQ(report.verdict, Verdict::kMismatch) << recheck_text(report, "proof");
  EXPECT_THAT(recheck_text(report, "proof"), HasSubstr("that it signed the checkpoint"));
}

// The log has grown since the commitment: a verifier that waited could have chosen among its heads.
TEST(Recheck, ASeedFromALaterHeadIsMalformed) {
  Caught caught(LeafType::kRow, 2, 5, 77);
  MismatchProof proof = caught.proof;
  Challenge challenge = Challenge::parse(proof.challenge, "challenge");
  TestProver& prover = caught.prover;
  LogWriter(prover.log_dir(), prover.log_key).append({log_entry_for_record(Digest{})});
  const LogReader log(prover.log_dir());
  proof.commitment_receipt = log.receipt(1);
  proof.receipt = log.receipt(0);
  challenge.checkpoint_note = log.checkpoint_note();
  challenge.sign(verifier_key());
  proof.challenge = challenge.serialize();
  proof.header = prover.header(challenge);
  proof.operators.clear();
  proof.sign(verifier_key());
  expect_malformed("the one that ends with it", [&] { judge(proof, caught.with_log()); });
  expect_malformed("the one that ends with it", [&] { judge(proof); });
}

TEST(Recheck, EveryByteIsUnderTheAccusersSignature) {
  const Caught caught(LeafType::kRow, 0, 2, 1);
  const Bytes good = caught.proof.serialize();
  for (std::size_t at = 0; at < good.size(); at += 1 + good.size() / 211) {
    Bytes bad = good;
    bad[at] ^= 0x04;
    EXPECT_THROW(MismatchProof::parse(bad, "proof"), Error) << at;
  }
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{20}, good.size() / 2, good.size() - 1}) {
    EXPECT_THROW(MismatchProof::parse(ByteView(good).first(size), "proof"), Error) << size;
  }
}

TEST(Recheck, OnlyWhatTheChallengeDrewCounts) {
  // The challenge drew layer 0 alone; the accuser shows a cell of layer 1 that the prover opened
  // for somebody else.
  TestProver prover(served(), Caught::lying(LeafType::kRow, 2, 5, 77));
  LiveAuditOptions options(verifier_key());
  options.plan.level = AuditLevel::kLayer;
  options.plan.layers = LayerChoice::parse("0");
  options.log_key = prover.log_key.public_key();
  const LiveAudit judged =
      live_audit(prover.record, OpenedModel::open(kModelDir), backend(), prover, options);
  ASSERT_EQ(judged.report.verdict, Verdict::kMatch);
  const Caught caught(LeafType::kRow, 2, 5, 77);
  MismatchProof proof = caught.proof;
  Record bare = prover.record;
  bare.evidence = {};
  proof.record = bare.serialize();
  proof.challenge = prover.challenges.at(0);
  const Challenge challenge = Challenge::parse(proof.challenge, "challenge");
  proof.commitment_receipt = prover.receipts(challenge.commitment).commitment;
  proof.header = prover.header(challenge);
  proof.opening = prover.layer({1, {5}});
  proof.prefix = 6;
  proof.operators.clear();
  proof.receipt = prover.receipts(challenge.commitment).record;
  proof.sign(verifier_key());
  expect_malformed("did not draw", [&] { judge(proof); });
}

TEST(Recheck, OtherPartiesCannotBeJudged) {
  const Caught caught(LeafType::kRow, 2, 5, 77);
  const auto cannot = [](const std::string& part, const RecheckReport& report) {
    EXPECT_EQ(report.verdict, Verdict::kCannotJudge) << recheck_text(report, "proof");
    EXPECT_THAT(recheck_text(report, "proof"), HasSubstr(part));
  };
  RecheckOptions options;
  options.log_key = SigningKey::generate("log.example/test").public_key();
  cannot("not by the given log key", judge(caught.proof, options));
  options = {};
  options.operator_key = SigningKey::generate("operator.example/test").public_key();
  cannot("operator key", judge(caught.proof, options));
  options.operator_key = caught.prover.operator_key->public_key();
  const RecheckReport vouched = judge(caught.proof, options);
  EXPECT_EQ(vouched.verdict, Verdict::kMismatch);
  EXPECT_THAT(recheck_text(vouched, "proof"), ::testing::Not(HasSubstr("nobody vouched")));
  EXPECT_THAT(recheck_text(judge(caught.proof), "proof"),
              HasSubstr("nobody vouched that the key shown is operator.example/test's own"));
  cannot("another model", judge(caught.proof, {}, kOtherDir));

  // Nobody signed the record: the log answers for the opening, so its key is needed.
  const Caught unsigned_one(LeafType::kRow, 2, 5, 77, /*with_operator=*/false);
  cannot("nobody can be held", judge(unsigned_one.proof));
  EXPECT_EQ(judge(unsigned_one.proof, unsigned_one.with_log()).verdict, Verdict::kMismatch);
}

TEST(Recheck, AModelWithOtherWeightsCannotJudge) {
  const Caught caught(LeafType::kRow, 2, 5, 77);  // layer 1
  const test::TempDir temp;
  const std::filesystem::path dir = temp.path() / "model";
  std::filesystem::copy(kModelDir, dir);
  std::filesystem::permissions(dir / "model.safetensors", std::filesystem::perms::owner_all);
  const Model model = Model::load(kModelDir);
  const std::string good = test::read_file(dir / "model.safetensors");
  const auto flipped = [&](const std::string& tensor) {
    for (const TensorView& view : model.tensors()) {
      if (view.name != tensor) continue;
      const std::string_view bytes(reinterpret_cast<const char*>(view.data), view.bytes);
      std::string bad = good;
      bad[bad.find(bytes)] ^= 0x40;
      test::write_file(dir / "model.safetensors", bad);
      return;
    }
    ADD_FAILURE() << "no tensor " << tensor;
  };
  flipped("model.layers.1.mlp.up_proj.weight");
  const RecheckReport report = judge(caught.proof, {}, dir.string());
  EXPECT_EQ(report.verdict, Verdict::kCannotJudge);
  EXPECT_THAT(recheck_text(report, "proof"), HasSubstr("model.layers.1.mlp.up_proj.weight"));
  // A weight that the cell does not use is not looked at.
  flipped("model.layers.2.mlp.up_proj.weight");
  EXPECT_EQ(judge(caught.proof, {}, dir.string()).verdict, Verdict::kMismatch);
}

// ---- Proofs of whole records.

MismatchProof record_proof(const Record& record) {
  MismatchProof proof;
  proof.record = record.serialize();
  proof.finding.op = "record";
  proof.backend = "test";
  proof.sign(verifier_key());
  return proof;
}

TEST(RecheckRecord, ConfirmedAndRefuted) {
  const TestProver honest(served(), honest_run());
  RecheckReport report = judge(record_proof(honest.record));
  EXPECT_EQ(report.verdict, Verdict::kMatch);
  EXPECT_THAT(recheck_text(report, "proof"), HasSubstr("the accusation does not hold"));

  TestProver lying(served(), Caught::lying(LeafType::kRow, 2, 5, 77));
  lying.record.evidence = rows_evidence(*lying.run.trace, lying.run.rows);
  MismatchProof proof = record_proof(lying.record);
  report = judge(proof);
  EXPECT_EQ(report.verdict, Verdict::kMismatch) << recheck_text(report, "proof");
  ASSERT_TRUE(report.place);
  EXPECT_EQ(report.place->element, 77U);

  proof.finding.element = 77;
  proof.finding.claimed_bits = *report.place->claimed_bits;
  proof.finding.computed_bits = *report.place->computed_bits;
  proof.sign(verifier_key());
  EXPECT_EQ(judge(proof).verdict, Verdict::kMismatch);
  proof.finding.element = 78;
  proof.sign(verifier_key());
  expect_malformed("misstates", [&] { judge(proof); });

  EXPECT_EQ(judge(record_proof(lying.record), {}, kOtherDir).verdict, Verdict::kCannotJudge);
}

TEST(RecheckRecord, AReceiptIsCheckedWhereThereIsOne) {
  TestProver lying(served(), Caught::lying(LeafType::kRow, 2, 5, 77));
  MismatchProof proof = record_proof(lying.record);
  RecheckOptions options;
  options.log_key = lying.log_key.public_key();
  // Who asks for the log is not told less than that.
  RecheckReport report = judge(proof, options);
  EXPECT_EQ(report.verdict, Verdict::kCannotJudge);
  EXPECT_FALSE(report.logged);
  EXPECT_THAT(recheck_text(report, "proof"), HasSubstr("no receipt"));
  proof.receipt = LogReader(lying.log_dir()).receipt(0);
  proof.sign(verifier_key());
  report = judge(proof, options);
  EXPECT_EQ(report.verdict, Verdict::kMismatch);
  EXPECT_TRUE(report.logged);
}

// Anybody can write such a record, and say that it is another's.
TEST(RecheckRecord, ARecordThatNobodyAnswersForCannotBeJudged) {
  TestProver lying(served(), Caught::lying(LeafType::kRow, 2, 5, 77), /*with_operator=*/false);
  MismatchProof proof = record_proof(lying.record);
  const auto cannot = [&](const std::string& part, const RecheckOptions& options) {
    const RecheckReport report = judge(proof, options);
    EXPECT_EQ(report.verdict, Verdict::kCannotJudge) << recheck_text(report, "proof");
    EXPECT_THAT(recheck_text(report, "proof"), HasSubstr(part));
  };
  RecheckOptions options;
  options.log_key = lying.log_key.public_key();
  cannot("nobody can be held", {});
  cannot("no receipt", options);
  proof.receipt = LogReader(lying.log_dir()).receipt(0);
  proof.sign(verifier_key());
  cannot("nobody can be held", {});
  RecheckReport report = judge(proof, options);
  EXPECT_EQ(report.verdict, Verdict::kMismatch);
  EXPECT_TRUE(report.logged);
  EXPECT_EQ(report.accused, lying.log_key.public_key().vkey());
}

}  // namespace
}  // namespace bitwitness
