#include "kernels/model/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/model/expect_error.h"
#include "tests/kernels/model/safetensors_writer.h"

namespace bitwitness {
namespace {

using test::expect_error;
using test::header_member;
using test::raw_safetensors;
using test::RawTensor;
using test::safetensors_bytes;

class Safetensors : public testing::Test {
 protected:
  std::filesystem::path write(std::string_view bytes) {
    const auto path = dir_.path() / "weights.safetensors";
    // A new file each time: an old one may still be mapped.
    std::filesystem::remove(path);
    test::write_file(path, bytes);
    return path;
  }
  void expect_refused(std::string_view bytes, std::initializer_list<std::string_view> parts) {
    const auto path = write(bytes);
    expect_error(ErrorKind::kUsage, parts, [&] { SafetensorsFile::open(path); });
    expect_error(ErrorKind::kUsage, {"weights.safetensors"}, [&] { SafetensorsFile::open(path); });
  }

  test::TempDir dir_;
};

std::string bytes_of(const TensorView& view) {
  return std::string(reinterpret_cast<const char*>(view.data), view.bytes);
}

TEST_F(Safetensors, ReadsTensorsInAnyOrder) {
  auto file = SafetensorsFile::open(write(safetensors_bytes({{"z", "F32", {2, 1}, "abcdefgh"},
                                                             {"a", "BF16", {3}, "012345"},
                                                             {"empty", "F32", {0, 7}, ""},
                                                             {"scalar", "F16", {}, "xy"}})));
  ASSERT_EQ(file.entries().size(), 4U);
  EXPECT_EQ(file.entries()[0].name, "a");
  EXPECT_EQ(file.entries()[3].name, "z");
  EXPECT_EQ(file.find("b"), nullptr);
  const TensorView z = file.view(*file.find("z"));
  EXPECT_EQ(z.dtype, Dtype::kFp32);
  EXPECT_EQ(z.shape, (std::vector<std::uint64_t>{2, 1}));
  EXPECT_EQ(bytes_of(z), "abcdefgh");
  EXPECT_EQ(bytes_of(file.view(*file.find("a"))), "012345");
  EXPECT_EQ(file.view(*file.find("empty")).bytes, 0U);
  const TensorView scalar = file.view(*file.find("scalar"));
  EXPECT_EQ(scalar.dtype, Dtype::kFp16);
  EXPECT_TRUE(scalar.shape.empty());
  EXPECT_EQ(bytes_of(scalar), "xy");
}

TEST_F(Safetensors, ViewsOutliveAMove) {
  auto file = SafetensorsFile::open(write(safetensors_bytes({{"a", "F32", {1}, "abcd"}})));
  const TensorView view = file.view(*file.find("a"));
  const SafetensorsFile moved = std::move(file);
  EXPECT_EQ(bytes_of(view), "abcd");
  EXPECT_EQ(moved.entries().size(), 1U);
}

TEST_F(Safetensors, MisalignedTensorsAreCopiedOnce) {
  // A one-byte tensor first, then headers of every length modulo 8.
  for (std::size_t pad = 0; pad < 8; ++pad) {
    const std::string name = "t" + std::string(pad, 'x');
    auto file = SafetensorsFile::open(write(safetensors_bytes(
        {{"byte", "U8", {1}, "!"}, {name, "F32", {2}, "abcdefgh"}, {"h", "BF16", {1}, "ij"}}, 1)));
    for (const char* each : {name.c_str(), "h"}) {
      const TensorView view = file.view(*file.find(each));
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.data) % dtype_bytes(view.dtype), 0U);
    }
    EXPECT_EQ(bytes_of(file.view(*file.find(name))), "abcdefgh");
    EXPECT_EQ(bytes_of(file.view(*file.find("h"))), "ij");
  }
}

