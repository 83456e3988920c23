// Which verifiers a prover answers.
#pragma once

#include <string>
#include <vector>

#include "attest/keys.h"

namespace bitwitness {

// Each of `values` is a verifier key (NAME+ID+KEY) or a file with one per line, where blank lines
// and what follows a '#' at a line's beginning or after white space is skipped. Usage Errors name
// file and line; a file without a key is one. Ascending by name, nothing twice.
std::vector<PublicKey> load_allow_list(const std::vector<std::string>& values);

}  // namespace bitwitness
