// Small matrix products in registers: C[m][n] = sum over k of A[m][k] * B[k][n], handed row by row to the caller.
//
// B lies in rows of whole vectors, A is broadcast one element at a time and may lie either way round. An element is a
// float, or a pair of bf16 that are consecutive in k (uint32_t): then a step covers two k, one instruction on avx512bf16.
//
//   gemm<BY_ROW>(m, vectors, steps, a, lda, b, ldb, emit)
//     a    BY_ROW: a[r*lda + k]; else a[k*lda + r]
//     b    b[k*ldb + c], c < vectors*LANES
//     emit(row, column, Vec): LANES columns of the result from `column` on; every (row, column) once
#pragma once
#include <type_traits>

#include "simd.h"

namespace retro::RETRO_ISA {

// Width and height of the accumulator tile: as many accumulators as registers allow beside one row of B and a broadcast.
#if RETRO_ISA_LEVEL >= 2
constexpr int TILE_VECTORS = 4;  // 32 registers: 6x4, 8x3, 12x2, 12x1
constexpr int tile_rows(int vectors) { return vectors >= 4 ? 6 : vectors == 3 ? 8 : 12; }
#else
constexpr int TILE_VECTORS = 2;  // 16 registers: 6x2, 12x1
constexpr int tile_rows(int vectors) { return vectors >= 2 ? 6 : 12; }
#endif

template <class E>
constexpr bool PAIRS = std::is_same_v<E, uint32_t>;

constexpr int pad(int n) { return (n + LANES - 1) / LANES * LANES; }

RETRO_INLINE Vec wide(const float* p) { return load(p); }
RETRO_INLINE Pairs wide(const uint32_t* p) { return load_pairs(p); }
RETRO_INLINE Vec spread(float x) { return broadcast(x); }
RETRO_INLINE Pairs spread(uint32_t x) { return broadcast_pair(x); }
RETRO_INLINE Vec step(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
RETRO_INLINE Vec step(Vec acc, Pairs a, Pairs b) { return dot(acc, a, b); }

// How many steps a contraction over n takes.
template <class E>
constexpr int steps_of(int n);
template <>
constexpr int steps_of<float>(int n) {
  return n;
}
template <>
constexpr int steps_of<uint32_t>(int n) {
  return (n + 1) / 2;
}

template <bool BY_ROW, int ROWS, int VECTORS, class E, class Emit>
RETRO_INLINE void tile(int steps, const E* a, int64_t lda, const E* b, int64_t ldb, int row, int column, Emit& emit) {
  Vec c[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) c[r][v] = zero();
  for (int k = 0; k < steps; ++k, b += ldb) {
    decltype(wide(b)) line[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) line[v] = wide(b + v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const auto x = spread(BY_ROW ? a[r * lda + k] : a[k * lda + r]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) c[r][v] = step(c[r][v], x, line[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) emit(row + r, column + v * LANES, c[r][v]);
}

template <bool BY_ROW, int VECTORS, class E, class Emit>
inline void strip(int m, int steps, const E* a, int64_t lda, const E* b, int64_t ldb, int column, Emit& emit) {
  constexpr int ROWS = tile_rows(VECTORS);
  const int64_t next = BY_ROW ? lda : 1;
  int r = 0;
  for (; r + ROWS <= m; r += ROWS) tile<BY_ROW, ROWS, VECTORS>(steps, a + r * next, lda, b, ldb, r, column, emit);
  for (; r + 4 <= m; r += 4) tile<BY_ROW, 4, VECTORS>(steps, a + r * next, lda, b, ldb, r, column, emit);
  if (r + 2 <= m) tile<BY_ROW, 2, VECTORS>(steps, a + r * next, lda, b, ldb, r, column, emit), r += 2;
  if (r < m) tile<BY_ROW, 1, VECTORS>(steps, a + r * next, lda, b, ldb, r, column, emit);
}

template <bool BY_ROW, class E, class Emit>
inline void gemm(int m, int vectors, int steps, const E* a, int64_t lda, const E* b, int64_t ldb, Emit&& emit) {
  int v = 0;
  for (; v + TILE_VECTORS <= vectors; v += TILE_VECTORS)
    strip<BY_ROW, TILE_VECTORS>(m, steps, a, lda, b + v * LANES, ldb, v * LANES, emit);
#if RETRO_ISA_LEVEL >= 2
  if (vectors - v == 3) return strip<BY_ROW, 3>(m, steps, a, lda, b + v * LANES, ldb, v * LANES, emit);
  if (vectors - v == 2) return strip<BY_ROW, 2>(m, steps, a, lda, b + v * LANES, ldb, v * LANES, emit);
#endif
  if (vectors - v == 1) strip<BY_ROW, 1>(m, steps, a, lda, b + v * LANES, ldb, v * LANES, emit);
}

}  // namespace retro::RETRO_ISA
