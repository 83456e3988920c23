#include "prover/refusal.h"

#include <new>

#include "attest/base/error.h"

namespace bitwitness {

Refusal refusal_of(const std::exception_ptr& failure, const ReportFn& report) {
  const auto tell = [&](const std::string& message) {
    if (report) report(message);
  };
  try {
    std::rethrow_exception(failure);
  } catch (const Refusal& refusal) {
    return refusal;
  } catch (const std::bad_alloc&) {
    tell("out of memory");
    return {RefusalCode::kResourceExhausted, "the prover has not enough memory for this request"};
  } catch (const std::exception& error) {
    tell(error.what());
  }
  return own_failure();
}

}  // namespace bitwitness
