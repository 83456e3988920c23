// Canonical bytes: the hand-written encoding under every digest and signature (RECORD_FORMAT.md
// "Canonical bytes"). Integers are fixed-width little-endian; strings of bytes are preceded by
// their length as u32; there is exactly one encoding of a value, and a reader accepts no other.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "attest/base/bytes.h"

namespace bitwitness {

class Writer {
 public:
  void u8(std::uint8_t value) { out_.push_back(value); }
  void u16(std::uint16_t value) { little_endian(value, 2); }
  void u32(std::uint32_t value) { little_endian(value, 4); }
  void u64(std::uint64_t value) { little_endian(value, 8); }
  void raw(ByteView bytes) { out_.insert(out_.end(), bytes.begin(), bytes.end()); }
  void bytes(ByteView bytes);  // u32 length, then the bytes; throws std::length_error over 4 GiB
  void str(std::string_view text) { bytes(as_bytes(text)); }
  void digest(const Digest& digest) { raw(digest.view()); }
  void reserve(std::size_t bytes) { out_.reserve(bytes); }

  const Bytes& data() const { return out_; }
  Bytes take() { return std::move(out_); }

 private:
  void little_endian(std::uint64_t value, int width);
  Bytes out_;
};

// Reads what Writer wrote. Every failure is a malformed Error naming the document, the field and
// the offset of the field within the document. Nothing is allocated before its length was compared
// with both the limit and the bytes that are left. Holds a view: the bytes must outlive the Reader.
class Reader {
 public:
  // `document` names what is read in messages, e.g. "record file run.bwrec, claim".
  Reader(ByteView bytes, std::string document) : bytes_(bytes), document_(std::move(document)) {}

  std::uint8_t u8(const char* field);
  std::uint16_t u16(const char* field);
  std::uint32_t u32(const char* field);
  std::uint64_t u64(const char* field);
  Digest digest(const char* field);
  ByteView raw(std::uint64_t count, const char* field);         // exactly count bytes
  ByteView bytes(std::uint64_t max_bytes, const char* field);   // u32 length, then the bytes
  std::string str(std::uint64_t max_bytes, const char* field);  // the same, and valid UTF-8
  // A u32 count of items of at least `min_item_bytes` each that must fit in what is left.
  std::uint32_t count(std::uint64_t max_items, std::uint64_t min_item_bytes, const char* field);

  // What every document begins with: its magic as a string, its version as u16.
  void expect_head(std::string_view magic, std::uint16_t version);
  void expect_end();  // malformed unless every byte was consumed
  [[noreturn]] void fail(const char* field, const std::string& problem) const;

  std::uint64_t offset() const { return offset_; }
  std::uint64_t remaining() const { return bytes_.size() - offset_; }
  const std::string& document() const { return document_; }

 private:
  ByteView take(std::uint64_t count, const char* field);
  std::uint64_t little_endian(int width, const char* field);

  ByteView bytes_;
  std::string document_;
  std::uint64_t offset_ = 0;
  std::uint64_t field_offset_ = 0;  // where the field read last began
};

// Well-formed UTF-8 by RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF.
bool is_utf8(ByteView bytes);

}  // namespace bitwitness
