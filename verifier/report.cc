#include "verifier/report.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "attest/base/print_json.h"
#include "attest/base/program.h"

namespace bitwitness {
namespace {

constexpr std::size_t kTextFindings = 12;  // what a person reads

std::string count_text(std::uint64_t checked, std::uint64_t all) {
  return std::to_string(checked) + " of " + std::to_string(all);
}

std::string bits_text(std::uint32_t bits) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", bits);
  return text;
}

// One line of text for a terminal: control characters escaped, long text cut.
std::string quoted(const std::string& text) {
  constexpr std::size_t kMaxBytes = 160;
  std::string out = "\"";
  for (std::size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    // Cut between characters: continuation bytes of UTF-8 begin with the bits 10.
    if (i >= kMaxBytes && (c & 0xc0u) != 0x80u) return out + "\" ...";
    if (c == '\n') {
      out += "\\n";
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += text[i];
    } else if (c < 0x20 || c == 0x7f) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", static_cast<unsigned>(c));
      out += escaped;
    } else {
      out += text[i];
    }
  }
  return out + "\"";
}

std::string sampling_text(const AuditReport& report) {
  if (report.sampling.greedy()) return "greedy";
  char text[128];
  std::snprintf(text, sizeof text, "temperature %.9g, top_k %u, top_p %.9g, seed from %s",
                static_cast<double>(contract::float_of(report.sampling.temperature_bits)),
                report.sampling.top_k,
                static_cast<double>(contract::float_of(report.sampling.top_p_bits)),
                seed_provenance_name(report.seed_provenance));
  return text;
}

std::string percent_text(std::uint64_t part, std::uint64_t all) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g %%",
                all == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(all));
  return text;
}

std::string layers_text(const std::vector<std::uint32_t>& layers) {
  std::string out;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    // Runs of three and more as first-last.
    std::size_t last = i;
    while (last + 1 < layers.size() && layers[last + 1] == layers[last] + 1) ++last;
    out += (out.empty() ? "" : ", ") + std::to_string(layers[i]);
    if (last >= i + 2) {
      out += "-" + std::to_string(layers[last]);
      i = last;
    }
  }
  return out.empty() ? "none" : out;
}

std::string bound_text(std::uint64_t bad, std::uint64_t checked, std::uint64_t all,
                       const std::string& what) {
  const std::string of_all = std::to_string(all) + " " + what;
  if (checked == 0) return "none of the " + of_all + " was checked";
  if (bad == 0 && checked == all) return "none of the " + of_all + " is bad";
  return "at most " + std::to_string(bad) + " of " + of_all + " (" + percent_text(bad, all) + ")";
}

std::string live_text(const AuditReport& report) {
  const LiveCoverage& live = *report.live;
  const AuditPlan& plan = live.plan;
  std::string out = std::string("plan         level ") + audit_level_name(plan.level) +
                    ", layers " + plan.layers.text();
  if (plan.level == AuditLevel::kCell) out += ", " + std::to_string(plan.cells) + " cells";
  out += ", " + std::to_string(plan.ends) + " ends\n";
  if (!live.seed) return out;
  out += "seed         " + live.seed->hex() + "\n";
  out += "checked      layers " + layers_text(live.layers);
  if (live.layers != live.chosen_layers) {
    out += " (of the chosen " + layers_text(live.chosen_layers) + ")";
  }
  out += "; embeddings " + std::to_string(live.embeddings_checked) + ", heads " +
         std::to_string(live.heads_checked) + "; " + std::to_string(live.opened_bytes) +
         " bytes opened\n";
  if (live.bad_cells_at_most) {
    const bool some_layers = live.population != report.cells;
    out += "bound        " +
           bound_text(*live.bad_cells_at_most, report.cells_checked, live.population,
                      some_layers ? "cells of the chosen layers" : "cells") +
           "\n             " +
           bound_text(*live.bad_embeddings_at_most, live.embeddings_checked,
                      report.ends - report.tokens, "embeddings") +
           "; " + bound_text(*live.bad_heads_at_most, live.heads_checked, report.tokens, "heads") +
           "\n";
    const bool layers_open = live.bad_layers_at_most && live.layers.size() != live.all_layers;
    if (layers_open) {
      out += "             " +
             bound_text(*live.bad_layers_at_most, live.layers.size(), live.all_layers, "layers") +
             " have a bad cell\n";
    }
    const auto sampled = [](std::uint64_t checked, std::uint64_t all) {
      return checked != 0 && checked != all;
    };
    if (layers_open || sampled(report.cells_checked, live.population) ||
        sampled(live.embeddings_checked, report.ends - report.tokens) ||
        sampled(live.heads_checked, report.tokens)) {
      out +=
          "             (each at 99 % confidence: with more, such a draw finds one in 99 of 100 "
          "audits)\n";
    }
  }
  constexpr std::size_t kTextCells = 8;
  for (std::size_t i = 0; i < live.bad.size() && i < kTextCells; ++i) {
    out += "bad          " + live.bad[i].text() + "\n";
  }
  const std::uint64_t bad = live.bad_cells + live.bad_ends;
  if (bad > kTextCells) out += "bad          and " + std::to_string(bad - kTextCells) + " more\n";
  return out;
}

