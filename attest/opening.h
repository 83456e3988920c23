// Openings: committed rows with the proofs that they are what was committed (AUDIT_FORMAT.md).
//
// An opening is a header, then the ends if any were drawn, then one part per layer, in the order of
// the sample. Parts have no lengths and no counts of their own: the challenge and the trace's shape
// give every offset, so whoever asked knows how many bytes must come before the first one does.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/base/merkle.h"
#include "attest/challenge.h"
#include "attest/key_signature.h"
#include "attest/trace.h"

namespace bitwitness {

// A verifier's request to be sent the opening of its challenge. The challenge goes into mismatch
// proofs, and with it alone nobody is sent anything: this signature never leaves the two ends.
struct OpenRequest {
  Bytes challenge;  // serialized
  KeySignature verifier;

  void sign(const SigningKey& key);
  Bytes serialize() const;
  // Form and signature; malformed otherwise. Whether the signer is the challenge's is for the
  // caller.
  static OpenRequest parse(ByteView bytes, const std::string& document);
};
constexpr std::uint64_t kMaxOpenRequestBytes = kMaxChallengeBytes + 4096;

// The prover's answer to one challenge, signed: all rows that follow lead to these roots, and the
// roots to the trace root of the record's claim.
struct OpeningHeader {
  Digest challenge;                // Challenge::digest()
  std::vector<Digest> tree_roots;  // Trace::tree_roots()
  KeySignature prover;

  void sign(const SigningKey& key);
  Bytes serialize() const;
  // Form, signature, and roots against the trace root; any flaw is malformed. `challenge` is the
  // one that was sent. Who signed is for the caller to judge.
  static OpeningHeader parse(ByteView bytes, const TraceShape& shape, const Digest& trace_root,
                             const Digest& challenge, const std::string& document);
};
std::uint64_t max_opening_header_bytes(const TraceShape& shape);

// Committed payloads by place: the bytes that were hashed. The view must stay valid until the next
// call. Used for leaves that are in the trace only.
using PayloadReader =
    std::function<ByteView(LeafType type, std::uint32_t layer, std::uint64_t position)>;

// Proofs about one trace, in logarithmic time each after the first one of a tree. Not thread-safe.
class TraceProofs {
 public:
  explicit TraceProofs(const Trace& trace) : trace_(trace) {}  // `trace` must outlive it
  std::vector<Digest> inclusion(LeafType type, std::uint32_t layer, std::uint64_t position);
  // From the first `positions` key-value leaves of a layer to all of them.
  std::vector<Digest> prefix(std::uint32_t layer, std::uint64_t positions);

 private:
  const MerkleNodes& tree(LeafType type, std::uint32_t layer);
  const Trace& trace_;
  std::map<std::pair<LeafType, std::uint32_t>, MerkleNodes> trees_;
};

// Cells of one layer: the key-value payloads of positions 0..prefix-1 with a proof that they are
// the beginning of the layer's tree, and for every cell its input and output row, each with its
// proof.
//
//   prefix x key-value payload; consistency proof from prefix to T;
//   per position: h[l][t], inclusion proof, h[l+1][t], inclusion proof
class LayerOpening {
 public:
  // Size for the cells `positions` (ascending, at least one) and a prefix beyond the last one.
  static std::uint64_t bytes(const TraceShape& shape, std::span<const std::uint64_t> positions,
                             std::uint64_t prefix);
  // prefix = last position + 1, as an opening has it.
  static std::uint64_t bytes(const TraceShape& shape, const LayerCells& cells);
  static Bytes make(TraceProofs& proofs, const TraceShape& shape, const LayerCells& cells,
                    const PayloadReader& payload);

  // Takes over `data`; std::logic_error unless it has exactly bytes().
  LayerOpening(const TraceShape& shape, LayerCells cells, std::uint64_t prefix, Bytes data);

