// The CUDA backend against the reference: equal bytes for every operator, on boundary shapes and
// poisoned outputs. Skipped by name where there is no device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "kernels/contract.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/reference/reference_backend.h"
#include "kernels/sampler.h"

namespace bitwitness {
namespace {

using contract::bits_of;
using contract::float_of;

// A fixed sequence of 32-bit words (splitmix64).
class Words {
 public:
  explicit Words(std::uint64_t seed) : state_(seed) {}
  std::uint32_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<std::uint32_t>((z ^ (z >> 31)) >> 16);
  }
  // Signs, zeros, subnormals and exponents within 2^-`spread` to 2^`spread`.
  float value(int spread) {
    const std::uint32_t word = next();
    const std::uint32_t sign = word & 0x80000000u;
    if (word % 61 == 0) return float_of(sign);
    if (word % 59 == 0) return float_of(sign | (next() & 0x007fffffu));
    const auto exponent = static_cast<std::uint32_t>(127 - spread) +
                          next() % static_cast<std::uint32_t>(2 * spread + 1);
    return float_of(sign | exponent << 23 | (word & 0x007fffffu));
  }

 private:
  std::uint64_t state_;
};

std::vector<float> values(std::int64_t count, std::uint64_t seed, int spread = 4) {
  Words words(seed);
  std::vector<float> result(static_cast<std::size_t>(count));
  for (float& x : result) x = words.value(spread);
  return result;
}

// Weights of a type as bytes, preceded by `lead` elements that no one may read: misaligns the rows.
std::vector<std::byte> weights(Dtype dtype, std::int64_t count, std::uint64_t seed, int lead = 0,
                               int spread = 4) {
  Words words(seed);
  const std::size_t size = dtype_bytes(dtype);
  std::vector<std::byte> result(static_cast<std::size_t>(count + lead) * size, std::byte{0xff});
  for (std::size_t i = static_cast<std::size_t>(lead); i < result.size() / size; ++i) {
    const float x = words.value(spread);
    if (dtype == Dtype::kFp32) {
      std::memcpy(&result[i * 4], &x, 4);
    } else {
      const std::uint16_t h =
          dtype == Dtype::kBf16 ? contract::f32_to_bf16(x) : contract::f32_to_fp16(x);
      std::memcpy(&result[i * 2], &h, 2);
    }
  }
  return result;
}

// The first element whose bytes differ, with its row and column; empty if there is none.
std::string first_difference(const std::vector<float>& got, const std::vector<float>& want,
                             std::int64_t width) {
  if (got.size() != want.size()) return "sizes differ";
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &want[i], 4) == 0) continue;
    unsigned char a[4], b[4];
    std::memcpy(a, &got[i], 4);
    std::memcpy(b, &want[i], 4);
    std::size_t byte = 0;
    while (a[byte] == b[byte]) ++byte;
    char text[160];
    std::snprintf(text, sizeof text, "byte %zu, row %lld column %lld: got %08x, want %08x",
                  4 * i + byte, static_cast<long long>(static_cast<std::int64_t>(i) / width),
                  static_cast<long long>(static_cast<std::int64_t>(i) % width), bits_of(got[i]),
                  bits_of(want[i]));
    return text;
  }
  return "";
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device: " << cuda_unavailable_reason();
    static const std::unique_ptr<Backend> backend = make_cuda_backend(0);
    cuda_ = backend.get();
  }

  template <class T>
  Buffer upload(const std::vector<T>& host) {
    Buffer buffer = cuda_->allocate(host.size() * sizeof(T));
    cuda_->to_device(buffer.as<void>(), host.data(), host.size() * sizeof(T));
    return buffer;
  }
  // A buffer of NaNs: elements that are not written show.
  Buffer poisoned(std::int64_t count) {
    return upload(std::vector<float>(static_cast<std::size_t>(count), float_of(0x7fc0dead)));
  }
  std::vector<float> download(const Buffer& buffer, std::int64_t count) {
    std::vector<float> host(static_cast<std::size_t>(count));
    cuda_->to_host(host.data(), buffer.as<void>(), host.size() * sizeof(float));
    return host;
  }

  Backend* cuda_ = nullptr;
  ReferenceBackend reference_;
};

