#include "prover/worker.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "attest/base/error.h"
#include "attest/log.h"
#include "prover/serve.h"

namespace bitwitness {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kPoll{50};  // how late cancellation may be noticed
constexpr std::int64_t kMinCapacity =
    256;  // positions; so that later requests can join a short one

}  // namespace

void GenerationJob::publish_token(std::uint32_t token, std::string_view text) {
  const std::scoped_lock lock(mutex);
  tokens.emplace_back(token, text);
  changed.notify_all();
}
void GenerationJob::finish(JobResult value) {
  const std::scoped_lock lock(mutex);
  result = std::move(value);
  changed.notify_all();
}
bool GenerationJob::answered() {
  const std::scoped_lock lock(mutex);
  return result.has_value() || refusal.has_value();
}
void GenerationJob::refuse(Refusal value) {
  const std::scoped_lock lock(mutex);
  refusal = std::move(value);
  changed.notify_all();
}

Worker::Worker(const ServedModel& model, const PlacedWeights& weights, Backend& backend,
               const ServeOptions& options, RecordStore& store, ProverLog* log)
    : model_(model),
      weights_(weights),
      backend_(backend),
      options_(options),
      store_(store),
      log_(log) {}

Worker::~Worker() {
  stop(milliseconds{0});
}

void Worker::start() {
  thread_ = std::thread([this] { loop(); });
}

void Worker::enqueue(const Job& job) {
  const std::scoped_lock lock(mutex_);
  if (stopping_) throw stopping();
  std::erase_if(queue_, [](const Job& waiting) { return waiting->abandoned.load(); });
  if (queue_.size() >= options_.max_queue) {
    throw Refusal{RefusalCode::kResourceExhausted, "the queue is full (" +
                                                       std::to_string(options_.max_queue) +
                                                       " requests waiting); try again later"};
  }
  queue_.push_back(job);
  changed_.notify_all();
}

void Worker::run(const GoneFn& gone, const std::function<void(const CancelledFn&)>& work) {
  const auto task = std::make_shared<Task>();
  task->work = &work;
  std::unique_lock lock(mutex_);
  if (stopping_) throw stopping();
  if (tasks_.size() >= options_.max_queue) {
    throw Refusal{RefusalCode::kResourceExhausted, "too many audits are waiting (" +
                                                       std::to_string(options_.max_queue) +
                                                       "); try again later"};
  }
  tasks_.push_back(task);
  changed_.notify_all();
  while (!task->done) {
    changed_.wait_for(lock, kPoll);
    if (task->done || !gone()) continue;
    task->abandoned = true;
    // Waiting: it goes. Running: it ends at its next step, and until then `work` is in use.
    if (std::erase(tasks_, task) != 0) throw cancelled_by_client();
  }
  if (!task->failure) return;
  if (task->abandoned) throw cancelled_by_client();
  if (cancel_) throw stopping();
  std::rethrow_exception(task->failure);
}

void Worker::stop(milliseconds grace) {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    for (const Job& job : queue_) job->refuse(stopping());
    queue_.clear();
    for (const auto& task : tasks_) {
      task->failure = std::make_exception_ptr(stopping());
      task->done = true;
    }
    tasks_.clear();
    changed_.notify_all();
    changed_.wait_for(lock, grace, [&] { return !busy_; });
  }
  cancel_ = true;
  if (thread_.joinable()) thread_.join();
}

void Worker::loop() {
  while (true) {
    std::vector<Job> jobs;
    std::shared_ptr<Task> task;
    {
      std::unique_lock lock(mutex_);
      busy_ = false;
      changed_.notify_all();
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty() || !tasks_.empty(); });
      if (stopping_) return;
      busy_ = true;
      if (task_due()) {
        task = tasks_.front();
        tasks_.pop_front();
      } else {
        jobs = take_batch();
      }
    }
    if (task) run_task(task, false);
    if (!jobs.empty()) generate(jobs, jobs.front()->evidence != EvidenceLevel::kRows);
  }
}

// ---- Audits.

bool Worker::task_due() const {
  return !tasks_.empty() &&
         (queue_.empty() || tasks_.front()->alone || steady_clock::now() >= next_task_);
}

