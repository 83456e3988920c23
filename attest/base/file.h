// Whole files: bounded reading and atomic, durable writing.
//
// Kinds of error: a path that cannot mean what the caller wants (absent, a directory, a device, a
// name that is too long) is `missing` when reading and usage when writing; everything the disk
// refuses (no permission, read-only, full, I/O) is infrastructure.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/base/error.h"

namespace bitwitness {

struct ReadLimits {
  std::uint64_t max_bytes;                      // inclusive
  ErrorKind missing = ErrorKind::kUsage;        // absent, or not a regular file
  ErrorKind too_large = ErrorKind::kMalformed;  // more than max_bytes
};

// The whole file. Only regular files (through symbolic links, if any): a FIFO or device is refused,
// so that reading cannot hang. The size is checked before allocation and again while reading.
Bytes read_file(const std::string& path, const ReadLimits& limits);

// The same, or standard input to its end when `path` is "-".
Bytes read_file_or_stdin(const std::string& path, const ReadLimits& limits);

enum class IfExists { kReplace, kFail };  // kFail: a usage Error, atomically (two racers: one wins)

// Writes a temporary file in the same directory, fsyncs it, renames it over `path` and fsyncs the
// directory. After a crash or an error `path` is either as before or complete; the temporary file
// is removed on error. A `path` that is a symbolic link, directory or device is refused: it would
// be replaced, which is never what was meant.
void write_file_atomic(const std::string& path, ByteView bytes, unsigned mode = 0644,
                       IfExists if_exists = IfExists::kReplace);
inline void write_file_atomic(const std::string& path, std::string_view text, unsigned mode = 0644,
                              IfExists if_exists = IfExists::kReplace) {
  write_file_atomic(path, as_bytes(text), mode, if_exists);
}

// Throws what write_file_atomic(path) would throw for reasons visible beforehand (no such
// directory, not writable, a directory in the way), so that a long run need not end in vain.
void check_writable_path(const std::string& path);
// A usage Error if the path lies inside a log, which is published as it stands, or inside a model's
// directory. Nothing need exist there.
void check_output_place(const std::string& path);
// Both for an output that a user named; and a usage Error if the file is there and holds a
// private or verifier key.
void check_output_path(const std::string& path);

// A path and what it is to the user, e.g. {"--out", "run.bwrec"}.
struct NamedPath {
  std::string name;
  std::string path;
};

// Throws a usage Error naming both if two outputs are one file, or an output is one of the inputs
// or lies inside one that is a directory: writing it would destroy the other. Links are resolved.
void check_distinct_paths(const std::vector<NamedPath>& outputs,
                          const std::vector<NamedPath>& inputs);

// Creates the directory and its parents (mode 0755) and fsyncs the parent of each one made.
void make_directories(const std::string& path);

bool path_exists(const std::string& path);

}  // namespace bitwitness
