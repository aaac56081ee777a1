// Vectors of 16 floats with AVX-512 F, BW, VL and DQ, and BF16 at level 3. simd.h includes this file.
#pragma once
#include <immintrin.h>

namespace retro::RETRO_ISA {

constexpr int LANES = 16, REGISTERS = 32;
constexpr bool MULTIPLIES_PAIRS = RETRO_ISA_LEVEL >= 3;
using Vec = __m512;
using Mask = __mmask16;
typedef uint32_t Pairs __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

RETRO_INLINE Vec zero() { return _mm512_setzero_ps(); }
RETRO_INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
RETRO_INLINE Pairs broadcast(uint32_t two) { return (Pairs)_mm512_set1_epi32(static_cast<int>(two)); }
RETRO_INLINE Mask first(int n) { return n >= LANES ? Mask(0xffff) : n <= 0 ? Mask(0) : Mask((1u << n) - 1u); }

RETRO_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
RETRO_INLINE Vec load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
RETRO_INLINE Halves load_halves(const void* p) { return copy_of<Halves>(p); }
RETRO_INLINE Halves load_halves(const void* p, int n) { return (Halves)_mm256_maskz_loadu_epi16(first(n), p); }
RETRO_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
RETRO_INLINE void store(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
RETRO_INLINE void store_halves(void* p, Halves x) { copy_to(p, x); }
RETRO_INLINE void store_halves(void* p, Halves x, int n) { _mm256_mask_storeu_epi16(p, first(n), (__m256i)x); }

RETRO_INLINE Vec widen(Halves x, bf16) { return (Vec)((Pairs)_mm512_cvtepu16_epi32((__m256i)x) << 16); }
RETRO_INLINE Vec widen(Halves x, fp16) { return _mm512_cvtph_ps((__m256i)x); }
RETRO_INLINE Halves narrow(Vec x, fp16) {
  return (Halves)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
RETRO_INLINE Halves low_halves(Pairs x) { return (Halves)_mm512_cvtepi32_epi16((__m512i)x); }

// Returns the pairs (low[i], high[i]) of the low and the high half of a vector.
RETRO_INLINE Pairs zip(__m512i halves) {
  alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (Pairs)_mm512_permutexvar_epi16(_mm512_load_si512(ORDER), halves);
}
RETRO_INLINE Pairs zip(Halves even, Halves odd) {
  return zip(_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)even), (__m256i)odd, 1));
}

#if RETRO_ISA_LEVEL >= 3  // subnormal numbers become 0; a test for them would take up to an eighth of an op's time
RETRO_INLINE Halves narrow(Vec x, bf16) { return (Halves)_mm512_cvtneps_pbh(x); }
RETRO_INLINE Pairs to_pairs(Vec even, Vec odd) { return zip((__m512i)_mm512_cvtne2ps_pbh(odd, even)); }
// The instruction takes subnormal numbers as 0, and such sums become 0. So one of them times -inf is NaN.
RETRO_INLINE Vec dot(Vec acc, Pairs a, Pairs b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
#else
RETRO_INLINE Halves narrow(Vec x, bf16) {  // one instruction less than in simd.h, by a mask
  const auto bits = (Pairs)x, rounded = bits + ((bits >> 16 & 1) + 0x7fff);
  const Mask nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return low_halves((Pairs)_mm512_mask_or_epi32((__m512i)rounded, nan, (__m512i)bits, _mm512_set1_epi32(0x400000)) >>
                    16);
}
#endif

RETRO_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
RETRO_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
RETRO_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
constexpr float LOWEST_POWER = -127.f;  // its result is 0
RETRO_INLINE Vec power_of_two(Vec x, Vec& power) {
  return power = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// The result is 0 for powers below -126: an Intel core takes 85 ns for a result below the smallest normal number.
RETRO_INLINE Vec times(Vec x, Vec power) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(power, _mm512_set1_ps(-126.f), _CMP_NLT_UQ), x, power);
}

RETRO_INLINE Mask gt(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
RETRO_INLINE Mask ge(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
RETRO_INLINE Mask either(Mask a, Mask b) { return a | b; }
RETRO_INLINE Vec select(Mask m, Vec a, Vec b) { return _mm512_mask_blend_ps(m, b, a); }
RETRO_INLINE uint32_t bits(Mask m) { return m; }

RETRO_INLINE float sum(Vec x) { return _mm512_reduce_add_ps(x); }
RETRO_INLINE float max_of(Vec x) { return _mm512_reduce_max_ps(x); }

RETRO_INLINE void transpose(Vec (&x)[LANES]) {
  Vec y[LANES];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // 4x4 inside each quarter
    const Vec a = _mm512_unpacklo_ps(x[i], x[i + 1]), b = _mm512_unpackhi_ps(x[i], x[i + 1]);
    const Vec c = _mm512_unpacklo_ps(x[i + 2], x[i + 3]), d = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
    y[i] = _mm512_shuffle_ps(a, c, 0x44);
    y[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    y[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
    y[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // the quarters themselves
    const Vec a = _mm512_shuffle_f32x4(y[i], y[i + 4], 0x44), b = _mm512_shuffle_f32x4(y[i], y[i + 4], 0xee);
    const Vec c = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0x44), d = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0xee);
    x[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    x[i + 4] = _mm512_shuffle_f32x4(a, c, 0xdd);
    x[i + 8] = _mm512_shuffle_f32x4(b, d, 0x88);
    x[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

// Each step adds the halves of two vectors and stores the results in one vector. This takes a third of the shuffles of
// a transpose.
RETRO_INLINE Vec sums(Vec (&x)[LANES]) {
  const auto halves = [](Vec a, Vec b) {
    return _mm512_mask_blend_ps(0xff00, a, b) + _mm512_shuffle_f32x4(a, b, 0x4e);
  };
  Vec y[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Vec a = halves(x[i], x[i + 4]), b = halves(x[i + 8], x[i + 12]);
    y[i] = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  }
  const auto pairs = [](Vec a, Vec b) { return _mm512_mask_blend_ps(0xcccc, a, b) + _mm512_shuffle_ps(a, b, 0x4e); };
  const Vec a = pairs(y[0], y[1]), b = pairs(y[2], y[3]);
  return _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd);
}

}  // namespace retro::RETRO_ISA
