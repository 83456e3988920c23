#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <cassert>
#include <string>
#include <vector>

#include "attest/base/error.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/known_answers.h"
#include "kernels/reference/reference_backend.h"
#include "kernels/sampler.h"

namespace bitwitness {
namespace {

// Below these a thread's share is not worth waking it.
constexpr std::int64_t kGrainElements = 16384;     // of an element-wise operator
constexpr std::int64_t kGrainMultiplies = 262144;  // multiply-adds of a product

// Rows of x that are packed at once in a prefill product: bounds the scratch to 4 MB.
constexpr std::int64_t kRowBlock = 1024;

// Rows of W that several groups of x rows read in turn; a multiple of every kernel's dot_rows.
constexpr std::int64_t kRowsInCache = 64;

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// How many units of `unit_cost` a thread should get at least.
constexpr std::int64_t grain_of(std::int64_t grain, std::int64_t unit_cost) {
  return divide_up(grain, std::max<std::int64_t>(unit_cost, 1));
}

void require_default_environment(const std::string& where) {
  if (floating_point_environment_is_default()) return;
  throw infrastructure_error(
      where +
      " flushes subnormals, does not round to nearest, or converts by other rules than IEEE 754's: "
      "another library changed the floating-point environment; refusing to compute in it");
}

class CpuBackend final : public ReferenceBackend {
 public:
  CpuBackend(const CpuKernels& kernels, int threads)
      : kernels_(kernels),
        pool_(threads,
              [](int thread) {
                const std::string where = "thread " + std::to_string(thread);
                check_known_answers(where);
                require_default_environment(where);
              }),
        scratch_(static_cast<std::size_t>(pool_.threads())) {}

  std::string name() const override { return kernels_.isa; }

  void embed(float* out, const Matrix& embedding, const std::int32_t* tokens,
             std::int64_t M) override;
  void rms_norm(float* out, const float* x, const Vector& weight, float eps,
                std::int64_t M) override;
  void matmul(float* y, const float* x, const Matrix& W, std::int64_t M) override;
  void rope(float* x, std::int64_t heads, std::int64_t head_dim, const float* cosines,
            const float* sines, const RowMap& rows) override;
  void attention(float* out, const float* q, const LayerKv& cache, std::int64_t heads,
                 std::int64_t kv_heads, std::int64_t head_dim, const RowMap& rows) override;
  void swiglu(float* out, const float* gate, const float* up, std::int64_t count) override;
  void add(float* out, const float* x, const float* y, std::int64_t count) override;
  void hash_rows(Digest* out, std::uint32_t* non_finite, LeafType type, std::uint32_t first_layer,
                 std::int64_t layers, const float* first, std::size_t first_bytes,
                 const float* second, std::size_t second_bytes, const RowMap& rows) override;
  NonFinite find_non_finite(const float* x, std::int64_t width, std::int64_t M) override;
  void sample(std::int32_t* out, const float* logits, std::int64_t vocab,
              const SampleRequest* requests, std::int64_t M, SampleKinds kinds) override;

 private:
  void matmul_rows(float* y, const float* x, const Matrix& W, std::int64_t M);
  void matmul_panels(float* y, const float* x, const Matrix& W, std::int64_t M);

  // The pool's loop, on a thread that may compute.
  template <class Body>
  void parallel_for(std::int64_t count, std::int64_t grain, const Body& body) {
    require_default_environment("the calling thread");
    pool_.parallel_for(count, grain, body);
  }

  // Room for `count` floats on a cache line's boundary: a vector that crosses lines is read twice.
  // Grows only, so that steady state allocates nothing.
  float* at_least(Buffer& buffer, std::int64_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
    if (buffer.bytes() < bytes) {
      buffer = Buffer();
      buffer = allocate(bytes);
    }
    return buffer.as<float>();
  }

  const CpuKernels& kernels_;
  ThreadPool pool_;
  Buffer packed_x_;              // x in a kernel's order
  std::vector<Buffer> scratch_;  // per thread
  Buffer norm_weight_;           // upcast
};

void CpuBackend::embed(float* out, const Matrix& embedding, const std::int32_t* tokens,
                       std::int64_t M) {
  const std::int64_t cols = embedding.cols;
  const std::int64_t row_bytes = cols * static_cast<std::int64_t>(dtype_bytes(embedding.dtype));
  parallel_for(M, grain_of(kGrainElements, cols), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t m = begin; m < end; ++m) {
      kernels_.upcast(out + m * cols, embedding.dtype, embedding.data + tokens[m] * row_bytes,
                      cols);
    }
  });
}

