// Leaf digests of committed rows on the device (attest/base/hash_tree.h): digests of chunks of 1
// KiB, then one block per row reduces them in the shape of RFC 6962. Only roots leave the device.
//
// SHA-256 is a chain: what counts beside few rows is how long one chunk takes. Two warps share 32
// chunks: one reads the messages and expands their schedules (which do not depend on each other),
// the other runs the rounds one message block behind it.
#include <algorithm>

#include "kernels/cuda/context.h"

namespace bitwitness::cuda {
namespace {

using hash_tree_detail::byte_swap;
using hash_tree_detail::rotate_right;
using hash_tree_detail::sha256_round_constant;

constexpr int kChunksPerBlock = 32;
constexpr int kChunkThreads = 2 * kChunksPerBlock;

// Rows first_row .. of one HashRows, as part of a launch.
struct Part {
  HashRows rows;
  DigestWords* digests = nullptr;  // [count of rows, chunks]
  std::uint64_t first_row = 0;
  std::uint32_t chunks = 0;       // of a row
  std::uint64_t chunk_count = 0;  // of all rows
  std::uint64_t row_count = 0;
};
struct Batch {
  Part part[kMostHashRows];
  std::uint64_t first_block[kMostHashRows + 1];  // of each part in the grid
};

__device__ __forceinline__ int part_of(const Batch& batch, std::uint64_t block) {
  int i = 0;
  while (block >= batch.first_block[i + 1]) ++i;
  return i;
}

// The message of one chunk, 16 words at a time.
class ChunkMessage {
 public:
  __device__ ChunkMessage(const Part& part, std::uint64_t chunk) {
    const HashRows& a = part.rows;
    const std::uint64_t row = part.first_row + chunk / part.chunks;
    const std::uint64_t M = static_cast<std::uint64_t>(a.M);
    const auto index = static_cast<std::uint32_t>(chunk % part.chunks);
    const std::uint64_t payload_bytes = 4 * (a.first_words + a.second_words);
    bytes_ = leaf_chunk_bytes(payload_bytes, index);
    blocks_ = (32 + bytes_ + 9 + 63) / 64;
    const std::uint64_t position = static_cast<std::uint64_t>(a.position[row % M]);
    prefix_[0] = byte_swap(static_cast<std::uint32_t>(a.type) |
                           static_cast<std::uint32_t>(kLeafVersion) << 8 |
                           static_cast<std::uint32_t>(Dtype::kFp32) << 16);
    prefix_[1] = byte_swap(a.first_layer + static_cast<std::uint32_t>(row / M));
    prefix_[2] = byte_swap(static_cast<std::uint32_t>(position));
    prefix_[3] = byte_swap(static_cast<std::uint32_t>(position >> 32));
    prefix_[4] = byte_swap(index);
    prefix_[5] = byte_swap(part.chunks);
    prefix_[6] = byte_swap(bytes_);
    prefix_[7] = 0;
    base_ = std::uint64_t{index} * (kLeafChunkBytes / 4);
    first_words_ = a.first_words;
    first_ = a.first + row * a.first_words;
    second_ = a.second + row * a.second_words;
    // Most chunks lie in one piece and on vectors.
    const bool in_first = base_ + bytes_ / 4 <= first_words_;
    const std::uint32_t* const data = in_first ? first_ + base_ : second_ + (base_ - first_words_);
    const bool whole = bytes_ == kLeafChunkBytes && (in_first || base_ >= first_words_) &&
                       reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
    vectors_ = whole ? reinterpret_cast<const uint4*>(data) : nullptr;
  }

  __device__ std::uint32_t blocks() const { return blocks_; }

  // Payload words of message block n < blocks(), as they lie in memory; others undefined.
  __device__ __forceinline__ void load(std::uint32_t n, std::uint32_t (&raw)[16]) const {
    if (vectors_ != nullptr) {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int at = static_cast<int>(4 * n) - 2 + q;  // vector of the payload
        if (at < 0 || at >= static_cast<int>(kLeafChunkBytes / 16)) continue;
        const uint4 v = vectors_[at];
        raw[4 * q] = v.x, raw[4 * q + 1] = v.y, raw[4 * q + 2] = v.z, raw[4 * q + 3] = v.w;
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const std::int64_t i = static_cast<std::int64_t>(16 * n) + j - 8;
      if (i < 0 || i >= bytes_ / 4) continue;
      const std::uint64_t at = base_ + static_cast<std::uint64_t>(i);
      raw[j] = at < first_words_ ? first_[at] : second_[at - first_words_];
    }
  }

