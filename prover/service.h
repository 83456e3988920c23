// The calls of audit.proto: requests read, answers written (proto/PROTOCOL.md). Protocol Buffers
// stay inside service.cc.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "prover/audits.h"
#include "prover/calls.h"
#include "prover/generate.h"
#include "prover/record_store.h"
#include "prover/worker.h"

namespace bitwitness {

struct ServeOptions;

inline constexpr const char* kServiceName = "bitwitness.v1.Audit";
inline constexpr int kMaxRequestBytes = 4 << 20;  // PROTOCOL.md "Limits"

// All arguments must outlive the service.
std::unique_ptr<grpc::Service> make_audit_service(const ServedModel& model,
                                                  const ServeOptions& options, RecordStore& store,
                                                  Worker& worker, Audits& audits, Calls& calls);

}  // namespace bitwitness
