// 8 x 8 blocks in 256-bit vectors, the same for every instruction set from AVX2 on. Text for the
// anonymous namespace of a kernels_<isa>.cc, as kernels_simd.h is.

// 8 weights at `p` (any alignment), upcast exactly.
template <Dtype kDtype>
BW_INLINE F8 load8(const std::byte* p) {
  if constexpr (kDtype == Dtype::kFp32) {
    return _mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(p)));
  } else {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(p));
    if constexpr (kDtype == Dtype::kFp16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
}
BW_INLINE F8 zero8() {
  return _mm256_setzero_ps();
}
BW_INLINE void store8(float* p, F8 x) {
  _mm256_storeu_ps(p, x);
}

BW_INLINE void transpose8(F8 (&a)[8]) {
  F8 b[8], c[8];
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    c[4 * i + 0] = _mm256_shuffle_ps(b[4 * i + 0], b[4 * i + 2], _MM_SHUFFLE(1, 0, 1, 0));
    c[4 * i + 1] = _mm256_shuffle_ps(b[4 * i + 0], b[4 * i + 2], _MM_SHUFFLE(3, 2, 3, 2));
    c[4 * i + 2] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], _MM_SHUFFLE(1, 0, 1, 0));
    c[4 * i + 3] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], _MM_SHUFFLE(3, 2, 3, 2));
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x20);
    a[i + 4] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x31);
  }
}

// Fills one 64-block of weights of kElementBytes each with -0.
template <int kElementBytes>
BW_INLINE void fill_negative_zero(std::byte* block) {
  const __m256i pattern = kElementBytes == 4 ? _mm256_set1_epi32(static_cast<int>(0x80000000u))
                                             : _mm256_set1_epi32(static_cast<int>(0x80008000u));
  for (int i = 0; i < kDotBlock * kElementBytes; i += 32) {
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(block + i), pattern);
  }
}
