// bw-prover bench: what the kernels of a step and whole steps take here, beside what they could.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "attest/base/print_json.h"
#include "attest/base/program.h"
#include "attest/base/progress.h"
#include "kernels/ceilings.h"
#include "prover/bench.h"
#include "prover/bench_model.h"
#include "prover/commands.h"

namespace bitwitness {
namespace {

struct BenchFlags {
  std::string device = "auto";
  int threads = 0;
  std::optional<std::string> shape, model;
  BenchOptions options;
  std::string format = "text";
};

nlohmann::ordered_json json_of(const BenchRow& row, const Ceilings& ceilings) {
  const BenchFloor floor = floor_of(row, ceilings);
  nlohmann::ordered_json json;
  json["what"] = row.what;
  json["shape"] = row.shape;
  json["rows"] = row.rows;
  json["context"] = row.context;
  json["us"] = row.seconds * 1e6;
  json["floor_us"] = floor.seconds * 1e6;
  json["share"] = floor.seconds / row.seconds;
  json["bound"] = floor.bound;
  json["bytes"] = row.bytes;
  json["operations"] = row.operations;
  if (row.seconds_without_commitment > 0) {
    json["us_without_commitment"] = row.seconds_without_commitment * 1e6;
    json["commitment_ratio"] = row.seconds / row.seconds_without_commitment;
  }
  return json;
}

void print_row(const BenchRow& row, const Ceilings& ceilings) {
  const BenchFloor floor = floor_of(row, ceilings);
  std::printf("%-18s %-34s %5lld %7lld %12.1f %12.1f %6.1f %%  %-10s", row.what.c_str(),
              row.shape.c_str(), static_cast<long long>(row.rows),
              static_cast<long long>(row.context), row.seconds * 1e6, floor.seconds * 1e6,
              100 * floor.seconds / row.seconds, floor.bound);
  if (row.seconds_without_commitment > 0) {
    std::printf(" %+6.2f %%", 100 * (row.seconds / row.seconds_without_commitment - 1));
  }
  std::printf("\n");
  std::fflush(stdout);
}

int bench(const BenchFlags& flags) {
  if (flags.shape) bench_shape(*flags.shape);  // a wrong name is found before a device is
  std::optional<Model> model;
  if (flags.model) model.emplace(Model::load(*flags.model));
  const std::unique_ptr<Backend> backend = make_backend(flags.device, flags.threads);
  const std::string shape =
      flags.model ? *flags.model
                  : flags.shape.value_or(backend->name() == "cuda" ? "llama3-8b" : "small");
  const ModelConfig& config = model ? model->config() : bench_shape(shape);

  const bool json = flags.format == "json";
  const Ceilings ceilings = measure_ceilings(*backend, flags.threads);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool headed = false;
  {
    ProgressLine progress("measuring");
    run_bench(
        *backend, config, model ? &*model : nullptr, ceilings, flags.options,
        [&](const BenchRow& row) {
          if (json) {
            rows.push_back(json_of(row, ceilings));
            return;
          }
          if (!headed) {
            std::printf("%s: %s\nshape %s; %.4g TB/s, %.4g Tflop/s multiply-adds, cache %zu MiB\n",
                        backend->name().c_str(), backend->device().c_str(), shape.c_str(),
                        ceilings.bytes_per_second / 1e12, ceilings.operations_per_second / 1e12,
                        ceilings.cache_bytes >> 20);
            std::printf("%-18s %-34s %5s %7s %12s %12s %8s  %-10s %s\n", "what", "shape", "rows",
                        "context", "us", "floor us", "of floor", "bound", "commitment");
            headed = true;
          }
          print_row(row, ceilings);
        },
        progress.callback());
  }
  if (json) {
    nlohmann::ordered_json out;
    out["version"] = BITWITNESS_VERSION;
    out["arithmetic"] = contract::kArithmeticName;
    out["arithmetic_version"] = contract::kArithmeticVersion;
    out["backend"] = backend->name();
    out["device"] = backend->device();
    out["shape"] = shape;
    out["ceilings"] = {{"bytes_per_second", ceilings.bytes_per_second},
                       {"operations_per_second", ceilings.operations_per_second},
                       {"cache_bytes", ceilings.cache_bytes}};
    out["rows"] = std::move(rows);
    print_json(out);
  }
  return to_int(ExitCode::kOk);
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* command = app.add_subcommand(
      "bench", "Time kernels and whole steps here, against this machine's limits");
  command
      ->add_option("--device", flags->device, "auto, cpu, ref, avx2, avx512, neon, cuda or cuda:N")
      ->capture_default_str();
  command->add_option("--threads", flags->threads, "CPU threads (0: all)")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  std::string shapes;
  for (const BenchShape& shape : bench_shapes()) {
    shapes.append(shapes.empty() ? "" : ", ").append(shape.name);
  }
  auto* shape = command->add_option("--shape", flags->shape,
                                    "Shape of the model, with random weights: " + shapes +
                                        " (default: llama3-8b on a GPU, else small)");
  command->add_option("--model", flags->model, "Model directory to take instead")->excludes(shape);
  command
      ->add_option("--only", flags->options.only,
                   "What to measure (default: everything), by name or group:\n" + bench_names())
      ->delimiter(',');
  command
      ->add_option("--rows", flags->options.rows,
                   "Only these numbers of rows (of a step: sequences or prompt tokens)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
      ->delimiter(',');
  command->add_option("--repeat", flags->options.repeat, "Steps that each median is taken of")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->add_option("--format", flags->format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command->callback([flags, &exit_code] { exit_code = bench(*flags); });
}

}  // namespace bitwitness
