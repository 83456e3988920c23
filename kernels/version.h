// What `--version` says: the program, the arithmetics and the formats it speaks.
#pragma once

#include <string>

#include "kernels/contract.h"

namespace bitwitness {

inline std::string version_text(const std::string& program, const std::string& version) {
  return program + " " + version + "\narithmetic " + contract::kArithmeticName + " version " +
         std::to_string(contract::kArithmeticVersion) + ", sampler version " +
         std::to_string(contract::kSamplerVersion) + "\nrecord format 1, log format 1";
}

}  // namespace bitwitness
