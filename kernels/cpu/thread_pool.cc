#include "kernels/cpu/thread_pool.h"

#include <algorithm>
#include <string>

#include "attest/base/error.h"

namespace bitwitness {
namespace {

// The pool whose loop the calling thread is in, and its number there.
thread_local const ThreadPool* tls_pool = nullptr;
thread_local int tls_thread = 0;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads, const std::function<void(int thread)>& on_start) {
  threads = std::max(threads, 1);
  const unsigned processors = std::thread::hardware_concurrency();
  // Spinning longer than a wake-up takes only helps when nobody else wants the processor.
  if (static_cast<unsigned>(threads) <= processors) spins_ = 2000;
  errors_.resize(static_cast<std::size_t>(threads));
  try {
    workers_.reserve(static_cast<std::size_t>(threads - 1));
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (const std::exception& e) {
    const std::size_t have = workers_.size() + 1;
    stop();
    throw infrastructure_error("cannot start thread " + std::to_string(have) + " of " +
                               std::to_string(threads) + ": " + e.what() + "; use fewer threads");
  }
  try {
    parallel_for(threads, 1, [&](std::int64_t, std::int64_t, int thread) { on_start(thread); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  stop();
}

void ThreadPool::stop() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    generation_.fetch_add(1, std::memory_order_release);
  }
  started_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void ThreadPool::run(Function function, const void* body, std::int64_t count, std::int64_t grain) {
  if (count <= 0) return;
  if (tls_pool == this) {
    function(body, 0, count, tls_thread);
    return;
  }
  const std::lock_guard<std::mutex> turn(turn_);
  const std::int64_t most = std::max<std::int64_t>(count / std::max<std::int64_t>(grain, 1), 1);
  function_ = function;
  body_ = body;
  count_ = count;
  parts_ = static_cast<int>(std::min<std::int64_t>(threads(), most));
  std::fill(errors_.begin(), errors_.end(), nullptr);
  if (parts_ == 1) {
    run_part(0);
  } else {
    pending_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    started_.notify_all();
    run_part(0);
    const auto done = [this] { return pending_.load(std::memory_order_acquire) == 0; };
    for (int i = 0; i < spins_ && !done(); ++i) relax();
    if (!done()) {
      std::unique_lock<std::mutex> lock(mutex_);
      finished_.wait(lock, done);
    }
  }
  for (const std::exception_ptr& error : errors_) {
    if (error != nullptr) std::rethrow_exception(error);
  }
}

void ThreadPool::run_part(int part) noexcept {
  const ThreadPool* const outer_pool = tls_pool;
  const int outer_thread = tls_thread;
  tls_pool = this;
  tls_thread = part;
  try {
    const std::int64_t share = count_ / parts_, rest = count_ % parts_;
    const std::int64_t begin = part * share + std::min<std::int64_t>(part, rest);
    function_(body_, begin, begin + share + (part < rest ? 1 : 0), part);
  } catch (...) {
    errors_[static_cast<std::size_t>(part)] = std::current_exception();
  }
  tls_pool = outer_pool;
  tls_thread = outer_thread;
}

void ThreadPool::work(int thread) {
  std::uint64_t seen = 0;
  for (;;) {
    const auto ready = [&] { return generation_.load(std::memory_order_acquire) != seen; };
    for (int i = 0; i < spins_ && !ready(); ++i) relax();
    if (!ready()) {
      std::unique_lock<std::mutex> lock(mutex_);
      started_.wait(lock, ready);
    }
    ++seen;
    if (stopping_) return;
    if (thread < parts_) run_part(thread);
    if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      const std::lock_guard<std::mutex> lock(mutex_);
      finished_.notify_one();
    }
  }
}

}  // namespace bitwitness
