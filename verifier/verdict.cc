#include "verifier/verdict.h"

#include <cstdio>

namespace bitwitness {

const char* verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::kMatch:
      return "match";
    case Verdict::kMismatch:
      return "mismatch";
    case Verdict::kCannotJudge:
      return "cannot_judge";
    case Verdict::kMalformed:
      return "malformed";
  }
  return "cannot_judge";
}

ExitCode exit_code(Verdict verdict) {
  switch (verdict) {
    case Verdict::kMatch:
      return ExitCode::kOk;
    case Verdict::kMismatch:
      return ExitCode::kMismatch;
    case Verdict::kCannotJudge:
      return ExitCode::kCannotJudge;
    case Verdict::kMalformed:
      return ExitCode::kMalformed;
  }
  return ExitCode::kCannotJudge;
}

std::optional<std::uint32_t> MismatchPlace::cell_layer() const {
  if (type == LeafType::kKeyValue) return layer;
  if (type == LeafType::kRow && layer > 0) return layer - 1;
  return std::nullopt;
}

std::string MismatchPlace::text() const {
  std::string out;
  if (const auto cell = cell_layer()) out = "layer " + std::to_string(*cell) + ", ";
  if (position && (type != LeafType::kTokens || op)) {
    out += "position " + std::to_string(*position) + ", ";
  }
  if (op) {
    out += *op == "sampler" ? "sampler" : "operator " + *op;
  } else {
    switch (type) {
      case LeafType::kRow:
        out += layer == 0 ? "embedding" : "output h[" + std::to_string(layer) + "]";
        break;
      case LeafType::kKeyValue:
        out += "keys and values";
        break;
      case LeafType::kLogits:
        out += "logits";
        break;
      default:
        out += "token ids";
    }
  }
  if (element) {
    char bits[112];
    const char* const format = type == LeafType::kTokens
                                   ? ", token %llu of the sequence: claimed %u, computed %u"
                                   : ", element %llu: claimed %08x, computed %08x";
    std::snprintf(bits, sizeof bits, format, static_cast<unsigned long long>(*element),
                  claimed_bits.value_or(0), computed_bits.value_or(0));
    out += bits;
  }
  return out;
}

}  // namespace bitwitness
