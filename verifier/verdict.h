// What an audit ends with, and where a difference stands.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "attest/base/error.h"
#include "attest/base/hash_tree.h"

namespace bitwitness {

enum class Verdict { kMatch, kMismatch, kCannotJudge, kMalformed };
const char* verdict_name(Verdict verdict);
ExitCode exit_code(Verdict verdict);

// The first place where re-execution and record differ, as exactly as what was shown allows.
struct MismatchPlace {
  LeafType type = LeafType::kRow;
  std::uint32_t layer = 0;
  std::optional<std::uint64_t> position;  // absent with evidence of level roots
  // Evidence of level rows and openings; for tokens the index in the sequence.
  std::optional<std::uint64_t> element;
  std::optional<std::uint32_t> claimed_bits;   // for tokens the id
  std::optional<std::uint32_t> computed_bits;  // likewise
  // The operator whose output the element is of, as layer_forward names it, or "embedding",
  // "lm_head", "sampler". Only audits of openings know it. The element is then one of that output,
  // which need not be the leaf of `type` and `layer` (those name the cell).
  std::optional<std::string> op;

  // The layer whose computation gave the differing leaf (h[l] is the output of layer l - 1); absent
  // for embedding, head and tokens.
  std::optional<std::uint32_t> cell_layer() const;
  std::string text() const;  // for people: "layer 3, position 17, output h[4], element 5: ..."
};

}  // namespace bitwitness
