// Rotary position embedding tables (ARITHMETIC.md section 5): made on the host by a specified
// sequence of IEEE binary64 operations, so that every host has the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/model/model_config.h"

namespace bitwitness {

// theta^(-2i/head_dim) for i in [0, head_dim/2), scaled as the config says, correctly rounded to
// binary32. Throws a usage error in the (never seen) case that 100 bits do not settle a rounding.
std::vector<float> rope_inverse_frequencies(const ModelConfig& config);

// cos and sin of RN32(position * inverse_frequency[i]), for positions [0, count): [count,
// head_dim/2].
struct RopeTables {
  std::vector<float> cosines;
  std::vector<float> sines;
};
RopeTables rope_tables(const std::vector<float>& inverse_frequencies, std::int64_t count);

// Cosine and sine of one binary32 angle in [0, 2^25], each rounded to binary32 once from a binary64
// value.
struct CosSin {
  float cosine;
  float sine;
};
CosSin rope_cos_sin(float angle);

// What the manifest binds: the inverse frequencies and the tables of the first kRopeDigestPositions
// positions (or fewer, if the model has fewer): name -> little-endian binary32 bytes.
inline constexpr std::int64_t kRopeDigestPositions = 1024;
std::vector<std::pair<std::string, std::vector<std::byte>>> rope_table_bytes(
    const ModelConfig& config);

}  // namespace bitwitness
