// Small matrix products in registers: C[m][n] = sum over k of A[m][k] * B[k][n]. An epilogue receives C, in vectors or
// in tiles, while C is still in registers.
//
// A micro-kernel keeps mr rows by nr vectors of C in registers. For each k it loads a row of B as whole vectors and
// broadcasts elements of A. An element is a float, or a pair of bf16 (uint32_t) that are consecutive in k. With pairs,
// one multiply-add covers two values of k, and kc, the depth of the product, counts pairs. It is a single instruction
// if MULTIPLIES_PAIRS is true.
//
//   gemm(m, vectors, kc, a, b, epilogue)
//     a    RowMajor: data[r*lda + k]; ColumnMajor: data[k*lda + r]; RowPointers: one pointer per row
//     b    PackedB: data[k*ldb + c], c < vectors*LANES; UnpackedB: pointers to rows, which the product packs
//     epilogue(row, column, Vec) is called for LANES columns of C from `column` on, once for every (row, column).
//     epilogue.tile(row, column, Vec (&)[MR][NR]) is called instead, for a whole tile, if the epilogue defines it.
//   gemm<ROW_MAJOR>(m, vectors, kc, a, lda, b, ldb, epilogue): RowMajor or ColumnMajor, and PackedB
#pragma once
#include <type_traits>

#include "simd.h"
#include "stages.h"
#include "tiles.h"

