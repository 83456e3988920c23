// The CUDA backend: every operator of backend.h on one NVIDIA GPU, equal to contract.h bit for bit
// on every architecture from sm_75 on. This header needs no toolkit: builds without CUDA answer
// that there is no device (cuda_stub.cc).
//
// Weights given to operators must have come through place(), which aligns them; misaligned rows (an
// odd number of columns, a tensor inside a larger buffer) are right but slower. One stream per
// backend: calls from several threads at once are the caller's to serialise.
#pragma once

#include <memory>
#include <string>

#include "kernels/backend.h"
#include "kernels/ceilings.h"

namespace bitwitness {

// Number of CUDA devices this process can use; 0 without a driver, a device, or CUDA in the build.
int cuda_device_count();

// Why cuda_device_count() is 0, in one line; empty if it is not.
std::string cuda_unavailable_reason();

// A backend on device `ordinal`. Runs the known answers on the device first. Throws a usage error
// for an ordinal that does not exist, an infrastructure error if the device fails or breaks a known
// answer.
std::unique_ptr<Backend> make_cuda_backend(int ordinal);

// Of the calling thread's current device.
Ceilings cuda_ceilings();

}  // namespace bitwitness
