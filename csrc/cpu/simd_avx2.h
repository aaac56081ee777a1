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
using Pairs = __m256i;

RETRO_INLINE Vec zero() { return _mm256_setzero_ps(); }
RETRO_INLINE Vec broadcast(float x) { return _mm256_set1_ps(x); }
RETRO_INLINE __m256i first_bits(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
RETRO_INLINE Mask first(int n) { return {_mm256_castsi256_ps(first_bits(n))}; }

RETRO_INLINE Vec widen(__m128i halves, bf16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
RETRO_INLINE Vec widen(__m128i halves, fp16) { return _mm256_cvtph_ps(halves); }

// AVX2 has no masked load of 16-bit elements, so the tail of a row is copied through the stack. Whole vectors are not
// copied, because the copies would take a tenth of a backward pass.
RETRO_INLINE __m128i load_halves(const void* p, int n) {
  if (n >= LANES)
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
  alignas(16) uint16_t buffer[LANES] = {};
  if (n > 0)
    std::memcpy(buffer, p, 2 * static_cast<size_t>(n));
  return _mm_load_si128(reinterpret_cast<const __m128i*>(buffer));
}

RETRO_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
RETRO_INLINE Vec load(const float* p, int n) { return _mm256_maskload_ps(p, first_bits(n)); }
template <class T> RETRO_INLINE Vec load(const T* p) {
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T{});
}
template <class T> RETRO_INLINE Vec load(const T* p, int n) { return widen(load_halves(p, n), T{}); }

RETRO_INLINE __m128i narrow(Vec x, fp16) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
RETRO_INLINE __m256i rounded_bf16(Vec x) {  // the bf16 in the low half of each lane
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
RETRO_INLINE __m128i narrow(Vec x, bf16) {
  const __m256i wide = rounded_bf16(x);
  return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}

RETRO_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
RETRO_INLINE void store(float* p, Vec x, int n) {
  if (n >= LANES)
    return store(p, x);  // a masked store takes dozens of operations on AMD's processors
  _mm256_maskstore_ps(p, first_bits(n), x);
}
template <class T> RETRO_INLINE void store(T* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x, T{}));
}
template <class T> RETRO_INLINE void store(T* p, Vec x, int n) {
  if (n >= LANES)
    return store(p, x);
  alignas(16) uint16_t buffer[LANES];
  _mm_store_si128(reinterpret_cast<__m128i*>(buffer), narrow(x, T{}));
  if (n > 0)
    std::memcpy(p, buffer, 2 * static_cast<size_t>(n < LANES ? n : LANES));
}

RETRO_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
RETRO_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
RETRO_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
RETRO_INLINE Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
constexpr float LOWEST_POWER = -127.f;  // its result is 0
// The low bits of the sum are n + 127. Shifted into the exponent, they give 2^n.
RETRO_INLINE Vec power_of_two(Vec x, Vec& power) {
  const Vec shift = broadcast(0x1.8p23f + 127.f), sum = x + shift;
  power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(sum), 23));
  return sum - shift;
}
RETRO_INLINE Vec times(Vec x, Vec power) { return x * power; }

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

RETRO_INLINE Pairs load(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
RETRO_INLINE void store(uint32_t* p, Pairs x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
RETRO_INLINE Pairs broadcast(uint32_t two) { return _mm256_set1_epi32(static_cast<int>(two)); }

RETRO_INLINE Pairs interleave(const bf16* even, const bf16* odd, int n = LANES) {
  const __m128i a = load_halves(even, n), b = load_halves(odd, n);
  return _mm256_or_si256(_mm256_cvtepu16_epi32(a), _mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16));
}
RETRO_INLINE Pairs to_pairs(Vec even, Vec odd) {
  return _mm256_or_si256(rounded_bf16(even), _mm256_slli_epi32(rounded_bf16(odd), 16));
}

RETRO_INLINE Vec even_of(Pairs x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
RETRO_INLINE Vec odd_of(Pairs x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
RETRO_INLINE Vec dot(Vec acc, Pairs a, Pairs b) { return fma(even_of(a), even_of(b), fma(odd_of(a), odd_of(b), acc)); }

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
