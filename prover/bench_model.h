// Models of known shapes with random weights, made in a backend's memory: what a benchmark runs
// where no trained weights are at hand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "kernels/backend.h"
#include "kernels/layer.h"
#include "kernels/model/model.h"

namespace bitwitness {

struct BenchShape {
  std::string name;
  ModelConfig config;  // of the Llama family
};
std::span<const BenchShape> bench_shapes();
// Throws a usage error that names the shapes there are.
const ModelConfig& bench_shape(const std::string& name);

// Random numbers, about normally distributed around zero: a chunk made on the host and repeated.
// Never zeros or one value: a device is faster, and cooler, on those.
class RandomNumbers {
 public:
  RandomNumbers(Backend& backend, Dtype dtype, float deviation);
  // Fills backend memory. `bytes` is a multiple of the size of an element. Waits.
  void fill(void* destination, std::size_t bytes) const;
  Buffer buffer(std::size_t bytes) const;

 private:
  Backend& backend_;
  Buffer chunk_;
};

// Deviation of random weights: activations stay finite, and of ordinary size, through all layers.
inline constexpr float kWeightDeviation = 0x1p-6f;

// Bytes of the weights of a model of one 16-bit type.
std::size_t weight_bytes(const ModelConfig& config);
// bf16; norms are 1. `backend` must outlive them.
PlacedWeights random_weights(const ModelConfig& config, Backend& backend);

}  // namespace bitwitness
