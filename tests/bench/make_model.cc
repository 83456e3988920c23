// make_model DIR [--shape NAME] [--layers N]: a model directory with random weights of a known
// shape, for benchmarks of runs, audits and replays where no trained weights are at hand.
#include <filesystem>
#include <iostream>
#include <map>
#include <string>

#include "tests/bench/bench_model.h"

namespace {

using bitwitness::bench::ModelShape;

const std::map<std::string, ModelShape>& shapes() {
  static const std::map<std::string, ModelShape> known{
      {"llama3-8b", {4096, 14336, 32, 32, 8, 128, 128256}},
      {"llama3-1b", {2048, 8192, 16, 32, 8, 64, 128256}},
      {"small", {512, 1408, 4, 8, 4, 64, 4096}},
  };
  return known;
}

int usage() {
  std::cerr << "usage: make_model DIR [--shape NAME] [--layers N]\nshapes:";
  for (const auto& [name, shape] : shapes()) std::cerr << ' ' << name;
  std::cerr << '\n';
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc % 2 != 0 || argv[1][0] == '-') return usage();
  ModelShape shape = shapes().at("small");
  long layers = 0;
  for (int i = 2; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--shape" && shapes().count(argv[i + 1]) != 0) {
      shape = shapes().at(argv[i + 1]);
    } else if (flag == "--layers" && (layers = std::atol(argv[i + 1])) > 0) {
    } else {
      return usage();
    }
  }
  if (layers > 0) shape.layers = layers;
  try {
    std::filesystem::create_directories(argv[1]);
    bitwitness::bench::write_model(argv[1], shape);
  } catch (const std::exception& error) {
    std::cerr << "make_model: " << error.what() << '\n';
    return 3;
  }
  return 0;
}
