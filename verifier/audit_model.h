// The auditor's own copy of the model, and how it compares with the manifest that a record claims.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "attest/base/progress.h"
#include "attest/manifest.h"
#include "kernels/model/model.h"
#include "kernels/tokenizer/tokenizer.h"

namespace bitwitness {

// Hashed once and in full, and used for any number of records.
struct AuditModel {
  Model model;
  std::optional<Tokenizer> tokenizer;
  Manifest manifest;
  static AuditModel load(const std::string& dir, const ProgressFn& manifest_progress = {});
};

// Opened, and hashed only where an audit looks: for models that are too large to be read in full.
class OpenedModel {
 public:
  // `manifest`: canonical bytes of this model's manifest, made by the auditor earlier
  // (`bw-prover manifest DIR --out FILE`); a usage Error when they are none, or not of a model with
  // this configuration, tokenizer, tables and tensors. Their tensor digests are believed where
  // nothing is hashed.
  static OpenedModel open(const std::string& dir,
                          const std::optional<std::string>& manifest_file = std::nullopt);

  const Model& model() const { return model_; }
  const std::optional<Tokenizer>& tokenizer() const { return tokenizer_; }
  bool knows_all_weights() const { return manifest_known_; }

  // The local manifest as far as it is known without hashing weights; tensor digests that are not
  // known are those of `claimed`, so that only known differences show.
  Manifest manifest(const Manifest& claimed) const;

  // Hashes the tensors of one layer, or those that ends use (embedding rows; final norm and head),
  // and names those whose digests are not `claimed`'s, as manifest_differences does. `claimed` has
  // tensors of the same names, types and shapes. With a manifest of the auditor's own, a tensor
  // that is not its is a usage Error: one's own files do not belong together.
  std::vector<std::string> layer_differences(const Manifest& claimed, std::uint32_t layer) const;
  std::vector<std::string> end_differences(const Manifest& claimed, bool embeddings,
                                           bool heads) const;

 private:
  OpenedModel(Model model, std::optional<Tokenizer> tokenizer)
      : model_(std::move(model)), tokenizer_(std::move(tokenizer)) {}
  std::vector<std::string> differences(const Manifest& claimed,
                                       const std::vector<std::size_t>& which) const;

  Model model_;
  std::optional<Tokenizer> tokenizer_;
  ModelDescription description_;  // its spans point into the files that model_ maps
  Manifest outline_;              // tensor digests: the auditor's own, or zero
  bool manifest_known_ = false;
};

// Whether the claimed model computes something else than ours (configuration, tensors' shapes), as
// opposed to the same computation on other weights or tables.
bool same_computation(const Manifest& claimed, const Manifest& local);

}  // namespace bitwitness
