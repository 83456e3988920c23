#include "kernels/ceilings.h"

#include <algorithm>
#include <string>
#include <thread>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/cpu_ceilings.h"
#include "kernels/cuda/cuda_backend.h"

namespace bitwitness {

Ceilings measure_ceilings(Backend& backend, int threads) {
  const std::string name = backend.name();
  if (name == "cuda") {
    backend.synchronize();  // makes its device the current one
    return cuda_ceilings();
  }
  if (name == "ref") {
    const char* const isas[] = {"avx512", "avx2", "neon"};
    const auto* const best = std::find_if(std::begin(isas), std::end(isas), cpu_supports);
    return cpu_ceilings(best == std::end(isas) ? "" : *best, 1);
  }
  if (threads <= 0) threads = static_cast<int>(std::thread::hardware_concurrency());
  return cpu_ceilings(name, std::max(threads, 1));
}

}  // namespace bitwitness
