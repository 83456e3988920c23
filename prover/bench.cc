#include "prover/bench.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "attest/base/error.h"
#include "kernels/engine.h"
#include "kernels/kv_cache.h"
#include "prover/bench_model.h"

namespace bitwitness {
namespace {

struct Name {
  std::string_view group, name;
};
constexpr Name kNames[] = {
    {"products", "qkv"},
    {"products", "o"},
    {"products", "gate_up"},
    {"products", "down"},
    {"products", "head"},
    {"attention", "attention_decode"},
    {"attention", "attention_prefill"},
    {"elementwise", "rms_norm"},
    {"elementwise", "rope_store"},
    {"commitment", "hash_rows"},
    {"commitment", "hash_key_values"},
    {"commitment", "hash_logits"},
    {"commitment", "check_finite"},
    {"sampler", "sample_greedy"},
    {"sampler", "sample_top_p"},
    {"steps", "decode"},
    {"steps", "prefill"},
};

std::string_view group_of(std::string_view name) {
  for (const Name& entry : kNames) {
    if (entry.name == name) return entry.group;
  }
  return {};
}

// What is measured, in this order.
struct Case {
  std::string_view what;
  std::int64_t rows = 0, context = 0;
};

// Rows whose logits the engine computes together, and those that it commits to together.
constexpr std::int64_t kHeadRows = 64;

std::vector<Case> all_cases(bool device) {
  std::vector<Case> cases;
  const auto add = [&](std::string_view what, const std::vector<std::int64_t>& rows) {
    for (const std::int64_t M : rows) cases.push_back({what, M, 0});
  };
  const std::vector<std::int64_t> rows =
      device ? std::vector<std::int64_t>{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048}
             : std::vector<std::int64_t>{1, 8, 64, 512};
  for (const std::string_view what : {"qkv", "o", "gate_up", "down"}) add(what, rows);
  std::vector<std::int64_t> head = rows;
  std::erase_if(head, [](std::int64_t M) { return M > kHeadRows; });
  add("head", head);

  const std::int64_t prefill = device ? 2048 : 512, batch = device ? 32 : 8;
  if (device) {
    for (const std::int64_t context : {128, 2048, 8192}) {
      cases.push_back({"attention_decode", 1, context});
    }
    for (const std::int64_t M : {8, 32}) cases.push_back({"attention_decode", M, 2048});
  } else {
    for (const std::int64_t M : {1, 8}) cases.push_back({"attention_decode", M, 512});
  }
  cases.push_back({"attention_prefill", prefill, prefill});
  for (const std::string_view what : {"rms_norm", "rope_store"}) add(what, {1, batch, prefill});
  for (const std::string_view what : {"hash_rows", "hash_key_values"}) {
    add(what, {1, batch, prefill});
  }
  for (const std::string_view what :
       {"hash_logits", "check_finite", "sample_greedy", "sample_top_p"}) {
    add(what, {1, batch});
  }
  cases.push_back({"decode", 1, 128});
  cases.push_back({"decode", 8, 128});
  if (device) cases.push_back({"decode", 32, 128});
  cases.push_back({"prefill", prefill, prefill});
  if (device) cases.push_back({"decode", 1, 8192});
  return cases;
}

std::vector<Case> chosen_cases(bool device, const ModelConfig& config,
                               const BenchOptions& options) {
  for (const std::string& name : options.only) {
    const bool known = std::any_of(std::begin(kNames), std::end(kNames), [&](const Name& entry) {
      return entry.name == name || entry.group == name;
    });
    if (!known)
      throw usage_error("there is nothing to measure called '" + name + "'; there are\n" +
                        bench_names());
  }
  std::vector<Case> cases = all_cases(device);
  const auto& only = options.only;
  const auto is_named = [](const Case& c, std::string_view name) {
    return name == c.what || name == group_of(c.what);
  };
  // What was asked for by name or number is measured, or refused: never left out in silence.
  for (const std::int64_t rows : options.rows) {
    std::set<std::int64_t> there;
    for (const Case& c : cases) {
      const bool named =
          only.empty() || std::any_of(only.begin(), only.end(),
                                      [&](const auto& name) { return is_named(c, name); });
      if (named) there.insert(c.rows);
    }
    if (there.contains(rows)) continue;
    std::string known;
    for (const std::int64_t M : there) known += " " + std::to_string(M);
    throw usage_error("--rows " + std::to_string(rows) +
                      ": nothing that is to be measured has so many rows; there are" + known);
  }
  std::erase_if(cases, [&](const Case& c) {
    const bool named =
        only.empty() || std::any_of(only.begin(), only.end(),
                                    [&](const std::string& name) { return is_named(c, name); });
    const bool sized =
        options.rows.empty() || std::count(options.rows.begin(), options.rows.end(), c.rows) != 0;
    // A decode step needs some positions beyond its context.
    const std::int64_t last = c.context + (c.what == "decode" ? LayerKv::kPagePositions : 0);
    return !named || !sized || last > config.max_positions;
  });
  for (const std::string& name : only) {
    if (std::any_of(cases.begin(), cases.end(), [&](const Case& c) { return is_named(c, name); })) {
      continue;
    }
    throw usage_error("nothing of '" + name +
                      "' is left to measure: widen --rows, or take a model with a longer context");
  }
  if (cases.empty()) {
    throw usage_error("nothing is left to measure: take a model with a longer context");
  }
  return cases;
}

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 != 0 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// What the system could give to a process; no limit where it does not say.
std::size_t host_memory_available() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("MemAvailable:")) return std::stoull(line.substr(13)) * 1024;
  }
  return std::numeric_limits<std::size_t>::max();
}

