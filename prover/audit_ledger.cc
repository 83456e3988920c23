#include "prover/audit_ledger.h"

#include <filesystem>

#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/challenge.h"

namespace bitwitness {
namespace {

constexpr std::chrono::hours kWindow{1};

}  // namespace

std::uint64_t AuditQuota::Window::left(std::uint64_t limit, Time now) {
  while (!taken.empty() && now - taken.front().first >= kWindow) {
    sum -= taken.front().second;
    taken.pop_front();
  }
  return limit - sum;
}

bool AuditQuota::Window::take(std::uint64_t amount, std::uint64_t limit, Time now) {
  if (amount > left(limit, now)) return false;
  taken.emplace_back(now, amount);
  sum += amount;
  return true;
}

bool AuditQuota::take_audit(const PublicKey& verifier, Time now) {
  const std::scoped_lock lock(mutex_);
  return uses_[{verifier.name, verifier.bytes}].audits.take(1, max_audits_, now);
}

bool AuditQuota::take_bytes(const PublicKey& verifier, std::uint64_t bytes, Time now) {
  const std::scoped_lock lock(mutex_);
  return uses_[{verifier.name, verifier.bytes}].bytes.take(bytes, max_bytes_, now);
}

std::uint64_t AuditQuota::audits_left(const PublicKey& verifier, Time now) {
  const std::scoped_lock lock(mutex_);
  return uses_[{verifier.name, verifier.bytes}].audits.left(max_audits_, now);
}

std::uint64_t AuditQuota::bytes_left(const PublicKey& verifier, Time now) {
  const std::scoped_lock lock(mutex_);
  return uses_[{verifier.name, verifier.bytes}].bytes.left(max_bytes_, now);
}

AuditSessions::AuditSessions(std::string dir, std::chrono::seconds memory)
    : dir_(std::move(dir)), memory_(memory) {
  if (dir_.empty()) return;
  make_directories(dir_);
  check_output_path((std::filesystem::path(dir_) / (Digest{}.hex() + ".challenge")).string());
}

AuditSessions::Session& AuditSessions::session(const Digest& commitment, Time now) {
  while (!order_.empty() && now - order_.front().first > memory_) {
    sessions_.erase(order_.front().second);
    order_.pop_front();
  }
  const auto [session, fresh] = sessions_.try_emplace(commitment);
  if (fresh) order_.emplace_back(now, commitment);
  return session->second;
}

bool AuditSessions::tie(const Digest& commitment, const Digest& challenge, ByteView challenge_bytes,
                        Time now) {
  const std::scoped_lock lock(mutex_);
  Session& kept = session(commitment, now);
  if (kept.challenge) return *kept.challenge == challenge;
  if (!dir_.empty()) {
    const std::string path =
        (std::filesystem::path(dir_) / (commitment.hex() + ".challenge")).string();
    if (path_exists(path)) {
      const Bytes bytes = read_file(path, {.max_bytes = kMaxChallengeBytes});
      kept.challenge = Challenge::parse(bytes, path).digest();
      return *kept.challenge == challenge;
    }
    write_file_atomic(path, challenge_bytes, 0600, IfExists::kFail);
  }
  kept.challenge = challenge;
  return true;
}

bool AuditSessions::take_answer(const Digest& commitment, unsigned limit, Time now) {
  const std::scoped_lock lock(mutex_);
  Session& kept = session(commitment, now);
  if (kept.answers >= limit) return false;
  ++kept.answers;
  return true;
}

void AuditSessions::return_answer(const Digest& commitment) {
  const std::scoped_lock lock(mutex_);
  const auto kept = sessions_.find(commitment);
  if (kept != sessions_.end() && kept->second.answers > 0) --kept->second.answers;
}

unsigned AuditSessions::answers(const Digest& commitment) const {
  const std::scoped_lock lock(mutex_);
  const auto kept = sessions_.find(commitment);
  return kept == sessions_.end() ? 0 : kept->second.answers;
}

}  // namespace bitwitness
