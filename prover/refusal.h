// How a call ends that is not answered.
#pragma once

#include <exception>
#include <functional>
#include <string>

namespace bitwitness {

// The status codes that this prover uses (PROTOCOL.md "Status codes").
enum class RefusalCode {
  kInvalidArgument,
  kNotFound,
  kFailedPrecondition,
  kPermissionDenied,
  kOutOfRange,
  kResourceExhausted,
  kUnavailable,
  kCancelled,
  kInternal,
};

// Thrown by whatever serves a call; becomes the call's status.
struct Refusal {
  RefusalCode code;
  std::string message;
};

inline Refusal invalid(const std::string& message) {
  return {RefusalCode::kInvalidArgument, message};
}
inline Refusal own_failure() {
  return {RefusalCode::kInternal, "the prover failed; its operator finds the reason in its output"};
}
inline Refusal stopping() {
  return {RefusalCode::kUnavailable, "the prover is shutting down"};
}
inline Refusal cancelled_by_client() {
  return {RefusalCode::kCancelled, "cancelled by the client or its deadline"};
}

// Whether the client of a call is gone or its deadline has passed. From any thread.
using GoneFn = std::function<bool()>;
using ReportFn = std::function<void(const std::string&)>;

// What a client is told about a failure: a Refusal as it is. Anything else is this side's, so the
// client learns only that, and `report` (may be empty) the rest.
Refusal refusal_of(const std::exception_ptr& failure, const ReportFn& report);

}  // namespace bitwitness
