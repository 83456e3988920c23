#include "attest/trace.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "attest/base/error.h"
#include "attest/base/merkle.h"

namespace bitwitness {
namespace {

constexpr std::string_view kTraceMagic = "bitwitness/trace";
constexpr std::uint16_t kTraceVersion = 1;

// Bounds that no real model meets and under which no size computed here overflows 64 bits.
constexpr std::uint32_t kMaxLayers = 1 << 16;
constexpr std::uint64_t kMaxPositions = std::uint64_t{1} << 26;
constexpr std::uint32_t kMaxWidth = 1 << 26;

std::optional<Dtype> to_dtype(std::uint8_t value) {
  const auto dtype = static_cast<Dtype>(value);
  switch (dtype) {
    case Dtype::kBf16:
    case Dtype::kFp16:
    case Dtype::kFp32:
      return dtype;
  }
  return std::nullopt;
}

// Root of one tree: its leaves are leaf digests, wrapped as RFC 6962 entries because a leaf digest
// of several chunks is itself a 0x01 node.
Digest tree_root(std::span<const Digest> leaf_digests) {
  MerkleAccumulator tree;
  for (const Digest& digest : leaf_digests) tree.append(merkle_leaf(digest.view()));
  return tree.root();
}

}  // namespace

const char* leaf_type_name(LeafType type) {
  switch (type) {
    case LeafType::kRow:
      return "row";
    case LeafType::kKeyValue:
      return "key-value";
    case LeafType::kLogits:
      return "logits";
    case LeafType::kTokens:
      return "tokens";
    case LeafType::kTensorChunk:
      return "tensor chunk";
  }
  return "unknown";
}

std::optional<std::uint64_t> first_non_finite(ByteView payload, Dtype dtype) {
  const std::size_t width = dtype_bytes(dtype);
  // The exponent bits, as they lie in the element's upper 16 bits.
  const std::uint32_t mask = dtype == Dtype::kFp16 ? 0x7c00U : 0x7f80U;
  for (std::size_t i = 0; i + width <= payload.size(); i += width) {
    const std::uint32_t upper =
        std::uint32_t{payload[i + width - 2]} | std::uint32_t{payload[i + width - 1]} << 8;
    if ((upper & mask) == mask) return i / width;
  }
  return std::nullopt;
}

std::string leaf_place_text(LeafType type, std::uint32_t layer, std::uint64_t position) {
  return std::string(leaf_type_name(type)) + " of layer " + std::to_string(layer) + ", position " +
         std::to_string(position);
}

std::vector<float> payload_floats(ByteView payload) {
  std::vector<float> out(payload.size() / sizeof(float));
  if (!out.empty()) std::memcpy(out.data(), payload.data(), out.size() * sizeof(float));
  return out;
}

Dtype TraceShape::payload_dtype(LeafType type) const {
  if (type == LeafType::kRow) return row_dtype;
  if (type == LeafType::kKeyValue) return kv_dtype;
  return Dtype::kFp32;
}

std::uint64_t TraceShape::payload_bytes(LeafType type) const {
  switch (type) {
    case LeafType::kRow:
      return std::uint64_t{hidden} * dtype_bytes(row_dtype);
    case LeafType::kKeyValue:
      return std::uint64_t{2} * kv_width * dtype_bytes(kv_dtype);
    case LeafType::kLogits:
      return std::uint64_t{4} * vocab;
    case LeafType::kTokens:
      return 4 * (positions + 1);
    case LeafType::kTensorChunk:
      break;
  }
  throw std::logic_error("TraceShape: tensor chunks are no part of a trace");
}

void TraceShape::check(const Reader& reader) const {
  const char* field = "trace shape";
  if (layers == 0 || layers > kMaxLayers) reader.fail(field, "layers out of range");
  if (positions == 0 || positions > kMaxPositions) reader.fail(field, "positions out of range");
  if (emitted == 0 || emitted > positions) reader.fail(field, "emitted positions out of range");
  if (hidden == 0 || hidden > kMaxWidth) reader.fail(field, "hidden width out of range");
  if (kv_width == 0 || kv_width > kMaxWidth) reader.fail(field, "key-value width out of range");
  if (vocab == 0 || vocab > kMaxWidth) reader.fail(field, "vocabulary out of range");
}

void TraceShape::write(Writer& writer) const {
  writer.u32(layers);
  writer.u64(positions);
  writer.u64(emitted);
  writer.u32(hidden);
  writer.u32(kv_width);
  writer.u32(vocab);
  writer.u8(static_cast<std::uint8_t>(row_dtype));
  writer.u8(static_cast<std::uint8_t>(kv_dtype));
}

TraceShape TraceShape::read(Reader& reader) {
  TraceShape shape;
  shape.layers = reader.u32("trace layers");
  shape.positions = reader.u64("trace positions");
  shape.emitted = reader.u64("trace emitted");
  shape.hidden = reader.u32("trace hidden");
  shape.kv_width = reader.u32("trace kv_width");
  shape.vocab = reader.u32("trace vocab");
  const auto row = to_dtype(reader.u8("trace row dtype"));
  if (!row) reader.fail("trace row dtype", "unknown type");
  const auto kv = to_dtype(reader.u8("trace key-value dtype"));
  if (!kv) reader.fail("trace key-value dtype", "unknown type");
  shape.row_dtype = *row;
  shape.kv_dtype = *kv;
  shape.check(reader);
  return shape;
}

std::uint64_t Trace::leaf_count(const TraceShape& shape) {
  return (2 * std::uint64_t{shape.layers} + 1) * shape.positions + shape.emitted + 1;
}

std::uint64_t Trace::root_count(const TraceShape& shape) {
  return 2 * std::uint64_t{shape.layers} + 3;
}

std::optional<std::uint64_t> Trace::leaf_index(const TraceShape& shape, LeafType type,
                                               std::uint32_t layer, std::uint64_t position) {
  const std::uint64_t rows = (std::uint64_t{shape.layers} + 1) * shape.positions;
  const std::uint64_t key_values = std::uint64_t{shape.layers} * shape.positions;
  switch (type) {
    case LeafType::kRow:
      if (layer > shape.layers || position >= shape.positions) return std::nullopt;
      return layer * shape.positions + position;
    case LeafType::kKeyValue:
      if (layer >= shape.layers || position >= shape.positions) return std::nullopt;
      return rows + layer * shape.positions + position;
    case LeafType::kLogits: {
      const std::uint64_t first = shape.positions - shape.emitted;
      if (layer != 0 || position < first || position >= shape.positions) return std::nullopt;
      return rows + key_values + position - first;
    }
    case LeafType::kTokens:
      if (layer != 0 || position != 0) return std::nullopt;
      return rows + key_values + shape.emitted;
    case LeafType::kTensorChunk:
      break;
  }
  return std::nullopt;
}

const Digest& Trace::leaf(LeafType type, std::uint32_t layer, std::uint64_t position) const {
  const auto index = leaf_index(shape_, type, layer, position);
  if (!index) throw std::out_of_range("trace: no " + leaf_place_text(type, layer, position));
  return leaves_[*index];
}

Digest Trace::root_from_tree_roots(const TraceShape& shape, std::span<const Digest> tree_roots) {
  if (tree_roots.size() != root_count(shape)) {
    throw std::logic_error("trace: wrong number of tree roots");
  }
  Writer header;
  header.str(kTraceMagic);
  header.u16(kTraceVersion);
  shape.write(header);
  MerkleAccumulator tree;
  tree.append(merkle_leaf(header.data()));
  for (const Digest& root : tree_roots) tree.append(merkle_leaf(root.view()));
  return tree.root();
}

Trace Trace::from_leaves(const TraceShape& shape, std::vector<Digest> leaves) {
  if (leaves.size() != leaf_count(shape)) {
    throw std::logic_error("trace: wrong number of leaf digests");
  }
  Trace trace;
  trace.shape_ = shape;
  trace.leaves_ = std::move(leaves);
  std::span<const Digest> rest = trace.leaves_;
  const auto next_tree = [&](std::uint64_t count) {
    trace.roots_.push_back(tree_root(rest.first(count)));
    rest = rest.subspan(count);
  };
  for (std::uint64_t i = 0; i < 2 * std::uint64_t{shape.layers} + 1; ++i) {
    next_tree(shape.positions);
  }
  next_tree(shape.emitted);
  next_tree(1);
  trace.root_ = root_from_tree_roots(shape, trace.roots_);
  return trace;
}

std::optional<LeafPlace> first_difference(const Trace& a, const Trace& b) {
  if (a.shape() != b.shape()) {
    throw std::logic_error("first_difference: the traces have different shapes");
  }
  const TraceShape& shape = a.shape();
  const auto differs = [&](LeafType type, std::uint32_t layer, std::uint64_t position) {
    return a.leaf(type, layer, position) != b.leaf(type, layer, position);
  };
  for (std::uint64_t t = 0; t < shape.positions; ++t) {
    if (differs(LeafType::kRow, 0, t)) return LeafPlace{LeafType::kRow, 0, t};
    for (std::uint32_t l = 0; l < shape.layers; ++l) {
      if (differs(LeafType::kKeyValue, l, t)) return LeafPlace{LeafType::kKeyValue, l, t};
      if (differs(LeafType::kRow, l + 1, t)) return LeafPlace{LeafType::kRow, l + 1, t};
    }
    if (t >= shape.positions - shape.emitted && differs(LeafType::kLogits, 0, t)) {
      return LeafPlace{LeafType::kLogits, 0, t};
    }
  }
  if (differs(LeafType::kTokens, 0, 0)) return LeafPlace{LeafType::kTokens, 0, 0};
  return std::nullopt;
}

TraceBuilder::TraceBuilder(const TraceShape& shape) : shape_(shape) {
  if (shape.layers == 0 || shape.layers > kMaxLayers) {
    throw std::logic_error("TraceBuilder: layers out of range");
  }
  rows_.resize(std::size_t{shape.layers} + 1);
  key_values_.resize(shape.layers);
  tokens_.digests.resize(1);
  tokens_.present.resize(1);
}

void TraceBuilder::reserve(std::uint64_t positions) {
  if (positions <= reserved_) return;
  if (positions > kMaxPositions) throw std::logic_error("TraceBuilder: too many positions");
  const std::uint64_t grown = std::max(positions, reserved_ + reserved_ / 2);
  const auto grow = [&](Column& column) {
    column.digests.resize(grown);
    column.present.resize(grown);
  };
  for (Column& column : rows_) grow(column);
  for (Column& column : key_values_) grow(column);
  grow(logits_);
  reserved_ = grown;
}

TraceBuilder::Column& TraceBuilder::column(LeafType type, std::uint32_t layer) {
  switch (type) {
    case LeafType::kRow:
      if (layer < rows_.size()) return rows_[layer];
      break;
    case LeafType::kKeyValue:
      if (layer < key_values_.size()) return key_values_[layer];
      break;
    case LeafType::kLogits:
      if (layer == 0) return logits_;
      break;
    case LeafType::kTokens:
      if (layer == 0) return tokens_;
      break;
    case LeafType::kTensorChunk:
      break;
  }
  throw std::logic_error("TraceBuilder: a trace has no " + leaf_place_text(type, layer, 0));
}

void TraceBuilder::set(LeafType type, std::uint32_t layer, std::uint64_t position,
                       const Digest& digest) {
  set_range(type, layer, position, {&digest, 1});
}

void TraceBuilder::set_range(LeafType type, std::uint32_t layer, std::uint64_t first_position,
                             std::span<const Digest> digests) {
  Column& to = column(type, layer);
  if (first_position > to.digests.size() || digests.size() > to.digests.size() - first_position) {
    throw std::logic_error("TraceBuilder: not reserved: " +
                           leaf_place_text(type, layer, first_position + digests.size() - 1));
  }
  for (std::size_t i = 0; i < digests.size(); ++i) {
    std::uint8_t& present = to.present[first_position + i];
    if (present != 0) {
      throw std::logic_error("TraceBuilder: set twice: " +
                             leaf_place_text(type, layer, first_position + i));
    }
    present = 1;
    to.digests[first_position + i] = digests[i];
  }
}

void TraceBuilder::take(Column& from, LeafType type, std::uint32_t layer, std::uint64_t first,
                        std::uint64_t count, std::vector<Digest>& to) const {
  for (std::uint64_t i = 0; i < from.present.size(); ++i) {
    const bool wanted = i >= first && i < first + count;
    if (wanted != (from.present[i] != 0)) {
      throw std::logic_error(
          "TraceBuilder: " + std::string(wanted ? "missing: " : "not expected: ") +
          leaf_place_text(type, layer, i));
    }
  }
  const auto begin = from.digests.begin() + static_cast<std::ptrdiff_t>(first);
  to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(count));
  from = Column{};
}

Trace TraceBuilder::finish(std::uint64_t positions, std::uint64_t emitted) {
  if (positions == 0 || emitted == 0 || emitted > positions || positions > reserved_) {
    throw std::logic_error("TraceBuilder: impossible counts: " + std::to_string(positions) +
                           " positions, " + std::to_string(emitted) + " emitted, " +
                           std::to_string(reserved_) + " reserved");
  }
  TraceShape shape = shape_;
  shape.positions = positions;
  shape.emitted = emitted;
  std::vector<Digest> leaves;
  leaves.reserve(Trace::leaf_count(shape));
  for (std::uint32_t l = 0; l < rows_.size(); ++l) {
    take(rows_[l], LeafType::kRow, l, 0, positions, leaves);
  }
  for (std::uint32_t l = 0; l < key_values_.size(); ++l) {
    take(key_values_[l], LeafType::kKeyValue, l, 0, positions, leaves);
  }
  take(logits_, LeafType::kLogits, 0, positions - emitted, emitted, leaves);
  take(tokens_, LeafType::kTokens, 0, 0, 1, leaves);
  *this = TraceBuilder(shape_);
  return Trace::from_leaves(shape, std::move(leaves));
}

}  // namespace bitwitness
