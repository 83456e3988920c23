// Calls being answered: how many there may be, and what becomes of clients that stop reading.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "prover/refusal.h"

namespace bitwitness {

class Call;

// Whether a client takes a part of an opening so slowly that its memory is asked back: since
// `taking` began, `slack` and the time of its `bytes` at 256 KiB/s have passed, or at 4 MiB/s while
// another opening waits for that memory (`contended`).
bool takes_too_slowly(std::chrono::steady_clock::duration taking, std::uint64_t bytes,
                      std::chrono::milliseconds slack, bool contended);

// The calls that live, and a watchdog: a client that takes or sends nothing for write_timeout would
// hold its handler's thread for ever, and is dropped.
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
  std::mutex mutex_;  // what follows, and blocked_since_ of every call
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
  // The same for a message that `receive` takes; false: there is none.
  bool read(const std::function<bool()>& receive);
  // The call is dropped when it lasts longer than write_timeout from now, whatever it does.
  void limit();

 private:
  friend class Calls;
  void set_blocked(std::optional<std::chrono::steady_clock::time_point> since);

  Calls& calls_;
  const GoneFn gone_;
  const std::function<void()> drop_;
  std::optional<std::chrono::steady_clock::time_point> blocked_since_;
};

}  // namespace bitwitness
