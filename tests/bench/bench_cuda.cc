// Matrix products and attention of the CUDA backend at the shapes of Llama-3-8B, against ceilings
// measured in the same run: the bandwidth of a device-to-device copy (bytes read plus written) and
// the rate of independent multiply-adds. Weights rotate through more memory than the caches hold.
//
//   bench_cuda [--device N] [--format text|json]
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/bench/cuda_ceilings.h"

namespace bitwitness {
namespace {

double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Median seconds of run(i), waiting once per batch of calls so that launches overlap as they do in
// a model.
double time_of(Backend& backend, const std::function<void(int)>& run) {
  for (int i = 0; i < 3; ++i) run(i);
  backend.synchronize();
  return median(bench::time_batches([&](int i) { run(i); }, [&] { backend.synchronize(); }));
}

struct Row {
  std::string what;
  std::int64_t M = 0;
  double seconds = 0, bytes = 0, operations = 0;
};

struct Shape {
  const char* name;
  std::int64_t N, K;
};
constexpr Shape kShapes[] = {{"qkv", 6144, 4096},
                             {"o", 4096, 4096},
                             {"gate+up", 28672, 4096},
                             {"down", 4096, 14336},
                             {"head", 128256, 4096}};

// Random bits of moderate exponent: zeros or denormals would not be the real load.
std::vector<std::uint32_t> random_words(std::size_t count, std::uint32_t mask,
                                        std::uint32_t exponent) {
  std::vector<std::uint32_t> words(count);
  std::uint64_t state = 1;
  for (std::uint32_t& word : words) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    word = (static_cast<std::uint32_t>(state >> 32) & mask) | exponent;
  }
  return words;
}

// A buffer of `bytes` random bytes made of one chunk, copied on and on.
Buffer random_buffer(Backend& backend, std::size_t bytes, std::uint32_t mask,
                     std::uint32_t exponent) {
  Buffer buffer = backend.allocate(bytes);
  const std::vector<std::uint32_t> words = random_words(std::size_t{1} << 20, mask, exponent);
  for (std::size_t at = 0; at < bytes; at += words.size() * 4) {
    backend.to_device(buffer.as<std::byte>() + at, words.data(),
                      std::min(words.size() * 4, bytes - at));
  }
  return buffer;
}

std::vector<Row> run(Backend& backend) {
  std::vector<Row> rows;
  constexpr std::int64_t kMostRows = 2048;
  // bf16 pairs and binary32 of exponents 2^-8 to 2^-1.
  const Buffer x = random_buffer(backend, kMostRows * 14336 * 4, 0x83ffffffu, 0x3c000000u);
  for (const Shape& shape : kShapes) {
    const std::size_t bytes = static_cast<std::size_t>(shape.N * shape.K) * 2;
    const std::size_t copies = std::max<std::size_t>(2, (std::size_t{512} << 20) / bytes);
    const Buffer w = random_buffer(backend, copies * bytes, 0x83ff83ffu, 0x3c003c00u);
    for (const std::int64_t M : {1, 2, 4, 8, 16, 32, 64, 256, 2048}) {
      if (shape.N > 100000 && M > 64) continue;  // the head runs on emitted positions only
      const Buffer y = backend.allocate(static_cast<std::size_t>(M * shape.N) * 4);
      const double seconds = time_of(backend, [&](int i) {
        const std::size_t copy = static_cast<std::size_t>(i) % copies;
        backend.matmul(y.as<float>(), x.as<float>(),
                       {Dtype::kBf16, shape.N, shape.K, w.as<std::byte>() + copy * bytes}, M);
      });
      rows.push_back(
          {std::string("matmul ") + shape.name + " " + std::to_string(shape.N) + "x" +
               std::to_string(shape.K),
           M, seconds,
           static_cast<double>(bytes) + 4.0 * static_cast<double>(M * (shape.N + shape.K)),
           2.0 * static_cast<double>(M * shape.N * shape.K)});
    }
  }

  // Attention of 32 heads of 128 over 8 key-value heads; the context ends at the last row.
  constexpr std::int64_t kHeads = 32, kKvHeads = 8, kHeadDim = 128, kContext = 8192;
  constexpr std::int64_t kWidth = kKvHeads * kHeadDim;
  const Buffer keys = random_buffer(backend, kContext * kWidth * 4, 0x83ffffffu, 0x3c000000u);
  const Buffer cached = random_buffer(backend, kContext * kWidth * 4, 0x83ffffffu, 0x3c000000u);
  struct Step {
    std::int64_t M, context;
  };
  for (const Step step :
       {Step{1, 128}, Step{1, 2048}, Step{1, 8192}, Step{8, 2048}, Step{2048, 2048}}) {
    std::vector<std::int32_t> slot(static_cast<std::size_t>(step.M), 0), position;
    double reads = 0;
    for (std::int64_t m = 0; m < step.M; ++m) {
      position.push_back(static_cast<std::int32_t>(step.context - step.M + m));
      reads += static_cast<double>(position.back() + 1);
    }
    const std::size_t bytes = position.size() * 4;
    const Buffer device_slot = backend.allocate(bytes), device_position = backend.allocate(bytes);
    backend.to_device(device_slot.as<void>(), slot.data(), bytes);
    backend.to_device(device_position.as<void>(), position.data(), bytes);
    const RowMap map{step.M, device_slot.as<std::int32_t>(), device_position.as<std::int32_t>(),
                     slot.data(), position.data()};
    const Buffer out = backend.allocate(static_cast<std::size_t>(step.M * kHeads * kHeadDim) * 4);
    const double seconds = time_of(backend, [&](int) {
      backend.attention(out.as<float>(), x.as<float>(),
                        {keys.as<float>(), cached.as<float>(), kContext, kWidth}, kHeads, kKvHeads,
                        kHeadDim, map);
    });
    // The cache is read once at least; multiply-adds of scores and values.
    rows.push_back({"attention 32/8x128, context " + std::to_string(step.context), step.M, seconds,
                    static_cast<double>(step.context * kWidth) * 8,
                    4.0 * reads * static_cast<double>(kHeads * kHeadDim)});
  }
  return rows;
}

}  // namespace
}  // namespace bitwitness

