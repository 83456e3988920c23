// bw-prover run: requests in, text, records and log entries out.
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/base/print_json.h"
#include "attest/base/program.h"
#include "attest/base/progress.h"
#include "attest/keys.h"
#include "attest/log.h"
#include "kernels/tokenizer/token_ids.h"
#include "prover/commands.h"
#include "prover/generate.h"
#include "prover/npy.h"
#include "prover/requests.h"

namespace bitwitness {
namespace {

constexpr std::uint64_t kMaxPromptBytes = std::uint64_t{64} << 20;

struct RunFlags {
  std::string model;
  std::optional<std::string> prompt, prompt_file, token_ids, batch;
  std::uint64_t max_tokens = 0;
  std::string arithmetic = contract::kArithmeticName;
  std::string device = "auto";
  int threads = 0;
  double temperature = 0;
  std::uint32_t top_k = 0;
  double top_p = 1;
  std::optional<std::string> seed;
  std::string out;
  std::string evidence = "leaves";
  std::optional<std::string> log, key, operator_key;
  std::optional<std::string> logits_out;
  std::int64_t prefill_chunk = 0;
  std::string format = "text";
};

// Where the results of request `index` go. One request: the paths as given; a batch: numbered files
// in the directories given.
std::string numbered(const std::string& base, bool batch, std::size_t index, const char* suffix) {
  if (!batch) return base;
  char name[32];
  std::snprintf(name, sizeof name, "%06zu%s", index, suffix);
  return (std::filesystem::path(base) / name).string();
}

std::vector<RequestText> requests_from(const RunFlags& flags) {
  RequestText request;
  request.max_tokens = flags.max_tokens;
  request.temperature = flags.temperature;
  request.top_k = flags.top_k;
  request.top_p = flags.top_p;
  request.seed_hex = flags.seed;
  if (flags.batch) return read_requests(*flags.batch, request);
  if (flags.token_ids) {
    request.token_ids = parse_token_ids(*flags.token_ids);
  } else if (flags.prompt_file) {
    const Bytes bytes = read_file_or_stdin(*flags.prompt_file,
                                           {kMaxPromptBytes, ErrorKind::kUsage, ErrorKind::kUsage});
    request.prompt = std::string(as_text(bytes));
  } else {
    request.prompt = flags.prompt;
  }
  return {request};
}

nlohmann::ordered_json result_json(const GenerationRequest& request, const Generation& generation,
                                   const Record& record, const std::string& path) {
  nlohmann::ordered_json json;
  json["prompt_token_ids"] = request.prompt_ids;
  json["token_ids"] = generation.claim.emitted_ids;
  json["text"] = generation.text;
  json["stop_reason"] = stop_reason_name(generation.claim.stop_reason);
  json["seed_provenance"] = seed_provenance_name(generation.claim.seed_provenance);
  json["trace_root"] = generation.claim.trace_root.hex();
  json["claim_digest"] = generation.claim.digest().hex();
  json["manifest_digest"] = generation.claim.manifest_digest.hex();
  json["record_digest"] = record.digest().hex();
  json["record"] = path;
  return json;
}

// Every output is writable, and none is another output, an input, a key, or inside model or log.
void check_paths(const RunFlags& flags, std::size_t requests) {
  const bool batch = flags.batch.has_value();
  if (batch) {
    make_directories(flags.out);
    if (flags.logits_out) make_directories(*flags.logits_out);
  }
  for (std::size_t i = 0; i < requests; ++i) {
    const std::string out = numbered(flags.out, batch, i, ".bwrec");
    check_output_path(out);
    check_output_path(out + ".tlog-proof");
    if (flags.logits_out) check_output_path(numbered(*flags.logits_out, batch, i, ".npy"));
  }
  std::vector<NamedPath> outputs{{"--out", flags.out}, {"the receipt", flags.out + ".tlog-proof"}};
  if (flags.logits_out) outputs.push_back({"--logits-out", *flags.logits_out});
  check_distinct_paths(outputs, {{"--model", flags.model},
                                 {"--prompt-file", flags.prompt_file.value_or("")},
                                 {"--batch", flags.batch.value_or("")},
                                 {"--log", flags.log.value_or("")},
                                 {"--key", flags.key.value_or("")},
                                 {"the log's verifier key", flags.key ? *flags.key + ".vkey" : ""},
                                 {"--operator-key", flags.operator_key.value_or("")}});
}

// One append for all records. They are on disk already: an error says so, and how to go on.
std::vector<AppendResult> append_to_log(const RunFlags& flags, const std::vector<Record>& records) {
  try {
    LogWriter writer(*flags.log, SigningKey::load(*flags.key));
    std::vector<Bytes> entries;
    for (const Record& record : records) entries.push_back(log_entry_for_record(record.digest()));
    return writer.append(entries);
  } catch (const Error& error) {
    // A log of one's own that is damaged is no evidence under judgement.
    const ErrorKind kind =
        error.kind() == ErrorKind::kMalformed ? ErrorKind::kInfrastructure : error.kind();
    throw Error(kind, std::string(error.what()) + ". What was generated is kept in " + flags.out +
                          ", but not logged; when the log is well again: bw-attest append " +
                          *flags.log + " --key " + *flags.key + " RECORD");
  }
}

int run(const RunFlags& flags) {
  if (flags.arithmetic != contract::kArithmeticName) {
    throw usage_error("--arithmetic: unknown arithmetic '" + flags.arithmetic +
                      "'; this build has " + contract::kArithmeticName);
  }
  if (flags.log.has_value() != flags.key.has_value()) {
    throw usage_error("--log and --key go together: the directory of the log and its signing key");
  }
  const bool json = flags.format == "json";
  const bool batch = flags.batch.has_value();
  const EvidenceLevel evidence = parse_evidence_level(flags.evidence);
  const std::vector<RequestText> texts = requests_from(flags);

  // Whatever can fail for reasons known now fails before the model is loaded.
  check_paths(flags, texts.size());
  std::optional<SigningKey> operator_key;
  if (flags.operator_key) operator_key = SigningKey::load(*flags.operator_key);
  if (flags.log) check_log(*flags.log, *flags.key);

  const std::unique_ptr<Backend> backend = make_backend(flags.device, flags.threads);
  std::optional<ServedModel> model;
  {
    ProgressLine progress("hashing weights");
    model.emplace(ServedModel::load(flags.model, progress.callback()));
  }
  std::vector<GenerationRequest> requests;
  for (const RequestText& text : texts) {
    try {
      requests.push_back(resolve_request(*model, text));
    } catch (const Error& error) {
      throw Error(error.kind(),
                  text.where.empty() ? error.what() : text.where + ": " + error.what());
    }
  }

  Provenance provenance = run_provenance(*backend);
  provenance[provenance_key::kStarted] = provenance_time_now();
  GenerationOptions options;
  options.prefill_chunk = flags.prefill_chunk;
  options.keep_logits = flags.logits_out.has_value();
  options.keep_rows = evidence == EvidenceLevel::kRows;
  std::vector<Generation> generations;
  {
    auto progress = std::make_unique<ProgressLine>("prompt");
    GenerationObserver observer;
    observer.on_prefill = [&](std::uint64_t done, std::uint64_t total) {
      if (progress) progress->update(done, total);
    };
    observer.on_token = [&](std::size_t, std::uint32_t, std::string_view piece) {
      if (json || batch) return;
      progress.reset();
      std::cout << piece << std::flush;
    };
    generations = generate(*model, *backend, requests, options, observer);
  }
  if (!json && !batch) std::cout << "\n";
  provenance[provenance_key::kFinished] = provenance_time_now();

  model->model.check_unchanged();

  std::vector<Record> records;
  for (std::size_t i = 0; i < generations.size(); ++i) {
    if (i > 0) provenance[provenance_key::kNonce] = new_provenance()[provenance_key::kNonce];
    records.push_back(make_record(*model, generations[i], evidence, provenance));
    if (operator_key) records.back().sign(*operator_key);
  }
  // All records before the log: whatever happens to the log, no finished work is lost.
  for (std::size_t i = 0; i < records.size(); ++i) {
    const Generation& generation = generations[i];
    if (flags.logits_out) {
      write_file_atomic(numbered(*flags.logits_out, batch, i, ".npy"),
                        npy_float32(generation.logits, generation.claim.emitted_ids.size(),
                                    generation.claim.trace_shape.vocab));
    }
    const std::string out = numbered(flags.out, batch, i, ".bwrec");
    write_record(out, records[i]);
    remove_stale_receipt(out + ".tlog-proof");
  }
  std::vector<AppendResult> logged;
  if (flags.log) logged = append_to_log(flags, records);

  for (std::size_t i = 0; i < records.size(); ++i) {
    const Generation& generation = generations[i];
    const std::string out = numbered(flags.out, batch, i, ".bwrec");
    if (!logged.empty()) write_file_atomic(out + ".tlog-proof", logged[i].receipt);
    if (json) {
      nlohmann::ordered_json result = result_json(requests[i], generation, records[i], out);
      if (!logged.empty()) {
        result["log_index"] = logged[i].index;
        result["receipt"] = out + ".tlog-proof";
      }
      print_json(result, -1);
    } else {
      if (batch) std::cout << "[" << i << "] " << generation.text << "\n";
      std::cerr << "record       " << out << "\n"
                << "trace root   " << generation.claim.trace_root.hex() << "\n"
                << "claim digest " << generation.claim.digest().hex() << "\n";
      if (!logged.empty()) {
        std::cerr << "log entry    " << logged[i].index << " of " << *flags.log << ", receipt "
                  << out << ".tlog-proof\n";
      }
    }
  }
  return to_int(ExitCode::kOk);
}

}  // namespace

void add_run_command(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<RunFlags>();
  CLI::App* command = app.add_subcommand("run", "Generate text and write its record");
  command->add_option("--model", flags->model, "Model directory (Hugging Face layout)")->required();
  auto* prompt = command->add_option_group("prompt", "What to run (exactly one)");
  prompt->add_option("--prompt", flags->prompt, "Prompt text");
  prompt->add_option("--prompt-file", flags->prompt_file,
                     "File with the prompt text (UTF-8); - for standard input");
  prompt->add_option("--token-ids", flags->token_ids, "Prompt as token ids: 1,2,3");
  prompt->add_option("--batch", flags->batch,
                     "JSONL file of requests, run together; --out (and --logits-out) are then "
                     "directories");
  prompt->require_option(1);
  command->add_option("--max-tokens", flags->max_tokens, "Tokens to generate at most")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{UINT32_MAX}))
      ->required();
  command->add_option("--arithmetic", flags->arithmetic, "Arithmetic contract")
      ->capture_default_str();
  command
      ->add_option("--device", flags->device, "auto, cpu, ref, avx2, avx512, neon, cuda or cuda:N")
      ->capture_default_str();
  command->add_option("--threads", flags->threads, "CPU threads (0: all)")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->add_option("--temperature", flags->temperature, "0 is greedy")
      ->check(CLI::Number)
      ->capture_default_str();
  command->add_option("--top-k", flags->top_k, "Keep the k most likely tokens (0: all)")
      ->capture_default_str();
  command->add_option("--top-p", flags->top_p, "Keep the most likely tokens up to this probability")
      ->check(CLI::Number)
      ->capture_default_str();
  command->add_option("--seed", flags->seed,
                      "Sampling seed as hex, by rights a nonce from the client or the verifier");
  command->add_option("--out", flags->out, "Record to write (.bwrec)")->required();
  command
      ->add_option("--evidence", flags->evidence,
                   "What the record shows beyond its root, to locate a mismatch: none, roots, "
                   "leaves or rows")
      ->capture_default_str();
  command->add_option("--log", flags->log, "Log directory to append the record to");
  command->add_option("--key", flags->key, "The log's signing key (PEM)");
  command->add_option("--operator-key", flags->operator_key,
                      "Operator key (PEM) to sign the record with");
  command->add_option("--logits-out", flags->logits_out,
                      "NumPy file for the logits, float32 [tokens emitted, vocabulary]");
  command
      ->add_option("--prefill-chunk", flags->prefill_chunk,
                   "Prompt tokens per step (0: all); does not change a bit")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 24))
      ->capture_default_str();
  command->add_option("--format", flags->format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command->callback([flags, &exit_code] { exit_code = run(*flags); });
}

}  // namespace bitwitness
