// What the kernels of attention over the paged cache share (contract.h section 7).
#pragma once

#include <cstdint>

#include "kernels/cuda/context.h"
#include "kernels/cuda/launch.cuh"

namespace bitwitness::cuda {

// One step's attention.
struct PagedAttention {
  float* out = nullptr;      // [rows, heads, head_dim]
  const float* q = nullptr;  // the same
  KvPages cache;
  StepShape step;
  int heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 0;
};

// The family for single rows: right for every step, fast for rows of different slots.
bool attention_decode_fits(const Context& context, const PagedAttention& attention);
void attention_decode(Context& context, const PagedAttention& attention);
// The same where q and k have not passed RopeStore yet: does its work as well. Slots are distinct.
bool attention_fused_fits(const Context& context, const PagedAttention& attention);
void attention_decode_fused(Context& context, const PagedAttention& attention,
                            const RopeStore& rope);

// The family for many rows of a slot; rows that stand in short runs are left to the other one.
bool attention_prefill_fits(const Context& context, const PagedAttention& attention);
void attention_prefill(Context& context, const PagedAttention& attention);

// The rows that attention_prefill leaves when its tiles have `positions_per_tile` rows of a step.
void attention_rows_left(Context& context, const PagedAttention& attention, int positions_per_tile);

// The query heads that share a key-value head are taken in `groups` groups of `group_heads`, at
// most `most`; the last group may be smaller.
struct HeadGroups {
  int sharing, groups, group_heads;
  __host__ __device__ HeadGroups(int heads, int kv_heads, int most)
      : sharing(heads / kv_heads),
        groups((sharing + most - 1) / most),
        group_heads((sharing + groups - 1) / groups) {}
};

// Whether attention_prefill takes a run of `rows` consecutive positions of one slot inside one of
// its tiles of `tile` rows.
__host__ __device__ inline bool is_tile_run(std::int64_t rows, int tile) {
  return 2 * rows >= tile;
}

}  // namespace bitwitness::cuda
