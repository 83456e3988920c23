// The operators of the CUDA backend, all but the products (product_test.cc), against the reference:
// equal bytes on boundary shapes and poisoned outputs. Skipped by name where there is no device.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "kernels/contract.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/sampler.h"
#include "tests/kernels/cuda/cuda_fixture.h"
#include "tests/kernels/paged_cache.h"

namespace bitwitness::test {
namespace {

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
  reference_.add(want.data(), a.data(), b.data(), count);
  const Buffer sum = poisoned(count);
  cuda_->add(sum.as<float>(), device_a.as<float>(), device_b.as<float>(), count);
  EXPECT_EQ(first_difference(download(sum, count), want, count), "");
  cuda_->add(device_a.as<float>(), device_a.as<float>(), device_b.as<float>(), count);
  EXPECT_EQ(first_difference(download(device_a, count), want, count), "") << "in place";
}

class CudaRowsTest : public CudaTest {
 protected:
  Rows rows(std::vector<std::int32_t> slot, std::vector<std::int32_t> position) {
    Rows result;
    result.slot = std::move(slot);
    result.position = std::move(position);
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
      const Buffer device_v = upload(v);
      PagedCache device(*cuda_, slots, positions, width, keys, cached);
      PagedCache host(reference_, slots, positions, width, keys, cached);
      cuda_->store_kv(device.layer(), device_x.as<float>(), device_v.as<float>(), step.device());
      reference_.store_kv(host.layer(), x.data(), v.data(), step.host());
      std::vector<float> got_keys, got_values;
      device.read(got_keys, got_values);
      host.read(keys, cached);
      EXPECT_EQ(first_difference(got_keys, keys, width), "");
      EXPECT_EQ(first_difference(got_values, cached, width), "");
    }
  }
}

// Norms, rotation and cache rows in one pass, as a layer has them.
TEST_F(CudaRowsTest, RopeStore) {
  const std::int64_t positions = 140, slots = 3;
  const Rows steps[] = {rows({2}, {0}), rows({0, 0, 1, 2, 2}, {0, 1, 139, 63, 64}),
                        rows({1, 0, 2}, {127, 128, 5})};
  for (const Rows& step : steps) {
    const auto M = static_cast<std::int64_t>(step.slot.size());
    for (const std::int64_t head_dim : {2, 16, 64, 80, 96, 128, 256}) {
      for (const bool norms : {false, true}) {
        for (const Dtype dtype : kDtypes) {
          const std::int64_t heads = 6, kv_heads = 2;
          const std::int64_t q_width = heads * head_dim, kv_width = kv_heads * head_dim;
          const std::vector<float> cosines = values(positions * head_dim / 2, 20, 1);
          const std::vector<float> sines = values(positions * head_dim / 2, 21, 1);
          std::vector<float> q = values(M * q_width, 22), k = values(M * kv_width, 23);
          const std::vector<float> v = values(M * kv_width, 24);
          const std::vector<std::byte> q_weight = weights(dtype, head_dim, 25);
          const std::vector<std::byte> k_weight = weights(dtype, head_dim, 26);
          const std::int64_t count = slots * positions * kv_width;
          std::vector<float> keys = values(count, 27), cached = values(count, 28);
          PagedCache device(*cuda_, slots, positions, kv_width, keys, cached);
          PagedCache host(reference_, slots, positions, kv_width, keys, cached);
          const Buffer device_q = upload(q), device_k = upload(k), device_v = upload(v);
          const Buffer c = upload(cosines), s = upload(sines);
          const Buffer device_q_weight = upload(q_weight), device_k_weight = upload(k_weight);
          const auto run = [&](Backend& backend, float* q_at, float* k_at, const float* v_at,
                               const float* cosines_at, const float* sines_at,
                               const std::byte* q_norm, const std::byte* k_norm,
                               const PagedCache& cache, const RowMap& map) {
            const Vector q_vector{dtype, head_dim, q_norm}, k_vector{dtype, head_dim, k_norm};
            const LayerKv layer = cache.layer();
            RopeStore a;
            a.q = q_at, a.k = k_at, a.v = v_at;
            a.q_norm = norms ? &q_vector : nullptr;
            a.k_norm = norms ? &k_vector : nullptr;
            a.eps = 1e-6f;
            a.cosines = cosines_at, a.sines = sines_at;
            a.heads = heads, a.kv_heads = kv_heads, a.head_dim = head_dim;
            a.cache = &layer;
            backend.rope_store(a, map);
          };
          run(*cuda_, device_q.as<float>(), device_k.as<float>(), device_v.as<float>(),
              c.as<float>(), s.as<float>(), device_q_weight.as<std::byte>(),
              device_k_weight.as<std::byte>(), device, step.device());
          run(reference_, q.data(), k.data(), v.data(), cosines.data(), sines.data(),
              q_weight.data(), k_weight.data(), host, step.host());
          EXPECT_EQ(first_difference(download(device_q, M * q_width), q, q_width), "") << head_dim;
          EXPECT_EQ(first_difference(download(device_k, M * kv_width), k, kv_width), "")
              << head_dim;
          std::vector<float> got_keys, got_values;
          device.read(got_keys, got_values);
          host.read(keys, cached);
          EXPECT_EQ(first_difference(got_keys, keys, kv_width), "") << head_dim;
          EXPECT_EQ(first_difference(got_values, cached, kv_width), "") << head_dim;
        }
      }
    }
  }
}

