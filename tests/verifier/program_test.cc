// bw-verifier as an auditor runs it: verdicts, exit codes, formats.
#include "tests/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "attest/record.h"

namespace bitwitness {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

const std::string kModel = std::string(BW_TEST_DATA_DIR) + "/models/tiny-qwen3";
const std::string kOther = std::string(BW_TEST_DATA_DIR) + "/models/tiny-llama";
const std::string kAudit = "bw-verifier audit run.bwrec --model " + kModel + " ";

class VerifierProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    const test::ProgramResult made = run(
        "bw-attest keygen --name log.example/t --out k.pem && bw-attest init log --key k.pem && "
        "bw-prover run --model " +
        kModel + " --prompt 'First Citizen:' --max-tokens 5 --out run.bwrec --log log --key k.pem");
    ASSERT_EQ(made.code, 0) << made.err;
  }
  test::ProgramResult run(const std::string& line) const { return shell_.run(line); }
  // Runs the line in both formats: same code, same verdict.
  void expect_verdict(const std::string& line, int code, const std::string& verdict,
                      const std::string& part = "") const {
    const test::ProgramResult text = run(line);
    EXPECT_EQ(text.code, code) << line << "\n" << text.out << text.err;
    EXPECT_THAT(text.out, StartsWith(verdict + "  ")) << line;
    EXPECT_THAT(text.out, HasSubstr(part)) << line;
    const test::ProgramResult json = run(line + " --format json");
    EXPECT_EQ(json.code, code) << line;
    const nlohmann::json parsed = nlohmann::json::parse(json.out);
    EXPECT_EQ(parsed.at("verdict"), verdict);
    EXPECT_EQ(parsed.at("exit_code"), code);
  }
  void expect_error(const std::string& line, int code, const std::string& part) const {
    const test::ProgramResult result = run(line);
    EXPECT_EQ(result.code, code) << line << "\n" << result.out << result.err;
    EXPECT_THAT(result.err, HasSubstr(part)) << line;
    EXPECT_EQ(result.out, "") << line;
  }
  void write(const std::string& name, const std::string& bytes) const {
    test::write_file(shell_.path(name), bytes);
  }
  std::string read(const std::string& name) const { return test::read_file(shell_.path(name)); }
  test::Shell shell_;
};

TEST_F(VerifierProgram, Match) {
  expect_verdict(kAudit, 0, "match", "log          not checked");
  expect_verdict(kAudit + "--log-key k.pem.vkey", 0, "match", "entry 0 of log.example/t");
  expect_verdict(kAudit + "--log-key \"$(cat k.pem.vkey)\" --device ref --level full", 0, "match");
  expect_verdict(kAudit + "--log-key k.pem.vkey --receipt run.bwrec.tlog-proof", 0, "match");
}

TEST_F(VerifierProgram, TheReportSaysWhatWasClaimed) {
  const test::ProgramResult text = run(kAudit);
  EXPECT_THAT(text.out, HasSubstr("prompt       \"<|begin_of_text|>First Citizen:\""));
  EXPECT_THAT(text.out, HasSubstr("5 of at most 5 emitted (length), greedy"));
  const nlohmann::json json = nlohmann::json::parse(run(kAudit + "--format json").out);
  EXPECT_EQ(json.at("token_ids").size(), 5u);
  EXPECT_EQ(json.at("sampling").at("temperature"), 0);
  EXPECT_TRUE(json.at("output_text").is_string());
}

TEST_F(VerifierProgram, AnyFlippedByteOfTheRecordIsMalformed) {
  const std::string good = read("run.bwrec");
  for (std::size_t at = 0; at < good.size(); at += 1 + good.size() / 23) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x20);
    write("run.bwrec", bad);
    expect_verdict(kAudit, 5, "malformed");
  }
}

