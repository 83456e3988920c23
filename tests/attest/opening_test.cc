// Openings: bytes of a second implementation, sizes known beforehand, every altered byte refused.
#include "attest/opening.h"

#include <cstring>
#include <fstream>
#include <sstream>

#include "attest/base/leaf_hash.h"
#include "attest/base/sha256.h"
#include "attest/record.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

using testing::error_kind;
using testing::fixed_key;
using testing::sample_run;
using testing::SampleRun;

// The payloads of the "part" vectors: no exponent is all ones.
Bytes vector_payload(LeafType type, std::uint32_t layer, std::uint64_t position, std::size_t size) {
  Bytes out(size);
  for (std::size_t i = 0; i < size; ++i) {
    out[i] = i % 4 == 3
                 ? std::uint8_t{0}
                 : static_cast<std::uint8_t>(
                       (i + static_cast<std::size_t>(type) + 3 * layer + 7 * position) % 251);
  }
  return out;
}

TEST(Opening, PartVectors) {
  std::ifstream file(std::string(BW_TEST_DATA_DIR) + "/attest/audit_vectors.txt");
  int checked = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string kind, positions, digest;
    std::uint32_t layer = 0;
    std::uint64_t bytes = 0;
    TraceShape shape;
    shape.emitted = 1;
    shape.vocab = 2;
    if (!(words >> kind) || kind != "part") continue;
    words >> layer >> positions >> shape.positions >> shape.hidden >> shape.kv_width >> bytes >>
        digest;
    shape.layers = layer + 1;
    LayerCells cells{layer, {}};
    std::istringstream list(positions);
    for (std::string t; std::getline(list, t, ',');) cells.positions.push_back(std::stoull(t));

    TraceBuilder builder(shape);
    builder.reserve(shape.positions);
    for (std::uint64_t t = 0; t < shape.positions; ++t) {
      for (std::uint32_t l = 0; l <= shape.layers; ++l) {
        const Bytes row = vector_payload(LeafType::kRow, l, t, 4 * shape.hidden);
        builder.set(LeafType::kRow, l, t, row_leaf(Dtype::kFp32, l, t, row));
      }
      for (std::uint32_t l = 0; l < shape.layers; ++l) {
        const Bytes row = vector_payload(LeafType::kKeyValue, l, t, 8 * shape.kv_width);
        builder.set(LeafType::kKeyValue, l, t, key_value_leaf(Dtype::kFp32, l, t, row, {}));
      }
    }
    builder.set(LeafType::kLogits, 0, shape.positions - 1, sha256("logits"));
    builder.set(LeafType::kTokens, 0, 0, sha256("tokens"));
    const Trace trace = builder.finish(shape.positions, 1);
    TraceProofs proofs(trace);
    Bytes payload;
    const Bytes part = LayerOpening::make(
        proofs, trace.shape(), cells, [&](LeafType type, std::uint32_t l, std::uint64_t t) {
          payload = vector_payload(type, l, t, trace.shape().payload_bytes(type));
          return ByteView(payload);
        });
    EXPECT_EQ(part.size(), bytes);
    EXPECT_EQ(LayerOpening::bytes(trace.shape(), cells), bytes);
    EXPECT_EQ(sha256(part).hex(), digest) << line;
    LayerOpening opening(trace.shape(), cells, cells.positions.back() + 1, part);
    EXPECT_NO_THROW(opening.check(trace.tree_roots(), "vector"));
    ++checked;
  }
  EXPECT_EQ(checked, 6);
}

// The small honest run, opened.
struct Opened {
  SampleRun run = sample_run();
  TraceProofs proofs{run.trace};
  const TraceShape& shape() const { return run.trace.shape(); }
  PayloadReader payload() {
    return [this](LeafType type, std::uint32_t layer, std::uint64_t position) {
      const RowRange range = evidence_row_range(shape(), type, layer, position).value();
      return ByteView(run.rows).subspan(range.offset, range.bytes);
    };
  }
  Bytes layer(const LayerCells& cells) {
    return LayerOpening::make(proofs, shape(), cells, payload());
  }
  Bytes ends(const AuditSample& sample) {
    return EndsOpening::make(proofs, shape(), sample, payload());
  }
};

