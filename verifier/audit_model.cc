#include "verifier/audit_model.h"

#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/base/sha256.h"

namespace bitwitness {
namespace {

constexpr std::uint64_t kMaxManifestFileBytes = std::uint64_t{64} << 20;

std::optional<Tokenizer> load_tokenizer(const Model& model, const std::string& dir) {
  if (model.tokenizer_json().empty()) return std::nullopt;
  return Tokenizer::from_json(model.tokenizer_json(), dir + "/tokenizer.json");
}

// A manifest without tensor digests and weights root.
Manifest outline_of(const ModelDescription& model) {
  Manifest out;
  out.arithmetic = model.arithmetic;
  out.family = model.family;
  out.config = model.config;
  if (!model.tokenizer_json.empty()) {
    out.tokenizer_digest = sha256(as_bytes(model.tokenizer_json));
  }
  for (const auto& [name, bytes] : model.tables) {
    out.tables.emplace_back(name, sha256(as_bytes(std::span<const std::byte>(bytes))));
  }
  for (const TensorDescription& tensor : model.tensors) {
    out.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, {}});
  }
  return out;
}

bool same_tensor(const ManifestTensor& a, const ManifestTensor& b) {
  return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape;
}

}  // namespace

AuditModel AuditModel::load(const std::string& dir, const ProgressFn& manifest_progress) {
  Model model = Model::load(dir);
  std::optional<Tokenizer> tokenizer = load_tokenizer(model, dir);
  Manifest manifest = build_manifest(model.describe(), manifest_progress);
  return {std::move(model), std::move(tokenizer), std::move(manifest)};
}

OpenedModel OpenedModel::open(const std::string& dir,
                              const std::optional<std::string>& manifest_file) {
  Model model = Model::load(dir);
  std::optional<Tokenizer> tokenizer = load_tokenizer(model, dir);
  OpenedModel out(std::move(model), std::move(tokenizer));
  out.description_ = out.model_.describe();
  out.outline_ = outline_of(out.description_);
  if (!manifest_file) return out;
  Manifest known;
  try {
    const Bytes bytes =
        read_file(*manifest_file, {kMaxManifestFileBytes, ErrorKind::kUsage, ErrorKind::kUsage});
    known = Manifest::parse(bytes, *manifest_file);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMalformed) throw;
    throw usage_error(std::string("--manifest: ") + error.what() +
                      "; make one with bw-prover manifest DIR --out FILE");
  }
  // With its own digests filled in, the outline must be this manifest.
  const std::vector<std::string> differences = manifest_differences(known, out.manifest(known));
  if (!differences.empty()) {
    throw usage_error("--manifest " + *manifest_file + " is not of the model in " + dir + ": " +
                      differences.front());
  }
  out.outline_ = std::move(known);
  out.manifest_known_ = true;
  return out;
}

Manifest OpenedModel::manifest(const Manifest& claimed) const {
  Manifest out = outline_;
  if (manifest_known_) return out;
  // Both lists are sorted by name.
  std::size_t i = 0;
  for (ManifestTensor& tensor : out.tensors) {
    while (i < claimed.tensors.size() && claimed.tensors[i].name < tensor.name) ++i;
    if (i < claimed.tensors.size() && same_tensor(claimed.tensors[i], tensor)) {
      tensor.root = claimed.tensors[i].root;
    }
  }
  out.weights_root = weights_root(out.tensors);
  return out;
}

std::vector<std::string> OpenedModel::differences(const Manifest& claimed,
                                                  const std::vector<std::size_t>& which) const {
  std::vector<TensorDescription> tensors;
  for (const std::size_t i : which) tensors.push_back(description_.tensors[i]);
  const std::vector<Digest> roots = tensor_roots(tensors);
  Manifest asked, here;  // of these tensors alone
  for (std::size_t k = 0; k < which.size(); ++k) {
    const ManifestTensor& own = outline_.tensors[which[k]];
    if (manifest_known_ && own.root != roots[k]) {
      throw usage_error("tensor " + own.name + " in " + model_.dir().string() +
                        " is not the one of --manifest: the files were changed since it was made, "
                        "or it is of other files");
    }
    here.tensors.push_back({own.name, own.dtype, own.shape, roots[k]});
    asked.tensors.push_back(claimed.tensors.at(which[k]));
  }
  return manifest_differences(asked, here);
}

std::vector<std::string> OpenedModel::layer_differences(const Manifest& claimed,
                                                        std::uint32_t layer) const {
  const std::string head = "model.layers." + std::to_string(layer) + ".";
  std::vector<std::size_t> which;
  for (std::size_t i = 0; i < description_.tensors.size(); ++i) {
    if (description_.tensors[i].name.starts_with(head)) which.push_back(i);
  }
  if (which.empty()) throw std::logic_error("OpenedModel: a layer without tensors");
  return differences(claimed, which);
}

std::vector<std::string> OpenedModel::end_differences(const Manifest& claimed, bool embeddings,
                                                      bool heads) const {
  const ModelWeights& weights = model_.weights();
  std::vector<std::size_t> which;
  for (std::size_t i = 0; i < description_.tensors.size(); ++i) {
    const std::byte* const data = description_.tensors[i].bytes.data();
    if ((embeddings && data == weights.embedding.data) ||
        (heads && (data == weights.head.data || data == weights.final_norm.data))) {
      which.push_back(i);
    }
  }
  return differences(claimed, which);
}

bool same_computation(const Manifest& claimed, const Manifest& local) {
  if (claimed.arithmetic != local.arithmetic || claimed.family != local.family ||
      claimed.config != local.config || claimed.tensors.size() != local.tensors.size()) {
    return false;
  }
  for (std::size_t i = 0; i < local.tensors.size(); ++i) {
    if (!same_tensor(claimed.tensors[i], local.tensors[i])) return false;
  }
  return true;
}

}  // namespace bitwitness
