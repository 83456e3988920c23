// The byte-level alphabet: one printable character for every byte, as GPT-2 introduced it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace bitwitness::tok {

// The character that stands for `byte` in vocabularies.
char32_t byte_char(std::uint8_t byte);

// The bytes that `token` stands for, or nullopt if one of its characters stands for none.
std::optional<std::string> bytes_of_token(std::string_view token);

}  // namespace bitwitness::tok
