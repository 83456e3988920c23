#include "kernels/model/model.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "attest/base/error.h"
#include "kernels/contract.h"
#include "kernels/model/json.h"
#include "kernels/rope_tables.h"

namespace bitwitness {
namespace {

constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";
constexpr std::string_view kHeadName = "lm_head.weight";
constexpr std::string_view kEmbeddingName = "model.embed_tokens.weight";
constexpr JsonLimits kIndexLimits{std::size_t{64} << 20, 8, 400'000};
constexpr std::size_t kMaxShards = 4096;

// Present under that name, as whatever: what it is, opening it says.
bool present(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::exists(std::filesystem::symlink_status(path, error));
}

void check_directory(const std::filesystem::path& dir) {
  std::error_code error;
  const auto status = std::filesystem::status(dir, error);
  if (std::filesystem::is_directory(status)) return;
  if (std::filesystem::exists(status)) {
    throw usage_error(dir.string() + ": is not a directory; a model directory is needed here");
  }
  throw usage_error(dir.string() + ": cannot open the model directory: " +
                    (error ? error.message() : std::string("it does not exist")));
}

// A name that stays inside the directory on every system.
bool is_plain_file_name(std::string_view name) {
  if (name.empty() || name.size() > 255 || name.front() == '.') return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte > 0x20 && byte != 0x7F && c != '/' && c != '\\' && c != ':';
  });
}

// Opens the shards of an index and checks that index and shards agree in both directions.
std::vector<SafetensorsFile> open_shards(const std::filesystem::path& dir) {
  const std::filesystem::path index_path = dir / kIndexFile;
  const std::string index_name = index_path.string();
  const std::string text = read_file_bounded(index_path, kIndexLimits.max_bytes);
  const JsonValue root = parse_json(text, kIndexLimits, index_name);
  const JsonValue* map = root.find("weight_map");
  if (map == nullptr || !map->is_object()) {
    throw usage_error(index_name + ": has no weight_map object");
  }
  if (map->members().size() > SafetensorsFile::kMaxTensors) {
    throw usage_error(index_name + ": lists " + std::to_string(map->members().size()) +
                      " tensors; at most " + std::to_string(SafetensorsFile::kMaxTensors) +
                      " are allowed");
  }
  std::map<std::string, std::vector<std::string>> by_shard;  // shard -> its tensors, ascending
  for (const auto& [tensor, shard] : map->members()) {
    if (!shard.is_string() || !is_plain_file_name(shard.text())) {
      throw usage_error(index_name + ": tensor \"" + printable(tensor) + "\" is mapped to " +
                        shard.summary() +
                        ", which is not the plain name of a file in this directory");
    }
    by_shard[shard.text()].push_back(tensor);
  }
  if (by_shard.empty()) throw usage_error(index_name + ": lists no tensor");
  if (by_shard.size() > kMaxShards) {
    throw usage_error(index_name + ": names " + std::to_string(by_shard.size()) +
                      " shards; at most " + std::to_string(kMaxShards) + " are allowed");
  }
  std::vector<SafetensorsFile> files;
  for (const auto& [shard, tensors] : by_shard) {
    if (!present(dir / shard)) {
      throw usage_error((dir / shard).string() + ": this shard is missing; " + index_name +
                        " maps tensor \"" + printable(tensors.front()) + "\" to it");
    }
    const SafetensorsFile& file = files.emplace_back(SafetensorsFile::open(dir / shard));
    for (const std::string& tensor : tensors) {
      if (file.find(tensor) == nullptr) {
        throw usage_error(file.path().string() + ": tensor \"" + printable(tensor) +
                          "\" is missing here, but " + index_name + " maps it to this file");
      }
    }
    for (const SafetensorsFile::Entry& entry : file.entries()) {
      if (!std::binary_search(tensors.begin(), tensors.end(), entry.name)) {
        throw usage_error(file.path().string() + ": tensor \"" + printable(entry.name) +
                          "\" is in this file, but " + index_name + " does not map it here");
      }
    }
  }
  return files;
}

std::vector<SafetensorsFile> open_weights(const std::filesystem::path& dir) {
  const bool single = present(dir / kSingleFile);
  const bool sharded = present(dir / kIndexFile);
  if (single && sharded) {
    throw usage_error(dir.string() + ": has both " + std::string(kSingleFile) + " and " +
                      std::string(kIndexFile) + "; which weights count is not defined: remove one");
  }
  if (sharded) return open_shards(dir);
  if (!single) {
    throw usage_error(dir.string() + ": has neither " + std::string(kSingleFile) + " nor " +
                      std::string(kIndexFile) + "; weights must be in safetensors format");
  }
  std::vector<SafetensorsFile> files;
  files.push_back(SafetensorsFile::open(dir / kSingleFile));
  return files;
}

// `model.layers.<digits>.self_attn.rotary_emb.inv_freq`: a buffer that old writers saved; the
// frequencies follow from the configuration.
bool is_inv_freq_buffer(std::string_view name) {
  constexpr std::string_view kBefore = "model.layers.";
  constexpr std::string_view kAfter = ".self_attn.rotary_emb.inv_freq";
  if (name.size() <= kBefore.size() + kAfter.size() || !name.starts_with(kBefore) ||
      !name.ends_with(kAfter)) {
    return false;
  }
  name.remove_prefix(kBefore.size());
  name.remove_suffix(kAfter.size());
  return std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// The tensors of all files by name. take() hands one out, checked; what was not taken is extra.
class TensorPool {
 public:
  TensorPool(std::vector<SafetensorsFile>* files, const std::filesystem::path& dir) : dir_(dir) {
    for (SafetensorsFile& file : *files) {
      for (const SafetensorsFile::Entry& entry : file.entries()) {
        // Within a file names are unique; across shards the index saw to it.
        places_.emplace(entry.name, Place{&file, &entry, false});
      }
    }
  }

  TensorView take(const std::string& name, std::vector<std::uint64_t> shape) {
    const auto at = places_.find(name);
    if (at == places_.end()) {
      throw usage_error(dir_.string() + ": tensor \"" + name +
                        "\" is missing; config.json calls for it with shape " + shape_text(shape));
    }
    Place& place = at->second;
    if (place.entry->shape != shape) {
      throw usage_error(place.file->path().string() + ": tensor \"" + name + "\" has shape " +
                        shape_text(place.entry->shape) + "; config.json calls for " +
                        shape_text(shape));
    }
    place.taken = true;
    return place.file->view(*place.entry);
  }

  bool has(std::string_view name) const { return places_.find(name) != places_.end(); }

  void refuse_extras() const {
    for (const auto& [name, place] : places_) {
      if (place.taken || is_inv_freq_buffer(name)) continue;
      throw usage_error(place.file->path().string() + ": tensor \"" + std::string(name) +
                        "\" is extra: the model that config.json describes has no such tensor");
    }
  }

 private:
  struct Place {
    SafetensorsFile* file;
    const SafetensorsFile::Entry* entry;
    bool taken;
  };
  const std::filesystem::path& dir_;
  std::map<std::string_view, Place> places_;
};

// Takes the tensors of a model from the pool in the order of the computation.
class WeightReader {
 public:
  WeightReader(TensorPool* pool, std::vector<TensorView>* used) : pool_(pool), used_(used) {}

  Matrix matrix(const std::string& name, std::int64_t rows, std::int64_t cols) {
    const TensorView& view = keep(
        pool_->take(name, {static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols)}));
    return Matrix{view.dtype, rows, cols, view.data};
  }

  Vector vector(const std::string& name, std::int64_t size) {
    const TensorView& view = keep(pool_->take(name, {static_cast<std::uint64_t>(size)}));
    return Vector{view.dtype, size, view.data};
  }

  LayerWeights layer(const ModelConfig& config, std::int64_t index) {
    const std::string at = "model.layers." + std::to_string(index) + ".";
    const std::int64_t d = config.hidden_size;
    const std::int64_t f = config.intermediate_size;
    LayerWeights layer;
    layer.input_norm = vector(at + "input_layernorm.weight", d);
    layer.q = matrix(at + "self_attn.q_proj.weight", config.q_size(), d);
    layer.k = matrix(at + "self_attn.k_proj.weight", config.kv_size(), d);
    layer.v = matrix(at + "self_attn.v_proj.weight", config.kv_size(), d);
    if (config.qk_norm) {
      layer.q_norm = vector(at + "self_attn.q_norm.weight", config.head_dim);
      layer.k_norm = vector(at + "self_attn.k_norm.weight", config.head_dim);
    }
    layer.o = matrix(at + "self_attn.o_proj.weight", d, config.q_size());
    layer.post_attention_norm = vector(at + "post_attention_layernorm.weight", d);
    layer.gate = matrix(at + "mlp.gate_proj.weight", f, d);
    layer.up = matrix(at + "mlp.up_proj.weight", f, d);
    layer.down = matrix(at + "mlp.down_proj.weight", d, f);
    return layer;
  }

 private:
  const TensorView& keep(TensorView view) { return used_->emplace_back(std::move(view)); }

  TensorPool* pool_;
  std::vector<TensorView>* used_;
};

// Calls body(bytes) for every matrix of a layer.
template <class Body>
void for_matrices(const LayerWeights& weights, const Body& body) {
  for (const Matrix* matrix : {&weights.q, &weights.k, &weights.v, &weights.o, &weights.gate,
                               &weights.up, &weights.down}) {
    const std::size_t bytes = static_cast<std::size_t>(matrix->rows) *
                              static_cast<std::size_t>(matrix->cols) * dtype_bytes(matrix->dtype);
    body(std::span<const std::byte>{matrix->data, bytes});
  }
}

}  // namespace

