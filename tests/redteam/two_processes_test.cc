// The red team over a real connection: a lying prover in one process, bw-verifier in another, and
// bw-verifier recheck in a third. Exit codes, places, and transports that fail.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/program.h"
#include "tests/redteam/lies.h"

namespace bitwitness {
namespace {

using redteam::Lie;
using test::ProgramResult;
using test::Shell;
using testing::HasSubstr;

const std::string kModelDir = std::string(BW_TEST_DATA_DIR) + "/models/tiny-qwen3";

// A lying prover that runs until this object ends.
class Prover {
 public:
  explicit Prover(const std::string& name, const std::string& behaviour = "") {
    int in[2];
    int out[2];
    if (pipe(in) != 0 || pipe(out) != 0) throw std::runtime_error("pipe failed");
    child_ = fork();
    if (child_ == 0) {
      dup2(in[0], 0);
      dup2(out[1], 1);
      for (const int fd : {in[0], in[1], out[0], out[1]}) close(fd);
      if (behaviour.empty()) {
        execl(BW_LYING_PROVER, BW_LYING_PROVER, kModelDir.c_str(), name.c_str(), nullptr);
      } else {
        execl(BW_LYING_PROVER, BW_LYING_PROVER, kModelDir.c_str(), name.c_str(), behaviour.c_str(),
              nullptr);
      }
      _exit(127);
    }
    close(in[0]);
    close(out[1]);
    stdin_ = in[1];
    std::string line;
    for (char c = 0; read(out[0], &c, 1) == 1 && c != '\n';) line += c;
    close(out[0]);
    ready = nlohmann::json::parse(line);
  }
  ~Prover() {
    close(stdin_);
    int status = 0;
    waitpid(child_, &status, 0);
  }
  Prover(const Prover&) = delete;
  Prover& operator=(const Prover&) = delete;

  std::string get(const char* key) const { return ready.at(key).get<std::string>(); }
  nlohmann::json ready;

