// Claims: canonical bytes, every consistency rule, differences in words.
#include "attest/claim.h"

#include <bit>

#include "attest/base/sha256.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

using testing::error_kind;
using testing::sample_run;

TEST(Claim, ParsesWhatItWrites) {
  const Claim claim = sample_run().record.claim;
  EXPECT_EQ(Claim::parse(claim.canonical_bytes(), "c"), claim);
  EXPECT_TRUE(claim_differences(claim, claim).empty());
}

TEST(Claim, EveryChangedByteIsMalformedOrAnotherClaim) {
  const Claim claim = sample_run().record.claim;
  const Bytes bytes = claim.canonical_bytes();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    Bytes changed = bytes;
    changed[i] ^= 0x01;
    try {
      const Claim other = Claim::parse(changed, "c");
      EXPECT_NE(other.digest(), claim.digest()) << "byte " << i;
      EXPECT_FALSE(claim_differences(other, claim).empty()) << "byte " << i;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kMalformed) << "byte " << i;
    }
    EXPECT_EQ(error_kind([&] { Claim::parse(ByteView(bytes).first(i), "c"); }),
              ErrorKind::kMalformed);
  }
  Bytes longer = bytes;
  longer.push_back(0);
  EXPECT_EQ(error_kind([&] { Claim::parse(longer, "c"); }), ErrorKind::kMalformed);
}

struct Rule {
  const char* name;
  std::function<void(Claim&)> breaks;
};

