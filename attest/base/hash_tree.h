// The hash tree over one committed row, for CPU and GPU alike (RECORD_FORMAT.md "Leaves").
//
// A payload is cut into chunks of 1024 bytes (the last one short; an empty payload has one empty
// chunk).
//   chunk digest = SHA-256(prefix ‖ chunk bytes), with the 32-byte prefix of LeafPrefix
//   leaf digest  = root over the chunk digests in the tree shape of RFC 6962, inner nodes being
//                  SHA-256(0x01 ‖ left ‖ right); with one chunk it is the chunk digest itself.
// Every prefix begins with a type of 0x10 or more, so no chunk is ever an RFC 6962 leaf (0x00) or
// node (0x01); every prefix has the chunk count and the chunk's length, so the tree's shape is
// bound.
//
// This header is plain functions on integers: no library beyond <cstdint>, no exceptions, no
// allocation. Digests are eight big-endian words as SHA-256 defines them (word 0 holds bytes 0 to
// 3, byte 0 highest). The host's fast path is leaf_hash.h.
#pragma once

#include <cstdint>

#include "attest/base/host_device.h"

namespace bitwitness {

enum class LeafType : std::uint8_t {
  kRow = 0x10,          // h[layer][position], layer 0 = embedding, layer L = last hidden state
  kKeyValue = 0x11,     // K[layer][position] ‖ V[layer][position] as cached (keys after RoPE)
  kLogits = 0x12,       // logits of a position that emitted a token; layer 0
  kTokens = 0x13,       // all token ids as u32, prompt then emitted; layer 0, position 0
  kTensorChunk = 0x14,  // a chunk of a weight tensor: another prefix, see manifest.h
};

constexpr std::uint32_t kLeafChunkBytes = 1024;
constexpr std::uint8_t kLeafVersion = 1;
constexpr std::uint8_t kLeafDtypeU32 = 0;  // dtype byte of token ids; rows use the values of Dtype

// What places a payload: hashed in front of each of its chunks.
struct LeafPrefix {
  LeafType type;
  std::uint8_t dtype;  // value of Dtype, or kLeafDtypeU32
  std::uint32_t layer;
  std::uint64_t position;
};

struct DigestWords {
  std::uint32_t word[8];
};

BW_HD constexpr std::uint32_t leaf_chunk_count(std::uint64_t payload_bytes) {
  return payload_bytes == 0
             ? 1U
             : static_cast<std::uint32_t>((payload_bytes + kLeafChunkBytes - 1) / kLeafChunkBytes);
}

// Bytes in chunk `index` of a payload.
BW_HD constexpr std::uint32_t leaf_chunk_bytes(std::uint64_t payload_bytes, std::uint32_t index) {
  const std::uint64_t begin = static_cast<std::uint64_t>(index) * kLeafChunkBytes;
  const std::uint64_t left = payload_bytes - begin;
  return left < kLeafChunkBytes ? static_cast<std::uint32_t>(left) : kLeafChunkBytes;
}

namespace hash_tree_detail {

BW_HD constexpr std::uint32_t rotate_right(std::uint32_t x, int n) {
  return (x >> n) | (x << (32 - n));
}

BW_HD constexpr std::uint32_t byte_swap(std::uint32_t x) {
  return (x >> 24) | ((x >> 8) & 0xff00U) | ((x << 8) & 0xff0000U) | (x << 24);
}

BW_HD constexpr std::uint32_t sha256_round_constant(int i) {
  // FIPS 180-4 §4.2.2: fractional parts of the cube roots of the first sixty-four primes.
  constexpr std::uint32_t kRound[64] = {
      0x428a2f98U, 0x71374491U, 0xb5c0fbcfU, 0xe9b5dba5U, 0x3956c25bU, 0x59f111f1U, 0x923f82a4U,
      0xab1c5ed5U, 0xd807aa98U, 0x12835b01U, 0x243185beU, 0x550c7dc3U, 0x72be5d74U, 0x80deb1feU,
      0x9bdc06a7U, 0xc19bf174U, 0xe49b69c1U, 0xefbe4786U, 0x0fc19dc6U, 0x240ca1ccU, 0x2de92c6fU,
      0x4a7484aaU, 0x5cb0a9dcU, 0x76f988daU, 0x983e5152U, 0xa831c66dU, 0xb00327c8U, 0xbf597fc7U,
      0xc6e00bf3U, 0xd5a79147U, 0x06ca6351U, 0x14292967U, 0x27b70a85U, 0x2e1b2138U, 0x4d2c6dfcU,
      0x53380d13U, 0x650a7354U, 0x766a0abbU, 0x81c2c92eU, 0x92722c85U, 0xa2bfe8a1U, 0xa81a664bU,
      0xc24b8b70U, 0xc76c51a3U, 0xd192e819U, 0xd6990624U, 0xf40e3585U, 0x106aa070U, 0x19a4c116U,
      0x1e376c08U, 0x2748774cU, 0x34b0bcb5U, 0x391c0cb3U, 0x4ed8aa4aU, 0x5b9cca4fU, 0x682e6ff3U,
      0x748f82eeU, 0x78a5636fU, 0x84c87814U, 0x8cc70208U, 0x90befffaU, 0xa4506cebU, 0xbef9a3f7U,
      0xc67178f2U};
  return kRound[i];
}

}  // namespace hash_tree_detail

BW_HD inline DigestWords sha256_initial_state() {
  // FIPS 180-4 §5.3.3: fractional parts of the square roots of the first eight primes.
  return {{0x6a09e667U, 0xbb67ae85U, 0x3c6ef372U, 0xa54ff53aU, 0x510e527fU, 0x9b05688cU,
           0x1f83d9abU, 0x5be0cd19U}};
}

// One FIPS 180-4 compression. `block` is the 64-byte message block as 16 big-endian words; it is
// overwritten (message schedule).
BW_HD inline void sha256_compress(DigestWords& state, std::uint32_t (&block)[16]) {
  using hash_tree_detail::rotate_right;
  using hash_tree_detail::sha256_round_constant;
  std::uint32_t a = state.word[0], b = state.word[1], c = state.word[2], d = state.word[3];
  std::uint32_t e = state.word[4], f = state.word[5], g = state.word[6], h = state.word[7];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 64; ++i) {
    std::uint32_t w = block[i & 15];
    if (i >= 16) {
      const std::uint32_t w15 = block[(i + 1) & 15];
      const std::uint32_t w2 = block[(i + 14) & 15];
      w += (rotate_right(w15, 7) ^ rotate_right(w15, 18) ^ (w15 >> 3)) + block[(i + 9) & 15] +
           (rotate_right(w2, 17) ^ rotate_right(w2, 19) ^ (w2 >> 10));
      block[i & 15] = w;
    }
    const std::uint32_t t1 = h + (rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25)) +
                             ((e & f) ^ (~e & g)) + sha256_round_constant(i) + w;
    const std::uint32_t t2 = (rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22)) +
                             ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  state.word[0] += a;
  state.word[1] += b;
  state.word[2] += c;
  state.word[3] += d;
  state.word[4] += e;
  state.word[5] += f;
  state.word[6] += g;
  state.word[7] += h;
}

