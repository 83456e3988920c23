#include "prover/service.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "attest/base/error.h"
#include "attest/base/hex.h"
#include "attest/base/random.h"
#include "proto/audit.grpc.pb.h"
#include "prover/serve.h"

namespace bitwitness {
namespace {

namespace wire = bitwitness::v1;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::size_t kChunkBytes = std::size_t{256} << 10;  // PROTOCOL.md "Limits"
constexpr milliseconds kPoll{50};                            // how late cancellation may be noticed
// Bytes of a record that are neither manifest, ids nor evidence: bounded by the limits on
// provenance.
constexpr std::uint64_t kRecordOverheadBytes = 64 << 10;

EvidenceLevel evidence_from(wire::EvidenceLevel level, EvidenceLevel unspecified) {
  switch (level) {
    case wire::EVIDENCE_LEVEL_UNSPECIFIED:
      return unspecified;
    case wire::EVIDENCE_LEVEL_NONE:
      return EvidenceLevel::kNone;
    case wire::EVIDENCE_LEVEL_ROOTS:
      return EvidenceLevel::kRoots;
    case wire::EVIDENCE_LEVEL_LEAVES:
      return EvidenceLevel::kLeaves;
    case wire::EVIDENCE_LEVEL_ROWS:
      return EvidenceLevel::kRows;
    default:
      throw invalid("evidence: unknown level " + std::to_string(static_cast<int>(level)));
  }
}

wire::EvidenceLevel to_wire(EvidenceLevel level) {
  switch (level) {
    case EvidenceLevel::kNone:
      return wire::EVIDENCE_LEVEL_NONE;
    case EvidenceLevel::kRoots:
      return wire::EVIDENCE_LEVEL_ROOTS;
    case EvidenceLevel::kLeaves:
      return wire::EVIDENCE_LEVEL_LEAVES;
    case EvidenceLevel::kRows:
      return wire::EVIDENCE_LEVEL_ROWS;
  }
  return wire::EVIDENCE_LEVEL_UNSPECIFIED;
}

wire::StopReason to_wire(StopReason reason) {
  switch (reason) {
    case StopReason::kStopToken:
      return wire::STOP_REASON_STOP_TOKEN;
    case StopReason::kLength:
      return wire::STOP_REASON_LENGTH;
    case StopReason::kContext:
      return wire::STOP_REASON_CONTEXT;
  }
  return wire::STOP_REASON_UNSPECIFIED;
}

// Largest record that `request` can lead to, at a level of evidence; nullopt: beyond any record.
std::optional<std::uint64_t> record_bytes_bound(const ServedModel& model,
                                                const GenerationRequest& request,
                                                EvidenceLevel evidence) {
  const ModelConfig& config = model.model.config();
  const std::uint64_t prompt = request.prompt_ids.size();
  const std::uint64_t room = static_cast<std::uint64_t>(config.max_positions) - prompt;
  TraceShape shape = trace_shape(config);
  shape.emitted = std::min(request.max_tokens, room + 1);
  shape.positions = prompt + shape.emitted - 1;
  std::uint64_t bytes = model.manifest.canonical_bytes().size() + 4 * (prompt + shape.emitted) +
                        4 * request.stop_ids.size() + kRecordOverheadBytes;
  if (evidence == EvidenceLevel::kRoots) bytes += 32 * Trace::root_count(shape);
  if (evidence >= EvidenceLevel::kLeaves) bytes += 32 * Trace::leaf_count(shape);
  if (evidence == EvidenceLevel::kRows) {
    const std::optional<std::uint64_t> rows = evidence_rows_bytes(shape);
    if (!rows) return std::nullopt;
    bytes += *rows;
  }
  return bytes;
}

wire::Result to_wire(const JobResult& result) {
  wire::Result out;
  out.set_record_id(result.record_id.hex());
  out.set_claim_digest(result.claim_digest.hex());
  out.set_trace_root(result.trace_root.hex());
  out.set_stop_reason(to_wire(result.stop_reason));
  out.set_prompt_tokens(result.prompt_tokens);
  out.set_emitted_tokens(result.emitted_tokens);
  out.set_record_bytes(result.record_bytes);
  return out;
}

wire::PartKind to_wire(Audits::PartKind kind) {
  switch (kind) {
    case Audits::PartKind::kHeader:
      return wire::PART_KIND_HEADER;
    case Audits::PartKind::kEnds:
      return wire::PART_KIND_ENDS;
    case Audits::PartKind::kLayer:
      return wire::PART_KIND_LAYER;
    case Audits::PartKind::kOperators:
      return wire::PART_KIND_OPERATORS;
  }
  return wire::PART_KIND_UNSPECIFIED;
}

grpc::StatusCode to_wire(RefusalCode code) {
  switch (code) {
    case RefusalCode::kInvalidArgument:
      return grpc::StatusCode::INVALID_ARGUMENT;
    case RefusalCode::kNotFound:
      return grpc::StatusCode::NOT_FOUND;
    case RefusalCode::kFailedPrecondition:
      return grpc::StatusCode::FAILED_PRECONDITION;
    case RefusalCode::kPermissionDenied:
      return grpc::StatusCode::PERMISSION_DENIED;
    case RefusalCode::kOutOfRange:
      return grpc::StatusCode::OUT_OF_RANGE;
    case RefusalCode::kResourceExhausted:
      return grpc::StatusCode::RESOURCE_EXHAUSTED;
    case RefusalCode::kUnavailable:
      return grpc::StatusCode::UNAVAILABLE;
    case RefusalCode::kCancelled:
      return grpc::StatusCode::CANCELLED;
    case RefusalCode::kInternal:
      return grpc::StatusCode::INTERNAL;
  }
  return grpc::StatusCode::INTERNAL;
}

template <class Message>
void write(Call& call, grpc::ServerWriter<Message>& writer, const Message& message) {
  call.write([&] { return writer.Write(message); });
}

ByteView view_of(const std::string& bytes) {
  return as_bytes(std::string_view(bytes));
}

// GetInfo and Commit answer with one message. By gRPC's usual way it would be sent after the
// handler, where nothing watches whether the client takes it; on the wire this is the same.
using AuditServiceBase = wire::Audit::WithStreamedUnaryMethod_GetInfo<
    wire::Audit::WithStreamedUnaryMethod_Commit<wire::Audit::Service>>;

class AuditService final : public AuditServiceBase {
 public:
  AuditService(const ServedModel& model, const ServeOptions& options, RecordStore& store,
               Worker& worker, Audits& audits, Calls& calls)
      : model_(model),
        options_(options),
        store_(store),
        worker_(worker),
        audits_(audits),
        calls_(calls) {}