  // What was loaded as words of the message: prefix, payload, 0x80, zeros, length (FIPS 180-4
  // §5.1.1). Says whether any payload word is a value that is not finite.
  __device__ __forceinline__ bool finish(std::uint32_t n, std::uint32_t (&word)[16]) const {
    const int full_words = static_cast<int>(bytes_ / 4);
    bool bad = false;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int i = static_cast<int>(16 * n) + j - 8;
      if (i >= 0 && i < full_words) {
        bad = bad || (word[j] & 0x7f800000U) == 0x7f800000U;
        word[j] = byte_swap(word[j]);
      } else if (i < 0) {
        word[j] = prefix_[j & 7];
      } else if (i == full_words) {
        word[j] = 0x80000000U;
      } else {
        word[j] = n + 1 == blocks_ && j == 15 ? (32 + bytes_) * 8 : 0;
      }
    }
    return bad;
  }

 private:
  std::uint32_t prefix_[8];
  std::uint32_t bytes_, blocks_;
  std::uint64_t base_, first_words_;  // of the chunk in the payload; of the first piece
  const std::uint32_t* first_;
  const std::uint32_t* second_;
  const uint4* vectors_;
};

// Expands the schedule of one message block; out[i][lane] = w[i] + K[i].
__device__ __forceinline__ void expand(std::uint32_t (&w)[16],
                                       std::uint32_t (*out)[kChunksPerBlock], int lane) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    if (i >= 16) {
      const std::uint32_t w15 = w[(i + 1) & 15], w2 = w[(i + 14) & 15];
      w[i & 15] += (rotate_right(w15, 7) ^ rotate_right(w15, 18) ^ (w15 >> 3)) + w[(i + 9) & 15] +
                   (rotate_right(w2, 17) ^ rotate_right(w2, 19) ^ (w2 >> 10));
    }
    out[i][lane] = w[i & 15] + sha256_round_constant(i);
  }
}

// The 64 rounds of one message block on an expanded schedule.
__device__ __forceinline__ void run_rounds(DigestWords& state,
                                           const std::uint32_t (*schedule)[kChunksPerBlock],
                                           int lane) {
  std::uint32_t a = state.word[0], b = state.word[1], c = state.word[2], d = state.word[3];
  std::uint32_t e = state.word[4], f = state.word[5], g = state.word[6], h = state.word[7];
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const std::uint32_t t1 = h + schedule[i][lane] +
                             (rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25)) +
                             ((e & f) ^ (~e & g));
    const std::uint32_t t2 = (rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22)) +
                             ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1;
    d = c, c = b, b = a, a = t1 + t2;
  }
  state.word[0] += a, state.word[1] += b, state.word[2] += c, state.word[3] += d;
  state.word[4] += e, state.word[5] += f, state.word[6] += g, state.word[7] += h;
}

__global__ void __launch_bounds__(kChunkThreads) chunk_kernel(const Batch batch) {
  __shared__ std::uint32_t schedule[2][64][kChunksPerBlock];
  const int lane = static_cast<int>(threadIdx.x) % kChunksPerBlock;
  const bool expands = threadIdx.x >= kChunksPerBlock;
  const Part& part = batch.part[part_of(batch, blockIdx.x)];
  const std::uint64_t block = blockIdx.x - batch.first_block[part_of(batch, blockIdx.x)];
  const std::uint64_t chunk = block * kChunksPerBlock + static_cast<std::uint64_t>(lane);
  const bool present = chunk < part.chunk_count;
  const ChunkMessage message(part, present ? chunk : 0);

  DigestWords state = sha256_initial_state();
  std::uint32_t words[16], next[16];
  bool bad = false;
  const auto produce = [&](std::uint32_t n) {
#pragma unroll
    for (int j = 0; j < 16; ++j) words[j] = next[j];
    if (n + 1 < message.blocks()) message.load(n + 1, next);
    bad = message.finish(n, words) || bad;
    expand(words, schedule[n % 2], lane);
  };
  if (expands) {
    message.load(0, next);
    produce(0);
  }
  __syncthreads();
  constexpr std::uint32_t kMostBlocks = (32 + kLeafChunkBytes + 9 + 63) / 64;
  for (std::uint32_t n = 0; n < kMostBlocks; ++n) {
    if (expands) {
      if (n + 1 < message.blocks()) produce(n + 1);
    } else if (n < message.blocks()) {
      run_rounds(state, schedule[n % 2], lane);
    }
    __syncthreads();
  }
  if (!present) return;
  if (expands) {
    if (bad) *part.rows.non_finite = 1;  // all who write it write the same
  } else {
    part.digests[chunk] = state;
  }
}

