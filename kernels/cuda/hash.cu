// Leaf digests of committed rows on the device (attest/base/hash_tree.h): one thread per chunk of 1
// KiB, then one block per row reduces the chunk digests in the shape of RFC 6962. Only roots leave
// the device.
#include <algorithm>

#include "kernels/cuda/context.h"

namespace bitwitness::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    chunk_kernel(DigestWords* __restrict__ digests, HashRows a, std::uint64_t first_row,
                 std::uint32_t chunks, std::uint64_t count) {
  const std::uint64_t i = static_cast<std::uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const std::uint64_t row = first_row + i / chunks, M = static_cast<std::uint64_t>(a.M);
  const LeafPrefix prefix{a.type, static_cast<std::uint8_t>(Dtype::kFp32),
                          a.first_layer + static_cast<std::uint32_t>(row / M),
                          static_cast<std::uint64_t>(a.position[row % M])};
  digests[i] = chunk_digest_words(prefix, static_cast<std::uint32_t>(i % chunks),
                                  a.first + row * a.first_words, a.first_words,
                                  a.second + row * a.second_words, a.second_words);
}

// Block m reduces digests[m, 0..chunks) in place. A round of pairs reads only digests that no
// earlier round has written: pair i reads 2 i and 2 i + 1 and writes i.
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(std::uint32_t* __restrict__ out, DigestWords* digests, std::uint32_t chunks) {
  DigestWords* const level = digests + static_cast<std::uint64_t>(blockIdx.x) * chunks;
  for (std::uint32_t count = chunks; count > 1; count = reduced_count(count)) {
    const std::uint32_t next = reduced_count(count);
    for (std::uint32_t begin = 0; begin < next; begin += kThreads) {
      const std::uint32_t i = begin + threadIdx.x;
      DigestWords digest{};
      if (i < next) digest = reduce_pair(level, count, i);
      __syncthreads();
      if (i < next) level[i] = digest;
      __syncthreads();
    }
  }
  // Big-endian words as bytes.
  if (threadIdx.x < 8) {
    out[static_cast<std::uint64_t>(blockIdx.x) * 8 + threadIdx.x] =
        __byte_perm(level[0].word[threadIdx.x], 0, 0x0123);
  }
}

// Rows in batches: bounds the scratch, and the grid.
std::int64_t rows_at_once(const HashRows& a, std::uint32_t chunks) {
  constexpr std::uint64_t kMostChunks = std::uint64_t{1} << 24;
  const auto most = static_cast<std::int64_t>(std::max<std::uint64_t>(1, kMostChunks / chunks));
  return std::min(most, a.layers * a.M);
}

std::uint32_t chunks_per_row(const HashRows& a) {
  return leaf_chunk_count(4 * (a.first_words + a.second_words));
}

}  // namespace

std::size_t hash_scratch_words(const HashRows& a) {
  static_assert(sizeof(DigestWords) == 32);
  const std::uint32_t chunks = chunks_per_row(a);
  return static_cast<std::size_t>(rows_at_once(a, chunks)) * chunks * 8;
}

void hash_rows(cudaStream_t stream, const HashRows& a, std::uint32_t* scratch) {
  const std::uint32_t chunks = chunks_per_row(a);
  auto* const digests = reinterpret_cast<DigestWords*>(scratch);
  const std::int64_t batch = rows_at_once(a, chunks);
  for (std::int64_t row = 0; row < a.layers * a.M; row += batch) {
    const auto rows = static_cast<std::uint64_t>(std::min(batch, a.layers * a.M - row));
    const std::uint64_t count = rows * chunks;
    chunk_kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
        digests, a, static_cast<std::uint64_t>(row), chunks, count);
    BW_CUDA_LAUNCHED("hash_rows (chunks)");
    reduce_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(a.out + row * 8, digests,
                                                                        chunks);
    BW_CUDA_LAUNCHED("hash_rows (reduction)");
  }
}

}  // namespace bitwitness::cuda
