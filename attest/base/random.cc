#include "attest/base/random.h"

#include <openssl/rand.h>

#include "attest/base/error.h"

namespace bitwitness {

Bytes random_bytes(std::size_t count) {
  Bytes bytes(count);
  if (count > 0x7fffffff || RAND_bytes(bytes.data(), static_cast<int>(count)) != 1) {
    throw infrastructure_error("random bytes: the operating system's generator gave none");
  }
  return bytes;
}

}  // namespace bitwitness
