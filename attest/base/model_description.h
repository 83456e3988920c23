// What a manifest is computed from: the model as it is on disk, in terms that do not depend on who
// loads it. kernels/ fills it (Model::describe), attest/ hashes it (build_manifest); it lives here
// because neither folder includes the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attest/base/dtype.h"

namespace bitwitness {

struct TensorDescription {
  std::string name;                  // as in the safetensors header
  Dtype dtype;                       //
  std::vector<std::uint64_t> shape;  // row major, outermost first
  std::span<const std::byte> bytes;  // raw little-endian elements, product(shape) * dtype_bytes
};

struct ModelDescription {
  std::string arithmetic;  // name of the arithmetic contract, e.g. "fma32"
  std::string family;      // "llama", "qwen3"
  // Every parameter that takes part in the computation, as canonical text (integers in decimal,
  // reals as C99 hexadecimal floats of the exact value used), sorted by key, keys unique.
  std::vector<std::pair<std::string, std::string>> config;
  std::span<const std::byte> tokenizer_json;  // raw file, empty when the model has none
  // Tables made on the host by a specified sequence (RoPE cosines and sines): name -> raw bytes.
  std::vector<std::pair<std::string, std::vector<std::byte>>> tables;
  std::vector<TensorDescription> tensors;  // sorted by name, names unique
};

}  // namespace bitwitness
