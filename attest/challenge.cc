#include "attest/challenge.h"

#include <algorithm>
#include <charconv>
#include <unordered_map>

#include "attest/base/canonical.h"
#include "attest/base/error.h"
#include "attest/base/merkle.h"
#include "attest/base/sha256.h"
#include "attest/log.h"

namespace bitwitness {
namespace {

constexpr std::string_view kSecretTag = "bitwitness/audit-secret/v1\n";
constexpr std::string_view kCommitmentMagic = "bitwitness/audit-commitment";
constexpr std::string_view kCommitmentTag = "bitwitness/audit-commitment/v1\n";
constexpr std::string_view kCommitmentSignatureTag = "bitwitness/audit-commitment-signature/v1\n";
constexpr std::string_view kChallengeMagic = "bitwitness/challenge";
constexpr std::string_view kChallengeTag = "bitwitness/challenge/v1\n";
constexpr std::string_view kChallengeSignatureTag = "bitwitness/challenge-signature/v1\n";
constexpr std::string_view kDrawTag = "bitwitness/draw/v1\n";
constexpr std::uint16_t kVersion = 1;
constexpr std::uint64_t kMaxListedLayers = 1 << 16;

constexpr std::uint8_t kLayerStream = 1;
constexpr std::uint8_t kCellStream = 2;
constexpr std::uint8_t kEmbeddingStream = 3;
constexpr std::uint8_t kHeadStream = 4;

// The stream's words: the first 8 bytes, little-endian, of SHA-256(tag ‖ seed ‖ stream ‖ counter).
class Draws {
 public:
  Draws(const Digest& seed, std::uint8_t stream) : seed_(seed), stream_(stream) {}

  // Uniform in 0..n-1: words at or above the largest multiple of n are skipped.
  std::uint64_t below(std::uint64_t n) {
    const std::uint64_t excess = (~std::uint64_t{0} % n + 1) % n;  // 2^64 mod n
    std::uint64_t word = next();
    while (word > ~std::uint64_t{0} - excess) word = next();
    return word % n;
  }

 private:
  std::uint64_t next() {
    Writer writer;
    writer.raw(as_bytes(kDrawTag));
    writer.digest(seed_);
    writer.u8(stream_);
    writer.u64(counter_++);
    const Digest digest = sha256(writer.data());
    std::uint64_t word = 0;
    for (int i = 7; i >= 0; --i) word = word << 8 | digest.bytes[static_cast<std::size_t>(i)];
    return word;
  }

