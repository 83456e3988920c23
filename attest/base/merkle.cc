#include "attest/base/merkle.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "attest/base/sha256.h"

namespace bitwitness {
namespace {

constexpr std::uint8_t kLeafTag[1] = {0x00};
constexpr std::uint8_t kNodeTag[1] = {0x01};

// RFC 6962 §2.1: the largest power of two smaller than n, n > 1.
std::uint64_t split_point(std::uint64_t n) {
  return std::bit_floor(n - 1);
}

// Hash over leaves [begin, end), begin < end; begin is a multiple of the least power of two >= end
// - begin, so a range of a power-of-two length is one stored node.
Digest range_hash(const NodeReader& node, std::uint64_t begin, std::uint64_t end) {
  const std::uint64_t n = end - begin;
  if (std::has_single_bit(n)) {
    const auto level = static_cast<unsigned>(std::countr_zero(n));
    return node(level, begin >> level);
  }
  const std::uint64_t k = split_point(n);
  return merkle_node(range_hash(node, begin, begin + k), range_hash(node, begin + k, end));
}

// RFC 6962 §2.1.1: PATH(m, D[n]).
void path(const NodeReader& node, std::uint64_t index, std::uint64_t begin, std::uint64_t end,
          std::vector<Digest>& out) {
  const std::uint64_t n = end - begin;
  if (n == 1) return;
  const std::uint64_t middle = begin + split_point(n);
  if (index < middle) {
    path(node, index, begin, middle, out);
    out.push_back(range_hash(node, middle, end));
  } else {
    path(node, index, middle, end, out);
    out.push_back(range_hash(node, begin, middle));
  }
}

// RFC 6962 §2.1.2: SUBPROOF(m, D[n], b) with m = old_size - begin.
void subproof(const NodeReader& node, std::uint64_t old_size, std::uint64_t begin,
              std::uint64_t end, bool complete, std::vector<Digest>& out) {
  if (old_size == end) {
    if (!complete) out.push_back(range_hash(node, begin, end));
    return;
  }
  const std::uint64_t middle = begin + split_point(end - begin);
  if (old_size <= middle) {
    subproof(node, old_size, begin, middle, complete, out);
    out.push_back(range_hash(node, middle, end));
  } else {
    subproof(node, old_size, middle, end, false, out);
    out.push_back(range_hash(node, begin, middle));
  }
}

// Nodes of a tree whose leaf hashes are in memory.
NodeReader reader_of(std::span<const Digest> leaf_hashes) {
  return [leaf_hashes](unsigned level, std::uint64_t index) {
    const std::uint64_t begin = index << level;
    return merkle_root(leaf_hashes.subspan(begin, std::uint64_t{1} << level));
  };
}

}  // namespace

Digest merkle_leaf(ByteView entry) {
  return sha256({ByteView(kLeafTag), entry});
}

Digest merkle_node(const Digest& left, const Digest& right) {
  return sha256({ByteView(kNodeTag), left.view(), right.view()});
}

Digest merkle_empty() {
  return sha256(ByteView{});
}

Digest merkle_root(std::span<const Digest> leaf_hashes) {
  MerkleAccumulator tree;
  for (const Digest& leaf : leaf_hashes) tree.append(leaf);
  return tree.root();
}

Digest merkle_root(const NodeReader& node, std::uint64_t size) {
  return size == 0 ? merkle_empty() : range_hash(node, 0, size);
}

std::vector<Digest> inclusion_proof(const NodeReader& node, std::uint64_t index,
                                    std::uint64_t size) {
  if (index >= size) throw std::out_of_range("inclusion proof: no such leaf");
  std::vector<Digest> out;
  path(node, index, 0, size, out);
  return out;
}

std::vector<Digest> consistency_proof(const NodeReader& node, std::uint64_t old_size,
                                      std::uint64_t new_size) {
  if (old_size > new_size) throw std::out_of_range("consistency proof: the old tree is larger");
  std::vector<Digest> out;
  if (old_size != 0 && old_size != new_size) subproof(node, old_size, 0, new_size, true, out);
  return out;
}

std::vector<Digest> inclusion_proof(std::span<const Digest> leaf_hashes, std::uint64_t index) {
  return inclusion_proof(reader_of(leaf_hashes), index, leaf_hashes.size());
}

std::vector<Digest> consistency_proof(std::span<const Digest> leaf_hashes, std::uint64_t old_size) {
  return consistency_proof(reader_of(leaf_hashes), old_size, leaf_hashes.size());
}

std::uint64_t inclusion_proof_length(std::uint64_t index, std::uint64_t size) {
  if (index >= size) throw std::out_of_range("inclusion proof: no such leaf");
  std::uint64_t length = 0;
  for (std::uint64_t n = size; n > 1; ++length) {
    const std::uint64_t k = split_point(n);
    if (index < k) {
      n = k;
    } else {
      index -= k;
      n -= k;
    }
  }
  return length;
}

std::uint64_t consistency_proof_length(std::uint64_t old_size, std::uint64_t new_size) {
  if (old_size > new_size) throw std::out_of_range("consistency proof: the old tree is larger");
  if (old_size == 0) return 0;
  std::uint64_t length = 0;
  bool complete = true;
  std::uint64_t m = old_size;
  std::uint64_t n = new_size;
  for (; m != n; ++length) {
    const std::uint64_t k = split_point(n);
    if (m <= k) {
      n = k;
    } else {
      m -= k;
      n -= k;
      complete = false;
    }
  }
  return length + (complete ? 0 : 1);
}

MerkleNodes::MerkleNodes(std::vector<Digest> leaf_hashes) {
  levels_.push_back(std::move(leaf_hashes));
  while (levels_.back().size() > 1) {
    const std::vector<Digest>& below = levels_.back();
    std::vector<Digest> level;
    level.reserve(below.size() / 2);
    for (std::size_t i = 0; i + 1 < below.size(); i += 2) {
      level.push_back(merkle_node(below[i], below[i + 1]));
    }
    levels_.push_back(std::move(level));
  }
}

NodeReader MerkleNodes::reader() const {
  return [this](unsigned level, std::uint64_t index) { return levels_.at(level).at(index); };
}

std::vector<Digest> MerkleNodes::inclusion(std::uint64_t index) const {
  return inclusion_proof(reader(), index, size());
}

std::vector<Digest> MerkleNodes::consistency(std::uint64_t old_size) const {
  return consistency_proof(reader(), old_size, size());
}

// RFC 9162 §2.1.3.2.
bool verify_inclusion(const Digest& leaf_hash, std::uint64_t index, std::uint64_t size,
                      std::span<const Digest> proof, const Digest& root) {
  if (index >= size) return false;
  std::uint64_t fn = index;
  std::uint64_t sn = size - 1;
  Digest r = leaf_hash;
  for (const Digest& p : proof) {
    if (sn == 0) return false;
    if ((fn & 1) == 1 || fn == sn) {
      r = merkle_node(p, r);
      while ((fn & 1) == 0 && fn != 0) {
        fn >>= 1;
        sn >>= 1;
      }
    } else {
      r = merkle_node(r, p);
    }
    fn >>= 1;
    sn >>= 1;
  }
  return sn == 0 && r == root;
}

// RFC 9162 §2.1.4.2.
bool verify_consistency(std::uint64_t old_size, std::uint64_t new_size,
                        std::span<const Digest> proof, const Digest& old_root,
                        const Digest& new_root) {
  if (old_size > new_size) return false;
  if (old_size == 0) {
    return proof.empty() && old_root == merkle_empty() &&
           (new_size != 0 || new_root == merkle_empty());
  }
  if (old_size == new_size) return proof.empty() && old_root == new_root;
  std::size_t next = 0;
  Digest first = old_root;
  if (!std::has_single_bit(old_size)) {
    if (proof.empty()) return false;
    first = proof[next++];
  }
  std::uint64_t fn = old_size - 1;
  std::uint64_t sn = new_size - 1;
  while ((fn & 1) == 1) {
    fn >>= 1;
    sn >>= 1;
  }
  Digest fr = first;
  Digest sr = first;
  for (; next < proof.size(); ++next) {
    const Digest& c = proof[next];
    if (sn == 0) return false;
    if ((fn & 1) == 1 || fn == sn) {
      fr = merkle_node(c, fr);
      sr = merkle_node(c, sr);
      while ((fn & 1) == 0 && fn != 0) {
        fn >>= 1;
        sn >>= 1;
      }
    } else {
      sr = merkle_node(sr, c);
    }
    fn >>= 1;
    sn >>= 1;
  }
  return sn == 0 && fr == old_root && sr == new_root;
}

void MerkleAccumulator::append(const Digest& leaf_hash) {
  Digest carry = leaf_hash;
  // Like adding one to a binary number: every trailing one merges with the carry.
  for (std::uint64_t bits = size_; (bits & 1) == 1; bits >>= 1) {
    carry = merkle_node(frontier_.back(), carry);
    frontier_.pop_back();
  }
  frontier_.push_back(carry);
  ++size_;
}

Digest MerkleAccumulator::root() const {
  if (frontier_.empty()) return merkle_empty();
  Digest root = frontier_.back();
  for (std::size_t i = frontier_.size() - 1; i-- > 0;) root = merkle_node(frontier_[i], root);
  return root;
}

}  // namespace bitwitness
