// Kernels over a vector type F of kWidth binary32 lanes, written once for every instruction set.
//
// A kernels_<isa>.cc includes this file inside its own anonymous namespace, after the vector
// primitives. Only intrinsics and what is defined here or there may be called: no function of
// another header (see cpu_kernels.h). No #pragma once: it is text.
//
// The primitives (kernels_avx2.cc says what each does):
//   types       F, I (kWidth floats, as many double words), F8 (8 floats)
//   constants   kWidth, kPackRows, kPanelVectors, kTileRows (at most 16), kValueVectors
//   floats      zero set1 broadcast load store load_part store_part first_lane
//               add sub mul div fma negate max_or_second min_or_second
//               equal_lanes non_finite_lanes scale_by_exponent
//   row dots    as_float low_halves_up high_halves halves_to_float transpose4
//               load_chains load_pair load_pieces add_chains fill_negative_zero
//   8 x 8       zero8 load8 store8 transpose8

#if defined(__clang__)
#define BW_UNROLL _Pragma("unroll")
#else
#define BW_UNROLL _Pragma("GCC unroll 32")
#endif

constexpr int kGroup = contract::kGroup;
constexpr int kChains = contract::kChains;
constexpr int kSegment = contract::kSegment;

// chain_length() of cpu_kernels.h.
constexpr int chain_length_here(int k_count, int c) {
  const int rest = k_count % kDotBlock - c * kGroup;
  return k_count / kDotBlock * kGroup + (rest < 0 ? 0 : rest < kGroup ? rest : kGroup);
}

template <Dtype kDtype>
constexpr int kBytes = kDtype == Dtype::kFp32 ? 4 : 2;

// ---- Row kernels (decode) ----
//
// A vector holds the 8 chains of kPackRows rows of W at one step. Loading 64 consecutive k of a row
// as 128-bit pieces (one chain each for 16-bit types) and transposing 4 x 4 double words in place
// gives those vectors without crossing lanes.

// One row of x as DotRows wants it.
void interleave(float* out, const float* x, std::int64_t K) {
  for (std::int64_t b = 0; b < K; b += kDotBlock) {
    for (int q = 0; q < kChains; ++q) {
      const int chain = q < 4 ? 2 * q : 2 * (q - 4) + 1;
      const std::int64_t k = b + kGroup * chain;
      for (int j = 0; j < kGroup; ++j) out[b + kGroup * j + q] = k + j < K ? x[k + j] : 0.0f;
    }
  }
}

// How much of W is asked for ahead of its use, over all rows that are read together. The streams
// are too short for the hardware's prefetchers: one thread read 60 % of what plain reading gives
// without, 85 % with this; half or twice as much is slower.
constexpr std::int64_t kPrefetchBytes = 8192;

// Where the rows of one pack (the vector's rows) stand.
struct PackRows {
  const std::byte* row[kPackRows];
};

// The 8 steps of one 64-block at `offset` bytes of the pack's rows.
template <Dtype kDtype>
inline __attribute__((always_inline)) void load_steps(const PackRows& rows, std::int64_t offset,
                                                      F (&w)[kGroup]) {
  if constexpr (kDtype == Dtype::kFp32) {
    BW_UNROLL
    for (int half = 0; half < 2; ++half) {
      I z[4];
      BW_UNROLL
      for (int i = 0; i < 4; ++i) z[i] = load_pieces(rows, offset + 64 * i + 16 * half, 32);
      transpose4(z);
      BW_UNROLL
      for (int i = 0; i < 4; ++i) w[4 * half + i] = as_float(z[i]);
    }
  } else {
    I z[4];
    BW_UNROLL
    for (int i = 0; i < 4; ++i) z[i] = load_pair(rows, offset + 32 * i);
    transpose4(z);
    BW_UNROLL
    for (int i = 0; i < 4; ++i) {
      if constexpr (kDtype == Dtype::kBf16) {
        w[2 * i] = as_float(low_halves_up(z[i]));
        w[2 * i + 1] = as_float(high_halves(z[i]));
      } else {
        halves_to_float(z[i], w[2 * i], w[2 * i + 1]);
      }
    }
  }
}

