// Generation: equal claims from every backend, chunking, batch and slot; requests refused before
// anything runs; what is returned fits the claim.
#include "prover/generate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <random>
#include <set>

#include "attest/base/error.h"
#include "kernels/sampler.h"
#include "prover/npy.h"
#include "prover/requests.h"
#include "tests/kernels/model/safetensors_writer.h"
#include "tests/kernels/reference_models.h"

namespace bitwitness {
namespace {

const ServedModel& served(const std::string& name) {
  static std::map<std::string, ServedModel> models;
  auto it = models.find(name);
  if (it == models.end()) {
    it = models.emplace(name, ServedModel::load((models_dir() / name).string())).first;
  }
  return it->second;
}

GenerationRequest request_for(const ServedModel& model, std::size_t i) {
  GenerationRequest request;
  const std::uint32_t vocab = static_cast<std::uint32_t>(model.model.config().vocab_size);
  for (std::size_t t = 0; t < 3 + 11 * i % 40; ++t) {
    request.prompt_ids.push_back(static_cast<std::uint32_t>((t * 131 + i * 17 + 5) % vocab));
  }
  request.max_tokens = 4 + 5 * i % 19;
  if (i % 2 == 1) {
    request.sampling = {0.7f, i % 4 == 1 ? 30u : 0u, i % 4 == 1 ? 1.0f : 0.9f};
    request.seed = {static_cast<std::uint8_t>(i), 7};
    request.seed_provenance = SeedProvenance::kNonce;
  }
  request.stop_ids = default_stop_ids(model);
  return request;
}

std::vector<Generation> run(const ServedModel& model, const std::string& device,
                            const std::vector<GenerationRequest>& requests,
                            const GenerationOptions& options = {}) {
  const std::unique_ptr<Backend> backend = make_backend(device, 2);
  return generate(model, *backend, requests, options);
}

class EqualClaims : public ::testing::TestWithParam<std::string> {};

TEST_P(EqualClaims, FromEveryBackendChunkingAndBatch) {
  const ServedModel& model = served(GetParam());
  std::vector<GenerationRequest> requests;
  for (std::size_t i = 0; i < 16; ++i) requests.push_back(request_for(model, i));
  std::vector<Claim> alone;
  for (const GenerationRequest& request : requests) {
    alone.push_back(run(model, "cpu", {request}).front().claim);
  }
  const auto expect_same = [&](const std::vector<Generation>& got, const std::string& how) {
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].claim.digest().hex(), alone[i].digest().hex())
          << how << ", request " << i << ": "
          << ::testing::PrintToString(claim_differences(got[i].claim, alone[i]));
    }
  };
  for (const std::string& device : available_backends()) {
    std::vector<GenerationRequest> few(requests.begin(), requests.begin() + 5);
    expect_same(run(model, device, few), "5 together on " + device);
    if (device == "ref") continue;
    expect_same(run(model, device, requests), "16 together on " + device);
    for (const std::int64_t chunk : {1, 7, 64}) {
      GenerationOptions options;
      options.prefill_chunk = chunk;
      options.max_slots = 2;
      options.max_rows = 9;
      expect_same(run(model, device, requests, options),
                  "chunks of " + std::to_string(chunk) + ", 2 at a time, on " + device);
    }
  }
}

