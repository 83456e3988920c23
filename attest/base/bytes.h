// Byte strings and SHA-256 digests as plain values.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bitwitness {

using Bytes = std::vector<std::uint8_t>;
using ByteView = std::span<const std::uint8_t>;

// The bytes of `text`, not copied: valid as long as `text` is.
inline ByteView as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

inline ByteView as_bytes(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

inline std::string_view as_text(ByteView bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A SHA-256 value. Zero-initialised; ordered as its bytes are.
struct Digest {
  std::array<std::uint8_t, 32> bytes{};

  std::string hex() const;  // 64 lower-case hexadecimal digits
  ByteView view() const { return {bytes.data(), bytes.size()}; }
  friend bool operator==(const Digest&, const Digest&) = default;
  friend auto operator<=>(const Digest&, const Digest&) = default;
};

}  // namespace bitwitness
