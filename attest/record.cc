#include "attest/record.h"

#include <algorithm>
#include <bit>
#include <ctime>
#include <stdexcept>

#include "attest/base/canonical.h"
#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/base/hex.h"
#include "attest/base/leaf_hash.h"
#include "attest/base/random.h"
#include "attest/base/sha256.h"

namespace bitwitness {
namespace {

constexpr std::string_view kMagic = "bwrecord";
constexpr std::uint32_t kVersion = 1;
constexpr std::string_view kFileTag = "bitwitness/record-file/v1\n";
constexpr std::string_view kRecordTag = "bitwitness/record/v1\n";
constexpr std::string_view kSignatureTag = "bitwitness/operator-signature/v1\n";
constexpr std::string_view kProvenanceTag = "bitwitness/provenance/v1\n";
constexpr std::string_view kProvenanceMagic = "bitwitness/provenance";
constexpr std::uint16_t kProvenanceVersion = 1;

constexpr std::uint64_t kMaxProvenanceEntries = 256;
constexpr std::uint64_t kMaxProvenanceKey = 64;
constexpr std::uint64_t kMaxProvenanceValue = 65536;
constexpr std::size_t kNonceDigits = 64;

bool is_provenance_key(std::string_view key) {
  return !key.empty() && key.size() <= kMaxProvenanceKey &&
         std::all_of(key.begin(), key.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
                  c == '-';
         });
}

Bytes provenance_bytes(const Provenance& provenance) {
  Writer writer;
  writer.str(kProvenanceMagic);
  writer.u16(kProvenanceVersion);
  writer.u32(static_cast<std::uint32_t>(provenance.size()));
  for (const auto& [key, value] : provenance) {  // std::map: sorted by bytes, unique
    writer.str(key);
    writer.str(value);
  }
  return writer.take();
}

Provenance parse_provenance(ByteView bytes, const std::string& document) {
  Reader reader(bytes, document);
  reader.expect_head(kProvenanceMagic, kProvenanceVersion);
  Provenance out;
  const std::uint32_t count = reader.count(kMaxProvenanceEntries, 8, "provenance count");
  for (std::uint32_t i = 0; i < count; ++i) {
    std::string key = reader.str(kMaxProvenanceKey, "provenance key");
    if (i > 0 && !(out.rbegin()->first < key)) {
      reader.fail("provenance key", "'" + key + "' is out of order or twice there");
    }
    std::string value = reader.str(kMaxProvenanceValue, "provenance value");
    out.emplace_hint(out.end(), std::move(key), std::move(value));
  }
  reader.expect_end();
  return out;
}

void write_digests(Writer& writer, const std::vector<Digest>& digests) {
  for (const Digest& digest : digests) writer.digest(digest);
}

std::vector<Digest> read_digests(Reader& reader, std::uint64_t count, const char* field) {
  // Compared before allocation: the count comes from the claim, not from this section.
  if (count > reader.remaining() / 32) {
    reader.fail(field, std::to_string(count) + " digests needed, but only " +
                           std::to_string(reader.remaining()) + " bytes are left");
  }
  std::vector<Digest> digests(count);
  for (Digest& digest : digests) digest = reader.digest(field);
  return digests;
}

Bytes evidence_bytes(const Evidence& evidence) {
  Writer writer;
  writer.reserve(1 + 32 * (evidence.tree_roots.size() + evidence.leaves.size()) +
                 evidence.rows.size());
  writer.u8(static_cast<std::uint8_t>(evidence.level));
  write_digests(writer, evidence.tree_roots);
  write_digests(writer, evidence.leaves);
  writer.raw(evidence.rows);
  return writer.take();
}

Evidence parse_evidence(ByteView bytes, const TraceShape& shape, const std::string& document) {
  Reader reader(bytes, document);
  Evidence out;
  out.level = static_cast<EvidenceLevel>(reader.u8("evidence level"));
  switch (out.level) {
    case EvidenceLevel::kNone:
      break;
    case EvidenceLevel::kRoots:
      out.tree_roots = read_digests(reader, Trace::root_count(shape), "tree roots");
      break;
    case EvidenceLevel::kLeaves:
      out.leaves = read_digests(reader, Trace::leaf_count(shape), "leaf digests");
      break;
    case EvidenceLevel::kRows: {
      out.leaves = read_digests(reader, Trace::leaf_count(shape), "leaf digests");
      const auto rows_bytes = evidence_rows_bytes(shape);
      if (!rows_bytes) reader.fail("rows", "more than a record can hold");
      const ByteView rows = reader.raw(*rows_bytes, "rows");
      out.rows.assign(rows.begin(), rows.end());
      break;
    }
    default:
      reader.fail("evidence level", "unknown");
  }
  reader.expect_end();
  return out;
}

// Every leaf but the tokens one, in committed order: visit(type, layer, position).
template <class Visit>
void for_each_row_leaf(const TraceShape& shape, Visit visit) {
  for (std::uint32_t l = 0; l <= shape.layers; ++l) {
    for (std::uint64_t t = 0; t < shape.positions; ++t) visit(LeafType::kRow, l, t);
  }
  for (std::uint32_t l = 0; l < shape.layers; ++l) {
    for (std::uint64_t t = 0; t < shape.positions; ++t) visit(LeafType::kKeyValue, l, t);
  }
  for (std::uint64_t t = shape.positions - shape.emitted; t < shape.positions; ++t) {
    visit(LeafType::kLogits, 0U, t);
  }
}

void check_evidence(const Evidence& evidence, const Claim& claim, const std::string& document) {
  const TraceShape& shape = claim.trace_shape;
  const auto fail = [&](const std::string& problem) {
    throw malformed_error(document + ": evidence: " + problem);
  };
  const bool wants_roots = evidence.level == EvidenceLevel::kRoots;
  const bool wants_rows = evidence.level == EvidenceLevel::kRows;
  const bool wants_leaves = evidence.level == EvidenceLevel::kLeaves || wants_rows;
  if (evidence.level > EvidenceLevel::kRows) fail("unknown level");
  if (evidence.tree_roots.size() != (wants_roots ? Trace::root_count(shape) : 0)) {
    fail("wrong number of tree roots");
  }
  if (evidence.leaves.size() != (wants_leaves ? Trace::leaf_count(shape) : 0)) {
    fail("wrong number of leaf digests");
  }
  const auto rows_bytes = wants_rows ? evidence_rows_bytes(shape) : std::optional<std::uint64_t>(0);
  if (!rows_bytes || evidence.rows.size() != *rows_bytes) fail("wrong number of row bytes");

  if (wants_roots && Trace::root_from_tree_roots(shape, evidence.tree_roots) != claim.trace_root) {
    fail("the tree roots do not lead to the trace root of the claim");
  }
  if (wants_leaves) {
    if (Trace::from_leaves(shape, evidence.leaves).root() != claim.trace_root) {
      fail("the leaf digests do not lead to the trace root of the claim");
    }
    if (evidence.leaves.back() != tokens_leaf(sequence_ids(claim))) {
      fail("the tokens leaf is not that of the token ids of the claim");
    }
  }
  if (wants_rows) {
    std::uint64_t offset = 0;
    std::uint64_t index = 0;
    for_each_row_leaf(shape, [&](LeafType type, std::uint32_t layer, std::uint64_t position) {
      const std::uint64_t bytes = shape.payload_bytes(type);
      const ByteView row = ByteView(evidence.rows).subspan(offset, bytes);
      offset += bytes;
      const Dtype dtype = shape.payload_dtype(type);
      const LeafPrefix prefix{type, static_cast<std::uint8_t>(dtype), layer, position};
      if (leaf_digest(prefix, row) != evidence.leaves[index++]) {
        fail("the bytes of the " + leaf_place_text(type, layer, position) +
             " do not hash to its leaf digest");
      }
      if (const auto element = first_non_finite(row, dtype)) {
        fail("element " + std::to_string(*element) + " of the " +
             leaf_place_text(type, layer, position) +
             " is not finite, and nothing non-finite is ever committed");
      }
    });
  }
}

Bytes signature_bytes(const std::optional<OperatorSignature>& signature) {
  Writer writer;
  if (signature) signature->write(writer);
  return writer.take();
}

std::optional<OperatorSignature> parse_signature(ByteView bytes, const std::string& document) {
  if (bytes.empty()) return std::nullopt;
  Reader reader(bytes, document);
  const OperatorSignature out = KeySignature::read(reader);
  reader.expect_end();
  return out;
}

Digest file_digest(ByteView content) {
  return sha256({as_bytes(kFileTag), content});
}

}  // namespace

