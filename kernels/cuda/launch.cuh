// Launches in which a kernel may start before the one in front of it has ended ("programmatic
// dependent launch", from sm_90 on): what does not depend on it, the reading of weights above all,
// then overlaps its end. Captured graphs keep this.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/cuda/context.h"

namespace bitwitness::cuda {

// Waits until the kernels in front have ended and what they wrote is visible. Every thread of a
// kernel started by launch_overlapping calls it before it reads or writes what others write or
// read, and no kernel so started leaves it out: one that ends without it lets the next run too
// early. A no-op before sm_90 and after an ordinary launch.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as multiprocessors have room for it. It still waits for the
// end of this one before it reads what this one writes.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Launches `kernel`, which calls wait_for_previous(), on the context's stream.
template <class... Parameters, class... Arguments>
void launch_overlapping(Context& context, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                        std::size_t shared_bytes, Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = context.stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = context.overlaps_launches ? 1 : 0;
  BW_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

}  // namespace bitwitness::cuda
