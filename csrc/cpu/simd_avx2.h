// Vectors of 8 floats with AVX2, FMA and F16C. simd.h includes this file.
#pragma once
#include <immintrin.h>

namespace retro::RETRO_ISA {

constexpr int LANES = 8, REGISTERS = 16;
constexpr bool MULTIPLIES_PAIRS = false;
using Vec = __m256;
struct Mask {
  __m256 v;  // each lane all ones or all zeros
};
typedef uint32_t Pairs __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));

RETRO_INLINE Vec zero() { return _mm256_setzero_ps(); }
RETRO_INLINE Vec broadcast(float x) { return _mm256_set1_ps(x); }
RETRO_INLINE Pairs broadcast(uint32_t two) { return (Pairs)_mm256_set1_epi32(static_cast<int>(two)); }
RETRO_INLINE __m256i first_bits(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
RETRO_INLINE Mask first(int n) { return {_mm256_castsi256_ps(first_bits(n))}; }

RETRO_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
RETRO_INLINE Vec load(const float* p, int n) { return _mm256_maskload_ps(p, first_bits(n)); }
RETRO_INLINE Halves load_halves(const void* p) { return copy_of<Halves>(p); }
RETRO_INLINE Halves load_halves(const void* p, int n) { return copy_of<Halves>(p, n); }
RETRO_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
RETRO_INLINE void store(float* p, Vec x, int n) {
  if (n >= LANES)
    return store(p, x);  // a masked store takes dozens of operations on AMD's processors
  _mm256_maskstore_ps(p, first_bits(n), x);
}
RETRO_INLINE void store_halves(void* p, Halves x) { copy_to(p, x); }
RETRO_INLINE void store_halves(void* p, Halves x, int n) { copy_to(p, x, n); }

RETRO_INLINE Vec widen(Halves x, bf16) { return (Vec)((Pairs)_mm256_cvtepu16_epi32((__m128i)x) << 16); }
RETRO_INLINE Vec widen(Halves x, fp16) { return _mm256_cvtph_ps((__m128i)x); }
RETRO_INLINE Halves narrow(Vec x, fp16) {
  return (Halves)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
RETRO_INLINE Halves low_halves(Pairs x) {
  return (Halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
}
RETRO_INLINE Pairs zip(Halves even, Halves odd) { return (Pairs)widen(even, bf16{}) >> 16 | (Pairs)widen(odd, bf16{}); }

RETRO_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
RETRO_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
RETRO_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
constexpr float LOWEST_POWER = -127.f;  // its result is 0

RETRO_INLINE Mask gt(Vec a, Vec b) { return {_mm256_cmp_ps(a, b, _CMP_GT_OQ)}; }
RETRO_INLINE Mask ge(Vec a, Vec b) { return {_mm256_cmp_ps(a, b, _CMP_GE_OQ)}; }
RETRO_INLINE Mask either(Mask a, Mask b) { return {_mm256_or_ps(a.v, b.v)}; }
RETRO_INLINE Vec select(Mask m, Vec a, Vec b) { return _mm256_blendv_ps(b, a, m.v); }
RETRO_INLINE uint32_t bits(Mask m) { return static_cast<uint32_t>(_mm256_movemask_ps(m.v)); }

template <class Combine> RETRO_INLINE float across(Vec x, Combine combine) {
  __m128 v = combine(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  v = combine(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(combine(v, _mm_shuffle_ps(v, v, 1)));
}
RETRO_INLINE float sum(Vec x) {
  return across(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
RETRO_INLINE float max_of(Vec x) {
  return across(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}

RETRO_INLINE void transpose(Vec (&x)[LANES]) {
  Vec y[LANES];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {  // 4x4 inside each half
    const Vec a = _mm256_unpacklo_ps(x[i], x[i + 1]), b = _mm256_unpackhi_ps(x[i], x[i + 1]);
    const Vec c = _mm256_unpacklo_ps(x[i + 2], x[i + 3]), d = _mm256_unpackhi_ps(x[i + 2], x[i + 3]);
    y[i] = _mm256_shuffle_ps(a, c, 0x44);
    y[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    y[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    y[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x20);
    x[i + 4] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x31);
  }
}

// Each step adds the halves of two vectors and stores the results in one vector. This takes a third of the shuffles of
// a transpose.
RETRO_INLINE Vec sums(Vec (&x)[LANES]) {
  Vec y[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    y[i] = _mm256_blend_ps(x[i], x[i + 4], 0xf0) + _mm256_permute2f128_ps(x[i], x[i + 4], 0x21);
  const Vec a = _mm256_blend_ps(y[0], y[1], 0xcc) + _mm256_shuffle_ps(y[0], y[1], 0x4e);
  const Vec b = _mm256_blend_ps(y[2], y[3], 0xcc) + _mm256_shuffle_ps(y[2], y[3], 0x4e);
  return _mm256_shuffle_ps(a, b, 0x88) + _mm256_shuffle_ps(a, b, 0xdd);
}

}  // namespace retro::RETRO_ISA
