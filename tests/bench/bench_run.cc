// A whole run on the CPU: prefill as a share of the measured FMA peak, decode as a share of the
// measured read bandwidth, commitment on against off, anonymous memory. A random model of a Llama
// shape is written to a temporary directory first (bf16, about 0.9 GB).
//
//   bench_run [--threads N] [--repeat N] [--clock wall|cpu] [--format text|json]
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/engine.h"
#include "kernels/model/model.h"
#include "tests/bench/bench_model.h"
#include "tests/bench/cpu_ceilings.h"
#include "tests/bench/cpu_options.h"

namespace bitwitness {
namespace {

using namespace bench;

constexpr ModelShape kShape{.hidden = 2048,
                            .intermediate = 7168,
                            .layers = 6,
                            .heads = 16,
                            .kv_heads = 4,
                            .head_dim = 128,
                            .vocab = 32768};
constexpr std::int64_t kPrompt = 512, kDecoded = 24;

struct Run {
  double prefill_s = 1e30;
  double decode_s = 1e30;  // a token
  double anonymous_mb = 0;
};

Run run_once(const Model& model, const PlacedWeights& weights, Backend& backend, bool commit) {
  Engine engine(model.config(), weights, backend, {.slots = 1, .capacity = kPrompt + kDecoded});
  StepObserver observer;
  if (commit) observer.on_leaves = [](LeafType, std::uint32_t, const RowMap&, const Digest*) {};
  std::vector<StepRow> prompt(static_cast<std::size_t>(kPrompt));
  for (std::size_t t = 0; t < prompt.size(); ++t) {
    prompt[t].position = static_cast<std::int32_t>(t);
    prompt[t].token = static_cast<std::int32_t>(t * 7919 % kShape.vocab);
    prompt[t].emit = t + 1 == prompt.size();
  }
  Run run;
  double start = seconds_now();
  std::int32_t token = engine.step(prompt, observer).front();
  run.prefill_s = seconds_now() - start;
  start = seconds_now();
  for (std::int64_t i = 0; i < kDecoded; ++i) {
    StepRow row;
    row.position = static_cast<std::int32_t>(kPrompt + i);
    row.token = token;
    row.emit = true;
    token = engine.step({&row, 1}, observer).front();
  }
  run.decode_s = (seconds_now() - start) / static_cast<double>(kDecoded);
  run.anonymous_mb = anonymous_megabytes();
  return run;
}

int main_of(int argc, char** argv) {
  const std::optional<CpuOptions> options = read_cpu_options("bench_run", argc, argv, 3);
  if (!options) return 2;
  const int threads = options->threads, repeat = options->repeat;
  const test::TempDir dir;
  write_model(dir.path(), kShape);
  const Model model = Model::load(dir.path());
  const std::string isa = cpu_supports("avx512") ? "avx512" : "avx2";
  const std::unique_ptr<Backend> backend = make_cpu_backend(isa, threads);

  const PlacedWeights weights(model.weights(), *backend);
  Run off, on;
  for (int i = 0; i < repeat; ++i) {  // alternately, so that drift meets both
    const Run a = run_once(model, weights, *backend, false),
              b = run_once(model, weights, *backend, true);
    off.prefill_s = std::min(off.prefill_s, a.prefill_s);
    off.decode_s = std::min(off.decode_s, a.decode_s);
    on.prefill_s = std::min(on.prefill_s, b.prefill_s);
    on.decode_s = std::min(on.decode_s, b.decode_s);
    on.anonymous_mb = std::max(on.anonymous_mb, b.anonymous_mb);
  }
  ThreadPool pool(threads, [](int) {});
  const double peak = fma_peak(pool, isa, repeat);
  const std::vector<std::byte> memory(std::size_t{512} << 20, std::byte{1});
  const double bandwidth = read_bandwidth(pool, memory, repeat);

  const double layer_weights = static_cast<double>(kShape.layer_products());
  double attention = 0;
  for (std::int64_t t = 0; t < kPrompt; ++t) {
    attention += static_cast<double>(kShape.layer_attention(t));
  }
  const double layers = static_cast<double>(kShape.layers);
  const double head = static_cast<double>(kShape.vocab * kShape.hidden);
  const double prefill_fma = layers * (layer_weights * kPrompt + attention) + head;
  const double decode_bytes = 2 * (layers * layer_weights + head);
  const double prefill_share = prefill_fma / on.prefill_s / peak;
  const double decode_share = decode_bytes / on.decode_s / bandwidth;
  const double kv_mb =
      2.0 * layers * static_cast<double>(kShape.kv_heads * kShape.head_dim * (kPrompt + kDecoded)) *
      4 / 1e6;
  if (options->json) {
    std::printf(
        "{\"isa\": \"%s\", \"threads\": %d, \"fma_peak_per_s\": %.4g, \"read_bytes_per_s\": %.4g, "
        "\"prefill_s\": %.4f, \"prefill_share\": %.3f, \"decode_s\": %.5f, \"decode_share\": %.3f, "
        "\"commit_prefill_ratio\": %.3f, \"commit_decode_ratio\": %.3f, \"anonymous_mb\": %.1f, "
        "\"kv_mb\": %.1f}\n",
        isa.c_str(), threads, peak, bandwidth, on.prefill_s, prefill_share, on.decode_s,
        decode_share, on.prefill_s / off.prefill_s, on.decode_s / off.decode_s, on.anonymous_mb,
        kv_mb);
    return 0;
  }
  std::printf("%s, %d threads; FMA peak %.1f G/s, read bandwidth %.1f GB/s\n", isa.c_str(), threads,
              peak / 1e9, bandwidth / 1e9);
  std::printf("prefill of %lld tokens   %7.3f s        %5.2f of FMA peak\n",
              static_cast<long long>(kPrompt), on.prefill_s, prefill_share);
  std::printf("decode, a token         %7.2f ms       %5.2f of read bandwidth\n", on.decode_s * 1e3,
              decode_share);
  std::printf("commitment on : off     %7.3f prefill, %5.3f decode\n", on.prefill_s / off.prefill_s,
              on.decode_s / off.decode_s);
  std::printf("anonymous memory        %7.1f MB, of which KV cache %.1f MB\n", on.anonymous_mb,
              kv_mb);
  return 0;
}

}  // namespace
}  // namespace bitwitness

int main(int argc, char** argv) {
  try {
    return bitwitness::main_of(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_run: error: %s\n", error.what());
    return 3;
  }
}
