// A task computes a tile of c. For DEPTH of k at a time, it packs 64 columns of b into L1 and walks down the rows of a.
// An element is always summed over k in blocks of DEPTH, in order, so its bits depend neither on the tiles nor on the
// threads.
//
// Rows of a are broadcast in place. Columns of a are copied, because each would be in a different page.
#include "linear.h"

#include <algorithm>

#include "pack.h"
#include "parallel.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int DEPTH = 128;    // of k: 64 packed columns are 32 KiB
constexpr int PANEL = 64;     // columns of b that are packed at a time
constexpr int ROWS = 528;     // of a task's tile at most; a multiple of every micro-kernel's rows
constexpr int COLUMNS = 256;  // of a task's tile at most
constexpr int LEAST_ROWS = 96, LEAST_COLUMNS = 128;  // of a task: with fewer another thread does not help
constexpr int GOOD_ROWS = 192;                       // with fewer packing b costs more than balanced threads gain
constexpr int TASKS_PER_THREAD = 2;                  // if tiles keep GOOD_ROWS, so that threads finish together

// Initial value of a tile of products: the bias at first, then the stored sums.
struct Sums {
  float* to;
  int64_t ld;
  int columns;
  bool first;
  const float* bias;

  template <class... Count>
  RETRO_INLINE void add(float* c, int column, Vec x, Count... count) const {
    if (!first)
      x = x + load(c, count...);
    else if (bias)
      x = x + load(bias + column, count...);
    store(c, x, count...);
  }
  template <int MR, int NR>
  RETRO_INLINE void tile(int row, int column, const Vec (&x)[MR][NR]) const {
    unrolled<MR, NR>([&](int r, int v) {
      const int at = column + v * LANES, left = columns - at;
      float* c = to + (row + r) * ld + at;
      left >= LANES ? add(c, at, x[r][v]) : add(c, at, x[r][v], left);
    });
  }
};

// Rows [k, k + depth) of columns [column, column + width) of b, as B of a product: zeros beyond the width.
void pack_panel(const View& b, int64_t k, int depth, int64_t column, int width, float* to) {
  const float* from = b.at<const float>(k, column);
  if (b.stride[1] != 1) return transpose(from, b.stride[1], width, depth, to, PANEL);
  for (int r = 0; r < depth; ++r, from += b.stride[0], to += PANEL)
    for (int x = 0; x < width; x += LANES)
      store(to + x, width - x >= LANES ? load(from + x) : load(from + x, width - x));
}

// Columns [k, k + depth) of `rows` rows of a, where columns are of consecutive elements.
void pack_columns(const View& a, int64_t row, int rows, int64_t k, int depth, float* to) {
  for (int c = 0; c < depth; ++c) {
    const float* from = a.at<const float>(row, k + c);
    if (c + 4 < depth) prefetch_row<CLOSE>(a.at<const float>(row, k + c + 4), rows * int64_t{sizeof(float)});
    std::copy(from, from + rows, to + int64_t{c} * ROWS);
  }
}

struct Tile {
  int64_t row, column;
  int rows, columns;
};

// Prefetches part `p` of `parts` of a rectangle. Each row or column begins in another page, where no hardware
// prefetcher follows.
template <Use USE = READ>
void ask_for(const View& m, int64_t row, int rows, int64_t column, int columns, int p = 0, int parts = 1) {
  const bool by_rows = m.stride[1] == 1;
  const int count = by_rows ? rows : columns;
  const int64_t bytes = int64_t{sizeof(float)} * (by_rows ? columns : rows);
  for (int i = count * p / parts; i < count * (p + 1) / parts; ++i)
    prefetch_row<USE>(by_rows ? m.at<const float>(row + i, column) : m.at<const float>(row, column + i), bytes);
}

void multiply(const View& a, const View& b, const View& bias, const View& c, const Tile& tile) {
  const bool by_rows = a.stride[1] == 1;
  auto* panel = static_cast<float*>(scratch(sizeof(float) * DEPTH * (PANEL + (by_rows ? 0 : ROWS))));
  float* columns = panel + DEPTH * PANEL;
  const auto depth_from = [&](int64_t k) { return static_cast<int>(std::clamp<int64_t>(a.size[1] - k, 0, DEPTH)); };
  for (int64_t k = 0; k < a.size[1]; k += DEPTH) {
    const int depth = depth_from(k);
    if (!by_rows) pack_columns(a, tile.row, tile.rows, k, depth, columns);
    for (int x = 0; x < tile.columns; x += PANEL) {
      const int width = std::min(PANEL, tile.columns - x), next = x + PANEL;
      // the next block of a, a share beside each panel
      ask_for(a, tile.row, tile.rows, k + DEPTH, depth_from(k + DEPTH), x / PANEL, (tile.columns + PANEL - 1) / PANEL);
      ask_for(b, k, depth, tile.column + next, std::clamp(tile.columns - next, 0, PANEL));
      // otherwise a first store would wait for lines that it replaces
      if (k == 0) ask_for<WRITE>(c, tile.row, tile.rows, tile.column + x, width);
      pack_panel(b, k, depth, tile.column + x, width, panel);
      const Sums sums{c.at<float>(tile.row, tile.column + x), c.stride[0], width, k == 0,
                      bias ? bias.at<const float>(tile.column + x) : nullptr};
      const int vectors = pad(width) / LANES;
      if (by_rows)
        gemm<true>(tile.rows, vectors, depth, a.at<const float>(tile.row, k), a.stride[0], panel, PANEL, sums);
      else
        gemm<false>(tile.rows, vectors, depth, columns, ROWS, panel, PANEL, sums);
    }
  }
}

}  // namespace

void matmul(const View& a, const View& b, const View& bias, const View& c, int threads) {
  const int64_t M = c.size[0], N = c.size[1];
  int64_t down = ceil_div(M, ROWS), across = ceil_div(N, COLUMNS);
  const auto cut = [&](int64_t tasks, int64_t rows) {
    while (down * across < tasks && (ceil_div(M, down + 1) >= rows || ceil_div(N, across + 1) >= LEAST_COLUMNS))
      ++(ceil_div(M, down + 1) >= rows ? down : across);
  };
  if (threads > 1) cut(threads, LEAST_ROWS), cut(int64_t{TASKS_PER_THREAD} * threads, GOOD_ROWS);
  const int64_t rows = ceil_div(ceil_div(M, down), 6) * 6, columns = ceil_div(ceil_div(N, across), PANEL) * PANEL;
  down = ceil_div(M, rows), across = ceil_div(N, columns);
  parallel_for(down * across, threads, [&](int64_t task) {
    const int64_t row = task % down * rows, column = task / down * columns;  // neighbours share columns of b
    multiply(a, b, bias, c,
             {row, column, static_cast<int>(std::min(rows, M - row)), static_cast<int>(std::min(columns, N - column))});
  });
}

}  // namespace retro::RETRO_ISA