Model Model::load(const std::filesystem::path& dir) {
  check_directory(dir);
  Model model;
  model.dir_ = dir;
  model.config_ = load_model_config(dir);
  if (present(dir / "tokenizer.json")) {
    model.tokenizer_ = MappedFile::open(dir / "tokenizer.json");
    if (model.tokenizer_.bytes().empty()) {
      throw usage_error((dir / "tokenizer.json").string() +
                        ": is empty; complete it, or remove it to work with token ids alone");
    }
  }
  model.files_ = open_weights(dir);

  const ModelConfig& config = model.config_;
  TensorPool pool(&model.files_, model.dir_);
  WeightReader reader(&pool, &model.tensors_);
  ModelWeights& weights = model.weights_;
  weights.embedding =
      reader.matrix(std::string(kEmbeddingName), config.vocab_size, config.hidden_size);
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    weights.layers.push_back(reader.layer(config, layer));
  }
  weights.final_norm = reader.vector("model.norm.weight", config.hidden_size);
  if (!config.tied_head) {
    weights.head = reader.matrix(std::string(kHeadName), config.vocab_size, config.hidden_size);
  } else {
    weights.head = weights.embedding;
    if (pool.has(kHeadName)) {
      // A copy of the embedding is redundant; anything else contradicts the configuration.
      const TensorView head =
          pool.take(std::string(kHeadName), {static_cast<std::uint64_t>(config.vocab_size),
                                             static_cast<std::uint64_t>(config.hidden_size)});
      if (head.dtype != weights.embedding.dtype ||
          std::memcmp(head.data, weights.embedding.data, head.bytes) != 0) {
        throw usage_error(dir.string() + ": tensor \"" + std::string(kHeadName) +
                          "\" differs from the embedding, but config.json ties them "
                          "(tie_word_embeddings = true)");
      }
    }
  }
  pool.refuse_extras();
  std::sort(model.tensors_.begin(), model.tensors_.end(),
            [](const TensorView& a, const TensorView& b) { return a.name < b.name; });
  return model;
}

