// Every operator of every CPU backend gives the reference backend's bytes, for shapes at every
// boundary of the kernels, whatever the number of threads.
#include "kernels/cpu/cpu_backend.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "attest/base/error.h"
#include "kernels/contract.h"
#include "kernels/reference/reference_backend.h"
#include "tests/kernels/paged_cache.h"

namespace bitwitness {
namespace {

using contract::bits_of;
using contract::float_of;

// Deterministic 64-bit values (splitmix64).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>((next() >> 32) % n); }
  // Finite, of magnitude [2^low, 2^high) with any fraction; sometimes zero or -0; subnormal where
  // low allows it.
  float value(int low, int high) {
    const std::uint32_t sign = static_cast<std::uint32_t>(next() & 1) << 31;
    if (below(16) == 0) return float_of(sign);
    const std::uint32_t least = static_cast<std::uint32_t>(std::max(low + 127, 0));
    const std::uint32_t exponent = least + below(static_cast<std::uint32_t>(high + 127) - least);
    return float_of(sign | exponent << 23 | below(1u << 23));
  }

 private:
  std::uint64_t state_;
};

// ThreadSanitizer makes everything some 30 times slower and looks at the threads alone, an emulator
// 100 times (BITWITNESS_THIN_TESTS=1): fewer shapes.
#if defined(__SANITIZE_THREAD__)
const bool kThin = true;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
const bool kThin = true;
#else
const bool kThin = std::getenv("BITWITNESS_THIN_TESTS") != nullptr;
#endif
#else
const bool kThin = std::getenv("BITWITNESS_THIN_TESTS") != nullptr;
#endif

enum class Spread { kNarrow, kWide };  // kWide: subnormals to 2^40

std::vector<float> random_floats(std::int64_t count, Spread spread, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& x : out) x = spread == Spread::kNarrow ? random.value(-4, 2) : random.value(-127, 40);
  return out;
}

// Weight bytes of `count` finite elements.
std::vector<std::byte> random_weights(Dtype dtype, std::int64_t count, Spread spread,
                                      std::uint64_t seed) {
  Random random(seed);
  const std::size_t size = dtype_bytes(dtype);
  std::vector<std::byte> out(static_cast<std::size_t>(count) * size);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    if (dtype == Dtype::kFp16) {
      // Any finite binary16, or an ordinary one.
      std::uint16_t h = static_cast<std::uint16_t>(random.next());
      if (spread == Spread::kNarrow) {
        h = contract::f32_to_fp16(random.value(-4, 2));
      } else if ((h & 0x7c00u) == 0x7c00u) {
        h = static_cast<std::uint16_t>(h & 0x83ffu);
      }
      std::memcpy(&out[i * size], &h, size);
    } else {
      const std::uint32_t u =
          bits_of(spread == Spread::kNarrow ? random.value(-4, 2) : random.value(-127, 40));
      const std::uint16_t h = static_cast<std::uint16_t>(u >> 16);
      if (dtype == Dtype::kBf16) {
        std::memcpy(&out[i * size], &h, size);
      } else {
        std::memcpy(&out[i * size], &u, size);
      }
    }
  }
  return out;
}

// Memory between two pages that trap: bytes can be placed to end (or begin) exactly at one.
class GuardedMemory {
 public:
  explicit GuardedMemory(std::size_t bytes) {
    page_ = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    inner_ = (bytes + page_ - 1) / page_ * page_;
    void* p = mmap(nullptr, inner_ + 2 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                   -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<std::byte*>(p);
    mprotect(base_, page_, PROT_NONE);
    mprotect(base_ + page_ + inner_, page_, PROT_NONE);
  }
  ~GuardedMemory() { munmap(base_, inner_ + 2 * page_); }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  std::byte* ending(std::size_t bytes) { return base_ + page_ + inner_ - bytes; }
  std::byte* beginning() { return base_ + page_; }

 private:
  std::size_t page_ = 0, inner_ = 0;
  std::byte* base_ = nullptr;
};

void poison(std::vector<float>& out) {
  std::fill(out.begin(), out.end(), std::numeric_limits<float>::quiet_NaN());
}

// The first element [i / width, i % width] whose bytes differ, as text; empty when all are equal.
std::string first_difference(const float* got, const float* want, std::int64_t count,
                             std::int64_t width) {
  if (std::memcmp(got, want, static_cast<std::size_t>(count) * sizeof(float)) == 0) return {};
  for (std::int64_t i = 0; i < count; ++i) {
    if (bits_of(got[i]) != bits_of(want[i])) {
      char text[160];
      std::snprintf(text, sizeof text, "[%lld, %lld]: got %a (%08x), want %a (%08x)",
                    static_cast<long long>(i / width), static_cast<long long>(i % width),
                    static_cast<double>(got[i]), bits_of(got[i]), static_cast<double>(want[i]),
                    bits_of(want[i]));
      return text;
    }
  }
  return "bytes differ";
}

const char* text_of(Spread spread) {
  return spread == Spread::kWide ? "wide" : "narrow";
}

class CpuBackendTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!cpu_supports(GetParam())) {
      GTEST_SKIP() << "this processor has no " << GetParam();
    }
  }
  std::unique_ptr<Backend> make(int threads) { return make_cpu_backend(GetParam(), threads); }
  ReferenceBackend reference_;
};

