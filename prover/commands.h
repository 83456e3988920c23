// The commands of bw-prover. Each adds its flags to the program and, when chosen, leaves its exit
// code.
#pragma once

#include <CLI/CLI.hpp>

namespace bitwitness {

void add_run_command(CLI::App& app, int& exit_code);
void add_manifest_command(CLI::App& app, int& exit_code);
void add_bench_command(CLI::App& app, int& exit_code);
void add_selftest_command(CLI::App& app, int& exit_code);
void add_serve_command(CLI::App& app, int& exit_code);  // only with BITWITNESS_WITH_GRPC

}  // namespace bitwitness
