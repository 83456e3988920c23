// The manifest: what is claimed to run, independent of device and build (RECORD_FORMAT.md
// "Manifest").
#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/base/dtype.h"
#include "attest/base/model_description.h"
#include "attest/base/progress.h"

namespace bitwitness {

constexpr std::uint64_t kTensorChunkBytes = 1 << 20;

struct ManifestTensor {
  std::string name;
  Dtype dtype = Dtype::kBf16;
  std::vector<std::uint64_t> shape;
  Digest root;  // over the tensor's chunks
  friend bool operator==(const ManifestTensor&, const ManifestTensor&) = default;
};

struct Manifest {
  std::string arithmetic;
  std::string family;
  std::vector<std::pair<std::string, std::string>> config;  // sorted by key, unique
  std::optional<Digest> tokenizer_digest;                   // SHA-256 of tokenizer.json
  std::vector<std::pair<std::string, Digest>> tables;  // sorted by name; SHA-256 of the raw bytes
  std::vector<ManifestTensor> tensors;                 // sorted by name, unique
  Digest weights_root;                                 // over the tensor entries

  Bytes canonical_bytes() const;
  Digest digest() const;  // domain-tagged SHA-256 of the canonical bytes

  // Strict: limits, order, uniqueness, recomputed weights root. Any flaw is malformed and named.
  static Manifest parse(ByteView bytes, const std::string& document);
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

// Hashes the model on all cores (`threads` 0) or on `threads` threads. A description that is not
// canonical (order, duplicates, sizes that do not fit the shape) is a usage Error naming the entry.
Manifest build_manifest(const ModelDescription& model, const ProgressFn& progress = {},
                        unsigned threads = 0);

// Roots of tensors whose bytes fit their shapes, in order, hashed on all cores (`threads` 0) or on
// `threads` threads; progress counts chunks. What an audit of some layers compares with the
// manifest's entries.
std::vector<Digest> tensor_roots(std::span<const TensorDescription> tensors,
                                 const ProgressFn& progress = {}, unsigned threads = 0);
// Root of one tensor: tree over its chunks of kTensorChunkBytes.
Digest tensor_root(const TensorDescription& tensor);
// The chunk digest itself, for chunk proofs.
Digest tensor_chunk_digest(const std::string& name, Dtype dtype,
                           const std::vector<std::uint64_t>& shape, std::uint64_t chunk_index,
                           std::uint64_t chunk_count, ByteView chunk);
Digest weights_root(const std::vector<ManifestTensor>& tensors);

// Differences in words, `claimed` against `local`; empty if and only if the two are equal.
std::vector<std::string> manifest_differences(const Manifest& claimed, const Manifest& local);

}  // namespace bitwitness