TEST_F(CudaRowsTest, Attention) {
  struct Shape {
    std::int64_t heads, kv_heads, head_dim;
  };
  const std::int64_t capacity = 330, slots = 2;
  // One row of each sequence (decode), a whole prompt and pieces of two (prefill).
  std::vector<std::int32_t> whole_slots, whole_positions, mixed_slots, mixed_positions;
  for (std::int32_t p = 0; p < 200; ++p) {
    whole_slots.push_back(1);
    whole_positions.push_back(p);
  }
  for (const std::int32_t slot : {0, 1}) {
    for (std::int32_t p = slot == 0 ? 50 : 301; p < (slot == 0 ? 139 : 330); ++p) {
      mixed_slots.push_back(slot);
      mixed_positions.push_back(p);
    }
  }
  const Rows steps[] = {rows({1}, {0}),
                        rows({0}, {63}),
                        rows({1}, {64}),
                        rows({0}, {127}),
                        rows({0}, {128}),
                        rows({1}, {329}),
                        rows({0, 1}, {5, 300}),
                        rows({1, 1, 1}, {62, 63, 64}),
                        rows(whole_slots, whole_positions),
                        rows(mixed_slots, mixed_positions)};
  for (const Shape shape :
       {Shape{4, 1, 16}, Shape{2, 2, 32}, Shape{6, 3, 80}, Shape{3, 1, 96}, Shape{8, 2, 128},
        Shape{2, 1, 256}, Shape{1, 1, 20}, Shape{4, 4, 7}, Shape{4, 1, 64}, Shape{4, 1, 1024}}) {
    const std::int64_t q_width = shape.heads * shape.head_dim;
    const std::int64_t kv_width = shape.kv_heads * shape.head_dim;
    std::vector<float> keys = values(slots * capacity * kv_width, 30, 1);
    std::vector<float> cached = values(slots * capacity * kv_width, 31, 20);
    const PagedCache device(*cuda_, slots, capacity, kv_width, keys, cached);
    const PagedCache host(reference_, slots, capacity, kv_width, keys, cached);
    for (const Rows& step : steps) {
      const auto M = static_cast<std::int64_t>(step.slot.size());
      if (M > 2 && shape.head_dim > 256) continue;  // slow in the reference
      const std::vector<float> q = values(M * q_width, 32, 1);
      const Buffer device_q = upload(q);
      std::vector<float> want(q.size());
      reference_.attention(want.data(), q.data(), host.layer(), shape.heads, shape.kv_heads,
                           shape.head_dim, step.host());
      // As a step has it, and as a recorded one may: sized for a longer context.
      for (const std::int64_t slack : {0, 128}) {
        RowMap map = step.device();
        map.context = std::min(map.context + slack, (capacity + 63) / 64 * 64);
        const Buffer fresh = poisoned(M * q_width);
        cuda_->attention(fresh.as<float>(), device_q.as<float>(), device.layer(), shape.heads,
                         shape.kv_heads, shape.head_dim, map);
        EXPECT_EQ(first_difference(download(fresh, M * q_width), want, q_width), "")
            << "heads " << shape.heads << "/" << shape.kv_heads << " head_dim " << shape.head_dim
            << " rows " << M << " last position " << step.position.back() << " slack " << slack;
      }
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
  const Buffer device_q = upload(q), out = poisoned(2 * width);
  const PagedCache device(*cuda_, 1, capacity, width, keys, cached);
  const PagedCache host(reference_, 1, capacity, width, keys, cached);
  std::vector<float> want(q.size());
  reference_.attention(want.data(), q.data(), host.layer(), 1, 1, width, step.host());
  cuda_->attention(out.as<float>(), device_q.as<float>(), device.layer(), 1, 1, width,
                   step.device());
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
      for (const std::int64_t layers : {1, 5}) {  // five rows of a layer, a row of five layers
        RowMap host = step.host(), device = step.device();
        host.rows = device.rows = 5 / layers;
        const Buffer digests = upload(std::vector<Digest>(M));
        const Buffer flag = upload(std::vector<std::uint32_t>{0});
        cuda_->hash_rows(digests.as<Digest>(), flag.as<std::uint32_t>(), type, 31, layers,
                         device_a.as<float>(), first * 4,
                         second == 0 ? nullptr : device_b.as<float>(), second * 4, device);
        cuda_->finish_hashing();
        cuda_->to_host(got.data(), digests.as<void>(), digests.bytes());
        std::uint32_t non_finite = 2, unset = 0;
        cuda_->to_host(&non_finite, flag.as<void>(), sizeof non_finite);
        EXPECT_EQ(non_finite, 0u);
        reference_.hash_rows(want.data(), &unset, type, 31, layers, a.data(), first * 4,
                             second == 0 ? nullptr : b.data(), second * 4, host);
        for (std::size_t m = 0; m < M; ++m) {
          EXPECT_EQ(got[m].hex(), want[m].hex()) << first << " + " << second << " words, row " << m;
        }
      }
    }
  }
}

