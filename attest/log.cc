#include "attest/log.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <map>
#include <stdexcept>
#include <thread>
#include <unordered_map>

#include "attest/base/base64.h"
#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/base/hex.h"
#include "attest/base/merkle.h"

namespace bitwitness {
namespace {

// LOG_FORMAT.md. Names and sizes are those of C2SP tlog-tiles.
constexpr const char* kCheckpointFile = "/checkpoint";
constexpr const char* kVkeyFile = "/log.vkey";
constexpr const char* kLockFile = "/.lock";
constexpr unsigned kTileHeight = 8;
constexpr std::uint64_t kTileWidth = 1 << kTileHeight;
constexpr std::uint64_t kHashBytes = 32;
constexpr std::uint64_t kMaxBundleBytes = kTileWidth * (2 + kMaxLogEntryBytes);
constexpr std::size_t kMaxProofHashes = 64;
constexpr std::string_view kEntryHead = "bitwitness/log-entry/v1\nrecord ";
constexpr std::string_view kAuditEntryHead = "bitwitness/log-entry/v1\naudit ";
constexpr std::string_view kProofMagic = "c2sp.org/tlog-proof@v1\n";

Bytes log_entry(std::string_view head, const Digest& digest) {
  const std::string text = std::string(head) + digest.hex() + "\n";
  const ByteView view = as_bytes(text);
  return Bytes(view.begin(), view.end());
}

std::optional<Digest> digest_of_log_entry(std::string_view head, ByteView entry) {
  const std::string_view text = as_text(entry);
  if (text.size() != head.size() + 65 || !text.starts_with(head) || text.back() != '\n') {
    return std::nullopt;
  }
  const std::optional<Bytes> bytes = from_hex(text.substr(head.size(), 64));
  if (!bytes) return std::nullopt;
  Digest digest;
  std::copy(bytes->begin(), bytes->end(), digest.bytes.begin());
  return digest;
}

bool is_directory(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

void require_log(const std::string& dir) {
  if (!is_directory(dir)) {
    throw usage_error(dir + ": no such directory; make a log with bw-attest init");
  }
  if (!path_exists(dir + kCheckpointFile)) {
    throw usage_error(dir + ": not a log (it has no checkpoint); make one with bw-attest init");
  }
}

// tlog-tiles: N as elements of three digits, all but the last with an x: 1234067 is x001/x234/067.
std::string index_path(std::uint64_t n) {
  std::string path;
  bool last = true;
  do {
    std::string element = std::to_string(n % 1000);
    element.insert(0, 3 - element.size(), '0');
    path = last ? element : "x" + element + "/" + path;
    last = false;
    n /= 1000;
  } while (n > 0);
  return path;
}

std::string tile_stem(unsigned level, std::uint64_t index) {
  return "/tile/" + std::to_string(level) + "/" + index_path(index);
}

std::string bundle_stem(std::uint64_t index) {
  return "/tile/entries/" + index_path(index);
}

std::string with_width(const std::string& stem, std::uint64_t width) {
  return width == kTileWidth ? stem : stem + ".p/" + std::to_string(width);
}

Digest digest_at(ByteView tile, std::uint64_t i) {
  Digest digest;
  std::copy_n(tile.begin() + static_cast<std::ptrdiff_t>(i * kHashBytes), kHashBytes,
              digest.bytes.begin());
  return digest;
}

Bytes tile_bytes(std::span<const Digest> hashes) {
  Bytes out;
  out.reserve(hashes.size() * kHashBytes);
  for (const Digest& hash : hashes) out.insert(out.end(), hash.bytes.begin(), hash.bytes.end());
  return out;
}

Bytes bundle_bytes(std::span<const Bytes> entries) {
  Bytes out;
  for (const Bytes& entry : entries) {
    out.push_back(static_cast<std::uint8_t>(entry.size() >> 8));
    out.push_back(static_cast<std::uint8_t>(entry.size() & 0xff));
    out.insert(out.end(), entry.begin(), entry.end());
  }
  return out;
}

// The static files of a log as they stand for a tree of `size` entries. Only form is checked here.
// One thread at a time.
class Tiles {
 public:
  Tiles(std::string dir, std::uint64_t size) : dir_(std::move(dir)), size_(size) {}

  // Hashes in the tile that exist at this size.
  std::uint64_t tile_width(unsigned level, std::uint64_t index) const {
    const std::uint64_t hashes = size_ >> (kTileHeight * level);
    return std::min(kTileWidth, hashes - index * kTileWidth);
  }

  const std::vector<Digest>& tile(unsigned level, std::uint64_t index) const {
    const auto place = std::pair(level, index);
    if (const auto cached = cache_.find(place); cached != cache_.end()) return cached->second;
    if (cache_.size() >= kCachedTiles) cache_.clear();
    return cache_.emplace(place, load(level, index)).first->second;
  }

  std::vector<Digest> load(unsigned level, std::uint64_t index) const {
    const std::uint64_t width = tile_width(level, index);
    std::string path;
    const Bytes bytes = read(tile_stem(level, index), width, kTileWidth * kHashBytes, path);
    const bool full = path.find(".p/") == std::string::npos;
    const std::uint64_t expected = (full ? kTileWidth : width) * kHashBytes;
    if (bytes.size() != expected) {
      throw malformed_error(path + ": has " + std::to_string(bytes.size()) + " bytes instead of " +
                            std::to_string(expected) + "; the log is damaged");
    }
    std::vector<Digest> hashes(width);
    for (std::uint64_t i = 0; i < width; ++i) hashes[i] = digest_at(bytes, i);
    return hashes;
  }

  std::vector<Bytes> bundle(std::uint64_t index) const {
    const std::uint64_t width = tile_width(0, index);
    std::string path;
    const Bytes bytes = read(bundle_stem(index), width, kMaxBundleBytes, path);
    const bool full = path.find(".p/") == std::string::npos;
    std::vector<Bytes> entries;
    std::size_t at = 0;
    while (at < bytes.size()) {
      const std::size_t length =
          bytes.size() - at < 2 ? 0 : std::size_t{bytes[at]} << 8 | bytes[at + 1];
      if (bytes.size() - at < 2 || bytes.size() - at - 2 < length) {
        throw malformed_error(path + ": entry " + std::to_string(entries.size()) +
                              " is cut off; the log is damaged");
      }
      const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(at + 2);
      entries.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(length));
      at += 2 + length;
    }
    if (entries.size() != (full ? kTileWidth : width)) {
      throw malformed_error(path + ": has " + std::to_string(entries.size()) +
                            " entries, not as many as its name says; the log is damaged");
    }
    entries.resize(width);
    return entries;
  }

  // Hash over leaves [index·2^level, (index+1)·2^level): from the tile that holds the nearest level
  // below.
  Digest node(unsigned level, std::uint64_t index) const {
    const unsigned tile_level = level / kTileHeight;
    const unsigned within = level % kTileHeight;
    const std::uint64_t first = index << within;  // in hashes of the tile's lowest level
    const std::vector<Digest>& hashes = tile(tile_level, first / kTileWidth);
    return merkle_root(std::span(hashes).subspan(first % kTileWidth, std::size_t{1} << within));
  }

  NodeReader reader() const {
    return [this](unsigned level, std::uint64_t index) { return node(level, index); };
  }

  Digest root() const { return merkle_root(reader(), size_); }

 private:
  // The partial file of that width, or else the full one, which may have replaced it.
  Bytes read(const std::string& stem, std::uint64_t width, std::uint64_t max_bytes,
             std::string& path) const {
    const ReadLimits limits{.max_bytes = max_bytes, .missing = ErrorKind::kMalformed};
    path = dir_ + with_width(stem, width);
    if (width == kTileWidth) return read_file(path, limits);
    try {
      return read_file(path, limits);
    } catch (const Error&) {
      if (path_exists(path) || !path_exists(dir_ + stem)) throw;
    }
    path = dir_ + stem;
    return read_file(path, limits);
  }

  static constexpr std::size_t kCachedTiles = 512;  // 4 MiB

  std::string dir_;
  std::uint64_t size_;
  mutable std::map<std::pair<unsigned, std::uint64_t>, std::vector<Digest>> cache_;
};

// Writes the tile or bundle of that width (creating its directory).
void publish(const std::string& dir, const std::string& stem, std::uint64_t width, ByteView bytes) {
  const std::string path = dir + with_width(stem, width);
  make_directories(path.substr(0, path.find_last_of('/')));
  write_file_atomic(path, bytes);
}

// Partial files that a full one replaces. Failing to remove them harms nobody.
void remove_partials(const std::string& dir, const std::string& stem) {
  const std::string partials = dir + stem + ".p";
  for (std::uint64_t width = 1; width < kTileWidth; ++width) {
    ::unlink((partials + "/" + std::to_string(width)).c_str());
  }
  ::rmdir(partials.c_str());
}

[[noreturn]] void fail_root(const std::string& dir) {
  throw malformed_error(dir +
                        ": the tiles do not lead to the root of the signed checkpoint; the "
                        "log is damaged, restore it from a copy");
}

std::uint64_t parse_index(std::string_view digits, const std::string& document) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() ||
      (digits.size() > 1 && digits[0] == '0')) {
    throw malformed_error(document + ": the index is no plain decimal number");
  }
  return value;
}