  Digest seed_;
  std::uint8_t stream_;
  std::uint64_t counter_ = 0;
};

void write_plan(Writer& writer, const AuditPlan& plan) {
  writer.u8(static_cast<std::uint8_t>(plan.level));
  writer.u8(static_cast<std::uint8_t>(plan.layers.kind));
  writer.u32(static_cast<std::uint32_t>(plan.layers.listed.size()));
  for (const std::uint32_t layer : plan.layers.listed) writer.u32(layer);
  writer.u32(plan.layers.random);
  writer.u64(plan.cells);
  writer.u64(plan.ends);
}

AuditPlan read_plan(Reader& reader) {
  AuditPlan plan;
  plan.level = static_cast<AuditLevel>(reader.u8("level"));
  if (plan.level != AuditLevel::kCell && plan.level != AuditLevel::kLayer) {
    reader.fail("level", "unknown");
  }
  const std::uint8_t kind = reader.u8("choice of layers");
  if (kind > 2) reader.fail("choice of layers", "unknown");
  plan.layers.kind = static_cast<LayerChoice::Kind>(kind);
  const std::uint32_t count = reader.count(kMaxListedLayers, 4, "listed layers");
  for (std::uint32_t i = 0; i < count; ++i) {
    plan.layers.listed.push_back(reader.u32("listed layer"));
    if (i > 0 && plan.layers.listed[i - 1] >= plan.layers.listed[i]) {
      reader.fail("listed layer", "out of order or twice there");
    }
  }
  plan.layers.random = reader.u32("random layers");
  plan.cells = reader.u64("cells");
  plan.ends = reader.u64("ends");
  const bool listed = plan.layers.kind == LayerChoice::Kind::kListed;
  const bool random = plan.layers.kind == LayerChoice::Kind::kRandom;
  if (listed != !plan.layers.listed.empty() || random != (plan.layers.random != 0)) {
    reader.fail("choice of layers", "its list or number does not fit its kind");
  }
  if ((plan.level == AuditLevel::kCell) != (plan.cells != 0)) {
    reader.fail("cells", "must be 0 exactly at level 'layer'");
  }
  if (plan.cells > kMaxPlanCells || plan.ends > kMaxPlanCells) {
    reader.fail("cells", "more than 2^24");
  }
  return plan;
}

Bytes commitment_body(const AuditCommitment& commitment) {
  Writer writer;
  writer.str(kCommitmentMagic);
  writer.u16(kVersion);
  writer.digest(commitment.record);
  writer.digest(commitment.secret_hash);
  write_plan(writer, commitment.plan);
  // The key is under the digest, so that nobody's commitment can be signed by another.
  writer.str(commitment.verifier.key.name);
  writer.raw(commitment.verifier.key.bytes);
  return writer.take();
}

}  // namespace

const char* audit_level_name(AuditLevel level) {
  return level == AuditLevel::kCell ? "cell" : "layer";
}

LayerChoice LayerChoice::parse(std::string_view text) {
  const auto bad = [&](const std::string& why) {
    return usage_error("layers '" + std::string(text.substr(0, 100)) + "': " + why +
                       "; use all, a list such as 0,5, or random:K");
  };
  const auto number = [&](std::string_view digits) {
    std::uint32_t value = 0;
    const char* const end = digits.data() + digits.size();
    const auto parsed = std::from_chars(digits.data(), end, value);
    if (parsed.ec != std::errc() || parsed.ptr != end) throw bad("not a number");
    return value;
  };
  LayerChoice out;
  if (text == "all") return out;
  constexpr std::string_view kRandomHead = "random:";
  if (text.starts_with(kRandomHead)) {
    out.kind = Kind::kRandom;
    out.random = number(text.substr(kRandomHead.size()));
    if (out.random == 0) throw bad("at least one layer must be drawn");
    return out;
  }
  out.kind = Kind::kListed;
  for (std::string_view rest = text;;) {
    const std::size_t comma = rest.find(',');
    out.listed.push_back(number(rest.substr(0, comma)));
    if (out.listed.size() > kMaxListedLayers) throw bad("too many layers");
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  std::sort(out.listed.begin(), out.listed.end());
  if (std::adjacent_find(out.listed.begin(), out.listed.end()) != out.listed.end()) {
    throw bad("a layer is twice there");
  }
  return out;
}

std::string LayerChoice::text() const {
  if (kind == Kind::kAll) return "all";
  if (kind == Kind::kRandom) return "random:" + std::to_string(random);
  std::string out;
  for (const std::uint32_t layer : listed) {
    out += (out.empty() ? "" : ",") + std::to_string(layer);
  }
  return out;
}

void AuditPlan::check(const TraceShape& shape) const {
  if (!layers.listed.empty() && layers.listed.back() >= shape.layers) {
    throw usage_error("layer " + std::to_string(layers.listed.back()) +
                      " is not there: the record's model has layers 0 to " +
                      std::to_string(shape.layers - 1));
  }
  if (layers.random > shape.layers) {
    throw usage_error(std::to_string(layers.random) +
                      " layers cannot be drawn: the record's model has " +
                      std::to_string(shape.layers));
  }
  if (level == AuditLevel::kCell && cells == 0) {
    throw usage_error("0 cells show nothing; ask for at least one");
  }
  if (cells > kMaxPlanCells || ends > kMaxPlanCells) {
    throw usage_error("more than 2^24 cells or ends; use --level layer or --level full");
  }
}

Digest secret_hash(const AuditSecret& secret) {
  return sha256({as_bytes(kSecretTag), ByteView(secret)});
}

Digest AuditCommitment::digest() const {
  return sha256({as_bytes(kCommitmentTag), commitment_body(*this)});
}

void AuditCommitment::sign(const SigningKey& key) {
  verifier.key = key.public_key();
  verifier = KeySignature::sign(key, kCommitmentSignatureTag, digest());
}

Bytes AuditCommitment::serialize() const {
  Writer writer;
  writer.raw(commitment_body(*this));
  verifier.write(writer);
  return writer.take();
}

AuditCommitment AuditCommitment::parse(ByteView bytes, const std::string& document) {
  Reader reader(bytes, document);
  if (bytes.size() > kMaxCommitmentBytes) reader.fail("commitment", "over the limit of 1 MiB");
  reader.expect_head(kCommitmentMagic, kVersion);
  AuditCommitment out;
  out.record = reader.digest("record");
  out.secret_hash = reader.digest("secret hash");
  out.plan = read_plan(reader);
  const std::string name = reader.str(255, "verifier key name");
  const ByteView key = reader.raw(32, "verifier public key");
  out.verifier = KeySignature::read(reader);
  reader.expect_end();
  if (out.verifier.key.name != name ||
      !std::equal(key.begin(), key.end(), out.verifier.key.bytes.begin())) {
    throw malformed_error(document + ": signed by another key than the one it names");
  }
  if (!out.verifier.good(kCommitmentSignatureTag, out.digest())) {
    throw malformed_error(document + ": the verifier's signature is not good");
  }
  return out;
}

Digest Challenge::digest() const {
  Writer writer;
  writer.raw(as_bytes(kChallengeTag));
  writer.digest(commitment.digest());
  writer.raw(secret);
  writer.str(checkpoint_note);
  return sha256(writer.data());
}

void Challenge::sign(const SigningKey& key) {
  verifier = KeySignature::sign(key, kChallengeSignatureTag, digest());
}

Bytes Challenge::serialize() const {
  Writer writer;
  writer.str(kChallengeMagic);
  writer.u16(kVersion);
  writer.bytes(commitment.serialize());
  writer.raw(secret);
  writer.str(checkpoint_note);
  verifier.write(writer);
  return writer.take();
}

Challenge Challenge::parse(ByteView bytes, const std::string& document) {
  Reader reader(bytes, document);
  if (bytes.size() > kMaxChallengeBytes) reader.fail("challenge", "over the limit of 3 MiB");
  reader.expect_head(kChallengeMagic, kVersion);
  Challenge out;
  out.commitment =
      AuditCommitment::parse(reader.bytes(kMaxCommitmentBytes, "commitment"), document);
  const ByteView secret = reader.raw(out.secret.size(), "secret");
  std::copy(secret.begin(), secret.end(), out.secret.begin());
  out.checkpoint_note = reader.str(kMaxNoteBytes, "checkpoint");
  out.verifier = KeySignature::read(reader);
  reader.expect_end();
  if (secret_hash(out.secret) != out.commitment.secret_hash) {
    throw malformed_error(document + ": the secret is not the one committed to");
  }
  if (out.verifier.key != out.commitment.verifier.key) {
    throw malformed_error(document + ": signed by another key than its commitment");
  }
  if (!out.verifier.good(kChallengeSignatureTag, out.digest())) {
    throw malformed_error(document + ": the verifier's signature is not good");
  }
  return out;
}

Checkpoint Challenge::checkpoint(const std::string& document) const {
  return parse_checkpoint(checkpoint_note, document);
}

void check_challenge_checkpoint(const Challenge& challenge, const std::string& commitment_receipt,
                                const std::string& document) {
  const auto fail = [&](const std::string& problem) {
    throw malformed_error(document + ": receipt of the commitment: " + problem);
  };
  const TlogProof proof = TlogProof::parse(commitment_receipt, document);
  const Checkpoint head = challenge.checkpoint(document);
  if (parse_checkpoint(proof.checkpoint_note, document).body() != head.body()) {
    fail("it is under another checkpoint than the challenge");
  }
  if (head.size != proof.index + 1) {
    fail("the commitment is entry " + std::to_string(proof.index) + " of " +
         std::to_string(head.size) + "; the seed's checkpoint is the one that ends with it");
  }
  const Bytes entry = log_entry_for_audit(challenge.commitment.digest());
  if (!verify_inclusion(merkle_leaf(entry), proof.index, head.size, proof.hashes, head.root)) {
    fail("it does not lead from the commitment to the checkpoint");
  }
}

Digest challenge_seed(const AuditSecret& secret, const Checkpoint& checkpoint,
                      const Digest& trace_root) {
  return sha256({ByteView(secret), as_bytes(checkpoint.body()), trace_root.view()});
}

std::uint64_t AuditSample::cell_count() const {
  std::uint64_t count = 0;
  for (const LayerCells& cells : layers) count += cells.positions.size();
  return count;
}

std::vector<std::uint64_t> draw_without_replacement(const Digest& seed, std::uint8_t stream,
                                                    std::uint64_t population, std::uint64_t count) {
  // Fisher and Yates' shuffle of 0..population-1, as far as it is needed; `moved` holds what does
  // not stand in its own place any more.
  Draws draws(seed, stream);
  std::unordered_map<std::uint64_t, std::uint64_t> moved;
  const auto at = [&](std::uint64_t i) {
    const auto found = moved.find(i);
    return found == moved.end() ? i : found->second;
  };
  std::vector<std::uint64_t> out;
  out.reserve(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t j = i + draws.below(population - i);
    out.push_back(at(j));
    moved[j] = at(i);
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::vector<std::uint32_t> draw_layers(const AuditPlan& plan, const TraceShape& shape,
                                       const Digest& seed) {
  std::vector<std::uint32_t> layers = plan.layers.listed;
  if (plan.layers.kind == LayerChoice::Kind::kAll) {
    for (std::uint32_t l = 0; l < shape.layers; ++l) layers.push_back(l);
  } else if (plan.layers.kind == LayerChoice::Kind::kRandom) {
    const std::uint64_t count = std::min(plan.layers.random, shape.layers);
    for (const std::uint64_t l :
         draw_without_replacement(seed, kLayerStream, shape.layers, count)) {
      layers.push_back(static_cast<std::uint32_t>(l));
    }
  }
  return layers;
}

AuditSample draw_sample(const AuditPlan& plan, const TraceShape& shape, const Digest& seed) {
  AuditSample out;
  const std::uint64_t T = shape.positions;
  const std::vector<std::uint32_t> layers = draw_layers(plan, shape, seed);
  const std::uint64_t population = layers.size() * T;
  const std::uint64_t count =
      plan.level == AuditLevel::kLayer ? population : std::min(plan.cells, population);
  const auto take = [&](std::uint64_t cell) {
    const std::uint32_t layer = layers[cell / T];
    if (out.layers.empty() || out.layers.back().layer != layer) out.layers.push_back({layer, {}});
    out.layers.back().positions.push_back(cell % T);
  };
  if (count == population) {
    for (std::uint64_t cell = 0; cell < population; ++cell) take(cell);
  } else {
    for (const std::uint64_t cell :
         draw_without_replacement(seed, kCellStream, population, count)) {
      take(cell);
    }
  }
  // Half of the ends are heads: there are few of them beside a long prompt, and the tokens are
  // theirs.
  const std::uint64_t N = shape.emitted;
  const std::uint64_t ends = std::min(plan.ends, T + N);
  const std::uint64_t embeddings = std::max(ends / 2, ends - std::min(ends, N));
  out.embeddings = draw_without_replacement(seed, kEmbeddingStream, T, embeddings);
  out.heads = draw_without_replacement(seed, kHeadStream, N, ends - embeddings);
  for (std::uint64_t& head : out.heads) head += T - N;
  return out;
}

}  // namespace bitwitness
