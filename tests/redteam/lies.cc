#include "tests/redteam/lies.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "attest/base/error.h"
#include "attest/claim.h"

namespace bitwitness::redteam {
namespace {

namespace fs = std::filesystem;
using test::KeptRun;
using test::TestProver;

// Where in the run the lies are put: prompt and answer together have more positions than that.
constexpr std::uint32_t kLayer = 2;
constexpr std::uint64_t kPosition = 7;
// Flips the lowest bit of an exponent: a value twice or half as large, which later sums cannot
// lose.
constexpr std::uint32_t kLoud = 1U << 23;

AuditPlan plan(AuditLevel level, const std::string& layers, std::uint64_t cells,
               std::uint64_t ends) {
  AuditPlan out;
  out.level = level;
  out.layers = LayerChoice::parse(layers);
  out.cells = cells;
  out.ends = ends;
  return out;
}
AuditPlan every_cell() {
  return plan(AuditLevel::kLayer, "all", 0, 1'000'000);
}
AuditPlan some_cells() {
  return plan(AuditLevel::kCell, "all", 8, 4);
}

// Byte offset of a tensor's data in a safetensors file.
std::size_t tensor_offset(const std::string& file, const std::string& tensor) {
  std::uint64_t header = 0;
  for (int i = 7; i >= 0; --i) header = header << 8 | static_cast<unsigned char>(file.at(i));
  const auto json = nlohmann::json::parse(file.substr(8, header));
  return 8 + header + json.at(tensor).at("data_offsets").at(0).get<std::size_t>();
}

// ---- Provers. Everything that a class does not override is done honestly.

class WrongSeed final : public TestProver {
 public:
  using TestProver::TestProver;
  AuditSample sample_of(const Challenge& challenge) override {
    Challenge other = challenge;
    other.secret[0] ^= 1;
    return TestProver::sample_of(other);
  }
};

// Answers with what it opened for the challenge before.
class Stale final : public TestProver {
 public:
  using TestProver::TestProver;
  Bytes header(const Challenge& challenge) override {
    Challenge before = challenge;
    before.secret[0] ^= 1;
    return TestProver::header(before);
  }
};

class Reordered final : public TestProver {
 public:
  using TestProver::TestProver;
  void send_opening(const Challenge& challenge, const AuditSample& sample,
                    OpeningSink& sink) override {
    AuditSample other = sample;
    std::swap(other.layers.front(), other.layers.back());
    TestProver::send_opening(challenge, other, sink);
  }
};

class LeavesOutALayer final : public TestProver {
 public:
  using TestProver::TestProver;
  void send_opening(const Challenge& challenge, const AuditSample& sample,
                    OpeningSink& sink) override {
    AuditSample other = sample;
    other.layers.pop_back();
    TestProver::send_opening(challenge, other, sink);
  }
};

// Opens one row of a layer as another one than it committed to.
class OpensAnotherRow : public TestProver {
 public:
  OpensAnotherRow(const ServedModel& model, KeptRun committed, LeafType type,
                  std::uint32_t leaf_layer, std::uint64_t position)
      : TestProver(model, std::move(committed)),
        type_(type),
        leaf_layer_(leaf_layer),
        position_(position) {}

  ByteView payload(LeafType type, std::uint32_t layer, std::uint64_t position) override {
    const ByteView honest = TestProver::payload(type, layer, position);
    if (type != type_ || layer != leaf_layer_ || position != position_ || !lies_now()) {
      return honest;
    }
    altered_.assign(honest.begin(), honest.end());
    altered_[2] ^= 1;
    return altered_;
  }

 protected:
  virtual bool lies_now() { return true; }

 private:
  LeafType type_;
  std::uint32_t leaf_layer_;
  std::uint64_t position_;
  Bytes altered_;
};

// The row that ends one layer is opened as committed there, and as another one where the next layer
// begins.
class TwoOpenings final : public OpensAnotherRow {
 public:
  TwoOpenings(const ServedModel& model, KeptRun committed)
      : OpensAnotherRow(model, std::move(committed), LeafType::kRow, kLayer + 1, kPosition) {}