TEST_F(CudaTest, FindNonFinite) {
  const std::int64_t width = 1001, M = 3000;
  std::vector<float> x = values(width * M, 40, 60);
  const auto find = [&] {
    const Buffer device_x = upload(x), flag = upload(std::vector<std::uint32_t>{0});
    const NonFinite found = cuda_->find_non_finite(device_x.as<float>(), width, M);
    cuda_->flag_non_finite(flag.as<std::uint32_t>(), device_x.as<float>(), width * M);
    cuda_->finish_hashing();
    std::uint32_t any = 2;
    cuda_->to_host(&any, flag.as<void>(), sizeof any);
    EXPECT_EQ(any, found.row < 0 ? 0u : 1u);
    return found;
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
      // All together, and those of each kind by themselves, with what is not among them left out.
      struct Kinds {
        SampleKinds said;
        bool exact;
      };
      for (const Kinds& kinds :
           {Kinds{{}, false}, Kinds{{false, false, false}, true}, Kinds{{true, false, false}, true},
            Kinds{{true, true, false}, true}, Kinds{{true, false, true}, true}}) {
        std::vector<SampleRequest> chosen;
        for (const SampleRequest& request : requests) {
          const contract::SamplingParams& p = request.params;
          const bool drawn = p.temperature != 0;
          if (kinds.exact && (drawn != kinds.said.drawn || (p.top_k != 0) != kinds.said.top_k ||
                              (p.top_p < 1) != kinds.said.top_p)) {
            continue;
          }
          chosen.push_back(request);
        }
        if (chosen.empty()) continue;
        std::vector<float> logits;
        for (std::size_t i = 0; i < chosen.size(); ++i) {
          logits.insert(logits.end(), row.begin(), row.end());
        }
        const Buffer device_logits = upload(logits), device_requests = upload(chosen);
        std::vector<std::int32_t> got(chosen.size(), -1);
        const Buffer tokens = upload(got);
        cuda_->sample(tokens.as<std::int32_t>(), device_logits.as<float>(), vocab,
                      device_requests.as<SampleRequest>(), static_cast<std::int64_t>(chosen.size()),
                      kinds.said);
        cuda_->to_host(got.data(), tokens.as<void>(), tokens.bytes());
        for (std::size_t i = 0; i < chosen.size(); ++i) {
          const contract::SamplingParams& p = chosen[i].params;
          ASSERT_EQ(got[i], sample_token(row.data(), vocab, p, chosen[i].draw))
              << "vocab " << vocab << " kind " << kind << " temperature " << p.temperature
              << " top_k " << p.top_k << " top_p " << p.top_p << " draw " << chosen[i].draw;
        }
      }
    }
  }
}

