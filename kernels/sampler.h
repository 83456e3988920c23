// Choosing the next token (ARITHMETIC.md section 8): exact integers after the elementary function,
// so that no order of summation exists.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/contract.h"

namespace bitwitness {

// The token drawn from logits[vocab] (vocab in [1, 2^24]). temperature 0: the greatest logit, the
// lowest id among equals. Otherwise top_k, then top_p, then the draw, as section 8 says. Where a
// logit is not finite, some id: such logits are never committed. Pure.
std::int32_t sample_token(const float* logits, std::int64_t vocab,
                          const contract::SamplingParams& params, std::uint64_t draw);

// The 64 uniform bits for the token at `position` of its sequence: the first 8 bytes,
// little-endian, of SHA-256("bitwitness/draw/v1\n" | u32 seed length | seed | u64 position),
// integers little-endian.
std::uint64_t sample_draw(std::span<const std::uint8_t> seed, std::uint64_t position);

}  // namespace bitwitness
