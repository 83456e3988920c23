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
  for (const std::string& note : report.notes) out += "note         " + note + "\n";
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
    nlohmann::ordered_json place;
    place["text"] = report.place->text();
    place["leaf"] = leaf_type_name(report.place->type);
    place["leaf_layer"] = report.place->layer;
    if (const auto layer = report.place->cell_layer()) place["layer"] = *layer;
    if (report.place->position) place["position"] = *report.place->position;
    if (report.place->element) {
      place["element"] = *report.place->element;
      place["claimed_bits"] = bits_text(report.place->claimed_bits.value_or(0));
      place["computed_bits"] = bits_text(report.place->computed_bits.value_or(0));
    }
    json["first_difference"] = std::move(place);
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
  return json_text(json);
}

}  // namespace bitwitness