// Rows of a step in host and device memory.
struct Rows {
  std::vector<std::int32_t> slot, position;
  Buffer device_slot, device_position;
  RowMap host() const {
    return {static_cast<std::int64_t>(slot.size()), slot.data(), position.data(), slot.data(),
            position.data()};
  }
  RowMap device() const {
    return {static_cast<std::int64_t>(slot.size()), device_slot.as<std::int32_t>(),
            device_position.as<std::int32_t>(), slot.data(), position.data()};
  }
};

// ---- Matrix product

class CudaMatmulTest : public CudaTest {
 protected:
  // Compares every output if there are few, else the borders and a sample: the reference is slow.
  void compare(Dtype dtype, std::int64_t M, std::int64_t N, std::int64_t K, int lead = 0,
               int spread = 4) {
    const std::uint64_t seed = static_cast<std::uint64_t>(M * 1000003 + N * 1009 + K);
    const std::vector<float> x = values(M * K, seed, spread);
    const std::vector<std::byte> w = weights(dtype, N * K, seed + 1, lead, spread);
    const Buffer device_x = upload(x), device_w = upload(w), device_y = poisoned(M * N);
    const std::size_t skip = static_cast<std::size_t>(lead) * dtype_bytes(dtype);
    cuda_->matmul(device_y.as<float>(), device_x.as<float>(),
                  {dtype, N, K, device_w.as<std::byte>() + skip}, M);
    const std::vector<float> y = download(device_y, M * N);
    const std::int64_t step = std::max<std::int64_t>(1, M * N * K / 6'000'000);
    for (std::int64_t i = 0; i < M * N; ++i) {
      const std::int64_t m = i / N, n = i % N;
      const float got = y[static_cast<std::size_t>(i)];
      const bool border = (n == 0 || n == N - 1) && (m == 0 || m == M - 1);
      if (i % step != 0 && !border) {
        ASSERT_NE(bits_of(got), 0x7fc0deadu) << "not written: " << m << ", " << n;
        continue;
      }
      const float* row = x.data() + m * K;
      const void* data = w.data() + skip;
      const float want =
          dtype == Dtype::kBf16   ? contract::matmul_element<Dtype::kBf16>(K, row, data, n)
          : dtype == Dtype::kFp16 ? contract::matmul_element<Dtype::kFp16>(K, row, data, n)
                                  : contract::matmul_element<Dtype::kFp32>(K, row, data, n);
      ASSERT_EQ(bits_of(got), bits_of(want))
          << dtype_name(dtype) << " M " << M << " N " << N << " K " << K << " lead " << lead
          << ": first difference at byte " << 4 * i << ", row " << m << " column " << n;
    }
  }
};

constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32};
constexpr std::int64_t kDepths[] = {1,   7,    8,    9,    63,   64,   65,   100,  192,
                                    512, 1000, 1023, 1024, 1025, 2048, 2050, 4096, 5000};

