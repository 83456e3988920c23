// The log directory: growth over every boundary, receipts, hostile and torn directories, two
// writers.
#include "attest/log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <random>
#include <thread>

#include "attest/base/base64.h"
#include "attest/base/file.h"
#include "attest/base/merkle.h"
#include "attest/base/sha256.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

using testing::error_kind;
using testing::fixed_key;
using testing::read_text;
using testing::snapshot;
using testing::TemporaryDirectory;
using testing::write_text;

Bytes entry_of(std::uint64_t i) {
  return log_entry_for_record(sha256(std::to_string(i)));
}

std::vector<Bytes> entries_of(std::uint64_t begin, std::uint64_t end) {
  std::vector<Bytes> out;
  for (std::uint64_t i = begin; i < end; ++i) out.push_back(entry_of(i));
  return out;
}

class LogTest : public ::testing::Test {
 protected:
  void SetUp() override { init_log(log_, key_); }
  std::vector<AppendResult> append(std::uint64_t begin, std::uint64_t end) {
    return LogWriter(log_, key_).append(entries_of(begin, end));
  }
  // Runs `work` in a child process; its exit status. 33 stands for an infrastructure Error.
  int in_child(const std::function<void()>& work) {
    const pid_t child = fork();
    if (child == 0) {
      try {
        work();
      } catch (const Error& error) {
        _exit(error.kind() == ErrorKind::kInfrastructure ? 33 : 34);
      } catch (...) {
        _exit(35);
      }
      _exit(0);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  TemporaryDirectory dir_;
  std::string log_ = dir_.path("log");
  SigningKey key_ = fixed_key("log.example.org/test", 3);
};

TEST_F(LogTest, EmptyLogIsSigned) {
  const LogReader log(log_, key_.public_key());
  EXPECT_EQ(log.size(), 0U);
  EXPECT_EQ(log.checkpoint().root, merkle_empty());
  log.verify_all();
  EXPECT_EQ(read_text(log_ + "/log.vkey"), key_.public_key().vkey() + "\n");
  EXPECT_EQ(error_kind([&] { log.entry(0); }), ErrorKind::kUsage);
}

TEST_F(LogTest, GrowsOverTileBoundaries) {
  std::vector<Digest> leaves;
  std::vector<std::pair<std::uint64_t, Digest>> heads{{0, merkle_empty()}};
  for (const std::uint64_t size : {1U, 2U, 3U, 254U, 255U, 256U, 257U, 511U, 512U, 513U, 1100U}) {
    const std::uint64_t before = leaves.size();
    for (std::uint64_t i = before; i < size; ++i) leaves.push_back(merkle_leaf(entry_of(i)));
    const auto results = append(before, size);
    const LogReader log(log_, key_.public_key());
    ASSERT_EQ(log.size(), size);
    EXPECT_EQ(log.checkpoint().root, merkle_root(leaves));
    log.verify_all();
    for (const AppendResult& result : results) {
      EXPECT_FALSE(result.existed);
      EXPECT_EQ(result.size, size);
      const ReceiptResult judged =
          verify_receipt(result.receipt, key_.public_key(), sha256(std::to_string(result.index)));
      EXPECT_EQ(judged.verdict, ReceiptVerdict::kIncluded);
    }
    for (const std::uint64_t i : {std::uint64_t{0}, size / 2, size - 1}) {
      EXPECT_EQ(log.entry(i), entry_of(i));
      EXPECT_EQ(log.find(entry_of(i)), i);
      EXPECT_EQ(log.inclusion(i), inclusion_proof(leaves, i));
    }
    EXPECT_FALSE(log.find(entry_of(size)));
    for (const auto& [old_size, old_root] : heads) {
      EXPECT_TRUE(verify_consistency(old_size, size, log.consistency(old_size), old_root,
                                     log.checkpoint().root));
    }
    heads.emplace_back(size, log.checkpoint().root);
  }
  EXPECT_TRUE(path_exists(log_ + "/tile/0/004.p/76"));
  EXPECT_TRUE(path_exists(log_ + "/tile/1/000.p/4"));
  EXPECT_TRUE(path_exists(log_ + "/tile/entries/003"));
  EXPECT_FALSE(path_exists(log_ + "/tile/0/000.p"));  // replaced by the full tile
}

TEST_F(LogTest, ThirdTileLevel) {
  const std::uint64_t size = 65536 + 300;
  append(0, 65000);
  append(65000, size);
  const LogReader log(log_, key_.public_key());
  log.verify_all();
  EXPECT_TRUE(path_exists(log_ + "/tile/2/000.p/1"));
  EXPECT_TRUE(path_exists(log_ + "/tile/1/001.p/1"));
  for (const std::uint64_t i : {std::uint64_t{0}, std::uint64_t{65535}, size - 1}) {
    EXPECT_EQ(verify_receipt(log.receipt(i), key_.public_key(), sha256(std::to_string(i))).verdict,
              ReceiptVerdict::kIncluded);
  }
}

TEST_F(LogTest, TheSameRecordKeepsItsIndex) {
  append(0, 300);
  const std::string before = read_text(log_ + "/checkpoint");
  const auto results = LogWriter(log_, key_).append({entry_of(7), entry_of(299), entry_of(7)});
  EXPECT_EQ(results[0].index, 7U);
  EXPECT_EQ(results[1].index, 299U);
  EXPECT_TRUE(results[0].existed && results[1].existed && results[2].existed);
  EXPECT_EQ(read_text(log_ + "/checkpoint"), before);
  const auto mixed = LogWriter(log_, key_).append({entry_of(300), entry_of(5), entry_of(300)});
  EXPECT_EQ(mixed[0].index, 300U);
  EXPECT_FALSE(mixed[0].existed);
  EXPECT_EQ(mixed[1].index, 5U);
  EXPECT_EQ(mixed[2].index, 300U);
  EXPECT_TRUE(mixed[2].existed);
  EXPECT_EQ(LogReader(log_, key_.public_key()).size(), 301U);
  EXPECT_EQ(verify_receipt(mixed[1].receipt, key_.public_key(), sha256("5")).verdict,
            ReceiptVerdict::kIncluded);
}

TEST_F(LogTest, EntriesOfAnySizeUpToTheLimit) {
  LogWriter writer(log_, key_);
  const std::vector<Bytes> entries{Bytes{}, Bytes(65535, 7), testing::prime_cycle(300)};
  writer.append(entries);
  const LogReader log(log_, key_.public_key());
  for (std::size_t i = 0; i < entries.size(); ++i) EXPECT_EQ(log.entry(i), entries[i]);
  log.verify_all();
  EXPECT_EQ(error_kind([&] { writer.append({Bytes(65536)}); }), ErrorKind::kUsage);
}

TEST_F(LogTest, HighLevelFunctions) {
  const std::string key_file = dir_.path("k.pem");
  key_.save(key_file);
  const Digest record = sha256("a record");
  check_log(log_, key_file);
  EXPECT_EQ(error_kind([&] { check_log(dir_.path("none"), key_file); }), ErrorKind::kUsage);
  fixed_key("other", 4).save(dir_.path("o.pem"));
  EXPECT_EQ(error_kind([&] { check_log(log_, dir_.path("o.pem")); }), ErrorKind::kUsage);
  const AppendResult result = append_record(log_, key_file, record);
  EXPECT_EQ(result.index, 0U);
  const ReceiptResult judged = verify_receipt(result.receipt, key_.public_key(), record);
  EXPECT_EQ(judged.verdict, ReceiptVerdict::kIncluded);
  EXPECT_EQ(judged.checkpoint.origin, "log.example.org/test");
  EXPECT_EQ(record_of_log_entry(log_entry_for_record(record)), record);
  EXPECT_FALSE(record_of_log_entry(as_bytes("something")));
}

TEST_F(LogTest, DirectoriesThatAreNoLog) {
  const SigningKey other = fixed_key("other", 8);
  EXPECT_EQ(error_kind([&] { LogReader(dir_.path("none")); }), ErrorKind::kUsage);
  EXPECT_EQ(error_kind([&] { LogWriter(dir_.path("none"), key_); }), ErrorKind::kUsage);
  EXPECT_EQ(error_kind([&] { LogReader(dir_.path()); }), ErrorKind::kUsage);
  EXPECT_EQ(error_kind([&] { LogWriter(dir_.path(), key_); }), ErrorKind::kUsage);
  EXPECT_EQ(error_kind([&] { init_log(log_, key_); }), ErrorKind::kUsage);
  EXPECT_EQ(error_kind([&] { init_log(log_, other); }), ErrorKind::kUsage);
  EXPECT_EQ(error_kind([&] { init_log(dir_.path(), key_); }), ErrorKind::kUsage);  // has "log"
  write_text(dir_.path("file"), "x");
  EXPECT_EQ(error_kind([&] { init_log(dir_.path("file"), key_); }), ErrorKind::kUsage);
  EXPECT_EQ(error_kind([&] { init_log(dir_.path("file/below"), key_); }), ErrorKind::kUsage);
  EXPECT_EQ(error_kind([&] { LogWriter(log_, other); }), ErrorKind::kUsage);
  EXPECT_EQ(error_kind([&] { LogReader(log_, other.public_key()); }), ErrorKind::kCannotJudge);
  // What a crashed init leaves is taken up again, by the same key only.
  std::filesystem::create_directory(dir_.path("half"));
  write_text(dir_.path("half/log.vkey"), key_.public_key().vkey() + "\n");
  EXPECT_EQ(error_kind([&] { init_log(dir_.path("half"), other); }), ErrorKind::kUsage);
  init_log(dir_.path("half"), key_);
  EXPECT_EQ(LogReader(dir_.path("half"), key_.public_key()).size(), 0U);
}

TEST_F(LogTest, EveryAlteredFileIsNoticed) {
  append(0, 258);
  const auto files = snapshot(log_);
  for (const auto& file : files) {
    const std::string& path = file.first;
    const std::string& content = file.second;
    if (path.ends_with("/.lock")) continue;
    const auto expect_noticed = [&](const std::string& altered, const std::string& how) {
      write_text(path, altered);
      EXPECT_EQ(error_kind([&] { LogReader(log_, key_.public_key()).verify_all(); }),
                ErrorKind::kMalformed)
          << path << " " << how;
      write_text(path, content);
    };
    if (path.ends_with("/log.vkey")) continue;  // not used when the key is given
    const std::size_t step = std::max<std::size_t>(1, content.size() / 40);
    for (std::size_t i = 0; i < content.size(); i += step) {
      std::string altered = content;
      altered[i] = static_cast<char>(altered[i] ^ 4);
      // A checkpoint altered in the signer's name or key id is one that our key did not sign.
      if (path.ends_with("/checkpoint")) {
        write_text(path, altered);
        const auto kind = error_kind([&] { LogReader(log_, key_.public_key()); });
        EXPECT_TRUE(kind == ErrorKind::kMalformed || kind == ErrorKind::kCannotJudge) << i;
        write_text(path, content);
        continue;
      }
      expect_noticed(altered, "byte " + std::to_string(i));
    }
    expect_noticed(content.substr(0, content.size() - 1), "cut");
    expect_noticed(content + "x", "longer");
    expect_noticed("", "empty");
    std::filesystem::remove(path);
    if (!path.ends_with("/checkpoint")) {
      EXPECT_EQ(error_kind([&] { LogReader(log_, key_.public_key()).verify_all(); }),
                ErrorKind::kMalformed)
          << path;
    }
    write_text(path, content);
  }
  LogReader(log_, key_.public_key()).verify_all();
}

TEST_F(LogTest, AWriterSignsNothingOnADamagedLog) {
  append(0, 258);
  const std::string checkpoint = read_text(log_ + "/checkpoint");
  const std::string tile = log_ + "/tile/0/001.p/2";
  std::string content = read_text(tile);
  content[40] = static_cast<char>(content[40] ^ 1);
  write_text(tile, content);
  EXPECT_EQ(error_kind([&] { append(258, 259); }), ErrorKind::kMalformed);
  EXPECT_EQ(error_kind([&] { LogWriter(log_, key_).republish(); }), ErrorKind::kMalformed);
  EXPECT_EQ(read_text(log_ + "/checkpoint"), checkpoint);
}

// A crash before the checkpoint leaves files ahead of it; the next append writes over them.
TEST_F(LogTest, FilesAheadOfTheCheckpointAreWrittenAgain) {
  for (const std::uint64_t base : {1U, 255U, 256U}) {
    const std::string log = dir_.path("log" + std::to_string(base));
    init_log(log, key_);
    LogWriter(log, key_).append(entries_of(0, base));
    const auto before = snapshot(log);
    LogWriter(log, key_).append(entries_of(5000, 5010));  // will be torn
    // Torn at every point of the publication: the files that came before, old checkpoint. Partial
    // files that the completed append removed are back, since removal comes last.
    for (const auto& [path, content] : before) {
      std::filesystem::create_directories(std::filesystem::path(path).parent_path());
      write_text(path, content);
    }
    LogReader(log, key_.public_key()).verify_all();
    LogWriter(log, key_).append(entries_of(base, base + 3));
    const LogReader reader(log, key_.public_key());
    EXPECT_EQ(reader.size(), base + 3);
    reader.verify_all();
    EXPECT_FALSE(reader.find(entry_of(5000)));
  }
}

TEST_F(LogTest, FullDiskLeavesTheLogAsItWas) {
  append(0, 200);
  const auto before = snapshot(log_);
  // Entries grow to 250 × 100 bytes, so the limit strikes at different files.
  for (const rlim_t limit : {10U, 300U, 3000U, 7000U, 20000U}) {
    const int status = in_child([&] {
      std::signal(SIGXFSZ, SIG_IGN);
      const rlimit file_size{limit, limit};
      setrlimit(RLIMIT_FSIZE, &file_size);
      append(200, 250);
    });
    EXPECT_EQ(status, 33) << limit;
    const auto after = snapshot(log_);
    EXPECT_EQ(after.at(log_ + "/checkpoint"), before.at(log_ + "/checkpoint"));
    for (const auto& [path, content] : before) EXPECT_EQ(after.at(path), content) << path;
    for (const auto& [path, content] : after) EXPECT_EQ(path.find(".bw-tmp-"), std::string::npos);
    LogReader(log_, key_.public_key()).verify_all();
  }
  append(200, 250);
  LogReader(log_, key_.public_key()).verify_all();
}

TEST_F(LogTest, ReadOnlyLogIsInfrastructure) {
  append(0, 3);
  const auto before = snapshot(log_);
  for (const auto& item : std::filesystem::recursive_directory_iterator(log_)) {
    if (item.is_directory()) {
      ASSERT_EQ(chmod(item.path().c_str(), 0555), 0);
    }
  }
  ASSERT_EQ(chmod(log_.c_str(), 0555), 0);
  EXPECT_EQ(in_child([&] {
              if (geteuid() == 0 && seteuid(65534) != 0) _exit(36);
              LogReader(log_, key_.public_key()).verify_all();  // reading is fine
              append(3, 4);
            }),
            33);
  EXPECT_EQ(in_child([&] {
              if (geteuid() == 0 && seteuid(65534) != 0) _exit(36);
              init_log(log_ + "/tile/new", key_);
            }),
            33);
  EXPECT_EQ(snapshot(log_), before);
  ASSERT_EQ(chmod(log_.c_str(), 0755), 0);
  for (const auto& item : std::filesystem::recursive_directory_iterator(log_)) {
    if (item.is_directory()) {
      ASSERT_EQ(chmod(item.path().c_str(), 0755), 0);
    }
  }
}

TEST_F(LogTest, OneWriterAtATime) {
  {
    const LogWriter holder(log_, key_);
    std::string message;
    EXPECT_EQ(error_kind([&] { LogWriter(log_, key_, 50); }, &message), ErrorKind::kInfrastructure);
    EXPECT_NE(message.find("another writer"), std::string::npos) << message;
  }
  // Processes and threads at once: every entry once, nothing lost.
  std::vector<pid_t> children;
  for (std::uint64_t c = 0; c < 3; ++c) {
    const pid_t child = fork();
    if (child == 0) {
      try {
        for (std::uint64_t i = 0; i < 5; ++i) {
          LogWriter(log_, key_, 60000).append({entry_of(100 * c + i), entry_of(9999)});
        }
      } catch (...) {
        _exit(1);
      }
      _exit(0);
    }
    children.push_back(child);
  }
  std::thread thread([&] {
    for (std::uint64_t i = 0; i < 5; ++i) LogWriter(log_, key_, 60000).append({entry_of(500 + i)});
  });
  thread.join();
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  const LogReader log(log_, key_.public_key());
  EXPECT_EQ(log.size(), 21U);
  log.verify_all();
  for (std::uint64_t c = 0; c < 3; ++c) {
    for (std::uint64_t i = 0; i < 5; ++i) EXPECT_TRUE(log.find(entry_of(100 * c + i)));
  }
}

TEST_F(LogTest, RepublishKeepsTheHead) {
  append(0, 3);
  const std::string before = read_text(log_ + "/checkpoint");
  LogWriter(log_, key_).republish();
  EXPECT_EQ(read_text(log_ + "/checkpoint"), before);  // Ed25519 is deterministic
}

TEST_F(LogTest, ReceiptOutcomes) {
  const auto results = append(0, 20);
  const std::string receipt = results[5].receipt;
  const Digest record = sha256("5");
  EXPECT_EQ(verify_receipt(receipt, key_.public_key(), record).verdict, ReceiptVerdict::kIncluded);
  const ReceiptResult other = verify_receipt(receipt, key_.public_key(), sha256("6"));
  EXPECT_EQ(other.verdict, ReceiptVerdict::kOtherRecord);
  EXPECT_EQ(other.record, record);
  EXPECT_EQ(
      verify_receipt(receipt, fixed_key("log.example.org/test", 9).public_key(), record).verdict,
      ReceiptVerdict::kUnknownLog);
  EXPECT_EQ(verify_receipt(receipt, fixed_key("elsewhere", 3).public_key(), record).verdict,
            ReceiptVerdict::kUnknownLog);

  // Without extra data a receipt for another record cannot be told from a forged one.
  TlogProof proof = TlogProof::parse(receipt, "r");
  EXPECT_EQ(proof.text(), receipt);
  proof.extra.reset();
  EXPECT_EQ(verify_receipt(proof.text(), key_.public_key(), record).verdict,
            ReceiptVerdict::kIncluded);
  EXPECT_EQ(error_kind([&] { verify_receipt(proof.text(), key_.public_key(), sha256("6")); }),
            ErrorKind::kMalformed);
  // Extra data that names the record does not help a proof of something else.
  proof = TlogProof::parse(results[6].receipt, "r");
  proof.extra = log_entry_for_record(record);
  EXPECT_EQ(error_kind([&] { verify_receipt(proof.text(), key_.public_key(), record); }),
            ErrorKind::kMalformed);
  proof = TlogProof::parse(receipt, "r");
  proof.index = 6;
  EXPECT_EQ(error_kind([&] { verify_receipt(proof.text(), key_.public_key(), record); }),
            ErrorKind::kMalformed);
  proof.index = UINT64_MAX;
  EXPECT_EQ(error_kind([&] { verify_receipt(proof.text(), key_.public_key(), record); }),
            ErrorKind::kMalformed);
  proof = TlogProof::parse(receipt, "r");
  proof.hashes.pop_back();
  EXPECT_EQ(error_kind([&] { verify_receipt(proof.text(), key_.public_key(), record); }),
            ErrorKind::kMalformed);
  proof.hashes.clear();
  EXPECT_EQ(error_kind([&] { verify_receipt(proof.text(), key_.public_key(), record); }),
            ErrorKind::kMalformed);
}

// What a log that has grown says of an entry under the head that ended with it: the same bytes that
// it said then, so a challenge drawn from that head stays the same.
TEST_F(LogTest, ReceiptsUnderAnOlderHeadAreThoseOfThen) {
  std::vector<std::string> then;
  for (std::uint64_t i = 0; i < 300; ++i) {
    append(i, i + 1);
    if (i % 37 == 0 || i == 255 || i == 256) {
      then.push_back(LogReader(log_, key_.public_key()).receipt(i));
    }
  }
  const LogReader log(log_, key_.public_key());
  std::size_t next = 0;
  for (std::uint64_t i = 0; i < 300; ++i) {
    if (i % 37 != 0 && i != 255 && i != 256) continue;
    EXPECT_EQ(log.receipt_at(i, i + 1, key_), then[next++]) << i;
  }
  EXPECT_EQ(log.receipt_at(3, 300, key_), log.receipt(3));
  const ReceiptResult judged =
      verify_receipt(log.receipt_at(3, 260, key_), key_.public_key(), sha256("3"));
  EXPECT_EQ(judged.verdict, ReceiptVerdict::kIncluded);
  EXPECT_EQ(judged.checkpoint.size, 260U);
  EXPECT_THROW(log.receipt_at(5, 5, key_), std::out_of_range);
  EXPECT_THROW(log.receipt_at(5, 301, key_), std::out_of_range);
  EXPECT_EQ(error_kind([&] { log.receipt_at(5, 6, fixed_key("log.example.org/test", 4)); }),
            ErrorKind::kUsage);
}

TEST_F(LogTest, NoOlderHeadIsSignedOnADamagedLog) {
  append(0, 10);
  const std::string tile = log_ + "/tile/0/000.p/10";
  std::string bytes = testing::read_text(tile);
  bytes[40] = static_cast<char>(bytes[40] ^ 1);  // entry 1
  testing::write_text(tile, bytes);
  EXPECT_EQ(error_kind([&] { LogReader(log_, key_.public_key()).receipt_at(1, 2, key_); }),
            ErrorKind::kMalformed);
}

TEST_F(LogTest, HostileReceiptsNeverPass) {
  const std::string receipt = append(0, 20)[5].receipt;
  const Digest record = sha256("5");
  const auto included = [&](const std::string& text) {
    try {
      return verify_receipt(text, key_.public_key(), record).verdict == ReceiptVerdict::kIncluded;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kMalformed) << error.what();
      return false;
    }
  };
  EXPECT_TRUE(included(receipt));
  for (std::size_t i = 0; i < receipt.size(); ++i) {
    EXPECT_FALSE(included(receipt.substr(0, i)));
    for (int bit = 0; bit < 8; ++bit) {
      std::string altered = receipt;
      altered[i] = static_cast<char>(altered[i] ^ (1 << bit));
      EXPECT_FALSE(included(altered)) << "byte " << i << " bit " << bit;
    }
  }
  std::mt19937 random(11);
  for (int i = 0; i < 500; ++i) {
    std::string noise = "c2sp.org/tlog-proof@v1\n";
    for (std::size_t k = random() % 300; k > 0; --k) noise += static_cast<char>(random());
    EXPECT_FALSE(included(noise));
  }
  EXPECT_FALSE(included(std::string(2'000'000, 'a')));
  std::string hashes = "c2sp.org/tlog-proof@v1\nindex 0\n";
  for (int i = 0; i < 100; ++i) hashes += base64_encode(Digest{}.view()) + "\n";
  EXPECT_FALSE(included(hashes + receipt.substr(receipt.find("\n\n") + 1)));
}

}  // namespace
}  // namespace bitwitness