template <class T>
Buffer placed(Backend& backend, const std::vector<T>& values) {
  Buffer out = backend.allocate(values.size() * sizeof(T));
  backend.to_device(out.as<void>(), values.data(), values.size() * sizeof(T));
  backend.synchronize();
  return out;
}

// The rows of a step, in host and backend memory.
struct Rows {
  std::vector<std::int32_t> slot, position;
  Buffer placed_slot, placed_position;
  RowMap map;
};

Rows rows_of(Backend& backend, std::vector<std::int32_t> slot, std::vector<std::int32_t> position,
             std::int64_t context, bool distinct_slots) {
  Rows out{std::move(slot), std::move(position), {}, {}, {}};
  out.placed_slot = placed(backend, out.slot);
  out.placed_position = placed(backend, out.position);
  out.map = {static_cast<std::int64_t>(out.slot.size()),
             out.placed_slot.as<std::int32_t>(),
             out.placed_position.as<std::int32_t>(),
             out.slot.data(),
             out.position.data(),
             context,
             distinct_slots};
  return out;
}

// The last position of `context` in each of M sequences.
Rows decode_rows(Backend& backend, std::int64_t M, std::int64_t context) {
  std::vector<std::int32_t> slot, position;
  for (std::int64_t m = 0; m < M; ++m) {
    slot.push_back(static_cast<std::int32_t>(m));
    position.push_back(static_cast<std::int32_t>(context - 1));
  }
  return rows_of(backend, std::move(slot), std::move(position), context, true);
}

// Positions 0 to M - 1 of one sequence.
Rows prefill_rows(Backend& backend, std::int64_t M) {
  std::vector<std::int32_t> position;
  for (std::int64_t m = 0; m < M; ++m) position.push_back(static_cast<std::int32_t>(m));
  std::vector<std::int32_t> slot(position.size(), 0);
  return rows_of(backend, std::move(slot), std::move(position), M, false);
}

std::size_t float_bytes(std::int64_t count) {
  return static_cast<std::size_t>(count) * sizeof(float);
}

class Bench {
 public:
  Bench(Backend& backend, const ModelConfig& config, const Model* model, const Ceilings& ceilings,
        const BenchOptions& options, const std::function<void(const BenchRow&)>& on_row,
        const ProgressFn& progress)
      : backend_(backend),
        config_(config),
        model_(model),
        options_(options),
        on_row_(on_row),
        progress_(progress),
        device_(backend.name() == "cuda"),
        cases_(chosen_cases(device_, config, options)) {
    // What calls read in turn exceeds the caches; hosts report those of others as well.
    constexpr std::size_t kMostOnHosts = std::size_t{256} << 20;
    rotation_bytes_ = 4 * ceilings.cache_bytes;
    if (!device_) rotation_bytes_ = std::min(rotation_bytes_, kMostOnHosts);
    if (model_ != nullptr) dtype_ = model_->weights().layers.front().q.dtype;
  }

