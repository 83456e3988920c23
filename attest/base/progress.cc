#include "attest/base/progress.h"

#include <unistd.h>

#include <cstdio>

namespace bitwitness {

ProgressLine::ProgressLine(std::string label, bool enabled)
    : label_(std::move(label)), active_(enabled && isatty(STDERR_FILENO) == 1) {}

ProgressLine::~ProgressLine() {
  if (drawn_) std::fputs("\r\033[K", stderr);
}

void ProgressLine::update(std::uint64_t done, std::uint64_t total) {
  if (!active_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && done < total && now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  drawn_ = true;
  const double percent =
      total == 0 ? 100.0 : 100.0 * static_cast<double>(done) / static_cast<double>(total);
  std::fprintf(stderr, "\r\033[K%s  %.0f %%", label_.c_str(), percent);
  std::fflush(stderr);
}

}  // namespace bitwitness
