// Manifests: hashing, canonical order, strict parsing, differences in words.
#include "attest/manifest.h"

#include <random>

#include "attest/base/merkle.h"
#include "attest/base/sha256.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

using testing::error_kind;
using testing::prime_cycle;

struct Model {
  Bytes big = prime_cycle(5 * (1 << 20) / 2);  // two and a half chunks
  Bytes small = prime_cycle(24, 9);
  std::string tokenizer = "{}";
  ModelDescription description;

  Model() {
    description.arithmetic = "fma32";
    description.family = "llama";
    description.config = {{"a", "1"}, {"b", "0x1p+3"}};
    description.tokenizer_json = std::as_bytes(std::span<const char>(tokenizer));
    description.tables = {{"cos", std::vector<std::byte>(4)}, {"sin", std::vector<std::byte>(8)}};
    const auto view = [](const Bytes& bytes) {
      return std::as_bytes(std::span<const std::uint8_t>(bytes));
    };
    description.tensors = {{"big", Dtype::kBf16, {5, 1 << 18}, view(big)},
                           {"small", Dtype::kFp32, {2, 3}, view(small)}};
  }
};

TEST(Manifest, HashesWhatTheSpecificationSays) {
  const Model model;
  const Manifest manifest = build_manifest(model.description);
  EXPECT_EQ(manifest.tokenizer_digest, sha256("{}"));
  EXPECT_EQ(manifest.tables[0].second, sha256(Bytes(4)));
  const std::vector<std::uint64_t> shape{5, 1 << 18};
  std::vector<Digest> chunks;
  for (std::uint64_t i = 0; i < 3; ++i) {
    const std::size_t begin = i << 20;
    chunks.push_back(
        tensor_chunk_digest("big", Dtype::kBf16, shape, i, 3,
                            ByteView(model.big).subspan(
                                begin, std::min<std::size_t>(1 << 20, model.big.size() - begin))));
  }
  EXPECT_EQ(manifest.tensors[0].root, merkle_root(chunks));
  EXPECT_EQ(manifest.tensors[0].root, tensor_root(model.description.tensors[0]));
  EXPECT_EQ(manifest.weights_root, weights_root(manifest.tensors));
}

TEST(Manifest, ThreadsAndProgressDoNotMatter) {
  const Model model;
  const Manifest one = build_manifest(model.description, {}, 1);
  std::uint64_t last = 0;
  const Manifest four = build_manifest(
      model.description,
      [&](std::uint64_t done, std::uint64_t total) { last = done == total ? total : last; }, 4);
  EXPECT_EQ(one, four);
  EXPECT_EQ(last, 4U);
}

// Any selection of tensors, in any order, on any number of threads.
TEST(Manifest, RootsOfSomeTensorsAreTheManifests) {
  const Model model;
  const Manifest manifest = build_manifest(model.description);
  const std::vector<TensorDescription>& all = model.description.tensors;
  const std::vector<TensorDescription> some{all[1], all[0], all[1]};
  for (const unsigned threads : {0U, 1U, 2U, 9U}) {
    EXPECT_EQ(tensor_roots(some, {}, threads),
              (std::vector<Digest>{manifest.tensors[1].root, manifest.tensors[0].root,
                                   manifest.tensors[1].root}))
        << threads;
    EXPECT_TRUE(tensor_roots({}, {}, threads).empty());
  }
}

TEST(Manifest, ParsesWhatItWrites) {
  const Model model;
  Manifest manifest = build_manifest(model.description);
  EXPECT_EQ(Manifest::parse(manifest.canonical_bytes(), "m"), manifest);
  manifest.tokenizer_digest.reset();
  manifest.config.clear();
  manifest.tables.clear();
  EXPECT_EQ(Manifest::parse(manifest.canonical_bytes(), "m"), manifest);
}

TEST(Manifest, EveryChangedByteIsMalformedOrAnotherManifest) {
  const Model model;
  const Manifest manifest = build_manifest(model.description);
  const Bytes bytes = manifest.canonical_bytes();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    Bytes changed = bytes;
    changed[i] ^= 0x41;
    try {
      const Manifest other = Manifest::parse(changed, "m");
      EXPECT_NE(other.digest(), manifest.digest()) << "byte " << i;
      EXPECT_FALSE(manifest_differences(other, manifest).empty()) << "byte " << i;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kMalformed) << "byte " << i;
    }
    EXPECT_EQ(error_kind([&] { Manifest::parse(ByteView(bytes).first(i), "m"); }),
              ErrorKind::kMalformed);
  }
  Bytes longer = bytes;
  longer.push_back(0);
  EXPECT_EQ(error_kind([&] { Manifest::parse(longer, "m"); }), ErrorKind::kMalformed);
}