TEST(Opening, RowsComeOutAsTheyWentIn) {
  Opened opened;
  const LayerCells cells{1, {0, 2}};
  LayerOpening opening(opened.shape(), cells, 3, opened.layer(cells));
  opening.check(opened.run.trace.tree_roots(), "opening");
  const PayloadReader payload = opened.payload();
  const auto same = [](ByteView a, ByteView b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  };
  for (std::size_t i = 0; i < 2; ++i) {
    const std::uint64_t t = cells.positions[i];
    EXPECT_TRUE(same(opening.input(i), payload(LeafType::kRow, 1, t)));
    EXPECT_TRUE(same(opening.output(i), payload(LeafType::kRow, 2, t)));
  }
  for (std::uint64_t t = 0; t < 3; ++t) {
    EXPECT_TRUE(same(opening.key_value(t), payload(LeafType::kKeyValue, 1, t)));
  }
  // One of the cells alone, with the same prefix, is good evidence too.
  LayerOpening single(opened.shape(), {1, {0}}, 3, opening.single(0));
  EXPECT_NO_THROW(single.check(opened.run.trace.tree_roots(), "single"));
  EXPECT_TRUE(same(single.output(0), opening.output(0)));

  AuditSample sample;
  sample.embeddings = {0, 3};
  sample.heads = {2, 3};
  EndsOpening ends(opened.shape(), sample.embeddings, sample.heads, opened.ends(sample));
  ends.check(opened.run.trace.tree_roots(), "ends");
  EXPECT_TRUE(same(ends.embedding(1), payload(LeafType::kRow, 0, 3)));
  EXPECT_TRUE(same(ends.last_row(0), payload(LeafType::kRow, 2, 2)));
  EXPECT_TRUE(same(ends.logits(1), payload(LeafType::kLogits, 0, 3)));
  EndsOpening embedding(opened.shape(), {3}, {}, ends.single_embedding(1));
  EXPECT_NO_THROW(embedding.check(opened.run.trace.tree_roots(), "embedding"));
  EndsOpening head(opened.shape(), {}, {2}, ends.single_head(0));
  EXPECT_NO_THROW(head.check(opened.run.trace.tree_roots(), "head"));
}

TEST(Opening, EveryAlteredByteOfALayerIsMalformed) {
  Opened opened;
  for (const LayerCells& cells :
       {LayerCells{0, {1}}, LayerCells{1, {0, 2}}, LayerCells{0, {0, 1, 2, 3}}}) {
    const Bytes good = opened.layer(cells);
    for (std::size_t i = 0; i < good.size(); ++i) {
      Bytes bad = good;
      bad[i] ^= 1;
      LayerOpening opening(opened.shape(), cells, cells.positions.back() + 1, bad);
      EXPECT_EQ(error_kind([&] { opening.check(opened.run.trace.tree_roots(), "opening"); }),
                ErrorKind::kMalformed)
          << "byte " << i;
    }
  }
}

TEST(Opening, EveryAlteredByteOfTheEndsIsMalformed) {
  Opened opened;
  AuditSample sample;
  sample.embeddings = {1};
  sample.heads = {3};
  const Bytes good = opened.ends(sample);
  for (std::size_t i = 0; i < good.size(); ++i) {
    Bytes bad = good;
    bad[i] ^= 0x80;
    EndsOpening opening(opened.shape(), sample.embeddings, sample.heads, bad);
    EXPECT_EQ(error_kind([&] { opening.check(opened.run.trace.tree_roots(), "ends"); }),
              ErrorKind::kMalformed)
        << "byte " << i;
  }
}

TEST(Opening, TheOpeningOfAnotherPlaceIsMalformed) {
  Opened opened;
  const auto refused = [&](LayerCells claimed, const Bytes& bytes) {
    const std::uint64_t prefix = claimed.positions.back() + 1;
    ASSERT_EQ(bytes.size(), LayerOpening::bytes(opened.shape(), claimed.positions, prefix));
    LayerOpening opening(opened.shape(), claimed, prefix, bytes);
    EXPECT_EQ(error_kind([&] { opening.check(opened.run.trace.tree_roots(), "opening"); }),
              ErrorKind::kMalformed);
  };
  refused({0, {2}}, opened.layer({1, {2}}));        // another layer
  refused({0, {0, 3}}, opened.layer({0, {1, 3}}));  // another position, the same prefix
}

TEST(Opening, OnlyTheRightNumberOfBytesIsTaken) {
  Opened opened;
  const LayerCells cells{0, {1}};
  Bytes bytes = opened.layer(cells);
  bytes.push_back(0);
  EXPECT_THROW(LayerOpening(opened.shape(), cells, 2, bytes), std::logic_error);
  bytes.resize(bytes.size() - 2);
  EXPECT_THROW(LayerOpening(opened.shape(), cells, 2, bytes), std::logic_error);
  EXPECT_THROW(LayerOpening(opened.shape(), cells, 1, opened.layer(cells)), std::logic_error);
  EXPECT_THROW(LayerOpening(opened.shape(), cells, 5, opened.layer(cells)), std::logic_error);
}

