// A prover inside the test: runs a model once with all rows kept and answers live audits from
// memory, with a real log in a temporary directory. Every step is virtual or a public member, so
// that lies can be put in one at a time. Header-only.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attest/base/error.h"
#include "attest/base/leaf_hash.h"
#include "attest/challenge.h"
#include "attest/log.h"
#include "attest/opening.h"
#include "attest/record.h"
#include "kernels/cell.h"
#include "kernels/contract.h"
#include "prover/generate.h"
#include "tests/kernels/model/safetensors_writer.h"
#include "verifier/audit_channel.h"

namespace bitwitness::test {

// BW_TEST_DEVICE: what the prover of a test computes on, where a GPU's lies are wanted as data.
inline std::unique_ptr<Backend> make_prover_backend() {
  const char* const device = std::getenv("BW_TEST_DEVICE");
  return make_backend(device == nullptr ? "cpu" : device, 1);
}

// What a run committed to. `rows` as Evidence::rows.
struct KeptRun {
  Claim claim;
  std::optional<Trace> trace;
  Bytes rows;

  ByteView payload(LeafType type, std::uint32_t layer, std::uint64_t position) const {
    const auto range = evidence_row_range(claim.trace_shape, type, layer, position);
    return ByteView(rows).subspan(range.value().offset, range->bytes);
  }
  // The committed element, to be changed; commit() then makes trace and root fit.
  void flip(LeafType type, std::uint32_t layer, std::uint64_t position, std::uint64_t element,
            std::uint32_t mask = 1) {
    const auto range = evidence_row_range(claim.trace_shape, type, layer, position);
    std::uint32_t bits = 0;
    std::uint8_t* const at = rows.data() + range.value().offset + 4 * element;
    std::memcpy(&bits, at, 4);
    bits ^= mask;
    std::memcpy(at, &bits, 4);
  }
  // Hashes everything again, as a prover that lies well does.
  void commit() {
    const TraceShape& shape = claim.trace_shape;
    TraceBuilder builder(shape);
    builder.reserve(shape.positions);
    const auto set = [&](LeafType type, std::uint32_t layer, std::uint64_t t) {
      builder.set(type, layer, t,
                  leaf_digest({type, static_cast<std::uint8_t>(Dtype::kFp32), layer, t},
                              payload(type, layer, t)));
    };
    for (std::uint64_t t = 0; t < shape.positions; ++t) {
      for (std::uint32_t l = 0; l <= shape.layers; ++l) set(LeafType::kRow, l, t);
      for (std::uint32_t l = 0; l < shape.layers; ++l) set(LeafType::kKeyValue, l, t);
      if (t >= shape.positions - shape.emitted) set(LeafType::kLogits, 0, t);
    }
    std::vector<std::uint32_t> ids = claim.prompt_ids;
    ids.insert(ids.end(), claim.emitted_ids.begin(), claim.emitted_ids.end());
    builder.set(LeafType::kTokens, 0, 0, tokens_leaf(ids));
    trace = builder.finish(shape.positions, shape.emitted);
    claim.trace_root = trace->root();
  }
};

inline KeptRun run_model(const ServedModel& model, const GenerationRequest& request) {
  const std::unique_ptr<Backend> backend = make_prover_backend();
  GenerationOptions options;
  options.keep_rows = true;
  Generation generation = std::move(generate(model, *backend, {&request, 1}, options).front());
  return {std::move(generation.claim), std::move(generation.trace), std::move(generation.rows)};
}

class TestProver : public AuditChannel {
 public:
  // `model` is what it claims to run (its manifest goes into the record) and must outlive it.
  // Signed by an operator key unless `with_operator` is false.
  TestProver(const ServedModel& model, KeptRun committed, bool with_operator = true)
      : run(std::move(committed)), model_(model), backend_(make_prover_backend()) {
    if (with_operator) operator_key = SigningKey::generate("operator.example/test");
    record.claim = run.claim;
    record.manifest = model.manifest;
    record.claim.manifest_digest = model.manifest.digest();
    record.provenance = run_provenance(*backend_);
    if (operator_key) record.sign(*operator_key);
    init_log(log_dir(), log_key);
    LogWriter(log_dir(), log_key).append({log_entry_for_record(record.digest())});
  }

  // ---- The honest prover; a lying one overrides.
  CommitReceipts commit(const Bytes& bytes) override {
    commitments.push_back(bytes);
    const AuditCommitment commitment = AuditCommitment::parse(bytes, "commitment");
    LogWriter(log_dir(), log_key).append({log_entry_for_audit(commitment.digest())});
    return receipts(commitment);
  }

  void open(const Bytes& bytes, OpeningSink& sink) override {
    open_requests.push_back(bytes);
    const OpenRequest request = OpenRequest::parse(bytes, "request");
    challenges.push_back(request.challenge);
    const Challenge challenge = Challenge::parse(request.challenge, "challenge");
    if (request.verifier.key != challenge.verifier.key) {
      throw cannot_judge_error("the challenge is not by the one who asks");
    }
    send_opening(challenge, sample_of(challenge), sink);
  }

  Bytes operators(const Bytes& bytes, std::uint64_t) override {
    requests.push_back(bytes);
    const OperatorsRequest request = OperatorsRequest::parse(bytes, "request");
    CellOperators out;
    out.challenge = Challenge::parse(request.challenge, "challenge").digest();
    out.layer = request.layer;
    out.position = request.position;
    for (auto& [name, values] : operators_of(request.layer, request.position)) {
      out.outputs.push_back({name, std::move(values)});
    }
    out.sign(signer());
    return out.serialize();
  }

