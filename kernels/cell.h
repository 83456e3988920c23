// Cells: rows of one layer, or ends of positions, recomputed from given inputs. The prover uses
// them to show the operators of a cell, the verifier to replay what was opened; what they run is
// layer_forward and head_forward (layer.h), so the bits are those of a run.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/layer.h"
#include "kernels/model/model.h"

namespace bitwitness {

// Rows of one layer at ascending positions, in host memory.
struct CellInputs {
  std::span<const std::int32_t> positions;  // [M], ascending, each below `prefix`
  std::span<const float> hidden;            // [M, hidden]: h[l] at the positions
  // [prefix, 2 * kv_width]: K row then V row of positions 0..prefix-1, as committed. Attention
  // reads these and no other: a cell is judged by what was committed before it, and by its own row
  // as committed (if that one differs from what the cell computes, the cell is bad anyway).
  std::span<const float> key_values;
  std::int64_t prefix = 0;
};

struct CellOutputs {
  std::vector<float> keys;    // [M, kv_width], after RoPE
  std::vector<float> values;  // [M, kv_width]
  std::vector<float> hidden;  // [M, hidden]: h[l+1] at the positions
};

// An operator's name and its output x[M, width], in the order of layer_forward.
using OperatorOutputs = std::vector<std::pair<std::string, std::vector<float>>>;

// Owns the RoPE tables and the scratch memory for replays of one model. `config` and `backend` must
// outlive it. Not thread-safe. Non-finite results are returned as they are.
class CellRunner {
 public:
  // `positions`: all that will be asked about are below it. Throws a usage Error when it exceeds
  // the model's context.
  CellRunner(const ModelConfig& config, Backend& backend, std::int64_t positions);

  // `weights` are the layer's, where the backend can use them (PlacedLayer, layer.h). Rows are
  // computed at most kMaxRows at a time. With `operators`, M must be 1, and they are filled in.
  CellOutputs run(const LayerWeights& weights, const CellInputs& inputs,
                  OperatorOutputs* operators = nullptr);

  // h[0][t] of each token: [M, hidden].
  std::vector<float> embed(const Matrix& embedding, std::span<const std::int32_t> tokens);

  struct Heads {
    std::vector<float> logits;                        // [M, vocab]
    std::vector<std::optional<std::int32_t>> tokens;  // [M]; absent when a logit is not finite
  };
  // The heads of last rows h[L][t] [M, hidden], computed at most kMaxHeads at a time, and the
  // tokens that are drawn from them: samples[m] belongs to row m.
  Heads heads(const ModelWeights& weights, std::span<const float> hidden,
              std::span<const SampleRequest> samples);

  static constexpr std::int64_t kMaxRows = 512;
  static constexpr std::int64_t kMaxHeads = 32;

 private:
  LayerKv load_key_values(const CellInputs& inputs);

  const ModelConfig& config_;
  Backend& backend_;
  std::int64_t positions_;
  LayerScratch scratch_;
  Buffer cosines_, sines_;
  Buffer hidden_, next_hidden_, keys_, values_;  // rows of a call
  Buffer slot_, position_;
  Buffer cache_, pages_;      // grown to the largest prefix
  Buffer logits_;             // made when a head is first asked for
  Buffer request_, sampled_;  // of one head
};

}  // namespace bitwitness
