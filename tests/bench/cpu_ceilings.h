// The limits of this machine's processor, measured: multiply-adds a second and bytes read a second.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <span>
#include <string_view>
#include <vector>

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

inline volatile float g_sink;

// ---- The machine's limits ----

constexpr std::int64_t kPeakSteps = 2000000;

#define BW_TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

// 12 independent chains of multiply-adds; returns how many were done.
__attribute__((target("avx2,fma"))) inline double fma_peak_avx2() {
  const __m256 w = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
#define X(i) __m256 a##i = _mm256_set1_ps(1.0f + static_cast<float>(i));
  BW_TWELVE(X)
#undef X
  for (std::int64_t s = 0; s < kPeakSteps; ++s) {
#define X(i) a##i = _mm256_fmadd_ps(a##i, w, b);
    BW_TWELVE(X)
#undef X
  }
  __m256 sum = _mm256_setzero_ps();
#define X(i) sum = _mm256_add_ps(sum, a##i);
  BW_TWELVE(X)
#undef X
  g_sink = _mm256_cvtss_f32(sum);
  return 12.0 * 8.0 * static_cast<double>(kPeakSteps);
}

__attribute__((target("avx512f"))) inline double fma_peak_avx512() {
  const __m512 w = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
#define X(i) __m512 a##i = _mm512_set1_ps(1.0f + static_cast<float>(i));
  BW_TWELVE(X)
#undef X
  for (std::int64_t s = 0; s < kPeakSteps; ++s) {
#define X(i) a##i = _mm512_fmadd_ps(a##i, w, b);
    BW_TWELVE(X)
#undef X
  }
  __m512 sum = _mm512_setzero_ps();
#define X(i) sum = _mm512_add_ps(sum, a##i);
  BW_TWELVE(X)
#undef X
  g_sink = _mm512_cvtss_f32(sum);
  return 12.0 * 16.0 * static_cast<double>(kPeakSteps);
}

// Multiply-adds per second of all threads.
inline double fma_peak(ThreadPool& pool, std::string_view isa, int repeat) {
  std::vector<double> done(static_cast<std::size_t>(pool.threads()));
  const double seconds = best_seconds(repeat, [&] {
    pool.parallel_for(pool.threads(), 1, [&](std::int64_t, std::int64_t, int thread) {
      done[static_cast<std::size_t>(thread)] =
          isa == "avx512" ? fma_peak_avx512() : fma_peak_avx2();
    });
  });
  double total = 0;
  for (const double d : done) total += d;
  return total / seconds;
}

__attribute__((target("avx2"))) inline void read_all(const std::byte* p, std::int64_t bytes) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (std::int64_t i = 0; i + 128 <= bytes; i += 128) {
    const auto* v = reinterpret_cast<const __m256i_u*>(p + i);
    a = _mm256_xor_si256(a, _mm256_loadu_si256(v));
    b = _mm256_xor_si256(b, _mm256_loadu_si256(v + 1));
    c = _mm256_xor_si256(c, _mm256_loadu_si256(v + 2));
    d = _mm256_xor_si256(d, _mm256_loadu_si256(v + 3));
  }
  const __m256i all = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
  g_sink = static_cast<float>(_mm256_extract_epi32(all, 0));
}

// Bytes per second that all threads read from memory far larger than the caches.
inline double read_bandwidth(ThreadPool& pool, std::span<const std::byte> memory, int repeat) {
  const std::int64_t lines = static_cast<std::int64_t>(memory.size()) / 4096;
  const double seconds = best_seconds(repeat, [&] {
    pool.parallel_for(lines, 1, [&](std::int64_t begin, std::int64_t end, int) {
      read_all(memory.data() + begin * 4096, (end - begin) * 4096);
    });
  });
  return static_cast<double>(lines * 4096) / seconds;
}

#undef BW_TWELVE

}  // namespace bitwitness::bench