EvidenceLevel parse_evidence_level(std::string_view name) {
  for (const EvidenceLevel level : {EvidenceLevel::kNone, EvidenceLevel::kRoots,
                                    EvidenceLevel::kLeaves, EvidenceLevel::kRows}) {
    if (name == evidence_level_name(level)) return level;
  }
  throw usage_error("unknown evidence level '" + std::string(name) +
                    "'; use none, roots, leaves or rows");
}

std::string provenance_time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

const char* evidence_level_name(EvidenceLevel level) {
  switch (level) {
    case EvidenceLevel::kNone:
      return "none";
    case EvidenceLevel::kRoots:
      return "roots";
    case EvidenceLevel::kLeaves:
      return "leaves";
    case EvidenceLevel::kRows:
      return "rows";
  }
  return "unknown";
}

Provenance new_provenance() {
  return {{provenance_key::kNonce, to_hex(random_bytes(kNonceDigits / 2))}};
}

Digest provenance_digest(const Provenance& provenance) {
  return sha256({as_bytes(kProvenanceTag), provenance_bytes(provenance)});
}

Evidence roots_evidence(const Trace& trace) {
  Evidence out;
  out.level = EvidenceLevel::kRoots;
  out.tree_roots.assign(trace.tree_roots().begin(), trace.tree_roots().end());
  return out;
}

