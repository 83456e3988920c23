// The address that a prover listens on.
#pragma once

#include <cstdint>
#include <string>

namespace bitwitness {

struct ListenAddress {
  std::string host;  // an IP address, without brackets
  bool v6 = false;
  std::uint16_t port = 0;

  // HOST:PORT; localhost is 127.0.0.1, IPv6 addresses stand in brackets. Usage Error otherwise.
  static ListenAddress parse(const std::string& text);

  // Reached from this machine alone: 127.0.0.0/8, ::1.
  bool loopback() const;
  std::string text(int actual_port) const;
};

// Tries the address with a plain socket: gRPC does not say why a bind failed. Infrastructure Error
// that does. Port 0 is always fine.
void check_bindable(const ListenAddress& address);

}  // namespace bitwitness
