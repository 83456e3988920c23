// What a device can do at most, measured on it: the limits that the times of operators are held
// against (bw-prover bench, tests/bench).
#pragma once

#include <cstddef>

#include "kernels/backend.h"

namespace bitwitness {

struct Ceilings {
  // CUDA: a copy within device memory, bytes read plus bytes written. Hosts: reading memory.
  double bytes_per_second = 0;
  // Independent binary32 multiply-adds, two operations each.
  double operations_per_second = 0;
  // Of the last cache level before that memory; what is timed has to exceed it several times.
  std::size_t cache_bytes = 0;
};

// Of the device of `backend`; hosts: of `threads` (0: all) of its threads, of one for "ref". About
// a second; takes 2 GiB of device memory, or 512 MiB of the host's, meanwhile.
Ceilings measure_ceilings(Backend& backend, int threads = 0);

}  // namespace bitwitness
