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
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/base/hash_tree.h"
#include "kernels/contract.h"
#include "kernels/epilogue.h"
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
// together, in ascending order of position. The host copies are always valid; the backend's are,
// too.
struct RowMap {
  std::int64_t rows = 0;
  const std::int32_t* slot = nullptr;           // [M] index of the sequence in the KV cache
  const std::int32_t* position = nullptr;       // [M]
  const std::int32_t* host_slot = nullptr;      // [M]
  const std::int32_t* host_position = nullptr;  // [M]
  std::int64_t context = 0;                     // every position is below it
  bool distinct_slots = false;                  // no two rows are of one sequence (decode)
};

// The paged KV cache of one layer: rows of kv_width binary32, keys after RoPE. Page p of a slot
// holds its positions [64 p, 64 p + 64), one block of attention; which pages there are, kv_cache.h
// says.
struct LayerKv {
  static constexpr std::int64_t kPagePositions = contract::kAttentionBlock;

  float* const* pages = nullptr;  // [slots, pages_per_slot], in the backend's memory
  std::int64_t pages_per_slot = 0;
  std::int64_t key_offset = 0;    // of the layer's keys in a page, in elements
  std::int64_t value_offset = 0;  // of its values
  std::int64_t kv_width = 0;      // num_kv_heads * head_dim

  // The rows of one position, for backends in host memory.
  float* key(std::int64_t slot, std::int64_t position) const {
    return page(slot, position) + key_offset + position % kPagePositions * kv_width;
  }
  float* value(std::int64_t slot, std::int64_t position) const {
    return page(slot, position) + value_offset + position % kPagePositions * kv_width;
  }

 private:
  float* page(std::int64_t slot, std::int64_t position) const {
    return pages[slot * pages_per_slot + position / kPagePositions];
  }
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

// The name of an operator of a layer and its output x[M, width]: for those who look inside.
using OperatorProbe = std::function<void(std::string_view op, const float* x, std::int64_t width)>;

// One to three matrices of one type and width that multiply the same rows of x, with what stands
// before and after them in a layer. y[M, N] = epilogue(norm(x[M, K]) W[N, K]^T) for each part.
struct Product {
  struct Part {
    std::string_view op;  // its name for a probe
    const Matrix* W = nullptr;
    float* y = nullptr;  // [M, W->rows]; that of an `up` part is scratch
  };
  const float* x = nullptr;  // [M, K]
  std::int64_t M = 0;
  std::string_view norm_op;
  const Vector* norm = nullptr;  // weight of an RMS norm that x passes first; null: x as it is
  float eps = 0;
  float* normed = nullptr;  // [M, K] scratch, with norm
  Epilogue epilogue = Epilogue::kStore;
  std::string_view epilogue_op;
  const float* residual = nullptr;  // [M, N] of the one part, with kAdd; may be its y
  float* dots = nullptr;            // [M, N] scratch, with kAdd
  int part_count = 1;
  Part parts[3];
};

// q[M, heads, head_dim] and k[M, kv_heads, head_dim] in place: RMS norm per head (Qwen3) where
// there is a weight, then RoPE; then k and v[M, kv_width] enter the cache, unless it is null.
struct RopeStore {
  float* q = nullptr;
  float* k = nullptr;
  const float* v = nullptr;
  const Vector* q_norm = nullptr;
  const Vector* k_norm = nullptr;
  float eps = 0;
  const float* cosines = nullptr;  // [positions, head_dim / 2]
  const float* sines = nullptr;    // [positions, head_dim / 2]
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
  const LayerKv* cache = nullptr;
};

// What may occur among the requests of a call, known before it is recorded: a backend leaves out
// what would have nothing to do.
struct SampleKinds {
  bool drawn = true;  // a temperature that is not 0
  bool top_k = true;  // top_k that is not 0
  bool top_p = true;  // top_p below 1
};

// Steps that were seen before, by key (Backend::make_recordings).
class Recordings {
 public:
  virtual ~Recordings() = default;
  // Does what `step` does. For one key, `step` always calls the same operators with the same
  // arguments, and none that waits; what the arguments point to may have changed. So a backend may
  // record them and later replay them without calling `step`.
  virtual void run(std::uint64_t key, const std::function<void()>& step) = 0;
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

