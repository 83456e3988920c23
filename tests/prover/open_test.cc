// Openings regenerated from a claim: what they hold leads to the committed roots, whatever the
// backend, the pieces and the passes.
#include "prover/open.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "kernels/cell.h"
#include "tests/kernels/reference_models.h"

namespace bitwitness {
namespace {

const ServedModel& served() {
  static const ServedModel model = ServedModel::load((models_dir() / "tiny-qwen3").string());
  return model;
}

Backend& backend() {
  static const std::unique_ptr<Backend> made = make_backend("cpu", 1);
  return *made;
}

const PlacedWeights& weights() {
  static const PlacedWeights placed(served().model.weights(), backend());
  return placed;
}

// A run of 41 positions, 12 of which emit a token drawn at a temperature.
const Generation& run() {
  static const Generation made = [] {
    GenerationRequest request;
    for (std::uint32_t t = 0; t < 30; ++t) request.prompt_ids.push_back((t * 131 + 5) % 2048);
    request.max_tokens = 12;
    request.sampling = {0.9f, 50, 0.95f};
    request.seed = {1, 2, 3};
    request.seed_provenance = SeedProvenance::kNonce;
    return std::move(generate(served(), weights(), backend(), {&request, 1}, {}).front());
  }();
  return made;
}

std::vector<std::uint64_t> all_positions() {
  std::vector<std::uint64_t> out(run().claim.trace_shape.positions);
  for (std::uint64_t t = 0; t < out.size(); ++t) out[t] = t;
  return out;
}

AuditSample some_cells() {
  AuditSample sample;
  sample.layers = {{0, {0, 7, 40}}, {1, {3, 7}}};
  sample.embeddings = {0, 12, 40};
  sample.heads = {29, 35, 40};
  return sample;
}

struct Opened {
  std::vector<Bytes> parts;  // ends if any, then the layers
  std::vector<Digest> roots;
};

Opened open_all(const AuditSample& sample, std::uint64_t max_bytes, Backend& on,
                const RerunOptions& options = {}) {
  const PlacedWeights placed(served().model.weights(), on);
  Opened out;
  for (const OpeningPass& pass : plan_passes(run().claim.trace_shape, sample, max_bytes)) {
    Rerun rerun(served(), placed, on, run().claim, sample, pass, options);
    out.roots.assign(rerun.trace().tree_roots().begin(), rerun.trace().tree_roots().end());
    if (pass.ends) out.parts.push_back(rerun.ends_part());
    for (std::size_t i = 0; i < pass.layer_count; ++i) {
      out.parts.push_back(rerun.layer_part(pass.first_layer + i));
    }
  }
  return out;
}

constexpr std::uint64_t kRoomy = std::uint64_t{1} << 30;

void expect_good(const AuditSample& sample, const Opened& opened) {
  const TraceShape& shape = run().claim.trace_shape;
  EXPECT_EQ(Trace::root_from_tree_roots(shape, opened.roots), run().claim.trace_root);
  std::size_t at = 0;
  if (!sample.embeddings.empty() || !sample.heads.empty()) {
    ASSERT_EQ(opened.parts.at(at).size(),
              EndsOpening::bytes(shape, sample.embeddings, sample.heads));
    EndsOpening ends(shape, sample.embeddings, sample.heads, opened.parts.at(at++));
    EXPECT_NO_THROW(ends.check(opened.roots, "opening"));
  }
  for (const LayerCells& cells : sample.layers) {
    ASSERT_EQ(opened.parts.at(at).size(), LayerOpening::bytes(shape, cells));
    LayerOpening layer(shape, cells, cells.positions.back() + 1, opened.parts.at(at++));
    EXPECT_NO_THROW(layer.check(opened.roots, "opening"));
  }
  EXPECT_EQ(at, opened.parts.size());
}

TEST(Open, WhatIsOpenedLeadsToTheRootsOfTheClaim) {
  expect_good(some_cells(), open_all(some_cells(), kRoomy, backend()));

  AuditSample everything;
  for (std::uint32_t l = 0; l < run().claim.trace_shape.layers; ++l) {
    everything.layers.push_back({l, all_positions()});
  }
  expect_good(everything, open_all(everything, kRoomy, backend()));

  AuditSample one;
  one.layers = {{run().claim.trace_shape.layers - 1, {0}}};
  expect_good(one, open_all(one, kRoomy, backend()));
}

TEST(Open, DrawnSamplesAreOpened) {
  AuditPlan plan;
  plan.cells = 9;
  plan.ends = 7;
  for (std::uint8_t i = 0; i < 8; ++i) {
    Digest seed;
    seed.bytes[0] = i;
    const AuditSample sample = draw_sample(plan, run().claim.trace_shape, seed);
    expect_good(sample, open_all(sample, kRoomy, backend()));
  }
}

TEST(Open, EqualBytesInPassesInPiecesAndOnEveryBackend) {
  const Opened whole = open_all(some_cells(), kRoomy, backend());
  const TraceShape& shape = run().claim.trace_shape;
  const std::uint64_t ends = EndsOpening::bytes(shape, some_cells().embeddings, some_cells().heads);
  const std::uint64_t first = LayerOpening::bytes(shape, some_cells().layers[0]);
  ASSERT_GE(first, LayerOpening::bytes(shape, some_cells().layers[1]));
  const std::uint64_t least = std::max(ends, first) + 32 * Trace::leaf_count(shape);
  EXPECT_EQ(plan_passes(shape, some_cells(), kRoomy).size(), 1u);
  EXPECT_GT(plan_passes(shape, some_cells(), least).size(), 1u);
  EXPECT_EQ(open_all(some_cells(), least, backend()).parts, whole.parts);
  for (const std::int64_t rows : {1, 7, 40, 41}) {
    RerunOptions options;
    options.max_rows = rows;
    EXPECT_EQ(open_all(some_cells(), kRoomy, backend(), options).parts, whole.parts)
        << rows << " rows at a time";
  }
  for (const std::string& name : available_backends()) {
    const std::unique_ptr<Backend> other = make_backend(name, 2);
    EXPECT_EQ(open_all(some_cells(), kRoomy, *other).parts, whole.parts) << name;
  }
}

TEST(Open, PassesHoldWhatFitsAndRefuseWhatDoesNot) {
  const TraceShape& shape = run().claim.trace_shape;
  AuditSample sample;
  sample.layers = {{0, {5}}, {1, {5}}, {2, {40}}, {3, {2}}};
  sample.embeddings = {1};
  const std::uint64_t large = LayerOpening::bytes(shape, sample.layers[2]);
  const std::uint64_t trace = 32 * Trace::leaf_count(shape);
  const std::vector<OpeningPass> passes = plan_passes(shape, sample, large + trace);
  ASSERT_EQ(passes.size(), 3u);
  EXPECT_TRUE(passes[0].ends);
  EXPECT_EQ(passes[0].layer_count, 2u);
  EXPECT_FALSE(passes[1].ends);
  EXPECT_EQ(passes[1].first_layer, 2u);
  EXPECT_EQ(passes[1].layer_count, 1u);
  EXPECT_EQ(passes[1].bytes, large);
  EXPECT_EQ(passes[1].memory, large + trace);
  EXPECT_EQ(passes[2].first_layer, 3u);
  EXPECT_EQ(passes[2].layer_count, 1u);

  const auto refused = [&](const AuditSample& what, std::uint64_t max_bytes, const char* text) {
    try {
      plan_passes(shape, what, max_bytes);
      ADD_FAILURE() << "planned; expected an error about " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_THAT(error.what(), testing::HasSubstr(text));
      EXPECT_THAT(error.what(), testing::HasSubstr("ask for fewer"));
    }
  };
  refused(sample, large + trace - 1, "layer 2 (1 cells, keys and values of 41 positions)");
  sample.heads = {40};
  refused(sample, 100, "the ends");
}

TEST(Open, AMachineThatDoesNotRepeatItsRecordOpensNothing) {
  const auto refused = [&](const Claim& claim) {
    try {
      const AuditSample sample = some_cells();
      const auto passes = plan_passes(claim.trace_shape, sample, kRoomy);
      const Rerun rerun(served(), weights(), backend(), claim, sample, passes[0], {});
      ADD_FAILURE() << "opened";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInfrastructure);
      EXPECT_THAT(error.what(), testing::HasSubstr("does not reproduce its own record"));
    }
  };
  Claim claim = run().claim;
  claim.trace_root.bytes[31] ^= 1;
  refused(claim);
  claim = run().claim;
  claim.prompt_ids[17] ^= 1;
  refused(claim);
  claim = run().claim;
  claim.emitted_ids.back() ^= 1;  // never fed back: under the tokens leaf alone
  refused(claim);
  claim = run().claim;
  claim.manifest_digest.bytes[0] ^= 1;
  const auto passes = plan_passes(claim.trace_shape, some_cells(), kRoomy);
  EXPECT_THROW(Rerun(served(), weights(), backend(), claim, some_cells(), passes[0], {}),
               std::logic_error);
}

TEST(Open, CancelledBetweenPieces) {
  int asked = 0;
  RerunOptions options;
  options.max_rows = 10;
  options.cancelled = [&] { return ++asked > 2; };
  EXPECT_THROW(open_all(some_cells(), kRoomy, backend(), options), Error);
  EXPECT_EQ(asked, 3);
}

TEST(Open, OperatorsLeadFromTheCellsInputToItsOutput) {
  const TraceShape& shape = run().claim.trace_shape;
  const Digest challenge = run().claim.digest();
  for (const auto& [layer, position] : {std::pair{0u, std::uint64_t{0}}, {1u, std::uint64_t{40}}}) {
    const CellOperators operators =
        open_operators(served(), weights(), backend(), run().claim, challenge, layer, position, {});
    EXPECT_EQ(operators.challenge, challenge);
    EXPECT_EQ(operators.layer, layer);
    EXPECT_EQ(operators.position, position);
    ASSERT_GT(operators.outputs.size(), 10u);

    AuditSample cell;
    cell.layers = {{layer, {position}}};
    const Opened opened = open_all(cell, kRoomy, backend());
    const LayerOpening part(shape, cell.layers[0], position + 1, opened.parts[0]);
    const std::vector<float>& last = operators.outputs.back().values;
    ASSERT_EQ(last.size() * sizeof(float), part.output(0).size());
    EXPECT_EQ(std::memcmp(last.data(), part.output(0).data(), part.output(0).size()), 0);

    CellOperators signed_one = operators;
    signed_one.sign(SigningKey::generate("prover.example"));
    const Bytes bytes = signed_one.serialize();
    EXPECT_LE(bytes.size(), max_operators_bytes(served().model.config()));
    EXPECT_NO_THROW(CellOperators::parse(bytes, challenge, layer, position, "operators"));

    for (const std::string& name : available_backends()) {
      const std::unique_ptr<Backend> other = make_backend(name, 1);
      const PlacedWeights placed(served().model.weights(), *other);
      const CellOperators again =
          open_operators(served(), placed, *other, run().claim, challenge, layer, position, {});
      ASSERT_EQ(again.outputs.size(), operators.outputs.size());
      for (std::size_t i = 0; i < again.outputs.size(); ++i) {
        EXPECT_EQ(again.outputs[i].name, operators.outputs[i].name);
        EXPECT_EQ(again.outputs[i].values, operators.outputs[i].values) << name;
      }
    }
  }
}

}  // namespace
}  // namespace bitwitness
