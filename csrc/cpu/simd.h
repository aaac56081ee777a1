// A thin vector of floats for each instruction set, in the namespace of the instruction set. Every kernel is written
// once, with these types and functions.
//
//   LANES, Vec, Mask                     Vec supports + - * / (compiler vectors)
//   REGISTERS MULTIPLIES_PAIRS           number of vector registers; whether dot(acc, a, b) is one instruction
//   zero broadcast load store            load/store of float, bf16, fp16; (p, n): the first n lanes only, others read 0
//   fma max min                          max(a, b) is b where either is NaN
//   power_of_two times                   n = power_of_two(x, p), the nearest integer; times(y, p) = y * 2^n
//   gt ge either select bits first       Mask: select(m, a, b) = m ? a : b; first(n): the first n lanes
//   sum max_of                           across the lanes, in a fixed order
//   exp exp2                             about 1 ulp
//   transpose sums                       of LANES vectors: x[r][c] becomes x[c][r]; lane u of sums(x) is sum(x[u])
//   Pairs: 2*LANES bf16; dot(acc, a, b) adds a.even*b.even + a.odd*b.odd to each lane
//   interleave to_pairs                  and load store broadcast, where a pair is a uint32_t
//   Halves: LANES bf16 or fp16           load_halves store_halves widen narrow low_halves zip, for this file only
//
// A header that uses the vectors must stay inside namespace retro::RETRO_ISA as well. Otherwise the linker might keep a
// copy of an inline function that was compiled for AVX-512, and an older processor would run this copy.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../view.h"

#ifndef RETRO_ISA_LEVEL  // in an editor, or if one file is compiled alone
#define RETRO_ISA_LEVEL 0
#define RETRO_ISA portable
#endif

#define RETRO_INLINE inline __attribute__((always_inline))

