#include "attest/manifest.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "attest/base/canonical.h"
#include "attest/base/error.h"
#include "attest/base/hash_tree.h"
#include "attest/base/merkle.h"
#include "attest/base/sha256.h"

namespace bitwitness {
namespace {

constexpr std::string_view kMagic = "bitwitness/manifest";
constexpr std::uint16_t kVersion = 1;
constexpr std::string_view kDigestTag = "bitwitness/manifest/v1\n";

constexpr std::uint64_t kMaxManifestBytes = 64 << 20;
constexpr std::uint64_t kMaxName = 512;
constexpr std::uint64_t kMaxConfigKeys = 4096;
constexpr std::uint64_t kMaxConfigKey = 256;
constexpr std::uint64_t kMaxConfigValue = 65536;
constexpr std::uint64_t kMaxTables = 64;
constexpr std::uint64_t kMaxTensors = 100000;
constexpr std::uint32_t kMaxRank = 8;

void write_tensor_identity(Writer& writer, const std::string& name, Dtype dtype,
                           const std::vector<std::uint64_t>& shape) {
  writer.str(name);
  writer.u8(static_cast<std::uint8_t>(dtype));
  writer.u32(static_cast<std::uint32_t>(shape.size()));
  for (const std::uint64_t extent : shape) writer.u64(extent);
}

Bytes tensor_entry(const ManifestTensor& tensor) {
  Writer writer;
  write_tensor_identity(writer, tensor.name, tensor.dtype, tensor.shape);
  writer.digest(tensor.root);
  return writer.take();
}

// Bytes of a tensor; nullopt when it has no element or overflows.
std::optional<std::uint64_t> tensor_bytes(Dtype dtype, const std::vector<std::uint64_t>& shape) {
  std::uint64_t bytes = dtype_bytes(dtype);
  for (const std::uint64_t extent : shape) {
    if (extent == 0 || __builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return bytes;
}

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

bool known_dtype(Dtype dtype) {
  return dtype == Dtype::kBf16 || dtype == Dtype::kFp16 || dtype == Dtype::kFp32;
}

// A model that the format cannot express is refused before hours of hashing.
void check_description(const ModelDescription& model) {
  const auto fail = [](const std::string& problem) { throw usage_error("manifest: " + problem); };
  const auto check_text = [&](const std::string& text, std::uint64_t limit, const char* what) {
    if (text.empty() || text.size() > limit || !is_utf8(as_bytes(text))) {
      fail(std::string(what) + " '" + text.substr(0, 80) + "' is empty, too long or not UTF-8");
    }
  };
  check_text(model.arithmetic, kMaxName, "arithmetic");
  check_text(model.family, kMaxName, "family");
  if (model.config.size() > kMaxConfigKeys || model.tables.size() > kMaxTables ||
      model.tensors.size() > kMaxTensors) {
    fail("too many entries for the format");
  }
  const auto ordered = [&](const std::string& before, const std::string& name, const char* what) {
    if (!(before < name))
      fail(std::string(what) + " '" + name + "' is out of order or twice there");
  };
  for (std::size_t i = 0; i < model.config.size(); ++i) {
    check_text(model.config[i].first, kMaxConfigKey, "config key");
    if (model.config[i].second.size() > kMaxConfigValue ||
        !is_utf8(as_bytes(model.config[i].second))) {
      fail("config value of '" + model.config[i].first + "' is too long or not UTF-8");
    }
    if (i > 0) ordered(model.config[i - 1].first, model.config[i].first, "config key");
  }
  for (std::size_t i = 0; i < model.tables.size(); ++i) {
    check_text(model.tables[i].first, kMaxName, "table");
    if (i > 0) ordered(model.tables[i - 1].first, model.tables[i].first, "table");
  }
  if (model.tensors.empty()) fail("the model has no tensors");
  for (std::size_t i = 0; i < model.tensors.size(); ++i) {
    const TensorDescription& tensor = model.tensors[i];
    check_text(tensor.name, kMaxName, "tensor");
    if (i > 0) ordered(model.tensors[i - 1].name, tensor.name, "tensor");
    if (!known_dtype(tensor.dtype)) fail("tensor '" + tensor.name + "' has an unknown type");
    if (tensor.shape.size() > kMaxRank) fail("tensor '" + tensor.name + "' has too many axes");
    if (tensor_bytes(tensor.dtype, tensor.shape) != std::optional(tensor.bytes.size())) {
      fail("tensor '" + tensor.name + "' of shape " + shape_text(tensor.shape) + " has " +
           std::to_string(tensor.bytes.size()) + " bytes, which do not fit the shape");
    }
  }
}

std::uint64_t chunk_count(std::uint64_t bytes) {
  return (bytes + kTensorChunkBytes - 1) / kTensorChunkBytes;
}

Digest chunk_digest_of(const TensorDescription& tensor, std::uint64_t index) {
  const ByteView bytes = as_bytes(tensor.bytes);
  const std::uint64_t begin = index * kTensorChunkBytes;
  return tensor_chunk_digest(
      tensor.name, tensor.dtype, tensor.shape, index, chunk_count(bytes.size()),
      bytes.subspan(begin, std::min(kTensorChunkBytes, bytes.size() - begin)));
}

}  // namespace

Digest tensor_chunk_digest(const std::string& name, Dtype dtype,
                           const std::vector<std::uint64_t>& shape, std::uint64_t chunk_index,
                           std::uint64_t chunk_count, ByteView chunk) {
  Writer prefix;
  prefix.u8(static_cast<std::uint8_t>(LeafType::kTensorChunk));
  prefix.u8(kLeafVersion);
  write_tensor_identity(prefix, name, dtype, shape);
  prefix.u64(chunk_index);
  prefix.u64(chunk_count);
  prefix.u32(static_cast<std::uint32_t>(chunk.size()));
  return sha256({prefix.data(), chunk});
}

std::vector<Digest> tensor_roots(std::span<const TensorDescription> tensors,
                                 const ProgressFn& progress, unsigned threads) {
  // One flat list of chunks, handed out in order: large tensors spread over all threads.
  std::vector<std::vector<Digest>> chunks(tensors.size());
  std::vector<std::uint64_t> first_chunk;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    first_chunk.push_back(total);
    chunks[i].resize(chunk_count(tensors[i].bytes.size()));
    total += chunks[i].size();
  }
  std::atomic<std::uint64_t> next{0};
  std::atomic<std::uint64_t> done{0};
  std::mutex mutex;  // guards progress and failure
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      while (true) {
        const std::uint64_t chunk = next.fetch_add(1);
        if (chunk >= total) return;
        const auto after = std::upper_bound(first_chunk.begin(), first_chunk.end(), chunk);
        const auto tensor = static_cast<std::size_t>(after - first_chunk.begin() - 1);
        const std::uint64_t index = chunk - first_chunk[tensor];
        chunks[tensor][index] = chunk_digest_of(tensors[tensor], index);
        const std::uint64_t finished = done.fetch_add(1) + 1;
        if (progress && (finished % 64 == 0 || finished == total)) {
          const std::lock_guard<std::mutex> lock(mutex);
          progress(finished, total);
        }
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!failure) failure = std::current_exception();
      next = total;
    }
  };
  if (threads == 0) threads = std::max(1U, std::thread::hardware_concurrency());
  threads = static_cast<unsigned>(std::min<std::uint64_t>(threads, total));
  {
    std::vector<std::jthread> pool;
    for (unsigned i = 1; i < threads; ++i) pool.emplace_back(work);
    work();
  }
  if (failure) std::rethrow_exception(failure);

