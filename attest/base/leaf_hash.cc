#include "attest/base/leaf_hash.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "attest/base/merkle.h"
#include "attest/base/sha256.h"

namespace bitwitness {
namespace {

static_assert(std::endian::native == std::endian::little, "committed bytes are read in place");

void store_le(std::uint8_t* at, std::uint64_t value, int width) {
  for (int i = 0; i < width; ++i) at[i] = static_cast<std::uint8_t>(value >> (8 * i));
}

std::array<std::uint8_t, 32> prefix_bytes(const LeafPrefix& prefix, std::uint32_t chunk_index,
                                          std::uint32_t chunk_count, std::uint32_t chunk_bytes) {
  std::array<std::uint8_t, 32> out{};
  out[0] = static_cast<std::uint8_t>(prefix.type);
  out[1] = kLeafVersion;
  out[2] = prefix.dtype;
  store_le(&out[4], prefix.layer, 4);
  store_le(&out[8], prefix.position, 8);
  store_le(&out[16], chunk_index, 4);
  store_le(&out[20], chunk_count, 4);
  store_le(&out[24], chunk_bytes, 4);
  return out;
}

}  // namespace

Digest leaf_digest(const LeafPrefix& prefix, ByteView first, ByteView second) {
  const std::uint64_t total = first.size() + second.size();
  if (total > std::uint64_t{1} << 42) throw std::length_error("leaf_digest: payload over 4 TiB");
  const std::uint32_t count = leaf_chunk_count(total);
  MerkleAccumulator tree;
  Digest only;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint64_t begin = std::uint64_t{i} * kLeafChunkBytes;
    const std::uint32_t bytes = leaf_chunk_bytes(total, i);
    const std::uint64_t from_first =
        begin < first.size() ? std::min<std::uint64_t>(bytes, first.size() - begin) : 0;
    const std::uint64_t second_begin = begin + from_first - first.size();  // 0 at the seam
    const auto head = prefix_bytes(prefix, i, count, bytes);
    only = sha256(
        {head, from_first ? first.subspan(begin, from_first) : ByteView{},
         from_first < bytes ? second.subspan(second_begin, bytes - from_first) : ByteView{}});
    if (count > 1) tree.append(only);
  }
  return count > 1 ? tree.root() : only;
}

Digest leaf_digest(const LeafPrefix& prefix, ByteView payload) {
  return leaf_digest(prefix, payload, ByteView{});
}

Digest row_leaf(Dtype dtype, std::uint32_t layer, std::uint64_t position, ByteView row) {
  return leaf_digest({LeafType::kRow, static_cast<std::uint8_t>(dtype), layer, position}, row);
}

Digest key_value_leaf(Dtype dtype, std::uint32_t layer, std::uint64_t position, ByteView k_row,
                      ByteView v_row) {
  return leaf_digest({LeafType::kKeyValue, static_cast<std::uint8_t>(dtype), layer, position},
                     k_row, v_row);
}

Digest logits_leaf(std::uint64_t position, ByteView logits) {
  return leaf_digest({LeafType::kLogits, static_cast<std::uint8_t>(Dtype::kFp32), 0, position},
                     logits);
}

Digest tokens_leaf(std::span<const std::uint32_t> ids) {
  // u32 little-endian is how this host stores them (BitwitnessPlatform.cmake).
  return leaf_digest({LeafType::kTokens, kLeafDtypeU32, 0, 0},
                     {reinterpret_cast<const std::uint8_t*>(ids.data()), ids.size_bytes()});
}

Digest to_digest(const DigestWords& words) {
  Digest digest;
  std::uint8_t bytes[32];
  store_digest(words, bytes);
  std::memcpy(digest.bytes.data(), bytes, 32);
  return digest;
}

}  // namespace bitwitness
