// The hash tree of hash_tree.h at host speed, through OpenSSL. Equal to the portable functions
// there (tests/attest/hash_tree_test.cc).
#pragma once

#include "attest/base/bytes.h"
#include "attest/base/dtype.h"
#include "attest/base/hash_tree.h"

namespace bitwitness {

// Leaf digest of a payload; any length up to 4 TiB, any alignment. Thread-safe.
Digest leaf_digest(const LeafPrefix& prefix, ByteView payload);
// The same for a payload in two pieces (K row, V row): equal to leaf_digest of their concatenation.
Digest leaf_digest(const LeafPrefix& prefix, ByteView first, ByteView second);

Digest row_leaf(Dtype dtype, std::uint32_t layer, std::uint64_t position, ByteView row);
Digest key_value_leaf(Dtype dtype, std::uint32_t layer, std::uint64_t position, ByteView k_row,
                      ByteView v_row);
Digest logits_leaf(std::uint64_t position, ByteView logits);  // binary32
// Token ids, prompt then emitted, each as u32 little-endian.
Digest tokens_leaf(std::span<const std::uint32_t> ids);

Digest to_digest(const DigestWords& words);

}  // namespace bitwitness