TEST(Opening, NothingNonFinite) {
  // A prover that commits to a NaN, honestly opened.
  Opened opened;
  const RowRange range = evidence_row_range(opened.shape(), LeafType::kRow, 1, 1).value();
  const std::uint32_t nan = 0x7fc00000;
  std::memcpy(opened.run.rows.data() + range.offset, &nan, 4);
  std::vector<Digest> leaves(opened.run.trace.leaves().begin(), opened.run.trace.leaves().end());
  leaves[*Trace::leaf_index(opened.shape(), LeafType::kRow, 1, 1)] =
      row_leaf(Dtype::kFp32, 1, 1, ByteView(opened.run.rows).subspan(range.offset, range.bytes));
  const Trace trace = Trace::from_leaves(opened.shape(), leaves);
  TraceProofs proofs(trace);
  const LayerCells cells{0, {1}};
  LayerOpening opening(opened.shape(), cells, 2,
                       LayerOpening::make(proofs, opened.shape(), cells, opened.payload()));
  std::string message;
  EXPECT_EQ(error_kind([&] { opening.check(trace.tree_roots(), "opening"); }, &message),
            ErrorKind::kMalformed);
  EXPECT_NE(message.find("not finite"), std::string::npos) << message;
}

TEST(Opening, HeaderBindsChallengeRootsAndSigner) {
  Opened opened;
  OpeningHeader header;
  header.challenge = sha256("challenge");
  header.tree_roots.assign(opened.run.trace.tree_roots().begin(),
                           opened.run.trace.tree_roots().end());
  header.sign(fixed_key("operator", 8));
  const Bytes good = header.serialize();
  EXPECT_LE(good.size(), max_opening_header_bytes(opened.shape()));
  const Digest& root = opened.run.trace.root();
  const auto parse = [&](ByteView bytes, const Digest& trace_root, const Digest& challenge) {
    return OpeningHeader::parse(bytes, opened.shape(), trace_root, challenge, "header");
  };
  EXPECT_EQ(parse(good, root, header.challenge).prover.key.name, "operator");
  EXPECT_EQ(error_kind([&] { parse(good, sha256("x"), header.challenge); }), ErrorKind::kMalformed);
  EXPECT_EQ(error_kind([&] { parse(good, root, sha256("other")); }), ErrorKind::kMalformed);
  for (std::size_t i = 0; i < good.size(); ++i) {
    Bytes bad = good;
    bad[i] ^= 2;
    EXPECT_EQ(error_kind([&] { parse(bad, root, header.challenge); }), ErrorKind::kMalformed) << i;
  }
}

TEST(Opening, TheRequestBindsItsSigner) {
  OpenRequest request;
  request.challenge = {1, 2, 3};
  request.sign(fixed_key("auditor", 3));
  const Bytes bytes = request.serialize();
  EXPECT_EQ(OpenRequest::parse(bytes, "request").challenge, request.challenge);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    Bytes bad = bytes;
    bad[i] ^= 1;
    EXPECT_EQ(error_kind([&] { OpenRequest::parse(bad, "request"); }), ErrorKind::kMalformed) << i;
  }
}

TEST(Opening, OperatorsAndTheirRequest) {
  CellOperators operators;
  operators.challenge = sha256("challenge");
  operators.layer = 2;
  operators.position = 9;
  operators.outputs = {{"input_norm", {1.0F, -2.0F}}, {"q_proj", {}}};
  operators.sign(fixed_key("operator", 8));
  const Bytes good = operators.serialize();
  const CellOperators parsed = CellOperators::parse(good, operators.challenge, 2, 9, "operators");
  EXPECT_EQ(parsed.outputs[0].values, operators.outputs[0].values);
  const auto kind = [&](ByteView bytes, std::uint32_t layer, std::uint64_t position) {
    return error_kind(
        [&] { CellOperators::parse(bytes, operators.challenge, layer, position, "operators"); });
  };
  EXPECT_EQ(kind(good, 1, 9), ErrorKind::kMalformed);
  EXPECT_EQ(kind(good, 2, 8), ErrorKind::kMalformed);
  for (std::size_t i = 0; i < good.size(); ++i) {
    Bytes bad = good;
    bad[i] ^= 1;
    EXPECT_EQ(kind(bad, 2, 9), ErrorKind::kMalformed) << i;
  }

  OperatorsRequest request;
  request.challenge = {1, 2, 3};
  request.layer = 2;
  request.position = 9;
  request.sign(fixed_key("auditor", 3));
  const Bytes bytes = request.serialize();
  EXPECT_EQ(OperatorsRequest::parse(bytes, "request").challenge, request.challenge);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    Bytes bad = bytes;
    bad[i] ^= 1;
    EXPECT_EQ(error_kind([&] { OperatorsRequest::parse(bad, "request"); }), ErrorKind::kMalformed);
  }
}

}  // namespace
}  // namespace bitwitness
