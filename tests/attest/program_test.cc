// bw-attest as a person or a script runs it: data on stdout, exit codes, nothing half-written.
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "attest/base/file.h"
#include "attest/log.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

using testing::fixed_key;
using testing::read_text;
using testing::sample_run;
using testing::snapshot;
using testing::TemporaryDirectory;
using testing::write_text;

struct Result {
  int code;
  std::string out;
  std::string err;
};

class ProgramTest : public ::testing::Test {
 protected:
  // Arguments are words of a shell line run in the temporary directory.
  Result run(const std::string& arguments) {
    const std::string command = "cd '" + dir_.path() + "' && '" BW_ATTEST_PROGRAM "' " + arguments +
                                " >'" + out_.path("out") + "' 2>'" + out_.path("err") + "'";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(out_.path("out")),
            read_text(out_.path("err"))};
  }
  void make_log() {
    ASSERT_EQ(run("keygen --name log.example.org/t --out k.pem").code, 0);
    ASSERT_EQ(run("init log --key k.pem").code, 0);
    Record record = sample_run(EvidenceLevel::kRoots).record;
    record.sign(fixed_key("operator.example", 1));
    write_record(dir_.path("a.bwrec"), record);
    record.provenance["nonce"] = std::string(64, '8');
    record.sign(fixed_key("operator.example", 1));
    write_record(dir_.path("b.bwrec"), record);
  }
  TemporaryDirectory dir_;
  TemporaryDirectory out_;
};

TEST_F(ProgramTest, VersionHelpAndUsage) {
  const Result version = run("--version");
  EXPECT_EQ(version.code, 0);
  EXPECT_NE(version.out.find("record format 1"), std::string::npos) << version.out;
  EXPECT_EQ(run("--help").code, 0);
  for (const char* bad : {"", "nonsense", "keygen", "keygen --name x", "verify", "show",
                          "verify log", "append log --key k.pem", "selftest --format xml",
                          "verify --log-key k --receipt r", "init"}) {
    const Result result = run(bad);
    EXPECT_EQ(result.code, 2) << bad;
    EXPECT_TRUE(result.out.empty()) << bad << result.out;
    EXPECT_FALSE(result.err.empty()) << bad;
  }
}

TEST_F(ProgramTest, Selftest) {
  const Result text = run("selftest");
  EXPECT_EQ(text.code, 0);
  EXPECT_NE(text.out.find(" 0 failed"), std::string::npos);
  EXPECT_EQ(run("selftest --format json").code, 0);
}

TEST_F(ProgramTest, KeygenNeverOverwritesByAccident) {
  const Result first = run("keygen --name log.example.org/t --out k.pem");
  EXPECT_EQ(first.code, 0);
  EXPECT_EQ(first.out, read_text(dir_.path("k.pem.vkey")));
  const auto before = snapshot(dir_.path());
  EXPECT_EQ(run("keygen --name log.example.org/t --out k.pem").code, 2);
  EXPECT_EQ(snapshot(dir_.path()), before);
  EXPECT_EQ(run("keygen --name log.example.org/t --out k.pem --force").code, 0);
  EXPECT_NE(snapshot(dir_.path()), before);
  EXPECT_EQ(run("keygen --name 'two words' --out l.pem").code, 2);
  EXPECT_EQ(run("keygen --name x --out none/l.pem").code, 2);
  EXPECT_EQ(snapshot(dir_.path()).size(), 2U);
}

TEST_F(ProgramTest, TheWholeWay) {
  make_log();
  const Result empty = run("verify log --log-key k.pem.vkey");
  EXPECT_EQ(empty.code, 4) << "nothing to check is never 0";
  const Result appended = run("append log --key k.pem a.bwrec b.bwrec a.bwrec");
  EXPECT_EQ(appended.code, 0) << appended.err;
  EXPECT_EQ(appended.out, "0  a.bwrec\n1  b.bwrec\n0  a.bwrec  (was there already)\n");
  EXPECT_TRUE(path_exists(dir_.path("b.bwrec.tlog-proof")));

  EXPECT_EQ(run("verify log --log-key k.pem.vkey").code, 0);
  EXPECT_EQ(run("verify log --log-key \"$(cat k.pem.vkey)\"").code, 0);
  const Result good =
      run("verify --receipt a.bwrec.tlog-proof --record a.bwrec --log-key k.pem.vkey");
  EXPECT_EQ(good.code, 0) << good.err;
  EXPECT_TRUE(good.out.starts_with("match: record ")) << good.out;
  const Result other = run(
      "verify --receipt a.bwrec.tlog-proof --record b.bwrec --log-key k.pem.vkey --format json");
  EXPECT_EQ(other.code, 1);
  EXPECT_NE(other.out.find("\"verdict\": \"mismatch\""), std::string::npos) << other.out;

  EXPECT_EQ(run("keygen --name other --out o.pem").code, 0);
  EXPECT_EQ(run("verify log --log-key o.pem.vkey").code, 4);
  EXPECT_EQ(run("verify --receipt a.bwrec.tlog-proof --record a.bwrec --log-key o.pem.vkey").code,
            4);
  EXPECT_EQ(run("append log --key o.pem a.bwrec").code, 2);

  const Result proof = run("prove log --index 1");
  EXPECT_EQ(proof.code, 0);
  EXPECT_EQ(proof.out, read_text(dir_.path("b.bwrec.tlog-proof")));
  EXPECT_EQ(run("prove log --record b.bwrec --out p.tlog-proof").code, 0);
  EXPECT_EQ(read_text(dir_.path("p.tlog-proof")), proof.out);
  EXPECT_EQ(run("prove log --index 2").code, 2);
  EXPECT_EQ(run("prove log").code, 2);
  EXPECT_EQ(run("prove log --index 0 --record a.bwrec").code, 2);
  write_record(dir_.path("c.bwrec"), sample_run().record);
  Record unlogged = sample_run().record;
  unlogged.provenance["nonce"] = std::string(64, '9');
  write_record(dir_.path("c.bwrec"), unlogged);
  EXPECT_EQ(run("prove log --record c.bwrec").code, 4);

  EXPECT_EQ(run("checkpoint log").out, read_text(dir_.path("log/checkpoint")));
  EXPECT_EQ(run("checkpoint log --key k.pem").code, 0);
  EXPECT_EQ(run("checkpoint log --key o.pem").code, 2);
}

