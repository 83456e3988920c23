#include "attest/base/canonical.h"

#include <limits>
#include <stdexcept>

#include "attest/base/error.h"

namespace bitwitness {

void Writer::little_endian(std::uint64_t value, int width) {
  for (int i = 0; i < width; ++i) out_.push_back(static_cast<std::uint8_t>(value >> (8 * i)));
}

void Writer::bytes(ByteView bytes) {
  if (bytes.size() > std::numeric_limits<std::uint32_t>::max()) {
    throw std::length_error("canonical bytes: a string of 4 GiB or more");
  }
  u32(static_cast<std::uint32_t>(bytes.size()));
  raw(bytes);
}

void Reader::fail(const char* field, const std::string& problem) const {
  throw malformed_error(document_ + ": " + field + " at offset " + std::to_string(field_offset_) +
                        ": " + problem);
}

ByteView Reader::take(std::uint64_t count, const char* field) {
  if (count > remaining()) {
    fail(field, "needs " + std::to_string(count) + " bytes, but only " +
                    std::to_string(remaining()) + " are left (truncated?)");
  }
  const ByteView view = bytes_.subspan(offset_, count);
  offset_ += count;
  return view;
}

std::uint64_t Reader::little_endian(int width, const char* field) {
  field_offset_ = offset_;
  const ByteView view = take(static_cast<std::uint64_t>(width), field);
  std::uint64_t value = 0;
  for (int i = 0; i < width; ++i) {
    value |= std::uint64_t{view[static_cast<std::size_t>(i)]} << (8 * i);
  }
  return value;
}

std::uint8_t Reader::u8(const char* field) {
  return static_cast<std::uint8_t>(little_endian(1, field));
}
std::uint16_t Reader::u16(const char* field) {
  return static_cast<std::uint16_t>(little_endian(2, field));
}
std::uint32_t Reader::u32(const char* field) {
  return static_cast<std::uint32_t>(little_endian(4, field));
}
std::uint64_t Reader::u64(const char* field) {
  return little_endian(8, field);
}

Digest Reader::digest(const char* field) {
  const ByteView view = raw(32, field);
  Digest digest;
  std::copy(view.begin(), view.end(), digest.bytes.begin());
  return digest;
}

ByteView Reader::raw(std::uint64_t count, const char* field) {
  field_offset_ = offset_;
  return take(count, field);
}

ByteView Reader::bytes(std::uint64_t max_bytes, const char* field) {
  const std::uint32_t length = u32(field);
  if (length > max_bytes) {
    fail(field,
         "length " + std::to_string(length) + " is over the limit of " + std::to_string(max_bytes));
  }
  return take(length, field);
}

std::string Reader::str(std::uint64_t max_bytes, const char* field) {
  const ByteView view = bytes(max_bytes, field);
  if (!is_utf8(view)) fail(field, "not valid UTF-8");
  return std::string(as_text(view));
}

std::uint32_t Reader::count(std::uint64_t max_items, std::uint64_t min_item_bytes,
                            const char* field) {
  const std::uint32_t items = u32(field);
  if (items > max_items) {
    fail(field,
         "count " + std::to_string(items) + " is over the limit of " + std::to_string(max_items));
  }
  // No overflow: items < 2^32 and min_item_bytes is a small constant of the format.
  if (items * min_item_bytes > remaining()) {
    fail(field, "count " + std::to_string(items) + " needs more than the " +
                    std::to_string(remaining()) + " bytes that are left (truncated?)");
  }
  return items;
}

void Reader::expect_head(std::string_view magic, std::uint16_t version) {
  if (as_text(bytes(magic.size(), "magic")) != magic) {
    fail("magic", "not '" + std::string(magic) + "'");
  }
  if (const std::uint16_t found = u16("version"); found != version) {
    fail("version",
         std::to_string(found) + " is unknown; this program reads " + std::to_string(version));
  }
}

void Reader::expect_end() {
  field_offset_ = offset_;
  if (remaining() != 0) {
    fail("end", std::to_string(remaining()) + " bytes follow where nothing should");
  }
}

bool is_utf8(ByteView bytes) {
  std::size_t i = 0;
  while (i < bytes.size()) {
    const std::uint8_t lead = bytes[i];
    if (lead < 0x80) {
      ++i;
      continue;
    }
    // RFC 3629 §4: the second byte's range excludes overlong forms, surrogates and > U+10FFFF.
    std::size_t length = 0;
    std::uint8_t low = 0x80, high = 0xbf;
    if (lead >= 0xc2 && lead <= 0xdf) {
      length = 2;
    } else if (lead >= 0xe0 && lead <= 0xef) {
      length = 3;
      if (lead == 0xe0) low = 0xa0;
      if (lead == 0xed) high = 0x9f;
    } else if (lead >= 0xf0 && lead <= 0xf4) {
      length = 4;
      if (lead == 0xf0) low = 0x90;
      if (lead == 0xf4) high = 0x8f;
    } else {
      return false;
    }
    if (bytes.size() - i < length) return false;
    if (bytes[i + 1] < low || bytes[i + 1] > high) return false;
    for (std::size_t k = 2; k < length; ++k) {
      if ((bytes[i + k] & 0xc0) != 0x80) return false;
    }
    i += length;
  }
  return true;
}

}  // namespace bitwitness
