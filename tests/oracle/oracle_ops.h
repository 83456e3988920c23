// The operators of the arithmetic `fma32`, version 1, in integers: written from
// kernels/ARITHMETIC.md alone, section by section, as plainly as possible. Everything is a bit
// pattern of a binary32 (oracle_float.h). Rows are vectors; a row's length is its dimension.
// Arguments are finite unless a function says otherwise.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/oracle/oracle_float.h"

namespace bitwitness::oracle {

using Row = std::vector<Bits>;

// Section 3. x and w have the same length K >= 1.
Bits dot(const Row& x, const Row& w);

// Section 4.
Bits sum_squares(const Row& x);
Row rms_norm(const Row& x, const Row& weight, Bits eps);

// Section 5: one head (first half, second half); cosines and sines have half its length.
Row rope(const Row& head, const Row& cosines, const Row& sines);

// Section 6; any argument, infinities and NaN included.
Bits exp(Bits x);
Bits silu(Bits x);
Bits swiglu(Bits gate, Bits up);

// Section 7: one query head over the positions 0 .. keys.size() - 1.
Row attention(const Row& q, const std::vector<Row>& keys, const std::vector<Row>& values);

// Section 8: the id drawn from the logits by the 64 bits `draw`.
std::uint32_t sample(const Row& logits, Bits temperature, std::uint32_t top_k, Bits top_p,
                     std::uint64_t draw);

// A small integer as a binary32 (exact below 2^24).
Bits from_integer(std::uint64_t value);

}  // namespace bitwitness::oracle