namespace retro::RETRO_ISA {

constexpr float LOG2E = 1.44269504088896341f;

RETRO_INLINE float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
RETRO_INLINE uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

RETRO_INLINE float to_float(float x) { return x; }
RETRO_INLINE float to_float(bf16 x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(fp16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u)
    return as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // the product changes the bias of the exponent, and also normalises subnormals
  return as_float(sign | as_bits(as_float(rest << 13) * 0x1p112f));
}

RETRO_INLINE void from_float(float x, float* to) { *to = x; }
RETRO_INLINE void from_float(float x, bf16* to) {
  const uint32_t bits = as_bits(x);
  to->bits = x != x ? static_cast<uint16_t>(bits >> 16 | 0x40u)
                    : static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline void from_float(float x, fp16* to) {
  const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  uint32_t half;
  if (rest > 0x7f800000u) {
    half = 0x7e00u;
  } else if (rest >= 0x477ff000u) {  // 65520 and beyond round to infinity
    half = 0x7c00u;
  } else if (rest < 0x38800000u) {  // subnormal: the low bits of the sum are the rounded result
    half = as_bits(as_float(rest) + 0.5f) - 0x3f000000u;
  } else {
    half = (rest + 0xfffu + (rest >> 13 & 1u) - 0x38000000u) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | half);
}

// Returns an element of any supported float type.
template <class... Index> RETRO_INLINE float scalar(const View& v, Index... index) {
  float x = 0;
  by_type(v.type, [&](auto t) { x = to_float(*v.at<const decltype(t)>(index...)); });
  return x;
}

template <int EACH> RETRO_INLINE void copy_first(void* to, const void* from, int n) {
  if (RETRO_ISA_LEVEL > 0 && n > 0)
    std::memcpy(to, from, n * EACH);
  for (int i = 0; RETRO_ISA_LEVEL == 0 && i < n; ++i)  // faster with SSE2
    std::memcpy(static_cast<char*>(to) + i * EACH, static_cast<const char*>(from) + i * EACH, EACH);
}
// Load and store a vector, or its first n lanes if the instruction set has no masked loads and stores. Whole vectors
// are not copied through the stack, because the copies would take a tenth of a backward pass.
template <class V> RETRO_INLINE V copy_of(const void* p) {
  V x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class V> RETRO_INLINE void copy_to(void* p, V x) { std::memcpy(p, &x, sizeof x); }
template <class V> RETRO_INLINE V copy_of(const void* p, int n) {
  constexpr int ALL = sizeof(V), EACH = sizeof(V{}[0]);
  if (n >= ALL / EACH)
    return copy_of<V>(p);
  alignas(V) char buffer[ALL] = {};
  copy_first<EACH>(buffer, p, n);
  return copy_of<V>(buffer);
}
template <class V> RETRO_INLINE void copy_to(void* p, V x, int n) {
  constexpr int ALL = sizeof(V), EACH = sizeof(V{}[0]);
  if (n >= ALL / EACH)
    return copy_to(p, x);
  alignas(V) char buffer[ALL];
  copy_to(buffer, x);  // a copy of x, because x would leave its register at every store
  copy_first<EACH>(p, buffer, n);
}

}  // namespace retro::RETRO_ISA

#if RETRO_ISA_LEVEL >= 6
#include "simd_sve.h"
#elif RETRO_ISA_LEVEL >= 4 || RETRO_ISA_LEVEL == 0
#include "simd_four.h"
#elif RETRO_ISA_LEVEL >= 2
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif

namespace retro::RETRO_ISA {

// The templates below serve instruction sets that have no function of their own. A function that is not a template is
// preferred.

template <class V> RETRO_INLINE Halves narrow(V x, bf16) {
  const auto bits = reinterpret_cast<Pairs>(x), rounded = bits + ((bits >> 16 & 1) + 0x7fff);
  const auto quiet = reinterpret_cast<Vec>(bits | 0x400000);
  return low_halves(reinterpret_cast<Pairs>(select(ge(x, x), reinterpret_cast<Vec>(rounded), quiet)) >> 16);
}
template <class V> RETRO_INLINE Pairs to_pairs(V even, V odd) { return zip(narrow(even, bf16{}), narrow(odd, bf16{})); }

template <class P> RETRO_INLINE Vec even_of(P x) { return reinterpret_cast<Vec>(x << 16); }
template <class P> RETRO_INLINE Vec odd_of(P x) { return reinterpret_cast<Vec>(x & 0xffff0000u); }
template <class P> RETRO_INLINE Vec dot(Vec acc, P a, P b) {
  return fma(even_of(a), even_of(b), fma(odd_of(a), odd_of(b), acc));
}

// The low bits of the sum are n + 127. Shifted into the exponent, they give 2^n.
template <class V> RETRO_INLINE Vec power_of_two(V x, Vec& power) {
  const Vec shift = broadcast(0x1.8p23f + 127.f), sum = x + shift;
  power = reinterpret_cast<Vec>(reinterpret_cast<Pairs>(sum) << 23);
  return sum - shift;
}
template <class V> RETRO_INLINE Vec times(V x, Vec power) { return x * power; }

template <class T> RETRO_INLINE Vec load(const T* p) { return widen(load_halves(p), T{}); }
template <class T> RETRO_INLINE Vec load(const T* p, int n) { return widen(load_halves(p, n), T{}); }
template <class T> RETRO_INLINE void store(T* p, Vec x) { store_halves(p, narrow(x, T{})); }
template <class T> RETRO_INLINE void store(T* p, Vec x, int n) { store_halves(p, narrow(x, T{}), n); }

RETRO_INLINE Pairs load(const uint32_t* p) { return copy_of<Pairs>(p); }
RETRO_INLINE void store(uint32_t* p, Pairs x) { copy_to(p, x); }
template <class... Count> RETRO_INLINE Pairs interleave(const bf16* even, const bf16* odd, Count... n) {
  return zip(load_halves(even, n...), load_halves(odd, n...));
}

RETRO_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the product x, and prevents the compiler from fusing x into a sum. So x has the same value in every use, and
// the bits of the sum do not depend on how the compiler unrolls a loop.
RETRO_INLINE Vec rounded(Vec x) {
#ifdef __x86_64__
  asm("" : "+x"(x));
#else
  asm("" : "+w"(x));
#endif
  return x;
}

// Calls f(i) for every whole vector of a row of `width` elements, and f(i, count) for the rest of the row, if any.
template <class Function> RETRO_INLINE void vectors(int64_t width, Function&& f) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES)
    f(i);
  if (i < width)
    f(i, static_cast<int>(width - i));
}

// Calls f(r, c) for all r < ROWS and c < COLUMNS. The loops are unrolled, so that arrays indexed by r and c stay in
// registers.
template <int ROWS, int COLUMNS, class Function> RETRO_INLINE void unrolled(Function&& f) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 24
    for (int c = 0; c < COLUMNS; ++c)
      f(r, c);
}