#if defined(__aarch64__)
constexpr const char* kInstructionSets[] = {"neon"};
#else
constexpr const char* kInstructionSets[] = {"avx2", "avx512"};
#endif

INSTANTIATE_TEST_SUITE_P(Isa, CpuBackendTest, testing::ValuesIn(kInstructionSets),
                         [](const auto& instance) { return std::string(instance.param); });

TEST_P(CpuBackendTest, NameIsTheInstructionSet) {
  EXPECT_EQ(make(1)->name(), GetParam());
}

// One reference product per (type, K) holds those of every smaller M and N: an element depends on
// its own row of x and row of W alone.
TEST_P(CpuBackendTest, MatmulAtEveryBoundary) {
  std::vector<std::int64_t> Ms;
  for (std::int64_t m = 1; m <= 20; ++m) Ms.push_back(m);
  for (const std::int64_t m : {24, 25, 27, 28, 29, 31, 32, 33, 39, 40, 41, 42, 43, 63, 64, 65})
    Ms.push_back(m);
  const std::int64_t Ks[] = {1,   7,   8,    9,    63,   64,   65,   71,   128,  129,  192,
                             512, 513, 1000, 1023, 1024, 1025, 1087, 1088, 2048, 2050, 4100};
  const std::int64_t Ns[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 130};
  constexpr std::int64_t kM = 65, kN = 130;
  const auto one = make(1);
  const auto three = make(3);
  std::uint64_t seed = 1;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    for (const std::int64_t K : Ks) {
      if (kThin && K != 71 && K != 4100) continue;
      const Spread spread = ++seed % 2 == 0 ? Spread::kWide : Spread::kNarrow;
      const std::vector<float> x = random_floats(kM * K, spread, seed);
      const std::vector<std::byte> w = random_weights(dtype, kN * K, spread, seed + 1000);
      std::vector<float> want(kM * kN);
      reference_.matmul(want.data(), x.data(), {dtype, kN, K, w.data()}, kM);

      GuardedMemory w_memory(w.size()), x_memory(x.size() * sizeof(float));
      int turn = 0;
      for (const std::int64_t N : Ns) {
        // W ends, and x ends, where the next byte traps.
        const std::size_t w_bytes = static_cast<std::size_t>(N * K) * dtype_bytes(dtype);
        std::byte* const w_at = w_memory.ending(w_bytes);
        std::memcpy(w_at, w.data(), w_bytes);
        for (const std::int64_t M : Ms) {
          if (kThin && M != 1 && M != 3 && M != 65) continue;
          const std::size_t x_bytes = static_cast<std::size_t>(M * K) * sizeof(float);
          std::byte* const x_at = x_memory.ending(x_bytes);
          std::memcpy(x_at, x.data(), x_bytes);
          std::vector<float> got(static_cast<std::size_t>(M * N + 1));
          poison(got);
          Backend& backend = ++turn % 2 == 0 ? *one : *three;
          backend.matmul(got.data(), reinterpret_cast<const float*>(x_at), {dtype, N, K, w_at}, M);
          for (std::int64_t m = 0; m < M; ++m) {
            ASSERT_EQ(first_difference(&got[static_cast<std::size_t>(m * N)],
                                       &want[static_cast<std::size_t>(m * kN)], N, N),
                      "")
                << dtype_name(dtype) << ' ' << text_of(spread) << " M=" << M << " N=" << N
                << " K=" << K << " row " << m;
          }
          ASSERT_TRUE(std::isnan(got.back())) << "wrote past the output";
        }
      }
    }
  }
}

