// Merkle trees by RFC 6962 §2.1 and the verification algorithms of RFC 9162 §2.1.3.2 and §2.1.4.2.
// Functions take leaf *hashes* (merkle_leaf of an entry), not entries.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "attest/base/bytes.h"

namespace bitwitness {

Digest merkle_leaf(ByteView entry);                           // SHA-256(0x00 ‖ entry)
Digest merkle_node(const Digest& left, const Digest& right);  // SHA-256(0x01 ‖ left ‖ right)
Digest merkle_empty();                                        // SHA-256("")

Digest merkle_root(std::span<const Digest> leaf_hashes);

// Audit path of leaf `index`, from the leaf's sibling upwards. index < size, else
// std::out_of_range.
std::vector<Digest> inclusion_proof(std::span<const Digest> leaf_hashes, std::uint64_t index);
// From a tree of old_size leaves to all of `leaf_hashes`. old_size <= size, else std::out_of_range.
// Empty for old_size 0 and old_size == size.
std::vector<Digest> consistency_proof(std::span<const Digest> leaf_hashes, std::uint64_t old_size);

// How many hashes those proofs have: a function of the sizes alone. Same errors.
std::uint64_t inclusion_proof_length(std::uint64_t index, std::uint64_t size);
std::uint64_t consistency_proof_length(std::uint64_t old_size, std::uint64_t new_size);

// False for any proof that does not lead exactly there: wrong hashes, too few, too many, bad index.
bool verify_inclusion(const Digest& leaf_hash, std::uint64_t index, std::uint64_t size,
                      std::span<const Digest> proof, const Digest& root);
// old_size 0 is consistent with everything and takes an empty proof (and old_root =
// merkle_empty()).
bool verify_consistency(std::uint64_t old_size, std::uint64_t new_size,
                        std::span<const Digest> proof, const Digest& old_root,
                        const Digest& new_root);

// Proofs out of stored nodes: node(level, i) is the hash over leaves [i·2^level, (i+1)·2^level),
// and is asked for complete subtrees inside `size` only.
using NodeReader = std::function<Digest(unsigned level, std::uint64_t index)>;
Digest merkle_root(const NodeReader& node, std::uint64_t size);
std::vector<Digest> inclusion_proof(const NodeReader& node, std::uint64_t index,
                                    std::uint64_t size);
std::vector<Digest> consistency_proof(const NodeReader& node, std::uint64_t old_size,
                                      std::uint64_t new_size);

// All complete subtrees of a tree in memory, so that many proofs cost logarithmic time each.
class MerkleNodes {
 public:
  explicit MerkleNodes(std::vector<Digest> leaf_hashes);
  std::uint64_t size() const { return levels_[0].size(); }
  std::vector<Digest> inclusion(std::uint64_t index) const;
  std::vector<Digest> consistency(std::uint64_t old_size) const;

 private:
  NodeReader reader() const;
  std::vector<std::vector<Digest>> levels_;  // [level][index]
};

// Append-only root in O(log n) memory: the frontier of complete subtrees.
class MerkleAccumulator {
 public:
  void append(const Digest& leaf_hash);
  std::uint64_t size() const { return size_; }
  Digest root() const;

 private:
  std::uint64_t size_ = 0;
  std::vector<Digest> frontier_;  // one per set bit of size_, largest subtree first
};

}  // namespace bitwitness
