#include "attest/claim.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "attest/base/canonical.h"
#include "attest/base/error.h"
#include "attest/base/hex.h"
#include "attest/base/sha256.h"

namespace bitwitness {
namespace {

constexpr std::string_view kMagic = "bitwitness/claim";
constexpr std::uint16_t kVersion = 1;
constexpr std::string_view kDigestTag = "bitwitness/claim/v1\n";
constexpr std::string_view kTextTag = "bitwitness/text/v1\n";
constexpr std::string_view kSaltTag = "bitwitness/salt/v1\n";

constexpr std::uint64_t kMaxName = 512;
constexpr std::uint64_t kMaxIds = std::uint64_t{1} << 26;
constexpr std::uint64_t kMaxStopIds = 4096;
constexpr std::uint64_t kMaxMaxTokens = std::uint64_t{1} << 40;

void write_ids(Writer& writer, const std::vector<std::uint32_t>& ids) {
  writer.u32(static_cast<std::uint32_t>(ids.size()));
  for (const std::uint32_t id : ids) writer.u32(id);
}

std::vector<std::uint32_t> read_ids(Reader& reader, std::uint64_t limit, const char* field) {
  const std::uint32_t count = reader.count(limit, 4, field);
  std::vector<std::uint32_t> ids(count);
  for (std::uint32_t& id : ids) id = reader.u32(field);
  return ids;
}

// The first id differing, or the counts, in words.
std::string ids_difference(const std::vector<std::uint32_t>& a,
                           const std::vector<std::uint32_t>& b) {
  const auto [pa, pb] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  if (pa != a.end() && pb != b.end()) {
    return "token " + std::to_string(pa - a.begin()) + " is " + std::to_string(*pa) + " against " +
           std::to_string(*pb);
  }
  return std::to_string(a.size()) + " tokens against " + std::to_string(b.size());
}

std::string number_hex(std::uint32_t bits) {
  const std::uint8_t bytes[4] = {
      static_cast<std::uint8_t>(bits >> 24), static_cast<std::uint8_t>(bits >> 16),
      static_cast<std::uint8_t>(bits >> 8), static_cast<std::uint8_t>(bits)};
  return "0x" + to_hex(bytes);
}

}  // namespace

const char* stop_reason_name(StopReason reason) {
  switch (reason) {
    case StopReason::kStopToken:
      return "stop_token";
    case StopReason::kLength:
      return "length";
    case StopReason::kContext:
      return "context";
  }
  return "unknown";
}

const char* seed_provenance_name(SeedProvenance provenance) {
  switch (provenance) {
    case SeedProvenance::kNone:
      return "none";
    case SeedProvenance::kNonce:
      return "nonce";
    case SeedProvenance::kProver:
      return "prover";
  }
  return "unknown";
}

void Claim::check(const std::string& document) const {
  const auto fail = [&](const std::string& problem) {
    throw malformed_error(document + ": " + problem);
  };
  if (arithmetic.empty() || arithmetic.size() > kMaxName || !is_utf8(as_bytes(arithmetic))) {
    fail("arithmetic: empty, too long or not UTF-8");
  }
  if (prompt_ids.empty()) fail("prompt: no token");
  if (emitted_ids.empty()) fail("emitted: no token");
  if (prompt_ids.size() > kMaxIds || emitted_ids.size() > kMaxIds) fail("too many tokens");
  if (max_tokens > kMaxMaxTokens) fail("max_tokens: out of range");
  if (emitted_ids.size() > max_tokens) fail("emitted: more tokens than max_tokens");
  for (const std::uint32_t id : prompt_ids) {
    if (id >= trace_shape.vocab) fail("prompt: token id outside the vocabulary");
  }
  for (const std::uint32_t id : emitted_ids) {
    if (id >= trace_shape.vocab) fail("emitted: token id outside the vocabulary");
  }
  if (stop_ids.size() > kMaxStopIds) fail("stop ids: too many");
  for (std::size_t i = 1; i < stop_ids.size(); ++i) {
    if (stop_ids[i - 1] >= stop_ids[i]) fail("stop ids: not ascending and unique");
  }
  const auto is_stop = [&](std::uint32_t id) {
    return std::binary_search(stop_ids.begin(), stop_ids.end(), id);
  };
  // A stop token ends the run: it may only be the last one, and if it is, it is the reason.
  for (std::size_t i = 0; i + 1 < emitted_ids.size(); ++i) {
    if (is_stop(emitted_ids[i])) fail("emitted: a stop token before the end");
  }
  const bool stopped = is_stop(emitted_ids.back());
  switch (stop_reason) {
    case StopReason::kStopToken:
      if (!stopped) fail("stop reason: stop_token, but the last token is none");
      break;
    case StopReason::kLength:
      if (stopped) fail("stop reason: length, but the last token is a stop token");
      if (emitted_ids.size() != max_tokens) fail("stop reason: length, but max_tokens not reached");
      break;
    case StopReason::kContext:
      if (stopped) fail("stop reason: context, but the last token is a stop token");
      if (emitted_ids.size() == max_tokens) fail("stop reason: context, but max_tokens is reached");
      break;
    default:
      fail("stop reason: unknown");
  }
  const float temperature = std::bit_cast<float>(sampling.temperature_bits);
  const float top_p = std::bit_cast<float>(sampling.top_p_bits);
  if (sampling.algorithm == 0) fail("sampling: algorithm version 0");
  // Bits, not the value: -0 is a second encoding of greedy.
  if ((sampling.temperature_bits >> 31) != 0 || !std::isfinite(temperature)) {
    fail("sampling: temperature negative or not finite");
  }
  if (!(top_p > 0.0F && top_p <= 1.0F)) fail("sampling: top_p outside (0, 1]");
  if (sampling.greedy() && (sampling.top_k != 0 || sampling.top_p_bits != 0x3f800000U)) {
    fail("sampling: greedy, so top_k must be 0 and top_p 1");
  }
  if (seed.size() > kMaxSeedBytes) fail("seed: more than 64 bytes");
  switch (seed_provenance) {
    case SeedProvenance::kNone:
      if (!seed.empty()) fail("seed: present, but its provenance is none");
      if (!sampling.greedy()) fail("seed: sampling draws, but there is no seed");
      break;
    case SeedProvenance::kNonce:
    case SeedProvenance::kProver:
      if (seed.empty()) fail("seed: empty, but its provenance is given");
      break;
    default:
      fail("seed provenance: unknown");
  }
  trace_shape.check(Reader({}, document));
  if (trace_shape.positions != prompt_ids.size() + emitted_ids.size() - 1) {
    fail("trace: positions are not prompt tokens + emitted tokens - 1");
  }
  if (trace_shape.emitted != emitted_ids.size()) fail("trace: emitted count differs");
}

Bytes Claim::canonical_bytes() const {
  Writer writer;
  writer.reserve(512 + 4 * (prompt_ids.size() + emitted_ids.size()));
  writer.str(kMagic);
  writer.u16(kVersion);
  writer.str(arithmetic);
  writer.digest(manifest_digest);
  write_ids(writer, prompt_ids);
  write_ids(writer, emitted_ids);
  writer.u8(static_cast<std::uint8_t>(stop_reason));
  write_ids(writer, stop_ids);
  writer.u64(max_tokens);
  writer.u16(sampling.algorithm);
  writer.u32(sampling.temperature_bits);
  writer.u32(sampling.top_k);
  writer.u32(sampling.top_p_bits);
  writer.bytes(seed);
  writer.u8(static_cast<std::uint8_t>(seed_provenance));
  writer.digest(text_digest);
  trace_shape.write(writer);
  writer.digest(trace_root);
  return writer.take();
}

Digest Claim::digest() const {
  return sha256({as_bytes(kDigestTag), canonical_bytes()});
}

Claim Claim::parse(ByteView bytes, const std::string& document) {
  Reader reader(bytes, document);
  reader.expect_head(kMagic, kVersion);
  Claim out;
  out.arithmetic = reader.str(kMaxName, "arithmetic");
  out.manifest_digest = reader.digest("manifest digest");
  out.prompt_ids = read_ids(reader, kMaxIds, "prompt ids");
  out.emitted_ids = read_ids(reader, kMaxIds, "emitted ids");
  out.stop_reason = static_cast<StopReason>(reader.u8("stop reason"));
  out.stop_ids = read_ids(reader, kMaxStopIds, "stop ids");
  out.max_tokens = reader.u64("max_tokens");
  out.sampling.algorithm = reader.u16("sampling algorithm");
  out.sampling.temperature_bits = reader.u32("temperature");
  out.sampling.top_k = reader.u32("top_k");
  out.sampling.top_p_bits = reader.u32("top_p");
  const ByteView seed = reader.bytes(kMaxSeedBytes, "seed");
  out.seed.assign(seed.begin(), seed.end());
  out.seed_provenance = static_cast<SeedProvenance>(reader.u8("seed provenance"));
  out.text_digest = reader.digest("text digest");
  out.trace_shape = TraceShape::read(reader);
  out.trace_root = reader.digest("trace root");
  reader.expect_end();
  out.check(document);
  return out;
}

std::vector<std::uint32_t> sequence_ids(const Claim& claim) {
  std::vector<std::uint32_t> ids = claim.prompt_ids;
  ids.insert(ids.end(), claim.emitted_ids.begin(), claim.emitted_ids.end());
  return ids;
}

Digest text_digest(ByteView seed, std::string_view text) {
  const Digest salt = sha256({as_bytes(kSaltTag), seed});
  return sha256({as_bytes(kTextTag), salt.view(), as_bytes(text)});
}

std::vector<std::string> claim_differences(const Claim& a, const Claim& b) {
  std::vector<std::string> out;
  const auto value = [&](const char* field, const std::string& left, const std::string& right) {
    if (left != right) out.push_back(std::string(field) + ": " + left + " against " + right);
  };
  value("arithmetic", a.arithmetic, b.arithmetic);
  value("manifest", a.manifest_digest.hex(), b.manifest_digest.hex());
  if (a.prompt_ids != b.prompt_ids) {
    out.push_back("prompt: " + ids_difference(a.prompt_ids, b.prompt_ids));
  }
  if (a.emitted_ids != b.emitted_ids) {
    out.push_back("emitted: " + ids_difference(a.emitted_ids, b.emitted_ids));
  }
  value("stop reason", stop_reason_name(a.stop_reason), stop_reason_name(b.stop_reason));
  if (a.stop_ids != b.stop_ids) {
    out.push_back("stop ids: " + ids_difference(a.stop_ids, b.stop_ids));
  }
  value("max_tokens", std::to_string(a.max_tokens), std::to_string(b.max_tokens));
  value("sampling algorithm", std::to_string(a.sampling.algorithm),
        std::to_string(b.sampling.algorithm));
  value("temperature bits", number_hex(a.sampling.temperature_bits),
        number_hex(b.sampling.temperature_bits));
  value("top_k", std::to_string(a.sampling.top_k), std::to_string(b.sampling.top_k));
  value("top_p bits", number_hex(a.sampling.top_p_bits), number_hex(b.sampling.top_p_bits));
  value("seed", to_hex(a.seed), to_hex(b.seed));
  value("seed provenance", seed_provenance_name(a.seed_provenance),
        seed_provenance_name(b.seed_provenance));
  value("text digest", a.text_digest.hex(), b.text_digest.hex());
  if (a.trace_shape != b.trace_shape) out.push_back("trace shape differs");
  value("trace root", a.trace_root.hex(), b.trace_root.hex());
  return out;
}

}  // namespace bitwitness
