// Test helper: writes safetensors files and model directories, well-formed or not. Header-only and
// independent of the reader under test.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bitwitness::test {

// A fresh directory under the system's temporary one, removed with everything in it.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "bw-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  if (!out) throw std::runtime_error("cannot write " + path.string());
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

struct RawTensor {
  std::string name;                  // written between quotes as it is: no quotes, no backslashes
  std::string dtype;                 // "BF16", "F16", "F32", ...
  std::vector<std::uint64_t> shape;  //
  std::string data;                  // raw little-endian elements
};

// A file from a header text and data, with nothing checked or padded.
inline std::string raw_safetensors(std::string_view header, std::string_view data) {
  std::string file;
  for (int shift = 0; shift < 64; shift += 8) {
    file += static_cast<char>((static_cast<std::uint64_t>(header.size()) >> shift) & 0xFF);
  }
  file.append(header);
  file.append(data);
  return file;
}

// "name":{"dtype":...,"shape":[...],"data_offsets":[begin,end]}
inline std::string header_member(const std::string& name, const std::string& dtype,
                                 const std::vector<std::uint64_t>& shape, std::uint64_t begin,
                                 std::uint64_t end) {
  std::string text = "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":[)";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? "," : "") + std::to_string(shape[i]);
  }
  return text + R"(],"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}

// A file as stock writers make it: tensors in the order given, header padded with spaces to a
// multiple of `alignment` bytes.
inline std::string safetensors_bytes(const std::vector<RawTensor>& tensors,
                                     std::size_t alignment = 8) {
  std::string header = R"({"__metadata__":{"format":"pt"})";
  std::string data;
  for (const RawTensor& tensor : tensors) {
    header += "," + header_member(tensor.name, tensor.dtype, tensor.shape, data.size(),
                                  data.size() + tensor.data.size());
    data += tensor.data;
  }
  header += "}";
  while (header.size() % alignment != 0) header += ' ';
  return raw_safetensors(header, data);
}

// dir/model.safetensors with all tensors.
inline void write_model(const std::filesystem::path& dir, std::string_view config_json,
                        const std::vector<RawTensor>& tensors) {
  write_file(dir / "config.json", config_json);
  write_file(dir / "model.safetensors", safetensors_bytes(tensors));
}

// dir/model-0000i-of-0000n.safetensors with the tensors dealt out in turn, and the index.
inline void write_sharded_model(const std::filesystem::path& dir, std::string_view config_json,
                                const std::vector<RawTensor>& tensors, std::size_t shards) {
  write_file(dir / "config.json", config_json);
  std::string map;
  for (std::size_t shard = 0; shard < shards; ++shard) {
    const std::string name =
        "model-" + std::to_string(shard + 1) + "-of-" + std::to_string(shards) + ".safetensors";
    std::vector<RawTensor> part;
    for (std::size_t i = shard; i < tensors.size(); i += shards) {
      part.push_back(tensors[i]);
      map += (map.empty() ? "\"" : ",\"") + tensors[i].name + "\":\"" + name + "\"";
    }
    write_file(dir / name, safetensors_bytes(part));
  }
  write_file(dir / "model.safetensors.index.json",
             R"({"metadata":{"total_size":1},"weight_map":{)" + map + "}}");
}

}  // namespace bitwitness::test
