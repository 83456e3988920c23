// How far the CPU backends are from the machine: prefill products as a share of the measured FMA
// peak, decode products as a share of the measured memory read bandwidth. Everything is measured in
// one run, the machine's limits again beside each product, so that ratios hold on a machine that is
// not quiet.
//
//   bench_cpu [--threads N] [--repeat N] [--clock wall|cpu] [--format text|json]
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/bench/cpu_ceilings.h"
#include "tests/bench/cpu_options.h"

namespace bitwitness {
namespace {

using namespace bench;

struct Result {
  std::string isa;
  std::string dtype;
  std::string limit;  // "fma" or "read"
  std::int64_t M = 0, N = 0, K = 0;
  double seconds = 0;
  double rate = 0;  // multiply-adds or bytes per second
  double limit_rate = 0;
};

struct Shape {
  std::int64_t N, K;
};

int main_of(int argc, char** argv) {
  const std::optional<CpuOptions> options = read_cpu_options("bench_cpu", argc, argv, 5);
  if (!options) return 2;
  const int threads = options->threads, repeat = options->repeat;
  // One layer of a Llama-3-8B shape, and its weights: 436 MB of 16-bit ones.
  const Shape shapes[] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}};
  constexpr std::int64_t kPrefillRows = 512;
  ThreadPool pool(threads, [](int) {});
  std::vector<std::byte> weights(std::size_t{28672} * 4096 * 2);
  std::uint64_t state = 1;
  for (std::size_t i = 0; i < weights.size(); i += 2) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    // bf16 and fp16 values of magnitude below 2 alike: sign, low exponents, any fraction.
    const std::uint32_t h = static_cast<std::uint32_t>(state >> 40) & 0xbfffu;
    weights[i] = static_cast<std::byte>(h & 0xff);
    weights[i + 1] = static_cast<std::byte>(h >> 8);
  }
  // In bf16 those are mostly tiny; make them ordinary: exponent 2^-8 to 2^-1.
  for (std::size_t i = 1; i < weights.size(); i += 2) {
    const unsigned high = static_cast<unsigned>(weights[i]);
    weights[i] = static_cast<std::byte>((high & 0x83u) | 0x3cu);
  }
  std::vector<float> x(static_cast<std::size_t>(kPrefillRows * 14336));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 251) / 128.0f - 1.0f;
  std::vector<float> y(static_cast<std::size_t>(kPrefillRows * 28672));

  std::vector<Result> results;
  for (const std::string isa : {"avx2", "avx512"}) {
    if (!cpu_supports(isa)) continue;
    const std::unique_ptr<Backend> backend = make_cpu_backend(isa, threads);
    const auto measure = [&](Dtype dtype, std::int64_t M, const Shape& shape) {
      Result r;
      r.isa = isa;
      r.dtype = dtype_name(dtype);
      r.M = M;
      r.N = shape.N;
      r.K = shape.K;
      const Matrix W{dtype, shape.N, shape.K, weights.data()};
      const bool prefill = M >= 64;
      r.limit = prefill ? "fma" : "read";
      r.seconds = 1e30;
      for (int i = 0; i < repeat; ++i) {
        r.limit_rate = std::max(
            r.limit_rate, prefill ? fma_peak(pool, isa, 1) : read_bandwidth(pool, weights, 1));
        r.seconds = std::min(r.seconds,
                             best_seconds(1, [&] { backend->matmul(y.data(), x.data(), W, M); }));
      }
      const double work = static_cast<double>(shape.N * shape.K);
      r.rate = (prefill ? work * static_cast<double>(M)
                        : work * static_cast<double>(dtype_bytes(dtype))) /
               r.seconds;
      results.push_back(r);
    };
    for (const Shape& shape : shapes) measure(Dtype::kBf16, kPrefillRows, shape);
    measure(Dtype::kFp16, kPrefillRows, shapes[1]);
    for (const Shape& shape : shapes) measure(Dtype::kBf16, 1, shape);
    for (const std::int64_t M : {2, 4, 8}) measure(Dtype::kBf16, M, shapes[2]);
    measure(Dtype::kFp16, 1, shapes[2]);
    measure(Dtype::kFp32, 1, Shape{14336, 4096});
  }

  const char* const clock = g_processor_time ? "cpu" : "wall";
  const std::string device = make_backend("ref")->device();
  if (options->json) {
    std::printf("{\"device\": \"%s\", \"threads\": %d, \"clock\": \"%s\", \"results\": [",
                device.c_str(), threads, clock);
  } else {
    std::printf("%s, %d thread(s), best of %d, %s clock\n", device.c_str(), threads, repeat, clock);
    std::printf("%-7s %-5s %5s %6s %6s %10s %10s %10s %6s\n", "isa", "type", "M", "N", "K", "ms",
                "rate G/s", "limit G/s", "share");
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Result& r = results[i];
    const double share = r.rate / r.limit_rate;
    if (options->json) {
      std::printf(
          "%s\n  {\"isa\": \"%s\", \"dtype\": \"%s\", \"M\": %lld, \"N\": %lld, \"K\": %lld, "
          "\"seconds\": %.6g, \"limit\": \"%s\", \"rate\": %.6g, \"limit_rate\": %.6g, \"share\": "
          "%.4f}",
          i == 0 ? "" : ",", r.isa.c_str(), r.dtype.c_str(), static_cast<long long>(r.M),
          static_cast<long long>(r.N), static_cast<long long>(r.K), r.seconds, r.limit.c_str(),
          r.rate, r.limit_rate, share);
    } else {
      std::printf("%-7s %-5s %5lld %6lld %6lld %10.3f %10.2f %10.2f %6.3f  of %s\n", r.isa.c_str(),
                  r.dtype.c_str(), static_cast<long long>(r.M), static_cast<long long>(r.N),
                  static_cast<long long>(r.K), r.seconds * 1e3, r.rate * 1e-9, r.limit_rate * 1e-9,
                  share, r.limit == "fma" ? "the FMA peak" : "read bandwidth");
    }
  }
  if (options->json) std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace bitwitness

int main(int argc, char** argv) {
  return bitwitness::main_of(argc, argv);
}
