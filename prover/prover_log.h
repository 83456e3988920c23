// The log of a serving prover: what it made and what verifiers announced, in one order.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "attest/keys.h"
#include "attest/log.h"

namespace bitwitness {

// Thread-safe. Errors as LogWriter and LogReader throw them; all of them are this prover's own.
class ProverLog {
 public:
  // Opened once, so that a log that cannot be written is known before the first request.
  ProverLog(std::string dir, SigningKey key);

  const SigningKey& key() const { return key_; }
  std::vector<AppendResult> append(const std::vector<Bytes>& entries);

  // The receipts of an audit under one checkpoint, the newest: of the commitment's entry, which is
  // appended unless it is there, and of the record's.
  struct AuditReceipts {
    std::uint64_t commitment_index = 0;
    std::string commitment;
    std::string record;
  };
  AuditReceipts log_audit(const Digest& commitment, std::uint64_t record_index);

  // Whether the entry of `record` stands at `index`.
  bool has_record(const Digest& record, std::uint64_t index) const;
  // Where the entry of `commitment` stands; nullopt: nowhere. Reads the whole log.
  std::optional<std::uint64_t> find_audit(const Digest& commitment) const;

 private:
  const std::string dir_;
  const SigningKey key_;
  std::mutex mutex_;  // one writer at a time waits for the lock on the directory
};

}  // namespace bitwitness