// Between two steps of a batch, which counts as requests that are there.
void Worker::run_due_task() {
  std::shared_ptr<Task> task;
  {
    const std::scoped_lock lock(mutex_);
    if (tasks_.empty() || tasks_.front()->alone || steady_clock::now() < next_task_) return;
    task = tasks_.front();
    tasks_.pop_front();
  }
  run_task(task, true);
}

void Worker::run_task(const std::shared_ptr<Task>& task, bool beside_batch) {
  const steady_clock::time_point start = steady_clock::now();
  std::exception_ptr failure;
  try {
    (*task->work)([&] { return cancel_ || task->abandoned; });
  } catch (...) {
    failure = std::current_exception();
  }
  const std::scoped_lock lock(mutex_);
  const steady_clock::time_point end = steady_clock::now();
  next_task_ = end + (end - start);
  if (failure && beside_batch && !stopping_ && !task->abandoned) {
    task->alone = true;
    tasks_.push_front(task);
    return;
  }
  task->failure = failure;
  task->done = true;
  changed_.notify_all();
}

// ---- Generations.

// The first requests in the queue that may be computed together. Those that keep their rows need
// much memory and run alone.
std::vector<Worker::Job> Worker::take_batch() {
  std::vector<Job> jobs;
  while (!queue_.empty() && jobs.size() < options_.max_batch) {
    const Job job = queue_.front();
    const bool alone = job->evidence == EvidenceLevel::kRows;
    if (alone && !jobs.empty()) break;
    queue_.pop_front();
    if (job->abandoned) continue;
    jobs.push_back(job);
    if (alone) break;
  }
  return jobs;
}

// A batch with the jobs that are in it.
class Worker::Session {
 public:
  Session(Worker& worker, const std::vector<Job>& jobs, bool together)
      : worker_(worker),
        capacity_(capacity_for(jobs, together)),
        batch_(worker.model_, worker.weights_, worker.backend_, capacity_,
               options_for(jobs, together), observer_) {
    observer_.on_token = [this](std::size_t index, std::uint32_t token, std::string_view text) {
      Active& active = active_.at(index);
      // After a failure requests run again; what was sent comes out the same and is not sent twice.
      if (++active.tokens <= active.job->published) return;
      active.job->published = active.tokens;
      active.job->publish_token(token, text);
    };
    observer_.cancelled = [this](std::size_t index) {
      if (!active_.at(index).job->abandoned) return false;
      active_.erase(index);
      return true;
    };
    for (const Job& job : jobs) add(job);
  }

  bool empty() const { return active_.empty(); }
  std::vector<Job> jobs() const {
    std::vector<Job> out;
    for (const auto& [index, active] : active_) out.push_back(active.job);
    return out;
  }

  // Lets requests from the queue in, in their order, as long as there is room for the next one.
  void admit() {
    const std::scoped_lock lock(worker_.mutex_);
    if (!worker_.tasks_.empty() && worker_.tasks_.front()->alone) return;
    while (!worker_.queue_.empty() && active_.size() < worker_.options_.max_batch) {
      const Job job = worker_.queue_.front();
      if (!job->abandoned && (job->evidence == EvidenceLevel::kRows ||
                              positions_needed(worker_.model_, job->request) > capacity_)) {
        return;
      }
      worker_.queue_.pop_front();  // first: what add() throws must not leave it there, too
      if (!job->abandoned) add(job);
    }
  }

  std::vector<std::pair<Active, Generation>> step() {
    std::vector<std::pair<Active, Generation>> out;
    for (GenerationBatch::Finished& done : batch_.step()) {
      out.emplace_back(std::move(active_.at(done.index)), std::move(done.generation));
      active_.erase(done.index);
    }
    return out;
  }

