// Our log as stock tools see it: Go's sumdb/note and sumdb/tlog verify signature, tiles and
// receipts.
#include <cstdlib>
#include <fstream>

#include "attest/base/sha256.h"
#include "attest/log.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

using testing::TemporaryDirectory;

TEST(StockTlog, GoVerifiesCheckpointTilesAndReceipts) {
  // GOPATH mode: the packages of Debian's golang-golang-x-mod-dev, no network.
  const std::string go = "GO111MODULE=off GOPATH=/usr/share/gocode GOFLAGS= CGO_ENABLED=0 go ";
  if (std::system((go + "list golang.org/x/mod/sumdb/tlog >/dev/null 2>&1").c_str()) != 0) {
    GTEST_SKIP() << "go with golang.org/x/mod is not here (Debian: golang-go, "
                    "golang-golang-x-mod-dev)";
  }
  const TemporaryDirectory dir;
  const std::string checker = dir.path("checker");
  ASSERT_EQ(std::system(("GOCACHE=" + dir.path("cache") + " " + go + "build -o " + checker + " " +
                         BW_SOURCE_DIR + "/tests/attest/stock_tlog/main.go")
                            .c_str()),
            0);
  const SigningKey key = testing::fixed_key("log.example.org/stock", 6);
  const std::string log = dir.path("log");
  init_log(log, key);
  std::uint64_t size = 0;
  for (const std::uint64_t next : {1U, 2U, 3U, 255U, 256U, 257U, 700U}) {
    std::vector<Bytes> entries;
    for (; size < next; ++size) {
      entries.push_back(log_entry_for_record(sha256(std::to_string(size))));
    }
    const AppendResult result = LogWriter(log, key).append(entries).back();
    testing::write_text(dir.path("receipt"), result.receipt);
    const std::string arguments = " " + log + " '" + key.public_key().vkey() + "' " +
                                  dir.path("receipt") + " " +
                                  sha256(std::to_string(result.index)).hex();
    EXPECT_EQ(std::system((checker + arguments).c_str()), 0) << next;
  }
  // The checker does reject: another record, an altered receipt, another key.
  const std::string quiet = " 2>/dev/null";
  const std::string vkey = " '" + key.public_key().vkey() + "' ";
  EXPECT_NE(std::system((checker + " " + log + vkey + dir.path("receipt") + " " +
                         sha256("no").hex() + quiet)
                            .c_str()),
            0);
  const std::string other = testing::fixed_key("log.example.org/stock", 7).public_key().vkey();
  EXPECT_NE(std::system((checker + " " + log + " '" + other + "' " + dir.path("receipt") + " " +
                         sha256("699").hex() + quiet)
                            .c_str()),
            0);
}

}  // namespace
}  // namespace bitwitness