 private:
  bool lies_now() override { return opened_++ > 0; }
  int opened_ = 0;
};

class Refuses final : public TestProver {
 public:
  enum class At { kCommit, kOpen };
  Refuses(const ServedModel& model, KeptRun committed, At at)
      : TestProver(model, std::move(committed)), at_(at) {}
  CommitReceipts commit(const Bytes& bytes) override {
    if (at_ == At::kCommit) throw cannot_judge_error("this prover is not audited by anyone");
    return TestProver::commit(bytes);
  }
  void open(const Bytes& bytes, OpeningSink& sink) override {
    if (at_ == At::kOpen) throw cannot_judge_error("this challenge is not answered");
    TestProver::open(bytes, sink);
  }

 private:
  At at_;
};

// Lies in a row, and shows operators without a fault.
class DeniesItsOperators final : public TestProver {
 public:
  using TestProver::TestProver;
  Bytes operators(const Bytes&, std::uint64_t) override {
    throw cannot_judge_error("operators are not shown");
  }
};

class OtherCheckpoint final : public TestProver {
 public:
  using TestProver::TestProver;
  // Receipts from before the commitment: the log never took it in.
  CommitReceipts receipts(const AuditCommitment&) override {
    const LogReader log(log_dir());
    const std::string receipt =
        log.receipt(log.find(log_entry_for_record(record.digest())).value());
    return {receipt, receipt};
  }
};

// Lets the log grow and answers with a later head: it would choose the one whose draw it likes.
class LaterCheckpoint final : public TestProver {
 public:
  using TestProver::TestProver;
  CommitReceipts receipts(const AuditCommitment& commitment) override {
    LogWriter(log_dir(), log_key).append({log_entry_for_record(commitment.digest())});
    const LogReader log(log_dir());
    const auto receipt = [&](const Bytes& entry) { return log.receipt(log.find(entry).value()); };
    return {receipt(log_entry_for_audit(commitment.digest())),
            receipt(log_entry_for_record(record.digest()))};
  }
};

template <class Prover = TestProver>
std::function<std::unique_ptr<TestProver>(Stage&)> honest_rows() {
  return [](Stage& stage) { return std::make_unique<Prover>(stage.honest(), stage.honest_run()); };
}

// One element of one committed row altered, and everything hashed and signed as if it were so.
template <class Prover = TestProver>
std::function<std::unique_ptr<TestProver>(Stage&)> altered(LeafType type, std::uint32_t leaf_layer,
                                                           std::uint64_t position,
                                                           std::uint64_t element,
                                                           std::uint32_t mask = 1) {
  return [=](Stage& stage) {
    KeptRun run = stage.honest_run();
    run.flip(type, leaf_layer, position, element, mask);
    run.commit();
    return std::make_unique<Prover>(stage.honest(), std::move(run));
  };
}

std::function<std::unique_ptr<TestProver>(Stage&)> opens_altered(LeafType type,
                                                                 std::uint32_t leaf_layer,
                                                                 std::uint64_t position) {
  return [=](Stage& stage) {
    return std::make_unique<OpensAnotherRow>(stage.honest(), stage.honest_run(), type, leaf_layer,
                                             position);
  };
}

std::function<std::unique_ptr<TestProver>(Stage&)> flipped_weight(const std::string& tensor,
                                                                  std::uint64_t element) {
  return [=](Stage& stage) {
    // The highest bit of a bf16 fraction.
    const ServedModel& other = stage.flipped(tensor, element, 6);
    auto prover = std::make_unique<TestProver>(stage.honest(), stage.run_on(other));
    prover->computes_with = &other;
    return prover;
  };
}

// The last token is another one than the sampler's, and the delivered text goes with it.
std::unique_ptr<TestProver> chooses_its_last_token(Stage& stage) {
  KeptRun run = stage.honest_run();
  std::uint32_t& last = run.claim.emitted_ids.back();
  do {
    last = last % 1000 + 2;  // no stop token
  } while (last == stage.honest_run().claim.emitted_ids.back());
  StreamDecoder decoder(*stage.honest().tokenizer, /*skip_special=*/true);
  std::string text;
  for (const std::uint32_t id : run.claim.emitted_ids) text += decoder.push(id);
  run.claim.text_digest = text_digest(run.claim.seed, text + decoder.flush());
  run.commit();
  return std::make_unique<TestProver>(stage.honest(), std::move(run));
}

// Says openly that it runs the other weights: an honest run of another model.
std::unique_ptr<TestProver> another_model(Stage& stage) {
  const ServedModel& other = stage.flipped("model.layers.2.mlp.up_proj.weight", 17 * 128 + 3, 6);
  auto prover = std::make_unique<TestProver>(other, stage.run_on(other));
  prover->computes_with = &other;
  return prover;
}

std::vector<Lie> make_lies() {
  const auto cell = AuditLevel::kCell;
  const auto nowhere = std::nullopt;
  const std::string up = "model.layers.2.mlp.up_proj.weight";
  std::vector<Lie> out;
  const auto add = [&](std::string name, std::string what, AuditPlan audited, Verdict verdict,
                       std::optional<std::uint32_t> layer, std::optional<std::uint64_t> position,
                       std::string op, std::function<std::unique_ptr<TestProver>(Stage&)> make) {
    out.push_back({std::move(name), std::move(what), std::move(audited), verdict, layer, position,
                   std::move(op), std::move(make)});
  };
  const Verdict mismatch = Verdict::kMismatch, malformed = Verdict::kMalformed;
  add("honest", "does not lie; every layer opened", every_cell(), Verdict::kMatch, nowhere, nowhere,
      "", honest_rows());
  add("honest-cells", "does not lie; some cells opened", some_cells(), Verdict::kMatch, nowhere,
      nowhere, "", honest_rows());

  add("flipped-weight", "one bit of one weight of up_proj in layer 2 flipped", every_cell(),
      mismatch, kLayer, 0, "up_proj", flipped_weight(up, 17 * 128 + 3));
  add("flipped-norm", "one bit of one weight of k_norm in layer 1 flipped", every_cell(), mismatch,
      1, 0, "k_norm", flipped_weight("model.layers.1.self_attn.k_norm.weight", 5));
  add("flipped-embedding", "one bit of the embedding of a prompt token flipped",
      plan(cell, "all", 8, 1'000'000), mismatch, nowhere, nowhere, "embedding", [](Stage& stage) {
        const std::uint64_t token = stage.honest_run().claim.prompt_ids.at(2);
        return flipped_weight("model.embed_tokens.weight", token * 128 + 1)(stage);
      });
  add("flipped-final-norm", "one bit of the last norm flipped", plan(cell, "all", 8, 1'000'000),
      mismatch, nowhere, nowhere, "lm_head", flipped_weight("model.norm.weight", 0));
  add("another-model", "says that it runs other weights", every_cell(), mismatch, kLayer, 0,
      "up_proj", another_model);

  add("altered-row", "one bit of h[3] of one position altered in the commitment", every_cell(),
      mismatch, kLayer, kPosition, "mlp_residual", altered(LeafType::kRow, 3, kPosition, 77));
  add("altered-last-row", "one bit of the last hidden row altered in the commitment", every_cell(),
      mismatch, 3, kPosition, "mlp_residual", altered(LeafType::kRow, 4, kPosition, 0));
  add("altered-key", "one bit of one key altered in the commitment", every_cell(), mismatch, kLayer,
      kPosition, "k_rope", altered(LeafType::kKeyValue, kLayer, kPosition, 5));
  add("altered-value", "one bit of one value altered in the commitment", every_cell(), mismatch,
      kLayer, kPosition, "v_proj", altered(LeafType::kKeyValue, kLayer, kPosition, 128 + 9));
  add("altered-logits", "one bit of one logit altered in the commitment",
      plan(cell, "all", 8, 1'000'000), mismatch, nowhere, nowhere, "lm_head", [](Stage& stage) {
        const TraceShape& shape = stage.honest_run().claim.trace_shape;
        return altered(LeafType::kLogits, 0, shape.positions - 1, 1234)(stage);
      });
  add("hidden-operators", "altered a row, and refuses to show its operators", every_cell(),
      mismatch, kLayer, kPosition, "mlp_residual",
      altered<DeniesItsOperators>(LeafType::kRow, 3, kPosition, 77));
  add("chosen-token", "the last token is not the sampler's", plan(cell, "all", 8, 1'000'000),
      mismatch, nowhere, nowhere, "sampler", chooses_its_last_token);
  // A key that no drawn cell is about, but that all later cells read: position 0 of layer 2, one
  // cell drawn from it. (With 1 in T the draw is of position 0 itself.)
  add("altered-prefix-key", "the key of position 0, read by whatever cell is drawn, altered",
      plan(cell, "2", 1, 0), mismatch, kLayer, nowhere, "",
      altered(LeafType::kKeyValue, kLayer, 0, 5, kLoud));

  add("opens-altered-prefix-key", "a key of the prefix opened otherwise than committed",
      every_cell(), malformed, nowhere, nowhere, "",
      opens_altered(LeafType::kKeyValue, kLayer, kPosition));
  add("opens-altered-row", "a row opened otherwise than committed", every_cell(), malformed,
      nowhere, nowhere, "", opens_altered(LeafType::kRow, kLayer, kPosition));
  add("two-openings", "one row opened in two ways", every_cell(), malformed, nowhere, nowhere, "",
      [](Stage& stage) {
        return std::make_unique<TwoOpenings>(stage.honest(), stage.honest_run());
      });
  add("stale-opening", "the answer to another challenge", some_cells(), malformed, nowhere, nowhere,
      "", honest_rows<Stale>());
  add("wrong-seed", "opens what another seed draws", some_cells(), malformed, nowhere, nowhere, "",
      honest_rows<WrongSeed>());
  add("reordered-layers", "layers in another order", every_cell(), malformed, nowhere, nowhere, "",
      honest_rows<Reordered>());
  add("missing-layer", "the last layer left out", every_cell(), malformed, nowhere, nowhere, "",
      honest_rows<LeavesOutALayer>());
  add("unlogged-commitment", "a receipt for something else than the commitment", some_cells(),
      malformed, nowhere, nowhere, "", honest_rows<OtherCheckpoint>());
  add("later-checkpoint", "a later head than the one that ends with the commitment", some_cells(),
      malformed, nowhere, nowhere, "", honest_rows<LaterCheckpoint>());

  add("refuses-commitment", "refuses the commitment", some_cells(), Verdict::kCannotJudge, nowhere,
      nowhere, "", [](Stage& stage) {
        return std::make_unique<Refuses>(stage.honest(), stage.honest_run(), Refuses::At::kCommit);
      });
  add("refuses-challenge", "refuses the challenge", some_cells(), Verdict::kCannotJudge, nowhere,
      nowhere, "", [](Stage& stage) {
        return std::make_unique<Refuses>(stage.honest(), stage.honest_run(), Refuses::At::kOpen);
      });
  return out;
}

}  // namespace

const ServedModel& Stage::honest() {
  if (!honest_) honest_ = std::make_unique<ServedModel>(ServedModel::load(dir_));
  return *honest_;
}

const ServedModel& Stage::flipped(const std::string& tensor, std::uint64_t element, unsigned bit) {
  const std::string what = tensor + ":" + std::to_string(element) + ":" + std::to_string(bit);
  for (const auto& made : flipped_) {
    if (made->what == what) return *made->model;
  }
  auto made = std::make_unique<Flipped>();
  made->what = what;
  const fs::path copy = made->dir.path() / "model";
  fs::copy(dir_, copy);
  const fs::path weights = copy / "model.safetensors";
  fs::permissions(weights, fs::perms::owner_all);
  std::string bytes = test::read_file(weights);
  char& byte = bytes.at(tensor_offset(bytes, tensor) + 2 * element + bit / 8);
  byte = static_cast<char>(byte ^ (1 << (bit % 8)));
  test::write_file(weights, bytes);
  made->model = std::make_unique<ServedModel>(ServedModel::load(copy.string()));
  flipped_.push_back(std::move(made));
  return *flipped_.back()->model;
}

const KeptRun& Stage::honest_run() {
  if (!run_) run_ = run_on(honest());
  return *run_;
}

KeptRun Stage::run_on(const ServedModel& model) {
  GenerationRequest request;
  request.prompt_ids = encode_prompt(honest(), "First Citizen:\nBefore we proceed any further");
  request.max_tokens = 12;
  request.seed = {1, 2, 3, 4};
  request.seed_provenance = SeedProvenance::kNonce;
  request.stop_ids = default_stop_ids(honest());
  return test::run_model(model, request);
}

const std::vector<Lie>& lies() {
  static const std::vector<Lie> all = make_lies();
  return all;
}

}  // namespace bitwitness::redteam
