#include "prover/calls.h"

#include <algorithm>
#include <string>
#include <utility>

namespace bitwitness {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

bool takes_too_slowly(steady_clock::duration taking, std::uint64_t bytes, milliseconds slack,
                      bool contended) {
  const std::uint64_t bytes_per_second = std::uint64_t{contended ? 4096U : 256U} << 10;
  return taking > slack + milliseconds(bytes * 1000 / bytes_per_second);
}

Calls::Calls(std::size_t max_calls, milliseconds write_timeout)
    : max_calls_(max_calls), write_timeout_(write_timeout), watchdog_([this] { watch(); }) {}

Calls::~Calls() {
  {
    const std::scoped_lock lock(mutex_);
    watching_ = false;
    changed_.notify_all();
  }
  watchdog_.join();
}

void Calls::add(Call* call) {
  const std::scoped_lock lock(mutex_);
  if (calls_.size() >= max_calls_) {
    throw Refusal{
        RefusalCode::kResourceExhausted,
        "too many calls at the same time (" + std::to_string(max_calls_) + "); try again later"};
  }
  calls_.insert(call);
}

void Calls::remove(Call* call) {
  const std::scoped_lock lock(mutex_);
  calls_.erase(call);
}

void Calls::watch() {
  std::unique_lock lock(mutex_);
  while (watching_) {
    changed_.wait_for(lock, std::min(write_timeout_, milliseconds{500}));
    const steady_clock::time_point now = steady_clock::now();
    for (Call* call : calls_) {
      if (call->blocked_since_ && now - *call->blocked_since_ > write_timeout_) {
        call->drop_();
      }
    }
  }
}

Call::Call(Calls& calls, GoneFn gone, std::function<void()> drop)
    : calls_(calls), gone_(std::move(gone)), drop_(std::move(drop)) {
  calls_.add(this);
}

Call::~Call() {
  calls_.remove(this);
}

void Call::check() const {
  if (gone_()) throw cancelled_by_client();
}

void Call::write(const std::function<bool()>& send) {
  check();
  set_blocked(steady_clock::now());
  const bool sent = send();
  set_blocked(std::nullopt);
  if (!sent) throw cancelled_by_client();
}

bool Call::read(const std::function<bool()>& receive) {
  check();
  set_blocked(steady_clock::now());
  const bool received = receive();
  set_blocked(std::nullopt);
  if (!received) check();
  return received;
}

void Call::limit() {
  set_blocked(steady_clock::now());
}

void Call::set_blocked(std::optional<steady_clock::time_point> since) {
  const std::scoped_lock lock(calls_.mutex_);
  blocked_since_ = since;
}

}  // namespace bitwitness
