#include "prover/audit_ledger.h"

#include <filesystem>

#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/challenge.h"

namespace bitwitness {
namespace {

constexpr std::chrono::hours kWindow{1};

}  // namespace

bool AuditQuota::Window::take(std::uint64_t amount, std::uint64_t limit, Time now) {
  while (!taken.empty() && now - taken.front().first >= kWindow) {
    sum -= taken.front().second;
    taken.pop_front();
  }
  if (amount > limit || sum > limit - amount) return false;
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

AuditSessions::AuditSessions(std::string dir, std::chrono::seconds memory)
    : dir_(std::move(dir)), memory_(memory) {
  if (dir_.empty()) return;
  make_directories(dir_);
  check_output_path((std::filesystem::path(dir_) / (Digest{}.hex() + ".challenge")).string());
}

void AuditSessions::add(const Digest& commitment, std::uint64_t log_index, Time now) {
  const std::scoped_lock lock(mutex_);
  while (!order_.empty() && now - order_.front().first > memory_) {
    sessions_.erase(order_.front().second);
    order_.pop_front();
  }
  const auto [session, fresh] = sessions_.try_emplace(commitment);
  session->second.log_index = log_index;
  if (fresh) order_.emplace_back(now, commitment);
}

std::optional<std::uint64_t> AuditSessions::log_index(const Digest& commitment) const {
  const std::scoped_lock lock(mutex_);
  const auto session = sessions_.find(commitment);
  if (session == sessions_.end()) return std::nullopt;
  return session->second.log_index;
}

bool AuditSessions::tie(const Digest& commitment, const Digest& challenge,
                        ByteView challenge_bytes) {
  const std::scoped_lock lock(mutex_);
  Session& session = sessions_.at(commitment);
  if (session.challenge) return *session.challenge == challenge;
  if (!dir_.empty()) {
    const std::string path =
        (std::filesystem::path(dir_) / (commitment.hex() + ".challenge")).string();
    if (path_exists(path)) {
      const Bytes kept = read_file(path, {.max_bytes = kMaxChallengeBytes});
      session.challenge = Challenge::parse(kept, path).digest();
      return *session.challenge == challenge;
    }
    write_file_atomic(path, challenge_bytes, 0600, IfExists::kFail);
  }
  session.challenge = challenge;
  return true;
}

bool AuditSessions::take_answer(const Digest& commitment, unsigned limit) {
  const std::scoped_lock lock(mutex_);
  Session& session = sessions_.at(commitment);
  if (session.answers >= limit) return false;
  ++session.answers;
  return true;
}

}  // namespace bitwitness