TEST_P(CpuBackendTest, MatmulOnAnyThreadsAndAlignment) {
  constexpr std::int64_t kM = 67, kN = 523, kK = 1290;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    const std::vector<float> x = random_floats(kM * kK, Spread::kNarrow, 5);
    const std::vector<std::byte> w = random_weights(dtype, kN * kK, Spread::kNarrow, 6);
    std::vector<float> want(kM * kN);
    reference_.matmul(want.data(), x.data(), {dtype, kN, kK, w.data()}, kM);
    std::vector<std::byte> shifted(w.size() + 64);
    for (const int threads : {1, 2, 3, 5}) {
      if (kThin && threads != 3) continue;
      const auto backend = make(threads);
      for (const std::size_t offset : {0, 1, 2, 3, 17, 34}) {
        std::memcpy(shifted.data() + offset, w.data(), w.size());
        for (const std::int64_t M : {1, 2, 5, 8, 9, 17, 40, 41, 67}) {
          std::vector<float> got(static_cast<std::size_t>(M * kN));
          poison(got);
          backend->matmul(got.data(), x.data(), {dtype, kN, kK, shifted.data() + offset}, M);
          ASSERT_EQ(first_difference(got.data(), want.data(), M * kN, kN), "")
              << dtype_name(dtype) << " threads=" << threads << " offset=" << offset << " M=" << M;
        }
      }
    }
  }
}

// Few panels and many threads: tiles are shared out as well. More rows than are packed at once.
TEST_P(CpuBackendTest, MatmulOfManyRows) {
  constexpr std::int64_t kM = 1100, kN = 33, kK = 1100;
  const std::vector<float> x = random_floats(kM * kK, Spread::kNarrow, 7);
  const std::vector<std::byte> w = random_weights(Dtype::kBf16, kN * kK, Spread::kNarrow, 8);
  std::vector<float> want(kM * kN), got(kM * kN);
  reference_.matmul(want.data(), x.data(), {Dtype::kBf16, kN, kK, w.data()}, kM);
  for (const int threads : {1, 5}) {
    poison(got);
    make(threads)->matmul(got.data(), x.data(), {Dtype::kBf16, kN, kK, w.data()}, kM);
    ASSERT_EQ(first_difference(got.data(), want.data(), kM * kN, kN), "") << "threads=" << threads;
  }
}

// Signed zeros survive: chains that are empty, products that are -0, and sums that underflow to -0
// (which padding with +0 would lose).
TEST_P(CpuBackendTest, MatmulOfZeros) {
  const auto backend = make(1);
  for (const std::int64_t K : {1, 3, 8, 9, 57, 64, 65, 1025}) {
    for (const std::int64_t M : {1, 3, 9, 41}) {  // rows, a group, two, panels
      for (const std::uint32_t x_bits : {0x00000000u, 0x80000000u, 0x3f800000u, 0x0d800000u}) {
        for (const std::uint16_t w_bits :
             {std::uint16_t{0}, std::uint16_t{0x8000}, std::uint16_t{0x8d80}}) {
          constexpr std::int64_t kN = 5;
          std::vector<float> x(static_cast<std::size_t>(M * K), float_of(x_bits));
          std::vector<std::uint16_t> w(static_cast<std::size_t>(kN * K), w_bits);
          const Matrix W{Dtype::kBf16, kN, K, reinterpret_cast<const std::byte*>(w.data())};
          std::vector<float> want(static_cast<std::size_t>(M * kN)), got(want.size());
          reference_.matmul(want.data(), x.data(), W, M);
          poison(got);
          backend->matmul(got.data(), x.data(), W, M);
          ASSERT_EQ(first_difference(got.data(), want.data(), M * kN, kN), "")
              << "M=" << M << " K=" << K << " x=" << x_bits << " w=" << w_bits;
        }
      }
    }
  }
}

