#include "prover/serve.h"

#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#if BITWITNESS_WITH_GRPC_REFLECTION
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <deque>
#include <filesystem>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "attest/base/error.h"
#include "attest/base/hex.h"
#include "attest/base/random.h"
#include "attest/log.h"
#include "proto/audit.grpc.pb.h"
#include "prover/record_store.h"

namespace bitwitness {
namespace {

namespace wire = bitwitness::v1;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
using WallClock = std::chrono::system_clock;

constexpr int kMaxRequestBytes = 4 << 20;                    // PROTOCOL.md "Limits"
constexpr std::size_t kChunkBytes = std::size_t{256} << 10;  // likewise
constexpr const char* kServiceName = "bitwitness.v1.Audit";
constexpr milliseconds kPoll{50};  // how late cancellation may be noticed
// Bytes of a record that are neither manifest, ids nor evidence: bounded by the limits on
// provenance.
constexpr std::uint64_t kRecordOverheadBytes = 64 << 10;

// ---- Listen address.

struct ListenAddress {
  std::string host;  // an IP address, without brackets
  bool v6 = false;
  std::uint16_t port = 0;

  std::string text(int actual_port) const {
    return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(actual_port);
  }
};

ListenAddress parse_listen(const std::string& text) {
  const auto bad = [&](const std::string& why) {
    return usage_error("--listen '" + text.substr(0, 100) + "': " + why +
                       "; use HOST:PORT with a loopback address, e.g. 127.0.0.1:7433");
  };
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos) throw bad("no port");
  std::string host = text.substr(0, colon);
  const std::string port = text.substr(colon + 1);
  ListenAddress out;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), out.port);
  if (port.empty() || error != std::errc() || end != port.data() + port.size()) {
    throw bad("the port must be a number from 0 to 65535");
  }
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    out.v6 = true;
  } else if (host == "localhost") {
    host = "127.0.0.1";
  }
  in6_addr six{};
  in_addr four{};
  if (inet_pton(out.v6 ? AF_INET6 : AF_INET, host.c_str(),
                out.v6 ? static_cast<void*>(&six) : static_cast<void*>(&four)) != 1) {
    throw bad("the host is no IP address");
  }
  const bool loopback =
      out.v6 ? IN6_IS_ADDR_LOOPBACK(&six) != 0 : (ntohl(four.s_addr) >> 24) == 127;
  if (!loopback) {
    throw usage_error("--listen '" + text +
                      "' can be reached from elsewhere, and the connection is neither encrypted "
                      "nor authenticated yet: listen on loopback, e.g. 127.0.0.1:7433, and forward "
                      "the port (ssh -L)");
  }
  out.host = host;
  return out;
}

// Tries the address with a plain socket: gRPC does not say why a bind failed.
void check_bindable(const ListenAddress& address) {
  if (address.port == 0) return;
  sockaddr_storage storage{};
  socklen_t length = 0;
  if (address.v6) {
    auto* in = reinterpret_cast<sockaddr_in6*>(&storage);
    in->sin6_family = AF_INET6;
    in->sin6_port = htons(address.port);
    inet_pton(AF_INET6, address.host.c_str(), &in->sin6_addr);
    length = sizeof *in;
  } else {
    auto* in = reinterpret_cast<sockaddr_in*>(&storage);
    in->sin_family = AF_INET;
    in->sin_port = htons(address.port);
    inet_pton(AF_INET, address.host.c_str(), &in->sin_addr);
    length = sizeof *in;
  }
  const int fd = socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int error = fd < 0 ? errno : 0;
  if (fd >= 0) {
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, reinterpret_cast<sockaddr*>(&storage), length) != 0) error = errno;
    close(fd);
  }
  if (error == 0) return;
  const std::string where = address.text(address.port);
  if (error == EADDRINUSE) {
    throw infrastructure_error("cannot listen on " + where +
                               ": the port is in use; stop the other program or choose another "
                               "--listen");
  }
  throw infrastructure_error("cannot listen on " + where + ": " + std::strerror(error));
}

