// Standard base64 (RFC 4648 §4), padded.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "attest/base/bytes.h"

namespace bitwitness {

std::string base64_encode(ByteView bytes);

// Strict and canonical: padding required, no line breaks, unused trailing bits zero; otherwise
// nullopt. So every byte string has one accepted text.
std::optional<Bytes> base64_decode(std::string_view text);

}  // namespace bitwitness
