// A whole run on the CPU: prefill as a share of the measured FMA peak, decode as a share of the
// measured read bandwidth, commitment on against off, anonymous memory. A random model of a Llama
// shape is written to a temporary directory first (bf16, about 0.9 GB).
//
//   bench_run [--threads N] [--repeat N] [--clock wall|cpu] [--format text|json]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/engine.h"
#include "kernels/model/model.h"
#include "tests/bench/cpu_ceilings.h"
#include "tests/kernels/model/safetensors_writer.h"

namespace bitwitness {
namespace {

using namespace bench;

constexpr std::int64_t kHidden = 2048, kIntermediate = 7168, kLayers = 6, kHeads = 16, kKvHeads = 4;
constexpr std::int64_t kHeadDim = 128, kVocab = 32768;
constexpr std::int64_t kPrompt = 512, kDecoded = 24;

// Writes tensor by tensor, so that the generator needs no memory to speak of.
void write_model(const std::filesystem::path& dir) {
  test::write_file(
      dir / "config.json",
      "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_act\": "
      "\"silu\", "
      "\"hidden_size\": " +
          std::to_string(kHidden) + ", \"intermediate_size\": " + std::to_string(kIntermediate) +
          ", \"num_hidden_layers\": " + std::to_string(kLayers) + ", \"num_attention_heads\": " +
          std::to_string(kHeads) + ", \"num_key_value_heads\": " + std::to_string(kKvHeads) +
          ", \"head_dim\": " + std::to_string(kHeadDim) +
          ", \"vocab_size\": " + std::to_string(kVocab) +
          ", \"max_position_embeddings\": 4096, \"rms_norm_eps\": 1e-5, \"rope_theta\": 500000.0, "
          "\"tie_word_embeddings\": false, \"attention_bias\": false, \"mlp_bias\": false}");
  struct Tensor {
    std::string name;
    std::int64_t rows, cols;  // cols 0: a vector
  };
  std::vector<Tensor> tensors{{"lm_head.weight", kVocab, kHidden},
                              {"model.embed_tokens.weight", kVocab, kHidden},
                              {"model.norm.weight", kHidden, 0}};
  for (std::int64_t l = 0; l < kLayers; ++l) {
    const std::string p = "model.layers." + std::to_string(l) + ".";
    tensors.insert(tensors.end(), {{p + "input_layernorm.weight", kHidden, 0},
                                   {p + "post_attention_layernorm.weight", kHidden, 0},
                                   {p + "self_attn.q_proj.weight", kHeads * kHeadDim, kHidden},
                                   {p + "self_attn.k_proj.weight", kKvHeads * kHeadDim, kHidden},
                                   {p + "self_attn.v_proj.weight", kKvHeads * kHeadDim, kHidden},
                                   {p + "self_attn.o_proj.weight", kHidden, kHeads * kHeadDim},
                                   {p + "mlp.gate_proj.weight", kIntermediate, kHidden},
                                   {p + "mlp.up_proj.weight", kIntermediate, kHidden},
                                   {p + "mlp.down_proj.weight", kHidden, kIntermediate}});
  }
  std::string header = "{";
  std::int64_t at = 0;
  for (const Tensor& tensor : tensors) {
    const std::int64_t bytes = 2 * tensor.rows * std::max<std::int64_t>(tensor.cols, 1);
    header +=
        (at == 0 ? "\"" : ", \"") + tensor.name + "\": {\"dtype\": \"BF16\", \"shape\": [" +
        std::to_string(tensor.rows) + (tensor.cols == 0 ? "" : ", " + std::to_string(tensor.cols)) +
        "], \"data_offsets\": [" + std::to_string(at) + ", " + std::to_string(at + bytes) + "]}";
    at += bytes;
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  std::ofstream out(dir / "model.safetensors", std::ios::binary);
  const std::uint64_t length = header.size();
  out.write(reinterpret_cast<const char*>(&length), 8);
  out.write(header.data(), static_cast<std::streamsize>(header.size()));
  std::mt19937 random(1);
  for (const Tensor& tensor : tensors) {
    std::vector<std::uint16_t> row(
        static_cast<std::size_t>(std::max<std::int64_t>(tensor.cols, 1)));
    for (std::int64_t r = 0; r < tensor.rows; ++r) {
      for (std::uint16_t& value : row) {
        const float unit = static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f;
        value = contract::f32_to_bf16(tensor.cols == 0 ? 1.0f : 0.03f * unit);
      }
      out.write(reinterpret_cast<const char*>(row.data()),
                static_cast<std::streamsize>(row.size() * 2));
    }
  }
  if (!out.flush()) throw infrastructure_error("cannot write the model: " + dir.string());
}

double anonymous_megabytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("Anonymous:")) return std::atof(line.c_str() + 10) * 1024 / 1e6;
  }
  return 0;
}

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
    prompt[t].token = static_cast<std::int32_t>(t * 7919 % kVocab);
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
  int threads = static_cast<int>(std::thread::hardware_concurrency()), repeat = 3;
  bool json = false;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--threads" && std::atoi(value.c_str()) > 0) {
      threads = std::atoi(value.c_str());
    } else if (flag == "--repeat" && std::atoi(value.c_str()) > 0) {
      repeat = std::atoi(value.c_str());
    } else if (flag == "--clock" && (value == "wall" || value == "cpu")) {
      g_processor_time = value == "cpu";
    } else if (flag == "--format" && (value == "text" || value == "json")) {
      json = value == "json";
    } else {
      std::fprintf(stderr,
                   "usage: bench_run [--threads N] [--repeat N] [--clock wall|cpu] [--format "
                   "text|json]\n");
      return 2;
    }
  }
  g_threads = threads;
  const test::TempDir dir;
  write_model(dir.path());
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

  const double layer_weights = static_cast<double>(
      kHidden * (2 * kHeads * kHeadDim + 2 * kKvHeads * kHeadDim + 3 * kIntermediate));
  const double attention = static_cast<double>(kHeads * kHeadDim * kPrompt * (kPrompt + 1));
  const double head = static_cast<double>(kVocab * kHidden);
  const double prefill_fma = kLayers * (layer_weights * kPrompt + attention) + head;
  const double decode_bytes = 2 * (kLayers * layer_weights + head);
  const double prefill_share = prefill_fma / on.prefill_s / peak;
  const double decode_share = decode_bytes / on.decode_s / bandwidth;
  const double kv_mb = 2.0 * kLayers * kKvHeads * kHeadDim * (kPrompt + kDecoded) * 4 / 1e6;
  if (json) {
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