namespace retro::RETRO_ISA {

// Number of vectors and rows of the micro-kernel's tile of C: the largest for which the tile, a row of B and an element
// of A fit in the registers.
constexpr int MAX_NR = REGISTERS >= 32 ? 4 : 2;  // 32 registers: 6x4, 8x3, 12x2, 12x1; 16 registers: 6x2, 12x1
constexpr int mr_of(int nr) { return nr >= 4 ? 6 : nr == 3 ? 8 : nr == 2 && REGISTERS < 32 ? 6 : 12; }

template <class Elem> constexpr bool PAIRS = std::is_same_v<Elem, uint32_t>;

constexpr int pad(int n) { return (n + LANES - 1) / LANES * LANES; }

RETRO_INLINE Vec fma(Pairs a, Pairs b, Vec acc) { return dot(acc, a, b); }

// Returns the depth of a product over k values: the number of elements of type Elem that hold them.
template <class Elem> constexpr int kc_of(int k) { return PAIRS<Elem> ? (k + 1) / 2 : k; }

template <class Elem, bool BY_ROWS> struct Strided {
  const Elem* data;
  int64_t lda;
  Strided from(int row) const { return {data + (BY_ROWS ? row * lda : row), lda}; }
  template <int MR> Strided held() const { return *this; }
  RETRO_INLINE Elem at(int r, int k) const { return BY_ROWS ? data[r * lda + k] : data[k * lda + r]; }
};
template <class Elem> using RowMajor = Strided<Elem, true>;
template <class Elem> using ColumnMajor = Strided<Elem, false>;

// T is the type of the rows in memory: bf16 if Elem is a pair of bf16, otherwise Elem.
template <class T, class Elem> struct RowPointers {
  const T* const* rows;
  template <int MR> struct Held {  // the pointers in registers
    const T* row[MR];
    RETRO_INLINE Elem at(int r, int k) const {
      Elem x;
      std::memcpy(&x, reinterpret_cast<const char*>(row[r]) + k * sizeof(Elem), sizeof(Elem));
      return x;
    }
  };
  RowPointers from(int row) const { return {rows + row}; }
  template <int MR> RETRO_INLINE Held<MR> held() const {
    Held<MR> h;
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
      h.row[r] = rows[r];
    return h;
  }
};

template <class Elem> struct PackedB {
  const Elem* data;
  int64_t ldb;
  PackedB from(int column) const { return {data + column, ldb}; }
  PackedB packed() const { return *this; }
  RETRO_INLINE auto row(int k, int c) const { return load(data + k * ldb + c); }
};

// Loads a vector of row k of B, or its first lanes, through pointers to rows. The first argument only selects the type.
template <class T, class... Count>
RETRO_INLINE Vec b_row_of(const float*, const T* const* rows, int k, int c, Count... count) {
  return load(rows[k] + c, count...);
}
template <class... Count>
RETRO_INLINE Pairs b_row_of(const uint32_t*, const bf16* const* rows, int k, int c, Count... count) {
  return interleave(rows[2 * k] + c, rows[2 * k + 1] + c, count...);
}

// While the first tile of rows is multiplied, it reads B through the pointers and packs it into `data`, where the other
// tiles read it. Rows are read in whole vectors. A pair has elements of the rows 2k and 2k + 1, which must both exist.
template <class T, class Elem> struct UnpackedB {
  const T* const* rows;
  Elem* data;
  int64_t ldb;
  int column = 0;
  UnpackedB from(int c) const { return {rows, data + c, ldb, column + c}; }
  PackedB<Elem> packed() const { return {data, ldb}; }
  RETRO_INLINE auto row(int k, int c) const {
    const auto x = b_row_of(data, rows, k, column + c);
    store(data + k * ldb + c, x);
    return x;
  }
};

template <class Epilogue, class = void> constexpr bool TAKES_TILES = false;
template <class Epilogue> constexpr bool TAKES_TILES<Epilogue, std::void_t<decltype(&Epilogue::template tile<1, 1>)>> =
    true;

template <int MR, int NR, class Epilogue>
RETRO_INLINE void finish_tile(int row, int column, const Vec (&c)[MR][NR], Epilogue& epilogue) {
  if constexpr (TAKES_TILES<Epilogue>)
    epilogue.tile(row, column, c);
  else
    unrolled<MR, NR>([&](int r, int v) { epilogue(row + r, column + v * LANES, c[r][v]); });
}

template <int MR, int NR, class A, class B, class Epilogue>
RETRO_INLINE void micro_kernel(int kc, const A& a, const B& b, int row, int column, Epilogue& epilogue) {
  Vec c[MR][NR];
  unrolled<MR, NR>([&](int r, int v) { c[r][v] = zero(); });
  const auto a_rows = a.from(row).template held<MR>();
  for (int k = 0; k < kc; ++k) {
    decltype(b.row(0, 0)) b_row[NR];
#pragma GCC unroll 4
    for (int v = 0; v < NR; ++v)
      b_row[v] = b.row(k, v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const auto x = broadcast(a_rows.at(r, k));
#pragma GCC unroll 4
      for (int v = 0; v < NR; ++v)
        c[r][v] = fma(x, b_row[v], c[r][v]);
    }
  }
  finish_tile(row, column, c, epilogue);
}

// Epilogue that adds C to floats, whose rows are `ld` elements apart.
struct AddTo {
  float* to;
  int64_t ld;
  RETRO_INLINE void operator()(int row, int column, Vec x) const {
    float* p = to + row * ld + column;
    store(p, load(p) + x);
  }
};

// Computes the rows from r on in tiles of MR rows, then in smaller tiles.
template <int MR, int NR, class A, class B, class Epilogue>
RETRO_INLINE void row_tiles(int r, int m, int kc, const A& a, const B& b, int column, Epilogue& epilogue) {
  for (; r + MR <= m; r += MR)
    micro_kernel<MR, NR>(kc, a, b, r, column, epilogue);
  for (; r + 4 <= m; r += 4)
    micro_kernel<4, NR>(kc, a, b, r, column, epilogue);
  if (r + 2 <= m)
    micro_kernel<2, NR>(kc, a, b, r, column, epilogue), r += 2;
  if (r < m)
    micro_kernel<1, NR>(kc, a, b, r, column, epilogue);
}

template <int NR, class A, class B, class Epilogue>
__attribute__((noinline)) void column_panel(int m, int kc, const A& a, const B& whole, int column, Epilogue& epilogue) {
  constexpr int MR = mr_of(NR);
  const B b = whole.from(column);
  if constexpr (!std::is_same_v<B, decltype(b.packed())>) {  // one tile packs B
    if (m >= MR) {
      micro_kernel<MR, NR>(kc, a, b, 0, column, epilogue);
      return row_tiles<MR, NR>(MR, m, kc, a, b.packed(), column, epilogue);
    }
    micro_kernel<1, NR>(kc, a, b, 0, column, epilogue);
    return row_tiles<MR, NR>(1, m, kc, a, b.packed(), column, epilogue);
  }
  row_tiles<MR, NR>(0, m, kc, a, b, column, epilogue);
}

// Calls f(nr, column) for panels of nr vectors that together are `vectors` wide: as many as fit with the constant nr =
// MOST, and the rest in one panel.
template <int MOST, class Function> RETRO_INLINE void each_panel(int vectors, Function&& f, int v = 0) {
  for (; v + MOST <= vectors; v += MOST)
    f(std::integral_constant<int, MOST>{}, v * LANES);
  if constexpr (MOST > 1)
    each_panel<MOST - 1>(vectors, f, v);
}

#if RETRO_TILES
template <class A, class B, class Epilogue>
void tile_gemm(int m, int vectors, int kc, const A& a, const B& b, Epilogue& epilogue);  // tile_gemm.h
#endif

// Returns the number of rows of a product that share its other operand in L1: `few`, or all if AMX multiplies.
template <class Elem> RETRO_INLINE int slice(int few, int all) { return PAIRS<Elem> && tiles_ready ? all : few; }

template <class A, class B, class Epilogue>
inline void gemm(int m, int vectors, int kc, const A& a, const B& b, Epilogue&& epilogue) {
  count_product((std::is_same_v<decltype(b.packed()), PackedB<uint32_t>> ? 2. : 1.) * m * vectors * LANES * kc);
#if RETRO_TILES
  if constexpr (std::is_same_v<decltype(b.packed()), PackedB<uint32_t>>)
    if (tiles_ready)
      return tile_gemm(m, vectors, kc, a, b, epilogue);
#endif
  each_panel<MAX_NR>(vectors, [&](auto nr, int column) { column_panel<nr>(m, kc, a, b, column, epilogue); });
}

template <bool ROW_MAJOR, class Elem, class Epilogue> inline void gemm(int m, int vectors, int kc, const Elem* a,
                                                                       int64_t lda, const Elem* b, int64_t ldb,
                                                                       Epilogue&& epilogue) {
  gemm(m, vectors, kc, Strided<Elem, ROW_MAJOR>{a, lda}, PackedB<Elem>{b, ldb}, epilogue);
}

}  // namespace retro::RETRO_ISA

#if RETRO_TILES
#include "tile_gemm.h"
#endif
