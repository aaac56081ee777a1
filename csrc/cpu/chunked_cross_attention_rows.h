// Rows of keys and values: their addresses, their use as operands of products, and how they are prefetched.
#pragma once
#include "chunked_cross_attention_tile.h"

namespace retro::RETRO_ISA {

// The keys or the values of one chunk, one key head and one block of tokens.
template <class T> struct Piece {
  T* first = nullptr;
  const int64_t* offset = nullptr;
  int count = 0;

  // The block starts at token `at` of the list. `of_keys` selects the keys, otherwise the values are selected. The
  // piece is empty if `head` is beyond the last head.
  Piece(const CrossAttention& c, const Tokens& tokens, bool of_keys, int head, int at) {
    const View& from = of_keys ? c.key : c.value;
    if (head >= from.size[4] || at >= tokens.count)
      return;
    first = from.at<T>(tokens.b, tokens.u, 0, 0, head);
    offset = (of_keys ? tokens.key : tokens.value) + at;
    count = std::min(KEY_BLOCK, tokens.count - at);
  }
  T* row(int r) const { return first + offset[r]; }
};

// Rows to prefetch. They are about a page apart, and no hardware prefetcher follows such a stride. A product requests a
// few of the rows with each of its tiles. Many requests at once would fill the line buffers, and the product's own
// loads would have to wait.
template <class T, Use USE = READ> struct Ahead {
  const T* first = nullptr;
  const int64_t* offset = nullptr;  // offset of each row from the first; null if the rows are `stride` elements apart
  int64_t stride = 0;
  int count = 0, bytes = 0;  // number of rows, bytes per row

  Ahead() = default;
  Ahead(const Piece<const T>& piece, const Sizes& n)
      : first(piece.first), offset(piece.offset), count(piece.count), bytes(n.D * int{sizeof(T)}) {}
  // The rows of a unit in `tensor` [B,N,H,width], for the given head.
  Ahead(const View& tensor, int64_t b, const Unit& unit, int head) {
    if (!tensor || head >= tensor.size[2] || unit.row < 0 || unit.row >= tensor.size[1])
      return;
    first = tensor.at<const T>(b, unit.row, head);
    stride = tensor.stride[1];
    count = static_cast<int>(std::min<int64_t>(unit.rows, tensor.size[1] - unit.row));
    bytes = static_cast<int>(tensor.size[3]) * int{sizeof(T)};
  }
  // Returns the rows, to be prefetched during a product with the given numbers of rows and vectors.
  Ahead beside(int rows, int vectors) const {
    Ahead a = *this;
    a.share_ = static_cast<int>((int64_t{count} << 16) / rows + 1), a.each_ = (bytes + vectors - 1) / vectors;
    return a;
  }
  // Prefetches the share of one tile of the product. This function and its callers must be inlined, because GCC treats
  // a function that only prefetches as one without effects and removes the calls.
  RETRO_INLINE void ask(int row, int rows, int column, int vectors) const {
    const int end = std::min((row + rows) * share_ >> 16, count), v = column / LANES;
    const int begin = (v * each_ + LINE - 1) / LINE * LINE, until = std::min((v + vectors) * each_, bytes);
    for (int r = row * share_ >> 16; r < end; ++r) {
      const char* at = reinterpret_cast<const char*>(first + (offset ? offset[r] : r * stride));
      for (int i = begin; i < until; i += LINE)
        __builtin_prefetch(at + i, USE == WRITE, 2);
    }
  }

 private:
  // share_: rows to prefetch per row of the product, in 1/65536. each_: bytes of a row per vector of columns.
  int share_ = 0, each_ = 0;
};

template <class T, Use USE> struct ThreeAhead {
  Ahead<T> first, second;
  Ahead<T, USE> third;
  RETRO_INLINE void ask(int row, int rows, int column, int vectors) const {
    first.ask(row, rows, column, vectors);
    second.ask(row, rows, column, vectors);
    third.ask(row, rows, column, vectors);
  }
};

// Epilogue that prefetches, and passes the vectors of a tile on one by one. Its row 0 is row `at` of the whole product.
template <class Soon, class Epilogue> struct AskingTiles {
  const Soon& soon;
  int at;
  const Epilogue& each;

  template <int MR, int NR> RETRO_INLINE void tile(int row, int column, const Vec (&x)[MR][NR]) const {
    soon.ask(at + row, MR, column, NR);
    unrolled<MR, NR>([&](int r, int v) { each(at + row + r, column + v * LANES, x[r][v]); });
  }
};

// The rows of a block of keys or values, as an operand of products. The block consists of pointers to the rows and to a
// row of zeros, which is the partner of the last row in a pair. As A the rows are used in place, or widened if the
// operands have another type. As B, with k = row, they are packed by the first product.
template <class T, class Elem> struct BlockRows {
  static constexpr bool SAME = std::is_same_v<T, Elem> || (PAIRS<Elem> && std::is_same_v<T, bf16>);
  int width;
  bool widens;
  const T** row;
  Elem *widened, *packed;

  BlockRows(const Sizes& n, bool as_a, bool as_b, Arena& arena)
      : width(n.D), widens(as_a && !SAME), row(arena.take<const T*>(KEY_BLOCK + 1)),
        widened(arena.take<Elem>(widens ? KEY_BLOCK * row_width<Elem>(width) : 0)),
        packed(arena.take<Elem>(as_b ? static_cast<int64_t>(kc_of<Elem>(KEY_BLOCK)) * pad(width) : 0)) {}
  void take(const Piece<const T>& piece) const {
    static const T NOTHING[LARGEST_D] = {};
    for (int r = 0; r < piece.count; ++r)
      row[r] = piece.row(r);
    row[piece.count] = NOTHING;
    if constexpr (!SAME)
      for (int r = 0; widens && r < piece.count; ++r)
        pack_row(row[r], nullptr, width, widened + r * row_width<Elem>(width));
  }
  auto a() const {
    if constexpr (SAME)
      return RowPointers<T, Elem>{row};
    else
      return RowMajor<Elem>{widened, row_width<Elem>(width)};
  }
  // Calls product(B). `again` tells whether an earlier call has packed the rows.
  template <class Function> void as_b(int count, bool again, Function&& product) const {
    const int ld = pad(width);
    if constexpr (!SAME)
      if (widens)
        return product(PackedB<Elem>{widened, ld});
    if (again)
      return product(PackedB<Elem>{packed, ld});
    if (width == ld)
      return product(UnpackedB<T, Elem>{row, packed, ld});
    for (int k = 0; k < kc_of<Elem>(count); ++k)
      for (int c = 0; c < ld; c += LANES)
        store(packed + k * ld + c, b_row_of(packed, row, k, c, width - c));
    product(PackedB<Elem>{packed, ld});
  }
};

}  // namespace retro::RETRO_ISA
