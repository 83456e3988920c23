#include "kernels/sampler.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "attest/base/sha256.h"

namespace bitwitness {
namespace {

using contract::logit_key;
using contract::multiply_high;
using contract::sampler_weight;
using contract::SamplingParams;

}  // namespace

std::int32_t sample_token(const float* logits, std::int64_t vocab, const SamplingParams& params,
                          std::uint64_t draw) {
  std::int32_t best = 0;
  for (std::int32_t i = 1; i < vocab; ++i) {
    if (logit_key(logits[i]) > logit_key(logits[best])) best = i;
  }
  if (params.temperature == 0.0f || !contract::is_finite(logits[best])) return best;

  const auto ranks_above = [&](std::int32_t a, std::int32_t b) {
    const std::uint32_t key_a = logit_key(logits[a]), key_b = logit_key(logits[b]);
    return key_a != key_b ? key_a > key_b : a < b;
  };
  std::vector<std::int32_t> kept(static_cast<std::size_t>(vocab));
  std::iota(kept.begin(), kept.end(), 0);
  if (params.top_k != 0 && params.top_k < kept.size()) {
    std::nth_element(kept.begin(), kept.begin() + params.top_k, kept.end(), ranks_above);
    kept.resize(params.top_k);
  }
  const auto weight_of = [&](std::int32_t id) -> std::uint64_t {
    if (!contract::is_finite(logits[id])) return 0;
    return sampler_weight(logits[id], logits[best], params.temperature);
  };
  std::uint64_t total = 0;
  for (const std::int32_t id : kept) total += weight_of(id);

  if (params.top_p < 1.0f) {
    std::sort(kept.begin(), kept.end(), ranks_above);
    const std::uint64_t fraction = contract::top_p_fraction(params.top_p);
    std::uint64_t before = 0;
    std::size_t count = 0;
    while (count < kept.size() && contract::within_top_p(before, total, fraction)) {
      before += weight_of(kept[count++]);
    }
    kept.resize(count);
    total = before;
  }
  std::sort(kept.begin(), kept.end());
  const std::uint64_t target = multiply_high(draw, total);
  std::uint64_t cumulative = 0;
  for (const std::int32_t id : kept) {
    cumulative += weight_of(id);
    if (cumulative > target) return id;
  }
  return best;  // unreachable: target < total
}

std::uint64_t sample_draw(std::span<const std::uint8_t> seed, std::uint64_t position) {
  Sha256 hash;
  hash.update("bitwitness/draw/v1\n");
  std::uint8_t length[4], at[8];
  for (int i = 0; i < 4; ++i) length[i] = static_cast<std::uint8_t>(seed.size() >> (8 * i));
  for (int i = 0; i < 8; ++i) at[i] = static_cast<std::uint8_t>(position >> (8 * i));
  hash.update(std::span<const std::uint8_t>(length));
  hash.update(seed);
  hash.update(std::span<const std::uint8_t>(at));
  const Digest digest = hash.finish();
  std::uint64_t draw = 0;
  for (int i = 0; i < 8; ++i) draw |= std::uint64_t{digest.bytes[i]} << (8 * i);
  return draw;
}

}  // namespace bitwitness