  void run() {
    note_done(0);
    products();
    attention();
    others();
    steps();
  }

 private:
  void note_done(std::int64_t more) {
    done_ += static_cast<std::uint64_t>(more);
    if (progress_) progress_(done_, cases_.size());
  }
  static BenchRow row_of(const Case& c, std::string shape) {
    BenchRow row;
    row.what = c.what;
    row.shape = std::move(shape);
    row.rows = c.rows;
    row.context = c.context;
    return row;
  }
  std::string heads_text() const {
    return std::to_string(config_.num_heads) + "/" + std::to_string(config_.num_kv_heads) +
           " heads of " + std::to_string(config_.head_dim);
  }
  void report(const BenchRow& row) {
    on_row_(row);
    note_done(1);
  }
  std::vector<Case> cases_of(std::string_view group) const {
    std::vector<Case> out;
    for (const Case& c : cases_) {
      if (group_of(c.what) == group) out.push_back(c);
    }
    return out;
  }

  // Hosts have no limit that a backend knows of; bench_model.h's weights are memory all the same.
  void require_memory(std::size_t bytes, std::string_view what) const {
    backend_.require_memory(bytes, what);
    const std::size_t available = device_ ? bytes : host_memory_available();
    if (bytes <= available) return;
    throw infrastructure_error(std::string(what) + " need " + std::to_string(bytes >> 20) +
                               " MiB of memory, and " + std::to_string(available >> 20) +
                               " MiB are free; use a smaller --shape");
  }

  // Median seconds of call(i), i = 0, 1, ..., in recorded steps of many calls, so that launches
  // follow each other as in a model. Call i works in memory of its own, `copies` in all.
  double time(std::int64_t copies, const std::function<void(std::int64_t)>& call) const {
    constexpr double kRecordingSeconds = 3e-3, kSampleSeconds = 5e-3;
    constexpr std::int64_t kUsualCalls = 64;
    const std::unique_ptr<Recordings> recordings = backend_.make_recordings();
    const auto seconds_of = [&](const std::function<void()>& work) {
      backend_.synchronize();
      const auto begin = Clock::now();
      work();
      backend_.synchronize();
      return seconds_since(begin);
    };
    const auto times_in = [](double seconds, double one, std::int64_t most) {
      return std::clamp(static_cast<std::int64_t>(seconds / std::max(one, 1e-9)), std::int64_t{1},
                        most);
    };
    call(0);
    const double once = seconds_of([&] { call(0); });
    const std::int64_t calls =
        std::max(times_in(kRecordingSeconds, once, kUsualCalls), once < 1.0 ? copies : 1);
    const auto replay = [&] {
      recordings->run(0, [&] {
        for (std::int64_t i = 0; i < calls; ++i) call(i % copies);
      });
    };
    replay();
    replay();
    const double recording = seconds_of(replay);
    const std::int64_t replays = times_in(kSampleSeconds, recording, 32);
    const int samples = std::max(1, recording > 0.1 ? options_.repeat / 6 : options_.repeat / 2);
    std::vector<double> times;
    for (int i = 0; i < samples; ++i) {
      const double seconds = seconds_of([&] {
        for (std::int64_t r = 0; r < replays; ++r) replay();
      });
      times.push_back(seconds / static_cast<double>(replays * calls));
    }
    return median(std::move(times));
  }

  // How many copies of `bytes` bytes make up the rotation.
  std::int64_t copies_of(std::size_t bytes) const {
    constexpr std::size_t kMost = 512;
    return static_cast<std::int64_t>(
        std::clamp((rotation_bytes_ + bytes - 1) / bytes, std::size_t{1}, kMost));
  }

  // ---- Products of a layer and the head, as layer_forward calls them.
  struct ProductShape {
    std::int64_t K = 0;
    std::vector<std::int64_t> N;  // of each part
    bool norm = false;
    Epilogue epilogue = Epilogue::kStore;
    std::string text;

