// bw-verifier audit: a record, from a file or a prover, against the auditor's own copy of the
// model.
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/base/hex.h"
#include "attest/base/program.h"
#include "attest/base/progress.h"
#include "attest/keys.h"
#include "attest/log.h"
#include "verifier/audit.h"
#include "verifier/audit_flags.h"
#include "verifier/cell_judge.h"
#include "verifier/commands.h"
#include "verifier/report.h"

namespace bitwitness {

void set_expectations(const AuditFlags& flags, RecordExpectations& expected) {
  if (flags.log_key) expected.log_key = PublicKey::load_vkey(*flags.log_key);
  if (flags.operator_key) expected.operator_key = PublicKey::load_vkey(*flags.operator_key);
  if (flags.nonce) {
    expected.nonce = from_hex_any_case(*flags.nonce);
    if (!expected.nonce || expected.nonce->empty()) {
      throw usage_error(
          "--nonce must be hexadecimal digits, two for every byte, at least one byte");
    }
  }
}

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

void check_proof_out(const AuditFlags& flags, const std::string& path) {
  check_output_path(path);
  std::vector<NamedPath> inputs{{"--model", flags.model}};
  const auto add = [&](const char* name, const std::optional<std::string>& value) {
    if (value) inputs.push_back({name, *value});
  };
  add("RECORD", flags.record_file);
  add("--receipt", flags.receipt);
  add("--key", flags.key);
  add("--manifest", flags.manifest);
  // These two may also be the key's text.
  for (const auto& [name, value] :
       {std::pair{"--log-key", flags.log_key}, std::pair{"--operator-key", flags.operator_key}}) {
    if (value && path_exists(*value)) add(name, value);
  }
#if BITWITNESS_WITH_GRPC
  add("--tls-ca", flags.prover.tls_ca);
  add("--tls-cert", flags.prover.tls_cert);
  add("--tls-key", flags.prover.tls_key);
#endif
  check_distinct_paths({{"--proof-out", path}}, inputs);
  if (flags.proof_out && path_exists(path)) {
    throw usage_error("--proof-out " + path +
                      ": exists already, and no proof is written over anything; name another file");
  }
}

void write_proof(const MismatchProof& proof, const std::string& path, AuditReport& report) {
  const Bytes bytes = proof.serialize();
  const std::filesystem::path first(path);
  for (std::uint64_t n = 1;; ++n) {
    const std::string name =
        n == 1 ? path
               : (first.parent_path() /
                  (first.stem().string() + "-" + std::to_string(n) + first.extension().string()))
                     .string();
    if (path_exists(name)) continue;
    try {
      write_file_atomic(name, bytes, 0600, IfExists::kFail);
      report.proof_file = name;
    } catch (const Error& error) {
      if (path_exists(name)) continue;  // somebody was faster
      // A full disk must not cost the verdict.
      report.notes.push_back(std::string("the proof of the mismatch could not be written: ") +
                             error.what());
    }
    return;
  }
}

namespace {

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
  if (flags.prover.address) {
    const ProverEndpoint prover = flags.prover.endpoint();
    FetchedRecord fetched = fetch_record(prover, *flags.record_id, flags.prover.fetch_options());
    evidence.record = std::move(fetched.record);
    evidence.name = prover.host_port + "/" + *flags.record_id;
    evidence.receipt = std::move(fetched.receipt);
    evidence.receipt_name = "receipt from " + prover.host_port;
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

// The proof of a mismatch that the record itself shows.
void prove_record(const SigningKey& key, const Evidence& evidence, const std::string& proof_out,
                  AuditReport& report) {
  MismatchProof proof;
  proof.record = evidence.record;
  proof.receipt = evidence.receipt.value_or("");
  if (report.place) proof.finding = finding_of(*report.place);
  proof.finding.op = "record";
  proof.backend = report.backend;
  proof.sign(key);
  write_proof(proof, proof_out, report);
  if (!report.operator_key && !evidence.receipt) {
    report.notes.push_back(
        "no operator signed the record and no receipt shows it in a log: nobody can be held to it, "
        "and a recheck of the proof will say so");
  }
}

AuditReport audit_full(const AuditFlags& flags, std::string& name) {
  AuditOptions options;
  set_expectations(flags, options);
  std::optional<SigningKey> key;
  const std::string proof_out = flags.proof_out.value_or(kDefaultProof);
  if (flags.key) {
    check_proof_out(flags, proof_out);
    key = SigningKey::load(*flags.key);
  }
  const std::unique_ptr<Backend> backend = make_backend(flags.device, flags.threads);
  Evidence evidence;
  std::optional<Record> record;
  try {
    evidence = gather(flags);
    name = evidence.name;
    options.receipt = evidence.receipt;
    options.receipt_name = evidence.receipt_name;
    record = Record::parse(evidence.record, evidence.name);
  } catch (const Error& error) {
    return verdict_of(error);
  }
  if (!key) evidence.record = Bytes();  // may be large
  std::optional<AuditModel> model;
  {
    ProgressLine progress("hashing weights");
    model.emplace(AuditModel::load(flags.model, progress.callback()));
  }
  AuditReport report;
  {
    ProgressLine progress("re-executing");
    options.on_replay = progress.callback();
    try {
      report = audit_record(*record, *model, *backend, options);
    } catch (const Error& error) {
      return verdict_of(error);
    }
  }
  if (key && report.record_shows_mismatch) prove_record(*key, evidence, proof_out, report);
  return report;
}

void check_flags(const AuditFlags& flags) {
#if BITWITNESS_WITH_GRPC
  const bool from_prover = flags.prover.address.has_value();
#else
  const bool from_prover = false;
#endif
  if (from_prover == flags.record_file.has_value()) {
    throw usage_error("name either a record file or --prover HOST:PORT with --record ID");
  }
  if (from_prover != flags.record_id.has_value()) {
    throw usage_error("--prover and --record go together");
  }
#if BITWITNESS_WITH_GRPC
  if (!from_prover && flags.prover.any_given()) {
    throw usage_error(
        "--tls-ca, --tls-cert, --tls-key, --deadline and --max-record-mib are about a prover; name "
        "it with --prover HOST:PORT");
  }
#endif
  if (flags.level == "full") {
    if (flags.proof_out && !flags.key) {
      throw usage_error("--proof-out needs --key: a proof is signed by its verifier");
    }
    if (flags.cells || flags.ends || flags.layers || flags.manifest || flags.retries) {
      throw usage_error(
          "--cells, --ends, --layers, --manifest and --retries are for --level cell and layer; "
          "level full checks everything");
    }
    return;
  }
  if (!from_prover) {
    throw usage_error("--level " + flags.level +
                      " needs --prover: what was computed is opened by the one who computed it");
  }
  if (!flags.key) {
    throw usage_error("--level " + flags.level +
                      " needs --key, the verifier's own: bw-attest keygen makes one, and the "
                      "prover must have it on its list");
  }
  if (flags.receipt) {
    throw usage_error("--receipt is for --level full: a live audit asks the log by its prover");
  }
  if (flags.level == "layer" && flags.cells) {
    throw usage_error("--cells is for --level cell: level layer opens every cell of its layers");
  }
}

int run(const AuditFlags& flags) {
  check_flags(flags);
  std::string name;
#if BITWITNESS_WITH_GRPC
  name = flags.record_file ? *flags.record_file : *flags.prover.address;
  const AuditReport report =
      flags.level == "full" ? audit_full(flags, name) : audit_live(flags, name);
#else
  name = *flags.record_file;
  const AuditReport report = audit_full(flags, name);
#endif
  std::cout << (flags.format == "json" ? report_json(report, name) : report_text(report, name));
  return to_int(exit_code(report.verdict));
}

}  // namespace

void add_audit_command(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<AuditFlags>();
  CLI::App* command = app.add_subcommand(
      "audit", "Judge a record: re-execute it, or have its prover open what is drawn at random");
  command->add_option("RECORD", flags->record_file, "Record file (.bwrec)");
  command->add_option("--model", flags->model, "The auditor's own copy of the model")->required();
  command->add_option("--log-key", flags->log_key,
                      "Verifier key of the log (text or file): the record must be in that log");
  command->add_option("--receipt", flags->receipt,
                      "Receipt (default: RECORD.tlog-proof, if it is there)");
  command->add_option(
      "--operator-key", flags->operator_key,
      "Verifier key (text or file) of the operator who must have signed the record");
  command->add_option("--nonce", flags->nonce,
                      "The seed that the record must have been sampled with (hex)");
  command->add_option("--key", flags->key,
                      "The verifier's own key (PEM by bw-attest keygen): signs challenges and "
                      "proofs");
  command->add_option(
      "--proof-out", flags->proof_out,
      "Where the proof of a mismatch goes, for bw-verifier recheck: a file that is "
      "not there yet (default with --key: mismatch.bwproof, mismatch-2.bwproof, ...)");
  command->add_option("--device", flags->device, "cpu, ref, avx2, avx512, neon, cuda or cuda:N")
      ->capture_default_str();
  command->add_option("--threads", flags->threads, "CPU threads (0: all)")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  CLI::Option* const level = command->add_option("--level", flags->level);
#if BITWITNESS_WITH_GRPC
  level
      ->description(
          "cell: cells drawn at random; layer: every cell of some layers; both opened by the "
          "prover. full: re-execute everything")
      ->check(CLI::IsMember({"cell", "layer", "full"}))
      ->capture_default_str();
  command->add_option("--cells", flags->cells, "Level cell: how many cells are drawn (32)")
      ->check(CLI::Range(std::uint64_t{1}, kMaxPlanCells));
  command
      ->add_option("--ends", flags->ends,
                   "How many embeddings and heads are drawn (16; 0: no token is checked)")
      ->check(CLI::Range(std::uint64_t{0}, kMaxPlanCells));
  command->add_option("--layers", flags->layers,
                      "all, a list such as 0,5, or random:K (level cell: all, layer: random:1)");
  command->add_option(
      "--manifest", flags->manifest,
      "The auditor's own manifest of the model (bw-prover manifest DIR --out FILE): "
      "compared in full, where otherwise only what is checked is hashed");
  command
      ->add_option("--retries", flags->retries,
                   "How often a call that failed on the way is made again (2)")
      ->check(CLI::Range(0U, 100U));
  flags->prover.add_to(*command, "Fetch the record from a prover, or audit it live: HOST:PORT");
  command->add_option("--record", flags->record_id, "Record id at the prover (64 hex digits)");
#else
  level
      ->description(
          "full: re-execute everything (cell and layer need a build with the live exchange)")
      ->check(CLI::IsMember({"full"}))
      ->capture_default_str();
#endif
  command->add_option("--format", flags->format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command->callback([flags, &exit_code] { exit_code = run(*flags); });
}

}  // namespace bitwitness
