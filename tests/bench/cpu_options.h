// The flags that the CPU benchmarks share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <thread>

#include "tests/bench/cpu_ceilings.h"

namespace bitwitness::bench {

struct CpuOptions {
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  int repeat = 3;
  bool json = false;
};

// Reads [--threads N] [--repeat N] [--clock wall|cpu] [--format text|json] and sets the clock of
// cpu_ceilings.h; prints how to call `program` and gives nothing when the line is wrong.
inline std::optional<CpuOptions> read_cpu_options(const char* program, int argc, char** argv,
                                                  int default_repeat) {
  CpuOptions options;
  options.repeat = default_repeat;
  bool good = argc % 2 == 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view flag = argv[i], value = argv[i + 1];
    if (flag == "--threads") {
      options.threads = std::atoi(argv[i + 1]);
    } else if (flag == "--repeat") {
      options.repeat = std::atoi(argv[i + 1]);
    } else if (flag == "--clock" && (value == "wall" || value == "cpu")) {
      g_processor_time = value == "cpu";
    } else if (flag == "--format" && (value == "text" || value == "json")) {
      options.json = value == "json";
    } else {
      good = false;
    }
  }
  if (!good || options.threads < 1 || options.repeat < 1) {
    std::fprintf(stderr,
                 "usage: %s [--threads N] [--repeat N] [--clock wall|cpu] [--format text|json]\n",
                 program);
    return std::nullopt;
  }
  g_threads = options.threads;
  return options;
}

}  // namespace bitwitness::bench