nlohmann::ordered_json live_json(const AuditReport& report) {
  const LiveCoverage& live = *report.live;
  nlohmann::ordered_json json;
  json["level"] = audit_level_name(live.plan.level);
  json["plan"] = {
      {"layers", live.plan.layers.text()}, {"cells", live.plan.cells}, {"ends", live.plan.ends}};
  if (live.seed) json["seed"] = live.seed->hex();
  if (live.checkpoint) {
    json["checkpoint"] = {{"origin", live.checkpoint->origin},
                          {"size", live.checkpoint->size},
                          {"root", live.checkpoint->root.hex()}};
  }
  json["log_key_from_prover"] = live.log_key_from_prover;
  json["layers_chosen"] = live.chosen_layers;
  json["layers_checked"] = live.layers;
  json["cells_drawn_from"] = live.population;
  json["embeddings_checked"] = live.embeddings_checked;
  json["heads_checked"] = live.heads_checked;
  json["opened_bytes"] = live.opened_bytes;
  json["attempts"] = live.attempts;
  json["bad_cells"] = live.bad_cells;
  json["bad_ends"] = live.bad_ends;
  nlohmann::ordered_json bad = nlohmann::ordered_json::array();
  for (const BadCell& one : live.bad) {
    nlohmann::ordered_json item;
    item["kind"] = one.kind == BadCell::Kind::kCell   ? "cell"
                   : one.kind == BadCell::Kind::kHead ? "head"
                                                      : "embedding";
    if (one.kind == BadCell::Kind::kCell) item["layer"] = one.layer;
    item["position"] = one.position;
    bad.push_back(std::move(item));
  }
  json["bad"] = std::move(bad);
  if (live.bad_cells_at_most) {
    nlohmann::ordered_json bound;
    bound["confidence"] = 0.99;
    bound["bad_cells_at_most"] = *live.bad_cells_at_most;
    bound["of_cells"] = live.population;
    bound["bad_embeddings_at_most"] = *live.bad_embeddings_at_most;
    bound["of_embeddings"] = report.ends - report.tokens;
    bound["bad_heads_at_most"] = *live.bad_heads_at_most;
    bound["of_heads"] = report.tokens;
    if (live.bad_layers_at_most) bound["bad_layers_at_most"] = *live.bad_layers_at_most;
    json["bound"] = std::move(bound);
  }
  return json;
}

nlohmann::ordered_json place_json(const MismatchPlace& at) {
  nlohmann::ordered_json place;
  place["text"] = at.text();
  place["leaf"] = leaf_type_name(at.type);
  place["leaf_layer"] = at.layer;
  if (const auto layer = at.cell_layer()) place["layer"] = *layer;
  if (at.position) place["position"] = *at.position;
  if (at.op) place["operator"] = *at.op;
  if (at.element) {
    place["element"] = *at.element;
    place["claimed_bits"] = bits_text(at.claimed_bits.value_or(0));
    place["computed_bits"] = bits_text(at.computed_bits.value_or(0));
  }
  return place;
}

const char* proof_kind_name(MismatchProof::Kind kind) {
  switch (kind) {
    case MismatchProof::Kind::kRecord:
      return "record";
    case MismatchProof::Kind::kCell:
      return "cell";
    case MismatchProof::Kind::kEmbedding:
      return "embedding";
    case MismatchProof::Kind::kHead:
      return "head";
  }
  return "record";
}

}  // namespace

