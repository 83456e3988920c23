// Mismatch proofs: what is in one comes out again, and nothing in it can be exchanged.
#include "attest/mismatch_proof.h"

#include "attest/base/merkle.h"
#include "attest/base/sha256.h"
#include "attest/log.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

using testing::error_kind;
using testing::fixed_key;
using testing::sample_run;
using testing::SampleRun;

struct Case {
  SampleRun run = sample_run();
  SigningKey verifier = fixed_key("auditor", 3);
  SigningKey operator_key = fixed_key("operator", 8);
  Challenge challenge;
  OpeningHeader header;
  TraceProofs proofs{run.trace};
  std::string commitment_receipt;

  std::string receipt_of(std::uint64_t index, const std::vector<Digest>& leaves) const {
    TlogProof proof;
    proof.index = index;
    proof.hashes = inclusion_proof(leaves, index);
    proof.checkpoint_note = challenge.checkpoint_note;
    return proof.text();
  }

  Case() {
    run.record.sign(operator_key);
    challenge.commitment.record = run.record.digest();
    challenge.commitment.secret_hash = secret_hash(challenge.secret);
    challenge.commitment.plan.cells = 1;
    challenge.commitment.sign(verifier);
    const std::vector<Digest> leaves{
        merkle_leaf(log_entry_for_record(run.record.digest())),
        merkle_leaf(log_entry_for_audit(challenge.commitment.digest()))};
    challenge.checkpoint_note =
        sign_checkpoint({"log.example", 2, merkle_root(leaves), {}}, fixed_key("log.example", 4));
    commitment_receipt = receipt_of(1, leaves);
    challenge.sign(verifier);
    header.challenge = challenge.digest();
    header.tree_roots.assign(run.trace.tree_roots().begin(), run.trace.tree_roots().end());
    header.sign(operator_key);
  }

  Bytes opening(const LayerCells& cells) {
    return LayerOpening::make(
        proofs, run.trace.shape(), cells,
        [this](LeafType type, std::uint32_t layer, std::uint64_t position) {
          const RowRange range =
              evidence_row_range(run.trace.shape(), type, layer, position).value();
          return ByteView(run.rows).subspan(range.offset, range.bytes);
        });
  }

  CellOperators operators() const {
    CellOperators out;
    out.challenge = challenge.digest();
    out.layer = 1;
    out.position = 2;
    out.outputs = {{"input_norm", {0.5F}}};
    out.sign(operator_key);
    return out;
  }

  MismatchProof proof() {
    MismatchProof out;
    out.kind = MismatchProof::Kind::kCell;
    out.layer = 1;
    out.position = 2;
    out.prefix = 3;
    out.record = run.record.serialize();
    out.commitment_receipt = commitment_receipt;
    out.challenge = challenge.serialize();
    out.header = header.serialize();
    out.opening = opening({1, {2}});
    out.operators = operators().serialize();
    out.finding = {"up_proj", 5, 0x3f800000, 0x3f800001};
    out.backend = "reference";
    out.sign(verifier);
    return out;
  }
};

std::optional<ErrorKind> opens_as(const MismatchProof& proof) {
  return error_kind(
      [&] { open_mismatch(MismatchProof::parse(proof.serialize(), "proof"), "proof"); });
}

TEST(MismatchProof, RoundTrip) {
  Case c;
  const MismatchProof proof = c.proof();
  const MismatchProof parsed = MismatchProof::parse(proof.serialize(), "proof");
  EXPECT_EQ(parsed.finding, proof.finding);
  EXPECT_EQ(parsed.serialize(), proof.serialize());
  const OpenedMismatch opened = open_mismatch(parsed, "proof");
  EXPECT_EQ(opened.record.digest(), c.run.record.digest());
  ASSERT_TRUE(opened.cell);
  EXPECT_EQ(opened.cell->layer(), 1u);
  EXPECT_EQ(opened.operators->outputs[0].name, "input_norm");
  EXPECT_EQ(prover_key(opened.record, std::nullopt), opened.header->prover.key);
}

TEST(MismatchProof, EveryFlippedBitIsMalformed) {
  Case c;
  const Bytes good = c.proof().serialize();
  for (std::size_t i = 0; i < good.size(); ++i) {
    Bytes bad = good;
    bad[i] ^= static_cast<std::uint8_t>(1u << (i % 8));
    EXPECT_EQ(error_kind([&] { MismatchProof::parse(bad, "proof"); }), ErrorKind::kMalformed)
        << "byte " << i;
  }
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{7}, std::size_t{40}, good.size() - 1}) {
    EXPECT_EQ(error_kind([&] { MismatchProof::parse(ByteView(good).first(size), "proof"); }),
              ErrorKind::kMalformed);
  }
}

