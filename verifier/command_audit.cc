// bw-verifier audit: a record, from a file or a prover, against the auditor's own copy of the
// model.
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/base/hex.h"
#include "attest/base/program.h"
#include "attest/base/progress.h"
#include "attest/keys.h"
#include "attest/log.h"
#include "verifier/audit.h"
#include "verifier/commands.h"
#include "verifier/report.h"
#if BITWITNESS_WITH_GRPC
#include "verifier/client.h"
#endif

namespace bitwitness {
namespace {

struct AuditFlags {
  std::optional<std::string> record_file, prover, record_id;
  std::string model;
  std::string level = "full";
  std::optional<std::string> log_key, receipt, operator_key, nonce;
  std::string device = "cpu";
  int threads = 0;
  std::string format = "text";
  unsigned deadline_s = 60;
};

// The record's bytes, its name for the report, and a receipt if one came along.
struct Evidence {
  Bytes record;
  std::string name;
  std::optional<std::string> receipt;
  std::string receipt_name;
};

Evidence gather(const AuditFlags& flags) {
  Evidence evidence;
#if BITWITNESS_WITH_GRPC
  if (flags.prover) {
    FetchOptions options;
    options.deadline = std::chrono::seconds(flags.deadline_s);
    FetchedRecord fetched = fetch_record(*flags.prover, *flags.record_id, options);
    evidence.record = std::move(fetched.record);
    evidence.name = *flags.prover + "/" + *flags.record_id;
    evidence.receipt = std::move(fetched.receipt);
    evidence.receipt_name = "receipt from " + *flags.prover;
  }
#endif
  std::optional<std::string> receipt = flags.receipt;
  if (flags.record_file) {
    evidence.record =
        read_file(*flags.record_file, {kMaxRecordBytes, ErrorKind::kUsage, ErrorKind::kMalformed});
    evidence.name = *flags.record_file;
    const std::string beside = *flags.record_file + ".tlog-proof";
    if (!receipt && path_exists(beside)) receipt = beside;
  }
  if (receipt) {
    const Bytes bytes =
        read_file(*receipt, {kMaxReceiptBytes, ErrorKind::kUsage, ErrorKind::kMalformed});
    evidence.receipt = std::string(as_text(bytes));
    evidence.receipt_name = *receipt;
  }
  return evidence;
}

// Evidence that is ill-formed or refused is a verdict; any other error is thrown on.
AuditReport verdict_of(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::kMalformed:
      return unjudged_report(Verdict::kMalformed, error.what());
    case ErrorKind::kCannotJudge:
      return unjudged_report(Verdict::kCannotJudge, error.what());
    default:
      throw Error(error);
  }
}

AuditReport judge(const AuditFlags& flags, std::string& name) {
  AuditOptions options;
  if (flags.log_key) options.log_key = PublicKey::load_vkey(*flags.log_key);
  if (flags.operator_key) options.operator_key = PublicKey::load_vkey(*flags.operator_key);
  if (flags.nonce) {
    options.nonce = from_hex_any_case(*flags.nonce);
    if (!options.nonce) throw usage_error("--nonce must be an even number of hexadecimal digits");
  }
  const std::unique_ptr<Backend> backend = make_backend(flags.device, flags.threads);
  std::optional<Record> record;
  try {
    Evidence evidence = gather(flags);
    name = evidence.name;
    options.receipt = std::move(evidence.receipt);
    options.receipt_name = evidence.receipt_name;
    record = Record::parse(evidence.record, evidence.name);
  } catch (const Error& error) {
    return verdict_of(error);
  }
  std::optional<AuditModel> model;
  {
    ProgressLine progress("hashing weights");
    model.emplace(AuditModel::load(flags.model, progress.callback()));
  }
  ProgressLine progress("re-executing");
  options.on_replay = progress.callback();
  try {
    return audit_record(*record, *model, *backend, options);
  } catch (const Error& error) {
    return verdict_of(error);
  }
}

int run(const AuditFlags& flags) {
  if (flags.prover.has_value() == flags.record_file.has_value()) {
    throw usage_error("name either a record file or --prover HOST:PORT with --record ID");
  }
  if (flags.prover.has_value() != flags.record_id.has_value()) {
    throw usage_error("--prover and --record go together");
  }
  std::string name = flags.prover ? *flags.prover : *flags.record_file;
  const AuditReport report = judge(flags, name);
  std::cout << (flags.format == "json" ? report_json(report, name) : report_text(report, name));
  return to_int(exit_code(report.verdict));
}

}  // namespace

void add_audit_command(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<AuditFlags>();
  CLI::App* command =
      app.add_subcommand("audit", "Re-execute a record from its token ids and judge it");
  command->add_option("RECORD", flags->record_file, "Record file (.bwrec)");
  command->add_option("--model", flags->model, "The auditor's own copy of the model")->required();
  command->add_option("--level", flags->level, "full: re-execute everything")
      ->check(CLI::IsMember({"full"}))
      ->capture_default_str();
  command->add_option("--log-key", flags->log_key,
                      "Verifier key of the log (text or file): the record must be in that log");
  command->add_option("--receipt", flags->receipt,
                      "Receipt (default: RECORD.tlog-proof, if it is there)");
  command->add_option(
      "--operator-key", flags->operator_key,
      "Verifier key (text or file) of the operator who must have signed the record");
  command->add_option("--nonce", flags->nonce,
                      "The seed that the record must have been sampled with (hex)");
  command->add_option("--device", flags->device, "cpu, ref, avx2, avx512, cuda or cuda:N")
      ->capture_default_str();
  command->add_option("--threads", flags->threads, "CPU threads (0: all)")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
#if BITWITNESS_WITH_GRPC
  command->add_option("--prover", flags->prover, "Fetch the record from a prover: HOST:PORT");
  command->add_option("--record", flags->record_id, "Record id at the prover (64 hex digits)");
  command->add_option("--deadline", flags->deadline_s, "Seconds to wait for the prover")
      ->check(CLI::Range(1u, 86400u))
      ->capture_default_str();
#endif
  command->add_option("--format", flags->format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command->callback([flags, &exit_code] { exit_code = run(*flags); });
}

}  // namespace bitwitness
