// The engine: a model on a backend, KV caches, and steps over rows of any mix of sequences. Prover
// and verifier run the same steps; what they do with the committed rows differs, so an observer
// gets them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "kernels/backend.h"
#include "kernels/kv_cache.h"
#include "kernels/layer.h"
#include "kernels/model/model.h"
#include "kernels/rope_tables.h"

namespace bitwitness {

// One token at one position of one sequence. With `emit`, the logits of the row are computed,
// committed and sampled from.
struct StepRow {
  std::int32_t slot = 0;
  std::int32_t position = 0;
  std::int32_t token = 0;
  bool emit = false;
  SampleRequest sample;  // used with emit
};

// What a step commits to. Any callback may be empty; what it would need is then not computed.
// on_values is called while the rows of a step are computed, on_leaves when they are done.
struct StepObserver {
  // Leaf digests of `rows` (layer l: row h[l] for l in [0, L], key-value l in [0, L), logits with l
  // = 0). rows.host_slot and rows.host_position say whose they are; digests[m] belongs to row m.
  std::function<void(LeafType type, std::uint32_t layer, const RowMap& rows, const Digest* digests)>
      on_leaves;
  // The rows themselves, in host memory: first[M, first_width] and, for key-values, second (the
  // values).
  std::function<void(LeafType type, std::uint32_t layer, const RowMap& rows, const float* first,
                     std::int64_t first_width, const float* second, std::int64_t second_width)>
      on_values;
  // Of which leaves on_values wants the rows: they are copied to the host, which costs time.
  // Absent: of all.
  std::function<bool(LeafType type, std::uint32_t layer)> wants_values;
  // Rows done so far in this call, and their number: for progress.
  std::function<void(std::int64_t done, std::int64_t total)> on_progress;
};

// A value that may not be committed (ARITHMETIC.md section 9). Usage error: the model, not the
// machine.
class NonFiniteError : public Error {
 public:
  NonFiniteError(const std::string& op, std::int64_t layer, std::int32_t slot,
                 std::int32_t position, std::int64_t element);
  std::string op;
  std::int64_t layer;  // num_layers for the head
  std::int32_t slot;
  std::int32_t position;
  std::int64_t element;
};

struct EngineOptions {
  std::int64_t slots = 1;     // sequences at a time
  std::int64_t capacity = 0;  // positions per sequence, at most config.max_positions
  // Rows computed together; longer steps are cut (bits do not change). 0: what suits the backend.
  std::int64_t max_rows = 0;
  // The leaves of a decode step may be delivered by the next step(), or by flush(): they are hashed
  // while that one computes. A value of it that is not finite is reported then, too.
  bool defer_leaves = false;
};

class Engine {
 public:
  // `weights` are those of a model with this configuration, placed on `backend`; both must outlive
  // the engine. Placing is the costly part where weights are copied: do it once for any number of
  // engines. Throws usage errors for options out of range and infrastructure errors when memory
  // does not suffice.
  Engine(const ModelConfig& config, const PlacedWeights& weights, Backend& backend,
         const EngineOptions& options);
  ~Engine();

  // Bytes that an engine with these options takes of the backend besides the weights, with a page
  // of cache for each sequence.
  static std::size_t least_memory(const ModelConfig& config, const EngineOptions& options,
                                  const Backend& backend);

  // Runs `rows` (of one slot: together, ascending consecutive positions, all earlier ones already
  // run) through the model and returns the sampled token of each row with emit, in order. Token ids
  // must be in the vocabulary and positions in [0, capacity), else a usage error.
  std::vector<std::int32_t> step(std::span<const StepRow> rows, const StepObserver& observer);

  // Delivers, to the observers of their steps, the leaves that are still to be delivered.
  void flush() { settle(); }

  // Takes memory for positions [0, positions) of a slot before it is needed; steps take what is
  // missing. Throws an infrastructure error when there is not enough.
  void reserve(std::int64_t slot, std::int64_t positions) { cache_.reserve(slot, positions); }
  // The sequence of the slot has ended: its memory is free for others.
  void release(std::int64_t slot) { cache_.release(slot); }

  const ModelConfig& config() const { return config_; }
  Backend& backend() { return backend_; }
  const EngineOptions& options() const { return options_; }

 private:
  // A step's inputs and outputs as they lie in one buffer, so that one copy takes each across. A
  // function of the numbers of rows and of emitted rows.
  struct StepLayout;
  struct Step;

  // What a step works on. Decode steps take the two lanes by turns: one is hashed while the other
  // computes.
  struct Lane {
    Buffer hidden;           // rows of all layers of a short step, of two layers of a long one
    Buffer keys, values;     // likewise
    Buffer logits;           // [max_emit, vocab]
    Buffer host_step, step;  // as StepLayout says
  };

  void step_chunk(std::span<const StepRow> rows, const StepObserver& observer,
                  std::vector<std::int32_t>& sampled);
  Step prepare(std::span<const StepRow> rows, Lane& lane);
  void commit_short_step(const Step& step);
  void settle();
  void compute(const Step& step, const StepObserver& observer);
  void compute_layers(const Step& step, const StepObserver& observer, const OperatorProbe& probe);
  void compute_heads(const Step& step, const StepObserver& observer);
  void show(LeafType type, std::uint32_t layer, const RowMap& rows, const float* first,
            std::int64_t first_width, const float* second, std::int64_t second_width,
            const StepObserver& observer);
  void deliver(const Step& step);
  [[noreturn]] void report_non_finite(const Step& step);
  // Where the rows of a layer stand in a step of M rows.
  float* hidden_rows(const Lane& lane, std::int64_t layer, std::int64_t M) const;
  float* key_value_rows(const Buffer& buffer, std::int64_t layer, std::int64_t M) const;

  Backend& backend_;
  EngineOptions options_;
  ModelConfig config_;
  const ModelWeights& weights_;
  LayerScratch scratch_;
  KvCache cache_;
  Buffer cosines_, sines_;                  // [capacity, head_dim / 2]
  Buffer emitted_hidden_;                   // [max_emit, hidden]
  Lane lanes_[2];                           // the second one is for short steps
  std::unique_ptr<Step> pending_;           // computed, not delivered
  std::unique_ptr<Recordings> recordings_;  // ends before what they use
  std::vector<float> host_first_, host_second_;
};

}  // namespace bitwitness
