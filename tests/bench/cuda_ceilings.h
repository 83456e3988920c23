// What the device could do at most, measured; for bench_cuda.
#pragma once

#include <chrono>
#include <vector>

namespace bitwitness::bench {

// On the current device. Throw nothing: 0 if a CUDA call fails.
double copy_bytes_per_second();               // device to device, bytes read plus bytes written
double multiply_add_operations_per_second();  // binary32, two operations each

// Seconds per call, of several batches of calls; about a third of a second in all.
template <class Run, class Wait>
std::vector<double> time_batches(const Run& run, const Wait& wait) {
  using Clock = std::chrono::steady_clock;
  const auto seconds_of = [&](int calls) {
    const auto begin = Clock::now();
    for (int i = 0; i < calls; ++i) run(i);
    wait();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  const double once = seconds_of(4) / 4;
  int calls = static_cast<int>(0.03 / once);
  calls = calls < 1 ? 1 : calls > 1000 ? 1000 : calls;
  std::vector<double> times;
  for (int batch = 0; batch < 9; ++batch) times.push_back(seconds_of(calls) / calls);
  return times;
}

}  // namespace bitwitness::bench