std::string make_receipt(const Bytes& entry, std::uint64_t index, std::vector<Digest> hashes,
                         const std::string& note) {
  TlogProof proof;
  proof.extra = entry;
  proof.index = index;
  proof.hashes = std::move(hashes);
  proof.checkpoint_note = note;
  return proof.text();
}

}  // namespace

Bytes log_entry_for_record(const Digest& record_digest) {
  return log_entry(kEntryHead, record_digest);
}

Bytes log_entry_for_audit(const Digest& commitment_digest) {
  return log_entry(kAuditEntryHead, commitment_digest);
}

std::optional<Digest> record_of_log_entry(ByteView entry) {
  return digest_of_log_entry(kEntryHead, entry);
}

std::optional<Digest> audit_of_log_entry(ByteView entry) {
  return digest_of_log_entry(kAuditEntryHead, entry);
}

void init_log(const std::string& dir, const SigningKey& key) {
  make_directories(dir);
  DIR* const listing = ::opendir(dir.c_str());
  if (listing == nullptr) {
    throw infrastructure_error(dir + ": cannot list: " + std::strerror(errno));
  }
  std::string foreign;
  while (const dirent* item = ::readdir(listing)) {
    const std::string name = item->d_name;
    // An init that crashed may have left the verifier key, whole or as a temporary file.
    if (name != "." && name != ".." && !name.starts_with("log.vkey") &&
        !name.starts_with(".bw-tmp-")) {
      foreign = name;
    }
  }
  ::closedir(listing);
  if (foreign == "checkpoint") throw usage_error(dir + ": is a log already");
  if (!foreign.empty()) {
    throw usage_error(dir + ": not empty (it has " + foreign +
                      "); a log needs a directory of its own");
  }
  if (path_exists(dir + kVkeyFile)) {
    if (PublicKey::load_vkey(dir + kVkeyFile) != key.public_key()) {
      throw usage_error(dir + kVkeyFile + ": belongs to another key than the one given");
    }
  } else {
    write_file_atomic(dir + kVkeyFile, key.public_key().vkey() + "\n", 0644, IfExists::kFail);
  }
  Checkpoint empty;
  empty.origin = key.public_key().name;
  empty.root = merkle_empty();
  write_file_atomic(dir + kCheckpointFile, sign_checkpoint(empty, key), 0644, IfExists::kFail);
}

