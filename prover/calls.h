// Calls being answered: how many there may be, and what becomes of clients that stop reading.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "prover/refusal.h"

namespace bitwitness {

class Call;

// The calls that live, and a watchdog: a client that takes nothing for write_timeout would hold its
// handler's thread for ever, and is dropped.
class Calls {
 public:
  Calls(std::size_t max_calls, std::chrono::milliseconds write_timeout);
  ~Calls();
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

 private:
  friend class Call;
  void add(Call* call);  // throws a Refusal when there are too many
  void remove(Call* call);
  void watch();

  const std::size_t max_calls_;
  const std::chrono::milliseconds write_timeout_;
  std::mutex mutex_;  // what follows, and writing_since_ of every call
  std::condition_variable changed_;
  std::set<Call*> calls_;
  bool watching_ = true;
  std::thread watchdog_;
};

// One call. Used by the thread of its handler.
class Call {
 public:
  // `drop` ends the call from another thread.
  Call(Calls& calls, GoneFn gone, std::function<void()> drop);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const GoneFn& gone() const { return gone_; }
  void check() const;  // throws a Refusal when the client is gone
  // `send` hands one message to the transport, which blocks while the client takes none; false: it
  // is gone.
  void write(const std::function<bool()>& send);

 private:
  friend class Calls;
  void set_writing(std::optional<std::chrono::steady_clock::time_point> since);

  Calls& calls_;
  const GoneFn gone_;
  const std::function<void()> drop_;
  std::optional<std::chrono::steady_clock::time_point> writing_since_;
};

}  // namespace bitwitness
