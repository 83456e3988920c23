// The one place that knows which instruction sets there are.
#include <cstdint>

#include "attest/base/error.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/cpu_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace bitwitness {

#if defined(__x86_64__)

extern const CpuKernels kCpuKernelsAvx2;
extern const CpuKernels kCpuKernelsAvx512;

namespace {

struct CpuFeatures {
  bool avx2 = false;
  bool avx512 = false;
};

// Intel SDM volume 1, chapters 14.3 and 15.2: the processor has it and the system saves its
// registers.
CpuFeatures detect() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return {};
  constexpr unsigned kFma = 1u << 12, kXsaveInUse = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  constexpr unsigned kNeeded = kFma | kXsaveInUse | kAvx | kF16c;
  if ((c & kNeeded) != kNeeded) return {};
  unsigned saved = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  constexpr unsigned kYmmSaved = 0x6, kZmmSaved = 0xe6;
  if ((saved & kYmmSaved) != kYmmSaved) return {};
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return {};
  constexpr unsigned kAvx2 = 1u << 5;
  constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  CpuFeatures features;
  features.avx2 = (b & kAvx2) != 0;
  features.avx512 = features.avx2 && (b & kAvx512) == kAvx512 && (saved & kZmmSaved) == kZmmSaved;
  return features;
}

}  // namespace

const CpuKernels* cpu_kernels(std::string_view isa) {
  static const CpuFeatures features = detect();
  if (isa == "avx2" && features.avx2) return &kCpuKernelsAvx2;
  if (isa == "avx512" && features.avx512) return &kCpuKernelsAvx512;
  return nullptr;
}

bool floating_point_environment_is_default() {
  constexpr unsigned kDenormalsAreZero = 0x0040, kRounding = 0x6000, kFlushToZero = 0x8000;
  return (_mm_getcsr() & (kDenormalsAreZero | kRounding | kFlushToZero)) == 0;
}

#elif defined(__aarch64__)

extern const CpuKernels kCpuKernelsNeon;

const CpuKernels* cpu_kernels(std::string_view isa) {
  return isa == "neon" ? &kCpuKernelsNeon : nullptr;
}

bool floating_point_environment_is_default() {
  // Arm ARM, "FPCR": all that can change a value; the others enable traps.
  constexpr std::uint64_t kFlushInputs = 1u << 0, kAlternate = 1u << 1, kMerging = 1u << 2;
  constexpr std::uint64_t kFlushHalf = 1u << 19, kRounding = 3u << 22, kFlush = 1u << 24;
  constexpr std::uint64_t kDefaultNan = 1u << 25, kAlternateHalf = 1u << 26;
  std::uint64_t fpcr = 0;
  __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
  return (fpcr & (kFlushInputs | kAlternate | kMerging | kFlushHalf | kRounding | kFlush |
                  kDefaultNan | kAlternateHalf)) == 0;
}

#else

const CpuKernels* cpu_kernels(std::string_view) {
  return nullptr;
}
bool floating_point_environment_is_default() {
  return true;
}

#endif

bool cpu_supports(std::string_view isa) {
  return cpu_kernels(isa) != nullptr;
}

}  // namespace bitwitness