  std::vector<Digest> roots;
  roots.reserve(tensors.size());
  for (const std::vector<Digest>& leaves : chunks) roots.push_back(merkle_root(leaves));
  return roots;
}

Digest tensor_root(const TensorDescription& tensor) {
  return tensor_roots({&tensor, 1}, {}, 1).front();
}

Digest weights_root(const std::vector<ManifestTensor>& tensors) {
  MerkleAccumulator tree;
  for (const ManifestTensor& tensor : tensors) tree.append(merkle_leaf(tensor_entry(tensor)));
  return tree.root();
}

Manifest build_manifest(const ModelDescription& model, const ProgressFn& progress,
                        unsigned threads) {
  check_description(model);
  const std::vector<Digest> roots = tensor_roots(model.tensors, progress, threads);

  Manifest manifest;
  manifest.arithmetic = model.arithmetic;
  manifest.family = model.family;
  manifest.config = model.config;
  if (!model.tokenizer_json.empty()) {
    manifest.tokenizer_digest = sha256(as_bytes(model.tokenizer_json));
  }
  for (const auto& [name, bytes] : model.tables) {
    manifest.tables.emplace_back(name, sha256(as_bytes(std::span<const std::byte>(bytes))));
  }
  for (std::size_t i = 0; i < model.tensors.size(); ++i) {
    const TensorDescription& tensor = model.tensors[i];
    manifest.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, roots[i]});
  }
  manifest.weights_root = weights_root(manifest.tensors);
  return manifest;
}