    std::int64_t outputs() const {
      std::int64_t sum = 0;
      for (const std::int64_t n : N) sum += n;
      return sum;
    }
  };

  ProductShape product_shape(std::string_view what) const {
    const std::int64_t hidden = config_.hidden_size, q = config_.q_size(), kv = config_.kv_size();
    const std::int64_t F = config_.intermediate_size;
    if (what == "qkv") return {hidden, {q, kv, kv}, true, Epilogue::kStore, "norm"};
    if (what == "o") return {q, {hidden}, false, Epilogue::kAdd, "residual"};
    if (what == "gate_up") return {hidden, {F, F}, true, Epilogue::kSwiglu, "norm, swiglu"};
    if (what == "down") return {F, {hidden}, false, Epilogue::kAdd, "residual"};
    return {hidden, {config_.vocab_size}, true, Epilogue::kStore, "norm"};
  }

  void products() {
    const std::vector<Case> cases = cases_of("products");
    if (cases.empty()) return;
    const std::size_t element = dtype_bytes(dtype_);
    std::int64_t most_rows = 0, most_inputs = 0, most_y = 0, most_weights = 0;
    for (const Case& c : cases) {
      const ProductShape shape = product_shape(c.what);
      most_rows = std::max(most_rows, c.rows);
      most_inputs = std::max(most_inputs, shape.K);
      most_y = std::max(most_y, c.rows * shape.outputs());
      most_weights = std::max(most_weights, shape.outputs() * shape.K);
    }
    const std::size_t pool_bytes =
        std::max(rotation_bytes_, static_cast<std::size_t>(most_weights) * element) / 256 * 256 +
        256;
    const std::size_t x_bytes = float_bytes(most_rows * most_inputs);
    require_memory(pool_bytes + 2 * x_bytes + 3 * float_bytes(most_y),
                   "the products to be measured");
    const Buffer pool = RandomNumbers(backend_, dtype_, kWeightDeviation).buffer(pool_bytes);
    const RandomNumbers numbers(backend_, Dtype::kFp32, 1.0f);
    const Buffer x = numbers.buffer(x_bytes), scratch = backend_.allocate(x_bytes);
    const Buffer residual = numbers.buffer(float_bytes(most_y));
    const Buffer y = backend_.allocate(float_bytes(most_y));
    const Buffer dots = backend_.allocate(float_bytes(most_y));
    const Buffer ones =
        placed(backend_, std::vector<float>(static_cast<std::size_t>(config_.hidden_size), 1.0f));
    const Vector norm{Dtype::kFp32, config_.hidden_size, ones.as<std::byte>()};

    for (const Case& c : cases) {
      const ProductShape shape = product_shape(c.what);
      const std::int64_t M = c.rows, K = shape.K, outputs = shape.outputs();
      const std::size_t weights = static_cast<std::size_t>(outputs * K) * element;
      const std::size_t stride = (weights + 255) / 256 * 256;
      const auto copies = std::min<std::int64_t>(copies_of(weights),
                                                 static_cast<std::int64_t>(pool_bytes / stride));
      const auto call = [&](std::int64_t i) {
        Matrix matrices[3];
        Product product;
        product.x = x.as<float>();
        product.M = M;
        if (shape.norm) {
          product.norm = &norm;
          product.eps = config_.rms_norm_eps;
          product.normed = scratch.as<float>();
        }
        product.epilogue = shape.epilogue;
        if (shape.epilogue == Epilogue::kAdd) {
          product.residual = residual.as<float>();
          product.dots = dots.as<float>();
        }
        product.part_count = static_cast<int>(shape.N.size());
        const std::byte* W = pool.as<std::byte>() + static_cast<std::size_t>(i) * stride;
        float* out = y.as<float>();
        for (std::size_t p = 0; p < shape.N.size(); ++p) {
          const std::int64_t N = shape.N[p];
          matrices[p] = {dtype_, N, K, W};
          product.parts[p] = {"", &matrices[p], out};
          W += static_cast<std::size_t>(N * K) * element;
          out += M * N;
        }
        backend_.product(product);
      };
      BenchRow row = row_of(c, "");
      for (const std::int64_t N : shape.N) {
        row.shape.append(row.shape.empty() ? "" : "+").append(std::to_string(N));
      }
      row.shape.append("x").append(std::to_string(K)).append(", ").append(shape.text);
      row.seconds = time(copies, call);
      const std::int64_t stored = shape.epilogue == Epilogue::kSwiglu ? shape.N[0]
                                  : shape.epilogue == Epilogue::kAdd
                                      ? 2 * outputs  // and the residual, read
                                      : outputs;
      row.bytes = static_cast<double>(weights) + static_cast<double>(float_bytes(M * (K + stored)));
      row.operations = 2.0 * static_cast<double>(M) * static_cast<double>(outputs * K);
      report(row);
    }
  }

