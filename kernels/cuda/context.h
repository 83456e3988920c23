// What the operators of the CUDA backend share: checked calls, device memory, launch limits, and
// the list of launch functions, one per operator. Needs the CUDA toolkit.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "attest/base/dtype.h"
#include "attest/base/hash_tree.h"
#include "kernels/contract.h"

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

// Device memory that is kept for re-use. Everything runs in one stream, so a block that is released
// while kernels still use it may be handed out again: its next user runs after them.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();

  // At least `bytes` bytes, aligned to 256. Throws an infrastructure error that says how much was
  // asked for and how much is free.
  void* allocate(std::size_t bytes);
  void release(void* data) noexcept;

 private:
  void drop_free_blocks() noexcept;

  std::unordered_map<void*, std::size_t> size_of_;  // all blocks
  std::map<std::size_t, std::vector<void*>> free_;  // released ones by size
};

struct Context {
  int ordinal = 0;
  int multiprocessors = 1;
  std::size_t shared_limit = 48 * 1024;  // bytes of shared memory that one block may have
  cudaStream_t stream = nullptr;
  DeviceMemory memory;

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
  Scratch(Context& context, std::size_t count)
      : memory_(context.memory), data_(static_cast<T*>(memory_.allocate(count * sizeof(T)))) {}
  ~Scratch() { memory_.release(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return data_; }

 private:
  DeviceMemory& memory_;
  T* data_;
};

// ---- Launch functions. Shapes as in backend.h; nothing waits.

void matmul(Context& context, float* y, const float* x, Dtype dtype, const std::byte* W,
            std::int64_t N, std::int64_t K, std::int64_t M);
// The two kernel families behind it. Both are right for every M; matmul() only chooses the faster
// one.
void matmul_decode(Context& context, float* y, const float* x, Dtype dtype, const std::byte* W,
                   std::int64_t N, std::int64_t K, std::int64_t M);
void matmul_prefill(Context& context, float* y, const float* x, Dtype dtype, const std::byte* W,
                    std::int64_t N, std::int64_t K, std::int64_t M);

void embed(Context& context, float* out, Dtype dtype, const std::byte* embedding,
           std::int64_t width, const std::int32_t* tokens, std::int64_t M);
void rms_norm(Context& context, float* out, const float* x, Dtype dtype, const std::byte* weight,
              std::int64_t K, float eps, std::int64_t M);
void rope(Context& context, float* x, std::int64_t heads, std::int64_t head_dim,
          const float* cosines, const float* sines, const std::int32_t* position, std::int64_t M);
void store_kv(Context& context, float* keys, float* values, std::int64_t capacity,
              std::int64_t kv_width, const float* k, const float* v, const std::int32_t* slot,
              const std::int32_t* position, std::int64_t M);
void swiglu(Context& context, float* out, const float* gate, const float* up, std::int64_t count);
void add(Context& context, float* x, const float* y, std::int64_t count);
void gather_rows(Context& context, float* out, const float* x, std::int64_t width,
                 const std::int32_t* index, std::int64_t count);

struct AttentionShape {
  std::int64_t rows;  // M
  std::int64_t heads;
  std::int64_t kv_heads;
  int head_dim;
  std::int64_t capacity;  // positions per slot of the cache
  std::int64_t last;      // the largest position of any row
};
void attention(Context& context, float* out, const float* q, const float* keys, const float* values,
               const AttentionShape& shape, const std::int32_t* slot, const std::int32_t* position);

// out[m]: 32 bytes of digest per row, as bytes. first_words and second_words are per row.
void hash_rows(Context& context, std::uint32_t* out, LeafType type, std::uint32_t layer,
               const std::uint32_t* first, std::uint64_t first_words, const std::uint32_t* second,
               std::uint64_t second_words, const std::int32_t* position, std::int64_t M);

// out[0]: index of the first non-finite element of x[count], or `count` if there is none.
void find_non_finite(Context& context, std::uint64_t* out, const float* x, std::int64_t count);

struct SampleRow {
  float temperature;
  std::uint32_t top_k;     // 0: all
  std::uint64_t fraction;  // contract::top_p_fraction, or 2^32 for all
  std::uint64_t draw;
};
// out[m]: token drawn from logits[m, 0..vocab) by requests[m], all in device memory.
void sample(Context& context, std::int32_t* out, const float* logits, std::int64_t vocab,
            const SampleRow* requests, std::int64_t M);

// Runs contract.h on the device and compares with published bits and with the host. Throws an
// infrastructure error that names the first operation that differs. Waits.
void check_device_known_answers(Context& context);

}  // namespace bitwitness::cuda