// Copies from[0..n) to to[0..n), which may have another type.
template <class From, class To> RETRO_INLINE void convert_row(const From* from, To* to, int64_t n) {
  vectors(n, [&](int64_t i, auto... count) { store(to + i, load(from + i, count...), count...); });
}

// Computes to[0..n) = factor * (from[0..n) + more[0..n)). `more` may be null. `from` and `more` are padded to whole
// vectors.
template <class T>
RETRO_INLINE void scale_row(const float* from, float factor, int n, T* to, const float* more = nullptr) {
  for (int i = 0; i < n; i += LANES)
    store(to + i, (more ? load(from + i) + load(more + i) : load(from + i)) * broadcast(factor), n - i);
}

// Evaluates a polynomial. The coefficient of the highest power comes first.
template <class... Coefficients> RETRO_INLINE Vec polynomial(Vec x, float leading, Coefficients... others) {
  Vec p = broadcast(leading);
  ((p = fma(p, x, broadcast(others))), ...);
  return p;
}

// Computes e^x to about 1 ulp, as 2^n * e^r with |r| <= ln2/2, for x up to 88. The result is 0 where n < -126 (SVE:
// -149), and NaN stays NaN. The coefficients come from Cephes' expf.
RETRO_INLINE Vec exp(Vec x) {
  constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
  x = max(broadcast(LOWEST_POWER * (LN2_HIGH + LN2_LOW)), x);
  Vec power;
  const Vec n = power_of_two(x * broadcast(LOG2E), power);
  Vec r = fma(n, broadcast(-LN2_HIGH), x);
  r = fma(n, broadcast(-LN2_LOW), r);
  const Vec p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                           5.0000001201e-1f);
  return times(fma(p, r * r, r) + broadcast(1.f), power);
}

// Computes 2^x to about 1 ulp, for a softmax in base 2, for x up to 127. The result is 0 below about 2^-126 (SVE:
// 2^-149), and NaN stays NaN. The coefficients come from Cephes' exp2f.
RETRO_INLINE Vec exp2(Vec x) {
  x = max(broadcast(LOWEST_POWER), x);
  Vec power;
  const Vec r = x - power_of_two(x, power);
  const Vec p = polynomial(r, 1.535336188319500e-4f, 1.339887440266574e-3f, 9.618437357674640e-3f,
                           5.550332471162809e-2f, 2.402264791363012e-1f, 6.931472028550421e-1f);
  return times(fma(p, r, broadcast(1.f)), power);
}

constexpr int LINE = 64;  // bytes of a cache line

enum Use { READ, CLOSE, WRITE };  // prefetch into L2 to be read, into L1 to be read, into L2 to be written

// Prefetches a row. Hardware prefetchers cannot do this, because they stop at the end of a page.
template <Use USE = READ> RETRO_INLINE void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += LINE)
    __builtin_prefetch(static_cast<const char*>(row) + i, USE == WRITE, USE == CLOSE ? 3 : 2);
}

}  // namespace retro::RETRO_ISA
