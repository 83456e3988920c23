// Records: every byte is covered, evidence is checked, hostile files are malformed and nothing
// else.
#include "attest/record.h"

#include <cstring>
#include <random>

#include "attest/base/file.h"
#include "attest/base/hex.h"
#include "attest/base/leaf_hash.h"
#include "attest/base/sha256.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

using testing::error_kind;
using testing::fixed_key;
using testing::read_text;
using testing::sample_run;
using testing::SampleRun;
using testing::TemporaryDirectory;

constexpr EvidenceLevel kLevels[] = {EvidenceLevel::kNone, EvidenceLevel::kRoots,
                                     EvidenceLevel::kLeaves, EvidenceLevel::kRows};

// What a forger does after changing a file: makes the file digest fit again.
void refit_file_digest(Bytes& file) {
  const ByteView content = ByteView(file).first(file.size() - 32);
  const Digest digest = sha256({as_bytes("bitwitness/record-file/v1\n"), content});
  std::copy(digest.bytes.begin(), digest.bytes.end(), file.end() - 32);
}

TEST(Record, RoundTripAtEveryLevel) {
  for (const EvidenceLevel level : kLevels) {
    for (const bool with_signature : {false, true}) {
      Record record = sample_run(level).record;
      if (with_signature) record.sign(fixed_key("operator.example", 1));
      const Bytes bytes = record.serialize();
      const Record parsed = Record::parse(bytes, "r");
      EXPECT_EQ(parsed.claim, record.claim);
      EXPECT_EQ(parsed.provenance, record.provenance);
      EXPECT_EQ(parsed.manifest, record.manifest);
      EXPECT_EQ(parsed.evidence, record.evidence);
      EXPECT_EQ(parsed.signature, record.signature);
      EXPECT_EQ(parsed.digest(), record.digest());
      EXPECT_EQ(parsed.serialize(), bytes);
    }
  }
}

TEST(Record, DigestCoversClaimManifestAndProvenanceButNotEvidence) {
  const Record record = sample_run().record;
  EXPECT_EQ(sample_run(EvidenceLevel::kRows).record.digest(), record.digest());
  Record other = record;
  other.claim.trace_root.bytes[3] ^= 1;
  EXPECT_NE(other.digest(), record.digest());
  other = record;
  other.manifest.family = "qwen3";
  EXPECT_NE(other.digest(), record.digest());
  other = record;
  other.provenance["backend"] = "avx2";
  EXPECT_NE(other.digest(), record.digest());
}

TEST(Record, EveryFlippedByteIsMalformed) {
  for (const EvidenceLevel level : kLevels) {
    Record record = sample_run(level).record;
    record.sign(fixed_key("operator.example", 1));
    const Bytes bytes = record.serialize();
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      Bytes changed = bytes;
      changed[i] ^= static_cast<std::uint8_t>(1 + i % 255);
      ASSERT_EQ(error_kind([&] { Record::parse(changed, "r"); }), ErrorKind::kMalformed)
          << "byte " << i;
    }
  }
}

TEST(Record, EveryFlippedByteOfASignedRecordIsMalformedEvenWithAFittingFileDigest) {
  for (const EvidenceLevel level : {EvidenceLevel::kRoots, EvidenceLevel::kRows}) {
    Record record = sample_run(level).record;
    record.sign(fixed_key("operator.example", 1));
    const Bytes bytes = record.serialize();
    for (std::size_t i = 0; i + 32 < bytes.size(); ++i) {
      Bytes changed = bytes;
      changed[i] ^= 1;
      refit_file_digest(changed);
      ASSERT_EQ(error_kind([&] { Record::parse(changed, "r"); }), ErrorKind::kMalformed)
          << "byte " << i;
    }
  }
}

