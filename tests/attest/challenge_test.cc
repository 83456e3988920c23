// Commitments, challenges and draws: vectors of a second implementation, every flaw refused, and
// that the draws are as likely as they should be.
#include "attest/challenge.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>

#include "attest/base/hex.h"
#include "attest/base/sha256.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

using testing::error_kind;
using testing::fixed_key;

std::vector<std::vector<std::string>> vectors(const std::string& kind) {
  std::ifstream file(std::string(BW_TEST_DATA_DIR) + "/attest/audit_vectors.txt");
  EXPECT_TRUE(file.good());
  std::vector<std::vector<std::string>> out;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::vector<std::string> fields{std::istream_iterator<std::string>(words), {}};
    if (!fields.empty() && fields[0] == kind) out.push_back(std::move(fields));
  }
  EXPECT_GE(out.size(), 3u) << kind;
  return out;
}

Digest digest_of(const std::string& hex) {
  const Bytes bytes = from_hex(hex).value();
  Digest out;
  std::copy(bytes.begin(), bytes.end(), out.bytes.begin());
  return out;
}

template <class Number>
std::string joined(const std::vector<Number>& numbers) {
  std::string out;
  for (const Number n : numbers) out += (out.empty() ? "" : ",") + std::to_string(n);
  return out.empty() ? "-" : out;
}

TraceShape shape_of(std::uint32_t layers, std::uint64_t positions, std::uint64_t emitted) {
  TraceShape shape;
  shape.layers = layers;
  shape.positions = positions;
  shape.emitted = emitted;
  shape.hidden = 4;
  shape.kv_width = 2;
  shape.vocab = 10;
  return shape;
}

Challenge sample_challenge(const SigningKey& key) {
  Challenge out;
  std::fill(out.secret.begin(), out.secret.end(), std::uint8_t{9});
  out.commitment.record = sha256("record");
  out.commitment.secret_hash = secret_hash(out.secret);
  out.commitment.plan.cells = 5;
  out.commitment.plan.ends = 2;
  out.commitment.plan.layers = LayerChoice::parse("1,3");
  out.commitment.sign(key);
  out.checkpoint_note =
      sign_checkpoint({"log.example", 7, sha256("root"), {}}, fixed_key("log.example", 4));
  out.sign(key);
  return out;
}

TEST(Challenge, SeedVectors) {
  for (const auto& fields : vectors("seed")) {
    AuditSecret secret{};
    const Bytes bytes = from_hex(fields[1]).value();
    std::copy(bytes.begin(), bytes.end(), secret.begin());
    const Bytes body = from_hex(fields[2]).value();
    const Checkpoint checkpoint = Checkpoint::parse_body(as_text(body), "vector");
    EXPECT_EQ(secret_hash(secret).hex(), fields[4]);
    EXPECT_EQ(challenge_seed(secret, checkpoint, digest_of(fields[3])).hex(), fields[5]);
  }
}

TEST(Challenge, DrawVectors) {
  for (const auto& fields : vectors("draw")) {
    const auto drawn = draw_without_replacement(digest_of(fields[1]),
                                                static_cast<std::uint8_t>(std::stoi(fields[2])),
                                                std::stoull(fields[3]), std::stoull(fields[4]));
    EXPECT_EQ(joined(drawn), fields[5]);
  }
}

TEST(Challenge, SampleVectors) {
  for (const auto& f : vectors("sample")) {
    AuditPlan plan;
    plan.level = f[1] == "cell" ? AuditLevel::kCell : AuditLevel::kLayer;
    plan.layers = LayerChoice::parse(f[2]);
    EXPECT_EQ(plan.layers.text(), f[2]);
    plan.cells = std::stoull(f[3]);
    plan.ends = std::stoull(f[4]);
    const TraceShape shape = shape_of(static_cast<std::uint32_t>(std::stoul(f[5])),
                                      std::stoull(f[6]), std::stoull(f[7]));
    const AuditSample sample = draw_sample(plan, shape, digest_of(f[8]));
    std::string cells;
    for (const LayerCells& layer : sample.layers) {
      for (const std::uint64_t t : layer.positions) {
        cells += (cells.empty() ? "" : ",") + std::to_string(layer.layer) + ":" + std::to_string(t);
      }
    }
    EXPECT_EQ(cells, f[9]);
    EXPECT_EQ(joined(sample.embeddings), f[10]);
    EXPECT_EQ(joined(sample.heads), f[11]);
  }
}

