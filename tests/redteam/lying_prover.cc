// A prover that lies, as a process of its own: lying-prover MODEL_DIR CASE [BEHAVIOUR].
//
// Serves one record over gRPC and answers audits as the case of lies.h does. Prints one line of
// JSON (address, record, keys) when it listens, and ends when its standard input does. BEHAVIOUR is
// about the transport of the opening: vanish, stall, drip, flood (ten gigabytes), nothing.
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "attest/base/error.h"
#include "proto/audit.grpc.pb.h"
#include "tests/redteam/lies.h"

namespace bitwitness {
namespace {

namespace wire = bitwitness::v1;

grpc::Status status_of(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::kCannotJudge:
      return {grpc::StatusCode::PERMISSION_DENIED, error.what()};
    case ErrorKind::kInfrastructure:
      return {grpc::StatusCode::UNAVAILABLE, error.what()};
    default:
      return {grpc::StatusCode::INVALID_ARGUMENT, error.what()};
  }
}

Bytes bytes_of(const std::string& text) {
  return Bytes(text.begin(), text.end());
}

class Service final : public wire::Audit::Service {
 public:
  Service(test::TestProver& prover, std::string behaviour)
      : prover_(prover), behaviour_(std::move(behaviour)) {}

  grpc::Status GetInfo(grpc::ServerContext*, const wire::GetInfoRequest*,
                       wire::GetInfoResponse* response) override {
    response->set_software("lying-prover");
    response->set_log_key(prover_.log_key.public_key().vkey());
    response->set_answers_audits(true);
    return grpc::Status::OK;
  }

  grpc::Status GetRecord(grpc::ServerContext*, const wire::GetRecordRequest*,
                         grpc::ServerWriter<wire::RecordChunk>* writer) override {
    const Bytes record = prover_.record.serialize();
    const LogReader log(prover_.log_dir());
    wire::RecordChunk chunk;
    chunk.mutable_header()->set_record_bytes(record.size());
    chunk.mutable_header()->set_receipt(log.receipt(0));
    writer->Write(chunk);
    for (std::size_t at = 0; at < record.size(); at += kMaxOpeningChunkBytes) {
      const std::size_t count = std::min<std::size_t>(kMaxOpeningChunkBytes, record.size() - at);
      chunk.set_data(record.data() + at, count);
      writer->Write(chunk);
    }
    return grpc::Status::OK;
  }

  grpc::Status Commit(grpc::ServerContext*, const wire::CommitRequest* request,
                      wire::CommitResponse* response) override {
    return answer([&] {
      const CommitReceipts receipts = prover_.commit(bytes_of(request->commitment()));
      response->set_commitment_receipt(receipts.commitment);
      response->set_record_receipt(receipts.record);
    });
  }

  grpc::Status Open(grpc::ServerContext* context, const wire::OpenRequest* request,
                    grpc::ServerWriter<wire::OpeningChunk>* writer) override {
    if (behaviour_ == "nothing") return grpc::Status::OK;
    if (behaviour_ == "stall") {
      while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return grpc::Status::CANCELLED;
    }
    if (behaviour_ == "flood") {
      wire::OpeningChunk chunk;
      chunk.mutable_part()->set_kind(wire::PART_KIND_HEADER);
      chunk.mutable_part()->set_bytes(10'000'000'000);
      bool taken = writer->Write(chunk);
      chunk.set_data(std::string(kMaxOpeningChunkBytes, 'x'));
      while (taken) taken = writer->Write(chunk);
      return grpc::Status::OK;
    }
    Sender sender(*context, *writer, behaviour_);
    return answer([&] { prover_.open(bytes_of(request->request()), sender); });
  }

  grpc::Status GetOperators(grpc::ServerContext* context, const wire::GetOperatorsRequest* request,
                            grpc::ServerWriter<wire::OpeningChunk>* writer) override {
    Sender sender(*context, *writer, "");
    return answer([&] {
      const Bytes bytes = bytes_of(request->request());
      const std::uint32_t layer = OperatorsRequest::parse(bytes, "request").layer;
      test::TestProver::send(sender, OpeningPartKind::kOperators, layer,
                             prover_.operators(bytes, UINT64_MAX));
    });
  }

 private:
  // Puts an opening on the wire, in the manner of a behaviour.
  class Sender final : public OpeningSink {
   public:
    Sender(grpc::ServerContext& context, grpc::ServerWriter<wire::OpeningChunk>& writer,
           std::string behaviour)
        : context_(context), writer_(writer), behaviour_(std::move(behaviour)) {}

    void part(OpeningPartKind kind, std::uint32_t layer, std::uint64_t bytes) override {
      // The process is gone in the middle of the stream.
      if (behaviour_ == "vanish" && kind != OpeningPartKind::kHeader) std::_Exit(0);
      wire::OpeningChunk chunk;
      chunk.mutable_part()->set_kind(static_cast<wire::PartKind>(kind));
      chunk.mutable_part()->set_layer(layer);
      chunk.mutable_part()->set_bytes(bytes);
      write(chunk);
    }
    void data(ByteView bytes) override {
      const std::size_t most = behaviour_ == "drip" ? 1 : bytes.size();
      wire::OpeningChunk chunk;
      for (std::size_t at = 0; at < bytes.size(); at += most) {
        chunk.set_data(bytes.data() + at, most);
        write(chunk);
        if (behaviour_ == "drip") std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }

   private:
    void write(const wire::OpeningChunk& chunk) {
      if (context_.IsCancelled() || !writer_.Write(chunk)) {
        throw infrastructure_error("the verifier is gone");
      }
    }
    grpc::ServerContext& context_;
    grpc::ServerWriter<wire::OpeningChunk>& writer_;
    std::string behaviour_;
  };

  template <class Work>
  static grpc::Status answer(const Work& work) {
    try {
      work();
      return grpc::Status::OK;
    } catch (const Error& error) {
      return status_of(error);
    }
  }

  test::TestProver& prover_;
  std::string behaviour_;
};

int run(const std::string& model_dir, const std::string& name, const std::string& behaviour) {
  redteam::Stage stage(model_dir);
  for (const redteam::Lie& lie : redteam::lies()) {
    if (lie.name != name) continue;
    const std::unique_ptr<test::TestProver> prover = lie.make(stage);
    Service service(*prover, behaviour);
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
    if (!server) {
      std::cerr << "lying-prover: cannot listen\n";
      return 3;
    }
    const nlohmann::json ready{{"address", "127.0.0.1:" + std::to_string(port)},
                               {"record", prover->record.digest().hex()},
                               {"log_key", prover->log_key.public_key().vkey()}};
    std::cout << ready.dump() << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
    }
    server->Shutdown(std::chrono::system_clock::now());
    return 0;
  }
  std::cerr << "lying-prover: no case '" << name << "'\n";
  return 2;
}

}  // namespace
}  // namespace bitwitness

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) {
    std::cerr << "usage: lying-prover MODEL_DIR CASE [vanish|stall|drip|flood|nothing]\n";
    return 2;
  }
  try {
    return bitwitness::run(argv[1], argv[2], argc == 4 ? argv[3] : "");
  } catch (const std::exception& error) {
    std::cerr << "lying-prover: " << error.what() << '\n';
    return 3;
  }
}
