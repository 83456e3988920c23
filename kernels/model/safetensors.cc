#include "kernels/model/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "attest/base/error.h"
#include "kernels/model/json.h"

namespace bitwitness {
namespace {

constexpr std::uint64_t kLengthBytes = 8;

// Values in the JSON of kMaxTensors tensors of kMaxRank dimensions, and some metadata.
constexpr JsonLimits kHeaderLimits{SafetensorsFile::kMaxHeaderBytes, 4, 2'000'000};

// Element types of the format whose elements are whole bytes. Only the first three can be used; the
// others are known so that a file holding them beside used ones can be checked and they can be
// named.
struct ElementType {
  std::string_view name;
  std::uint64_t bytes;
};
constexpr ElementType kElementTypes[] = {
    {"BF16", 2},    {"F16", 2}, {"F32", 4},         {"F64", 8},         {"I8", 1},
    {"I16", 2},     {"I32", 4}, {"I64", 8},         {"U8", 1},          {"U16", 2},
    {"U32", 4},     {"U64", 8}, {"BOOL", 1},        {"F8_E4M3", 1},     {"F8_E5M2", 1},
    {"F8_E8M0", 1}, {"C64", 8}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1},
};

const ElementType* element_type(std::string_view name) {
  for (const ElementType& type : kElementTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

std::optional<Dtype> supported_dtype(std::string_view name) {
  if (name == "BF16") return Dtype::kBf16;
  if (name == "F16") return Dtype::kFp16;
  if (name == "F32") return Dtype::kFp32;
  return std::nullopt;
}

bool has_control_character(std::string_view text) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x20 || byte == 0x7F) return true;
    // U+0080 to U+009F
    if (byte == 0xC2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xA0) {
      return true;
    }
  }
  return false;
}

// a * b, or nothing when it does not fit.
std::optional<std::uint64_t> checked_product(std::uint64_t a, std::uint64_t b) {
  if (a != 0 && b > std::numeric_limits<std::uint64_t>::max() / a) return std::nullopt;
  return a * b;
}

// The checks of one header member, with the file and the tensor in every message.
class EntryReader {
 public:
  EntryReader(const std::string& file, std::uint64_t data_begin, std::uint64_t data_bytes)
      : file_(file), data_begin_(data_begin), data_bytes_(data_bytes) {}

  SafetensorsFile::Entry read(const std::string& name, const JsonValue& value) const {
    if (name.empty()) throw usage_error(file_ + ": a tensor with an empty name");
    if (name.size() > 1024) {
      throw usage_error(file_ + ": a tensor name of " + std::to_string(name.size()) +
                        " bytes; at most 1024 are allowed");
    }
    // Names go into messages and listings as they are.
    if (has_control_character(name)) {
      fail(name, "has a control character in its name");
    }
    if (!value.is_object()) fail(name, "must be a JSON object, is " + value.summary());
    for (const auto& [key, member] : value.members()) {
      if (key != "dtype" && key != "shape" && key != "data_offsets") {
        fail(name, "has an unknown field \"" + printable(key) + "\" in the header");
      }
    }
    SafetensorsFile::Entry entry;
    entry.name = name;
    const ElementType& type = read_dtype(name, value, &entry);
    read_shape(name, value, &entry);
    read_offsets(name, value, &entry);

    std::optional<std::uint64_t> bytes = type.bytes;
    // A zero anywhere makes the product zero, whatever the other dimensions are.
    if (std::find(entry.shape.begin(), entry.shape.end(), 0U) != entry.shape.end()) {
      bytes = 0;
    } else {
      for (const std::uint64_t dimension : entry.shape) {
        bytes = checked_product(*bytes, dimension);
        if (!bytes) fail(name, "has a shape " + shape_text(entry.shape) + " whose size overflows");
      }
    }
    if (entry.end - entry.begin != *bytes) {
      fail(name, "has " + std::to_string(entry.end - entry.begin) + " bytes of data, but shape " +
                     shape_text(entry.shape) + " of " + entry.dtype + " needs " +
                     std::to_string(*bytes));
    }
    return entry;
  }

