// Vectors of 8 floats on 64-bit ARM with SVE, compiled for registers of 256 bits, with bf16 dot products. simd.h
// includes this file.
#pragma once
#include <arm_sve.h>

namespace retro::RETRO_ISA {

constexpr int LANES = 8, REGISTERS = 32;
constexpr bool MULTIPLIES_PAIRS = true;
using Vec = svfloat32_t __attribute__((arm_sve_vector_bits(256)));
using Pairs = svuint32_t __attribute__((arm_sve_vector_bits(256)));
using Halves = Pairs;  // one element in the low half of each lane
using Predicate = svbool_t __attribute__((arm_sve_vector_bits(256)));
struct Mask {
  Predicate v;
};

RETRO_INLINE Predicate all() { return svptrue_b32(); }
RETRO_INLINE Predicate lanes_below(int n) { return svwhilelt_b32_s32(0, n); }

RETRO_INLINE Vec zero() { return svdup_f32(0.f); }
RETRO_INLINE Vec broadcast(float x) { return svdup_f32(x); }
RETRO_INLINE Mask first(int n) { return {lanes_below(n)}; }

// Inactive lanes touch no memory and read 0.
RETRO_INLINE Vec load(const float* p) { return svld1_f32(all(), p); }
RETRO_INLINE Vec load(const float* p, int n) { return svld1_f32(lanes_below(n), p); }
RETRO_INLINE Halves load_halves(const void* p) { return svld1uh_u32(all(), static_cast<const uint16_t*>(p)); }
RETRO_INLINE Halves load_halves(const void* p, int n) {
  return svld1uh_u32(lanes_below(n), static_cast<const uint16_t*>(p));
}
RETRO_INLINE void store(float* p, Vec x) { svst1_f32(all(), p, x); }
RETRO_INLINE void store(float* p, Vec x, int n) { svst1_f32(lanes_below(n), p, x); }
RETRO_INLINE void store_halves(void* p, Halves x) { svst1h_u32(all(), static_cast<uint16_t*>(p), x); }
RETRO_INLINE void store_halves(void* p, Halves x, int n) { svst1h_u32(lanes_below(n), static_cast<uint16_t*>(p), x); }

RETRO_INLINE Vec even_of(Pairs x) { return svreinterpret_f32_u32(svlsl_n_u32_x(all(), x, 16)); }
RETRO_INLINE Vec odd_of(Pairs x) { return svreinterpret_f32_u32(svand_n_u32_x(all(), x, 0xffff0000u)); }
RETRO_INLINE Vec widen(Halves x, bf16) { return even_of(x); }
RETRO_INLINE Vec widen(Halves x, fp16) { return svcvt_f32_f16_x(all(), svreinterpret_f16_u32(x)); }
RETRO_INLINE Halves low_halves(Pairs x) { return x; }
RETRO_INLINE Halves narrow(Vec x, bf16) { return svreinterpret_u32_bf16(svcvt_bf16_f32_x(all(), x)); }
RETRO_INLINE Halves narrow(Vec x, fp16) { return svreinterpret_u32_f16(svcvt_f16_f32_x(all(), x)); }

RETRO_INLINE Vec fma(Vec a, Vec b, Vec c) { return svmla_f32_x(all(), c, a, b); }
RETRO_INLINE Mask gt(Vec a, Vec b) { return {svcmpgt_f32(all(), a, b)}; }
RETRO_INLINE Mask ge(Vec a, Vec b) { return {svcmpge_f32(all(), a, b)}; }
RETRO_INLINE Mask either(Mask a, Mask b) { return {svorr_b_z(all(), a.v, b.v)}; }
RETRO_INLINE Vec select(Mask m, Vec a, Vec b) { return svsel_f32(m.v, a, b); }
RETRO_INLINE Vec max(Vec a, Vec b) { return select(gt(a, b), a, b); }
RETRO_INLINE Vec min(Vec a, Vec b) { return select(gt(b, a), a, b); }
RETRO_INLINE uint32_t bits(Mask m) {
  return static_cast<uint32_t>(svorv_u32(m.v, svlsl_u32_x(all(), svdup_u32(1), svindex_u32(0, 1))));
}

constexpr float LOWEST_POWER = -152.f;  // its result is 0
RETRO_INLINE Vec power_of_two(Vec x, Vec& power) { return power = svrintn_f32_x(all(), x); }
RETRO_INLINE Vec times(Vec x, Vec power) { return svscale_f32_x(all(), x, svcvt_s32_f32_x(all(), power)); }

RETRO_INLINE float sum(Vec x) {
  return svaddv_f32(all(), x);
}  // adds neighbouring lanes, then neighbouring sums, and so on
RETRO_INLINE float max_of(Vec x) { return svmaxnmv_f32(all(), x); }

RETRO_INLINE Pairs broadcast(uint32_t two) { return svdup_u32(two); }
RETRO_INLINE Pairs zip(Halves even, Halves odd) { return svorr_u32_x(all(), even, svlsl_n_u32_x(all(), odd, 16)); }
RETRO_INLINE Pairs to_pairs(Vec even, Vec odd) {
  return svreinterpret_u32_bf16(svcvtnt_bf16_f32_x(svcvt_bf16_f32_x(all(), even), all(), odd));
}
RETRO_INLINE Vec dot(Vec acc, Pairs a, Pairs b) {
  return svbfdot_f32(acc, svreinterpret_bf16_u32(a), svreinterpret_bf16_u32(b));
}

// The place of a number is a string of bits, the row followed by the column. Each round moves the
// first bit of the string to its end, so that after three rounds row and column are exchanged.
RETRO_INLINE void transpose(Vec (&x)[LANES]) {
#pragma GCC unroll 3
  for (int round = 0; round < 3; ++round) {
    Vec y[LANES];
#pragma GCC unroll 4
    for (int i = 0; i < LANES / 2; ++i) {
      y[2 * i] = svzip1_f32(x[i], x[i + LANES / 2]);
      y[2 * i + 1] = svzip2_f32(x[i], x[i + LANES / 2]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < LANES; ++i)
      x[i] = y[i];
  }
}

// Each step adds the neighbouring lanes of two vectors and stores the sums in one vector.
RETRO_INLINE Vec sums(Vec (&x)[LANES]) {
  const auto neighbours = [](Vec a, Vec b) { return Vec(svuzp1_f32(a, b)) + Vec(svuzp2_f32(a, b)); };
  const Vec a = neighbours(neighbours(x[0], x[1]), neighbours(x[2], x[3]));
  return neighbours(a, neighbours(neighbours(x[4], x[5]), neighbours(x[6], x[7])));
}

}  // namespace retro::RETRO_ISA
