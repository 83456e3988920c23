// A mismatch as a file of its own (.bwproof): everything that a third party needs to see it again
// with its own copy of the model, and the signatures of both sides (AUDIT_FORMAT.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "attest/base/bytes.h"
#include "attest/challenge.h"
#include "attest/key_signature.h"
#include "attest/opening.h"
#include "attest/record.h"

namespace bitwitness {

// What the verifier says it found; a recheck finds it again or refutes it.
struct MismatchFinding {
  std::string
      op;  // operator as layer_forward names it; "embedding", "lm_head", "sampler", "record"
  std::optional<std::uint64_t> element;
  std::uint32_t claimed_bits = 0;   // with an element
  std::uint32_t computed_bits = 0;  // likewise
  friend bool operator==(const MismatchFinding&, const MismatchFinding&) = default;
};

struct MismatchProof {
  enum class Kind : std::uint8_t {
    kRecord = 0,     // seen by re-executing the whole record, which is all that is in here
    kCell = 1,       // `opening` is a LayerOpening of (layer, position)
    kEmbedding = 2,  // `opening` is an EndsOpening of one embedding
    kHead = 3,       // `opening` is an EndsOpening of one head
  };
  Kind kind = Kind::kRecord;
  std::uint32_t layer = 0;
  std::uint64_t position = 0;
  std::uint64_t prefix = 0;        // kCell: as LayerOpening has it; else 0
  Bytes record;                    // file of RECORD_FORMAT.md
  std::string receipt;             // of the record in the log; may be empty
  std::string commitment_receipt;  // of the commitment, under the challenge's checkpoint
  Bytes challenge;                 // Challenge; empty for kRecord
  Bytes header;                    // OpeningHeader, the prover's signature; empty for kRecord
  Bytes opening;                   // empty for kRecord
  Bytes operators;                 // CellOperators; empty when the prover did not give them
  MismatchFinding finding;
  std::string backend;  // that computed the other bits, for people
  KeySignature verifier;

  void sign(const SigningKey& key);
  Bytes serialize() const;
  // Form and limits, the verifier's signature; any flaw is malformed.
  static MismatchProof parse(ByteView bytes, const std::string& document);
};
constexpr std::uint64_t kMaxMismatchProofBytes = kMaxRecordBytes + (std::uint64_t{1} << 30);

// The parts of a proof, each checked as far as that is possible without the model: the record,
// receipt aside; the challenge is about this record and by the key that signed the proof, and its
// checkpoint is the head that the log had with the commitment as its last entry (whose head that
// is, its signature says, which is for the caller to check); the header answers it and is signed by
// the key that `prover_key` gives; the opening leads to its roots. Malformed otherwise.
struct OpenedMismatch {
  Record record;
  std::optional<Challenge> challenge;
  std::optional<OpeningHeader> header;
  std::optional<LayerOpening> cell;
  std::optional<EndsOpening> ends;
  std::optional<CellOperators> operators;
};
OpenedMismatch open_mismatch(const MismatchProof& proof, const std::string& document);

// Whose signature an opening must bear: the operator's who signed the record; for a record that
// nobody signed the log's that the checkpoint is by, which `log_key` is.
PublicKey prover_key(const Record& record, const std::optional<PublicKey>& log_key);

}  // namespace bitwitness
