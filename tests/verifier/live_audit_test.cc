// Live audits without a wire: an honest prover matches at every level; whatever breaks the exchange
// gets the verdict that the protocol gives it, and nothing is ever drawn twice.
#include "verifier/live_audit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "attest/base/error.h"
#include "attest/base/sha256.h"
#include "tests/verifier/test_prover.h"
#include "verifier/cell_judge.h"
#include "verifier/coverage.h"
#include "verifier/opening_receiver.h"
#include "verifier/report.h"

namespace bitwitness {
namespace {

using test::KeptRun;
using test::TestProver;
using ::testing::HasSubstr;

const std::string kModelDir = std::string(BW_TEST_DATA_DIR) + "/models/tiny-qwen3";

const ServedModel& served() {
  static const ServedModel model = ServedModel::load(kModelDir);
  return model;
}
const OpenedModel& auditor() {
  static const OpenedModel model = OpenedModel::open(kModelDir);
  return model;
}
Backend& backend() {
  static const std::unique_ptr<Backend> made = make_backend("cpu", 2);
  return *made;
}

const KeptRun& honest_run() {
  static const KeptRun run = [] {
    GenerationRequest request;
    request.prompt_ids = encode_prompt(served(), "First Citizen:\nBefore we proceed");
    request.max_tokens = 12;
    request.sampling = {0.8f, 40, 0.95f};
    request.seed = {1, 2, 3, 4};
    request.seed_provenance = SeedProvenance::kNonce;
    request.stop_ids = default_stop_ids(served());
    return test::run_model(served(), request);
  }();
  return run;
}

AuditPlan plan_of(const std::string& layers, std::uint64_t cells, std::uint64_t ends,
                  AuditLevel level = AuditLevel::kCell) {
  AuditPlan plan;
  plan.level = level;
  plan.layers = LayerChoice::parse(layers);
  plan.cells = cells;
  plan.ends = ends;
  return plan;
}
// Everything that there is to open, cell by cell.
AuditPlan everything() {
  return plan_of("all", 1'000'000, 1'000'000);
}

LiveAuditOptions options_for(const TestProver& prover, const AuditPlan& plan) {
  static const SigningKey key = SigningKey::generate("auditor.example");
  LiveAuditOptions options(key);
  options.plan = plan;
  options.log_key = prover.log_key.public_key();
  options.retry_wait = std::chrono::milliseconds(0);
  return options;
}

LiveAudit audit(TestProver& prover, const AuditPlan& plan = plan_of("all", 8, 4)) {
  return live_audit(prover.record, auditor(), backend(), prover, options_for(prover, plan));
}

void expect(Verdict verdict, const std::string& part, const LiveAudit& judged) {
  const std::string text = report_text(judged.report, "record");
  EXPECT_EQ(judged.report.verdict, verdict) << text;
  EXPECT_THAT(text, HasSubstr(part));
}

TEST(LiveAudit, AnHonestProverMatchesAtEveryLevel) {
  const AuditPlan plans[] = {plan_of("all", 8, 4),
                             plan_of("0,3", 5, 0),
                             plan_of("random:2", 6, 3),
                             plan_of("all", 0, 5, AuditLevel::kLayer),
                             plan_of("random:1", 0, 0, AuditLevel::kLayer),
                             everything()};
  for (const AuditPlan& plan : plans) {
    TestProver prover(served(), honest_run());
    const LiveAudit judged = audit(prover, plan);
    expect(Verdict::kMatch, "match", judged);
    EXPECT_FALSE(judged.proof);
    const AuditReport& report = judged.report;
    const AuditSample sample =
        draw_sample(plan, prover.run.claim.trace_shape, report.live->seed.value());
    EXPECT_EQ(report.cells_checked, sample.cell_count());
    EXPECT_EQ(report.ends_checked, sample.embeddings.size() + sample.heads.size());
    EXPECT_EQ(report.log_state, AuditReport::LogState::kIncluded);
    EXPECT_EQ(report.log_index, 0U);
    EXPECT_EQ(report.checkpoint->size, 2U);  // record and commitment
    EXPECT_GT(report.live->opened_bytes, 0U);
  }
}

TEST(LiveAudit, EveryBackendJudgesAlike) {
  TestProver prover(served(), honest_run());
  for (const std::string& device : available_backends()) {
    const std::unique_ptr<Backend> judging = make_backend(device, 2);
    const LiveAudit judged = live_audit(prover.record, auditor(), *judging, prover,
                                        options_for(prover, plan_of("all", 30, 10)));
    expect(Verdict::kMatch, device, judged);
  }
}

TEST(LiveAudit, CheckingEverythingLeavesNothingOpen) {
  TestProver prover(served(), honest_run());
  const AuditReport report = audit(prover, everything()).report;
  EXPECT_EQ(report.cells_checked, report.cells);
  EXPECT_EQ(report.ends_checked, report.ends);
  EXPECT_EQ(report.tokens_checked, report.tokens);
  EXPECT_EQ(report.live->bad_cells_at_most, 0U);
  EXPECT_EQ(report.live->bad_embeddings_at_most, 0U);
  EXPECT_EQ(report.live->bad_heads_at_most, 0U);
}

TEST(LiveAudit, WhatWasNotLookedAtIsSaid) {
  TestProver prover(served(), honest_run());
  expect(Verdict::kMatch, "no token, embedding or head was looked at",
         audit(prover, plan_of("all", 4, 0)));
  EXPECT_THAT(report_text(audit(prover, plan_of("all", 4, 1)).report, "record"),
              ::testing::Not(HasSubstr("was looked at")));

  // One cell of three layers: the layers that it was drawn from are named, too.
  const LiveAudit judged = audit(prover, plan_of("random:3", 1, 0));
  const LiveCoverage& live = *judged.report.live;
  ASSERT_EQ(live.chosen_layers.size(), 3U);
  ASSERT_EQ(live.layers.size(), 1U);
  EXPECT_EQ(live.population, 3 * prover.run.claim.trace_shape.positions);
  expect(Verdict::kMatch, " (of the chosen ", judged);
  for (const std::uint32_t layer : live.chosen_layers) {
    EXPECT_THAT(report_json(judged.report, "record"), HasSubstr(std::to_string(layer)));
  }
}

TEST(LiveAudit, OnlyWhatWasAllCheckedIsSaidToBeGood) {
  AuditReport report;
  report.verdict = Verdict::kMatch;
  report.cells = 200;
  report.ends = 30;
  report.tokens = 10;
  LiveCoverage& live = report.live.emplace();
  live.seed.emplace();
  live.population = 200;
  live.all_layers = 4;
  live.embeddings_checked = 20;
  live.heads_checked = 10;
  live.bad_cells_at_most = live.bad_embeddings_at_most = live.bad_heads_at_most = 0;
  report.cells_checked = 200;
  std::string text = report_text(report, "record");
  EXPECT_THAT(text, HasSubstr("none of the 200 cells is bad"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("confidence")));
  report.cells_checked = 199;
  ASSERT_EQ(bad_at_most(200, 199), 0U);
  text = report_text(report, "record");
  EXPECT_THAT(text, HasSubstr("at most 0 of 200 cells"));
  EXPECT_THAT(text, HasSubstr("none of the 20 embeddings is bad; none of the 10 heads is bad"));
  EXPECT_THAT(text, HasSubstr("99 % confidence"));
}

TEST(LiveAudit, TheLogAnswersForRecordsThatNobodySigned) {
  TestProver prover(served(), honest_run(), /*with_operator=*/false);
  expect(Verdict::kMatch, "none by an operator", audit(prover));
}

// One bit of one committed element, everything above it hashed and signed afresh.
struct Lie {
  LeafType type;
  std::uint32_t leaf_layer;
  std::uint64_t position;
  std::uint64_t element;
  const char* op;
  std::uint64_t place_element;
};
class OneBitOpened : public ::testing::TestWithParam<Lie> {};

TEST_P(OneBitOpened, IsFoundInItsOperator) {
  const Lie& lie = GetParam();
  KeptRun run = honest_run();
  run.flip(lie.type, lie.leaf_layer, lie.position, lie.element);
  run.commit();
  TestProver prover(served(), run);
  const LiveAudit judged = audit(prover, everything());
  expect(Verdict::kMismatch, lie.op, judged);
  ASSERT_TRUE(judged.report.place);
  const MismatchPlace& place = *judged.report.place;
  EXPECT_EQ(place.type, lie.type);
  EXPECT_EQ(place.layer, lie.leaf_layer);
  EXPECT_EQ(place.position, lie.position);
  EXPECT_EQ(place.op, lie.op);
  EXPECT_EQ(place.element, lie.place_element);
  EXPECT_EQ(*place.claimed_bits ^ *place.computed_bits, 1U);
  ASSERT_TRUE(judged.proof);
  EXPECT_EQ(judged.proof->finding.op, lie.op);
  EXPECT_EQ(MismatchProof::parse(judged.proof->serialize(), "proof").verifier.key.name,
            "auditor.example");
}

INSTANTIATE_TEST_SUITE_P(Places, OneBitOpened,
                         ::testing::Values(Lie{LeafType::kRow, 0, 4, 9, "embedding", 9},
                                           Lie{LeafType::kRow, 2, 5, 77, "mlp_residual", 77},
                                           Lie{LeafType::kRow, 4, 19, 127, "mlp_residual", 127},
                                           Lie{LeafType::kKeyValue, 0, 3, 0, "k_rope", 0},
                                           Lie{LeafType::kKeyValue, 3, 11, 255, "v_proj", 127},
                                           Lie{LeafType::kLogits, 0, 19, 2047, "lm_head", 2047}));

// ---- The sink: what does not belong is refused before a byte of it is kept.

class Framing : public ::testing::Test {
 protected:
  class Hooked : public TestProver {
   public:
    using TestProver::TestProver;
    std::function<void(const Challenge&, const AuditSample&, OpeningSink&)> lie;
    void send_opening(const Challenge& challenge, const AuditSample& sample,
                      OpeningSink& sink) override {
      lie(challenge, sample, sink);
    }
    void honestly(const Challenge& challenge, const AuditSample& sample, OpeningSink& sink) {
      TestProver::send_opening(challenge, sample, sink);
    }
  };
  using Kind = OpeningPartKind;

