// Errors and exit codes shared by every folder and by all three programs.
//
// An Error is for broken logistics (bad flags, unreadable files, ill-formed evidence). A difference
// in bits is never an Error: it is a returned verdict.
#pragma once

#include <stdexcept>
#include <string>

namespace bitwitness {

// Exit codes of bw-prover, bw-verifier and bw-attest. Zero evidence is never kOk.
enum class ExitCode : int {
  kOk = 0,              // verified / done
  kMismatch = 1,        // re-execution or comparison found different bits
  kUsage = 2,           // wrong flags or unusable input of one's own
  kInfrastructure = 3,  // network, disk, device
  kCannotJudge = 4,     // nothing to check, evidence missing or refused
  kMalformed = 5,       // the record, opening or proof under judgement is ill-formed
};

// What went wrong, in the terms of ExitCode. There is no kind for a mismatch on purpose.
enum class ErrorKind { kUsage, kInfrastructure, kCannotJudge, kMalformed };

constexpr ExitCode exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUsage:
      return ExitCode::kUsage;
    case ErrorKind::kInfrastructure:
      return ExitCode::kInfrastructure;
    case ErrorKind::kCannotJudge:
      return ExitCode::kCannotJudge;
    case ErrorKind::kMalformed:
      return ExitCode::kMalformed;
  }
  return ExitCode::kInfrastructure;
}

// The message says what failed, where (file, offset, tensor, line) and what to do about it.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

inline Error usage_error(const std::string& message) {
  return Error(ErrorKind::kUsage, message);
}
inline Error infrastructure_error(const std::string& message) {
  return Error(ErrorKind::kInfrastructure, message);
}
inline Error cannot_judge_error(const std::string& message) {
  return Error(ErrorKind::kCannotJudge, message);
}
inline Error malformed_error(const std::string& message) {
  return Error(ErrorKind::kMalformed, message);
}

}  // namespace bitwitness