  // ---- Its steps.
  virtual CommitReceipts receipts(const AuditCommitment& commitment) {
    const LogReader log(log_dir());
    const std::uint64_t index = log.find(log_entry_for_audit(commitment.digest())).value();
    const std::uint64_t at = log.find(log_entry_for_record(record.digest())).value();
    return {log.receipt_at(index, index + 1, log_key), log.receipt_at(at, index + 1, log_key)};
  }

  virtual AuditSample sample_of(const Challenge& challenge) {
    const Checkpoint checkpoint = challenge.checkpoint("challenge");
    return draw_sample(challenge.commitment.plan, run.claim.trace_shape,
                       challenge_seed(challenge.secret, checkpoint, run.claim.trace_root));
  }

  virtual void send_opening(const Challenge& challenge, const AuditSample& sample,
                            OpeningSink& sink) {
    send(sink, OpeningPartKind::kHeader, 0, header(challenge));
    if (!sample.embeddings.empty() || !sample.heads.empty()) {
      send(sink, OpeningPartKind::kEnds, 0, ends(sample));
    }
    for (const LayerCells& cells : sample.layers) {
      send(sink, OpeningPartKind::kLayer, cells.layer, layer(cells));
    }
  }

  virtual Bytes header(const Challenge& challenge) {
    OpeningHeader out;
    out.challenge = challenge.digest();
    const auto roots = run.trace->tree_roots();
    out.tree_roots.assign(roots.begin(), roots.end());
    out.sign(signer());
    return out.serialize();
  }
  virtual Bytes ends(const AuditSample& sample) {
    TraceProofs proofs(*run.trace);
    return EndsOpening::make(proofs, run.claim.trace_shape, sample, reader());
  }
  virtual Bytes layer(const LayerCells& cells) {
    TraceProofs proofs(*run.trace);
    return LayerOpening::make(proofs, run.claim.trace_shape, cells, reader());
  }
  virtual ByteView payload(LeafType type, std::uint32_t layer, std::uint64_t position) {
    return run.payload(type, layer, position);
  }

  // What the cell's operators give from the committed rows, with the outputs that are committed as
  // they were committed: one that lied in a row lies in the operator, too.
  virtual OperatorOutputs operators_of(std::uint32_t layer, std::uint64_t position) {
    const ServedModel& computing = computes_with != nullptr ? *computes_with : model_;
    const TraceShape& shape = run.claim.trace_shape;
    const std::int32_t at = static_cast<std::int32_t>(position);
    std::vector<float> key_values;
    for (std::uint64_t t = 0; t <= position; ++t) {
      append(key_values, run.payload(LeafType::kKeyValue, layer, t));
    }
    std::vector<float> hidden;
    append(hidden, run.payload(LeafType::kRow, layer, position));
    CellInputs inputs;
    inputs.positions = {&at, 1};
    inputs.hidden = hidden;
    inputs.key_values = key_values;
    inputs.prefix = at + 1;
    CellRunner runner(computing.model.config(), *backend_,
                      static_cast<std::int64_t>(shape.positions));
    const PlacedLayer placed(computing.model.weights().layers[layer], *backend_);
    OperatorOutputs out;
    runner.run(placed.weights(), inputs, &out);
    for (auto& [name, values] : out) {
      const ByteView kv = run.payload(LeafType::kKeyValue, layer, position);
      if (name == "k_rope") set(values, kv.first(kv.size() / 2));
      if (name == "v_proj") set(values, kv.subspan(kv.size() / 2));
      if (name == "mlp_residual") set(values, run.payload(LeafType::kRow, layer + 1, position));
    }
    return out;
  }

  // Announces `announced` bytes (default: as many as there are) and sends the data in chunks.
  static void send(OpeningSink& sink, OpeningPartKind kind, std::uint32_t layer, const Bytes& data,
                   std::optional<std::uint64_t> announced = std::nullopt,
                   std::size_t chunk = kMaxOpeningChunkBytes) {
    sink.part(kind, layer, announced.value_or(data.size()));
    for (std::size_t at = 0; at < data.size(); at += chunk) {
      sink.data(ByteView(data).subspan(at, std::min(chunk, data.size() - at)));
    }
  }

  const SigningKey& signer() const { return operator_key ? *operator_key : log_key; }
  std::string log_dir() const { return (dir_.path() / "log").string(); }
  const ServedModel& model() const { return model_; }

  KeptRun run;
  const ServedModel* computes_with = nullptr;  // for operators; nullptr: the model it claims
  SigningKey log_key = SigningKey::generate("log.example/test");
  std::optional<SigningKey> operator_key;
  Record record;
  std::vector<Bytes> commitments, open_requests, challenges, requests;  // as they came

 private:
  PayloadReader reader() {
    return [this](LeafType type, std::uint32_t layer, std::uint64_t position) {
      return payload(type, layer, position);
    };
  }
  static void append(std::vector<float>& to, ByteView payload) {
    const std::size_t at = to.size();
    to.resize(at + payload.size() / 4);
    std::memcpy(to.data() + at, payload.data(), payload.size());
  }
  static void set(std::vector<float>& values, ByteView payload) {
    values.clear();
    append(values, payload);
  }

  const ServedModel& model_;
  std::unique_ptr<Backend> backend_;
  TempDir dir_;
};

}  // namespace bitwitness::test
