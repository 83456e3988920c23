// Where a serving prover keeps the records it made, by digest.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "attest/base/bytes.h"

namespace bitwitness {

// One stored record, open for reading. Not for use by several threads at once.
class StoredRecord {
 public:
  std::uint64_t size_bytes() const { return size_bytes_; }
  // tlog-proof text; empty if the record was not logged.
  const std::string& receipt() const { return receipt_; }
  // When it was put; of a file, when it was last written.
  std::chrono::system_clock::time_point stored_at() const { return stored_at_; }
  // Fills `out` with the bytes from `offset`; offset + out.size() is at most size_bytes(). A file
  // that no longer has them is an infrastructure Error.
  void read(std::uint64_t offset, std::span<std::uint8_t> out);

 private:
  friend class RecordStore;
  std::uint64_t size_bytes_ = 0;
  std::string receipt_;
  std::chrono::system_clock::time_point stored_at_;
  struct File {
    explicit File(int descriptor) : fd(descriptor) {}
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    int fd;
  };
  std::shared_ptr<const Bytes> memory_;  // or
  std::shared_ptr<File> file_;
  std::string path_;
};

// Thread-safe. In a directory: ID.bwrec and, where there is one, ID.bwrec.tlog-proof, each written
// atomically and durably and never removed; a later server finds them again. In memory: the oldest
// records are forgotten when all together exceed the limit, and every one after its retention.
class RecordStore {
 public:
  // `dir` empty: in memory, at most `max_memory_bytes`, each for `retention`. Makes the directory
  // if it is absent; throws as make_directories and check_output_path.
  RecordStore(std::string dir, std::uint64_t max_memory_bytes,
              std::chrono::seconds retention = std::chrono::hours(24 * 7));

  // Stores `record`; with the same id again it is replaced (evidence may differ). In memory, one
  // larger than the limit is a std::logic_error. `receipt` may be empty.
  void put(const Digest& id, Bytes record);
  // Adds the receipt of a record that was put; without effect if it is forgotten already.
  void put_receipt(const Digest& id, const std::string& receipt);

  // nullopt: not there. What lies there under the id and is no regular file of a record (a link, a
  // pipe, other content) is an infrastructure Error that names it.
  std::optional<StoredRecord> get(const Digest& id);

 private:
  struct Entry {
    std::shared_ptr<const Bytes> record;
    std::string receipt;
    std::chrono::system_clock::time_point stored_at;
  };
  std::string path(const Digest& id) const;
  void forget_oldest();   // with mutex_ held
  void forget_expired();  // likewise

  std::string dir_;
  std::uint64_t max_memory_bytes_;
  std::chrono::seconds retention_;
  std::mutex mutex_;
  std::map<Digest, Entry> entries_;
  std::deque<Digest> order_;  // oldest first
  std::uint64_t memory_bytes_ = 0;
};

}  // namespace bitwitness
