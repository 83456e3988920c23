// A prover that answers requests over gRPC (proto/PROTOCOL.md). Protocol Buffers stay inside
// serve.cc.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "attest/keys.h"
#include "attest/record.h"
#include "kernels/backend.h"
#include "prover/generate.h"

namespace bitwitness {

struct ServeOptions {
  // HOST:PORT with a loopback address: 127.x.x.x, [::1] or localhost (which is 127.0.0.1). Port 0
  // takes a free one. Other addresses are refused: the transport is not encrypted.
  std::string listen = "127.0.0.1:7433";

  EvidenceLevel evidence = EvidenceLevel::kLeaves;  // of requests that leave it open
  std::uint64_t max_tokens = 4096;                  // per request
  std::uint64_t max_record_bytes = std::uint64_t{256} << 20;
  std::size_t max_queue = 64;   // requests waiting for the device
  std::size_t max_batch = 8;    // requests computed together
  std::size_t max_calls = 128;  // calls answered at the same time
  // A client that takes nothing of what is sent for this long is dropped.
  std::chrono::milliseconds write_timeout{30'000};

  std::string records_dir;  // empty: records are kept in memory and end with the server
  std::uint64_t max_memory_bytes = std::uint64_t{512}
                                   << 20;  // without a directory; oldest go first

  std::string log_dir;  // empty: records are not logged
  std::optional<SigningKey> log_key;
  std::optional<SigningKey> operator_key;  // signs every record

  std::int64_t max_rows = 512;  // as GenerationOptions; longer prompts are cut, so that
                                // cancellation is noticed between the pieces

  // What went wrong on this side, for the operator; clients are told only that it did. Called from
  // any thread.
  std::function<void(const std::string&)> on_error;
};

// Throws a usage Error for options that contradict each other and for a listen address that is
// ill-formed or not loopback, and an infrastructure Error for one that cannot be bound now.
void check_serve_options(const ServeOptions& options);

// One thread owns the backend: it takes what is queued, computes it together, stores and logs the
// records, then answers. The bits of an answer do not depend on the company.
//
// A request that its client cancels, or whose deadline passes, is answered at once and dropped
// before it starts; one that is already being computed with others is computed to its end, and ends
// at the next step when nobody waits for any of them.
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
