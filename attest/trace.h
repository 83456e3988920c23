// The trace: every activation row of a run under one root (RECORD_FORMAT.md "Trace").
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/base/canonical.h"
#include "attest/base/dtype.h"
#include "attest/base/hash_tree.h"

namespace bitwitness {

// L, T and the widths of a trace. T counts the positions computed: prompt tokens + emitted tokens -
// 1 (the last emitted token is never fed back). The positions that emitted a token are the last N
// ones, T - N to T - 1.
struct TraceShape {
  std::uint32_t layers = 0;     // L
  std::uint64_t positions = 0;  // T
  std::uint64_t emitted = 0;    // N, 1 <= N <= T
  std::uint32_t hidden = 0;     // elements of a row h[l][t]
  std::uint32_t kv_width = 0;   // elements of one K row (V rows have as many)
  std::uint32_t vocab = 0;      // elements of a logits row; logits are always binary32
  Dtype row_dtype = Dtype::kFp32;
  Dtype kv_dtype = Dtype::kFp32;

  // Bytes of one payload of that type. kTokens: 4 * (positions + 1).
  std::uint64_t payload_bytes(LeafType type) const;
  // Type of its elements: row_dtype, kv_dtype; binary32 for logits. None for kTokens.
  Dtype payload_dtype(LeafType type) const;
  void check(
      const Reader& reader) const;  // malformed unless the counts are possible and within limits
  void write(Writer& writer) const;
  static TraceShape read(Reader& reader);
  friend bool operator==(const TraceShape&, const TraceShape&) = default;
};

// A finished trace: all leaf digests and all roots. Immutable.
class Trace {
 public:
  const TraceShape& shape() const { return shape_; }
  const Digest& root() const { return root_; }

  // Leaf digests. layer: 0..L for kRow, 0..L-1 for kKeyValue, 0 for the others; position: 0..T-1,
  // for kLogits T-N..T-1, for kTokens 0. std::out_of_range otherwise.
  const Digest& leaf(LeafType type, std::uint32_t layer, std::uint64_t position) const;
  // All leaf digests in committed order: rows layer by layer (position running fastest), key-values
  // likewise, logits, tokens. Count: (L+1)·T + L·T + N + 1.
  std::span<const Digest> leaves() const { return leaves_; }
  // Tree roots in committed order: rows 0..L, key-values 0..L-1, logits, tokens. Count: 2L + 3.
  std::span<const Digest> tree_roots() const { return roots_; }

  static std::uint64_t leaf_count(const TraceShape& shape);
  static std::uint64_t root_count(const TraceShape& shape);
  // Position in leaves(); nullopt when there is no such leaf.
  static std::optional<std::uint64_t> leaf_index(const TraceShape& shape, LeafType type,
                                                 std::uint32_t layer, std::uint64_t position);
  // Trace root from the tree roots (root_count of them).
  static Digest root_from_tree_roots(const TraceShape& shape, std::span<const Digest> tree_roots);
  // Rebuilds a trace from its leaf digests (leaf_count of them).
  static Trace from_leaves(const TraceShape& shape, std::vector<Digest> leaves);

 private:
  Trace() = default;
  TraceShape shape_;
  std::vector<Digest> leaves_;
  std::vector<Digest> roots_;
  Digest root_;
};

// Where two traces of equal shape differ first, in the order in which a run computes them: position
// by position, and in a position h[0], then per layer its key-value leaf and h[layer+1], then
// logits; tokens last.
struct LeafPlace {
  LeafType type;
  std::uint32_t layer;
  std::uint64_t position;
};
std::optional<LeafPlace> first_difference(const Trace& a, const Trace& b);
const char* leaf_type_name(LeafType type);
// "row of layer 3, position 17", for messages.
std::string leaf_place_text(LeafType type, std::uint32_t layer, std::uint64_t position);

// The elements of a binary32 payload, which need not be aligned: they are little-endian, as is the
// memory of every host that this builds for (BitwitnessPlatform.cmake).
std::vector<float> payload_floats(ByteView payload);

// The first element of a committed payload that is Inf or NaN, if any: no trace has one.
std::optional<std::uint64_t> first_non_finite(ByteView payload, Dtype dtype);

// Collects leaf digests in any order while a run goes on. The number of positions need not be known
// beforehand. set() may be called from several threads for different leaves; reserve() may not run
// beside anything else.
class TraceBuilder {
 public:
  // `shape` gives layers, widths and types; its positions and emitted are ignored.
  explicit TraceBuilder(const TraceShape& shape);

  // Room for positions 0..positions-1 (never shrinks; amortised).
  void reserve(std::uint64_t positions);
  // Places one digest. std::logic_error: no such layer or type, position not reserved, or already
  // set. Logits may be set for any reserved position; finish() demands exactly those of the last
  // `emitted`.
  void set(LeafType type, std::uint32_t layer, std::uint64_t position, const Digest& digest);
  // Consecutive positions from `first_position` of one layer.
  void set_range(LeafType type, std::uint32_t layer, std::uint64_t first_position,
                 std::span<const Digest> digests);

  // The trace over positions 0..positions-1 with the last `emitted` logits. std::logic_error naming
  // the first leaf that is missing, or set beyond the end. The builder is left empty.
  Trace finish(std::uint64_t positions, std::uint64_t emitted);

 private:
  struct Column {  // one layer of one type, by position
    std::vector<Digest> digests;
    std::vector<std::uint8_t> present;
  };
  Column& column(LeafType type, std::uint32_t layer);
  void take(Column& from, LeafType type, std::uint32_t layer, std::uint64_t first,
            std::uint64_t count, std::vector<Digest>& to) const;

  TraceShape shape_;
  std::uint64_t reserved_ = 0;
  std::vector<Column> rows_;        // L + 1
  std::vector<Column> key_values_;  // L
  Column logits_;
  Column tokens_;
};

}  // namespace bitwitness