Bytes Manifest::canonical_bytes() const {
  Writer writer;
  writer.str(kMagic);
  writer.u16(kVersion);
  writer.str(arithmetic);
  writer.str(family);
  writer.u32(static_cast<std::uint32_t>(config.size()));
  for (const auto& [key, value] : config) {
    writer.str(key);
    writer.str(value);
  }
  writer.u8(tokenizer_digest ? 1 : 0);
  if (tokenizer_digest) writer.digest(*tokenizer_digest);
  writer.u32(static_cast<std::uint32_t>(tables.size()));
  for (const auto& [name, digest] : tables) {
    writer.str(name);
    writer.digest(digest);
  }
  writer.u32(static_cast<std::uint32_t>(tensors.size()));
  for (const ManifestTensor& tensor : tensors) writer.raw(tensor_entry(tensor));
  writer.digest(weights_root);
  return writer.take();
}

Digest Manifest::digest() const {
  return sha256({as_bytes(kDigestTag), canonical_bytes()});
}

Manifest Manifest::parse(ByteView bytes, const std::string& document) {
  Reader reader(bytes, document);
  if (bytes.size() > kMaxManifestBytes) reader.fail("manifest", "more than 64 MiB");
  reader.expect_head(kMagic, kVersion);
  const auto name = [&](std::uint64_t limit, const char* field) {
    std::string text = reader.str(limit, field);
    if (text.empty()) reader.fail(field, "empty");
    return text;
  };
  const auto ordered = [&](const std::string& before, const std::string& text, const char* field) {
    if (!(before < text)) reader.fail(field, "'" + text + "' is out of order or twice there");
  };
  Manifest out;
  out.arithmetic = name(kMaxName, "arithmetic");
  out.family = name(kMaxName, "family");
  const std::uint32_t config_count = reader.count(kMaxConfigKeys, 8, "config count");
  for (std::uint32_t i = 0; i < config_count; ++i) {
    std::string key = name(kMaxConfigKey, "config key");
    if (i > 0) ordered(out.config.back().first, key, "config key");
    std::string value = reader.str(kMaxConfigValue, "config value");
    out.config.emplace_back(std::move(key), std::move(value));
  }
  const std::uint8_t has_tokenizer = reader.u8("tokenizer flag");
  if (has_tokenizer > 1) reader.fail("tokenizer flag", "neither 0 nor 1");
  if (has_tokenizer == 1) out.tokenizer_digest = reader.digest("tokenizer digest");
  const std::uint32_t table_count = reader.count(kMaxTables, 36, "table count");
  for (std::uint32_t i = 0; i < table_count; ++i) {
    std::string table = name(kMaxName, "table name");
    if (i > 0) ordered(out.tables.back().first, table, "table name");
    out.tables.emplace_back(std::move(table), reader.digest("table digest"));
  }
  const std::uint32_t tensor_count = reader.count(kMaxTensors, 41, "tensor count");
  if (tensor_count == 0) reader.fail("tensor count", "a model without tensors");
  for (std::uint32_t i = 0; i < tensor_count; ++i) {
    ManifestTensor tensor;
    tensor.name = name(kMaxName, "tensor name");
    if (i > 0) ordered(out.tensors.back().name, tensor.name, "tensor name");
    tensor.dtype = static_cast<Dtype>(reader.u8("tensor dtype"));
    if (!known_dtype(tensor.dtype)) reader.fail("tensor dtype", "unknown type");
    const std::uint32_t rank = reader.count(kMaxRank, 8, "tensor rank");
    for (std::uint32_t k = 0; k < rank; ++k) tensor.shape.push_back(reader.u64("tensor extent"));
    if (!tensor_bytes(tensor.dtype, tensor.shape)) {
      reader.fail("tensor extent", "the shape of '" + tensor.name + "' is empty or overflows");
    }
    tensor.root = reader.digest("tensor root");
    out.tensors.push_back(std::move(tensor));
  }
  out.weights_root = reader.digest("weights root");
  if (out.weights_root != bitwitness::weights_root(out.tensors)) {
    reader.fail("weights root", "is not the root over the tensors listed");
  }
  reader.expect_end();
  return out;
}

