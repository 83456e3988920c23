#include "prover/listen_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>

#include "attest/base/error.h"

namespace bitwitness {

ListenAddress ListenAddress::parse(const std::string& text) {
  const auto bad = [&](const std::string& why) {
    return usage_error("--listen '" + text.substr(0, 100) + "': " + why +
                       "; use HOST:PORT, e.g. 127.0.0.1:7433");
  };
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos) throw bad("no port");
  std::string host = text.substr(0, colon);
  const std::string port = text.substr(colon + 1);
  ListenAddress out;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), out.port);
  if (port.empty() || error != std::errc() || end != port.data() + port.size()) {
    throw bad("the port must be a number from 0 to 65535");
  }
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    out.v6 = true;
  } else if (host == "localhost") {
    host = "127.0.0.1";
  }
  in6_addr six{};
  in_addr four{};
  if (inet_pton(out.v6 ? AF_INET6 : AF_INET, host.c_str(),
                out.v6 ? static_cast<void*>(&six) : static_cast<void*>(&four)) != 1) {
    throw bad("the host is no IP address");
  }
  out.host = host;
  return out;
}

bool ListenAddress::loopback() const {
  in6_addr six{};
  in_addr four{};
  if (v6) return inet_pton(AF_INET6, host.c_str(), &six) == 1 && IN6_IS_ADDR_LOOPBACK(&six) != 0;
  return inet_pton(AF_INET, host.c_str(), &four) == 1 && (ntohl(four.s_addr) >> 24) == 127;
}

std::string ListenAddress::text(int actual_port) const {
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(actual_port);
}

void check_bindable(const ListenAddress& address) {
  if (address.port == 0) return;
  sockaddr_storage storage{};
  socklen_t length = 0;
  if (address.v6) {
    auto* in = reinterpret_cast<sockaddr_in6*>(&storage);
    in->sin6_family = AF_INET6;
    in->sin6_port = htons(address.port);
    inet_pton(AF_INET6, address.host.c_str(), &in->sin6_addr);
    length = sizeof *in;
  } else {
    auto* in = reinterpret_cast<sockaddr_in*>(&storage);
    in->sin_family = AF_INET;
    in->sin_port = htons(address.port);
    inet_pton(AF_INET, address.host.c_str(), &in->sin_addr);
    length = sizeof *in;
  }
  const int fd = socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int error = fd < 0 ? errno : 0;
  if (fd >= 0) {
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, reinterpret_cast<sockaddr*>(&storage), length) != 0) error = errno;
    close(fd);
  }
  if (error == 0) return;
  const std::string where = address.text(address.port);
  if (error == EADDRINUSE) {
    throw infrastructure_error("cannot listen on " + where +
                               ": the port is in use; stop the other program or choose another "
                               "--listen");
  }
  throw infrastructure_error("cannot listen on " + where + ": " + std::strerror(error));
}

}  // namespace bitwitness
