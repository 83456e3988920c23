// Weight files in safetensors format: u64 little-endian header length, JSON header, data.
//
// The whole header is checked before any tensor is handed out: length (<= 100 MB and inside the
// file), first byte '{', strict JSON without duplicate names (1 to 1024 bytes, no control
// characters), at most 100,000 tensors of at most 8 dimensions, known element type, begin <= end <=
// data size, end - begin == product(shape) * element size, no overlap, no hole, and the last tensor
// ends where the file ends. `__metadata__` must map strings to strings; its content is ignored.
// Source: the format's README and its reference reader.
//
// Errors: kUsage, naming file and tensor; kInfrastructure if the file cannot be mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "attest/base/dtype.h"
#include "kernels/model/mapped_file.h"

namespace bitwitness {

// One tensor of a supported type. `data` is aligned to its element size and little-endian.
struct TensorView {
  std::string name;
  Dtype dtype = Dtype::kFp32;
  std::vector<std::uint64_t> shape;  // row major, outermost first; empty for a scalar
  const std::byte* data = nullptr;   // product(shape) elements; may be null when bytes == 0
  std::size_t bytes = 0;
};

// "[2048, 192]", for messages.
std::string shape_text(const std::vector<std::uint64_t>& shape);

class SafetensorsFile {
 public:
  static constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
  static constexpr std::size_t kMaxTensors = 100'000;
  static constexpr std::size_t kMaxRank = 8;

  struct Entry {
    std::string name;
    std::string dtype;  // as written: "BF16", "F16", "F32", or another known type
    std::vector<std::uint64_t> shape;
    std::uint64_t begin = 0;  // byte offsets from the start of the file
    std::uint64_t end = 0;
  };

  static SafetensorsFile open(const std::filesystem::path& path);

  // Sorted by name, names unique.
  const std::vector<Entry>& entries() const { return entries_; }
  const Entry* find(std::string_view name) const;
  const std::filesystem::path& path() const { return file_.path(); }
  bool changed() const { return file_.changed(); }  // as MappedFile::changed

  // The tensor's elements, in place where the file has them aligned. The format does not promise
  // alignment: a tensor that starts off its element size is copied once into memory that this
  // object owns (files of current writers never need that). Valid while this object lives, also
  // when moved. Throws kUsage, naming the tensor, when its type is none of BF16, F16, F32. Not
  // thread-safe.
  TensorView view(const Entry& entry);

 private:
  MappedFile file_;
  std::vector<Entry> entries_;
  std::vector<std::unique_ptr<std::byte[]>> copies_;
};

}  // namespace bitwitness
