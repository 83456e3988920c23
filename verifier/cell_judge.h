// Judging what was opened: recompute cells and ends from the committed rows and compare bit by bit.
// Live audits and rechecks of a mismatch proof both end here, so that they find the same.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attest/claim.h"
#include "attest/mismatch_proof.h"
#include "attest/opening.h"
#include "kernels/cell.h"
#include "verifier/verdict.h"

namespace bitwitness {

// Bits as they are compared and reported: those of any NaN are 7fc00000, since which NaN comes out
// of an operation depends on the processor. (Nothing committed is a NaN; what is recomputed from a
// lie may be.)
std::uint32_t comparable_bits(float value);

// Where committed and recomputed rows of one cell or end differ first.
struct RowDifference {
  std::size_t index = 0;  // among the positions of the opening
  MismatchPlace place;    // position, leaf, element, bits; op for ends, else not yet known
};

// Replays all cells of a checked opening, in pieces of CellRunner::kMaxRows. Of each bad cell one
// difference: in K, else in V, else in h[l+1], the first element. `weights` are the layer's,
// placed. `progress` counts cells done.
std::vector<RowDifference> judge_cells(const LayerOpening& opening, const ModelConfig& config,
                                       const LayerWeights& weights, CellRunner& runner,
                                       const std::function<void(std::size_t)>& progress = {});

// The outputs of all operators of one cell of a checked opening.
OperatorOutputs cell_operators(const LayerOpening& opening, std::size_t index,
                               const LayerWeights& weights, CellRunner& runner);

// The same for ends. Of a head: the first logit that differs, else the token if the sampler draws
// another one from these logits than the claim has.
std::vector<RowDifference> judge_embeddings(const EndsOpening& opening, const Claim& claim,
                                            const ModelConfig& config, const ModelWeights& weights,
                                            CellRunner& runner);
std::vector<RowDifference> judge_heads(const EndsOpening& opening, const Claim& claim,
                                       const ModelConfig& config, const ModelWeights& weights,
                                       CellRunner& runner);

// Puts the difference of a cell down to one operator, as exactly as the evidence allows.
//
// With what the prover shows of its operators: the first output that differs from ours, provided
// that it shows the operators of layer_forward, with their widths, and that they end in the rows it
// committed to; else `unusable` says why they do not count.
// Without: the committed tensor that differs names the operator that made it: k_rope for K, v_proj
// for V, mlp_residual for h[l+1].
struct OperatorPlace {
  MismatchPlace place;
  bool from_operators = false;
  std::string unusable;
};
OperatorPlace place_operator(const MismatchPlace& difference, const LayerOpening& opening,
                             std::size_t index, const OperatorOutputs& computed,
                             const CellOperators* claimed);

// The finding that a proof states, from the place found.
MismatchFinding finding_of(const MismatchPlace& place);

}  // namespace bitwitness