LogReader::LogReader(std::string dir, std::optional<PublicKey> key) : dir_(std::move(dir)) {
  require_log(dir_);
  key_ = key ? *key : PublicKey::load_vkey(dir_ + kVkeyFile);
  const std::string path = dir_ + kCheckpointFile;
  const Bytes note = read_file(path, {.max_bytes = kMaxNoteBytes});
  note_ = std::string(as_text(note));
  checkpoint_ = open_checkpoint(note_, key_, path);
  if (Tiles(dir_, size()).root() != checkpoint_.root) fail_root(dir_);
}

Digest LogReader::node(unsigned level, std::uint64_t index) const {
  if (level >= 63 || index >= size() >> level) throw std::out_of_range("log: no such node");
  return Tiles(dir_, size()).node(level, index);
}

Bytes LogReader::entry(std::uint64_t index) const {
  if (index >= size()) {
    throw usage_error(dir_ + ": no entry " + std::to_string(index) + "; the log has " +
                      std::to_string(size()));
  }
  const Tiles tiles(dir_, size());
  Bytes entry = tiles.bundle(index / kTileWidth)[index % kTileWidth];
  const std::vector<Digest> proof = inclusion_proof(tiles.reader(), index, size());
  if (!verify_inclusion(merkle_leaf(entry), index, size(), proof, checkpoint_.root)) {
    throw malformed_error(dir_ + ": entry " + std::to_string(index) +
                          " is not the one under the signed root; the log is damaged");
  }
  return entry;
}

