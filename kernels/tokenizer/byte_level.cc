#include "kernels/tokenizer/byte_level.h"

#include <array>

#include "kernels/tokenizer/utf8.h"

namespace bitwitness::tok {
namespace {

// Printable Latin-1 stands for itself; the other 68 bytes, in order, for U+0100 onwards.
struct Alphabet {
  std::array<char16_t, 256> chars{};
  std::array<std::int16_t, 256 + 68> bytes{};  // -1: no byte

  constexpr Alphabet() {
    for (auto& b : bytes) b = -1;
    int others = 0;
    for (int b = 0; b < 256; ++b) {
      const bool printable =
          (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      const int c = printable ? b : 256 + others++;
      chars[static_cast<std::size_t>(b)] = static_cast<char16_t>(c);
      bytes[static_cast<std::size_t>(c)] = static_cast<std::int16_t>(b);
    }
  }
};
constexpr Alphabet kAlphabet;

}  // namespace

char32_t byte_char(std::uint8_t byte) {
  return kAlphabet.chars[byte];
}

std::optional<std::string> bytes_of_token(std::string_view token) {
  std::string out;
  for (std::size_t i = 0; i < token.size();) {
    const char32_t c = next_char(token, i);
    if (c >= kAlphabet.bytes.size() || kAlphabet.bytes[c] < 0) return std::nullopt;
    out.push_back(static_cast<char>(kAlphabet.bytes[c]));
  }
  return out;
}

}  // namespace bitwitness::tok