// ---- Requests.

// A status that ends a call.
struct Refusal {
  grpc::StatusCode code;
  std::string message;
};

Refusal invalid(const std::string& message) {
  return {grpc::StatusCode::INVALID_ARGUMENT, message};
}
Refusal own_failure() {
  return {grpc::StatusCode::INTERNAL,
          "the prover failed; its operator finds the reason in its output"};
}
Refusal stopping() {
  return {grpc::StatusCode::UNAVAILABLE, "the prover is shutting down"};
}

EvidenceLevel evidence_from(wire::EvidenceLevel level, EvidenceLevel unspecified) {
  switch (level) {
    case wire::EVIDENCE_LEVEL_UNSPECIFIED:
      return unspecified;
    case wire::EVIDENCE_LEVEL_NONE:
      return EvidenceLevel::kNone;
    case wire::EVIDENCE_LEVEL_ROOTS:
      return EvidenceLevel::kRoots;
    case wire::EVIDENCE_LEVEL_LEAVES:
      return EvidenceLevel::kLeaves;
    case wire::EVIDENCE_LEVEL_ROWS:
      return EvidenceLevel::kRows;
    default:
      throw invalid("evidence: unknown level " + std::to_string(static_cast<int>(level)));
  }
}

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

wire::StopReason to_wire(StopReason reason) {
  switch (reason) {
    case StopReason::kStopToken:
      return wire::STOP_REASON_STOP_TOKEN;
    case StopReason::kLength:
      return wire::STOP_REASON_LENGTH;
    case StopReason::kContext:
      return wire::STOP_REASON_CONTEXT;
  }
  return wire::STOP_REASON_UNSPECIFIED;
}

// Largest record that `request` can lead to, at a level of evidence; nullopt: beyond any record.
std::optional<std::uint64_t> record_bytes_bound(const ServedModel& model,
                                                const GenerationRequest& request,
                                                EvidenceLevel evidence) {
  const ModelConfig& config = model.model.config();
  const std::uint64_t prompt = request.prompt_ids.size();
  const std::uint64_t room = static_cast<std::uint64_t>(config.max_positions) - prompt;
  TraceShape shape;
  shape.layers = static_cast<std::uint32_t>(config.num_layers);
  shape.hidden = static_cast<std::uint32_t>(config.hidden_size);
  shape.kv_width = static_cast<std::uint32_t>(config.kv_size());
  shape.vocab = static_cast<std::uint32_t>(config.vocab_size);
  shape.emitted = std::min(request.max_tokens, room + 1);
  shape.positions = prompt + shape.emitted - 1;
  std::uint64_t bytes = model.manifest.canonical_bytes().size() + 4 * (prompt + shape.emitted) +
                        4 * request.stop_ids.size() + kRecordOverheadBytes;
  if (evidence == EvidenceLevel::kRoots) bytes += 32 * Trace::root_count(shape);
  if (evidence >= EvidenceLevel::kLeaves) bytes += 32 * Trace::leaf_count(shape);
  if (evidence == EvidenceLevel::kRows) {
    const std::optional<std::uint64_t> rows = evidence_rows_bytes(shape);
    if (!rows) return std::nullopt;
    bytes += *rows;
  }
  return bytes;
}

// A request on its way through the worker. The handler that made it waits on it.
struct Job {
  GenerationRequest request;
  EvidenceLevel evidence = EvidenceLevel::kNone;
  std::atomic<bool> abandoned{false};  // nobody waits any more
  std::size_t published = 0;           // tokens in `tokens` so far; worker only

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<std::uint32_t, std::string>> tokens;  // not yet taken by the handler
  std::optional<wire::Result> result;
  std::optional<Refusal> refusal;

  void publish_token(std::uint32_t token, std::string_view text) {
    const std::scoped_lock lock(mutex);
    tokens.emplace_back(token, text);
    changed.notify_all();
  }
  void finish(wire::Result value) {
    const std::scoped_lock lock(mutex);
    result = std::move(value);
    changed.notify_all();
  }
  void refuse(Refusal value) {
    const std::scoped_lock lock(mutex);
    refusal = std::move(value);
    changed.notify_all();
  }
};

