// bw-prover bench: that it measures and says what it promises. How fast anything is, is no test.
#include "prover/bench.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "prover/bench_model.h"
#include "tests/program.h"

namespace bitwitness {
namespace {

using ::testing::HasSubstr;

const std::string kTiny = "bw-prover bench --shape tiny --device cpu --threads 2 --repeat 2 ";

std::set<std::string> all_names() {
  std::set<std::string> names;
  std::istringstream lines(bench_names());
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) {
      if (word.ends_with(',')) word.pop_back();
      names.insert(word);
    }
  }
  return names;
}

TEST(Bench, TheFloorIsTheLongerOfBytesAndOperations) {
  const Ceilings ceilings{100, 1000, 0};
  BenchRow row;
  row.bytes = 200;
  row.operations = 1000;
  EXPECT_EQ(floor_of(row, ceilings).seconds, 2);
  EXPECT_STREQ(floor_of(row, ceilings).bound, "bytes");
  row.operations = 3000;
  EXPECT_EQ(floor_of(row, ceilings).seconds, 3);
  EXPECT_STREQ(floor_of(row, ceilings).bound, "operations");
}

TEST(Bench, RandomNumbersFillEveryByteAndVary) {
  const std::unique_ptr<Backend> backend = make_backend("ref");
  const RandomNumbers numbers(*backend, Dtype::kFp32, 2.0f);
  const std::size_t count = 10'000'000;  // more than a chunk
  const Buffer buffer = numbers.buffer(count * sizeof(float));
  const std::span<const float> values(buffer.as<float>(), count);
  double sum = 0, squares = 0;
  for (const float value : values) {
    ASSERT_TRUE(std::isfinite(value));
    sum += value;
    squares += static_cast<double>(value) * value;
  }
  EXPECT_NEAR(sum / count, 0, 0.01);
  EXPECT_NEAR(std::sqrt(squares / count), 2, 0.01);
  for (std::size_t width : {512, 4096}) {  // rows of a matrix differ
    EXPECT_NE(values[0], values[width]);
    EXPECT_NE(values[0], values[1024 * width]);
  }
}

TEST(Bench, WeightBytesAreThoseOfTheWeights) {
  const std::unique_ptr<Backend> backend = make_backend("ref");
  const ModelConfig& config = bench_shape("tiny");
  const PlacedWeights weights = random_weights(config, *backend);
  std::size_t bytes = 0;
  const auto count = [&](const Matrix& matrix) {
    bytes += static_cast<std::size_t>(matrix.rows * matrix.cols) * dtype_bytes(matrix.dtype);
  };
  count(weights.weights().embedding);
  count(weights.weights().head);
  for (const LayerWeights& layer : weights.weights().layers) {
    for (const Matrix* matrix :
         {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
      count(*matrix);
    }
  }
  EXPECT_EQ(bytes, weight_bytes(config));
}

TEST(BenchProgram, JsonHasEveryFieldAndFiniteShares) {
  const test::Shell shell;
  const test::ProgramResult result = shell.run(kTiny + "--format json");
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json.at("arithmetic"), "fma32");
  EXPECT_EQ(json.at("shape"), "tiny");
  EXPECT_FALSE(json.at("version").get<std::string>().empty());
  EXPECT_FALSE(json.at("device").get<std::string>().empty());
  EXPECT_FALSE(json.at("backend").get<std::string>().empty());
  EXPECT_GE(json.at("arithmetic_version"), 1);
  EXPECT_GT(json.at("ceilings").at("bytes_per_second"), 1e6);
  EXPECT_GT(json.at("ceilings").at("operations_per_second"), 1e6);
  EXPECT_GT(json.at("ceilings").at("cache_bytes"), 0);
  std::set<std::string> seen;
  for (const nlohmann::json& row : json.at("rows")) {
    seen.insert(row.at("what").get<std::string>());
    EXPECT_FALSE(row.at("shape").get<std::string>().empty()) << row;
    EXPECT_GE(row.at("rows"), 1) << row;
    EXPECT_GE(row.at("context"), 0) << row;
    EXPECT_GT(row.at("us"), 0) << row;
    EXPECT_GT(row.at("floor_us"), 0) << row;
    EXPECT_GT(row.at("bytes"), 0) << row;
    EXPECT_GE(row.at("operations"), 0) << row;
    EXPECT_TRUE(std::isfinite(row.at("share").get<double>())) << row;
    EXPECT_TRUE(row.at("bound") == "bytes" || row.at("bound") == "operations") << row;
    const bool step = row.at("what") == "decode" || row.at("what") == "prefill";
    EXPECT_EQ(row.contains("commitment_ratio"), step) << row;
    EXPECT_EQ(row.contains("us_without_commitment"), step) << row;
    EXPECT_TRUE(std::isfinite(row.value("commitment_ratio", 1.0))) << row;
  }
  EXPECT_EQ(seen, all_names());
}

TEST(BenchProgram, TextHasALineARow) {
  const test::Shell shell;
  const test::ProgramResult result = shell.run(kTiny + "--only o,decode --rows 1,8");
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 3 + 4) << result.out;
  EXPECT_THAT(result.out, HasSubstr("shape tiny"));
  EXPECT_THAT(result.out, HasSubstr("\no "));
  EXPECT_THAT(result.out, HasSubstr("\ndecode "));
  EXPECT_EQ(result.err, "");
}

TEST(BenchProgram, RunsAModelDirectory) {
  const test::Shell shell;
  const test::ProgramResult result = shell.run(
      "bw-prover bench --device ref --repeat 1 --format json --only steps,qkv --rows 1 "
      "--model " BW_TEST_DATA_DIR "/models/tiny-qwen3");
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out).at("backend"), "ref");
  EXPECT_GE(nlohmann::json::parse(result.out).at("rows").size(), 2u);
}

TEST(BenchProgram, BadFlags) {
  const test::Shell shell;
  const auto expect_usage = [&](const std::string& flags, const std::string& part) {
    const test::ProgramResult result = shell.run("bw-prover bench " + flags);
    EXPECT_EQ(result.code, 2) << flags << "\n" << result.err;
    EXPECT_THAT(result.err, HasSubstr(part)) << flags;
    EXPECT_EQ(result.out, "") << flags;
  };
  expect_usage("--shape llama9", "llama3-8b, llama3-1b, small, tiny");
  expect_usage("--shape tiny --model x", "--model");
  expect_usage("--shape tiny --only nothing", "attention_decode");
  expect_usage("--shape tiny --only qkv --rows 3", "there are 1 8 64 512");
  expect_usage("--shape tiny --only qkv decode --rows 64", "nothing of 'decode' is left");
  expect_usage("--shape tiny --rows 0", "--rows");
  expect_usage("--shape tiny --repeat 0", "--repeat");
  expect_usage("--shape tiny --device none", "none");
  expect_usage("--format xml", "--format");
  expect_usage("--model none", "none");
  expect_usage("--quick", "--quick");
}

}  // namespace
}  // namespace bitwitness
