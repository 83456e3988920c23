// The limits of this machine's processor, measured by the clock of the CPU benchmarks:
// multiply-adds a second and bytes read a second.
#pragma once

#include <algorithm>
#include <cstddef>
#include <ctime>
#include <span>
#include <string_view>

#include "kernels/cpu/cpu_ceilings.h"
#include "kernels/cpu/thread_pool.h"

namespace bitwitness::bench {

// What times are taken from: the wall, or (on a machine that others use, too) the processor time of
// this process divided by its threads, which does not see load that is badly shared out.
inline bool g_processor_time = false;
inline int g_threads = 1;

inline double seconds_now() {
  timespec now{};
  clock_gettime(g_processor_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  const double seconds = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  return g_processor_time ? seconds / g_threads : seconds;
}

// Best time of a call over `repeat` batches of at least 50 ms: what the clock of processor time
// misses of a running thread (a tick) is then small.
template <class Body>
double best_seconds(int repeat, const Body& body) {
  double best = 1e30;
  int calls = 1;
  for (int i = 0; i < repeat;) {
    const double start = seconds_now();
    for (int call = 0; call < calls; ++call) body();
    const double seconds = seconds_now() - start;
    if (seconds < 0.05 && calls < 1024) {
      calls *= 2;
      continue;
    }
    best = std::min(best, seconds / calls);
    ++i;
  }
  return best;
}

// Multiply-adds per second of all threads.
inline double fma_peak(ThreadPool& pool, std::string_view isa, int repeat) {
  double done = 0;
  const double seconds = best_seconds(repeat, [&] { done = run_multiply_adds(pool, isa); });
  return done / seconds;
}

// Bytes per second that all threads read from memory far larger than the caches.
inline double read_bandwidth(ThreadPool& pool, std::span<const std::byte> memory, int repeat) {
  const double seconds = best_seconds(repeat, [&] { read_memory(pool, memory); });
  return static_cast<double>(memory.size()) / seconds;
}

}  // namespace bitwitness::bench