 private:
  std::int64_t capacity_for(const std::vector<Job>& jobs, bool together) const {
    std::int64_t needed = together ? kMinCapacity : 1;
    for (const Job& job : jobs) {
      needed = std::max(needed, positions_needed(worker_.model_, job->request));
    }
    if (!together) return needed;
    const std::int64_t rounded =
        static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(needed)));
    return std::min(rounded, worker_.model_.model.config().max_positions);
  }

  GenerationOptions options_for(const std::vector<Job>& jobs, bool together) const {
    GenerationOptions options;
    options.max_slots = together ? static_cast<std::int64_t>(worker_.options_.max_batch) : 1;
    options.max_rows = worker_.options_.max_rows;
    options.prefill_chunk =
        options.max_rows > 0 ? options.max_rows : worker_.backend_.preferred_rows();
    options.keep_rows = jobs.front()->evidence == EvidenceLevel::kRows;
    return options;
  }

  void add(const Job& job) {
    active_[next_] = {job, provenance_time_now(), 0};
    batch_.add(next_++, job->request);
  }

  Worker& worker_;
  std::int64_t capacity_;
  GenerationObserver observer_;
  std::map<std::size_t, Active> active_;
  std::size_t next_ = 0;
  GenerationBatch batch_;
};

// `together`: others may join. Otherwise `jobs` is one job.
void Worker::generate(const std::vector<Job>& jobs, bool together) {
  std::optional<Session> session;
  std::exception_ptr failure;
  try {
    session.emplace(*this, jobs, together);
    while (!session->empty()) {
      if (cancel_) throw stopping();
      if (together) session->admit();
      deliver(session->step());
      run_due_task();
    }
    return;
  } catch (...) {
    failure = std::current_exception();
  }
  std::vector<Job> unanswered = session ? session->jobs() : jobs;
  session.reset();
  std::erase_if(unanswered, [](const Job& job) { return job->abandoned || job->answered(); });
  if (cancel_ || !together) {
    const Refusal refusal = cancel_ ? stopping() : refusal_for(failure);
    for (const Job& job : unanswered) job->refuse(refusal);
    return;
  }
  // One request must not take down its neighbours: again, each alone.
  for (const Job& job : unanswered) generate({job}, false);
}

Refusal Worker::refusal_for(const std::exception_ptr& failure) const {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    // The request was good when it was checked, so this is about the model (a value that may not be
    // committed, say), and worth the client's knowing.
    if (error.kind() == ErrorKind::kUsage) {
      return {RefusalCode::kFailedPrecondition, error.what()};
    }
  } catch (...) {
  }
  return refusal_of(failure, options_.on_error);
}

void Worker::deliver(std::vector<std::pair<Active, Generation>> finished) {
  if (finished.empty()) return;
  try {
    model_.model.check_unchanged();
    std::vector<JobResult> results = keep(finished);
    for (std::size_t i = 0; i < finished.size(); ++i) {
      finished[i].first.job->finish(std::move(results[i]));
    }
  } catch (...) {
    // The disk or the log, so no fault of a request's, and computing again would not help.
    const Refusal refusal = refusal_of(std::current_exception(), options_.on_error);
    for (const auto& [active, generation] : finished) active.job->refuse(refusal);
  }
}

// Stored before it is logged, logged before it is answered: the log never names a record that is
// nowhere, and no client hears of one that is not logged.
std::vector<JobResult> Worker::keep(const std::vector<std::pair<Active, Generation>>& finished) {
  std::vector<JobResult> results;
  std::vector<Bytes> entries;
  for (const auto& [active, generation] : finished) {
    Provenance provenance = run_provenance(backend_);
    provenance[provenance_key::kStarted] = active.started;
    provenance[provenance_key::kFinished] = provenance_time_now();
    Record record = make_record(model_, generation, active.job->evidence, std::move(provenance));
    if (options_.operator_key) record.sign(*options_.operator_key);
    Bytes bytes = record.serialize();
    const Claim& claim = record.claim;
    results.push_back({record.digest(), claim.digest(), claim.trace_root, claim.stop_reason,
                       claim.prompt_ids.size(), claim.emitted_ids.size(), bytes.size()});
    entries.push_back(log_entry_for_record(results.back().record_id));
    store_.put(results.back().record_id, std::move(bytes));
  }
  if (log_ != nullptr) {
    const std::vector<AppendResult> appended = log_->append(entries);
    for (std::size_t i = 0; i < appended.size(); ++i) {
      store_.put_receipt(results[i].record_id, appended[i].receipt);
    }
  }
  return results;
}

}  // namespace bitwitness
