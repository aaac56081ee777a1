// Vectors of 4 floats as the compiler's own vector type, which is SSE2 on x86-64. simd.h includes this file.
#pragma once

namespace retro::RETRO_ISA {

constexpr int LANES = 4, REGISTERS = 16;
constexpr bool MULTIPLIES_PAIRS = false;
typedef float Vec __attribute__((vector_size(16), aligned(16)));
typedef int32_t Mask __attribute__((vector_size(16)));
typedef uint32_t Pairs __attribute__((vector_size(16)));

RETRO_INLINE Vec zero() { return Vec{}; }
RETRO_INLINE Vec broadcast(float x) { return Vec{x, x, x, x}; }
RETRO_INLINE Mask first(int n) { return Mask{0, 1, 2, 3} < Mask{n, n, n, n}; }

RETRO_INLINE Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class T> RETRO_INLINE Vec load(const T* p) {
  return Vec{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
template <class T> RETRO_INLINE Vec load(const T* p, int n) {
  Vec x{};
  for (int i = 0; i < LANES && i < n; ++i)
    x[i] = to_float(p[i]);
  return x;
}

RETRO_INLINE void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
template <class T> RETRO_INLINE void store(T* p, Vec x) {
  for (int i = 0; i < LANES; ++i)
    from_float(x[i], p + i);
}
template <class T> RETRO_INLINE void store(T* p, Vec x, int n) {
  for (int i = 0; i < LANES && i < n; ++i)
    from_float(x[i], p + i);
}

RETRO_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
RETRO_INLINE Mask either(Mask a, Mask b) { return a | b; }
RETRO_INLINE Vec select(Mask m, Vec a, Vec b) { return m ? a : b; }
RETRO_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
RETRO_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
RETRO_INLINE Vec round(Vec x) {  // requires |x| < 2^22; the sum is rounded to the nearest integer, ties to even
  const Vec shift = broadcast(0x1.8p23f);
  return (x + shift) - shift;
}
constexpr float LOWEST_POWER = -127.f;  // its result is 0
// The low bits of the sum are n + 127. Shifted into the exponent, they give 2^n.
RETRO_INLINE Vec power_of_two(Vec x, Vec& power) {
  const Vec shift = broadcast(0x1.8p23f + 127.f), sum = x + shift;
  power = reinterpret_cast<Vec>(reinterpret_cast<Pairs>(sum) << 23);
  return sum - shift;
}
RETRO_INLINE Vec times(Vec x, Vec power) { return x * power; }

RETRO_INLINE Mask gt(Vec a, Vec b) { return a > b; }
RETRO_INLINE Mask ge(Vec a, Vec b) { return a >= b; }
RETRO_INLINE uint32_t bits(Mask m) { return (m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8); }

RETRO_INLINE float sum(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
RETRO_INLINE float max_of(Vec x) {
  const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}

RETRO_INLINE Pairs load(const uint32_t* p) {
  Pairs x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
RETRO_INLINE void store(uint32_t* p, Pairs x) { std::memcpy(p, &x, sizeof x); }
RETRO_INLINE Pairs broadcast(uint32_t two) { return Pairs{two, two, two, two}; }
RETRO_INLINE Pairs interleave(const bf16* even, const bf16* odd, int n = LANES) {
  Pairs x{};
  for (int i = 0; i < LANES && i < n; ++i)
    x[i] = even[i].bits | static_cast<uint32_t>(odd[i].bits) << 16;
  return x;
}
RETRO_INLINE Pairs to_pairs(Vec even, Vec odd) {
  bf16 a[LANES], b[LANES];
  store(a, even);
  store(b, odd);
  return interleave(a, b);
}
RETRO_INLINE Vec even_of(Pairs x) { return reinterpret_cast<Vec>(x << 16); }
RETRO_INLINE Vec odd_of(Pairs x) { return reinterpret_cast<Vec>(x & 0xffff0000u); }
RETRO_INLINE Vec dot(Vec acc, Pairs a, Pairs b) { return fma(even_of(a), even_of(b), fma(odd_of(a), odd_of(b), acc)); }

RETRO_INLINE void transpose(Vec (&x)[LANES]) {
  const Vec a = x[0], b = x[1], c = x[2], d = x[3];
  for (int i = 0; i < LANES; ++i)
    x[i] = Vec{a[i], b[i], c[i], d[i]};
}

RETRO_INLINE Vec sums(Vec (&x)[LANES]) {
  transpose(x);
  return (x[0] + x[1]) + (x[2] + x[3]);
}

}  // namespace retro::RETRO_ISA
