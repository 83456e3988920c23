// The limits of this machine's processor: work that reaches them, and what it measures.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "kernels/ceilings.h"
#include "kernels/cpu/thread_pool.h"

namespace bitwitness {

// Some milliseconds of independent multiply-adds on every thread, with the vectors of `isa` (which
// the processor must have; "": scalars). Returns how many there were.
double run_multiply_adds(ThreadPool& pool, std::string_view isa);
// Reads `memory` once, each thread its share.
void read_memory(ThreadPool& pool, std::span<const std::byte> memory);

Ceilings cpu_ceilings(std::string_view isa, int threads);

}  // namespace bitwitness