  // Handlers run in gRPC's threads.

  grpc::Status StreamedGetInfo(
      grpc::ServerContext* context,
      grpc::ServerUnaryStreamer<wire::GetInfoRequest, wire::GetInfoResponse>* stream) override {
    return answer_one(
        context, *stream, [&](const wire::GetInfoRequest&, wire::GetInfoResponse* response) {
          const ModelConfig& config = model_.model.config();
          response->set_software("bitwitness " BITWITNESS_VERSION);
          std::filesystem::path dir = model_.model.dir().lexically_normal();
          if (!dir.has_filename()) dir = dir.parent_path();
          response->set_model(dir.filename().string());
          response->set_manifest_digest(manifest_digest_.hex());
          response->set_arithmetic(model_.manifest.arithmetic);
          response->set_context_tokens(static_cast<std::uint64_t>(config.max_positions));
          response->set_vocabulary(static_cast<std::uint64_t>(config.vocab_size));
          response->set_has_tokenizer(model_.tokenizer.has_value());
          response->set_max_tokens(options_.max_tokens);
          response->set_max_record_bytes(options_.max_record_bytes);
          response->set_evidence(to_wire(options_.evidence));
          if (options_.log_key) response->set_log_key(options_.log_key->public_key().vkey());
          if (options_.operator_key) {
            response->set_operator_key(options_.operator_key->public_key().vkey());
          }
          response->set_answers_audits(options_.log_key && !options_.allow.empty());
          response->set_retention_seconds(static_cast<std::uint64_t>(options_.retention.count()));
        });
  }

  grpc::Status Generate(grpc::ServerContext* context, const wire::GenerateRequest* request,
                        grpc::ServerWriter<wire::GenerateEvent>* writer) override {
    return answer(context, [&](Call& call) {
      const auto job = std::make_shared<GenerationJob>();
      read_request(*request, *job);
      worker_.enqueue(job);
      try {
        follow(*job, call, *writer);
      } catch (...) {
        job->abandoned = true;
        throw;
      }
    });
  }

