// Live audits as a prover serves them (proto/PROTOCOL.md "Audits"): raw calls, good and bad ones.
// What a verifier makes of the answers is tests/verifier's.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/base/hex.h"
#include "attest/challenge.h"
#include "attest/log.h"
#include "attest/opening.h"
#include "attest/record.h"
#include "prover/allow_list.h"
#include "prover/audit_ledger.h"
#include "prover/audits.h"
#include "prover/calls.h"
#include "prover/prover_log.h"
#include "prover/serve.h"
#include "tests/certificates.h"
#include "tests/prover/serving.h"

namespace bitwitness {
namespace {

namespace fs = std::filesystem;
namespace wire = bitwitness::v1;
using grpc::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::HasSubstr;
using namespace test;

constexpr seconds kDeadline{60};

// Parts as they came, by the framing's rules.
struct Part {
  wire::PartKind kind;
  std::uint32_t layer;
  Bytes data;
  friend bool operator==(const Part&, const Part&) = default;
};
struct Answer {
  grpc::Status status;
  std::vector<Part> parts;
};

std::vector<Part> read_parts(grpc::ClientReader<wire::OpeningChunk>& reader) {
  std::vector<Part> parts;
  std::uint64_t missing = 0;
  wire::OpeningChunk chunk;
  while (reader.Read(&chunk)) {
    if (chunk.has_part()) {
      EXPECT_EQ(missing, 0u) << "a part begins before the one before is complete";
      parts.push_back({chunk.part().kind(), chunk.part().layer(), {}});
      missing = chunk.part().bytes();
      continue;
    }
    const std::string& data = chunk.data();
    EXPECT_GE(data.size(), 1u);
    EXPECT_LE(data.size(), 262'144u);
    EXPECT_LE(data.size(), missing);
    missing -= data.size();
    if (!parts.empty()) parts.back().data.insert(parts.back().data.end(), data.begin(), data.end());
  }
  return parts;
}

// One verifier's calls.
class Auditor {
 public:
  explicit Auditor(
      const std::string& address, const std::string& name = "verifier.example",
      std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials(),
      std::optional<SigningKey> key = std::nullopt)
      : key_(key ? *key : key_named(name)),
        channel_(grpc::CreateChannel(address, credentials)),
        stub_(wire::Audit::NewStub(channel_)) {}

  // The same name gives the same key.
  static SigningKey key_named(const std::string& name) {
    Bytes seed(32, static_cast<std::uint8_t>(name.size()));
    return SigningKey::from_seed(name, seed);
  }

  bool connect() {
    return channel_->WaitForConnected(std::chrono::system_clock::now() + seconds(10));
  }

  const SigningKey& key() const { return key_; }
  wire::Audit::Stub& stub() { return *stub_; }

  // A finished record, by its own request.
  Record generate(std::uint64_t max_tokens = 6) { return fetch(generate_id(max_tokens)); }

  std::string generate_id(std::uint64_t max_tokens) {
    connect();
    grpc::ClientContext context;
    deadline(context, kDeadline);
    wire::GenerateRequest request;
    for (std::uint32_t t = 0; t < 20; ++t) request.mutable_token_ids()->add_ids(40 + 3 * t);
    request.set_max_tokens(max_tokens);
    const auto reader = stub_->Generate(&context, request);
    wire::GenerateEvent event;
    std::string id;
    while (reader->Read(&event)) {
      if (event.has_result()) id = event.result().record_id();
    }
    const grpc::Status status = reader->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return id;
  }

  Record fetch(const std::string& id) {
    grpc::ClientContext context;
    deadline(context, kDeadline);
    wire::GetRecordRequest request;
    request.set_record_id(id);
    const auto reader = stub_->GetRecord(&context, request);
    wire::RecordChunk chunk;
    Bytes bytes;
    while (reader->Read(&chunk))
      bytes.insert(bytes.end(), chunk.data().begin(), chunk.data().end());
    EXPECT_TRUE(reader->Finish().ok());
    return Record::parse(bytes, "record");
  }

  AuditCommitment commitment(const Digest& record, const AuditPlan& plan,
                             std::uint8_t secret = 1) const {
    AuditCommitment out;
    out.record = record;
    out.secret_hash = secret_hash(secret_of(secret));
    out.plan = plan;
    out.sign(key_);
    return out;
  }

  static AuditSecret secret_of(std::uint8_t fill) {
    AuditSecret secret;
    secret.fill(fill);
    return secret;
  }

  grpc::Status commit(const Bytes& bytes, wire::CommitResponse* response = nullptr) {
    connect();
    grpc::ClientContext context;
    deadline(context, kDeadline);
    wire::CommitRequest request;
    request.set_commitment(bytes.data(), bytes.size());
    wire::CommitResponse ignored;
    return stub_->Commit(&context, request, response != nullptr ? response : &ignored);
  }

  // The challenge of a commitment, which is sent.
  Challenge challenge(const AuditCommitment& commitment_, std::uint8_t secret = 1) {
    wire::CommitResponse response;
    const grpc::Status status = commit(commitment_.serialize(), &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    if (!status.ok()) return {};
    Challenge out;
    out.commitment = commitment_;
    out.secret = secret_of(secret);
    out.checkpoint_note =
        TlogProof::parse(response.commitment_receipt(), "receipt").checkpoint_note;
    out.sign(key_);
    return out;
  }

  Bytes open_request(const Bytes& challenge_bytes) const {
    OpenRequest request;
    request.challenge = challenge_bytes;
    request.sign(key_);
    return request.serialize();
  }

  Answer open(const Bytes& challenge_bytes, milliseconds within = kDeadline) {
    return send_open(open_request(challenge_bytes), within);
  }

  Answer send_open(const Bytes& request_bytes, milliseconds within = kDeadline) {
    connect();
    grpc::ClientContext context;
    deadline(context, within);
    wire::OpenRequest request;
    request.set_request(request_bytes.data(), request_bytes.size());
    const auto reader = stub_->Open(&context, request);
    Answer out;
    out.parts = read_parts(*reader);
    out.status = reader->Finish();
    return out;
  }

  Answer operators(const Bytes& request_bytes) {
    grpc::ClientContext context;
    deadline(context, kDeadline);
    wire::GetOperatorsRequest request;
    request.set_request(request_bytes.data(), request_bytes.size());
    const auto reader = stub_->GetOperators(&context, request);
    Answer out;
    out.parts = read_parts(*reader);
    out.status = reader->Finish();
    return out;
  }

  wire::GetInfoResponse info() {
    connect();
    grpc::ClientContext context;
    deadline(context, kDeadline);
    wire::GetInfoResponse response;
    EXPECT_TRUE(stub_->GetInfo(&context, {}, &response).ok());
    return response;
  }

  static void deadline(grpc::ClientContext& context, milliseconds within) {
    context.set_deadline(std::chrono::system_clock::now() + within);
  }

 private:
  SigningKey key_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<wire::Audit::Stub> stub_;
};

void expect_refused(const grpc::Status& status, StatusCode code, const std::string& text) {
  EXPECT_EQ(status.error_code(), code) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr(text));
}

AuditPlan some_cells(std::uint64_t cells = 5, std::uint64_t ends = 3) {
  AuditPlan plan;
  plan.cells = cells;
  plan.ends = ends;
  return plan;
}

AuditPlan whole_layers(const std::string& layers) {
  AuditPlan plan;
  plan.level = AuditLevel::kLayer;
  plan.layers = LayerChoice::parse(layers);
  plan.ends = 2;
  return plan;
}

class ServeAudit : public testing::Test {
 protected:
  ServeAudit() {
    init_log(dir / "log", log_key);
    options = local_options();
    options.log_dir = dir / "log";
    options.log_key = log_key;
    options.allow = {Auditor::key_named("verifier.example").public_key()};
    options.on_error = [this](const std::string& message) {
      const std::scoped_lock lock(mutex);
      told.push_back(message);
    };
  }
  std::vector<std::string> errors() {
    const std::scoped_lock lock(mutex);
    return told;
  }

  const TempDir dir;
  const SigningKey log_key = SigningKey::generate("log.example");
  ServeOptions options;
  std::mutex mutex;
  std::vector<std::string> told;
};

// Everything that an honest answer must be.
void expect_good(const Record& record, const Challenge& challenge, const Answer& answer,
                 const PublicKey& signer) {
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  const TraceShape& shape = record.claim.trace_shape;
  const AuditSample sample = draw_sample(
      challenge.commitment.plan, shape,
      challenge_seed(challenge.secret, challenge.checkpoint("challenge"), record.claim.trace_root));
  ASSERT_FALSE(answer.parts.empty());
  EXPECT_EQ(answer.parts[0].kind, wire::PART_KIND_HEADER);
  EXPECT_LE(answer.parts[0].data.size(), max_opening_header_bytes(shape));
  const OpeningHeader header = OpeningHeader::parse(
      answer.parts[0].data, shape, record.claim.trace_root, challenge.digest(), "header");
  EXPECT_EQ(header.prover.key, signer);
  std::size_t at = 1;
  if (!sample.embeddings.empty() || !sample.heads.empty()) {
    ASSERT_LT(at, answer.parts.size());
    EXPECT_EQ(answer.parts[at].kind, wire::PART_KIND_ENDS);
    EXPECT_EQ(answer.parts[at].layer, 0u);
    EndsOpening ends(shape, sample.embeddings, sample.heads, answer.parts[at++].data);
    EXPECT_NO_THROW(ends.check(header.tree_roots, "ends"));
  }
  ASSERT_EQ(answer.parts.size(), at + sample.layers.size());
  for (const LayerCells& cells : sample.layers) {
    EXPECT_EQ(answer.parts[at].kind, wire::PART_KIND_LAYER);
    EXPECT_EQ(answer.parts[at].layer, cells.layer);
    LayerOpening layer(shape, cells, cells.positions.back() + 1, answer.parts[at++].data);
    EXPECT_NO_THROW(layer.check(header.tree_roots, "layer"));
  }
}

OperatorsRequest operators_request(const Challenge& challenge, std::uint32_t layer,
                                   std::uint64_t position, const SigningKey& key) {
  OperatorsRequest request;
  request.challenge = challenge.serialize();
  request.layer = layer;
  request.position = position;
  request.sign(key);
  return request;
}

TEST_F(ServeAudit, CommitChallengeOpen) {
  for (const bool with_operator : {false, true}) {
    SCOPED_TRACE(with_operator);
    const SigningKey operator_key = SigningKey::generate("operator.example");
    if (with_operator) options.operator_key = operator_key;
    const PublicKey signer = with_operator ? operator_key.public_key() : log_key.public_key();
    const Running running(options);
    Auditor auditor(running.address());
    const wire::GetInfoResponse info = auditor.info();
    EXPECT_TRUE(info.answers_audits());
    EXPECT_EQ(info.retention_seconds(), 168u * 3600);
    EXPECT_EQ(info.operator_key(), with_operator ? operator_key.public_key().vkey() : "");
    EXPECT_EQ(info.log_key(), log_key.public_key().vkey());

    const Record record = auditor.generate();
    std::uint8_t secret = 0;
    for (const AuditPlan& plan :
         {some_cells(), some_cells(1, 0), some_cells(1 << 20, 1 << 20), whole_layers("all"),
          whole_layers("random:2"), whole_layers("1,3")}) {
      ++secret;
      const AuditCommitment commitment = auditor.commitment(record.digest(), plan, secret);
      wire::CommitResponse response;
      ASSERT_TRUE(auditor.commit(commitment.serialize(), &response).ok());
      const ReceiptResult about_commitment =
          verify_entry_receipt(response.commitment_receipt(), log_key.public_key(),
                               log_entry_for_audit(commitment.digest()));
      const ReceiptResult about_record =
          verify_receipt(response.record_receipt(), log_key.public_key(), record.digest());
      EXPECT_EQ(about_commitment.verdict, ReceiptVerdict::kIncluded);
      EXPECT_EQ(about_record.verdict, ReceiptVerdict::kIncluded);
      EXPECT_EQ(about_commitment.checkpoint, about_record.checkpoint);

      const Challenge challenge = auditor.challenge(commitment, secret);
      const Answer answer = auditor.open(challenge.serialize());
      expect_good(record, challenge, answer, signer);
      // The same again: the same bytes.
      EXPECT_EQ(auditor.open(challenge.serialize()).parts, answer.parts);
    }
    EXPECT_THAT(errors(), testing::IsEmpty());
  }
}

// The head that ends with the commitment, whatever the log has become since: there is one seed.
TEST_F(ServeAudit, CommittingAgainGivesTheSameReceipts) {
  options.records_dir = dir / "records";
  AuditCommitment commitment;
  wire::CommitResponse first, again;
  {
    const Running running(options);
    Auditor auditor(running.address());
    auditor.generate(2);
    const Record record = auditor.generate();
    commitment = auditor.commitment(record.digest(), some_cells());
    ASSERT_TRUE(auditor.commit(commitment.serialize(), &first).ok());
    const TlogProof proof = TlogProof::parse(first.commitment_receipt(), "receipt");
    EXPECT_EQ(proof.index, 2u);
    EXPECT_EQ(parse_checkpoint(proof.checkpoint_note, "note").size, 3u);
    EXPECT_EQ(proof.checkpoint_note,
              TlogProof::parse(first.record_receipt(), "receipt").checkpoint_note);
    EXPECT_EQ(proof.checkpoint_note, LogReader(dir / "log").checkpoint_note());
    auditor.generate(3);
    ASSERT_TRUE(auditor.commit(commitment.serialize(), &again).ok());
    EXPECT_EQ(again.commitment_receipt(), first.commitment_receipt());
    EXPECT_EQ(again.record_receipt(), first.record_receipt());
  }
  options.quota_audits = 1;
  const Running running(options);
  Auditor auditor(running.address());
  const Record other = auditor.generate(4);
  EXPECT_TRUE(auditor.commit(auditor.commitment(other.digest(), some_cells(), 2).serialize()).ok());
  // The quota is used up, and a later server finds the commitment in the log.
  ASSERT_TRUE(auditor.commit(commitment.serialize(), &again).ok());
  EXPECT_EQ(again.commitment_receipt(), first.commitment_receipt());
  EXPECT_EQ(again.record_receipt(), first.record_receipt());
  EXPECT_EQ(LogReader(dir / "log").size(), 6u);
}

TEST_F(ServeAudit, ARecordLoggedAfterItsCommitment) {
  options.records_dir = dir / "records";
  const Running running(options);
  Auditor auditor(running.address());
  Record record = auditor.generate(1);
  record.provenance[provenance_key::kNonce] = new_provenance()[provenance_key::kNonce];
  const std::string path = dir / ("records/" + record.digest().hex() + ".bwrec");
  write_record(path, record);
  const AuditCommitment commitment = auditor.commitment(record.digest(), some_cells());
  LogWriter writer(dir / "log", log_key);
  writer.append({log_entry_for_audit(commitment.digest())});
  write_file_atomic(path + ".tlog-proof",
                    writer.append({log_entry_for_record(record.digest())})[0].receipt);
  expect_refused(auditor.commit(commitment.serialize()), StatusCode::FAILED_PRECONDITION,
                 "entry 2, after the commitment, which is entry 1");
  Challenge challenge;
  challenge.commitment = commitment;
  challenge.secret = Auditor::secret_of(1);
  challenge.checkpoint_note =
      TlogProof::parse(LogReader(dir / "log").receipt_at(1, 2, log_key), "receipt").checkpoint_note;
  challenge.sign(auditor.key());
  expect_refused(auditor.open(challenge.serialize()).status, StatusCode::FAILED_PRECONDITION,
                 "after the commitment");
  EXPECT_THAT(errors(), testing::IsEmpty());
}

TEST_F(ServeAudit, OperatorsOfADrawnCell) {
  const Running running(options);
  Auditor auditor(running.address());
  const Record record = auditor.generate();
  AuditPlan plan = whole_layers("2");
  const Challenge challenge = auditor.challenge(auditor.commitment(record.digest(), plan));
  const Answer opened = auditor.open(challenge.serialize());
  expect_good(record, challenge, opened, log_key.public_key());
  const OperatorsRequest request = operators_request(challenge, 2, 11, auditor.key());
  const Answer answer = auditor.operators(request.serialize());
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  ASSERT_EQ(answer.parts.size(), 1u);
  EXPECT_EQ(answer.parts[0].kind, wire::PART_KIND_OPERATORS);
  EXPECT_EQ(answer.parts[0].layer, 2u);
  const CellOperators operators =
      CellOperators::parse(answer.parts[0].data, challenge.digest(), 2, 11, "operators");
  EXPECT_EQ(operators.prover.key, log_key.public_key());
  EXPECT_GT(operators.outputs.size(), 10u);

  expect_refused(
      auditor.operators(operators_request(challenge, 1, 11, auditor.key()).serialize()).status,
      StatusCode::INVALID_ARGUMENT, "no cell that the challenge drew");
  expect_refused(
      auditor.operators(operators_request(challenge, 2, 999, auditor.key()).serialize()).status,
      StatusCode::INVALID_ARGUMENT, "no cell that the challenge drew");
  const SigningKey thief = Auditor::key_named("thief.example");
  expect_refused(auditor.operators(operators_request(challenge, 2, 11, thief).serialize()).status,
                 StatusCode::INVALID_ARGUMENT, "another key than its challenge");
}

TEST_F(ServeAudit, OnlyVerifiersOnTheList) {
  Record record;
  {
    options.records_dir = dir / "records";
    const Running running(options);
    Auditor auditor(running.address());
    record = auditor.generate();
    Auditor other(running.address(), "other.example");
    expect_refused(other.commit(other.commitment(record.digest(), some_cells()).serialize()),
                   StatusCode::PERMISSION_DENIED, "other.example+");
    // The right name does not help.
    Auditor impostor(running.address(), "", grpc::InsecureChannelCredentials(),
                     SigningKey::generate("verifier.example"));
    expect_refused(impostor.commit(impostor.commitment(record.digest(), some_cells()).serialize()),
                   StatusCode::PERMISSION_DENIED, "--allow");
    // Nor does the commitment of one who is.
    const AuditCommitment good = auditor.commitment(record.digest(), some_cells());
    Challenge stolen = auditor.challenge(good);
    stolen.sign(other.key());
    expect_refused(auditor.open(stolen.serialize()).status, StatusCode::INVALID_ARGUMENT,
                   "another key than its commitment");
    // Nor the challenge, which is in every mismatch proof.
    const Challenge published = auditor.challenge(good);
    expect_refused(other.open(published.serialize()).status, StatusCode::INVALID_ARGUMENT,
                   "another key than its challenge");
    expect_refused(auditor.send_open(published.serialize()).status, StatusCode::INVALID_ARGUMENT,
                   "open request");
    EXPECT_EQ(LogReader(dir / "log").size(), 2u) << "a refused commitment was logged";
  }
  options.allow.clear();
  const Running running(options);
  Auditor auditor(running.address());
  EXPECT_FALSE(auditor.info().answers_audits());
  expect_refused(auditor.commit(auditor.commitment(record.digest(), some_cells(), 9).serialize()),
                 StatusCode::PERMISSION_DENIED, "answers no audits");
}

TEST_F(ServeAudit, QuotaOfAudits) {
  options.quota_audits = 2;
  options.allow.push_back(Auditor::key_named("second.example").public_key());
  const Running running(options);
  Auditor auditor(running.address());
  const Record record = auditor.generate();
  const auto commit = [&](Auditor& by, std::uint8_t secret) {
    return by.commit(by.commitment(record.digest(), some_cells(), secret).serialize());
  };
  EXPECT_TRUE(commit(auditor, 1).ok());
  EXPECT_TRUE(commit(auditor, 2).ok());
  expect_refused(commit(auditor, 3), StatusCode::RESOURCE_EXHAUSTED, "2 audits");
  // What was committed before is still answered, and costs no audit.
  EXPECT_TRUE(commit(auditor, 1).ok());
  const Challenge challenge =
      auditor.challenge(auditor.commitment(record.digest(), some_cells(), 2), 2);
  EXPECT_TRUE(auditor.open(challenge.serialize()).status.ok());
  EXPECT_TRUE(auditor.open(challenge.serialize()).status.ok());
  // The quota is each verifier's own.
  Auditor second(running.address(), "second.example");
  EXPECT_TRUE(commit(second, 3).ok());
}

TEST_F(ServeAudit, QuotaOfBytes) {
  const Running probe(options);
  Auditor prober(probe.address());
  const Record model_record = prober.generate();
  const Challenge probed =
      prober.challenge(prober.commitment(model_record.digest(), whole_layers("all")));
  std::uint64_t bytes = 0;
  for (const Part& part : prober.open(probed.serialize()).parts) bytes += part.data.size();

  options.quota_bytes = bytes * 5 / 2;
  const Running running(options);
  Auditor auditor(running.address());
  const Record record = auditor.generate();
  const Challenge challenge =
      auditor.challenge(auditor.commitment(record.digest(), whole_layers("all"), 2), 2);
  EXPECT_TRUE(auditor.open(challenge.serialize()).status.ok());
  EXPECT_TRUE(auditor.open(challenge.serialize()).status.ok());  // retries count, too
  // What is refused is no answer: the 32 of this commitment are not spent on it.
  for (int i = 0; i < 40; ++i) {
    const Answer third = auditor.open(challenge.serialize());
    expect_refused(third.status, StatusCode::RESOURCE_EXHAUSTED, "bytes of an hour");
    EXPECT_TRUE(third.parts.empty());
  }

  options.quota_bytes = bytes / 2;
  const Running small(options);
  Auditor other(small.address());
  const Record again = other.generate();
  expect_refused(
      other
          .open(other.challenge(other.commitment(again.digest(), whole_layers("all"), 3), 3)
                    .serialize())
          .status,
      StatusCode::OUT_OF_RANGE, "ask for less");
}

TEST_F(ServeAudit, AnswersToOneCommitmentAreCounted) {
  const Running running(options);
  Auditor auditor(running.address());
  const Record record = auditor.generate(1);
  const Bytes challenge =
      auditor.challenge(auditor.commitment(record.digest(), some_cells(1, 0))).serialize();
  int answered = 0;
  grpc::Status status;
  while (answered < 100 && (status = auditor.open(challenge).status).ok()) ++answered;
  EXPECT_EQ(answered, 32);
  expect_refused(status, StatusCode::RESOURCE_EXHAUSTED, "32 answers");
}

TEST_F(ServeAudit, OneSeedOneUse) {
  options.records_dir = dir / "records";
  AuditCommitment commitment;
  Challenge challenge, later;
  Answer answer;
  {
    const Running running(options);
    Auditor auditor(running.address());
    const Record record = auditor.generate();
    commitment = auditor.commitment(record.digest(), whole_layers("0"));
    challenge = auditor.challenge(commitment);
    auditor.generate(2);  // the log grows, so that there is another checkpoint
    Challenge steered = challenge;
    steered.checkpoint_note = LogReader(dir / "log", log_key.public_key()).checkpoint_note();
    steered.sign(auditor.key());
    ASSERT_NE(steered.checkpoint_note, challenge.checkpoint_note);
    expect_refused(auditor.open(steered.serialize()).status, StatusCode::INVALID_ARGUMENT,
                   "another checkpoint than the challenge");
    expect_refused(
        auditor.operators(operators_request(steered, 0, 0, auditor.key()).serialize()).status,
        StatusCode::INVALID_ARGUMENT, "another checkpoint than the challenge");
    answer = auditor.open(challenge.serialize());
    expect_good(record, challenge, answer, log_key.public_key());
    // The same head with one more signature on it: the same seed, but other bytes.
    later = challenge;
    const std::string cosigned =
        sign_checkpoint(challenge.checkpoint("challenge"), SigningKey::generate("other.example"));
    later.checkpoint_note += cosigned.substr(cosigned.find("\n\n") + 2);
    later.sign(auditor.key());
    expect_refused(auditor.open(later.serialize()).status, StatusCode::FAILED_PRECONDITION,
                   "one seed, one use");
    expect_refused(
        auditor.operators(operators_request(later, 0, 0, auditor.key()).serialize()).status,
        StatusCode::FAILED_PRECONDITION, "one seed, one use");
    // A second secret is none of this commitment's.
    Challenge other = challenge;
    other.secret = Auditor::secret_of(7);
    other.sign(auditor.key());
    expect_refused(auditor.open(other.serialize()).status, StatusCode::INVALID_ARGUMENT,
                   "not the one committed to");
  }
  // A later server on the same directory knows, and answers the same challenge with the same bytes.
  const Running running(options);
  Auditor auditor(running.address());
  expect_refused(auditor.open(later.serialize()).status, StatusCode::FAILED_PRECONDITION,
                 "one seed, one use");
  const Answer again = auditor.open(challenge.serialize());
  EXPECT_TRUE(again.status.ok()) << again.status.error_message();
  EXPECT_EQ(again.parts, answer.parts);
  EXPECT_THAT(errors(), testing::IsEmpty());
}

TEST_F(ServeAudit, CheckpointsThatDoNotCount) {
  const Running running(options);
  Auditor auditor(running.address());
  const std::string empty_note = LogReader(dir / "log").checkpoint_note();
  const Record record = auditor.generate();
  const std::string without_commitment = LogReader(dir / "log").checkpoint_note();
  const AuditCommitment commitment = auditor.commitment(record.digest(), some_cells());
  Challenge challenge;
  challenge.commitment = commitment;
  challenge.secret = Auditor::secret_of(1);
  challenge.checkpoint_note = without_commitment;
  challenge.sign(auditor.key());
  expect_refused(auditor.open(challenge.serialize()).status, StatusCode::FAILED_PRECONDITION,
                 "send Commit first");

  const Challenge good = auditor.challenge(commitment);
  for (const std::string& note : {without_commitment, empty_note}) {
    challenge.checkpoint_note = note;
    challenge.sign(auditor.key());
    expect_refused(auditor.open(challenge.serialize()).status, StatusCode::INVALID_ARGUMENT,
                   "another checkpoint than the challenge");
  }
  const SigningKey forger = SigningKey::generate("log.example");
  challenge.checkpoint_note = sign_checkpoint(good.checkpoint("challenge"), forger);
  challenge.sign(auditor.key());
  EXPECT_EQ(auditor.open(challenge.serialize()).status.error_code(), StatusCode::INVALID_ARGUMENT);
  challenge.checkpoint_note = "no checkpoint";
  challenge.sign(auditor.key());
  EXPECT_EQ(auditor.open(challenge.serialize()).status.error_code(), StatusCode::INVALID_ARGUMENT);
  // None of these was a use of the seed.
  expect_good(record, good, auditor.open(good.serialize()), log_key.public_key());
}

TEST_F(ServeAudit, RecordsThatCannotBeAudited) {
  options.records_dir = dir / "records";
  const Running running(options);
  Auditor auditor(running.address());
  std::uint8_t secret = 0;
  const auto commit = [&](const Digest& record) {
    return auditor.commit(auditor.commitment(record, some_cells(), ++secret).serialize());
  };
  expect_refused(commit(Digest{}), StatusCode::NOT_FOUND, "no record");

  const Record record = auditor.generate();
  const std::string path = dir / ("records/" + record.digest().hex() + ".bwrec");
  const auto put = [&](Record other) {
    other.provenance[provenance_key::kNonce] = new_provenance()[provenance_key::kNonce];
    if (other.signature) other.sign(Auditor::key_named("operator.example"));
    write_record(dir / ("records/" + other.digest().hex() + ".bwrec"), other);
    return other.digest();
  };
  // Not logged; then with the receipt of another record.
  const Digest unlogged = put(record);
  expect_refused(commit(unlogged), StatusCode::FAILED_PRECONDITION, "not in this prover's log");
  fs::copy(path + ".tlog-proof", dir / ("records/" + unlogged.hex() + ".bwrec.tlog-proof"));
  expect_refused(commit(unlogged), StatusCode::FAILED_PRECONDITION, "as it is now");

  Record old = record;
  old.provenance[provenance_key::kFinished] = "2020-01-01T00:00:00Z";
  expect_refused(commit(put(old)), StatusCode::FAILED_PRECONDITION, "older than the 604800 s");
  // Without a time of its own, the file's counts.
  old.provenance.erase(provenance_key::kFinished);
  const Digest undated = put(old);
  expect_refused(commit(undated), StatusCode::FAILED_PRECONDITION, "not in this prover's log");
  fs::last_write_time(dir / ("records/" + undated.hex() + ".bwrec"),
                      fs::file_time_type::clock::now() - std::chrono::hours(169));
  expect_refused(commit(undated), StatusCode::FAILED_PRECONDITION, "older than");

  const ServedModel other_model = ServedModel::load(BW_TEST_DATA_DIR "/models/tiny-llama");
  GenerationRequest request;
  request.prompt_ids = {1, 2, 3};
  request.max_tokens = 2;
  const Generation made = std::move(generate(other_model, backend(), {&request, 1}, {}).front());
  expect_refused(
      commit(put(make_record(other_model, made, EvidenceLevel::kNone, new_provenance()))),
      StatusCode::FAILED_PRECONDITION, "another model");
  EXPECT_THAT(errors(), testing::IsEmpty());

  // What the disk did is the operator's to know.
  Bytes damaged = read_file(path, {1 << 24});
  damaged[damaged.size() / 2] ^= 1;
  write_file_atomic(path, damaged);
  expect_refused(commit(record.digest()), StatusCode::INTERNAL, "its operator");
  EXPECT_EQ(errors().size(), 1u);
}

// An opening is signed by the key that signed the record; another one would hold nobody to it.
TEST_F(ServeAudit, ARecordSignedByAKeyThatIsNotHere) {
  options.records_dir = dir / "records";
  options.operator_key = SigningKey::generate("operator.example");
  Record record;
  {
    const Running running(options);
    record = Auditor(running.address()).generate();
  }
  for (const bool with_another : {true, false}) {
    options.operator_key.reset();
    if (with_another) options.operator_key = SigningKey::generate("operator.example");
    const Running running(options);
    Auditor auditor(running.address());
    expect_refused(auditor.commit(auditor.commitment(record.digest(), some_cells()).serialize()),
                   StatusCode::FAILED_PRECONDITION, "does not have now");
  }
}

TEST_F(ServeAudit, RecordsInMemoryAreForgottenAfterTheirRetention) {
  options.retention = seconds(1);
  const Running running(options);
  Auditor auditor(running.address());
  const std::optional<Bytes> id = from_hex(auditor.generate_id(1));
  ASSERT_TRUE(id && id->size() == 32);
  Digest record;
  std::copy(id->begin(), id->end(), record.bytes.begin());
  std::this_thread::sleep_for(milliseconds(1100));
  expect_refused(auditor.commit(auditor.commitment(record, some_cells()).serialize()),
                 StatusCode::NOT_FOUND, "no longer kept");
}

TEST_F(ServeAudit, WithoutALog) {
  ServeOptions bare = local_options();
  const Running running(bare);
  Auditor auditor(running.address());
  EXPECT_FALSE(auditor.info().answers_audits());
  const Record record = auditor.generate(1);
  expect_refused(auditor.commit(auditor.commitment(record.digest(), some_cells()).serialize()),
                 StatusCode::PERMISSION_DENIED, "answers no audits");
  bare.allow = options.allow;
  expect_error(ErrorKind::kUsage, "--allow needs --log", [&] { check_serve_options(bare); });
}

TEST_F(ServeAudit, IllFormedBytesAreTheClientsFault) {
  const Running running(options);
  Auditor auditor(running.address());
  const Record record = auditor.generate(1);
  const Bytes commitment = auditor.commitment(record.digest(), some_cells()).serialize();
  const Challenge challenge = auditor.challenge(auditor.commitment(record.digest(), some_cells()));
  const Bytes opening = auditor.open_request(challenge.serialize());
  const Bytes request = operators_request(challenge, 0, 0, auditor.key()).serialize();
  const auto each_flaw = [](const Bytes& good,
                            const std::function<grpc::Status(const Bytes&)>& send) {
    std::vector<Bytes> bad = {{}, Bytes(good.begin(), good.end() - 1), good, good};
    bad[2].push_back(0);
    bad[3][good.size() / 2] ^= 0x20;
    bad.push_back(Bytes(1000, 0xff));
    for (const Bytes& bytes : bad) {
      EXPECT_EQ(send(bytes).error_code(), StatusCode::INVALID_ARGUMENT) << bytes.size();
    }
  };
  each_flaw(commitment, [&](const Bytes& bytes) { return auditor.commit(bytes); });
  each_flaw(opening, [&](const Bytes& bytes) { return auditor.send_open(bytes).status; });
  each_flaw(challenge.serialize(), [&](const Bytes& bytes) { return auditor.open(bytes).status; });
  each_flaw(request, [&](const Bytes& bytes) { return auditor.operators(bytes).status; });
  EXPECT_EQ(auditor.commit(Bytes(2 << 20)).error_code(), StatusCode::INVALID_ARGUMENT);
  // Beyond the limit on messages the transport refuses.
  EXPECT_FALSE(auditor.commit(Bytes(5 << 20)).ok());

  expect_refused(
      auditor.commit(auditor.commitment(record.digest(), whole_layers("0,4")).serialize()),
      StatusCode::INVALID_ARGUMENT, "layer 4 is not there");
  EXPECT_THAT(errors(), testing::IsEmpty());
  EXPECT_TRUE(auditor.send_open(opening).status.ok());
}

TEST_F(ServeAudit, PassesWhenMemoryIsShort) {
  const Running roomy(options);
  Auditor auditor(roomy.address());
  const Record record = auditor.generate();
  const Challenge challenge =
      auditor.challenge(auditor.commitment(record.digest(), whole_layers("all")));
  const Answer whole = auditor.open(challenge.serialize());
  std::uint64_t largest = 0;
  for (const Part& part : whole.parts) largest = std::max<std::uint64_t>(largest, part.data.size());

  // The digests of the trace are held beside the rows.
  largest += 32 * Trace::leaf_count(record.claim.trace_shape);
  options.max_opening_bytes = largest;
  {
    const Running tight(options);
    Auditor again(tight.address());
    const Record same = again.generate();
    const Challenge tight_challenge =
        again.challenge(again.commitment(same.digest(), whole_layers("all"), 2), 2);
    const Answer answer = again.open(tight_challenge.serialize());
    expect_good(same, tight_challenge, answer, log_key.public_key());
    // Layers whole: the same cells, so the same bytes but for header and ends.
    ASSERT_EQ(answer.parts.size(), whole.parts.size());
    for (std::size_t i = 2; i < answer.parts.size(); ++i)
      EXPECT_EQ(answer.parts[i], whole.parts[i]);
    // Two verifiers at once share the memory.
    std::thread other([&] {
      Auditor second(tight.address());
      EXPECT_EQ(second.open(tight_challenge.serialize()).parts, answer.parts);
    });
    EXPECT_EQ(again.open(tight_challenge.serialize()).parts, answer.parts);
    other.join();
  }
  options.max_opening_bytes = largest - 1;
  const Running tighter(options);
  Auditor last(tighter.address());
  const Record same = last.generate();
  // Known when it is committed to, or when it is drawn.
  expect_refused(last.commit(last.commitment(same.digest(), whole_layers("all"), 3).serialize()),
                 StatusCode::OUT_OF_RANGE, "ask for fewer cells");
  const Challenge drawn = last.challenge(last.commitment(same.digest(), some_cells(1000, 0), 4), 4);
  const Answer refused = last.open(drawn.serialize());
  expect_refused(refused.status, StatusCode::OUT_OF_RANGE, "ask for fewer cells");
  EXPECT_TRUE(refused.parts.empty());
}

// A device that computes something else once `flip` is set.
class FickleBackend final : public SlowBackend {
 public:
  FickleBackend() : SlowBackend(milliseconds(0)) {}
  void add(float* out, const float* x, const float* y, std::int64_t count) override {
    SlowBackend::add(out, x, y, count);
    if (flip) out[0] += 1;
  }
  std::atomic<bool> flip{false};
};

TEST_F(ServeAudit, AMachineThatDoesNotRepeatItsRecordSaysSoToItsOperator) {
  FickleBackend fickle;
  const Running running(options, fickle);
  Auditor auditor(running.address());
  const Record record = auditor.generate();
  const Challenge challenge = auditor.challenge(auditor.commitment(record.digest(), some_cells()));
  fickle.flip = true;
  const Answer answer = auditor.open(challenge.serialize());
  expect_refused(answer.status, StatusCode::INTERNAL, "its operator");
  EXPECT_TRUE(answer.parts.empty());
  ASSERT_EQ(errors().size(), 1u);
  EXPECT_THAT(errors()[0], HasSubstr("does not reproduce its own record"));
  fickle.flip = false;
  expect_good(record, challenge, auditor.open(challenge.serialize()), log_key.public_key());
}

TEST_F(ServeAudit, DeadlinesAndCancelledOpenings) {
  SlowBackend slow(milliseconds(100));
  options.max_rows = 2;  // so that a re-run has many steps
  const Running running(options, slow);
  Auditor auditor(running.address());
  const Record record = auditor.generate(1);
  const Challenge challenge = auditor.challenge(auditor.commitment(record.digest(), some_cells()));
  const int before = slow.steps;
  const Answer late = auditor.open(challenge.serialize(), milliseconds(250));
  EXPECT_EQ(late.status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  // The device is free for the next one before the re-run would have ended.
  const Answer good = auditor.open(challenge.serialize());
  expect_good(record, challenge, good, log_key.public_key());
  EXPECT_LT(slow.steps - before, 10 + 8);
  EXPECT_THAT(errors(), testing::IsEmpty());
}

TEST_F(ServeAudit, AuditsAndGenerationsShareTheDevice) {
  SlowBackend slow(milliseconds(10));
  const Running running(options, slow);
  Auditor auditor(running.address());
  const Record record = auditor.generate(1);
  const Challenge challenge = auditor.challenge(auditor.commitment(record.digest(), some_cells()));
  grpc::ClientContext context;
  wire::GenerateRequest request;
  request.mutable_token_ids()->add_ids(40);
  request.set_max_tokens(1000);  // 10 s
  const auto reader = auditor.stub().Generate(&context, request);
  wire::GenerateEvent event;
  ASSERT_TRUE(reader->Read(&event));
  // Openings come through while it runs.
  for (int i = 0; i < 3; ++i) {
    expect_good(record, challenge, auditor.open(challenge.serialize()), log_key.public_key());
  }
  // And it runs on while they come.
  std::atomic<bool> enough{false};
  std::thread insistent([&] {
    Auditor other(running.address());
    while (!enough) {
      const grpc::Status status = other.open(challenge.serialize()).status;
      if (status.error_code() == StatusCode::RESOURCE_EXHAUSTED) break;
      EXPECT_TRUE(status.ok()) << status.error_message();
    }
  });
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(reader->Read(&event));
  enough = true;
  EXPECT_TRUE(event.has_token());
  insistent.join();
  context.TryCancel();
  reader->Finish();
}

// A device on which a re-run fails as long as it is `scarce`; steps of one row do not.
class ScarceBackend final : public SlowBackend {
 public:
  ScarceBackend() : SlowBackend(milliseconds(10)) {}
  void embed(float* out, const Matrix& embedding, const std::int32_t* tokens,
             std::int64_t M) override {
    if (scarce && M > 1) {
      ++refused;
      throw infrastructure_error("no memory");
    }
    SlowBackend::embed(out, embedding, tokens, M);
  }
  std::atomic<bool> scarce{false};
  std::atomic<int> refused{0};
};

TEST_F(ServeAudit, WhatFailsBesideABatchIsTriedWithoutOne) {
  ScarceBackend device;
  const Running running(options, device);
  Auditor auditor(running.address());
  const Record record = auditor.generate(1);
  const Challenge challenge = auditor.challenge(auditor.commitment(record.digest(), some_cells()));
  grpc::ClientContext context;
  wire::GenerateRequest request;
  request.mutable_token_ids()->add_ids(40);
  request.set_max_tokens(200);
  const auto reader = auditor.stub().Generate(&context, request);
  wire::GenerateEvent event;
  ASSERT_TRUE(reader->Read(&event));
  device.scarce = true;
  std::thread batch([&] {
    while (device.refused == 0) std::this_thread::sleep_for(milliseconds(1));
    device.scarce = false;
    while (reader->Read(&event)) {
    }
    EXPECT_TRUE(reader->Finish().ok());
  });
  expect_good(record, challenge, auditor.open(challenge.serialize()), log_key.public_key());
  EXPECT_EQ(device.refused, 1);
  batch.join();
  EXPECT_TRUE(event.has_result());
  EXPECT_THAT(errors(), testing::IsEmpty());
  // Without a batch a failure is one.
  device.scarce = true;
  expect_refused(auditor.open(challenge.serialize()).status, StatusCode::INTERNAL, "its operator");
  EXPECT_EQ(device.refused, 2);
  EXPECT_EQ(errors().size(), 1u);
}

TEST_F(ServeAudit, ShutdownWhileAnOpeningRuns) {
  SlowBackend slow(milliseconds(50));
  options.max_rows = 1;
  auto running = std::make_unique<Running>(options, slow);
  Auditor auditor(running->address());
  const Record record = auditor.generate(1);
  const Challenge challenge = auditor.challenge(auditor.commitment(record.digest(), some_cells()));
  const int before = slow.steps;
  std::thread stopper([&] {
    while (slow.steps == before) std::this_thread::sleep_for(milliseconds(1));
    running->server.shutdown(milliseconds(0));
  });
  const Answer answer = auditor.open(challenge.serialize());
  stopper.join();
  EXPECT_EQ(answer.status.error_code(), StatusCode::UNAVAILABLE) << answer.status.error_message();
  EXPECT_LT(slow.steps - before, 10);
}

TEST_F(ServeAudit, AVerifierThatStopsReadingIsDropped) {
  options.write_timeout = seconds(1);
  options.max_calls = 1;
  const Running running(options);
  Auditor auditor(running.address());
  const Record record = auditor.generate(100);
  const Bytes challenge =
      auditor.challenge(auditor.commitment(record.digest(), whole_layers("all"))).serialize();
  grpc::ChannelArguments small_window;
  small_window.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  small_window.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 65'536);
  const auto channel = grpc::CreateCustomChannel(running.address(),
                                                 grpc::InsecureChannelCredentials(), small_window);
  ASSERT_TRUE(channel->WaitForConnected(std::chrono::system_clock::now() + seconds(10)));
  const auto stub = wire::Audit::NewStub(channel);
  grpc::ClientContext context;
  wire::OpenRequest request;
  const Bytes open_request = auditor.open_request(challenge);
  request.set_request(open_request.data(), open_request.size());
  const auto reader = stub->Open(&context, request);
  wire::OpeningChunk chunk;
  ASSERT_TRUE(reader->Read(&chunk));
  bool freed = false;
  for (int i = 0; i < 200 && !freed; ++i) {
    std::this_thread::sleep_for(milliseconds(50));
    freed = auditor.open(challenge).status.ok();
  }
  EXPECT_TRUE(freed);
  while (reader->Read(&chunk)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
}

TEST(OpeningMemory, IsAskedBackFromSlowClientsWhileOthersWait) {
  using std::chrono::minutes;
  constexpr std::uint64_t kMiB = 1 << 20;
  EXPECT_FALSE(takes_too_slowly(seconds(30), 0, seconds(30), true));
  EXPECT_TRUE(takes_too_slowly(seconds(31), 0, seconds(30), false));
  EXPECT_FALSE(takes_too_slowly(seconds(69), 10 * kMiB, seconds(30), false));
  EXPECT_TRUE(takes_too_slowly(seconds(71), 10 * kMiB, seconds(30), false));
  EXPECT_FALSE(takes_too_slowly(seconds(32), 10 * kMiB, seconds(30), true));
  EXPECT_TRUE(takes_too_slowly(seconds(33), 10 * kMiB, seconds(30), true));
  EXPECT_FALSE(takes_too_slowly(minutes(4), 1024 * kMiB, seconds(30), true));
  EXPECT_TRUE(takes_too_slowly(minutes(5), 1024 * kMiB, seconds(30), true));

  OpeningMemory memory(100);
  std::atomic<bool> gone{false};
  auto held = std::make_unique<OpeningMemory::Part>(memory, 60, [] { return false; });
  EXPECT_FALSE(memory.contended());
  std::thread other([&] {
    EXPECT_THROW(OpeningMemory::Part(memory, 60, [&] { return gone.load(); }), Refusal);
    const OpeningMemory::Part whole(memory, 100, [] { return false; });
  });
  while (!memory.contended()) std::this_thread::sleep_for(milliseconds(1));
  gone = true;
  held.reset();
  other.join();
  EXPECT_FALSE(memory.contended());
}

// ---- Ledger and allow-list.

TEST(AuditSessions, ForgetsAndCounts) {
  AuditSessions sessions("", seconds(100));
  const auto at = [](int s) { return AuditSessions::Time{} + seconds(1000 + s); };
  Digest a, b, challenge, other;
  b.bytes[0] = challenge.bytes[0] = 1;
  other.bytes[0] = 2;
  EXPECT_TRUE(sessions.tie(a, challenge, {}, at(0)));
  EXPECT_TRUE(sessions.tie(a, challenge, {}, at(100)));
  EXPECT_FALSE(sessions.tie(a, other, {}, at(100)));
  EXPECT_TRUE(sessions.take_answer(a, 2, at(100)));
  EXPECT_TRUE(sessions.take_answer(a, 2, at(100)));
  EXPECT_FALSE(sessions.take_answer(a, 2, at(100)));
  sessions.return_answer(a);
  EXPECT_EQ(sessions.answers(a), 1u);
  EXPECT_TRUE(sessions.take_answer(a, 2, at(100)));
  // Another commitment lets the first one expire, in between two steps of its own perhaps.
  EXPECT_TRUE(sessions.tie(b, other, {}, at(101)));
  EXPECT_EQ(sessions.answers(a), 0u);
  sessions.return_answer(a);
  EXPECT_TRUE(sessions.take_answer(a, 2, at(101)));
}

TEST(ProverLog, FindsCommitmentsWhoeverWroteThem) {
  const TempDir dir;
  const SigningKey key = SigningKey::generate("log.example");
  init_log(dir / "log", key);
  const auto digest_of = [](std::uint16_t n) {
    Digest digest;
    digest.bytes[0] = static_cast<std::uint8_t>(n >> 8);
    digest.bytes[1] = static_cast<std::uint8_t>(n & 0xff);
    return digest;
  };
  std::vector<Bytes> entries;
  for (std::uint16_t n = 0; n < 300; ++n) {
    entries.push_back(n % 2 == 0 ? log_entry_for_record(digest_of(n))
                                 : log_entry_for_audit(digest_of(n)));
  }
  LogWriter(dir / "log", key).append(entries);
  ProverLog log(dir / "log", key);
  EXPECT_EQ(log.find_audit(digest_of(1)), 1u);
  EXPECT_EQ(log.find_audit(digest_of(299)), 299u);
  EXPECT_EQ(log.find_audit(digest_of(298)), std::nullopt);  // a record's
  EXPECT_EQ(log.find_audit(digest_of(300)), std::nullopt);
  EXPECT_EQ(log.append_audit(digest_of(300)), 300u);
  EXPECT_EQ(log.find_audit(digest_of(300)), 300u);
  LogWriter(dir / "log", key).append({log_entry_for_audit(digest_of(301))});
  EXPECT_EQ(log.find_audit(digest_of(301)), 301u);
  const ProverLog::AuditReceipts receipts = log.audit_receipts(299, 298);
  EXPECT_EQ(receipts.commitment, log.commitment_receipt(299));
  const ReceiptResult about =
      verify_entry_receipt(receipts.record, key.public_key(), log_entry_for_record(digest_of(298)));
  EXPECT_EQ(about.verdict, ReceiptVerdict::kIncluded);
  EXPECT_EQ(about.checkpoint.size, 300u);
}

TEST(AuditQuota, SlidesOverAnHour) {
  AuditQuota quota(2, 100);
  const PublicKey key = Auditor::key_named("a").public_key();
  const auto at = [](int minutes) {
    return AuditQuota::Time{} + std::chrono::hours(10) + std::chrono::minutes(minutes);
  };
  EXPECT_TRUE(quota.take_audit(key, at(0)));
  EXPECT_TRUE(quota.take_audit(key, at(30)));
  EXPECT_FALSE(quota.take_audit(key, at(59)));
  EXPECT_TRUE(quota.take_audit(key, at(60)));
  EXPECT_FALSE(quota.take_audit(key, at(61)));
  EXPECT_TRUE(quota.take_audit(key, at(90)));
  EXPECT_TRUE(quota.take_bytes(key, 60, at(0)));
  EXPECT_FALSE(quota.take_bytes(key, 41, at(1)));
  EXPECT_TRUE(quota.take_bytes(key, 40, at(1)));
  EXPECT_FALSE(quota.take_bytes(key, 1, at(59)));
  EXPECT_FALSE(quota.take_bytes(key, 101, at(600)));
  EXPECT_FALSE(quota.take_bytes(key, UINT64_MAX, at(600)));
  EXPECT_TRUE(quota.take_bytes(key, 100, at(600)));
}

TEST(AllowList, KeysAndFiles) {
  const TempDir dir;
  const std::string a = SigningKey::generate("a.example").public_key().vkey();
  const std::string b = SigningKey::generate("b.example#1").public_key().vkey();
  write_file_atomic(dir / "list", "# who may audit\n\n" + b + "\t# the second\r\n  " + a + "\n");
  EXPECT_EQ(load_allow_list({dir / "list"}).size(), 2u);
  EXPECT_EQ(load_allow_list({a, dir / "list", a})[0].vkey(), a);
  EXPECT_EQ(load_allow_list({a, dir / "list", a})[1].vkey(), b);
  EXPECT_TRUE(load_allow_list({}).empty());
  write_file_atomic(dir / "bad", a + "\nnonsense\n");
  expect_error(ErrorKind::kUsage, "bad:2", [&] { load_allow_list({dir / "bad"}); });
  write_file_atomic(dir / "none", std::string_view("# nobody\n"));
  expect_error(ErrorKind::kUsage, "no verifier key", [&] { load_allow_list({dir / "none"}); });
  expect_error(ErrorKind::kUsage, "absent", [&] { load_allow_list({dir / "absent"}); });
  expect_error(ErrorKind::kUsage, "verifier key", [&] { load_allow_list({"a+b"}); });
}

// ---- Certificates.

class ServeTls : public ServeAudit {
 protected:
  ServeTls() { use(server); }
  void use(const Certificate& identity) {
    write_file_atomic(dir / "server.pem", identity.pem);
    write_file_atomic(dir / "server.key", identity.key_pem, 0600);
    write_file_atomic(dir / "ca.pem", authority.pem);
    options.tls = {dir / "server.pem", dir / "server.key", dir / "ca.pem"};
  }
  std::shared_ptr<grpc::ChannelCredentials> credentials(const Certificate& ca,
                                                        const Certificate* own) {
    grpc::SslCredentialsOptions ssl;
    ssl.pem_root_certs = ca.pem;
    if (own != nullptr) {
      ssl.pem_cert_chain = own->pem;
      ssl.pem_private_key = own->key_pem;
    }
    return grpc::SslCredentials(ssl);
  }
  // Whether a verifier with these credentials is answered: the handshake succeeds, and then a call.
  // A connection can fail for no reason (gRPC 1.51), so it takes three to be refused.
  bool answered(const std::string& address, std::shared_ptr<grpc::ChannelCredentials> with) {
    return answered_once(address, with) || answered_once(address, with) ||
           answered_once(address, with);
  }
  bool answered_once(const std::string& address,
                     const std::shared_ptr<grpc::ChannelCredentials>& with) {
    grpc::ChannelArguments fresh;
    fresh.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = grpc::CreateCustomChannel(address, with, fresh);
    const auto until = std::chrono::system_clock::now() + seconds(20);
    grpc_connectivity_state state = channel->GetState(/*try_to_connect=*/true);
    while (state == GRPC_CHANNEL_IDLE || state == GRPC_CHANNEL_CONNECTING) {
      if (!channel->WaitForStateChange(state, until)) {
        ADD_FAILURE() << "neither connected nor refused";
        return false;
      }
      state = channel->GetState(true);
    }
    if (state != GRPC_CHANNEL_READY) return false;
    const auto stub = wire::Audit::NewStub(channel);
    grpc::ClientContext context;
    Auditor::deadline(context, seconds(20));
    wire::GetInfoResponse response;
    const grpc::Status status = stub->GetInfo(&context, {}, &response);
    EXPECT_NE(status.error_code(), StatusCode::DEADLINE_EXCEEDED);
    return status.ok();
  }

  const Certificate authority = make_certificate("authority");
  const Certificate stranger = make_certificate("stranger");
  const Certificate server = make_certificate("server", {.issuer = &authority});
  const Certificate client = make_certificate("client", {.issuer = &authority});
  const Certificate foreign = make_certificate("client", {.issuer = &stranger});
};

TEST_F(ServeTls, BothSidesShowCertificates) {
  const Running running(options);
  EXPECT_TRUE(answered(running.address(), credentials(authority, &client)));
  EXPECT_FALSE(answered(running.address(), credentials(authority, nullptr)));
  EXPECT_FALSE(answered(running.address(), credentials(authority, &foreign)));
  EXPECT_FALSE(answered(running.address(), credentials(stranger, &client)));
  EXPECT_FALSE(answered(running.address(), grpc::InsecureChannelCredentials()));
  Auditor auditor(running.address(), "verifier.example", credentials(authority, &client));
  const Record record = auditor.generate();
  const Challenge challenge = auditor.challenge(auditor.commitment(record.digest(), some_cells()));
  expect_good(record, challenge, auditor.open(challenge.serialize()), log_key.public_key());
}

TEST_F(ServeTls, OnLoopbackTheServerAloneMay) {
  options.tls.client_ca.clear();
  const Running running(options);
  EXPECT_TRUE(answered(running.address(), credentials(authority, nullptr)));
  EXPECT_FALSE(answered(running.address(), credentials(stranger, nullptr)));
  EXPECT_FALSE(answered(running.address(), grpc::InsecureChannelCredentials()));
}

TEST_F(ServeTls, OffLoopbackOnlyWithAllThree) {
  options.listen = "0.0.0.0:0";
  {
    const Running running(options);
    const std::string here = "127.0.0.1:" + std::to_string(running.server.port());
    EXPECT_TRUE(answered(here, credentials(authority, &client)));
    EXPECT_FALSE(answered(here, credentials(authority, nullptr)));
  }
  options.tls.client_ca.clear();
  expect_error(ErrorKind::kUsage, "give --tls-client-ca;", [&] { check_serve_options(options); });
  options.tls = {};
  expect_error(ErrorKind::kUsage, "give --tls-cert, --tls-key, --tls-client-ca;",
               [&] { check_serve_options(options); });
  options.listen = "[::]:0";
  expect_error(ErrorKind::kUsage, "reached from elsewhere", [&] { check_serve_options(options); });
}

TEST_F(ServeTls, FilesAreCheckedBeforeAnythingListens) {
  const auto refused = [&](const std::string& file, const std::string& text) {
    expect_error(ErrorKind::kUsage, file, [&] { check_serve_options(options); });
    expect_error(ErrorKind::kUsage, text, [&] { check_serve_options(options); });
    use(server);
    EXPECT_NO_THROW(check_serve_options(options));
  };
  options.tls.key.clear();
  refused("--tls-key", "go together");
  options.tls.certificate = dir / "absent.pem";
  refused("absent.pem", "No such file");
  write_file_atomic(dir / "server.pem", std::string_view("hello"));
  refused("server.pem", "no PEM certificate");
  write_file_atomic(dir / "server.pem", server.pem + server.pem.substr(0, server.pem.size() / 2));
  refused("server.pem", "after number 1");
  write_file_atomic(dir / "server.key", std::string_view("hello"), 0600);
  refused("server.key", "no unencrypted PEM private key");
  write_file_atomic(dir / "server.key", client.key_pem, 0600);
  refused("server.key", "is not the key of the first certificate");
  ASSERT_EQ(chmod((dir / "server.key").c_str(), 0640), 0);
  refused("server.key", "chmod 600");
  write_file_atomic(dir / "ca.pem", std::string_view(""));
  refused("ca.pem", "no PEM certificate");
  for (const auto& [from, to, text] :
       {std::tuple(-7200L, -60L, "has expired"), std::tuple(3600L, 7200L, "is not valid before")}) {
    const Certificate other =
        make_certificate("server", {.issuer = &authority, .from_s = from, .to_s = to});
    use(other);
    refused("server.pem", text);
    const Certificate other_ca = make_certificate("authority", {.from_s = from, .to_s = to});
    write_file_atomic(dir / "ca.pem", other_ca.pem);
    refused("ca.pem", text);
  }
  const std::unique_ptr<BIO, decltype(&BIO_free)> bio(BIO_new(BIO_s_mem()), &BIO_free);
  ASSERT_EQ(PEM_write_bio_PKCS8PrivateKey(bio.get(), server.key.get(), EVP_aes_256_cbc(), "secret",
                                          6, nullptr, nullptr),
            1);
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  const std::string encrypted(data, static_cast<std::size_t>(size));
  write_file_atomic(dir / "server.key", encrypted, 0600);
  refused("server.key", "no unencrypted PEM private key");
}

}  // namespace
}  // namespace bitwitness
