// Traces: golden roots, order-free building, missing and surplus leaves, first difference.
#include "attest/trace.h"

#include <algorithm>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "attest/base/leaf_hash.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

struct Leaf {
  LeafType type;
  std::uint32_t layer;
  std::uint64_t position;
};

TraceShape shape_of(std::uint32_t layers, std::uint64_t positions, std::uint64_t emitted) {
  TraceShape shape;
  shape.layers = layers;
  shape.positions = positions;
  shape.emitted = emitted;
  shape.hidden = 4;
  shape.kv_width = 2;
  shape.vocab = 10;
  return shape;
}

std::vector<Leaf> all_leaves(const TraceShape& shape) {
  std::vector<Leaf> out;
  for (std::uint64_t t = 0; t < shape.positions; ++t) {
    for (std::uint32_t l = 0; l <= shape.layers; ++l) out.push_back({LeafType::kRow, l, t});
    for (std::uint32_t l = 0; l < shape.layers; ++l) out.push_back({LeafType::kKeyValue, l, t});
    if (t >= shape.positions - shape.emitted) out.push_back({LeafType::kLogits, 0, t});
  }
  out.push_back({LeafType::kTokens, 0, 0});
  return out;
}

Digest digest_of(const Leaf& leaf, std::uint8_t salt = 0) {
  return leaf_digest({leaf.type, 3, leaf.layer, leaf.position}, Bytes{salt});
}

Trace build(const TraceShape& shape, const std::vector<Leaf>& order) {
  TraceBuilder builder(shape);
  builder.reserve(shape.positions);
  for (const Leaf& leaf : order) {
    builder.set(leaf.type, leaf.layer, leaf.position, digest_of(leaf));
  }
  return builder.finish(shape.positions, shape.emitted);
}

// Made by a second implementation: tests/attest/make_vectors.py.
TEST(Trace, GoldenRoots) {
  std::ifstream file(std::string(BW_TEST_DATA_DIR) + "/attest/trace_vectors.txt");
  ASSERT_TRUE(file.good());
  std::string line;
  int cases = 0;
  while (std::getline(file, line)) {
    if (line.starts_with("#")) continue;
    std::istringstream in(line);
    TraceShape shape;
    std::uint64_t prompt = 0;
    std::string expected;
    in >> shape.layers >> prompt >> shape.emitted >> shape.hidden >> shape.kv_width >>
        shape.vocab >> expected;
    ASSERT_TRUE(in) << line;
    shape.positions = prompt + shape.emitted - 1;
    TraceBuilder builder(shape);
    builder.reserve(shape.positions);
    for (const Leaf& leaf : all_leaves(shape)) {
      Digest digest;
      if (leaf.type == LeafType::kTokens) {
        std::vector<std::uint32_t> ids(shape.positions + 1);
        for (std::uint32_t i = 0; i < ids.size(); ++i) ids[i] = i;
        digest = tokens_leaf(ids);
      } else {
        const std::size_t start = static_cast<std::size_t>(leaf.type) + 3 * leaf.layer +
                                  7 * static_cast<std::size_t>(leaf.position);
        const Bytes payload = testing::prime_cycle(shape.payload_bytes(leaf.type), start);
        digest = leaf_digest({leaf.type, 3, leaf.layer, leaf.position}, payload);
      }
      builder.set(leaf.type, leaf.layer, leaf.position, digest);
    }
    EXPECT_EQ(builder.finish(shape.positions, shape.emitted).root().hex(), expected) << line;
    ++cases;
  }
  EXPECT_EQ(cases, 3);
}

TEST(Trace, OrderOfArrivalDoesNotMatter) {
  const TraceShape shape = shape_of(3, 7, 4);
  std::vector<Leaf> order = all_leaves(shape);
  const Trace expected = build(shape, order);
  std::mt19937 random(1);
  for (int i = 0; i < 5; ++i) {
    std::shuffle(order.begin(), order.end(), random);
    EXPECT_EQ(build(shape, order).root(), expected.root());
  }
  // Ranges, growing room, and threads that set different leaves.
  TraceBuilder builder(shape);
  for (std::uint64_t t = 0; t < shape.positions; ++t) {
    builder.reserve(t + 1);
    std::vector<std::thread> threads;
    for (const Leaf& leaf : order) {
      if (leaf.position == t && leaf.type != LeafType::kTokens) {
        threads.emplace_back([&builder, leaf] {
          builder.set(leaf.type, leaf.layer, leaf.position, digest_of(leaf));
        });
      }
    }
    for (std::thread& thread : threads) thread.join();
  }
  builder.set(LeafType::kTokens, 0, 0, digest_of({LeafType::kTokens, 0, 0}));
  EXPECT_EQ(builder.finish(7, 4).root(), expected.root());
}

