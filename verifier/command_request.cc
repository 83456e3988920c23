// bw-verifier request: an auditor's own request to a prover, with a nonce of its own, and the
// record that comes of it.
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/base/hex.h"
#include "attest/base/print_json.h"
#include "attest/base/program.h"
#include "attest/base/random.h"
#include "attest/log.h"
#include "kernels/tokenizer/token_ids.h"
#include "verifier/client.h"
#include "verifier/commands.h"
#include "verifier/prover_flags.h"

namespace bitwitness {
namespace {

constexpr std::uint64_t kMaxPromptBytes = std::uint64_t{4} << 20;  // what a request can carry
constexpr std::size_t kNonceBytes = 32;

struct RequestFlags {
  ProverFlags prover;
  std::string prompt, prompt_file, token_ids;
  std::uint64_t max_tokens = 0;
  double temperature = 0;
  std::uint32_t top_k = 0;
  double top_p = 1;
  std::string nonce = "random";
  std::string evidence;
  std::string out;
  std::string format = "text";
};

Bytes parse_nonce(const std::string& text) {
  if (text == "random") return random_bytes(kNonceBytes);
  std::optional<Bytes> nonce = from_hex_any_case(text);
  if (!nonce || nonce->empty()) {
    throw usage_error("--nonce '" + text.substr(0, 80) +
                      "': give an even number of hexadecimal digits, or random");
  }
  return *nonce;
}

RemoteRequest request_from(const RequestFlags& flags) {
  RemoteRequest request;
  if (!flags.token_ids.empty()) {
    request.prompt_ids = parse_token_ids(flags.token_ids);
  } else if (!flags.prompt_file.empty()) {
    request.prompt = std::string(as_text(read_file_or_stdin(
        flags.prompt_file, {kMaxPromptBytes, ErrorKind::kUsage, ErrorKind::kUsage})));
  } else {
    request.prompt = flags.prompt;
  }
  request.max_tokens = flags.max_tokens;
  request.temperature = static_cast<float>(flags.temperature);
  if (flags.temperature != 0 && request.temperature == 0) {
    throw usage_error("--temperature is too small for binary32; use 0 for greedy");
  }
  request.top_k = flags.top_k;
  request.top_p = static_cast<float>(flags.top_p);
  request.nonce = parse_nonce(flags.nonce);
  if (!flags.evidence.empty()) {
    request.evidence = parse_evidence_level(flags.evidence);
  }
  return request;
}

int run(const RequestFlags& flags) {
  const RemoteRequest request = request_from(flags);
  if (!flags.prover.address) throw usage_error("--prover HOST:PORT is required");
  const ProverEndpoint prover = flags.prover.endpoint();
  const std::string receipt_path = flags.out + ".tlog-proof";
  check_output_path(flags.out);
  check_output_path(receipt_path);
  check_distinct_paths({{"--out", flags.out}, {"receipt", receipt_path}},
                       {{"--prompt-file", flags.prompt_file}});
  const bool json = flags.format == "json";
  const auto show = [&](std::uint32_t, std::string_view text) {
    if (!json) std::cout << text << std::flush;
  };
  const RemoteGeneration generation =
      generate_remote(prover, request, flags.prover.deadline(), flags.prover.fetch_options(), show);
  if (!json) std::cout << "\n";
  const FetchedRecord& fetched = generation.fetched;
  write_file_atomic(flags.out, fetched.record);
  if (fetched.receipt) {
    write_file_atomic(receipt_path, *fetched.receipt);
  } else {
    remove_stale_receipt(receipt_path);
  }

  const Claim& claim = fetched.parsed.claim;
  if (json) {
    nlohmann::ordered_json out;
    out["prompt_token_ids"] = claim.prompt_ids;
    out["token_ids"] = claim.emitted_ids;
    out["text"] = generation.text;
    out["stop_reason"] = stop_reason_name(claim.stop_reason);
    out["nonce"] = to_hex(request.nonce);
    out["trace_root"] = claim.trace_root.hex();
    out["claim_digest"] = claim.digest().hex();
    out["manifest_digest"] = claim.manifest_digest.hex();
    out["record_digest"] = fetched.parsed.digest().hex();
    out["record"] = flags.out;
    if (fetched.receipt) out["receipt"] = receipt_path;
    print_json(out, -1);
  } else {
    std::cerr << "record       " << flags.out << "\n"
              << "record id    " << fetched.parsed.digest().hex() << "\n"
              << "trace root   " << claim.trace_root.hex() << "\n"
              << "claim digest " << claim.digest().hex() << "\n";
    if (fetched.receipt) std::cerr << "receipt      " << receipt_path << "\n";
    std::cerr << "not judged yet: bw-verifier audit " << flags.out << " --model DIR\n";
  }
  return to_int(ExitCode::kOk);
}

}  // namespace

void add_request_command(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<RequestFlags>();
  CLI::App* command =
      app.add_subcommand("request", "Ask a prover to run something and fetch its record");
  flags->prover.add_to(*command, "HOST:PORT of bw-prover serve");
  auto* prompt = command->add_option_group("prompt", "What to run (exactly one)");
  prompt->add_option("--prompt", flags->prompt, "Prompt text");
  prompt->add_option("--prompt-file", flags->prompt_file, "File with the prompt text (UTF-8)");
  prompt->add_option("--token-ids", flags->token_ids, "Prompt as token ids: 1,2,3");
  prompt->require_option(1);
  command->add_option("--max-tokens", flags->max_tokens, "Tokens to generate at most")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{UINT32_MAX}))
      ->required();
  command->add_option("--temperature", flags->temperature, "0 is greedy")
      ->check(CLI::Number)
      ->capture_default_str();
  command->add_option("--top-k", flags->top_k, "Keep the k most likely tokens (0: all)")
      ->capture_default_str();
  command->add_option("--top-p", flags->top_p, "Keep the most likely tokens up to this probability")
      ->check(CLI::Number)
      ->capture_default_str();
  command
      ->add_option("--nonce", flags->nonce,
                   "Seed of the sampling and salt of the text digest, as hex, or random")
      ->capture_default_str();
  command->add_option("--evidence", flags->evidence,
                      "none, roots, leaves or rows (default: the prover's choice)");
  command
      ->add_option("--out", flags->out,
                   "Record to write (.bwrec); a receipt goes to the same name with .tlog-proof")
      ->required();
  command->add_option("--format", flags->format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command->callback([flags, &exit_code] { exit_code = run(*flags); });
}

}  // namespace bitwitness
