// A real prover within a test: model, backends, server, client stubs.
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attest/base/error.h"
#include "kernels/backend.h"
#include "proto/audit.grpc.pb.h"
#include "prover/generate.h"
#include "prover/serve.h"

namespace bitwitness::test {

inline const std::string kModelDir = BW_TEST_DATA_DIR "/models/tiny-qwen3";

inline const ServedModel& model() {
  static const ServedModel served = ServedModel::load(kModelDir);
  return served;
}

inline Backend& backend() {
  static const std::unique_ptr<Backend> made = make_backend("cpu", 1);
  return *made;
}

// The same bits, `delay` later per step (a request that lasts, on any machine), or a failure.
class SlowBackend : public Backend {
 public:
  explicit SlowBackend(std::chrono::milliseconds delay) : delay_(delay) {}

  std::string name() const override { return backend().name(); }
  std::string device() const override { return backend().device(); }
  Buffer allocate(std::size_t bytes) override { return backend().allocate(bytes); }
  void release(void* data) noexcept override { backend().release(data); }
  void to_device(void* destination, const void* host, std::size_t bytes) override {
    backend().to_device(destination, host, bytes);
  }
  void to_host(void* host, const void* source, std::size_t bytes) override {
    backend().to_host(host, source, bytes);
  }
  void synchronize() override { backend().synchronize(); }
  const std::byte* place(const std::byte* host, std::size_t bytes,
                         std::vector<Buffer>& owned) override {
    return backend().place(host, bytes, owned);
  }
  void embed(float* out, const Matrix& embedding, const std::int32_t* tokens,
             std::int64_t M) override {
    std::this_thread::sleep_for(delay_);
    ++steps;
    last_rows = M;
    if (std::find(tokens, tokens + M, poison) != tokens + M) {
      throw infrastructure_error("the device of this test failed");
    }
    backend().embed(out, embedding, tokens, M);
  }
  void rms_norm(float* out, const float* x, const Vector& weight, float eps,
                std::int64_t M) override {
    backend().rms_norm(out, x, weight, eps, M);
  }
  void matmul(float* y, const float* x, const Matrix& W, std::int64_t M) override {
    backend().matmul(y, x, W, M);
  }
  void rope(float* x, std::int64_t heads, std::int64_t head_dim, const float* cosines,
            const float* sines, const RowMap& rows) override {
    backend().rope(x, heads, head_dim, cosines, sines, rows);
  }
  void store_kv(const LayerKv& cache, const float* k, const float* v, const RowMap& rows) override {
    backend().store_kv(cache, k, v, rows);
  }
  void attention(float* out, const float* q, const LayerKv& cache, std::int64_t heads,
                 std::int64_t kv_heads, std::int64_t head_dim, const RowMap& rows) override {
    backend().attention(out, q, cache, heads, kv_heads, head_dim, rows);
  }
  void swiglu(float* out, const float* gate, const float* up, std::int64_t count) override {
    backend().swiglu(out, gate, up, count);
  }
  void add(float* out, const float* x, const float* y, std::int64_t count) override {
    backend().add(out, x, y, count);
  }
  void gather_rows(float* out, const float* x, std::int64_t width, const std::int32_t* index,
                   std::int64_t count) override {
    backend().gather_rows(out, x, width, index, count);
  }
  void hash_rows(Digest* out, std::uint32_t* non_finite, LeafType type, std::uint32_t first_layer,
                 std::int64_t layers, const float* first, std::size_t first_bytes,
                 const float* second, std::size_t second_bytes, const RowMap& rows) override {
    backend().hash_rows(out, non_finite, type, first_layer, layers, first, first_bytes, second,
                        second_bytes, rows);
  }
  void flag_non_finite(std::uint32_t* flag, const float* x, std::int64_t count) override {
    backend().flag_non_finite(flag, x, count);
  }
  NonFinite find_non_finite(const float* x, std::int64_t width, std::int64_t M) override {
    return backend().find_non_finite(x, width, M);
  }
  void sample(std::int32_t* out, const float* logits, std::int64_t vocab,
              const SampleRequest* requests, std::int64_t M, SampleKinds kinds) override {
    backend().sample(out, logits, vocab, requests, M, kinds);
  }

  std::atomic<int> steps{0};
  std::atomic<std::int64_t> last_rows{0};  // of the last step
  std::int32_t poison = -1;                // a step with this token fails

 private:
  std::chrono::milliseconds delay_;
};

class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "bw-serve-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const {
    return (std::filesystem::path(path_) / name).string();
  }

 private:
  std::string path_;
};

inline ServeOptions local_options() {
  ServeOptions options;
  options.listen = "127.0.0.1:0";
  return options;
}

// A running server.
struct Running {
  explicit Running(ServeOptions options = local_options(), Backend& on = backend())
      : server(model(), on, std::move(options)) {
    server.start();
  }
  std::string address() const { return server.address(); }
  Server server;
};

inline std::unique_ptr<v1::Audit::Stub> stub_for(const std::string& address) {
  return v1::Audit::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
}

// Runs `work`, which must throw an Error of `kind` whose message has `text` in it.
inline void expect_error(ErrorKind kind, const std::string& text,
                         const std::function<void()>& work) {
  try {
    work();
    ADD_FAILURE() << "no error where one with '" << text << "' was expected";
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
    EXPECT_THAT(error.what(), testing::HasSubstr(text));
  }
}

}  // namespace bitwitness::test