Evidence leaves_evidence(const Trace& trace) {
  Evidence out;
  out.level = EvidenceLevel::kLeaves;
  out.leaves.assign(trace.leaves().begin(), trace.leaves().end());
  return out;
}

Evidence rows_evidence(const Trace& trace, Bytes rows) {
  const auto expected = evidence_rows_bytes(trace.shape());
  if (!expected || rows.size() != *expected) {
    throw std::logic_error("rows_evidence: the rows do not fit the trace's shape");
  }
  Evidence out = leaves_evidence(trace);
  out.level = EvidenceLevel::kRows;
  out.rows = std::move(rows);
  return out;
}

std::optional<std::uint64_t> evidence_rows_bytes(const TraceShape& shape) {
  std::uint64_t total = 0;
  const auto add = [&](std::uint64_t count, LeafType type) {
    std::uint64_t bytes = 0;
    return !__builtin_mul_overflow(count, shape.payload_bytes(type), &bytes) &&
           !__builtin_add_overflow(total, bytes, &total);
  };
  // The counts themselves stay below 2^43 (TraceShape::check).
  if (!add((std::uint64_t{shape.layers} + 1) * shape.positions, LeafType::kRow) ||
      !add(std::uint64_t{shape.layers} * shape.positions, LeafType::kKeyValue) ||
      !add(shape.emitted, LeafType::kLogits) || total > kMaxRecordBytes) {
    return std::nullopt;
  }
  return total;
}

std::optional<RowRange> evidence_row_range(const TraceShape& shape, LeafType type,
                                           std::uint32_t layer, std::uint64_t position) {
  if (type == LeafType::kTokens) return std::nullopt;
  const auto index = Trace::leaf_index(shape, type, layer, position);
  if (!index || !evidence_rows_bytes(shape)) return std::nullopt;
  const std::uint64_t rows = (std::uint64_t{shape.layers} + 1) * shape.positions;
  const std::uint64_t key_values = std::uint64_t{shape.layers} * shape.positions;
  const std::uint64_t row_bytes = shape.payload_bytes(LeafType::kRow);
  const std::uint64_t kv_bytes = shape.payload_bytes(LeafType::kKeyValue);
  const std::uint64_t bytes = shape.payload_bytes(type);
  if (*index < rows) return RowRange{*index * row_bytes, bytes};
  if (*index < rows + key_values) {
    return RowRange{rows * row_bytes + (*index - rows) * kv_bytes, bytes};
  }
  return RowRange{rows * row_bytes + key_values * kv_bytes + (*index - rows - key_values) * bytes,
                  bytes};
}

Digest Record::digest() const {
  return sha256({as_bytes(kRecordTag), claim.digest().view(), manifest.digest().view(),
                 provenance_digest(provenance).view()});
}

