// layer_forward: the hinge of the whole system. The prover calls it to run, the verifier to replay;
// it is written once over the operators of a backend.
#pragma once

#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

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
  // Before anything is copied: an infrastructure error that says what is needed and what there is
  // if they, and `besides` bytes for what is to run on them, do not fit (Engine::least_memory).
  PlacedWeights(const ModelWeights& weights, Backend& backend, std::size_t besides = 0);
  // Of weights that lie in the backend's memory already, in `owned`.
  PlacedWeights(const ModelWeights& placed, std::vector<Buffer> owned)
      : owned_(std::move(owned)), weights_(placed) {}
  const ModelWeights& weights() const { return weights_; }

 private:
  std::optional<PlacedEnds> ends_;
  std::vector<PlacedLayer> layers_;
  std::vector<Buffer> owned_;
  ModelWeights weights_;
};

// Scratch rows of one step, sized for at most `max_rows` rows. [M, width] each.
struct LayerScratch {
  LayerScratch(Backend& backend, const ModelConfig& config, std::int64_t max_rows);
  static std::size_t bytes(const ModelConfig& config, std::int64_t max_rows);
  Buffer normed;     // [M, hidden]
  Buffer q;          // [M, heads * head_dim]
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

// Whose keys and values attention reads for the rows themselves: a run stores theirs in the cache
// first, the replay of a cell reads a cache that holds what was committed for them.
enum class CacheUse { kStore, kReadOnly };

// The rows that a layer reads and those that are committed of it, [M, width] each.
struct LayerRows {
  const float* in = nullptr;  // h[l], [M, hidden]
  float* out = nullptr;       // h[l+1], [M, hidden]; may not be `in`
  float* k = nullptr;         // [M, kv_width], after RoPE
  float* v = nullptr;         // [M, kv_width]
};

// One decoder layer over M rows. With kStore, K and V of the rows enter the cache. Reads cache rows
// 0..position of each row's slot; those before the rows of this call must have been written. With a
// probe, operators run one by one and it sees the output of each, by name; the bits are the same.
void layer_forward(Backend& backend, const ModelConfig& config, const LayerWeights& weights,
                   const RopeView& rope, const LayerKv& cache, const RowMap& map,
                   LayerScratch& scratch, const LayerRows& rows, CacheUse use = CacheUse::kStore,
                   const OperatorProbe& probe = {});

// logits[M, vocab] of last hidden rows h[M, hidden] (not changed).
void head_forward(Backend& backend, const ModelConfig& config, const ModelWeights& weights,
                  const float* h, LayerScratch& scratch, std::int64_t rows, float* logits);

}  // namespace bitwitness
