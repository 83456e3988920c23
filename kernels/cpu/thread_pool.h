// A fixed set of threads that run one parallel loop at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace bitwitness {

class ThreadPool {
 public:
  // `threads` >= 1 counts the calling thread, so threads - 1 are started. `on_start(i)` runs on
  // every thread (0: the calling one) before the constructor returns; the first exception in the
  // order of i is thrown, with all threads joined. Workers inherit the floating-point environment
  // of their creator.
  ThreadPool(int threads, const std::function<void(int thread)>& on_start);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end, thread) on consecutive ranges that cover [0, count), at most one per
  // thread and none shorter than `grain` (but the only one), and waits for all. The cut depends on
  // the arguments and threads() alone. The first exception in the order of the ranges is thrown;
  // the other ranges still finish. Loops from several threads take turns; a loop inside a body runs
  // on its thread alone.
  template <class Body>
  void parallel_for(std::int64_t count, std::int64_t grain, const Body& body) {
    run([](const void* b, std::int64_t begin, std::int64_t end,
           int thread) { (*static_cast<const Body*>(b))(begin, end, thread); },
        &body, count, grain);
  }

 private:
  using Function = void (*)(const void* body, std::int64_t begin, std::int64_t end, int thread);

  void run(Function function, const void* body, std::int64_t count, std::int64_t grain);
  void run_part(int part) noexcept;
  void work(int thread);
  void stop() noexcept;

  int spins_ = 0;  // looks at a flag before sleeping
  std::mutex turn_;

  std::mutex mutex_;
  std::condition_variable started_, finished_;
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<int> pending_{0};  // workers that have not finished the generation
  bool stopping_ = false;        // written before a generation, read after

  // The loop of the current generation.
  Function function_ = nullptr;
  const void* body_ = nullptr;
  std::int64_t count_ = 0;
  int parts_ = 0;
  std::vector<std::exception_ptr> errors_;

  std::vector<std::thread> workers_;
};

}  // namespace bitwitness