AuditReport unjudged_report(Verdict verdict, const std::string& why) {
  AuditReport report;
  report.verdict = verdict;
  report.judged = false;
  report.findings.push_back(why);
  return report;
}

std::string report_text(const AuditReport& report, const std::string& name) {
  std::string out = std::string(verdict_name(report.verdict)) + "  " + printable(name) + "\n";
  for (std::size_t i = 0; i < report.findings.size() && i < kTextFindings; ++i) {
    out += "  " + printable(report.findings[i]) + "\n";
  }
  if (report.findings.size() > kTextFindings) {
    out += "  and " + std::to_string(report.findings.size() - kTextFindings) +
           " more (all of them with --format json)\n";
  }
  if (report.place) out += "  first difference: " + report.place->text() + "\n";
  if (!report.judged) return out;
  if (report.prompt_text) out += "prompt       " + quoted(*report.prompt_text) + "\n";
  if (report.output_text) out += "output       " + quoted(*report.output_text) + "\n";
  out += "run          " + std::to_string(report.prompt_ids.size()) + " prompt tokens, " +
         std::to_string(report.emitted_ids.size()) + " of at most " +
         std::to_string(report.max_tokens) + " emitted (" + stop_reason_name(report.stop_reason) +
         "), " + sampling_text(report) + "\n";
  out += "record       " + report.record_digest.hex() + "\n";
  out += "claim        " + report.claim_digest.hex() + "\n";
  out += "trace root   " + report.claimed_trace_root.hex() + " (claimed)\n";
  if (report.computed_trace_root) {
    out += "             " + report.computed_trace_root->hex() + " (re-executed)\n";
  }
  out += "made on      " +
         (report.claimed_backend.empty() ? std::string("unknown")
                                         : printable(report.claimed_backend)) +
         " (self-reported)\n";
  out += "replayed on  " + report.backend + ", " + report.device + "\n";
  out += "coverage     cells " + count_text(report.cells_checked, report.cells) + ", ends " +
         count_text(report.ends_checked, report.ends) + ", tokens " +
         count_text(report.tokens_checked, report.tokens) + "\n";
  if (report.live) out += live_text(report);
  if (report.log_state == AuditReport::LogState::kIncluded) {
    out += "log          entry " + std::to_string(report.log_index.value_or(0)) + " of " +
           printable(report.checkpoint->origin) + ", checkpoint of size " +
           std::to_string(report.checkpoint->size) + "\n";
  } else {
    out += report.log_state == AuditReport::LogState::kNotShown
               ? "log          not shown to hold this record\n"
               : "log          not checked\n";
  }
  out +=
      "signature    " +
      (report.operator_key ? printable(*report.operator_key) : std::string("none by an operator")) +
      "\n";
  if (report.proof_file) {
    out += "proof        " + printable(*report.proof_file) + " (bw-verifier recheck)\n";
  }
  for (const std::string& note : report.notes) {
    out += "note         " + printable(note) + "\n";
  }
  return out;
}

