// Packing: copies rows of a tensor, of type T, and floats that a kernel has computed into the layouts that gemm.h
// reads. These are row-major A, [rows][row_width<Elem>(D)], B with k = row, and B with k = column. Elem is float, or a
// pair of bf16 (uint32_t).
#pragma once
#include "gemm.h"

namespace retro::RETRO_ISA {

constexpr int LARGEST_D = 256;  // maximum of D and E; the Python checks refuse larger values

// Returns the number of elements of type Elem in a packed row of `n` values, which is padded with zeros to whole
// vectors.
template <class Elem> constexpr int row_width(int n) { return kc_of<Elem>(pad(n)); }

// Packs a row of A: to[0..n) = from[0..n) + bias[0..n), followed by zeros up to pad(n). `bias` may be null.
template <class T, class Elem> RETRO_INLINE void pack_row(const T* from, const float* bias, int n, Elem* to) {
  auto* out = reinterpret_cast<std::conditional_t<PAIRS<Elem>, bf16, float>*>(to);
  vectors(n, [&](int64_t i, auto... count) {
    store(out + i, bias ? load(from + i, count...) + load(bias + i, count...) : load(from + i, count...));
  });
}

// Converts bias[head] to floats in `to` [pad(width)] and returns `to`, or returns null without a bias.
template <class T> const float* bias_of(const View& bias, int head, int width, float* to) {
  if (!bias)
    return nullptr;
  pack_row(bias.at<const T>(head), nullptr, width, to);
  return to;
}

template <class Elem> RETRO_INLINE void clear(Elem* to, int64_t n) {
  std::memset(to, 0, static_cast<size_t>(n) * sizeof(Elem));
}

// Converts row-major A to B with k = row, [kc][pad(D)]. An odd last row is paired with zeros. Floats need no
// conversion, because the two layouts are equal.
RETRO_INLINE const float* pack_b(const float* rows, int, int, float*) { return rows; }
inline const uint32_t* pack_b(const uint32_t* rows, int n, int width, uint32_t* to) {
  const auto* from = reinterpret_cast<const bf16*>(rows);
  static const bf16 NOTHING[LANES] = {};
  const int ld = pad(width);
  for (int r = 0; r < n; r += 2)
    for (int c = 0; c < ld; c += LANES) {
      const bf16* even = from + r * ld + c;
      store(to + r / 2 * ld + c, interleave(even, r + 1 < n ? even + ld : NOTHING));
    }
  return to;
}

// Convert floats to row-major A, and to B or column-major A with k = row. If Elem is float, they are used in place.
RETRO_INLINE RowMajor<float> to_row_major(const float* from, int64_t ld, int, int, float*, int64_t) {
  return {from, ld};
}
inline RowMajor<uint32_t> to_row_major(const float* from, int64_t ld, int rows, int columns, uint32_t* to,
                                       int64_t to_ld) {
  for (int r = 0; r < rows; ++r)
    for (int x = 0; x < columns; x += LANES)
      store(reinterpret_cast<bf16*>(to + r * to_ld) + x, load(from + r * ld + x));
  return {to, to_ld};
}

RETRO_INLINE ColumnMajor<float> to_column_major(const float* from, int64_t ld, int, int, float*, int64_t) {
  return {from, ld};
}
inline ColumnMajor<uint32_t> to_column_major(const float* from, int64_t ld, int rows, int columns, uint32_t* to,
                                             int64_t to_ld) {
  for (int r = 0; r < rows; r += 2)
    for (int x = 0; x < columns; x += LANES) {
      const float* even = from + r * ld + x;
      store(to + r / 2 * to_ld + x, to_pairs(load(even), r + 1 < rows ? load(even + ld) : zero()));
    }
  return {to, to_ld};
}

// Computes to[c][r] = from[r][c] for c < columns and r < pad(rows), with zeros for r >= rows. The strides are in
// elements and may be negative.
inline void transpose(const float* from, int64_t from_stride, int rows, int columns, float* to, int64_t to_stride) {
  for (int r = 0; r < rows; r += LANES)
    for (int c = 0; c < columns; c += LANES) {
      Vec x[LANES];
      const int height = rows - r, width = columns - c;
      const float* block = from + r * from_stride + c;
      if (height >= LANES && width >= LANES) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i)
          x[i] = load(block + i * from_stride);
      } else {
        for (int i = 0; i < LANES; ++i)
          x[i] = i < height ? load(block + i * from_stride, width) : zero();
      }
      transpose(x);
      if (width >= LANES) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i)
          store(to + (c + i) * to_stride + r, x[i]);
      } else {
        for (int i = 0; i < width; ++i)
          store(to + (c + i) * to_stride + r, x[i]);
      }
    }
}
// The same for pairs: a transpose moves 32-bit elements of any type.
inline void transpose(const uint32_t* from, int64_t from_stride, int rows, int columns, uint32_t* to,
                      int64_t to_stride) {
  transpose(reinterpret_cast<const float*>(from), from_stride, rows, columns, reinterpret_cast<float*>(to), to_stride);
}

// Calls `f` with values of two types: the type of the tensors in memory, and the type of the operands of products.
template <class Function> inline void by_storage(Type type, Function&& f) {
  by_type(type, [&](auto t) {
    constexpr bool PAIRED = MULTIPLIES_PAIRS && std::is_same_v<decltype(t), bf16>;
    f(t, std::conditional_t<PAIRED, uint32_t, float>{});
  });
}

}  // namespace retro::RETRO_ISA