 private:
  [[noreturn]] void fail(const std::string& tensor, const std::string& what) const {
    throw usage_error(file_ + ": tensor \"" + printable(tensor) + "\" " + what);
  }

  const ElementType& read_dtype(const std::string& name, const JsonValue& value,
                                SafetensorsFile::Entry* entry) const {
    const JsonValue* dtype = value.find("dtype");
    if (dtype == nullptr || !dtype->is_string()) fail(name, "has no dtype");
    const ElementType* type = element_type(dtype->text());
    if (type == nullptr) fail(name, "has an unknown dtype " + dtype->summary());
    entry->dtype = dtype->text();
    return *type;
  }

  void read_shape(const std::string& name, const JsonValue& value,
                  SafetensorsFile::Entry* entry) const {
    const JsonValue* shape = value.find("shape");
    if (shape == nullptr || !shape->is_array()) fail(name, "has no shape");
    if (shape->items().size() > SafetensorsFile::kMaxRank) {
      fail(name, "has " + std::to_string(shape->items().size()) + " dimensions; at most " +
                     std::to_string(SafetensorsFile::kMaxRank) + " are allowed");
    }
    for (const JsonValue& item : shape->items()) {
      const auto dimension = item.unsigned_integer();
      if (!dimension) fail(name, "has a dimension that is no size: " + item.summary());
      entry->shape.push_back(*dimension);
    }
  }

  void read_offsets(const std::string& name, const JsonValue& value,
                    SafetensorsFile::Entry* entry) const {
    const JsonValue* offsets = value.find("data_offsets");
    if (offsets == nullptr || !offsets->is_array() || offsets->items().size() != 2) {
      fail(name, "has no data_offsets [begin, end]");
    }
    const auto begin = offsets->items()[0].unsigned_integer();
    const auto end = offsets->items()[1].unsigned_integer();
    if (!begin || !end) fail(name, "has data_offsets that are no sizes: " + offsets->summary());
    if (*begin > *end) fail(name, "has data_offsets that run backwards: " + offsets->summary());
    if (*end > data_bytes_) {
      fail(name, "has data_offsets " + offsets->summary() + " outside the " +
                     std::to_string(data_bytes_) + " bytes of data in the file");
    }
    entry->begin = data_begin_ + *begin;
    entry->end = data_begin_ + *end;
  }

  const std::string& file_;
  std::uint64_t data_begin_;
  std::uint64_t data_bytes_;
};

// The data must be tiled: sorted by offset, each tensor begins where the one before it ended.
void check_tiling(const std::string& file, const std::vector<SafetensorsFile::Entry>& entries,
                  std::uint64_t data_begin, std::uint64_t file_bytes) {
  std::vector<std::size_t> order(entries.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(entries[a].begin, entries[a].end) <
           std::pair(entries[b].begin, entries[b].end);
  });
  std::uint64_t at = data_begin;
  const SafetensorsFile::Entry* previous = nullptr;
  for (const std::size_t index : order) {
    const SafetensorsFile::Entry& entry = entries[index];
    if (entry.begin < at) {
      throw usage_error(file + ": tensors \"" + previous->name + "\" and \"" + entry.name +
                        "\" overlap");
    }
    if (entry.begin > at) {
      throw usage_error(file + ": " + std::to_string(entry.begin - at) +
                        " bytes of data before tensor \"" + entry.name + "\" belong to no tensor");
    }
    at = entry.end;
    previous = &entry;
  }
  if (at != file_bytes) {
    throw usage_error(file + ": " + std::to_string(file_bytes - at) +
                      " bytes after the last tensor belong to no tensor");
  }
}

