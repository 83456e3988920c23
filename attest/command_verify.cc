// bw-attest verify: a whole log, or one receipt. The exit code is the verdict's, whatever the
// format.
#include <iostream>
#include <nlohmann/json.hpp>

#include "attest/base/file.h"
#include "attest/base/print_json.h"
#include "attest/base/program.h"
#include "attest/base/progress.h"
#include "attest/commands.h"
#include "attest/log.h"
#include "attest/record.h"

namespace bitwitness {
namespace {

struct Outcome {
  ExitCode code = ExitCode::kCannotJudge;
  std::string detail;
  nlohmann::ordered_json fields = nlohmann::ordered_json::object();
};

const char* verdict_word(ExitCode code) {
  switch (code) {
    case ExitCode::kOk:
      return "match";
    case ExitCode::kMismatch:
      return "mismatch";
    case ExitCode::kMalformed:
      return "malformed";
    default:
      return "cannot_judge";
  }
}

Outcome verify_log(const std::string& dir, const PublicKey& key) {
  const LogReader log(dir, key);
  Outcome out;
  out.fields = {{"origin", log.checkpoint().origin},
                {"size", log.size()},
                {"root", log.checkpoint().root.hex()}};
  ProgressLine line("verifying the log");
  log.verify_all(line.callback());
  if (log.size() == 0) {
    out.detail = "the log is empty: its checkpoint is signed, but there is nothing to check";
    return out;
  }
  out.code = ExitCode::kOk;
  out.detail = std::to_string(log.size()) + " entries, all tiles and the signed root of " +
               log.checkpoint().origin + " agree";
  return out;
}

Outcome verify_one_receipt(const std::string& receipt_path, const std::string& record_path,
                           const PublicKey& key) {
  const Bytes receipt = read_file(receipt_path, {.max_bytes = kMaxReceiptBytes});
  const Digest record = read_record(record_path).digest();
  const ReceiptResult result =
      verify_receipt(std::string(as_text(receipt)), key, record, receipt_path);
  Outcome out;
  out.fields = {{"record", record.hex()},
                {"index", result.index},
                {"origin", result.checkpoint.origin},
                {"size", result.checkpoint.size},
                {"root", result.checkpoint.root.hex()}};
  const std::string place = "entry " + std::to_string(result.index) + " of the " +
                            std::to_string(result.checkpoint.size) + " in log " +
                            result.checkpoint.origin;
  switch (result.verdict) {
    case ReceiptVerdict::kIncluded:
      out.code = ExitCode::kOk;
      out.detail = "record " + record.hex() + " is " + place;
      break;
    case ReceiptVerdict::kOtherRecord:
      out.code = ExitCode::kMismatch;
      out.detail =
          place + " is " +
          (result.record ? "record " + result.record->hex() : std::string("something else")) +
          ", not record " + record.hex();
      break;
    case ReceiptVerdict::kUnknownLog:
      out.detail = "the receipt's checkpoint is not signed by " + key.vkey();
      break;
  }
  return out;
}

}  // namespace

void add_verify_command(CLI::App& app, int& exit_code) {
  struct Flags {
    std::string dir, receipt, record, log_key;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "verify", "Check a whole log (DIR), or that a record is in it (--receipt and --record)");
  command->add_option("DIR", flags->dir, "Directory of the log");
  command->add_option("--receipt", flags->receipt, "Receipt of the record (.tlog-proof)");
  command->add_option("--record", flags->record, "Record that the receipt should be for");
  command->add_option("--log-key", flags->log_key, "Verifier key of the log: the string or a file")
      ->required();
  auto format = add_format_option(command);
  command->callback([flags, format, &exit_code] {
    const bool whole = !flags->dir.empty();
    if (whole == (!flags->receipt.empty() && !flags->record.empty()) ||
        (whole && !(flags->receipt.empty() && flags->record.empty()))) {
      throw usage_error("verify: give either DIR, or --receipt and --record");
    }
    const PublicKey key = PublicKey::load_vkey(flags->log_key);
    Outcome out;
    try {
      out = whole ? verify_log(flags->dir, key)
                  : verify_one_receipt(flags->receipt, flags->record, key);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kMalformed && error.kind() != ErrorKind::kCannotJudge) throw;
      out.code = bitwitness::exit_code(error.kind());
      out.detail = error.what();
    }
    if (*format == "json") {
      nlohmann::ordered_json json{{"verdict", verdict_word(out.code)}, {"detail", out.detail}};
      json.update(out.fields);
      print_json(json);
    } else {
      std::cout << verdict_word(out.code) << ": " << printable(out.detail) << "\n";
    }
    exit_code = to_int(out.code);
  });
}

}  // namespace bitwitness
