#include "kernels/rope_tables.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "attest/base/error.h"

namespace bitwitness {
namespace {

// Double-double numbers: an unevaluated sum hi + lo, |lo| <= ulp(hi)/2, about 106 bits. The
// operations are those of Dekker (1971) and Knuth, with fma for the exact product.
struct Dd {
  double hi;
  double lo;
};

Dd quick_two_sum(double a, double b) {
  const double s = a + b;
  return {s, b - (s - a)};
}
Dd two_sum(double a, double b) {
  const double s = a + b;
  const double v = s - a;
  return {s, (a - (s - v)) + (b - v)};
}
Dd two_product(double a, double b) {
  const double p = a * b;
  return {p, std::fma(a, b, -p)};
}
Dd operator+(Dd a, Dd b) {
  Dd s = two_sum(a.hi, b.hi);
  const Dd t = two_sum(a.lo, b.lo);
  s = quick_two_sum(s.hi, s.lo + t.hi);
  return quick_two_sum(s.hi, s.lo + t.lo);
}
Dd operator-(Dd a) {
  return {-a.hi, -a.lo};
}
Dd operator-(Dd a, Dd b) {
  return a + -b;
}
Dd operator*(Dd a, Dd b) {
  const Dd p = two_product(a.hi, b.hi);
  return quick_two_sum(p.hi, p.lo + (a.hi * b.lo + a.lo * b.hi));
}
Dd operator/(Dd a, Dd b) {
  const double q1 = a.hi / b.hi;
  Dd r = a - b * Dd{q1, 0.0};
  const double q2 = r.hi / b.hi;
  r = r - b * Dd{q2, 0.0};
  const double q3 = r.hi / b.hi;
  return quick_two_sum(q1, q2) + Dd{q3, 0.0};
}
bool less(Dd a, Dd b) {
  return a.hi < b.hi || (a.hi == b.hi && a.lo < b.lo);
}

constexpr Dd kLn2{0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56};
constexpr Dd kTwoPi{0x1.921fb54442d18p+2, 0x1.1a62633145c07p-52};

// ln x = e ln 2 + 2 atanh((m - 1) / (m + 1)), x = m 2^e, m in [1, 2): 40 terms leave less than
// 2^-120.
Dd dd_log(double x) {
  int e = 0;
  const double m = 2.0 * std::frexp(x, &e);
  const Dd z = (Dd{m, 0.0} - Dd{1.0, 0.0}) / (Dd{m, 0.0} + Dd{1.0, 0.0});
  const Dd z2 = z * z;
  Dd sum{0.0, 0.0};
  for (int k = 39; k >= 0; --k) sum = sum * z2 + Dd{1.0, 0.0} / Dd{2.0 * k + 1.0, 0.0};
  return Dd{2.0, 0.0} * z * sum + kLn2 * Dd{static_cast<double>(e - 1), 0.0};
}

// e^y = 2^n (e^(r/256))^256, y = n ln 2 + r, with 14 Taylor terms.
Dd dd_exp(Dd y) {
  const double n = std::nearbyint(y.hi / kLn2.hi);
  const Dd r = (y - kLn2 * Dd{n, 0.0}) * Dd{0x1p-8, 0.0};
  Dd sum{1.0, 0.0};
  for (int k = 14; k >= 1; --k) sum = sum * r / Dd{static_cast<double>(k), 0.0} + Dd{1.0, 0.0};
  for (int i = 0; i < 8; ++i) sum = sum * sum;
  const int exponent = static_cast<int>(n);
  return {std::ldexp(sum.hi, exponent), std::ldexp(sum.lo, exponent)};
}

// Rounds to binary32; false if an error of 2^-85 relative could change the result.
bool round_to_float(Dd x, float* out) {
  const auto rounded = [](Dd v) {
    float f = static_cast<float>(v.hi);
    // Conversion of hi alone is wrong only if hi is a midpoint of two binary32 and lo breaks the
    // tie.
    const double residue = v.hi - static_cast<double>(f);
    const float next = std::nextafterf(f, residue > 0 ? HUGE_VALF : -HUGE_VALF);
    if (residue != 0.0 && v.hi - static_cast<double>(f) == static_cast<double>(next) - v.hi) {
      const bool up = v.lo > 0.0, next_is_up = next > f;
      if (v.lo != 0.0 && up == next_is_up) f = next;
    }
    return f;
  };
  const double margin = std::fabs(x.hi) * 0x1p-85;
  const float below = rounded(x - Dd{margin, 0.0}), above = rounded(x + Dd{margin, 0.0});
  *out = below;
  return below == above;
}

// The frequency rule of Llama 3.1: low frequencies are divided by `factor`, high ones kept, those
// between interpolated. All in double-double; one rounding at the end.
Dd llama3_scaled(const ModelConfig& config, Dd frequency) {
  const Dd context{static_cast<double>(config.rope_original_max_positions), 0.0};
  const Dd low{config.rope_low_freq_factor, 0.0}, high{config.rope_high_freq_factor, 0.0};
  const Dd factor{config.rope_factor, 0.0};
  const Dd turns = context * frequency / kTwoPi;  // context / wavelength
  if (less(high, turns)) return frequency;
  if (less(turns, low)) return frequency / factor;
  const Dd smooth = (turns - low) / (high - low);
  return (Dd{1.0, 0.0} - smooth) * frequency / factor + smooth * frequency;
}

void append_floats(std::vector<std::byte>& out, const float* values, std::size_t count) {
  const std::size_t at = out.size();
  out.resize(at + count * sizeof(float));
  std::memcpy(out.data() + at, values, count * sizeof(float));
}

}  // namespace

std::vector<float> rope_inverse_frequencies(const ModelConfig& config) {
  const int half = static_cast<int>(config.head_dim / 2);
  const Dd log_theta = dd_log(config.rope_theta);
  std::vector<float> out(static_cast<std::size_t>(half));
  for (int i = 0; i < half; ++i) {
    const Dd power = Dd{2.0 * i, 0.0} / Dd{static_cast<double>(config.head_dim), 0.0};
    Dd frequency = i == 0 ? Dd{1.0, 0.0} : dd_exp(-(log_theta * power));
    if (config.rope_kind == ModelConfig::RopeKind::kLlama3)
      frequency = llama3_scaled(config, frequency);
    float rounded = 0.0f;
    // An exact power (theta = 4^n, say) sits on a binary32 value, never on a midpoint.
    if (!round_to_float(frequency, &rounded)) {
      throw usage_error("RoPE: the inverse frequency " + std::to_string(i) +
                        " of this model cannot be rounded with certainty; this rope_theta is not "
                        "supported");
    }
    out[static_cast<std::size_t>(i)] = rounded;
  }
  return out;
}

CosSin rope_cos_sin(float angle) {
  // Cody-Waite reduction by pi/2 with fma: r = a - n pi/2, |r| <= pi/4 + 2^-30.
  const double a = static_cast<double>(angle);
  const double magic = 0x1.8p+52;
  const double n = std::fma(a, 0x1.45f306dc9c883p-1, magic) - magic;
  double r = std::fma(-n, 0x1.921fb54442d18p+0, a);
  r = std::fma(-n, 0x1.1a62633145c07p-54, r);
  const double r2 = r * r;
  // Taylor to r^19 and r^18: the first omitted term is below 2^-66.
  double s = -0x1.2f49b46814157p-57;            // -1/19!
  s = std::fma(s, r2, 0x1.952c77030ad4ap-49);   //  1/17!
  s = std::fma(s, r2, -0x1.ae7f3e733b81fp-41);  // -1/15!
  s = std::fma(s, r2, 0x1.6124613a86d09p-33);   //  1/13!
  s = std::fma(s, r2, -0x1.ae64567f544e4p-26);  // -1/11!
  s = std::fma(s, r2, 0x1.71de3a556c734p-19);   //  1/9!
  s = std::fma(s, r2, -0x1.a01a01a01a01ap-13);  // -1/7!
  s = std::fma(s, r2, 0x1.1111111111111p-7);    //  1/5!
  s = std::fma(s, r2, -0x1.5555555555555p-3);   // -1/3!
  const double sine = std::fma(s * r2, r, r);
  double c = -0x1.6827863b97d97p-53;            // -1/18!
  c = std::fma(c, r2, 0x1.ae7f3e733b81fp-45);   //  1/16!
  c = std::fma(c, r2, -0x1.93974a8c07c9dp-37);  // -1/14!
  c = std::fma(c, r2, 0x1.1eed8eff8d898p-29);   //  1/12!
  c = std::fma(c, r2, -0x1.27e4fb7789f5cp-22);  // -1/10!
  c = std::fma(c, r2, 0x1.a01a01a01a01ap-16);   //  1/8!
  c = std::fma(c, r2, -0x1.6c16c16c16c17p-10);  // -1/6!
  c = std::fma(c, r2, 0x1.5555555555555p-5);    //  1/4!
  c = std::fma(c, r2, -0.5);
  const double cosine = std::fma(c, r2, 1.0);
  switch (static_cast<std::int64_t>(n) & 3) {
    case 0:
      return {static_cast<float>(cosine), static_cast<float>(sine)};
    case 1:
      return {static_cast<float>(-sine), static_cast<float>(cosine)};
    case 2:
      return {static_cast<float>(-cosine), static_cast<float>(-sine)};
    default:
      return {static_cast<float>(sine), static_cast<float>(-cosine)};
  }
}

RopeTables rope_tables(const std::vector<float>& inverse_frequencies, std::int64_t count) {
  const std::size_t half = inverse_frequencies.size();
  RopeTables tables;
  tables.cosines.resize(static_cast<std::size_t>(count) * half);
  tables.sines.resize(static_cast<std::size_t>(count) * half);
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::size_t i = 0; i < half; ++i) {
      const CosSin value = rope_cos_sin(static_cast<float>(t) * inverse_frequencies[i]);
      tables.cosines[static_cast<std::size_t>(t) * half + i] = value.cosine;
      tables.sines[static_cast<std::size_t>(t) * half + i] = value.sine;
    }
  }
  return tables;
}

std::vector<std::pair<std::string, std::vector<std::byte>>> rope_table_bytes(
    const ModelConfig& config) {
  const std::vector<float> frequencies = rope_inverse_frequencies(config);
  const RopeTables tables =
      rope_tables(frequencies, std::min<std::int64_t>(config.max_positions, kRopeDigestPositions));
  std::vector<std::byte> frequency_bytes, table_bytes;
  append_floats(frequency_bytes, frequencies.data(), frequencies.size());
  append_floats(table_bytes, tables.cosines.data(), tables.cosines.size());
  append_floats(table_bytes, tables.sines.data(), tables.sines.size());
  return {{"rope.cosines_sines", std::move(table_bytes)},
          {"rope.inverse_frequencies", std::move(frequency_bytes)}};
}

}  // namespace bitwitness
