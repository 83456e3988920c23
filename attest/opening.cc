#include "attest/opening.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "attest/base/canonical.h"
#include "attest/base/error.h"
#include "attest/base/leaf_hash.h"
#include "attest/base/sha256.h"

namespace bitwitness {
namespace {

constexpr std::string_view kHeaderMagic = "bitwitness/opening";
constexpr std::string_view kHeaderTag = "bitwitness/opening/v1\n";
constexpr std::string_view kHeaderSignatureTag = "bitwitness/opening-signature/v1\n";
constexpr std::string_view kOperatorsMagic = "bitwitness/operators";
constexpr std::string_view kOperatorsTag = "bitwitness/operators/v1\n";
constexpr std::string_view kOperatorsSignatureTag = "bitwitness/operators-signature/v1\n";
constexpr std::string_view kOpenMagic = "bitwitness/open-request";
constexpr std::string_view kOpenTag = "bitwitness/open-request/v1\n";
constexpr std::string_view kOpenSignatureTag = "bitwitness/open-request-signature/v1\n";
constexpr std::string_view kRequestMagic = "bitwitness/operators-request";
constexpr std::string_view kRequestTag = "bitwitness/operators-request/v1\n";
constexpr std::string_view kRequestSignatureTag = "bitwitness/operators-request-signature/v1\n";
constexpr std::uint16_t kVersion = 1;
constexpr std::uint64_t kDigestBytes = 32;
constexpr std::uint64_t kMaxSignatureBytes = 4 + 255 + 4 + 32 + 64;
constexpr std::uint64_t kMaxOperators = 256;
constexpr std::uint64_t kMaxOperatorName = 64;

// Index among tree_roots() (RECORD_FORMAT.md "Trace").
std::size_t root_index(const TraceShape& shape, LeafType type, std::uint32_t layer) {
  const std::size_t L = shape.layers;
  if (type == LeafType::kRow) return layer;
  if (type == LeafType::kKeyValue) return L + 1 + layer;
  return type == LeafType::kLogits ? 2 * L + 1 : 2 * L + 2;
}

// Size of the tree that holds a leaf, and the leaf's index in it.
std::uint64_t tree_size(const TraceShape& shape, LeafType type) {
  return type == LeafType::kLogits ? shape.emitted : shape.positions;
}
std::uint64_t tree_index(const TraceShape& shape, LeafType type, std::uint64_t position) {
  return type == LeafType::kLogits ? position - (shape.positions - shape.emitted) : position;
}

std::uint64_t inclusion_bytes(const TraceShape& shape, LeafType type, std::uint64_t position) {
  return kDigestBytes *
         inclusion_proof_length(tree_index(shape, type, position), tree_size(shape, type));
}

// A payload and its proof.
std::uint64_t leaf_bytes(const TraceShape& shape, LeafType type, std::uint64_t position) {
  return shape.payload_bytes(type) + inclusion_bytes(shape, type, position);
}

std::vector<Digest> digests_of(ByteView bytes) {
  std::vector<Digest> out(bytes.size() / kDigestBytes);
  if (!out.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

// The leaf digest of an opened payload. Malformed if a value is not finite.
Digest payload_leaf(const TraceShape& shape, LeafType type, std::uint32_t layer,
                    std::uint64_t position, ByteView payload, const std::string& document) {
  const Dtype dtype = shape.payload_dtype(type);
  if (const auto element = first_non_finite(payload, dtype)) {
    throw malformed_error(document + ": element " + std::to_string(*element) + " of the " +
                          leaf_place_text(type, layer, position) +
                          " is not finite, and nothing non-finite is ever committed");
  }
  return leaf_digest({type, static_cast<std::uint8_t>(dtype), layer, position}, payload);
}

// `bytes` is a payload and its inclusion proof.
void check_leaf(const TraceShape& shape, LeafType type, std::uint32_t layer, std::uint64_t position,
                ByteView bytes, std::span<const Digest> tree_roots, const std::string& document) {
  const std::uint64_t payload_bytes = shape.payload_bytes(type);
  const Digest leaf =
      payload_leaf(shape, type, layer, position, bytes.first(payload_bytes), document);
  if (!verify_inclusion(merkle_leaf(leaf.view()), tree_index(shape, type, position),
                        tree_size(shape, type), digests_of(bytes.subspan(payload_bytes)),
                        tree_roots[root_index(shape, type, layer)])) {
    throw malformed_error(document + ": the " + leaf_place_text(type, layer, position) +
                          " is not what was committed: its proof does not lead to the root");
  }
}

class PartWriter {
 public:
  PartWriter(TraceProofs& proofs, const PayloadReader& payload, std::uint64_t bytes)
      : proofs_(proofs), payload_(payload) {
    writer_.reserve(bytes);
  }
  void payload(LeafType type, std::uint32_t layer, std::uint64_t position) {
    writer_.raw(payload_(type, layer, position));
  }
  void digests(const std::vector<Digest>& digests) {
    for (const Digest& digest : digests) writer_.digest(digest);
  }
  void leaf(LeafType type, std::uint32_t layer, std::uint64_t position) {
    payload(type, layer, position);
    digests(proofs_.inclusion(type, layer, position));
  }
  Bytes take(std::uint64_t expected) {
    if (writer_.data().size() != expected) {
      throw std::logic_error("opening: a payload has another size than the trace's shape says");
    }
    return writer_.take();
  }

 private:
  TraceProofs& proofs_;
  const PayloadReader& payload_;
  Writer writer_;
};

Digest header_digest(const OpeningHeader& header) {
  Writer writer;
  writer.raw(as_bytes(kHeaderTag));
  writer.digest(header.challenge);
  for (const Digest& root : header.tree_roots) writer.digest(root);
  return sha256(writer.data());
}

Bytes operators_body(const CellOperators& operators) {
  Writer writer;
  writer.str(kOperatorsMagic);
  writer.u16(kVersion);
  writer.digest(operators.challenge);
  writer.u32(operators.layer);
  writer.u64(operators.position);
  writer.u32(static_cast<std::uint32_t>(operators.outputs.size()));
  for (const OperatorOutput& output : operators.outputs) {
    writer.str(output.name);
    writer.bytes(as_bytes(std::as_bytes(std::span(output.values))));
  }
  return writer.take();
}

Digest operators_digest(const CellOperators& operators) {
  return sha256({as_bytes(kOperatorsTag), operators_body(operators)});
}

Digest open_request_digest(const OpenRequest& request) {
  Writer writer;
  writer.raw(as_bytes(kOpenTag));
  writer.bytes(request.challenge);
  return sha256(writer.data());
}

Digest request_digest(const OperatorsRequest& request) {
  Writer writer;
  writer.raw(as_bytes(kRequestTag));
  writer.bytes(request.challenge);
  writer.u32(request.layer);
  writer.u64(request.position);
  return sha256(writer.data());
}

}  // namespace

// ---- Request and header.

void OpenRequest::sign(const SigningKey& key) {
  verifier = KeySignature::sign(key, kOpenSignatureTag, open_request_digest(*this));
}

Bytes OpenRequest::serialize() const {
  Writer writer;
  writer.str(kOpenMagic);
  writer.u16(kVersion);
  writer.bytes(challenge);
  verifier.write(writer);
  return writer.take();
}

OpenRequest OpenRequest::parse(ByteView bytes, const std::string& document) {
  Reader reader(bytes, document);
  if (bytes.size() > kMaxOpenRequestBytes) reader.fail("request", "too long");
  reader.expect_head(kOpenMagic, kVersion);
  OpenRequest out;
  const ByteView challenge = reader.bytes(kMaxChallengeBytes, "challenge");
  out.challenge.assign(challenge.begin(), challenge.end());
  out.verifier = KeySignature::read(reader);
  reader.expect_end();
  if (!out.verifier.good(kOpenSignatureTag, open_request_digest(out))) {
    throw malformed_error(document + ": the verifier's signature is not good");
  }
  return out;
}

void OpeningHeader::sign(const SigningKey& key) {
  prover = KeySignature::sign(key, kHeaderSignatureTag, header_digest(*this));
}

Bytes OpeningHeader::serialize() const {
  Writer writer;
  writer.str(kHeaderMagic);
  writer.u16(kVersion);
  writer.digest(challenge);
  for (const Digest& root : tree_roots) writer.digest(root);
  prover.write(writer);
  return writer.take();
}

std::uint64_t max_opening_header_bytes(const TraceShape& shape) {
  return 4 + kHeaderMagic.size() + 2 + kDigestBytes * (1 + Trace::root_count(shape)) +
         kMaxSignatureBytes;
}

OpeningHeader OpeningHeader::parse(ByteView bytes, const TraceShape& shape,
                                   const Digest& trace_root, const Digest& challenge,
                                   const std::string& document) {
  Reader reader(bytes, document);
  reader.expect_head(kHeaderMagic, kVersion);
  OpeningHeader out;
  out.challenge = reader.digest("challenge");
  const ByteView roots = reader.raw(kDigestBytes * Trace::root_count(shape), "tree roots");
  out.tree_roots = digests_of(roots);
  out.prover = KeySignature::read(reader);
  reader.expect_end();
  if (out.challenge != challenge) {
    throw malformed_error(document + ": it answers another challenge");
  }
  if (!out.prover.good(kHeaderSignatureTag, header_digest(out))) {
    throw malformed_error(document + ": the prover's signature is not good");
  }
  if (Trace::root_from_tree_roots(shape, out.tree_roots) != trace_root) {
    throw malformed_error(document + ": the tree roots do not lead to the record's trace root");
  }
  return out;
}

// ---- Proofs.

const MerkleNodes& TraceProofs::tree(LeafType type, std::uint32_t layer) {
  const auto key = std::make_pair(type, layer);
  if (const auto found = trees_.find(key); found != trees_.end()) return found->second;
  const TraceShape& shape = trace_.shape();
  const std::uint64_t size = tree_size(shape, type);
  const std::uint64_t first = type == LeafType::kLogits ? shape.positions - shape.emitted : 0;
  std::vector<Digest> leaves;
  leaves.reserve(size);
  for (std::uint64_t i = 0; i < size; ++i) {
    leaves.push_back(merkle_leaf(trace_.leaf(type, layer, first + i).view()));
  }
  return trees_.emplace(key, MerkleNodes(std::move(leaves))).first->second;
}

std::vector<Digest> TraceProofs::inclusion(LeafType type, std::uint32_t layer,
                                           std::uint64_t position) {
  return tree(type, layer).inclusion(tree_index(trace_.shape(), type, position));
}

std::vector<Digest> TraceProofs::prefix(std::uint32_t layer, std::uint64_t positions) {
  return tree(LeafType::kKeyValue, layer).consistency(positions);
}

// ---- Layers.

std::uint64_t LayerOpening::bytes(const TraceShape& shape, std::span<const std::uint64_t> positions,
                                  std::uint64_t prefix) {
  std::uint64_t total = prefix * shape.payload_bytes(LeafType::kKeyValue) +
                        kDigestBytes * consistency_proof_length(prefix, shape.positions);
  for (const std::uint64_t t : positions) total += 2 * leaf_bytes(shape, LeafType::kRow, t);
  return total;
}

std::uint64_t LayerOpening::bytes(const TraceShape& shape, const LayerCells& cells) {
  return bytes(shape, cells.positions, cells.positions.back() + 1);
}

Bytes LayerOpening::make(TraceProofs& proofs, const TraceShape& shape, const LayerCells& cells,
                         const PayloadReader& payload) {
  const std::uint64_t prefix = cells.positions.back() + 1;
  const std::uint64_t size = bytes(shape, cells);
  PartWriter writer(proofs, payload, size);
  for (std::uint64_t t = 0; t < prefix; ++t) writer.payload(LeafType::kKeyValue, cells.layer, t);
  writer.digests(proofs.prefix(cells.layer, prefix));
  for (const std::uint64_t t : cells.positions) {
    writer.leaf(LeafType::kRow, cells.layer, t);
    writer.leaf(LeafType::kRow, cells.layer + 1, t);
  }
  return writer.take(size);
}

LayerOpening::LayerOpening(const TraceShape& shape, LayerCells cells, std::uint64_t prefix,
                           Bytes data)
    : shape_(shape), cells_(std::move(cells)), prefix_(prefix), data_(std::move(data)) {
  if (cells_.positions.empty() || prefix_ <= cells_.positions.back() ||
      prefix_ > shape_.positions || data_.size() != bytes(shape_, cells_.positions, prefix_)) {
    throw std::logic_error("LayerOpening: the bytes are not of these cells");
  }
  std::uint64_t at = prefix_ * shape_.payload_bytes(LeafType::kKeyValue) +
                     kDigestBytes * consistency_proof_length(prefix_, shape_.positions);
  for (const std::uint64_t t : cells_.positions) {
    cell_offsets_.push_back(at);
    at += 2 * leaf_bytes(shape_, LeafType::kRow, t);
  }
}

ByteView LayerOpening::key_value(std::uint64_t position) const {
  const std::uint64_t size = shape_.payload_bytes(LeafType::kKeyValue);
  return ByteView(data_).subspan(position * size, size);
}

std::uint64_t LayerOpening::proof_bytes(std::size_t i) const {
  return inclusion_bytes(shape_, LeafType::kRow, cells_.positions[i]);
}

ByteView LayerOpening::input(std::size_t i) const {
  return ByteView(data_).subspan(cell_offset(i), shape_.payload_bytes(LeafType::kRow));
}

ByteView LayerOpening::output(std::size_t i) const {
  const std::uint64_t size = shape_.payload_bytes(LeafType::kRow);
  return ByteView(data_).subspan(cell_offset(i) + size + proof_bytes(i), size);
}

void LayerOpening::check(std::span<const Digest> tree_roots, const std::string& document) const {
  const std::uint32_t l = cells_.layer;
  const std::string what = document + ": opening of layer " + std::to_string(l);
  MerkleAccumulator tree;
  for (std::uint64_t t = 0; t < prefix_; ++t) {
    const Digest leaf = payload_leaf(shape_, LeafType::kKeyValue, l, t, key_value(t), what);
    tree.append(merkle_leaf(leaf.view()));
  }
  const std::uint64_t proof_at = prefix_ * shape_.payload_bytes(LeafType::kKeyValue);
  const ByteView proof = ByteView(data_).subspan(
      proof_at, kDigestBytes * consistency_proof_length(prefix_, shape_.positions));
  if (!verify_consistency(prefix_, shape_.positions, digests_of(proof), tree.root(),
                          tree_roots[root_index(shape_, LeafType::kKeyValue, l)])) {
    throw malformed_error(what + ": the keys and values of positions 0 to " +
                          std::to_string(prefix_ - 1) +
                          " are not what was committed: their proof does not lead to the root");
  }
  for (std::size_t i = 0; i < cells_.positions.size(); ++i) {
    const std::uint64_t t = cells_.positions[i];
    const std::uint64_t size = leaf_bytes(shape_, LeafType::kRow, t);
    check_leaf(shape_, LeafType::kRow, l, t, ByteView(data_).subspan(cell_offset(i), size),
               tree_roots, what);
    check_leaf(shape_, LeafType::kRow, l + 1, t,
               ByteView(data_).subspan(cell_offset(i) + size, size), tree_roots, what);
  }
}

Bytes LayerOpening::single(std::size_t i) const {
  Writer writer;
  writer.raw(ByteView(data_).first(cell_offset(0)));
  writer.raw(ByteView(data_).subspan(cell_offset(i),
                                     2 * leaf_bytes(shape_, LeafType::kRow, cells_.positions[i])));
  return writer.take();
}

// ---- Ends.

namespace {

std::uint64_t embedding_bytes(const TraceShape& shape, std::uint64_t t) {
  return leaf_bytes(shape, LeafType::kRow, t);
}
std::uint64_t head_bytes(const TraceShape& shape, std::uint64_t t) {
  return leaf_bytes(shape, LeafType::kRow, t) + leaf_bytes(shape, LeafType::kLogits, t);
}

}  // namespace

std::uint64_t EndsOpening::bytes(const TraceShape& shape, std::span<const std::uint64_t> embeddings,
                                 std::span<const std::uint64_t> heads) {
  std::uint64_t total = 0;
  for (const std::uint64_t t : embeddings) total += embedding_bytes(shape, t);
  for (const std::uint64_t t : heads) total += head_bytes(shape, t);
  return total;
}

Bytes EndsOpening::make(TraceProofs& proofs, const TraceShape& shape, const AuditSample& sample,
                        const PayloadReader& payload) {
  const std::uint64_t size = bytes(shape, sample.embeddings, sample.heads);
  PartWriter writer(proofs, payload, size);
  for (const std::uint64_t t : sample.embeddings) writer.leaf(LeafType::kRow, 0, t);
  for (const std::uint64_t t : sample.heads) {
    writer.leaf(LeafType::kRow, shape.layers, t);
    writer.leaf(LeafType::kLogits, 0, t);
  }
  return writer.take(size);
}

EndsOpening::EndsOpening(const TraceShape& shape, std::vector<std::uint64_t> embeddings,
                         std::vector<std::uint64_t> heads, Bytes data)
    : shape_(shape),
      embeddings_(std::move(embeddings)),
      heads_(std::move(heads)),
      data_(std::move(data)) {
  std::uint64_t at = 0;
  for (const std::uint64_t t : embeddings_) {
    embedding_offsets_.push_back(at);
    at += embedding_bytes(shape_, t);
  }
  embedding_offsets_.push_back(at);
  for (const std::uint64_t t : heads_) {
    head_offsets_.push_back(at);
    at += head_bytes(shape_, t);
  }
  head_offsets_.push_back(at);
  if (data_.size() != at) throw std::logic_error("EndsOpening: the bytes are not of these ends");
}

ByteView EndsOpening::embedding(std::size_t i) const {
  return ByteView(data_).subspan(embedding_offsets_[i], shape_.payload_bytes(LeafType::kRow));
}

ByteView EndsOpening::last_row(std::size_t i) const {
  return ByteView(data_).subspan(head_offsets_[i], shape_.payload_bytes(LeafType::kRow));
}

ByteView EndsOpening::logits(std::size_t i) const {
  return ByteView(data_).subspan(head_offsets_[i] + leaf_bytes(shape_, LeafType::kRow, heads_[i]),
                                 shape_.payload_bytes(LeafType::kLogits));
}

void EndsOpening::check(std::span<const Digest> tree_roots, const std::string& document) const {
  const std::string what = document + ": opening of the ends";
  for (std::size_t i = 0; i < embeddings_.size(); ++i) {
    check_leaf(shape_, LeafType::kRow, 0, embeddings_[i],
               ByteView(data_).subspan(embedding_offsets_[i],
                                       embedding_offsets_[i + 1] - embedding_offsets_[i]),
               tree_roots, what);
  }
  for (std::size_t i = 0; i < heads_.size(); ++i) {
    const std::uint64_t t = heads_[i];
    const std::uint64_t row = leaf_bytes(shape_, LeafType::kRow, t);
    const std::uint64_t logits = leaf_bytes(shape_, LeafType::kLogits, t);
    check_leaf(shape_, LeafType::kRow, shape_.layers, t,
               ByteView(data_).subspan(head_offsets_[i], row), tree_roots, what);
    check_leaf(shape_, LeafType::kLogits, 0, t,
               ByteView(data_).subspan(head_offsets_[i] + row, logits), tree_roots, what);
  }
}

Bytes EndsOpening::single_embedding(std::size_t i) const {
  const ByteView part = ByteView(data_).subspan(embedding_offsets_[i],
                                                embedding_offsets_[i + 1] - embedding_offsets_[i]);
  return Bytes(part.begin(), part.end());
}

Bytes EndsOpening::single_head(std::size_t i) const {
  const ByteView part =
      ByteView(data_).subspan(head_offsets_[i], head_offsets_[i + 1] - head_offsets_[i]);
  return Bytes(part.begin(), part.end());
}

// ---- Operators of a cell.

void CellOperators::sign(const SigningKey& key) {
  prover = KeySignature::sign(key, kOperatorsSignatureTag, operators_digest(*this));
}

Bytes CellOperators::serialize() const {
  Writer writer;
  writer.raw(operators_body(*this));
  prover.write(writer);
  return writer.take();
}

CellOperators CellOperators::parse(ByteView bytes, const Digest& challenge, std::uint32_t layer,
                                   std::uint64_t position, const std::string& document) {
  Reader reader(bytes, document);
  if (bytes.size() > kMaxCellOperatorsBytes) reader.fail("operators", "over the limit of 64 MiB");
  reader.expect_head(kOperatorsMagic, kVersion);
  CellOperators out;
  out.challenge = reader.digest("challenge");
  out.layer = reader.u32("layer");
  out.position = reader.u64("position");
  const std::uint32_t count = reader.count(kMaxOperators, 8, "operators");
  for (std::uint32_t i = 0; i < count; ++i) {
    OperatorOutput output;
    output.name = reader.str(kMaxOperatorName, "operator name");
    const ByteView values = reader.bytes(kMaxCellOperatorsBytes, "operator output");
    if (values.size() % sizeof(float) != 0) reader.fail("operator output", "no whole binary32");
    output.values.resize(values.size() / sizeof(float));
    if (!values.empty()) std::memcpy(output.values.data(), values.data(), values.size());
    out.outputs.push_back(std::move(output));
  }
  out.prover = KeySignature::read(reader);
  reader.expect_end();
  if (out.challenge != challenge || out.layer != layer || out.position != position) {
    throw malformed_error(document + ": it is about another challenge or cell");
  }
  if (!out.prover.good(kOperatorsSignatureTag, operators_digest(out))) {
    throw malformed_error(document + ": the prover's signature is not good");
  }
  return out;
}

void OperatorsRequest::sign(const SigningKey& key) {
  verifier = KeySignature::sign(key, kRequestSignatureTag, request_digest(*this));
}

Bytes OperatorsRequest::serialize() const {
  Writer writer;
  writer.str(kRequestMagic);
  writer.u16(kVersion);
  writer.bytes(challenge);
  writer.u32(layer);
  writer.u64(position);
  verifier.write(writer);
  return writer.take();
}

OperatorsRequest OperatorsRequest::parse(ByteView bytes, const std::string& document) {
  Reader reader(bytes, document);
  if (bytes.size() > kMaxOperatorsRequestBytes) reader.fail("request", "too long");
  reader.expect_head(kRequestMagic, kVersion);
  OperatorsRequest out;
  const ByteView challenge = reader.bytes(kMaxChallengeBytes, "challenge");
  out.challenge.assign(challenge.begin(), challenge.end());
  out.layer = reader.u32("layer");
  out.position = reader.u64("position");
  out.verifier = KeySignature::read(reader);
  reader.expect_end();
  if (!out.verifier.good(kRequestSignatureTag, request_digest(out))) {
    throw malformed_error(document + ": the verifier's signature is not good");
  }
  return out;
}

}  // namespace bitwitness
