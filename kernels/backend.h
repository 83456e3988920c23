// The operators of one arithmetic on one device. A backend owns memory and runs operators in the
// order in which they are called; layer_forward (layer.h) composes them, once, for every backend.
//
// Contract for every operator: results are equal to the functions of contract.h, element by
// element, for every shape, whatever the batch. Pointers are in the backend's memory unless named
// `host`. Output never aliases input unless stated. Matrices are row major; M counts rows, one row
// per (sequence, position). Operators may run asynchronously; to_host and synchronize wait.
// Failures of the device throw infrastructure errors; arguments out of contract are bugs
// (assertions).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/base/hash_tree.h"
#include "kernels/contract.h"
#include "kernels/model/model.h"

namespace bitwitness {

class Backend;

// Memory of a backend. Move-only; freed with the object, which must not outlive its backend.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Backend* owner, void* data, std::size_t bytes)
      : owner_(owner), data_(data), bytes_(bytes) {}
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  Backend* owner_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Which sequence and position each of the M rows of a step belongs to. Rows of one sequence stand
// in ascending order of position. The host copies are always valid; the backend's are, too.
struct RowMap {
  std::int64_t rows = 0;
  const std::int32_t* slot = nullptr;           // [M] index of the sequence's KV cache
  const std::int32_t* position = nullptr;       // [M]
  const std::int32_t* host_slot = nullptr;      // [M]
  const std::int32_t* host_position = nullptr;  // [M]
};

// The KV cache of one layer: rows of kv_width binary32, keys after RoPE.
struct LayerKv {
  float* keys = nullptr;      // [slots, capacity, kv_width]
  float* values = nullptr;    // [slots, capacity, kv_width]
  std::int64_t capacity = 0;  // positions per slot
  std::int64_t kv_width = 0;  // num_kv_heads * head_dim
};

// Where the first non-finite value stands; row is -1 if all are finite.
struct NonFinite {
  std::int64_t row = -1;
  std::int64_t element = -1;
};

// One row to sample from (contract.h section 8).
struct SampleRequest {
  contract::SamplingParams params;
  std::uint64_t draw = 0;  // uniform 64 bits from the seed and the position
};

class Backend {
 public:
  virtual ~Backend() = default;

  // "ref", "avx2", "avx512", "neon", "cuda": enters provenance, never a claim.
  virtual std::string name() const = 0;
  // Free text about the device (CPU or GPU model, driver), for provenance.
  virtual std::string device() const = 0;

  // ---- Memory. Sizes in bytes; contents of a new buffer are undefined.
  virtual Buffer allocate(std::size_t bytes) = 0;
  virtual void release(void* data) noexcept = 0;
  virtual void to_device(void* destination, const void* host, std::size_t bytes) = 0;
  virtual void to_host(void* host, const void* source, std::size_t bytes) = 0;  // waits
  virtual void synchronize() = 0;
  // Makes weight bytes usable by operators: backends in host memory return `host` itself (which
  // must outlive the backend's use), others copy into a buffer appended to `owned`.
  virtual const std::byte* place(const std::byte* host, std::size_t bytes,
                                 std::vector<Buffer>& owned) = 0;

  // ---- Operators.
  // out[m, :] = upcast(E[token[m], :]); tokens in [0, E.rows).
  virtual void embed(float* out, const Matrix& embedding, const std::int32_t* tokens,
                     std::int64_t M) = 0;
  // out[m, i] = rms_norm(x[m, :])[i]; K = weight.size. May be in place (out == x).
  virtual void rms_norm(float* out, const float* x, const Vector& weight, float eps,
                        std::int64_t M) = 0;
  // y[m, n] = dot(x[m, :], W[n, :]); x is [M, W.cols], y is [M, W.rows].
  virtual void matmul(float* y, const float* x, const Matrix& W, std::int64_t M) = 0;
  // Rotates `heads` heads of every row of x[M, heads * head_dim] in place. The tables are
  // [positions, head_dim / 2].
  virtual void rope(float* x, std::int64_t heads, std::int64_t head_dim, const float* cosines,
                    const float* sines, const RowMap& rows) = 0;
  // Copies k[M, kv_width] and v[M, kv_width] into the cache at (slot, position) of every row.
  virtual void store_kv(const LayerKv& cache, const float* k, const float* v,
                        const RowMap& rows) = 0;
  // out[m, h, :] = attention of q[m, h, :] over positions 0..position[m] of its slot; head h reads
  // key-value head h / (heads / kv_heads). out and q are [M, heads * head_dim].
  virtual void attention(float* out, const float* q, const LayerKv& cache, std::int64_t heads,
                         std::int64_t kv_heads, std::int64_t head_dim, const RowMap& rows) = 0;
  // out[m, i] = silu(gate[m, i]) * up[m, i]. May be in place on either input.
  virtual void swiglu(float* out, const float* gate, const float* up, std::int64_t count) = 0;
  // x[i] += y[i]
  virtual void add(float* x, const float* y, std::int64_t count) = 0;
  // out[i, :] = x[index[i], :], rows of `width` binary32; index in backend memory.
  virtual void gather_rows(float* out, const float* x, std::int64_t width,
                           const std::int32_t* index, std::int64_t count) = 0;

  // ---- Commitment.
  // host_out[m] = leaf digest (attest/base/hash_tree.h) of the payload of row m: first_bytes bytes
  // at first + m * first_bytes, then second_bytes bytes at second + m * second_bytes (0: nothing).
  // Positions come from `rows`. Waits.
  virtual void hash_rows(Digest* host_out, LeafType type, std::uint32_t layer, const float* first,
                         std::size_t first_bytes, const float* second, std::size_t second_bytes,
                         const RowMap& rows) = 0;
  // The first non-finite element of x[M, width] in row-major order. Waits.
  virtual NonFinite find_non_finite(const float* x, std::int64_t width, std::int64_t M) = 0;
  // host_out[m] = the token drawn from logits[m, 0..vocab). Logits are finite. Waits.
  virtual void sample(std::int32_t* host_out, const float* logits, std::int64_t vocab,
                      std::span<const SampleRequest> requests) = 0;
};

// Devices by name: "auto" (cuda if a usable one is there, else cpu), "cpu" (the fastest host
// backend that this processor has), "ref", "avx2", "avx512", "neon", "cuda", "cuda:N". `threads` =
// 0: all of the machine's. Runs the known answers first; an environment that breaks them is refused
// (infrastructure error), an unknown or absent device is a usage error that says what there is.
std::unique_ptr<Backend> make_backend(std::string_view device, int threads = 0);

// The backends that can be made here, reference first: for tests and `selftest`.
std::vector<std::string> available_backends();

}  // namespace bitwitness