TEST_F(ProgramTest, TamperedEvidenceIsMalformedInBothFormats) {
  make_log();
  ASSERT_EQ(run("append log --key k.pem a.bwrec").code, 0);
  std::string receipt = read_text(dir_.path("a.bwrec.tlog-proof"));
  receipt[receipt.find("\n1\n") + 1] = '2';
  write_text(dir_.path("bad.tlog-proof"), receipt);
  std::string record = read_text(dir_.path("a.bwrec"));
  record[100] = static_cast<char>(record[100] ^ 1);
  write_text(dir_.path("bad.bwrec"), record);
  for (const std::string format : {"text", "json"}) {
    const std::string tail = " --log-key k.pem.vkey --format " + format;
    for (const std::string& arguments :
         {"verify --receipt bad.tlog-proof --record a.bwrec" + tail,
          "verify --receipt a.bwrec.tlog-proof --record bad.bwrec" + tail,
          "verify --receipt a.bwrec --record a.bwrec" + tail}) {
      const Result result = run(arguments);
      EXPECT_EQ(result.code, 5) << arguments << result.err;
      EXPECT_NE(result.out.find("malformed"), std::string::npos) << result.out;
    }
  }
  EXPECT_EQ(run("append log --key k.pem bad.bwrec").code, 5);
  const std::string proof = BW_TEST_DATA_DIR "/records/h200-altered-key.bwproof";
  const Result shown = run("show '" + proof + "' --format json");
  EXPECT_EQ(shown.code, 0) << shown.err;
  EXPECT_NE(shown.out.find("\"operator\": \"k_rope\""), std::string::npos) << shown.out;
  EXPECT_NE(shown.out.find("\"accused\": \"operator.example/test+"), std::string::npos);
  EXPECT_EQ(run("show bad.bwrec").code, 5);
  EXPECT_EQ(run("show k.pem").code, 5);
  EXPECT_EQ(run("verify --receipt none --record a.bwrec --log-key k.pem.vkey").code, 2);
  EXPECT_EQ(run("show none").code, 2);
  write_text(dir_.path("log/tile/0/000.p/1"), std::string(32, 'x'));
  EXPECT_EQ(run("verify log --log-key k.pem.vkey").code, 5);
  EXPECT_EQ(run("verify none --log-key k.pem.vkey").code, 2);
}

TEST_F(ProgramTest, AppendIsAllOrNothing) {
  make_log();
  write_text(dir_.path("bad.bwrec"), "bwrecord");
  const auto before = snapshot(dir_.path());
  EXPECT_EQ(run("append log --key k.pem a.bwrec bad.bwrec").code, 5);
  EXPECT_EQ(run("append log --key k.pem a.bwrec none.bwrec").code, 2);
  EXPECT_EQ(run("append nolog --key k.pem a.bwrec").code, 2);
  ASSERT_EQ(chmod(dir_.path("k.pem").c_str(), 0644), 0);
  const Result open_key = run("append log --key k.pem a.bwrec");
  EXPECT_EQ(open_key.code, 2);
  EXPECT_NE(open_key.err.find("chmod 600"), std::string::npos) << open_key.err;
  EXPECT_EQ(snapshot(dir_.path()), before);
}

TEST_F(ProgramTest, ShowsEveryKindOfFile) {
  make_log();
  ASSERT_EQ(run("append log --key k.pem a.bwrec").code, 0);
  const Record record = read_record(dir_.path("a.bwrec"));
  const Bytes manifest = record.manifest.canonical_bytes();
  write_text(dir_.path("m"), as_text(manifest));
  const std::pair<const char*, std::string> files[] = {
      {"a.bwrec", record.digest().hex()},
      {"a.bwrec.tlog-proof", record.digest().hex()},
      {"log/checkpoint", "log.example.org/t"},
      {"m", record.manifest.digest().hex()}};
  for (const auto& [file, expected] : files) {
    for (const std::string format : {"text", "json"}) {
      const Result result = run("show " + std::string(file) + " --format " + format);
      EXPECT_EQ(result.code, 0) << file << result.err;
      EXPECT_NE(result.out.find(expected), std::string::npos) << file << result.out;
    }
  }
}

TEST_F(ProgramTest, FullStandardOutputIsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  make_log();
  const std::string command =
      "'" BW_ATTEST_PROGRAM "' checkpoint '" + dir_.path("log") + "' >/dev/full 2>/dev/null";
  const int status = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 3);
}

}  // namespace
}  // namespace bitwitness
