// The flags of every command that talks to a prover.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <optional>
#include <string>

#include "attest/base/error.h"
#include "verifier/client.h"
#include "verifier/prover_endpoint.h"

namespace bitwitness {

struct ProverFlags {
  std::optional<std::string> address;
  std::optional<std::string> tls_ca, tls_cert, tls_key;
  unsigned deadline_s = 600;
  std::uint64_t max_record_mib = 256;
  const CLI::Option* deadline_flag = nullptr;
  const CLI::Option* max_record_flag = nullptr;

  void add_to(CLI::App& command, const std::string& address_help) {
    command.add_option("--prover", address, address_help);
    command.add_option("--tls-ca", tls_ca,
                       "Connect by TLS: certificate (PEM) that the prover's must lead to; needed "
                       "for every prover that is not on this machine");
    command.add_option("--tls-cert", tls_cert, "This side's own certificate (PEM), if asked for");
    command.add_option("--tls-key", tls_key, "Key of that certificate (PEM)");
    deadline_flag =
        command.add_option("--deadline", deadline_s, "Seconds to wait for the prover, every call")
            ->check(CLI::Range(1U, 86400U))
            ->capture_default_str();
    max_record_flag =
        command.add_option("--max-record-mib", max_record_mib, "Largest record to fetch, in MiB")
            ->check(CLI::Range(std::uint64_t{1}, kMaxRecordBytes >> 20))
            ->capture_default_str();
  }

  // Whether one of them but the address was given.
  bool any_given() const {
    return tls_ca || tls_cert || tls_key || deadline_flag->count() != 0 ||
           max_record_flag->count() != 0;
  }

  // Usage Errors for an address that is none, or not loopback and without TLS, and for bad files.
  ProverEndpoint endpoint() const {
    if (!tls_ca && (tls_cert || tls_key)) {
      throw usage_error("--tls-cert and --tls-key need --tls-ca: without it there is no TLS");
    }
    ProverEndpoint out(address.value());
    if (tls_ca) out.tls = TlsCredentials::load(*tls_ca, tls_cert, tls_key);
    check_endpoint(out);
    return out;
  }
  std::chrono::milliseconds deadline() const { return std::chrono::seconds(deadline_s); }
  FetchOptions fetch_options() const { return {deadline(), max_record_mib << 20}; }
};

}  // namespace bitwitness
