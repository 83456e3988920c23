// A prover that answers requests over gRPC (proto/PROTOCOL.md). The calls are in service.cc, the
// work in worker.cc and audits.cc; here are options, transport, start and stop.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attest/keys.h"
#include "attest/record.h"
#include "kernels/backend.h"
#include "prover/generate.h"
#include "prover/tls_files.h"

namespace bitwitness {

struct ServeOptions {
  // HOST:PORT with an IP address or localhost (which is 127.0.0.1). Port 0 takes a free one. What
  // is not loopback needs all of `tls`: both sides show certificates.
  std::string listen = "127.0.0.1:7433";
  TlsFiles tls;  // empty: plaintext; without client_ca: clients show no certificate

  EvidenceLevel evidence = EvidenceLevel::kLeaves;  // of requests that leave it open
  std::uint64_t max_tokens = 4096;                  // per request
  std::uint64_t max_record_bytes = std::uint64_t{256} << 20;
  std::size_t max_queue = 64;   // requests waiting for the device
  std::size_t max_batch = 8;    // requests computed together
  std::size_t max_calls = 128;  // calls answered at the same time
  // Server reflection, for tools that explore: nullopt, on loopback only. 4 streams at a time.
  std::optional<bool> reflection;
  // A client that takes nothing of what is sent for this long is dropped.
  std::chrono::milliseconds write_timeout{30'000};

  std::string records_dir;  // empty: records are kept in memory and end with the server
  std::uint64_t max_memory_bytes = std::uint64_t{512}
                                   << 20;  // without a directory; oldest go first

  std::string log_dir;  // empty: records are not logged
  std::optional<SigningKey> log_key;
  std::optional<SigningKey> operator_key;  // signs every record

  // Audits: for these verifiers, about records of at most this age, and for each verifier within an
  // hour. Needs a log.
  std::vector<PublicKey> allow;
  std::chrono::seconds retention = std::chrono::hours(168);
  std::uint64_t quota_audits = 60;
  std::uint64_t quota_bytes = std::uint64_t{16} << 30;
  std::uint64_t max_opening_bytes = std::uint64_t{1} << 30;  // of rows held at a time, all openings

  std::int64_t max_rows = 0;  // as GenerationOptions; longer prompts are cut, so that cancellation
                              // is noticed between the pieces

  // What went wrong on this side, for the operator; clients are told only that it did. Called from
  // any thread.
  std::function<void(const std::string&)> on_error;
};

// Throws a usage Error for options that contradict each other, for a listen address that is
// ill-formed or not loopback without certificates, and for certificates that would not work, and an
// infrastructure Error for an address that cannot be bound now.
void check_serve_options(const ServeOptions& options);

// One thread owns the backend: it computes requests together, lets them join and leave between
// steps, stores and logs each record when it is done, and re-runs what audits open in between. The
// bits of an answer do not depend on the company.
//
// A request that its client cancels, or whose deadline passes, is answered at once and dropped at
// the next step.
class Server {
 public:
  // `model` and `backend` must outlive the server; nobody else may use `backend` meanwhile.
  // Throws as check_serve_options, and what opening the record directory and the log throws.
  Server(const ServedModel& model, Backend& backend, ServeOptions options);
  ~Server();  // shutdown() without grace
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Listens. An address that cannot be bound is an infrastructure Error that names it. Once only.
  void start();

  int port() const;             // after start()
  std::string address() const;  // HOST:PORT, after start()

  // Refuses new requests and those that wait, lets what is being computed finish within `grace`,
  // then cancels it and stops listening. Safe to call more than once, and from another thread than
  // wait().
  void shutdown(std::chrono::milliseconds grace = std::chrono::milliseconds{0});
  void wait();  // until shutdown() is done

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bitwitness