// ---- Recorded steps

// What a step's arguments point to changes from run to run; recorded steps follow.
TEST_F(CudaRowsTest, RecordedStepsReadWhatStandsThereNow) {
  const std::int64_t N = 70, K = 1096;
  const Buffer w = upload(weights(Dtype::kBf16, N * K, 60)), x = poisoned(K), y = poisoned(N);
  const Buffer digest = upload(std::vector<Digest>(1));
  const Buffer flag = upload(std::vector<std::uint32_t>{0});
  const Matrix matrix{Dtype::kBf16, N, K, w.as<std::byte>()};
  const Rows one = rows({0}, {7});
  const std::unique_ptr<Recordings> recordings = cuda_->make_recordings();
  for (std::uint64_t run = 0; run < 6; ++run) {
    const std::vector<float> input = values(K, 61 + run);
    cuda_->to_device(x.as<void>(), input.data(), x.bytes());
    recordings->run(run % 2, [&] {  // two keys, the same step
      cuda_->matmul(y.as<float>(), x.as<float>(), matrix, 1);
      cuda_->hash_rows(digest.as<Digest>(), flag.as<std::uint32_t>(), LeafType::kRow, 1, 1,
                       y.as<float>(), N * 4, nullptr, 0, one.device());
      cuda_->finish_hashing();
    });
    Digest got, want;
    std::uint32_t unset = 0;
    cuda_->to_host(&got, digest.as<void>(), sizeof got);
    std::vector<float> product(static_cast<std::size_t>(N));
    const std::vector<std::byte> host_w = weights(Dtype::kBf16, N * K, 60);
    reference_.matmul(product.data(), input.data(), {Dtype::kBf16, N, K, host_w.data()}, 1);
    reference_.hash_rows(&want, &unset, LeafType::kRow, 1, 1, product.data(), N * 4, nullptr, 0,
                         one.host());
    EXPECT_EQ(got.hex(), want.hex()) << "run " << run;
  }
}

// ---- Memory and errors

TEST_F(CudaTest, MemoryThatIsNotThereIsSaidBeforehand) {
  EXPECT_NO_THROW(cuda_->require_memory(1 << 20, "the weights"));
  try {
    cuda_->require_memory(std::size_t{1} << 46, "the weights");
    FAIL() << "64 TiB of device memory would be there";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInfrastructure);
    EXPECT_NE(std::string(e.what()).find("the weights need 67108864 MiB"), std::string::npos)
        << e.what();
  }
}

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
}  // namespace bitwitness::test
