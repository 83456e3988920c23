// What every main() does around its work.
#pragma once

#include <functional>
#include <string>

#include "attest/base/error.h"

namespace bitwitness {

// Makes broken pipes and file size limits errors of writing instead of fatal signals, and turns
// SIGBUS (a mapped file that was truncated) into exit code 3 with a message. Then runs `work` and
// returns its exit code; an exception becomes one line "NAME: error: ..." on stderr and the exit
// code of its kind (Error), or 3 (out of memory, any other exception). Data that could not be
// written to stdout turns a success into 3.
int run_program(const char* name, const std::function<int()>& work);

// `text` with control characters (C0, DEL, C1) replaced by spaces: names out of files and records
// must not steer a terminal or forge a second line of output.
std::string printable(const std::string& text);

inline int to_int(ExitCode code) {
  return static_cast<int>(code);
}

}  // namespace bitwitness
