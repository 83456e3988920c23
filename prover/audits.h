// The prover's side of live audits (PROTOCOL.md): who may ask, what was promised before, and the
// re-runs that answer. Canonical bytes in and out; Protocol Buffers stay in service.cc.
//
// What a client may know of a failure is thrown as a Refusal; everything else is this prover's own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

#include "attest/base/bytes.h"
#include "attest/challenge.h"
#include "attest/record.h"
#include "prover/audit_ledger.h"
#include "prover/generate.h"
#include "prover/open.h"
#include "prover/prover_log.h"
#include "prover/record_store.h"
#include "prover/refusal.h"
#include "prover/worker.h"

namespace bitwitness {

struct ServeOptions;

// Memory for openings that are on their way, shared by all of them, first come, first served.
class OpeningMemory {
 public:
  explicit OpeningMemory(std::uint64_t bytes) : free_(bytes) {}

  class Part {
   public:
    Part(OpeningMemory& memory, std::uint64_t bytes, const GoneFn& gone);  // waits; see take()
    ~Part();
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;

   private:
    OpeningMemory& memory_;
    std::uint64_t bytes_;
  };

  bool contended() const;  // somebody waits for some

 private:
  void take(std::uint64_t bytes, const GoneFn& gone);  // Refusal when the client goes meanwhile
  void give(std::uint64_t bytes);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t free_;
  std::deque<const std::uint64_t*> waiting_;  // tickets
};

class Audits {
 public:
  // All arguments must outlive it. `log` may be null: then every audit is refused.
  Audits(const ServedModel& model, const PlacedWeights& weights, Backend& backend,
         const ServeOptions& options, RecordStore& store, ProverLog* log, Worker& worker);

  struct Receipts {
    std::string commitment;
    std::string record;
  };
  Receipts commit(ByteView commitment);

  enum class PartKind { kHeader, kEnds, kLayer, kOperators };
  // Takes one part; it may block while the client takes it in turn.
  using PartSink = std::function<void(PartKind kind, std::uint32_t layer, const Bytes& part)>;
  void open(ByteView request, const GoneFn& gone, const PartSink& sink);
  void operators(ByteView request, const GoneFn& gone, const PartSink& sink);

  // Whether another opening waits for what those that are being sent hold.
  bool memory_contended() const { return memory_.contended(); }

  // Answers that one commitment gets: its opening, the same again, operators. Each costs a re-run.
  static constexpr unsigned kMaxAnswers = 32;

 private:
  struct Kept {
    Record record;
    std::uint64_t log_index = 0;
  };
  struct Accepted {
    Challenge challenge;
    Digest digest;
    Kept kept;
    AuditSample sample;
  };
  void check_verifier(const PublicKey& verifier) const;
  Kept find(const Digest& id) const;
  static void check_order(const Kept& kept, std::uint64_t commitment_index);
  Refusal answers_used_up() const;
  Refusal bytes_used_up(std::uint64_t bytes) const;
  void check_plan(const AuditPlan& plan, const TraceShape& shape) const;
  // Of a request signed by `signer`, which must be the challenge's.
  Accepted accept(ByteView challenge, const PublicKey& signer);
  // What remains to be checked when it is known what the answer costs: quotas, one seed, one use.
  void admit(const Accepted& accepted, ByteView challenge, std::uint64_t bytes);
  const SigningKey& signer(const Record& record) const;
  RerunOptions rerun_options(const Worker::CancelledFn& cancelled) const;

  const ServedModel& model_;
  const PlacedWeights& weights_;
  Backend& backend_;
  const ServeOptions& options_;
  RecordStore& store_;
  ProverLog* const log_;
  Worker& worker_;
  AuditQuota quota_;
  AuditSessions sessions_;
  OpeningMemory memory_;
  std::mutex commit_mutex_;  // a commitment is appended once
};

}  // namespace bitwitness
