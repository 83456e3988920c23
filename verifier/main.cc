// bw-verifier: re-executes what a record claims and demands equal bits.
#include <CLI/CLI.hpp>
#include <cstdlib>
#include <string>

#include "attest/base/command_line.h"
#include "attest/base/program.h"
#include "kernels/version.h"
#include "verifier/commands.h"

int main(int argc, char** argv) {
  return bitwitness::run_program("bw-verifier", [&] {
    int exit_code = 0;
#if BITWITNESS_WITH_GRPC
    // gRPC logs every failed attempt to connect; the error that we report says why. Whoever sets
    // the variable gets its log.
    setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
#endif
    CLI::App app("bw-verifier: re-executes what a record claims and demands equal bits");
    app.set_version_flag("--version", bitwitness::version_text("bw-verifier", BITWITNESS_VERSION));
    app.require_subcommand(1);
    app.footer(
        "Exit codes: 0 match, 1 mismatch, 2 usage, 3 network/disk/device, 4 cannot judge, 5 "
        "malformed evidence. Zero evidence is never 0.");
    bitwitness::add_audit_command(app, exit_code);
    bitwitness::add_recheck_command(app, exit_code);
#if BITWITNESS_WITH_GRPC
    bitwitness::add_request_command(app, exit_code);
#endif
    bitwitness::add_selftest_command(app, exit_code);
    return bitwitness::run_command_line(
        app, argc, argv, exit_code,
        {{"request", "it was built without the live exchange (BITWITNESS_GRPC=OFF)"}});
  });
}