TEST_F(Safetensors, OtherTypesAreRefusedByNameWhenWanted) {
  for (const auto& [dtype, size] : {std::pair("F64", 8), std::pair("I64", 8), std::pair("I8", 1),
                                    std::pair("BOOL", 1), std::pair("F8_E4M3", 1)}) {
    auto file = SafetensorsFile::open(write(safetensors_bytes(
        {{"odd.weight", dtype, {1}, std::string(static_cast<std::size_t>(size), 'x')}})));
    expect_error(ErrorKind::kUsage, {"odd.weight", dtype, "weights.safetensors"},
                 [&] { file.view(*file.find("odd.weight")); });
  }
}

TEST_F(Safetensors, FileWithoutTensors) {
  EXPECT_TRUE(SafetensorsFile::open(write(raw_safetensors("{}", ""))).entries().empty());
  EXPECT_TRUE(SafetensorsFile::open(write(raw_safetensors(R"({"__metadata__":{}})", "")))
                  .entries()
                  .empty());
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
  const std::string whole =
      safetensors_bytes({{"a", "F32", {2}, "abcdefgh"}, {"b", "BF16", {2, 2}, "ijklmnop"}});
  for (std::size_t size = 0; size < whole.size(); ++size) {
    expect_refused(whole.substr(0, size), {});
  }
  expect_refused(whole + "x", {"1 bytes after the last tensor"});
}

TEST_F(Safetensors, TruncatedRealFileIsRefused) {
  const std::string whole = test::read_file(std::filesystem::path(BW_TEST_DATA_DIR) /
                                            "models/zoo/llama31-ropescale/model.safetensors");
  for (std::size_t size = 0; size < whole.size(); size += 4093) {
    expect_refused(whole.substr(0, size), {});
  }
  expect_refused(whole.substr(0, whole.size() - 1), {"outside"});
}

