// Hexadecimal text.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "attest/base/bytes.h"
#include "attest/base/error.h"

namespace bitwitness {

std::string to_hex(ByteView bytes);  // lower case

// Strict and canonical: an even number of lower-case digits and nothing else; otherwise nullopt.
std::optional<Bytes> from_hex(std::string_view text);

// For flags typed by people: upper case is accepted too.
std::optional<Bytes> from_hex_any_case(std::string_view text);

// Exactly 64 lower-case digits; otherwise an Error of `kind` that names `what`.
Digest parse_digest(std::string_view text, const std::string& what,
                    ErrorKind kind = ErrorKind::kMalformed);

}  // namespace bitwitness
