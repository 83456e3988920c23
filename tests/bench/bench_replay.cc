// What an auditor's work on one sampled layer costs on the CPU: replaying the whole layer and
// cells of it, from weights that the page cache holds, and hashing its weights. One layer of a
// Llama-3-8B shape (436 MB of bf16) is written to a temporary directory and mapped as a model's.
//
//   bench_replay [--threads N] [--repeat N] [--clock wall|cpu] [--format text|json]
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attest/manifest.h"
#include "kernels/cell.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/model/model.h"
#include "tests/bench/bench_model.h"
#include "tests/bench/cpu_ceilings.h"
#include "tests/bench/cpu_options.h"

namespace bitwitness {
namespace {

using namespace bench;

constexpr ModelShape kShape{.hidden = 4096,
                            .intermediate = 14336,
                            .layers = 1,
                            .heads = 32,
                            .kv_heads = 8,
                            .head_dim = 128,
                            .vocab = 256};
constexpr std::int64_t kPositions = 512;  // of the record: a cell at position 512 has 512 before it
constexpr std::int64_t kLayerBytes = 2 * kShape.layer_products();

struct Result {
  std::string isa;
  std::string name;
  std::int64_t rows = 0;
  double seconds = 1e30;
  double fma_rate = 0, fma_limit = 0;    // multiply-adds a second
  double read_rate = 0, read_limit = 0;  // bytes of weights a second
};

// The layer as a verifier replays it, with made-up committed rows.
class Layer {
 public:
  Layer(const Model& model, Backend& backend)
      : runner_(model.config(), backend, kPositions + 1),
        weights_(model.weights().layers[0]),
        hidden_(static_cast<std::size_t>(kPositions * kShape.hidden)),
        key_values_(
            static_cast<std::size_t>((kPositions + 1) * 2 * kShape.kv_heads * kShape.head_dim)) {
    for (std::size_t i = 0; i < hidden_.size(); ++i) {
      hidden_[i] = static_cast<float>(i * 6007 % 1019) / 512.0f - 1.0f;
    }
    for (std::size_t i = 0; i < key_values_.size(); ++i) {
      key_values_[i] = static_cast<float>(i * 7919 % 1021) / 512.0f - 1.0f;
    }
  }

  void replay(std::span<const std::int32_t> positions) {
    const std::span<const float> hidden(hidden_);
    runner_.run(weights_,
                {.positions = positions,
                 .hidden = hidden.first(positions.size() * static_cast<std::size_t>(kShape.hidden)),
                 .key_values = key_values_,
                 .prefix = kPositions + 1});
  }