  grpc::Status GetRecord(grpc::ServerContext* context, const wire::GetRecordRequest* request,
                         grpc::ServerWriter<wire::RecordChunk>* writer) override {
    return answer(context, [&](Call& call) {
      const std::optional<Bytes> id_bytes = from_hex(request->record_id());
      Digest id;
      if (!id_bytes || id_bytes->size() != id.bytes.size()) {
        throw invalid("record_id must be 64 lower-case hexadecimal digits");
      }
      std::copy(id_bytes->begin(), id_bytes->end(), id.bytes.begin());
      std::optional<StoredRecord> record = store_.get(id);
      if (!record) {
        throw Refusal{RefusalCode::kNotFound,
                      "no record " + id.hex() + " here (never made, or no longer kept)"};
      }
      wire::RecordChunk chunk;
      chunk.mutable_header()->set_record_bytes(record->size_bytes());
      chunk.mutable_header()->set_receipt(record->receipt());
      write(call, *writer, chunk);
      Bytes buffer;
      for (std::uint64_t at = 0; at < record->size_bytes(); at += buffer.size()) {
        buffer.resize(std::min<std::uint64_t>(kChunkBytes, record->size_bytes() - at));
        record->read(at, buffer);
        chunk.set_data(buffer.data(), buffer.size());
        write(call, *writer, chunk);
      }
    });
  }

  grpc::Status StreamedCommit(
      grpc::ServerContext* context,
      grpc::ServerUnaryStreamer<wire::CommitRequest, wire::CommitResponse>* stream) override {
    return answer_one(context, *stream,
                      [&](const wire::CommitRequest& request, wire::CommitResponse* response) {
                        Audits::Receipts receipts = audits_.commit(view_of(request.commitment()));
                        response->set_commitment_receipt(std::move(receipts.commitment));
                        response->set_record_receipt(std::move(receipts.record));
                      });
  }

  grpc::Status Open(grpc::ServerContext* context, const wire::OpenRequest* request,
                    grpc::ServerWriter<wire::OpeningChunk>* writer) override {
    return answer(context, [&](Call& call) {
      audits_.open(view_of(request->request()), call.gone(), part_sink(call, *writer));
    });
  }

  grpc::Status GetOperators(grpc::ServerContext* context, const wire::GetOperatorsRequest* request,
                            grpc::ServerWriter<wire::OpeningChunk>* writer) override {
    return answer(context, [&](Call& call) {
      audits_.operators(view_of(request->request()), call.gone(), part_sink(call, *writer));
    });
  }

 private:
  // Runs a handler; whatever it throws becomes a status.
  template <class Work>
  grpc::Status answer(grpc::ServerContext* context, const Work& work) {
    try {
      Call call(
          calls_, [context] { return context->IsCancelled(); },
          [context] { context->TryCancel(); });
      work(call);
      return grpc::Status::OK;
    } catch (...) {
      const Refusal refusal = refusal_of(std::current_exception(), options_.on_error);
      return {to_wire(refusal.code), refusal.message};
    }
  }

  // The same for a call with one message each way.
  template <class Stream, class Work>
  grpc::Status answer_one(grpc::ServerContext* context, Stream& stream, const Work& work) {
    return answer(context, [&](Call& call) { exchange_one(call, stream, work); });
  }
  template <class Request, class Response, class Work>
  static void exchange_one(Call& call, grpc::ServerUnaryStreamer<Request, Response>& stream,
                           const Work& work) {
    Request request;
    if (!call.read([&] { return stream.Read(&request); })) {
      throw invalid("the request is not there, or it is no message of this call");
    }
    Response response;
    work(request, &response);
    call.write([&] { return stream.Write(response); });
  }

  Audits::PartSink part_sink(Call& call, grpc::ServerWriter<wire::OpeningChunk>& writer) const {
    return [this, &call, &writer](Audits::PartKind kind, std::uint32_t layer, const Bytes& part) {
      const steady_clock::time_point start = steady_clock::now();
      wire::OpeningChunk chunk;
      chunk.mutable_part()->set_kind(to_wire(kind));
      chunk.mutable_part()->set_layer(layer);
      chunk.mutable_part()->set_bytes(part.size());
      write(call, writer, chunk);
      for (std::size_t at = 0; at < part.size(); at += kChunkBytes) {
        if (takes_too_slowly(steady_clock::now() - start, part.size(), options_.write_timeout,
                             audits_.memory_contended())) {
          throw Refusal{RefusalCode::kCancelled, "the client takes the opening too slowly"};
        }
        chunk.set_data(part.data() + at, std::min(kChunkBytes, part.size() - at));
        write(call, writer, chunk);
      }
    };
  }

