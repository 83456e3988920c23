// The one thread that owns the backend: generations in a batch that requests join and leave between
// steps, and re-runs for audits in between.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "attest/claim.h"
#include "attest/record.h"
#include "kernels/backend.h"
#include "prover/generate.h"
#include "prover/prover_log.h"
#include "prover/record_store.h"
#include "prover/refusal.h"

namespace bitwitness {

struct ServeOptions;

// What a client learns of a finished request, by when its record is stored and logged.
struct JobResult {
  Digest record_id;
  Digest claim_digest;
  Digest trace_root;
  StopReason stop_reason = StopReason::kLength;
  std::uint64_t prompt_tokens = 0;
  std::uint64_t emitted_tokens = 0;
  std::uint64_t record_bytes = 0;
};

// A request on its way through the worker. The handler that made it waits on it.
struct GenerationJob {
  GenerationRequest request;
  EvidenceLevel evidence = EvidenceLevel::kNone;
  std::atomic<bool> abandoned{false};  // nobody waits any more
  std::size_t published = 0;           // tokens in `tokens` so far; worker only

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<std::uint32_t, std::string>> tokens;  // not yet taken by the handler
  std::optional<JobResult> result;
  std::optional<Refusal> refusal;

  void publish_token(std::uint32_t token, std::string_view text);
  void finish(JobResult value);
  void refuse(Refusal value);
  bool answered();
};

class Worker {
 public:
  // All arguments must outlive the worker. `log` may be null: records are not logged.
  Worker(const ServedModel& model, const PlacedWeights& weights, Backend& backend,
         const ServeOptions& options, RecordStore& store, ProverLog* log);
  ~Worker();  // stop() without grace
  void start();

  // Refusal: the queue is full, or the prover is stopping.
  void enqueue(const std::shared_ptr<GenerationJob>& job);

  // Runs `work` on the worker's thread and waits for it. `work` asks `cancelled` between its steps,
  // and ends by throwing when it says true: the client is gone, or the prover stops. Throws what
  // `work` throws, or a Refusal as enqueue, or one that says why it was cancelled.
  //
  // Audits and generations share the device by time: after a piece of work that took so long,
  // requests that are there get as long before the next one. Neither can starve the other. Work
  // that fails beside a batch (memory, say) is tried again without one, so it must begin afresh.
  using CancelledFn = std::function<bool()>;
  void run(const GoneFn& gone, const std::function<void(const CancelledFn& cancelled)>& work);

  // Refuses what waits, lets what is being computed finish within `grace`, then cancels it.
  void stop(std::chrono::milliseconds grace);
  bool cancelling() const { return cancel_; }

 private:
  using Job = std::shared_ptr<GenerationJob>;
  struct Task {
    const std::function<void(const CancelledFn&)>* work = nullptr;
    std::atomic<bool> abandoned{false};
    // With mutex_ held.
    bool alone = false;  // waits until no batch is there
    bool done = false;
    std::exception_ptr failure;
  };
  struct Active {
    Job job;
    std::string started;
    std::size_t tokens = 0;
  };
  class Session;

  void loop();
  bool task_due() const;  // with mutex_ held
  void run_due_task();
  void run_task(const std::shared_ptr<Task>& task, bool beside_batch);
  std::vector<Job> take_batch();  // with mutex_ held
  void generate(const std::vector<Job>& jobs, bool together);
  void deliver(std::vector<std::pair<Active, Generation>> finished);
  std::vector<JobResult> keep(const std::vector<std::pair<Active, Generation>>& finished);
  Refusal refusal_for(const std::exception_ptr& failure) const;

  const ServedModel& model_;
  const PlacedWeights& weights_;
  Backend& backend_;
  const ServeOptions& options_;
  RecordStore& store_;
  ProverLog* const log_;

  std::mutex mutex_;  // what follows up to cancel_
  std::condition_variable changed_;
  std::deque<Job> queue_;
  std::deque<std::shared_ptr<Task>> tasks_;
  std::chrono::steady_clock::time_point next_task_{};  // not before, while requests are there
  bool stopping_ = false;                              // nothing new
  bool busy_ = false;                                  // computing something
  std::atomic<bool> cancel_{false};                    // what is being computed, too
  std::thread thread_;
};

}  // namespace bitwitness