 private:
  CellRunner runner_;
  const LayerWeights& weights_;
  std::vector<float> hidden_;
  std::vector<float> key_values_;
};

// `count` positions up to kPositions, spread as sampled cells are.
std::vector<std::int32_t> cell_positions(std::int64_t count) {
  std::vector<std::int32_t> positions;
  for (std::int64_t i = 1; i <= count; ++i) {
    positions.push_back(static_cast<std::int32_t>(i * kPositions / count));
  }
  return positions;
}

double multiply_adds(const std::vector<std::int32_t>& positions) {
  double sum = 0;
  for (const std::int32_t position : positions) {
    sum += static_cast<double>(kShape.layer_products() + kShape.layer_attention(position));
  }
  return sum;
}

void print(const std::vector<Result>& results, const CpuOptions& options, double memory_mb) {
  const std::string device = make_backend("ref")->device();
  const char* const clock = g_processor_time ? "cpu" : "wall";
  if (options.json) {
    std::printf(
        "{\"device\": \"%s\", \"threads\": %d, \"clock\": \"%s\", \"anonymous_mb\": %.1f, "
        "\"results\": [",
        device.c_str(), options.threads, clock, memory_mb);
  } else {
    std::printf("%s, %d thread(s), best of %d, %s clock; anonymous memory at most %.1f MB\n",
                device.c_str(), options.threads, options.repeat, clock, memory_mb);
    std::printf("%-7s %-28s %10s %18s %24s\n", "isa", "case", "ms", "G fma/s (share)",
                "weights GB/s (share)");
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Result& r = results[i];
    const double fma_share = r.fma_limit > 0 ? r.fma_rate / r.fma_limit : 0;
    const double read_share = r.read_limit > 0 ? r.read_rate / r.read_limit : 0;
    if (options.json) {
      std::printf(
          "%s\n  {\"isa\": \"%s\", \"case\": \"%s\", \"rows\": %lld, \"seconds\": %.6g, "
          "\"fma_rate\": %.6g, \"fma_share\": %.4f, \"read_rate\": %.6g, \"read_share\": %.4f}",
          i == 0 ? "" : ",", r.isa.c_str(), r.name.c_str(), static_cast<long long>(r.rows),
          r.seconds, r.fma_rate, fma_share, r.read_rate, read_share);
    } else {
      std::printf("%-7s %-28s %10.2f ", r.isa.c_str(), r.name.c_str(), r.seconds * 1e3);
      if (r.fma_limit > 0) {
        std::printf("%10.2f (%5.3f)", r.fma_rate * 1e-9, fma_share);
      } else {
        std::printf("%18s", "");
      }
      std::printf(" %16.2f (%5.3f)\n", r.read_rate * 1e-9, read_share);
    }
  }
  if (options.json) std::printf("\n]}\n");
}

int main_of(int argc, char** argv) {
  const std::optional<CpuOptions> options = read_cpu_options("bench_replay", argc, argv, 3);
  if (!options) return 2;
  const test::TempDir dir;
  write_model(dir.path(), kShape);
  const Model model = Model::load(dir.path());
  const Matrix& gate = model.weights().layers[0].gate;
  const std::span<const std::byte> memory{gate.data,
                                          static_cast<std::size_t>(gate.rows * gate.cols * 2)};
  ThreadPool pool(options->threads, [](int) {});
  std::vector<Result> results;
  double memory_mb = 0;

  for (const std::string isa : {"avx2", "avx512"}) {
    if (!cpu_supports(isa)) continue;
    const std::unique_ptr<Backend> backend = make_cpu_backend(isa, options->threads);
    Layer layer(model, *backend);
    // `cold`: the layer's pages are in the page cache, but not in the process.
    const auto measure = [&](const std::string& name, const std::vector<std::int32_t>& positions,
                             bool cold) {
      Result r;
      r.isa = isa;
      r.name = name;
      r.rows = static_cast<std::int64_t>(positions.size());
      for (int i = 0; i < options->repeat; ++i) {
        r.fma_limit = std::max(r.fma_limit, fma_peak(pool, isa, 1));
        r.read_limit = std::max(r.read_limit, read_bandwidth(pool, memory, 1));
        if (cold) {
          model.release_layer(0);
          const double start = seconds_now();
          layer.replay(positions);
          r.seconds = std::min(r.seconds, seconds_now() - start);
        } else {
          r.seconds = std::min(r.seconds, best_seconds(1, [&] { layer.replay(positions); }));
        }
      }
      r.fma_rate = multiply_adds(positions) / r.seconds;
      r.read_rate = static_cast<double>(kLayerBytes) / r.seconds;
      results.push_back(r);
      memory_mb = std::max(memory_mb, anonymous_megabytes());
    };
    std::vector<std::int32_t> all(kPositions);
    for (std::size_t t = 0; t < all.size(); ++t) all[t] = static_cast<std::int32_t>(t);
    measure("layer, positions 0..511", all, false);
    measure("cell at 512, first touch", cell_positions(1), true);
    measure("cell at 512", cell_positions(1), false);
    for (const std::int64_t cells : {2, 4, 8, 9, 16, 24, 32, 40}) {
      measure(std::to_string(cells) + " cells up to 512", cell_positions(cells), false);
    }
  }

  // The digests that bind the layer's weights to the manifest.
  std::vector<TensorDescription> tensors;
  for (const TensorDescription& tensor : model.describe().tensors) {
    if (tensor.name.starts_with("model.layers.0.")) tensors.push_back(tensor);
  }
  Result hashing;
  hashing.isa = "any";
  hashing.name = "hash of the layer's weights";
  for (int i = 0; i < options->repeat; ++i) {
    hashing.read_limit = std::max(hashing.read_limit, read_bandwidth(pool, memory, 1));
    hashing.seconds = std::min(hashing.seconds, best_seconds(1, [&] {
                                 tensor_roots(tensors, {}, static_cast<unsigned>(options->threads));
                               }));
  }
  hashing.read_rate = static_cast<double>(kLayerBytes) / hashing.seconds;
  results.push_back(hashing);
  print(results, *options, std::max(memory_mb, anonymous_megabytes()));
  return 0;
}

}  // namespace
}  // namespace bitwitness

int main(int argc, char** argv) {
  try {
    return bitwitness::main_of(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_replay: error: %s\n", error.what());
    return 3;
  }
}
