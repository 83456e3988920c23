#include "verifier/prover_endpoint.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <memory>
#include <string_view>

#include "attest/base/error.h"
#include "attest/base/file.h"

namespace bitwitness {
namespace {

constexpr std::uint64_t kMaxPemBytes = 1 << 20;

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

Bio memory_of(const std::string& text) {
  return {BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), &BIO_free};
}

// No passphrase is asked for on a terminal: an encrypted key is refused.
int no_passphrase(char*, int, int, void*) {
  return -1;
}

std::string read_pem(const char* flag, const std::string& path) {
  const Bytes bytes = read_file(path, {kMaxPemBytes, ErrorKind::kUsage, ErrorKind::kUsage});
  const std::string text(as_text(bytes));
  if (text.find("-----BEGIN ") == std::string::npos) {
    throw usage_error(std::string(flag) + " " + path + ": no PEM file");
  }
  return text;
}

Certificate first_certificate(const char* flag, const std::string& path, const std::string& pem) {
  const Bio bio = memory_of(pem);
  Certificate out(PEM_read_bio_X509(bio.get(), nullptr, &no_passphrase, nullptr), &X509_free);
  ERR_clear_error();
  if (!out) throw usage_error(std::string(flag) + " " + path + ": no certificate in it");
  return out;
}

bool is_loopback(std::string_view host) {
  if (host == "localhost" || host == "::1") return true;
  return host.starts_with("127.") && std::count(host.begin(), host.end(), '.') == 3 &&
         host.find_first_not_of("0123456789.") == std::string_view::npos;
}

}  // namespace

TlsCredentials TlsCredentials::load(const std::string& ca_file,
                                    const std::optional<std::string>& certificate_file,
                                    const std::optional<std::string>& key_file) {
  if (certificate_file.has_value() != key_file.has_value()) {
    throw usage_error("--tls-cert and --tls-key go together: a certificate and its key");
  }
  TlsCredentials out;
  out.ca = read_pem("--tls-ca", ca_file);
  first_certificate("--tls-ca", ca_file, out.ca);
  if (!certificate_file) return out;
  out.certificate = read_pem("--tls-cert", *certificate_file);
  out.key = read_pem("--tls-key", *key_file);
  const Certificate certificate =
      first_certificate("--tls-cert", *certificate_file, out.certificate);
  const Bio bio = memory_of(out.key);
  const Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, &no_passphrase, nullptr),
                &EVP_PKEY_free);
  const bool fits = key && X509_check_private_key(certificate.get(), key.get()) == 1;
  ERR_clear_error();
  if (!key) {
    throw usage_error("--tls-key " + *key_file + ": no private key without a passphrase in it");
  }
  if (!fits) {
    throw usage_error("--tls-key " + *key_file + " is not the key of the certificate in " +
                      *certificate_file);
  }
  return out;
}

void check_endpoint(const ProverEndpoint& prover) {
  const std::string& host_port = prover.host_port;
  const auto bad = [&](const char* why) {
    return usage_error("prover address '" + host_port.substr(0, 300) + "': " + why +
                       "; use HOST:PORT, e.g. 127.0.0.1:7433");
  };
  const std::size_t colon = host_port.rfind(':');
  if (colon == std::string::npos || colon == 0) throw bad("no host or no port");
  std::uint16_t port = 0;
  const char* const end = host_port.data() + host_port.size();
  const auto parsed = std::from_chars(host_port.data() + colon + 1, end, port);
  if (parsed.ec != std::errc() || parsed.ptr != end || port == 0) {
    throw bad("the port must be a number from 1 to 65535");
  }
  const std::string_view host(host_port.data(), colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  const std::string_view inner = bracketed ? host.substr(1, host.size() - 2) : host;
  constexpr std::string_view kAllowed =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_";
  for (const char c : inner) {
    if (kAllowed.find(c) == std::string_view::npos && !(bracketed && c == ':')) {
      throw bad("the host is no name and no IP address (IPv6 goes in brackets)");
    }
  }
  if (!prover.tls && !is_loopback(inner)) {
    throw usage_error("prover address '" + host_port +
                      "' is not on this machine: give --tls-ca FILE, the certificate that its own "
                      "leads to, or forward its port to loopback (ssh -L)");
  }
}

}  // namespace bitwitness