std::optional<std::uint64_t> LogReader::find(ByteView entry) const {
  const Tiles tiles(dir_, size());
  for (std::uint64_t b = 0; b * kTileWidth < size(); ++b) {
    const std::vector<Bytes> entries = tiles.bundle(b);
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (std::ranges::equal(entries[i], entry)) return b * kTileWidth + i;
    }
  }
  return std::nullopt;
}

void LogReader::for_each(
    std::uint64_t first,
    const std::function<void(std::uint64_t index, ByteView entry)>& visit) const {
  const Tiles tiles(dir_, size());
  for (std::uint64_t b = first / kTileWidth; b * kTileWidth < size(); ++b) {
    const std::vector<Bytes> entries = tiles.bundle(b);
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const std::uint64_t index = b * kTileWidth + i;
      if (index >= first) visit(index, entries[i]);
    }
  }
}

std::vector<Digest> LogReader::inclusion(std::uint64_t index) const {
  return inclusion_proof(Tiles(dir_, size()).reader(), index, size());
}

std::vector<Digest> LogReader::consistency(std::uint64_t old_size) const {
  return consistency_proof(Tiles(dir_, size()).reader(), old_size, size());
}

std::string LogReader::receipt(std::uint64_t index) const {
  const Bytes logged = entry(index);  // refuses an index out of range
  return make_receipt(logged, index, inclusion(index), note_);
}

std::string LogReader::receipt_at(std::uint64_t index, std::uint64_t head_size,
                                  const SigningKey& key) const {
  if (index >= head_size || head_size > size()) {
    throw std::out_of_range("receipt: no such entry under a head of that size");
  }
  if (key.public_key() != key_) throw usage_error(dir_ + ": not the key of this log");
  const Tiles tiles(dir_, size());
  const NodeReader node = tiles.reader();
  Checkpoint head;
  head.origin = checkpoint_.origin;
  head.size = head_size;
  head.root = merkle_root(node, head_size);
  // Nothing is signed that the published head does not bear out.
  if (!verify_consistency(head_size, size(), consistency_proof(node, head_size, size()), head.root,
                          checkpoint_.root)) {
    throw malformed_error(dir_ +
                          ": the tiles do not lead to the signed root; run bw-attest verify");
  }
  return make_receipt(entry(index), index, inclusion_proof(node, index, head_size),
                      sign_checkpoint(head, key));
}