void check_metadata(const std::string& file, const JsonValue& metadata) {
  if (!metadata.is_object()) throw usage_error(file + ": __metadata__ must be a JSON object");
  for (const auto& [key, value] : metadata.members()) {
    if (!value.is_string()) {
      throw usage_error(file + ": __metadata__ must map strings to strings; \"" + printable(key) +
                        "\" is " + value.type_name());
    }
  }
}

}  // namespace

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile result;
  result.file_ = MappedFile::open(path);
  const std::string file = path.string();
  const std::span<const std::byte> bytes = result.file_.bytes();
  if (bytes.size() < kLengthBytes) {
    throw usage_error(file + ": " + std::to_string(bytes.size()) +
                      " bytes are too few for a safetensors file; is the download complete?");
  }
  std::uint64_t header_bytes = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    header_bytes |= std::uint64_t{std::to_integer<std::uint8_t>(bytes[i])} << (8 * i);
  }
  if (header_bytes > kMaxHeaderBytes) {
    throw usage_error(file + ": a safetensors header of " + std::to_string(header_bytes) +
                      " bytes; the format allows " + std::to_string(kMaxHeaderBytes) +
                      " (is this a safetensors file?)");
  }
  if (header_bytes > bytes.size() - kLengthBytes) {
    throw usage_error(file + ": the header of " + std::to_string(header_bytes) +
                      " bytes does not fit into the file of " + std::to_string(bytes.size()) +
                      " bytes; is the download complete?");
  }
  const std::string_view header(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes,
                                static_cast<std::size_t>(header_bytes));
  if (header.empty() || header.front() != '{') {
    throw usage_error(file + ": the safetensors header does not begin with '{'");
  }
  const JsonValue root = parse_json(header, kHeaderLimits, file + " (header)");
  const std::uint64_t data_begin = kLengthBytes + header_bytes;

  const JsonValue* metadata = root.find("__metadata__");
  const std::size_t tensors = root.members().size() - (metadata != nullptr ? 1 : 0);
  if (tensors > kMaxTensors) {
    throw usage_error(file + ": " + std::to_string(tensors) + " tensors; at most " +
                      std::to_string(kMaxTensors) + " are allowed");
  }
  if (metadata != nullptr) check_metadata(file, *metadata);
  const EntryReader reader(file, data_begin, bytes.size() - data_begin);
  result.entries_.reserve(tensors);
  for (const auto& [name, value] : root.members()) {
    if (&value != metadata) result.entries_.push_back(reader.read(name, value));
  }
  check_tiling(file, result.entries_, data_begin, bytes.size());
  return result;
}

const SafetensorsFile::Entry* SafetensorsFile::find(std::string_view name) const {
  const auto at =
      std::lower_bound(entries_.begin(), entries_.end(), name,
                       [](const Entry& entry, std::string_view key) { return entry.name < key; });
  return at != entries_.end() && at->name == name ? &*at : nullptr;
}

TensorView SafetensorsFile::view(const Entry& entry) {
  const std::optional<Dtype> dtype = supported_dtype(entry.dtype);
  if (!dtype) {
    throw usage_error(path().string() + ": tensor \"" + entry.name + "\" has dtype " + entry.dtype +
                      "; only BF16, F16 and F32 weights are supported");
  }
  TensorView view;
  view.name = entry.name;
  view.dtype = *dtype;
  view.shape = entry.shape;
  view.bytes = static_cast<std::size_t>(entry.end - entry.begin);
  view.data = file_.bytes().data() + entry.begin;
  // Mappings begin on a page, so the address is aligned exactly when the offset is.
  if (entry.begin % dtype_bytes(*dtype) != 0 && view.bytes > 0) {
    copies_.push_back(std::make_unique<std::byte[]>(view.bytes));
    std::memcpy(copies_.back().get(), view.data, view.bytes);
    view.data = copies_.back().get();
  }
  return view;
}

}  // namespace bitwitness
