#include "verifier/grpc_audit_channel.h"

#include "attest/base/error.h"
#include "attest/log.h"
#include "attest/opening.h"
#include "verifier/connection.h"

namespace bitwitness {
namespace {

namespace wire = bitwitness::v1;
using std::chrono::milliseconds;

// Collects the one part of GetOperators.
class OperatorsSink final : public OpeningSink {
 public:
  OperatorsSink(std::uint32_t layer, std::uint64_t max_bytes, std::string what)
      : layer_(layer), max_bytes_(max_bytes), what_(std::move(what)) {}

  void part(OpeningPartKind kind, std::uint32_t layer, std::uint64_t bytes) override {
    if (announced_ != 0) throw malformed_error(what_ + ": a second part");
    if (kind != OpeningPartKind::kOperators || layer != layer_) {
      throw malformed_error(what_ + ": a part that was not asked for");
    }
    if (bytes == 0 || bytes > max_bytes_) {
      throw malformed_error(what_ + ": announced with " + std::to_string(bytes) + " bytes; 1 to " +
                            std::to_string(max_bytes_) + " are allowed");
    }
    announced_ = bytes;
  }
  void data(ByteView bytes) override {
    if (bytes.empty() || bytes.size() > kMaxOpeningChunkBytes) {
      throw malformed_error(what_ + ": a chunk of " + std::to_string(bytes.size()) + " bytes");
    }
    if (bytes.size() > announced_ - data_.size()) {
      throw malformed_error(what_ + ": more bytes than the " + std::to_string(announced_) +
                            " announced");
    }
    data_.insert(data_.end(), bytes.begin(), bytes.end());
  }
  Bytes take() {
    if (announced_ == 0 || data_.size() != announced_) {
      throw malformed_error(what_ + ": " + std::to_string(data_.size()) + " bytes where " +
                            std::to_string(announced_) + " were announced");
    }
    return std::move(data_);
  }

 private:
  std::uint32_t layer_;
  std::uint64_t max_bytes_;
  std::string what_;
  std::uint64_t announced_ = 0;
  Bytes data_;
};

OpeningPartKind part_kind(wire::PartKind kind) {
  switch (kind) {
    case wire::PART_KIND_HEADER:
      return OpeningPartKind::kHeader;
    case wire::PART_KIND_ENDS:
      return OpeningPartKind::kEnds;
    case wire::PART_KIND_LAYER:
      return OpeningPartKind::kLayer;
    case wire::PART_KIND_OPERATORS:
      return OpeningPartKind::kOperators;
    default:
      return OpeningPartKind{};  // no sink takes it
  }
}

class GrpcAuditChannel final : public AuditChannel {
 public:
  GrpcAuditChannel(ProverEndpoint prover, milliseconds deadline)
      : prover_(std::move(prover)), deadline_(deadline) {
    check_endpoint(prover_);
  }

  CommitReceipts commit(const Bytes& commitment) override {
    const std::unique_ptr<wire::Audit::Stub> stub = connect(prover_, deadline_);
    grpc::ClientContext context;
    set_deadline(context, deadline_);
    wire::CommitRequest request;
    request.set_commitment(commitment.data(), commitment.size());
    wire::CommitResponse response;
    const grpc::Status status = stub->Commit(&context, request, &response);
    if (!status.ok()) {
      throw status_error(status, prover_, "Commit", deadline_, /*own_request=*/false);
    }
    for (const std::string* receipt :
         {&response.commitment_receipt(), &response.record_receipt()}) {
      if (receipt->empty() || receipt->size() > kMaxReceiptBytes) {
        throw malformed_error("prover " + prover_.host_port + ": Commit: a receipt of " +
                              std::to_string(receipt->size()) + " bytes");
      }
    }
    return {response.commitment_receipt(), response.record_receipt()};
  }

  void open(const Bytes& request_bytes, OpeningSink& sink) override {
    const std::unique_ptr<wire::Audit::Stub> stub = connect(prover_, deadline_);
    grpc::ClientContext context;
    WaitBudget budget(context, deadline_);
    wire::OpenRequest request;
    request.set_request(request_bytes.data(), request_bytes.size());
    // Begins with a write, which a peer can hold up by flow control.
    Stream<wire::OpeningChunk> stream(context,
                                      budget.wait([&] { return stub->Open(&context, request); }));
    receive(stream, budget, sink, "Open");
  }

  Bytes operators(const Bytes& request_bytes, std::uint64_t max_bytes) override {
    const std::unique_ptr<wire::Audit::Stub> stub = connect(prover_, deadline_);
    grpc::ClientContext context;
    WaitBudget budget(context, deadline_);
    wire::GetOperatorsRequest request;
    request.set_request(request_bytes.data(), request_bytes.size());
    Stream<wire::OpeningChunk> stream(
        context, budget.wait([&] { return stub->GetOperators(&context, request); }));
    OperatorsSink sink(OperatorsRequest::parse(request_bytes, "own request").layer, max_bytes,
                       "prover " + prover_.host_port + ": GetOperators");
    receive(stream, budget, sink, "GetOperators");
    return sink.take();
  }

 private:
  void receive(Stream<wire::OpeningChunk>& stream, WaitBudget& budget, OpeningSink& sink,
               const char* call) const {
    wire::OpeningChunk chunk;
    while (budget.wait([&] { return stream.read(chunk); })) {
      switch (chunk.chunk_case()) {
        case wire::OpeningChunk::kPart:
          sink.part(part_kind(chunk.part().kind()), chunk.part().layer(), chunk.part().bytes());
          break;
        case wire::OpeningChunk::kData:
          sink.data(as_bytes(chunk.data()));
          break;
        default:
          throw malformed_error("prover " + prover_.host_port + ": " + call +
                                ": a message that is neither a part nor data");
      }
    }
    grpc::Status status = budget.wait([&] { return stream.finish(); });
    if (budget.spent()) {
      status = grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "waited too long");
    }
    if (!status.ok()) {
      throw status_error(status, prover_, call, deadline_, /*own_request=*/false);
    }
  }

  ProverEndpoint prover_;
  milliseconds deadline_;
};

}  // namespace

std::unique_ptr<AuditChannel> make_grpc_audit_channel(const ProverEndpoint& prover,
                                                      milliseconds deadline) {
  return std::make_unique<GrpcAuditChannel>(prover, deadline);
}

}  // namespace bitwitness
