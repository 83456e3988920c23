#include "prover/serve.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/impl/server_builder_plugin.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/support/server_interceptor.h>
#if BITWITNESS_WITH_GRPC_REFLECTION
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string_view>
#include <utility>

#include "attest/base/error.h"
#include "prover/audits.h"
#include "prover/calls.h"
#include "prover/listen_address.h"
#include "prover/prover_log.h"
#include "prover/record_store.h"
#include "prover/service.h"
#include "prover/worker.h"

namespace bitwitness {
namespace {

using std::chrono::milliseconds;
using WallClock = std::chrono::system_clock;

void check_tls(const TlsFiles& tls, const ListenAddress& listen, const std::string& listen_text) {
  if (!listen.loopback() && !tls.mutual()) {
    std::string missing;
    for (const auto& [flag, value] :
         {std::pair("--tls-cert", &tls.certificate), std::pair("--tls-key", &tls.key),
          std::pair("--tls-client-ca", &tls.client_ca)}) {
      if (value->empty()) missing += (missing.empty() ? "" : ", ") + std::string(flag);
    }
    throw usage_error(
        "--listen '" + listen_text +
        "' can be reached from elsewhere, and then both sides must show "
        "certificates: give " +
        missing + "; or listen on loopback, e.g. 127.0.0.1:7433, and forward the port (ssh -L)");
  }
  if (!tls.any()) return;
  if (tls.certificate.empty() || tls.key.empty()) {
    throw usage_error(
        "--tls-cert and --tls-key go together (and --tls-client-ca needs both): give the server's "
        "certificate and its key");
  }
  load_tls_files(tls);
}

std::shared_ptr<grpc::ServerCredentials> credentials(const TlsFiles& tls) {
  if (!tls.any()) return grpc::InsecureServerCredentials();
  TlsMaterial material = load_tls_files(tls);
  grpc::SslServerCredentialsOptions options(
      tls.client_ca.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                            : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = std::move(material.client_ca_pem);
  options.pem_key_cert_pairs.push_back(
      {std::move(material.key_pem), std::move(material.certificate_pem)});
  return grpc::SslServerCredentials(options);
}

ServeOptions checked(ServeOptions options) {
  check_serve_options(options);
  return options;
}

// ---- Reflection. Its handler is gRPC's own: one thread for each stream, for as long as the client
// likes. So its streams are few, and end after write_timeout.

constexpr std::size_t kMaxReflectionStreams = 4;
constexpr std::string_view kReflectionMethods = "/grpc.reflection.";

class ReflectionStream final : public grpc::experimental::Interceptor {
 public:
  ReflectionStream(Calls& calls, grpc::ServerContextBase* context)
      : calls_(calls), context_(context) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    using grpc::experimental::InterceptionHookPoints;
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      try {
        call_.emplace(
            calls_, [context = context_] { return context->IsCancelled(); },
            [context = context_] { context->TryCancel(); });
        call_->limit();
      } catch (const Refusal&) {
        context_->TryCancel();
      }
    }
    // The handler has returned; nothing may touch the context for long now.
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) call_.reset();
    methods->Proceed();
  }

 private:
  Calls& calls_;
  grpc::ServerContextBase* const context_;
  std::optional<Call> call_;
};

class ReflectionStreams final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit ReflectionStreams(Calls& calls) : calls_(calls) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    if (!std::string_view(info->method()).starts_with(kReflectionMethods)) return nullptr;
    return new ReflectionStream(calls_, info->server_context());
  }

 private:
  Calls& calls_;
};

// The plugin is there as soon as its library is.
class WithoutReflection final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    std::erase_if(*plugins, [](const std::unique_ptr<grpc::ServerBuilderPlugin>& plugin) {
      return plugin->name() == "proto_server_reflection";
    });
  }
};

}  // namespace

void check_serve_options(const ServeOptions& options) {
  const ListenAddress listen = ListenAddress::parse(options.listen);
  check_tls(options.tls, listen, options.listen);
  check_bindable(listen);
  if (options.log_dir.empty() == options.log_key.has_value()) {
    throw usage_error(
        "a log directory and its signing key go together (--log and --key): give both or none");
  }
  if (!options.allow.empty() && !options.log_key) {
    throw usage_error(
        "--allow needs --log and --key: an audit's commitment and its record must stand in a log");
  }
  if (options.max_batch == 0 || options.max_queue == 0 || options.max_calls == 0 ||
      options.max_tokens == 0 || options.max_rows < 0) {
    throw usage_error("serve: a limit of 0 would refuse every request");
  }
  if (options.records_dir.empty() && options.max_record_bytes > options.max_memory_bytes) {
    throw usage_error(
        "serve: one record may be larger than all records kept in memory; give a --records "
        "directory");
  }
}

