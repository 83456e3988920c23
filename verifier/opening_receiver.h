// The framing of an opening: which parts come in which order, and exactly how large.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "attest/challenge.h"
#include "attest/trace.h"
#include "verifier/audit_channel.h"

namespace bitwitness {

struct ExpectedPart {
  OpeningPartKind kind = OpeningPartKind::kHeader;
  std::uint32_t layer = 0;
  std::uint64_t min_bytes = 0, max_bytes = 0;  // equal for all but the header
  std::size_t layer_index = 0;                 // in AuditSample::layers
  std::string text() const;                    // "the part of layer 3"
};

// Header, the ends if any were drawn, then the layers: a function of shape and sample.
std::vector<ExpectedPart> expected_parts(const TraceShape& shape, const AuditSample& sample);

// Holds one part at a time and hands it over when it is complete. Anything out of order, of another
// size, too much or too little is malformed, before it is stored. An error of `on_part` passes
// through. After an error the receiver takes nothing more.
class OpeningReceiver final : public OpeningSink {
 public:
  using OnPart = std::function<void(std::size_t index, const ExpectedPart& part, Bytes data)>;
  // `parts` must outlive the receiver. `document` names the opening in messages.
  OpeningReceiver(const std::vector<ExpectedPart>& parts, std::string document, OnPart on_part);

  void part(OpeningPartKind kind, std::uint32_t layer, std::uint64_t bytes) override;
  void data(ByteView bytes) override;
  // After the stream ended: malformed unless everything came.
  void finish();

  // What part() or data() threw, as opposed to an error of the channel.
  std::exception_ptr failure() const { return failure_; }

 private:
  template <class Work>
  void guarded(Work work);
  void complete();

  const std::vector<ExpectedPart>& parts_;
  std::string document_;
  OnPart on_part_;
  std::size_t next_ = 0;  // the part expected next, or being received
  bool receiving_ = false;
  std::uint64_t announced_ = 0;
  Bytes buffer_;
  std::exception_ptr failure_;
};

}  // namespace bitwitness
