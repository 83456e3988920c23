// The challenge of a live audit: which cells a verifier asks to see, fixed by neither side alone
// (AUDIT_FORMAT.md). A verifier commits to a secret and to a plan, the log takes the commitment
// in, and secret, checkpoint and trace root together give the seed from which everything is drawn.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/checkpoint.h"
#include "attest/key_signature.h"
#include "attest/trace.h"

namespace bitwitness {

using AuditSecret = std::array<std::uint8_t, 32>;

// How much is opened. An audit by full re-execution needs no opening.
enum class AuditLevel : std::uint8_t {
  kCell = 1,   // cells drawn from those of the chosen layers
  kLayer = 2,  // every cell of the chosen layers
};
const char* audit_level_name(AuditLevel level);

struct LayerChoice {
  enum class Kind : std::uint8_t { kAll = 0, kListed = 1, kRandom = 2 };
  Kind kind = Kind::kAll;
  std::vector<std::uint32_t> listed;  // kListed: ascending, unique, at least one
  std::uint32_t random = 0;           // kRandom: how many are drawn, at least one

  // "all", "0,5" or "random:3"; a usage Error otherwise.
  static LayerChoice parse(std::string_view text);
  std::string text() const;
  friend bool operator==(const LayerChoice&, const LayerChoice&) = default;
};

struct AuditPlan {
  AuditLevel level = AuditLevel::kCell;
  LayerChoice layers;
  std::uint64_t cells = 0;  // kCell: how many are drawn (at most all of them); kLayer: 0
  std::uint64_t ends = 0;   // embeddings and heads drawn, half of each (at most all of them)

  // Usage Error naming the field: listed layers that the shape lacks, nothing to open.
  void check(const TraceShape& shape) const;
  friend bool operator==(const AuditPlan&, const AuditPlan&) = default;
};
constexpr std::uint64_t kMaxPlanCells = std::uint64_t{1} << 24;

// SHA-256("bitwitness/audit-secret/v1\n" ‖ secret)
Digest secret_hash(const AuditSecret& secret);

// What a verifier publishes before it can know what it will ask, signed by it.
struct AuditCommitment {
  Digest record;       // Record::digest()
  Digest secret_hash;  // of a secret that is used once
  AuditPlan plan;
  KeySignature verifier;

  Digest digest() const;  // over all but the signature
  void sign(const SigningKey& key);
  Bytes serialize() const;
  // Form, limits and signature; any flaw is malformed. Trailing bytes are, too.
  static AuditCommitment parse(ByteView bytes, const std::string& document);
};

// The commitment opened, under the log's checkpoint that covers it and the record.
struct Challenge {
  AuditCommitment commitment;
  AuditSecret secret{};
  std::string checkpoint_note;  // as signed by the log
  KeySignature verifier;        // by the commitment's key

  Digest digest() const;  // over all but the signature
  void sign(const SigningKey& key);
  Bytes serialize() const;
  // Form, both signatures by one key, and the secret's hash; any flaw is malformed. Whether the
  // checkpoint is the log's is open_checkpoint's to say, what it covers the receipts'.
  static Challenge parse(ByteView bytes, const std::string& document);
  // The checkpoint, form only.
  Checkpoint checkpoint(const std::string& document) const;
};
constexpr std::uint64_t kMaxCommitmentBytes = 1 << 20;
constexpr std::uint64_t kMaxChallengeBytes = 3 << 20;

// That the challenge's checkpoint is the one that the seed must be from: the head of the log when
// the commitment was its last entry, as `commitment_receipt` (a tlog-proof under that very head)
// shows. With any other one a verifier could choose among the heads that follow. Malformed
// otherwise. Who signed the checkpoint is not looked at.
void check_challenge_checkpoint(const Challenge& challenge, const std::string& commitment_receipt,
                                const std::string& document);

// SHA-256(secret ‖ checkpoint body ‖ trace root)
Digest challenge_seed(const AuditSecret& secret, const Checkpoint& checkpoint,
                      const Digest& trace_root);

// What is to be opened: everything ascending, nothing twice.
struct LayerCells {
  std::uint32_t layer = 0;
  std::vector<std::uint64_t> positions;  // at least one
  friend bool operator==(const LayerCells&, const LayerCells&) = default;
};
struct AuditSample {
  std::vector<LayerCells> layers;         // with at least one cell each
  std::vector<std::uint64_t> embeddings;  // positions 0..T-1
  std::vector<std::uint64_t> heads;       // positions T-N..T-1
  std::uint64_t cell_count() const;
  friend bool operator==(const AuditSample&, const AuditSample&) = default;
};

// The layers that the plan names or draws, ascending; cells are drawn from these.
std::vector<std::uint32_t> draw_layers(const AuditPlan& plan, const TraceShape& shape,
                                       const Digest& seed);

// Draws what the plan asks for. A function of its arguments alone.
AuditSample draw_sample(const AuditPlan& plan, const TraceShape& shape, const Digest& seed);

// `count` of 0..population-1 without replacement, ascending, from one stream of the seed
// (AUDIT_FORMAT.md "Draws"). count <= population.
std::vector<std::uint64_t> draw_without_replacement(const Digest& seed, std::uint8_t stream,
                                                    std::uint64_t population, std::uint64_t count);

}  // namespace bitwitness