TEST(Challenge, EveryCellAndEndIsDrawnEquallyOften) {
  const TraceShape shape = shape_of(3, 4, 3);
  AuditPlan plan;
  plan.cells = 5;
  plan.ends = 3;  // one embedding, two heads
  std::map<std::pair<std::uint32_t, std::uint64_t>, int> cells;
  std::map<std::uint64_t, int> ends;
  constexpr int kDraws = 6000;
  for (int i = 0; i < kDraws; ++i) {
    const AuditSample sample = draw_sample(plan, shape, sha256("seed " + std::to_string(i)));
    ASSERT_EQ(sample.cell_count(), 5u);
    ASSERT_EQ(sample.embeddings.size(), 1u);
    ASSERT_EQ(sample.heads.size(), 2u);
    for (const LayerCells& layer : sample.layers) {
      ASSERT_TRUE(std::is_sorted(layer.positions.begin(), layer.positions.end()));
      for (const std::uint64_t t : layer.positions) ++cells[{layer.layer, t}];
    }
    for (const std::uint64_t t : sample.embeddings) ++ends[t];
    for (const std::uint64_t t : sample.heads) ++ends[100 + t];
  }
  ASSERT_EQ(cells.size(), 12u);
  ASSERT_EQ(ends.size(), 7u);
  // Six standard deviations of a binomial: such a miss has a probability below 1e-7 in all.
  const auto near = [](int count, double p) {
    return std::abs(count - kDraws * p) < 6 * std::sqrt(kDraws * p * (1 - p));
  };
  for (const auto& [cell, count] : cells) EXPECT_TRUE(near(count, 5.0 / 12)) << count;
  for (const auto& [end, count] : ends) {
    EXPECT_TRUE(near(count, end < 100 ? 1.0 / 4 : 2.0 / 3)) << count;
  }
}

TEST(Challenge, MoreThanThereIsMeansAll) {
  const TraceShape shape = shape_of(2, 3, 1);
  AuditPlan plan;
  plan.cells = kMaxPlanCells;
  plan.ends = kMaxPlanCells;
  const AuditSample sample = draw_sample(plan, shape, sha256("x"));
  EXPECT_EQ(sample.layers, (std::vector<LayerCells>{{0, {0, 1, 2}}, {1, {0, 1, 2}}}));
  EXPECT_EQ(sample.embeddings, (std::vector<std::uint64_t>{0, 1, 2}));
  EXPECT_EQ(sample.heads, (std::vector<std::uint64_t>{2}));
}

TEST(Challenge, HalfOfTheEndsAreHeads) {
  const auto drawn = [](std::uint64_t ends, std::uint64_t positions, std::uint64_t emitted) {
    AuditPlan plan;
    plan.cells = 1;
    plan.ends = ends;
    const AuditSample sample = draw_sample(plan, shape_of(1, positions, emitted), sha256("ends"));
    return std::make_pair(sample.embeddings.size(), sample.heads.size());
  };
  using Counts = std::pair<std::size_t, std::size_t>;
  EXPECT_EQ(drawn(0, 100, 10), Counts(0, 0));
  EXPECT_EQ(drawn(1, 100, 10), Counts(0, 1));
  EXPECT_EQ(drawn(16, 100, 10), Counts(8, 8));
  EXPECT_EQ(drawn(17, 100, 10), Counts(8, 9));
  EXPECT_EQ(drawn(30, 100, 10), Counts(20, 10)) << "no more heads than there are";
  EXPECT_EQ(drawn(3, 2, 2), Counts(1, 2));
  EXPECT_EQ(drawn(4, 2, 2), Counts(2, 2));
  EXPECT_EQ(drawn(1000, 7, 7), Counts(7, 7));
}

TEST(Challenge, LayerChoices) {
  EXPECT_EQ(LayerChoice::parse("3,0").listed, (std::vector<std::uint32_t>{0, 3}));
  EXPECT_EQ(LayerChoice::parse("random:2").random, 2u);
  for (const char* bad : {"", "ALL", "0,,1", "0,0", "-1", "1.5", "random:", "random:0", "random:x",
                          "0 ", "99999999999"}) {
    EXPECT_EQ(error_kind([&] { LayerChoice::parse(bad); }), ErrorKind::kUsage) << bad;
  }
}