  void expect_malformed(
      const std::string& part,
      std::function<void(const Challenge&, const AuditSample&, OpeningSink&)> lie) {
    prover.lie = std::move(lie);
    const std::size_t before = prover.challenges.size();
    expect(Verdict::kMalformed, part, audit(prover));
    EXPECT_EQ(prover.challenges.size(), before + 1) << "what is malformed is not asked for again";
  }
  Hooked prover{served(), honest_run()};
};

TEST_F(Framing, WrongStreamsAreMalformed) {
  expect_malformed("ended before the header", [](auto&, auto&, auto&) {});
  expect_malformed("ended before the ends", [&](auto& challenge, auto&, auto& sink) {
    TestProver::send(sink, Kind::kHeader, 0, prover.header(challenge));
  });
  expect_malformed("data without a part", [](auto&, auto&, auto& sink) { sink.data(Bytes(1)); });
  expect_malformed("the ends where the header belongs", [&](auto&, auto& sample, auto& sink) {
    TestProver::send(sink, Kind::kEnds, 0, prover.ends(sample));
  });
  expect_malformed("operators where the header",
                   [](auto&, auto&, auto& sink) { sink.part(Kind::kOperators, 0, 10); });
  expect_malformed("an unknown part where",
                   [](auto&, auto&, auto& sink) { sink.part(static_cast<Kind>(77), 0, 10); });
  expect_malformed("announced with 10000000000 bytes",
                   [](auto&, auto&, auto& sink) { sink.part(Kind::kHeader, 0, 10'000'000'000); });
  expect_malformed("announced with 0 bytes",
                   [](auto&, auto&, auto& sink) { sink.part(Kind::kHeader, 0, 0); });
  expect_malformed("after 10 of", [&](auto& challenge, auto& sample, auto& sink) {
    const Bytes header = prover.header(challenge);
    sink.part(Kind::kHeader, 0, header.size());
    sink.data(ByteView(header).first(10));
    TestProver::send(sink, Kind::kEnds, 0, prover.ends(sample));
  });
  expect_malformed("more bytes in the header", [&](auto& challenge, auto&, auto& sink) {
    Bytes header = prover.header(challenge);
    header.push_back(0);
    TestProver::send(sink, Kind::kHeader, 0, header, header.size() - 1);
  });
  expect_malformed("a chunk of 0 bytes", [&](auto& challenge, auto&, auto& sink) {
    sink.part(Kind::kHeader, 0, prover.header(challenge).size());
    sink.data({});
  });
  expect_malformed("a chunk of 262145 bytes", [&](auto& challenge, auto&, auto& sink) {
    sink.part(Kind::kHeader, 0, prover.header(challenge).size());
    sink.data(Bytes(262'145));
  });
  expect_malformed("after everything that was asked for",
                   [&](auto& challenge, auto& sample, auto& sink) {
                     prover.honestly(challenge, sample, sink);
                     sink.part(Kind::kLayer, 3, 1);
                   });
  expect_malformed("data without a part", [&](auto& challenge, auto& sample, auto& sink) {
    prover.honestly(challenge, sample, sink);
    sink.data(Bytes(1));
  });
}

TEST_F(Framing, LayersComeAsDrawn) {
  const auto with_layers = [&](const Challenge& challenge, const AuditSample& sample,
                               OpeningSink& sink, const std::vector<std::size_t>& order) {
    TestProver::send(sink, Kind::kHeader, 0, prover.header(challenge));
    if (!sample.embeddings.empty() || !sample.heads.empty()) {
      TestProver::send(sink, Kind::kEnds, 0, prover.ends(sample));
    }
    for (const std::size_t i : order) {
      const LayerCells& cells = sample.layers.at(i);
      TestProver::send(sink, Kind::kLayer, cells.layer, prover.layer(cells));
    }
  };
  const auto two = plan_of("0,2", 0, 0, AuditLevel::kLayer);
  const auto run = [&](const std::vector<std::size_t>& order) {
    prover.lie = [&, order](auto& challenge, auto& sample, auto& sink) {
      with_layers(challenge, sample, sink, order);
    };
    return audit(prover, two);
  };
  expect(Verdict::kMatch, "layers 0, 2", run({0, 1}));
  expect(Verdict::kMalformed, "the part of layer 2 where the part of layer 0", run({1, 0}));
  expect(Verdict::kMalformed, "the part of layer 0 where the part of layer 2", run({0, 0}));
  expect(Verdict::kMalformed, "ended before the part of layer 2", run({0}));
}

TEST_F(Framing, WrongBytesAreMalformed) {
  const auto flipped = [](Bytes bytes, std::size_t at) {
    bytes.at(at) ^= 1;
    return bytes;
  };
  for (const std::size_t at : {std::size_t{0}, std::size_t{30}, std::size_t{100}}) {
    expect_malformed("header", [&](auto& challenge, auto&, auto& sink) {
      TestProver::send(sink, Kind::kHeader, 0, flipped(prover.header(challenge), at));
    });
  }
  expect_malformed("ends", [&](auto& challenge, auto& sample, auto& sink) {
    TestProver::send(sink, Kind::kHeader, 0, prover.header(challenge));
    TestProver::send(sink, Kind::kEnds, 0, flipped(prover.ends(sample), 7));
  });
  expect_malformed("layer", [&](auto& challenge, auto& sample, auto& sink) {
    TestProver::send(sink, Kind::kHeader, 0, prover.header(challenge));
    if (!sample.embeddings.empty() || !sample.heads.empty()) {
      TestProver::send(sink, Kind::kEnds, 0, prover.ends(sample));
    }
    const LayerCells& cells = sample.layers.front();
    TestProver::send(sink, Kind::kLayer, cells.layer, flipped(prover.layer(cells), 1));
  });
}

TEST_F(Framing, AnotherSignerIsMalformed) {
  prover.lie = [&](auto& challenge, auto& sample, auto& sink) {
    prover.honestly(challenge, sample, sink);
  };
  expect(Verdict::kMatch, "match", audit(prover));
  prover.operator_key = SigningKey::generate("operator.example/test");  // another key, same name
  expect(Verdict::kMalformed, "the one to answer for the record", audit(prover));
}

TEST_F(Framing, ChunksMayBeOfAnySize) {
  prover.lie = [&](auto& challenge, auto& sample, auto& sink) {
    TestProver::send(sink, Kind::kHeader, 0, prover.header(challenge), std::nullopt, 1);
    if (!sample.embeddings.empty() || !sample.heads.empty()) {
      TestProver::send(sink, Kind::kEnds, 0, prover.ends(sample), std::nullopt, 997);
    }
    for (const LayerCells& cells : sample.layers) {
      TestProver::send(sink, Kind::kLayer, cells.layer, prover.layer(cells), std::nullopt, 65'537);
    }
  };
  expect(Verdict::kMatch, "match", audit(prover));
}

// ---- Receipts.

class WithReceipts : public TestProver {
 public:
  using TestProver::TestProver;
  std::function<void(CommitReceipts&)> change;
  CommitReceipts receipts(const AuditCommitment& commitment) override {
    CommitReceipts out = TestProver::receipts(commitment);
    change(out);
    return out;
  }
};

TEST(LiveReceipts, BothAreChecked) {
  WithReceipts prover(served(), honest_run());
  const auto run = [&](std::function<void(CommitReceipts&)> change) {
    prover.change = std::move(change);
    return audit(prover);
  };
  expect(Verdict::kMatch, "match", run([](auto&) {}));
  expect(Verdict::kMalformed, "receipt of the commitment",
         run([](auto& r) { r.commitment.clear(); }));
  expect(Verdict::kMalformed, "receipt of the record", run([](auto& r) { r.record.clear(); }));
  expect(Verdict::kMalformed, "for another entry",
         run([](auto& r) { std::swap(r.commitment, r.record); }));
  expect(Verdict::kMalformed, "receipt of the record is good, but for another entry",
         run([](auto& r) { r.record = r.commitment; }));
  // A record's receipt that is good, but older.
  std::string old;
  expect(Verdict::kMatch, "match", run([&](auto& r) { old = r.record; }));
  expect(Verdict::kMalformed, "different checkpoints", run([&](auto& r) { r.record = old; }));
  EXPECT_TRUE(prover.challenges.size() == 2U) << "nothing is opened on bad receipts";
}

// A prover that lets its log grow and then takes the head whose draw it likes.
TEST(LiveReceipts, TheSeedIsFromTheHeadThatEndsWithTheCommitment) {
  WithReceipts prover(served(), honest_run());
  prover.change = [&](CommitReceipts& receipts) {
    const auto of = [](const std::string& receipt) { return TlogProof::parse(receipt, "").index; };
    LogWriter(prover.log_dir(), prover.log_key)
        .append({log_entry_for_record(sha256(std::to_string(of(receipts.commitment))))});
    const LogReader log(prover.log_dir());
    receipts = {log.receipt(of(receipts.commitment)), log.receipt(of(receipts.record))};
  };
  expect(Verdict::kMalformed, "the one that ends with it", audit(prover));
  EXPECT_TRUE(prover.challenges.empty());
}

TEST(LiveReceipts, HugeCheckpointsAreRefused) {
  WithReceipts prover(served(), honest_run());
  const auto with_note_of = [&](std::size_t bytes) {
    prover.change = [&, bytes](CommitReceipts& receipts) {
      for (std::string* text : {&receipts.commitment, &receipts.record}) {
        TlogProof proof = TlogProof::parse(*text, "receipt");
        Checkpoint checkpoint = parse_checkpoint(proof.checkpoint_note, "checkpoint");
        checkpoint.extensions = {std::string(bytes - proof.checkpoint_note.size() - 1, 'x')};
        proof.checkpoint_note = sign_checkpoint(checkpoint, prover.log_key);
        ASSERT_EQ(proof.checkpoint_note.size(), bytes);
        *text = proof.text();
      }
    };
    return audit(prover);
  };
  expect(Verdict::kMatch, "match", with_note_of(16384));
  expect(Verdict::kMalformed, "a checkpoint of 16385 bytes", with_note_of(16385));
}

TEST(LiveReceipts, AnotherLogCannotBeJudged) {
  TestProver prover(served(), honest_run());
  LiveAuditOptions options = options_for(prover, plan_of("all", 8, 4));
  options.log_key = SigningKey::generate("log.example/test").public_key();
  const LiveAudit judged = live_audit(prover.record, auditor(), backend(), prover, options);
  expect(Verdict::kCannotJudge, "not by the log key", judged);
  EXPECT_TRUE(prover.challenges.empty());
}

TEST(LiveReceipts, AKeyThatOnlyTheProverToldIsNoted) {
  TestProver prover(served(), honest_run());
  LiveAuditOptions options = options_for(prover, plan_of("all", 8, 4));
  options.log_key_from_prover = true;
  const LiveAudit judged = live_audit(prover.record, auditor(), backend(), prover, options);
  expect(Verdict::kMatch, "only what the prover says", judged);
}

// ---- Refusals, failures, retries.

class Failing : public TestProver {
 public:
  using TestProver::TestProver;
  // Called with how often this call was made before.
  std::function<void(std::size_t)> on_commit, on_open, on_operators;
  // Ends the opening's stream after so many parts, the first time.
  std::optional<std::size_t> vanish_after_parts;
  std::vector<Bytes> asked;  // requests to open, answered or not

  CommitReceipts commit(const Bytes& bytes) override {
    CommitReceipts out = TestProver::commit(bytes);
    if (on_commit) on_commit(commitments.size() - 1);
    return out;
  }
  void open(const Bytes& bytes, OpeningSink& sink) override {
    asked.push_back(bytes);
    if (on_open) on_open(asked.size() - 1);
    TestProver::open(bytes, sink);
  }
  void send_opening(const Challenge& challenge, const AuditSample& sample,
                    OpeningSink& sink) override {
    if (!vanish_after_parts) return TestProver::send_opening(challenge, sample, sink);
    struct Counting final : OpeningSink {
      OpeningSink* to = nullptr;
      std::size_t left = 0;
      void part(OpeningPartKind kind, std::uint32_t layer, std::uint64_t bytes) override {
        if (left-- == 0) throw infrastructure_error("the prover of this test vanished");
        to->part(kind, layer, bytes);
      }
      void data(ByteView bytes) override { to->data(bytes); }
    } counting;
    counting.to = &sink;
    counting.left = *std::exchange(vanish_after_parts, std::nullopt);
    TestProver::send_opening(challenge, sample, counting);
  }
  Bytes operators(const Bytes& bytes, std::uint64_t limit) override {
    Bytes out = TestProver::operators(bytes, limit);
    if (on_operators) on_operators(requests.size() - 1);
    return out;
  }
};

void fail_with(const Error& error) {
  throw Error(error);
}

TEST(LiveFailures, RefusalsCannotBeJudged) {
  const Error refusal = cannot_judge_error("prover refused: not on the list");
  {
    Failing prover(served(), honest_run());
    prover.on_commit = [&](std::size_t) { fail_with(refusal); };
    expect(Verdict::kCannotJudge, "not on the list", audit(prover));
    EXPECT_EQ(prover.commitments.size(), 1U);
  }
  {
    Failing prover(served(), honest_run());
    prover.on_open = [&](std::size_t) { fail_with(refusal); };
    const LiveAudit judged = audit(prover);
    expect(Verdict::kCannotJudge, "not on the list", judged);
    // By these it can be told how often a prover does that.
    ASSERT_EQ(prover.commitments.size(), 1U);
    ASSERT_EQ(prover.asked.size(), 1U);
    const Challenge challenge =
        Challenge::parse(OpenRequest::parse(prover.asked[0], "request").challenge, "challenge");
    expect(Verdict::kCannotJudge, challenge.digest().hex(), judged);
    expect(Verdict::kCannotJudge,
           AuditCommitment::parse(prover.commitments[0], "commitment").digest().hex(), judged);
    EXPECT_EQ(judged.report.cells_checked, 0U);
    EXPECT_FALSE(judged.report.live->bad_cells_at_most);
  }
}

TEST(LiveFailures, RetriesSendTheSameBytesAndDrawNothingAnew) {
  Failing prover(served(), honest_run());
  const auto twice = [](std::size_t before) {
    if (before < 2) throw infrastructure_error("gone");
  };
  prover.on_commit = twice;
  prover.on_open = twice;
  const LiveAudit judged = audit(prover);
  expect(Verdict::kMatch, "match", judged);
  ASSERT_EQ(prover.commitments.size(), 3U);
  EXPECT_EQ(prover.commitments[0], prover.commitments[1]);
  EXPECT_EQ(prover.commitments[0], prover.commitments[2]);
  ASSERT_EQ(prover.asked.size(), 3U);
  EXPECT_EQ(prover.asked[0], prover.asked[1]);
  EXPECT_EQ(prover.asked[0], prover.asked[2]);
  EXPECT_EQ(judged.report.live->attempts, 3U);
  EXPECT_EQ(judged.report.checkpoint->size, 2U) << "one commitment, one entry";
}

TEST(LiveFailures, AChallengeIsRepeatedByteByByte) {
  for (const std::size_t parts : {std::size_t{0}, std::size_t{1}, std::size_t{3}}) {
    Failing prover(served(), honest_run());
    prover.vanish_after_parts = parts;
    const LiveAudit judged = audit(prover, everything());
    expect(Verdict::kMatch, "match", judged);
    ASSERT_EQ(prover.open_requests.size(), 2U);
    EXPECT_EQ(prover.open_requests[0], prover.open_requests[1]);
    EXPECT_EQ(judged.report.cells_checked, judged.report.cells) << "nothing counts twice";
  }
}

TEST(LiveFailures, VanishingForGoodIsInfrastructure) {
  for (const bool at_commit : {true, false}) {
    Failing prover(served(), honest_run());
    const auto gone = [](std::size_t) { throw infrastructure_error("gone"); };
    (at_commit ? prover.on_commit : prover.on_open) = gone;
    try {
      audit(prover);
      ADD_FAILURE() << "a verdict out of nothing";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInfrastructure) << error.what();
      EXPECT_EQ(std::string(error.what()).find("it knew what it had to open") != std::string::npos,
                !at_commit);
    }
  }
}

TEST(LiveFailures, TwoAnswersToOneChallengeAreMalformed) {
  class TwoFaced final : public Failing {
   public:
    using Failing::Failing;
    Bytes layer(const LayerCells& cells) override {
      Bytes out = Failing::layer(cells);
      if (challenges.size() > 1) out.back() ^= 1;
      return out;
    }
  };
  TwoFaced prover(served(), honest_run());
  prover.vanish_after_parts = 4;  // header, ends, two layers
  expect(Verdict::kMalformed, "answered with before", audit(prover, everything()));
}

TEST(LiveFailures, WhoWasCaughtStaysCaught) {
  KeptRun run = honest_run();
  run.flip(LeafType::kRow, 1, 6, 3);  // layer 0, the first that is opened
  run.commit();
  class Fleeing final : public TestProver {
   public:
    using TestProver::TestProver;
    Error with = infrastructure_error("gone");
    Bytes layer(const LayerCells& cells) override {
      if (cells.layer == 2) throw Error(with);
      return TestProver::layer(cells);
    }
  };
  for (const Error& error :
       {infrastructure_error("gone"), cannot_judge_error("no more"), malformed_error("nonsense")}) {
    Fleeing prover(served(), run);
    prover.with = error;
    const LiveAudit judged = audit(prover, everything());
    expect(Verdict::kMismatch, "the audit ended early", judged);
    ASSERT_TRUE(judged.proof);
    EXPECT_EQ(judged.report.place->text().substr(0, 20), "layer 0, position 6,");
  }
}

// ---- Operators: what the prover does not show costs a name, nothing else.

TEST(LiveOperators, UnusableOnesFallBackToTheCommittedTensor) {
  KeptRun run = honest_run();
  run.flip(LeafType::kRow, 2, 5, 77);
  run.commit();
  class Hooked final : public Failing {
   public:
    using Failing::Failing;
    std::function<void(OperatorOutputs&)> change;
    std::function<void(Bytes&)> change_bytes;
    OperatorOutputs operators_of(std::uint32_t layer, std::uint64_t position) override {
      OperatorOutputs out = Failing::operators_of(layer, position);
      if (change) change(out);
      return out;
    }
    Bytes operators(const Bytes& bytes, std::uint64_t limit) override {
      Bytes out = Failing::operators(bytes, limit);
      if (change_bytes) change_bytes(out);
      return out;
    }
  };
  const auto falls_back = [&](const std::string& why, const std::function<void(Hooked&)>& lie) {
    Hooked prover(served(), run);
    lie(prover);
    const LiveAudit judged = audit(prover, everything());
    expect(Verdict::kMismatch, why, judged);
    EXPECT_EQ(judged.report.place->op, "mlp_residual");
    EXPECT_EQ(judged.report.place->element, 77U);
    ASSERT_TRUE(judged.proof);
    EXPECT_TRUE(judged.proof->operators.empty());
  };
  falls_back("refused them", [](Hooked& p) {
    p.on_operators = [](std::size_t) { throw cannot_judge_error("refused them"); };
  });
  falls_back("gone", [](Hooked& p) {
    p.on_operators = [](std::size_t) { throw infrastructure_error("gone"); };
  });
  falls_back("good", [](Hooked& p) {
    p.change_bytes = [](Bytes& bytes) { bytes[bytes.size() - 3] ^= 1; };
  });
  falls_back("number is wrong",
             [](Hooked& p) { p.change = [](OperatorOutputs& out) { out.pop_back(); }; });
  falls_back("names are wrong", [](Hooked& p) {
    p.change = [](OperatorOutputs& out) { std::swap(out[0].first, out[1].first); };
  });
  falls_back("wrong size",
             [](Hooked& p) { p.change = [](OperatorOutputs& out) { out[2].second.pop_back(); }; });
  falls_back("not what was committed",
             [](Hooked& p) { p.change = [](OperatorOutputs& out) { out.back().second[77] = 1; }; });
}

TEST(LiveOperators, TheFirstThatDiffersIsNamed) {
  KeptRun run = honest_run();
  run.flip(LeafType::kRow, 2, 5, 77);
  run.commit();
  class Telling final : public TestProver {
   public:
    using TestProver::TestProver;
    OperatorOutputs operators_of(std::uint32_t layer, std::uint64_t position) override {
      OperatorOutputs out = TestProver::operators_of(layer, position);
      for (auto& [name, values] : out) {
        if (name == "swiglu") values[11] += 1;
      }
      return out;
    }
  };
  Telling prover(served(), run);
  const LiveAudit judged = audit(prover, everything());
  expect(Verdict::kMismatch, "layer 1, position 5, operator swiglu, element 11", judged);
  ASSERT_TRUE(judged.proof);
  EXPECT_FALSE(judged.proof->operators.empty());
}

// ---- Claims that are bad in themselves, and what the auditor expects.

TEST(LiveClaims, WhatNeedsNoReplayIsCheckedToo) {
  KeptRun run = honest_run();
  run.claim.text_digest = text_digest(run.claim.seed, "42");
  TestProver prover(served(), run);
  const LiveAudit judged = audit(prover);
  expect(Verdict::kMismatch, "digest of the delivered text", judged);
  ASSERT_TRUE(judged.proof);
  EXPECT_EQ(judged.proof->kind, MismatchProof::Kind::kRecord);
}

TEST(LiveClaims, AnImpossibleShapeIsRefusedBeforeAnythingIsAsked) {
  KeptRun run = honest_run();
  run.claim.trace_shape.hidden = 64;
  TestProver prover(served(), run);
  const LiveAudit judged = audit(prover);
  expect(Verdict::kMismatch, "claimed shape", judged);
  EXPECT_TRUE(prover.commitments.empty());
  ASSERT_TRUE(judged.proof);
  EXPECT_EQ(judged.proof->kind, MismatchProof::Kind::kRecord);
}

TEST(LiveClaims, TokenIdsAreThoseThatWereCommitted) {
  KeptRun run = honest_run();
  run.claim.prompt_ids[2] ^= 1;  // the trace is still of the others
  TestProver prover(served(), run);
  expect(Verdict::kMalformed, "token ids are not those of the record's claim", audit(prover));
}

TEST(LiveClaims, AChosenSeedIsNoted) {
  KeptRun run = honest_run();
  run.claim.seed_provenance = SeedProvenance::kProver;
  TestProver prover(served(), run);
  expect(Verdict::kMatch, "hidden data", audit(prover));
}

// Committed keys so large that recomputation overflows: still a mismatch, of finite claims.
TEST(LiveClaims, RecomputationThatDoesNotStayFiniteIsAMismatch) {
  KeptRun run = honest_run();
  for (std::uint64_t i = 0; i < run.claim.trace_shape.kv_width; ++i) {
    const auto range = evidence_row_range(run.claim.trace_shape, LeafType::kKeyValue, 1, 2).value();
    const std::uint32_t huge = i % 2 == 0 ? 0x7f7fffffU : 0xff7fffffU;
    std::memcpy(run.rows.data() + range.offset + 4 * i, &huge, 4);
  }
  run.commit();
  TestProver prover(served(), run);
  const LiveAudit judged = audit(prover, everything());
  expect(Verdict::kMismatch, "layer 1, position 2, operator k_rope", judged);
  EXPECT_GT(judged.report.live->bad_cells, 1U);
  EXPECT_EQ(judged.report.live->bad.size(), judged.report.live->bad_cells);
}

TEST(LiveClaims, NansAreComparedAsOne) {
  EXPECT_EQ(comparable_bits(contract::float_of(0xffc00000U)),
            comparable_bits(contract::float_of(0x7f800001U)));
  EXPECT_NE(comparable_bits(0.0F), comparable_bits(-0.0F));
}

TEST(LiveClaims, ExpectationsAreJudgedBeforeAnythingIsAsked) {
  TestProver prover(served(), honest_run());
  LiveAuditOptions options = options_for(prover, plan_of("all", 8, 4));
  options.nonce = Bytes{9};
  expect(Verdict::kMismatch, "nonce",
         live_audit(prover.record, auditor(), backend(), prover, options));
  options.nonce.reset();
  options.operator_key = SigningKey::generate("operator.example/test").public_key();
  expect(Verdict::kCannotJudge, "operator key",
         live_audit(prover.record, auditor(), backend(), prover, options));
  EXPECT_TRUE(prover.commitments.empty());
}

TEST(LiveClaims, APlanThatTheRecordDoesNotAllowIsUsage) {
  TestProver prover(served(), honest_run());
  for (const AuditPlan& plan : {plan_of("4", 3, 0), plan_of("random:5", 3, 0)}) {
    try {
      audit(prover, plan);
      ADD_FAILURE() << "a plan that cannot be";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
    }
  }
  EXPECT_TRUE(prover.commitments.empty());
}

// ---- The auditor's own model.

TEST(LiveModel, AnotherModelCannotBeJudged) {
  const OpenedModel other = OpenedModel::open(std::string(BW_TEST_DATA_DIR) + "/models/tiny-llama");
  TestProver prover(served(), honest_run());
  const LiveAudit judged = live_audit(prover.record, other, backend(), prover,
                                      options_for(prover, plan_of("all", 8, 4)));
  expect(Verdict::kCannotJudge, "another model", judged);
  EXPECT_TRUE(prover.commitments.empty());
}

class OwnModel : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::copy(kModelDir, dir());
    std::filesystem::permissions(weights(), std::filesystem::perms::owner_all);
  }
  std::filesystem::path dir() const { return temp_.path() / "model"; }
  std::filesystem::path weights() const { return dir() / "model.safetensors"; }
  std::string manifest_file() const { return (temp_.path() / "manifest").string(); }
  void flip_a_weight() const {
    std::string bytes = test::read_file(weights());
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 0x40);
    test::write_file(weights(), bytes);
  }
  void write_manifest(const Manifest& manifest) const {
    const Bytes bytes = manifest.canonical_bytes();
    test::write_file(manifest_file(), std::string(bytes.begin(), bytes.end()));
  }
  LiveAudit audit_with(const OpenedModel& model, const AuditPlan& plan) const {
    TestProver prover(served(), honest_run());
    return live_audit(prover.record, model, backend(), prover, options_for(prover, plan));
  }
  test::TempDir temp_;
};

TEST_F(OwnModel, OtherWeightsAreNamedAndGiveNoProof) {
  flip_a_weight();
  const LiveAudit judged = audit_with(OpenedModel::open(dir().string()), everything());
  expect(Verdict::kMismatch, "weights of tensor", judged);
  EXPECT_THAT(report_text(judged.report, "record"), HasSubstr("no proof for others"));
  EXPECT_FALSE(judged.proof);
}

TEST_F(OwnModel, AManifestOfOnesOwnIsComparedInFull) {
  write_manifest(served().manifest);
  const OpenedModel known = OpenedModel::open(dir().string(), manifest_file());
  LiveAudit judged = audit_with(known, plan_of("0", 1, 0));
  EXPECT_EQ(judged.report.verdict, Verdict::kMatch);
  EXPECT_THAT(report_text(judged.report, "record"), ::testing::Not(HasSubstr("--manifest")));
  EXPECT_THAT(report_text(audit_with(auditor(), plan_of("0", 1, 0)).report, "record"),
              HasSubstr("--manifest"));

  // Another weight in a layer that the audit does not look at: only the manifest tells.
  flip_a_weight();
  const Manifest other = build_manifest(Model::load(dir().string()).describe());
  write_manifest(other);
  const OpenedModel changed = OpenedModel::open(dir().string(), manifest_file());
  judged = audit_with(changed, everything());
  expect(Verdict::kMismatch, "weights of tensor", judged);
}

TEST_F(OwnModel, AManifestThatIsNotOfTheseFilesIsUsage) {
  const auto usage = [&](const std::string& part, const std::function<void()>& work) {
    try {
      work();
      ADD_FAILURE() << "no error where '" << part << "' was expected";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
  };
  const auto open = [&] { OpenedModel::open(dir().string(), manifest_file()); };
  usage("manifest", open);
  test::write_file(manifest_file(), "nonsense");
  usage("bw-prover manifest", open);
  write_manifest(ServedModel::load(std::string(BW_TEST_DATA_DIR) + "/models/tiny-llama").manifest);
  usage("not of the model", open);
  write_manifest(served().manifest);
  flip_a_weight();  // the files were changed since
  const OpenedModel stale = OpenedModel::open(dir().string(), manifest_file());
  usage("--manifest", [&] { audit_with(stale, everything()); });
}

}  // namespace
}  // namespace bitwitness
