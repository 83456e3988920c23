// What the operators of the CUDA backend share: checked calls, device memory, launch limits, and
// the list of launch functions, one per operator. Needs the CUDA toolkit.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "attest/base/dtype.h"
#include "attest/base/hash_tree.h"
#include "kernels/contract.h"
#include "kernels/epilogue.h"

namespace bitwitness::cuda {

// Throws an infrastructure error that names the call, its place, CUDA's reason and what to do.
[[noreturn]] void throw_cuda_error(cudaError_t error, const char* call, const char* file, int line);

#define BW_CUDA(call)                                                                 \
  do {                                                                                \
    const cudaError_t bw_cuda_error = (call);                                         \
    if (bw_cuda_error != cudaSuccess) {                                               \
      ::bitwitness::cuda::throw_cuda_error(bw_cuda_error, #call, __FILE__, __LINE__); \
    }                                                                                 \
  } while (false)

// After every launch: a refused configuration or an earlier fault of the device shows here.
#define BW_CUDA_LAUNCHED(kernel)                                                         \
  do {                                                                                   \
    const cudaError_t bw_cuda_error = cudaGetLastError();                                \
    if (bw_cuda_error != cudaSuccess) {                                                  \
      ::bitwitness::cuda::throw_cuda_error(bw_cuda_error, "launch of " kernel, __FILE__, \
                                           __LINE__);                                    \
    }                                                                                    \
  } while (false)

// Device memory that is kept for re-use, in kinds that never mix. Scratch of one operator may be
// handed out again while kernels still use it: its next user runs after them, in the same stream. A
// recorded step goes on using the scratch that it was recorded with, so that neither a buffer nor
// what runs beside recorded steps (hashing) may ever be made of it.
class DeviceMemory {
 public:
  enum class Kind { kBuffer, kScratch, kHashing };

  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();

  // At least `bytes` bytes, aligned to 256. Throws an infrastructure error that says how much was
  // asked for and how much is free.
  void* allocate(std::size_t bytes, Kind kind);
  void release(void* data) noexcept;
  // Bytes that are not handed out, here or by the device.
  std::size_t available() const;
  // Changes when scratch is given back to the device: steps recorded before are void.
  std::uint64_t generation() const { return generation_; }

 private:
  struct Block {
    std::size_t size;
    Kind kind;
  };
  void drop_free_blocks() noexcept;

  std::unordered_map<void*, Block> blocks_;                          // all
  std::map<std::pair<Kind, std::size_t>, std::vector<void*>> free_;  // released ones
  std::uint64_t generation_ = 0;
};

struct Context {
  int ordinal = 0;
  int multiprocessors = 1;
  int capability = 75;                   // 10 * major + minor
  bool overlaps_launches = false;        // see launch.cuh; from compute capability 9.0 on
  std::size_t shared_limit = 48 * 1024;  // bytes of shared memory that one block may have
  cudaStream_t stream = nullptr;
  DeviceMemory memory;
  // Products that a variant has shown the contract's bytes for (product.cu).
  std::set<std::string> admitted_products;

  // Allows `kernel` its dynamic shared memory and returns how many such blocks fit on a
  // multiprocessor (at least 1). Asked of the driver once per configuration.
  int blocks_per_multiprocessor(const void* kernel, int threads, std::size_t shared_bytes);

 private:
  std::map<std::tuple<const void*, int, std::size_t>, int> occupancy_;
};

// Scratch of one operator.
template <class T>
class Scratch {
 public:
  Scratch(Context& context, std::size_t count,
          DeviceMemory::Kind kind = DeviceMemory::Kind::kScratch)
      : memory_(context.memory),
        data_(static_cast<T*>(memory_.allocate(count * sizeof(T), kind))) {}
  ~Scratch() { memory_.release(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return data_; }

 private:
  DeviceMemory& memory_;
  T* data_;
};

// ---- Launch functions. Shapes as in backend.h; nothing waits.

// One to three matrices of one type and K that multiply the same rows of x: y[M, N] = x[M, K]
// W[N, K]^T for each part, every element a contract::dot.
struct ProductPart {
  const std::byte* W = nullptr;  // [N, K]
  std::int64_t N = 0;
  float* y = nullptr;  // [M, N]; with kSwiglu, that of the second part is not used
};
struct Product {
  std::int64_t M = 0, K = 0;
  const float* x = nullptr;         // [M, K]
  const std::byte* norm = nullptr;  // weight of an RMS norm that x passes first; null: x as it is
  Dtype norm_dtype = Dtype::kBf16;
  float eps = 0;
  Dtype dtype = Dtype::kBf16;  // of every W
  Epilogue epilogue = Epilogue::kStore;
  const float* residual = nullptr;  // [M, N] of the one part, with kAdd; may be its y
  int part_count = 1;
  ProductPart parts[3];
};

// A way to compute products. The table (product.cu) holds the variants in order of preference; the
// first that fits is used, after it has given the bytes of product_plain on this device.
struct ProductVariant {
  const char* name;
  // Whether it can compute this product on this device, and is meant for it. It looks at shapes,
  // types, alignment and the device's limits, never at values.
  bool (*fits)(const Context& context, const Product& product);
  bool fuses_norm;  // else `norm` is null when launch is called
  void (*launch)(Context& context, const Product& product);
};
std::span<const ProductVariant> decode_variants();   // few rows: matmul_decode.cu
std::span<const ProductVariant> batch_variants();    // tens of rows: matmul_batch.cu
std::span<const ProductVariant> prefill_variants();  // hundreds of rows: matmul_prefill.cu

// Fits everything: one thread per output, contract.h as it stands.
void product_plain(Context& context, const Product& product);
void product(Context& context, const Product& product);

// The paged KV cache of one layer. Page p of a slot holds its positions [64 p, 64 p + 64): the
// key row of position t is pages[slot * pages_per_slot + t / 64] + key_offset + t % 64 * width, the
// value row likewise; rows of width = kv_heads * head_dim.
struct KvPages {
  float* const* pages = nullptr;  // [slots, pages_per_slot], in device memory
  std::int64_t pages_per_slot = 0;
  std::int64_t key_offset = 0, value_offset = 0;  // in elements
  std::int64_t width = 0;
};

// Whose rows a step has. Only what is not in device memory may shape a launch: a recorded step is
// replayed with other slots and positions in the same memory.
struct StepShape {
  std::int64_t rows = 0;                   // M
  const std::int32_t* slot = nullptr;      // [M]
  const std::int32_t* position = nullptr;  // [M]
  std::int64_t context = 0;                // every position is below it
  bool distinct_slots = false;  // no two rows have the same slot (decode); else rows of one slot
                                // stand together, ascending in position
};

// q[M, heads, head_dim] and k[M, kv_heads, head_dim] in place: RMS norm per head where the weight
// is not null, then RoPE; then k and v[M, kv_heads * head_dim] enter the cache unless its pages are
// null. Tables are [positions, head_dim / 2].
struct RopeStore {
  float* q = nullptr;
  float* k = nullptr;
  const float* v = nullptr;
  const std::byte* q_norm = nullptr;
  const std::byte* k_norm = nullptr;
  Dtype q_norm_dtype = Dtype::kBf16, k_norm_dtype = Dtype::kBf16;
  float eps = 0;
  const float* cosines = nullptr;
  const float* sines = nullptr;
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
};
void store_kv(Context& context, const KvPages& cache, const float* k, const float* v,
              const StepShape& step);
void rope_store(Context& context, const RopeStore& arguments, const KvPages& cache,
                const StepShape& step);

// out[m, h, :] for q[m, h, :] over positions 0..position[m] of slot[m]; out may not alias q.
void attention(Context& context, float* out, const float* q, const KvPages& cache,
               std::int64_t heads, std::int64_t kv_heads, int head_dim, const StepShape& step);
// The same for a q that has not passed rope_store, whose work it does too; false, and nothing done,
// where there is no such kernel for the step.
bool attention_fused(Context& context, float* out, const RopeStore& rope, const KvPages& cache,
                     const StepShape& step);

void embed(Context& context, float* out, Dtype dtype, const std::byte* embedding,
           std::int64_t width, const std::int32_t* tokens, std::int64_t M);
void rms_norm(Context& context, float* out, const float* x, Dtype dtype, const std::byte* weight,
              std::int64_t K, float eps, std::int64_t M);
void rope(Context& context, float* x, std::int64_t heads, std::int64_t head_dim,
          const float* cosines, const float* sines, const std::int32_t* position, std::int64_t M);
void swiglu(Context& context, float* out, const float* gate, const float* up, std::int64_t count);
void add(Context& context, float* out, const float* x, const float* y, std::int64_t count);
void gather_rows(Context& context, float* out, const float* x, std::int64_t width,
                 const std::int32_t* index, std::int64_t count);

// Digest l * M + m, 32 bytes at out + 8 (l * M + m), of row l * M + m of `first` (and `second`),
// first_words and second_words per row, in layer first_layer + l at position[m]; in `stream`.
// `scratch` holds hash_scratch_words() words.
struct HashRows {
  std::uint32_t* out = nullptr;
  std::uint32_t* non_finite = nullptr;  // set to 1 if any element is not finite
  LeafType type = LeafType::kRow;
  std::uint32_t first_layer = 0;
  std::int64_t layers = 1;
  const std::uint32_t* first = nullptr;
  std::uint64_t first_words = 0;
  const std::uint32_t* second = nullptr;
  std::uint64_t second_words = 0;
  const std::int32_t* position = nullptr;
  std::int64_t M = 0;
};
std::size_t hash_scratch_words(const HashRows& arguments);
// Several at once, at most kMostHashRows.
inline constexpr int kMostHashRows = 4;
void hash_rows(cudaStream_t stream, std::span<const HashRows> arguments,
               std::span<std::uint32_t* const> scratch);

// Sets *flag to 1 if any of x[count] is not finite, in `stream`.
void flag_non_finite(Context& context, cudaStream_t stream, std::uint32_t* flag, const float* x,
                     std::int64_t count);
// out[0]: index of the first non-finite element of x[count], or `count` if there is none.
void find_non_finite(Context& context, std::uint64_t* out, const float* x, std::int64_t count);

// A request, and what kinds there may be, as backend.h has them.
struct SampleRow {
  contract::SamplingParams params;
  std::uint64_t draw = 0;
};
struct SampleKinds {
  bool drawn = true, top_k = true, top_p = true;
};
// out[m]: token drawn from logits[m, 0..vocab) by requests[m], all in device memory.
// `kinds`: what may be among the requests; passes for others are left out.
void sample(Context& context, std::int32_t* out, const float* logits, std::int64_t vocab,
            const SampleRow* requests, std::int64_t M, SampleKinds kinds);

// Runs contract.h on the device and compares with published bits and with the host. Throws an
// infrastructure error that names the first operation that differs. Waits.
void check_device_known_answers(Context& context);

}  // namespace bitwitness::cuda
