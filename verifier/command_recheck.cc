// bw-verifier recheck: a mismatch proof, judged again offline by anybody who has the model.
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/base/program.h"
#include "attest/base/progress.h"
#include "verifier/commands.h"
#include "verifier/recheck.h"
#include "verifier/report.h"

namespace bitwitness {
namespace {

struct RecheckFlags {
  std::string file;
  std::string model;
  std::optional<std::string> log_key, operator_key;
  std::string device = "cpu";
  int threads = 0;
  std::string format = "text";
};

RecheckReport judge(const RecheckFlags& flags) {
  RecheckOptions options;
  if (flags.log_key) options.log_key = PublicKey::load_vkey(*flags.log_key);
  if (flags.operator_key) options.operator_key = PublicKey::load_vkey(*flags.operator_key);
  const std::unique_ptr<Backend> backend = make_backend(flags.device, flags.threads);
  try {
    const MismatchProof proof = MismatchProof::parse(
        read_file(flags.file, {kMaxMismatchProofBytes, ErrorKind::kUsage, ErrorKind::kMalformed}),
        flags.file);
    ProgressLine hashing("hashing weights");
    options.on_hash = hashing.callback();
    return recheck(proof, flags.model, *backend, options, flags.file);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMalformed && error.kind() != ErrorKind::kCannotJudge) throw;
    RecheckReport report;
    report.verdict =
        error.kind() == ErrorKind::kMalformed ? Verdict::kMalformed : Verdict::kCannotJudge;
    report.findings.push_back(error.what());
    return report;
  }
}

int run(const RecheckFlags& flags) {
  const RecheckReport report = judge(flags);
  std::cout << (flags.format == "json" ? recheck_json(report, flags.file)
                                       : recheck_text(report, flags.file));
  return to_int(exit_code(report.verdict));
}

}  // namespace

void add_recheck_command(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<RecheckFlags>();
  CLI::App* command = app.add_subcommand(
      "recheck",
      "Judge the proof of a mismatch again: 1 confirmed, 0 the accusation does not hold");
  command->add_option("PROOF", flags->file, "Proof of a mismatch (.bwproof)")->required();
  command->add_option("--model", flags->model, "One's own copy of the model")->required();
  command->add_option(
      "--log-key", flags->log_key,
      "Verifier key of the log (text or file): record, and seed where there is one, "
      "must be in it; needed for records that no operator signed");
  command->add_option(
      "--operator-key", flags->operator_key,
      "Verifier key (text or file) of the operator who must have signed the record: without it "
      "nobody vouches for the name shown");
  command->add_option("--device", flags->device, "cpu, ref, avx2, avx512, neon, cuda or cuda:N")
      ->capture_default_str();
  command->add_option("--threads", flags->threads, "CPU threads (0: all)")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->add_option("--format", flags->format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command->callback([flags, &exit_code] { exit_code = run(*flags); });
}

}  // namespace bitwitness
