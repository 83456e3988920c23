// The reference backend: loops over the functions of contract.h in host memory, on the calling
// thread. It defines what every other backend must equal, and is the base class of those in host
// memory.
#pragma once

#include "kernels/backend.h"

namespace bitwitness {

class ReferenceBackend : public Backend {
 public:
  ReferenceBackend();  // checks the known answers

  std::string name() const override { return "ref"; }
  std::string device() const override;

  Buffer allocate(std::size_t bytes) override;
  void release(void* data) noexcept override;
  void to_device(void* destination, const void* host, std::size_t bytes) override;
  void to_host(void* host, const void* source, std::size_t bytes) override;
  void synchronize() override {}
  const std::byte* place(const std::byte* host, std::size_t bytes,
                         std::vector<Buffer>& owned) override;

  void embed(float* out, const Matrix& embedding, const std::int32_t* tokens,
             std::int64_t M) override;
  void rms_norm(float* out, const float* x, const Vector& weight, float eps,
                std::int64_t M) override;
  void matmul(float* y, const float* x, const Matrix& W, std::int64_t M) override;
  void rope(float* x, std::int64_t heads, std::int64_t head_dim, const float* cosines,
            const float* sines, const RowMap& rows) override;
  void store_kv(const LayerKv& cache, const float* k, const float* v, const RowMap& rows) override;
  void attention(float* out, const float* q, const LayerKv& cache, std::int64_t heads,
                 std::int64_t kv_heads, std::int64_t head_dim, const RowMap& rows) override;
  void swiglu(float* out, const float* gate, const float* up, std::int64_t count) override;
  void add(float* out, const float* x, const float* y, std::int64_t count) override;
  void gather_rows(float* out, const float* x, std::int64_t width, const std::int32_t* index,
                   std::int64_t count) override;
  void hash_rows(Digest* out, std::uint32_t* non_finite, LeafType type, std::uint32_t first_layer,
                 std::int64_t layers, const float* first, std::size_t first_bytes,
                 const float* second, std::size_t second_bytes, const RowMap& rows) override;
  void flag_non_finite(std::uint32_t* flag, const float* x, std::int64_t count) override;
  NonFinite find_non_finite(const float* x, std::int64_t width, std::int64_t M) override;
  void sample(std::int32_t* out, const float* logits, std::int64_t vocab,
              const SampleRequest* requests, std::int64_t M, SampleKinds kinds) override;

 protected:
  // Digest `index` of those that hash_rows makes of these arguments.
  static Digest hash_row(LeafType type, std::uint32_t first_layer, std::int64_t index,
                         const float* first, std::size_t first_bytes, const float* second,
                         std::size_t second_bytes, const RowMap& rows);
};

}  // namespace bitwitness