std::string report_json(const AuditReport& report, const std::string& name) {
  nlohmann::ordered_json json;
  json["verdict"] = verdict_name(report.verdict);
  json["exit_code"] = static_cast<int>(exit_code(report.verdict));
  json["record"] = name;
  json["findings"] = report.findings;
  json["notes"] = report.notes;
  if (report.place) {
    json["first_difference"] = place_json(*report.place);
  }
  if (!report.judged) return json_text(json);
  json["record_digest"] = report.record_digest.hex();
  json["claim_digest"] = report.claim_digest.hex();
  json["trace_root"] = report.claimed_trace_root.hex();
  if (report.computed_trace_root) {
    json["computed_trace_root"] = report.computed_trace_root->hex();
  }
  json["prompt_token_ids"] = report.prompt_ids;
  json["token_ids"] = report.emitted_ids;
  if (report.prompt_text) json["prompt_text"] = *report.prompt_text;
  if (report.output_text) json["output_text"] = *report.output_text;
  json["max_tokens"] = report.max_tokens;
  json["stop_reason"] = stop_reason_name(report.stop_reason);
  json["sampling"] = {{"temperature", contract::float_of(report.sampling.temperature_bits)},
                      {"top_k", report.sampling.top_k},
                      {"top_p", contract::float_of(report.sampling.top_p_bits)},
                      {"seed_provenance", seed_provenance_name(report.seed_provenance)}};
  json["claimed_backend"] = report.claimed_backend;
  json["backend"] = report.backend;
  json["device"] = report.device;
  json["coverage"] = {{"cells", {{"checked", report.cells_checked}, {"total", report.cells}}},
                      {"ends", {{"checked", report.ends_checked}, {"total", report.ends}}},
                      {"tokens", {{"checked", report.tokens_checked}, {"total", report.tokens}}}};
  if (report.live) json["live"] = live_json(report);
  if (report.log_state == AuditReport::LogState::kIncluded) {
    json["log"] = {{"state", "included"},
                   {"index", report.log_index.value_or(0)},
                   {"origin", report.checkpoint->origin},
                   {"size", report.checkpoint->size}};
  } else {
    json["log"] = {{"state", report.log_state == AuditReport::LogState::kNotShown ? "not_shown"
                                                                                  : "not_checked"}};
  }
  if (report.operator_key) {
    json["operator_key"] = *report.operator_key;
  } else {
    json["operator_key"] = nullptr;
  }
  if (report.proof_file) json["proof"] = *report.proof_file;
  return json_text(json);
}

std::string recheck_text(const RecheckReport& report, const std::string& name) {
  std::string out = std::string(verdict_name(report.verdict)) + "  " + printable(name) + "\n";
  for (std::size_t i = 0; i < report.findings.size() && i < kTextFindings; ++i) {
    out += "  " + printable(report.findings[i]) + "\n";
  }
  if (report.place) out += "  first difference: " + report.place->text() + "\n";
  if (report.accuser.empty()) return out;
  out += std::string("accused of   a bad ") + proof_kind_name(report.kind);
  if (report.kind == MismatchProof::Kind::kCell) {
    out += ", layer " + std::to_string(report.layer);
  }
  if (report.kind != MismatchProof::Kind::kRecord) {
    out += ", position " + std::to_string(report.position);
  }
  out += ", in " + printable(report.stated.op) + "\n";
  out += "record       " + report.record_digest.hex() + "\n";
  out += "by           " + printable(report.accuser) + ", replayed on " +
         printable(report.stated_backend) + " (self-reported)\n";
  out += "against      " +
         (report.accused ? printable(*report.accused) : std::string("nobody: no signature")) + "\n";
  out +=
      std::string("log          ") + (report.logged ? "the record is in it" : "not checked") + "\n";
  out += "replayed on  " + report.backend + ", " + report.device + "\n";
  for (const std::string& note : report.notes) {
    out += "note         " + printable(note) + "\n";
  }
  return out;
}

std::string recheck_json(const RecheckReport& report, const std::string& name) {
  nlohmann::ordered_json json;
  json["verdict"] = verdict_name(report.verdict);
  json["exit_code"] = static_cast<int>(exit_code(report.verdict));
  json["proof"] = name;
  json["findings"] = report.findings;
  json["notes"] = report.notes;
  if (report.place) json["first_difference"] = place_json(*report.place);
  if (report.accuser.empty()) return json_text(json);
  json["kind"] = proof_kind_name(report.kind);
  if (report.kind == MismatchProof::Kind::kCell) json["layer"] = report.layer;
  if (report.kind != MismatchProof::Kind::kRecord) json["position"] = report.position;
  nlohmann::ordered_json stated;
  stated["operator"] = report.stated.op;
  if (report.stated.element) {
    stated["element"] = *report.stated.element;
    stated["claimed_bits"] = bits_text(report.stated.claimed_bits);
    stated["computed_bits"] = bits_text(report.stated.computed_bits);
  }
  json["stated"] = std::move(stated);
  json["record_digest"] = report.record_digest.hex();
  json["accuser"] = report.accuser;
  if (report.accused) {
    json["accused"] = *report.accused;
  } else {
    json["accused"] = nullptr;
  }
  json["logged"] = report.logged;
  json["backend"] = report.backend;
  json["device"] = report.device;
  return json_text(json);
}

}  // namespace bitwitness
