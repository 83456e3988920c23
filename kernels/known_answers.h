// Known answers of the arithmetic: a build or an environment that breaks them refuses to run.
#pragma once

#include <string>

namespace bitwitness {

// Checks, on the calling thread, that binary32 operations round to nearest even, keep subnormals,
// fuse only where `fma` is written, and that the elementary functions give their published bits.
// `where` names the thread or device in the error (infrastructure). MXCSR and FPCR are per thread:
// call it on each.
void check_known_answers(const std::string& where);

}  // namespace bitwitness