void CpuBackend::rms_norm(float* out, const float* x, const Vector& weight, float eps,
                          std::int64_t M) {
  const std::int64_t K = weight.size;
  float* const w = at_least(norm_weight_, K);
  kernels_.upcast(w, weight.dtype, weight.data, K);
  parallel_for(M, grain_of(kGrainElements, K), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t m = begin; m < end; ++m) {
      const float* row = x + m * K;
      const float scale = contract::rms_scale(kernels_.sum_squares(row, K), K, eps);
      kernels_.scale_row(out + m * K, row, w, scale, K);
    }
  });
}

void CpuBackend::matmul(float* y, const float* x, const Matrix& W, std::int64_t M) {
  assert(W.cols >= 1);
  if (M <= kernels_.row_limit) {
    matmul_rows(y, x, W, M);
    return;
  }
  for (std::int64_t m = 0; m < M; m += kRowBlock) {
    matmul_panels(y + m * W.rows, x + m * W.cols, W, std::min(kRowBlock, M - m));
  }
}

void CpuBackend::matmul_rows(float* y, const float* x, const Matrix& W, std::int64_t M) {
  if (M <= 0) return;
  const std::int64_t K = W.cols, N = W.rows;
  const std::int64_t stride = divide_up(K, kDotBlock) * kDotBlock;
  float* const packed = at_least(packed_x_, M * stride);
  for (std::int64_t m = 0; m < M; ++m) kernels_.interleave(packed + m * stride, x + m * K, K);

  DotRows args;
  args.w = W.data;
  args.w_stride_bytes = K * static_cast<std::int64_t>(dtype_bytes(W.dtype));
  args.K = K;
  args.x_stride = stride;
  args.out_stride = N;
  const DotRowsFunction function = W.dtype == Dtype::kBf16   ? kernels_.dot_rows_bf16
                                   : W.dtype == Dtype::kFp16 ? kernels_.dot_rows_fp16
                                                             : kernels_.dot_rows_fp32;
  const std::int64_t unit = kernels_.dot_rows;
  // More x rows than a kernel takes go in equal groups, by turns over so many rows of W that the
  // later groups find them in a cache.
  const std::int64_t groups = divide_up(M, kMaxDotRows);
  parallel_for(divide_up(N, unit), grain_of(kGrainMultiplies, unit * K * M),
               [&](std::int64_t begin, std::int64_t end, int) {
                 const std::int64_t n_end = std::min(end * unit, N);
                 const std::int64_t step = groups == 1 ? N : kRowsInCache;
                 for (std::int64_t n = begin * unit; n < n_end; n += step) {
                   for (std::int64_t g = 0; g < groups; ++g) {
                     const std::int64_t m = g * M / groups, next = (g + 1) * M / groups;
                     DotRows part = args;
                     part.x = packed + m * stride;
                     part.out = y + m * N;
                     function(part, static_cast<int>(next - m), n, std::min(n + step, n_end));
                   }
                 }
               });
}

