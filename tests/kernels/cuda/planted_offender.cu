// Breaks every rule of scripts/check_ptx.py and scripts/check_sass.py, to prove that the checks
// bite. Never linked into anything.
#include <cuda_bf16.h>

__global__ void planted_offender(float* x, __nv_bfloat16* h) {
  const int i = static_cast<int>(threadIdx.x);
  asm("mul.f32 %0, %0, %0;" : "+f"(x[i]));  // no rounding named: the assembler may fuse
  x[i + 1] = __expf(x[i]);                  // .approx
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i + 3]));
  asm("mad.rn.f32 %0, %0, %0, %0;" : "+f"(x[i + 4]));
  atomicAdd(x, 1.0f);             // the order of threads shows
  h[i] = __hadd(h[i], h[i + 1]);  // 16-bit arithmetic
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x[i + 5]));
  asm("rsqrt.approx.ftz.f32 %0, %0;" : "+f"(x[i + 6]));
  asm("add.rn.ftz.f32 %0, %0, %0;" : "+f"(x[i + 7]));
  asm("fma.rz.f32 %0, %0, %0, %0;" : "+f"(x[i + 8]));
  const unsigned halves = __float_as_uint(x[i + 9]);
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4}, {%4}, "
      "{%0, %1, %2, %3};"  // the tensor core
      : "+f"(x[i + 10]), "+f"(x[i + 11]), "+f"(x[i + 12]), "+f"(x[i + 13])
      : "r"(halves));
}
