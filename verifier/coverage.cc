#include "verifier/coverage.h"

namespace bitwitness {

std::uint64_t bad_at_most(std::uint64_t population, std::uint64_t checked) {
  if (checked == 0) return population;
  constexpr double kDoubt = 0.01;
  // The product shrinks by at least (N-n)/N a step, so that the loop ends after at most
  // ln(100) * N / n steps.
  double missed = 1;
  for (std::uint64_t bad = 0; bad + checked < population; ++bad) {
    missed *=
        static_cast<double>(population - checked - bad) / static_cast<double>(population - bad);
    if (!(missed > kDoubt)) return bad;
  }
  return population - checked;
}

}  // namespace bitwitness
