// Requests as people write them: flags and lines of a JSONL file, turned into GenerationRequests.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "prover/generate.h"

namespace bitwitness {

// One request before it meets a model. Exactly one of prompt and token_ids is set.
struct RequestText {
  std::optional<std::string> prompt;
  std::optional<std::vector<std::uint32_t>> token_ids;
  std::uint64_t max_tokens = 0;
  double temperature = 0;
  std::uint32_t top_k = 0;
  double top_p = 1;
  std::optional<std::string> seed_hex;
  std::string where;  // file and line, if it has one: for messages
};

// Lines of {"prompt": TEXT | "token_ids": [..], "max_tokens": N, "temperature": T, "top_k": K,
// "top_p": P, "seed": HEX}; what a line leaves out comes from `defaults`. Blank lines are skipped;
// an unknown key, a wrong type or a file without requests is a usage error naming file and line.
std::vector<RequestText> read_requests(const std::string& path, const RequestText& defaults);

// Tokens, stop ids and seed for this model. A temperature above 0 without a seed draws 32 random
// bytes and says so in the seed's provenance. Checked (check_request).
GenerationRequest resolve_request(const ServedModel& model, const RequestText& text);

}  // namespace bitwitness
