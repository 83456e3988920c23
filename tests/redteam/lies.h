// The lying provers of the red team: what each of them does, and what an audit must say of it.
// lies_test.cc audits them in one process, lying_prover.cc serves them over gRPC.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "attest/challenge.h"
#include "tests/verifier/test_prover.h"
#include "verifier/verdict.h"

namespace bitwitness::redteam {

// The honest model, and copies of it with one bit of one weight flipped. What is expensive is made
// when it is first asked for.
class Stage {
 public:
  explicit Stage(std::string model_dir) : dir_(std::move(model_dir)) {}

  const std::string& model_dir() const { return dir_; }
  const ServedModel& honest();
  // Bit `bit` of element `element` of `tensor`, under the honest model's manifest.
  const ServedModel& flipped(const std::string& tensor, std::uint64_t element, unsigned bit);
  const test::KeptRun& honest_run();
  // The honest request, run on another model.
  test::KeptRun run_on(const ServedModel& model);

 private:
  struct Flipped {
    test::TempDir dir;
    std::string what;
    std::unique_ptr<ServedModel> model;
  };
  std::string dir_;
  std::unique_ptr<ServedModel> honest_;
  std::optional<test::KeptRun> run_;
  std::vector<std::unique_ptr<Flipped>> flipped_;
};

struct Lie {
  std::string name;
  std::string what;  // a sentence for the table
  AuditPlan plan;    // with which it is audited
  Verdict verdict;
  // Of a mismatch: where it must be found.
  std::optional<std::uint32_t> layer;     // of the cell; absent for ends
  std::optional<std::uint64_t> position;  // absent: depends on the draw
  std::string op;
  std::function<std::unique_ptr<test::TestProver>(Stage&)> make;

  // A mismatch with a proof for others. A prover that says openly that it runs another model has
  // committed to nothing that a third party could find wrong.
  bool provable() const { return verdict == Verdict::kMismatch && name != "another-model"; }
};

inline void PrintTo(const Lie& lie, std::ostream* out) {
  *out << lie.name;
}

// The honest prover first.
const std::vector<Lie>& lies();

}  // namespace bitwitness::redteam