TEST_P(CpuBackendTest, Embed) {
  const auto backend = make(2);
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    for (const std::int64_t cols : {1, 7, 8, 9, 64, 1001}) {
      constexpr std::int64_t kRows = 50;
      const std::vector<std::byte> table = random_weights(dtype, kRows * cols, Spread::kWide, 9);
      GuardedMemory memory(table.size());
      std::memcpy(memory.ending(table.size()), table.data(), table.size());
      const Matrix E{dtype, kRows, cols, memory.ending(table.size())};
      std::vector<std::int32_t> tokens;
      for (int i = 0; i < 70; ++i) tokens.push_back((i * 37 + 49) % static_cast<int>(kRows));
      const std::int64_t M = static_cast<std::int64_t>(tokens.size());
      std::vector<float> want(static_cast<std::size_t>(M * cols)), got(want.size());
      reference_.embed(want.data(), E, tokens.data(), M);
      poison(got);
      backend->embed(got.data(), E, tokens.data(), M);
      ASSERT_EQ(first_difference(got.data(), want.data(), M * cols, cols), "")
          << dtype_name(dtype) << " cols=" << cols;
    }
  }
}

TEST_P(CpuBackendTest, RmsNorm) {
  for (const int threads : {1, 3}) {
    const auto backend = make(threads);
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
      for (const std::int64_t K :
           {1, 7, 8, 15, 16, 17, 64, 128, 255, 256, 257, 511, 513, 1031, 4096}) {
        for (const Spread spread : {Spread::kNarrow, Spread::kWide}) {
          constexpr std::int64_t kM = 17;
          const std::vector<float> x = random_floats(kM * K, spread, 10);
          const std::vector<std::byte> w = random_weights(dtype, K, spread, 11);
          GuardedMemory memory(w.size());
          std::memcpy(memory.ending(w.size()), w.data(), w.size());
          const Vector weight{dtype, K, memory.ending(w.size())};
          std::vector<float> want(static_cast<std::size_t>(kM * K)), got(want.size());
          reference_.rms_norm(want.data(), x.data(), weight, 1e-5f, kM);
          poison(got);
          backend->rms_norm(got.data(), x.data(), weight, 1e-5f, kM);
          ASSERT_EQ(first_difference(got.data(), want.data(), kM * K, K), "")
              << dtype_name(dtype) << " K=" << K << ' ' << text_of(spread);
          got = x;
          backend->rms_norm(got.data(), got.data(), weight, 1e-5f, kM);
          ASSERT_EQ(first_difference(got.data(), want.data(), kM * K, K), "")
              << "in place, K=" << K;
        }
      }
    }
  }
}

TEST_P(CpuBackendTest, Rope) {
  const auto backend = make(3);
  for (const std::int64_t head_dim : {2, 6, 16, 32, 34, 64, 80, 96, 128, 130}) {
    for (const std::int64_t heads : {1, 3, 8}) {
      constexpr std::int64_t kPositions = 200;
      const std::vector<float> cosines =
          random_floats(kPositions * head_dim / 2, Spread::kNarrow, 12);
      const std::vector<float> sines =
          random_floats(kPositions * head_dim / 2, Spread::kNarrow, 13);
      std::vector<std::int32_t> slots, positions;
      for (int i = 0; i < 100; ++i) {
        slots.push_back(0);
        positions.push_back((i * 71 + 199) % static_cast<int>(kPositions));
      }
      const RowMap rows{100, slots.data(), positions.data(), slots.data(), positions.data()};
      std::vector<float> want = random_floats(100 * heads * head_dim, Spread::kWide, 14),
                         got = want;
      reference_.rope(want.data(), heads, head_dim, cosines.data(), sines.data(), rows);
      backend->rope(got.data(), heads, head_dim, cosines.data(), sines.data(), rows);
      ASSERT_EQ(first_difference(got.data(), want.data(), static_cast<std::int64_t>(got.size()),
                                 heads * head_dim),
                "")
          << "head_dim=" << head_dim << " heads=" << heads;
    }
  }
}

TEST_P(CpuBackendTest, SwigluAndAdd) {
  std::vector<std::int64_t> counts;
  for (std::int64_t n = 1; n <= 40; ++n) counts.push_back(n);
  counts.push_back(100003);
  for (const int threads : {1, 5}) {
    const auto backend = make(threads);
    for (const std::int64_t count : counts) {
      for (const Spread spread : {Spread::kNarrow, Spread::kWide}) {
        const std::vector<float> gate = random_floats(count, spread, 15);
        const std::vector<float> up = random_floats(count, spread, 16);
        std::vector<float> want(static_cast<std::size_t>(count)), got(want.size());
        reference_.swiglu(want.data(), gate.data(), up.data(), count);
        poison(got);
        backend->swiglu(got.data(), gate.data(), up.data(), count);
        ASSERT_EQ(first_difference(got.data(), want.data(), count, count), "")
            << "swiglu " << count;
        got = gate;
        backend->swiglu(got.data(), got.data(), up.data(), count);
        ASSERT_EQ(first_difference(got.data(), want.data(), count, count), "")
            << "in place " << count;
        reference_.add(want.data(), gate.data(), up.data(), count);
        poison(got);
        backend->add(got.data(), gate.data(), up.data(), count);
        ASSERT_EQ(first_difference(got.data(), want.data(), count, count), "") << "add " << count;
        got = gate;
        backend->add(got.data(), got.data(), up.data(), count);
        ASSERT_EQ(first_difference(got.data(), want.data(), count, count), "")
            << "add in place " << count;
      }
    }
  }
}

