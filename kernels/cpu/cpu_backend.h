// The tuned CPU backends: one per instruction set, chosen at run time. Equal bits to the reference
// backend for every operator and shape, whatever the number of threads (tests/kernels/cpu/).
#pragma once

#include <memory>
#include <string_view>

#include "kernels/backend.h"

namespace bitwitness {

// Whether this build has kernels for `isa` ("avx2": AVX2 + FMA + F16C; "avx512": AVX-512 F, BW, DQ,
// VL beside those; "neon": AArch64's Advanced SIMD), and this processor and its operating system
// run them. False for any other name.
bool cpu_supports(std::string_view isa);

// A backend of `threads` >= 1 threads, the calling one among them; workers sleep between operators.
// The known answers are checked on every thread (infrastructure error). An `isa` that
// cpu_supports() denies is a usage error. Operators must be called from one thread at a time; any
// thread whose floating-point environment is the default one may call (infrastructure error
// otherwise).
std::unique_ptr<Backend> make_cpu_backend(std::string_view isa, int threads);

}  // namespace bitwitness