TEST(Challenge, PlansThatCannotBeDrawn) {
  const TraceShape shape = shape_of(3, 4, 2);
  const auto kind = [&](const char* layers, std::uint64_t cells, AuditLevel level) {
    AuditPlan plan;
    plan.level = level;
    plan.layers = LayerChoice::parse(layers);
    plan.cells = cells;
    return error_kind([&] { plan.check(shape); });
  };
  EXPECT_EQ(kind("0,3", 1, AuditLevel::kCell), ErrorKind::kUsage);
  EXPECT_EQ(kind("random:4", 1, AuditLevel::kCell), ErrorKind::kUsage);
  EXPECT_EQ(kind("all", 0, AuditLevel::kCell), ErrorKind::kUsage);
  EXPECT_EQ(kind("all", kMaxPlanCells + 1, AuditLevel::kCell), ErrorKind::kUsage);
}

TEST(Challenge, RoundTrip) {
  const SigningKey key = fixed_key("auditor", 3);
  const Challenge challenge = sample_challenge(key);
  const Challenge parsed = Challenge::parse(challenge.serialize(), "challenge");
  EXPECT_EQ(parsed.digest(), challenge.digest());
  EXPECT_EQ(parsed.commitment.plan, challenge.commitment.plan);
  EXPECT_EQ(parsed.serialize(), challenge.serialize());
  EXPECT_EQ(parsed.checkpoint("challenge").size, 7u);
}

TEST(Challenge, EveryFlippedBitAndEveryCutIsMalformed) {
  const SigningKey key = fixed_key("auditor", 3);
  const Bytes good = sample_challenge(key).serialize();
  for (std::size_t i = 0; i < good.size(); ++i) {
    Bytes bad = good;
    bad[i] ^= static_cast<std::uint8_t>(1u << (i % 8));
    EXPECT_EQ(error_kind([&] { Challenge::parse(bad, "challenge"); }), ErrorKind::kMalformed)
        << "byte " << i;
  }
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_EQ(error_kind([&] { Challenge::parse(ByteView(good).first(size), "challenge"); }),
              ErrorKind::kMalformed);
  }
  Bytes longer = good;
  longer.push_back(0);
  EXPECT_EQ(error_kind([&] { Challenge::parse(longer, "challenge"); }), ErrorKind::kMalformed);
}

TEST(Challenge, AnotherSecretOrAnotherSignerIsMalformed) {
  const SigningKey key = fixed_key("auditor", 3);
  const SigningKey other = fixed_key("auditor", 5);
  Challenge secret = sample_challenge(key);
  secret.secret[0] ^= 1;
  secret.sign(key);  // properly signed, but not what was committed to
  EXPECT_EQ(error_kind([&] { Challenge::parse(secret.serialize(), "challenge"); }),
            ErrorKind::kMalformed);
  Challenge signer = sample_challenge(key);
  signer.sign(other);
  EXPECT_EQ(error_kind([&] { Challenge::parse(signer.serialize(), "challenge"); }),
            ErrorKind::kMalformed);
  // A commitment taken over by somebody else: the key is under its digest.
  AuditCommitment taken = sample_challenge(key).commitment;
  const Digest before = taken.digest();
  taken.sign(other);
  EXPECT_NE(taken.digest(), before);
}

TEST(Challenge, PlansThatContradictThemselvesAreMalformed) {
  const SigningKey key = fixed_key("auditor", 3);
  const auto kind = [&](const auto& change) {
    AuditCommitment commitment = sample_challenge(key).commitment;
    change(commitment.plan);
    commitment.sign(key);
    return error_kind([&] { AuditCommitment::parse(commitment.serialize(), "commitment"); });
  };
  const std::vector<void (*)(AuditPlan&)> bad{
      [](AuditPlan& plan) { plan.level = static_cast<AuditLevel>(3); },
      [](AuditPlan& plan) { plan.level = static_cast<AuditLevel>(0); },
      [](AuditPlan& plan) { plan.level = AuditLevel::kLayer; },  // with a number of cells
      [](AuditPlan& plan) { plan.cells = 0; },
      [](AuditPlan& plan) { plan.cells = kMaxPlanCells + 1; },
      [](AuditPlan& plan) { plan.ends = kMaxPlanCells + 1; },
      [](AuditPlan& plan) { plan.layers.kind = static_cast<LayerChoice::Kind>(3); },
      [](AuditPlan& plan) { plan.layers.kind = LayerChoice::Kind::kAll; },  // with a list
      [](AuditPlan& plan) {
        plan.layers.listed = {3, 1};
      },
      [](AuditPlan& plan) {
        plan.layers.listed = {1, 1};
      },
      [](AuditPlan& plan) { plan.layers.listed.clear(); },
      [](AuditPlan& plan) { plan.layers.random = 1; },
  };
  for (const auto change : bad) EXPECT_EQ(kind(change), ErrorKind::kMalformed);
}

}  // namespace
}  // namespace bitwitness
