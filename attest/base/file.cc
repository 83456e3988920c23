#include "attest/base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "attest/base/hex.h"
#include "attest/base/random.h"

namespace bitwitness {
namespace {

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }
  // close(2) reports delayed write errors on some file systems.
  bool close() {
    const int fd = fd_;
    fd_ = -1;
    return ::close(fd) == 0;
  }

 private:
  int fd_;
};

// The path itself is wrong, as against: the disk refused.
bool is_path_problem(int error) {
  return error == ENOENT || error == ENOTDIR || error == EISDIR || error == ENAMETOOLONG ||
         error == ELOOP || error == EINVAL;
}

[[noreturn]] void fail_write(const std::string& path, const char* action, int error) {
  std::string hint;
  if (error == ENOENT) hint = "; create the directory first";
  if (error == ENOSPC || error == EFBIG || error == EDQUOT) hint = "; make room and run again";
  if (error == EACCES || error == EROFS || error == EPERM) hint = "; choose a writable place";
  throw Error(is_path_problem(error) ? ErrorKind::kUsage : ErrorKind::kInfrastructure,
              path + ": cannot " + action + ": " + std::strerror(error) + hint);
}

std::string parent_of(const std::string& path) {
  const std::size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

void sync_directory(const std::string& dir) {
  const Fd fd(::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems cannot sync a directory; EINVAL says so and nothing better exists there.
  if (fd.get() < 0 || (::fsync(fd.get()) != 0 && errno != EINVAL)) {
    fail_write(dir, "make the new file name durable", errno);
  }
}

// Removes the temporary file unless the write went through.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string path) : path_(std::move(path)) {}
  ~TemporaryFile() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }
  void keep() { path_.clear(); }

 private:
  std::string path_;
};

void refuse_odd_target(const std::string& path) {
  if (path.empty() || path.back() == '/') {
    throw usage_error("'" + path + "': not a file name; name the file to write");
  }
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return;
    fail_write(path, "write the file", errno);
  }
  if (S_ISDIR(info.st_mode)) throw usage_error(path + ": is a directory; name the file to write");
  if (!S_ISREG(info.st_mode)) {
    throw usage_error(path +
                      ": is no regular file (link, device or pipe) and would be replaced; "
                      "name another file");
  }
}

}  // namespace

Bytes read_file(const std::string& path, const ReadLimits& limits) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) {
    const int error = errno;
    throw Error(is_path_problem(error) ? limits.missing : ErrorKind::kInfrastructure,
                path + ": cannot open: " + std::strerror(error));
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) {
    throw infrastructure_error(path + ": cannot examine: " + std::strerror(errno));
  }
  if (!S_ISREG(info.st_mode)) {
    throw Error(limits.missing, path + ": not a regular file");
  }
  const auto size = static_cast<std::uint64_t>(info.st_size);
  const auto refuse_size = [&](const std::string& found) {
    throw Error(limits.too_large, path + ": " + found + ", more than the limit of " +
                                      std::to_string(limits.max_bytes));
  };
  if (size > limits.max_bytes) refuse_size(std::to_string(size) + " bytes");
  Bytes bytes(size);
  std::uint64_t done = 0;
  while (done < size) {
    const ssize_t got = ::read(fd.get(), bytes.data() + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw infrastructure_error(path + ": cannot read: " + std::strerror(errno));
    if (got == 0) break;  // shrank meanwhile: what is there is what counts
    done += static_cast<std::uint64_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

void write_file_atomic(const std::string& path, ByteView bytes, unsigned mode, IfExists if_exists) {
  refuse_odd_target(path);
  if (if_exists == IfExists::kFail && path_exists(path)) {
    throw usage_error(path + ": exists already and is not replaced");
  }
  TemporaryFile temporary(path + ".tmp-" + to_hex(random_bytes(8)));
  {
    // O_EXCL neither follows a link nor re-uses what somebody prepared under that name.
    Fd fd(::open(temporary.path().c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                 static_cast<mode_t>(mode)));
    if (fd.get() < 0) {
      const int error = errno;
      temporary.keep();
      fail_write(path, "create the file", error);
    }
    std::uint64_t done = 0;
    while (done < bytes.size()) {
      const ssize_t put = ::write(fd.get(), bytes.data() + done, bytes.size() - done);
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) fail_write(path, "write the file", errno);
      done += static_cast<std::uint64_t>(put);
    }
    if (::fsync(fd.get()) != 0) fail_write(path, "make the file durable", errno);
    if (!fd.close()) fail_write(path, "close the file", errno);
  }
  if (if_exists == IfExists::kFail) {
    // link(2) fails if the name exists, which rename(2) does not.
    if (::link(temporary.path().c_str(), path.c_str()) != 0) {
      if (errno == EEXIST) throw usage_error(path + ": exists already and is not replaced");
      fail_write(path, "name the file", errno);
    }
  } else {
    if (::rename(temporary.path().c_str(), path.c_str()) != 0) {
      fail_write(path, "name the file", errno);
    }
    temporary.keep();
  }
  sync_directory(parent_of(path));
}

void check_output_path(const std::string& path) {
  refuse_odd_target(path);
  const std::string parent = parent_of(path);
  struct stat info {};
  if (::stat(parent.c_str(), &info) != 0) fail_write(path, "write the file", errno);
  if (!S_ISDIR(info.st_mode)) fail_write(path, "write the file", ENOTDIR);
  // AT_EACCESS: with the rights that the write will have.
  if (::faccessat(AT_FDCWD, parent.c_str(), W_OK | X_OK, AT_EACCESS) != 0) {
    fail_write(path, "write the file", errno);
  }
}

void make_directories(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) {
    if (!S_ISDIR(info.st_mode)) fail_write(path, "make the directory", ENOTDIR);
    return;
  }
  if (errno != ENOENT) fail_write(path, "make the directory", errno);
  const std::string parent = parent_of(path);
  make_directories(parent);
  if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) {
    fail_write(path, "make the directory", errno);
  }
  sync_directory(parent);
}

bool path_exists(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}

}  // namespace bitwitness