// One request among random neighbours that come and go: the same claim at every slot.
TEST_P(EqualClaims, AloneAndAtEachSlotOfLargeBatches) {
  const ServedModel& model = served(GetParam());
  const std::uint32_t vocab = static_cast<std::uint32_t>(model.model.config().vocab_size);
  std::mt19937 random(20261130);
  const auto random_request = [&](std::size_t prompt, std::size_t tokens) {
    GenerationRequest request;
    for (std::size_t t = 0; t < prompt; ++t) {
      request.prompt_ids.push_back(static_cast<std::uint32_t>(random()) % vocab);
    }
    request.max_tokens = tokens;
    request.sampling = {0.8f, 0, 0.95f};
    request.seed = {static_cast<std::uint8_t>(random()), 1};
    request.seed_provenance = SeedProvenance::kNonce;
    return request;
  };
  const GenerationRequest subject = random_request(61, 9);  // crosses a page of the cache
  const std::string alone = run(model, "cpu", {subject}).front().claim.digest().hex();
  for (const std::string& device : available_backends()) {
    if (device == "ref") continue;
    const std::unique_ptr<Backend> backend = make_backend(device, 2);
    const PlacedWeights weights(model.model.weights(), *backend);
    std::size_t batches = 0;
    const auto expect_same = [&](std::size_t batch, std::size_t slot, std::int64_t chunk) {
      std::vector<GenerationRequest> requests;
      for (std::size_t i = 0; i < batch; ++i) {
        requests.push_back(i == slot ? subject
                                     : random_request(1 + random() % 9, 1 + random() % 12));
      }
      GenerationOptions options;
      options.max_slots = static_cast<std::int64_t>(batch);
      options.prefill_chunk = chunk;
      const Claim claim = generate(model, weights, *backend, requests, options)[slot].claim;
      EXPECT_EQ(claim.digest().hex(), alone)
          << device << ", batch of " << batch << ", slot " << slot << ", chunk " << chunk;
      ++batches;
    };
    for (const std::size_t batch : {1u, 2u, 8u, 33u, 64u}) {
      // Every slot where it is quick; on a CPU the ends and the middle of the large batches.
      const std::size_t step = batch <= 8 || device == "cuda" ? 1 : batch / 2;
      for (std::size_t slot = 0; slot < batch; slot += step) expect_same(batch, slot, 0);
      for (const std::int64_t chunk : {1, 16, 17}) expect_same(batch, batch - 1, chunk);
    }
    std::cout << "batch invariance | " << GetParam() << " on " << device << ": one claim from "
              << batches << " batches of 1 to 64\n";
  }
}

INSTANTIATE_TEST_SUITE_P(Models, EqualClaims, ::testing::ValuesIn(supported_models()),
                         [](const auto& param) { return test_name(param.param); });

TEST(Generate, TextIsThatOfTheStockLibrary) {
  for (const char* name : {"tiny-llama", "tiny-qwen3"}) {
    const ServedModel& model = served(name);
    for (const ReferenceCase& reference : reference_cases(name)) {
      GenerationRequest request;
      request.prompt_ids = encode_prompt(model, reference.name);
      ASSERT_EQ(request.prompt_ids,
                std::vector<std::uint32_t>(reference.input_ids.begin(), reference.input_ids.end()));
      request.max_tokens = reference.greedy_ids.size() - reference.input_ids.size();
      request.stop_ids = default_stop_ids(model);
      std::string streamed;
      GenerationObserver observer;
      observer.on_token = [&](std::size_t, std::uint32_t, std::string_view piece) {
        streamed += piece;
      };
      const std::unique_ptr<Backend> backend = make_backend("cpu", 2);
      const Generation result =
          std::move(generate(model, *backend, {&request, 1}, {}, observer).front());
      EXPECT_EQ(reference.name + result.text, reference.text);
      EXPECT_EQ(streamed, result.text);
    }
  }
}

TEST(Generate, StopsAtAStopTokenAtTheLengthAndAtTheContext) {
  const ServedModel& model = served("zoo/llama31-ropescale");
  GenerationRequest request;
  request.prompt_ids = {5, 6, 7};
  request.max_tokens = 6;
  const Generation free_run = std::move(run(model, "cpu", {request}).front());
  EXPECT_EQ(free_run.claim.stop_reason, StopReason::kLength);
  ASSERT_EQ(free_run.claim.emitted_ids.size(), 6u);

  request.stop_ids = {free_run.claim.emitted_ids[2]};
  const Claim stopped = run(model, "cpu", {request}).front().claim;
  EXPECT_EQ(stopped.stop_reason, StopReason::kStopToken);
  EXPECT_EQ(stopped.emitted_ids.back(), request.stop_ids.front());
  EXPECT_LE(stopped.emitted_ids.size(), 3u);

  request.stop_ids.clear();
  const std::size_t context = static_cast<std::size_t>(model.model.config().max_positions);
  request.prompt_ids.assign(context - 2, 9);
  request.max_tokens = 1'000'000;
  const Claim full = run(model, "cpu", {request}).front().claim;
  EXPECT_EQ(full.stop_reason, StopReason::kContext);
  EXPECT_EQ(full.trace_shape.positions, context);
  EXPECT_EQ(full.emitted_ids.size(), 3u);
  full.check("claim");
}