using Jobs = std::vector<std::shared_ptr<Job>>;

}  // namespace

void check_serve_options(const ServeOptions& options) {
  check_bindable(parse_listen(options.listen));
  if (options.log_dir.empty() == options.log_key.has_value()) {
    throw usage_error(
        "a log directory and its signing key go together (--log and --key): give both or none");
  }
  if (options.max_batch == 0 || options.max_queue == 0 || options.max_calls == 0 ||
      options.max_tokens == 0 || options.max_rows <= 0) {
    throw usage_error("serve: a limit of 0 would refuse every request");
  }
  if (options.records_dir.empty() && options.max_record_bytes > options.max_memory_bytes) {
    throw usage_error(
        "serve: one record may be larger than all records kept in memory; give a --records "
        "directory");
  }
}

class Server::Impl final : public wire::Audit::Service {
 public:
  Impl(const ServedModel& model, Backend& backend, ServeOptions options)
      : model_(model),
        backend_(backend),
        weights_(model.model.weights(), backend),
        options_(checked(std::move(options))),
        listen_(parse_listen(options_.listen)),
        store_(options_.records_dir, options_.max_memory_bytes) {
    if (options_.log_key) {
      // Opened once, so that a log that cannot be written is known before the first request.
      const LogWriter writer(options_.log_dir, *options_.log_key);
    }
  }

  ~Impl() override { shutdown(milliseconds{0}); }

