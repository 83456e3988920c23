// Groups of asynchronous copies from global to shared memory (sm_80; copies before that are done
// when they are issued, and nothing here has anything to do). How a kernel copies is its own: the
// sizes and the hints differ.
#pragma once

namespace bitwitness::cuda {

// The copies of this thread since the last call form a group.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most the kNewest latest groups of this thread are under way. Other threads see what was
// copied after a barrier.
template <int kNewest>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
#endif
}

}  // namespace bitwitness::cuda
