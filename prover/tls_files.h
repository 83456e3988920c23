// Certificates and keys of a listening prover, checked before it listens: gRPC would accept bad
// ones and then fail every connection without saying why.
#pragma once

#include <string>

namespace bitwitness {

struct TlsFiles {
  std::string certificate;  // PEM, the server's first, then its chain
  std::string key;          // PEM, unencrypted, readable by its owner alone
  std::string client_ca;    // PEM; empty: clients show no certificate

  bool any() const { return !certificate.empty() || !key.empty() || !client_ca.empty(); }
  bool mutual() const { return !certificate.empty() && !key.empty() && !client_ca.empty(); }
};

struct TlsMaterial {
  std::string certificate_pem;
  std::string key_pem;
  std::string client_ca_pem;
};

// Reads and checks: a usage Error names the file, what is wrong (absent, no PEM, encrypted, not
// each other's, expired, not valid yet, open to others) and what to do.
TlsMaterial load_tls_files(const TlsFiles& files);

}  // namespace bitwitness
