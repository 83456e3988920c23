// bw-attest show: what a record, manifest, receipt or checkpoint says. Checks form, judges nothing
// else.
#include <bit>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "attest/base/file.h"
#include "attest/base/hex.h"
#include "attest/base/print_json.h"
#include "attest/base/program.h"
#include "attest/commands.h"
#include "attest/log.h"
#include "attest/mismatch_proof.h"
#include "attest/record.h"

namespace bitwitness {
namespace {

using Json = nlohmann::ordered_json;

Json manifest_json(const Manifest& manifest) {
  Json config = Json::object();
  for (const auto& [key, value] : manifest.config) config[key] = value;
  Json tables = Json::object();
  for (const auto& [name, digest] : manifest.tables) tables[name] = digest.hex();
  Json tensors = Json::array();
  for (const ManifestTensor& tensor : manifest.tensors) {
    tensors.push_back({{"name", tensor.name},
                       {"dtype", dtype_name(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"root", tensor.root.hex()}});
  }
  return {
      {"digest", manifest.digest().hex()},
      {"arithmetic", manifest.arithmetic},
      {"family", manifest.family},
      {"config", config},
      {"tokenizer", manifest.tokenizer_digest ? Json(manifest.tokenizer_digest->hex()) : Json()},
      {"tables", tables},
      {"weights_root", manifest.weights_root.hex()},
      {"tensors", tensors}};
}

Json claim_json(const Claim& claim) {
  const TraceShape& shape = claim.trace_shape;
  return {{"digest", claim.digest().hex()},
          {"arithmetic", claim.arithmetic},
          {"manifest_digest", claim.manifest_digest.hex()},
          {"prompt_token_ids", claim.prompt_ids},
          {"token_ids", claim.emitted_ids},
          {"stop_reason", stop_reason_name(claim.stop_reason)},
          {"stop_token_ids", claim.stop_ids},
          {"max_tokens", claim.max_tokens},
          {"sampling",
           {{"algorithm", claim.sampling.algorithm},
            {"temperature", std::bit_cast<float>(claim.sampling.temperature_bits)},
            {"top_k", claim.sampling.top_k},
            {"top_p", std::bit_cast<float>(claim.sampling.top_p_bits)},
            {"seed", to_hex(claim.seed)},
            {"seed_provenance", seed_provenance_name(claim.seed_provenance)}}},
          {"text_digest", claim.text_digest.hex()},
          {"trace",
           {{"root", claim.trace_root.hex()},
            {"layers", shape.layers},
            {"positions", shape.positions},
            {"emitted", shape.emitted},
            {"hidden", shape.hidden},
            {"kv_width", shape.kv_width},
            {"vocab", shape.vocab},
            {"row_dtype", dtype_name(shape.row_dtype)},
            {"kv_dtype", dtype_name(shape.kv_dtype)}}}};
}

Json record_json(const Record& record) {
  Json signature;
  if (record.signature) signature = record.signature->key.vkey();
  return {{"kind", "record"},
          {"digest", record.digest().hex()},
          {"claim", claim_json(record.claim)},
          {"provenance", record.provenance},
          {"evidence", evidence_level_name(record.evidence.level)},
          {"signed_by", signature},
          {"manifest", manifest_json(record.manifest)}};
}

Json checkpoint_json(const std::string& note, const std::string& document) {
  const Checkpoint head = parse_checkpoint(note, document);
  Json signers = Json::array();
  for (const NoteSignature& signature : parse_note(note, document).signatures) {
    signers.push_back(signature.name);
  }
  return {{"origin", head.origin},
          {"size", head.size},
          {"root", head.root.hex()},
          {"signatures_not_checked", signers}};
}

Json proof_json(const std::string& text, const std::string& document) {
  const TlogProof proof = TlogProof::parse(text, document);
  Json hashes = Json::array();
  for (const Digest& hash : proof.hashes) hashes.push_back(hash.hex());
  const auto record = proof.extra ? record_of_log_entry(*proof.extra) : std::nullopt;
  return {{"kind", "receipt"},
          {"index", proof.index},
          {"record", record ? Json(record->hex()) : Json()},
          {"hashes", hashes},
          {"checkpoint", checkpoint_json(proof.checkpoint_note, document)}};
}

// Lists of scalars longer than this are cut in text; JSON has everything.
constexpr std::size_t kShownItems = 24;

// A scalar on one line of a terminal: the strings are somebody else's.
std::string shown(const Json& value) {
  if (value.is_null()) return "none";
  return printable(value.is_string() ? value.get<std::string>() : value.dump());
}

// "key: value" lines, objects indented.
void print_text(const Json& json, int indent) {
  const std::string margin(static_cast<std::size_t>(indent), ' ');
  for (const auto& [key, value] : json.items()) {
    std::cout << margin << printable(key) << ":";
    if (value.is_object()) {
      std::cout << "\n";
      print_text(value, indent + 2);
    } else if (value.is_array() && !value.empty() && value[0].is_object()) {
      std::cout << "\n";
      for (const Json& item : value) {
        std::cout << margin << " ";
        for (const auto& [name, field] : item.items()) {
          std::cout << " " << shown(field);
        }
        std::cout << "\n";
      }
    } else if (value.is_array()) {
      for (std::size_t i = 0; i < std::min(value.size(), kShownItems); ++i) {
        std::cout << " " << shown(value[i]);
      }
      if (value.size() > kShownItems) std::cout << " ... (" << value.size() << " in all)";
      std::cout << "\n";
    } else {
      std::cout << " " << shown(value) << "\n";
    }
  }
}

// What a mismatch proof states; whether it is so, bw-verifier recheck finds out.
Json mismatch_json(const MismatchProof& proof, const std::string& path) {
  const OpenedMismatch opened = open_mismatch(proof, path);
  Json out{{"kind", "mismatch proof"}};
  switch (proof.kind) {
    case MismatchProof::Kind::kRecord:
      out["about"] = "a whole record";
      break;
    case MismatchProof::Kind::kCell:
      out["about"] = "a cell";
      out["layer"] = proof.layer;
      out["position"] = proof.position;
      break;
    case MismatchProof::Kind::kEmbedding:
    case MismatchProof::Kind::kHead:
      out["about"] = proof.kind == MismatchProof::Kind::kHead ? "a head" : "an embedding";
      out["position"] = proof.position;
      break;
  }
  out["operator"] = proof.finding.op;
  if (proof.finding.element) {
    const auto bits = [](std::uint32_t value) {
      char digits[9];
      std::snprintf(digits, sizeof digits, "%08x", value);
      return std::string(digits);
    };
    out["element"] = *proof.finding.element;
    out["claimed_bits"] = bits(proof.finding.claimed_bits);
    out["computed_bits"] = bits(proof.finding.computed_bits);
  }
  out["record_digest"] = opened.record.digest().hex();
  out["accuser"] = proof.verifier.key.vkey();
  if (opened.header) {
    out["accused"] = opened.header->prover.key.vkey();
  } else if (opened.record.signature) {
    out["accused"] = opened.record.signature->key.vkey();
  }
  return out;
}

Json show(const std::string& path) {
  const Bytes bytes = read_file(path, {.max_bytes = kMaxMismatchProofBytes});
  const std::string_view text = as_text(bytes);
  if (text.starts_with("bwrecord")) return record_json(Record::parse(bytes, path));
  if (text.starts_with("bw-proof")) return mismatch_json(MismatchProof::parse(bytes, path), path);
  if (text.starts_with("c2sp.org/tlog-proof")) return proof_json(std::string(text), path);
  if (text.substr(0, 64).find("bitwitness/manifest") == 4) {
    Json out{{"kind", "manifest"}};
    out.update(manifest_json(Manifest::parse(bytes, path)));
    return out;
  }
  if (text.substr(0, kMaxNoteBytes).find("\n\n\xe2\x80\x94 ") != std::string_view::npos) {
    Json out{{"kind", "checkpoint"}};
    out.update(checkpoint_json(std::string(text), path));
    return out;
  }
  throw malformed_error(path + ": no record, manifest, receipt, checkpoint or mismatch proof");
}

}  // namespace

void add_show_command(CLI::App& app, int& exit_code) {
  auto path = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand(
      "show",
      "Print a record, manifest, receipt, checkpoint or mismatch proof; checks its form only");
  command->add_option("FILE", *path, "The file")->required();
  auto format = add_format_option(command);
  command->callback([path, format, &exit_code] {
    const Json json = show(*path);
    if (*format == "json") {
      print_json(json);
    } else {
      print_text(json, 0);
    }
    exit_code = 0;
  });
}

}  // namespace bitwitness
