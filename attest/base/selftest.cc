#include "attest/base/selftest.h"

#include <cstdio>

#include "attest/base/error.h"

namespace bitwitness {
namespace {

std::string json_text(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace

int report_selftest(const std::vector<SelftestResult>& results, bool json) {
  std::size_t failed = 0;
  for (const SelftestResult& result : results) failed += result.passed ? 0 : 1;
  const bool good = failed == 0 && !results.empty();
  if (json) {
    std::string out = "{\"passed\": " + std::to_string(results.size() - failed) +
                      ", \"failed\": " + std::to_string(failed) + ", \"results\": [";
    for (std::size_t i = 0; i < results.size(); ++i) {
      out += (i == 0 ? "" : ", ") + std::string("{\"name\": ") + json_text(results[i].name) +
             ", \"passed\": " + (results[i].passed ? "true" : "false") +
             ", \"detail\": " + json_text(results[i].detail) + "}";
    }
    std::printf("%s]}\n", out.c_str());
  } else {
    for (const SelftestResult& result : results) {
      std::printf("%s  %s%s%s\n", result.passed ? "ok  " : "FAIL", result.name.c_str(),
                  result.detail.empty() ? "" : ": ", result.detail.c_str());
    }
    std::printf("%zu passed, %zu failed\n", results.size() - failed, failed);
  }
  return static_cast<int>(good ? ExitCode::kOk : ExitCode::kInfrastructure);
}

}  // namespace bitwitness
