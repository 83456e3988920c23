#include "attest/mismatch_proof.h"

#include "attest/base/canonical.h"
#include "attest/base/error.h"
#include "attest/base/sha256.h"
#include "attest/log.h"

namespace bitwitness {
namespace {

constexpr std::string_view kMagic = "bw-proof";
constexpr std::uint32_t kVersion = 1;
constexpr std::string_view kTag = "bitwitness/mismatch-proof/v1\n";
constexpr std::string_view kSignatureTag = "bitwitness/mismatch-proof-signature/v1\n";
constexpr std::uint64_t kMaxOperatorName = 64;
constexpr std::uint64_t kMaxBackendName = 1024;

Bytes body(const MismatchProof& proof) {
  Writer writer;
  writer.raw(as_bytes(kMagic));
  writer.u32(kVersion);
  writer.u8(static_cast<std::uint8_t>(proof.kind));
  writer.u32(proof.layer);
  writer.u64(proof.position);
  writer.u64(proof.prefix);
  for (const ByteView section :
       {ByteView(proof.record), as_bytes(proof.receipt), as_bytes(proof.commitment_receipt),
        ByteView(proof.challenge), ByteView(proof.header), ByteView(proof.opening),
        ByteView(proof.operators)}) {
    writer.u64(section.size());
    writer.raw(section);
  }
  writer.str(proof.finding.op);
  writer.u8(proof.finding.element ? 1 : 0);
  writer.u64(proof.finding.element.value_or(0));
  writer.u32(proof.finding.claimed_bits);
  writer.u32(proof.finding.computed_bits);
  writer.str(proof.backend);
  return writer.take();
}

Bytes copy(ByteView view) {
  return Bytes(view.begin(), view.end());
}

}  // namespace

void MismatchProof::sign(const SigningKey& key) {
  verifier = KeySignature::sign(key, kSignatureTag, sha256({as_bytes(kTag), body(*this)}));
}

Bytes MismatchProof::serialize() const {
  Writer writer;
  writer.raw(body(*this));
  verifier.write(writer);
  return writer.take();
}

MismatchProof MismatchProof::parse(ByteView bytes, const std::string& document) {
  Reader reader(bytes, document);
  if (bytes.size() > kMaxMismatchProofBytes) reader.fail("proof", "over the limit of 5 GiB");
  if (as_text(reader.raw(kMagic.size(), "magic")) != kMagic) {
    reader.fail("magic", "this is no Bitwitness mismatch proof");
  }
  if (const auto version = reader.u32("version"); version != kVersion) {
    reader.fail("version", std::to_string(version) + " is unknown; this program reads 1");
  }
  MismatchProof out;
  const std::uint8_t kind = reader.u8("kind");
  if (kind > static_cast<std::uint8_t>(Kind::kHead)) reader.fail("kind", "unknown");
  out.kind = static_cast<Kind>(kind);
  out.layer = reader.u32("layer");
  out.position = reader.u64("position");
  out.prefix = reader.u64("prefix");
  const auto section = [&](const char* field) { return reader.raw(reader.u64(field), field); };
  out.record = copy(section("record section"));
  const ByteView receipt = section("receipt section");
  if (receipt.size() > kMaxReceiptBytes) reader.fail("receipt section", "too long");
  out.receipt = std::string(as_text(receipt));
  const ByteView commitment_receipt = section("commitment receipt section");
  if (commitment_receipt.size() > kMaxReceiptBytes) {
    reader.fail("commitment receipt section", "too long");
  }
  out.commitment_receipt = std::string(as_text(commitment_receipt));
  out.challenge = copy(section("challenge section"));
  out.header = copy(section("header section"));
  out.opening = copy(section("opening section"));
  out.operators = copy(section("operators section"));
  out.finding.op = reader.str(kMaxOperatorName, "operator");
  const std::uint8_t has_element = reader.u8("element flag");
  if (has_element > 1) reader.fail("element flag", "neither 0 nor 1");
  const std::uint64_t element = reader.u64("element");
  if (has_element == 1) out.finding.element = element;
  out.finding.claimed_bits = reader.u32("claimed bits");
  out.finding.computed_bits = reader.u32("computed bits");
  if (has_element == 0 &&
      (element != 0 || out.finding.claimed_bits != 0 || out.finding.computed_bits != 0)) {
    reader.fail("element", "there is none, so it and its bits must be 0");
  }
  out.backend = reader.str(kMaxBackendName, "backend");
  out.verifier = KeySignature::read(reader);
  reader.expect_end();
  const bool opened = out.kind != Kind::kRecord;
  if (opened == out.challenge.empty() || opened == out.header.empty() ||
      opened == out.opening.empty() || opened == out.commitment_receipt.empty() ||
      (out.kind == Kind::kCell) == (out.prefix == 0)) {
    throw malformed_error(document + ": its sections do not fit its kind");
  }
  if (out.kind != Kind::kCell && (!out.operators.empty() || out.layer != 0)) {
    throw malformed_error(document + ": operators or a layer where there is no cell");
  }
  if (!out.verifier.good(kSignatureTag, sha256({as_bytes(kTag), body(out)}))) {
    throw malformed_error(document + ": the verifier's signature is not good");
  }
  return out;
}

PublicKey prover_key(const Record& record, const std::optional<PublicKey>& log_key) {
  if (record.signature) return record.signature->key;
  if (log_key) return *log_key;
  throw cannot_judge_error(
      "the record is signed by no operator and the log's key is not known, so nobody can be held "
      "to it");
}

OpenedMismatch open_mismatch(const MismatchProof& proof, const std::string& document) {
  OpenedMismatch out;
  out.record = Record::parse(proof.record, document + ", record");
  if (proof.kind == MismatchProof::Kind::kRecord) return out;
  const TraceShape& shape = out.record.claim.trace_shape;
  const auto fail = [&](const std::string& problem) {
    throw malformed_error(document + ": " + problem);
  };

  out.challenge = Challenge::parse(proof.challenge, document + ", challenge");
  if (out.challenge->commitment.record != out.record.digest()) {
    fail("the challenge is about another record");
  }
  if (out.challenge->verifier.key != proof.verifier.key) {
    fail("the challenge is by another verifier than the proof");
  }
  check_challenge_checkpoint(*out.challenge, proof.commitment_receipt, document);
  out.header = OpeningHeader::parse(proof.header, shape, out.record.claim.trace_root,
                                    out.challenge->digest(), document + ", opening header");
  const std::span<const Digest> roots = out.header->tree_roots;

  const std::uint64_t t = proof.position;
  if (t >= shape.positions) fail("the position is beyond the record's");
  if (proof.kind == MismatchProof::Kind::kCell) {
    if (proof.layer >= shape.layers) fail("the layer is beyond the record's");
    if (proof.prefix <= t || proof.prefix > shape.positions) fail("the prefix does not fit");
    const std::uint64_t only[] = {t};
    if (proof.opening.size() != LayerOpening::bytes(shape, only, proof.prefix)) {
      fail("the opening does not have the size of this cell's");
    }
    out.cell.emplace(shape, LayerCells{proof.layer, {t}}, proof.prefix, proof.opening);
    out.cell->check(roots, document);
    if (!proof.operators.empty()) {
      out.operators = CellOperators::parse(proof.operators, out.challenge->digest(), proof.layer, t,
                                           document + ", operators");
      if (out.operators->prover.key != out.header->prover.key) {
        fail("operators and opening are signed by different keys");
      }
    }
    return out;
  }
  const bool head = proof.kind == MismatchProof::Kind::kHead;
  if (head && t < shape.positions - shape.emitted) fail("this position emitted no token");
  std::vector<std::uint64_t> embeddings, heads;
  (head ? heads : embeddings).push_back(t);
  if (proof.opening.size() != EndsOpening::bytes(shape, embeddings, heads)) {
    fail("the opening does not have the size of this end's");
  }
  out.ends.emplace(shape, embeddings, heads, proof.opening);
  out.ends->check(roots, document);
  return out;
}

}  // namespace bitwitness