  void start() {
    check_bindable(listen_);
    grpc::EnableDefaultHealthCheckService(true);
#if BITWITNESS_WITH_GRPC_REFLECTION
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
#endif
    grpc::ServerBuilder builder;
    builder.AddListeningPort(listen_.text(listen_.port), grpc::InsecureServerCredentials(), &port_);
    // Without this a second server would share the port, and get half of the requests.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
    builder.SetMaxReceiveMessageSize(kMaxRequestBytes);
    grpc::ResourceQuota quota("bw-prover");
    quota.SetMaxThreads(static_cast<int>(std::min<std::size_t>(options_.max_calls, 10'000)) + 16);
    builder.SetResourceQuota(quota);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    if (!server_ || port_ == 0) {
      throw infrastructure_error("cannot listen on " + listen_.text(listen_.port) +
                                 "; is the port in use?");
    }
    if (auto* health = server_->GetHealthCheckService()) {
      health->SetServingStatus(kServiceName, true);
    }
    worker_ = std::thread([this] { work(); });
    watchdog_ = std::thread([this] { watch(); });
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
    {
      std::unique_lock lock(mutex_);
      stopping_ = true;
      for (const auto& job : queue_) job->refuse(stopping());
      queue_.clear();
      changed_.notify_all();
      changed_.wait_for(lock, grace, [&] { return !computing_; });
    }
    cancel_ = true;
    if (server_) {
      // Results that are on their way get a moment, then every call is cancelled.
      if (auto* health = server_->GetHealthCheckService()) {
        health->SetServingStatus(kServiceName, false);
      }
      server_->Shutdown(WallClock::now() +
                        std::max(milliseconds{200}, std::min(grace, milliseconds{2000})));
    }
    if (worker_.joinable()) worker_.join();
    {
      const std::scoped_lock lock(calls_mutex_);
      watching_ = false;
      calls_changed_.notify_all();
    }
    if (watchdog_.joinable()) watchdog_.join();
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

  // ---- The service. Handlers run in gRPC's threads.

  grpc::Status GetInfo(grpc::ServerContext* context, const wire::GetInfoRequest*,
                       wire::GetInfoResponse* response) override {
    return answer(context, [&](Call&) {
      const ModelConfig& config = model_.model.config();
      response->set_software("bitwitness " BITWITNESS_VERSION);
      std::filesystem::path dir = model_.model.dir().lexically_normal();
      if (!dir.has_filename()) dir = dir.parent_path();
      response->set_model(dir.filename().string());
      response->set_manifest_digest(manifest_digest_.hex());
      response->set_arithmetic(model_.manifest.arithmetic);
      response->set_context_tokens(static_cast<std::uint64_t>(config.max_positions));
      response->set_vocabulary(static_cast<std::uint64_t>(config.vocab_size));
      response->set_has_tokenizer(model_.tokenizer.has_value());
      response->set_max_tokens(options_.max_tokens);
      response->set_max_record_bytes(options_.max_record_bytes);
      response->set_evidence(to_wire(options_.evidence));
      if (options_.log_key) response->set_log_key(options_.log_key->public_key().vkey());
    });
  }

  grpc::Status Generate(grpc::ServerContext* context, const wire::GenerateRequest* request,
                        grpc::ServerWriter<wire::GenerateEvent>* writer) override {
    return answer(context, [&](Call& call) {
      const auto job = std::make_shared<Job>();
      read_request(*request, *job);
      enqueue(job);
      try {
        follow(*job, call, *writer);
      } catch (...) {
        job->abandoned = true;
        throw;
      }
    });
  }

  grpc::Status GetRecord(grpc::ServerContext* context, const wire::GetRecordRequest* request,
                         grpc::ServerWriter<wire::RecordChunk>* writer) override {
    return answer(context, [&](Call& call) {
      const std::optional<Bytes> id_bytes = from_hex(request->record_id());
      Digest id;
      if (!id_bytes || id_bytes->size() != id.bytes.size()) {
        throw invalid("record_id must be 64 lower-case hexadecimal digits");
      }
      std::copy(id_bytes->begin(), id_bytes->end(), id.bytes.begin());
      std::optional<StoredRecord> record = store_.get(id);
      if (!record) {
        throw Refusal{grpc::StatusCode::NOT_FOUND,
                      "no record " + id.hex() + " here (never made, or no longer kept)"};
      }
      wire::RecordChunk chunk;
      chunk.mutable_header()->set_record_bytes(record->size_bytes());
      chunk.mutable_header()->set_receipt(record->receipt());
      call.write(*writer, chunk);
      Bytes buffer;
      for (std::uint64_t at = 0; at < record->size_bytes(); at += buffer.size()) {
        buffer.resize(std::min<std::uint64_t>(kChunkBytes, record->size_bytes() - at));
        record->read(at, buffer);
        chunk.set_data(buffer.data(), buffer.size());
        call.write(*writer, chunk);
      }
    });
  }

 private:
  static ServeOptions checked(ServeOptions options) {
    check_serve_options(options);
    return options;
  }

  // A call being answered; registered with the watchdog while it lives.
  class Call {
   public:
    Call(Impl& server, grpc::ServerContext* context) : server_(server), context_(context) {
      const std::scoped_lock lock(server_.calls_mutex_);
      if (server_.calls_.size() >= server_.options_.max_calls) {
        throw Refusal{grpc::StatusCode::RESOURCE_EXHAUSTED,
                      "too many calls at the same time (" +
                          std::to_string(server_.options_.max_calls) + "); try again later"};
      }
      server_.calls_.insert(this);
    }
    ~Call() {
      const std::scoped_lock lock(server_.calls_mutex_);
      server_.calls_.erase(this);
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // Throws a Refusal when the client is gone.
    void check() const {
      if (context_->IsCancelled()) {
        throw Refusal{grpc::StatusCode::CANCELLED, "cancelled by the client or its deadline"};
      }
    }

    template <class Message>
    void write(grpc::ServerWriter<Message>& writer, const Message& message) {
      check();
      set_writing(steady_clock::now());
      const bool sent = writer.Write(message);
      set_writing(std::nullopt);
      if (!sent) throw Refusal{grpc::StatusCode::CANCELLED, "the client is gone"};
    }

    // With calls_mutex_ held.
    void drop_if_stalled(steady_clock::time_point now) {
      if (writing_since_ && now - *writing_since_ > server_.options_.write_timeout) {
        context_->TryCancel();
      }
    }

   private:
    void set_writing(std::optional<steady_clock::time_point> since) {
      const std::scoped_lock lock(server_.calls_mutex_);
      writing_since_ = since;
    }

    Impl& server_;
    grpc::ServerContext* context_;
    std::optional<steady_clock::time_point> writing_since_;
  };

  // Runs a handler; whatever it throws becomes a status.
  template <class Work>
  grpc::Status answer(grpc::ServerContext* context, const Work& work) {
    try {
      Call call(*this, context);
      work(call);
      return grpc::Status::OK;
    } catch (...) {
      const Refusal refusal = refusal_of(std::current_exception());
      return {refusal.code, refusal.message};
    }
  }

  // What a client is told about a failure; the operator is told the rest.
  Refusal refusal_of(const std::exception_ptr& failure) const {
    try {
      std::rethrow_exception(failure);
    } catch (const Refusal& refusal) {
      return refusal;
    } catch (const Error& error) {
      // The request was good when it was checked, so this is about the model (a value that may
      // not be committed, say), and worth the client's knowing.
      if (error.kind() == ErrorKind::kUsage) {
        return {grpc::StatusCode::FAILED_PRECONDITION, error.what()};
      }
      report(error.what());
    } catch (const std::bad_alloc&) {
      report("out of memory");
      return {grpc::StatusCode::RESOURCE_EXHAUSTED,
              "the prover has not enough memory for this request"};
    } catch (const std::exception& error) {
      report(error.what());
    }
    return own_failure();
  }

  void report(const std::string& message) const {
    if (options_.on_error) options_.on_error(message);
  }

  // Fills in the job or throws a Refusal that names the field.
  void read_request(const wire::GenerateRequest& request, Job& job) const {
    GenerationRequest& out = job.request;
    job.evidence = evidence_from(request.evidence(), options_.evidence);
    out.max_tokens = request.max_tokens();
    if (out.max_tokens > options_.max_tokens) {
      throw invalid("max_tokens is " + std::to_string(out.max_tokens) +
                    "; this prover allows at most " + std::to_string(options_.max_tokens));
    }
    if (request.has_sampling()) {
      out.sampling.temperature = request.sampling().temperature();
      out.sampling.top_k = request.sampling().top_k();
      out.sampling.top_p = request.sampling().has_top_p() ? request.sampling().top_p() : 1.0F;
    }
    out.seed.assign(request.nonce().begin(), request.nonce().end());
    if (!out.seed.empty()) {
      out.seed_provenance = SeedProvenance::kNonce;
    } else if (out.sampling.temperature != 0) {
      out.seed = random_bytes(32);
      out.seed_provenance = SeedProvenance::kProver;
    }
    out.stop_ids = default_stop_ids(model_);
    try {
      switch (request.prompt_case()) {
        case wire::GenerateRequest::kText:
          if (request.text().empty()) {
            throw invalid("the prompt is empty; give some text or token ids");
          }
          if (!model_.tokenizer) {
            throw invalid("this model has no tokenizer; give the prompt as token ids");
          }
          out.prompt_ids = encode_prompt(model_, request.text());
          break;
        case wire::GenerateRequest::kTokenIds:
          out.prompt_ids.assign(request.token_ids().ids().begin(), request.token_ids().ids().end());
          break;
        default:
          throw invalid("the request has no prompt; give some text or token ids");
      }
      check_request(model_, out);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kUsage) throw invalid(error.what());
      throw;
    }
    const std::optional<std::uint64_t> bytes = record_bytes_bound(model_, out, job.evidence);
    if (!bytes || *bytes > options_.max_record_bytes) {
      throw invalid(std::string("the record of this request with evidence '") +
                    evidence_level_name(job.evidence) + "' could need more than the " +
                    std::to_string(options_.max_record_bytes) +
                    " bytes allowed; ask for fewer tokens or less evidence");
    }
  }

  void enqueue(const std::shared_ptr<Job>& job) {
    const std::scoped_lock lock(mutex_);
    if (stopping_) throw stopping();
    std::erase_if(queue_, [](const auto& waiting) { return waiting->abandoned.load(); });
    if (queue_.size() >= options_.max_queue) {
      throw Refusal{grpc::StatusCode::RESOURCE_EXHAUSTED,
                    "the queue is full (" + std::to_string(options_.max_queue) +
                        " requests waiting); try again later"};
    }
    queue_.push_back(job);
    changed_.notify_all();
  }

  // Passes on what the worker publishes until the result, or throws a Refusal.
  void follow(Job& job, Call& call, grpc::ServerWriter<wire::GenerateEvent>& writer) const {
    for (bool done = false; !done;) {
      std::deque<std::pair<std::uint32_t, std::string>> tokens;
      std::optional<wire::Result> result;
      {
        std::unique_lock lock(job.mutex);
        job.changed.wait_for(lock, kPoll, [&] {
          return !job.tokens.empty() || job.result.has_value() || job.refusal.has_value();
        });
        tokens.swap(job.tokens);
        if (job.refusal) throw *job.refusal;
        result = job.result;
      }
      call.check();
      if (cancel_ && !result) throw stopping();
      wire::GenerateEvent event;
      for (auto& [id, text] : tokens) {
        event.mutable_token()->set_id(id);
        event.mutable_token()->set_text(std::move(text));
        call.write(writer, event);
      }
      if (result) {
        *event.mutable_result() = *result;
        call.write(writer, event);
        done = true;
      }
    }
  }

  // ---- The worker: the only thread that touches the backend.

  void work() {
    while (true) {
      Jobs jobs;
      {
        std::unique_lock lock(mutex_);
        computing_ = false;
        changed_.notify_all();
        changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
        if (stopping_) return;
        jobs = take_batch();
        computing_ = true;
      }
      compute(jobs);
    }
  }

  // The longest run of queued jobs that may be computed together. Those that keep their rows need
  // much memory and run alone. With mutex_ held.
  Jobs take_batch() {
    Jobs jobs;
    while (!queue_.empty() && jobs.size() < options_.max_batch) {
      const std::shared_ptr<Job> job = queue_.front();
      const bool alone = job->evidence == EvidenceLevel::kRows;
      if (alone && !jobs.empty()) break;
      queue_.pop_front();
      if (job->abandoned) continue;
      jobs.push_back(job);
      if (alone) break;
    }
    return jobs;
  }

  void compute(const Jobs& jobs) {
    if (jobs.empty()) return;
    try {
      run(jobs);
    } catch (...) {
      const std::exception_ptr failure = std::current_exception();
      if (jobs.size() == 1 || cancel_) {
        const Refusal refusal = cancel_ ? stopping() : refusal_for(jobs, failure);
        for (const auto& job : jobs) job->refuse(refusal);
        return;
      }
      // One request must not take down its neighbours: again, each alone. Tokens that were sent
      // already come out the same and are not sent twice.
      for (const auto& job : jobs) {
        if (!job->abandoned) compute({job});
      }
    }
  }

  Refusal refusal_for(const Jobs& jobs, const std::exception_ptr& failure) const {
    const bool nobody_waits = std::all_of(jobs.begin(), jobs.end(),
                                          [](const auto& job) { return job->abandoned.load(); });
    if (nobody_waits) return {grpc::StatusCode::CANCELLED, "cancelled"};
    return refusal_of(failure);
  }

  void run(const Jobs& jobs) {
    std::vector<GenerationRequest> requests;
    for (const auto& job : jobs) requests.push_back(job->request);
    GenerationOptions options;
    options.max_slots = static_cast<std::int64_t>(options_.max_batch);
    options.max_rows = options_.max_rows;
    options.prefill_chunk = options_.max_rows;
    options.keep_rows = jobs.front()->evidence == EvidenceLevel::kRows;
    std::vector<std::size_t> seen(jobs.size(), 0);
    GenerationObserver observer;
    observer.on_token = [&](std::size_t index, std::uint32_t token, std::string_view text) {
      Job& job = *jobs[index];
      if (++seen[index] <= job.published) return;
      job.published = seen[index];
      job.publish_token(token, text);
    };
    observer.cancelled = [&] {
      return cancel_ || std::all_of(jobs.begin(), jobs.end(),
                                    [](const auto& job) { return job->abandoned.load(); });
    };
    Provenance provenance = run_provenance(backend_);
    provenance[provenance_key::kStarted] = provenance_time_now();
    const std::vector<Generation> generations =
        generate(model_, weights_, backend_, requests, options, observer);
    model_.model.check_unchanged();
    provenance[provenance_key::kFinished] = provenance_time_now();

    try {
      std::vector<wire::Result> results = keep(jobs, generations, std::move(provenance));
      for (std::size_t i = 0; i < jobs.size(); ++i) jobs[i]->finish(std::move(results[i]));
    } catch (const std::exception& error) {
      // The disk or the log, so no fault of a request's, and computing again would not help.
      report(error.what());
      for (const auto& job : jobs) job->refuse(own_failure());
    }
  }

  // Stored before it is logged, logged before it is answered: the log never names a record that is
  // nowhere, and no client hears of one that is not logged.
  std::vector<wire::Result> keep(const Jobs& jobs, const std::vector<Generation>& generations,
                                 Provenance provenance) {
    std::vector<wire::Result> results;
    std::vector<Digest> ids;
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      provenance[provenance_key::kNonce] = new_provenance()[provenance_key::kNonce];
      Record record = make_record(model_, generations[i], jobs[i]->evidence, provenance);
      if (options_.operator_key) record.sign(*options_.operator_key);
      ids.push_back(record.digest());
      Bytes bytes = record.serialize();
      results.push_back(result_of(record, bytes.size()));
      store_.put(ids.back(), std::move(bytes));
    }
    log(ids);
    return results;
  }

  static wire::Result result_of(const Record& record, std::size_t bytes) {
    wire::Result result;
    result.set_record_id(record.digest().hex());
    result.set_claim_digest(record.claim.digest().hex());
    result.set_trace_root(record.claim.trace_root.hex());
    result.set_stop_reason(to_wire(record.claim.stop_reason));
    result.set_prompt_tokens(record.claim.prompt_ids.size());
    result.set_emitted_tokens(record.claim.emitted_ids.size());
    result.set_record_bytes(bytes);
    return result;
  }

  void log(const std::vector<Digest>& ids) {
    if (!options_.log_key) return;
    std::vector<Bytes> entries;
    for (const Digest& id : ids) entries.push_back(log_entry_for_record(id));
    LogWriter writer(options_.log_dir, *options_.log_key);
    const std::vector<AppendResult> appended = writer.append(entries);
    for (std::size_t i = 0; i < ids.size(); ++i) store_.put_receipt(ids[i], appended[i].receipt);
  }

  // ---- The watchdog: a client that stops reading would hold its handler's thread for ever.

  void watch() {
    std::unique_lock lock(calls_mutex_);
    while (watching_) {
      calls_changed_.wait_for(lock, std::min(options_.write_timeout, milliseconds{500}));
      for (Call* call : calls_) call->drop_if_stalled(steady_clock::now());
    }
  }

  const ServedModel& model_;
  Backend& backend_;
  const PlacedWeights weights_;
  const ServeOptions options_;
  const ListenAddress listen_;
  const Digest manifest_digest_ = model_.manifest.digest();
  RecordStore store_;
  int port_ = 0;

  std::mutex mutex_;  // queue_, stopping_, computing_
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> queue_;
  bool stopping_ = false;            // nothing new
  bool computing_ = false;           // the worker has jobs
  std::atomic<bool> cancel_{false};  // what is being computed, too
  std::atomic<bool> stopped_{false};
  std::mutex shutdown_mutex_;

  std::mutex calls_mutex_;  // calls_, watching_
  std::condition_variable calls_changed_;
  std::set<Call*> calls_;
  bool watching_ = true;

  std::unique_ptr<grpc::Server> server_;
  std::thread worker_;
  std::thread watchdog_;
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