// The elementary function over every exponent, both signs and values around its branches.
TEST_P(CpuBackendTest, SwigluOfEveryExponent) {
  std::vector<float> gate;
  Random random(17);
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (int i = 0; i < 400; ++i) {
      const std::uint32_t u = exponent << 23 | random.below(1u << 23);
      gate.push_back(float_of(u));
      gate.push_back(float_of(u | 0x80000000u));
    }
  }
  for (const float edge :
       {0.0f, -0.0f, 86.0f, 87.5f, 88.0f, 88.5f, 88.8f, 89.0f, 103.0f, 104.0f, 105.0f}) {
    for (std::uint32_t step = 0; step < 200; ++step) {
      gate.push_back(float_of(bits_of(edge) + step));
      gate.push_back(-float_of(bits_of(edge) + step));
    }
  }
  const std::vector<float> up(gate.size(), 1.0f);
  std::vector<float> want(gate.size()), got(gate.size());
  const std::int64_t count = static_cast<std::int64_t>(gate.size());
  reference_.swiglu(want.data(), gate.data(), up.data(), count);
  poison(got);
  make(2)->swiglu(got.data(), gate.data(), up.data(), count);
  for (std::size_t i = 0; i < gate.size(); ++i) {
    ASSERT_EQ(bits_of(got[i]), bits_of(want[i])) << "silu of " << gate[i] << " at " << i;
  }
}

struct AttentionShape {
  std::int64_t heads, kv_heads, head_dim;
};

class AttentionCase {
 public:
  AttentionCase(const AttentionShape& shape, std::int64_t slots, std::int64_t capacity,
                Spread spread)
      : shape_(shape),
        slots_(slots),
        capacity_(capacity),
        kv_width_(shape.kv_heads * shape.head_dim) {
    const std::int64_t count = slots * capacity * kv_width_;
    // Wide: exponents that spread within binary32's range for scores.
    keys_ = random_floats(count, Spread::kNarrow, 18);
    values_ = random_floats(count, spread, 19);
  }

  // Rows (slot, position), with everything after the last position of each slot poisoned.
  void check(ReferenceBackend& reference, Backend& backend,
             const std::vector<std::pair<std::int32_t, std::int32_t>>& at) {
    std::vector<std::int32_t> slots, positions;
    std::vector<std::int32_t> last(64, -1);
    for (const auto& [slot, position] : at) {
      slots.push_back(slot);
      positions.push_back(position);
      std::int32_t& end = last[static_cast<std::size_t>(slot)];
      end = std::max(end, position);
    }
    std::vector<float> keys = keys_, values = values_;
    for (std::int64_t slot = 0; slot < slots_; ++slot) {
      for (std::int64_t j = last[static_cast<std::size_t>(slot)] + 1; j < capacity_; ++j) {
        for (std::int64_t i = 0; i < kv_width_; ++i) {
          const std::size_t k = static_cast<std::size_t>((slot * capacity_ + j) * kv_width_ + i);
          keys[k] = values[k] = std::numeric_limits<float>::quiet_NaN();
        }
      }
    }
    const test::PagedCache paged(reference, slots_, capacity_, kv_width_, keys, values);
    const LayerKv cache = paged.layer();
    const std::int64_t M = static_cast<std::int64_t>(at.size());
    const std::int64_t width = shape_.heads * shape_.head_dim;
    const RowMap rows{M, slots.data(), positions.data(), slots.data(), positions.data()};
    const std::vector<float> q = random_floats(M * width, Spread::kNarrow, 20);
    std::vector<float> want(static_cast<std::size_t>(M * width)), got(want.size());
    reference.attention(want.data(), q.data(), cache, shape_.heads, shape_.kv_heads,
                        shape_.head_dim, rows);
    poison(got);
    backend.attention(got.data(), q.data(), cache, shape_.heads, shape_.kv_heads, shape_.head_dim,
                      rows);
    ASSERT_EQ(first_difference(got.data(), want.data(), M * width, width), "")
        << "heads=" << shape_.heads << '/' << shape_.kv_heads << " head_dim=" << shape_.head_dim
        << " M=" << M << " first row at slot " << slots[0] << " position " << positions[0];
  }