TEST(Record, TruncatedAndExtendedFilesAreMalformed) {
  Record record = sample_run(EvidenceLevel::kLeaves).record;
  record.sign(fixed_key("operator.example", 1));
  const Bytes bytes = record.serialize();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    ASSERT_EQ(error_kind([&] { Record::parse(ByteView(bytes).first(size), "r"); }),
              ErrorKind::kMalformed);
  }
  Bytes longer = bytes;
  longer.push_back(0);
  EXPECT_EQ(error_kind([&] { Record::parse(longer, "r"); }), ErrorKind::kMalformed);
  refit_file_digest(longer);
  EXPECT_EQ(error_kind([&] { Record::parse(longer, "r"); }), ErrorKind::kMalformed);
}

TEST(Record, HostileLengthsAllocateNothing) {
  const Bytes bytes = sample_run(EvidenceLevel::kLeaves).record.serialize();
  // Every aligned u32 becomes huge; the file digest fits.
  for (std::size_t i = 8; i + 36 < bytes.size(); i += 1) {
    Bytes changed = bytes;
    const std::uint32_t huge = 0xfffffff0U;
    std::memcpy(&changed[i], &huge, 4);
    refit_file_digest(changed);
    try {
      Record::parse(changed, "r");
    } catch (const Error& error) {
      ASSERT_EQ(error.kind(), ErrorKind::kMalformed) << error.what();
    }
  }
}

TEST(Record, RandomBytesAreMalformed) {
  std::mt19937 random(7);
  const Bytes good = sample_run(EvidenceLevel::kRoots).record.serialize();
  for (int i = 0; i < 3000; ++i) {
    Bytes bytes(random() % 600);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    if (i % 2 == 0) {
      bytes.insert(bytes.begin(), good.begin(), good.begin() + static_cast<long>(random() % 200));
    }
    ASSERT_EQ(error_kind([&] { Record::parse(bytes, "r"); }), ErrorKind::kMalformed);
  }
}

TEST(Record, EvidenceThatDoesNotLeadToTheTraceRootIsMalformed) {
  for (const EvidenceLevel level :
       {EvidenceLevel::kRoots, EvidenceLevel::kLeaves, EvidenceLevel::kRows}) {
    Record record = sample_run(level).record;
    record.claim.trace_root.bytes[0] ^= 1;
    EXPECT_EQ(error_kind([&] { record.check("r"); }), ErrorKind::kMalformed);
  }
  Record record = sample_run(EvidenceLevel::kRoots).record;
  record.evidence.tree_roots.pop_back();
  EXPECT_EQ(error_kind([&] { record.check("r"); }), ErrorKind::kMalformed);
  record = sample_run(EvidenceLevel::kLeaves).record;
  record.claim.prompt_ids[1] = 6;  // the tokens leaf no longer fits
  EXPECT_EQ(error_kind([&] { record.check("r"); }), ErrorKind::kMalformed);
  record = sample_run(EvidenceLevel::kLeaves).record;
  record.evidence.level = EvidenceLevel::kRoots;
  EXPECT_EQ(error_kind([&] { record.check("r"); }), ErrorKind::kMalformed);
}

TEST(Record, AlteredRowIsNamed) {
  const SampleRun run = sample_run(EvidenceLevel::kRows);
  const TraceShape& shape = run.trace.shape();
  std::uint64_t next = 0;
  for (std::uint64_t i = 0; i + 1 < Trace::leaf_count(shape); ++i) {
    // Ranges tile Evidence::rows in the order of the leaves.
    std::optional<RowRange> range;
    std::string place;
    for (const LeafType type : {LeafType::kRow, LeafType::kKeyValue, LeafType::kLogits}) {
      for (std::uint32_t l = 0; l <= shape.layers; ++l) {
        for (std::uint64_t t = 0; t < shape.positions; ++t) {
          if (Trace::leaf_index(shape, type, l, t) != i) continue;
          range = evidence_row_range(shape, type, l, t);
          place = std::string(leaf_type_name(type)) + " of layer " + std::to_string(l) +
                  ", position " + std::to_string(t);
        }
      }
    }
    ASSERT_TRUE(range);
    EXPECT_EQ(range->offset, next);
    next += range->bytes;
    Record record = run.record;
    record.evidence.rows[range->offset + range->bytes - 1] ^= 1;
    std::string message;
    EXPECT_EQ(error_kind([&] { record.check("r"); }, &message), ErrorKind::kMalformed);
    EXPECT_NE(message.find(place), std::string::npos) << message;
  }
  EXPECT_EQ(next, run.rows.size());
  EXPECT_FALSE(evidence_row_range(shape, LeafType::kLogits, 0, 1));
  EXPECT_FALSE(evidence_row_range(shape, LeafType::kTokens, 0, 0));
}

