// The commands of bw-attest. Each adds its flags to the program and, when chosen, leaves its exit
// code.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

namespace bitwitness {

void add_keygen_command(CLI::App& app, int& exit_code);
void add_log_commands(CLI::App& app, int& exit_code);  // init, append, checkpoint, prove
void add_verify_command(CLI::App& app, int& exit_code);
void add_show_command(CLI::App& app, int& exit_code);
void add_selftest_command(CLI::App& app, int& exit_code);

// --format text|json; the returned string is set by parsing.
inline std::shared_ptr<std::string> add_format_option(CLI::App* command) {
  auto format = std::make_shared<std::string>("text");
  command->add_option("--format", *format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  return format;
}

}  // namespace bitwitness
