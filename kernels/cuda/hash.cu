// Leaf digests of committed rows on the device (attest/base/hash_tree.h): one thread per chunk of 1
// KiB, then one block per row reduces the chunk digests in the shape of RFC 6962. Only roots leave
// the device.
#include <algorithm>

#include "kernels/cuda/context.h"

namespace bitwitness::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    chunk_kernel(DigestWords* __restrict__ digests, LeafType type, std::uint32_t layer,
                 const std::uint32_t* __restrict__ first, std::uint64_t first_words,
                 const std::uint32_t* __restrict__ second, std::uint64_t second_words,
                 const std::int32_t* __restrict__ position, std::uint32_t chunks,
                 std::uint64_t count) {
  const std::uint64_t i = static_cast<std::uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const std::uint64_t m = i / chunks;
  const LeafPrefix prefix{type, static_cast<std::uint8_t>(Dtype::kFp32), layer,
                          static_cast<std::uint64_t>(position[m])};
  digests[i] =
      chunk_digest_words(prefix, static_cast<std::uint32_t>(i % chunks), first + m * first_words,
                         first_words, second + m * second_words, second_words);
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

}  // namespace

void hash_rows(Context& context, std::uint32_t* out, LeafType type, std::uint32_t layer,
               const std::uint32_t* first, std::uint64_t first_words, const std::uint32_t* second,
               std::uint64_t second_words, const std::int32_t* position, std::int64_t M) {
  const std::uint32_t chunks = leaf_chunk_count(4 * (first_words + second_words));
  // Rows in batches: bounds the scratch, and the grid.
  constexpr std::uint64_t kMostChunks = std::uint64_t{1} << 24;
  const std::int64_t batch =
      static_cast<std::int64_t>(std::max<std::uint64_t>(1, kMostChunks / chunks));
  Scratch<DigestWords> digests(
      context, static_cast<std::size_t>(std::min(batch, M)) * static_cast<std::size_t>(chunks));
  for (std::int64_t m = 0; m < M; m += batch) {
    const auto rows = static_cast<std::uint64_t>(std::min(batch, M - m));
    const std::uint64_t count = rows * chunks;
    const auto row = static_cast<std::uint64_t>(m);
    chunk_kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0,
                   context.stream>>>(digests.get(), type, layer, first + row * first_words,
                                     first_words, second + row * second_words, second_words,
                                     position + row, chunks, count);
    BW_CUDA_LAUNCHED("hash_rows (chunks)");
    reduce_kernel<<<static_cast<unsigned>(rows), kThreads, 0, context.stream>>>(
        out + row * 8, digests.get(), chunks);
    BW_CUDA_LAUNCHED("hash_rows (reduction)");
  }
}

}  // namespace bitwitness::cuda