constexpr int kReduceThreads = 256;

// A block reduces the chunk digests of a row. A round of pairs reads only digests that no earlier
// round has written: pair i reads 2 i and 2 i + 1 and writes i.
__global__ void __launch_bounds__(kReduceThreads) reduce_kernel(const Batch batch) {
  __shared__ DigestWords shared[2 * kReduceThreads];
  const int p = part_of(batch, blockIdx.x);
  const Part& part = batch.part[p];
  const std::uint64_t row = blockIdx.x - batch.first_block[p];
  DigestWords* level = part.digests + row * part.chunks;
  std::uint32_t count = part.chunks;
  while (count > 1) {
    const std::uint32_t next = reduced_count(count);
    // From where all of it fits, in shared memory; one round then, and no level in place before.
    DigestWords* const out = next <= kReduceThreads ? shared : level;
    for (std::uint32_t begin = 0; begin < next; begin += kReduceThreads) {
      const std::uint32_t i = begin + threadIdx.x;
      DigestWords digest{};
      if (i < next) digest = reduce_pair(level, count, i);
      __syncthreads();
      if (i < next) out[i] = digest;
      __syncthreads();
    }
    level = out;
    count = next;
  }
  // Big-endian words as bytes.
  if (threadIdx.x < 8) {
    part.rows.out[(part.first_row + row) * 8 + threadIdx.x] =
        __byte_perm(level[0].word[threadIdx.x], 0, 0x0123);
  }
}

std::uint32_t chunks_per_row(const HashRows& a) {
  return leaf_chunk_count(4 * (a.first_words + a.second_words));
}

// Rows in batches: bounds the scratch, and the grid.
std::uint64_t rows_at_once(const HashRows& a) {
  constexpr std::uint64_t kMostChunks = std::uint64_t{1} << 24;
  return std::min(std::max<std::uint64_t>(1, kMostChunks / chunks_per_row(a)),
                  static_cast<std::uint64_t>(a.layers * a.M));
}

void launch(cudaStream_t stream, Batch& batch, std::size_t parts) {
  const auto place = [&](const auto& blocks_of) {
    batch.first_block[0] = 0;
    for (std::size_t i = 0; i < kMostHashRows; ++i) {
      batch.first_block[i + 1] =
          batch.first_block[i] + (i < parts ? blocks_of(batch.part[i]) : std::uint64_t{0});
    }
    return static_cast<unsigned>(batch.first_block[kMostHashRows]);
  };
  const unsigned chunk_blocks = place(
      [](const Part& part) { return (part.chunk_count + kChunksPerBlock - 1) / kChunksPerBlock; });
  chunk_kernel<<<chunk_blocks, kChunkThreads, 0, stream>>>(batch);
  BW_CUDA_LAUNCHED("hash_rows (chunks)");
  const unsigned rows = place([](const Part& part) { return part.row_count; });
  reduce_kernel<<<rows, kReduceThreads, 0, stream>>>(batch);
  BW_CUDA_LAUNCHED("hash_rows (reduction)");
}

}  // namespace

std::size_t hash_scratch_words(const HashRows& a) {
  static_assert(sizeof(DigestWords) == 32);
  return static_cast<std::size_t>(rows_at_once(a)) * chunks_per_row(a) * 8;
}

void hash_rows(cudaStream_t stream, std::span<const HashRows> arguments,
               std::span<std::uint32_t* const> scratch) {
  // All first batches together, then what is left of each: only very many rows leave anything.
  for (std::uint64_t round = 0;; ++round) {
    Batch batch;
    std::size_t parts = 0;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const HashRows& a = arguments[i];
      const std::uint64_t at_once = rows_at_once(a), first = round * at_once;
      const auto rows = static_cast<std::uint64_t>(a.layers * a.M);
      if (first >= rows) continue;
      Part& part = batch.part[parts++];
      part.rows = a;
      part.digests = reinterpret_cast<DigestWords*>(scratch[i]);
      part.first_row = first;
      part.chunks = chunks_per_row(a);
      part.row_count = std::min(at_once, rows - first);
      part.chunk_count = part.row_count * part.chunks;
    }
    if (parts == 0) return;
    launch(stream, batch, parts);
  }
}

}  // namespace bitwitness::cuda