class Server::Impl {
 public:
  Impl(const ServedModel& model, Backend& backend, ServeOptions options)
      : options_(checked(std::move(options))),
        listen_(ListenAddress::parse(options_.listen)),
        weights_(model.model.weights(), backend,
                 least_memory(model, backend, {.max_rows = options_.max_rows},
                              model.model.config().max_positions)),
        store_(options_.records_dir, options_.max_memory_bytes, options_.retention),
        log_(options_.log_key ? std::make_unique<ProverLog>(options_.log_dir, *options_.log_key)
                              : nullptr),
        worker_(model, weights_, backend, options_, store_, log_.get()),
        audits_(model, weights_, backend, options_, store_, log_.get(), worker_),
        calls_(options_.max_calls, options_.write_timeout),
        reflection_calls_(kMaxReflectionStreams, options_.write_timeout),
        service_(make_audit_service(model, options_, store_, worker_, audits_, calls_)) {}

  ~Impl() { shutdown(milliseconds{0}); }

  void start() {
    check_bindable(listen_);
    grpc::EnableDefaultHealthCheckService(true);
#if BITWITNESS_WITH_GRPC_REFLECTION
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
#endif
    grpc::ServerBuilder builder;
    if (options_.reflection.value_or(listen_.loopback())) {
      std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> watching;
      watching.push_back(std::make_unique<ReflectionStreams>(reflection_calls_));
      builder.experimental().SetInterceptorCreators(std::move(watching));
    } else {
      builder.SetOption(std::make_unique<WithoutReflection>());
    }
    builder.AddListeningPort(listen_.text(listen_.port), credentials(options_.tls), &port_);
    // Without this a second server would share the port, and get half of the requests.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
    // Connections on which nobody speaks are dropped: gRPC 1.51 stops accepting for good once the
    // process has run out of file descriptors.
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 10'000);
    // So that one connection does not get all calls.
    builder.AddChannelArgument(
        GRPC_ARG_MAX_CONCURRENT_STREAMS,
        static_cast<int>(std::clamp<std::size_t>(options_.max_calls / 2, 8, 10'000)));
    builder.SetMaxReceiveMessageSize(kMaxRequestBytes);
    grpc::ResourceQuota quota("bw-prover");
    quota.SetMaxThreads(static_cast<int>(std::min<std::size_t>(options_.max_calls, 10'000)) + 16);
    builder.SetResourceQuota(quota);
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    if (!server_ || port_ == 0) {
      throw infrastructure_error("cannot listen on " + listen_.text(listen_.port) +
                                 "; is the port in use?");
    }
    if (auto* health = server_->GetHealthCheckService()) {
      health->SetServingStatus(kServiceName, true);
    }
    worker_.start();
  }

  int port() const {
    return port_;
  }
  std::string address() const {
    return listen_.text(port_);
  }

  void shutdown(milliseconds grace) {
    const std::scoped_lock once(shutdown_mutex_);
    if (stopped_) return;
    worker_.stop(grace);
    if (server_) {
      // Results that are on their way get a moment, then every call is cancelled.
      if (auto* health = server_->GetHealthCheckService()) {
        health->SetServingStatus(kServiceName, false);
      }
      server_->Shutdown(WallClock::now() +
                        std::max(milliseconds{200}, std::min(grace, milliseconds{2000})));
    }
    {
      const std::scoped_lock lock(mutex_);
      stopped_ = true;
      changed_.notify_all();
    }
  }

  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopped_.load(); });
  }

 private:
  const ServeOptions options_;
  const ListenAddress listen_;
  const PlacedWeights weights_;
  RecordStore store_;
  const std::unique_ptr<ProverLog> log_;
  Worker worker_;
  Audits audits_;
  Calls calls_;
  Calls reflection_calls_;
  const std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;

  std::mutex shutdown_mutex_;
  std::mutex mutex_;  // stopped_
  std::condition_variable changed_;
  std::atomic<bool> stopped_{false};
};

Server::Server(const ServedModel& model, Backend& backend, ServeOptions options)
    : impl_(std::make_unique<Impl>(model, backend, std::move(options))) {}
Server::~Server() = default;
void Server::start() {
  impl_->start();
}
int Server::port() const {
  return impl_->port();
}
std::string Server::address() const {
  return impl_->address();
}
void Server::shutdown(std::chrono::milliseconds grace) {
  impl_->shutdown(grace);
}
void Server::wait() {
  impl_->wait();
}

}  // namespace bitwitness