  // ---- Attention.
  // A cache of `copies` layers whose pages hold random numbers.
  std::unique_ptr<KvCache> filled_cache(std::int64_t slots, std::int64_t context,
                                        std::int64_t copies) {
    ModelConfig config = config_;
    config.num_layers = copies;
    const std::size_t page = KvCache::page_bytes(config);
    const auto pages = static_cast<std::size_t>(
        slots * ((context + LayerKv::kPagePositions - 1) / LayerKv::kPagePositions));
    require_memory(pages * page, "the KV cache to be measured");
    auto cache = std::make_unique<KvCache>(config, backend_, slots, context);
    for (std::int64_t slot = 0; slot < slots; ++slot) cache->reserve(slot, context);
    cache->upload();
    std::vector<float*> table(pages);
    backend_.to_host(table.data(), cache->layer(0).pages, pages * sizeof(float*));
    const RandomNumbers numbers(backend_, Dtype::kFp32, 1.0f);
    for (float* data : table) numbers.fill(data, page);
    return cache;
  }

  void attention() {
    for (const Case& c : cases_of("attention")) {
      const bool decode = c.what == "attention_decode";
      const std::int64_t M = c.rows, kv_width = config_.kv_size(), q_width = config_.q_size();
      const std::int64_t slots = decode ? M : 1;
      const std::size_t cached = float_bytes(slots * c.context * 2 * kv_width);
      const std::int64_t copies = copies_of(cached);
      const std::unique_ptr<KvCache> cache = filled_cache(slots, c.context, copies);
      const Rows rows = decode ? decode_rows(backend_, M, c.context) : prefill_rows(backend_, M);
      const Buffer q = RandomNumbers(backend_, Dtype::kFp32, 1.0f).buffer(float_bytes(M * q_width));
      const Buffer out = backend_.allocate(float_bytes(M * q_width));
      BenchRow row = row_of(c, heads_text());
      row.seconds = time(copies, [&](std::int64_t i) {
        backend_.attention(out.as<float>(), q.as<float>(), cache->layer(i), config_.num_heads,
                           config_.num_kv_heads, config_.head_dim, rows.map);
      });
      double reads = 0;  // cached positions, by all rows
      for (const std::int32_t position : rows.position) reads += position + 1.0;
      row.bytes = static_cast<double>(cached + float_bytes(2 * M * q_width));
      row.operations = 4.0 * reads * static_cast<double>(q_width);
      report(row);
    }
  }

  // ---- What else a step consists of. Its inputs were just written: no rotation.
  void others() {
    for (const std::string_view group : {"elementwise", "commitment", "sampler"}) {
      for (const Case& c : cases_of(group)) {
        if (c.what == "rms_norm") rms_norm(c);
        if (c.what == "rope_store") rope_store(c);
        if (group == "commitment") commitment(c);
        if (group == "sampler") sampler(c);
      }
    }
  }

  void rms_norm(const Case& c) {
    const std::int64_t M = c.rows, width = config_.hidden_size;
    const Buffer x = RandomNumbers(backend_, Dtype::kFp32, 1.0f).buffer(float_bytes(M * width));
    const Buffer out = backend_.allocate(float_bytes(M * width));
    const Buffer ones = placed(backend_, std::vector<float>(static_cast<std::size_t>(width), 1.0f));
    const Vector weight{Dtype::kFp32, width, ones.as<std::byte>()};
    BenchRow row = row_of(c, "of " + std::to_string(width));
    row.seconds = time(1, [&](std::int64_t) {
      backend_.rms_norm(out.as<float>(), x.as<float>(), weight, config_.rms_norm_eps, M);
    });
    row.bytes = static_cast<double>(float_bytes(2 * M * width));
    row.operations = 4.0 * static_cast<double>(M * width);
    report(row);
  }

