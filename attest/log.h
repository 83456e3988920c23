// The log: a directory of static files in the C2SP tlog-tiles layout (LOG_FORMAT.md).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/base/progress.h"
#include "attest/checkpoint.h"
#include "attest/keys.h"

namespace bitwitness {

constexpr std::size_t kMaxLogEntryBytes = 65535;

// The entry that stands for a record: "bitwitness/log-entry/v1\nrecord <hex of the record
// digest>\n".
Bytes log_entry_for_record(const Digest& record_digest);
std::optional<Digest> record_of_log_entry(ByteView entry);  // nullopt: not such an entry
// The entry that publishes a verifier's commitment (challenge.h): "bitwitness/log-entry/v1\naudit
// <hex of the commitment's digest>\n".
Bytes log_entry_for_audit(const Digest& commitment_digest);
std::optional<Digest> audit_of_log_entry(ByteView entry);  // as record_of_log_entry

// Makes an empty log with a signed checkpoint of size 0. `dir` may be absent or an empty directory;
// a log or anything else in it is a usage Error. The key's name is the log's origin.
void init_log(const std::string& dir, const SigningKey& key);

// Reads a log as any client of the static files would. Every answer is checked against the
// checkpoint's root on the way; what is torn, altered or missing is malformed, naming the file.
// `dir` that is no log is a usage Error.
class LogReader {
 public:
  // Opens at the published checkpoint; its signature is checked with `key`, or with the log's own
  // log.vkey if none is given (that proves nothing to a third party).
  explicit LogReader(std::string dir, std::optional<PublicKey> key = std::nullopt);

  const PublicKey& key() const { return key_; }
  const Checkpoint& checkpoint() const { return checkpoint_; }
  const std::string& checkpoint_note() const { return note_; }
  std::uint64_t size() const { return checkpoint_.size; }

  Bytes entry(std::uint64_t index) const;
  std::optional<std::uint64_t> find(ByteView entry) const;  // lowest index
  // Entries from `first` on, in order, as the files have them: entry() checks one.
  void for_each(std::uint64_t first,
                const std::function<void(std::uint64_t index, ByteView entry)>& visit) const;
  // Hash over the leaves [index·2^level, (index+1)·2^level), complete within the checkpoint.
  Digest node(unsigned level, std::uint64_t index) const;
  std::vector<Digest> inclusion(std::uint64_t index) const;
  std::vector<Digest> consistency(std::uint64_t old_size) const;
  // tlog-proof text for the entry at `index`, with the entry as its extra data.
  std::string receipt(std::uint64_t index) const;
  // The same under the head that the log had at `head_size` entries, index < head_size <= size(),
  // signed by `key`, which must be the log's. The body is the one signed then; Ed25519 gives the
  // same bytes.
  std::string receipt_at(std::uint64_t index, std::uint64_t head_size, const SigningKey& key) const;

  // Recomputes everything from the entries: tiles, root. Malformed on the first flaw.
  void verify_all(const ProgressFn& progress = {}) const;

 private:
  std::string dir_;
  PublicKey key_;
  std::string note_;
  Checkpoint checkpoint_;
};

struct AppendResult {
  std::uint64_t index = 0;
  std::uint64_t size = 0;  // of the log, after the append
  bool existed = false;    // the same entry was there before; nothing was added
  std::string receipt;     // tlog-proof text
};

// The one writer. Takes an exclusive lock on the directory for its life (infrastructure Error when
// it is not free within `wait_ms`).
class LogWriter {
 public:
  LogWriter(const std::string& dir, const SigningKey& key, unsigned wait_ms = 10000);
  ~LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  // Appends the entries that are not there yet and publishes one checkpoint over all. Entries, then
  // tiles, then the checkpoint are written, each atomically and durably, so that at any moment the
  // published checkpoint is fully backed; after a crash the next append writes the same files
  // again.
  std::vector<AppendResult> append(const std::vector<Bytes>& entries);
  // Signs the present tree head again (after a change of key files, or to refresh extensions).
  void republish();

 private:
  std::string dir_;
  SigningKey key_;
  int lock_fd_ = -1;
};

// What the prover does with a finished record: appends and returns the receipt.
AppendResult append_record(const std::string& log_dir, const std::string& key_file,
                           const Digest& record_digest);

// Throws what append_record would throw for reasons visible beforehand (no log, not its key, not
// writable, damaged), so that a long run need not end in vain.
void check_log(const std::string& log_dir, const std::string& key_file);

// Outcomes of judging a receipt; an ill-formed or forged one is a malformed Error instead.
enum class ReceiptVerdict {
  kIncluded,     // this record is in the log of that key
  kOtherRecord,  // a good receipt, for another record: a mismatch
  kUnknownLog,   // not signed by that key: cannot judge
};

struct ReceiptResult {
  ReceiptVerdict verdict;
  std::uint64_t index = 0;
  Checkpoint checkpoint;
  std::optional<Digest> record;  // the record the receipt is for, when it says
};

// Removes a receipt left beside a record that was replaced by one without receipt: it would be
// taken for the new record's. Nothing there is fine.
void remove_stale_receipt(const std::string& path);

constexpr std::size_t kMaxReceiptBytes = 1'200'000;

// `document` names the receipt in messages, e.g. its path.
ReceiptResult verify_receipt(const std::string& receipt_text, const PublicKey& log_key,
                             const Digest& record_digest, const std::string& document = "receipt");

// The same for any entry: kOtherRecord when the receipt is for another one.
ReceiptResult verify_entry_receipt(const std::string& receipt_text, const PublicKey& log_key,
                                   const Bytes& entry, const std::string& document = "receipt");

// The parts of a tlog-proof (https://c2sp.org/tlog-proof).
struct TlogProof {
  std::optional<Bytes> extra;
  std::uint64_t index = 0;
  std::vector<Digest> hashes;
  std::string checkpoint_note;

  std::string text() const;
  static TlogProof parse(std::string_view text,
                         const std::string& document);  // malformed on any flaw
};

}  // namespace bitwitness