TEST(Trace, EveryLeafAndTheShapeCount) {
  const TraceShape shape = shape_of(2, 3, 2);
  const std::vector<Leaf> order = all_leaves(shape);
  const Trace honest = build(shape, order);
  EXPECT_EQ(honest.leaves().size(), Trace::leaf_count(shape));
  EXPECT_EQ(honest.tree_roots().size(), Trace::root_count(shape));
  EXPECT_EQ(Trace::root_from_tree_roots(shape, honest.tree_roots()), honest.root());
  EXPECT_FALSE(first_difference(honest, honest));
  for (const Leaf& leaf : order) {
    const auto index = Trace::leaf_index(shape, leaf.type, leaf.layer, leaf.position);
    ASSERT_TRUE(index);
    EXPECT_EQ(honest.leaf(leaf.type, leaf.layer, leaf.position), digest_of(leaf));
    std::vector<Digest> changed(honest.leaves().begin(), honest.leaves().end());
    changed[*index] = digest_of(leaf, 1);
    const Trace other = Trace::from_leaves(shape, changed);
    EXPECT_NE(other.root(), honest.root());
    const auto place = first_difference(honest, other);
    ASSERT_TRUE(place);
    EXPECT_EQ(place->type, leaf.type);
    EXPECT_EQ(place->layer, leaf.layer);
    EXPECT_EQ(place->position, leaf.position);
  }
  for (int field = 0; field < 5; ++field) {
    TraceShape other = shape;
    if (field == 0) other.hidden++;
    if (field == 1) other.kv_width++;
    if (field == 2) other.vocab++;
    if (field == 3) other.row_dtype = Dtype::kBf16;
    if (field == 4) other.kv_dtype = Dtype::kBf16;
    EXPECT_NE(Trace::root_from_tree_roots(other, honest.tree_roots()), honest.root());
  }
}

TEST(Trace, FirstDifferenceIsFirstInTheOrderOfTheRun) {
  const TraceShape shape = shape_of(2, 3, 2);
  const Trace honest = build(shape, all_leaves(shape));
  std::vector<Digest> changed(honest.leaves().begin(), honest.leaves().end());
  for (const Leaf& leaf :
       {Leaf{LeafType::kRow, 0, 2}, Leaf{LeafType::kRow, 2, 1}, Leaf{LeafType::kKeyValue, 1, 1}}) {
    changed[*Trace::leaf_index(shape, leaf.type, leaf.layer, leaf.position)] = digest_of(leaf, 1);
  }
  const auto place = first_difference(honest, Trace::from_leaves(shape, changed));
  ASSERT_TRUE(place);
  EXPECT_EQ(place->type, LeafType::kKeyValue);
  EXPECT_EQ(place->layer, 1U);
  EXPECT_EQ(place->position, 1U);
}

TEST(Trace, MissingSurplusAndRepeatedLeavesAreBugs) {
  const TraceShape shape = shape_of(2, 3, 2);
  const std::vector<Leaf> order = all_leaves(shape);
  for (std::size_t skip = 0; skip < order.size(); ++skip) {
    std::vector<Leaf> incomplete = order;
    incomplete.erase(incomplete.begin() + static_cast<std::ptrdiff_t>(skip));
    EXPECT_THROW(build(shape, incomplete), std::logic_error);
    std::vector<Leaf> repeated = order;
    repeated.push_back(order[skip]);
    EXPECT_THROW(build(shape, repeated), std::logic_error);
  }
  std::vector<Leaf> surplus = order;
  surplus.push_back({LeafType::kLogits, 0, 0});  // a position that emitted nothing
  EXPECT_THROW(build(shape, surplus), std::logic_error);
  TraceBuilder builder(shape);
  builder.reserve(2);
  EXPECT_THROW(builder.set(LeafType::kRow, 0, 2, Digest{}), std::logic_error);
  EXPECT_THROW(builder.set(LeafType::kRow, 3, 0, Digest{}), std::logic_error);
  EXPECT_THROW(builder.set(LeafType::kKeyValue, 2, 0, Digest{}), std::logic_error);
  EXPECT_THROW(builder.set(LeafType::kTensorChunk, 0, 0, Digest{}), std::logic_error);
  EXPECT_THROW(builder.finish(3, 1), std::logic_error);
  EXPECT_THROW(builder.finish(2, 0), std::logic_error);
  EXPECT_THROW(builder.finish(1, 2), std::logic_error);
  EXPECT_THROW(Trace::from_leaves(shape, {}), std::logic_error);
  EXPECT_THROW(Trace::root_from_tree_roots(shape, {}), std::logic_error);
}

}  // namespace
}  // namespace bitwitness
