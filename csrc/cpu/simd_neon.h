// Vectors of 4 floats on 64-bit ARM, with bf16 dot products at level 5. simd.h includes this file.
#pragma once
#include <arm_neon.h>

namespace retro::RETRO_ISA {

constexpr int LANES = 4, REGISTERS = 32;
constexpr bool MULTIPLIES_PAIRS = RETRO_ISA_LEVEL >= 5;
using Vec = float32x4_t;
struct Mask {
  uint32x4_t v;  // each lane all ones or all zeros
};
using Pairs = uint32x4_t;

RETRO_INLINE Vec zero() { return vdupq_n_f32(0.f); }
RETRO_INLINE Vec broadcast(float x) { return vdupq_n_f32(x); }
RETRO_INLINE Mask first(int n) {
  constexpr int32_t LANE[LANES] = {0, 1, 2, 3};
  return {vcltq_s32(vld1q_s32(LANE), vdupq_n_s32(n))};
}

RETRO_INLINE Vec widen(uint16x4_t halves, bf16) { return vreinterpretq_f32_u32(vshll_n_u16(halves, 16)); }
RETRO_INLINE Vec widen(uint16x4_t halves, fp16) { return vcvt_f32_f16(vreinterpret_f16_u16(halves)); }

// Returns the size of the first n lanes. They are copied through the stack, because NEON does not have masked loads.
RETRO_INLINE size_t bytes_of(int n, size_t each) {
  return each * static_cast<size_t>(n < 0 ? 0 : n < LANES ? n : LANES);
}
RETRO_INLINE uint16x4_t load_halves(const void* p, int n) {
  if (n >= LANES)
    return vld1_u16(static_cast<const uint16_t*>(p));
  uint16_t buffer[LANES] = {};
  std::memcpy(buffer, p, bytes_of(n, 2));
  return vld1_u16(buffer);
}

RETRO_INLINE Vec load(const float* p) { return vld1q_f32(p); }
RETRO_INLINE Vec load(const float* p, int n) {
  if (n >= LANES)
    return load(p);
  float buffer[LANES] = {};
  std::memcpy(buffer, p, bytes_of(n, 4));
  return vld1q_f32(buffer);
}
template <class T> RETRO_INLINE Vec load(const T* p) {
  return widen(vld1_u16(reinterpret_cast<const uint16_t*>(p)), T{});
}
template <class T> RETRO_INLINE Vec load(const T* p, int n) { return widen(load_halves(p, n), T{}); }

RETRO_INLINE uint16x4_t narrow(Vec x, fp16) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
RETRO_INLINE uint32x4_t rounded_bf16(Vec x) {  // the bf16 in the low half of each lane
  const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrq_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
}
RETRO_INLINE uint16x4_t narrow(Vec x, bf16) { return vmovn_u32(rounded_bf16(x)); }

RETRO_INLINE void store(float* p, Vec x) { vst1q_f32(p, x); }
RETRO_INLINE void store(float* p, Vec x, int n) {
  if (n >= LANES)
    return store(p, x);
  float buffer[LANES];
  vst1q_f32(buffer, x);
  std::memcpy(p, buffer, bytes_of(n, 4));
}
template <class T> RETRO_INLINE void store(T* p, Vec x) { vst1_u16(reinterpret_cast<uint16_t*>(p), narrow(x, T{})); }
template <class T> RETRO_INLINE void store(T* p, Vec x, int n) {
  if (n >= LANES)
    return store(p, x);
  uint16_t buffer[LANES];
  vst1_u16(buffer, narrow(x, T{}));
  std::memcpy(p, buffer, bytes_of(n, 2));
}

RETRO_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
RETRO_INLINE Mask gt(Vec a, Vec b) { return {vcgtq_f32(a, b)}; }
RETRO_INLINE Mask ge(Vec a, Vec b) { return {vcgeq_f32(a, b)}; }
RETRO_INLINE Mask either(Mask a, Mask b) { return {vorrq_u32(a.v, b.v)}; }
RETRO_INLINE Vec select(Mask m, Vec a, Vec b) { return vbslq_f32(m.v, a, b); }
RETRO_INLINE Vec max(Vec a, Vec b) { return select(gt(a, b), a, b); }
RETRO_INLINE Vec min(Vec a, Vec b) { return select(gt(b, a), a, b); }
RETRO_INLINE uint32_t bits(Mask m) {
  constexpr uint32_t BIT[LANES] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(m.v, vld1q_u32(BIT)));
}

RETRO_INLINE Vec round(Vec x) { return vrndnq_f32(x); }
RETRO_INLINE Vec shifted_power(int32x4_t e) { return vreinterpretq_f32_s32(vshlq_n_s32(e, 23)); }
constexpr float LOWEST_POWER = -127.f;  // its result is 0
RETRO_INLINE Vec power_of_two(Vec x, Vec& power) {
  const Vec n = round(x);
  power = shifted_power(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)));
  return n;
}
RETRO_INLINE Vec times(Vec x, Vec power) { return x * power; }

RETRO_INLINE float sum(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
RETRO_INLINE float max_of(Vec x) {
  const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}

RETRO_INLINE Pairs load(const uint32_t* p) { return vld1q_u32(p); }
RETRO_INLINE void store(uint32_t* p, Pairs x) { vst1q_u32(p, x); }
RETRO_INLINE Pairs broadcast(uint32_t two) { return vdupq_n_u32(two); }
RETRO_INLINE Pairs zip(uint16x4_t even, uint16x4_t odd) {
  return vreinterpretq_u32_u16(vcombine_u16(vzip1_u16(even, odd), vzip2_u16(even, odd)));
}
RETRO_INLINE Pairs interleave(const bf16* even, const bf16* odd, int n = LANES) {
  return zip(load_halves(even, n), load_halves(odd, n));
}
RETRO_INLINE Pairs to_pairs(Vec even, Vec odd) { return zip(narrow(even, bf16{}), narrow(odd, bf16{})); }
RETRO_INLINE Vec even_of(Pairs x) { return vreinterpretq_f32_u32(vshlq_n_u32(x, 16)); }
RETRO_INLINE Vec odd_of(Pairs x) { return vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000u))); }
#if RETRO_ISA_LEVEL >= 5
RETRO_INLINE Vec dot(Vec acc, Pairs a, Pairs b) {
  return vbfdotq_f32(acc, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
}
#else
RETRO_INLINE Vec dot(Vec acc, Pairs a, Pairs b) { return fma(even_of(a), even_of(b), fma(odd_of(a), odd_of(b), acc)); }
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

RETRO_INLINE Vec sums(Vec (&x)[LANES]) {
  transpose(x);
  return (x[0] + x[1]) + (x[2] + x[3]);
}

}  // namespace retro::RETRO_ISA
