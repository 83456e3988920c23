// The models in tests/data/models with what the stock library computes for them (reference.json).
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace bitwitness {

// One prompt of one model: ids in, and the stock library's answers.
struct ReferenceCase {
  std::string model;  // directory
  std::string name;
  std::vector<std::int32_t> input_ids;
  std::vector<std::int32_t> greedy_ids;  // prompt and continuation, computed in binary64
  std::vector<double> last_logits;       // binary64
  std::vector<double> mid_logits;        // at position 20; zoo models only
  std::string text;                      // tiny models only
};

inline std::filesystem::path models_dir() {
  return std::filesystem::path(BW_TEST_DATA_DIR) / "models";
}

inline std::vector<ReferenceCase> reference_cases(const std::string& model) {
  const std::filesystem::path dir = models_dir() / model;
  std::ifstream file(dir / "reference.json");
  const nlohmann::json json = nlohmann::json::parse(file);
  std::vector<ReferenceCase> cases;
  const auto add = [&](const std::string& name, const nlohmann::json& one) {
    ReferenceCase out;
    out.model = dir.string();
    out.name = name;
    out.input_ids = one.at("input_ids").get<std::vector<std::int32_t>>();
    const nlohmann::json& stock = one.at("float64");
    out.greedy_ids = stock.at("greedy_ids").get<std::vector<std::int32_t>>();
    out.last_logits = stock.at("last_logits").get<std::vector<double>>();
    if (stock.contains("mid_logits")) {
      out.mid_logits = stock.at("mid_logits").get<std::vector<double>>();
    }
    if (stock.contains("text")) out.text = stock.at("text").get<std::string>();
    cases.push_back(std::move(out));
  };
  if (json.contains("input_ids")) {
    add(model, json);
  } else {
    for (const auto& [prompt, one] : json.items()) add(prompt, one);
  }
  return cases;
}

// Models of the families that are supported, all of which have reference.json.
inline const std::vector<std::string>& supported_models() {
  static const std::vector<std::string> models{"tiny-llama", "tiny-qwen3", "zoo/llama31-ropescale"};
  return models;
}

// Devices that a test of one device takes as its parameter; those that are absent here are skipped
// by name, but not those of another architecture.
inline const std::vector<std::string>& tested_devices() {
#if defined(__aarch64__)
  static const std::vector<std::string> devices{"ref", "neon", "cuda"};
#else
  static const std::vector<std::string> devices{"ref", "avx2", "avx512", "cuda"};
#endif
  return devices;
}

// `text` as the name of a parameterised test: letters and digits, anything else as '_'.
inline std::string test_name(std::string text) {
  for (char& c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return text;
}

}  // namespace bitwitness
