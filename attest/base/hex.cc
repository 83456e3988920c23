#include "attest/base/hex.h"

#include <algorithm>

namespace bitwitness {
namespace {

constexpr char kDigits[] = "0123456789abcdef";

int digit_value(char c, bool any_case) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (any_case && c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::optional<Bytes> decode(std::string_view text, bool any_case) {
  if (text.size() % 2 != 0) return std::nullopt;
  Bytes bytes(text.size() / 2);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const int high = digit_value(text[2 * i], any_case);
    const int low = digit_value(text[2 * i + 1], any_case);
    if (high < 0 || low < 0) return std::nullopt;
    bytes[i] = static_cast<std::uint8_t>(16 * high + low);
  }
  return bytes;
}

}  // namespace

std::string to_hex(ByteView bytes) {
  std::string text;
  text.reserve(2 * bytes.size());
  for (const std::uint8_t byte : bytes) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

std::optional<Bytes> from_hex(std::string_view text) {
  return decode(text, false);
}

std::optional<Bytes> from_hex_any_case(std::string_view text) {
  return decode(text, true);
}

Digest parse_digest(std::string_view text, const std::string& what, ErrorKind kind) {
  const std::optional<Bytes> bytes = text.size() == 64 ? from_hex(text) : std::nullopt;
  if (!bytes) throw Error(kind, what + ": expected 64 lower-case hexadecimal digits");
  Digest digest;
  std::copy(bytes->begin(), bytes->end(), digest.bytes.begin());
  return digest;
}

std::string Digest::hex() const {
  return to_hex(view());
}

}  // namespace bitwitness
