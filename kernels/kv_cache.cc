#include "kernels/kv_cache.h"

#include <algorithm>

#include "attest/base/error.h"

namespace bitwitness {
namespace {

constexpr std::int64_t pages_for(std::int64_t positions) {
  return (positions + LayerKv::kPagePositions - 1) / LayerKv::kPagePositions;
}

}  // namespace

std::size_t KvCache::page_bytes(const ModelConfig& config) {
  return static_cast<std::size_t>(config.num_layers) * 2 *
         static_cast<std::size_t>(LayerKv::kPagePositions * config.kv_size()) * sizeof(float);
}

KvCache::KvCache(const ModelConfig& config, Backend& backend, std::int64_t slots,
                 std::int64_t capacity)
    : backend_(backend),
      layers_(config.num_layers),
      kv_width_(config.kv_size()),
      pages_per_slot_(pages_for(capacity)),
      page_bytes_(page_bytes(config)),
      reserved_(static_cast<std::size_t>(slots), 0) {
  std::size_t bytes = sizeof(float*);
  if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(slots), &bytes) ||
      __builtin_mul_overflow(bytes, static_cast<std::size_t>(pages_per_slot_), &bytes)) {
    throw usage_error("the KV cache's table does not fit in memory; use fewer sequences or tokens");
  }
  host_table_ = backend.allocate_host(bytes);
  table_ = backend.allocate(bytes);
  std::fill_n(host_table_.as<float*>(), bytes / sizeof(float*), nullptr);
}

void KvCache::reserve(std::int64_t slot, std::int64_t positions) {
  std::int64_t& have = reserved_[static_cast<std::size_t>(slot)];
  const std::int64_t need = pages_for(positions);
  while (static_cast<std::int64_t>(free_.size()) < need - have) {
    pages_.reserve(pages_.size() + 1);
    free_.reserve(pages_.size() + 1);
    pages_.push_back(backend_.allocate(page_bytes_));
    free_.push_back(pages_.back().as<float>());
  }
  float** const table = host_table_.as<float*>() + slot * pages_per_slot_;
  for (; have < need; ++have) {
    table[have] = free_.back();
    free_.pop_back();
    changed_ = true;
  }
}

// The table keeps the old pages: nobody reads them before the slot has others.
void KvCache::release(std::int64_t slot) {
  std::int64_t& have = reserved_[static_cast<std::size_t>(slot)];
  float* const* const table = host_table_.as<float*>() + slot * pages_per_slot_;
  free_.insert(free_.end(), table, table + have);
  have = 0;
}

void KvCache::upload() {
  if (!changed_) return;
  backend_.to_device(table_.as<void>(), host_table_.as<void>(), host_table_.bytes());
  changed_ = false;
}

LayerKv KvCache::layer(std::int64_t l) const {
  LayerKv out;
  out.pages = table_.as<float*>();
  out.pages_per_slot = pages_per_slot_;
  const std::int64_t half = LayerKv::kPagePositions * kv_width_;
  out.key_offset = 2 * l * half;
  out.value_offset = out.key_offset + half;
  out.kv_width = kv_width_;
  return out;
}

}  // namespace bitwitness
