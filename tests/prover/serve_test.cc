// The live exchange (proto/PROTOCOL.md): a server with a real model and the real client, and the
// client against provers that misbehave.
#include "prover/serve.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "attest/base/error.h"
#include "attest/base/file.h"
#include "attest/log.h"
#include "proto/audit.grpc.pb.h"
#include "prover/record_store.h"
#include "tests/prover/serving.h"
#include "verifier/client.h"

namespace bitwitness {
namespace {

namespace fs = std::filesystem;
namespace wire = bitwitness::v1;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::HasSubstr;
using namespace test;

Bytes nonce_of(std::uint8_t fill) {
  return Bytes(32, fill);
}

RemoteRequest text_request(const std::string& prompt, std::uint64_t max_tokens) {
  RemoteRequest request;
  request.prompt = prompt;
  request.max_tokens = max_tokens;
  request.nonce = nonce_of(7);
  return request;
}

// What the same request gives without any server.
Generation run_alone(const RemoteRequest& request) {
  GenerationRequest local;
  local.prompt_ids =
      request.prompt_ids ? *request.prompt_ids : encode_prompt(model(), *request.prompt);
  local.max_tokens = request.max_tokens;
  local.sampling.temperature = request.temperature;
  local.sampling.top_k = request.top_k;
  local.sampling.top_p = request.top_p;
  local.seed = request.nonce;
  local.seed_provenance = request.nonce.empty() ? SeedProvenance::kNone : SeedProvenance::kNonce;
  local.stop_ids = default_stop_ids(model());
  return std::move(generate(model(), backend(), {&local, 1}, {}).front());
}

// ---- The real server.

TEST(Serve, GenerateThenGetRecord) {
  const Running running;
  RemoteRequest request = text_request("To be, or not to be", 12);
  std::string streamed;
  std::vector<std::uint32_t> tokens;
  const RemoteGeneration remote = generate_remote(running.address(), request, seconds(60), {},
                                                  [&](std::uint32_t token, std::string_view text) {
                                                    tokens.push_back(token);
                                                    streamed += text;
                                                  });
  const Generation alone = run_alone(request);
  EXPECT_EQ(remote.fetched.parsed.claim, alone.claim);
  EXPECT_EQ(tokens, alone.claim.emitted_ids);
  EXPECT_EQ(streamed, alone.text);
  EXPECT_EQ(remote.text, alone.text);
  EXPECT_EQ(remote.fetched.parsed.evidence.level, EvidenceLevel::kLeaves);
  EXPECT_EQ(remote.fetched.parsed.manifest, model().manifest);
  EXPECT_FALSE(remote.fetched.receipt.has_value());

  // Again by its id alone, in upper case as people paste it.
  std::string id = remote.fetched.parsed.digest().hex();
  for (char& c : id) c = static_cast<char>(std::toupper(c));
  const FetchedRecord again = fetch_record(running.address(), id);
  EXPECT_EQ(again.record, remote.fetched.record);
}

TEST(Serve, EveryKindOfRequest) {
  const Running running;
  RemoteRequest ids;
  ids.prompt_ids = {5, 17, 300, 42};
  ids.max_tokens = 4;
  const RemoteGeneration greedy = generate_remote(running.address(), ids, seconds(60));
  EXPECT_EQ(greedy.fetched.parsed.claim, run_alone(ids).claim);
  EXPECT_EQ(greedy.fetched.parsed.claim.seed_provenance, SeedProvenance::kNone);

  RemoteRequest sampled = text_request("ROMEO:", 8);
  sampled.temperature = 0.8F;
  sampled.top_k = 50;
  sampled.top_p = 0.9F;
  sampled.nonce = Bytes(64, 0xa5);
  EXPECT_EQ(generate_remote(running.address(), sampled, seconds(60)).fetched.parsed.claim,
            run_alone(sampled).claim);

  // Without a nonce the prover draws the seed, and the claim says so.
  sampled.nonce.clear();
  const Claim own = generate_remote(running.address(), sampled, seconds(60)).fetched.parsed.claim;
  EXPECT_EQ(own.seed_provenance, SeedProvenance::kProver);
  EXPECT_EQ(own.seed.size(), 32U);

  for (const EvidenceLevel level : {EvidenceLevel::kNone, EvidenceLevel::kRoots,
                                    EvidenceLevel::kLeaves, EvidenceLevel::kRows}) {
    RemoteRequest request = text_request("JULIET:", 3);
    request.evidence = level;
    const RemoteGeneration remote = generate_remote(running.address(), request, seconds(60));
    EXPECT_EQ(remote.fetched.parsed.evidence.level, level);
  }
}

TEST(Serve, GetInfoTellsModelAndLimits) {
  const Running running;
  grpc::ClientContext context;
  wire::GetInfoResponse info;
  const grpc::Status status = stub_for(running.address())->GetInfo(&context, {}, &info);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(info.model(), "tiny-qwen3");
  EXPECT_EQ(info.manifest_digest(), model().manifest.digest().hex());
  EXPECT_EQ(info.arithmetic(), "fma32");
  EXPECT_EQ(info.context_tokens(), 1024U);
  EXPECT_EQ(info.vocabulary(), 2048U);
  EXPECT_TRUE(info.has_tokenizer());
  EXPECT_EQ(info.max_tokens(), 4096U);
  EXPECT_EQ(info.evidence(), wire::EVIDENCE_LEVEL_LEAVES);
  EXPECT_EQ(info.log_key(), "");
}

// A unary call with bytes in and out, for services whose generated code is not installed.
grpc::Status call_raw(const std::string& address, const std::string& method,
                      const std::string& request, std::string& response) {
  grpc::GenericStub stub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + seconds(20));
  grpc::CompletionQueue queue;
  const grpc::Slice slice(request);
  const grpc::ByteBuffer sent(&slice, 1);
  const auto call = stub.PrepareUnaryCall(&context, method, sent, &queue);
  call->StartCall();
  grpc::ByteBuffer received;
  grpc::Status status;
  call->Finish(&received, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  std::vector<grpc::Slice> slices;
  if (status.ok() && received.Dump(&slices).ok()) {
    for (const grpc::Slice& part : slices) {
      response.append(reinterpret_cast<const char*>(part.begin()), part.size());
    }
  }
  return status;
}

TEST(Serve, TellsItsHealth) {
  const Running running;
  for (const std::string service : {"", "bitwitness.v1.Audit"}) {
    // HealthCheckRequest.service is field 1; so is HealthCheckResponse.status, and SERVING is 1.
    const std::string request =
        service.empty() ? "" : std::string("\x0a") + static_cast<char>(service.size()) + service;
    std::string response;
    const grpc::Status status =
        call_raw(running.address(), "/grpc.health.v1.Health/Check", request, response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response, std::string("\x08\x01"));
  }
}

// What does not parse as a message of audit.proto reaches no handler.
TEST(Serve, GarbageInPlaceOfARequest) {
  const Running running;
  std::string response;
  EXPECT_FALSE(
      call_raw(running.address(), "/bitwitness.v1.Audit/GetInfo", "\xff\xff\xff", response).ok());
  EXPECT_EQ(call_raw(running.address(), "/bitwitness.v1.Audit/Close", "", response).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_NO_THROW(generate_remote(running.address(), text_request("x", 1), seconds(60)));
}

TEST(Serve, ConcurrentRequestsGiveTheClaimsOfEachAlone) {
  std::vector<RemoteRequest> requests;
  for (std::size_t i = 0; i < 11; ++i) {
    RemoteRequest request = text_request(std::string(1 + 9 * i, 'a') + " king", 3 + i);
    request.nonce = nonce_of(static_cast<std::uint8_t>(i + 1));
    if (i % 2 == 1) request.temperature = 1.0F;
    if (i == 4) request.evidence = EvidenceLevel::kRows;
    requests.push_back(request);
  }
  std::vector<Claim> alone;
  for (const RemoteRequest& request : requests) alone.push_back(run_alone(request).claim);

  ServeOptions options = local_options();
  options.max_batch = 4;
  SlowBackend slow(milliseconds(5));
  const Running running(options, slow);
  std::vector<std::future<Claim>> together;
  for (const RemoteRequest& request : requests) {
    together.push_back(std::async(std::launch::async, [&] {
      return generate_remote(running.address(), request, seconds(120)).fetched.parsed.claim;
    }));
  }
  for (std::size_t i = 0; i < requests.size(); ++i) {
    EXPECT_THAT(claim_differences(alone[i], together[i].get()), testing::IsEmpty())
        << "request " << i;
  }
  EXPECT_LT(slow.steps, 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10 + 11 + 12 + 13) << "nothing was batched";
}

TEST(Serve, OneFailingRequestSparesItsNeighbours) {
  ServeOptions options = local_options();
  std::mutex mutex;
  std::vector<std::string> told;
  options.on_error = [&](const std::string& message) {
    const std::scoped_lock lock(mutex);
    told.push_back(message);
  };
  SlowBackend slow(milliseconds(20));
  slow.poison = 2047;
  const Running running(options, slow);
  const auto ask = [&](std::vector<std::uint32_t> ids, std::uint64_t max_tokens) {
    RemoteRequest request;
    request.prompt_ids = std::move(ids);
    request.max_tokens = max_tokens;
    return request;
  };
  // While the first is computed, the others queue up and make one batch.
  std::thread occupant(
      [&] { EXPECT_NO_THROW(generate_remote(running.address(), ask({1}, 20), seconds(60))); });
  while (slow.steps == 0) std::this_thread::sleep_for(milliseconds(1));
  std::thread failing([&] {
    expect_error(ErrorKind::kInfrastructure, "its operator", [&] {
      generate_remote(running.address(), ask({3, 2047}, 4), seconds(60));
    });
  });
  const RemoteRequest good = ask({4, 5, 6}, 6);
  std::size_t tokens = 0;
  const RemoteGeneration remote = generate_remote(
      running.address(), good, seconds(60), {}, [&](std::uint32_t, std::string_view) { ++tokens; });
  occupant.join();
  failing.join();
  EXPECT_EQ(remote.fetched.parsed.claim, run_alone(good).claim);
  EXPECT_EQ(tokens, remote.fetched.parsed.claim.emitted_ids.size());
  const std::scoped_lock lock(mutex);
  EXPECT_THAT(told, testing::ElementsAre("the device of this test failed"));
}

TEST(Serve, UnknownAndIllFormedIds) {
  const Running running;
  expect_error(ErrorKind::kCannotJudge, "no record",
               [&] { fetch_record(running.address(), std::string(64, '0')); });
  for (const std::string id : {"", "12", "../../etc/passwd", "zz"}) {
    expect_error(ErrorKind::kUsage, "64 hexadecimal digits",
                 [&] { fetch_record(running.address(), id); });
    // Past the client's own check.
    grpc::ClientContext context;
    wire::GetRecordRequest request;
    request.set_record_id(id);
    const auto stub = stub_for(running.address());
    const auto reader = stub->GetRecord(&context, request);
    wire::RecordChunk chunk;
    EXPECT_FALSE(reader->Read(&chunk));
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
}

TEST(Serve, BadRequestsAreNamed) {
  ServeOptions options = local_options();
  options.max_tokens = 100;
  options.max_record_bytes = 2 << 20;
  const Running running(options);
  const auto stub = stub_for(running.address());
  const auto refused = [&](const char* message,
                           const std::function<void(wire::GenerateRequest&)>& change) {
    wire::GenerateRequest request;
    request.set_text("Hello");
    request.set_max_tokens(2);
    change(request);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + seconds(30));
    const auto reader = stub->Generate(&context, request);
    wire::GenerateEvent event;
    EXPECT_FALSE(reader->Read(&event)) << message;
    const grpc::Status status = reader->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << message;
    EXPECT_THAT(status.error_message(), HasSubstr(message));
  };
  refused("prompt is empty", [](auto& r) { r.set_text(""); });
  refused("no prompt", [](auto& r) { r.clear_prompt(); });
  refused("prompt is empty", [](auto& r) { r.mutable_token_ids(); });
  refused("UTF-8", [](auto& r) { r.set_text("ab\xff"); });
  refused("context", [](auto& r) { r.set_text(std::string(20'000, 'x') + " y"); });
  refused("vocabulary", [](auto& r) { r.mutable_token_ids()->add_ids(2048); });
  refused("max_tokens", [](auto& r) { r.set_max_tokens(0); });
  refused("at most 100", [](auto& r) { r.set_max_tokens(101); });
  refused("temperature", [](auto& r) { r.mutable_sampling()->set_temperature(-1.0F); });
  refused("temperature", [](auto& r) { r.mutable_sampling()->set_temperature(-0.0F); });
  refused("temperature", [](auto& r) {
    r.mutable_sampling()->set_temperature(std::numeric_limits<float>::quiet_NaN());
  });
  refused("temperature", [](auto& r) {
    r.mutable_sampling()->set_temperature(std::numeric_limits<float>::infinity());
  });
  refused("top_p", [](auto& r) {
    r.mutable_sampling()->set_temperature(1.0F);
    r.mutable_sampling()->set_top_p(0.0F);
  });
  refused("top_p", [](auto& r) {
    r.mutable_sampling()->set_temperature(1.0F);
    r.mutable_sampling()->set_top_p(1.5F);
  });
  refused("top_k", [](auto& r) { r.mutable_sampling()->set_top_k(4); });
  refused("seed has 65 bytes", [](auto& r) { r.set_nonce(std::string(65, 'n')); });
  refused("evidence", [](auto& r) { r.set_evidence(static_cast<wire::EvidenceLevel>(9)); });
  refused("less evidence", [](auto& r) {
    r.set_evidence(wire::EVIDENCE_LEVEL_ROWS);
    r.set_max_tokens(100);
    r.set_text(std::string(1000, 'x'));
  });

  // The same through the client: the user's own fault.
  expect_error(ErrorKind::kUsage, "at most 100",
               [&] { generate_remote(running.address(), text_request("x", 101), seconds(30)); });
  expect_error(ErrorKind::kUsage, "nonce has 65 bytes", [&] {
    RemoteRequest request = text_request("x", 1);
    request.nonce = Bytes(65);
    generate_remote(running.address(), request, seconds(30));
  });
  expect_error(ErrorKind::kUsage, "shorten the prompt", [&] {
    generate_remote(running.address(), text_request(std::string(5 << 20, 'x'), 1), seconds(30));
  });
  // And none of it hurt the server.
  EXPECT_NO_THROW(generate_remote(running.address(), text_request("x", 1), seconds(60)));
}

TEST(Serve, ListenAddresses) {
  const auto refused = [](ErrorKind kind, const std::string& listen, const std::string& text) {
    ServeOptions options;
    options.listen = listen;
    expect_error(kind, text, [&] {
      Server server(model(), backend(), options);
      server.start();
    });
  };
  refused(ErrorKind::kUsage, "", "HOST:PORT");
  refused(ErrorKind::kUsage, "127.0.0.1", "no port");
  refused(ErrorKind::kUsage, "127.0.0.1:", "port must be");
  refused(ErrorKind::kUsage, "127.0.0.1:65536", "port must be");
  refused(ErrorKind::kUsage, "127.0.0.1:-1", "port must be");
  refused(ErrorKind::kUsage, "127.0.0.1:7x", "port must be");
  refused(ErrorKind::kUsage, "::1:7433", "no IP address");
  refused(ErrorKind::kUsage, "example.org:7433", "no IP address");
  refused(ErrorKind::kUsage, "0.0.0.0:7433", "loopback");
  refused(ErrorKind::kUsage, "192.168.1.1:7433", "loopback");
  refused(ErrorKind::kUsage, "[::]:7433", "loopback");

  const Running first;
  refused(ErrorKind::kInfrastructure, first.address(), "in use");
  EXPECT_NO_THROW(generate_remote(first.address(), text_request("x", 1), seconds(60)));
  EXPECT_EQ(first.server.port(), std::stoi(first.address().substr(first.address().rfind(':') + 1)));
  // The port is free again afterwards.
  ServeOptions options;
  {
    const Running second;
    options.listen = second.address();
  }
  const Running third(options);
  EXPECT_EQ(third.address(), options.listen);
}

TEST(Serve, OptionsThatContradictEachOther) {
  ServeOptions options = local_options();
  options.log_dir = "/nowhere";
  expect_error(ErrorKind::kUsage, "go together", [&] { check_serve_options(options); });
  options = local_options();
  options.max_record_bytes = options.max_memory_bytes + 1;
  expect_error(ErrorKind::kUsage, "--records", [&] { check_serve_options(options); });
}

TEST(Serve, RecordsOnDiskOutliveTheServer) {
  const TempDir dir;
  ServeOptions options = local_options();
  options.records_dir = dir / "records";
  std::string id;
  Bytes bytes;
  {
    const Running running(options);
    const RemoteGeneration remote =
        generate_remote(running.address(), text_request("Enter HAMLET", 3), seconds(60));
    id = remote.fetched.parsed.digest().hex();
    bytes = remote.fetched.record;
  }
  const std::string path = dir / ("records/" + id + ".bwrec");
  EXPECT_EQ(read_record(path).digest().hex(), id);

  const Running running(options);
  EXPECT_EQ(fetch_record(running.address(), id).record, bytes);

  // What the disk did to it is for the client to see.
  Bytes damaged = bytes;
  damaged[damaged.size() / 2] ^= 1;
  write_file_atomic(path, damaged);
  expect_error(ErrorKind::kMalformed, id, [&] { fetch_record(running.address(), id); });
  write_file_atomic(path, ByteView(bytes).first(bytes.size() - 1));
  expect_error(ErrorKind::kMalformed, id, [&] { fetch_record(running.address(), id); });
  write_file_atomic(path, ByteView());
  expect_error(ErrorKind::kInfrastructure, "its operator",
               [&] { fetch_record(running.address(), id); });  // no record any more
}

TEST(Serve, LoggedRecordsComeWithTheirReceipt) {
  const TempDir dir;
  const SigningKey key = SigningKey::generate("log.example");
  const SigningKey operator_key = SigningKey::generate("operator.example");
  init_log(dir / "log", key);
  ServeOptions options = local_options();
  options.log_dir = dir / "log";
  options.log_key = key;
  options.operator_key = operator_key;
  const Running running(options);
  std::vector<RemoteGeneration> made;
  for (int i = 0; i < 3; ++i) {
    made.push_back(generate_remote(running.address(), text_request("Exeunt", 2), seconds(60)));
  }
  for (std::size_t i = 0; i < made.size(); ++i) {
    const FetchedRecord& fetched = made[i].fetched;
    ASSERT_TRUE(fetched.receipt.has_value());
    const ReceiptResult result =
        verify_receipt(*fetched.receipt, key.public_key(), fetched.parsed.digest());
    EXPECT_EQ(result.verdict, ReceiptVerdict::kIncluded);
    EXPECT_EQ(result.index, i);
    ASSERT_TRUE(fetched.parsed.signature.has_value());
    EXPECT_EQ(fetched.parsed.signature->key, operator_key.public_key());
  }
  EXPECT_EQ(LogReader(dir / "log", key.public_key()).size(), 3U);

  // A log that breaks later: the operator learns why, the client only that it failed.
  std::mutex mutex;
  std::string told;
  ServeOptions reporting = options;
  reporting.on_error = [&](const std::string& message) {
    const std::scoped_lock lock(mutex);
    told = message;
  };
  const Running second(reporting);
  fs::remove_all(dir / "log");
  expect_error(ErrorKind::kInfrastructure, "its operator",
               [&] { generate_remote(second.address(), text_request("Exeunt", 2), seconds(60)); });
  const std::scoped_lock lock(mutex);
  EXPECT_THAT(told, HasSubstr("log"));
}

TEST(Serve, CancelledAndExpiredRequestsLeaveTheServerFree) {
  SlowBackend slow(milliseconds(20));
  const Running running(local_options(), slow);
  const auto stub = stub_for(running.address());
  wire::GenerateRequest request;
  request.mutable_token_ids()->add_ids(40);
  request.set_max_tokens(1000);  // 20 s
  {
    grpc::ClientContext context;
    const auto reader = stub->Generate(&context, request);
    wire::GenerateEvent event;
    ASSERT_TRUE(reader->Read(&event));
    context.TryCancel();
    while (reader->Read(&event)) {
    }
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  expect_error(ErrorKind::kInfrastructure, "was not done within 100 ms", [&] {
    generate_remote(running.address(), text_request("KING RICHARD:", 1000), milliseconds(100));
  });
  // Neither is computed to its end: the device is free for the next one long before.
  EXPECT_NO_THROW(generate_remote(running.address(), text_request("x", 1), seconds(60)));
  EXPECT_LT(slow.steps, 500);
}

// A request joins what is being computed, and is done when it is done itself.
TEST(Serve, AShortRequestDoesNotWaitForALongOne) {
  const TempDir dir;
  ServeOptions options = local_options();
  options.log_dir = dir / "log";
  options.log_key = SigningKey::generate("log.example");
  init_log(options.log_dir, *options.log_key);
  SlowBackend slow(milliseconds(20));
  const Running running(options, slow);
  const auto stub = stub_for(running.address());
  grpc::ClientContext context;
  wire::GenerateRequest request;
  request.mutable_token_ids()->add_ids(40);
  request.set_max_tokens(200);  // 4 s
  const auto reader = stub->Generate(&context, request);
  wire::GenerateEvent event;
  ASSERT_TRUE(reader->Read(&event));
  for (const std::uint64_t tokens : {1, 5}) {
    const RemoteRequest brief = text_request("Exit", tokens);
    const RemoteGeneration remote = generate_remote(running.address(), brief, seconds(60));
    EXPECT_EQ(remote.fetched.parsed.claim, run_alone(brief).claim);
    EXPECT_TRUE(remote.fetched.receipt.has_value());
  }
  EXPECT_LT(slow.steps, 100) << "the short ones waited";
  RemoteRequest same;
  same.prompt_ids = {40};
  same.max_tokens = 200;
  std::string id;
  while (reader->Read(&event)) {
    if (event.has_result()) id = event.result().record_id();
  }
  ASSERT_TRUE(reader->Finish().ok());
  EXPECT_EQ(fetch_record(running.address(), id).parsed.claim, run_alone(same).claim);
}

TEST(Serve, ACancelledRequestLeavesItsNeighbours) {
  SlowBackend slow(milliseconds(10));
  const Running running(local_options(), slow);
  const auto stub = stub_for(running.address());
  wire::GenerateRequest request;
  request.mutable_token_ids()->add_ids(40);
  request.set_max_tokens(1000);
  grpc::ClientContext contexts[2];
  std::unique_ptr<grpc::ClientReader<wire::GenerateEvent>> readers[2];
  wire::GenerateEvent event;
  for (int i = 0; i < 2; ++i) {
    readers[i] = stub->Generate(&contexts[i], request);
    ASSERT_TRUE(readers[i]->Read(&event));
  }
  for (int i = 0; i < 500 && slow.last_rows != 2; ++i)
    std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(slow.last_rows, 2);
  contexts[0].TryCancel();
  readers[0]->Finish();
  for (int i = 0; i < 500 && slow.last_rows != 1; ++i)
    std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(slow.last_rows, 1);
  EXPECT_TRUE(readers[1]->Read(&event));
  contexts[1].TryCancel();
  readers[1]->Finish();
}

TEST(Serve, ShutdownWhileARequestRuns) {
  for (const bool graceful : {false, true}) {
    SlowBackend slow(milliseconds(20));
    Running running(local_options(), slow);
    const auto stub = stub_for(running.address());
    grpc::ClientContext context;
    wire::GenerateRequest request;
    request.mutable_token_ids()->add_ids(40);
    request.set_max_tokens(graceful ? 10 : 1000);
    const auto reader = stub->Generate(&context, request);
    wire::GenerateEvent event;
    ASSERT_TRUE(reader->Read(&event));
    std::thread stopper(
        [&] { running.server.shutdown(graceful ? milliseconds(60'000) : milliseconds(0)); });
    running.server.wait();
    stopper.join();
    while (reader->Read(&event)) {
    }
    const grpc::Status status = reader->Finish();
    if (graceful) {
      EXPECT_TRUE(status.ok()) << status.error_message();
      EXPECT_TRUE(event.has_result());
    } else {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
      EXPECT_LT(slow.steps, 500);
    }
    expect_error(ErrorKind::kInfrastructure, "cannot be reached",
                 [&] { generate_remote(running.address(), text_request("x", 1), seconds(10)); });
    running.server.shutdown();  // again is harmless
  }
}

TEST(Serve, AFullQueueRefuses) {
  SlowBackend slow(milliseconds(20));
  ServeOptions options = local_options();
  options.max_queue = 1;
  options.max_batch = 1;
  const Running running(options, slow);
  const auto stub = stub_for(running.address());
  wire::GenerateRequest request;
  request.mutable_token_ids()->add_ids(40);
  request.set_max_tokens(1000);
  grpc::ClientContext contexts[3];
  std::unique_ptr<grpc::ClientReader<wire::GenerateEvent>> readers[3];
  wire::GenerateEvent event;
  readers[0] = stub->Generate(&contexts[0], request);
  ASSERT_TRUE(readers[0]->Read(&event));  // it is being computed
  // Of the next two, whichever comes second finds the queue full and is answered at once.
  readers[1] = stub->Generate(&contexts[1], request);
  readers[2] = stub->Generate(&contexts[2], request);
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (const int i : {1, 2}) {
    threads.emplace_back([&, i] {
      wire::GenerateEvent ignored;
      while (readers[i]->Read(&ignored)) {
      }
      const grpc::Status status = readers[i]->Finish();
      if (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) {
        EXPECT_THAT(status.error_message(), HasSubstr("queue is full"));
        ++refused;
        for (grpc::ClientContext& context : contexts) context.TryCancel();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  readers[0]->Finish();
  EXPECT_EQ(refused, 1);
}

TEST(Serve, AClientThatStopsReadingIsDropped) {
  ServeOptions options = local_options();
  options.write_timeout = seconds(2);
  options.evidence = EvidenceLevel::kRows;
  options.max_calls = 1;
  const Running running(options);
  const RemoteGeneration made =
      generate_remote(running.address(), text_request(std::string(500, 'x'), 20), seconds(60));
  ASSERT_GT(made.fetched.record.size(), 1U << 20);  // far more than the stream's window
  grpc::ChannelArguments small_window;
  small_window.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  small_window.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 65'536);
  const auto stub = wire::Audit::NewStub(grpc::CreateCustomChannel(
      running.address(), grpc::InsecureChannelCredentials(), small_window));
  grpc::ClientContext context;
  wire::GetRecordRequest request;
  request.set_record_id(made.fetched.parsed.digest().hex());
  const auto reader = stub->GetRecord(&context, request);
  wire::RecordChunk chunk;
  ASSERT_TRUE(reader->Read(&chunk));
  // The only call there may be is taken until the server gives up on this client.
  expect_error(ErrorKind::kInfrastructure, "too many calls",
               [&] { fetch_record(running.address(), request.record_id()); });
  bool freed = false;
  for (int i = 0; i < 200 && !freed; ++i) {
    std::this_thread::sleep_for(milliseconds(50));
    try {
      freed = fetch_record(running.address(), request.record_id()).record == made.fetched.record;
    } catch (const Error&) {
    }
  }
  EXPECT_TRUE(freed);
  while (reader->Read(&chunk)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
}

// HTTP/2 by hand: `streams` calls of `path` on one connection whose windows are 0, so that nothing
// can be sent to them, with an empty message or with none; never read from.
class DeafClient {
 public:
  DeafClient(int port, const std::string& path, int streams, bool with_message) {
    socket_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<std::uint16_t>(port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(socket_, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
    std::string out = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    out += frame(4, 0, 0, std::string("\0\4\0\0\0\0", 6));  // SETTINGS_INITIAL_WINDOW_SIZE 0
    const std::string headers = field(":method", "POST") + field(":scheme", "http") +
                                field(":path", path) + field(":authority", "x") +
                                field("content-type", "application/grpc") + field("te", "trailers");
    for (int i = 0; i < streams; ++i) {
      const std::uint32_t id = 2 * static_cast<std::uint32_t>(i) + 1;
      out += frame(1, 4, id, headers);                                 // HEADERS, END_HEADERS
      if (with_message) out += frame(0, 1, id, std::string(5, '\0'));  // DATA, END_STREAM
    }
    EXPECT_EQ(send(socket_, out.data(), out.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(out.size()));
  }
  ~DeafClient() { close(socket_); }
  DeafClient(const DeafClient&) = delete;
  DeafClient& operator=(const DeafClient&) = delete;

 private:
  static std::string frame(int type, int flags, std::uint32_t stream, const std::string& payload) {
    const auto byte = [](std::size_t value) { return static_cast<char>(value & 0xff); };
    return std::string{byte(payload.size() >> 16), byte(payload.size() >> 8), byte(payload.size()),
                       static_cast<char>(type),    static_cast<char>(flags),  byte(stream >> 24),
                       byte(stream >> 16),         byte(stream >> 8),         byte(stream)} +
           payload;
  }
  // A literal without indexing (RFC 7541, 6.2.2), both shorter than 127 bytes.
  static std::string field(const std::string& name, const std::string& value) {
    return std::string(1, '\0') + static_cast<char>(name.size()) + name +
           static_cast<char>(value.size()) + value;
  }
  int socket_ = -1;
};

// More such calls than the server has threads; each would hold one for ever.
TEST(Serve, ClientsThatTakeNothingDoNotHoldItsThreads) {
  ServeOptions options = local_options();
  options.write_timeout = seconds(1);
  options.max_calls = 8;
  const Running running(options);
  const std::string audit = "/bitwitness.v1.Audit/";
  for (const auto& [path, with_message] :
       {std::pair(audit + "GetInfo", true), std::pair(audit + "GetInfo", false),
        std::pair(audit + "Commit", true), std::pair(audit + "Generate", false),
        std::pair(std::string("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
                  false)}) {
    SCOPED_TRACE(path + (with_message ? "" : " without a message"));
    std::vector<std::unique_ptr<DeafClient>> clients;
    for (int i = 0; i < 5; ++i) {
      clients.push_back(
          std::make_unique<DeafClient>(running.server.port(), path, 20, with_message));
    }
    std::this_thread::sleep_for(milliseconds(200));
    // Refused while they have the calls, but not for long, and answered at once afterwards.
    const auto stub = stub_for(running.address());
    const steady_clock::time_point until = steady_clock::now() + seconds(15);
    grpc::Status status;
    do {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + seconds(15));
      wire::GetInfoResponse response;
      status = stub->GetInfo(&context, {}, &response);
      std::this_thread::sleep_for(milliseconds(20));
    } while (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED &&
             steady_clock::now() < until);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
}

// A bidirectional call of reflection with an empty message: answered where there is reflection.
grpc::Status reflect(grpc::GenericStub& stub) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + seconds(20));
  grpc::CompletionQueue queue;
  void* tag = nullptr;
  bool ok = false;
  const auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  call->StartCall(nullptr);
  queue.Next(&tag, &ok);
  call->WritesDone(nullptr);
  queue.Next(&tag, &ok);
  grpc::Status status;
  call->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
  return status;
}

TEST(Serve, ReflectionCanBeSwitchedOff) {
  ServeOptions options = local_options();
#if BITWITNESS_WITH_GRPC_REFLECTION
  const bool built_in = true;
#else
  const bool built_in = false;
#endif
  for (const std::optional<bool> reflection : {std::optional<bool>(), std::optional(false)}) {
    options.reflection = reflection;
    const Running running(options);
    grpc::GenericStub stub(
        grpc::CreateChannel(running.address(), grpc::InsecureChannelCredentials()));
    const grpc::Status status = reflect(stub);
    const bool there = built_in && reflection.value_or(true);
    EXPECT_EQ(status.error_code(), there ? grpc::StatusCode::OK : grpc::StatusCode::UNIMPLEMENTED)
        << status.error_message();
  }
}

TEST(RecordStore, MemoryForgetsTheOldest) {
  RecordStore store("", 100);
  const auto id = [](std::uint8_t n) {
    Digest digest;
    digest.bytes[0] = n;
    return digest;
  };
  store.put(id(1), Bytes(40, 1));
  store.put_receipt(id(1), "receipt");
  store.put(id(2), Bytes(40, 2));
  std::optional<StoredRecord> held = store.get(id(1));
  ASSERT_TRUE(held.has_value());
  EXPECT_EQ(held->receipt(), "receipt");
  store.put(id(3), Bytes(40, 3));
  EXPECT_FALSE(store.get(id(1)).has_value());
  EXPECT_TRUE(store.get(id(2)).has_value());
  EXPECT_TRUE(store.get(id(3)).has_value());
  store.put_receipt(id(1), "late");  // harmless
  EXPECT_FALSE(store.get(id(1)).has_value());
  // What was opened before stays readable.
  Bytes out(39);
  held->read(1, out);
  EXPECT_EQ(out, Bytes(39, 1));
  EXPECT_THROW(held->read(2, out), std::logic_error);
  EXPECT_THROW(store.put(id(4), Bytes(101)), std::logic_error);
  store.put(id(2), Bytes(60, 9));  // replaced, not counted twice
  EXPECT_TRUE(store.get(id(3)).has_value());
  EXPECT_EQ(store.get(id(2))->size_bytes(), 60U);
}

// ---- Provers that misbehave.

class FakeProver final : public wire::Audit::Service {
 public:
  using RecordWriter = grpc::ServerWriter<wire::RecordChunk>;
  using EventWriter = grpc::ServerWriter<wire::GenerateEvent>;

  FakeProver() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.SetMaxSendMessageSize(-1);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
  }
  ~FakeProver() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status GetRecord(grpc::ServerContext* context, const wire::GetRecordRequest*,
                         RecordWriter* writer) override {
    return current(get_record_)(*context, *writer);
  }
  grpc::Status Generate(grpc::ServerContext*, const wire::GenerateRequest*,
                        EventWriter* writer) override {
    return current(generate_)(*writer);
  }

  const std::string& address() const { return address_; }
  void vanish() { server_->Shutdown(std::chrono::system_clock::now()); }

  using GetRecordFn = std::function<grpc::Status(grpc::ServerContext&, RecordWriter&)>;
  using GenerateFn = std::function<grpc::Status(EventWriter&)>;
  void on_get_record(GetRecordFn behaviour) { set(get_record_, std::move(behaviour)); }
  void on_generate(GenerateFn behaviour) { set(generate_, std::move(behaviour)); }

 private:
  // A handler that a client left may still be running when the next behaviour is set.
  template <class Fn>
  void set(Fn& slot, Fn behaviour) {
    const std::scoped_lock lock(mutex_);
    slot = std::move(behaviour);
  }
  template <class Fn>
  Fn current(const Fn& slot) {
    const std::scoped_lock lock(mutex_);
    return slot;
  }

  std::mutex mutex_;
  GetRecordFn get_record_;
  GenerateFn generate_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

void send_header(FakeProver::RecordWriter& writer, std::uint64_t bytes,
                 const std::string& receipt = "") {
  wire::RecordChunk chunk;
  chunk.mutable_header()->set_record_bytes(bytes);
  chunk.mutable_header()->set_receipt(receipt);
  writer.Write(chunk);
}

void send_data(FakeProver::RecordWriter& writer, ByteView data) {
  wire::RecordChunk chunk;
  chunk.set_data(data.data(), data.size());
  writer.Write(chunk);
}

// An honest record of 'request', as a prover would store it.
Record honest_record(const RemoteRequest& request) {
  return make_record(model(), run_alone(request), EvidenceLevel::kRoots, run_provenance(backend()));
}

class HostileProver : public testing::Test {
 protected:
  void expect_fetch(
      ErrorKind kind, const std::string& text,
      std::function<grpc::Status(grpc::ServerContext&, FakeProver::RecordWriter&)> behaviour) {
    prover.on_get_record(std::move(behaviour));
    expect_error(kind, text, [&] { fetch_record(prover.address(), id, options); });
  }
  void expect_fetch(ErrorKind kind, const std::string& text,
                    const std::function<void(FakeProver::RecordWriter&)>& behaviour) {
    expect_fetch(kind, text, [behaviour](grpc::ServerContext&, FakeProver::RecordWriter& writer) {
      behaviour(writer);
      return grpc::Status::OK;
    });
  }

  RemoteRequest request = text_request("Enter", 2);
  Record record = honest_record(request);
  Bytes bytes = record.serialize();
  std::string id = record.digest().hex();
  FetchOptions options{seconds(20), 1 << 20};
  FakeProver prover;  // last: its handlers use what is above
};

TEST_F(HostileProver, AnHonestOneIsBelieved) {
  prover.on_get_record([&](grpc::ServerContext&, FakeProver::RecordWriter& writer) {
    send_header(writer, bytes.size(), "a receipt");
    for (std::size_t at = 0; at < bytes.size(); at += 1000) {
      send_data(writer,
                ByteView(bytes).subspan(at, std::min<std::size_t>(1000, bytes.size() - at)));
    }
    return grpc::Status::OK;
  });
  const FetchedRecord fetched = fetch_record(prover.address(), id, options);
  EXPECT_EQ(fetched.record, bytes);
  EXPECT_EQ(fetched.receipt, "a receipt");
}

TEST_F(HostileProver, WrongStreamsAreMalformed) {
  const auto malformed = [&](const std::string& text,
                             const std::function<void(FakeProver::RecordWriter&)>& behaviour) {
    expect_fetch(ErrorKind::kMalformed, text, behaviour);
  };
  malformed("nothing was sent", [](auto&) {});
  malformed("header is missing", [&](auto& w) { send_data(w, bytes); });
  malformed("header is missing", [](auto& w) { w.Write(wire::RecordChunk()); });
  malformed("announced as empty", [](auto& w) { send_header(w, 0); });
  malformed("where data belong", [&](auto& w) {
    send_header(w, bytes.size());
    send_header(w, bytes.size());
  });
  malformed("were announced", [&](auto& w) { send_header(w, bytes.size()); });
  malformed("were announced", [&](auto& w) {
    send_header(w, bytes.size());
    send_data(w, ByteView(bytes).first(bytes.size() - 1));
  });
  malformed("more bytes than", [&](auto& w) {
    send_header(w, bytes.size());
    send_data(w, bytes);
    send_data(w, ByteView(bytes).first(1));
  });
  malformed("more bytes than", [&](auto& w) {
    send_header(w, bytes.size());
    for (int i = 0; i < 10'000; ++i) send_data(w, bytes);
  });
  malformed("a chunk of 0 bytes", [&](auto& w) {
    send_header(w, bytes.size());
    send_data(w, ByteView());
  });
  malformed("a chunk of 262145 bytes", [&](auto& w) {
    send_header(w, 500'000);
    send_data(w, Bytes(262'145));
  });
  malformed("larger than max", [&](auto& w) {
    send_header(w, 1'000'000);
    send_data(w, Bytes(3 << 20));
  });
  malformed("receipt is too long",
            [&](auto& w) { send_header(w, bytes.size(), std::string(1'200'001, 'r')); });
}

TEST_F(HostileProver, WrongRecordsAreMalformed) {
  const auto send = [](Bytes what) {
    return [what](FakeProver::RecordWriter& w) {
      send_header(w, what.size());
      send_data(w, what);
    };
  };
  expect_fetch(ErrorKind::kMalformed, id, send(Bytes(5000, 0x42)));
  Bytes flipped = bytes;
  flipped[flipped.size() / 3] ^= 0x10;
  expect_fetch(ErrorKind::kMalformed, id, send(flipped));
  // A good record, but of another run.
  const Record other = honest_record(text_request("Exit", 2));
  expect_fetch(ErrorKind::kMalformed, "another record was sent", send(other.serialize()));
}

TEST_F(HostileProver, TooLargeIsNotJudged) {
  expect_fetch(ErrorKind::kCannotJudge, "more than the 1048576",
               [](auto& w) { send_header(w, (1 << 20) + 1); });
  expect_fetch(ErrorKind::kCannotJudge, "more than the 1048576",
               [](auto& w) { send_header(w, std::numeric_limits<std::uint64_t>::max()); });
}

TEST_F(HostileProver, StallsAndDripsEndAtTheDeadline) {
  options.deadline = milliseconds(400);
  const auto start = steady_clock::now();
  const auto until_cancelled = [](grpc::ServerContext& context) {
    while (!context.IsCancelled()) std::this_thread::sleep_for(milliseconds(5));
    return grpc::Status::CANCELLED;
  };
  expect_fetch(ErrorKind::kInfrastructure, "was not done within 400 ms",
               [&](grpc::ServerContext& context, FakeProver::RecordWriter&) {
                 return until_cancelled(context);
               });
  expect_fetch(ErrorKind::kInfrastructure, "was not done within 400 ms",
               [&](grpc::ServerContext& context, FakeProver::RecordWriter& writer) {
                 send_header(writer, bytes.size());
                 send_data(writer, ByteView(bytes).first(10));
                 return until_cancelled(context);
               });
  expect_fetch(ErrorKind::kInfrastructure, "was not done within 400 ms",
               [&](grpc::ServerContext& context, FakeProver::RecordWriter& writer) {
                 send_header(writer, bytes.size());
                 for (std::size_t i = 0; i < bytes.size() && !context.IsCancelled(); ++i) {
                   send_data(writer, ByteView(bytes).subspan(i, 1));
                   std::this_thread::sleep_for(milliseconds(2));
                 }
                 return grpc::Status::OK;
               });
  EXPECT_LT(steady_clock::now() - start, seconds(15));
}

TEST_F(HostileProver, StatusesBecomeKinds) {
  using grpc::StatusCode;
  const std::pair<StatusCode, ErrorKind> cases[] = {
      {StatusCode::INVALID_ARGUMENT, ErrorKind::kCannotJudge},  // the id is good: a refusal
      {StatusCode::NOT_FOUND, ErrorKind::kCannotJudge},
      {StatusCode::FAILED_PRECONDITION, ErrorKind::kCannotJudge},
      {StatusCode::PERMISSION_DENIED, ErrorKind::kCannotJudge},
      {StatusCode::UNAUTHENTICATED, ErrorKind::kCannotJudge},
      {StatusCode::OUT_OF_RANGE, ErrorKind::kCannotJudge},
      {StatusCode::UNIMPLEMENTED, ErrorKind::kCannotJudge},
      {StatusCode::INTERNAL, ErrorKind::kInfrastructure},
      {StatusCode::UNKNOWN, ErrorKind::kInfrastructure},
      {StatusCode::UNAVAILABLE, ErrorKind::kInfrastructure},
      {StatusCode::RESOURCE_EXHAUSTED, ErrorKind::kInfrastructure},
      {StatusCode::DATA_LOSS, ErrorKind::kInfrastructure},
      {StatusCode::ABORTED, ErrorKind::kInfrastructure},
      {StatusCode::CANCELLED, ErrorKind::kInfrastructure},
  };
  for (const auto& [code, kind] : cases) {
    expect_fetch(kind, prover.address(),
                 [&, status = code](grpc::ServerContext&, FakeProver::RecordWriter& writer) {
                   // Even when everything has been sent: a failed call is no record.
                   send_header(writer, bytes.size());
                   send_data(writer, bytes);
                   return grpc::Status(status, "go\naway\x1b[31m");
                 });
  }
}

TEST_F(HostileProver, VanishesOrIsNotThere) {
  std::mutex mutex;
  std::condition_variable changed;
  bool sent = false;
  prover.on_get_record([&](grpc::ServerContext& context, FakeProver::RecordWriter& writer) {
    send_header(writer, bytes.size());
    {
      const std::scoped_lock lock(mutex);
      sent = true;
      changed.notify_all();
    }
    while (!context.IsCancelled()) std::this_thread::sleep_for(milliseconds(5));
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
  });
  std::thread killer([&] {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return sent; });
    lock.unlock();
    prover.vanish();
  });
  expect_error(ErrorKind::kInfrastructure, prover.address(),
               [&] { fetch_record(prover.address(), id, options); });
  killer.join();
  expect_error(ErrorKind::kInfrastructure, "cannot be reached",
               [&] { fetch_record(prover.address(), id, options); });
  expect_error(ErrorKind::kUsage, "--tls-ca",
               [&] { fetch_record("nowhere.invalid:7433", id, options); });
  for (const char* address : {"", ":1", "localhost", "localhost:", "localhost:0", "localhost:99999",
                              "unix:/tmp/x", "a/b:1", "::1:7433", "host name:1"}) {
    expect_error(ErrorKind::kUsage, "HOST:PORT", [&] { fetch_record(address, id, options); });
  }
}

TEST_F(HostileProver, GenerateStreamsAreChecked) {
  prover.on_get_record([&](grpc::ServerContext&, FakeProver::RecordWriter& writer) {
    send_header(writer, bytes.size());
    send_data(writer, bytes);
    return grpc::Status::OK;
  });
  const Generation alone = run_alone(request);
  wire::GenerateEvent result;
  result.mutable_result()->set_record_id(id);
  result.mutable_result()->set_claim_digest(record.claim.digest().hex());
  result.mutable_result()->set_trace_root(record.claim.trace_root.hex());
  const auto token = [](std::uint32_t token_id, const std::string& text) {
    wire::GenerateEvent event;
    event.mutable_token()->set_id(token_id);
    event.mutable_token()->set_text(text);
    return event;
  };
  ASSERT_EQ(alone.claim.emitted_ids.size(), 2U);
  const wire::GenerateEvent first = token(alone.claim.emitted_ids[0], alone.text);
  const wire::GenerateEvent second = token(alone.claim.emitted_ids[1], "");

  const auto run = [&](const std::vector<wire::GenerateEvent>& events) {
    prover.on_generate([events](FakeProver::EventWriter& writer) {
      for (const wire::GenerateEvent& event : events) writer.Write(event);
      return grpc::Status::OK;
    });
    return generate_remote(prover.address(), request, seconds(20), options);
  };
  EXPECT_EQ(run({first, second, result}).fetched.record, bytes);

  const auto malformed = [&](const std::string& text,
                             const std::vector<wire::GenerateEvent>& events) {
    expect_error(ErrorKind::kMalformed, text, [&] { run(events); });
  };
  malformed("without a result", {});
  malformed("without a result", {first, second});
  malformed("after the result", {first, second, result, result});
  malformed("after the result", {first, result, second});
  malformed("neither token nor result", {wire::GenerateEvent(), result});
  malformed("more tokens", {first, second, second, result});
  malformed("too much text", {token(1, std::string(70'000, 'x')), result});
  malformed("tokens delivered", {first, result});
  malformed("tokens delivered", {second, first, result});
  malformed("text delivered",
            {token(alone.claim.emitted_ids[0], alone.text + "!"), second, result});
  wire::GenerateEvent wrong = result;
  wrong.mutable_result()->set_claim_digest(std::string(64, '0'));
  malformed("claim digest", {first, second, wrong});
  wrong = result;
  wrong.mutable_result()->set_trace_root(std::string(64, '0'));
  malformed("trace root", {first, second, wrong});
  wrong = result;
  wrong.mutable_result()->set_record_id("../x");
  malformed("record_id", {first, second, wrong});

  // An honest record of a request with another nonce, limit or sampling is no answer to this one.
  request.nonce = nonce_of(8);
  malformed("nonce", {first, second, result});
  request.nonce.clear();
  malformed("nonce", {first, second, result});
  request = text_request("Enter", 3);
  malformed("max_tokens", {first, second, result});
  request = text_request("Enter", 2);
  request.temperature = 0.5F;
  malformed("temperature", {first, second, result});
  request = text_request("", 2);
  request.prompt.reset();
  request.prompt_ids = {1, 2};
  malformed("prompt", {first, second, result});
}

}  // namespace
}  // namespace bitwitness
