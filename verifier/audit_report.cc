#include "verifier/audit_report.h"

namespace bitwitness {

std::string BadCell::text() const {
  const std::string at = "position " + std::to_string(position);
  switch (kind) {
    case Kind::kEmbedding:
      return "embedding of " + at;
    case Kind::kCell:
      return "layer " + std::to_string(layer) + ", " + at;
    case Kind::kHead:
      return "head of " + at;
  }
  return at;
}

}  // namespace bitwitness