// Digest of one chunk. `load(i)`, i < ⌈chunk_bytes/4⌉, returns bytes 4i to 4i+3 of the chunk as a
// little-endian word; bytes at or after chunk_bytes are ignored. chunk_bytes <= kLeafChunkBytes.
template <class LoadWord>
BW_HD inline DigestWords chunk_digest(const LeafPrefix& prefix, std::uint32_t chunk_index,
                                      std::uint32_t chunk_count, std::uint32_t chunk_bytes,
                                      LoadWord load) {
  using hash_tree_detail::byte_swap;
  DigestWords state = sha256_initial_state();
  std::uint32_t block[16];
  const std::uint32_t head = static_cast<std::uint32_t>(prefix.type) |
                             (static_cast<std::uint32_t>(kLeafVersion) << 8) |
                             (static_cast<std::uint32_t>(prefix.dtype) << 16);
  block[0] = byte_swap(head);
  block[1] = byte_swap(prefix.layer);
  block[2] = byte_swap(static_cast<std::uint32_t>(prefix.position));
  block[3] = byte_swap(static_cast<std::uint32_t>(prefix.position >> 32));
  block[4] = byte_swap(chunk_index);
  block[5] = byte_swap(chunk_count);
  block[6] = byte_swap(chunk_bytes);
  block[7] = 0;
  // Message words from here on: the payload, then 0x80, zeros and the length in bits (FIPS 180-4
  // §5.1.1).
  const std::uint32_t full_words = chunk_bytes / 4;
  const std::uint32_t blocks = (32 + chunk_bytes + 9 + 63) / 64;
  const std::uint32_t last_word = blocks * 16 - 1;
  std::uint32_t at = 8;  // index of the message word
  for (std::uint32_t n = 0; n < blocks; ++n) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (std::uint32_t j = 0; j < 16; ++j) {
      if (n == 0 && j < 8) continue;
      const std::uint32_t i = at - 8;  // index of the payload word
      std::uint32_t word = 0;
      if (i < full_words) {
        word = byte_swap(load(i));
      } else if (i == full_words) {
        const std::uint32_t tail = chunk_bytes & 3;
        if (tail == 0) {
          word = 0x80000000U;
        } else {
          const std::uint32_t mask = 0xffffffffU << (32 - 8 * tail);
          word = (byte_swap(load(i)) & mask) | (0x80000000U >> (8 * tail));
        }
      } else if (at == last_word) {
        word = (32 + chunk_bytes) * 8;
      }
      block[j] = word;
      ++at;
    }
    sha256_compress(state, block);
  }
  return state;
}

