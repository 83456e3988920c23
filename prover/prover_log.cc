#include "prover/prover_log.h"

#include <utility>

#include "attest/base/error.h"
#include "attest/base/merkle.h"

namespace bitwitness {

ProverLog::ProverLog(std::string dir, SigningKey key) : dir_(std::move(dir)), key_(std::move(key)) {
  const LogWriter writer(dir_, key_);
  head_ = LogReader(dir_, key_.public_key()).checkpoint();
}

LogReader ProverLog::reader() const {
  const std::scoped_lock lock(
      head_mutex_);  // so that no older head is read than the one compared with
  LogReader log(dir_, key_.public_key());
  const bool goes_on = log.size() >= head_.size &&
                       verify_consistency(head_.size, log.size(), log.consistency(head_.size),
                                          head_.root, log.checkpoint().root);
  if (!goes_on) {
    throw infrastructure_error(
        dir_ + ": the log does not go on from its head of size " + std::to_string(head_.size) +
        " that this process saw: was an older copy put back? Nothing is signed on it; restore the "
        "newest copy");
  }
  head_ = log.checkpoint();
  return log;
}

std::vector<AppendResult> ProverLog::append(const std::vector<Bytes>& entries) {
  const std::scoped_lock lock(mutex_);
  reader();
  const std::vector<AppendResult> appended = LogWriter(dir_, key_).append(entries);
  reader();  // remembers the new head
  return appended;
}

std::uint64_t ProverLog::append_audit(const Digest& commitment) {
  return append({log_entry_for_audit(commitment)}).front().index;
}

ProverLog::AuditReceipts ProverLog::audit_receipts(std::uint64_t commitment_index,
                                                   std::uint64_t record_index) const {
  const LogReader log = reader();
  return {log.receipt_at(commitment_index, commitment_index + 1, key_),
          log.receipt_at(record_index, commitment_index + 1, key_)};
}

std::string ProverLog::commitment_receipt(std::uint64_t commitment_index) const {
  return reader().receipt_at(commitment_index, commitment_index + 1, key_);
}

bool ProverLog::has_record(const Digest& record, std::uint64_t index) const {
  const LogReader log = reader();
  return index < log.size() && log.entry(index) == log_entry_for_record(record);
}

std::optional<std::uint64_t> ProverLog::find_audit(const Digest& commitment) {
  const std::scoped_lock lock(audits_mutex_);
  auto found = audits_.find(commitment);
  if (found == audits_.end()) {
    const LogReader log = reader();
    log.for_each(audits_known_, [&](std::uint64_t index, ByteView entry) {
      if (const std::optional<Digest> audit = audit_of_log_entry(entry)) {
        audits_.try_emplace(*audit, index);
      }
    });
    audits_known_ = log.size();
    found = audits_.find(commitment);
  }
  if (found == audits_.end()) return std::nullopt;
  return found->second;
}

}  // namespace bitwitness
