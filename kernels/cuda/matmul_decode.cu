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
  return rows < std::numeric_limits<std::int32_t>::max() / 16;
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

// ---- row_kernel

// Half of what a multiprocessor has, so that the next kernel's blocks find room beside this one's.
std::size_t half_of_shared(const Context& context) {
  return context.shared_limit / 2;
}

template <Dtype kDtype, int kM, int kDepth>
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
  const std::size_t shared_bytes = row_kernel_shared_bytes(kM, a.segments, threads, kDepth);
  const auto kernel = row_kernel<kDtype, kM, kDepth>;
  context.blocks_per_multiprocessor(reinterpret_cast<const void*>(kernel), threads, shared_bytes);
  const std::int64_t blocks = std::min<std::int64_t>(tasks, context.multiprocessors);
  launch_overlapping(context, kernel, dim3(static_cast<unsigned>(blocks)),
                     dim3(static_cast<unsigned>(threads)), shared_bytes, a, 0);
}

constexpr int kRowThreads = 256;
constexpr int kDeep = 6, kShallow = 3;

template <int kM, int kDepth>
std::size_t row_shared(const Product& product) {
  const auto segments = static_cast<int>((product.K + kSegment - 1) / kSegment);
  return row_kernel_shared_bytes(kM, segments, kRowThreads, kDepth);
}

template <Dtype kDtype, int kM>
void launch_rows_of(Context& context, const Product& product) {
  if (row_shared<kM, kDeep>(product) <= half_of_shared(context)) {
    return launch_rows_as<kDtype, kM, kDeep>(context, product, kRowThreads);
  }
  launch_rows_as<kDtype, kM, kShallow>(context, product, kRowThreads);
}

template <int kM>
void launch_rows(Context& context, const Product& product) {
  switch (product.dtype) {
    case Dtype::kBf16:
      return launch_rows_of<Dtype::kBf16, kM>(context, product);
    case Dtype::kFp16:
      return launch_rows_of<Dtype::kFp16, kM>(context, product);
    case Dtype::kFp32:
      return launch_rows_of<Dtype::kFp32, kM>(context, product);
  }
}

template <int kM>
bool fits_rows(const Context& context, const Product& product) {
  return product.M <= kM && reads_vectors(product) &&
         row_shared<kM, kShallow>(product) <= context.shared_limit;
}

// ---- segment_kernel

constexpr int kSegmentDepth = 4;

int segment_threads(const Context& context, int rows) {
  int threads = kSegmentMaxThreads;
  while (threads > 32 &&
         segment_kernel_shared_bytes(rows, threads, kSegmentDepth) > context.shared_limit) {
    threads /= 2;
  }
  return threads;
}

template <Dtype kDtype, int kM, int kDepth>
void launch_segments_as(Context& context, const Product& product, int threads) {
  Arguments a = arguments_of(product);
  constexpr int kTaskRows = kSegmentTaskRows<kDtype>;
  std::int64_t tasks = 0, most = 0;
  for (int p = 0; p < product.part_count; ++p) {
    a.parts[p].first_task = static_cast<int>(tasks);
    tasks += tasks_of(product.parts[p], kTaskRows);
    most = std::max(most, product.parts[p].N);
  }
  a.tasks = static_cast<int>(tasks);
  a.partial_rows = tasks * kTaskRows;
  const Scratch<float> partial(context, static_cast<std::size_t>(a.segments) *
                                            static_cast<std::size_t>(a.partial_rows) * kM);
  a.partial = partial.get();

  const std::size_t shared_bytes = segment_kernel_shared_bytes(kM, threads, kDepth);
  const auto kernel = segment_kernel<kDtype, kM, kDepth>;
  context.blocks_per_multiprocessor(reinterpret_cast<const void*>(kernel), threads, shared_bytes);
  const std::int64_t blocks =
      std::clamp<std::int64_t>(context.multiprocessors / a.segments, 1, tasks) * a.segments;
  launch_overlapping(context, kernel, dim3(static_cast<unsigned>(blocks)),
                     dim3(static_cast<unsigned>(threads)), shared_bytes, a, 0);

  const std::int64_t threads_needed = most * (kM / 4);
  const auto columns =
      static_cast<unsigned>((threads_needed + kCombineThreads - 1) / kCombineThreads);
  const unsigned parts = a.epilogue == Epilogue::kSwiglu ? 1u : static_cast<unsigned>(a.part_count);
  launch_overlapping(context, combine_kernel<kM, kTaskRows>, dim3(columns, parts),
                     dim3(kCombineThreads), 0, a);
}

template <int kM>
void launch_segments(Context& context, const Product& product) {
  const int threads = segment_threads(context, kM);
  switch (product.dtype) {
    case Dtype::kBf16:
      return launch_segments_as<Dtype::kBf16, kM, kSegmentDepth>(context, product, threads);
    case Dtype::kFp16:
      return launch_segments_as<Dtype::kFp16, kM, kSegmentDepth>(context, product, threads);
    case Dtype::kFp32:
      return launch_segments_as<Dtype::kFp32, kM, kSegmentDepth>(context, product, threads);
  }
}

template <int kM>
bool fits_segments(const Context& context, const Product& product) {
  return product.M <= kM && reads_vectors(product) &&
         segment_kernel_shared_bytes(kM, 32, kSegmentDepth) <= context.shared_limit;
}

}  // namespace
}  // namespace decode

std::span<const ProductVariant> decode_variants() {
  using namespace decode;
  static constexpr ProductVariant kVariants[] = {
      {"decode_rows_1", fits_rows<1>, true, launch_rows<1>},
      {"decode_rows_2", fits_rows<2>, true, launch_rows<2>},
      {"decode_segments_4", fits_segments<4>, false, launch_segments<4>},
      {"decode_segments_8", fits_segments<8>, false, launch_segments<8>},
      {"decode_segments_16", fits_segments<16>, false, launch_segments<16>},
  };
  return kVariants;
}

}  // namespace bitwitness::cuda