TEST(Manifest, ParsingRefusesWhatIsNotCanonical) {
  const Model model;
  const Manifest good = build_manifest(model.description);
  const auto kind = [](const Manifest& manifest) {
    return error_kind([&] { Manifest::parse(manifest.canonical_bytes(), "m"); });
  };
  Manifest bad = good;
  std::swap(bad.config[0], bad.config[1]);
  EXPECT_EQ(kind(bad), ErrorKind::kMalformed);
  bad = good;
  bad.config[1].first = "a";
  EXPECT_EQ(kind(bad), ErrorKind::kMalformed);
  bad = good;
  std::swap(bad.tensors[0], bad.tensors[1]);
  bad.weights_root = weights_root(bad.tensors);
  EXPECT_EQ(kind(bad), ErrorKind::kMalformed);
  bad = good;
  bad.tensors.clear();
  bad.weights_root = weights_root(bad.tensors);
  EXPECT_EQ(kind(bad), ErrorKind::kMalformed);
  bad = good;
  bad.tensors[0].shape = {1ULL << 62, 1ULL << 62};
  bad.weights_root = weights_root(bad.tensors);
  EXPECT_EQ(kind(bad), ErrorKind::kMalformed);
  bad = good;
  bad.tensors[0].shape = {0, 3};
  bad.weights_root = weights_root(bad.tensors);
  EXPECT_EQ(kind(bad), ErrorKind::kMalformed);
  bad = good;
  bad.tensors[0].dtype = static_cast<Dtype>(9);
  bad.weights_root = weights_root(bad.tensors);
  EXPECT_EQ(kind(bad), ErrorKind::kMalformed);
  bad = good;
  bad.weights_root.bytes[0] ^= 1;
  EXPECT_EQ(kind(bad), ErrorKind::kMalformed);
  bad = good;
  bad.arithmetic = "\xff";
  EXPECT_EQ(kind(bad), ErrorKind::kMalformed);
}

TEST(Manifest, DescriptionsThatAreNotCanonicalAreRefused) {
  const auto kind = [](const std::function<void(ModelDescription&)>& change) {
    Model model;
    change(model.description);
    return error_kind([&] { build_manifest(model.description); });
  };
  EXPECT_EQ(kind([](auto& d) { std::swap(d.tensors[0], d.tensors[1]); }), ErrorKind::kUsage);
  EXPECT_EQ(kind([](auto& d) { d.tensors[1].name = "big"; }), ErrorKind::kUsage);
  EXPECT_EQ(kind([](auto& d) { d.tensors[1].shape = {2, 4}; }), ErrorKind::kUsage);
  EXPECT_EQ(kind([](auto& d) { d.tensors[1].shape = {1ULL << 63, 2}; }), ErrorKind::kUsage);
  EXPECT_EQ(kind([](auto& d) { d.tensors.clear(); }), ErrorKind::kUsage);
  EXPECT_EQ(kind([](auto& d) { d.config[1].first = "a"; }), ErrorKind::kUsage);
  EXPECT_EQ(kind([](auto& d) { d.tables[1].first = "a"; }), ErrorKind::kUsage);
  EXPECT_EQ(kind([](auto& d) { d.family = ""; }), ErrorKind::kUsage);
}

TEST(Manifest, DifferencesNameTheEntry) {
  const Model model;
  const Manifest here = build_manifest(model.description);
  EXPECT_TRUE(manifest_differences(here, here).empty());

  Model changed;
  changed.small[5] ^= 1;
  changed.description.config[0].second = "2";
  const auto differences = manifest_differences(build_manifest(changed.description), here);
  ASSERT_EQ(differences.size(), 2U);
  EXPECT_EQ(differences[0], "config a: claimed 2, here 1");
  EXPECT_TRUE(differences[1].starts_with("weights of tensor small: claimed "));

  Manifest without = here;
  without.tensors.pop_back();
  without.config.erase(without.config.begin());
  EXPECT_EQ(manifest_differences(without, here),
            (std::vector<std::string>{"config a: here, but not claimed",
                                      "tensor small: here, but not claimed"}));
  EXPECT_EQ(manifest_differences(here, without),
            (std::vector<std::string>{"config a: claimed, but not here",
                                      "tensor small: claimed, but not here"}));
}

}  // namespace
}  // namespace bitwitness