ModelDescription Model::describe() const {
  ModelDescription description;
  description.arithmetic = contract::kArithmeticName;
  description.family = config_.family_name();
  description.config = config_.canonical();
  description.tokenizer_json = tokenizer_json();
  description.tables = rope_table_bytes(config_);
  description.tensors.reserve(tensors_.size());
  for (const TensorView& tensor : tensors_) {
    description.tensors.push_back(
        TensorDescription{tensor.name, tensor.dtype, tensor.shape, {tensor.data, tensor.bytes}});
  }
  return description;
}

void Model::check_unchanged() const {
  const auto refuse = [](const std::filesystem::path& path) {
    throw infrastructure_error(
        path.string() +
        ": was changed while it was in use, so the result means nothing and is "
        "not given; leave the model's files alone and run again");
  };
  for (const SafetensorsFile& file : files_) {
    if (file.changed()) refuse(file.path());
  }
  if (tokenizer_.changed()) refuse(tokenizer_.path());
}

void Model::prefetch_layer(std::int64_t layer) const {
  for_matrices(weights_.layers.at(static_cast<std::size_t>(layer)), prefetch_mapped);
}

void Model::release_layer(std::int64_t layer) const {
  for_matrices(weights_.layers.at(static_cast<std::size_t>(layer)), release_mapped);
}

}  // namespace bitwitness
