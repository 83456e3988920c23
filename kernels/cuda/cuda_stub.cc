// cuda_backend.h for builds without a CUDA toolkit.
#include "attest/base/error.h"
#include "kernels/cuda/cuda_backend.h"

namespace bitwitness {

int cuda_device_count() {
  return 0;
}

std::string cuda_unavailable_reason() {
  return "this build has no CUDA backend (no CUDA toolkit was found when it was configured, or "
         "BITWITNESS_CUDA=OFF)";
}

std::unique_ptr<Backend> make_cuda_backend(int) {
  throw usage_error("device cuda: " + cuda_unavailable_reason() + "; choose another --device");
}

Ceilings cuda_ceilings() {
  throw usage_error("device cuda: " + cuda_unavailable_reason() + "; choose another --device");
}

}  // namespace bitwitness