  // Memory of the host that to_device and to_host take at full speed. Freed like any buffer.
  virtual Buffer allocate_host(std::size_t bytes) { return allocate(bytes); }
  // Throws an infrastructure error that says what is needed and what there is when `bytes` more
  // than is allocated now do not fit. `what` they are for: "the weights of the model".
  virtual void require_memory(std::size_t bytes, std::string_view what);
  // How many rows a step should have at most to be computed well.
  virtual std::int64_t preferred_rows() const { return 512; }
  // An empty set of recordings, which must not outlive the backend or the buffers its steps use.
  virtual std::unique_ptr<Recordings> make_recordings();

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
  // out[i] = x[i] + y[i]. May be in place (out == x).
  virtual void add(float* out, const float* x, const float* y, std::int64_t count) = 0;
  // out[i, :] = x[index[i], :], rows of `width` binary32; index in backend memory.
  virtual void gather_rows(float* out, const float* x, std::int64_t width,
                           const std::int32_t* index, std::int64_t count) = 0;

  // ---- Operators together: what a backend may do in fewer passes, with the same bits. As they
  // stand here they call the operators above, and `probe`, if any, with each one's output.
  virtual void product(const Product& product) { compose(product, {}); }
  virtual void rope_store(const RopeStore& arguments, const RowMap& rows) {
    compose(arguments, rows, {});
  }
  // rope_store, then attention of its q.
  virtual void attend(float* out, const RopeStore& arguments, const LayerKv& cache,
                      const RowMap& rows) {
    rope_store(arguments, rows);
    attention(out, arguments.q, cache, arguments.heads, arguments.kv_heads, arguments.head_dim,
              rows);
  }
  void compose(const Product& product, const OperatorProbe& probe);
  void compose(const RopeStore& arguments, const RowMap& rows, const OperatorProbe& probe);

  // ---- Commitment. Nothing here waits but find_non_finite.
  // out[l * M + m] = leaf digest (attest/base/hash_tree.h) of type `type` and layer first_layer + l
  // for row m of group l < layers, in backend memory. The payload of a row are first_bytes bytes at
  // first + (l * M + m) * first_bytes, then second_bytes bytes of `second` likewise (0: nothing).
  // Positions come from `rows`. Sets *non_finite to 1 if any element of the payloads is not finite,
  // else leaves it. It may run beside later operators, or not before finish_hashing(), so that
  // payloads, positions and `out` are not to be touched before that.
  virtual void hash_rows(Digest* out, std::uint32_t* non_finite, LeafType type,
                         std::uint32_t first_layer, std::int64_t layers, const float* first,
                         std::size_t first_bytes, const float* second, std::size_t second_bytes,
                         const RowMap& rows) = 0;
  // Starts what hash_rows was asked for so far, beside later operators.
  virtual void start_hashing() {}
  // Later operators run after every hash_rows so far.
  virtual void finish_hashing() {}
  // Copies to host memory (of allocate_host) after every hash_rows so far, beside later operators;
  // done once wait_hashed() was called with what is returned. Calls are waited for in their order.
  virtual std::uint64_t fetch_hashed(void* host, const void* source, std::size_t bytes) {
    to_host(host, source, bytes);
    return 0;
  }
  virtual void wait_hashed(std::uint64_t) {}
  // Sets *flag to 1 if any of x[count] is not finite, else leaves it. Backend memory. It may run
  // beside later operators, too.
  virtual void flag_non_finite(std::uint32_t* flag, const float* x, std::int64_t count) = 0;
  // The first non-finite element of x[M, width] in row-major order. Waits.
  virtual NonFinite find_non_finite(const float* x, std::int64_t width, std::int64_t M) = 0;
  // out[m] = the token drawn from logits[m, 0..vocab) by requests[m], m < M, all in backend memory.
  // Where a logit is not finite, any token or none.
  virtual void sample(std::int32_t* out, const float* logits, std::int64_t vocab,
                      const SampleRequest* requests, std::int64_t M, SampleKinds kinds) = 0;
};

// Devices by name: "auto" (cuda if a usable one is there, else cpu), "cpu" (the fastest host
// backend that this processor has), "ref", "avx2", "avx512", "neon", "cuda", "cuda:N". `threads` =
// 0: all of the machine's. Runs the known answers first; an environment that breaks them is refused
// (infrastructure error), an unknown or absent device is a usage error that says what there is.
std::unique_ptr<Backend> make_backend(std::string_view device, int threads = 0);

// The backends that can be made here, reference first: for tests and `selftest`.
std::vector<std::string> available_backends();

}  // namespace bitwitness