std::uint32_t bits(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

void make_sampled(Claim& claim) {
  claim.sampling.temperature_bits = bits(0.7F);
  claim.sampling.top_k = 40;
  claim.sampling.top_p_bits = bits(0.9F);
}

TEST(Claim, EveryRuleIsEnforcedOnParsing) {
  const Rule rules[] = {
      {"no prompt", [](Claim& c) { c.prompt_ids.clear(); }},
      {"nothing emitted", [](Claim& c) { c.emitted_ids.clear(); }},
      {"positions", [](Claim& c) { c.trace_shape.positions = 5; }},
      {"emitted count", [](Claim& c) { c.trace_shape.emitted = 1; }},
      {"prompt id", [](Claim& c) { c.prompt_ids[0] = 11; }},
      {"emitted id", [](Claim& c) { c.emitted_ids[0] = 11; }},
      {"over max_tokens", [](Claim& c) { c.max_tokens = 1; }},
      {"absurd max_tokens", [](Claim& c) { c.max_tokens = UINT64_MAX; }},
      {"stop ids order",
       [](Claim& c) {
         c.stop_ids = {3, 2};
       }},
      {"stop ids twice",
       [](Claim& c) {
         c.stop_ids = {2, 2};
       }},
      {"stop token missing", [](Claim& c) { c.stop_ids = {3}; }},
      {"stop token inside",
       [](Claim& c) {
         c.stop_ids = {2, 9};
       }},
      {"length with stop token",
       [](Claim& c) {
         c.stop_reason = StopReason::kLength;
         c.max_tokens = 2;
       }},
      {"length too early",
       [](Claim& c) {
         c.stop_reason = StopReason::kLength;
         c.stop_ids.clear();
       }},
      {"context at max_tokens",
       [](Claim& c) {
         c.stop_reason = StopReason::kContext;
         c.stop_ids.clear();
         c.max_tokens = 2;
       }},
      {"context with stop token", [](Claim& c) { c.stop_reason = StopReason::kContext; }},
      {"stop reason unknown", [](Claim& c) { c.stop_reason = static_cast<StopReason>(7); }},
      {"temperature -0",
       [](Claim& c) {
         make_sampled(c);
         c.sampling.temperature_bits = 0x80000000U;
       }},
      {"temperature negative",
       [](Claim& c) {
         make_sampled(c);
         c.sampling.temperature_bits = bits(-1.0F);
       }},
      {"temperature Inf",
       [](Claim& c) {
         make_sampled(c);
         c.sampling.temperature_bits = 0x7f800000U;
       }},
      {"temperature NaN",
       [](Claim& c) {
         make_sampled(c);
         c.sampling.temperature_bits = 0x7fc00000U;
       }},
      {"top_p 0",
       [](Claim& c) {
         make_sampled(c);
         c.sampling.top_p_bits = 0;
       }},
      {"top_p > 1",
       [](Claim& c) {
         make_sampled(c);
         c.sampling.top_p_bits = bits(1.5F);
       }},
      {"top_p NaN",
       [](Claim& c) {
         make_sampled(c);
         c.sampling.top_p_bits = 0x7fc00000U;
       }},
      {"greedy top_k", [](Claim& c) { c.sampling.top_k = 1; }},
      {"greedy top_p", [](Claim& c) { c.sampling.top_p_bits = bits(0.5F); }},
      {"algorithm 0", [](Claim& c) { c.sampling.algorithm = 0; }},
      {"seed too long", [](Claim& c) { c.seed.assign(65, 1); }},
      {"seed without provenance", [](Claim& c) { c.seed_provenance = SeedProvenance::kNone; }},
      {"provenance without seed", [](Claim& c) { c.seed.clear(); }},
      {"drawn without seed",
       [](Claim& c) {
         make_sampled(c);
         c.seed.clear();
         c.seed_provenance = SeedProvenance::kNone;
       }},
      {"provenance unknown", [](Claim& c) { c.seed_provenance = static_cast<SeedProvenance>(9); }},
      {"layers 0", [](Claim& c) { c.trace_shape.layers = 0; }},
      {"layers huge", [](Claim& c) { c.trace_shape.layers = 1 << 30; }},
      {"hidden 0", [](Claim& c) { c.trace_shape.hidden = 0; }},
      {"kv_width 0", [](Claim& c) { c.trace_shape.kv_width = 0; }},
      {"vocab huge", [](Claim& c) { c.trace_shape.vocab = UINT32_MAX; }},
      {"row dtype", [](Claim& c) { c.trace_shape.row_dtype = static_cast<Dtype>(0); }},
      {"kv dtype", [](Claim& c) { c.trace_shape.kv_dtype = static_cast<Dtype>(4); }},
      {"arithmetic empty", [](Claim& c) { c.arithmetic.clear(); }},
  };
  for (const Rule& rule : rules) {
    Claim claim = sample_run().record.claim;
    rule.breaks(claim);
    std::string message;
    EXPECT_EQ(error_kind([&] { Claim::parse(claim.canonical_bytes(), "c.bwrec"); }, &message),
              ErrorKind::kMalformed)
        << rule.name;
    EXPECT_NE(message.find("c.bwrec"), std::string::npos) << rule.name << ": " << message;
  }
}

TEST(Claim, HonestVariationsAreAccepted) {
  Claim claim = sample_run().record.claim;
  claim.stop_ids.clear();
  claim.stop_reason = StopReason::kLength;
  claim.max_tokens = 2;
  claim.check("length");
  claim.stop_reason = StopReason::kContext;
  claim.max_tokens = 3;
  claim.check("context");
  make_sampled(claim);
  claim.check("sampled");
  claim.sampling = {};
  claim.seed.clear();
  claim.seed_provenance = SeedProvenance::kNone;
  claim.check("greedy without seed");
  EXPECT_EQ(Claim::parse(claim.canonical_bytes(), "c"), claim);
}

TEST(Claim, TextDigestIsSaltedBySeed) {
  const Bytes seed{1, 2, 3};
  const Digest salt = sha256({as_bytes("bitwitness/salt/v1\n"), seed});
  EXPECT_EQ(text_digest(seed, "hello"),
            sha256({as_bytes("bitwitness/text/v1\n"), salt.view(), as_bytes("hello")}));
  EXPECT_NE(text_digest(seed, "hello"), text_digest({}, "hello"));
}

TEST(Claim, DifferencesNameTheField) {
  const Claim a = sample_run().record.claim;
  Claim b = a;
  b.emitted_ids[0] = 4;
  b.trace_root.bytes[0] ^= 1;
  const auto differences = claim_differences(a, b);
  ASSERT_EQ(differences.size(), 2U);
  EXPECT_EQ(differences[0], "emitted: token 0 is 9 against 4");
  EXPECT_TRUE(differences[1].starts_with("trace root: "));
}

}  // namespace
}  // namespace bitwitness