// A vector of two rows needs x in both halves, and such loads are dear: two packs share them (two
// packs of W in registers are what 32 registers hold).
constexpr bool kShareChains = kPackRows == 2;
// Measured (bench_replay): panels are packed for too few tiles below.
constexpr int kRowLimit = kShareChains ? 40 : 16;

// One 64-block for kPacks packs of rows and kM rows of x. `ahead`: offset of what the caches should
// get.
template <Dtype kDtype, int kPacks, int kM>
inline __attribute__((always_inline)) void dot_block(const PackRows (&rows)[kPacks],
                                                     std::int64_t offset, std::int64_t ahead,
                                                     const float* x, std::int64_t x_stride,
                                                     F (&acc)[kPacks * kM]) {
  // Packs whose x is loaded once for all of them.
  constexpr int kTogether = kShareChains && kPacks == 2 ? 2 : 1;
  BW_UNROLL
  for (int first = 0; first < kPacks; first += kTogether) {
    F w[kTogether][kGroup];
    BW_UNROLL
    for (int t = 0; t < kTogether; ++t) {
      const PackRows& pack = rows[first + t];
      BW_UNROLL
      for (int h = 0; h < kPackRows; ++h) {
        BW_UNROLL
        for (int line = 0; line < kDotBlock * kBytes<kDtype>; line += 64) {
          __builtin_prefetch(pack.row[h] + ahead + line);
        }
      }
      load_steps<kDtype>(pack, offset, w[t]);
    }
    BW_UNROLL
    for (int j = 0; j < kGroup; ++j) {
      BW_UNROLL
      for (int m = 0; m < kM; ++m) {
        const F chains = load_chains(x + m * x_stride + kGroup * j);
        BW_UNROLL
        for (int t = 0; t < kTogether; ++t) {
          F& sum = acc[(first + t) * kM + m];
          sum = fma(chains, w[t][j], sum);
        }
      }
    }
  }
}

// One segment: adds its sums to `total`. Lane 8 h + i of total[g] is the sum of row h of the
// pack and x row of accumulator 4 g + i. Reading W goes on at offset + jump once the offset in the
// rows has reached `turn` (both in bytes); that is only a hint for prefetching.
template <Dtype kDtype, int kPacks, int kM>
inline __attribute__((always_inline)) void dot_segment(const DotRows& args,
                                                       const PackRows (&rows)[kPacks],
                                                       std::int64_t k_begin, std::int64_t turn,
                                                       std::int64_t jump, F* total) {
  constexpr int kAccumulators = kPacks * kM;
  const std::int64_t rest = args.K - k_begin;
  const std::int64_t k_end = k_begin + (rest < kSegment ? rest : kSegment);
  F acc[kAccumulators];
  BW_UNROLL
  for (int i = 0; i < kAccumulators; ++i) acc[i] = zero();
  std::int64_t k = k_begin;
  for (; k + kDotBlock <= k_end; k += kDotBlock) {
    const std::int64_t offset = k * kBytes<kDtype>;
    const std::int64_t ahead = offset + kPrefetchBytes / (kPacks * kPackRows);
    dot_block<kDtype, kPacks, kM>(rows, offset, ahead < turn ? ahead : ahead + jump, args.x + k,
                                  args.x_stride, acc);
  }
  if (k < k_end) {
    // The last, partial block: absent weights are -0, absent x are +0 (their product -0 changes
    // nothing).
    alignas(64) std::byte tail[kPacks * kPackRows][kDotBlock * kBytes<kDtype>];
    PackRows tail_rows[kPacks];
    for (int r = 0; r < kPacks; ++r) {
      for (int h = 0; h < kPackRows; ++h) {
        std::byte* copy = tail[r * kPackRows + h];
        fill_negative_zero<kBytes<kDtype>>(copy);
        __builtin_memcpy(copy, rows[r].row[h] + k * kBytes<kDtype>,
                         static_cast<std::size_t>((k_end - k) * kBytes<kDtype>));
        tail_rows[r].row[h] = copy;
      }
    }
    dot_block<kDtype, kPacks, kM>(tail_rows, 0, 0, args.x + k, args.x_stride, acc);
  }
  BW_UNROLL
  for (int g = 0; g < (kAccumulators + 3) / 4; ++g) {
    F four[4];
    BW_UNROLL
    for (int i = 0; i < 4; ++i) four[i] = 4 * g + i < kAccumulators ? acc[4 * g + i] : zero();
    const F segment = add_chains(four);
    total[g] = add(total[g], segment);
  }
}

