// RFC 6962 trees: published vectors, and every proof of every small tree, honest and tampered.
#include "attest/base/merkle.h"

#include "attest/base/hex.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

// The reference tree of RFC 6962 implementations: eight entries and the roots of its first n.
const char* const kEntries[] = {"",
                                "00",
                                "10",
                                "2021",
                                "3031",
                                "40414243",
                                "5051525354555657",
                                "606162636465666768696a6b6c6d6e6f"};
const char* const kRoots[] = {"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
                              "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
                              "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
                              "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
                              "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
                              "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
                              "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
                              "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
                              "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"};

std::vector<Digest> reference_leaves() {
  std::vector<Digest> leaves;
  for (const char* entry : kEntries) leaves.push_back(merkle_leaf(*from_hex(entry)));
  return leaves;
}

std::vector<Digest> numbered_leaves(std::size_t count) {
  std::vector<Digest> leaves;
  for (std::size_t i = 0; i < count; ++i)
    leaves.push_back(merkle_leaf(as_bytes(std::to_string(i))));
  return leaves;
}

// RFC 6962 §2.1, written as the definition is.
Digest by_definition(std::span<const Digest> leaves) {
  if (leaves.empty()) return merkle_empty();
  if (leaves.size() == 1) return leaves[0];
  std::size_t k = 1;
  while (2 * k < leaves.size()) k *= 2;
  return merkle_node(by_definition(leaves.first(k)), by_definition(leaves.subspan(k)));
}

TEST(Merkle, ReferenceRoots) {
  const std::vector<Digest> leaves = reference_leaves();
  MerkleAccumulator tree;
  for (std::size_t n = 0; n <= leaves.size(); ++n) {
    EXPECT_EQ(merkle_root(std::span(leaves).first(n)).hex(), kRoots[n]);
    EXPECT_EQ(tree.root().hex(), kRoots[n]);
    if (n < leaves.size()) tree.append(leaves[n]);
  }
}

TEST(Merkle, AccumulatorEqualsTheDefinition) {
  const std::vector<Digest> leaves = numbered_leaves(300);
  for (std::size_t n = 0; n <= leaves.size(); ++n) {
    ASSERT_EQ(merkle_root(std::span(leaves).first(n)), by_definition(std::span(leaves).first(n)))
        << n;
  }
}

TEST(Merkle, PublishedProofs) {
  const std::vector<Digest> leaves = reference_leaves();
  // RFC 6962 test data: path of leaf 5 in the tree of 8, consistency 6 -> 8.
  const auto path = inclusion_proof(leaves, 5);
  ASSERT_EQ(path.size(), 3U);
  EXPECT_EQ(path[0].hex(), "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b");
  EXPECT_EQ(path[1].hex(), "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0");
  EXPECT_EQ(path[2].hex(), "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7");
  const auto consistency = consistency_proof(leaves, 6);
  ASSERT_EQ(consistency.size(), 3U);
  EXPECT_EQ(consistency[0].hex(),
            "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a");
  EXPECT_EQ(consistency[1].hex(),
            "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0");
  EXPECT_EQ(consistency[2].hex(),
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7");
}

TEST(Merkle, EveryInclusionProof) {
  for (std::size_t n = 1; n <= 33; ++n) {
    const std::vector<Digest> leaves = numbered_leaves(n);
    const Digest root = merkle_root(leaves);
    for (std::size_t i = 0; i < n; ++i) {
      std::vector<Digest> proof = inclusion_proof(leaves, i);
      ASSERT_TRUE(verify_inclusion(leaves[i], i, n, proof, root)) << i << " of " << n;
      for (std::size_t j = 0; j < n; ++j) {
        if (j == i) continue;
        ASSERT_FALSE(verify_inclusion(leaves[i], j, n, proof, root)) << "index";
        ASSERT_FALSE(verify_inclusion(leaves[j], i, n, proof, root)) << "leaf";
      }
      ASSERT_FALSE(verify_inclusion(leaves[i], n, n, proof, root)) << "index out of the tree";
      for (std::size_t k = 0; k < proof.size(); ++k) {
        std::vector<Digest> bad = proof;
        bad[k].bytes[31] ^= 1;
        ASSERT_FALSE(verify_inclusion(leaves[i], i, n, bad, root)) << "hash " << k;
      }
      std::vector<Digest> longer = proof;
      longer.push_back(root);
      ASSERT_FALSE(verify_inclusion(leaves[i], i, n, longer, root)) << "too long";
      if (!proof.empty()) {
        proof.pop_back();
        ASSERT_FALSE(verify_inclusion(leaves[i], i, n, proof, root)) << "too short";
      }
    }
  }
}

TEST(Merkle, EveryConsistencyProof) {
  const std::vector<Digest> leaves = numbered_leaves(33);
  for (std::size_t n = 0; n <= leaves.size(); ++n) {
    const auto newer = std::span(leaves).first(n);
    const Digest new_root = merkle_root(newer);
    for (std::size_t m = 0; m <= n; ++m) {
      const Digest old_root = merkle_root(std::span(leaves).first(m));
      std::vector<Digest> proof = consistency_proof(newer, m);
      ASSERT_TRUE(verify_consistency(m, n, proof, old_root, new_root)) << m << " to " << n;
      for (std::size_t k = 0; k < proof.size(); ++k) {
        std::vector<Digest> bad = proof;
        bad[k].bytes[0] ^= 0x80;
        ASSERT_FALSE(verify_consistency(m, n, bad, old_root, new_root));
      }
      std::vector<Digest> longer = proof;
      longer.push_back(new_root);
      ASSERT_FALSE(verify_consistency(m, n, longer, old_root, new_root));
      Digest other = old_root;
      other.bytes[5] ^= 1;
      ASSERT_FALSE(verify_consistency(m, n, proof, other, new_root));
      if (m != n) {
        ASSERT_FALSE(verify_consistency(n, m, proof, new_root, old_root));
      }
      if (!proof.empty()) {
        proof.pop_back();
        ASSERT_FALSE(verify_consistency(m, n, proof, old_root, new_root));
      }
    }
  }
}

TEST(Merkle, StoredNodesGiveTheSameProofsOfKnownLength) {
  for (std::size_t n = 1; n <= 70; ++n) {
    const std::vector<Digest> leaves = numbered_leaves(n);
    const MerkleNodes nodes(leaves);
    for (std::size_t i = 0; i < n; ++i) {
      ASSERT_EQ(nodes.inclusion(i), inclusion_proof(leaves, i)) << i << " of " << n;
      ASSERT_EQ(nodes.inclusion(i).size(), inclusion_proof_length(i, n)) << i << " of " << n;
    }
    for (std::size_t m = 0; m <= n; ++m) {
      ASSERT_EQ(nodes.consistency(m), consistency_proof(leaves, m)) << m << " to " << n;
      ASSERT_EQ(nodes.consistency(m).size(), consistency_proof_length(m, n)) << m << " to " << n;
    }
  }
}

TEST(Merkle, ProofsOutOfTheTreeThrow) {
  const std::vector<Digest> leaves = numbered_leaves(3);
  EXPECT_THROW(inclusion_proof(leaves, 3), std::out_of_range);
  EXPECT_THROW(consistency_proof(leaves, 4), std::out_of_range);
  EXPECT_THROW(inclusion_proof_length(3, 3), std::out_of_range);
  EXPECT_THROW(consistency_proof_length(4, 3), std::out_of_range);
}

}  // namespace
}  // namespace bitwitness
