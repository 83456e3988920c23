// What verifiers have asked for: how much within the last hour, and under which commitment and
// challenge. Time is an argument.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "attest/base/bytes.h"
#include "attest/keys.h"

namespace bitwitness {

// Audits and opened bytes per verifier key and sliding hour. Thread-safe.
class AuditQuota {
 public:
  using Time = std::chrono::steady_clock::time_point;
  AuditQuota(std::uint64_t audits_per_hour, std::uint64_t bytes_per_hour)
      : max_audits_(audits_per_hour), max_bytes_(bytes_per_hour) {}

  // Count one audit, or bytes; false, and nothing is counted, when that would exceed the quota.
  bool take_audit(const PublicKey& verifier, Time now);
  bool take_bytes(const PublicKey& verifier, std::uint64_t bytes, Time now);
  // How many are left, without counting any.
  std::uint64_t audits_left(const PublicKey& verifier, Time now);
  std::uint64_t bytes_left(const PublicKey& verifier, Time now);
  std::uint64_t max_audits() const { return max_audits_; }
  std::uint64_t max_bytes() const { return max_bytes_; }

 private:
  struct Window {
    std::deque<std::pair<Time, std::uint64_t>> taken;
    std::uint64_t sum = 0;
    bool take(std::uint64_t amount, std::uint64_t limit, Time now);
    std::uint64_t left(std::uint64_t limit, Time now);
  };
  struct Use {
    Window audits, bytes;
  };
  const std::uint64_t max_audits_;
  const std::uint64_t max_bytes_;
  std::mutex mutex_;
  std::map<std::pair<std::string, std::array<std::uint8_t, 32>>, Use> uses_;
};

// Commitments and the one challenge that each may have: one seed, one use. Thread-safe.
class AuditSessions {
 public:
  // `dir`: where challenges that were answered are kept as HEX-OF-COMMITMENT.challenge, for this
  // server's successors and as evidence of who asked; made if absent. Empty: only in memory, for at
  // least `memory` after the first challenge, by when the record must be out of reach.
  AuditSessions(std::string dir, std::chrono::seconds memory);

  using Time = std::chrono::steady_clock::time_point;
  // Ties `challenge` (its digest and bytes) to its commitment, durably where there is a directory.
  // False: another one is tied to it already.
  bool tie(const Digest& commitment, const Digest& challenge, ByteView challenge_bytes, Time now);
  // Counts one more answer to a commitment; false when it has had `limit`.
  bool take_answer(const Digest& commitment, unsigned limit, Time now);
  void return_answer(const Digest& commitment);  // it was not given after all
  unsigned answers(const Digest& commitment) const;

 private:
  struct Session {
    std::optional<Digest> challenge;
    unsigned answers = 0;
  };
  Session& session(const Digest& commitment, Time now);  // with mutex_ held; made if absent

  const std::string dir_;
  const std::chrono::seconds memory_;
  mutable std::mutex mutex_;
  std::map<Digest, Session> sessions_;
  std::deque<std::pair<Time, Digest>> order_;
};

}  // namespace bitwitness