TEST_F(VerifierProgram, TruncatedPaddedRandomAndHugeRecordsAreMalformed) {
  const std::string good = read("run.bwrec");
  for (const std::string& bad :
       {std::string(), good.substr(0, 7), good.substr(0, good.size() / 2), good + "x",
        std::string(4096, '\xff'), std::string("{\"verdict\": \"match\"}")}) {
    write("run.bwrec", bad);
    expect_verdict(kAudit, 5, "malformed");
  }
  ASSERT_EQ(run("truncate -s 5G run.bwrec").code, 0);
  expect_verdict(kAudit, 5, "malformed");
}

TEST_F(VerifierProgram, ATamperedModelIsAMismatchWithThePlace) {
  ASSERT_EQ(run("cp -r " + kModel + " m && chmod -R u+w m").code, 0);
  std::string weights = read("m/model.safetensors");
  weights[weights.size() / 2] = static_cast<char>(weights[weights.size() / 2] ^ 0x40);
  write("m/model.safetensors", weights);
  expect_verdict("bw-verifier audit run.bwrec --model m", 1, "mismatch", "first difference: layer");
}

TEST_F(VerifierProgram, AnotherModelCannotBeJudged) {
  expect_verdict("bw-verifier audit run.bwrec --model " + kOther, 4, "cannot_judge",
                 "another model");
}

TEST_F(VerifierProgram, FileNamesThatAreNotUtf8DoNotChangeTheVerdict) {
  ASSERT_EQ(run("cp run.bwrec $(printf 'x\\377.bwrec')").code, 0);
  expect_verdict("bw-verifier audit $(printf 'x\\377.bwrec') --model " + kModel, 0, "match");
}

TEST_F(VerifierProgram, Expectations) {
  expect_verdict(kAudit + "--nonce 00", 1, "mismatch", "nonce");
  expect_verdict(kAudit + "--operator-key k.pem.vkey", 4, "cannot_judge", "operator key");
  expect_error(kAudit + "--nonce 0", 2, "nonce");
  expect_error(kAudit + "--log-key k.pem", 2, "k.pem.vkey");
}

TEST_F(VerifierProgram, Receipts) {
  const std::string with_key = kAudit + "--log-key k.pem.vkey";
  std::string receipt = read("run.bwrec.tlog-proof");
  receipt[receipt.size() - 5] = receipt[receipt.size() - 5] == 'A' ? 'B' : 'A';
  write("bad.tlog-proof", receipt);
  expect_verdict(with_key + " --receipt bad.tlog-proof", 5, "malformed");
  write("empty.tlog-proof", "");
  expect_verdict(with_key + " --receipt empty.tlog-proof", 5, "malformed");
  ASSERT_EQ(run("bw-attest keygen --name log.example/u --out u.pem").code, 0);
  expect_verdict(kAudit + "--log-key u.pem.vkey", 4, "cannot_judge");
  ASSERT_EQ(run("rm run.bwrec.tlog-proof").code, 0);
  expect_verdict(with_key, 4, "cannot_judge", "no receipt");
}

TEST_F(VerifierProgram, UnusableInputOfOnesOwn) {
  expect_error("bw-verifier audit none.bwrec --model " + kModel, 2, "none.bwrec");
  expect_error("bw-verifier audit . --model " + kModel, 2, ".");
  expect_error("bw-verifier audit run.bwrec --model none", 2, "none");
  expect_error("bw-verifier audit run.bwrec", 2, "--model");
  expect_error("bw-verifier audit --model " + kModel, 2, "record");
  expect_error(kAudit + "--level cell", 2, "level");
  expect_error(kAudit + "--log-key nonsense", 2, "nonsense");
  expect_error(kAudit + "--receipt none", 2, "none");
  expect_error(kAudit + "--device tpu", 2, "tpu");
  expect_error(kAudit + "--format yaml", 2, "format");
  expect_error("bw-verifier", 2, "");
}

