#include "verifier/opening_receiver.h"

#include "attest/base/error.h"
#include "attest/opening.h"

namespace bitwitness {

std::string ExpectedPart::text() const {
  switch (kind) {
    case OpeningPartKind::kHeader:
      return "the header";
    case OpeningPartKind::kEnds:
      return "the ends";
    case OpeningPartKind::kLayer:
      return "the part of layer " + std::to_string(layer);
    case OpeningPartKind::kOperators:
      return "operators";
  }
  return "an unknown part";
}

std::vector<ExpectedPart> expected_parts(const TraceShape& shape, const AuditSample& sample) {
  std::vector<ExpectedPart> out;
  out.push_back({OpeningPartKind::kHeader, 0, 1, max_opening_header_bytes(shape), 0});
  if (!sample.embeddings.empty() || !sample.heads.empty()) {
    const std::uint64_t bytes = EndsOpening::bytes(shape, sample.embeddings, sample.heads);
    out.push_back({OpeningPartKind::kEnds, 0, bytes, bytes, 0});
  }
  for (std::size_t i = 0; i < sample.layers.size(); ++i) {
    const std::uint64_t bytes = LayerOpening::bytes(shape, sample.layers[i]);
    out.push_back({OpeningPartKind::kLayer, sample.layers[i].layer, bytes, bytes, i});
  }
  return out;
}

OpeningReceiver::OpeningReceiver(const std::vector<ExpectedPart>& parts, std::string document,
                                 OnPart on_part)
    : parts_(parts), document_(std::move(document)), on_part_(std::move(on_part)) {}

template <class Work>
void OpeningReceiver::guarded(Work work) {
  if (failure_) std::rethrow_exception(failure_);
  try {
    work();
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

void OpeningReceiver::part(OpeningPartKind kind, std::uint32_t layer, std::uint64_t bytes) {
  guarded([&] {
    const auto fail = [&](const std::string& problem) {
      throw malformed_error(document_ + ": " + problem);
    };
    if (receiving_) {
      fail(parts_[next_].text() + " ended after " + std::to_string(buffer_.size()) + " of " +
           std::to_string(announced_) + " bytes");
    }
    const ExpectedPart got{kind, layer, bytes, bytes, 0};
    if (next_ == parts_.size()) fail(got.text() + " after everything that was asked for");
    const ExpectedPart& expected = parts_[next_];
    if (kind != expected.kind || layer != expected.layer) {
      fail(got.text() + " where " + expected.text() + " belongs");
    }
    if (bytes < expected.min_bytes || bytes > expected.max_bytes) {
      fail(expected.text() + " is announced with " + std::to_string(bytes) + " bytes; " +
           (expected.min_bytes == expected.max_bytes ? "exactly " : "at most ") +
           std::to_string(expected.max_bytes) + " belong there");
    }
    receiving_ = true;
    announced_ = bytes;
    buffer_ = Bytes();
    buffer_.reserve(bytes);
  });
}

void OpeningReceiver::data(ByteView bytes) {
  guarded([&] {
    const auto fail = [&](const std::string& problem) {
      throw malformed_error(document_ + ": " + problem);
    };
    if (!receiving_) fail("data without a part that they are of");
    if (bytes.empty() || bytes.size() > kMaxOpeningChunkBytes) {
      fail("a chunk of " + std::to_string(bytes.size()) + " bytes; 1 to " +
           std::to_string(kMaxOpeningChunkBytes) + " are allowed");
    }
    if (bytes.size() > announced_ - buffer_.size()) {
      fail("more bytes in " + parts_[next_].text() + " than the " + std::to_string(announced_) +
           " announced");
    }
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    if (buffer_.size() == announced_) complete();
  });
}

void OpeningReceiver::complete() {
  receiving_ = false;
  const std::size_t index = next_++;
  on_part_(index, parts_[index], std::move(buffer_));
}

void OpeningReceiver::finish() {
  guarded([&] {
    if (next_ < parts_.size()) {
      throw malformed_error(document_ + ": it ended before " + parts_[next_].text() +
                            " was complete, although the call ended well");
    }
  });
}

}  // namespace bitwitness