TEST_F(CudaMatmulTest, EveryDepthAtDecodeAndPrefill) {
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t K : kDepths) {
      for (const std::int64_t M : {1, 2, 3, 8, 17, 65}) {
        compare(dtype, M, K < 300 ? 65 : 31, K);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaMatmulTest, EveryNumberOfRowsAndColumns) {
  for (const std::int64_t M : {1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 130}) {
    for (const std::int64_t N : {1, 3, 4, 31, 64, 65, 200}) {
      for (const std::int64_t K : {192, 1032, 1025}) {
        compare(Dtype::kBf16, M, N, K);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaMatmulTest, MisalignedRows) {
  for (const Dtype dtype : kDtypes) {
    for (const int lead : {1, 2, 3, 4}) {
      for (const std::int64_t M : {1, 4, 33}) {
        compare(dtype, M, 33, 1088, lead);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaMatmulTest, LargeTiles) {  // enough tiles for the large one on any device
  for (const Dtype dtype : kDtypes) {
    compare(dtype, 257, 4100, 520);
    compare(dtype, 130, 8192, 1000);
    compare(dtype, 129, 8200, 77);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaMatmulTest, ManySegments) {  // more than one round of segments, x too large to stage
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t K : {14336, 16384, 16392, 40000, 70001}) {
      for (const std::int64_t M : {1, 2, 4, 8, 20}) {
        compare(dtype, M, 37, K);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaMatmulTest, WideExponentsAndSubnormalSums) {
  for (const std::int64_t M : {1, 3, 8, 40}) {
    compare(Dtype::kBf16, M, 65, 1096, 0, 60);
    compare(Dtype::kFp16, M, 65, 1096, 0, 14);
    compare(Dtype::kFp32, M, 65, 1096, 0, 62);
    compare(Dtype::kFp32, M, 33, 1001, 0, 62);
    if (HasFatalFailure()) return;
  }
  // Products that are subnormal, and zeros of both signs: -0 sums must come out as -0 where they
  // do.
  const std::int64_t N = 64, K = 72;
  for (const std::int64_t M : {1, 2, 4, 8, 64}) {
    std::vector<float> x(static_cast<std::size_t>(M * K)), w(static_cast<std::size_t>(N * K));
    Words words(5);
    for (float& v : x)
      v = float_of((words.next() & 0x80000000u) | (0x1f800000u + words.next() % 4096));
    for (float& v : w)
      v = float_of((words.next() & 0x80000000u) | (words.next() % 3 != 0 ? 0x1f000000u : 0u));
    std::fill(w.begin(), w.begin() + K, -0.0f);
    std::fill(x.begin(), x.begin() + K, 1.0f);
    const Buffer device_x = upload(x), device_w = upload(w), device_y = poisoned(M * N);
    cuda_->matmul(device_y.as<float>(), device_x.as<float>(),
                  {Dtype::kFp32, N, K, device_w.as<std::byte>()}, M);
    std::vector<float> want(static_cast<std::size_t>(M * N));
    reference_.matmul(want.data(), x.data(),
                      {Dtype::kFp32, N, K, reinterpret_cast<const std::byte*>(w.data())}, M);
    EXPECT_EQ(first_difference(download(device_y, M * N), want, N), "") << "M " << M;
  }
}

TEST_F(CudaMatmulTest, RowsDoNotDependOnTheBatch) {
  const std::int64_t N = 200, K = 2056, most = 140;
  const std::vector<float> x = values(most * K, 3);
  const Buffer device_x = upload(x), device_w = upload(weights(Dtype::kBf16, N * K, 4));
  std::vector<float> alone;
  for (std::int64_t m = 0; m < most; ++m) {
    const Buffer y = poisoned(N);
    cuda_->matmul(y.as<float>(), device_x.as<float>() + m * K,
                  {Dtype::kBf16, N, K, device_w.as<std::byte>()}, 1);
    const std::vector<float> row = download(y, N);
    alone.insert(alone.end(), row.begin(), row.end());
  }
  for (const std::int64_t M : {2, 5, 8, 9, 15, 16, 17, 24, 32, 33, 64, 100, 140}) {
    const Buffer y = poisoned(M * N);
    cuda_->matmul(y.as<float>(), device_x.as<float>(),
                  {Dtype::kBf16, N, K, device_w.as<std::byte>()}, M);
    EXPECT_EQ(first_difference(download(y, M * N), {alone.begin(), alone.begin() + M * N}, N), "")
        << "M " << M;
  }
}

// ---- Rows and elements

TEST_F(CudaTest, RmsNorm) {
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t K :
         {1, 16, 31, 64, 80, 128, 255, 256, 257, 511, 512, 513, 1000, 4096, 5001}) {
      for (const std::int64_t M : {1, 3, 70}) {
        const std::vector<float> x = values(M * K, 7, M == 3 ? 60 : 4);
        const std::vector<std::byte> w = weights(dtype, K, 8);
        const Buffer device_x = upload(x), device_w = upload(w), device_y = poisoned(M * K);
        std::vector<float> want(x.size());
        reference_.rms_norm(want.data(), x.data(), {dtype, K, w.data()}, 1e-5f, M);
        const Vector weight{dtype, K, device_w.as<std::byte>()};
        cuda_->rms_norm(device_y.as<float>(), device_x.as<float>(), weight, 1e-5f, M);
        EXPECT_EQ(first_difference(download(device_y, M * K), want, K), "")
            << "K " << K << " M " << M;
        cuda_->rms_norm(device_x.as<float>(), device_x.as<float>(), weight, 1e-5f, M);
        EXPECT_EQ(first_difference(download(device_x, M * K), want, K), "") << "in place, K " << K;
      }
    }
  }
}

TEST_F(CudaTest, EmbedGatherAddSwiglu) {
  for (const std::int64_t width : {1, 33, 256, 4096}) {
    const std::vector<std::int32_t> tokens = {5, 0, 12, 12, 7};
    const auto M = static_cast<std::int64_t>(tokens.size());
    const Buffer device_tokens = upload(tokens);
    for (const Dtype dtype : kDtypes) {
      const std::vector<std::byte> table = weights(dtype, 13 * width, 9);
      const Buffer device_table = upload(table), out = poisoned(M * width);
      std::vector<float> want(static_cast<std::size_t>(M * width));
      reference_.embed(want.data(), {dtype, 13, width, table.data()}, tokens.data(), M);
      cuda_->embed(out.as<float>(), {dtype, 13, width, device_table.as<std::byte>()},
                   device_tokens.as<std::int32_t>(), M);
      EXPECT_EQ(first_difference(download(out, M * width), want, width), "") << dtype_name(dtype);
    }
    const std::vector<float> x = values(13 * width, 10, 60);
    const Buffer device_x = upload(x), gathered = poisoned(M * width);
    std::vector<float> want(static_cast<std::size_t>(M * width));
    reference_.gather_rows(want.data(), x.data(), width, tokens.data(), M);
    cuda_->gather_rows(gathered.as<float>(), device_x.as<float>(), width,
                       device_tokens.as<std::int32_t>(), M);
    EXPECT_EQ(first_difference(download(gathered, M * width), want, width), "");
  }
  const std::int64_t count = 1'000'003;  // more than one round of the grid
  const std::vector<float> a = values(count, 11, 8), b = values(count, 12, 120);
  std::vector<float> want(a.size());
  const Buffer device_a = upload(a), device_b = upload(b), out = poisoned(count);
  reference_.swiglu(want.data(), a.data(), b.data(), count);
  cuda_->swiglu(out.as<float>(), device_a.as<float>(), device_b.as<float>(), count);
  EXPECT_EQ(first_difference(download(out, count), want, count), "");
  const Buffer gate = upload(a), up = upload(b);
  cuda_->swiglu(gate.as<float>(), gate.as<float>(), device_b.as<float>(), count);
  cuda_->swiglu(up.as<float>(), device_a.as<float>(), up.as<float>(), count);
  EXPECT_EQ(first_difference(download(gate, count), want, count), "") << "in place on gate";
  EXPECT_EQ(first_difference(download(up, count), want, count), "") << "in place on up";
  want = a;
  reference_.add(want.data(), b.data(), count);
  cuda_->add(device_a.as<float>(), device_b.as<float>(), count);
  EXPECT_EQ(first_difference(download(device_a, count), want, count), "");
}

class CudaRowsTest : public CudaTest {
 protected:
  Rows rows(std::vector<std::int32_t> slot, std::vector<std::int32_t> position) {
    Rows result{std::move(slot), std::move(position), {}, {}};
    result.device_slot = upload(result.slot);
    result.device_position = upload(result.position);
    return result;
  }
};

TEST_F(CudaRowsTest, RopeAndStoreKv) {
  const std::int64_t positions = 70, slots = 3;
  const Rows step = rows({0, 0, 1, 2, 2}, {0, 1, 69, 63, 64});
  const std::int64_t M = 5;
  for (const std::int64_t head_dim : {2, 16, 80, 96, 128, 256}) {
    for (const std::int64_t heads : {1, 3, 8}) {
      const std::int64_t width = heads * head_dim;
      const std::vector<float> cosines = values(positions * head_dim / 2, 20, 1);
      const std::vector<float> sines = values(positions * head_dim / 2, 21, 1);
      std::vector<float> x = values(M * width, 22);
      const Buffer device_x = upload(x), c = upload(cosines), s = upload(sines);
      cuda_->rope(device_x.as<float>(), heads, head_dim, c.as<float>(), s.as<float>(),
                  step.device());
      reference_.rope(x.data(), heads, head_dim, cosines.data(), sines.data(), step.host());
      EXPECT_EQ(first_difference(download(device_x, M * width), x, width), "") << head_dim;

      const std::int64_t count = slots * positions * width;
      std::vector<float> keys = values(count, 23), cached = values(count, 24);
      const std::vector<float> v = values(M * width, 25);
      const Buffer device_keys = upload(keys), device_values = upload(cached), device_v = upload(v);
      cuda_->store_kv({device_keys.as<float>(), device_values.as<float>(), positions, width},
                      device_x.as<float>(), device_v.as<float>(), step.device());
      reference_.store_kv({keys.data(), cached.data(), positions, width}, x.data(), v.data(),
                          step.host());
      EXPECT_EQ(first_difference(download(device_keys, count), keys, width), "");
      EXPECT_EQ(first_difference(download(device_values, count), cached, width), "");
    }
  }
}

TEST_F(CudaRowsTest, Attention) {
  struct Shape {
    std::int64_t heads, kv_heads, head_dim;
  };
  const std::int64_t capacity = 330, slots = 2;
  // Few rows split the key blocks over thread blocks, many do not: both orders, all block borders.
  std::vector<std::int32_t> many_slots, many_positions;
  for (std::int32_t p = 0; p < 330; p += (p % 64 >= 61 || p % 64 <= 2) ? 1 : 7) {
    many_slots.push_back(p % 2);
    many_positions.push_back(p);
  }
  const Rows steps[] = {
      rows({1}, {0}),   rows({0}, {63}),  rows({1}, {64}),        rows({0}, {127}),
      rows({0}, {128}), rows({1}, {329}), rows({0, 1}, {5, 300}), rows(many_slots, many_positions)};
  for (const Shape shape :
       {Shape{4, 1, 16}, Shape{2, 2, 32}, Shape{6, 3, 80}, Shape{3, 1, 96}, Shape{8, 2, 128},
        Shape{2, 1, 256}, Shape{1, 1, 20}, Shape{4, 4, 7}, Shape{4, 1, 64}, Shape{4, 1, 1024}}) {
    const std::int64_t q_width = shape.heads * shape.head_dim;
    const std::int64_t kv_width = shape.kv_heads * shape.head_dim;
    std::vector<float> keys = values(slots * capacity * kv_width, 30, 1);
    std::vector<float> cached = values(slots * capacity * kv_width, 31, 20);
    const Buffer device_keys = upload(keys), device_values = upload(cached);
    for (const Rows& step : steps) {
      const auto M = static_cast<std::int64_t>(step.slot.size());
      if (M > 2 && shape.head_dim > 256) continue;  // slow in the reference
      const std::vector<float> q = values(M * q_width, 32, 1);
      const Buffer device_q = upload(q), out = poisoned(M * q_width);
      std::vector<float> want(q.size());
      reference_.attention(want.data(), q.data(), {keys.data(), cached.data(), capacity, kv_width},
                           shape.heads, shape.kv_heads, shape.head_dim, step.host());
      cuda_->attention(out.as<float>(), device_q.as<float>(),
                       {device_keys.as<float>(), device_values.as<float>(), capacity, kv_width},
                       shape.heads, shape.kv_heads, shape.head_dim, step.device());
      EXPECT_EQ(first_difference(download(out, M * q_width), want, q_width), "")
          << "heads " << shape.heads << "/" << shape.kv_heads << " head_dim " << shape.head_dim
          << " rows " << M << " last position " << step.position.back();
    }
  }
}

TEST_F(CudaRowsTest, AttentionSkipsStaleKeys) {  // what lies beyond the position must not poison
  const std::int64_t capacity = 128, width = 64;
  std::vector<float> keys = values(capacity * width, 33, 1),
                     cached = values(capacity * width, 34, 1);
  for (std::int64_t i = 70 * width; i < capacity * width; ++i) {
    keys[static_cast<std::size_t>(i)] = cached[static_cast<std::size_t>(i)] = float_of(0x7fc00000);
  }
  const Rows step = rows({0, 0}, {3, 69});
  const std::vector<float> q = values(2 * width, 35, 1);
  const Buffer device_keys = upload(keys), device_values = upload(cached), device_q = upload(q);
  const Buffer out = poisoned(2 * width);
  std::vector<float> want(q.size());
  reference_.attention(want.data(), q.data(), {keys.data(), cached.data(), capacity, width}, 1, 1,
                       width, step.host());
  cuda_->attention(out.as<float>(), device_q.as<float>(),
                   {device_keys.as<float>(), device_values.as<float>(), capacity, width}, 1, 1,
                   width, step.device());
  EXPECT_EQ(first_difference(download(out, 2 * width), want, width), "");
}

TEST_F(CudaRowsTest, HashRows) {
  const Rows step = rows({0, 0, 1, 0, 2}, {0, 1, 1000, 64, 2147483647});
  const std::size_t M = 5;
  for (const std::size_t first : {1u, 2u, 63u, 255u, 256u, 257u, 512u, 1000u, 4096u, 40000u}) {
    for (const std::size_t second : {0u, 1u, 192u, 256u, 1024u}) {
      const std::vector<float> a = values(static_cast<std::int64_t>(M * first), first, 60);
      const std::vector<float> b = values(static_cast<std::int64_t>(M * second), second + 1, 60);
      const Buffer device_a = upload(a), device_b = upload(b);
      std::vector<Digest> got(M), want(M);
      const LeafType type = second == 0 ? LeafType::kRow : LeafType::kKeyValue;
      cuda_->hash_rows(got.data(), type, 31, device_a.as<float>(), first * 4,
                       second == 0 ? nullptr : device_b.as<float>(), second * 4, step.device());
      reference_.hash_rows(want.data(), type, 31, a.data(), first * 4,
                           second == 0 ? nullptr : b.data(), second * 4, step.host());
      for (std::size_t m = 0; m < M; ++m) {
        EXPECT_EQ(got[m].hex(), want[m].hex()) << first << " + " << second << " words, row " << m;
      }
    }
  }
}

TEST_F(CudaTest, FindNonFinite) {
  const std::int64_t width = 1001, M = 3000;
  std::vector<float> x = values(width * M, 40, 60);
  const auto find = [&] {
    const Buffer device_x = upload(x);
    return cuda_->find_non_finite(device_x.as<float>(), width, M);
  };
  EXPECT_EQ(find().row, -1);
  struct At {
    std::int64_t row, element;
  };
  // From the last to the first: each new one precedes those that are there.
  for (const At at :
       {At{2999, 1000}, At{2999, 0}, At{1500, 777}, At{1500, 776}, At{0, 1000}, At{0, 0}}) {
    const std::uint32_t bits[] = {0x7f800000u, 0xff800000u, 0x7fc00001u};
    x[static_cast<std::size_t>(at.row * width + at.element)] =
        float_of(bits[static_cast<std::size_t>(at.element) % 3]);
    const NonFinite found = find();
    EXPECT_EQ(found.row, at.row);
    EXPECT_EQ(found.element, at.element);
  }
}

// ---- Sampler

TEST_F(CudaTest, Sampler) {
  for (const std::int64_t vocab : {1, 2, 31, 1000, 1024, 1025, 32000, 150000}) {
    for (const int kind : {0, 1, 2}) {
      // Spread, many ties with zeros of both signs, all equal.
      std::vector<float> row = values(vocab, static_cast<std::uint64_t>(vocab + kind), 3);
      Words words(50);
      if (kind == 1) {
        for (float& x : row) {
          x = static_cast<float>(words.next() % 7) - 3.0f;
          if (x == 0.0f && words.next() % 2) x = -0.0f;
        }
      }
      if (kind == 2) std::fill(row.begin(), row.end(), -1.5f);
      std::vector<SampleRequest> requests;
      for (const float temperature : {0.0f, 0.05f, 1.0f, 30.0f}) {
        for (const std::uint32_t top_k : {0u, 1u, 2u, 40u, 5000u, 200000u}) {
          for (const float top_p : {1.0f, 0.9f, 0.3f, 1e-9f}) {
            const std::uint64_t draws[] = {0, ~std::uint64_t{0},
                                           std::uint64_t{words.next()} << 32 | words.next()};
            for (const std::uint64_t draw : draws) {
              requests.push_back({{temperature, top_k, top_p}, draw});
            }
          }
        }
      }
      if (vocab > 50000) {  // the reference sorts: every third is enough
        std::vector<SampleRequest> some;
        for (std::size_t i = static_cast<std::size_t>(kind); i < requests.size(); i += 7) {
          some.push_back(requests[i]);
        }
        requests = some;
      }
      std::vector<float> logits;
      for (std::size_t i = 0; i < requests.size(); ++i) {
        logits.insert(logits.end(), row.begin(), row.end());
      }
      const Buffer device_logits = upload(logits);
      std::vector<std::int32_t> got(requests.size(), -1);
      cuda_->sample(got.data(), device_logits.as<float>(), vocab, requests);
      for (std::size_t i = 0; i < requests.size(); ++i) {
        const contract::SamplingParams& p = requests[i].params;
        ASSERT_EQ(got[i], sample_token(row.data(), vocab, p, requests[i].draw))
            << "vocab " << vocab << " kind " << kind << " temperature " << p.temperature
            << " top_k " << p.top_k << " top_p " << p.top_p << " draw " << requests[i].draw;
      }
    }
  }
}

// ---- Memory and errors

TEST_F(CudaTest, OutOfMemoryNamesTheAmounts) {
  try {
    cuda_->allocate(std::size_t{1} << 46);
    FAIL() << "64 TiB of device memory were given out";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInfrastructure);
    EXPECT_NE(std::string(e.what()).find("asked for"), std::string::npos) << e.what();
  }
  const Buffer x = upload(std::vector<float>{1.0f, 2.0f});  // and the backend goes on
  EXPECT_EQ(download(x, 2), (std::vector<float>{1.0f, 2.0f}));
}

TEST_F(CudaTest, DescribesTheDevice) {
  EXPECT_EQ(cuda_->name(), "cuda");
  EXPECT_NE(cuda_->device().find("compute capability"), std::string::npos) << cuda_->device();
  EXPECT_NE(cuda_->device().find("UUID GPU-"), std::string::npos);
}

TEST(CudaAbsent, OrdinalOutOfRangeIsAUsageError) {
  try {
    make_cuda_backend(cuda_device_count());
    FAIL() << "made a backend on a device that does not exist";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUsage) << e.what();
    EXPECT_NE(std::string(e.what()).find("cuda"), std::string::npos);
  }
  EXPECT_EQ(cuda_device_count() == 0, !cuda_unavailable_reason().empty());
}

}  // namespace
}  // namespace bitwitness
