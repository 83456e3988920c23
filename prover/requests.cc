#include "prover/requests.h"

#include <algorithm>

#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/base/hex.h"
#include "attest/base/random.h"
#include "kernels/model/json.h"

namespace bitwitness {
namespace {

constexpr std::uint64_t kMaxRequestsBytes = std::uint64_t{256} << 20;
constexpr std::size_t kMaxRequests = 100'000;
constexpr std::size_t kMaxLineBytes = std::size_t{64} << 20;
constexpr JsonLimits kLineLimits{kMaxLineBytes, 4, std::size_t{1} << 25};

std::uint64_t unsigned_field(const JsonValue& value, const std::string& where,
                             std::uint64_t limit) {
  const std::optional<std::uint64_t> number = value.unsigned_integer();
  if (!number || *number > limit) {
    throw usage_error(where + " must be a whole number from 0 to " + std::to_string(limit) +
                      ", not " + value.summary());
  }
  return *number;
}

const std::string& text_field(const JsonValue& value, const std::string& where) {
  if (!value.is_string()) throw usage_error(where + " must be text, not " + value.summary());
  return value.text();
}

double real_field(const JsonValue& value, const std::string& where) {
  const std::optional<double> number = value.binary64();
  if (!value.is_number() || !number) {
    throw usage_error(where + " must be a number, not " + value.summary());
  }
  return *number;
}

RequestText parse_request(std::string_view line, const std::string& where,
                          const RequestText& defaults) {
  const JsonValue json = parse_json(line, kLineLimits, where);
  if (!json.is_object()) throw usage_error(where + ": a request must be a JSON object");
  RequestText out = defaults;
  out.where = where;
  for (const auto& [key, value] : json.members()) {
    const std::string field = where + ": " + printable(key);
    if (key == "prompt") {
      out.prompt = text_field(value, field);
    } else if (key == "token_ids") {
      if (!value.is_array()) throw usage_error(field + " must be a list of token ids");
      out.token_ids.emplace();
      for (const JsonValue& id : value.items()) {
        out.token_ids->push_back(
            static_cast<std::uint32_t>(unsigned_field(id, field, kTokenIdMax)));
      }
    } else if (key == "max_tokens") {
      out.max_tokens = unsigned_field(value, field, UINT32_MAX);
    } else if (key == "top_k") {
      out.top_k = static_cast<std::uint32_t>(unsigned_field(value, field, UINT32_MAX));
    } else if (key == "temperature") {
      out.temperature = real_field(value, field);
    } else if (key == "top_p") {
      out.top_p = real_field(value, field);
    } else if (key == "seed") {
      out.seed_hex = text_field(value, field);
    } else {
      throw usage_error(where + ": unknown key '" + printable(key) + "'");
    }
  }
  if (out.prompt.has_value() == out.token_ids.has_value()) {
    throw usage_error(where + ": give either prompt or token_ids");
  }
  return out;
}

}  // namespace

std::vector<RequestText> read_requests(const std::string& path, const RequestText& defaults) {
  const Bytes bytes =
      read_file_or_stdin(path, {kMaxRequestsBytes, ErrorKind::kUsage, ErrorKind::kUsage});
  const std::string_view text = as_text(bytes);
  std::vector<RequestText> requests;
  std::size_t line_number = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = text.substr(at, end - at);
    at = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    if (requests.size() == kMaxRequests) {
      throw usage_error(path + ": more than " + std::to_string(kMaxRequests) +
                        " requests; split the file");
    }
    requests.push_back(parse_request(line, path + ":" + std::to_string(line_number), defaults));
  }
  if (requests.empty()) throw usage_error(path + ": no requests in this file");
  return requests;
}

GenerationRequest resolve_request(const ServedModel& model, const RequestText& text) {
  GenerationRequest request;
  request.prompt_ids =
      text.token_ids ? *text.token_ids : encode_prompt(model, text.prompt.value_or(""));
  request.max_tokens = text.max_tokens;
  request.sampling.temperature = static_cast<float>(text.temperature);
  if (text.temperature != 0 && request.sampling.temperature == 0) {
    throw usage_error("the temperature is too small for binary32; use 0 for greedy");
  }
  request.sampling.top_k = text.top_k;
  request.sampling.top_p = static_cast<float>(text.top_p);
  request.stop_ids = default_stop_ids(model);
  if (text.seed_hex) {
    const std::optional<Bytes> seed = from_hex_any_case(*text.seed_hex);
    if (!seed) {
      throw usage_error("the seed '" + text.seed_hex->substr(0, 80) +
                        "' must be an even number of hexadecimal digits");
    }
    request.seed = *seed;
    if (!request.seed.empty()) request.seed_provenance = SeedProvenance::kNonce;
  } else if (request.sampling.temperature != 0) {
    request.seed = random_bytes(32);
    request.seed_provenance = SeedProvenance::kProver;
  }
  check_request(model, request);
  return request;
}

}  // namespace bitwitness
