// Small matrix products in registers: C[m][n] = sum over k of A[m][k] * B[k][n], handed row by row to the caller.
//
// B lies in rows of whole vectors, A is broadcast one element at a time. An element is a float, or a pair of bf16 that
// are consecutive in k (uint32_t): then a step covers two k, one instruction on avx512bf16.
//
//   gemm(m, vectors, steps, a, b, emit)
//     a    ByRow: data[r*ld + k]; ByLine: data[k*ld + r]; RowList: a pointer for each row, wherever it lies
//     b    Lines: data[k*ld + c], c < vectors*LANES; PackLines: rows wherever they lie, packed on the way
//     emit(row, column, Vec): LANES columns of the result from `column` on; every (row, column) once
//   gemm<BY_ROW>(m, vectors, steps, a, lda, b, ldb, emit): ByRow or ByLine, and Lines
#pragma once
#include <type_traits>

#include "simd.h"

namespace retro::RETRO_ISA {

// Width and height of the accumulator tile: as many accumulators
// as registers allow beside one row of B and a broadcast.
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

template <class E>
struct ByRow {
  const E* data;
  int64_t ld;
  ByRow from(int row) const { return {data + row * ld, ld}; }
  template <int ROWS>
  ByRow held() const {
    return *this;
  }
  RETRO_INLINE E at(int r, int k) const { return data[r * ld + k]; }
};

template <class E>
struct ByLine {
  const E* data;
  int64_t ld;
  ByLine from(int row) const { return {data + row, ld}; }
  template <int ROWS>
  ByLine held() const {
    return *this;
  }
  RETRO_INLINE E at(int r, int k) const { return data[k * ld + r]; }
};

// T is what the rows are stored as: E itself, or bf16 where E is a pair of them.
template <class T, class E>
struct RowList {
  const T* const* rows;
  template <int ROWS>
  struct Held {  // the pointers in registers
    const T* row[ROWS];
    RETRO_INLINE E at(int r, int k) const {
      E x;
      std::memcpy(&x, reinterpret_cast<const char*>(row[r]) + k * sizeof(E), sizeof(E));
      return x;
    }
  };
  RowList from(int row) const { return {rows + row}; }
  template <int ROWS>
  RETRO_INLINE Held<ROWS> held() const {
    Held<ROWS> h;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) h.row[r] = rows[r];
    return h;
  }
};

template <class E>
struct Lines {
  const E* data;
  int64_t ld;
  Lines from(int column) const { return {data + column, ld}; }
  Lines packed() const { return *this; }
  RETRO_INLINE auto line(int k, int c) const { return wide(data + k * ld + c); }
};

RETRO_INLINE void store_line(float* to, Vec x) { store(to, x); }
RETRO_INLINE void store_line(uint32_t* to, Pairs x) { store_pairs(to, x); }
template <class T>
RETRO_INLINE Vec line_of(const T* const* rows, int k, int c, const float*) {
  return load(rows[k] + c);
}
RETRO_INLINE Pairs line_of(const bf16* const* rows, int k, int c, const uint32_t*) {
  return interleave(rows[2 * k] + c, rows[2 * k + 1] + c);
}

// The first tile of rows reads B where it lies, and packs it into `data` for the others: the copy hides behind the
// products. Whole vectors are read. Pairs are of rows 2k and 2k + 1: both must be there.
template <class T, class E>
struct PackLines {
  const T* const* rows;
  E* data;
  int64_t ld;
  int column = 0;
  PackLines from(int c) const { return {rows, data + c, ld, column + c}; }
  Lines<E> packed() const { return {data, ld}; }
  RETRO_INLINE auto line(int k, int c) const {
    const auto x = line_of(rows, k, column + c, data);
    store_line(data + k * ld + c, x);
    return x;
  }
};

template <int ROWS, int VECTORS, class A, class B, class Emit>
RETRO_INLINE void tile(int steps, const A& a, const B& b, int row, int column, Emit& emit) {
  Vec c[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) c[r][v] = zero();
  const auto here = a.from(row).template held<ROWS>();
  for (int k = 0; k < steps; ++k) {
    decltype(b.line(0, 0)) line[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) line[v] = b.line(k, v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const auto x = spread(here.at(r, k));
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) c[r][v] = step(c[r][v], x, line[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) emit(row + r, column + v * LANES, c[r][v]);
}

// Rows from r on that fill tiles of ROWS, then of fewer.
template <int ROWS, int VECTORS, class A, class B, class Emit>
RETRO_INLINE void tiles(int r, int m, int steps, const A& a, const B& b, int column, Emit& emit) {
  for (; r + ROWS <= m; r += ROWS) tile<ROWS, VECTORS>(steps, a, b, r, column, emit);
  for (; r + 4 <= m; r += 4) tile<4, VECTORS>(steps, a, b, r, column, emit);
  if (r + 2 <= m) tile<2, VECTORS>(steps, a, b, r, column, emit), r += 2;
  if (r < m) tile<1, VECTORS>(steps, a, b, r, column, emit);
}

template <int VECTORS, class A, class B, class Emit>
__attribute__((noinline)) void strip(int m, int steps, const A& a, const B& whole, int column, Emit& emit) {
  constexpr int ROWS = tile_rows(VECTORS);
  const B b = whole.from(column);
  if constexpr (!std::is_same_v<B, decltype(b.packed())>) {  // one tile packs
    if (m >= ROWS)
      return tile<ROWS, VECTORS>(steps, a, b, 0, column, emit),
             tiles<ROWS, VECTORS>(ROWS, m, steps, a, b.packed(), column, emit);
    tile<1, VECTORS>(steps, a, b, 0, column, emit);
    return tiles<ROWS, VECTORS>(1, m, steps, a, b.packed(), column, emit);
  }
  tiles<ROWS, VECTORS>(0, m, steps, a, b, column, emit);
}

template <class A, class B, class Emit>
inline void gemm(int m, int vectors, int steps, const A& a, const B& b, Emit&& emit) {
  int v = 0;
  for (; v + TILE_VECTORS <= vectors; v += TILE_VECTORS) strip<TILE_VECTORS>(m, steps, a, b, v * LANES, emit);
#if RETRO_ISA_LEVEL >= 2
  if (vectors - v == 3) return strip<3>(m, steps, a, b, v * LANES, emit);
  if (vectors - v == 2) return strip<2>(m, steps, a, b, v * LANES, emit);
#endif
  if (vectors - v == 1) strip<1>(m, steps, a, b, v * LANES, emit);
}

template <bool BY_ROW, class E, class Emit>
inline void gemm(int m, int vectors, int steps, const E* a, int64_t lda, const E* b, int64_t ldb, Emit&& emit) {
  using A = std::conditional_t<BY_ROW, ByRow<E>, ByLine<E>>;
  gemm(m, vectors, steps, A{a, lda}, Lines<E>{b, ldb}, emit);
}

}  // namespace retro::RETRO_ISA