  // Fills in the job or throws a Refusal that names the field.
  void read_request(const wire::GenerateRequest& request, GenerationJob& job) const {
    GenerationRequest& out = job.request;
    job.evidence = evidence_from(request.evidence(), options_.evidence);
    out.max_tokens = request.max_tokens();
    if (out.max_tokens > options_.max_tokens) {
      throw invalid("max_tokens is " + std::to_string(out.max_tokens) +
                    "; this prover allows at most " + std::to_string(options_.max_tokens));
    }
    if (request.has_sampling()) {
      out.sampling.temperature = request.sampling().temperature();
      out.sampling.top_k = request.sampling().top_k();
      out.sampling.top_p = request.sampling().has_top_p() ? request.sampling().top_p() : 1.0F;
    }
    out.seed.assign(request.nonce().begin(), request.nonce().end());
    if (!out.seed.empty()) {
      out.seed_provenance = SeedProvenance::kNonce;
    } else if (out.sampling.temperature != 0) {
      out.seed = random_bytes(32);
      out.seed_provenance = SeedProvenance::kProver;
    }
    out.stop_ids = default_stop_ids(model_);
    try {
      switch (request.prompt_case()) {
        case wire::GenerateRequest::kText:
          if (request.text().empty()) {
            throw invalid("the prompt is empty; give some text or token ids");
          }
          if (!model_.tokenizer) {
            throw invalid("this model has no tokenizer; give the prompt as token ids");
          }
          out.prompt_ids = encode_prompt(model_, request.text());
          break;
        case wire::GenerateRequest::kTokenIds:
          out.prompt_ids.assign(request.token_ids().ids().begin(), request.token_ids().ids().end());
          break;
        default:
          throw invalid("the request has no prompt; give some text or token ids");
      }
      check_request(model_, out);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kUsage) throw invalid(error.what());
      throw;
    }
    const std::optional<std::uint64_t> bytes = record_bytes_bound(model_, out, job.evidence);
    if (!bytes || *bytes > options_.max_record_bytes) {
      throw invalid(std::string("the record of this request with evidence '") +
                    evidence_level_name(job.evidence) + "' could need more than the " +
                    std::to_string(options_.max_record_bytes) +
                    " bytes allowed; ask for fewer tokens or less evidence");
    }
  }

  // Passes on what the worker publishes until the result, or throws a Refusal.
  void follow(GenerationJob& job, Call& call,
              grpc::ServerWriter<wire::GenerateEvent>& writer) const {
    for (bool done = false; !done;) {
      std::deque<std::pair<std::uint32_t, std::string>> tokens;
      std::optional<JobResult> result;
      {
        std::unique_lock lock(job.mutex);
        job.changed.wait_for(lock, kPoll, [&] {
          return !job.tokens.empty() || job.result.has_value() || job.refusal.has_value();
        });
        tokens.swap(job.tokens);
        if (job.refusal) throw *job.refusal;
        result = job.result;
      }
      call.check();
      if (worker_.cancelling() && !result) throw stopping();
      wire::GenerateEvent event;
      for (auto& [id, text] : tokens) {
        event.mutable_token()->set_id(id);
        event.mutable_token()->set_text(std::move(text));
        write(call, writer, event);
      }
      if (result) {
        *event.mutable_result() = to_wire(*result);
        write(call, writer, event);
        done = true;
      }
    }
  }

  const ServedModel& model_;
  const ServeOptions& options_;
  RecordStore& store_;
  Worker& worker_;
  Audits& audits_;
  Calls& calls_;
  const Digest manifest_digest_ = model_.manifest.digest();
};

}  // namespace

std::unique_ptr<grpc::Service> make_audit_service(const ServedModel& model,
                                                  const ServeOptions& options, RecordStore& store,
                                                  Worker& worker, Audits& audits, Calls& calls) {
  return std::make_unique<AuditService>(model, options, store, worker, audits, calls);
}

}  // namespace bitwitness
