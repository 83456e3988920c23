// Where a prover is and how it is reached. No gRPC in here: commands and tests use it as a value.
#pragma once

#include <optional>
#include <string>

namespace bitwitness {

// What a TLS connection needs, as PEM text.
struct TlsCredentials {
  std::string ca;           // certificates that the prover's must lead to
  std::string certificate;  // of this side, and its chain; empty: none is shown
  std::string key;          // of that certificate

  // From files. Usage Errors name the file and what is wrong: absent, no PEM, no certificate in it,
  // a key that does not belong to the certificate, one of the two without the other.
  static TlsCredentials load(const std::string& ca_file,
                             const std::optional<std::string>& certificate_file,
                             const std::optional<std::string>& key_file);
};

struct ProverEndpoint {
  ProverEndpoint(std::string address) : host_port(std::move(address)) {}
  ProverEndpoint(const char* address) : host_port(address) {}
  ProverEndpoint(std::string address, std::optional<TlsCredentials> credentials)
      : host_port(std::move(address)), tls(std::move(credentials)) {}

  std::string host_port;              // "gpu.example:7433", "127.0.0.1:7433", "[::1]:7433"
  std::optional<TlsCredentials> tls;  // absent: neither encrypted nor authenticated
};

// Usage Error unless the address is one, and is loopback (127.x.x.x, [::1], localhost) where there
// is no TLS.
void check_endpoint(const ProverEndpoint& prover);

}  // namespace bitwitness
