#include "verifier/connection.h"

#include <algorithm>

#include "attest/base/program.h"

namespace bitwitness {
namespace {

using std::chrono::milliseconds;

// How long an address that refuses is tried again: a prover may be about to listen, and gRPC 1.51
// takes a connection under way for a failed one when errno changes in between.
constexpr milliseconds kRefusedPatience{3'000};
// How long a connection under way is waited for: names, TCP and TLS over a slow line.
constexpr milliseconds kHandshakePatience{20'000};
constexpr milliseconds kAttempt{10'000};  // one attempt to connect

void wait_until_connected(grpc::Channel& channel, milliseconds deadline) {
  const auto start = std::chrono::system_clock::now();
  const auto refused = start + std::min(kRefusedPatience, deadline);
  const auto slow = start + std::min(kHandshakePatience, deadline);
  for (;;) {
    const grpc_connectivity_state state = channel.GetState(/*try_to_connect=*/true);
    if (state == GRPC_CHANNEL_READY || state == GRPC_CHANNEL_SHUTDOWN) return;
    const auto until = state == GRPC_CHANNEL_TRANSIENT_FAILURE ? refused : slow;
    if (!channel.WaitForStateChange(state, until)) return;
  }
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

std::shared_ptr<grpc::ChannelCredentials> credentials(const ProverEndpoint& prover) {
  if (!prover.tls) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = prover.tls->ca;
  options.pem_cert_chain = prover.tls->certificate;
  options.pem_private_key = prover.tls->key;
  return grpc::SslCredentials(options);
}

}  // namespace

std::unique_ptr<v1::Audit::Stub> connect(const ProverEndpoint& prover, milliseconds deadline) {
  check_endpoint(prover);
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  // Evidence comes straight from the prover, not through whatever proxy the environment names.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // A channel of its own: after an earlier failure a shared one would wait before it tries again.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  // In spite of its name the limit of an attempt; one that fails earlier is repeated as above.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, static_cast<int>(kAttempt.count()));
  const auto channel =
      grpc::CreateCustomChannel("dns:///" + prover.host_port, credentials(prover), arguments);
  wait_until_connected(*channel, deadline);
  return v1::Audit::NewStub(channel);
}

void set_deadline(grpc::ClientContext& context, milliseconds deadline) {
  context.set_deadline(std::chrono::system_clock::now() + deadline);
}

Error status_error(const grpc::Status& status, const ProverEndpoint& endpoint, const char* call,
                   milliseconds deadline, bool own_request) {
  const std::string prover = "prover " + endpoint.host_port;
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
    case grpc::StatusCode::UNAVAILABLE: {
      // gRPC 1.51 does not say why a handshake failed, and a side that lacks a certificate sees
      // only that the connection ends.
      const bool cut = reason.find("andshake") != std::string::npos ||
                       reason.find("losed") != std::string::npos ||
                       reason.find("reset") != std::string::npos ||
                       reason.find("SETTINGS") != std::string::npos;
      const char* hint = "";
      if (cut && endpoint.tls) {
        hint =
            "; the prover's certificate must lead to --tls-ca, be for this host and be valid now "
            "(are both clocks right?), and it may ask for one of this side (--tls-cert). Or it "
            "speaks no TLS";
      } else if (cut) {
        hint = "; if it speaks TLS, give --tls-ca (and --tls-cert, --tls-key if it asks for them)";
      }
      return infrastructure_error(prover + " cannot be reached or is gone: " + reason + hint);
    }
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      // gRPC's own words for a message beyond kMaxMessageBytes.
      if (reason.find("larger than max") != std::string::npos) {
        return malformed_error(prover + ": " + call + ": " + reason);
      }
      return infrastructure_error(prover + " does not take this now (try again later): " + reason);
    default:
      return infrastructure_error(prover + " failed in " + call + " (gRPC status " +
                                  std::to_string(static_cast<int>(status.error_code())) +
                                  "): " + reason);
  }
}

WaitBudget::WaitBudget(grpc::ClientContext& context, milliseconds budget)
    : context_(context), left_(budget), watcher_([this] { watch(); }) {}

WaitBudget::~WaitBudget() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  watcher_.join();
}

bool WaitBudget::spent() const {
  const std::scoped_lock lock(mutex_);
  return spent_;
}

void WaitBudget::begin() {
  {
    const std::scoped_lock lock(mutex_);
    waiting_ = true;
    until_ = Clock::now() + left_;
  }
  changed_.notify_all();
}

void WaitBudget::end() {
  const std::scoped_lock lock(mutex_);
  waiting_ = false;
  left_ = until_ - Clock::now();
}

void WaitBudget::watch() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (!waiting_) {
      changed_.wait(lock);
    } else if (Clock::now() < until_) {
      changed_.wait_until(lock, until_);
    } else {
      spent_ = true;
      context_.TryCancel();
      return;
    }
  }
}

}  // namespace bitwitness
