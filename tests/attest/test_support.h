// Shared by the tests of attest/: a temporary directory, a small honest record, hostile variations.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>

#include "attest/base/bytes.h"
#include "attest/base/error.h"
#include "attest/record.h"

namespace bitwitness::testing {

// An empty directory, removed with everything in it at the end.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  std::string path(const std::string& name = "") const;

 private:
  std::filesystem::path dir_;
};

// Bytes that cycle through a prime number of values.
Bytes prime_cycle(std::size_t size, std::size_t start = 0);

std::string read_text(const std::string& path);
void write_text(const std::string& path, std::string_view text);
// Every regular file below `dir` with its content, to see that nothing changed.
std::map<std::string, std::string> snapshot(const std::string& dir);

// The kind of the Error that `work` throws; fails the test (and returns nullopt) if it throws none.
std::optional<ErrorKind> error_kind(const std::function<void()>& work,
                                    std::string* message = nullptr);

// A key that is always the same: seed = 32 times `fill`.
SigningKey fixed_key(const std::string& name, std::uint8_t fill);

// A small honest record: 2 layers, 3 prompt tokens, 2 emitted ones, rows of 8, key-values of 4,
// vocabulary 11, one tensor; rows are made up but committed truly. Always the same bytes.
struct SampleRun {
  Trace trace;
  Bytes rows;  // Evidence::rows
  Record record;
};
SampleRun sample_run(EvidenceLevel level = EvidenceLevel::kNone);

}  // namespace bitwitness::testing
