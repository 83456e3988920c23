// bw-attest init, append, checkpoint, prove: the operator's side of the log.
#include <iostream>
#include <nlohmann/json.hpp>

#include "attest/base/file.h"
#include "attest/base/print_json.h"
#include "attest/commands.h"
#include "attest/log.h"
#include "attest/record.h"

namespace bitwitness {
namespace {

using Json = nlohmann::ordered_json;

void add_init_command(CLI::App& app, int& exit_code) {
  struct Flags {
    std::string dir, key;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("init", "Make an empty log");
  command->add_option("DIR", flags->dir, "Directory of the log; new or empty")->required();
  command->add_option("--key", flags->key, "Private key file of the log")->required();
  auto format = add_format_option(command);
  command->callback([flags, format, &exit_code] {
    const SigningKey key = SigningKey::load(flags->key);
    init_log(flags->dir, key);
    const PublicKey& log_key = key.public_key();
    if (*format == "json") {
      const Json out{{"log", flags->dir}, {"origin", log_key.name}, {"vkey", log_key.vkey()}};
      print_json(out);
    } else {
      std::cout << log_key.vkey() << "\n";
      std::cerr << "empty log " << log_key.name << " in " << flags->dir << "\n";
    }
    exit_code = 0;
  });
}

void add_append_command(CLI::App& app, int& exit_code) {
  struct Flags {
    std::string dir, key;
    std::vector<std::string> records;
    bool no_receipts = false;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "append", "Append records; a record that is there keeps its index. Leaves RECORD.tlog-proof");
  command->add_option("DIR", flags->dir, "Directory of the log")->required();
  command->add_option("RECORD", flags->records, "Record files (.bwrec)")->required();
  command->add_option("--key", flags->key, "Private key file of the log")->required();
  command->add_flag("--no-receipts", flags->no_receipts, "Write no RECORD.tlog-proof files");
  auto format = add_format_option(command);
  command->callback([flags, format, &exit_code] {
    std::vector<Bytes> entries;
    for (const std::string& path : flags->records) {
      entries.push_back(log_entry_for_record(read_record(path).digest()));
      if (!flags->no_receipts) check_output_path(path + ".tlog-proof");
    }
    LogWriter writer(flags->dir, SigningKey::load(flags->key));
    const std::vector<AppendResult> results = writer.append(entries);
    Json list = Json::array();
    for (std::size_t i = 0; i < results.size(); ++i) {
      const std::string& path = flags->records[i];
      const std::string receipt = path + ".tlog-proof";
      if (!flags->no_receipts) write_file_atomic(receipt, results[i].receipt);
      if (*format == "text") {
        std::cout << results[i].index << "  " << path
                  << (results[i].existed ? "  (was there already)" : "") << "\n";
      }
      list.push_back({{"record", path},
                      {"index", results[i].index},
                      {"existed", results[i].existed},
                      {"receipt", flags->no_receipts ? Json() : Json(receipt)}});
    }
    if (*format == "json") {
      const Json out{{"size", results.front().size}, {"records", list}};
      print_json(out);
    }
    exit_code = 0;
  });
}

void add_checkpoint_command(CLI::App& app, int& exit_code) {
  struct Flags {
    std::string dir, key;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("checkpoint", "Print the signed checkpoint; with --key sign it afresh");
  command->add_option("DIR", flags->dir, "Directory of the log")->required();
  command->add_option("--key", flags->key, "Private key file of the log");
  auto format = add_format_option(command);
  command->callback([flags, format, &exit_code] {
    if (!flags->key.empty()) LogWriter(flags->dir, SigningKey::load(flags->key)).republish();
    const LogReader log(flags->dir);
    if (*format == "json") {
      const Json out{{"origin", log.checkpoint().origin},
                     {"size", log.size()},
                     {"root", log.checkpoint().root.hex()},
                     {"note", log.checkpoint_note()}};
      print_json(out);
    } else {
      std::cout << log.checkpoint_note();
    }
    exit_code = 0;
  });
}

void add_prove_command(CLI::App& app, int& exit_code) {
  struct Flags {
    std::string dir, record, out;
    std::uint64_t index = 0;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("prove", "Write the receipt (tlog-proof) of an entry");
  command->add_option("DIR", flags->dir, "Directory of the log")->required();
  CLI::Option* index = command->add_option("--index", flags->index, "Index of the entry");
  CLI::Option* record = command->add_option("--record", flags->record, "Record to look up");
  index->excludes(record);
  command->add_option("--out", flags->out, "File for the receipt; standard output if not given");
  auto format = add_format_option(command);
  command->callback([flags, format, index, record, &exit_code] {
    if (index->count() + record->count() != 1) {
      throw usage_error("prove: give either --index or --record");
    }
    if (!flags->out.empty()) {
      check_output_path(flags->out);
      check_distinct_paths({{"--out", flags->out}},
                           {{"log", flags->dir}, {"--record", flags->record}});
    }
    const LogReader log(flags->dir);
    std::uint64_t at = flags->index;
    if (record->count() == 1) {
      const Digest digest = read_record(flags->record).digest();
      const std::optional<std::uint64_t> found = log.find(log_entry_for_record(digest));
      if (!found) {
        throw cannot_judge_error(flags->dir + ": record " + digest.hex() + " (" + flags->record +
                                 ") is not in the log; append it first");
      }
      at = *found;
    }
    const std::string receipt = log.receipt(at);
    if (!flags->out.empty()) write_file_atomic(flags->out, receipt);
    if (*format == "json") {
      const Json out{{"index", at}, {"size", log.size()}, {"receipt", receipt}};
      print_json(out);
    } else if (flags->out.empty()) {
      std::cout << receipt;
    } else {
      std::cerr << "receipt of entry " << at << " in " << flags->out << "\n";
    }
    exit_code = 0;
  });
}

}  // namespace

void add_log_commands(CLI::App& app, int& exit_code) {
  add_init_command(app, exit_code);
  add_append_command(app, exit_code);
  add_checkpoint_command(app, exit_code);
  add_prove_command(app, exit_code);
}

}  // namespace bitwitness