TEST_F(VerifierProgram, FlagsOfLiveAudits) {
  const std::string live = "bw-verifier audit --prover 127.0.0.1:9 --record " +
                           std::string(64, 'a') + " --model " + kModel + " --level ";
  expect_error(kAudit + "--level cell --key k.pem", 2, "--prover");
  expect_error(live + "cell", 2, "--key");
  expect_error(live + "layer --key k.pem --cells 3", 2, "--cells");
  expect_error(live + "cell --key k.pem --layers some", 2, "random:K");
  expect_error(live + "cell --key k.pem --cells 0", 2, "");
  expect_error(live + "cell --key none.pem", 2, "none.pem");
  expect_error(live + "cell --key k.pem --receipt run.bwrec.tlog-proof", 2, "--receipt");
  expect_error(live + "cell --key k.pem --proof-out no/such/dir/x", 2, "no/such/dir");
  expect_error(live + "cell --key k.pem --proof-out k.pem", 2, "k.pem");
  expect_error(live + "cell --key k.pem --manifest run.bwrec", 2, "--manifest");
  expect_error(live + "cell --key k.pem --tls-ca k.pem.vkey", 2, "no PEM");
  expect_error(live + "cell --key k.pem --tls-cert k.pem", 2, "--tls-ca");
  expect_error(live + "cell --key k.pem --max-record-mib 0", 2, "");
  expect_error(live + "full --layers all", 2, "--layers");
  expect_error("bw-verifier audit --prover 192.0.2.1:9 --record " + std::string(64, 'a') +
                   " --model " + kModel + " --level cell --key k.pem",
               2, "--tls-ca");
  expect_error(live + "cell --key k.pem --deadline 1", 3, "cannot be reached");
  expect_error(kAudit + "--proof-out p.bwproof", 2, "--key");
}

TEST_F(VerifierProgram, ProofsOfWholeRecords) {
  const std::string with_proof = " --key k.pem --proof-out p.bwproof";
  expect_verdict(kAudit + with_proof, 0, "match");
  EXPECT_NE(run("test -e p.bwproof").code, 0) << "a match leaves no proof";
  // A model that is not the record's shows nothing to others.
  ASSERT_EQ(run("cp -r " + kModel + " m && chmod -R u+w m").code, 0);
  std::string weights = read("m/model.safetensors");
  weights[weights.size() / 2] = static_cast<char>(weights[weights.size() / 2] ^ 0x40);
  write("m/model.safetensors", weights);
  expect_verdict("bw-verifier audit run.bwrec --model m" + with_proof, 1, "mismatch");
  EXPECT_NE(run("test -e p.bwproof").code, 0);
}

TEST_F(VerifierProgram, ProofsAreNeverWrittenOverAnything) {
  const auto refused = [&](const std::string& name, const std::string& part) {
    expect_error(kAudit + "--key k.pem --proof-out " + name, 2, part);
  };
  write("old.bwproof", "an earlier proof");
  refused("old.bwproof", "exists already");
  EXPECT_EQ(read("old.bwproof"), "an earlier proof");
  refused("run.bwrec", "RECORD");
  refused("./run.bwrec.tlog-proof", "exists already");
  refused("k.pem", "k.pem");
  refused("k.pem.vkey --log-key k.pem.vkey", "is a key");
  ASSERT_EQ(run("cp -r " + kModel + " m && chmod -R u+w m").code, 0);
  expect_error("bw-verifier audit run.bwrec --model m --key k.pem --proof-out m/p.bwproof", 2,
               "inside the model");
}

