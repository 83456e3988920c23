// A mismatch proof (.bwproof) judged by a third party, offline: the accusation is confirmed or
// refuted with the party's own copy of the model, on whatever machine it has.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "attest/base/progress.h"
#include "attest/keys.h"
#include "attest/mismatch_proof.h"
#include "kernels/backend.h"
#include "verifier/audit_model.h"
#include "verifier/verdict.h"

namespace bitwitness {

struct RecheckOptions {
  // Of the log that the proof's checkpoint and receipt must be by. Needed for records that no
  // operator signed: then the log's key answers for them, and an opening must bear it.
  std::optional<PublicKey> log_key;
  std::optional<PublicKey> operator_key;  // the record must be signed by it
  ProgressFn on_hash;                     // proofs of whole records: hashing the weights
  ProgressFn on_replay;
};

struct RecheckReport {
  Verdict verdict = Verdict::kCannotJudge;
  std::vector<std::string> findings;  // what was found, most telling first
  std::vector<std::string> notes;
  std::optional<MismatchPlace> place;  // of a confirmed mismatch, as recomputed here
  MismatchProof::Kind kind = MismatchProof::Kind::kRecord;
  std::uint32_t layer = 0;
  std::uint64_t position = 0;
  MismatchFinding stated;
  std::string stated_backend;  // self-reported
  std::string backend, device;
  Digest record_digest;
  std::string accuser;                 // verifier key that signed the proof
  std::optional<std::string> accused;  // key that signed the opening, or the record
  bool logged = false;                 // the receipt was checked and is good
};

// Confirmed: mismatch. The cell is good after all: match, with a finding that says so. Anything
// that stands in the way of judging: cannot_judge. Throws malformed for a proof that is ill-formed
// or states another finding than the one that is recomputed, usage and infrastructure Errors for
// one's own files and machine. `dir` is the auditor's own copy of the model.
RecheckReport recheck(const MismatchProof& proof, const std::string& dir, Backend& backend,
                      const RecheckOptions& options, const std::string& document);

}  // namespace bitwitness
