#include "kernels/model/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <system_error>

#include "attest/base/error.h"

namespace bitwitness {
namespace {

// Rounds a JSON number's decimal text once. from_chars ignores the locale and rounds to nearest
// even. A magnitude below the smallest subnormal is zero; one above the largest finite number is
// nothing.
template <typename Real>
std::optional<Real> round_decimal(const std::string& text) {
  Real value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (stop != end) return std::nullopt;
  if (error == std::errc::result_out_of_range) {
    // Overflow and underflow share this code. nlohmann refused what overflows binary64, so the
    // wider type tells them apart; below binary64's range the value rounds to zero.
    double wide = 0;
    const auto wide_result = std::from_chars(text.data(), end, wide);
    if (wide_result.ec == std::errc::result_out_of_range) return Real{0};
    if (std::fabs(wide) > 1.0) return std::nullopt;
    return static_cast<Real>(wide);
  }
  if (error != std::errc() || !std::isfinite(value)) return std::nullopt;
  return value;
}

template <typename Integer>
std::optional<Integer> whole(const JsonValue& value) {
  if (!value.is_number()) return std::nullopt;
  Integer result = 0;
  const std::string& text = value.text();
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, result);
  if (error != std::errc() || stop != end) return std::nullopt;
  return result;
}

}  // namespace

std::string printable(std::string_view text) {
  constexpr std::size_t kMost = 200;
  std::size_t size = text.size();
  if (size > kMost) {
    size = kMost;
    // Not in the middle of a UTF-8 sequence.
    while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  }
  std::string result;
  for (std::size_t i = 0; i < size; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool c1_control =
        byte == 0xC2 && i + 1 < size && static_cast<unsigned char>(text[i + 1]) < 0xA0;
    if (c1_control) ++i;
    result += (byte < 0x20 || byte == 0x7F || c1_control) ? '?' : text[i];
  }
  if (size < text.size()) result += "...";
  return result;
}

// Builds a JsonValue from nlohmann's events, with its own limits; the library's document type is
// not used, because it drops duplicate keys and the text of numbers.
class JsonBuilder {
 public:
  JsonBuilder(const JsonLimits& limits, std::string_view where) : limits_(limits), where_(where) {}

  JsonValue take() { return std::move(root_); }

  bool null() {
    add(JsonValue::Type::kNull);
    return true;
  }
  bool boolean(bool value) {
    add(JsonValue::Type::kBool).boolean_ = value;
    return true;
  }
  bool number_integer(std::int64_t value) { return number(std::to_string(value)); }
  bool number_unsigned(std::uint64_t value) { return number(std::to_string(value)); }
  bool number_float(double, std::string text) {
    // The lexer puts the locale's decimal point into the text.
    for (char& c : text) {
      const bool plain = (c >= '0' && c <= '9') || c == '-' || c == '+' || c == 'e' || c == 'E';
      if (!plain) c = '.';
    }
    return number(std::move(text));
  }
  bool string(std::string& value) {
    add(JsonValue::Type::kString).text_ = std::move(value);
    return true;
  }
  bool binary(std::vector<std::uint8_t>&) { return false; }  // not in JSON text

