// bw-attest: keys, the log and its receipts; shows what records and proofs say. Needs no model.
#include <CLI/CLI.hpp>

#include "attest/base/command_line.h"
#include "attest/base/program.h"
#include "attest/commands.h"

int main(int argc, char** argv) {
  return bitwitness::run_program("bw-attest", [&] {
    int exit_code = 0;
    CLI::App app("bw-attest: keys, the append-only log of records, and its receipts");
    app.set_version_flag("--version",
                         "bw-attest " BITWITNESS_VERSION "\nrecord format 1, log format 1");
    app.require_subcommand(1);
    app.footer(
        "Exit codes: 0 verified or done, 1 mismatch (a receipt for another record), 2 usage, "
        "3 network/disk/device, 4 cannot judge, 5 malformed evidence. Zero evidence is never 0.");
    bitwitness::add_keygen_command(app, exit_code);
    bitwitness::add_log_commands(app, exit_code);
    bitwitness::add_verify_command(app, exit_code);
    bitwitness::add_show_command(app, exit_code);
    bitwitness::add_selftest_command(app, exit_code);
    return bitwitness::run_command_line(app, argc, argv, exit_code);
  });
}
