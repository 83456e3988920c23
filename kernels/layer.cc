#include "kernels/layer.h"

namespace bitwitness {
namespace {

std::size_t row_bytes(std::int64_t rows, std::int64_t width) {
  return static_cast<std::size_t>(rows * width) * sizeof(float);
}

void place(Matrix& matrix, Backend& backend, std::vector<Buffer>& owned) {
  const std::size_t bytes =
      static_cast<std::size_t>(matrix.rows * matrix.cols) * dtype_bytes(matrix.dtype);
  matrix.data = backend.place(matrix.data, bytes, owned);
}

void place(Vector& vector, Backend& backend, std::vector<Buffer>& owned) {
  vector.data = backend.place(
      vector.data, static_cast<std::size_t>(vector.size) * dtype_bytes(vector.dtype), owned);
}

}  // namespace

PlacedLayer::PlacedLayer(const LayerWeights& weights, Backend& backend) : weights_(weights) {
  for (Matrix* matrix : {&weights_.q, &weights_.k, &weights_.v, &weights_.o, &weights_.gate,
                         &weights_.up, &weights_.down}) {
    place(*matrix, backend, owned_);
  }
  place(weights_.input_norm, backend, owned_);
  place(weights_.post_attention_norm, backend, owned_);
  if (weights_.q_norm) place(*weights_.q_norm, backend, owned_);
  if (weights_.k_norm) place(*weights_.k_norm, backend, owned_);
}

PlacedEnds::PlacedEnds(const ModelWeights& weights, Backend& backend) {
  weights_.embedding = weights.embedding;
  weights_.final_norm = weights.final_norm;
  weights_.head = weights.head;
  const bool tied = weights_.head.data == weights_.embedding.data;
  place(weights_.embedding, backend, owned_);
  place(weights_.final_norm, backend, owned_);
  if (tied) {
    weights_.head = weights_.embedding;
  } else {
    place(weights_.head, backend, owned_);
  }
}

PlacedWeights::PlacedWeights(const ModelWeights& weights, Backend& backend)
    : ends_(weights, backend), weights_(ends_.weights()) {
  for (const LayerWeights& layer : weights.layers) {
    layers_.emplace_back(layer, backend);
    weights_.layers.push_back(layers_.back().weights());
  }
}

LayerScratch::LayerScratch(Backend& backend, const ModelConfig& config, std::int64_t max_rows) {
  const std::int64_t q_width = std::int64_t{config.num_heads} * config.head_dim;
  const std::int64_t kv_width = std::int64_t{config.num_kv_heads} * config.head_dim;
  normed = backend.allocate(row_bytes(max_rows, config.hidden_size));
  q = backend.allocate(row_bytes(max_rows, q_width));
  k = backend.allocate(row_bytes(max_rows, kv_width));
  v = backend.allocate(row_bytes(max_rows, kv_width));
  attention = backend.allocate(row_bytes(max_rows, q_width));
  gate = backend.allocate(row_bytes(max_rows, config.intermediate_size));
  up = backend.allocate(row_bytes(max_rows, config.intermediate_size));
  projected = backend.allocate(row_bytes(max_rows, config.hidden_size));
}

void layer_forward(Backend& backend, const ModelConfig& config, const LayerWeights& weights,
                   const RopeView& rope, const LayerKv& cache, const RowMap& rows,
                   LayerScratch& scratch, float* h, CacheUse use, const OperatorProbe& probe) {
  const std::int64_t M = rows.rows;
  const std::int64_t hidden = config.hidden_size, intermediate = config.intermediate_size;
  const std::int64_t heads = config.num_heads, kv_heads = config.num_kv_heads;
  const std::int64_t head_dim = config.head_dim;
  float* normed = scratch.normed.as<float>();
  float* q = scratch.q.as<float>();
  float* k = scratch.k.as<float>();
  float* v = scratch.v.as<float>();
  float* attention = scratch.attention.as<float>();
  float* gate = scratch.gate.as<float>();
  float* up = scratch.up.as<float>();
  float* projected = scratch.projected.as<float>();
  const auto done = [&](std::string_view op, const float* x, std::int64_t width) {
    if (probe) probe(op, x, width);
  };

  backend.rms_norm(normed, h, weights.input_norm, config.rms_norm_eps, M);
  done("input_norm", normed, hidden);
  backend.matmul(q, normed, weights.q, M);
  done("q_proj", q, heads * head_dim);
  backend.matmul(k, normed, weights.k, M);
  done("k_proj", k, kv_heads * head_dim);
  backend.matmul(v, normed, weights.v, M);
  done("v_proj", v, kv_heads * head_dim);
  if (weights.q_norm) {
    backend.rms_norm(q, q, *weights.q_norm, config.rms_norm_eps, M * heads);
    done("q_norm", q, heads * head_dim);
  }
  if (weights.k_norm) {
    backend.rms_norm(k, k, *weights.k_norm, config.rms_norm_eps, M * kv_heads);
    done("k_norm", k, kv_heads * head_dim);
  }
  backend.rope(q, heads, head_dim, rope.cosines, rope.sines, rows);
  done("q_rope", q, heads * head_dim);
  backend.rope(k, kv_heads, head_dim, rope.cosines, rope.sines, rows);
  done("k_rope", k, kv_heads * head_dim);
  if (use == CacheUse::kStore) backend.store_kv(cache, k, v, rows);
  backend.attention(attention, q, cache, heads, kv_heads, head_dim, rows);
  done("attention", attention, heads * head_dim);
  backend.matmul(projected, attention, weights.o, M);
  done("o_proj", projected, hidden);
  backend.add(h, projected, M * hidden);
  done("attention_residual", h, hidden);

  backend.rms_norm(normed, h, weights.post_attention_norm, config.rms_norm_eps, M);
  done("post_attention_norm", normed, hidden);
  backend.matmul(gate, normed, weights.gate, M);
  done("gate_proj", gate, intermediate);
  backend.matmul(up, normed, weights.up, M);
  done("up_proj", up, intermediate);
  backend.swiglu(gate, gate, up, M * intermediate);
  done("swiglu", gate, intermediate);
  backend.matmul(projected, gate, weights.down, M);
  done("down_proj", projected, hidden);
  backend.add(h, projected, M * hidden);
  done("mlp_residual", h, hidden);
}

void head_forward(Backend& backend, const ModelConfig& config, const ModelWeights& weights,
                  const float* h, LayerScratch& scratch, std::int64_t rows, float* logits) {
  float* normed = scratch.normed.as<float>();
  backend.rms_norm(normed, h, weights.final_norm, config.rms_norm_eps, rows);
  backend.matmul(logits, normed, weights.head, rows);
}

}  // namespace bitwitness
