// The verifier's end of live audits on a real wire, against provers that misbehave: framing,
// limits, deadlines, statuses, certificates.
#include "verifier/client.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "attest/base/error.h"
#include "attest/opening.h"
#include "proto/audit.grpc.pb.h"
#include "tests/certificates.h"
#include "tests/kernels/model/safetensors_writer.h"
#include "verifier/grpc_audit_channel.h"

namespace bitwitness {
namespace {

namespace wire = bitwitness::v1;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
using test::Certificate;
using test::make_certificate;
using ::testing::HasSubstr;

class FakeProver final : public wire::Audit::Service {
 public:
  using Writer = grpc::ServerWriter<wire::OpeningChunk>;
  using StreamFn = std::function<grpc::Status(grpc::ServerContext&, Writer&)>;
  using CommitFn = std::function<grpc::Status(wire::CommitResponse&)>;

  explicit FakeProver(
      std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials()) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", credentials, &port);
    builder.SetMaxSendMessageSize(-1);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
  }
  ~FakeProver() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status GetInfo(grpc::ServerContext*, const wire::GetInfoRequest*,
                       wire::GetInfoResponse* response) override {
    response->set_log_key(log_key);
    response->set_answers_audits(true);
    return grpc::Status::OK;
  }
  grpc::Status Commit(grpc::ServerContext*, const wire::CommitRequest*,
                      wire::CommitResponse* response) override {
    return current(commit_)(*response);
  }
  grpc::Status Open(grpc::ServerContext* context, const wire::OpenRequest*,
                    Writer* writer) override {
    return current(stream_)(*context, *writer);
  }
  grpc::Status GetOperators(grpc::ServerContext* context, const wire::GetOperatorsRequest*,
                            Writer* writer) override {
    return current(stream_)(*context, *writer);
  }

  const std::string& address() const { return address_; }
  void vanish() { server_->Shutdown(std::chrono::system_clock::now()); }
  void on_commit(CommitFn behaviour) { set(commit_, std::move(behaviour)); }
  void on_stream(StreamFn behaviour) { set(stream_, std::move(behaviour)); }
  std::string log_key;

