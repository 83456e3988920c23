// bw-prover as a person or a script runs it: outputs, exit codes, nothing half-written.
#include "tests/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "attest/record.h"

namespace bitwitness {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string kModels = std::string(BW_TEST_DATA_DIR) + "/models";
const std::string kRun = "bw-prover run --model " + kModels + "/tiny-qwen3 --max-tokens 6 ";

class ProverProgram : public ::testing::Test {
 protected:
  test::ProgramResult run(const std::string& line) const { return shell_.run(line); }
  nlohmann::json run_json(const std::string& line) const {
    const test::ProgramResult result = run(line + " --format json");
    EXPECT_EQ(result.code, 0) << result.err;
    return nlohmann::json::parse(result.out);
  }
  bool exists(const std::string& name) const { return std::filesystem::exists(shell_.path(name)); }
  // The line fails with this code, says so on stderr with `part`, and leaves nothing behind.
  void expect_error(const std::string& line, int code, const std::string& part) const {
    const test::ProgramResult result = run(line);
    EXPECT_EQ(result.code, code) << line << "\n" << result.err;
    EXPECT_THAT(result.err, HasSubstr(part)) << line;
    EXPECT_FALSE(exists("x.bwrec")) << line;
    EXPECT_FALSE(exists("x.bwrec.tlog-proof")) << line;
  }
  test::Shell shell_;
};

TEST_F(ProverProgram, JsonHasWhatScriptsNeed) {
  const nlohmann::json json = run_json(kRun + "--prompt 'KING RICHARD III:' --out x.bwrec");
  const Record record = read_record(shell_.path("x.bwrec").string());
  EXPECT_EQ(json.at("prompt_token_ids").get<std::vector<std::uint32_t>>(), record.claim.prompt_ids);
  EXPECT_EQ(json.at("token_ids").get<std::vector<std::uint32_t>>(), record.claim.emitted_ids);
  EXPECT_EQ(json.at("trace_root"), record.claim.trace_root.hex());
  EXPECT_EQ(json.at("claim_digest"), record.claim.digest().hex());
  EXPECT_EQ(json.at("token_ids").size(), 6u);
  EXPECT_TRUE(json.at("text").is_string());
}

TEST_F(ProverProgram, TextGoesToStdoutAndProseToStderr) {
  const test::ProgramResult result = run(kRun + "--prompt 'KING RICHARD III:' --out x.bwrec");
  EXPECT_EQ(result.code, 0);
  const nlohmann::json json = run_json(kRun + "--prompt 'KING RICHARD III:' --out y.bwrec");
  EXPECT_EQ(result.out, json.at("text").get<std::string>() + "\n");
  EXPECT_THAT(result.err, HasSubstr(json.at("trace_root").get<std::string>()));
}

TEST_F(ProverProgram, ClaimsAreEqualOnEveryDeviceAndHoweverThePromptIsFed) {
  const std::string line =
      kRun + "--prompt 'What light through yonder' --temperature 0.8 --top-k 30 --seed 00ff ";
  const std::string want = run_json(line + "--out a.bwrec --device ref").at("claim_digest");
  for (const char* how : {"--device cpu", "--device cpu --threads 1", "--prefill-chunk 1",
                          "--prefill-chunk 3 --evidence none", "--evidence rows"}) {
    EXPECT_EQ(run_json(line + "--out b.bwrec " + how).at("claim_digest"), want) << how;
  }
}

TEST_F(ProverProgram, BatchWritesOneRecordEachEqualToRunsAlone) {
  test::write_file(shell_.path("requests.jsonl"),
                   "{\"prompt\": \"KING RICHARD III:\"}\n"
                   "{\"token_ids\": [0, 5, 9], \"max_tokens\": 3}\n"
                   "{\"prompt\": \"What light\", \"temperature\": 0.7, \"seed\": \"abcd\"}\n");
  const test::ProgramResult result =
      run(kRun + "--batch requests.jsonl --out records --logits-out logits --format json");
  ASSERT_EQ(result.code, 0) << result.err;
  std::vector<std::string> claims;
  std::istringstream lines(result.out);
  for (std::string line; std::getline(lines, line);) {
    claims.push_back(nlohmann::json::parse(line).at("claim_digest"));
  }
  ASSERT_EQ(claims.size(), 3u);
  EXPECT_TRUE(exists("records/000002.bwrec"));
  EXPECT_TRUE(exists("logits/000000.npy"));
  EXPECT_EQ(run_json(kRun + "--prompt 'KING RICHARD III:' --out a.bwrec").at("claim_digest"),
            claims[0]);
  EXPECT_EQ(run_json("bw-prover run --model " + kModels +
                     "/tiny-qwen3 --max-tokens 3 --token-ids 0,5,9 --out a.bwrec")
                .at("claim_digest"),
            claims[1]);
  EXPECT_EQ(run_json(kRun + "--prompt 'What light' --temperature 0.7 --seed ABCD --out a.bwrec")
                .at("claim_digest"),
            claims[2]);
}

TEST_F(ProverProgram, LogitsAreANumpyArray) {
  ASSERT_EQ(run(kRun + "--token-ids 0,7 --out x.bwrec --logits-out l.npy").code, 0);
  const std::string bytes = test::read_file(shell_.path("l.npy"));
  EXPECT_THAT(bytes.substr(0, 128), HasSubstr("'shape': (6, 2048)"));
  EXPECT_EQ(bytes.size() % 64, 0u);
  EXPECT_GE(bytes.size(), 6u * 2048 * 4 + 64);
}

TEST_F(ProverProgram, AppendsToTheLogAndLeavesAReceipt) {
  ASSERT_EQ(run("bw-attest keygen --name log.example/t --out k.pem && bw-attest init log --key "
                "k.pem")
                .code,
            0);
  const nlohmann::json json =
      run_json(kRun + "--token-ids 0,7 --out x.bwrec --log log --key k.pem");
  EXPECT_EQ(json.at("log_index"), 0);
  const std::string receipt = test::read_file(shell_.path("x.bwrec.tlog-proof"));
  EXPECT_THAT(receipt, ::testing::StartsWith("c2sp.org/tlog-proof@v1\n"));
  EXPECT_THAT(receipt, HasSubstr("log.example/t\n1\n"));
  EXPECT_EQ(run("bw-attest verify --receipt x.bwrec.tlog-proof --record x.bwrec --log-key "
                "k.pem.vkey")
                .code,
            0);
}

TEST_F(ProverProgram, SignsWithAnOperatorKey) {
  ASSERT_EQ(run("bw-attest keygen --name operator.example --out o.pem").code, 0);
  ASSERT_EQ(run(kRun + "--token-ids 0,7 --out x.bwrec --operator-key o.pem").code, 0);
  const Record record = read_record(shell_.path("x.bwrec").string());
  ASSERT_TRUE(record.signature);
  EXPECT_EQ(record.signature->key.name, "operator.example");
}

TEST_F(ProverProgram, BadPrompts) {
  expect_error(kRun + "--prompt-file none --out x.bwrec", 2, "none");
  expect_error(kRun + "--prompt-file . --out x.bwrec", 2, ".");
  test::write_file(shell_.path("bad-utf8"), std::string("ab\xff"
                                                        "cd",
                                                        5));
  expect_error(kRun + "--prompt-file bad-utf8 --out x.bwrec", 2, "UTF-8");
  expect_error(kRun + "--token-ids '' --out x.bwrec", 2, "token");
  expect_error(kRun + "--token-ids 1,2048 --out x.bwrec", 2, "vocabulary");
  expect_error(kRun + "--token-ids 1,x --out x.bwrec", 2, "'x'");
  std::string ids = "1";
  for (int i = 0; i < 1024; ++i) ids += ",1";
  expect_error(kRun + "--token-ids " + ids + " --out x.bwrec", 2, "1024");
  expect_error("bw-prover run --model " + kModels +
                   "/zoo/llama31-ropescale --max-tokens 1 --prompt a --out x.bwrec",
               2, "tokenizer");
  test::write_file(shell_.path("empty.jsonl"), "\n\n");
  expect_error(kRun + "--batch empty.jsonl --out records", 2, "no requests");
}

TEST_F(ProverProgram, AnEmptyPromptIsRefusedWhereItHasNoTokens) {
  // The tiny models' post-processor adds a BOS, so an empty text has one token there.
  EXPECT_EQ(run_json(kRun + "--prompt '' --out a.bwrec").at("prompt_token_ids").size(), 1u);
  // Without post-processor, an empty text has none.
  ASSERT_EQ(run("cp -r " + kModels + "/tiny-qwen3 m && chmod -R u+w m").code, 0);
  nlohmann::json tokenizer =
      nlohmann::json::parse(test::read_file(shell_.path("m/tokenizer.json")));
  tokenizer["post_processor"] = nullptr;
  test::write_file(shell_.path("m/tokenizer.json"), tokenizer.dump());
  expect_error("bw-prover run --model m --max-tokens 2 --prompt '' --out x.bwrec", 2,
               "prompt is empty");
}

TEST_F(ProverProgram, BadFlags) {
  expect_error(kRun + "--prompt a", 2, "--out");
  expect_error(kRun + "--out x.bwrec", 2, "prompt");
  expect_error(kRun + "--prompt a --token-ids 1 --out x.bwrec", 2, "prompt");
  expect_error(kRun + "--prompt a --out x.bwrec --arithmetic fp8", 2, "fma32");
  expect_error(kRun + "--prompt a --out x.bwrec --device tpu", 2, "tpu");
  expect_error(kRun + "--prompt a --out x.bwrec --device cuda:99", 2, "cuda");
  expect_error(kRun + "--prompt a --out x.bwrec --temperature -1", 2, "temperature");
  expect_error(kRun + "--prompt a --out x.bwrec --temperature nan", 2, "temperature");
  expect_error(kRun + "--prompt a --out x.bwrec --temperature 1e-60", 2, "temperature");
  expect_error(kRun + "--prompt a --out x.bwrec --temperature 1 --top-p 0", 2, "top_p");
  expect_error(kRun + "--prompt a --out x.bwrec --top-k 3", 2, "greedy");
  expect_error(kRun + "--prompt a --out x.bwrec --seed xyz", 2, "xyz");
  expect_error(kRun + "--prompt a --out x.bwrec --seed " + std::string(130, 'a'), 2, "seed");
  expect_error(kRun + "--prompt a --out x.bwrec --evidence all", 2, "all");
  expect_error(kRun + "--prompt a --out x.bwrec --log log", 2, "--key");
  expect_error(kRun + "--prompt a --out x.bwrec --key k", 2, "--log");
  expect_error(
      "bw-prover run --model " + kModels + "/tiny-qwen3 --prompt a --max-tokens 0 --out x.bwrec", 2,
      "max-tokens");
  expect_error("bw-prover", 2, "");
  expect_error("bw-prover fly", 2, "unknown command 'fly'; this program has: run");
}

TEST_F(ProverProgram, ValuesThatAreNoNumbersAreNotZero) {
  expect_error(kRun + "--prompt a --out x.bwrec --temperature ''", 2, "temperature");
  expect_error(kRun + "--prompt a --out x.bwrec --temperature 1 --top-p ''", 2, "top-p");
  expect_error(kRun + "--prompt a --out x.bwrec --prefill-chunk -1", 2, "prefill-chunk");
  expect_error(kRun + "--prompt a --out x.bwrec --temperature 0.8 --seed ''", 2, "seed");
}

TEST_F(ProverProgram, ThePromptCanComeFromStandardInput) {
  const std::string want =
      run_json(kRun + "--prompt 'KING RICHARD' --out a.bwrec").at("claim_digest");
  EXPECT_EQ(run_json("printf 'KING RICHARD' | " + kRun + "--prompt-file - --out b.bwrec")
                .at("claim_digest"),
            want);
  EXPECT_EQ(
      run_json("printf '{\"prompt\": \"KING RICHARD\"}' | " + kRun + "--batch - --out records")
          .at("claim_digest"),
      want);
}

TEST_F(ProverProgram, OutputsNeverReplaceInputsKeysOrOneAnother) {
  ASSERT_EQ(run("bw-attest keygen --name log.example/t --out k.pem && bw-attest init log --key "
                "k.pem && printf a > p.txt && cp -r " +
                kModels + "/tiny-qwen3 m && chmod -R u+w m")
                .code,
            0);
  const std::string logged = kRun + "--prompt a --log log --key k.pem --out ";
  for (const std::string& line : std::vector<std::string>{
           logged + "k.pem", logged + "k.pem.vkey", logged + "log/checkpoint", logged + "./log/x",
           kRun + "--prompt-file p.txt --out ./p.txt",
           "bw-prover run --model m --prompt a --max-tokens 1 --out m/model.safetensors",
           kRun + "--prompt a --out same --logits-out same",
           logged + "y.bwrec --logits-out y.bwrec.tlog-proof", "bw-prover manifest m --out k.pem",
           "bw-prover manifest m --out m/config.json",
           std::string("bw-attest prove log --index 0 --out k.pem")}) {
    const std::string before =
        run("sha256sum k.pem k.pem.vkey p.txt log/checkpoint m/* | sort").out;
    EXPECT_EQ(run(line).code, 2) << line;
    EXPECT_EQ(run("sha256sum k.pem k.pem.vkey p.txt log/checkpoint m/* | sort").out, before)
        << line;
  }
}

TEST_F(ProverProgram, AReaderThatLeavesAndASizeLimitLoseNothing) {
  run(kRun + "--prompt a --out x.bwrec | true");
  EXPECT_EQ(run("bw-verifier audit x.bwrec --model " + kModels + "/tiny-qwen3").code, 0);
  const test::ProgramResult limited =
      run("ulimit -f 4; " + kRun +
          "--prompt a --evidence rows --out big.bwrec; code=$?; ls -A; "
          "exit $code");
  EXPECT_EQ(limited.code, 3) << limited.err;
  EXPECT_THAT(limited.err, HasSubstr("big.bwrec"));
  EXPECT_THAT(limited.out, Not(HasSubstr("big.bwrec")));
  EXPECT_THAT(limited.out, Not(HasSubstr(".bw-tmp")));
}

TEST_F(ProverProgram, LongFileNamesFailBeforeTheRunOrWork) {
  const std::string fits(240, 'n'), too_long(250, 'n');
  EXPECT_EQ(run(kRun + "--prompt a --out " + fits).code, 0);
  expect_error(kRun + "--prompt a --out " + too_long, 2, "too long");
}

TEST_F(ProverProgram, ARecordWithoutReceiptTakesAwayTheOldOne) {
  ASSERT_EQ(run("bw-attest keygen --name log.example/t --out k.pem && bw-attest init log --key "
                "k.pem")
                .code,
            0);
  ASSERT_EQ(run(kRun + "--prompt a --out x.bwrec --log log --key k.pem").code, 0);
  EXPECT_TRUE(exists("x.bwrec.tlog-proof"));
  ASSERT_EQ(run(kRun + "--prompt a --out x.bwrec").code, 0);
  EXPECT_FALSE(exists("x.bwrec.tlog-proof"));
}

TEST_F(ProverProgram, RecordsOutliveALogThatFails) {
  if (run("mkdir full && mount -t tmpfs -o size=16k none full").code != 0) {
    GTEST_SKIP() << "mounting a small file system is not permitted here";
  }
  ASSERT_EQ(run("bw-attest keygen --name log.example/t --out k.pem && bw-attest init full/log "
                "--key k.pem; head -c 100000 /dev/zero > full/filler; true")
                .code,
            0);
  const test::ProgramResult result =
      run(kRun + "--prompt a --out x.bwrec --log full/log --key k.pem");
  run("umount full");
  EXPECT_EQ(result.code, 3) << result.err;
  if (exists("x.bwrec")) {  // unless the check before the run noticed
    EXPECT_THAT(result.err, HasSubstr("bw-attest append"));
  }
}

TEST_F(ProverProgram, AModelThatChangesWhileInUseGivesNoRecord) {
  ASSERT_EQ(run("cp -r " + kModels + "/tiny-qwen3 m && chmod -R u+w m").code, 0);
  // The first text on stdout shows that the model is loaded and the run goes on.
  const std::string line =
      "rm -f text; bw-prover run --model m --prompt a --max-tokens 900 --device ref --out x.bwrec "
      "> text & "
      "pid=$!; for i in $(seq 600); do [ -s text ] && break; sleep 0.1; done; ";
  const test::ProgramResult changed = run(
      line + "printf 'X' | dd of=m/model.safetensors bs=1 seek=2000000 conv=notrunc; wait $pid");
  EXPECT_EQ(changed.code, 3) << changed.err;
  EXPECT_THAT(changed.err, HasSubstr("changed while it was in use"));
  EXPECT_FALSE(exists("x.bwrec"));
  const test::ProgramResult truncated =
      run(line + "truncate -s 4096 m/model.safetensors; wait $pid");
  EXPECT_EQ(truncated.code, 3) << truncated.err;
  EXPECT_FALSE(exists("x.bwrec"));
}

TEST_F(ProverProgram, AnEmptyTokenizerIsNoMissingOne) {
  ASSERT_EQ(
      run("cp -r " + kModels + "/tiny-qwen3 m && chmod -R u+w m && : > m/tokenizer.json").code, 0);
  expect_error("bw-prover run --model m --token-ids 1 --max-tokens 1 --out x.bwrec", 2,
               "tokenizer.json");
}

TEST_F(ProverProgram, BadModels) {
  const std::string rest = " --prompt a --max-tokens 1 --out x.bwrec";
  expect_error("bw-prover run --model none" + rest, 2, "none");
  for (const char* refused : {"mistral-sliding", "mixtral", "qwen2-bias"}) {
    expect_error("bw-prover run --model " + kModels + "/zoo/" + refused +
                     " --token-ids 1 --max-tokens 1 --out x.bwrec",
                 2, "config.json");
  }
  ASSERT_EQ(run("cp -r " + kModels +
                "/tiny-qwen3 m && chmod -R u+w m && truncate -s 100000 "
                "m/model.safetensors")
                .code,
            0);
  expect_error("bw-prover run --model m" + rest, 2, "model.safetensors");
  expect_error("bw-prover manifest m", 2, "model.safetensors");
}

TEST_F(ProverProgram, OutputsThatCannotBeWrittenFailBeforeTheRun) {
  expect_error(kRun + "--prompt a --out none/x.bwrec", 2, "none");
  ASSERT_EQ(run("mkdir d").code, 0);
  expect_error(kRun + "--prompt a --out d", 2, "d");
  expect_error(kRun + "--prompt a --out x.bwrec --logits-out none/l.npy", 2, "none");
  expect_error(kRun + "--prompt a --out /proc/x.bwrec", 2, "/proc");
  expect_error(kRun + "--prompt a --out ''", 2, "");
}

// A file system of 64 KiB, if this user may mount one.
TEST_F(ProverProgram, AFullDiskIsAnErrorThatLeavesNothingHalfWritten) {
  if (run("mkdir full && mount -t tmpfs -o size=64k none full").code != 0) {
    GTEST_SKIP() << "mounting a small file system is not permitted here";
  }
  const test::ProgramResult result =
      run(kRun + "--prompt a --evidence rows --out full/x.bwrec; code=$?; ls -A full; exit $code");
  run("umount full");
  EXPECT_EQ(result.code, 3) << result.err;
  EXPECT_THAT(result.err, HasSubstr("full/x.bwrec"));
  EXPECT_THAT(result.out, Not(HasSubstr("x.bwrec")));
}

TEST_F(ProverProgram, BadLogsFailBeforeTheRun) {
  ASSERT_EQ(run("bw-attest keygen --name log.example/t --out k.pem && bw-attest init log --key "
                "k.pem && bw-attest keygen --name log.example/u --out other.pem")
                .code,
            0);
  const std::string line = kRun + "--prompt a --out x.bwrec ";
  expect_error(line + "--log none --key k.pem", 2, "none");
  expect_error(line + "--log log --key none.pem", 2, "none.pem");
  ASSERT_EQ(run("cp k.pem loose.pem && cp k.pem.vkey loose.pem.vkey && chmod 644 loose.pem").code,
            0);
  expect_error(line + "--log log --key loose.pem", 2, "loose.pem");
  EXPECT_NE(run(line + "--log log --key other.pem").code, 0);
  EXPECT_FALSE(exists("x.bwrec"));
}

TEST_F(ProverProgram, ManifestIsTheSameInTextAndJson) {
  const test::ProgramResult text = run("bw-prover manifest " + kModels + "/tiny-qwen3");
  EXPECT_EQ(text.code, 0);
  const test::ProgramResult json =
      run("bw-prover manifest " + kModels + "/tiny-qwen3 --format json --out m.bin");
  const nlohmann::json parsed = nlohmann::json::parse(json.out);
  EXPECT_THAT(text.out, HasSubstr(parsed.at("manifest_digest").get<std::string>()));
  EXPECT_EQ(parsed.at("tensors").size(), 46u);
  const std::string bytes = test::read_file(shell_.path("m.bin"));
  const Manifest manifest =
      Manifest::parse({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}, "m.bin");
  EXPECT_EQ(manifest.digest().hex(), parsed.at("manifest_digest"));
}

TEST_F(ProverProgram, VersionAndSelftest) {
  EXPECT_THAT(run("bw-prover --version").out, HasSubstr("arithmetic fma32 version 1"));
  EXPECT_EQ(run("bw-prover --help").code, 0);
  const test::ProgramResult result = run("bw-prover selftest --format json");
  EXPECT_EQ(result.code, 0) << result.out;
  EXPECT_EQ(nlohmann::json::parse(result.out).at("failed"), 0);
}

#if BITWITNESS_WITH_GRPC
const std::string kServe = "bw-prover serve --model " + kModels + "/tiny-qwen3 --listen ";

TEST_F(ProverProgram, ServeSaysWhatIsMissing) {
  ASSERT_EQ(run("bw-attest keygen --name log.example --out log.pem && "
                "bw-attest init log --key log.pem && echo nobody > list")
                .code,
            0);
  expect_error(kServe + "0.0.0.0:0", 2, "--tls-cert, --tls-key, --tls-client-ca");
  expect_error(kServe + "0.0.0.0:0 --tls-cert a --tls-key b", 2, "give --tls-client-ca");
  expect_error(kServe + "127.0.0.1:0 --tls-cert a", 2, "go together");
  expect_error(kServe + "127.0.0.1:0 --tls-cert absent.pem --tls-key b", 2, "absent.pem");
  expect_error(kServe + "127.0.0.1:0 --allow $(cat log.pem.vkey)", 2, "needs --log and --key");
  expect_error(kServe + "127.0.0.1:0 --log log --key log.pem --allow list", 2, "list:1");
  expect_error(kServe + "127.0.0.1:0 --log log --key log.pem --allow absent", 2, "absent");
  expect_error(kServe + "127.0.0.1:0 --retention 0", 2, "--retention");
  expect_error(kServe + "127.0.0.1:0 --quota-audits -1", 2, "--quota-audits");
}

// Both programs, certificates on both sides, every level.
TEST_F(ProverProgram, ServesLiveAuditsOverMutualTls) {
  if (run("command -v openssl").code != 0) GTEST_SKIP() << "the openssl command is not there";
  const test::ProgramResult result = run(R"(set -e
    for name in log operator verifier; do
      bw-attest keygen --name $name.example --out $name.pem
    done >&2
    bw-attest init log --key log.pem >&2
    new="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    openssl req -x509 $new -keyout ca.key -out ca.pem -subj /CN=authority -days 2 2>/dev/null
    echo subjectAltName=DNS:localhost,IP:127.0.0.1 > extensions
    for name in server client; do
      openssl req $new -keyout $name.key -out $name.csr -subj /CN=$name 2>/dev/null
      openssl x509 -req -in $name.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 \
        -extfile extensions -out $name.pem 2>/dev/null
      chmod 600 $name.key
    done
    bw-prover serve --model )" + kModels +
                                         R"(/tiny-qwen3 --device cpu --threads 1 \
      --listen 127.0.0.1:0 --records records --log log --key log.pem \
      --operator-key operator.pem --allow verifier.pem.vkey --tls-cert server.pem \
      --tls-key server.key --tls-client-ca ca.pem > serving 2> serving.err &
    server=$!
    trap 'kill $server 2>/dev/null || true' EXIT
    for i in $(seq 200); do grep -q serving serving && break; sleep 0.05; done
    address=$(sed 's/.* on //' serving)
    tls="--tls-ca ca.pem --tls-cert client.pem --tls-key client.key"
    bw-verifier request --prover $address $tls --prompt 'To be, or not to be' --max-tokens 5 \
      --out run.bwrec >&2
    id=$(basename records/*.bwrec .bwrec)
    for level in cell layer full; do
      bw-verifier audit --prover $address $tls --record $id --level $level \
        --model )" + kModels + R"(/tiny-qwen3 --key verifier.pem --log-key log.pem.vkey | head -1
    done
    ls records/audits | wc -l
    kill $server
    wait $server
    echo stopped $?)");
  ASSERT_EQ(result.code, 0) << result.out << result.err;
  const std::string id = std::filesystem::directory_iterator(shell_.path("records/audits"))
                             ->path()
                             .filename()
                             .string();
  EXPECT_TRUE(id.ends_with(".challenge")) << id;
  std::istringstream lines(result.out);
  std::string line;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(std::getline(lines, line));
    EXPECT_TRUE(line.starts_with("match ")) << line;
  }
  std::getline(lines, line);
  EXPECT_EQ(line, "2");
  std::getline(lines, line);
  EXPECT_EQ(line, "stopped 0");
}
#endif

}  // namespace
}  // namespace bitwitness