template <Dtype kDtype, int kPacks, int kM>
void dot_rows_m(const DotRows& args, std::int64_t n_begin, std::int64_t n_end) {
  constexpr int kTotals = (kPacks * kM + 3) / 4;
  constexpr int kRows = kPacks * kPackRows;
  // With several x rows a segment of them stays in the nearest cache while a batch of W rows goes
  // by.
  constexpr int kBatch = kM == 1 ? 1 : 16;
  for (std::int64_t n = n_begin; n < n_end; n += kBatch * kRows) {
    F total[kBatch][kTotals];
    for (int b = 0; b < kBatch; ++b) {
      for (int g = 0; g < kTotals; ++g) total[b][g] = set1(-0.0f);
    }
    for (std::int64_t k = 0; k < args.K; k += kSegment) {
      for (int b = 0; b < kBatch; ++b) {
        const std::int64_t first = n + b * kRows;
        if (first >= n_end) break;
        PackRows rows[kPacks];
        for (int r = 0; r < kPacks; ++r) {
          for (int h = 0; h < kPackRows; ++h) {
            const std::int64_t row = first + r * kPackRows + h;
            rows[r].row[h] = args.w + (row < n_end ? row : n_end - 1) * args.w_stride_bytes;
          }
        }
        // Next come the following rows, of this segment (a batch) or from their beginning.
        const std::int64_t end = kBatch != 1 && k + kSegment < args.K ? k + kSegment : args.K;
        const std::int64_t turn = end * kBytes<kDtype>;
        const std::int64_t back = (kBatch == 1 ? end : end - k) * kBytes<kDtype>;
        dot_segment<kDtype, kPacks, kM>(args, rows, k, turn, kRows * args.w_stride_bytes - back,
                                        total[b]);
      }
    }
    for (int b = 0; b < kBatch && n + b * kRows < n_end; ++b) {
      alignas(64) float lanes[kTotals][kWidth];
      for (int g = 0; g < kTotals; ++g) store(lanes[g], total[b][g]);
      for (int r = 0; r < kPacks; ++r) {
        for (int h = 0; h < kPackRows; ++h) {
          const std::int64_t row = n + b * kRows + r * kPackRows + h;
          if (row >= n_end) break;
          for (int m = 0; m < kM; ++m) {
            const int a = r * kM + m;
            args.out[m * args.out_stride + row] = lanes[a / 4][8 * h + a % 4];
          }
        }
      }
    }
  }
}

template <Dtype kDtype>
void dot_rows(const DotRows& args, int M, std::int64_t n_begin, std::int64_t n_end) {
  constexpr int kOne = 8 / kPackRows;  // packs of kDotRowsAtOnce = 8 rows
  constexpr int kMany = kShareChains ? 2 : 1;
  switch (M) {
    case 1:
      return dot_rows_m<kDtype, kOne, 1>(args, n_begin, n_end);
    case 2:
      return dot_rows_m<kDtype, 4, 2>(args, n_begin, n_end);
    case 3:
      return dot_rows_m<kDtype, 2, 3>(args, n_begin, n_end);
    case 4:
      return dot_rows_m<kDtype, 2, 4>(args, n_begin, n_end);
    case 5:
      return dot_rows_m<kDtype, kMany, 5>(args, n_begin, n_end);
    case 6:
      return dot_rows_m<kDtype, kMany, 6>(args, n_begin, n_end);
    case 7:
      return dot_rows_m<kDtype, kMany, 7>(args, n_begin, n_end);
    case 8:
      return dot_rows_m<kDtype, kMany, 8>(args, n_begin, n_end);
    default:
      __builtin_trap();
  }
}

// ---- Panel kernels (prefill) ----

constexpr int kPanelColumns = kPanelVectors * kWidth;

