// The paged KV cache of all layers: pages of 64 positions (one block of attention) of one sequence,
// taken as sequences need them and given back when they end, so that memory follows what is used
// and not the longest sequence that might come.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/model/model_config.h"

namespace bitwitness {

class KvCache {
 public:
  // Room for `slots` sequences of at most `capacity` positions each; no page yet. `backend` must
  // outlive the cache.
  KvCache(const ModelConfig& config, Backend& backend, std::int64_t slots, std::int64_t capacity);

  // Positions [0, positions) of the slot get pages that they lack. Throws an infrastructure error
  // when memory does not suffice, and leaves the slot as it was.
  void reserve(std::int64_t slot, std::int64_t positions);
  // The slot's pages are free for others.
  void release(std::int64_t slot);
  // Makes pages that were added visible to operators. Cheap when there are none.
  void upload();

  LayerKv layer(std::int64_t l) const;

  // Bytes of one page, of all layers, keys and values.
  static std::size_t page_bytes(const ModelConfig& config);

 private:
  Backend& backend_;
  std::int64_t layers_, kv_width_, pages_per_slot_;
  std::size_t page_bytes_;
  std::vector<Buffer> pages_;           // all there are
  std::vector<float*> free_;            // of them
  std::vector<std::int64_t> reserved_;  // pages of each slot
  Buffer host_table_;                   // float* [slots, pages_per_slot]
  Buffer table_;                        // the same for operators
  bool changed_ = true;
};

}  // namespace bitwitness
