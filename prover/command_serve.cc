// bw-prover serve: answers requests over gRPC until it is told to stop.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <iostream>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "attest/base/print_json.h"
#include "attest/base/program.h"
#include "attest/base/progress.h"
#include "attest/keys.h"
#include "prover/allow_list.h"
#include "prover/commands.h"
#include "prover/generate.h"
#include "prover/serve.h"

namespace bitwitness {
namespace {

struct ServeFlags {
  std::string model;
  std::string listen = "127.0.0.1:7433";
  std::string device = "auto";
  int threads = 0;
  std::string records;
  std::string log, key, operator_key;
  TlsFiles tls;
  std::vector<std::string> allow;
  std::uint64_t quota_audits = 60;
  std::uint64_t quota_mib = 16384;
  std::uint64_t retention_hours = 168;
  std::uint64_t max_opening_mib = 1024;
  std::string evidence = "leaves";
  std::uint64_t max_tokens = 4096;
  std::uint64_t max_record_mib = 256;
  std::size_t max_queue = 64;
  std::size_t max_batch = 8;
  std::string reflection = "auto";
  unsigned grace_s = 10;
  std::string format = "text";
};

// SIGINT and SIGTERM as bytes in a pipe: a handler may do no more than write. The second signal has
// its usual effect, so that a stop that takes too long can be cut short.
class StopSignals {
 public:
  StopSignals() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw infrastructure_error("cannot make a pipe for signals");
    read_end_ = ends[0];
    write_end_ = ends[1];
    struct sigaction action {};
    action.sa_handler = [](int) {
      const int saved = errno;
      const char byte = 0;
      [[maybe_unused]] const ssize_t written = write(write_end_, &byte, 1);
      errno = saved;
    };
    action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  void wait() const {
    char byte = 0;
    while (read(read_end_, &byte, 1) < 0 && errno == EINTR) {
    }
  }

 private:
  int read_end_ = -1;
  static inline std::atomic<int> write_end_{-1};  // what a handler can reach
};

// An empty value is a variable that was not set, and never what was meant.
const CLI::Validator kNotEmpty(
    [](const std::string& value) {
      return value.empty() ? std::string("must not be empty") : std::string();
    },
    "");

// As many connections as the system lets this process have: the usual soft limit of 1,024 is soon
// reached by idle ones.
void raise_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
}

int run(const ServeFlags& flags) {
  if (flags.log.empty() != flags.key.empty()) {
    throw usage_error("--log and --key go together: the directory of the log and its signing key");
  }
  ServeOptions options;
  options.listen = flags.listen;
  options.evidence = parse_evidence_level(flags.evidence);
  options.max_tokens = flags.max_tokens;
  options.max_record_bytes = flags.max_record_mib << 20;
  options.max_memory_bytes = std::max(options.max_memory_bytes, options.max_record_bytes);
  options.max_queue = flags.max_queue;
  options.max_batch = flags.max_batch;
  if (flags.reflection != "auto") options.reflection = flags.reflection == "on";
  options.records_dir = flags.records;
  options.log_dir = flags.log;
  if (!flags.key.empty()) options.log_key = SigningKey::load(flags.key);
  if (!flags.operator_key.empty()) options.operator_key = SigningKey::load(flags.operator_key);
  options.tls = flags.tls;
  options.allow = load_allow_list(flags.allow);
  options.quota_audits = flags.quota_audits;
  options.quota_bytes = flags.quota_mib << 20;
  options.retention = std::chrono::hours(flags.retention_hours);
  options.max_opening_bytes = flags.max_opening_mib << 20;
  std::mutex stderr_mutex;
  options.on_error = [&](const std::string& message) {
    const std::scoped_lock lock(stderr_mutex);
    std::cerr << "bw-prover: serve: " << message << std::endl;
  };
  check_serve_options(options);  // before the model is loaded

  const std::unique_ptr<Backend> backend = make_backend(flags.device, flags.threads);
  std::optional<ServedModel> model;
  {
    ProgressLine progress("hashing weights");
    model.emplace(ServedModel::load(flags.model, progress.callback()));
  }
  raise_file_limit();
  Server server(*model, *backend, std::move(options));
  server.start();
  const StopSignals signals;
  if (flags.format == "json") {
    nlohmann::ordered_json json;
    json["serving"] = model->model.dir().string();
    json["address"] = server.address();
    json["manifest_digest"] = model->manifest.digest().hex();
    json["backend"] = backend->name();
    json["answers_audits"] = !flags.allow.empty();
    print_json(json, -1);
  } else {
    std::cout << "serving " << model->model.dir().string() << " on " << server.address()
              << std::endl;
  }
  if (flags.records.empty()) {
    std::cerr << "records are kept in memory and end with this process; --records DIR keeps them\n";
  }
  if (flags.allow.empty()) {
    std::cerr << "audits are refused to everyone; --allow VKEY lets a verifier in\n";
  }
  signals.wait();
  std::cerr << "stopping: waiting up to " << flags.grace_s
            << " s for what is being computed (interrupt again to stop at once)" << std::endl;
  server.shutdown(std::chrono::seconds(flags.grace_s));
  return to_int(ExitCode::kOk);
}

}  // namespace