void LogReader::verify_all(const ProgressFn& progress) const {
  const Tiles tiles(dir_, size());
  // Level 0 from the entries, then each tile level from the roots of the full tiles below.
  std::vector<Digest> roots;
  MerkleAccumulator tree;
  const auto compare = [&](unsigned level, std::uint64_t index, std::span<const Digest> expected) {
    if (!std::ranges::equal(tiles.tile(level, index), expected)) {
      throw malformed_error(dir_ + with_width(tile_stem(level, index), expected.size()) +
                            ": is not the tile over the entries; the log is damaged");
    }
  };
  for (std::uint64_t b = 0; b * kTileWidth < size(); ++b) {
    std::vector<Digest> leaves;
    for (const Bytes& entry : tiles.bundle(b)) leaves.push_back(merkle_leaf(entry));
    for (const Digest& leaf : leaves) tree.append(leaf);
    compare(0, b, leaves);
    if (leaves.size() == kTileWidth) roots.push_back(merkle_root(leaves));
    if (progress) progress(std::min(size(), (b + 1) * kTileWidth), size());
  }
  for (unsigned level = 1; !roots.empty(); ++level) {
    std::vector<Digest> above;
    for (std::uint64_t i = 0; i * kTileWidth < roots.size(); ++i) {
      const auto part = std::span<const Digest>(roots).subspan(
          i * kTileWidth, std::min(kTileWidth, roots.size() - i * kTileWidth));
      compare(level, i, part);
      if (part.size() == kTileWidth) above.push_back(merkle_root(part));
    }
    roots = std::move(above);
  }
  if (tree.root() != checkpoint_.root) {
    throw malformed_error(dir_ + ": the entries do not lead to the root of the signed checkpoint");
  }
}

