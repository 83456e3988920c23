#include "verifier/client.h"

#include <bit>
#include <memory>

#include "attest/base/error.h"
#include "attest/base/hex.h"
#include "attest/log.h"
#include "verifier/connection.h"

namespace bitwitness {
namespace {

namespace wire = bitwitness::v1;
using std::chrono::milliseconds;

// PROTOCOL.md "Limits".
constexpr std::size_t kMaxTokenTextBytes = std::size_t{64} << 10;
constexpr std::size_t kMaxTextBytes = std::size_t{64} << 20;
constexpr std::size_t kMaxRequestBytes = std::size_t{4} << 20;

wire::EvidenceLevel to_wire(EvidenceLevel level) {
  switch (level) {
    case EvidenceLevel::kNone:
      return wire::EVIDENCE_LEVEL_NONE;
    case EvidenceLevel::kRoots:
      return wire::EVIDENCE_LEVEL_ROOTS;
    case EvidenceLevel::kLeaves:
      return wire::EVIDENCE_LEVEL_LEAVES;
    case EvidenceLevel::kRows:
      return wire::EVIDENCE_LEVEL_ROWS;
  }
  return wire::EVIDENCE_LEVEL_UNSPECIFIED;
}

wire::GenerateRequest to_wire(const RemoteRequest& request) {
  if (request.prompt.has_value() == request.prompt_ids.has_value()) {
    throw usage_error("a request has either a prompt or its token ids");
  }
  if (request.nonce.size() > kMaxSeedBytes) {
    throw usage_error("the nonce has " + std::to_string(request.nonce.size()) + " bytes; at most " +
                      std::to_string(kMaxSeedBytes) + " are allowed");
  }
  wire::GenerateRequest out;
  if (request.prompt) {
    out.set_text(*request.prompt);
  } else {
    out.mutable_token_ids()->mutable_ids()->Add(request.prompt_ids->begin(),
                                                request.prompt_ids->end());
  }
  out.set_max_tokens(request.max_tokens);
  out.mutable_sampling()->set_temperature(request.temperature);
  out.mutable_sampling()->set_top_k(request.top_k);
  out.mutable_sampling()->set_top_p(request.top_p);
  out.set_nonce(request.nonce.data(), request.nonce.size());
  if (request.evidence) out.set_evidence(to_wire(*request.evidence));
  if (out.ByteSizeLong() > kMaxRequestBytes) {
    throw usage_error("the request has " + std::to_string(out.ByteSizeLong()) + " bytes; at most " +
                      std::to_string(kMaxRequestBytes) + " can be sent: shorten the prompt");
  }
  return out;
}

// What a prover streamed before it named its record.
struct Delivered {
  std::vector<std::uint32_t> ids;
  std::string text;
  wire::Result result;
};

// Everything in the record that this side knows without the model.
void check_claim(const Claim& claim, const RemoteRequest& request, const Delivered& delivered,
                 const std::string& what) {
  const auto require = [&](bool good, const char* field) {
    if (!good) {
      throw malformed_error(what + " is not the record of this exchange: " + field + " differs");
    }
  };
  require(!request.prompt_ids || claim.prompt_ids == *request.prompt_ids, "prompt");
  require(claim.max_tokens == request.max_tokens, "max_tokens");
  require(claim.sampling.temperature_bits == std::bit_cast<std::uint32_t>(request.temperature),
          "temperature");
  require(claim.sampling.top_k == request.top_k, "top_k");
  require(claim.sampling.top_p_bits == std::bit_cast<std::uint32_t>(request.top_p), "top_p");
  if (!request.nonce.empty()) {
    require(claim.seed == request.nonce && claim.seed_provenance == SeedProvenance::kNonce,
            "nonce");
  } else {
    require(claim.seed_provenance != SeedProvenance::kNonce, "nonce");
  }
  require(claim.emitted_ids == delivered.ids, "the tokens delivered");
  require(claim.text_digest == text_digest(claim.seed, delivered.text), "the text delivered");
  require(claim.digest().hex() == delivered.result.claim_digest(), "claim digest");
  require(claim.trace_root.hex() == delivered.result.trace_root(), "trace root");
}

Delivered run_remote(
    const ProverEndpoint& prover, const RemoteRequest& request, milliseconds deadline,
    const std::function<void(std::uint32_t token, std::string_view text)>& on_token) {
  const wire::GenerateRequest message = to_wire(request);
  const std::unique_ptr<wire::Audit::Stub> stub = connect(prover, deadline);
  const auto bad = [&](const std::string& why) {
    return malformed_error("prover " + prover.host_port + ": Generate: " + why);
  };
  grpc::ClientContext context;
  set_deadline(context, deadline);
  Stream<wire::GenerateEvent> stream(context, stub->Generate(&context, message));
  Delivered out;
  bool done = false;
  wire::GenerateEvent event;
  while (stream.read(event)) {
    if (done) throw bad("a message after the result");
    if (event.has_result()) {
      out.result = event.result();
      done = true;
      continue;
    }
    if (!event.has_token()) throw bad("a message that is neither token nor result");
    if (out.ids.size() >= request.max_tokens) throw bad("more tokens than were asked for");
    if (event.token().text().size() > kMaxTokenTextBytes) throw bad("a token with too much text");
    if (out.text.size() > kMaxTextBytes) throw bad("too much text");
    out.ids.push_back(event.token().id());
    out.text += event.token().text();
    if (on_token) on_token(event.token().id(), event.token().text());
  }
  const grpc::Status status = stream.finish();
  if (!status.ok()) {
    throw status_error(status, prover, "Generate", deadline, /*own_request=*/true);
  }
  if (!done) throw bad("the stream ended without a result");
  parse_digest(out.result.record_id(), "prover " + prover.host_port + ": record_id");
  return out;
}

}  // namespace

ProverInfo fetch_info(const ProverEndpoint& prover, milliseconds deadline) {
  const std::unique_ptr<wire::Audit::Stub> stub = connect(prover, deadline);
  grpc::ClientContext context;
  set_deadline(context, deadline);
  wire::GetInfoResponse response;
  const grpc::Status status = stub->GetInfo(&context, wire::GetInfoRequest(), &response);
  if (!status.ok()) {
    throw status_error(status, prover, "GetInfo", deadline, /*own_request=*/false);
  }
  ProverInfo out;
  out.answers_audits = response.answers_audits();
  if (!response.log_key().empty()) {
    try {
      out.log_key = PublicKey::parse_vkey(response.log_key(), ErrorKind::kMalformed);
    } catch (const Error& error) {
      throw malformed_error("prover " + prover.host_port + ": log key: " + error.what());
    }
  }
  return out;
}

FetchedRecord fetch_record(const ProverEndpoint& prover, const std::string& record_id,
                           const FetchOptions& options) {
  const std::optional<Bytes> id_bytes = from_hex_any_case(record_id);
  if (!id_bytes || id_bytes->size() != 32) {
    throw usage_error("record id '" + record_id.substr(0, 80) +
                      "' must be 64 hexadecimal digits: the record's digest");
  }
  const std::string id = to_hex(*id_bytes);
  const std::string what = "record " + id + " from " + prover.host_port;
  const std::unique_ptr<wire::Audit::Stub> stub = connect(prover, options.deadline);
  grpc::ClientContext context;
  set_deadline(context, options.deadline);
  wire::GetRecordRequest request;
  request.set_record_id(id);
  Stream<wire::RecordChunk> stream(context, stub->GetRecord(&context, request));

  FetchedRecord out;
  std::optional<std::uint64_t> announced;
  wire::RecordChunk chunk;
  while (stream.read(chunk)) {
    if (!announced) {
      if (!chunk.has_header()) throw malformed_error(what + ": the header is missing");
      announced = chunk.header().record_bytes();
      if (*announced == 0) throw malformed_error(what + ": announced as empty");
      if (*announced > options.max_bytes) {
        throw cannot_judge_error(what + " has " + std::to_string(*announced) +
                                 " bytes, more than the " + std::to_string(options.max_bytes) +
                                 " allowed here; raise the limit to fetch it");
      }
      const std::string& receipt = chunk.header().receipt();
      if (receipt.size() > kMaxReceiptBytes) {
        throw malformed_error(what + ": its receipt is too long");
      }
      if (!receipt.empty()) out.receipt = receipt;
      continue;
    }
    if (chunk.part_case() != wire::RecordChunk::kData) {
      throw malformed_error(what + ": a message that is no data where data belong");
    }
    const std::string& data = chunk.data();
    if (data.empty() || data.size() > kChunkBytes) {
      throw malformed_error(what + ": a chunk of " + std::to_string(data.size()) + " bytes; 1 to " +
                            std::to_string(kChunkBytes) + " are allowed");
    }
    if (data.size() > *announced - out.record.size()) {
      throw malformed_error(what + ": more bytes than the " + std::to_string(*announced) +
                            " announced");
    }
    out.record.insert(out.record.end(), data.begin(), data.end());
  }
  const grpc::Status status = stream.finish();
  if (!status.ok()) {
    throw status_error(status, prover, "GetRecord", options.deadline, /*own_request=*/false);
  }
  if (!announced) throw malformed_error(what + ": nothing was sent");
  if (out.record.size() != *announced) {
    throw malformed_error(what + ": " + std::to_string(out.record.size()) + " bytes where " +
                          std::to_string(*announced) + " were announced");
  }
  out.parsed = Record::parse(out.record, what);
  if (out.parsed.digest().hex() != id) {
    throw malformed_error(what + ": another record was sent, " + out.parsed.digest().hex());
  }
  return out;
}

RemoteGeneration generate_remote(
    const ProverEndpoint& prover, const RemoteRequest& request, milliseconds deadline,
    const FetchOptions& options,
    const std::function<void(std::uint32_t token, std::string_view text)>& on_token) {
  const Delivered delivered = run_remote(prover, request, deadline, on_token);
  RemoteGeneration out;
  out.text = delivered.text;
  out.fetched = fetch_record(prover, delivered.result.record_id(), options);
  check_claim(out.fetched.parsed.claim, request, delivered,
              "record " + delivered.result.record_id() + " from " + prover.host_port);
  return out;
}

}  // namespace bitwitness
