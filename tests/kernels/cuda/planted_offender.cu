// Breaks every rule of scripts/check_ptx.py, to prove that the check bites. Never linked into
// anything.
#include <cuda_bf16.h>

__global__ void planted_offender(float* x, __nv_bfloat16* h) {
  const int i = static_cast<int>(threadIdx.x);
  asm("mul.f32 %0, %0, %0;" : "+f"(x[i]));  // no rounding named: the assembler may fuse
  x[i + 1] = __expf(x[i]);                  // .approx
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i + 3]));
  asm("mad.rn.f32 %0, %0, %0, %0;" : "+f"(x[i + 4]));
  atomicAdd(x, 1.0f);             // the order of threads shows
  h[i] = __hadd(h[i], h[i + 1]);  // 16-bit arithmetic
}
