#include "prover/record_store.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/log.h"

namespace bitwitness {
namespace {

constexpr const char* kRecordSuffix = ".bwrec";
constexpr const char* kReceiptSuffix = ".tlog-proof";

}  // namespace

void StoredRecord::read(std::uint64_t offset, std::span<std::uint8_t> out) {
  if (offset > size_bytes_ || out.size() > size_bytes_ - offset) {
    throw std::logic_error("read past the end of a stored record");
  }
  if (memory_) {
    std::copy_n(memory_->begin() + static_cast<std::ptrdiff_t>(offset), out.size(), out.begin());
    return;
  }
  file_.seekg(static_cast<std::streamoff>(offset));
  file_.read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(out.size()));
  if (!file_ || file_.gcount() != static_cast<std::streamsize>(out.size())) {
    throw infrastructure_error(path_ + ": cannot read " + std::to_string(out.size()) +
                               " bytes at offset " + std::to_string(offset) +
                               "; was the file changed while it was being sent?");
  }
}

RecordStore::RecordStore(std::string dir, std::uint64_t max_memory_bytes,
                         std::chrono::seconds retention)
    : dir_(std::move(dir)), max_memory_bytes_(max_memory_bytes), retention_(retention) {
  if (dir_.empty()) return;
  make_directories(dir_);
  check_output_path(path(Digest{}));
}

std::string RecordStore::path(const Digest& id) const {
  return (std::filesystem::path(dir_) / (id.hex() + kRecordSuffix)).string();
}

void RecordStore::put(const Digest& id, Bytes record) {
  if (!dir_.empty()) {
    write_file_atomic(path(id), record);
    return;
  }
  if (record.size() > max_memory_bytes_) {
    throw std::logic_error("a record is larger than the memory of the record store");
  }
  const std::scoped_lock lock(mutex_);
  if (const auto old = entries_.find(id); old != entries_.end()) {
    memory_bytes_ -= old->second.record->size();
    entries_.erase(old);
    std::erase(order_, id);
  }
  forget_expired();
  while (memory_bytes_ + record.size() > max_memory_bytes_) forget_oldest();
  memory_bytes_ += record.size();
  order_.push_back(id);
  entries_[id] = {std::make_shared<const Bytes>(std::move(record)), "",
                  std::chrono::system_clock::now()};
}

void RecordStore::forget_oldest() {
  const auto oldest = entries_.find(order_.front());
  memory_bytes_ -= oldest->second.record->size();
  entries_.erase(oldest);
  order_.pop_front();
}

void RecordStore::forget_expired() {
  const auto now = std::chrono::system_clock::now();
  while (!order_.empty() && now - entries_.at(order_.front()).stored_at > retention_) {
    forget_oldest();
  }
}

void RecordStore::put_receipt(const Digest& id, const std::string& receipt) {
  if (!dir_.empty()) {
    write_file_atomic(path(id) + kReceiptSuffix, receipt);
    return;
  }
  const std::scoped_lock lock(mutex_);
  if (const auto entry = entries_.find(id); entry != entries_.end()) {
    entry->second.receipt = receipt;
  }
}

std::optional<StoredRecord> RecordStore::get(const Digest& id) {
  StoredRecord out;
  if (dir_.empty()) {
    const std::scoped_lock lock(mutex_);
    forget_expired();
    const auto entry = entries_.find(id);
    if (entry == entries_.end()) return std::nullopt;
    out.memory_ = entry->second.record;
    out.receipt_ = entry->second.receipt;
    out.stored_at_ = entry->second.stored_at;
    out.size_bytes_ = out.memory_->size();
    return out;
  }
  out.path_ = path(id);
  if (!path_exists(out.path_)) return std::nullopt;
  out.file_.open(out.path_, std::ios::binary | std::ios::ate);
  const std::streamoff size = out.file_ ? std::streamoff(out.file_.tellg()) : -1;
  if (size < 0) {
    throw infrastructure_error(out.path_ + ": cannot be read; check its permissions");
  }
  out.size_bytes_ = static_cast<std::uint64_t>(size);
  struct stat info {};
  if (::stat(out.path_.c_str(), &info) == 0) {
    out.stored_at_ = std::chrono::system_clock::from_time_t(info.st_mtime);
  }
  if (const std::string receipt = out.path_ + kReceiptSuffix; path_exists(receipt)) {
    out.receipt_ = as_text(read_file(
        receipt, {kMaxReceiptBytes, ErrorKind::kInfrastructure, ErrorKind::kInfrastructure}));
  }
  return out;
}

}  // namespace bitwitness
