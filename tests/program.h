// Runs the programs as a person or a script does. Header-only.
#pragma once

#include <sys/wait.h>

#include <cstdlib>
#include <string>

#include "tests/kernels/model/safetensors_writer.h"

namespace bitwitness::test {

struct ProgramResult {
  int code = -1;  // exit code; -1 if a signal ended it
  std::string out;
  std::string err;
};

// A temporary directory in which shell lines run. The programs are in PATH as bw-prover,
// bw-verifier and bw-attest (BW_PROGRAM_PATH: their directories, separated by colons).
class Shell {
 public:
  ProgramResult run(const std::string& line) const {
    const std::string script = "cd '" + work_.path().string() +
                               "' && PATH=" BW_PROGRAM_PATH ":\"$PATH\" && { " + line + "\n} >'" +
                               path_of("out") + "' 2>'" + path_of("err") + "'";
    const int status = std::system(script.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(path_of("out")),
            read_file(path_of("err"))};
  }
  std::filesystem::path path(const std::string& name) const { return work_.path() / name; }

 private:
  std::string path_of(const char* name) const { return (streams_.path() / name).string(); }

  TempDir work_;
  TempDir streams_;
};

}  // namespace bitwitness::test