// Rows of W in groups of 8 k, upcast and transposed, in chain order.
template <Dtype kDtype>
void pack_panel(const PanelArgs& args, std::int64_t n_begin, float* panel) {
  constexpr int kLineRows = 8 * kGroup * kBytes<kDtype> / 64;  // rows that a group uses a line of
  int chain_begin[kChains];
  for (int c = 0, at = 0; c < kChains; ++c) {
    chain_begin[c] = at;
    at += chain_length_here(args.k_count, c);
  }
  for (int r = 0; r < kPanelColumns; r += 8) {
    const std::int64_t left = args.N - n_begin - r;
    const int rows = left < 0 ? 0 : left < 8 ? static_cast<int>(left) : 8;
    const std::byte* w = args.w + ((n_begin + r) * args.K + args.k_begin) * kBytes<kDtype>;
    for (int k = 0; k < args.k_count; k += kGroup) {
      const int group = k / kGroup;
      float* out =
          panel + (chain_begin[group % kChains] + group / kChains * kGroup) * kPanelColumns + r;
      const int count = args.k_count - k < kGroup ? args.k_count - k : kGroup;
      // The next rows are asked for meanwhile, as many lines as are used up: the streams are too
      // short and too many for the hardware's prefetchers.
      BW_UNROLL
      for (int i = 0; i < kLineRows; ++i) {
        const std::int64_t row = 8 + group % (8 / kLineRows) * kLineRows + i;
        __builtin_prefetch(w + (row * args.K + k) * kBytes<kDtype>);
      }
      F8 block[8];
      BW_UNROLL
      for (int i = 0; i < 8; ++i) {
        const std::byte* from = w + (i * args.K + k) * kBytes<kDtype>;
        if (i >= rows) {
          block[i] = zero8();
        } else if (count == kGroup) {
          block[i] = load8<kDtype>(from);
        } else {
          alignas(32) std::byte copy[kGroup * kBytes<kDtype>] = {};
          __builtin_memcpy(copy, from, static_cast<std::size_t>(count * kBytes<kDtype>));
          block[i] = load8<kDtype>(copy);
        }
      }
      transpose8(block);
      BW_UNROLL
      for (int j = 0; j < kGroup; ++j) {
        if (j < count) store8(out + j * kPanelColumns, block[j]);
      }
    }
  }
}

// A tile of x in chain order, transposed in blocks of 8 rows by 8 k.
void pack_tile(float* out, const float* x, std::int64_t K, int rows, int k_count) {
  static_assert(kTileRows <= 16);
  constexpr int kBlocks = (kTileRows + 7) / 8;
  float* const end = out + static_cast<std::int64_t>(k_count) * rows;
  for (int c = 0; c < kChains; ++c) {
    for (int k = c * kGroup; k < k_count; k += kDotBlock) {
      const int count = k_count - k < kGroup ? k_count - k : kGroup;
      F8 block[kBlocks][8];
      BW_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        BW_UNROLL
        for (int i = 0; i < 8; ++i) {
          const int row = 8 * b + i;
          const auto* from = reinterpret_cast<const std::byte*>(x + (row < rows ? row : 0) * K + k);
          if (row >= rows) {
            block[b][i] = zero8();
          } else if (count == kGroup) {
            block[b][i] = load8<Dtype::kFp32>(from);
          } else {
            alignas(32) std::byte copy[kGroup * sizeof(float)] = {};
            __builtin_memcpy(copy, from, static_cast<std::size_t>(count) * sizeof(float));
            block[b][i] = load8<Dtype::kFp32>(copy);
          }
        }
        transpose8(block[b]);
      }
      // What a step's vectors write beyond its rows is overwritten by the next step; beyond the
      // tile they may not write.
      alignas(64) float last[(kGroup + 1) * 8 * kBlocks];
      const bool inside = end - out >= (count - 1) * rows + 8 * kBlocks;
      float* const to = inside ? out : last;
      BW_UNROLL
      for (int j = 0; j < kGroup; ++j) {
        if (j >= count) break;
        BW_UNROLL
        for (int b = 0; b < kBlocks; ++b) store8(to + j * rows + 8 * b, block[b][j]);
      }
      const int size = count * rows;
      if (!inside) __builtin_memcpy(out, last, static_cast<std::size_t>(size) * sizeof(float));
      out += size;
    }
  }
}

