// The KV cache of one layer with given contents, for tests of attention: pages lie in an order of
// their own, values before keys, and hold NaN where no position is.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/backend.h"

namespace bitwitness::test {

class PagedCache {
 public:
  // keys and values are [slots, capacity, width].
  PagedCache(Backend& backend, std::int64_t slots, std::int64_t capacity, std::int64_t width,
             const std::vector<float>& keys, const std::vector<float>& values)
      : backend_(backend), slots_(slots), capacity_(capacity), width_(width) {
    pages_per_slot_ = (capacity + kPositions - 1) / kPositions;
    const std::int64_t count = slots * pages_per_slot_;
    host_.assign(static_cast<std::size_t>(count * page_floats()),
                 std::numeric_limits<float>::quiet_NaN());
    each_row([&](std::int64_t row, float* key, float* value) {
      std::memcpy(key, &keys[static_cast<std::size_t>(row * width_)], row_bytes());
      std::memcpy(value, &values[static_cast<std::size_t>(row * width_)], row_bytes());
    });
    memory_ = backend.allocate(host_.size() * sizeof(float));
    backend.to_device(memory_.as<void>(), host_.data(), memory_.bytes());
    std::vector<float*> table;
    for (std::int64_t page = 0; page < count; ++page) {
      table.push_back(memory_.as<float>() + place_of(page) * page_floats());
    }
    table_ = backend.allocate(table.size() * sizeof(float*));
    backend.to_device(table_.as<void>(), table.data(), table_.bytes());
  }

  LayerKv layer() const {
    LayerKv out;
    out.pages = table_.as<float*>();
    out.pages_per_slot = pages_per_slot_;
    out.key_offset = kPositions * width_;
    out.value_offset = 0;
    out.kv_width = width_;
    return out;
  }

  // What it holds now, as given to the constructor.
  void read(std::vector<float>& keys, std::vector<float>& values) {
    backend_.to_host(host_.data(), memory_.as<void>(), memory_.bytes());
    keys.resize(static_cast<std::size_t>(slots_ * capacity_ * width_));
    values.resize(keys.size());
    each_row([&](std::int64_t row, const float* key, const float* value) {
      std::memcpy(&keys[static_cast<std::size_t>(row * width_)], key, row_bytes());
      std::memcpy(&values[static_cast<std::size_t>(row * width_)], value, row_bytes());
    });
  }

 private:
  static constexpr std::int64_t kPositions = LayerKv::kPagePositions;

  std::int64_t page_floats() const { return 2 * kPositions * width_; }
  std::size_t row_bytes() const { return static_cast<std::size_t>(width_) * sizeof(float); }
  // Pages lie in reverse order.
  std::int64_t place_of(std::int64_t page) const { return slots_ * pages_per_slot_ - 1 - page; }

  template <class Visit>
  void each_row(const Visit& visit) {
    for (std::int64_t slot = 0; slot < slots_; ++slot) {
      for (std::int64_t t = 0; t < capacity_; ++t) {
        const std::int64_t place = place_of(slot * pages_per_slot_ + t / kPositions);
        float* const value =
            &host_[static_cast<std::size_t>(place * page_floats() + t % kPositions * width_)];
        visit(slot * capacity_ + t, value + kPositions * width_, value);
      }
    }
  }

  Backend& backend_;
  std::int64_t slots_, capacity_, width_, pages_per_slot_ = 0;
  std::vector<float> host_;
  Buffer memory_, table_;
};

}  // namespace bitwitness::test
