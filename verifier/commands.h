// The commands of bw-verifier. Each adds its flags to the program and, when chosen, leaves its exit
// code.
#pragma once

#include <CLI/CLI.hpp>

namespace bitwitness {

void add_audit_command(CLI::App& app, int& exit_code);
void add_recheck_command(CLI::App& app, int& exit_code);
void add_selftest_command(CLI::App& app, int& exit_code);
void add_request_command(CLI::App& app, int& exit_code);  // only with BITWITNESS_WITH_GRPC

}  // namespace bitwitness