TEST(Generate, KeepsLogitsAndRows) {
  const ServedModel& model = served("tiny-qwen3");
  GenerationRequest request = request_for(model, 2);
  GenerationOptions options;
  options.keep_logits = true;
  options.keep_rows = true;
  const Generation result = std::move(run(model, "cpu", {request}, options).front());
  const std::size_t vocab = 2048, emitted = result.claim.emitted_ids.size();
  ASSERT_EQ(result.logits.size(), emitted * vocab);
  for (std::size_t i = 0; i < emitted; ++i) {
    EXPECT_EQ(static_cast<std::uint32_t>(
                  sample_token(result.logits.data() + i * vocab, 2048, request.sampling,
                               sample_draw(request.seed, request.prompt_ids.size() + i))),
              result.claim.emitted_ids[i]);
  }
  EXPECT_EQ(result.rows.size(), *evidence_rows_bytes(result.claim.trace_shape));
  Record record = make_record(model, result, EvidenceLevel::kRows, new_provenance());
  EXPECT_NO_THROW(record.check("record"));
}

void expect_usage(const GenerationRequest& request, const std::string& part) {
  try {
    check_request(served("tiny-qwen3"), request);
    FAIL() << "accepted; expected an error about: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_THAT(error.what(), ::testing::HasSubstr(part));
  }
}

TEST(Generate, RefusesBadRequestsByName) {
  const GenerationRequest good = request_for(served("tiny-qwen3"), 1);
  EXPECT_NO_THROW(check_request(served("tiny-qwen3"), good));
  GenerationRequest bad = good;
  bad.prompt_ids.clear();
  expect_usage(bad, "prompt is empty");
  bad = good;
  bad.prompt_ids.assign(1025, 5);
  expect_usage(bad, "context has 1024");
  bad = good;
  bad.prompt_ids[1] = 2048;
  expect_usage(bad, "prompt token 1 is 2048");
  bad = good;
  bad.max_tokens = 0;
  expect_usage(bad, "max_tokens");
  for (const float temperature : {-1.0f, -0.0f, std::numeric_limits<float>::infinity(),
                                  std::numeric_limits<float>::quiet_NaN()}) {
    bad = good;
    bad.sampling.temperature = temperature;
    expect_usage(bad, "temperature");
  }
  for (const float top_p : {0.0f, -0.5f, 1.5f, std::numeric_limits<float>::quiet_NaN()}) {
    bad = good;
    bad.sampling.top_p = top_p;
    expect_usage(bad, "top_p");
  }
  bad = good;
  bad.sampling = {0.0f, 5, 1.0f};
  expect_usage(bad, "greedy");
  bad = good;
  bad.seed.assign(65, 1);
  expect_usage(bad, "seed");
}

TEST(Generate, CancelEndsTheCall) {
  const ServedModel& model = served("tiny-qwen3");
  const GenerationRequest request = request_for(model, 3);
  int asked = 0;
  GenerationObserver observer;
  observer.cancelled = [&](std::size_t) { return ++asked > 2; };
  const std::unique_ptr<Backend> backend = make_backend("cpu", 1);
  EXPECT_THROW(generate(model, *backend, {&request, 1}, {}, observer), Error);
}

// Requests come and go between steps, and slots are used again: the bits of each stay its own.
TEST(GenerationBatch, RequestsJoinAndLeaveAtAnyStep) {
  const ServedModel& model = served("tiny-qwen3");
  std::vector<GenerationRequest> requests;
  std::int64_t capacity = 0;
  for (std::size_t i = 0; i < 12; ++i) {
    requests.push_back(request_for(model, i));
    capacity = std::max(capacity, positions_needed(model, requests.back()));
  }
  std::vector<Claim> alone;
  for (const GenerationRequest& request : requests) {
    alone.push_back(run(model, "cpu", {request}).front().claim);
  }
  const std::unique_ptr<Backend> backend = make_backend("cpu", 1);
  const PlacedWeights weights(model.model.weights(), *backend);
  std::set<std::size_t> unwanted, gone;
  GenerationObserver observer;
  std::vector<std::vector<std::uint32_t>> streamed(requests.size());
  observer.on_token = [&](std::size_t index, std::uint32_t token, std::string_view) {
    EXPECT_FALSE(gone.contains(index)) << "computed although nobody wants it";
    streamed[index].push_back(token);
  };
  observer.cancelled = [&](std::size_t index) {
    if (!unwanted.contains(index)) return false;
    EXPECT_TRUE(gone.insert(index).second);
    return true;
  };
  GenerationOptions options;
  options.max_slots = 3;
  options.prefill_chunk = 5;
  options.max_rows = 7;
  GenerationBatch batch(model, weights, *backend, capacity, options, observer);
  EXPECT_TRUE(batch.step().empty());
  std::map<std::size_t, Claim> finished;
  std::size_t next = 0;
  for (int step = 0; next < requests.size() || batch.size() != 0; ++step) {
    ASSERT_LT(step, 1000);
    if (step % 4 == 0 && next < requests.size()) {
      batch.add(next, requests[next]);
      ++next;
    }
    if (step == 9) unwanted.insert(2);   // while it is computed
    if (step == 16) unwanted.insert(4);  // before it is: it has just been added
    for (GenerationBatch::Finished& done : batch.step()) {
      EXPECT_TRUE(finished.emplace(done.index, done.generation.claim).second);
    }
  }
  EXPECT_EQ(gone, (std::set<std::size_t>{2, 4}));
  EXPECT_EQ(finished.size(), requests.size() - 2);
  for (const auto& [index, claim] : finished) {
    EXPECT_THAT(claim_differences(claim, alone[index]), ::testing::IsEmpty()) << index;
    EXPECT_EQ(streamed[index], claim.emitted_ids);
  }
  EXPECT_TRUE(streamed[4].empty());
}

