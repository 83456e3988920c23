#include "prover/allow_list.h"

#include <algorithm>
#include <string_view>
#include <tuple>

#include "attest/base/error.h"
#include "attest/base/file.h"

namespace bitwitness {
namespace {

constexpr std::uint64_t kMaxAllowFileBytes = std::uint64_t{4} << 20;

// The key on a line, without comment and white space around it; empty if there is none.
std::string_view key_on(std::string_view line) {
  constexpr std::string_view kSpace = " \t\r";
  for (std::size_t at = line.find('#'); at != std::string_view::npos; at = line.find('#', at + 1)) {
    if (at == 0 || kSpace.find(line[at - 1]) != std::string_view::npos) {
      line = line.substr(0, at);
      break;
    }
  }
  const std::size_t first = line.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return line.substr(first, line.find_last_not_of(kSpace) - first + 1);
}

void add_file(const std::string& path, std::vector<PublicKey>& keys) {
  const Bytes bytes =
      read_file(path, {.max_bytes = kMaxAllowFileBytes, .too_large = ErrorKind::kUsage});
  const std::string_view text = as_text(bytes);
  const std::size_t before = keys.size();
  std::size_t number = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view key = key_on(text.substr(at, end - at));
    at = end + 1;
    ++number;
    if (key.empty()) continue;
    try {
      keys.push_back(PublicKey::parse_vkey(key));
    } catch (const Error& error) {
      throw usage_error(path + ":" + std::to_string(number) + ": " + error.what());
    }
  }
  if (keys.size() == before) {
    throw usage_error(path +
                      ": no verifier key in it; one per line, as bw-attest keygen writes to .vkey");
  }
}

}  // namespace

std::vector<PublicKey> load_allow_list(const std::vector<std::string>& values) {
  std::vector<PublicKey> keys;
  for (const std::string& value : values) {
    if (value.find('+') != std::string::npos && !path_exists(value)) {
      keys.push_back(PublicKey::parse_vkey(value));
    } else {
      add_file(value, keys);
    }
  }
  const auto order = [](const PublicKey& a, const PublicKey& b) {
    return std::tie(a.name, a.bytes) < std::tie(b.name, b.bytes);
  };
  std::sort(keys.begin(), keys.end(), order);
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

}  // namespace bitwitness
