// Throw-away X.509 certificates for tests of TLS, through OpenSSL. Header-only.
#pragma once

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

namespace bitwitness::test {

struct Certificate {
  std::string pem;
  std::string key_pem;
  std::shared_ptr<X509> x509;
  std::shared_ptr<EVP_PKEY> key;
};

struct CertificateOptions {
  const Certificate* issuer = nullptr;  // nullptr: an authority, signed by itself
  std::string names = "DNS:localhost,IP:127.0.0.1";
  long from_s = -3600, to_s = 3600;  // seconds from now
};

inline Certificate make_certificate(const std::string& name,
                                    const CertificateOptions& options = {}) {
  const auto require = [](bool good) {
    if (!good) throw std::runtime_error("make_certificate: OpenSSL failed");
  };
  Certificate out;
  out.key = {EVP_EC_gen("P-256"), &EVP_PKEY_free};
  out.x509 = {X509_new(), &X509_free};
  X509* const x509 = out.x509.get();
  require(out.key && x509 != nullptr && X509_set_version(x509, 2) == 1);
  static long serial = 1;
  ASN1_INTEGER_set(X509_get_serialNumber(x509), ++serial);
  X509_gmtime_adj(X509_getm_notBefore(x509), options.from_s);
  X509_gmtime_adj(X509_getm_notAfter(x509), options.to_s);
  require(X509_NAME_add_entry_by_txt(X509_get_subject_name(x509), "CN", MBSTRING_ASC,
                                     reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1,
                                     0) == 1);
  X509* const issuer = options.issuer != nullptr ? options.issuer->x509.get() : x509;
  X509_set_issuer_name(x509, X509_get_subject_name(issuer));
  X509_set_pubkey(x509, out.key.get());
  const std::string value = options.issuer != nullptr ? options.names : "critical,CA:TRUE";
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(
      nullptr, nullptr, options.issuer != nullptr ? NID_subject_alt_name : NID_basic_constraints,
      value.c_str());
  require(extension != nullptr);
  X509_add_ext(x509, extension, -1);
  X509_EXTENSION_free(extension);
  require(X509_sign(x509, options.issuer != nullptr ? options.issuer->key.get() : out.key.get(),
                    EVP_sha256()) > 0);
  const auto pem_of = [&](const std::function<int(BIO*)>& write) {
    const std::unique_ptr<BIO, decltype(&BIO_free)> bio(BIO_new(BIO_s_mem()), &BIO_free);
    require(bio && write(bio.get()) == 1);
    char* data = nullptr;
    const long size = BIO_get_mem_data(bio.get(), &data);
    return std::string(data, static_cast<std::size_t>(size));
  };
  out.pem = pem_of([&](BIO* bio) { return PEM_write_bio_X509(bio, x509); });
  out.key_pem = pem_of([&](BIO* bio) {
    return PEM_write_bio_PKCS8PrivateKey(bio, out.key.get(), nullptr, nullptr, 0, nullptr, nullptr);
  });
  return out;
}

}  // namespace bitwitness::test