void add_serve_command(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App* command = app.add_subcommand("serve", "Answer requests over gRPC and keep the records");
  command->add_option("--model", flags->model, "Model directory (Hugging Face layout)")->required();
  command
      ->add_option(
          "--listen", flags->listen,
          "HOST:PORT; off loopback all three --tls flags are needed; port 0 takes a free one")
      ->capture_default_str();
  command->add_option("--tls-cert", flags->tls.certificate,
                      "The server's certificate and its chain (PEM)");
  command->add_option("--tls-key", flags->tls.key,
                      "The certificate's private key (PEM, mode 0600)");
  command->add_option("--tls-client-ca", flags->tls.client_ca,
                      "Authorities (PEM); only clients with a certificate by one of them get in");
  command
      ->add_option("--device", flags->device, "auto, cpu, ref, avx2, avx512, neon, cuda or cuda:N")
      ->capture_default_str();
  command->add_option("--threads", flags->threads, "CPU threads (0: all)")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command
      ->add_option("--records", flags->records,
                   "Directory for the records (without: in memory, the oldest go first)")
      ->check(kNotEmpty);
  command->add_option("--log", flags->log, "Log directory to append every record to")
      ->check(kNotEmpty);
  command->add_option("--key", flags->key, "The log's signing key (PEM)")->check(kNotEmpty);
  command
      ->add_option("--operator-key", flags->operator_key,
                   "Operator key (PEM) to sign the records with")
      ->check(kNotEmpty);
  command
      ->add_option("--allow", flags->allow,
                   "Verifier that may audit: its key, or a file with one per line; repeatable "
                   "(without: nobody may)")
      ->type_name("VKEY_OR_FILE");
  command
      ->add_option("--quota-audits", flags->quota_audits, "Audits of one verifier within an hour")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1'000'000}))
      ->capture_default_str();
  command
      ->add_option("--quota-mib", flags->quota_mib,
                   "MiB that one verifier gets opened within an hour")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 32))
      ->capture_default_str();
  command
      ->add_option("--retention", flags->retention_hours,
                   "Hours after its run that a record can be audited; files are kept beyond it")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{10 * 365 * 24}))
      ->capture_default_str();
  command
      ->add_option("--max-opening-mib", flags->max_opening_mib,
                   "MiB of rows held at a time for openings; larger ones take several re-runs")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 24))
      ->capture_default_str();
  command
      ->add_option("--evidence", flags->evidence,
                   "Evidence of requests that leave it open: none, roots, leaves or rows")
      ->capture_default_str();
  command->add_option("--max-tokens", flags->max_tokens, "Tokens a request may ask for")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{UINT32_MAX}))
      ->capture_default_str();
  command
      ->add_option("--max-record-mib", flags->max_record_mib,
                   "Size of the largest record made, in MiB")
      ->check(CLI::Range(std::uint64_t{1}, kMaxRecordBytes >> 20))
      ->capture_default_str();
  command->add_option("--max-queue", flags->max_queue, "Requests that may wait")
      ->check(CLI::Range(std::size_t{1}, std::size_t{100'000}))
      ->capture_default_str();
  command
      ->add_option("--max-batch", flags->max_batch,
                   "Requests computed together; the key-value cache is made for that many")
      ->check(CLI::Range(std::size_t{1}, std::size_t{1024}))
      ->capture_default_str();
  command
      ->add_option("--reflection", flags->reflection,
                   "gRPC server reflection: on, off, or auto (on loopback only)")
      ->check(CLI::IsMember({"auto", "on", "off"}))
      ->capture_default_str();
  command
      ->add_option("--grace", flags->grace_s,
                   "Seconds that running requests get when the server is told to stop")
      ->check(CLI::Range(0U, 3600U))
      ->capture_default_str();
  command->add_option("--format", flags->format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command->callback([flags, &exit_code] { exit_code = run(*flags); });
}

}  // namespace bitwitness
