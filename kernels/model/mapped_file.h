// Read-only access to files of the model directory: whole-file mappings for weights, bounded reads
// for small files. Both follow symbolic links (model caches are made of them) and accept regular
// files only.
//
// Errors: kUsage when the path is missing, a loop of links, a directory, not a regular file or not
// readable; kInfrastructure when the system fails. Messages name the path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace bitwitness {

// A private read-only mapping of a whole file; empty files give an empty span. Pages are loaded
// when touched. The file must not be truncated while mapped: the system then ends the process at
// the next touch. Moving keeps every pointer into the mapping valid.
class MappedFile {
 public:
  static MappedFile open(const std::filesystem::path& path);

  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {data_, size_}; }

  // Whether the file was written to since it was opened, by its size and time of modification. What
  // was computed from a file that changed belongs to no state of it.
  bool changed() const;
  const std::filesystem::path& path() const { return path_; }

 private:
  void release() noexcept;

  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  int fd_ = -1;  // kept for changed()
  std::int64_t modified_s_ = 0, modified_ns_ = 0;
  std::filesystem::path path_;
};

// Asks the system to start reading these mapped bytes. A hint: never fails, changes no value.
void prefetch_mapped(std::span<const std::byte> bytes) noexcept;

// Tells the system that this process does not need the pages of these mapped bytes for now: they
// leave its memory and come back, with the file's bytes, when touched. A hint, as above.
void release_mapped(std::span<const std::byte> bytes) noexcept;

// The whole file as bytes; a file longer than max_bytes is refused before memory is taken (kUsage).
std::string read_file_bounded(const std::filesystem::path& path, std::size_t max_bytes);

}  // namespace bitwitness