  void rope_store(const Case& c) {
    constexpr std::int64_t kDecodeContext = 128;
    const std::int64_t M = c.rows, q_width = config_.q_size(), kv_width = config_.kv_size();
    const bool decode = M <= kHeadRows;
    const std::int64_t context = decode ? kDecodeContext : M;
    const std::unique_ptr<KvCache> cache = filled_cache(decode ? M : 1, context, 1);
    const Rows rows = decode ? decode_rows(backend_, M, context) : prefill_rows(backend_, M);
    const RandomNumbers numbers(backend_, Dtype::kFp32, 1.0f);
    const Buffer q = numbers.buffer(float_bytes(M * q_width));
    const Buffer k = numbers.buffer(float_bytes(M * kv_width));
    const Buffer v = numbers.buffer(float_bytes(M * kv_width));
    const RopeTables tables = rope_tables(rope_inverse_frequencies(config_), context);
    const Buffer cosines = placed(backend_, tables.cosines), sines = placed(backend_, tables.sines);
    const LayerKv layer = cache->layer(0);
    RopeStore arguments;
    arguments.q = q.as<float>();
    arguments.k = k.as<float>();
    arguments.v = v.as<float>();
    arguments.cosines = cosines.as<float>();
    arguments.sines = sines.as<float>();
    arguments.heads = config_.num_heads;
    arguments.kv_heads = config_.num_kv_heads;
    arguments.head_dim = config_.head_dim;
    arguments.cache = &layer;
    BenchRow row = row_of(c, heads_text());
    row.seconds = time(1, [&](std::int64_t) { backend_.rope_store(arguments, rows.map); });
    // q and k are read and written, v is read, k and v are written to the cache.
    row.bytes = static_cast<double>(float_bytes(M * (2 * q_width + 5 * kv_width)));
    row.operations = 3.0 * static_cast<double>(M * (q_width + kv_width));
    report(row);
  }

  void commitment(const Case& c) {
    const std::int64_t M = c.rows;
    // A short step commits to most layers at once, a long one layer by layer (engine.cc).
    const std::int64_t layers = M <= kHeadRows ? config_.num_layers : 1;
    std::int64_t groups = 1, first = config_.vocab_size, second = 0;
    LeafType type = LeafType::kLogits;
    BenchRow row = row_of(c, "logits of " + std::to_string(first));
    if (c.what == "hash_rows") {
      groups = layers == 1 ? 1 : layers + 1;
      first = config_.hidden_size;
      type = LeafType::kRow;
      row.shape = std::to_string(groups) + " layers of " + std::to_string(first);
    } else if (c.what == "hash_key_values") {
      groups = layers;
      first = second = config_.kv_size();
      type = LeafType::kKeyValue;
      row.shape = std::to_string(groups) + " layers of 2x" + std::to_string(first);
    }
    const RandomNumbers numbers(backend_, Dtype::kFp32, 1.0f);
    const Buffer a = numbers.buffer(float_bytes(groups * M * first));
    const Buffer b = numbers.buffer(float_bytes(groups * M * second));
    const Buffer out = backend_.allocate(static_cast<std::size_t>(groups * M) * sizeof(Digest));
    const Buffer flag = backend_.allocate(sizeof(Digest));
    const Rows rows = prefill_rows(backend_, M);
    row.seconds = time(1, [&](std::int64_t) {
      if (c.what == "check_finite") {
        backend_.flag_non_finite(flag.as<std::uint32_t>(), a.as<float>(), M * first);
      } else {
        backend_.hash_rows(out.as<Digest>(), flag.as<std::uint32_t>(), type, 0, groups,
                           a.as<float>(), float_bytes(first), second == 0 ? nullptr : b.as<float>(),
                           float_bytes(second), rows.map);
      }
      backend_.finish_hashing();
    });
    row.bytes = static_cast<double>(float_bytes(groups * M * (first + second)));
    report(row);
  }