 private:
  AttentionShape shape_;
  std::int64_t slots_, capacity_, kv_width_;
  std::vector<float> keys_, values_;
};

const AttentionShape kAttentionShapes[] = {{4, 4, 16},  {8, 2, 32},  {6, 3, 64},  {4, 1, 80},
                                           {5, 1, 96},  {8, 1, 128}, {3, 3, 20},  {2, 1, 7},
                                           {20, 2, 40}, {1, 1, 1},   {2, 2, 192}, {2, 1, 130}};

TEST_P(CpuBackendTest, AttentionDecodesAroundBlockBoundaries) {
  const auto backend = make(2);
  for (const AttentionShape& shape : kAttentionShapes) {
    AttentionCase test(shape, 1, 260, Spread::kWide);
    for (const std::int32_t position :
         {0, 1, 2, 7, 8, 15, 16, 17, 31, 62, 63, 64, 65, 126, 127, 128, 129, 200, 255, 256}) {
      test.check(reference_, *backend, {{0, position}});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CpuBackendTest, AttentionOfPrefillAndBatches) {
  for (const int threads : {1, 2, 3, 5}) {
    if (kThin && threads != 3) continue;
    const auto backend = make(threads);
    for (const AttentionShape& shape : kAttentionShapes) {
      AttentionCase test(shape, 3, 140, Spread::kNarrow);
      std::vector<std::pair<std::int32_t, std::int32_t>> whole, chunk, mixed;
      for (std::int32_t p = 0; p < 140; ++p) whole.emplace_back(0, p);
      for (std::int32_t p = 61; p < 70; ++p) chunk.emplace_back(1, p);
      for (std::int32_t p = 0; p < 5; ++p) mixed.emplace_back(2, 60 + p);
      mixed.emplace_back(0, 127);
      mixed.emplace_back(1, 0);
      mixed.emplace_back(1, 1);
      test.check(reference_, *backend, whole);
      test.check(reference_, *backend, chunk);
      test.check(reference_, *backend, mixed);
      if (HasFatalFailure()) return;
    }
  }
}

// Scores that differ by hundreds: probabilities underflow, blocks lose all weight.
TEST_P(CpuBackendTest, AttentionWithExtremeScores) {
  const auto backend = make(1);
  constexpr std::int64_t kDim = 32, kPositions = 200;
  std::vector<float> keys = random_floats(kPositions * kDim, Spread::kNarrow, 21);
  std::vector<float> values = random_floats(kPositions * kDim, Spread::kWide, 22);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] *= i / kDim % 7 == 0 ? 64.0f : 8.0f;
  const test::PagedCache paged(reference_, 1, kPositions, kDim, keys, values);
  const LayerKv cache = paged.layer();
  std::vector<std::int32_t> slots(kPositions, 0), positions;
  for (std::int32_t p = 0; p < kPositions; ++p) positions.push_back(p);
  const RowMap rows{kPositions, slots.data(), positions.data(), slots.data(), positions.data()};
  const std::vector<float> q = random_floats(kPositions * kDim, Spread::kNarrow, 23);
  std::vector<float> want(kPositions * kDim), got(want.size());
  reference_.attention(want.data(), q.data(), cache, 1, 1, kDim, rows);
  poison(got);
  backend->attention(got.data(), q.data(), cache, 1, 1, kDim, rows);
  EXPECT_EQ(first_difference(got.data(), want.data(), kPositions * kDim, kDim), "");
}

TEST_P(CpuBackendTest, HashRows) {
  for (const int threads : {1, 3}) {
    const auto backend = make(threads);
    for (const std::int64_t M : {1, 2, 3, 40}) {
      for (const std::size_t width : {1, 255, 256, 257, 1000}) {
        const std::vector<float> a =
            random_floats(M * static_cast<std::int64_t>(width), Spread::kWide, 24);
        const std::vector<float> b =
            random_floats(M * static_cast<std::int64_t>(width), Spread::kWide, 25);
        std::vector<std::int32_t> slots(static_cast<std::size_t>(M), 0), positions;
        for (std::int32_t m = 0; m < M; ++m) positions.push_back(m * 3 + 1);
        // All rows as one layer, and as layers of a row each.
        for (const std::int64_t layers : {std::int64_t{1}, M}) {
          const RowMap rows{M / layers, slots.data(), positions.data(), slots.data(),
                            positions.data()};
          std::vector<Digest> want(static_cast<std::size_t>(M)), got(want.size());
          std::uint32_t non_finite = 0;
          reference_.hash_rows(want.data(), &non_finite, LeafType::kKeyValue, 3, layers, a.data(),
                               width * 4, b.data(), width * 4, rows);
          backend->hash_rows(got.data(), &non_finite, LeafType::kKeyValue, 3, layers, a.data(),
                             width * 4, b.data(), width * 4, rows);
          EXPECT_EQ(got, want) << "M=" << M << " width=" << width;
          reference_.hash_rows(want.data(), &non_finite, LeafType::kRow, 4, layers, a.data(),
                               width * 4, nullptr, 0, rows);
          backend->hash_rows(got.data(), &non_finite, LeafType::kRow, 4, layers, a.data(),
                             width * 4, nullptr, 0, rows);
          EXPECT_EQ(got, want) << "M=" << M << " width=" << width;
          EXPECT_EQ(non_finite, 0u);
          std::vector<float> bad = a;
          bad.back() = std::numeric_limits<float>::infinity();
          backend->hash_rows(got.data(), &non_finite, LeafType::kRow, 4, layers, bad.data(),
                             width * 4, nullptr, 0, rows);
          EXPECT_EQ(non_finite, 1u);
        }
      }
    }
  }
}

TEST_P(CpuBackendTest, FindNonFinite) {
  const float bad[] = {std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity(),
                       std::numeric_limits<float>::quiet_NaN(), float_of(0xff800001u)};
  for (const int threads : {1, 3}) {
    const auto backend = make(threads);
    for (const auto& shape :
         {std::pair<std::int64_t, std::int64_t>{1, 1}, {7, 3}, {33, 5}, {1000, 301}}) {
      const std::int64_t width = shape.first, M = shape.second;
      std::vector<float> x = random_floats(width * M, Spread::kWide, 26);
      x[0] = std::numeric_limits<float>::max();
      EXPECT_EQ(backend->find_non_finite(x.data(), width, M).row, -1);
      std::uint32_t unset = 0;
      backend->flag_non_finite(&unset, x.data(), width * M);
      EXPECT_EQ(unset, 0u);
      Random random(27);
      for (int i = 0; i < 40; ++i) {
        std::vector<float> y = x;
        const auto place = [&] {
          return static_cast<std::size_t>(random.below(static_cast<std::uint32_t>(width * M)));
        };
        y[i == 0 ? 0 : i == 1 ? y.size() - 1 : place()] = bad[i % 4];
        if (i % 3 == 0) y[place()] = bad[(i + 1) % 4];
        const NonFinite want = reference_.find_non_finite(y.data(), width, M);
        const NonFinite got = backend->find_non_finite(y.data(), width, M);
        std::uint32_t flag = 0;
        backend->flag_non_finite(&flag, y.data(), width * M);
        ASSERT_EQ(flag, 1u);
        ASSERT_EQ(got.row, want.row);
        ASSERT_EQ(got.element, want.element);
      }
    }
  }
}

TEST_P(CpuBackendTest, Sample) {
  for (const int threads : {1, 3}) {
    const auto backend = make(threads);
    for (const std::int64_t vocab : {1, 2, 7, 8, 15, 16, 17, 33, 1000, 5003}) {
      constexpr std::int64_t kM = 24;
      std::vector<float> logits = random_floats(kM * vocab, Spread::kNarrow, 28);
      Random random(29);
      std::vector<SampleRequest> requests(kM);
      for (std::int64_t m = 0; m < kM; ++m) {
        SampleRequest& request = requests[static_cast<std::size_t>(m)];
        request.draw = random.next();
        if (m % 2 == 1) request.params = {0.8f, m % 4 == 1 ? 0u : 20u, m % 3 == 0 ? 1.0f : 0.9f};
        // Ties of the greatest logit, of +0 with -0 among them.
        if (m % 6 == 0) {
          for (std::int64_t i = 0; i < vocab; ++i) {
            float& logit = logits[static_cast<std::size_t>(m * vocab + i)];
            logit =
                m % 12 == 0 ? std::min(logit, 0.5f) : (i % 3 == 0 ? -0.0f : std::min(logit, 0.0f));
          }
        }
      }
      std::vector<std::int32_t> want(kM, -1), got(kM, -2);
      reference_.sample(want.data(), logits.data(), vocab, requests.data(), kM, {});
      backend->sample(got.data(), logits.data(), vocab, requests.data(), kM, {});
      EXPECT_EQ(got, want) << "vocab=" << vocab;
      // Without a finite logit, some id.
      std::fill(logits.begin(), logits.end(), std::numeric_limits<float>::quiet_NaN());
      backend->sample(got.data(), logits.data(), vocab, requests.data(), kM, {});
      for (const std::int32_t id : got) EXPECT_TRUE(id >= 0 && id < vocab) << "vocab=" << vocab;
    }
  }
}

#if defined(__x86_64__) || defined(__aarch64__)
// The calling thread's floating-point control register, and bits of it that change values.
#if defined(__x86_64__)
std::uint64_t control_register() {
  return _mm_getcsr();
}
void set_control_register(std::uint64_t value) {
  _mm_setcsr(static_cast<unsigned>(value));
}
constexpr std::uint64_t kDenormalsAreZero = 0x0040, kRoundDown = 0x2000, kFlushToZero = 0x8000;
constexpr std::uint64_t kBadControlBits[] = {kDenormalsAreZero, kFlushToZero, kRoundDown};
#else
std::uint64_t control_register() {
  std::uint64_t value = 0;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
void set_control_register(std::uint64_t value) {
  asm volatile("msr fpcr, %0" ::"r"(value));
}
constexpr std::uint64_t kRoundUp = 1u << 22, kRoundDown = 2u << 22, kFlushToZero = 1u << 24;
constexpr std::uint64_t kDefaultNan = 1u << 25, kAlternateHalf = 1u << 26;
constexpr std::uint64_t kBadControlBits[] = {kRoundUp, kRoundDown, kFlushToZero, kDefaultNan,
                                             kAlternateHalf};
#endif

// Sets bits of the register for a scope.
class ControlBits {
 public:
  explicit ControlBits(std::uint64_t bits) : saved_(control_register()) {
    set_control_register(saved_ | bits);
  }
  ~ControlBits() { set_control_register(saved_); }
  ControlBits(const ControlBits&) = delete;
  ControlBits& operator=(const ControlBits&) = delete;

 private:
  std::uint64_t saved_;
};

TEST_P(CpuBackendTest, RefusesAnEnvironmentThatBreaksTheArithmetic) {
  for (const std::uint64_t bits : kBadControlBits) {
    ErrorKind kind = ErrorKind::kUsage;
    bool refused = false;
    {
      const ControlBits scope(bits);
      try {
        make(2);
      } catch (const Error& e) {
        refused = true;
        kind = e.kind();
      }
    }
    EXPECT_TRUE(refused) << "control bits " << bits;
    EXPECT_EQ(kind, ErrorKind::kInfrastructure);
  }
}

TEST_P(CpuBackendTest, RefusesACallerWhoseEnvironmentChanged) {
  const auto backend = make(2);
  std::vector<float> x(8, 1.0f);
  for (const std::uint64_t bits : kBadControlBits) {
    bool refused = false;
    std::thread caller([&] {
      const ControlBits scope(bits);
      try {
        backend->add(x.data(), x.data(), x.data(), 8);
      } catch (const Error& e) {
        refused = e.kind() == ErrorKind::kInfrastructure;
      }
    });
    caller.join();
    EXPECT_TRUE(refused) << "control bits " << bits;
  }
  backend->add(x.data(), x.data(), x.data(), 8);
  EXPECT_EQ(x[7], 2.0f);
}
#endif

TEST(CpuBackend, UnknownInstructionSetIsAUsageError) {
  EXPECT_FALSE(cpu_supports("avx1024"));
  EXPECT_FALSE(cpu_supports(""));
  try {
    make_cpu_backend("avx1024", 1);
    FAIL() << "no exception";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUsage);
    EXPECT_NE(std::string(e.what()).find("avx1024"), std::string::npos);
  }
}

}  // namespace
}  // namespace bitwitness