TEST(Record, ClaimAndManifestMustBelongTogether) {
  Record record = sample_run().record;
  record.manifest.config[0].second = "9";
  EXPECT_EQ(error_kind([&] { record.check("r"); }), ErrorKind::kMalformed);
  record = sample_run().record;
  record.claim.arithmetic = "tc16-l16f25";
  EXPECT_EQ(error_kind([&] { record.check("r"); }), ErrorKind::kMalformed);
}

TEST(Record, ProvenanceRules) {
  const std::function<void(Provenance&)> breaks[] = {
      [](Provenance& p) { p.erase("nonce"); },
      [](Provenance& p) { p["nonce"] = std::string(64, 'A'); },
      [](Provenance& p) { p["nonce"] = std::string(62, '0'); },
      [](Provenance& p) { p["Key"] = "x"; },
      [](Provenance& p) { p[""] = "x"; },
      [](Provenance& p) { p[std::string(65, 'k')] = "x"; },
      [](Provenance& p) { p["k"] = "\xff"; },
      [](Provenance& p) { p["k"] = std::string(65537, 'v'); },
      [](Provenance& p) {
        for (int i = 0; i < 300; ++i) p["k" + std::to_string(i)] = "";
      }};
  for (const auto& change : breaks) {
    Record record = sample_run().record;
    change(record.provenance);
    EXPECT_EQ(error_kind([&] { record.check("r"); }), ErrorKind::kMalformed);
    EXPECT_EQ(error_kind([&] { record.serialize(); }), ErrorKind::kMalformed);
  }
  EXPECT_NE(new_provenance(), new_provenance());
  EXPECT_EQ(new_provenance()["nonce"].size(), 64U);
}

TEST(Record, SignatureBindsNameKeyAndContent) {
  Record record = sample_run().record;
  record.sign(fixed_key("operator.example", 1));
  record.check("r");
  Record other = record;
  other.signature->key.name = "somebody.else";
  EXPECT_EQ(error_kind([&] { other.check("r"); }), ErrorKind::kMalformed);
  other = record;
  other.signature->key = fixed_key("operator.example", 2).public_key();
  EXPECT_EQ(error_kind([&] { other.check("r"); }), ErrorKind::kMalformed);
  other = record;
  other.provenance["backend"] = "avx2";
  EXPECT_EQ(error_kind([&] { other.check("r"); }), ErrorKind::kMalformed);
  other = record;
  other.signature->key.bytes.fill(0xff);
  EXPECT_EQ(error_kind([&] { other.check("r"); }), ErrorKind::kMalformed);
}

TEST(Record, NonFiniteRowsAreMalformed) {
  SampleRun run = sample_run(EvidenceLevel::kRows);
  const TraceShape shape = run.trace.shape();
  // A prover that committed to an infinity, consistently.
  const RowRange range = *evidence_row_range(shape, LeafType::kRow, 1, 2);
  const std::uint32_t infinity = 0xff800000U;
  std::memcpy(&run.rows[range.offset + 12], &infinity, 4);
  std::vector<Digest> leaves(run.trace.leaves().begin(), run.trace.leaves().end());
  leaves[*Trace::leaf_index(shape, LeafType::kRow, 1, 2)] =
      row_leaf(Dtype::kFp32, 1, 2, ByteView(run.rows).subspan(range.offset, range.bytes));
  const Trace trace = Trace::from_leaves(shape, leaves);
  run.record.claim.trace_root = trace.root();
  run.record.evidence = rows_evidence(trace, run.rows);
  std::string message;
  EXPECT_EQ(error_kind([&] { run.record.check("r"); }, &message), ErrorKind::kMalformed);
  EXPECT_NE(message.find("element 3 of the row of layer 1, position 2"), std::string::npos)
      << message;
}