  void sampler(const Case& c) {
    constexpr float kLogitDeviation = 3.0f;
    const std::int64_t M = c.rows, vocab = config_.vocab_size;
    const Buffer logits =
        RandomNumbers(backend_, Dtype::kFp32, kLogitDeviation).buffer(float_bytes(M * vocab));
    std::vector<SampleRequest> requests(static_cast<std::size_t>(M));
    const bool drawn = c.what == "sample_top_p";
    const SampleKinds kinds{drawn, false, drawn};
    for (std::size_t m = 0; m < requests.size(); ++m) {
      if (drawn) {
        requests[m].params.temperature = 0.8f;
        requests[m].params.top_p = 0.95f;
      }
      requests[m].draw = (m + 1) * 0x9e3779b97f4a7c15u;
    }
    const Buffer placed_requests = placed(backend_, requests);
    const Buffer out = backend_.allocate(static_cast<std::size_t>(M) * sizeof(std::int32_t));
    BenchRow row = row_of(c, "of " + std::to_string(vocab));
    row.seconds = time(1, [&](std::int64_t) {
      backend_.sample(out.as<std::int32_t>(), logits.as<float>(), vocab,
                      placed_requests.as<SampleRequest>(), M, kinds);
    });
    row.bytes = static_cast<double>(float_bytes(M * vocab));
    report(row);
  }

  // ---- Whole steps, by the clock on the wall, as a prover runs them.
  void steps() {
    const std::vector<Case> cases = cases_of("steps");
    if (cases.empty()) return;
    EngineOptions engine_options;
    engine_options.defer_leaves = true;  // as GenerationBatch has it
    std::size_t pages = 0;
    for (const Case& c : cases) {
      const bool decode = c.what == "decode";
      const std::int64_t positions = c.context + (decode ? LayerKv::kPagePositions : 0);
      engine_options.slots = std::max(engine_options.slots, decode ? c.rows : 1);
      engine_options.capacity = std::max(engine_options.capacity, positions);
      pages += static_cast<std::size_t>((decode ? c.rows : 1) *
                                        (positions / LayerKv::kPagePositions + 1));
    }
    const std::size_t besides = Engine::least_memory(config_, engine_options, backend_) +
                                pages * KvCache::page_bytes(config_);
    std::optional<PlacedWeights> weights;
    if (model_ != nullptr) {
      weights.emplace(model_->weights(), backend_, besides);
    } else {
      require_memory(weight_bytes(config_) + besides,
                     "random weights of the shape and what runs on them");
      weights.emplace(random_weights(config_, backend_));
    }
    Engine engine(config_, *weights, backend_, engine_options);
    for (const Case& c : cases) report(step_row(engine, weights->weights(), c));
  }

  StepRow step_row_at(std::int64_t slot, std::int64_t position, bool emit) const {
    StepRow row;
    row.slot = static_cast<std::int32_t>(slot);
    row.position = static_cast<std::int32_t>(position);
    row.token =
        static_cast<std::int32_t>((slot * 7919 + position * 104729 + 1) % config_.vocab_size);
    row.emit = emit;
    return row;
  }