// One tile: kRows rows of x against the panel, one chain after the other.
template <int kRows>
__attribute__((noinline)) void run_tile(float* y, std::int64_t N, int columns, const float* x,
                                        const float* panel, int k_count, bool first) {
  // The outputs are asked for now and used after the chains: their rows lie pages apart, so that
  // each would be a miss of its own (5 % of a product).
  for (int m = 0; m < kRows; ++m) {
    BW_UNROLL
    for (int v = 0; v < kPanelVectors; ++v) __builtin_prefetch(y + m * N + v * kWidth, 1);
  }
  alignas(64) float sum[kRows * kPanelColumns];
  // -0 + x is x for every x: sums whose first term stands alone start there.
  for (int i = 0; i < kRows * kPanelColumns; i += kWidth) store(sum + i, set1(-0.0f));
  for (int c = 0; c < kChains; ++c) {
    F acc[kRows * kPanelVectors];
    BW_UNROLL
    for (int i = 0; i < kRows * kPanelVectors; ++i) acc[i] = zero();
    for (int left = chain_length_here(k_count, c); left > 0; --left) {
      F w[kPanelVectors];
      BW_UNROLL
      for (int v = 0; v < kPanelVectors; ++v) w[v] = load(panel + v * kWidth);
      BW_UNROLL
      for (int m = 0; m < kRows; ++m) {
        const F b = broadcast(x + m);
        BW_UNROLL
        for (int v = 0; v < kPanelVectors; ++v) {
          acc[m * kPanelVectors + v] = fma(b, w[v], acc[m * kPanelVectors + v]);
        }
      }
      panel += kPanelColumns;
      x += kRows;
    }
    BW_UNROLL
    for (int i = 0; i < kRows * kPanelVectors; ++i) {
      store(sum + i * kWidth, add(load(sum + i * kWidth), acc[i]));
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v * kWidth < columns; ++v) {
      float* at = y + m * N + v * kWidth;
      const int count = columns - v * kWidth < kWidth ? columns - v * kWidth : kWidth;
      const F segment = load(sum + m * kPanelColumns + v * kWidth);
      store_part(at, first ? segment : add(load_part(at, count), segment), count);
    }
  }
}

template <int kRows>
void run_tile_of(int rows, float* y, std::int64_t N, int columns, const float* x,
                 const float* panel, int k_count, bool first) {
  if (rows == kRows) {
    run_tile<kRows>(y, N, columns, x, panel, k_count, first);
  } else if constexpr (kRows > 1) {
    run_tile_of<kRows - 1>(rows, y, N, columns, x, panel, k_count, first);
  }
}

void run_panel(const PanelArgs& args, std::int64_t n_begin, const float* panel,
               std::int64_t tile_begin, std::int64_t tile_end) {
  const std::int64_t left = args.N - n_begin;
  const int columns = left < kPanelColumns ? static_cast<int>(left) : kPanelColumns;
  for (std::int64_t t = tile_begin; t < tile_end; ++t) {
    const std::int64_t row = t * args.rows / args.tiles;
    const std::int64_t next = (t + 1) * args.rows / args.tiles;
    run_tile_of<kTileRows>(static_cast<int>(next - row), args.y + row * args.N + n_begin, args.N,
                           columns, args.x + row * args.k_count, panel, args.k_count,
                           args.k_begin == 0);
  }
}

// ---- Rows and elements ----

// Calls body(i, count) for vectors of a row: whole ones, then the rest.
template <class Body>
inline __attribute__((always_inline)) void for_vectors(std::int64_t count, const Body& body) {
  std::int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) body(i, kWidth);
  if (i < count) body(i, static_cast<int>(count - i));
}

inline __attribute__((always_inline)) F load_some(const float* p, int count) {
  return count == kWidth ? load(p) : load_part(p, count);
}
inline __attribute__((always_inline)) void store_some(float* p, F x, int count) {
  if (count == kWidth) {
    store(p, x);
  } else {
    store_part(p, x, count);
  }
}

template <Dtype kDtype>
void upcast_row(float* out, const std::byte* in, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) store8(out + i, load8<kDtype>(in + i * kBytes<kDtype>));
  if (i < count) {
    alignas(32) std::byte copy[8 * kBytes<kDtype>] = {};
    alignas(32) float eight[8];
    __builtin_memcpy(copy, in + i * kBytes<kDtype>,
                     static_cast<std::size_t>((count - i) * kBytes<kDtype>));
    store8(eight, load8<kDtype>(copy));
    for (int j = 0; i < count; ++i, ++j) out[i] = eight[j];
  }
}

