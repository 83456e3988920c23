#include "verifier/client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <memory>

#include "attest/base/error.h"
#include "attest/base/hex.h"
#include "attest/log.h"
#include "proto/audit.grpc.pb.h"

namespace bitwitness {
namespace {

namespace wire = bitwitness::v1;
using std::chrono::milliseconds;

// PROTOCOL.md "Limits".
constexpr std::size_t kChunkBytes = std::size_t{256} << 10;
constexpr std::size_t kMaxTokenTextBytes = std::size_t{64} << 10;
constexpr std::size_t kMaxTextBytes = std::size_t{64} << 20;
constexpr std::size_t kMaxRequestBytes = std::size_t{4} << 20;
constexpr int kMaxMessageBytes = 2 << 20;  // the largest message is a header with a receipt
// How long an address that does not answer is tried again: a prover may be about to listen, and
// gRPC 1.51 takes a connection under way for a failed one when errno changes in between.
constexpr milliseconds kConnectPatience{3'000};

void check_address(const std::string& host_port) {
  const auto bad = [&](const char* why) {
    return usage_error("prover address '" + host_port.substr(0, 300) + "': " + why +
                       "; use HOST:PORT, e.g. 127.0.0.1:7433");
  };
  const std::size_t colon = host_port.rfind(':');
  if (colon == std::string::npos || colon == 0) throw bad("no host or no port");
  std::uint16_t port = 0;
  const char* const end = host_port.data() + host_port.size();
  const auto parsed = std::from_chars(host_port.data() + colon + 1, end, port);
  if (parsed.ec != std::errc() || parsed.ptr != end || port == 0) {
    throw bad("the port must be a number from 1 to 65535");
  }
  const std::string_view host(host_port.data(), colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  const std::string_view inner = bracketed ? host.substr(1, host.size() - 2) : host;
  constexpr std::string_view kAllowed =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_";
  for (const char c : inner) {
    if (kAllowed.find(c) == std::string_view::npos && !(bracketed && c == ':')) {
      throw bad("the host is no name and no IP address (IPv6 goes in brackets)");
    }
  }
}

// A connection, tried for at most the patience above and `deadline`. One that could not be made
// fails in its first call, which knows why.
std::unique_ptr<wire::Audit::Stub> connect(const std::string& host_port, milliseconds deadline) {
  check_address(host_port);
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  // Evidence comes straight from the prover, not through whatever proxy the environment names.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // A channel of its own: after an earlier failure a shared one would wait before it tries again.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  const auto channel = grpc::CreateCustomChannel("dns:///" + host_port,
                                                 grpc::InsecureChannelCredentials(), arguments);
  channel->WaitForConnected(std::chrono::system_clock::now() +
                            std::min(kConnectPatience, deadline));
  return wire::Audit::NewStub(channel);
}

void set_deadline(grpc::ClientContext& context, milliseconds deadline) {
  context.set_deadline(std::chrono::system_clock::now() + deadline);
}

// Text from a prover for a message of ours: bounded, printable.
std::string quoted(const std::string& text) {
  std::string out;
  for (const char c : text.substr(0, 500)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7f ? ' ' : c;
  }
  return out + (text.size() > 500 ? "..." : "");
}

// The error of a call that did not end well. `own_request`: INVALID_ARGUMENT is about what the user
// asked for.
Error status_error(const grpc::Status& status, const std::string& host_port, const char* call,
                   milliseconds deadline, bool own_request) {
  const std::string prover = "prover " + host_port;
  const std::string reason = quoted(status.error_message());
  switch (status.error_code()) {
    case grpc::StatusCode::INVALID_ARGUMENT:
      if (own_request) return usage_error(prover + " does not take this request: " + reason);
      return cannot_judge_error(prover + " refused " + call + ": " + reason);
    case grpc::StatusCode::NOT_FOUND:
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::OUT_OF_RANGE:
      return cannot_judge_error(prover + " refused " + call + ": " + reason);
    case grpc::StatusCode::UNIMPLEMENTED:
      return cannot_judge_error(prover + " does not know " + call +
                                ": is this a bw-prover of this version?");
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return infrastructure_error(prover + ": " + call + " was not done within " +
                                  std::to_string(deadline.count()) +
                                  " ms; try again or allow more time");
    case grpc::StatusCode::UNAVAILABLE:
      return infrastructure_error(prover + " cannot be reached or is gone: " + reason);
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      // gRPC's own words for a message beyond kMaxMessageBytes.
      if (reason.find("larger than max") != std::string::npos) {
        return malformed_error(prover + ": " + call + ": " + reason);
      }
      return infrastructure_error(prover + " is overloaded: " + reason);
    default:
      return infrastructure_error(prover + " failed in " + call + " (gRPC status " +
                                  std::to_string(static_cast<int>(status.error_code())) +
                                  "): " + reason);
  }
}

// A read side of a stream that is cancelled when it is left early, so that the peer does not go on
// sending.
template <class Message>
class Stream {
 public:
  Stream(grpc::ClientContext& context, std::unique_ptr<grpc::ClientReader<Message>> reader)
      : context_(context), reader_(std::move(reader)) {}
  ~Stream() {
    if (finished_) return;
    context_.TryCancel();
    reader_->Finish();
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  bool read(Message& message) { return reader_->Read(&message); }
  grpc::Status finish() {
    finished_ = true;
    return reader_->Finish();
  }

 private:
  grpc::ClientContext& context_;
  std::unique_ptr<grpc::ClientReader<Message>> reader_;
  bool finished_ = false;
};

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
    const std::string& host_port, const RemoteRequest& request, milliseconds deadline,
    const std::function<void(std::uint32_t token, std::string_view text)>& on_token) {
  const wire::GenerateRequest message = to_wire(request);
  const std::unique_ptr<wire::Audit::Stub> stub = connect(host_port, deadline);
  const auto bad = [&](const std::string& why) {
    return malformed_error("prover " + host_port + ": Generate: " + why);
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
    throw status_error(status, host_port, "Generate", deadline, /*own_request=*/true);
  }
  if (!done) throw bad("the stream ended without a result");
  parse_digest(out.result.record_id(), "prover " + host_port + ": record_id");
  return out;
}

}  // namespace

FetchedRecord fetch_record(const std::string& host_port, const std::string& record_id,
                           const FetchOptions& options) {
  const std::optional<Bytes> id_bytes = from_hex_any_case(record_id);
  if (!id_bytes || id_bytes->size() != 32) {
    throw usage_error("record id '" + record_id.substr(0, 80) +
                      "' must be 64 hexadecimal digits: the record's digest");
  }
  const std::string id = to_hex(*id_bytes);
  const std::string what = "record " + id + " from " + host_port;
  const std::unique_ptr<wire::Audit::Stub> stub = connect(host_port, options.deadline);
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
    throw status_error(status, host_port, "GetRecord", options.deadline, /*own_request=*/false);
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
    const std::string& host_port, const RemoteRequest& request, milliseconds deadline,
    const FetchOptions& options,
    const std::function<void(std::uint32_t token, std::string_view text)>& on_token) {
  const Delivered delivered = run_remote(host_port, request, deadline, on_token);
  RemoteGeneration out;
  out.text = delivered.text;
  out.fetched = fetch_record(host_port, delivered.result.record_id(), options);
  check_claim(out.fetched.parsed.claim, request, delivered,
              "record " + delivered.result.record_id() + " from " + host_port);
  return out;
}

}  // namespace bitwitness
