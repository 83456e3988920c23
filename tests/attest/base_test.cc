// attest/base: hex, base64, canonical bytes, SHA-256, files, the program wrapper.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <random>
#include <thread>

#include "attest/base/base64.h"
#include "attest/base/canonical.h"
#include "attest/base/file.h"
#include "attest/base/hex.h"
#include "attest/base/program.h"
#include "attest/base/sha256.h"
#include "tests/attest/test_support.h"

namespace bitwitness {
namespace {

using testing::error_kind;
using testing::fixed_key;
using testing::prime_cycle;
using testing::read_text;
using testing::snapshot;
using testing::TemporaryDirectory;
using testing::write_text;

std::string text_of(const Bytes& bytes) {
  return std::string(as_text(bytes));
}

TEST(Hex, RoundTripAndStrictness) {
  EXPECT_EQ(to_hex(Bytes{0x00, 0x9f, 0xff}), "009fff");
  EXPECT_EQ(from_hex("009fff"), (Bytes{0x00, 0x9f, 0xff}));
  EXPECT_EQ(from_hex(""), Bytes{});
  for (const char* bad : {"0", "0g", "9F", " 00", "00 ", "0x00"})
    EXPECT_FALSE(from_hex(bad)) << bad;
  EXPECT_EQ(from_hex_any_case("9F"), Bytes{0x9f});
  EXPECT_EQ(parse_digest(std::string(64, 'a'), "x").hex(), std::string(64, 'a'));
  EXPECT_EQ(error_kind([] { parse_digest("aa", "x", ErrorKind::kUsage); }), ErrorKind::kUsage);
}

// RFC 4648 §10.
TEST(Base64, PublishedVectors) {
  const std::pair<const char*, const char*> vectors[] = {{"", ""},
                                                         {"f", "Zg=="},
                                                         {"fo", "Zm8="},
                                                         {"foo", "Zm9v"},
                                                         {"foob", "Zm9vYg=="},
                                                         {"fooba", "Zm9vYmE="},
                                                         {"foobar", "Zm9vYmFy"}};
  for (const auto& [plain, encoded] : vectors) {
    EXPECT_EQ(base64_encode(as_bytes(plain)), encoded);
    ASSERT_TRUE(base64_decode(encoded));
    EXPECT_EQ(text_of(*base64_decode(encoded)), plain);
  }
}

TEST(Base64, OneTextPerByteString) {
  for (const char* bad : {"Zg", "Zg=", "Zh==", "Zm9=", "Z===", "====", "Zg==Zg==", "Zm9v\n", "Zm9 ",
                          "Zm_v", "=g==", "Zg=a"}) {
    EXPECT_FALSE(base64_decode(bad)) << bad;
  }
  for (std::size_t size = 0; size < 70; ++size) {
    const Bytes bytes = prime_cycle(size, 200);
    EXPECT_EQ(base64_decode(base64_encode(bytes)), bytes);
  }
}

TEST(Canonical, WriterAndReaderAgree) {
  Writer writer;
  writer.u8(7);
  writer.u16(0x1234);
  writer.u32(0xdeadbeef);
  writer.u64(0x0123456789abcdefULL);
  writer.str("\xc3\xa9");
  writer.digest(sha256("x"));
  EXPECT_EQ(to_hex(ByteView(writer.data()).first(21)),
            "073412efbeaddeefcdab896745230102000000c3a9");
  Reader reader(writer.data(), "test");
  EXPECT_EQ(reader.u8("a"), 7);
  EXPECT_EQ(reader.u16("b"), 0x1234);
  EXPECT_EQ(reader.u32("c"), 0xdeadbeefU);
  EXPECT_EQ(reader.u64("d"), 0x0123456789abcdefULL);
  EXPECT_EQ(reader.str(2, "e"), "\xc3\xa9");
  EXPECT_EQ(reader.digest("f"), sha256("x"));
  reader.expect_end();
}

TEST(Canonical, ErrorsNameDocumentFieldAndOffset) {
  const Bytes bytes{1, 0, 0, 0};
  std::string message;
  EXPECT_EQ(error_kind(
                [&] {
                  Reader reader(bytes, "thing.bin");
                  reader.u8("flag");
                  reader.u64("size");
                },
                &message),
            ErrorKind::kMalformed);
  EXPECT_NE(message.find("thing.bin"), std::string::npos) << message;
  EXPECT_NE(message.find("size at offset 1"), std::string::npos) << message;
}

TEST(Canonical, LimitsComeBeforeAllocation) {
  const Bytes huge{0xff, 0xff, 0xff, 0xff, 1};
  EXPECT_EQ(error_kind([&] { Reader(huge, "t").bytes(100, "b"); }), ErrorKind::kMalformed);
  EXPECT_EQ(error_kind([&] { Reader(huge, "t").bytes(UINT64_MAX, "b"); }), ErrorKind::kMalformed);
  EXPECT_EQ(error_kind([&] { Reader(huge, "t").count(100, 1, "n"); }), ErrorKind::kMalformed);
  EXPECT_EQ(error_kind([&] { Reader(huge, "t").count(UINT64_MAX, 32, "n"); }),
            ErrorKind::kMalformed);
  EXPECT_EQ(error_kind([&] { Reader(huge, "t").raw(6, "r"); }), ErrorKind::kMalformed);
  EXPECT_EQ(error_kind([&] { Reader(huge, "t").expect_end(); }), ErrorKind::kMalformed);
  const Bytes latin1{1, 0, 0, 0, 0xe9};
  EXPECT_EQ(error_kind([&] { Reader(latin1, "t").str(9, "s"); }), ErrorKind::kMalformed);
}

TEST(Canonical, Utf8) {
  for (const char* good : {"", "abc", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf",
                           "\xee\x80\x80", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(is_utf8(as_bytes(std::string_view(good))))
        << to_hex(as_bytes(std::string_view(good)));
  }
  for (const char* bad :
       {"\x80", "\xc0\x80", "\xc1\xbf", "\xc2", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xe2\x82", "a\xbf"}) {
    EXPECT_FALSE(is_utf8(as_bytes(std::string_view(bad))))
        << to_hex(as_bytes(std::string_view(bad)));
  }
}

// FIPS 180-4 examples and the long one of the NIST vectors.
TEST(Sha256, PublishedVectors) {
  EXPECT_EQ(sha256("").hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc").hex(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq").hex(),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  Sha256 hash;
  const std::string a(1000, 'a');
  for (int i = 0; i < 1000; ++i) hash.update(a);
  EXPECT_EQ(hash.finish().hex(),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  hash.update("abc");  // ready again
  EXPECT_EQ(hash.finish(), sha256("abc"));
  EXPECT_EQ(sha256({as_bytes("a"), as_bytes(""), as_bytes("bc")}), sha256("abc"));
}

TEST(Sha256, ThreadsDoNotDisturbEachOther) {
  const Digest expected = sha256(prime_cycle(3000));
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 500; ++k) wrong += sha256(prime_cycle(3000)) == expected ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(File, ReadRefusesWhatIsNoBoundedRegularFile) {
  const TemporaryDirectory dir;
  write_text(dir.path("f"), "12345");
  EXPECT_EQ(text_of(read_file(dir.path("f"), {.max_bytes = 5})), "12345");
  EXPECT_EQ(error_kind([&] { read_file(dir.path("f"), {.max_bytes = 4}); }), ErrorKind::kMalformed);
  EXPECT_EQ(error_kind([&] { read_file(dir.path("none"), {.max_bytes = 4}); }), ErrorKind::kUsage);
  EXPECT_EQ(error_kind([&] {
              read_file(dir.path("none"), {.max_bytes = 4, .missing = ErrorKind::kCannotJudge});
            }),
            ErrorKind::kCannotJudge);
  EXPECT_EQ(error_kind([&] { read_file(dir.path(), {.max_bytes = 4}); }), ErrorKind::kUsage);
  ASSERT_EQ(mkfifo(dir.path("fifo").c_str(), 0600), 0);
  EXPECT_EQ(error_kind([&] { read_file(dir.path("fifo"), {.max_bytes = 4}); }), ErrorKind::kUsage);
  EXPECT_EQ(error_kind([&] { read_file("/dev/zero", {.max_bytes = 4}); }), ErrorKind::kUsage);
}

TEST(File, WriteReplacesOrFailsAtomically) {
  const TemporaryDirectory dir;
  const std::string path = dir.path("f");
  write_file_atomic(path, std::string_view("one"), 0600);
  struct stat info {};
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  write_file_atomic(path, std::string_view("two"));
  EXPECT_EQ(read_text(path), "two");
  EXPECT_EQ(error_kind(
                [&] { write_file_atomic(path, std::string_view("three"), 0644, IfExists::kFail); }),
            ErrorKind::kUsage);
  EXPECT_EQ(read_text(path), "two");
  write_file_atomic(dir.path("g"), std::string_view("new"), 0644, IfExists::kFail);
  EXPECT_EQ(read_text(dir.path("g")), "new");
  EXPECT_EQ(snapshot(dir.path()).size(), 2U);  // no temporary file left
}

TEST(File, WriteRefusesOddTargets) {
  const TemporaryDirectory dir;
  ASSERT_EQ(symlink("elsewhere", dir.path("link").c_str()), 0);
  for (const std::string& path :
       {dir.path("link"), dir.path(), dir.path("none/f"), std::string(""), dir.path("d/"),
        std::string("/dev/null"), dir.path(std::string(300, 'n'))}) {
    EXPECT_EQ(error_kind([&] { write_file_atomic(path, std::string_view("x")); }),
              ErrorKind::kUsage)
        << path;
    EXPECT_EQ(snapshot(dir.path()).size(), 0U);
  }
  for (const std::string& path : {dir.path("link"), dir.path(), dir.path("none/f")}) {
    EXPECT_EQ(error_kind([&] { check_output_path(path); }), ErrorKind::kUsage) << path;
  }
  check_output_path(dir.path("fine"));
  EXPECT_FALSE(path_exists(dir.path("fine")));
}

// In a child process, because the limit cannot be lifted again.
TEST(File, OutputReplacesNoKeyAndGoesIntoNoLogOrModel) {
  const TemporaryDirectory dir;
  const auto refused = [&](const std::string& name) {
    return error_kind([&] { check_output_path(dir.path(name)); });
  };
  fixed_key("auditor.example", 3).save(dir.path("key.pem"));
  EXPECT_EQ(refused("key.pem"), ErrorKind::kUsage);
  EXPECT_EQ(refused("key.pem.vkey"), ErrorKind::kUsage);
  write_text(dir.path("text"), "one + two + three\n");
  EXPECT_NO_THROW(check_output_path(dir.path("text")));

  std::filesystem::create_directories(dir.path("log/tile/entries/x000"));
  write_text(dir.path("log/checkpoint"), "x");
  write_text(dir.path("log/log.vkey"), "x");
  std::filesystem::create_directories(dir.path("model/sub"));
  write_text(dir.path("model/config.json"), "{}");
  write_text(dir.path("model/model.safetensors.index.json"), "{}");
  for (const char* name : {"log/new", "log/checkpoint", "log/tile/new", "log/tile/entries/x000/000",
                           "model/new", "model/config.json", "model/sub/new"}) {
    EXPECT_EQ(refused(name), ErrorKind::kUsage) << name;
    EXPECT_EQ(error_kind([&] { check_output_place(dir.path(name)); }), ErrorKind::kUsage) << name;
  }
  std::filesystem::create_directory_symlink(dir.path("log"), dir.path("link"));
  EXPECT_EQ(refused("link/new"), ErrorKind::kUsage);
  EXPECT_NO_THROW(check_writable_path(dir.path("log/checkpoint")));
}

TEST(File, FullDiskLeavesTheOldFile) {
  const TemporaryDirectory dir;
  const std::string path = dir.path("f");
  write_file_atomic(path, std::string_view("old"));
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000, 1000};
    setrlimit(RLIMIT_FSIZE, &limit);
    try {
      write_file_atomic(path, prime_cycle(5000));
    } catch (const Error& error) {
      _exit(error.kind() == ErrorKind::kInfrastructure ? 33 : 34);
    }
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 33);
  EXPECT_EQ(snapshot(dir.path()), (std::map<std::string, std::string>{{path, "old"}}));
}

TEST(File, ReadOnlyDirectoryIsInfrastructure) {
  const TemporaryDirectory dir;
  ASSERT_EQ(chmod(dir.path().c_str(), 0555), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (geteuid() == 0 && seteuid(65534) != 0) _exit(35);  // permissions do not bind root
    try {
      check_output_path(dir.path("f"));
      _exit(36);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInfrastructure) _exit(37);
    }
    try {
      write_file_atomic(dir.path("f"), std::string_view("x"));
    } catch (const Error& error) {
      _exit(error.kind() == ErrorKind::kInfrastructure ? 33 : 34);
    }
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 33);
  ASSERT_EQ(chmod(dir.path().c_str(), 0755), 0);
}

TEST(Program, ExitCodesAndMessages) {
  const auto run = [](const std::function<int()>& work) {
    ::testing::internal::CaptureStderr();
    const int code = run_program("bw-test", work);
    return std::pair(code, ::testing::internal::GetCapturedStderr());
  };
  EXPECT_EQ(run([] { return 0; }), std::pair(0, std::string()));
  EXPECT_EQ(run([] { return 1; }), std::pair(1, std::string()));
  EXPECT_EQ(run([]() -> int { throw usage_error("no such flag\nhere"); }),
            std::pair(2, std::string("bw-test: error: no such flag here\n")));
  EXPECT_EQ(run([]() -> int { throw infrastructure_error("x"); }).first, 3);
  EXPECT_EQ(run([]() -> int { throw cannot_judge_error("x"); }).first, 4);
  EXPECT_EQ(run([]() -> int { throw malformed_error("x"); }).first, 5);
  EXPECT_EQ(run([]() -> int { throw std::bad_alloc(); }),
            std::pair(3, std::string("bw-test: error: out of memory\n")));
  EXPECT_EQ(run([]() -> int { throw std::logic_error("x"); }),
            std::pair(3, std::string("bw-test: error: internal error: x\n")));
  EXPECT_EQ(run([]() -> int { throw 1; }).first, 3);
}

TEST(Program, PrintableTextCannotSteerATerminal) {
  EXPECT_EQ(printable("a\x1b[2Jb\n\x7f\xc2\x9b\xc3\xa9\xc2"), "a [2Jb    \xc3\xa9\xc2");
}

}  // namespace
}  // namespace bitwitness