void upcast(float* out, Dtype dtype, const std::byte* in, std::int64_t count) {
  switch (dtype) {
    case Dtype::kBf16:
      return upcast_row<Dtype::kBf16>(out, in, count);
    case Dtype::kFp16:
      return upcast_row<Dtype::kFp16>(out, in, count);
    case Dtype::kFp32:
      return upcast_row<Dtype::kFp32>(out, in, count);
  }
}

float sum_squares(const float* x, std::int64_t K) {
  constexpr int kVectors = contract::kLanes / kWidth;
  F lane[kVectors];
  for (int v = 0; v < kVectors; ++v) lane[v] = zero();
  std::int64_t k = 0;
  for (; k + contract::kLanes <= K; k += contract::kLanes) {
    for (int v = 0; v < kVectors; ++v) {
      const F t = load(x + k + v * kWidth);
      lane[v] = fma(t, t, lane[v]);
    }
  }
  for (int v = 0; k < K; k += kWidth, ++v) {
    const F t = load_some(x + k, K - k < kWidth ? static_cast<int>(K - k) : kWidth);
    lane[v] = fma(t, t, lane[v]);
  }
  for (int width = kVectors / 2; width >= 1; width /= 2) {
    for (int v = 0; v < width; ++v) lane[v] = add(lane[v], lane[v + width]);
  }
  alignas(64) float last[kWidth];
  store(last, lane[0]);
  for (int width = kWidth / 2; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) last[i] = last[i] + last[i + width];
  }
  return last[0];
}

void scale_row(float* out, const float* x, const float* weight, float scale, std::int64_t K) {
  const F s = broadcast(&scale);
  for_vectors(K, [&](std::int64_t i, int count) {
    store_some(out + i, mul(load_some(weight + i, count), mul(load_some(x + i, count), s)), count);
  });
}

void rope_row(float* x, std::int64_t heads, std::int64_t half, const float* cosines,
              const float* sines) {
  for (std::int64_t h = 0; h < heads; ++h) {
    float* first = x + 2 * h * half;
    float* second = first + half;
    for_vectors(half, [&](std::int64_t i, int count) {
      const F a = load_some(first + i, count), b = load_some(second + i, count);
      const F c = load_some(cosines + i, count), s = load_some(sines + i, count);
      store_some(first + i, fma(a, c, negate(mul(b, s))), count);
      store_some(second + i, fma(b, c, mul(a, s)), count);
    });
  }
}

