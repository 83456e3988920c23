// JSON for scripts on stdout. Only the programs' commands include this.
#pragma once

#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

namespace bitwitness {

// `indent` as nlohmann's dump: -1 for one line. File names need not be UTF-8, the output is: what
// is not becomes U+FFFD. Json is nlohmann::json or nlohmann::ordered_json.
template <class Json>
std::string json_text(const Json& json, int indent = 2) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace) + "\n";
}

template <class Json>
void print_json(const Json& json, int indent = 2) {
  std::cout << json_text(json, indent) << std::flush;
}

}  // namespace bitwitness
