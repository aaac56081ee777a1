// Vectors of 16 floats with AVX-512 F, BW, VL and DQ, and BF16 at level 3. simd.h includes this file.
#pragma once
#include <immintrin.h>

namespace retro::RETRO_ISA {

constexpr int LANES = 16, REGISTERS = 32;
constexpr bool MULTIPLIES_PAIRS = RETRO_ISA_LEVEL >= 3;
using Vec = __m512;
using Mask = __mmask16;
using Pairs = __m512i;

RETRO_INLINE Vec zero() { return _mm512_setzero_ps(); }
RETRO_INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
RETRO_INLINE Mask first(int n) { return n >= LANES ? Mask(0xffff) : n <= 0 ? Mask(0) : Mask((1u << n) - 1u); }

RETRO_INLINE Vec widen(__m256i halves, bf16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
RETRO_INLINE Vec widen(__m256i halves, fp16) { return _mm512_cvtph_ps(halves); }

RETRO_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
RETRO_INLINE Vec load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
template <class T> RETRO_INLINE Vec load(const T* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{});
}
template <class T> RETRO_INLINE Vec load(const T* p, int n) {
  return widen(_mm256_maskz_loadu_epi16(first(n), p), T{});
}

RETRO_INLINE __m256i narrow(Vec x, fp16) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
RETRO_INLINE __m256i narrow(Vec x, bf16) {
#if RETRO_ISA_LEVEL >= 3  // subnormal numbers become 0; a test for them would take up to an eighth of an op's time
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

RETRO_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
RETRO_INLINE void store(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
template <class T> RETRO_INLINE void store(T* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x, T{}));
}
template <class T> RETRO_INLINE void store(T* p, Vec x, int n) {
  _mm256_mask_storeu_epi16(p, first(n), narrow(x, T{}));
}

RETRO_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
RETRO_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
RETRO_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
RETRO_INLINE Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
constexpr float LOWEST_POWER = -127.f;  // its result is 0
RETRO_INLINE Vec power_of_two(Vec x, Vec& power) { return power = round(x); }
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

RETRO_INLINE Pairs load(const uint32_t* p) { return _mm512_loadu_si512(p); }
RETRO_INLINE void store(uint32_t* p, Pairs x) { _mm512_storeu_si512(p, x); }
RETRO_INLINE Pairs broadcast(uint32_t two) { return _mm512_set1_epi32(static_cast<int>(two)); }

// Returns the pairs (low[i], high[i]) of the low and the high half of a vector.
RETRO_INLINE Pairs zip(__m512i halves) {
  alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), halves);
}
RETRO_INLINE __m512i beside(__m256i low, __m256i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// Returns the pairs (even[i], odd[i]).
RETRO_INLINE Pairs interleave(const bf16* even, const bf16* odd) {
  return zip(beside(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)),
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd))));
}
RETRO_INLINE Pairs interleave(const bf16* even, const bf16* odd, int n) {
  return zip(beside(_mm256_maskz_loadu_epi16(first(n), even), _mm256_maskz_loadu_epi16(first(n), odd)));
}
RETRO_INLINE Pairs to_pairs(Vec even, Vec odd) {
#if RETRO_ISA_LEVEL >= 3
  return zip((__m512i)_mm512_cvtne2ps_pbh(odd, even));
#else
  return zip(beside(narrow(even, bf16{}), narrow(odd, bf16{})));
#endif
}

RETRO_INLINE Vec even_of(Pairs x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
RETRO_INLINE Vec odd_of(Pairs x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

#if RETRO_ISA_LEVEL >= 3
// The instruction takes subnormal numbers as 0, and such sums become 0. So one of them times -inf is NaN.
RETRO_INLINE Vec dot(Vec acc, Pairs a, Pairs b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
#else
RETRO_INLINE Vec dot(Vec acc, Pairs a, Pairs b) { return fma(even_of(a), even_of(b), fma(odd_of(a), odd_of(b), acc)); }
#endif

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