// contract::exp32, lane by lane.
inline __attribute__((always_inline)) F exp32(F x) {
  x = max_or_second(set1(-105.0f), x);  // NaN passes both selections
  x = min_or_second(set1(89.0f), x);
  const F magic = set1(0x1.8p+23f);
  const F shifted = fma(x, set1(0x1.715476p+0f), magic);
  const F n = sub(shifted, magic);
  F r = fma(n, set1(-0x1.62e4p-1f), x);
  r = fma(n, set1(-0x1.7f7d1cp-20f), r);
  F p = set1(0x1.a01a02p-13f);
  p = fma(p, r, set1(0x1.6c16c2p-10f));
  p = fma(p, r, set1(0x1.111112p-7f));
  p = fma(p, r, set1(0x1.555556p-5f));
  p = fma(p, r, set1(0x1.555556p-3f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return scale_by_exponent(p, shifted);
}

void swiglu(float* out, const float* gate, const float* up, std::int64_t count) {
  const F one = set1(1.0f);
  for_vectors(count, [&](std::int64_t i, int n) {
    const F x = load_some(gate + i, n);
    const F silu = div(x, add(one, exp32(negate(x))));
    store_some(out + i, mul(silu, load_some(up + i, n)), n);
  });
}

void add_rows(float* out, const float* x, const float* y, std::int64_t count) {
  for_vectors(count, [&](std::int64_t i, int n) {
    store_some(out + i, add(load_some(x + i, n), load_some(y + i, n)), n);
  });
}

std::int64_t find_non_finite(const float* x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kWidth) {
    const int n = count - i < kWidth ? static_cast<int>(count - i) : kWidth;
    const unsigned lanes = non_finite_lanes(load_some(x + i, n));
    if (lanes != 0) return i + __builtin_ctz(lanes);
  }
  return -1;
}

std::int64_t argmax(const float* x, std::int64_t count) {
  float best = x[0];
  std::int64_t i = 0;
  if (count >= kWidth) {
    F most = load(x);
    for (i = kWidth; i + kWidth <= count; i += kWidth) most = max_or_second(load(x + i), most);
    alignas(64) float lanes[kWidth];
    store(lanes, most);
    for (int j = 0; j < kWidth; ++j) best = lanes[j] > best ? lanes[j] : best;
  }
  for (; i < count; ++i) best = x[i] > best ? x[i] : best;
  const F wanted = set1(best);
  for (i = 0; i + kWidth <= count; i += kWidth) {
    const unsigned lanes = equal_lanes(load(x + i), wanted);
    if (lanes != 0) return i + __builtin_ctz(lanes);
  }
  while (i < count - 1 && !(x[i] == best)) ++i;
  return i < count ? i : 0;  // NaN alone equals nothing
}

// ---- Attention ----

constexpr int kBlock = contract::kAttentionBlock;

// How one query's block joins its running state.
struct BlockMerge {
  float running;
  float block;
};

// out (+)= p . V over one block for kQueries queries and kVectors vectors of the head at `i`.
template <int kQueries, int kVectors>
inline __attribute__((always_inline)) void weigh_values(const AttentionGroup& group,
                                                        int first_query,
                                                        const float (&p)[kMaxDotRows][kBlock],
                                                        const int* counts, const BlockMerge* merges,
                                                        std::int64_t begin, int i, int lanes) {
  F acc[kQueries][kVectors];
  BW_UNROLL
  for (int a = 0; a < kQueries; ++a) {
    BW_UNROLL
    for (int v = 0; v < kVectors; ++v) acc[a][v] = zero();
  }
  const float* value = group.pages[begin / kBlock] + group.value_offset + i;
  // Counts descend with the query's index: all queries take part up to the last one's count.
  const int common = counts[first_query + kQueries - 1];
  for (int j = 0; j < common; ++j) {
    F vec[kVectors];
    BW_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      vec[v] = load_some(value + j * group.stride + v * kWidth, lanes);
    }
    BW_UNROLL
    for (int a = 0; a < kQueries; ++a) {
      const F weight = broadcast(&p[first_query + a][j]);
      BW_UNROLL
      for (int v = 0; v < kVectors; ++v) acc[a][v] = fma(weight, vec[v], acc[a][v]);
    }
  }
  BW_UNROLL
  for (int a = 0; a < kQueries; ++a) {
    const int query = first_query + a;
    for (int j = common; j < counts[query]; ++j) {
      const F weight = broadcast(&p[query][j]);
      BW_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        acc[a][v] = fma(weight, load_some(value + j * group.stride + v * kWidth, lanes), acc[a][v]);
      }
    }
    BW_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      float* out = group.out[query] + i + v * kWidth;
      F result = acc[a][v];
      if (begin != 0) {
        result = fma(load_some(out, lanes), set1(merges[query].running),
                     mul(result, set1(merges[query].block)));
      }
      store_some(out, result, lanes);
    }
  }
}

template <int kQueries>
void weigh_head(const AttentionGroup& group, int first_query, const float (&p)[kMaxDotRows][kBlock],
                const int* counts, const BlockMerge* merges, std::int64_t begin) {
  int i = 0;
  for (; i + kValueVectors * kWidth <= group.head_dim; i += kValueVectors * kWidth) {
    weigh_values<kQueries, kValueVectors>(group, first_query, p, counts, merges, begin, i, kWidth);
  }
  for (; i < group.head_dim; i += kWidth) {
    const int lanes = group.head_dim - i < kWidth ? group.head_dim - i : kWidth;
    weigh_values<kQueries, 1>(group, first_query, p, counts, merges, begin, i, lanes);
  }
}

