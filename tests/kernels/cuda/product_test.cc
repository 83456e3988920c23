// Matrix products of the CUDA backend: every variant of the table, at every number of rows and
// depth around its tiles, against the contract. Skipped by name where there is no device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "tests/kernels/cuda/cuda_fixture.h"

namespace bitwitness::test {
namespace {

// A product in host memory, with what it should give.
struct Case {
  Dtype dtype = Dtype::kBf16;
  std::int64_t M = 1, K = 1;
  std::vector<std::int64_t> N;  // of each part
  Epilogue epilogue = Epilogue::kStore;
  bool norm = false;
  bool in_place = false;  // kAdd: the residual is the output
  int lead = 0;           // elements before the weights: misaligns their rows
  int spread = 4;         // of exponents
};

class ProductTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped()) host_ = make_backend("cpu");  // equal to the reference, and faster
  }

  // Runs one product on the device and compares all of it with the host's composition.
  void check(const Case& c) {
    const std::uint64_t seed = static_cast<std::uint64_t>(c.M * 1000003 + c.N[0] * 1009 + c.K);
    const std::vector<float> x = values(c.M * c.K, seed, c.spread);
    const std::vector<std::byte> norm = weights(c.dtype, c.K, seed + 1);
    const std::vector<float> residual = values(c.M * c.N[0], seed + 2, c.spread);
    const std::size_t skip = static_cast<std::size_t>(c.lead) * dtype_bytes(c.dtype);
    std::vector<std::vector<std::byte>> host_w;
    std::vector<std::vector<float>> want;
    std::vector<Buffer> device_w, device_y;
    for (std::size_t i = 0; i < c.N.size(); ++i) {
      host_w.push_back(weights(c.dtype, c.N[i] * c.K, seed + 3 + i, c.lead, c.spread));
      device_w.push_back(upload(host_w.back()));
      want.emplace_back(static_cast<std::size_t>(c.M * c.N[i]));
      device_y.push_back(poisoned(c.M * c.N[i]));
    }
    const Buffer device_x = upload(x), device_norm = upload(norm),
                 device_residual = upload(residual);
    if (c.in_place) device_y[0] = upload(residual);
    const Buffer normed = poisoned(c.M * c.K), dots = poisoned(c.M * c.N[0]);
    std::vector<float> host_normed(x.size()), host_dots(residual.size());

    std::vector<Matrix> matrices(c.N.size());
    const auto product_of = [&](const float* rows, const Vector& weight, const float* added,
                                float* normed_at, float* dots_at) {
      Product p;
      p.x = rows;
      p.M = c.M;
      p.norm = c.norm ? &weight : nullptr;
      p.eps = 1e-5f;
      p.normed = normed_at;
      p.epilogue = c.epilogue;
      p.residual = added;
      p.dots = dots_at;
      p.part_count = static_cast<int>(c.N.size());
      return p;
    };
    const Vector host_weight{c.dtype, c.K, norm.data()};
    Product on_host =
        product_of(x.data(), host_weight, residual.data(), host_normed.data(), host_dots.data());
    for (std::size_t i = 0; i < c.N.size(); ++i) {
      matrices[i] = {c.dtype, c.N[i], c.K, host_w[i].data() + skip};
      on_host.parts[i] = {"", &matrices[i], want[i].data()};
    }
    host_->product(on_host);
    const Vector device_weight{c.dtype, c.K, device_norm.as<std::byte>()};
    const Buffer& added = c.in_place ? device_y[0] : device_residual;
    Product on_device = product_of(device_x.as<float>(), device_weight, added.as<float>(),
                                   normed.as<float>(), dots.as<float>());
    for (std::size_t i = 0; i < c.N.size(); ++i) {
      matrices[i] = {c.dtype, c.N[i], c.K, device_w[i].as<std::byte>() + skip};
      on_device.parts[i] = {"", &matrices[i], device_y[i].as<float>()};
    }
    cuda_->product(on_device);
    const std::size_t stored = c.epilogue == Epilogue::kSwiglu ? 1 : c.N.size();
    for (std::size_t i = 0; i < stored; ++i) {
      ASSERT_EQ(first_difference(download(device_y[i], c.M * c.N[i]), want[i], c.N[i]), "")
          << dtype_name(c.dtype) << " M " << c.M << " N " << c.N[i] << " K " << c.K << " part " << i
          << " epilogue " << static_cast<int>(c.epilogue) << " norm " << c.norm << " lead "
          << c.lead;
      compared_ += c.M * c.N[i];
    }
    ++cases_;
  }

  void TearDown() override {
    if (cases_ != 0) {
      std::cout << "products | " << testing::UnitTest::GetInstance()->current_test_info()->name()
                << ": " << cases_ << " products, " << compared_ << " outputs compared\n";
    }
  }

  std::unique_ptr<Backend> host_;
  std::int64_t cases_ = 0, compared_ = 0;
};

const std::int64_t kRows[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10,  11,  12,  13, 14,
                              15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 512};

