#include "kernels/layer.h"

namespace bitwitness {
namespace {

std::size_t row_bytes(std::int64_t rows, std::int64_t width) {
  return static_cast<std::size_t>(rows * width) * sizeof(float);
}

std::size_t bytes_of(const Matrix& matrix) {
  return static_cast<std::size_t>(matrix.rows * matrix.cols) * dtype_bytes(matrix.dtype);
}

void place(Matrix& matrix, Backend& backend, std::vector<Buffer>& owned) {
  matrix.data = backend.place(matrix.data, bytes_of(matrix), owned);
}

void place(Vector& vector, Backend& backend, std::vector<Buffer>& owned) {
  vector.data = backend.place(
      vector.data, static_cast<std::size_t>(vector.size) * dtype_bytes(vector.dtype), owned);
}

// The backend, if it has room for a model.
Backend& checked(const ModelWeights& weights, Backend& backend, std::size_t besides) {
  std::size_t bytes = bytes_of(weights.embedding);
  if (weights.head.data != weights.embedding.data) bytes += bytes_of(weights.head);
  for (const LayerWeights& layer : weights.layers) {
    for (const Matrix* matrix :
         {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
      bytes += bytes_of(*matrix);
    }
  }
  backend.require_memory(bytes + besides, "the weights of the model and what runs on them");
  return backend;
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

PlacedWeights::PlacedWeights(const ModelWeights& weights, Backend& backend, std::size_t besides)
    : ends_(std::in_place, weights, checked(weights, backend, besides)),
      weights_(ends_->weights()) {
  for (const LayerWeights& layer : weights.layers) {
    layers_.emplace_back(layer, backend);
    weights_.layers.push_back(layers_.back().weights());
  }
}

LayerScratch::LayerScratch(Backend& backend, const ModelConfig& config, std::int64_t max_rows) {
  const std::int64_t q_width = std::int64_t{config.num_heads} * config.head_dim;
  normed = backend.allocate(row_bytes(max_rows, config.hidden_size));
  q = backend.allocate(row_bytes(max_rows, q_width));
  attention = backend.allocate(row_bytes(max_rows, q_width));
  gate = backend.allocate(row_bytes(max_rows, config.intermediate_size));
  up = backend.allocate(row_bytes(max_rows, config.intermediate_size));
  projected = backend.allocate(row_bytes(max_rows, config.hidden_size));
}

std::size_t LayerScratch::bytes(const ModelConfig& config, std::int64_t max_rows) {
  return row_bytes(max_rows,
                   2 * (config.hidden_size + std::int64_t{config.num_heads} * config.head_dim +
                        config.intermediate_size));
}

void layer_forward(Backend& backend, const ModelConfig& config, const LayerWeights& weights,
                   const RopeView& rope, const LayerKv& cache, const RowMap& map,
                   LayerScratch& scratch, const LayerRows& rows, CacheUse use,
                   const OperatorProbe& probe) {
  const std::int64_t M = map.rows;
  const std::int64_t heads = config.num_heads, kv_heads = config.num_kv_heads;
  const std::int64_t head_dim = config.head_dim;
  float* normed = scratch.normed.as<float>();
  float* q = scratch.q.as<float>();
  float* attention = scratch.attention.as<float>();
  float* gate = scratch.gate.as<float>();
  float* up = scratch.up.as<float>();
  float* projected = scratch.projected.as<float>();
  const auto run = [&](const Product& product) {
    probe ? backend.compose(product, probe) : backend.product(product);
  };
  const auto norm_then = [&](std::string_view op, const float* x, const Vector& weight) {
    Product product;
    product.x = x;
    product.M = M;
    product.norm_op = op;
    product.norm = &weight;
    product.eps = config.rms_norm_eps;
    product.normed = normed;
    return product;
  };
  const auto project_and_add = [&](std::string_view op, const float* x, const Matrix& W,
                                   std::string_view epilogue_op, const float* residual) {
    Product product;
    product.x = x;
    product.M = M;
    product.parts[0] = {op, &W, rows.out};
    product.epilogue = Epilogue::kAdd;
    product.epilogue_op = epilogue_op;
    product.residual = residual;
    product.dots = projected;
    run(product);
  };

  Product qkv = norm_then("input_norm", rows.in, weights.input_norm);
  qkv.part_count = 3;
  qkv.parts[0] = {"q_proj", &weights.q, q};
  qkv.parts[1] = {"k_proj", &weights.k, rows.k};
  qkv.parts[2] = {"v_proj", &weights.v, rows.v};
  run(qkv);

  RopeStore rotate;
  rotate.q = q;
  rotate.k = rows.k;
  rotate.v = rows.v;
  rotate.q_norm = weights.q_norm ? &*weights.q_norm : nullptr;
  rotate.k_norm = weights.k_norm ? &*weights.k_norm : nullptr;
  rotate.eps = config.rms_norm_eps;
  rotate.cosines = rope.cosines;
  rotate.sines = rope.sines;
  rotate.heads = heads;
  rotate.kv_heads = kv_heads;
  rotate.head_dim = head_dim;
  rotate.cache = use == CacheUse::kStore ? &cache : nullptr;
  if (probe) {
    backend.compose(rotate, map, probe);
    backend.attention(attention, q, cache, heads, kv_heads, head_dim, map);
    probe("attention", attention, heads * head_dim);
  } else {
    backend.attend(attention, rotate, cache, map);
  }
  project_and_add("o_proj", attention, weights.o, "attention_residual", rows.in);

  Product mlp = norm_then("post_attention_norm", rows.out, weights.post_attention_norm);
  mlp.part_count = 2;
  mlp.parts[0] = {"gate_proj", &weights.gate, gate};
  mlp.parts[1] = {"up_proj", &weights.up, up};
  mlp.epilogue = Epilogue::kSwiglu;
  mlp.epilogue_op = "swiglu";
  run(mlp);
  project_and_add("down_proj", gate, weights.down, "mlp_residual", rows.out);
}

void head_forward(Backend& backend, const ModelConfig& config, const ModelWeights& weights,
                  const float* h, LayerScratch& scratch, std::int64_t rows, float* logits) {
  Product head;
  head.x = h;
  head.M = rows;
  head.norm_op = "final_norm";
  head.norm = &weights.final_norm;
  head.eps = config.rms_norm_eps;
  head.normed = scratch.normed.as<float>();
  head.parts[0] = {"lm_head", &weights.head, logits};
  backend.product(head);
}

}  // namespace bitwitness
