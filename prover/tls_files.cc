#include "prover/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "attest/base/bytes.h"
#include "attest/base/error.h"
#include "attest/base/file.h"

namespace bitwitness {
namespace {

constexpr std::uint64_t kMaxPemBytes = 1 << 20;

struct BioFree {
  void operator()(BIO* bio) const { BIO_free(bio); }
};
struct CertificateFree {
  void operator()(X509* certificate) const { X509_free(certificate); }
};
struct KeyFree {
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using Bio = std::unique_ptr<BIO, BioFree>;
using Certificate = std::unique_ptr<X509, CertificateFree>;
using Key = std::unique_ptr<EVP_PKEY, KeyFree>;

std::string read_pem(const std::string& path) {
  const Bytes bytes = read_file(path, {.max_bytes = kMaxPemBytes, .too_large = ErrorKind::kUsage});
  return std::string(as_text(bytes));
}

Bio open_pem(const std::string& pem) {
  Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  if (!bio) throw std::bad_alloc();
  return bio;
}

std::string time_text(const ASN1_TIME* time) {
  const Bio bio(BIO_new(BIO_s_mem()));
  char* text = nullptr;
  if (!bio || ASN1_TIME_print(bio.get(), time) != 1) return "an unreadable time";
  const long size = BIO_get_mem_data(bio.get(), &text);
  return std::string(text, static_cast<std::size_t>(size));
}

// All certificates of a file, valid now.
std::vector<Certificate> certificates_in(const std::string& path, const std::string& pem) {
  std::vector<Certificate> out;
  const Bio bio = open_pem(pem);
  while (X509* certificate = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) {
    out.emplace_back(certificate);
  }
  const unsigned long error = ERR_peek_last_error();
  ERR_clear_error();
  if (out.empty() || ERR_GET_REASON(error) != PEM_R_NO_START_LINE) {
    throw usage_error(path + ": " +
                      (out.empty() ? "no PEM certificate in it"
                                   : "the certificate after number " + std::to_string(out.size()) +
                                         " cannot be read") +
                      "; give a file of -----BEGIN CERTIFICATE----- blocks");
  }
  for (const Certificate& certificate : out) {
    if (X509_cmp_current_time(X509_get0_notBefore(certificate.get())) > 0) {
      throw usage_error(path + ": a certificate is not valid before " +
                        time_text(X509_get0_notBefore(certificate.get())) +
                        "; check this machine's clock, or use another certificate");
    }
    if (X509_cmp_current_time(X509_get0_notAfter(certificate.get())) <= 0) {
      throw usage_error(path + ": a certificate has expired, " +
                        time_text(X509_get0_notAfter(certificate.get())) +
                        "; renew it (or check this machine's clock)");
    }
  }
  return out;
}

int no_pass_phrase(char*, int, int, void*) {
  return 0;
}

Key key_in(const std::string& path, std::string& pem) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    throw usage_error(path + ": cannot open the key file: " + std::strerror(errno));
  }
  if (S_ISREG(info.st_mode) && (info.st_mode & 077) != 0) {
    throw usage_error(path +
                      ": this private key is open to group or others and is not used; run chmod "
                      "600 on it, or make a new key if somebody may have read it");
  }
  pem = read_pem(path);
  const Bio bio = open_pem(pem);
  Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_pass_phrase, nullptr));
  ERR_clear_error();
  if (!key) throw usage_error(path + ": no unencrypted PEM private key in it");
  return key;
}

}  // namespace

TlsMaterial load_tls_files(const TlsFiles& files) {
  TlsMaterial out;
  out.certificate_pem = read_pem(files.certificate);
  const std::vector<Certificate> chain = certificates_in(files.certificate, out.certificate_pem);
  const Key key = key_in(files.key, out.key_pem);
  if (X509_check_private_key(chain.front().get(), key.get()) != 1) {
    ERR_clear_error();
    throw usage_error(files.key + ": is not the key of the first certificate in " +
                      files.certificate + "; give the two that were made together");
  }
  if (!files.client_ca.empty()) {
    out.client_ca_pem = read_pem(files.client_ca);
    certificates_in(files.client_ca, out.client_ca_pem);
  }
  return out;
}

}  // namespace bitwitness
