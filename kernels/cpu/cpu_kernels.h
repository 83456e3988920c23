// The table of functions that one instruction set gives to CpuBackend. Every function works on one
// thread's part of an operator; bits never depend on how an operator is cut into parts.
//
// A table is filled by kernels_<isa>.cc from the templates of kernels_simd.h. Those files are
// compiled with flags of their instruction set, so nothing in them may have external linkage but
// the table: an inline function compiled there could replace its twin in the rest of the program
// (tests/kernels/cpu checks the symbols).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "attest/base/dtype.h"
#include "kernels/contract.h"

namespace bitwitness {

// Largest number of x rows that the row kernels (decode) take.
inline constexpr int kMaxDotRows = 8;

// k consecutive elements whose chains and steps the row kernels hold in registers at once.
inline constexpr int kDotBlock = contract::kChains * contract::kGroup;

// Row kernels: out[m * out_stride + n] = dot(x[m, :], W[n, :]) for a few x rows, reading W once.
// x rows are interleaved: step j of the chain in lane q of 64-block b stands at
// x[m * x_stride + 64 b + 8 j + q]; absent elements are +0. Lanes hold chains 0, 2, 4, 6, 1, 3, 5,
// 7, what transposes of 4 x 4 double words within 128 bits give.
struct DotRows {
  const std::byte* w = nullptr;  // [n, K] rows; any alignment
  std::int64_t w_stride_bytes = 0;
  std::int64_t K = 0;
  const float* x = nullptr;  // [M, x_stride]
  std::int64_t x_stride = 0;
  float* out = nullptr;  // [M, out_stride]
  std::int64_t out_stride = 0;
};
using DotRowsFunction = void (*)(const DotRows& args, int M, std::int64_t n_begin,
                                 std::int64_t n_end);

// Panel kernels: one segment of K for one panel of `panel_columns` rows of W and a range of x
// tiles. x is packed: tile by tile, [segment_k in chain order][rows of the tile].
struct PanelArgs {
  float* y = nullptr;            // [rows, N], the first row of this block
  const std::byte* w = nullptr;  // [N, K]
  std::int64_t N = 0;
  std::int64_t K = 0;
  std::int64_t k_begin = 0;  // of the segment
  int k_count = 0;           // of the segment, <= kSegment
  const float* x = nullptr;  // packed tiles
  std::int64_t rows = 0;
  std::int64_t tiles = 0;  // tile t has rows t * rows / tiles up to (t + 1) * rows / tiles
};
// Packs W rows n_begin.. (upcast) into panel[k_count][panel_columns].
using PackPanelFunction = void (*)(const PanelArgs& args, std::int64_t n_begin, float* panel);
// y (+)= segment sums of tiles [tile_begin, tile_end) for the columns of the panel.
using RunPanelFunction = void (*)(const PanelArgs& args, std::int64_t n_begin, const float* panel,
                                  std::int64_t tile_begin, std::int64_t tile_end);

// Elements of a segment of `k_count` in chain c.
constexpr int chain_length(int k_count, int c) {
  const int rest = k_count % kDotBlock - c * contract::kGroup;
  return k_count / kDotBlock * contract::kGroup + (rest < 0                  ? 0
                                                   : rest < contract::kGroup ? rest
                                                                             : contract::kGroup);
}

// Up to kMaxDotRows (row, head) pairs that read one key-value head of one sequence, in descending
// order of their last position.
struct AttentionGroup {
  int queries = 0;
  const float* q[kMaxDotRows] = {};  // [head_dim]
  float* out[kMaxDotRows] = {};      // [head_dim]
  std::int64_t last[kMaxDotRows] = {};
  const float* const* pages = nullptr;  // block b of the keys at pages[b] + key_offset
  std::int64_t key_offset = 0;
  std::int64_t value_offset = 0;
  std::int64_t stride = 0;  // from one position of a block to the next
  int head_dim = 0;
  float scale = 0.0f;
};

struct CpuKernels {
  const char* isa;
  int dot_rows;       // W rows that a row kernel works on at once: cut N in multiples of it
  int panel_columns;  // W rows of a panel
  int tile_rows;      // largest x tile
  int row_limit;      // x rows up to which the row kernels, in groups, beat the panels

  // One row of x for the row kernels; writes whole blocks of kDotBlock.
  void (*interleave)(float* out, const float* x, std::int64_t K);
  DotRowsFunction dot_rows_bf16, dot_rows_fp16, dot_rows_fp32;
  PackPanelFunction pack_panel_bf16, pack_panel_fp16, pack_panel_fp32;
  // `rows` rows of x (at x + m * K, k_count elements each) as a tile out[k_count][rows] for
  // run_panel.
  void (*pack_tile)(float* out, const float* x, std::int64_t K, int rows, int k_count);
  RunPanelFunction run_panel;
  // `x` is scratch for kMaxDotRows interleaved rows of head_dim.
  void (*attention)(const AttentionGroup& group, float* x);

  void (*upcast)(float* out, Dtype dtype, const std::byte* in, std::int64_t count);
  float (*sum_squares)(const float* x, std::int64_t K);
  // out[i] = weight[i] * (x[i] * scale); out may be x.
  void (*scale_row)(float* out, const float* x, const float* weight, float scale, std::int64_t K);
  // x[heads, 2 * half] in place; cosines[half], sines[half].
  void (*rope_row)(float* x, std::int64_t heads, std::int64_t half, const float* cosines,
                   const float* sines);
  void (*swiglu)(float* out, const float* gate, const float* up, std::int64_t count);
  void (*add)(float* out, const float* x, const float* y, std::int64_t count);
  // Index of the first non-finite element, -1 if there is none.
  std::int64_t (*find_non_finite)(const float* x, std::int64_t count);
  // Index of the first of the greatest elements; all finite, count >= 1.
  std::int64_t (*argmax)(const float* x, std::int64_t count);
};

// The table of an instruction set that cpu_supports(); null for any other name.
const CpuKernels* cpu_kernels(std::string_view isa);

// Whether the calling thread rounds to nearest even, keeps subnormals and converts binary16 as IEEE
// 754 says (a glance at the control register, MXCSR or FPCR; check_known_answers is the proof).
bool floating_point_environment_is_default();

}  // namespace bitwitness