std::vector<std::string> manifest_differences(const Manifest& claimed, const Manifest& local) {
  std::vector<std::string> out;
  const auto value = [&](const std::string& what, const std::string& a, const std::string& b) {
    if (a != b) out.push_back(what + ": claimed " + a + ", here " + b);
  };
  value("arithmetic", claimed.arithmetic, local.arithmetic);
  value("family", claimed.family, local.family);

  // Both lists are sorted: one merge pass names what is on one side only and what differs.
  const auto merge = [&](const auto& a, const auto& b, const std::string& what, const auto& name_of,
                         const auto& compare) {
    std::size_t i = 0, j = 0;
    while (i < a.size() || j < b.size()) {
      if (j == b.size() || (i < a.size() && name_of(a[i]) < name_of(b[j]))) {
        out.push_back(what + " " + name_of(a[i++]) + ": claimed, but not here");
      } else if (i == a.size() || name_of(b[j]) < name_of(a[i])) {
        out.push_back(what + " " + name_of(b[j++]) + ": here, but not claimed");
      } else {
        compare(a[i++], b[j++]);
      }
    }
  };
  const auto first = [](const auto& pair) -> const std::string& { return pair.first; };
  merge(claimed.config, local.config, "config", first,
        [&](const auto& a, const auto& b) { value("config " + a.first, a.second, b.second); });
  const auto tokenizer = [](const Manifest& manifest) {
    return manifest.tokenizer_digest ? manifest.tokenizer_digest->hex() : std::string("none");
  };
  value("tokenizer.json", tokenizer(claimed), tokenizer(local));
  merge(claimed.tables, local.tables, "table", first, [&](const auto& a, const auto& b) {
    value("table " + a.first, a.second.hex(), b.second.hex());
  });
  merge(
      claimed.tensors, local.tensors, "tensor",
      [](const ManifestTensor& tensor) -> const std::string& { return tensor.name; },
      [&](const ManifestTensor& a, const ManifestTensor& b) {
        value("type of tensor " + a.name, dtype_name(a.dtype), dtype_name(b.dtype));
        value("shape of tensor " + a.name, shape_text(a.shape), shape_text(b.shape));
        if (a.dtype == b.dtype && a.shape == b.shape) {
          value("weights of tensor " + a.name, a.root.hex(), b.root.hex());
        }
      });
  if (out.empty() && claimed != local) {
    value("weights root", claimed.weights_root.hex(), local.weights_root.hex());
  }
  return out;
}

}  // namespace bitwitness
