// Products of pairs in tile registers. gemm.h includes this file, which reads the same operands. A tile of A is 16 rows
// of RowMajor, and a tile of B is 16 rows and one vector of PackedB. Other operands and incomplete tiles are first
// copied into whole tiles, which are padded with zeros. So the bits of a row do not depend on its place in the product.
#pragma once
#include "gemm.h"

namespace retro::RETRO_ISA {

// Returns the rows [row, row + rows) and pairs [k, k + pairs) of A as a tile, in place or in `copy`.
RETRO_INLINE TileOperand tile_of(const RowMajor<uint32_t>& a, int row, int rows, int k, int pairs, uint32_t* copy) {
  const uint32_t* from = a.data + row * a.lda + k;
  if (rows == TILE && pairs == TILE)
    return {from, a.lda * int64_t{sizeof(*from)}};
  return copied(rows, pairs, copy, [&](int r) { return from + r * a.lda; });
}
template <class T> RETRO_INLINE TileOperand tile_of(const RowPointers<T, uint32_t>& a, int row, int rows, int k,
                                                    int pairs, uint32_t* copy) {
  return copied(rows, pairs, copy, [&](int r) { return reinterpret_cast<const uint32_t*>(a.rows[row + r]) + k; });
}
RETRO_INLINE TileOperand tile_of(const ColumnMajor<uint32_t>& a, int row, int rows, int k, int pairs, uint32_t* copy) {
  Vec x[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < TILE; ++i)
    x[i] = _mm512_maskz_loadu_ps(i < pairs ? first(rows) : Mask(0), a.data + (k + (i < pairs ? i : 0)) * a.lda + row);
  transpose(x);
#pragma GCC unroll 16
  for (int r = 0; r < TILE; ++r)
    store(reinterpret_cast<float*>(copy + r * TILE), x[r]);
  return {copy, ROW_BYTES};
}

RETRO_INLINE TileOperand tile_of(const PackedB<uint32_t>& b, int k, int pairs, int column, uint32_t* copy) {
  const uint32_t* from = b.data + k * b.ldb + column;
  if (pairs == TILE)
    return {from, b.ldb * int64_t{sizeof(*from)}};
  return copied(pairs, TILE, copy, [&](int i) { return from + i * b.ldb; });
}

// Passes the rows [r, r + MR) of the sums to the epilogue.
template <int MR, int NR, class Epilogue>
RETRO_INLINE void hand_over(const float* sums, int r, int row, int column, Epilogue& epilogue) {
  Vec c[MR][NR];
  unrolled<MR, NR>([&](int i, int v) { c[i][v] = load(sums + (r + i) * NR * LANES + v * LANES); });
  finish_tile(row + r, column, c, epilogue);
}

// Computes NR vectors of columns, from `column` on, for all rows.
template <int NR, class A, class Epilogue> __attribute__((noinline)) void tile_panel(int m, int kc, const A& a,
                                                                                     const PackedB<uint32_t>& b,
                                                                                     int column, Epilogue& epilogue) {
  alignas(64) uint32_t copy_a[TILE * TILE], copy_b[TILE * TILE];
  alignas(64) float sums[TILE * NR * LANES];
  for (int row = 0; row < m; row += TILE) {
    const int rows = std::min(TILE, m - row);
    each_sum<NR>([](auto v) { clear_tile<v>(); });
    for (int k = 0; k < kc; k += TILE) {
      const int pairs = std::min(TILE, kc - k);
      load_tile<TILE_A>(tile_of(a, row, rows, k, pairs, copy_a));
      each_sum<NR>(
          [&](auto v) { load_tile<TILE_B>(tile_of(b, k, pairs, column + v * LANES, copy_b)), multiply_tiles<v>(); });
    }
    each_sum<NR>([&](auto v) { store_tile<v>(sums + v * LANES, NR * LANES); });
    int r = 0;
    for (; r + 4 <= rows; r += 4)
      hand_over<4, NR>(sums, r, row, column, epilogue);
    for (; r < rows; ++r)
      hand_over<1, NR>(sums, r, row, column, epilogue);
  }
}

template <class T> RETRO_INLINE PackedB<uint32_t> packed(const UnpackedB<T, uint32_t>& b, int vectors, int kc) {
  for (int k = 0; k < kc; ++k)
    for (int v = 0; v < vectors; ++v)
      b.row(k, v * LANES);
  return b.packed();
}
RETRO_INLINE PackedB<uint32_t> packed(const PackedB<uint32_t>& b, int, int) { return b; }

template <class A, class B, class Epilogue>
void tile_gemm(int m, int vectors, int kc, const A& a, const B& whole, Epilogue& epilogue) {
  const PackedB<uint32_t> b = packed(whole, vectors, kc);
  each_panel<4>(vectors, [&](auto nr, int column) { tile_panel<nr>(m, kc, a, b, column, epilogue); });
}

}  // namespace retro::RETRO_ISA
