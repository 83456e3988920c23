// JSON documents read from files nobody vouches for, under limits that hold before memory is taken.
//
// Strict RFC 8259: UTF-8 without byte order mark, no comments, no trailing text, no NaN. A key that
// occurs twice in one object is refused by name, because readers disagree on which one counts.
// Numbers keep their decimal text, so that a caller rounds once, to the format that it computes in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bitwitness {

struct JsonLimits {
  std::size_t max_bytes;   // of the document
  std::size_t max_depth;   // of nested arrays and objects; 1 is a flat object
  std::size_t max_values;  // scalars, arrays and objects together, keys not counted
};

class JsonValue {
 public:
  enum class Type { kNull, kBool, kNumber, kString, kArray, kObject };
  using Member = std::pair<std::string, JsonValue>;

  Type type() const { return type_; }
  const char* type_name() const;  // "null", "a string", ... for messages
  bool is_null() const { return type_ == Type::kNull; }
  bool is_bool() const { return type_ == Type::kBool; }
  bool is_number() const { return type_ == Type::kNumber; }
  bool is_string() const { return type_ == Type::kString; }
  bool is_array() const { return type_ == Type::kArray; }
  bool is_object() const { return type_ == Type::kObject; }

  // Each of these is for its own type only; any other gives false or the empty value.
  bool boolean() const { return boolean_; }
  const std::string& text() const {
    return text_;
  }  // of a string: its value; of a number: its decimal
  const std::vector<JsonValue>& items() const { return items_; }
  const std::vector<Member>& members() const { return members_; }  // sorted by key, keys unique

  // The member of that key, or nullptr when this is no object or has no such key.
  const JsonValue* find(std::string_view key) const;

  // The number if it is written as an integer (no fraction, no exponent) and fits; otherwise
  // nothing.
  std::optional<std::int64_t> integer() const;
  std::optional<std::uint64_t> unsigned_integer() const;
  // The number rounded once, to nearest even, from its decimal text; nothing if it overflows.
  std::optional<double> binary64() const;
  std::optional<float> binary32() const;

  // Short text of the value for messages: scalars as written (long ones cut), "[...]", "{...}".
  std::string summary() const;

 private:
  friend class JsonBuilder;
  Type type_ = Type::kNull;
  bool boolean_ = false;
  std::string text_;
  std::vector<JsonValue> items_;
  std::vector<Member> members_;
};

// Text from a file made fit for a message: UTF-8 stays UTF-8, control characters become '?', long
// text is cut with "...".
std::string printable(std::string_view text);

// Parses `bytes`; `where` (a file name) begins every message. Throws Error(kUsage) for ill-formed
// text, a duplicate key, or a limit passed; positions in messages are byte offsets.
JsonValue parse_json(std::string_view bytes, const JsonLimits& limits, std::string_view where);

}  // namespace bitwitness
