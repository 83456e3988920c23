// Products of few rows of x: which kernel, and how it is launched (matmul_decode.cuh).
#include <algorithm>
#include <limits>

#include "kernels/cuda/context.h"
#include "kernels/cuda/matmul_decode.cuh"

namespace bitwitness::cuda {
namespace decode {
namespace {

constexpr std::int64_t kMostRows = 16;
// K is exact in binary32 (contract::rms_scale) and products of indices stay in 32 bits.
constexpr std::int64_t kMaxK = std::int64_t{1} << 24;

// Tasks of part `p`, for tasks of `rows` rows of W.
std::int64_t tasks_of(const ProductPart& part, int rows) {
  return (part.N + rows - 1) / rows;
}

bool reads_vectors(const Product& product) {
  if (product.M < 1 || product.M > kMostRows || product.K >= kMaxK) return false;
  std::int64_t rows = 0;
  for (int p = 0; p < product.part_count; ++p) {
    const ProductPart& part = product.parts[p];
    if (!rows_are_vectors(product.x, part.W, product.K)) return false;
    rows += part.N;
  }
  return rows > 0 && rows < std::numeric_limits<std::int32_t>::max() / 16;
}

// All but the tasks.
Arguments arguments_of(const Product& product) {
  Arguments a{};
  a.x = product.x;
  a.norm = product.norm;
  a.residual = product.residual;
  a.part_count = product.part_count;
  a.M = static_cast<int>(product.M);
  a.K = static_cast<int>(product.K);
  a.segments = static_cast<int>((product.K + kSegment - 1) / kSegment);
  a.segment_lanes = a.segments >= 3 ? 4 : a.segments;
  a.eps = product.eps;
  a.norm_dtype = product.norm_dtype;
  a.epilogue = product.epilogue;
  for (int p = 0; p < product.part_count; ++p) {
    a.parts[p] = {product.parts[p].W, product.parts[p].y, product.parts[p].N, 0};
  }
  return a;
}

// So much that no other such block fits beside it. Blocks start while others still run, and the
// scheduler would put two of them on one multiprocessor and none on the next; and a block that
// starts when the one in front has just ended reads weights in exactly the gap between kernels.
std::size_t alone(const Context& context, std::size_t shared_bytes) {
  return std::max(shared_bytes, context.shared_limit / 2 + 1024);
}

// ---- row_kernel

template <Dtype kDtype, int kDepth>
void launch_rows_as(Context& context, const Product& product, int threads) {
  Arguments a = arguments_of(product);
  const bool pair = a.epilogue == Epilogue::kSwiglu;
  const int task_rows = 4 / a.segment_lanes * (pair ? 1 : kRowRows);
  std::int64_t tasks = 0;
  for (int p = 0; p < product.part_count; ++p) {
    a.parts[p].first_task = static_cast<int>(tasks);
    if (!pair || p == 0) tasks += tasks_of(product.parts[p], task_rows);
  }
  a.tasks = static_cast<int>(tasks);
  const std::size_t shared_bytes =
      alone(context, row_kernel_shared_bytes(a.segments, threads, kDepth));
  const auto kernel = row_kernel<kDtype, kDepth>;
  context.blocks_per_multiprocessor(reinterpret_cast<const void*>(kernel), threads, shared_bytes);
  const std::int64_t blocks = std::min<std::int64_t>(tasks, context.multiprocessors);
  launch_overlapping(context, kernel, dim3(static_cast<unsigned>(blocks)),
                     dim3(static_cast<unsigned>(threads)), shared_bytes, a);
}

constexpr int kRowDepth = 4;  // leaves room for blocks of other kernels beside it

// As many threads as their queues find room for beside x; 0: none.
int row_threads(const Context& context, std::int64_t K) {
  const auto segments = static_cast<int>((K + kSegment - 1) / kSegment);
  int threads = kRowMaxThreads;
  while (threads >= 128 &&
         row_kernel_shared_bytes(segments, threads, kRowDepth) > context.shared_limit) {
    threads -= 128;
  }
  return threads;
}

void launch_rows(Context& context, const Product& product) {
  const int threads = row_threads(context, product.K);
  switch (product.dtype) {
    case Dtype::kBf16:
      return launch_rows_as<Dtype::kBf16, kRowDepth>(context, product, threads);
    case Dtype::kFp16:
      return launch_rows_as<Dtype::kFp16, kRowDepth>(context, product, threads);
    case Dtype::kFp32:
      return launch_rows_as<Dtype::kFp32, kRowDepth>(context, product, threads);
  }
}

bool fits_rows(const Context& context, const Product& product) {
  return product.M == 1 && reads_vectors(product) && row_threads(context, product.K) != 0;
}

// ---- segment_kernel

constexpr int kSegmentSteps = 2, kSegmentDepth = 3;

// As many warps as memory and registers allow, but equally many on each of the four schedulers.
int segment_warps(const Context& context, int rows, int steps, int depth) {
  int warps = segment_max_threads(rows) / 32;
  while (warps > 1 &&
         segment_kernel_shared_bytes(rows, 32 * warps, depth, steps) > context.shared_limit) {
    warps -= warps > 4 ? 4 : 1;
  }
  return warps;
}

template <Dtype kDtype, int kM, int kBatchSteps, int kDepth>
void launch_segments_as(Context& context, const Product& product, int warps = 0) {
  Arguments a = arguments_of(product);
  constexpr int kTaskRows = kSegmentTaskRows<kDtype>;
  std::int64_t tasks = 0, most_rows = 0;
  for (int p = 0; p < product.part_count; ++p) {
    a.parts[p].first_task = static_cast<int>(tasks);
    tasks += tasks_of(product.parts[p], kTaskRows);
    most_rows = std::max(most_rows, product.parts[p].N);
  }
  a.tasks = static_cast<int>(tasks);
  a.partial_rows = tasks * kTaskRows;
  const Scratch<float> partial(context, static_cast<std::size_t>(a.segments) *
                                            static_cast<std::size_t>(a.partial_rows) * kM);
  a.partial = partial.get();

  const std::int64_t blocks =
      std::clamp<std::int64_t>(context.multiprocessors / a.segments, 1, tasks);
  if (warps == 0) warps = segment_warps(context, kM, kBatchSteps, kDepth);
  const std::size_t shared_bytes =
      alone(context, segment_kernel_shared_bytes(kM, 32 * warps, kDepth, kBatchSteps));
  const auto kernel = segment_kernel<kDtype, kM, kBatchSteps, kDepth>;
  context.blocks_per_multiprocessor(reinterpret_cast<const void*>(kernel), 32 * warps,
                                    shared_bytes);
  launch_overlapping(context, kernel, dim3(static_cast<unsigned>(blocks * a.segments)),
                     dim3(static_cast<unsigned>(32 * warps)), shared_bytes, a);

  const auto columns =
      static_cast<unsigned>((most_rows * (kM / 4) + kCombineThreads - 1) / kCombineThreads);
  const unsigned parts = a.epilogue == Epilogue::kSwiglu ? 1u : static_cast<unsigned>(a.part_count);
  launch_overlapping(context, combine_kernel<kM, kTaskRows>, dim3(columns, parts),
                     dim3(kCombineThreads), 0, a);
}

template <int kM>
void launch_segments(Context& context, const Product& product) {
  switch (product.dtype) {
    case Dtype::kBf16:
      return launch_segments_as<Dtype::kBf16, kM, kSegmentSteps, kSegmentDepth>(context, product);
    case Dtype::kFp16:
      return launch_segments_as<Dtype::kFp16, kM, kSegmentSteps, kSegmentDepth>(context, product);
    case Dtype::kFp32:
      return launch_segments_as<Dtype::kFp32, kM, kSegmentSteps, kSegmentDepth>(context, product);
  }
}

template <int kM>
bool fits_segments(const Context& context, const Product& product) {
  return product.M <= kM && reads_vectors(product) &&
         segment_kernel_shared_bytes(kM, 32, kSegmentDepth, kSegmentSteps) <= context.shared_limit;
}

}  // namespace
}  // namespace decode

std::span<const ProductVariant> decode_variants() {
  using namespace decode;
  static constexpr ProductVariant kVariants[] = {
      {"decode_rows", fits_rows, true, launch_rows},
      {"decode_segments_4", fits_segments<4>, false, launch_segments<4>},
      {"decode_segments_8", fits_segments<8>, false, launch_segments<8>},
      {"decode_segments_12", fits_segments<12>, false, launch_segments<12>},
      {"decode_segments_16", fits_segments<16>, false, launch_segments<16>},
  };
  return kVariants;
}

}  // namespace bitwitness::cuda