  // Every proof, in full: malformed names layer, position and what does not fit, also a value that
  // is not finite. Fills in the leaf digests below.
  void check(std::span<const Digest> tree_roots, const std::string& document) const;

  std::uint32_t layer() const { return cells_.layer; }
  const std::vector<std::uint64_t>& positions() const { return cells_.positions; }
  std::uint64_t prefix() const { return prefix_; }
  ByteView data() const { return data_; }
  ByteView key_value(std::uint64_t position) const;  // K row then V row; position < prefix
  ByteView input(std::size_t i) const;               // h[l][positions[i]]
  ByteView output(std::size_t i) const;              // h[l+1][positions[i]]

  // The same prefix with one of the cells alone: evidence about it.
  Bytes single(std::size_t i) const;

 private:
  std::uint64_t cell_offset(std::size_t i) const { return cell_offsets_[i]; }
  std::uint64_t proof_bytes(std::size_t i) const;

  TraceShape shape_;
  LayerCells cells_;
  std::uint64_t prefix_;
  Bytes data_;
  std::vector<std::uint64_t> cell_offsets_;
};

// Ends: per embedding h[0][t] and its proof; per head h[L][t] and its proof, the logits row and its
// proof.
class EndsOpening {
 public:
  static std::uint64_t bytes(const TraceShape& shape, std::span<const std::uint64_t> embeddings,
                             std::span<const std::uint64_t> heads);
  static Bytes make(TraceProofs& proofs, const TraceShape& shape, const AuditSample& sample,
                    const PayloadReader& payload);

  // As LayerOpening.
  EndsOpening(const TraceShape& shape, std::vector<std::uint64_t> embeddings,
              std::vector<std::uint64_t> heads, Bytes data);
  void check(std::span<const Digest> tree_roots, const std::string& document) const;

  const std::vector<std::uint64_t>& embeddings() const { return embeddings_; }
  const std::vector<std::uint64_t>& heads() const { return heads_; }
  ByteView data() const { return data_; }
  ByteView embedding(std::size_t i) const;  // h[0][embeddings[i]]
  ByteView last_row(std::size_t i) const;   // h[L][heads[i]]
  ByteView logits(std::size_t i) const;     // of heads[i]

  Bytes single_embedding(std::size_t i) const;
  Bytes single_head(std::size_t i) const;

 private:
  TraceShape shape_;
  std::vector<std::uint64_t> embeddings_;
  std::vector<std::uint64_t> heads_;
  Bytes data_;
  std::vector<std::uint64_t> embedding_offsets_;  // and the end
  std::vector<std::uint64_t> head_offsets_;       // and the end
};

// The outputs of every operator of one cell, as the prover computed them: not committed, but signed
// after the fact, and given so that a difference can be put down to one operator. Names and widths
// are those of layer_forward (kernels/layer.h), in its order.
struct OperatorOutput {
  std::string name;
  std::vector<float> values;
};
struct CellOperators {
  Digest challenge;
  std::uint32_t layer = 0;
  std::uint64_t position = 0;
  std::vector<OperatorOutput> outputs;
  KeySignature prover;

  void sign(const SigningKey& key);
  Bytes serialize() const;
  // Form, signature, and that it is about this cell of this challenge; any flaw is malformed.
  static CellOperators parse(ByteView bytes, const Digest& challenge, std::uint32_t layer,
                             std::uint64_t position, const std::string& document);
};
constexpr std::uint64_t kMaxCellOperatorsBytes = std::uint64_t{64} << 20;

// The verifier's request for them, signed, so that only it gets them.
struct OperatorsRequest {
  Bytes challenge;  // serialized
  std::uint32_t layer = 0;
  std::uint64_t position = 0;
  KeySignature verifier;

  void sign(const SigningKey& key);
  Bytes serialize() const;
  static OperatorsRequest parse(ByteView bytes, const std::string& document);
};
constexpr std::uint64_t kMaxOperatorsRequestBytes = kMaxChallengeBytes + 4096;

}  // namespace bitwitness
