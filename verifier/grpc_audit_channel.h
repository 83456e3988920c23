// Live audits over gRPC: the calls Commit, Open and GetOperators (proto/PROTOCOL.md).
#pragma once

#include <chrono>
#include <memory>

#include "verifier/audit_channel.h"
#include "verifier/prover_endpoint.h"

namespace bitwitness {

// Every call makes a connection of its own, so that one that broke does not stand in the way of the
// next. Commit and GetOperators must be done within `deadline`; of Open, the time that is spent
// waiting for the prover counts, not the time in which the sink judges what came.
std::unique_ptr<AuditChannel> make_grpc_audit_channel(const ProverEndpoint& prover,
                                                      std::chrono::milliseconds deadline);

}  // namespace bitwitness