class RequestFile : public ::testing::Test {
 protected:
  std::vector<RequestText> read(const std::string& text) {
    const std::string path = (dir_.path() / "requests.jsonl").string();
    test::write_file(path, text);
    return read_requests(path, defaults_);
  }
  void expect_error(const std::string& text, const std::string& part) {
    try {
      read(text);
      FAIL() << "accepted: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_THAT(error.what(), ::testing::HasSubstr(part));
    }
  }
  test::TempDir dir_;
  RequestText defaults_ = [] {
    RequestText text;
    text.max_tokens = 9;
    return text;
  }();
};

TEST_F(RequestFile, LinesOverrideDefaults) {
  const auto requests = read(
      "{\"prompt\": \"a\"}\n\n{\"token_ids\": [1, 2], \"max_tokens\": 3, \"temperature\": 0.5, "
      "\"top_k\": 4, \"top_p\": 0.5, \"seed\": \"00ff\"}");
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_EQ(requests[0].prompt, "a");
  EXPECT_EQ(requests[0].max_tokens, 9u);
  EXPECT_EQ(requests[1].token_ids, (std::vector<std::uint32_t>{1, 2}));
  EXPECT_EQ(requests[1].max_tokens, 3u);
  EXPECT_EQ(requests[1].seed_hex, "00ff");
}

TEST_F(RequestFile, BadLinesAreNamed) {
  expect_error("", "no requests");
  expect_error("{\"prompt\": \"a\"}\n{", "requests.jsonl:2");
  expect_error("[1]", "object");
  expect_error("{\"prompt\": \"a\", \"prompt\": \"b\"}", "prompt");
  expect_error("{\"prompt\": \"a\", \"token_ids\": [1]}", "either");
  expect_error("{}", "either");
  expect_error("{\"prompt\": \"a\", \"tempreature\": 1}", "tempreature");
  expect_error("{\"prompt\": 5}", "text");
  expect_error("{\"token_ids\": [1.5]}", "whole number");
  expect_error("{\"token_ids\": [-1]}", "whole number");
  expect_error("{\"token_ids\": 7}", "list");
  expect_error("{\"prompt\": \"a\", \"max_tokens\": \"9\"}", "whole number");
  expect_error(std::string("{\"prompt\": \"a\"}\0x", 17), "requests.jsonl:1");
}

TEST(Npy, HeaderIsAlignedAndSaysTheShape) {
  const std::vector<float> values{1, 2, 3, 4, 5, 6};
  const Bytes bytes = npy_float32(values, 2, 3);
  const std::size_t header = bytes[8] + 256u * bytes[9];
  EXPECT_EQ((10 + header) % 64, 0u);
  const std::string text(bytes.begin() + 10, bytes.begin() + 10 + static_cast<long>(header));
  EXPECT_THAT(text,
              ::testing::StartsWith("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"));
  EXPECT_EQ(text.back(), '\n');
  EXPECT_EQ(bytes.size(), 10 + header + 24);
  EXPECT_EQ(bytes[10 + header + 2], 0x80);  // 1.0f, little-endian
}

}  // namespace
}  // namespace bitwitness
