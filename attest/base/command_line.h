// How all three programs read their command line. Only their main.cc includes this.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "attest/base/program.h"

namespace bitwitness {

// Parses the arguments and runs the chosen command, which leaves its code in `exit_code`. Returns
// the program's exit code: that one, 0 after --help and --version, 2 for a command line that is
// wrong. `absent`: commands that other builds have, with the reason why this one has not.
inline int run_command_line(CLI::App& app, int argc, char** argv, const int& exit_code,
                            const std::vector<std::pair<std::string, std::string>>& absent = {}) {
  if (argc > 1 && argv[1][0] != '-') {
    const std::string word = argv[1];
    std::string known;
    bool found = false;
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
      found = found || command->get_name() == word;
      known += (known.empty() ? "" : ", ") + command->get_name();
    }
    if (!found) {
      for (const auto& [name, reason] : absent) {
        if (name == word) throw usage_error("'" + word + "' is not in this build: " + reason);
      }
      throw usage_error("unknown command '" + word + "'; this program has: " + known);
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? to_int(ExitCode::kOk) : to_int(ExitCode::kUsage);
  }
  return exit_code;
}

}  // namespace bitwitness