TEST(Record, FilesAreReadAndWrittenWhole) {
  const TemporaryDirectory dir;
  const Record record = sample_run(EvidenceLevel::kRoots).record;
  write_record(dir.path("a.bwrec"), record);
  EXPECT_EQ(read_record(dir.path("a.bwrec")).digest(), record.digest());
  Record bad = record;
  bad.claim.max_tokens = 0;
  EXPECT_EQ(error_kind([&] { write_record(dir.path("b.bwrec"), bad); }), ErrorKind::kMalformed);
  EXPECT_FALSE(path_exists(dir.path("b.bwrec")));
  std::string message;
  EXPECT_EQ(error_kind([&] { read_record(dir.path("none.bwrec")); }, &message), ErrorKind::kUsage);
  EXPECT_NE(message.find("none.bwrec"), std::string::npos);
  testing::write_text(dir.path("c.bwrec"), "not a record at all");
  EXPECT_EQ(error_kind([&] { read_record(dir.path("c.bwrec")); }, &message), ErrorKind::kMalformed);
  EXPECT_NE(message.find("c.bwrec"), std::string::npos);
}

TEST(Record, EvidenceSizesDoNotOverflow) {
  TraceShape shape;
  shape.layers = 1 << 16;
  shape.positions = 1 << 26;
  shape.emitted = 1 << 26;
  shape.hidden = 1 << 26;
  shape.kv_width = 1 << 26;
  shape.vocab = 1 << 26;
  EXPECT_FALSE(evidence_rows_bytes(shape));
  EXPECT_FALSE(evidence_row_range(shape, LeafType::kRow, 0, 0));
}

// The worked example of attest/RECORD_FORMAT.md and its published values.
class RecordFormatExample : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string text = read_text(std::string(BW_SOURCE_DIR) + "/attest/RECORD_FORMAT.md");
    std::string digits;
    std::size_t at = text.find("<!-- example:begin -->");
    const std::size_t end = text.find("<!-- example:end -->");
    ASSERT_NE(at, std::string::npos);
    ASSERT_NE(end, std::string::npos);
    // Lines of hex, each with a comment behind '#'.
    while (at < end) {
      const std::size_t line_end = text.find('\n', at);
      std::string line = text.substr(at, line_end - at);
      line = line.substr(0, line.find('#'));
      if (line.find_first_not_of("0123456789abcdef ") == std::string::npos) {
        for (const char c : line) {
          if (c != ' ') digits += c;
        }
      }
      at = line_end + 1;
    }
    ASSERT_TRUE(from_hex(digits));
    bytes_ = *from_hex(digits);
    values_ = text;
  }
  void expect_value(const std::string& name, const Digest& digest) const {
    EXPECT_NE(values_.find(name + " | `" + digest.hex() + "`"), std::string::npos)
        << name << " " << digest.hex();
  }
  Bytes bytes_;
  std::string values_;
};

TEST_F(RecordFormatExample, IsTheSampleRecord) {
  Record record = sample_run(EvidenceLevel::kRoots).record;
  record.sign(fixed_key("operator.example", 1));
  EXPECT_EQ(to_hex(bytes_), to_hex(record.serialize()));
}

TEST_F(RecordFormatExample, DecodesToThePublishedValues) {
  const Record record = Record::parse(bytes_, "example");
  EXPECT_EQ(record.claim.arithmetic, "fma32");
  EXPECT_EQ(record.claim.prompt_ids, (std::vector<std::uint32_t>{1, 5, 7}));
  EXPECT_EQ(record.claim.emitted_ids, (std::vector<std::uint32_t>{9, 2}));
  EXPECT_EQ(record.claim.text_digest, text_digest(Bytes{0xaa, 0xbb}, "hi"));
  expect_value("claim digest", record.claim.digest());
  expect_value("manifest digest", record.manifest.digest());
  expect_value("provenance digest", provenance_digest(record.provenance));
  expect_value("record digest", record.digest());
  expect_value("trace root", record.claim.trace_root);
  expect_value("weights root", record.manifest.weights_root);
}

}  // namespace
}  // namespace bitwitness