void Record::sign(const SigningKey& key) {
  signature = KeySignature::sign(key, kSignatureTag, digest());
}

void Record::check(const std::string& document) const {
  const auto fail = [&](const std::string& problem) {
    throw malformed_error(document + ": " + problem);
  };
  claim.check(document + ", claim");
  if (manifest.digest() != claim.manifest_digest) {
    fail("the manifest is not the one that the claim names");
  }
  if (manifest.arithmetic != claim.arithmetic) {
    fail("claim and manifest name different arithmetics");
  }
  if (provenance.size() > kMaxProvenanceEntries) fail("provenance: too many entries");
  for (const auto& [key, value] : provenance) {
    if (!is_provenance_key(key)) {
      fail("provenance: bad key '" + key.substr(0, kMaxProvenanceKey) +
           "' (a-z, 0-9, '_', '.', '-', at most 64)");
    }
    if (value.size() > kMaxProvenanceValue || !is_utf8(as_bytes(value))) {
      fail("provenance: the value of " + key + " is too long or not UTF-8");
    }
  }
  const auto nonce = provenance.find(provenance_key::kNonce);
  if (nonce == provenance.end() || nonce->second.size() != kNonceDigits ||
      !from_hex(nonce->second)) {
    fail("provenance: nonce missing or not 64 lower-case hexadecimal digits");
  }
  check_evidence(evidence, claim, document);
  if (signature && !signature->good(kSignatureTag, digest())) {
    fail("the operator signature by " + signature->key.name +
         " is not good: the record was altered after it was signed, or the signature is forged");
  }
}

Bytes Record::serialize() const {
  check("record to be written");
  Writer writer;
  const Bytes sections[] = {claim.canonical_bytes(), manifest.canonical_bytes(),
                            provenance_bytes(provenance), evidence_bytes(evidence),
                            signature_bytes(signature)};
  std::uint64_t total = kMagic.size() + 4 + 32;
  for (const Bytes& section : sections) total += 8 + section.size();
  if (total > kMaxRecordBytes) {
    throw usage_error("record: " + std::to_string(total) +
                      " bytes, over the limit of 4 GiB; choose less evidence");
  }
  writer.reserve(total);
  writer.raw(as_bytes(kMagic));
  writer.u32(kVersion);
  for (const Bytes& section : sections) {
    writer.u64(section.size());
    writer.raw(section);
  }
  writer.digest(file_digest(writer.data()));
  return writer.take();
}

Record Record::parse(ByteView bytes, const std::string& document) {
  Reader reader(bytes, document);
  if (bytes.size() > kMaxRecordBytes) reader.fail("record", "over the limit of 4 GiB");
  if (as_text(reader.raw(kMagic.size(), "magic")) != kMagic) {
    reader.fail("magic", "this is no Bitwitness record");
  }
  if (const auto version = reader.u32("version"); version != kVersion) {
    reader.fail("version", std::to_string(version) + " is unknown; this program reads version 1");
  }
  const auto section = [&](const char* field) { return reader.raw(reader.u64(field), field); };
  const ByteView claim_section = section("claim section");
  const ByteView manifest_section = section("manifest section");
  const ByteView provenance_section = section("provenance section");
  const ByteView evidence_section = section("evidence section");
  const ByteView signature_section = section("signature section");
  const ByteView content = bytes.first(reader.offset());
  const Digest digest = reader.digest("file digest");
  reader.expect_end();
  if (digest != file_digest(content)) {
    throw malformed_error(document +
                          ": the file digest does not fit: the file was damaged or altered");
  }
  Record out;
  out.claim = Claim::parse(claim_section, document + ", claim");
  out.manifest = Manifest::parse(manifest_section, document + ", manifest");
  out.provenance = parse_provenance(provenance_section, document + ", provenance");
  out.evidence = parse_evidence(evidence_section, out.claim.trace_shape, document + ", evidence");
  out.signature = parse_signature(signature_section, document + ", signature");
  out.check(document);
  return out;
}

Record read_record(const std::string& path) {
  return Record::parse(read_file(path, {.max_bytes = kMaxRecordBytes}), path);
}

void write_record(const std::string& path, const Record& record) {
  write_file_atomic(path, record.serialize());
}

}  // namespace bitwitness
