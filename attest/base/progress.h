// A progress line on stderr, for people: silent unless stderr is a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace bitwitness {

// How long work reports progress: done and total in the work's own unit. May be empty. Called from
// one thread at a time.
using ProgressFn = std::function<void(std::uint64_t done, std::uint64_t total)>;

// Redraws at most ten times a second and wipes its line when destroyed. Thread-safe.
class ProgressLine {
 public:
  // Shows "label  42 %". Silent when stderr is no terminal or `enabled` is false.
  explicit ProgressLine(std::string label, bool enabled = true);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void update(std::uint64_t done, std::uint64_t total);
  // A callback into this object, which must outlive it.
  ProgressFn callback() {
    return [this](std::uint64_t done, std::uint64_t total) { update(done, total); };
  }

 private:
  std::mutex mutex_;
  std::string label_;
  bool active_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace bitwitness