TEST_F(Safetensors, HeaderLength) {
  const auto with_length = [](std::uint64_t length, std::string_view rest) {
    std::string file(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>((length >> (8 * i)) & 0xFF);
    return file + std::string(rest);
  };
  expect_refused(with_length(0, ""), {"begin with '{'"});
  expect_refused(with_length(1, "{"), {"not valid JSON"});
  expect_refused(with_length(3, "{}"), {"does not fit"});
  expect_refused(with_length(100'000'000, "{}"), {"does not fit"});
  expect_refused(with_length(100'000'001, "{}"), {"100000001"});
  for (const std::uint64_t huge :
       {UINT64_MAX, UINT64_MAX - 7, UINT64_MAX - 8, std::uint64_t{1} << 63}) {
    expect_refused(with_length(huge, "{}"), {"header"});
  }
  expect_refused(raw_safetensors(" {}", ""), {"begin with '{'"});
  expect_refused(raw_safetensors("[]", ""), {"begin with '{'"});
  expect_refused(raw_safetensors("{}{}", ""), {"not valid JSON"});
  EXPECT_NO_THROW(SafetensorsFile::open(write(raw_safetensors("{}   ", ""))));
  expect_refused(raw_safetensors(std::string("{}\0", 3), ""), {"not valid JSON"});
}

TEST_F(Safetensors, HeaderOf100MegabytesIsHandled) {
  // As large as the format allows and valid: spaces only. One byte more is refused unread.
  std::string header = "{}";
  header.resize(SafetensorsFile::kMaxHeaderBytes, ' ');
  EXPECT_NO_THROW(SafetensorsFile::open(write(raw_safetensors(header, ""))));
  header += ' ';
  expect_refused(raw_safetensors(header, ""), {"100000001"});
  // Hostile content of that size ends at a limit, long before the memory for 50 million values.
  std::string values = "{\"a\":[";
  while (values.size() < 20'000'000) values += "0,";
  expect_refused(raw_safetensors(values, ""), {"more than 2000000 values"});
  expect_refused(raw_safetensors("{\"a\":" + std::string(10'000'000, '['), ""), {"nested deeper"});
}

TEST_F(Safetensors, TensorCount) {
  const auto header = [](std::size_t count) {
    std::string text = "{";
    for (std::size_t i = 0; i < count; ++i) {
      if (i > 0) text += ',';
      text += header_member("t" + std::to_string(i), "F32", {0}, 0, 0);
    }
    return text + "}";
  };
  EXPECT_EQ(SafetensorsFile::open(write(raw_safetensors(header(100'000), ""))).entries().size(),
            100'000U);
  expect_refused(raw_safetensors(header(100'001), ""), {"100001 tensors"});
  expect_refused(raw_safetensors(header(400'000), ""), {"values"});
}

TEST_F(Safetensors, OverlapsAndHolesAreNamed) {
  const std::string data(16, 'x');
  const auto two = [&](std::uint64_t b0, std::uint64_t e0, std::uint64_t b1, std::uint64_t e1) {
    return raw_safetensors("{" + header_member("first", "U8", {e0 - b0}, b0, e0) + "," +
                               header_member("second", "U8", {e1 - b1}, b1, e1) + "}",
                           data);
  };
  EXPECT_NO_THROW(SafetensorsFile::open(write(two(0, 8, 8, 16))));
  EXPECT_NO_THROW(SafetensorsFile::open(write(two(8, 16, 0, 8))));
  EXPECT_NO_THROW(SafetensorsFile::open(write(two(0, 0, 0, 16))));
  expect_refused(two(0, 9, 8, 16), {"\"first\" and \"second\" overlap"});
  expect_refused(two(0, 16, 0, 16), {"overlap"});
  expect_refused(two(0, 16, 4, 8), {"\"first\" and \"second\" overlap"});
  expect_refused(two(0, 7, 8, 16), {"1 bytes of data before tensor \"second\""});
  expect_refused(two(1, 8, 8, 16), {"1 bytes of data before tensor \"first\""});
  expect_refused(two(0, 8, 8, 15), {"1 bytes after the last tensor"});
  expect_refused(two(0, 16, 4, 4), {"overlap"});  // an empty tensor inside another
}

TEST_F(Safetensors, EveryBadFieldNamesItsTensor) {
  const std::string data(16, 'x');
  const auto one = [&](const std::string& value) {
    return raw_safetensors(R"({"bad.weight":)" + value + "}", data);
  };
  const auto fields = [&](const std::string& dtype, const std::string& shape,
                          const std::string& offsets) {
    return one(R"({"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
               "}");
  };
  EXPECT_NO_THROW(SafetensorsFile::open(write(fields("\"F32\"", "[2,2]", "[0,16]"))));
  const auto refused = [&](const std::string& file, std::string_view part) {
    expect_refused(file, {"\"bad.weight\"", part});
  };
  refused(one("7"), "object");
  refused(one("{}"), "dtype");
  refused(one(R"({"dtype":"F32","data_offsets":[0,16]})"), "shape");
  refused(one(R"({"dtype":"F32","shape":[4]})"), "data_offsets");
  refused(one(R"({"dtype":"F32","shape":[4],"data_offsets":[0,16],"extra":1})"), "\"extra\"");
  refused(fields("\"F33\"", "[4]", "[0,16]"), "\"F33\"");
  refused(fields("4", "[4]", "[0,16]"), "dtype");
  refused(fields("\"BF16\"", "[4]", "[0,16]"), "needs 8");
  refused(fields("\"F32\"", "[3]", "[0,16]"), "needs 12");
  refused(fields("\"F32\"", "[]", "[0,16]"), "needs 4");
  refused(fields("\"F32\"", "[0]", "[0,16]"), "needs 0");
  refused(fields("\"F32\"", "[-4]", "[0,16]"), "-4");
  refused(fields("\"F32\"", "[4.0]", "[0,16]"), "4.0");
  refused(fields("\"F32\"", "[\"4\"]", "[0,16]"), "dimension");
  refused(fields("\"F32\"", "4", "[0,16]"), "shape");
  refused(fields("\"F32\"", "[1,1,1,1,1,1,1,1,4]", "[0,16]"), "9 dimensions");
  refused(fields("\"F32\"", "[4294967296,4294967296]", "[0,16]"), "overflows");
  refused(fields("\"F32\"", "[4611686018427387905]", "[0,16]"), "overflows");  // 4 * this == 4
  refused(fields("\"F32\"", "[18446744073709551616]", "[0,16]"), "dimension");
  refused(fields("\"F32\"", "[4]", "[16,0]"), "backwards");
  refused(fields("\"F32\"", "[4]", "[4,20]"), "outside");
  refused(fields("\"F32\"", "[4]", "[18446744073709551600,18446744073709551615]"), "outside");
  refused(fields("\"F32\"", "[4]", "[-16,0]"), "data_offsets");
  refused(fields("\"F32\"", "[4]", "[0,16,16]"), "data_offsets");
  refused(fields("\"F32\"", "[4]", "16"), "data_offsets");
}

TEST_F(Safetensors, NamesAndMetadata) {
  const std::string member = header_member("twin", "F32", {0}, 0, 0);
  expect_refused(raw_safetensors("{" + member + "," + member + "}", ""), {"\"twin\"", "twice"});
  expect_refused(raw_safetensors("{" + header_member("", "F32", {0}, 0, 0) + "}", ""),
                 {"empty name"});
  expect_refused(
      raw_safetensors("{" + header_member(std::string(1025, 'n'), "F32", {0}, 0, 0) + "}", ""),
      {"1025"});
  expect_refused(raw_safetensors("{" + header_member("a\\u001bb", "F32", {0}, 0, 0) + "}", ""),
                 {"a?b", "control character"});
  expect_refused(raw_safetensors(R"({"__metadata__":{"a":1}})", ""), {"__metadata__", "\"a\""});
  expect_refused(raw_safetensors(R"({"__metadata__":[]})", ""), {"__metadata__"});
  expect_refused(raw_safetensors(R"({"__metadata__":{"a":"b","a":"c"}})", ""), {"twice"});
}

TEST_F(Safetensors, RandomBytesNeverPass) {
  std::uint32_t state = 12345;
  const auto next = [&] { return state = state * 1664525U + 1013904223U; };
  const std::string whole =
      safetensors_bytes({{"a", "F32", {2}, "abcdefgh"}, {"b", "BF16", {2, 2}, "ijklmnop"}});
  for (int round = 0; round < 300; ++round) {
    std::string noise((next() >> 8) % 300, '\0');
    for (char& c : noise) c = static_cast<char>(next() >> 24);
    expect_refused(noise, {});
    expect_refused(raw_safetensors("{" + noise, ""), {});
    // One header byte changed: either refused, or the file still tiles and every view is inside it.
    std::string changed = whole;
    changed[(next() >> 8) % (whole.size() - 16)] = static_cast<char>(next() >> 24);
    const auto path = write(changed);
    try {
      auto file = SafetensorsFile::open(path);
      std::size_t total = 0;
      for (const auto& entry : file.entries())
        total += static_cast<std::size_t>(entry.end - entry.begin);
      EXPECT_EQ(total, 16U);
    } catch (const Error& error) {
      EXPECT_EQ(exit_code(error.kind()), ExitCode::kUsage) << error.what();
    }
  }
}

TEST_F(Safetensors, PathsThatAreNoFiles) {
  const auto refused = [&](const std::filesystem::path& path, std::string_view part) {
    expect_error(ErrorKind::kUsage, {path.filename().string(), part},
                 [&] { SafetensorsFile::open(path); });
  };
  refused(dir_.path() / "missing", "No such file");
  std::filesystem::create_directory(dir_.path() / "folder");
  refused(dir_.path() / "folder", "directory");
  std::filesystem::create_symlink("loop", dir_.path() / "loop");
  refused(dir_.path() / "loop", "symbolic links");
  test::write_file(dir_.path() / "nothing", "");
  refused(dir_.path() / "nothing", "0 bytes");
  refused(dir_.path() / "nothing" / "below", "Not a directory");
  refused("/dev/null", "not a regular file");
}

}  // namespace
}  // namespace bitwitness