// The same for a chunk that lies at `bytes` (any alignment).
BW_HD inline DigestWords chunk_digest_bytes(const LeafPrefix& prefix, std::uint32_t chunk_index,
                                            std::uint32_t chunk_count, std::uint32_t chunk_bytes,
                                            const std::uint8_t* bytes) {
  return chunk_digest(prefix, chunk_index, chunk_count, chunk_bytes, [=](std::uint32_t i) {
    std::uint32_t word = 0;
    for (std::uint32_t k = 0; k < 4 && 4 * i + k < chunk_bytes; ++k) {
      word |= static_cast<std::uint32_t>(bytes[4 * i + k]) << (8 * k);
    }
    return word;
  });
}

// Chunk `chunk_index` of a payload of whole 32-bit words that lies in two pieces (K row, V row; or
// one piece and second = nullptr, second_words = 0): the payload is first[0..first_words) ‖
// second[0..second_words). Reads words as the machine stores them (little-endian).
BW_HD inline DigestWords chunk_digest_words(const LeafPrefix& prefix, std::uint32_t chunk_index,
                                            const std::uint32_t* first, std::uint64_t first_words,
                                            const std::uint32_t* second,
                                            std::uint64_t second_words) {
  const std::uint64_t payload_bytes = 4 * (first_words + second_words);
  const std::uint64_t base = static_cast<std::uint64_t>(chunk_index) * (kLeafChunkBytes / 4);
  return chunk_digest(prefix, chunk_index, leaf_chunk_count(payload_bytes),
                      leaf_chunk_bytes(payload_bytes, chunk_index), [=](std::uint32_t i) {
                        const std::uint64_t at = base + i;
                        return at < first_words ? first[at] : second[at - first_words];
                      });
}

// SHA-256(0x01 ‖ left ‖ right): RFC 6962 §2.1 inner node.
BW_HD inline DigestWords node_digest(const DigestWords& left, const DigestWords& right) {
  DigestWords state = sha256_initial_state();
  std::uint32_t block[16];
  // The 0x01 shifts everything by one byte.
  block[0] = 0x01000000U | (left.word[0] >> 8);
  for (int i = 1; i < 8; ++i) block[i] = (left.word[i - 1] << 24) | (left.word[i] >> 8);
  block[8] = (left.word[7] << 24) | (right.word[0] >> 8);
  for (int i = 1; i < 8; ++i) block[8 + i] = (right.word[i - 1] << 24) | (right.word[i] >> 8);
  sha256_compress(state, block);
  block[0] = (right.word[7] << 24) | 0x00800000U;
  for (int i = 1; i < 15; ++i) block[i] = 0;
  block[15] = 65 * 8;
  sha256_compress(state, block);
  return state;
}

// One level of the reduction: of `count` digests, pair number i (i < count/2) is
// node_digest(level[2i], level[2i+1]); with an odd count the last digest moves up unchanged.
// Repeating this until one is left gives the RFC 6962 shape. A GPU block calls it with one thread a
// pair, in == a different buffer than out:
BW_HD inline DigestWords reduce_pair(const DigestWords* level, std::uint32_t count,
                                     std::uint32_t i) {
  return 2 * i + 1 < count ? node_digest(level[2 * i], level[2 * i + 1]) : level[2 * i];
}

BW_HD constexpr std::uint32_t reduced_count(std::uint32_t count) {
  return (count + 1) / 2;
}

// Serial reduction in place: on return digests[0] is the leaf digest. count >= 1.
BW_HD inline DigestWords reduce_chunks(DigestWords* digests, std::uint32_t count) {
  while (count > 1) {
    const std::uint32_t next = reduced_count(count);
    for (std::uint32_t i = 0; i < next; ++i) digests[i] = reduce_pair(digests, count, i);
    count = next;
  }
  return digests[0];
}

// The digest as bytes, most significant byte of word 0 first.
BW_HD inline void store_digest(const DigestWords& digest, std::uint8_t (&out)[32]) {
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 4; ++k) {
      out[4 * i + k] = static_cast<std::uint8_t>(digest.word[i] >> (24 - 8 * k));
    }
  }
}

}  // namespace bitwitness