LogWriter::LogWriter(const std::string& dir, const SigningKey& key, unsigned wait_ms)
    : dir_(dir), key_(key) {
  require_log(dir_);
  if (PublicKey::load_vkey(dir_ + kVkeyFile) != key_.public_key()) {
    throw usage_error(dir_ + ": the key given (" + key_.public_key().name +
                      ") is not this log's, see log.vkey there");
  }
  const std::string lock = dir_ + kLockFile;
  lock_fd_ = ::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (lock_fd_ < 0) {
    throw infrastructure_error(lock + ": cannot open the log for writing: " + std::strerror(errno));
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_ms);
  while (::flock(lock_fd_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    if ((error != EWOULDBLOCK && error != EINTR) || std::chrono::steady_clock::now() >= deadline) {
      ::close(lock_fd_);
      throw infrastructure_error(lock + ": cannot lock the log" +
                                 (error == EWOULDBLOCK
                                      ? std::string(": another writer holds it; try again later")
                                      : ": " + std::string(std::strerror(error))));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

LogWriter::~LogWriter() {
  ::close(lock_fd_);
}

std::vector<AppendResult> LogWriter::append(const std::vector<Bytes>& entries) {
  for (const Bytes& entry : entries) {
    if (entry.size() > kMaxLogEntryBytes) throw usage_error("log: an entry is over 65,535 bytes");
  }
  const LogReader before(dir_, key_.public_key());
  const Tiles old_tiles(dir_, before.size());

  // Stage: which entries are new, and the index of each.
  std::unordered_map<std::string_view, std::uint64_t> wanted;
  for (const Bytes& entry : entries) wanted.emplace(as_text(entry), UINT64_MAX);
  for (std::uint64_t b = 0; b * kTileWidth < before.size() && !wanted.empty(); ++b) {
    const std::vector<Bytes> bundle = old_tiles.bundle(b);
    for (std::size_t i = 0; i < bundle.size(); ++i) {
      const auto found = wanted.find(as_text(bundle[i]));
      if (found != wanted.end() && found->second == UINT64_MAX) {
        found->second = b * kTileWidth + i;
      }
    }
  }
  std::vector<AppendResult> results;
  std::vector<Bytes> fresh;
  for (const Bytes& entry : entries) {
    AppendResult result;
    std::uint64_t& index = wanted.at(as_text(entry));
    result.existed = index != UINT64_MAX;
    if (!result.existed) {
      index = before.size() + fresh.size();
      fresh.push_back(entry);
    }
    result.index = index;
    results.push_back(result);
  }
  const std::uint64_t size = before.size() + fresh.size();
  std::vector<std::string> completed;  // stems of files that became full

  // Publish entries, then the tiles of every level, lowest first.
  if (!fresh.empty()) {
    std::uint64_t b = before.size() / kTileWidth;
    std::vector<Bytes> open;
    if (before.size() % kTileWidth != 0) open = old_tiles.bundle(b);
    open.insert(open.end(), fresh.begin(), fresh.end());
    for (std::size_t at = 0; at < open.size(); at += kTileWidth, ++b) {
      const auto part = std::span<const Bytes>(open).subspan(
          at, std::min<std::size_t>(kTileWidth, open.size() - at));
      publish(dir_, bundle_stem(b), part.size(), bundle_bytes(part));
      if (part.size() == kTileWidth) completed.push_back(bundle_stem(b));
    }
    std::vector<Digest> hashes;  // new ones of the level at hand
    for (const Bytes& entry : fresh) hashes.push_back(merkle_leaf(entry));
    for (unsigned level = 0; !hashes.empty(); ++level) {
      const std::uint64_t old_hashes = before.size() >> (kTileHeight * level);
      std::uint64_t t = old_hashes / kTileWidth;
      std::vector<Digest> row;
      if (old_hashes % kTileWidth != 0) row = old_tiles.tile(level, t);
      row.insert(row.end(), hashes.begin(), hashes.end());
      hashes.clear();
      for (std::size_t at = 0; at < row.size(); at += kTileWidth, ++t) {
        const auto part = std::span<const Digest>(row).subspan(
            at, std::min<std::size_t>(kTileWidth, row.size() - at));
        publish(dir_, tile_stem(level, t), part.size(), tile_bytes(part));
        if (part.size() == kTileWidth) {
          completed.push_back(tile_stem(level, t));
          hashes.push_back(merkle_root(part));
        }
      }
    }
  }

  // Sign what the files now say, and only if it extends what was signed before.
  const Tiles tiles(dir_, size);
  std::string note = before.checkpoint_note();
  Checkpoint head = before.checkpoint();
  if (!fresh.empty()) {
    head = Checkpoint{key_.public_key().name, size, tiles.root(), {}};
    if (!verify_consistency(before.size(), size,
                            consistency_proof(tiles.reader(), before.size(), size),
                            before.checkpoint().root, head.root)) {
      fail_root(dir_);
    }
    note = sign_checkpoint(head, key_);
    write_file_atomic(dir_ + kCheckpointFile, note);
    for (const std::string& stem : completed) remove_partials(dir_, stem);
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    AppendResult& result = results[i];
    result.size = size;
    std::vector<Digest> proof = inclusion_proof(tiles.reader(), result.index, size);
    if (!verify_inclusion(merkle_leaf(entries[i]), result.index, size, proof, head.root)) {
      fail_root(dir_);
    }
    result.receipt = make_receipt(entries[i], result.index, std::move(proof), note);
  }
  return results;
}

void LogWriter::republish() {
  const LogReader reader(dir_, key_.public_key());
  const Checkpoint head{key_.public_key().name, reader.size(), reader.checkpoint().root, {}};
  write_file_atomic(dir_ + kCheckpointFile, sign_checkpoint(head, key_));
}

AppendResult append_record(const std::string& log_dir, const std::string& key_file,
                           const Digest& record_digest) {
  LogWriter writer(log_dir, SigningKey::load(key_file));
  return writer.append({log_entry_for_record(record_digest)}).front();
}

void remove_stale_receipt(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    throw infrastructure_error(
        path +
        ": cannot remove the receipt of the record that was replaced: " + std::strerror(errno));
  }
}

void check_log(const std::string& log_dir, const std::string& key_file) {
  const SigningKey key = SigningKey::load(key_file);
  const LogWriter writer(log_dir, key);
  check_writable_path(log_dir + kCheckpointFile);
  LogReader(log_dir, key.public_key());
}

std::string TlogProof::text() const {
  std::string out(kProofMagic);
  if (extra) out += "extra " + base64_encode(*extra) + "\n";
  out += "index " + std::to_string(index) + "\n";
  for (const Digest& hash : hashes) out += base64_encode(hash.view()) + "\n";
  return out + "\n" + checkpoint_note;
}

TlogProof TlogProof::parse(std::string_view text, const std::string& document) {
  const auto fail = [&](const std::string& problem) {
    throw malformed_error(document + ": tlog-proof: " + problem);
  };
  if (text.size() > kMaxReceiptBytes) fail("too long");
  if (!text.starts_with(kProofMagic)) fail("line 1 is not c2sp.org/tlog-proof@v1");
  text.remove_prefix(kProofMagic.size());
  const auto next_line = [&] {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) fail("cut off before the checkpoint");
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    return line;
  };
  TlogProof out;
  std::string_view line = next_line();
  if (line.starts_with("extra ")) {
    out.extra = base64_decode(line.substr(6));
    if (!out.extra) fail("the extra data is not canonical base64");
    line = next_line();
  }
  if (!line.starts_with("index ")) fail("no index line");
  out.index = parse_index(line.substr(6), document + ": tlog-proof");
  for (line = next_line(); !line.empty(); line = next_line()) {
    if (out.hashes.size() == kMaxProofHashes) fail("more than 64 hashes");
    const std::optional<Bytes> hash = base64_decode(line);
    if (!hash || hash->size() != 32) {
      fail("hash " + std::to_string(out.hashes.size()) + " is not 32 bytes of canonical base64");
    }
    out.hashes.push_back(digest_at(*hash, 0));
  }
  out.checkpoint_note = std::string(text);
  return out;
}

ReceiptResult verify_receipt(const std::string& receipt_text, const PublicKey& log_key,
                             const Digest& record_digest, const std::string& document) {
  ReceiptResult result =
      verify_entry_receipt(receipt_text, log_key, log_entry_for_record(record_digest), document);
  if (result.verdict == ReceiptVerdict::kIncluded) result.record = record_digest;
  return result;
}

ReceiptResult verify_entry_receipt(const std::string& receipt_text, const PublicKey& log_key,
                                   const Bytes& entry, const std::string& document) {
  const TlogProof proof = TlogProof::parse(receipt_text, document);
  const Note note = parse_note(proof.checkpoint_note, document);
  ReceiptResult result{};
  result.index = proof.index;
  result.checkpoint = Checkpoint::parse_body(note.text, document);
  if (proof.extra) result.record = record_of_log_entry(*proof.extra);
  if (verify_note(note, {log_key}, document).empty()) {
    result.verdict = ReceiptVerdict::kUnknownLog;
    return result;
  }
  const Checkpoint& head = result.checkpoint;
  if (head.origin != log_key.name) {
    throw malformed_error(document + ": the checkpoint's origin '" + head.origin +
                          "' is not the name of the key that signed it");
  }
  const auto included = [&](const Bytes& candidate) {
    return verify_inclusion(merkle_leaf(candidate), proof.index, head.size, proof.hashes,
                            head.root);
  };
  const bool same = !proof.extra || *proof.extra == entry;
  if (same && included(entry)) {
    result.verdict = ReceiptVerdict::kIncluded;
  } else if (!same && included(*proof.extra)) {
    result.verdict = ReceiptVerdict::kOtherRecord;
  } else {
    throw malformed_error(document + ": the proof does not lead from entry " +
                          std::to_string(proof.index) + " to the signed root");
  }
  return result;
}

}  // namespace bitwitness
