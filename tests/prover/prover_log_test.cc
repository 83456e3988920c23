// The log of a serving prover never gets a second history, whatever is done to its directory.
#include "prover/prover_log.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "attest/base/error.h"
#include "attest/base/sha256.h"
#include "tests/kernels/model/safetensors_writer.h"

namespace bitwitness {
namespace {

namespace fs = std::filesystem;

class ProverLogTest : public ::testing::Test {
 protected:
  ProverLogTest() { init_log(dir(), key_); }
  std::string dir() const { return (work_.path() / "log").string(); }
  void copy(const char* from, const char* to) {
    fs::remove_all(work_.path() / to);
    fs::copy(work_.path() / from, work_.path() / to, fs::copy_options::recursive);
  }
  static Bytes entry(int i) { return log_entry_for_record(sha256(std::to_string(i))); }

  test::TempDir work_;
  SigningKey key_ = SigningKey::generate("log.example");
};

TEST_F(ProverLogTest, AnOlderCopyPutBackIsNotSignedOn) {
  ProverLog log(dir(), key_);
  log.append({entry(0)});
  copy("log", "backup");
  const std::uint64_t audit = log.append_audit(sha256("commitment"));
  EXPECT_EQ(audit, 1u);
  copy("log", "newest");
  copy("backup", "log");
  const std::string head = test::read_file(fs::path(dir()) / "checkpoint");
  const auto refused = [&](const auto& work) {
    try {
      work();
      ADD_FAILURE() << "it was signed";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInfrastructure) << error.what();
      EXPECT_NE(std::string(error.what()).find("older copy"), std::string::npos) << error.what();
    }
  };
  refused([&] { log.append({entry(1)}); });
  refused([&] { log.append_audit(sha256("another")); });
  refused([&] { log.audit_receipts(0, 0); });
  refused([&] { log.has_record(sha256("0"), 0); });
  EXPECT_EQ(test::read_file(fs::path(dir()) / "checkpoint"), head) << "and nothing is written";

  // Another history of the same length is no better.
  LogWriter(dir(), key_).append({entry(7), entry(8), entry(9)});
  refused([&] { log.append({entry(1)}); });

  // With the newest copy it goes on.
  copy("newest", "log");
  EXPECT_EQ(log.append({entry(1)}).front().index, 2u);
}

TEST_F(ProverLogTest, OthersMayAppendToo) {
  ProverLog log(dir(), key_);
  log.append({entry(0)});
  LogWriter(dir(), key_).append({entry(1), log_entry_for_audit(sha256("theirs"))});
  EXPECT_EQ(log.find_audit(sha256("theirs")), 2u);
  EXPECT_EQ(log.append({entry(2)}).front().index, 3u);
  const ProverLog::AuditReceipts receipts = log.audit_receipts(2, 1);
  EXPECT_EQ(verify_entry_receipt(receipts.commitment, key_.public_key(),
                                 log_entry_for_audit(sha256("theirs")))
                .checkpoint.size,
            3u);
  EXPECT_EQ(verify_receipt(receipts.record, key_.public_key(), sha256("1")).verdict,
            ReceiptVerdict::kIncluded);
}

}  // namespace
}  // namespace bitwitness
