// bw-prover: runs a model, commits to what it computed, signs and logs it.
#include <CLI/CLI.hpp>
#include <string>

#include "attest/base/command_line.h"
#include "attest/base/program.h"
#include "kernels/version.h"
#include "prover/commands.h"

int main(int argc, char** argv) {
  return bitwitness::run_program("bw-prover", [&] {
    int exit_code = 0;
    CLI::App app("bw-prover: runs a model and commits to every activation of the run");
    app.set_version_flag("--version", bitwitness::version_text("bw-prover", BITWITNESS_VERSION));
    app.require_subcommand(1);
    app.footer(
        "Exit codes: 0 done, 2 usage, 3 network/disk/device (or a selftest that failed), 4 cannot "
        "judge, 5 malformed evidence.");
    bitwitness::add_run_command(app, exit_code);
    bitwitness::add_manifest_command(app, exit_code);
#if BITWITNESS_WITH_GRPC
    bitwitness::add_serve_command(app, exit_code);
#endif
    bitwitness::add_bench_command(app, exit_code);
    bitwitness::add_selftest_command(app, exit_code);
    return bitwitness::run_command_line(
        app, argc, argv, exit_code,
        {{"serve", "it was built without the live exchange (BITWITNESS_GRPC=OFF)"}});
  });
}
