// bw-verifier audit --level cell|layer: a record judged by what its prover opens.
#include "attest/base/error.h"
#include "attest/base/progress.h"
#include "verifier/audit_flags.h"
#include "verifier/client.h"
#include "verifier/grpc_audit_channel.h"
#include "verifier/live_audit.h"

namespace bitwitness {
namespace {

constexpr std::uint64_t kDefaultCells = 32;
constexpr std::uint64_t kDefaultEnds = 16;

AuditPlan plan_from(const AuditFlags& flags) {
  AuditPlan plan;
  const bool cell = flags.level == "cell";
  plan.level = cell ? AuditLevel::kCell : AuditLevel::kLayer;
  plan.layers = LayerChoice::parse(flags.layers.value_or(cell ? "all" : "random:1"));
  plan.cells = cell ? flags.cells.value_or(kDefaultCells) : 0;
  plan.ends = flags.ends.value_or(kDefaultEnds);
  return plan;
}

// Without --log-key: the key that the prover names, which the report then says.
void take_log_key(const ProverEndpoint& prover, const AuditFlags& flags,
                  LiveAuditOptions& options) {
  if (options.log_key) return;
  const ProverInfo info = fetch_info(prover, flags.prover.deadline());
  if (!info.log_key) {
    throw cannot_judge_error("prover " + prover.host_port +
                             " keeps no log, so that nothing fixes what it is challenged with");
  }
  options.log_key = info.log_key;
  options.log_key_from_prover = true;
}

}  // namespace

AuditReport audit_live(const AuditFlags& flags, std::string& name) {
  // One's own things first: nothing is asked for in vain.
  const std::string proof_out = flags.proof_out.value_or(kDefaultProof);
  check_proof_out(flags, proof_out);
  LiveAuditOptions options(SigningKey::load(*flags.key));
  set_expectations(flags, options);
  options.plan = plan_from(flags);
  options.retries = flags.retries.value_or(options.retries);
  const ProverEndpoint prover = flags.prover.endpoint();
  options.prover = "prover " + prover.host_port;
  const std::unique_ptr<Backend> backend = make_backend(flags.device, flags.threads);
  const OpenedModel model = OpenedModel::open(flags.model, flags.manifest);

  std::optional<Record> record;
  try {
    record = fetch_record(prover, *flags.record_id, flags.prover.fetch_options()).parsed;
    name = prover.host_port + "/" + *flags.record_id;
    take_log_key(prover, flags, options);
  } catch (const Error& error) {
    return verdict_of(error);
  }
  const std::unique_ptr<AuditChannel> channel =
      make_grpc_audit_channel(prover, flags.prover.deadline());
  ProgressLine progress("replaying cells");
  options.on_replay = progress.callback();
  LiveAudit judged = live_audit(*record, model, *backend, *channel, options);
  if (judged.proof) write_proof(*judged.proof, proof_out, judged.report);
  return std::move(judged.report);
}

}  // namespace bitwitness
