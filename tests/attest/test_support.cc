#include "tests/attest/test_support.h"

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "attest/base/hex.h"
#include "attest/base/leaf_hash.h"
#include "attest/base/random.h"

namespace bitwitness::testing {

TemporaryDirectory::TemporaryDirectory()
    : dir_(std::filesystem::temp_directory_path() / ("bw-test-" + to_hex(random_bytes(8)))) {
  std::filesystem::create_directory(dir_);
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(dir_, ignored);
}

std::string TemporaryDirectory::path(const std::string& name) const {
  return name.empty() ? dir_.string() : (dir_ / name).string();
}

Bytes prime_cycle(std::size_t size, std::size_t start) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>((i + start) % 251);
  return bytes;
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write_text(const std::string& path, std::string_view text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  ASSERT_TRUE(file.good()) << path;
}

std::map<std::string, std::string> snapshot(const std::string& dir) {
  std::map<std::string, std::string> files;
  for (const auto& item : std::filesystem::recursive_directory_iterator(dir)) {
    if (item.is_regular_file()) files[item.path().string()] = read_text(item.path().string());
  }
  return files;
}

std::optional<ErrorKind> error_kind(const std::function<void()>& work, std::string* message) {
  try {
    work();
  } catch (const Error& error) {
    if (message != nullptr) *message = error.what();
    EXPECT_STRNE(error.what(), "");
    return error.kind();
  }
  ADD_FAILURE() << "expected an Error";
  return std::nullopt;
}

SigningKey fixed_key(const std::string& name, std::uint8_t fill) {
  return SigningKey::from_seed(name, Bytes(32, fill));
}

SampleRun sample_run(EvidenceLevel level) {
  TraceShape shape;
  shape.layers = 2;
  shape.positions = 4;
  shape.emitted = 2;
  shape.hidden = 8;
  shape.kv_width = 4;
  shape.vocab = 11;
  const std::vector<std::uint32_t> prompt{1, 5, 7};
  const std::vector<std::uint32_t> emitted{9, 2};

  Bytes rows(*evidence_rows_bytes(shape));
  // Small whole numbers are finite and exact in binary32.
  for (std::size_t i = 0; i < rows.size() / 4; ++i) {
    const float value = static_cast<float>(i % 251) - 125.0F;
    std::memcpy(&rows[4 * i], &value, 4);
  }
  TraceBuilder builder(shape);
  builder.reserve(shape.positions);
  const auto row = [&](LeafType type, std::uint32_t layer, std::uint64_t position) {
    const RowRange range = evidence_row_range(shape, type, layer, position).value();
    return ByteView(rows).subspan(range.offset, range.bytes);
  };
  for (std::uint64_t t = 0; t < shape.positions; ++t) {
    for (std::uint32_t l = 0; l <= shape.layers; ++l) {
      builder.set(LeafType::kRow, l, t, row_leaf(Dtype::kFp32, l, t, row(LeafType::kRow, l, t)));
    }
    for (std::uint32_t l = 0; l < shape.layers; ++l) {
      const ByteView both = row(LeafType::kKeyValue, l, t);
      builder.set(LeafType::kKeyValue, l, t,
                  key_value_leaf(Dtype::kFp32, l, t, both.first(16), both.subspan(16)));
    }
    if (t >= 2) {
      builder.set(LeafType::kLogits, 0, t, logits_leaf(t, row(LeafType::kLogits, 0, t)));
    }
  }
  std::vector<std::uint32_t> ids = prompt;
  ids.insert(ids.end(), emitted.begin(), emitted.end());
  builder.set(LeafType::kTokens, 0, 0, tokens_leaf(ids));
  Trace trace = builder.finish(4, 2);

  Record record;
  record.manifest.arithmetic = "fma32";
  record.manifest.family = "llama";
  record.manifest.config = {{"hidden_size", "8"}, {"rope_theta", "0x1.388p+13"}};
  record.manifest.tokenizer_digest = Digest{};
  record.manifest.tables = {{"rope_cos", Digest{}}};
  const Bytes weights = prime_cycle(16);
  const TensorDescription tensor{"lm_head.weight",
                                 Dtype::kBf16,
                                 {2, 4},
                                 std::as_bytes(std::span<const std::uint8_t>(weights))};
  record.manifest.tensors = {{tensor.name, tensor.dtype, tensor.shape, tensor_root(tensor)}};
  record.manifest.weights_root = weights_root(record.manifest.tensors);

  Claim& claim = record.claim;
  claim.arithmetic = "fma32";
  claim.manifest_digest = record.manifest.digest();
  claim.prompt_ids = prompt;
  claim.emitted_ids = emitted;
  claim.stop_reason = StopReason::kStopToken;
  claim.stop_ids = {2, 3};
  claim.max_tokens = 16;
  claim.seed = {0xaa, 0xbb};
  claim.seed_provenance = SeedProvenance::kNonce;
  claim.text_digest = text_digest(claim.seed, "hi");
  claim.trace_shape = trace.shape();
  claim.trace_root = trace.root();

  record.provenance = {{"nonce", std::string(64, '7')}, {"backend", "reference"}};
  if (level == EvidenceLevel::kRoots) record.evidence = roots_evidence(trace);
  if (level == EvidenceLevel::kLeaves) record.evidence = leaves_evidence(trace);
  if (level == EvidenceLevel::kRows) record.evidence = rows_evidence(trace, rows);
  return {std::move(trace), std::move(rows), std::move(record)};
}

}  // namespace bitwitness::testing
