// The log of a serving prover: what it made and what verifiers announced, in one order.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "attest/keys.h"
#include "attest/log.h"

namespace bitwitness {

// Thread-safe. Errors as LogWriter and LogReader throw them; all of them are this prover's own.
// Once it has seen a head it signs nothing on a log that does not go on from there (an older copy
// put back, say): that would be a second history under one key.
class ProverLog {
 public:
  // Opened once, so that a log that cannot be written is known before the first request.
  ProverLog(std::string dir, SigningKey key);

  const SigningKey& key() const { return key_; }
  std::vector<AppendResult> append(const std::vector<Bytes>& entries);

  // Appends the entry of `commitment`, which is not there, alone. Returns its index.
  std::uint64_t append_audit(const Digest& commitment);

  // The receipts of an audit under the head that ends with the commitment, so that they are the
  // same whenever they are asked for. record_index < commitment_index.
  struct AuditReceipts {
    std::string commitment;
    std::string record;
  };
  AuditReceipts audit_receipts(std::uint64_t commitment_index, std::uint64_t record_index) const;
  std::string commitment_receipt(std::uint64_t commitment_index) const;

  // Whether the entry of `record` stands at `index`.
  bool has_record(const Digest& record, std::uint64_t index) const;
  // Where the entry of `commitment` stands; nullopt: nowhere. Reads what was appended to the log
  // since the last call; it does not keep append() waiting.
  std::optional<std::uint64_t> find_audit(const Digest& commitment);

 private:
  // The log as it is now, which goes on from what was seen before; else an infrastructure Error.
  LogReader reader() const;

  const std::string dir_;
  const SigningKey key_;
  std::mutex mutex_;  // one writer at a time waits for the lock on the directory

  mutable std::mutex head_mutex_;
  mutable Checkpoint head_;  // the largest that was seen

  std::mutex audits_mutex_;  // what follows
  std::map<Digest, std::uint64_t> audits_;
  std::uint64_t audits_known_ = 0;  // entries of the log that were looked at
};

}  // namespace bitwitness