TEST_F(ProductTest, EveryNumberOfRows) {
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t M : kRows) {
      for (const std::int64_t K : {64, 1032, 2056}) {
        for (const std::int64_t N : {1, 65, 260}) check({dtype, M, K, {N}});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(ProductTest, EveryDepth) {
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t K : {1,   7,   8,    9,    16,   63,   64,   65,   72,   100,  128,
                                 192, 512, 1000, 1023, 1024, 1025, 1088, 2048, 2050, 4096, 5000}) {
      for (const std::int64_t M : {1, 2, 3, 8, 12, 17, 40, 65, 130}) {
        check({dtype, M, K, {K < 300 ? 129 : 70}});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(ProductTest, EveryNumberOfColumns) {
  for (const std::int64_t N : {1,  2,  3,  7,   8,   9,   15,  16,  17,  31,  32,  33,
                               63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 1000}) {
    for (const std::int64_t M : {1, 2, 4, 8, 16, 32, 64, 128, 257}) {
      check({Dtype::kBf16, M, 1096, {N}});
      if (HasFatalFailure()) return;
    }
  }
}

// As a layer has them: three parts under a norm, a residual, gate and up.
TEST_F(ProductTest, LayersProducts) {
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t M : kRows) {
      for (const std::int64_t K : {72, 1024, 1544}) {
        for (const bool norm : {false, true}) {
          check({dtype, M, K, {192, 40, 40}, Epilogue::kStore, norm});
          check({dtype, M, K, {133, 133}, Epilogue::kSwiglu, norm});
        }
        check({dtype, M, K, {136}, Epilogue::kAdd});
        check({dtype, M, K, {67}, Epilogue::kAdd, false, true});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(ProductTest, MisalignedRows) {
  for (const Dtype dtype : kDtypes) {
    for (const int lead : {1, 2, 3, 4, 8}) {
      for (const std::int64_t M : {1, 4, 12, 33, 130}) {
        check({dtype, M, 1088, {33}, Epilogue::kStore, false, false, lead});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(ProductTest, ManyTiles) {  // more than the device has room for at once
  for (const Dtype dtype : kDtypes) {
    check({dtype, 257, 520, {4100}});
    check({dtype, 513, 1000, {8192}});
    check({dtype, 129, 77, {8200}});
    check({dtype, 40, 1096, {20000}});
    check({dtype, 3, 2056, {30001}});
    if (HasFatalFailure()) return;
  }
}

TEST_F(ProductTest, ManySegments) {  // more than fit a block at once, x too large to stage
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t K : {14336, 16384, 16392, 40000, 70001}) {
      for (const std::int64_t M : {1, 2, 4, 8, 16, 20, 64, 130}) {
        check({dtype, M, K, {37}, Epilogue::kStore, K == 16384});
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Sums that are subnormal, cancel, or overflow to infinity.
TEST_F(ProductTest, WideExponents) {
  for (const std::int64_t M : {1, 3, 8, 16, 40, 130}) {
    check({Dtype::kBf16, M, 1096, {65}, Epilogue::kStore, false, false, 0, 60});
    check({Dtype::kFp16, M, 1096, {65}, Epilogue::kStore, false, false, 0, 14});
    check({Dtype::kFp32, M, 1096, {65}, Epilogue::kStore, false, false, 0, 62});
    check({Dtype::kFp32, M, 1001, {33}, Epilogue::kStore, false, false, 0, 62});
    if (HasFatalFailure()) return;
  }
}

// Products that are subnormal, and zeros of both signs: sums that are -0 must come out as -0.
TEST_F(ProductTest, SubnormalsAndSignedZeros) {
  const std::int64_t N = 64, K = 72;
  for (const std::int64_t M : {1, 2, 4, 8, 16, 32, 64, 160}) {
    std::vector<float> x(static_cast<std::size_t>(M * K)), w(static_cast<std::size_t>(N * K));
    Words words(5);
    for (float& v : x)
      v = float_of((words.next() & 0x80000000u) | (0x1f800000u + words.next() % 4096));
    for (float& v : w)
      v = float_of((words.next() & 0x80000000u) | (words.next() % 3 != 0 ? 0x1f000000u : 0u));
    std::fill(w.begin(), w.begin() + K, -0.0f);
    std::fill(x.begin(), x.begin() + K, 1.0f);
    std::vector<std::uint16_t> w16;  // the same, exactly
    for (const float v : w) w16.push_back(contract::f32_to_bf16(v));
    const Buffer device_x = upload(x), device_w = upload(w), device_w16 = upload(w16);
    std::vector<float> want(static_cast<std::size_t>(M * N));
    reference_.matmul(want.data(), x.data(),
                      {Dtype::kFp32, N, K, reinterpret_cast<const std::byte*>(w.data())}, M);
    const Buffer y = poisoned(M * N), y16 = poisoned(M * N);
    cuda_->matmul(y.as<float>(), device_x.as<float>(),
                  {Dtype::kFp32, N, K, device_w.as<std::byte>()}, M);
    cuda_->matmul(y16.as<float>(), device_x.as<float>(),
                  {Dtype::kBf16, N, K, device_w16.as<std::byte>()}, M);
    EXPECT_EQ(first_difference(download(y, M * N), want, N), "") << "M " << M;
    EXPECT_EQ(first_difference(download(y16, M * N), want, N), "") << "bf16, M " << M;
  }
}

TEST_F(ProductTest, RowsDoNotDependOnTheBatch) {
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

}  // namespace
}  // namespace bitwitness::test