void CpuBackend::matmul_panels(float* y, const float* x, const Matrix& W, std::int64_t M) {
  const std::int64_t K = W.cols, N = W.rows;
  const std::int64_t columns = kernels_.panel_columns;
  const std::int64_t panels = divide_up(N, columns);
  const PackPanelFunction pack_panel = W.dtype == Dtype::kBf16   ? kernels_.pack_panel_bf16
                                       : W.dtype == Dtype::kFp16 ? kernels_.pack_panel_fp16
                                                                 : kernels_.pack_panel_fp32;
  PanelArgs args;
  args.y = y;
  args.w = W.data;
  args.N = N;
  args.K = K;
  args.rows = M;
  args.tiles = divide_up(M, kernels_.tile_rows);
  float* const packed = at_least(packed_x_, M * std::min<std::int64_t>(K, contract::kSegment));
  args.x = packed;
  // With few panels the tiles are shared out, too, and a panel is packed by each thread that needs
  // it.
  const std::int64_t wanted = 2 * static_cast<std::int64_t>(pool_.threads());
  const std::int64_t parts = std::clamp<std::int64_t>(wanted / panels, 1, args.tiles);

  for (std::int64_t k = 0; k < K; k += contract::kSegment) {
    args.k_begin = k;
    args.k_count = static_cast<int>(std::min<std::int64_t>(K - k, contract::kSegment));
    parallel_for(args.tiles, grain_of(kGrainElements, kernels_.tile_rows * args.k_count),
                 [&](std::int64_t begin, std::int64_t end, int) {
                   for (std::int64_t t = begin; t < end; ++t) {
                     const std::int64_t row = t * M / args.tiles;
                     const std::int64_t rows = (t + 1) * M / args.tiles - row;
                     kernels_.pack_tile(packed + row * args.k_count, x + row * K + k, K,
                                        static_cast<int>(rows), args.k_count);
                   }
                 });
    parallel_for(
        panels * parts, grain_of(kGrainMultiplies, columns * args.k_count * divide_up(M, parts)),
        [&](std::int64_t begin, std::int64_t end, int thread) {
          float* const panel =
              at_least(scratch_[static_cast<std::size_t>(thread)], columns * contract::kSegment);
          std::int64_t in_panel = -1;
          for (std::int64_t unit = begin; unit < end; ++unit) {
            const std::int64_t n = unit / parts * columns, part = unit % parts;
            if (n != in_panel) pack_panel(args, n, panel);
            in_panel = n;
            kernels_.run_panel(args, n, panel, part * args.tiles / parts,
                               (part + 1) * args.tiles / parts);
          }
        });
  }
}

void CpuBackend::rope(float* x, std::int64_t heads, std::int64_t head_dim, const float* cosines,
                      const float* sines, const RowMap& rows) {
  const std::int64_t half = head_dim / 2, width = heads * head_dim;
  parallel_for(rows.rows, grain_of(kGrainElements, width),
               [&](std::int64_t begin, std::int64_t end, int) {
                 for (std::int64_t m = begin; m < end; ++m) {
                   const std::int64_t at = rows.position[m] * half;
                   kernels_.rope_row(x + m * width, heads, half, cosines + at, sines + at);
                 }
               });
}

void CpuBackend::attention(float* out, const float* q, const LayerKv& cache, std::int64_t heads,
                           std::int64_t kv_heads, std::int64_t head_dim, const RowMap& rows) {
  const std::int64_t share = heads / kv_heads;  // query heads of a key-value head
  // Queries that read one key-value head of one sequence are worked on together: `row_span`
  // consecutive rows times `head_span` heads.
  const std::int64_t head_span = std::min<std::int64_t>(share, kMaxDotRows);
  const std::int64_t row_span = kMaxDotRows / head_span;
  const std::int64_t head_parts = divide_up(share, head_span);

  struct Task {
    std::int64_t row, rows, kv_head, head, heads, cost;
  };
  std::vector<Task> tasks;
  for (std::int64_t m = 0; m < rows.rows;) {
    std::int64_t count = 1;
    while (count < row_span && m + count < rows.rows && rows.slot[m + count] == rows.slot[m] &&
           rows.position[m + count] > rows.position[m + count - 1]) {
      ++count;
    }
    for (std::int64_t g = 0; g < kv_heads; ++g) {
      for (std::int64_t part = 0; part < head_parts; ++part) {
        const std::int64_t head = g * share + part * head_span;
        const std::int64_t head_count = std::min(head_span, share - part * head_span);
        tasks.push_back({m, count, g, head, head_count,
                         (rows.position[m + count - 1] + 1) * head_dim * count * head_count});
      }
    }
    m += count;
  }
  if (tasks.empty()) return;
  // Later positions cost more: ranges are cut by cost, at boundaries of `slices` equal parts.
  std::vector<std::int64_t> cost_before(tasks.size() + 1, 0);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    cost_before[i + 1] = cost_before[i] + tasks[i].cost;
  }
  const std::int64_t total = cost_before.back();
  const std::int64_t slices = std::clamp<std::int64_t>(total / kGrainElements, 1, pool_.threads());
  const auto first_task = [&](std::int64_t slice) {
    const std::int64_t target = total / slices * slice + total % slices * slice / slices;
    return slice == slices
               ? tasks.size()
               : static_cast<std::size_t>(
                     std::lower_bound(cost_before.begin(), cost_before.end() - 1, target) -
                     cost_before.begin());
  };
  const float scale = contract::attention_scale(static_cast<int>(head_dim));

  parallel_for(slices, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
    float* const interleaved = at_least(scratch_[static_cast<std::size_t>(thread)],
                                        kMaxDotRows * divide_up(head_dim, kDotBlock) * kDotBlock);
    for (std::size_t i = first_task(begin); i < first_task(end); ++i) {
      const Task& task = tasks[i];
      AttentionGroup group;
      group.head_dim = static_cast<int>(head_dim);
      group.scale = scale;
      group.stride = cache.kv_width;
      group.pages = cache.pages + rows.slot[task.row] * cache.pages_per_slot;
      group.key_offset = cache.key_offset + task.kv_head * head_dim;
      group.value_offset = cache.value_offset + task.kv_head * head_dim;
      for (std::int64_t m = task.row + task.rows - 1; m >= task.row; --m) {
        for (std::int64_t h = task.head; h < task.head + task.heads; ++h) {
          const int a = group.queries++;
          group.q[a] = q + (m * heads + h) * head_dim;
          group.out[a] = out + (m * heads + h) * head_dim;
          group.last[a] = rows.position[m];
        }
      }
      kernels_.attention(group, interleaved);
    }
  });
}