 private:
  // A handler that a client left may still be running when the next behaviour is set.
  template <class Fn>
  void set(Fn& slot, Fn behaviour) {
    const std::scoped_lock lock(mutex_);
    slot = std::move(behaviour);
  }
  template <class Fn>
  Fn current(const Fn& slot) {
    const std::scoped_lock lock(mutex_);
    return slot;
  }
  std::mutex mutex_;
  CommitFn commit_;
  StreamFn stream_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

// A peer on bare TCP. Every connection is given to `serve`, which ends when its socket is shut
// down: after `patience`, so that a test of what hangs fails, or with this object.
class RawPeer {
 public:
  using Serve = std::function<void(int socket)>;
  explicit RawPeer(Serve serve, milliseconds patience = milliseconds(15'000))
      : serve_(std::move(serve)), listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    if (::bind(listener_, any, size) != 0 || ::listen(listener_, 16) != 0 ||
        ::getsockname(listener_, any, &size) != 0) {
      throw std::runtime_error("cannot listen");
    }
    port_ = ntohs(address.sin_port);
    acceptor_ = std::thread([this] { accept(); });
    watchdog_ = std::thread([this, until = steady_clock::now() + patience] {
      while (!ended_ && steady_clock::now() < until) std::this_thread::sleep_for(milliseconds(10));
      shut_down();
    });
  }
  ~RawPeer() {
    ended_ = true;
    watchdog_.join();
    acceptor_.join();
    for (std::thread& connection : connections_) connection.join();
    for (const int socket : sockets_) ::close(socket);
    ::close(listener_);
  }
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  static int connect_to(std::uint16_t port) {
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    if (::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      throw std::runtime_error("cannot connect");
    }
    return socket;
  }
  static bool send_all(int socket, std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }
  // Until the peer or shut_down ends it; `to` < 0: nowhere.
  static void pump(int from, int to) {
    char buffer[16384];
    for (ssize_t got = 0; (got = ::recv(from, buffer, sizeof buffer, 0)) > 0;) {
      if (to >= 0 && !send_all(to, {buffer, static_cast<std::size_t>(got)})) break;
    }
    if (to >= 0) ::shutdown(to, SHUT_RDWR);
  }

 private:
  void accept() {
    for (;;) {
      const int socket = ::accept(listener_, nullptr, nullptr);
      if (socket < 0) return;
      const std::scoped_lock lock(mutex_);
      sockets_.push_back(socket);
      if (shut_) ::shutdown(socket, SHUT_RDWR);
      connections_.emplace_back([this, socket] {
        serve_(socket);
        ::shutdown(socket, SHUT_RDWR);
      });
    }
  }
  void shut_down() {
    const std::scoped_lock lock(mutex_);
    shut_ = true;
    ::shutdown(listener_, SHUT_RDWR);
    for (const int socket : sockets_) ::shutdown(socket, SHUT_RDWR);
  }

  Serve serve_;
  int listener_;
  std::uint16_t port_ = 0;
  std::mutex mutex_;
  bool shut_ = false;
  std::vector<int> sockets_;
  std::vector<std::thread> connections_;
  std::atomic<bool> ended_{false};
  std::thread acceptor_, watchdog_;
};

void send_part(FakeProver::Writer& writer, wire::PartKind kind, std::uint32_t layer,
               std::uint64_t bytes) {
  wire::OpeningChunk chunk;
  chunk.mutable_part()->set_kind(kind);
  chunk.mutable_part()->set_layer(layer);
  chunk.mutable_part()->set_bytes(bytes);
  writer.Write(chunk);
}
void send_data(FakeProver::Writer& writer, std::size_t bytes, std::uint8_t fill = 7) {
  wire::OpeningChunk chunk;
  chunk.set_data(std::string(bytes, static_cast<char>(fill)));
  writer.Write(chunk);
}

// Takes everything and keeps what came.
struct Recorder final : OpeningSink {
  struct Part {
    OpeningPartKind kind;
    std::uint32_t layer;
    std::uint64_t announced;
    Bytes data;
  };
  void part(OpeningPartKind kind, std::uint32_t layer, std::uint64_t bytes) override {
    parts.push_back({kind, layer, bytes, {}});
  }
  void data(ByteView bytes) override {
    if (on_data) on_data();
    if (parts.empty()) throw malformed_error("data before a part");
    parts.back().data.insert(parts.back().data.end(), bytes.begin(), bytes.end());
  }
  std::vector<Part> parts;
  std::function<void()> on_data;
};

void expect_error(ErrorKind kind, const std::string& text, const std::function<void()>& work) {
  try {
    work();
    ADD_FAILURE() << "no error where one with '" << text << "' was expected";
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(text));
  }
}

Bytes operators_request(std::uint32_t layer) {
  OperatorsRequest request;
  request.challenge = {1, 2, 3};
  request.layer = layer;
  request.sign(SigningKey::generate("auditor.example"));
  return request.serialize();
}

class AuditWire : public ::testing::Test {
 protected:
  std::unique_ptr<AuditChannel> channel() const {
    return make_grpc_audit_channel(prover.address(), deadline);
  }
  void on_stream(std::function<void(FakeProver::Writer&)> behaviour) {
    prover.on_stream([behaviour = std::move(behaviour)](auto&, auto& writer) {
      behaviour(writer);
      return grpc::Status::OK;
    });
  }
  milliseconds deadline{20'000};
  FakeProver prover;
};

TEST_F(AuditWire, WhatIsSentArrives) {
  prover.on_commit([](wire::CommitResponse& response) {
    response.set_commitment_receipt("one");
    response.set_record_receipt("two");
    return grpc::Status::OK;
  });
  const CommitReceipts receipts = channel()->commit({1});
  EXPECT_EQ(receipts.commitment, "one");
  EXPECT_EQ(receipts.record, "two");

  on_stream([](auto& writer) {
    send_part(writer, wire::PART_KIND_HEADER, 0, 4);
    send_data(writer, 3, 1);
    send_data(writer, 1, 2);
    send_part(writer, wire::PART_KIND_LAYER, 9, 0);
    send_part(writer, static_cast<wire::PartKind>(77), 1, ~std::uint64_t{0});
  });
  Recorder sink;
  channel()->open({1}, sink);
  ASSERT_EQ(sink.parts.size(), 3U);
  EXPECT_EQ(sink.parts[0].kind, OpeningPartKind::kHeader);
  EXPECT_EQ(sink.parts[0].data, (Bytes{1, 1, 1, 2}));
  EXPECT_EQ(sink.parts[1].kind, OpeningPartKind::kLayer);
  EXPECT_EQ(sink.parts[1].layer, 9U);
  EXPECT_EQ(sink.parts[2].kind, OpeningPartKind{}) << "unknown kinds are none that a sink expects";
  EXPECT_EQ(sink.parts[2].announced, ~std::uint64_t{0});
}

TEST_F(AuditWire, OperatorsAreFramedExactly) {
  const Bytes request = operators_request(3);
  on_stream([](auto& writer) {
    send_part(writer, wire::PART_KIND_OPERATORS, 3, 300'000);
    send_data(writer, 262'144);
    send_data(writer, 300'000 - 262'144);
  });
  EXPECT_EQ(channel()->operators(request, 1 << 20), Bytes(300'000, 7));
  const auto malformed = [&](const std::string& text,
                             std::function<void(FakeProver::Writer&)> behaviour) {
    on_stream(std::move(behaviour));
    expect_error(ErrorKind::kMalformed, text, [&] { channel()->operators(request, 1 << 20); });
  };
  malformed("0 bytes where 0", [](auto&) {});
  malformed("neither a part nor data", [](auto& w) { w.Write(wire::OpeningChunk()); });
  malformed("not asked for", [](auto& w) { send_part(w, wire::PART_KIND_OPERATORS, 2, 10); });
  malformed("not asked for", [](auto& w) { send_part(w, wire::PART_KIND_LAYER, 3, 10); });
  malformed("announced with 1048577 bytes",
            [](auto& w) { send_part(w, wire::PART_KIND_OPERATORS, 3, (1 << 20) + 1); });
  malformed("announced with 0", [](auto& w) { send_part(w, wire::PART_KIND_OPERATORS, 3, 0); });
  malformed("more bytes than the 0", [](auto& w) { send_data(w, 1); });
  malformed("a second part", [](auto& w) {
    send_part(w, wire::PART_KIND_OPERATORS, 3, 10);
    send_part(w, wire::PART_KIND_OPERATORS, 3, 10);
  });
  malformed("more bytes than the 10", [](auto& w) {
    send_part(w, wire::PART_KIND_OPERATORS, 3, 10);
    send_data(w, 11);
  });
  malformed("9 bytes where 10", [](auto& w) {
    send_part(w, wire::PART_KIND_OPERATORS, 3, 10);
    send_data(w, 9);
  });
  malformed("a chunk of 0 bytes", [](auto& w) {
    send_part(w, wire::PART_KIND_OPERATORS, 3, 10);
    send_data(w, 0);
  });
  malformed("a chunk of 262145 bytes", [](auto& w) {
    send_part(w, wire::PART_KIND_OPERATORS, 3, 300'000);
    send_data(w, 262'145);
  });
}

TEST_F(AuditWire, HugeMessagesAndReceiptsAreMalformed) {
  on_stream([](auto& writer) { send_data(writer, 3 << 20); });
  Recorder sink;
  expect_error(ErrorKind::kMalformed, "larger than max", [&] { channel()->open({1}, sink); });
  EXPECT_TRUE(sink.parts.empty());
  prover.on_commit([](wire::CommitResponse& response) {
    response.set_commitment_receipt(std::string(1'200'001, 'r'));
    response.set_record_receipt("r");
    return grpc::Status::OK;
  });
  expect_error(ErrorKind::kMalformed, "a receipt of 1200001", [&] { channel()->commit({1}); });
  prover.on_commit([](wire::CommitResponse&) { return grpc::Status::OK; });
  expect_error(ErrorKind::kMalformed, "a receipt of 0", [&] { channel()->commit({1}); });
}

TEST_F(AuditWire, TheSinksErrorEndsTheStream) {
  std::atomic<bool> cancelled{false};
  prover.on_stream([&](grpc::ServerContext& context, FakeProver::Writer& writer) {
    for (int i = 0; i < 100'000 && !context.IsCancelled(); ++i) send_data(writer, 1000);
    cancelled = context.IsCancelled();
    return grpc::Status::OK;
  });
  Recorder sink;
  expect_error(ErrorKind::kMalformed, "data before a part", [&] { channel()->open({1}, sink); });
  prover.vanish();  // waits for the handler
  EXPECT_TRUE(cancelled);
}

TEST_F(AuditWire, StallsAndDripsEndWhenTheWaitIsSpent) {
  deadline = milliseconds(300);
  const auto start = steady_clock::now();
  const auto expect_spent = [&](FakeProver::StreamFn behaviour) {
    prover.on_stream(std::move(behaviour));
    Recorder sink;
    expect_error(ErrorKind::kInfrastructure, "was not done within 300 ms",
                 [&] { channel()->open({1}, sink); });
  };
  expect_spent([](grpc::ServerContext& context, FakeProver::Writer&) {
    while (!context.IsCancelled()) std::this_thread::sleep_for(milliseconds(5));
    return grpc::Status::OK;
  });
  expect_spent([](grpc::ServerContext& context, FakeProver::Writer& writer) {
    send_part(writer, wire::PART_KIND_HEADER, 0, 1'000'000);
    while (!context.IsCancelled()) {
      send_data(writer, 1);
      std::this_thread::sleep_for(milliseconds(5));
    }
    return grpc::Status::OK;
  });
  prover.on_commit([](wire::CommitResponse&) {
    std::this_thread::sleep_for(milliseconds(600));
    return grpc::Status::OK;
  });
  expect_error(ErrorKind::kInfrastructure, "was not done within 300 ms",
               [&] { channel()->commit({1}); });
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(15));
}

// HTTP/2 settings that allow no byte of a request, and then silence: the first write of a call must
// not outlast the wait either.
TEST(AuditWireFlow, APeerThatTakesNothingIsLeft) {
  const RawPeer peer([](int socket) {
    using namespace std::string_view_literals;
    RawPeer::send_all(socket,
                      "\0\0\x06\4\0\0\0\0\0"    // SETTINGS,
                      "\0\4\0\0\0\0"            // INITIAL_WINDOW_SIZE = 0
                      "\0\0\0\4\1\0\0\0\0"sv);  // and the acknowledgement
    RawPeer::pump(socket, -1);
  });
  constexpr milliseconds kDeadline(500);
  const std::unique_ptr<AuditChannel> channel = make_grpc_audit_channel(peer.address(), kDeadline);
  const auto left = [](const std::function<void()>& call) {
    const auto start = steady_clock::now();
    expect_error(ErrorKind::kInfrastructure, "was not done within 500 ms", call);
    EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(5));
  };
  Recorder sink;
  left([&] { channel->open({1}, sink); });
  left([&] { channel->operators(operators_request(3), 100); });
  left([&] { channel->commit({1}); });
  left([&] { fetch_record(peer.address(), std::string(64, 'a'), {kDeadline, 1 << 20}); });
  RemoteRequest request;
  request.prompt_ids = {1};
  request.max_tokens = 1;
  left([&] { generate_remote(peer.address(), request, kDeadline, {kDeadline, 1 << 20}, {}); });
  EXPECT_TRUE(sink.parts.empty());
}

// A line on which every connection takes its time before the first byte.
TEST(AuditWireFlow, ASlowHandshakeIsWaitedFor) {
  FakeProver prover;
  const auto port = static_cast<std::uint16_t>(
      std::stoi(prover.address().substr(prover.address().find(':') + 1)));
  const RawPeer slow([&](int socket) {
    std::this_thread::sleep_for(milliseconds(1'500));
    const int onward = RawPeer::connect_to(port);
    std::thread back([&] { RawPeer::pump(onward, socket); });
    RawPeer::pump(socket, onward);
    back.join();
    ::close(onward);
  });
  EXPECT_TRUE(fetch_info(slow.address(), milliseconds(10'000)).answers_audits);
}

TEST_F(AuditWire, TheTimeOfJudgingIsNotThePeers) {
  deadline = milliseconds(300);
  on_stream([](auto& writer) {
    send_part(writer, wire::PART_KIND_HEADER, 0, 3);
    for (int i = 0; i < 3; ++i) send_data(writer, 1);
  });
  Recorder sink;
  sink.on_data = [] { std::this_thread::sleep_for(milliseconds(250)); };
  channel()->open({1}, sink);
  EXPECT_EQ(sink.parts.at(0).data.size(), 3U);
}

TEST_F(AuditWire, StatusesBecomeKinds) {
  using grpc::StatusCode;
  const std::pair<StatusCode, ErrorKind> cases[] = {
      {StatusCode::INVALID_ARGUMENT, ErrorKind::kCannotJudge},
      {StatusCode::NOT_FOUND, ErrorKind::kCannotJudge},
      {StatusCode::FAILED_PRECONDITION, ErrorKind::kCannotJudge},
      {StatusCode::PERMISSION_DENIED, ErrorKind::kCannotJudge},
      {StatusCode::UNAUTHENTICATED, ErrorKind::kCannotJudge},
      {StatusCode::UNIMPLEMENTED, ErrorKind::kCannotJudge},
      {StatusCode::RESOURCE_EXHAUSTED, ErrorKind::kInfrastructure},
      {StatusCode::INTERNAL, ErrorKind::kInfrastructure},
      {StatusCode::UNAVAILABLE, ErrorKind::kInfrastructure},
      {StatusCode::CANCELLED, ErrorKind::kInfrastructure},
  };
  for (const auto& [code, kind] : cases) {
    prover.on_commit([status = code](auto&) { return grpc::Status(status, "go\naway\x1b[31m"); });
    expect_error(kind, prover.address(), [&] { channel()->commit({1}); });
    prover.on_stream([status = code](auto&, auto& writer) {
      send_part(writer, wire::PART_KIND_HEADER, 0, 1);
      send_data(writer, 1);
      return grpc::Status(status, "after all was sent");
    });
    Recorder sink;
    expect_error(kind, prover.address(), [&] { channel()->open({1}, sink); });
  }
}

TEST_F(AuditWire, AProverThatIsGoneIsInfrastructure) {
  prover.vanish();
  deadline = milliseconds(500);
  Recorder sink;
  expect_error(ErrorKind::kInfrastructure, "cannot be reached", [&] { channel()->commit({1}); });
  expect_error(ErrorKind::kInfrastructure, "cannot be reached",
               [&] { channel()->open({1}, sink); });
}

TEST_F(AuditWire, InfoIsRead) {
  EXPECT_FALSE(fetch_info(prover.address(), deadline).log_key);
  const PublicKey key = SigningKey::generate("log.example").public_key();
  prover.log_key = key.vkey();
  EXPECT_EQ(fetch_info(prover.address(), deadline).log_key, key);
  prover.log_key = "nonsense";
  expect_error(ErrorKind::kMalformed, "verifier key",
               [&] { fetch_info(prover.address(), deadline); });
}

// ---- TLS.

class Tls : public ::testing::Test {
 protected:
  static std::shared_ptr<grpc::ServerCredentials> serving(const Certificate& certificate,
                                                          const Certificate* client_ca = nullptr) {
    grpc::SslServerCredentialsOptions options(
        client_ca == nullptr ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                             : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    if (client_ca != nullptr) options.pem_root_certs = client_ca->pem;
    options.pem_key_cert_pairs.push_back({certificate.key_pem, certificate.pem});
    return grpc::SslServerCredentials(options);
  }
  Certificate by_authority(const std::string& names = "DNS:localhost,IP:127.0.0.1",
                           long from_s = -3600, long to_s = 3600) const {
    return make_certificate("prover.example", {&authority, names, from_s, to_s});
  }
  static ProverInfo connect(const FakeProver& prover, const Certificate& ca,
                            const Certificate* own = nullptr) {
    TlsCredentials tls;
    tls.ca = ca.pem;
    if (own != nullptr) {
      tls.certificate = own->pem;
      tls.key = own->key_pem;
    }
    return fetch_info({prover.address(), tls}, patience);
  }
  std::string path(const std::string& name, const std::string& text) const {
    test::write_file(dir.path() / name, text);
    return (dir.path() / name).string();
  }
  // A good connection takes a few milliseconds; a bad one is tried again for as long as this.
  static constexpr milliseconds patience{700};
  const Certificate authority = make_certificate("authority.example");
  const Certificate stranger = make_certificate("stranger.example");
  const test::TempDir dir;
};

TEST_F(Tls, ACertificateByTheGivenAuthorityIsGood) {
  const FakeProver prover(serving(by_authority()));
  EXPECT_TRUE(connect(prover, authority).answers_audits);
}

TEST_F(Tls, BadCertificatesAreInfrastructureWithTheReason) {
  const auto refused = [&](const std::string& what, const Certificate& certificate,
                           const Certificate& ca) {
    SCOPED_TRACE(what);
    const FakeProver prover(serving(certificate));
    expect_error(ErrorKind::kInfrastructure, "ertificate", [&] { connect(prover, ca); });
  };
  refused("another authority", by_authority(), stranger);
  refused("self-signed", make_certificate("prover.example"), authority);
  refused("expired", by_authority("IP:127.0.0.1", -7200, -3600), authority);
  refused("not yet valid", by_authority("IP:127.0.0.1", 3600, 7200), authority);
  refused("another name", by_authority("DNS:elsewhere.example"), authority);
}

TEST_F(Tls, BothSidesMustSpeakIt) {
  const FakeProver plain;
  expect_error(ErrorKind::kInfrastructure, plain.address(), [&] { connect(plain, authority); });
  const FakeProver secure(serving(by_authority()));
  expect_error(ErrorKind::kInfrastructure, secure.address(),
               [&] { fetch_info(secure.address(), patience); });
}

TEST_F(Tls, AProverMayAskForACertificate) {
  const FakeProver prover(serving(by_authority(), &authority));
  const Certificate own = make_certificate("auditor.example", {&authority, "DNS:auditor.example"});
  const Certificate foreign =
      make_certificate("auditor.example", {&stranger, "DNS:auditor.example"});
  EXPECT_TRUE(connect(prover, authority, &own).answers_audits);
  expect_error(ErrorKind::kInfrastructure, prover.address(), [&] { connect(prover, authority); });
  expect_error(ErrorKind::kInfrastructure, prover.address(),
               [&] { connect(prover, authority, &foreign); });
}

TEST_F(Tls, FilesAreCheckedFirst) {
  const std::string ca = path("ca.pem", authority.pem);
  const std::string own = path("own.pem", authority.pem), key = path("own.key", authority.key_pem);
  const std::string other = path("other.key", stranger.key_pem);
  const TlsCredentials good = TlsCredentials::load(ca, own, key);
  EXPECT_EQ(good.key, authority.key_pem);
  EXPECT_EQ(TlsCredentials::load(ca, std::nullopt, std::nullopt).certificate, "");
  const auto usage = [](const std::string& text, const std::function<void()>& work) {
    expect_error(ErrorKind::kUsage, text, work);
  };
  usage("absent", [&] { TlsCredentials::load("absent", std::nullopt, std::nullopt); });
  const std::string text = path("text", "nothing of the kind\n");
  usage("no PEM", [&] { TlsCredentials::load(text, std::nullopt, std::nullopt); });
  usage("no certificate", [&] { TlsCredentials::load(key, std::nullopt, std::nullopt); });
  usage("go together", [&] { TlsCredentials::load(ca, own, std::nullopt); });
  usage("go together", [&] { TlsCredentials::load(ca, std::nullopt, key); });
  usage("no private key", [&] { TlsCredentials::load(ca, own, ca); });
  usage("is not the key", [&] { TlsCredentials::load(ca, own, other); });
}

TEST_F(Tls, AddressesOffThisMachineNeedIt) {
  for (const char* address : {"10.0.0.1:1", "gpu.example:7433", "[2001:db8::1]:7433",
                              "127.0.0.1.example:1", "128.0.0.1:1", "0.0.0.0:1"}) {
    expect_error(ErrorKind::kUsage, "--tls-ca", [&] { check_endpoint(address); });
    TlsCredentials tls;
    tls.ca = authority.pem;
    EXPECT_NO_THROW(check_endpoint({address, tls})) << address;
  }
  for (const char* address : {"127.0.0.1:1", "127.9.9.9:7433", "localhost:1", "[::1]:7433"}) {
    EXPECT_NO_THROW(check_endpoint(address)) << address;
  }
  for (const char* address :
       {"", "host", ":1", "host:0", "host:65536", "host:1x", "a b:1", "unix:/tmp/x:1", "[::1:1"}) {
    expect_error(ErrorKind::kUsage, "HOST:PORT", [&] { check_endpoint(address); });
  }
}

}  // namespace
}  // namespace bitwitness
