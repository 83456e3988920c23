// layer_forward: the hinge of the whole system. The prover calls it to run, the verifier to replay;
// it is written once over the operators of a backend.
#pragma once

#include <functional>
#include <string_view>

#include "kernels/backend.h"
#include "kernels/model/model.h"

namespace bitwitness {

// Weights where a backend can use them. What they were made from and the backend must outlive it.
// In host memory nothing is copied or touched.
class PlacedLayer {
 public:
  PlacedLayer(const LayerWeights& weights, Backend& backend);
  const LayerWeights& weights() const { return weights_; }

 private:
  LayerWeights weights_;
  std::vector<Buffer> owned_;
};
class PlacedEnds {  // embedding, final norm and head
 public:
  PlacedEnds(const ModelWeights& weights, Backend& backend);
  const ModelWeights& weights() const { return weights_; }  // its `layers` are empty

 private:
  ModelWeights weights_;
  std::vector<Buffer> owned_;
};
class PlacedWeights {  // all of a model's
 public:
  PlacedWeights(const ModelWeights& weights, Backend& backend);
  const ModelWeights& weights() const { return weights_; }

 private:
  PlacedEnds ends_;
  std::vector<PlacedLayer> layers_;
  ModelWeights weights_;
};

// Scratch rows of one step, sized for at most `max_rows` rows. [M, width] each.
struct LayerScratch {
  LayerScratch(Backend& backend, const ModelConfig& config, std::int64_t max_rows);
  Buffer normed;     // [M, hidden]
  Buffer q;          // [M, heads * head_dim]
  Buffer k;          // [M, kv_width]
  Buffer v;          // [M, kv_width]
  Buffer attention;  // [M, heads * head_dim]
  Buffer gate;       // [M, intermediate]
  Buffer up;         // [M, intermediate]
  Buffer projected;  // [M, hidden]
};

// RoPE tables in the backend's memory, [positions, head_dim / 2] each.
struct RopeView {
  const float* cosines = nullptr;
  const float* sines = nullptr;
};

// Called after each operator of a layer with its name and its output x[M, width]: used to name the
// operator in which a value stopped being finite.
using OperatorProbe = std::function<void(std::string_view op, const float* x, std::int64_t width)>;

// Whose keys and values attention reads for the rows themselves: a run stores theirs in the cache
// first, the replay of a cell reads a cache that holds what was committed for them.
enum class CacheUse { kStore, kReadOnly };

// One decoder layer over M rows: in h[l], out h[l+1] in place in `h` [M, hidden]. Leaves K
// (after RoPE) and V of the rows in scratch.k and scratch.v [M, kv_width] and, with kStore, writes
// them to the cache. Reads cache rows 0..position of each row's slot; those before the rows of this
// call must have been written.
void layer_forward(Backend& backend, const ModelConfig& config, const LayerWeights& weights,
                   const RopeView& rope, const LayerKv& cache, const RowMap& rows,
                   LayerScratch& scratch, float* h, CacheUse use = CacheUse::kStore,
                   const OperatorProbe& probe = {});

// logits[M, vocab] of last hidden rows h[M, hidden] (not changed).
void head_forward(Backend& backend, const ModelConfig& config, const ModelWeights& weights,
                  const float* h, LayerScratch& scratch, std::int64_t rows, float* logits);

}  // namespace bitwitness
