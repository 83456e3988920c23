#include "tests/oracle/oracle_ops.h"

#include <algorithm>
#include <cstddef>

namespace bitwitness::oracle {
namespace {

__extension__ typedef unsigned __int128 Wide;

// integer * 2^exponent, for the hexadecimal constants of the text: 0x1.715476p+0 is (0x1715476,
// -24).
Bits constant(std::uint64_t integer, int exponent, bool negative = false) {
  return round_to_f32(negative, integer, exponent);
}

Bits maximum(Bits a, Bits b) {
  return less(a, b) ? b : a;
}

}  // namespace

Bits from_integer(std::uint64_t value) {
  return round_to_f32(false, value, 0);
}

Bits dot(const Row& x, const Row& w) {
  Bits total = kPlusZero;
  for (std::size_t start = 0; start < x.size(); start += 1024) {
    // Hand every k of the segment to its chain, ascending: chain = floor(k / 8) mod 8.
    Bits chains[8] = {};
    const std::size_t stop = std::min(start + 1024, x.size());
    for (std::size_t k = start; k < stop; ++k) {
      Bits& chain = chains[k / 8 % 8];
      chain = fma(x[k], w[k], chain);
    }
    Bits segment = chains[0];
    for (int c = 1; c < 8; ++c) segment = add(segment, chains[c]);
    total = start == 0 ? segment : add(total, segment);
  }
  return total;
}

Bits sum_squares(const Row& x) {
  std::vector<Bits> lanes(256, kPlusZero);
  for (std::size_t k = 0; k < x.size(); ++k) lanes[k % 256] = fma(x[k], x[k], lanes[k % 256]);
  while (lanes.size() > 1) {
    const std::size_t w = lanes.size() / 2;
    for (std::size_t i = 0; i < w; ++i) lanes[i] = add(lanes[i], lanes[i + w]);
    lanes.resize(w);
  }
  return lanes[0];
}

Row rms_norm(const Row& x, const Row& weight, Bits eps) {
  const Bits mean = div(sum_squares(x), from_integer(x.size()));
  const Bits r = div(kOne, sqrt(add(mean, eps)));
  Row out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) out[i] = mul(weight[i], mul(x[i], r));
  return out;
}

Row rope(const Row& head, const Row& cosines, const Row& sines) {
  const std::size_t half = head.size() / 2;
  Row out(head.size());
  for (std::size_t i = 0; i < half; ++i) {
    const Bits first = head[i], second = head[i + half];
    out[i] = fma(first, cosines[i], negate(mul(second, sines[i])));
    out[i + half] = fma(second, cosines[i], mul(first, sines[i]));
  }
  return out;
}

Bits exp(Bits x) {
  static const Bits kLowest = constant(105, 0, true), kHighest = constant(89, 0);
  static const Bits kLog2E = constant(0x1715476u, -24);
  static const Bits kMagic = constant(3, 22);  // 0x1.8p+23
  static const Bits kMinusLn2High = constant(0x162e4u, -17, true);
  static const Bits kMinusLn2Low = constant(0x17f7d1cu, -44, true);
  static const std::vector<Bits> kCoefficients = [] {  // 1/7!, 1/6!, ..., 1/1!, 1/0!
    std::vector<Bits> coefficients;
    for (int k = 7; k >= 0; --k) {
      std::uint64_t factorial = 1;
      for (int i = 2; i <= k; ++i) factorial *= static_cast<std::uint64_t>(i);
      coefficients.push_back(div(kOne, from_integer(factorial)));
    }
    return coefficients;
  }();
  if (is_nan(x)) return kQuietNan;
  if (less(x, kLowest)) x = kLowest;
  if (less(kHighest, x)) x = kHighest;
  const Bits n = sub(fma(x, kLog2E, kMagic), kMagic);
  Bits r = fma(n, kMinusLn2High, x);
  r = fma(n, kMinusLn2Low, r);
  Bits p = kCoefficients[0];
  for (std::size_t i = 1; i < kCoefficients.size(); ++i) p = fma(p, r, kCoefficients[i]);
  // n is an integer of magnitude below 2^8.
  const int magnitude = static_cast<int>(floor_scaled(n & 0x7fffffffu, 0));
  const int exponent = (n >> 31) != 0 ? -magnitude : magnitude;
  const int half = exponent >= 0 ? exponent / 2 : -((1 - exponent) / 2);  // floor
  return mul(mul(p, constant(1, half)), constant(1, exponent - half));
}

