#include "kernels/cpu/cpu_ceilings.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace bitwitness {
namespace {

volatile float g_sink;  // what is stored here has been computed

constexpr std::int64_t kSteps = 2000000;
constexpr double kChains = 12;  // enough to fill two units of latency 4 or 5

#define BW_TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

#if defined(__x86_64__)

__attribute__((target("avx2,fma"))) double multiply_adds_avx2() {
  const __m256 w = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
#define X(i) __m256 a##i = _mm256_set1_ps(1.0f + static_cast<float>(i));
  BW_TWELVE(X)
#undef X
  for (std::int64_t s = 0; s < kSteps; ++s) {
#define X(i) a##i = _mm256_fmadd_ps(a##i, w, b);
    BW_TWELVE(X)
#undef X
  }
  __m256 sum = _mm256_setzero_ps();
#define X(i) sum = _mm256_add_ps(sum, a##i);
  BW_TWELVE(X)
#undef X
  g_sink = _mm256_cvtss_f32(sum);
  return kChains * 8 * static_cast<double>(kSteps);
}

__attribute__((target("avx512f"))) double multiply_adds_avx512() {
  const __m512 w = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
#define X(i) __m512 a##i = _mm512_set1_ps(1.0f + static_cast<float>(i));
  BW_TWELVE(X)
#undef X
  for (std::int64_t s = 0; s < kSteps; ++s) {
#define X(i) a##i = _mm512_fmadd_ps(a##i, w, b);
    BW_TWELVE(X)
#undef X
  }
  __m512 sum = _mm512_setzero_ps();
#define X(i) sum = _mm512_add_ps(sum, a##i);
  BW_TWELVE(X)
#undef X
  g_sink = _mm512_cvtss_f32(sum);
  return kChains * 16 * static_cast<double>(kSteps);
}

__attribute__((target("avx2"))) void read_avx2(const std::byte* p, std::int64_t bytes) {
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

#elif defined(__aarch64__)

double multiply_adds_neon() {
  const float32x4_t w = vdupq_n_f32(0.999f), b = vdupq_n_f32(0.001f);
#define X(i) float32x4_t a##i = vdupq_n_f32(1.0f + static_cast<float>(i));
  BW_TWELVE(X)
#undef X
  for (std::int64_t s = 0; s < kSteps; ++s) {
#define X(i) a##i = vfmaq_f32(a##i, b, w);
    BW_TWELVE(X)
#undef X
  }
  float32x4_t sum = vdupq_n_f32(0.0f);
#define X(i) sum = vaddq_f32(sum, a##i);
  BW_TWELVE(X)
#undef X
  g_sink = vgetq_lane_f32(sum, 0);
  return kChains * 4 * static_cast<double>(kSteps);
}

#endif

double multiply_adds_scalar() {
  constexpr std::int64_t kScalarSteps = kSteps / 16;  // std::fma may be a function
#define X(i) float a##i = 1.0f + static_cast<float>(i);
  BW_TWELVE(X)
#undef X
  for (std::int64_t s = 0; s < kScalarSteps; ++s) {
#define X(i) a##i = std::fma(a##i, 0.999f, 0.001f);
    BW_TWELVE(X)
#undef X
  }
  float sum = 0.0f;
#define X(i) sum += a##i;
  BW_TWELVE(X)
#undef X
  g_sink = sum;
  return kChains * static_cast<double>(kScalarSteps);
}

#undef BW_TWELVE

void read_scalar(const std::byte* p, std::int64_t bytes) {
  std::uint64_t all = 0;
  for (std::int64_t i = 0; i + 8 <= bytes; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, p + i, sizeof word);
    all ^= word;
  }
  g_sink = static_cast<float>(all);
}

// Of a few calls.
template <class Body>
double best_seconds(const Body& body) {
  using Clock = std::chrono::steady_clock;
  double best = 1e30;
  for (int i = 0; i < 5; ++i) {
    const auto begin = Clock::now();
    body();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return best;
}

}  // namespace

double run_multiply_adds(ThreadPool& pool, std::string_view isa) {
  double (*run)() = multiply_adds_scalar;
#if defined(__x86_64__)
  if (isa == "avx2") run = multiply_adds_avx2;
  if (isa == "avx512") run = multiply_adds_avx512;
#elif defined(__aarch64__)
  if (isa == "neon") run = multiply_adds_neon;
#endif
  static_cast<void>(isa);
  std::vector<double> done(static_cast<std::size_t>(pool.threads()), 0.0);
  pool.parallel_for(pool.threads(), 1, [&](std::int64_t, std::int64_t, int thread) {
    done[static_cast<std::size_t>(thread)] = run();
  });
  double total = 0;
  for (const double count : done) total += count;
  return total;
}

void read_memory(ThreadPool& pool, std::span<const std::byte> memory) {
  constexpr std::int64_t kPage = 4096;
  void (*read)(const std::byte*, std::int64_t) = read_scalar;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) read = read_avx2;
#endif
  pool.parallel_for(static_cast<std::int64_t>(memory.size()) / kPage, 1,
                    [&](std::int64_t begin, std::int64_t end, int) {
                      read(memory.data() + begin * kPage, (end - begin) * kPage);
                    });
}

Ceilings cpu_ceilings(std::string_view isa, int threads) {
  constexpr std::size_t kMemory = std::size_t{512} << 20, kUsualCache = std::size_t{32} << 20;
  ThreadPool pool(threads, [](int) {});
  Ceilings out;
  double operations = 0;
  const double seconds = best_seconds([&] { operations = 2 * run_multiply_adds(pool, isa); });
  out.operations_per_second = operations / seconds;
  const std::vector<std::byte> memory(kMemory, std::byte{1});
  out.bytes_per_second =
      static_cast<double>(kMemory) / best_seconds([&] { read_memory(pool, memory); });
  long cache = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  out.cache_bytes = cache > 0 ? static_cast<std::size_t>(cache) : kUsualCache;
  return out;
}

}  // namespace bitwitness
