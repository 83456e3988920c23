// What a matrix product may do with its dots in the same pass; shared by backend.h and device code.
#pragma once

namespace bitwitness {

enum class Epilogue {
  kStore,   // y[m, n] = dot
  kAdd,     // y[m, n] = add(residual[m, n], dot)
  kSwiglu,  // two parts of equal N, gate and up: y[m, n] of the first = swiglu_element(gate, up)
};

}  // namespace bitwitness