 private:
  pid_t child_ = -1;
  int stdin_ = -1;
};

std::string plan_flags(const AuditPlan& plan) {
  std::string out = std::string(" --level ") + audit_level_name(plan.level) + " --layers " +
                    plan.layers.text() + " --ends " + std::to_string(plan.ends);
  if (plan.level == AuditLevel::kCell) out += " --cells " + std::to_string(plan.cells);
  return out;
}

int expected_code(Verdict verdict) {
  return static_cast<int>(exit_code(verdict));
}

ProgramResult audit(Shell& shell, const Prover& prover, const std::string& flags) {
  return shell.run(
      "[ -e auditor.pem ] || bw-attest keygen --out auditor.pem --name auditor.example >&2\n"
      "bw-verifier audit --prover " +
      prover.get("address") + " --record " + prover.get("record") + " --model '" + kModelDir +
      "' --key auditor.pem --log-key '" + prover.get("log_key") + "' --format json" + flags);
}

class TwoProcesses : public ::testing::TestWithParam<Lie> {};

TEST_P(TwoProcesses, VerdictExitCodeAndPlace) {
  const Lie& lie = GetParam();
  const Prover prover(lie.name);
  Shell shell;
  const ProgramResult result =
      audit(shell, prover, plan_flags(lie.plan) + " --proof-out proof.bwproof");
  ASSERT_EQ(result.code, expected_code(lie.verdict)) << result.out << result.err;
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json.at("verdict"), verdict_name(lie.verdict));
  const bool has_place = lie.verdict == Verdict::kMismatch;
  std::printf("two processes | %-24s | exit %d | %-12s | %s\n", lie.name.c_str(), result.code,
              verdict_name(lie.verdict),
              json.contains("first_difference")
                  ? json.at("first_difference").at("text").get<std::string>().c_str()
                  : "-");
  ASSERT_EQ(json.contains("first_difference"), has_place) << result.out;
  if (!has_place) return;
  const auto& place = json.at("first_difference");
  if (lie.layer) {
    EXPECT_EQ(place.at("layer"), *lie.layer);
  }
  if (lie.position) {
    EXPECT_EQ(place.at("position"), *lie.position);
  }
  if (!lie.op.empty()) {
    EXPECT_EQ(place.at("operator"), lie.op);
  }
  if (!lie.provable()) {
    EXPECT_FALSE(std::filesystem::exists(shell.path("proof.bwproof")));
    return;
  }
  const ProgramResult again =
      shell.run("bw-verifier recheck proof.bwproof --model '" + kModelDir + "' --log-key '" +
                prover.get("log_key") + "' --device ref --format json");
  EXPECT_EQ(again.code, 1) << again.out << again.err;
  const auto rechecked = nlohmann::json::parse(again.out);
  EXPECT_EQ(rechecked.at("first_difference").at("text"), place.at("text"));
  EXPECT_EQ(rechecked.at("logged"), true);
}

INSTANTIATE_TEST_SUITE_P(Lies, TwoProcesses, ::testing::ValuesIn(redteam::lies()),
                         [](const auto& param) {
                           std::string name = param.param.name;
                           for (char& c : name) {
                             if (c == '-') c = '_';
                           }
                           return name;
                         });

TEST(TwoProcessesProofs, AnEarlierProofIsKept) {
  const Prover prover("altered-row");
  Shell shell;
  const auto proof_of_an_audit = [&] {
    const ProgramResult result = audit(shell, prover, " --level cell --cells 1000000");
    EXPECT_EQ(result.code, 1) << result.out << result.err;
    return nlohmann::json::parse(result.out).at("proof").get<std::string>();
  };
  EXPECT_EQ(proof_of_an_audit(), "mismatch.bwproof");
  const std::string first = test::read_file(shell.path("mismatch.bwproof"));
  EXPECT_EQ(proof_of_an_audit(), "mismatch-2.bwproof");
  EXPECT_EQ(proof_of_an_audit(), "mismatch-3.bwproof");
  EXPECT_EQ(test::read_file(shell.path("mismatch.bwproof")), first);
  for (const char* name : {"mismatch.bwproof", "mismatch-3.bwproof"}) {
    EXPECT_EQ(std::filesystem::status(shell.path(name)).permissions(),
              std::filesystem::perms::owner_read | std::filesystem::perms::owner_write)
        << name;
    EXPECT_EQ(
        shell.run(std::string("bw-verifier recheck ") + name + " --model '" + kModelDir + "'").code,
        1);
  }
}

struct Transport {
  const char* behaviour;
  const char* flags;
  int code;
  const char* message;
};
void PrintTo(const Transport& transport, std::ostream* out) {
  *out << transport.behaviour;
}
class BadTransport : public ::testing::TestWithParam<Transport> {};

TEST_P(BadTransport, IsNeverAMatchAndNeverHangs) {
  const Transport& transport = GetParam();
  const Prover prover("honest-cells", transport.behaviour);
  Shell shell;
  const ProgramResult result =
      audit(shell, prover, std::string(" --level cell --cells 8 --retries 0") + transport.flags);
  EXPECT_EQ(result.code, transport.code) << result.out << result.err;
  EXPECT_THAT(result.out + result.err, HasSubstr(transport.message));
}

INSTANTIATE_TEST_SUITE_P(Behaviours, BadTransport,
                         ::testing::Values(Transport{"vanish", "", 3, "gone"},
                                           Transport{"stall", " --deadline 1", 3,
                                                     "not done within"},
                                           Transport{"drip", " --deadline 1", 3, "not done within"},
                                           Transport{"flood", "", 5, "10000000000"},
                                           Transport{"nothing", "", 5, "ended before the header"}),
                         [](const auto& param) { return std::string(param.param.behaviour); });

}  // namespace
}  // namespace bitwitness