// A verifier that signs whatever it likes still cannot exchange what the prover is held to.
TEST(MismatchProof, ASigningVerifierCannotFrame) {
  Case c;
  const auto kind = [&](const auto& change) {
    MismatchProof proof = c.proof();
    change(proof);
    proof.sign(c.verifier);
    return opens_as(proof);
  };
  const auto is_malformed = [&](const char* what, const auto& change) {
    EXPECT_EQ(kind(change), ErrorKind::kMalformed) << what;
  };
  is_malformed("a row that was not committed", [](MismatchProof& p) { p.opening[5] ^= 1; });
  is_malformed("the row of another position", [&](MismatchProof& p) {
    p.opening = c.opening({1, {1}});
  });
  is_malformed("another position", [](MismatchProof& p) { p.position = 1; });
  is_malformed("another layer", [](MismatchProof& p) { p.layer = 0; });
  is_malformed("a layer beyond", [](MismatchProof& p) { p.layer = 2; });
  is_malformed("a position beyond", [](MismatchProof& p) { p.position = 4; });
  is_malformed("another prefix", [](MismatchProof& p) { p.prefix = 4; });
  is_malformed("another kind", [](MismatchProof& p) { p.kind = MismatchProof::Kind::kHead; });
  is_malformed("no header", [](MismatchProof& p) { p.header.clear(); });
  is_malformed("an altered record", [](MismatchProof& p) { p.record[40] ^= 1; });
  is_malformed("another record", [&](MismatchProof& p) {
    Record other = c.run.record;
    other.provenance["nonce"] = std::string(64, '8');
    other.sign(c.operator_key);
    p.record = other.serialize();
  });
  is_malformed("roots of its own", [&](MismatchProof& p) {
    OpeningHeader header = c.header;
    header.tree_roots[0] = sha256("mine");
    header.sign(c.operator_key);
    p.header = header.serialize();
  });
  is_malformed("the answer to another challenge", [&](MismatchProof& p) {
    OpeningHeader header = c.header;
    header.challenge = sha256("other");
    header.sign(c.operator_key);
    p.header = header.serialize();
  });
  is_malformed("a challenge by somebody else", [&](MismatchProof& p) {
    Challenge other = c.challenge;
    other.commitment.sign(fixed_key("auditor", 5));
    other.sign(fixed_key("auditor", 5));
    p.challenge = other.serialize();
  });
  is_malformed("no receipt of the commitment",
               [](MismatchProof& p) { p.commitment_receipt.clear(); });
  is_malformed("the receipt of another entry", [&](MismatchProof& p) {
    const std::vector<Digest> leaves{
        merkle_leaf(log_entry_for_record(c.run.record.digest())),
        merkle_leaf(log_entry_for_audit(c.challenge.commitment.digest()))};
    p.commitment_receipt = c.receipt_of(0, leaves);
  });
  // The log has grown since: the seed would be another one, of the verifier's choice.
  is_malformed("a later checkpoint", [&](MismatchProof& p) {
    const std::vector<Digest> leaves{
        merkle_leaf(log_entry_for_record(c.run.record.digest())),
        merkle_leaf(log_entry_for_audit(c.challenge.commitment.digest())),
        merkle_leaf(log_entry_for_record(sha256("later")))};
    Case later;
    later.challenge.checkpoint_note =
        sign_checkpoint({"log.example", 3, merkle_root(leaves), {}}, fixed_key("log.example", 4));
    later.challenge.sign(c.verifier);
    OpeningHeader header = c.header;
    header.challenge = later.challenge.digest();
    header.sign(c.operator_key);
    p.challenge = later.challenge.serialize();
    p.header = header.serialize();
    p.commitment_receipt = later.receipt_of(1, leaves);
    p.operators.clear();
  });
  is_malformed("operators of another cell", [&](MismatchProof& p) {
    CellOperators operators = c.operators();
    operators.position = 1;
    operators.sign(c.operator_key);
    p.operators = operators.serialize();
  });
  is_malformed("operators by somebody else", [&](MismatchProof& p) {
    CellOperators operators = c.operators();
    operators.sign(fixed_key("other", 9));
    p.operators = operators.serialize();
  });
}

TEST(MismatchProof, EndsAndWholeRecords) {
  Case c;
  AuditSample sample;
  sample.heads = {3};
  MismatchProof head = c.proof();
  head.kind = MismatchProof::Kind::kHead;
  head.layer = 0;
  head.position = 3;
  head.prefix = 0;
  head.operators.clear();
  head.opening = EndsOpening::make(
      c.proofs, c.run.trace.shape(), sample,
      [&](LeafType type, std::uint32_t layer, std::uint64_t position) {
        const RowRange range =
            evidence_row_range(c.run.trace.shape(), type, layer, position).value();
        return ByteView(c.run.rows).subspan(range.offset, range.bytes);
      });
  head.sign(c.verifier);
  EXPECT_EQ(open_mismatch(MismatchProof::parse(head.serialize(), "head"), "head").ends->heads(),
            (std::vector<std::uint64_t>{3}));
  head.position = 1;  // emitted nothing
  head.sign(c.verifier);
  EXPECT_EQ(opens_as(head), ErrorKind::kMalformed);

  MismatchProof whole;
  whole.record = c.run.record.serialize();
  whole.finding.op = "record";
  whole.sign(c.verifier);
  EXPECT_FALSE(open_mismatch(MismatchProof::parse(whole.serialize(), "whole"), "whole").challenge);
  whole.opening = {1};
  whole.sign(c.verifier);
  EXPECT_EQ(opens_as(whole), ErrorKind::kMalformed);
}

TEST(MismatchProof, WhoMustHaveSigned) {
  Case c;
  const PublicKey log = fixed_key("log.example", 4).public_key();
  EXPECT_EQ(prover_key(c.run.record, log).name, "operator");
  c.run.record.signature.reset();
  EXPECT_EQ(prover_key(c.run.record, log), log);
  EXPECT_EQ(error_kind([&] { prover_key(c.run.record, std::nullopt); }), ErrorKind::kCannotJudge);
}

}  // namespace
}  // namespace bitwitness
