// What a sample says about what was not in it.
#pragma once

#include <cstdint>

namespace bitwitness {

// `checked` of `population` were drawn without replacement and none was bad. The largest number B
// of bad ones that such a draw would have missed with a probability above 1 %: with more of them,
// it would have hit one in 99 of 100 audits at least. So at most B are bad, at 99 % confidence.
//
// The probability of missing all of B bad ones is C(N-B, n) / C(N, n), the product over i = 0..B-1
// of (N-n-i) / (N-i), N the population and n the number checked. B is found by multiplying in
// binary64, factor by factor, until the product is no longer above 0.01; the N - n factors that
// there can be are each exact to 2^-53, so the product is exact to about B * 2^-52. 0 when all were
// checked; `population` when none was.
std::uint64_t bad_at_most(std::uint64_t population, std::uint64_t checked);

}  // namespace bitwitness
