// The gRPC connection to a prover: address, TLS, deadlines, and what a status means. Inside the
// client only: Protocol Buffers and gRPC stop here.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "attest/base/error.h"
#include "proto/audit.grpc.pb.h"
#include "verifier/prover_endpoint.h"

namespace bitwitness {

// PROTOCOL.md "Limits".
constexpr std::size_t kChunkBytes = std::size_t{256} << 10;
constexpr int kMaxMessageBytes = 2 << 20;  // the largest message is a header with a receipt

// A connection: for at most `deadline`, an address that refuses is tried for 3 s, a handshake
// waited for 20 s. One that could not be made fails in its first call, which knows why. Usage Error
// as check_endpoint.
std::unique_ptr<v1::Audit::Stub> connect(const ProverEndpoint& prover,
                                         std::chrono::milliseconds deadline);

void set_deadline(grpc::ClientContext& context, std::chrono::milliseconds deadline);

// The error of a call that did not end well. `own_request`: INVALID_ARGUMENT is about what the user
// asked for.
Error status_error(const grpc::Status& status, const ProverEndpoint& prover, const char* call,
                   std::chrono::milliseconds deadline, bool own_request);

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

// Cancels a call when the time spent waiting for its peer exceeds a budget. Unlike a deadline it
// does not count what this side does between two messages: an opening is judged as it comes.
class WaitBudget {
 public:
  // `context` must outlive it.
  WaitBudget(grpc::ClientContext& context, std::chrono::milliseconds budget);
  ~WaitBudget();
  WaitBudget(const WaitBudget&) = delete;
  WaitBudget& operator=(const WaitBudget&) = delete;

  // What `work` returns, its time counted.
  template <class Work>
  auto wait(Work work) {
    begin();
    auto result = work();
    end();
    return result;
  }
  bool spent() const;

 private:
  using Clock = std::chrono::steady_clock;
  void begin();
  void end();
  void watch();

  grpc::ClientContext& context_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Clock::duration left_;
  Clock::time_point until_;  // when left_ is spent; while waiting_
  bool waiting_ = false, spent_ = false, stopping_ = false;
  std::thread watcher_;
};

}  // namespace bitwitness
