// The band of position logits, for queries in blocks of BLOCK rows.
//
// Query row i and key j belong to column c = j - i of the band, whose row of rel_key is query_offset - rel_start - c.
// Columns are divided into chunks: chunk m has the columns BLOCK*m + 1 .. BLOCK*(m+1). The query rows from BLOCK*a on
// and the keys from BLOCK*b on need the chunks b-a-1 and b-a, and the next block of keys needs chunk b-a again. So a
// strip [query][column] slides along the keys, and each chunk is multiplied once, which is as much work as the product
// of queries and keys. The strip stores a score at its column. Reading it with a row stride that is shorter by one
// removes the skew.
//
//        c:  1 2 3 4 | 5 6 7 8        BLOCK = 4, keys 4..7 of query rows 0..3 (a = 0, b = 1)
//   row 0    . . . 4   5 6 7 .
//   row 1    . . 4 5   6 7 . .        j = c + i
//   row 2    . 4 5 6   7 . . .
//   row 3    4 5 6 7   . . . .
#pragma once
#include <algorithm>

#include "arena.h"
#include "pack.h"

namespace retro::RETRO_ISA {

constexpr int BLOCK = 64;  // rows of a query block, keys of a key block, columns of a chunk
// Number of rows to prefetch ahead of packing. The rows of a head are heads*D elements apart, and no hardware
// prefetcher follows such a stride.
constexpr int ROWS_AHEAD = 16;
// Number of rows or columns that a product of a diagonal part takes at a time: fewer multiply fewer products that are
// not needed, and more share operands in registers.
constexpr int DIAGONAL_ROWS = 12, DIAGONAL_COLUMNS = 2 * LANES;
constexpr int NARROW = 4;  // maximum width for which gradients are computed as inner products along the columns

inline int64_t floor_divide(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

struct Band {
  View table;  // [H or 1,table_rows,E]
  int E = 0, E_pad = 0;
  int64_t table_rows = 0;
  int64_t zero = 0;             // column c reads row zero - c of the table
  int64_t low = 0, high = 0;    // visible columns inside the table: [low, high)
  int64_t first = 0, last = 0;  // chunks of these columns: [first, last)

  Band(const View& rel_key, int64_t query_offset, int64_t rel_start, int64_t lowest, int64_t highest) : table(rel_key) {
    if (!rel_key)
      return;
    table_rows = table.size[1];
    E = static_cast<int>(table.size[2]);
    E_pad = pad(E);
    zero = query_offset - rel_start;
    low = std::max(lowest, zero - table_rows + 1);
    high = std::min(highest, zero + 1);
    if (low < high) {
      first = floor_divide(low - 1, BLOCK);
      last = floor_divide(high - 2, BLOCK) + 1;
    }
  }
  explicit operator bool() const { return E > 0; }
  int tables() const { return static_cast<int>(table.size[0]); }
  bool holds(int64_t m) const { return m >= first && m < last; }
  // Returns the part [begin, end) of chunk m that is between `low` and `high`, in whole vectors.
  void inside(int64_t m, int& begin, int& end) const {
    if (!holds(m))
      return void(begin = end = 0);
    begin = static_cast<int>(std::clamp<int64_t>(low - 1 - m * BLOCK, 0, BLOCK)) / LANES * LANES;
    end = pad(static_cast<int>(std::clamp<int64_t>(high - 1 - m * BLOCK, 0, BLOCK)));
  }
};

// Chunks of one head's relative keys. A chunk is packed at its first use, in two layouts of an operand B: transposed,
// and as rows in the order of columns. Elem: type of the operands of products, float or a pair of bf16.
template <class Elem> struct BandChunks {
  const Band& n;
  const int kc = kc_of<Elem>(n.E), width = row_width<Elem>(n.E);

  BandChunks(const Band& band, int64_t first, int64_t last, bool with_rows_b, Arena& arena)
      : n(band), first_(std::max(first, n.first)), count_(std::max<int64_t>(std::min(last, n.last) - first_, 0)),
        keep_rows_b_(with_rows_b && n.E > NARROW), columns_(arena.take<Elem>(count_ * kc * BLOCK)),
        rows_b_(arena.take<Elem>(keep_rows_b_ ? count_ * kc_of<Elem>(BLOCK) * n.E_pad : 0)),
        rows_a_(arena.take<Elem>(BLOCK * width)), ready_(arena.take<uint8_t>(count_)) {}
  void reset() { clear(ready_, count_); }
  Elem* columns(int64_t m) const { return columns_ + (m - first_) * kc * BLOCK; }                  // [kc][BLOCK]
  Elem* rows_b(int64_t m) const { return rows_b_ + (m - first_) * kc_of<Elem>(BLOCK) * n.E_pad; }  // [kc(BLOCK)][E_pad]

  template <class T> void prepare(int head, int64_t m) {
    if (ready_[m - first_])
      return;
    ready_[m - first_] = 1;
    const InStage stage(PACK);
    Elem* to = keep_rows_b_ && !PAIRS<Elem> ? rows_b(m) : rows_a_;
    const int h = n.tables() == 1 ? 0 : head;
    for (int x = 0; x < BLOCK; ++x) {
      const int64_t row = n.zero - (m * BLOCK + 1 + x);
      if (row >= 0 && row < n.table_rows)
        pack_row(n.table.at<const T>(h, row), nullptr, n.E, to + x * width);
      else
        clear(to + x * width, width);
    }
    transpose(to, width, BLOCK, kc, columns(m), BLOCK);
    if (keep_rows_b_)
      pack_b(to, BLOCK, n.E, rows_b(m));
  }

 private:
  int64_t first_, count_;
  bool keep_rows_b_;
  Elem *columns_, *rows_b_, *rows_a_;
  uint8_t* ready_;
};

// Packs `rows` rows of one head, plus a bias, as row-major A: [rows][row_width]. `as_floats` is scratch memory for the
// bias.
template <class T, class Elem> void pack_queries(const View& from, const View& bias, int64_t b, int64_t i, int rows,
                                                 int head, int width, float* as_floats, Elem* to) {
  const float* const more = bias_of<T>(bias, head, width, as_floats);
  for (int r = 0; r < rows; ++r) {
    if (const int64_t soon = i + r + ROWS_AHEAD; soon < from.size[1])
      prefetch_row(from.at<const T>(b, soon, head), width * sizeof(T));
    pack_row(from.at<const T>(b, i + r, head), more, width, to + r * row_width<Elem>(width));
  }
}

// The part of a chunk whose keys exist: row r has the columns [first - r, last - r).
struct Diagonals {
  int first, last;

  // For the keys [first_key, last_key), with the query rows from i on, and chunk m.
  static Diagonals of(int64_t m, int64_t i, int64_t first_key, int64_t last_key) {
    const int64_t zero = m * BLOCK + 1 + i;  // key of row 0 and column 0
    return {static_cast<int>(std::clamp<int64_t>(first_key - zero, 0, 2 * BLOCK)),
            static_cast<int>(std::clamp<int64_t>(last_key - zero, 0, 2 * BLOCK))};
  }
  bool whole() const { return first <= 0 && last >= 2 * BLOCK - 1; }
  // Calls f(row, count, from, to) for slices of the `rows` rows, with the needed part [from, to) of the columns
  // [begin, end), in whole vectors. `step` is the number of rows of a slice unless all columns are needed.
  template <class Function> void each_slice(int rows, int step, int begin, int end, Function&& f) const {
    step = whole() ? rows : step;
    for (int row = 0; row < rows; row += step) {
      const int count = std::min(step, rows - row);
      const int from = std::max(begin, std::max(first - row - count + 1, 0) / LANES * LANES);
      const int to = std::min(end, pad(std::max(last - row, 0)));
      if (from < to)
        f(row, count, from, to);
    }
  }
};

// Computes strip[r][0..BLOCK), the products of relative query r and the relative keys of chunk m. Columns outside
// `Band::inside` become 0. Columns that are not needed are undefined.
template <class T, class Elem> void band_logits(const Band& n, BandChunks<Elem>& chunks, int head, int64_t m, int rows,
                                                const Elem* rel_query, float* strip, int64_t ld,
                                                const Diagonals& need) {
  const InStage stage(POSITION_LOGITS);
  int begin, end;
  n.inside(m, begin, end);
  for (int r = 0; r < rows && end - begin < BLOCK; ++r)
    for (int x = 0; x < BLOCK; x += LANES)
      if (x < begin || x >= end)
        store(strip + r * ld + x, zero());
  if (begin >= end)
    return;
  chunks.template prepare<T>(head, m);
  need.each_slice(rows, slice<Elem>(DIAGONAL_ROWS, TILE), begin, end, [&](int row, int count, int from, int to) {
    float* const at = strip + row * ld + from;
    gemm<true>(count, (to - from) / LANES, chunks.kc, rel_query + row * chunks.width, chunks.width,
               chunks.columns(m) + from, BLOCK, [=](int r, int x, Vec s) { store(at + r * ld + x, s); });
  });
}

// Returns element e of LANES relative keys from the transposed layout of a chunk.
RETRO_INLINE Vec key_column(const float* columns, int e, int x) { return load(columns + e * BLOCK + x); }
RETRO_INLINE Vec key_column(const uint32_t* columns, int e, int x) {
  const Pairs two = load(columns + e / 2 * BLOCK + x);
  return e % 2 ? odd_of(two) : even_of(two);
}

// Reads a chunk of the strip, which holds the gradients of the scores. Adds its contribution to
//   d_query [rows][E_pad]   the products of the gradients and the relative keys, unless null
//   d_table [E][BLOCK]      the gradient of the chunk's relative keys, transposed, unless null
// The strip is 0 in columns that are not needed. rel_query is an operand B with k = row. `rounded` is scratch memory
// for BLOCK*BLOCK/2 pairs.
template <class T, class Elem> void band_gradients(const Band& n, BandChunks<Elem>& chunks, int head, int64_t m,
                                                   int rows, const Elem* rel_query, const float* strip, int64_t ld,
                                                   Elem* rounded, float* d_query, float* d_table,
                                                   const Diagonals& need) {
  int begin, end;
  n.inside(m, begin, end);
  if (begin >= end)
    return;
  const float* grad = strip + begin;
  const int columns = end - begin;
  if (d_table) {
    const auto a = to_column_major(grad, ld, rows, columns, rounded, BLOCK);
    const int step = need.whole() ? columns : DIAGONAL_COLUMNS;
    for (int x = 0; x < columns; x += step) {
      const int width = std::min(step, columns - x);
      // the rows that have columns of these, from an even one on, because two rows are a pair
      const int from = std::max(need.first - begin - x - width + 1, 0) / 2 * 2,
                to = std::min(rows, need.last - begin - x);
      if (from < to)
        gemm<false>(n.E, width / LANES, kc_of<Elem>(to - from), rel_query + kc_of<Elem>(from) * n.E_pad, n.E_pad,
                    a.data + kc_of<Elem>(from) * a.lda + x, a.lda, AddTo{d_table + begin + x, BLOCK});
    }
  }
  if (!d_query)
    return;
  chunks.template prepare<T>(head, m);
  if (n.E > NARROW) {
    const auto a = to_row_major(grad, ld, rows, columns, rounded, kc_of<Elem>(BLOCK));
    return need.each_slice(rows, slice<Elem>(DIAGONAL_ROWS, TILE), begin, end,
                           [&](int row, int count, int from, int to) {
                             gemm(count, n.E_pad / LANES, kc_of<Elem>(to - from),
                                  RowMajor<Elem>{a.data + row * a.lda + kc_of<Elem>(from - begin), a.lda},
                                  PackedB<Elem>{chunks.rows_b(m) + kc_of<Elem>(from) * n.E_pad, n.E_pad},
                                  AddTo{d_query + row * n.E_pad, n.E_pad});
                           });
  }
  for (int r = 0; r < rows; ++r)
    for (int e = 0; e < n.E; ++e) {
      Vec s = zero();
      for (int x = begin; x < end; x += LANES)
        s = fma(load(strip + r * ld + x), key_column(chunks.columns(m), e, x), s);
      d_query[r * n.E_pad + e] += sum(s);
    }
}

}  // namespace retro::RETRO_ISA