void CpuBackend::swiglu(float* out, const float* gate, const float* up, std::int64_t count) {
  parallel_for(count, kGrainElements, [&](std::int64_t begin, std::int64_t end, int) {
    kernels_.swiglu(out + begin, gate + begin, up + begin, end - begin);
  });
}

void CpuBackend::add(float* out, const float* x, const float* y, std::int64_t count) {
  parallel_for(count, 4 * kGrainElements, [&](std::int64_t begin, std::int64_t end, int) {
    kernels_.add(out + begin, x + begin, y + begin, end - begin);
  });
}

void CpuBackend::hash_rows(Digest* out, std::uint32_t* non_finite, LeafType type,
                           std::uint32_t first_layer, std::int64_t layers, const float* first,
                           std::size_t first_bytes, const float* second, std::size_t second_bytes,
                           const RowMap& rows) {
  const auto count = [&](std::size_t bytes) {
    return layers * rows.rows * static_cast<std::int64_t>(bytes / sizeof(float));
  };
  flag_non_finite(non_finite, first, count(first_bytes));
  if (second_bytes != 0) flag_non_finite(non_finite, second, count(second_bytes));
  const std::int64_t row_bytes = static_cast<std::int64_t>(first_bytes + second_bytes);
  parallel_for(layers * rows.rows, grain_of(kGrainElements, row_bytes),
               [&](std::int64_t begin, std::int64_t end, int) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   out[i] = hash_row(type, first_layer, i, first, first_bytes, second, second_bytes,
                                     rows);
                 }
               });
}

NonFinite CpuBackend::find_non_finite(const float* x, std::int64_t width, std::int64_t M) {
  std::vector<std::int64_t> found(static_cast<std::size_t>(pool_.threads()), -1);
  parallel_for(width * M, 4 * kGrainElements,
               [&](std::int64_t begin, std::int64_t end, int thread) {
                 const std::int64_t at = kernels_.find_non_finite(x + begin, end - begin);
                 if (at >= 0) found[static_cast<std::size_t>(thread)] = begin + at;
               });
  for (const std::int64_t at : found) {  // threads have ascending ranges
    if (at >= 0) return {at / width, at % width};
  }
  return {};
}

void CpuBackend::sample(std::int32_t* out, const float* logits, std::int64_t vocab,
                        const SampleRequest* requests, std::int64_t M, SampleKinds) {
  parallel_for(M, grain_of(kGrainElements, vocab), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t m = begin; m < end; ++m) {
      const SampleRequest& request = requests[m];
      const float* row = logits + m * vocab;
      out[m] = request.params.temperature == 0.0f
                   ? static_cast<std::int32_t>(kernels_.argmax(row, vocab))
                   : sample_token(row, vocab, request.params, request.draw);
    }
  });
}

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(std::string_view isa, int threads) {
  const CpuKernels* kernels = cpu_kernels(isa);
  if (kernels == nullptr) {
    throw usage_error("CPU kernels '" + std::string(isa) +
                      "': this processor or this build does not have them; use --device cpu");
  }
  if (threads < 1) throw usage_error("a CPU backend needs at least one thread");
  return std::make_unique<CpuBackend>(*kernels, threads);
}

}  // namespace bitwitness
