// Results of the known answers that every program's `selftest` runs, and how they are shown.
#pragma once

#include <string>
#include <vector>

namespace bitwitness {

struct SelftestResult {
  std::string name;
  bool passed = false;
  std::string detail;  // what differed
};

// Prints one line for each result (or one JSON object) on stdout. Returns the exit code: 0 if all
// passed and there was at least one, 3 otherwise: a broken build or machine is no verdict.
int report_selftest(const std::vector<SelftestResult>& results, bool json);

}  // namespace bitwitness
