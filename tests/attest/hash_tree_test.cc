// The hash tree (attest/base/hash_tree.h, leaf_hash.h) against itself, the golden vectors and RFC
// shape.
#include <fstream>
#include <sstream>

#include "attest/base/hex.h"
#include "attest/base/leaf_hash.h"
#include "attest/base/merkle.h"
#include "attest/base/sha256.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

using testing::prime_cycle;

Digest portable(const LeafPrefix& prefix, const Bytes& payload) {
  const std::uint32_t count = leaf_chunk_count(payload.size());
  std::vector<DigestWords> digests(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    digests[i] = chunk_digest_bytes(prefix, i, count, leaf_chunk_bytes(payload.size(), i),
                                    payload.data() + std::size_t{i} * kLeafChunkBytes);
  }
  return to_digest(reduce_chunks(digests.data(), count));
}

TEST(HashTree, PortableEqualsOpenSslOnEverySize) {
  const LeafPrefix prefix{LeafType::kKeyValue, 3, 17, 0x123456789aULL};
  for (std::size_t size = 0; size <= 5000; ++size) {
    const Bytes payload = prime_cycle(size);
    ASSERT_EQ(portable(prefix, payload), leaf_digest(prefix, payload)) << size << " bytes";
  }
}

TEST(HashTree, ManyChunks) {
  const LeafPrefix prefix{LeafType::kLogits, 3, 0, 9};
  for (std::size_t chunks = 1; chunks <= 70; ++chunks) {
    for (const std::size_t size : {chunks * 1024 - 1, chunks * 1024, chunks * 1024 + 1}) {
      const Bytes payload = prime_cycle(size);
      ASSERT_EQ(portable(prefix, payload), leaf_digest(prefix, payload)) << size << " bytes";
    }
  }
}

TEST(HashTree, SplitPayloadEqualsItsConcatenation) {
  const LeafPrefix prefix{LeafType::kKeyValue, 3, 2, 5};
  for (const std::size_t words : {1U, 2U, 127U, 128U, 129U, 255U, 256U, 257U, 512U, 1000U}) {
    std::vector<std::uint32_t> k(words), v(words);
    for (std::size_t i = 0; i < words; ++i) {
      k[i] = static_cast<std::uint32_t>(i * 2654435761U);
      v[i] = ~k[i];
    }
    std::vector<std::uint32_t> both = k;
    both.insert(both.end(), v.begin(), v.end());
    const auto bytes_of = [](const std::vector<std::uint32_t>& x) {
      return ByteView(reinterpret_cast<const std::uint8_t*>(x.data()), 4 * x.size());
    };
    const Digest expected = leaf_digest(prefix, bytes_of(both));
    EXPECT_EQ(leaf_digest(prefix, bytes_of(k), bytes_of(v)), expected);
    EXPECT_EQ(key_value_leaf(Dtype::kFp32, 2, 5, bytes_of(k), bytes_of(v)), expected);
    const std::uint32_t count = leaf_chunk_count(8 * words);
    std::vector<DigestWords> digests(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      digests[i] = chunk_digest_words(prefix, i, k.data(), words, v.data(), words);
    }
    EXPECT_EQ(to_digest(reduce_chunks(digests.data(), count)), expected);
  }
  // Seams inside a word, for the byte path.
  const Bytes payload = prime_cycle(3000);
  for (const std::size_t seam : {0U, 1U, 1023U, 1024U, 1025U, 2999U, 3000U}) {
    EXPECT_EQ(leaf_digest(prefix, ByteView(payload).first(seam), ByteView(payload).subspan(seam)),
              leaf_digest(prefix, payload));
  }
}

TEST(HashTree, ReductionIsTheRfcTree) {
  for (std::uint32_t count = 1; count <= 40; ++count) {
    std::vector<DigestWords> words(count);
    std::vector<Digest> digests(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      words[i] = chunk_digest_bytes({LeafType::kRow, 3, 0, i}, 0, 1, 0, nullptr);
      digests[i] = to_digest(words[i]);
    }
    EXPECT_EQ(to_digest(reduce_chunks(words.data(), count)), merkle_root(digests)) << count;
  }
}

TEST(HashTree, EveryPartOfThePrefixCounts) {
  const Bytes payload = prime_cycle(1500);
  const LeafPrefix base{LeafType::kRow, 3, 1, 2};
  const Digest digest = leaf_digest(base, payload);
  EXPECT_NE(leaf_digest({LeafType::kLogits, 3, 1, 2}, payload), digest);
  EXPECT_NE(leaf_digest({LeafType::kRow, 1, 1, 2}, payload), digest);
  EXPECT_NE(leaf_digest({LeafType::kRow, 3, 0, 2}, payload), digest);
  EXPECT_NE(leaf_digest({LeafType::kRow, 3, 1, 3}, payload), digest);
  EXPECT_NE(leaf_digest({LeafType::kRow, 3, 1, 2 + (1ULL << 32)}, payload), digest);
}

// Made by a second implementation from the text of RECORD_FORMAT.md: tests/attest/make_vectors.py.
TEST(HashTree, GoldenVectors) {
  std::ifstream file(std::string(BW_TEST_DATA_DIR) + "/attest/leaf_vectors.txt");
  ASSERT_TRUE(file.good());
  std::string line;
  int cases = 0;
  while (std::getline(file, line)) {
    if (line.starts_with("#")) continue;
    std::istringstream in(line);
    unsigned type = 0, dtype = 0;
    LeafPrefix prefix{};
    std::size_t size = 0;
    std::string expected;
    in >> type >> dtype >> prefix.layer >> prefix.position >> size >> expected;
    ASSERT_TRUE(in) << line;
    prefix.type = static_cast<LeafType>(type);
    prefix.dtype = static_cast<std::uint8_t>(dtype);
    EXPECT_EQ(leaf_digest(prefix, prime_cycle(size)).hex(), expected) << line;
    EXPECT_EQ(portable(prefix, prime_cycle(size)).hex(), expected) << line;
    ++cases;
  }
  EXPECT_EQ(cases, 128);
}

TEST(HashTree, TypedLeaves) {
  const Bytes payload = prime_cycle(400);
  EXPECT_EQ(row_leaf(Dtype::kBf16, 4, 5, payload), leaf_digest({LeafType::kRow, 1, 4, 5}, payload));
  EXPECT_EQ(logits_leaf(6, payload), leaf_digest({LeafType::kLogits, 3, 0, 6}, payload));
  const std::vector<std::uint32_t> ids{1, 0x01020304};
  EXPECT_EQ(tokens_leaf(ids),
            leaf_digest({LeafType::kTokens, 0, 0, 0}, Bytes{1, 0, 0, 0, 4, 3, 2, 1}));
}

}  // namespace
}  // namespace bitwitness
