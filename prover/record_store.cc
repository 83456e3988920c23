#include "prover/record_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/log.h"
#include "attest/record.h"

namespace bitwitness {
namespace {

constexpr const char* kRecordSuffix = ".bwrec";
constexpr std::string_view kRecordMagic = "bwrecord";  // RECORD_FORMAT.md "File"
constexpr const char* kReceiptSuffix = ".tlog-proof";

}  // namespace

StoredRecord::File::~File() {
  if (fd >= 0) ::close(fd);
}

void StoredRecord::read(std::uint64_t offset, std::span<std::uint8_t> out) {
  if (offset > size_bytes_ || out.size() > size_bytes_ - offset) {
    throw std::logic_error("read past the end of a stored record");
  }
  if (memory_) {
    std::copy_n(memory_->begin() + static_cast<std::ptrdiff_t>(offset), out.size(), out.begin());
    return;
  }
  const ssize_t count = ::pread(file_->fd, out.data(), out.size(), static_cast<off_t>(offset));
  if (count != static_cast<ssize_t>(out.size())) {
    throw infrastructure_error(path_ + ": cannot read " + std::to_string(out.size()) +
                               " bytes at offset " + std::to_string(offset) +
                               "; was the file changed while it was being sent?");
  }
}

RecordStore::RecordStore(std::string dir, std::uint64_t max_memory_bytes,
                         std::chrono::seconds retention)
    : dir_(std::move(dir)), max_memory_bytes_(max_memory_bytes), retention_(retention) {
  if (dir_.empty()) return;
  check_output_place(path(Digest{}));
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
  // Records are files that this store wrote: no links, no pipes, and what calls itself a record.
  out.file_ = std::make_shared<StoredRecord::File>(
      ::open(out.path_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat info {};
  if (out.file_->fd < 0 && errno == ENOENT) return std::nullopt;
  if (out.file_->fd < 0 || ::fstat(out.file_->fd, &info) != 0) {
    throw infrastructure_error(out.path_ + ": cannot be read: " + std::strerror(errno));
  }
  std::array<std::uint8_t, 8> magic{};
  out.size_bytes_ = static_cast<std::uint64_t>(std::max<off_t>(info.st_size, 0));
  if (S_ISREG(info.st_mode) && out.size_bytes_ >= magic.size()) out.read(0, magic);
  if (as_text(magic) != kRecordMagic || out.size_bytes_ > kMaxRecordBytes) {
    throw infrastructure_error(out.path_ +
                               ": is not a record that this prover wrote; remove it from there");
  }
  out.stored_at_ = std::chrono::system_clock::from_time_t(info.st_mtime);
  if (const std::string receipt = out.path_ + kReceiptSuffix; path_exists(receipt)) {
    out.receipt_ = as_text(read_file(
        receipt, {kMaxReceiptBytes, ErrorKind::kInfrastructure, ErrorKind::kInfrastructure}));
  }
  return out;
}

}  // namespace bitwitness