int main(int argc, char** argv) {
  using namespace bitwitness;
  int ordinal = 0;
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--device" && !value.empty() &&
        value.find_first_not_of("0123456789") == std::string::npos) {
      ordinal = std::atoi(argv[++i]);
    } else if (flag == "--format" && (value == "text" || value == "json")) {
      json = argv[++i] == std::string("json");
    } else {
      std::fprintf(stderr,
                   "bench_cuda: '%s' is not understood; usage: bench_cuda [--device N] [--format "
                   "text|json]\n",
                   flag.c_str());
      return static_cast<int>(ExitCode::kUsage);
    }
  }
  try {
    const std::unique_ptr<Backend> backend = make_cuda_backend(ordinal);
    const double copy = bench::copy_bytes_per_second();
    const double peak = bench::multiply_add_operations_per_second();
    const auto rows = run(*backend);
    if (json) {
      std::printf(
          "{\"device\": \"%s\", \"copy_bytes_per_second\": %.4g, \"ffma_flops\": %.4g, \"rows\": [",
          backend->device().c_str(), copy, peak);
    } else {
      std::printf("%s\ncopy %.2f TB/s, FFMA %.1f TFLOP/s\n%-40s %5s %10s %8s %7s %9s %7s\n",
                  backend->device().c_str(), copy / 1e12, peak / 1e12, "operator", "M", "us",
                  "TB/s", "of copy", "TFLOP/s", "of FFMA");
    }
    const char* separator = "";
    for (const auto& r : rows) {
      const double rate = r.bytes / r.seconds, flops = r.operations / r.seconds;
      if (json) {
        std::printf(
            "%s\n  {\"operator\": \"%s\", \"M\": %lld, \"us\": %.2f, \"bytes_per_second\": %.4g, "
            "\"share_of_copy\": %.3f, \"flops\": %.4g, \"share_of_ffma\": %.3f}",
            separator, r.what.c_str(), static_cast<long long>(r.M), r.seconds * 1e6, rate,
            rate / copy, flops, flops / peak);
        separator = ",";
      } else {
        std::printf("%-40s %5lld %10.1f %8.2f %6.0f%% %9.1f %6.0f%%\n", r.what.c_str(),
                    static_cast<long long>(r.M), r.seconds * 1e6, rate / 1e12, 100 * rate / copy,
                    flops / 1e12, 100 * flops / peak);
      }
    }
    if (json) std::printf("\n]}\n");
    return 0;
  } catch (const Error& e) {
    std::fprintf(stderr, "bench_cuda: %s\n", e.what());
    return static_cast<int>(exit_code(e.kind()));
  }
}
