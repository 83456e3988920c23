#include "prover/npy.h"

#include <cstring>

namespace bitwitness {

Bytes npy_float32(std::span<const float> values, std::uint64_t rows, std::uint64_t cols) {
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" +
                       std::to_string(rows) + ", " + std::to_string(cols) + "), }";
  // Magic (6), version (2), header length (2) and header fill a multiple of 64 and end in a
  // newline.
  constexpr std::size_t kFixed = 10, kAlign = 64;
  header.append((kAlign - (kFixed + header.size() + 1) % kAlign) % kAlign, ' ');
  header += '\n';

  Bytes out(kFixed + header.size() + values.size_bytes());
  const std::uint8_t magic[8] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0};
  std::memcpy(out.data(), magic, sizeof magic);
  out[8] = static_cast<std::uint8_t>(header.size() & 0xffu);
  out[9] = static_cast<std::uint8_t>(header.size() >> 8);
  std::memcpy(out.data() + kFixed, header.data(), header.size());
  if (!values.empty()) {
    std::memcpy(out.data() + kFixed + header.size(), values.data(), values.size_bytes());
  }
  return out;
}

}  // namespace bitwitness