void attention(const AttentionGroup& group, float* x) {
  const int padded = (group.head_dim + kDotBlock - 1) / kDotBlock * kDotBlock;
  for (int a = 0; a < group.queries; ++a) {
    interleave(x + a * padded, group.q[a], group.head_dim);
  }
  float running_max[kMaxDotRows] = {}, running_sum[kMaxDotRows] = {};
  int active = group.queries;  // queries that see the block; they stand first
  for (std::int64_t begin = 0; begin <= group.last[0]; begin += kBlock) {
    while (group.last[active - 1] < begin) --active;
    int counts[kMaxDotRows];
    for (int a = 0; a < active; ++a) {
      const std::int64_t left = group.last[a] - begin + 1;
      counts[a] = left < kBlock ? static_cast<int>(left) : kBlock;
    }
    alignas(64) float p[kMaxDotRows][kBlock];
    DotRows scores;
    scores.w = reinterpret_cast<const std::byte*>(group.pages[begin / kBlock] + group.key_offset);
    scores.w_stride_bytes = group.stride * 4;
    scores.K = group.head_dim;
    scores.x = x;
    scores.x_stride = padded;
    scores.out = p[0];
    scores.out_stride = kBlock;
    dot_rows<Dtype::kFp32>(scores, active, 0, counts[0]);

    float block_max[kMaxDotRows], block_sum[kMaxDotRows] = {};
    BlockMerge merges[kMaxDotRows];
    const F scale = set1(group.scale);
    for (int a = 0; a < active; ++a) {
      // Absent lanes repeat the first score: they change no maximum, and their result is not read.
      for (int j = counts[a]; j < kBlock; ++j) p[a][j] = p[a][0];
      F most = mul(load(p[a]), scale);
      store(p[a], most);
      for (int j = kWidth; j < kBlock; j += kWidth) {
        const F score = mul(load(p[a] + j), scale);
        store(p[a] + j, score);
        most = max_or_second(score, most);
      }
      alignas(64) float lanes[kWidth];
      store(lanes, most);
      float maximum = lanes[0];
      for (int j = 1; j < kWidth; ++j) maximum = lanes[j] > maximum ? lanes[j] : maximum;
      block_max[a] = maximum;
      for (int j = 0; j < kBlock; j += kWidth) {
        store(p[a] + j, exp32(sub(load(p[a] + j), set1(maximum))));
      }
    }
    const int common = counts[active - 1];
    for (int j = 0; j < common; ++j) {
      for (int a = 0; a < active; ++a) block_sum[a] = block_sum[a] + p[a][j];
    }
    for (int a = 0; a < active; ++a) {
      for (int j = common; j < counts[a]; ++j) block_sum[a] = block_sum[a] + p[a][j];
      if (begin == 0) {
        merges[a] = {0.0f, 1.0f};  // not read
        running_max[a] = block_max[a];
        running_sum[a] = block_sum[a];
        continue;
      }
      const float maximum = block_max[a] > running_max[a] ? block_max[a] : running_max[a];
      merges[a].running = first_lane(exp32(sub(set1(running_max[a]), set1(maximum))));
      merges[a].block = first_lane(exp32(sub(set1(block_max[a]), set1(maximum))));
      const F merged = fma(set1(running_sum[a]), set1(merges[a].running),
                           mul(set1(block_sum[a]), set1(merges[a].block)));
      running_sum[a] = first_lane(merged);
      running_max[a] = maximum;
    }
    int a = 0;
    for (; a + 4 <= active; a += 4) weigh_head<4>(group, a, p, counts, merges, begin);
    for (; a + 2 <= active; a += 2) weigh_head<2>(group, a, p, counts, merges, begin);
    if (a < active) weigh_head<1>(group, a, p, counts, merges, begin);
  }
  for (int a = 0; a < group.queries; ++a) {
    const F sum = set1(running_sum[a]);
    float* out = group.out[a];
    for_vectors(group.head_dim, [&](std::int64_t i, int n) {
      store_some(out + i, div(load_some(out + i, n), sum), n);
    });
  }
}

constexpr CpuKernels table_of(const char* isa) {
  return CpuKernels{isa,
                    8,
                    kPanelColumns,
                    kTileRows,
                    kRowLimit,
                    interleave,
                    dot_rows<Dtype::kBf16>,
                    dot_rows<Dtype::kFp16>,
                    dot_rows<Dtype::kFp32>,
                    pack_panel<Dtype::kBf16>,
                    pack_panel<Dtype::kFp16>,
                    pack_panel<Dtype::kFp32>,
                    pack_tile,
                    run_panel,
                    attention,
                    upcast,
                    sum_squares,
                    scale_row,
                    rope_row,
                    swiglu,
                    add_rows,
                    find_non_finite,
                    argmax};
}
