// The band of position logits, for queries in blocks of BLOCK rows.
//
// Query row i and key j belong to column c = j - i, whose row of rel_key is query_offset - rel_start - c. Columns are
// divided into chunks: chunk m has c = BLOCK*m + 1 .. BLOCK*(m+1). Query rows BLOCK*a.. and keys BLOCK*b.. need chunks
// b-a-1 and b-a, and the next block of keys needs b-a again. So a strip [query][column] slides along the keys, and each
// chunk is multiplied once: as much work as query times key. Scores are in the strip at their column; a row stride that
// is shorter by one removes the skew.
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
constexpr int NARROW = 4;  // up to this width gradients are inner products along the columns

inline int64_t floor_divide(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

struct Band {
  View table;  // [H or 1,table_rows,E]
  int E = 0, E_pad = 0;
  int64_t table_rows = 0;
  int64_t zero = 0;             // column c reads row zero - c
  int64_t low = 0, high = 0;    // columns inside the table that are visible
  int64_t first = 0, last = 0;  // their chunks

  Band(const View& rel_key, int64_t query_offset, int64_t rel_start, int64_t lowest, int64_t highest) : table(rel_key) {
    if (!rel_key) return;
    table_rows = table.size[1], E = static_cast<int>(table.size[2]), E_pad = pad(E), zero = query_offset - rel_start;
    low = std::max(lowest, zero - table_rows + 1), high = std::min(highest, zero + 1);
    if (low < high) first = floor_divide(low - 1, BLOCK), last = floor_divide(high - 2, BLOCK) + 1;
  }
  explicit operator bool() const { return E > 0; }
  int tables() const { return static_cast<int>(table.size[0]); }
  bool holds(int64_t m) const { return m >= first && m < last; }
  // Columns of chunk m from `low` to `high`, as [begin, end) inside the chunk, in whole vectors.
  void inside(int64_t m, int& begin, int& end) const {
    begin = static_cast<int>(std::clamp<int64_t>(low - 1 - m * BLOCK, 0, BLOCK)) / LANES * LANES;
    end = pad(static_cast<int>(std::clamp<int64_t>(high - 1 - m * BLOCK, 0, BLOCK)));
  }
};

// Chunks of one head's relative keys, packed at the first use: transposed, and as rows in the order of columns, both as
// B. Elem: type of the products' operands, float or a pair of bf16.
template <class Elem>
class BandChunks {
 public:
  BandChunks() = default;
  BandChunks(const Band& band, int64_t first, int64_t last, bool with_rows_b, Arena& arena)
      : band_(&band), first_(std::max(first, band.first)),
        count_(std::max<int64_t>(std::min(last, band.last) - first_, 0)) {
    kc_ = kc_of<Elem>(band.E), width_ = row_width<Elem>(band.E);
    columns_ = arena.take<Elem>(count_ * kc_ * BLOCK);
    keep_rows_b_ = with_rows_b && band.E > NARROW;
    rows_b_ = arena.take<Elem>(keep_rows_b_ ? count_ * kc_of<Elem>(BLOCK) * band.E_pad : 0);
    rows_a_ = arena.take<Elem>(BLOCK * width_);
    ready_ = arena.take<uint8_t>(count_);
  }
  void reset() { clear(ready_, count_); }
  const Elem* columns(int64_t m) const { return columns_ + (m - first_) * kc_ * BLOCK; }  // [kc(E)][BLOCK]
  // [kc(BLOCK)][E_pad]
  Elem* rows_b(int64_t m) const { return rows_b_ + (m - first_) * kc_of<Elem>(BLOCK) * band_->E_pad; }
  int kc() const { return kc_; }
  int width() const { return width_; }

  template <class T>
  void prepare(int head, int64_t m) {
    if (ready_[m - first_]) return;
    ready_[m - first_] = 1;
    const Band& n = *band_;
    Elem* to = keep_rows_b_ && !PAIRS<Elem> ? rows_b(m) : rows_a_;
    const int h = n.tables() == 1 ? 0 : head;
    for (int x = 0; x < BLOCK; ++x) {
      const int64_t row = n.zero - (m * BLOCK + 1 + x);
      if (row >= 0 && row < n.table_rows)
        pack_row(n.table.at<const T>(h, row), nullptr, n.E, to + x * width_);
      else
        clear(to + x * width_, width_);
    }
    transpose(to, width_, BLOCK, kc_, columns_ + (m - first_) * kc_ * BLOCK, BLOCK);
    if (keep_rows_b_) pack_b(to, BLOCK, n.E, rows_b(m));
  }

 private:
  const Band* band_ = nullptr;
  int64_t first_ = 0, count_ = 0;
  bool keep_rows_b_ = false;
  int kc_ = 0, width_ = 0;
  Elem *columns_ = nullptr, *rows_b_ = nullptr, *rows_a_ = nullptr;
  uint8_t* ready_ = nullptr;
};

inline void clear_columns(float* strip, int64_t ld, int rows, int begin, int end) {
  for (int r = 0; r < rows; ++r)
    for (int x = begin; x < end; x += LANES) store(strip + r * ld + x, zero());
}

// strip[r][0..BLOCK) = rel_query_r · the relative keys of chunk m, zeros outside `Band::inside`.
template <class T, class Elem>
void band_logits(const Band& n, BandChunks<Elem>& chunks, int head, int64_t m, int rows, const Elem* rel_query,
                 float* strip, int64_t ld) {
  int begin = 0, end = 0;
  if (n.holds(m)) n.inside(m, begin, end);
  clear_columns(strip, ld, rows, 0, begin), clear_columns(strip, ld, rows, end, BLOCK);
  if (begin >= end) return;
  chunks.template prepare<T>(head, m);
  gemm<true>(rows, (end - begin) / LANES, chunks.kc(), rel_query, chunks.width(), chunks.columns(m) + begin, BLOCK,
             [=](int r, int x, Vec s) { store(strip + r * ld + begin + x, s); });
}

// Column e of the relative keys in chunk columns of Elem.
RETRO_INLINE Vec key_column(const float* columns, int e, int x) { return load(columns + e * BLOCK + x); }
RETRO_INLINE Vec key_column(const uint32_t* columns, int e, int x) {
  const Pairs two = load_pairs(columns + e / 2 * BLOCK + x);
  return e % 2 ? odd_of(two) : even_of(two);
}

// Adds the contribution of a chunk of the strip, which holds the gradients of the scores, to
//   d_query [rows][E_pad]   if not null: gradient · relative keys
//   d_table [E][BLOCK]      if not null: the gradient of the chunk's relative keys, transposed
// rel_query: B with k = row. `rounded`: BLOCK*BLOCK/2 elements for pairs.
template <class T, class Elem>
void band_gradients(const Band& n, BandChunks<Elem>& chunks, int head, int64_t m, int rows, const Elem* rel_query,
                    const float* strip, int64_t ld, Elem* rounded, float* d_query, float* d_table) {
  int begin = 0, end = 0;
  if (n.holds(m)) n.inside(m, begin, end);
  if (begin >= end) return;
  const float* grad = strip + begin;
  const int columns = end - begin;
  if (d_table) {
    const auto a = to_column_major(grad, ld, rows, columns, rounded, BLOCK);
    gemm<false>(n.E, columns / LANES, kc_of<Elem>(rows), rel_query, n.E_pad, a.data, a.lda, [=](int e, int x, Vec s) {
      float* to = d_table + e * BLOCK + begin + x;
      store(to, load(to) + s);
    });
  }
  if (!d_query) return;
  chunks.template prepare<T>(head, m);
  if (n.E > NARROW) {
    const auto a = to_row_major(grad, ld, rows, columns, rounded, kc_of<Elem>(BLOCK));
    const PackedB<Elem> keys{chunks.rows_b(m) + kc_of<Elem>(begin) * n.E_pad, n.E_pad};
    return gemm(rows, n.E_pad / LANES, kc_of<Elem>(columns), a, keys, [=](int r, int e, Vec s) {
      float* to = d_query + r * n.E_pad + e;
      store(to, load(to) + s);
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

// Clears the rows of the gradient that are in no chunk.
template <class T>
void clear_unused_rows(const Band& n, const View& to) {
  for (int h = 0; h < n.tables(); ++h)
    for (int64_t row = 0; row < n.table_rows; ++row)
      if (!n.holds(floor_divide(n.zero - row - 1, BLOCK))) clear(to.at<T>(h, row), n.E);
}

// d_rel_key[h] rows of chunk m = factor * total [E][BLOCK]; `temporary` [BLOCK][E_pad].
template <class T>
void write_table_gradient(const Band& n, const View& to, int h, int64_t m, const float* total, float factor,
                          float* temporary) {
  transpose(total, BLOCK, n.E, BLOCK, temporary, n.E_pad);
  for (int x = 0; x < BLOCK; ++x) {
    const int64_t row = n.zero - (m * BLOCK + 1 + x);
    if (row < 0 || row >= n.table_rows) continue;
    scale_row(temporary + x * n.E_pad, factor, n.E, to.at<T>(h, row));
  }
}

}  // namespace retro::RETRO_ISA
