#include "attest/base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>

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

[[noreturn]] void refuse_size(const std::string& path, const std::string& found,
                              const ReadLimits& limits) {
  throw Error(limits.too_large,
              path + ": " + found + ", more than the limit of " + std::to_string(limits.max_bytes));
}

// Reads to the end, whatever size the system gave: files in /proc say 0, pipes have none.
Bytes read_to_end(int fd, const std::string& path, std::uint64_t expected,
                  const ReadLimits& limits) {
  Bytes bytes(expected + 1);
  std::uint64_t done = 0;
  while (true) {
    if (done > limits.max_bytes) refuse_size(path, "more bytes", limits);
    if (done == bytes.size()) bytes.resize(std::min(2 * done, limits.max_bytes + 1));
    const ssize_t got = ::read(fd, bytes.data() + done, bytes.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw infrastructure_error(path + ": cannot read: " + std::strerror(errno));
    if (got == 0) break;
    done += static_cast<std::uint64_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

// The absolute path with links resolved as far as it exists.
std::filesystem::path resolved(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::path whole = std::filesystem::absolute(path, ignored);
  const std::filesystem::path canonical = std::filesystem::weakly_canonical(whole, ignored);
  return canonical.empty() ? whole : canonical;
}

bool is_inside(const std::filesystem::path& path, const std::filesystem::path& dir) {
  return std::mismatch(dir.begin(), dir.end(), path.begin(), path.end()).first == dir.end();
}

// "name+xxxxxxxx+base64": a verifier key as C2SP signed notes write it.
bool is_verifier_key(std::string_view text) {
  const std::size_t first = text.find('+');
  if (first == 0 || first == std::string_view::npos) return false;
  const std::string_view id = text.substr(first + 1, 9);
  return id.size() == 9 && id[8] == '+' &&
         id.substr(0, 8).find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// A key is never replaced by output: whoever names one there meant something else.
void refuse_key(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  char head[300];  // a key's name has at most 255 bytes
  const ssize_t count = fd.get() < 0 ? -1 : ::read(fd.get(), head, sizeof head);
  if (count <= 0) return;
  const std::string_view text(head, static_cast<std::size_t>(count));
  if (text.starts_with("-----BEGIN") || is_verifier_key(text)) {
    throw usage_error(path + ": is a key and would be replaced; name another file");
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
  if (size > limits.max_bytes) refuse_size(path, std::to_string(size) + " bytes", limits);
  return read_to_end(fd.get(), path, size, limits);
}

Bytes read_file_or_stdin(const std::string& path, const ReadLimits& limits) {
  if (path != "-") return read_file(path, limits);
  return read_to_end(STDIN_FILENO, "standard input", 0, limits);
}

void write_file_atomic(const std::string& path, ByteView bytes, unsigned mode, IfExists if_exists) {
  refuse_odd_target(path);
  if (if_exists == IfExists::kFail && path_exists(path)) {
    throw usage_error(path + ": exists already and is not replaced");
  }
  // A short name of its own: one made from `path` could be too long.
  TemporaryFile temporary(parent_of(path) + "/.bw-tmp-" + to_hex(random_bytes(8)));
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

void check_output_place(const std::string& path) {
  constexpr int kLogDepth = 5;    // LOG/tile/entries/x000/000
  constexpr int kModelDepth = 2;  // MODEL/DIR/file
  std::filesystem::path dir = resolved(path).parent_path();
  for (int depth = 1; depth <= kLogDepth && dir.has_relative_path(); ++depth) {
    const auto has = [&](const char* name) { return path_exists((dir / name).string()); };
    const char* what = nullptr;
    if (has("checkpoint") && has("log.vkey")) what = "log";
    if (depth <= kModelDepth && has("config.json") &&
        (has("model.safetensors") || has("model.safetensors.index.json"))) {
      what = "model";
    }
    if (what != nullptr) {
      throw usage_error(path + ": lies inside the " + what + " " + dir.string() +
                        "; name another place");
    }
    dir = dir.parent_path();
  }
}

void check_output_path(const std::string& path) {
  refuse_odd_target(path);
  refuse_key(path);
  check_output_place(path);
  check_writable_path(path);
}

void check_writable_path(const std::string& path) {
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

void check_distinct_paths(const std::vector<NamedPath>& outputs,
                          const std::vector<NamedPath>& inputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const std::filesystem::path output = resolved(outputs[i].path);
    const auto refuse = [&](const NamedPath& other, const char* how) {
      throw usage_error(outputs[i].name + " " + outputs[i].path + how + other.name + " " +
                        other.path + "; name another file");
    };
    for (std::size_t k = 0; k < i; ++k) {
      if (output == resolved(outputs[k].path)) refuse(outputs[k], ": is also ");
    }
    for (const NamedPath& input : inputs) {
      if (input.path.empty()) continue;  // an option that was not given
      const std::filesystem::path other = resolved(input.path);
      if (output == other) refuse(input, ": is also ");
      std::error_code ignored;
      if (std::filesystem::is_directory(other, ignored) && is_inside(output, other)) {
        refuse(input, ": lies inside ");
      }
    }
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
