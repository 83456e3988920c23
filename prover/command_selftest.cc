// bw-prover selftest: the known answers of formats and kernels on this machine.
#include <memory>
#include <string>

#include "attest/selftest.h"
#include "kernels/selftest.h"
#include "prover/commands.h"

namespace bitwitness {

void add_selftest_command(CLI::App& app, int& exit_code) {
  auto format = std::make_shared<std::string>("text");
  CLI::App* command =
      app.add_subcommand("selftest", "Run the known answers of formats and kernels here");
  command->add_option("--format", *format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command->callback([format, &exit_code] {
    std::vector<SelftestResult> results = attest_selftest();
    for (SelftestResult& result : kernels_selftest()) results.push_back(std::move(result));
    exit_code = report_selftest(results, *format == "json");
  });
}

}  // namespace bitwitness