TEST_F(VerifierProgram, AProofThatCannotBeWrittenDoesNotCostTheVerdict) {
  Record lie = read_record(shell_.path("run.bwrec").string());
  lie.evidence = {};
  lie.claim.trace_root.bytes[7] ^= 1;
  write_record(shell_.path("lie.bwrec").string(), lie);
  // Through a pipe: the limit is for files.
  const test::ProgramResult full = run("(ulimit -f 1; bw-verifier audit lie.bwrec --model " +
                                       kModel + " --key k.pem; echo code $?) | cat");
  EXPECT_THAT(full.out, HasSubstr("code 1")) << full.err;
  EXPECT_THAT(full.out, HasSubstr("could not be written"));
  EXPECT_NE(run("test -e mismatch.bwproof").code, 0);
  // With room it goes to the default name, and the next one beside it.
  for (const char* name : {"mismatch.bwproof", "mismatch-2.bwproof"}) {
    EXPECT_EQ(run("bw-verifier audit lie.bwrec --model " + kModel + " --key k.pem").code, 1);
    EXPECT_EQ(run(std::string("test -s ") + name).code, 0) << name;
  }
}

TEST_F(VerifierProgram, FlagsWithoutEffectAreRefused) {
  expect_error(kAudit + "--nonce ''", 2, "--nonce");
  expect_error(kAudit + "--tls-ca nope.pem", 2, "--prover");
  expect_error(kAudit + "--deadline 5", 2, "--prover");
  expect_error(kAudit + "--max-record-mib 1", 2, "--prover");
}

TEST_F(VerifierProgram, Recheck) {
  Record lie = read_record(shell_.path("run.bwrec").string());
  lie.evidence = {};
  lie.claim.trace_root.bytes[7] ^= 1;
  write_record(shell_.path("lie.bwrec").string(), lie);
  const std::string audit =
      "bw-verifier audit lie.bwrec --model " + kModel + " --key k.pem --proof-out ";
  const std::string with_log = " --log-key k.pem.vkey --model ";
  // A record that no operator signed and no log holds: anybody can have written it.
  ASSERT_EQ(run(audit + "none.bwproof").code, 1);
  expect_verdict("bw-verifier recheck none.bwproof --model " + kModel, 4, "cannot_judge",
                 "nobody can be held");
  expect_verdict("bw-verifier recheck none.bwproof" + with_log + kModel, 4, "cannot_judge",
                 "no receipt");
  ASSERT_EQ(run("bw-attest append log lie.bwrec --key k.pem").code, 0);
  const test::ProgramResult audited = run("umask 0; " + audit + "p.bwproof");
  EXPECT_EQ(audited.code, 1) << audited.out << audited.err;
  EXPECT_THAT(audited.out, HasSubstr("proof        p.bwproof"));
  EXPECT_EQ(std::filesystem::status(shell_.path("p.bwproof")).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write)
      << "it holds the prompt";
  expect_verdict("bw-verifier recheck p.bwproof --device ref" + with_log + kModel, 1, "mismatch",
                 "confirmed");
  expect_verdict("bw-verifier recheck p.bwproof --model " + kModel, 4, "cannot_judge");
  expect_verdict("bw-verifier recheck p.bwproof" + with_log + kOther, 4, "cannot_judge");
  expect_verdict("bw-verifier recheck p.bwproof --operator-key k.pem.vkey --model " + kModel, 4,
                 "cannot_judge");
  write("bad.bwproof", "bw-proof and then nothing of the kind");
  expect_verdict("bw-verifier recheck bad.bwproof --model " + kModel, 5, "malformed");
  expect_verdict("bw-verifier recheck run.bwrec --model " + kModel, 5, "malformed",
                 "no Bitwitness mismatch proof");
  expect_error("bw-verifier recheck none --model " + kModel, 2, "none");
  expect_error("bw-verifier recheck run.bwrec", 2, "--model");
}

TEST_F(VerifierProgram, VersionAndSelftest) {
  EXPECT_THAT(run("bw-verifier --version").out, HasSubstr("arithmetic fma32 version 1"));
  EXPECT_EQ(run("bw-verifier --help").code, 0);
  const test::ProgramResult result = run("bw-verifier selftest");
  EXPECT_EQ(result.code, 0) << result.out;
  EXPECT_THAT(result.out, HasSubstr(", 0 failed"));
}

}  // namespace
}  // namespace bitwitness
