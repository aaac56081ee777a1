// Vectors of 4 floats as the compiler's own vector type: SSE2 on x86-64, NEON on 64-bit ARM, where level 5 has bf16 dot
// products. simd.h includes this file.
#pragma once
#if RETRO_ISA_LEVEL >= 4
#include <arm_neon.h>
#endif

namespace retro::RETRO_ISA {

constexpr int LANES = 4, REGISTERS = RETRO_ISA_LEVEL >= 4 ? 32 : 16;
constexpr bool MULTIPLIES_PAIRS = RETRO_ISA_LEVEL >= 5;
typedef float Vec __attribute__((vector_size(16), aligned(16)));
typedef int32_t Mask __attribute__((vector_size(16)));
typedef uint32_t Pairs __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(8)));

RETRO_INLINE Vec zero() { return Vec{}; }
RETRO_INLINE Vec broadcast(float x) { return Vec{x, x, x, x}; }
RETRO_INLINE Pairs broadcast(uint32_t two) { return Pairs{two, two, two, two}; }
RETRO_INLINE Mask first(int n) { return Mask{0, 1, 2, 3} < Mask{n, n, n, n}; }

RETRO_INLINE Vec load(const float* p) { return copy_of<Vec>(p); }
RETRO_INLINE Vec load(const float* p, int n) { return copy_of<Vec>(p, n); }
RETRO_INLINE Halves load_halves(const void* p) { return copy_of<Halves>(p); }
RETRO_INLINE Halves load_halves(const void* p, int n) { return copy_of<Halves>(p, n); }
RETRO_INLINE void store(float* p, Vec x) { copy_to(p, x); }
RETRO_INLINE void store(float* p, Vec x, int n) { copy_to(p, x, n); }
RETRO_INLINE void store_halves(void* p, Halves x) { copy_to(p, x); }
RETRO_INLINE void store_halves(void* p, Halves x, int n) { copy_to(p, x, n); }

RETRO_INLINE Mask gt(Vec a, Vec b) { return a > b; }
RETRO_INLINE Mask ge(Vec a, Vec b) { return a >= b; }
RETRO_INLINE Mask either(Mask a, Mask b) { return a | b; }
RETRO_INLINE Vec select(Mask m, Vec a, Vec b) { return m ? a : b; }
RETRO_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
RETRO_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
constexpr float LOWEST_POWER = -127.f;  // its result is 0

RETRO_INLINE float sum(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
RETRO_INLINE float max_of(Vec x) {
  const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}

#if RETRO_ISA_LEVEL >= 4
RETRO_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
RETRO_INLINE Vec power_of_two(Vec x, Vec& power) {
  const Vec n = vrndnq_f32(x);
  power = vreinterpretq_f32_s32((vcvtq_s32_f32(n) + 127) << 23);
  return n;
}
RETRO_INLINE uint32_t bits(Mask m) { return vaddvq_u32(reinterpret_cast<Pairs>(m) & Pairs{1, 2, 4, 8}); }
RETRO_INLINE Vec widen(Halves x, bf16) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
RETRO_INLINE Vec widen(Halves x, fp16) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
RETRO_INLINE Halves narrow(Vec x, fp16) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
RETRO_INLINE Halves low_halves(Pairs x) { return vmovn_u32(x); }
RETRO_INLINE Pairs zip(Halves even, Halves odd) {
  return vreinterpretq_u32_u16(vcombine_u16(vzip1_u16(even, odd), vzip2_u16(even, odd)));
}
#if RETRO_ISA_LEVEL >= 5
RETRO_INLINE Vec dot(Vec acc, Pairs a, Pairs b) {
  return vbfdotq_f32(acc, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
}
#endif

RETRO_INLINE void transpose(Vec (&x)[LANES]) {
  const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(x[0], x[1])),
                    b = vreinterpretq_f64_f32(vtrn2q_f32(x[0], x[1]));
  const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(x[2], x[3])),
                    d = vreinterpretq_f64_f32(vtrn2q_f32(x[2], x[3]));
  x[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
  x[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
  x[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
  x[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
}
#else
RETRO_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
RETRO_INLINE uint32_t bits(Mask m) { return (m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8); }
RETRO_INLINE Vec widen(Halves x, bf16) { return reinterpret_cast<Vec>(__builtin_convertvector(x, Pairs) << 16); }
RETRO_INLINE Vec widen(Halves x, fp16) {
  return Vec{to_float(fp16{x[0]}), to_float(fp16{x[1]}), to_float(fp16{x[2]}), to_float(fp16{x[3]})};
}
RETRO_INLINE Halves narrow(Vec x, fp16) {
  fp16 to[LANES];
  for (int i = 0; i < LANES; ++i)
    from_float(x[i], to + i);
  return load_halves(to);
}
RETRO_INLINE Halves low_halves(Pairs x) { return __builtin_convertvector(x, Halves); }
RETRO_INLINE Pairs zip(Halves even, Halves odd) {
  Pairs x{};
  for (int i = 0; i < LANES; ++i)
    x[i] = even[i] | static_cast<uint32_t>(odd[i]) << 16;
  return x;
}

RETRO_INLINE void transpose(Vec (&x)[LANES]) {
  const Vec a = x[0], b = x[1], c = x[2], d = x[3];
  for (int i = 0; i < LANES; ++i)
    x[i] = Vec{a[i], b[i], c[i], d[i]};
}
#endif

RETRO_INLINE Vec sums(Vec (&x)[LANES]) {
  transpose(x);
  return (x[0] + x[1]) + (x[2] + x[3]);
}

}  // namespace retro::RETRO_ISA
