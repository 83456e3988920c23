// make_model DIR [--shape NAME] [--layers N]: a model directory with random weights of a known
// shape, for runs, audits and replays where no trained weights are at hand.
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>

#include "attest/base/error.h"
#include "prover/bench_model.h"
#include "tests/bench/bench_model.h"

namespace {

int usage() {
  std::cerr << "usage: make_model DIR [--shape NAME] [--layers N]\nshapes:";
  for (const auto& shape : bitwitness::bench_shapes()) std::cerr << ' ' << shape.name;
  std::cerr << '\n';
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc % 2 != 0 || argv[1][0] == '-') return usage();
  std::string name = "small";
  long layers = 0;
  for (int i = 2; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--shape") {
      name = argv[i + 1];
    } else if (flag != "--layers" || (layers = std::atol(argv[i + 1])) <= 0) {
      return usage();
    }
  }
  try {
    const bitwitness::ModelConfig& config = bitwitness::bench_shape(name);
    bitwitness::bench::ModelShape shape{.hidden = config.hidden_size,
                                        .intermediate = config.intermediate_size,
                                        .layers = layers > 0 ? layers : config.num_layers,
                                        .heads = config.num_heads,
                                        .kv_heads = config.num_kv_heads,
                                        .head_dim = config.head_dim,
                                        .vocab = config.vocab_size};
    std::filesystem::create_directories(argv[1]);
    bitwitness::bench::write_model(argv[1], shape);
  } catch (const bitwitness::Error& error) {
    std::cerr << "make_model: " << error.what() << '\n';
    return static_cast<int>(bitwitness::exit_code(error.kind()));
  } catch (const std::exception& error) {
    std::cerr << "make_model: " << error.what() << '\n';
    return 3;
  }
  return 0;
}