  BenchRow step_row(Engine& engine, const ModelWeights& weights, const Case& c) {
    const bool decode = c.what == "decode";
    constexpr std::int64_t kPage = LayerKv::kPagePositions;
    if (decode) {  // the context first
      std::vector<StepRow> prompt;
      for (std::int64_t slot = 0; slot < c.rows; ++slot) {
        for (std::int64_t t = 0; t < c.context; ++t) prompt.push_back(step_row_at(slot, t, false));
      }
      engine.step(prompt, {});
    }
    // Digests go where a trace would keep them.
    std::vector<Digest> digests;
    StepObserver with, without;
    with.on_leaves = [&](LeafType, std::uint32_t, const RowMap& rows, const Digest* leaves) {
      digests.insert(digests.end(), leaves, leaves + rows.rows);
    };
    // Decode goes on from step to step, within a page, and then anew; a prefill is repeated.
    std::int64_t steps_done = 0;
    double positions = 0;
    // Seconds of a step, in a block of them: the leaves of one are delivered by the next.
    const int block = decode ? 8 : 1;
    const auto run_step = [&](const StepObserver& observer) {
      std::vector<StepRow> rows;
      const std::int64_t position = c.context + steps_done++ % kPage;
      for (std::int64_t m = 0; m < c.rows; ++m) {
        rows.push_back(decode ? step_row_at(m, position, true)
                              : step_row_at(0, m, m + 1 == c.rows));
      }
      positions = 0;
      for (const StepRow& row : rows) positions += row.position + 1.0;
      engine.step(rows, observer);
    };
    const auto seconds_of_step = [&](const StepObserver& observer) {
      digests.clear();
      const auto begin = Clock::now();
      for (int i = 0; i < block; ++i) run_step(observer);
      engine.flush();
      return seconds_since(begin) / block;
    };
    // With and without by turns, so that a machine that drifts does so for both.
    const int warm_up = decode ? 3 : 1;
    const int repeat = std::max(1, options_.repeat / 4);
    std::vector<double> seconds, seconds_without;
    double reads = 0;
    for (int i = -warm_up; i < repeat; ++i) {
      double one[2];
      for (const int which : {0, 1}) {
        const bool commits = (which == 0) == (i % 2 == 0);
        one[commits ? 0 : 1] = seconds_of_step(commits ? with : without);
      }
      if (i < 0) continue;
      seconds.push_back(one[0]);
      seconds_without.push_back(one[1]);
      reads += positions / repeat;
    }

    const ModelConfig& config = config_;
    BenchRow row = row_of(c, "");
    row.shape =
        std::to_string(config.num_layers) + " layers of " + std::to_string(config.hidden_size);
    row.seconds = median(std::move(seconds));
    row.seconds_without_commitment = median(std::move(seconds_without));
    double elements = 0, weights_read = 0;
    const auto count = [&](const Matrix& matrix, double rows) {
      const double size = static_cast<double>(matrix.rows) * static_cast<double>(matrix.cols);
      weights_read += size * static_cast<double>(dtype_bytes(matrix.dtype));
      elements += rows * size;
    };
    const auto M = static_cast<double>(c.rows);
    for (const LayerWeights& layer : weights.layers) {
      for (const Matrix* matrix :
           {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
        count(*matrix, M);
      }
    }
    count(weights.head, decode ? M : 1.0);
    const auto layers = static_cast<double>(config.num_layers);
    const double cached = decode ? reads : M;  // positions, each of one sequence once
    row.bytes =
        weights_read + layers * cached * static_cast<double>(float_bytes(2 * config.kv_size()));
    row.operations = 2.0 * elements + 4.0 * layers * reads * static_cast<double>(config.q_size());
    return row;
  }

  Backend& backend_;
  const ModelConfig& config_;
  const Model* model_;
  const BenchOptions& options_;
  const std::function<void(const BenchRow&)>& on_row_;
  const ProgressFn& progress_;
  bool device_;
  std::vector<Case> cases_;
  Dtype dtype_ = Dtype::kBf16;
  std::size_t rotation_bytes_ = 0;
  std::uint64_t done_ = 0;
};

}  // namespace

BenchFloor floor_of(const BenchRow& row, const Ceilings& ceilings) {
  const double bytes = row.bytes / ceilings.bytes_per_second;
  const double operations = row.operations / ceilings.operations_per_second;
  return bytes >= operations ? BenchFloor{bytes, "bytes"} : BenchFloor{operations, "operations"};
}

std::string bench_names() {
  std::string text;
  std::string_view group;
  for (const Name& entry : kNames) {
    if (entry.group != group) {
      text.append(text.empty() ? "  " : "\n  ").append(entry.group).append(": ");
      group = entry.group;
    } else {
      text.append(", ");
    }
    text.append(entry.name);
  }
  return text;
}

void run_bench(Backend& backend, const ModelConfig& config, const Model* model,
               const Ceilings& ceilings, const BenchOptions& options,
               const std::function<void(const BenchRow&)>& on_row, const ProgressFn& progress) {
  Bench(backend, config, model, ceilings, options, on_row, progress).run();
}

}  // namespace bitwitness