Bits silu(Bits x) {
  return div(x, add(kOne, exp(negate(x))));
}

Bits swiglu(Bits gate, Bits up) {
  return mul(silu(gate), up);
}

Row attention(const Row& q, const std::vector<Row>& keys, const std::vector<Row>& values) {
  const std::size_t dim = q.size();
  const Bits scale = div(kOne, sqrt(from_integer(dim)));
  Bits M = kPlusZero, L = kPlusZero;
  Row O(dim, kPlusZero);
  for (std::size_t start = 0; start < keys.size(); start += 64) {
    const std::size_t stop = std::min(start + 64, keys.size());
    Row s;
    for (std::size_t j = start; j < stop; ++j) s.push_back(mul(dot(q, keys[j]), scale));
    Bits m = s[0];
    for (const Bits score : s) m = maximum(m, score);
    Bits l = kPlusZero;
    Row o(dim, kPlusZero);
    for (std::size_t j = start; j < stop; ++j) {
      const Bits p = exp(sub(s[j - start], m));
      l = add(l, p);
      for (std::size_t i = 0; i < dim; ++i) o[i] = fma(p, values[j][i], o[i]);
    }
    if (start == 0) {
      M = m;
      L = l;
      O = o;
      continue;
    }
    const Bits joint = maximum(M, m);
    const Bits a = exp(sub(M, joint)), b = exp(sub(m, joint));
    L = fma(L, a, mul(l, b));
    for (std::size_t i = 0; i < dim; ++i) O[i] = fma(O[i], a, mul(o[i], b));
    M = joint;
  }
  for (std::size_t i = 0; i < dim; ++i) O[i] = div(O[i], L);
  return O;
}

std::uint32_t sample(const Row& logits, Bits temperature, std::uint32_t top_k, Bits top_p,
                     std::uint64_t draw) {
  std::vector<std::uint32_t> ranked(logits.size());
  for (std::size_t i = 0; i < ranked.size(); ++i) ranked[i] = static_cast<std::uint32_t>(i);
  std::stable_sort(ranked.begin(), ranked.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return less(logits[b], logits[a]); });
  if ((temperature & 0x7fffffffu) == 0) return ranked[0];

  const Bits greatest = logits[ranked[0]];
  const auto weight = [&](std::uint32_t id) -> Wide {
    return floor_scaled(exp(div(sub(logits[id], greatest), temperature)), 38);
  };
  if (top_k != 0 && top_k < ranked.size()) ranked.resize(top_k);
  Wide total = 0;
  for (const std::uint32_t id : ranked) total += weight(id);
  if (less(top_p, kOne)) {
    const Wide P = std::max<std::uint64_t>(1, floor_scaled(top_p, 32));
    std::vector<std::uint32_t> kept;
    Wide before = 0;
    for (const std::uint32_t id : ranked) {
      if ((before << 32) < P * total) kept.push_back(id);
      before += weight(id);
    }
    ranked = kept;
  }
  Wide kept_total = 0;
  for (const std::uint32_t id : ranked) kept_total += weight(id);
  const Wide target = (draw * kept_total) >> 64;
  std::sort(ranked.begin(), ranked.end());
  Wide running = 0;
  for (const std::uint32_t id : ranked) {
    running += weight(id);
    if (running > target) return id;
  }
  return 0xffffffffu;  // no id: cannot be, since target < kept_total
}

}  // namespace bitwitness::oracle