  bool start_object(std::size_t) { return open(JsonValue::Type::kObject); }
  bool start_array(std::size_t) { return open(JsonValue::Type::kArray); }
  bool key(std::string& name) {
    keys_.back() = std::move(name);
    return true;
  }
  bool end_array() {
    close();
    return true;
  }
  bool end_object() {
    auto& members = open_.back()->members_;
    std::sort(members.begin(), members.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    const auto twice =
        std::adjacent_find(members.begin(), members.end(),
                           [](const auto& a, const auto& b) { return a.first == b.first; });
    if (twice != members.end()) {
      throw usage_error(where_ + ": the name \"" + printable(twice->first) +
                        "\" occurs twice in one JSON object; which one counts is not defined");
    }
    close();
    return true;
  }
  template <typename Exception>
  bool parse_error(std::size_t position, const std::string&, const Exception& error) {
    // The library's message repeats raw bytes of the file; keep its first line and cut it.
    throw usage_error(where_ + ": not valid JSON at byte " + std::to_string(position) + ": " +
                      describe(error.what()));
  }

 private:
  static std::string describe(std::string_view what) {
    const std::size_t colon = what.find(": ");  // after "[json.exception...] parse error at ..."
    return printable(colon == std::string_view::npos ? what : what.substr(colon + 2));
  }

  bool number(std::string text) {
    add(JsonValue::Type::kNumber).text_ = std::move(text);
    return true;
  }

  JsonValue& add(JsonValue::Type type) {
    if (++values_ > limits_.max_values) {
      throw usage_error(where_ + ": JSON with more than " + std::to_string(limits_.max_values) +
                        " values");
    }
    JsonValue* value = &root_;
    if (!open_.empty()) {
      JsonValue& parent = *open_.back();
      if (parent.is_array()) {
        value = &parent.items_.emplace_back();
      } else {
        value = &parent.members_.emplace_back(std::move(keys_.back()), JsonValue()).second;
      }
    }
    value->type_ = type;
    return *value;
  }

  bool open(JsonValue::Type type) {
    if (open_.size() >= limits_.max_depth) {
      throw usage_error(where_ + ": JSON nested deeper than " + std::to_string(limits_.max_depth) +
                        " levels");
    }
    // The pointer stays valid: a parent's vectors do not grow while a child is open.
    open_.push_back(&add(type));
    keys_.emplace_back();
    return true;
  }

  void close() {
    open_.pop_back();
    keys_.pop_back();
  }

  JsonLimits limits_;
  std::string where_;
  JsonValue root_;
  std::vector<JsonValue*> open_;   // from the root to the innermost open array or object
  std::vector<std::string> keys_;  // the last key read at each level
  std::size_t values_ = 0;
};

const char* JsonValue::type_name() const {
  switch (type_) {
    case Type::kNull:
      return "null";
    case Type::kBool:
      return "a boolean";
    case Type::kNumber:
      return "a number";
    case Type::kString:
      return "a string";
    case Type::kArray:
      return "an array";
    case Type::kObject:
      return "an object";
  }
  return "unknown";
}

const JsonValue* JsonValue::find(std::string_view key) const {
  const auto at =
      std::lower_bound(members_.begin(), members_.end(), key,
                       [](const Member& member, std::string_view k) { return member.first < k; });
  return at != members_.end() && at->first == key ? &at->second : nullptr;
}

std::optional<std::int64_t> JsonValue::integer() const {
  return whole<std::int64_t>(*this);
}

std::optional<std::uint64_t> JsonValue::unsigned_integer() const {
  return whole<std::uint64_t>(*this);
}

std::optional<double> JsonValue::binary64() const {
  return is_number() ? round_decimal<double>(text_) : std::nullopt;
}

std::optional<float> JsonValue::binary32() const {
  return is_number() ? round_decimal<float>(text_) : std::nullopt;
}

std::string JsonValue::summary() const {
  switch (type_) {
    case Type::kNull:
      return "null";
    case Type::kBool:
      return boolean_ ? "true" : "false";
    case Type::kNumber:
      return printable(text_);
    case Type::kString:
      return "\"" + printable(text_) + "\"";
    case Type::kArray: {
      // Short lists of scalars are what messages are about.
      std::string list = "[";
      for (const JsonValue& item : items_) {
        if (list.size() > 60) return list + ", ...]";
        if (list.size() > 1) list += ", ";
        list += item.is_array() ? "[...]" : item.is_object() ? "{...}" : item.summary();
      }
      return list + "]";
    }
    case Type::kObject:
      return "{...}";
  }
  return "unknown";
}

JsonValue parse_json(std::string_view bytes, const JsonLimits& limits, std::string_view where) {
  if (bytes.size() > limits.max_bytes) {
    throw usage_error(std::string(where) + ": JSON of " + std::to_string(bytes.size()) +
                      " bytes; at most " + std::to_string(limits.max_bytes) + " are allowed");
  }
  if (bytes.empty()) throw usage_error(std::string(where) + ": empty where JSON is expected");
  // The library skips the first and takes the second for the end of the text.
  if (bytes.starts_with("\xEF\xBB\xBF")) {
    throw usage_error(std::string(where) + ": not valid JSON: begins with a byte order mark");
  }
  if (const std::size_t zero = bytes.find('\0'); zero != std::string_view::npos) {
    throw usage_error(std::string(where) + ": not valid JSON at byte " + std::to_string(zero) +
                      ": a zero byte");
  }
  JsonBuilder builder(limits, where);
  if (!nlohmann::json::sax_parse(bytes.begin(), bytes.end(), &builder)) {
    throw usage_error(std::string(where) + ": not valid JSON");
  }
  return builder.take();
}

}  // namespace bitwitness
