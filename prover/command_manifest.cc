// bw-prover manifest: what a model directory is, in digests.
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "attest/base/file.h"
#include "attest/base/print_json.h"
#include "attest/base/program.h"
#include "attest/base/progress.h"
#include "attest/manifest.h"
#include "kernels/model/model.h"
#include "prover/commands.h"

namespace bitwitness {
namespace {

struct ManifestFlags {
  std::string dir;
  std::string out;
  std::string format = "text";
};

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

void show_json(const Manifest& manifest) {
  nlohmann::ordered_json json;
  json["manifest_digest"] = manifest.digest().hex();
  json["arithmetic"] = manifest.arithmetic;
  json["family"] = manifest.family;
  for (const auto& [key, value] : manifest.config) json["config"][key] = value;
  if (manifest.tokenizer_digest) json["tokenizer_digest"] = manifest.tokenizer_digest->hex();
  for (const auto& [name, digest] : manifest.tables) json["tables"][name] = digest.hex();
  json["weights_root"] = manifest.weights_root.hex();
  for (const ManifestTensor& tensor : manifest.tensors) {
    json["tensors"].push_back({{"name", tensor.name},
                               {"dtype", dtype_name(tensor.dtype)},
                               {"shape", tensor.shape},
                               {"root", tensor.root.hex()}});
  }
  print_json(json);
}

void show_text(const Manifest& manifest) {
  std::cout << "manifest   " << manifest.digest().hex() << "\n"
            << "arithmetic " << manifest.arithmetic << "\n"
            << "family     " << manifest.family << "\n";
  for (const auto& [key, value] : manifest.config) {
    std::cout << "config     " << key << " = " << value << "\n";
  }
  if (manifest.tokenizer_digest) {
    std::cout << "tokenizer  " << manifest.tokenizer_digest->hex() << "\n";
  }
  for (const auto& [name, digest] : manifest.tables) {
    std::cout << "table      " << digest.hex() << "  " << name << "\n";
  }
  std::cout << "weights    " << manifest.weights_root.hex() << "\n";
  for (const ManifestTensor& tensor : manifest.tensors) {
    std::cout << "tensor     " << tensor.root.hex() << "  " << tensor.name << " "
              << dtype_name(tensor.dtype) << " " << shape_text(tensor.shape) << "\n";
  }
}

int run(const ManifestFlags& flags) {
  if (!flags.out.empty()) {
    check_output_path(flags.out);
    check_distinct_paths({{"--out", flags.out}}, {{"DIR", flags.dir}});
  }
  const Model model = Model::load(flags.dir);
  Manifest manifest;
  {
    ProgressLine progress("hashing weights");
    manifest = build_manifest(model.describe(), progress.callback());
  }
  if (!flags.out.empty()) write_file_atomic(flags.out, manifest.canonical_bytes());
  if (flags.format == "json") {
    show_json(manifest);
  } else {
    show_text(manifest);
  }
  return to_int(ExitCode::kOk);
}

}  // namespace

void add_manifest_command(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<ManifestFlags>();
  CLI::App* command = app.add_subcommand("manifest", "Digest a model directory");
  command->add_option("DIR", flags->dir, "Model directory (Hugging Face layout)")->required();
  command->add_option("--out", flags->out, "Also write the manifest's canonical bytes here");
  command->add_option("--format", flags->format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command->callback([flags, &exit_code] { exit_code = run(*flags); });
}

}  // namespace bitwitness
