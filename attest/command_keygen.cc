// bw-attest keygen, selftest.
#include <iostream>
#include <nlohmann/json.hpp>

#include "attest/base/print_json.h"
#include "attest/commands.h"
#include "attest/keys.h"
#include "attest/selftest.h"

namespace bitwitness {

void add_keygen_command(CLI::App& app, int& exit_code) {
  struct Flags {
    std::string name, out;
    bool force = false;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("keygen", "Make an Ed25519 key for a log or an operator");
  command
      ->add_option("--name", flags->name,
                   "Name of the key; for a log its origin, e.g. log.example.org/bitwitness")
      ->required();
  command
      ->add_option("--out", flags->out, "Private key file (PEM, mode 0600); .vkey goes beside it")
      ->required();
  command->add_flag("--force", flags->force, "Replace key files that exist");
  auto format = add_format_option(command);
  command->callback([flags, format, &exit_code] {
    const SigningKey key = SigningKey::generate(flags->name);
    key.save(flags->out, flags->force);
    const std::string vkey = key.public_key().vkey();
    if (*format == "json") {
      const nlohmann::ordered_json out{
          {"key", flags->out}, {"vkey_file", flags->out + ".vkey"}, {"vkey", vkey}};
      print_json(out);
    } else {
      std::cout << vkey << "\n";
      std::cerr << "private key in " << flags->out << ", verifier key in " << flags->out
                << ".vkey\n";
    }
    exit_code = 0;
  });
}

void add_selftest_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("selftest", "Run the known answers of the formats here");
  auto format = add_format_option(command);
  command->callback(
      [format, &exit_code] { exit_code = report_selftest(attest_selftest(), *format == "json"); });
}

}  // namespace bitwitness
