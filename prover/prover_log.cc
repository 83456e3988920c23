#include "prover/prover_log.h"

#include <utility>

namespace bitwitness {

ProverLog::ProverLog(std::string dir, SigningKey key) : dir_(std::move(dir)), key_(std::move(key)) {
  const LogWriter writer(dir_, key_);
}

std::vector<AppendResult> ProverLog::append(const std::vector<Bytes>& entries) {
  const std::scoped_lock lock(mutex_);
  return LogWriter(dir_, key_).append(entries);
}

ProverLog::AuditReceipts ProverLog::log_audit(const Digest& commitment,
                                              std::uint64_t record_index) {
  AuditReceipts out;
  out.commitment_index = append({log_entry_for_audit(commitment)}).front().index;
  const LogReader reader(dir_, key_.public_key());
  out.commitment = reader.receipt(out.commitment_index);
  out.record = reader.receipt(record_index);
  return out;
}

bool ProverLog::has_record(const Digest& record, std::uint64_t index) const {
  const LogReader reader(dir_, key_.public_key());
  return index < reader.size() && reader.entry(index) == log_entry_for_record(record);
}

std::optional<std::uint64_t> ProverLog::find_audit(const Digest& commitment) const {
  return LogReader(dir_, key_.public_key()).find(log_entry_for_audit(commitment));
}

}  // namespace bitwitness
