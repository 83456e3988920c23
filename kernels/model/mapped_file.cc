#include "kernels/model/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <system_error>
#include <utility>

#include "attest/base/error.h"

namespace bitwitness {
namespace {

// A file descriptor, closed at the end of its scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { ::close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void fail(const std::filesystem::path& path, const char* what, int error) {
  const std::string message =
      path.string() + ": " + what + ": " + std::generic_category().message(error);
  switch (error) {
    case ENOENT:
    case ENOTDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case EACCES:
    case EPERM:
    case EISDIR:
    case EINVAL:
    case ENXIO:
      throw usage_error(message);
    default:
      throw infrastructure_error(message);
  }
}

// Opens a regular file for reading. O_NONBLOCK so that a named pipe is refused instead of waited
// for.
int open_regular(const std::filesystem::path& path, std::size_t* size) {
  const std::string name = path.string();
  if (name.find('\0') != std::string::npos) {
    throw usage_error("file name with a zero byte in it: " + name.substr(0, name.find('\0')));
  }
  int fd = -1;
  do {
    fd = ::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) fail(path, "cannot open", errno);
  struct stat status {};
  if (::fstat(fd, &status) != 0) {
    const int error = errno;
    ::close(fd);
    fail(path, "cannot stat", error);
  }
  if (!S_ISREG(status.st_mode)) {
    ::close(fd);
    throw usage_error(name + ": " +
                      (S_ISDIR(status.st_mode) ? "is a directory" : "is not a regular file") +
                      "; a file is needed here");
  }
  if (static_cast<std::uintmax_t>(status.st_size) > std::numeric_limits<std::size_t>::max() / 2) {
    ::close(fd);
    throw usage_error(name + ": too large to map");
  }
  *size = static_cast<std::size_t>(status.st_size);
  return fd;
}

// Advice about the pages that hold these bytes. Advice only: whether it is taken changes no value.
void advise(std::span<const std::byte> bytes, int advice) noexcept {
  if (bytes.empty()) return;
  const long page = ::sysconf(_SC_PAGESIZE);
  if (page <= 0) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
  const std::uintptr_t skew = begin % static_cast<std::uintptr_t>(page);
  auto* start = const_cast<std::byte*>(bytes.data()) - skew;
  static_cast<void>(::madvise(start, bytes.size() + skew, advice));
}

}  // namespace

MappedFile MappedFile::open(const std::filesystem::path& path) {
  MappedFile file;
  file.path_ = path;
  std::size_t size = 0;
  file.fd_ = open_regular(path, &size);
  struct stat status {};
  if (::fstat(file.fd_, &status) != 0) fail(path, "cannot stat", errno);
  file.modified_s_ = status.st_mtim.tv_sec;
  file.modified_ns_ = status.st_mtim.tv_nsec;
  if (size == 0) return file;
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd_, 0);
  // MAP_FAILED is a C-style cast in the system's header: compare as an integer.
  if (reinterpret_cast<std::intptr_t>(address) == -1) {
    throw infrastructure_error(path.string() +
                               ": cannot map: " + std::generic_category().message(errno));
  }
  file.data_ = static_cast<const std::byte*>(address);
  file.size_ = size;
  return file;
}

bool MappedFile::changed() const {
  if (fd_ < 0) return false;
  struct stat status {};
  return ::fstat(fd_, &status) != 0 || static_cast<std::size_t>(status.st_size) != size_ ||
         status.st_mtim.tv_sec != modified_s_ || status.st_mtim.tv_nsec != modified_ns_;
}

MappedFile::MappedFile(MappedFile&& other) noexcept {
  *this = std::move(other);
}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    fd_ = std::exchange(other.fd_, -1);
    modified_s_ = other.modified_s_;
    modified_ns_ = other.modified_ns_;
    path_ = std::move(other.path_);
  }
  return *this;
}

MappedFile::~MappedFile() {
  release();
}

void MappedFile::release() noexcept {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
  if (fd_ >= 0) ::close(fd_);
  data_ = nullptr;
  size_ = 0;
  fd_ = -1;
}

void prefetch_mapped(std::span<const std::byte> bytes) noexcept {
  advise(bytes, MADV_WILLNEED);
}

void release_mapped(std::span<const std::byte> bytes) noexcept {
  // Nothing is ever written to these private mappings, so what is dropped is in the file, and pages
  // shared with a neighbour may go, too.
  advise(bytes, MADV_DONTNEED);
}

std::string read_file_bounded(const std::filesystem::path& path, std::size_t max_bytes) {
  std::size_t size = 0;
  const Descriptor fd(open_regular(path, &size));
  const auto too_large = [&] {
    return usage_error(path.string() + ": larger than the " + std::to_string(max_bytes) +
                       " bytes allowed for this kind of file");
  };
  if (size > max_bytes) throw too_large();
  std::string text(size, '\0');
  std::size_t done = 0;
  while (done < size) {
    const ssize_t got = ::read(fd.get(), text.data() + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path, "cannot read", errno);
    if (got == 0) {
      throw infrastructure_error(path.string() + ": became shorter while it was read");
    }
    done += static_cast<std::size_t>(got);
  }
  return text;
}

}  // namespace bitwitness
