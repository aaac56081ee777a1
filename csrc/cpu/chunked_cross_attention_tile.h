// Functions that the forward and the backward pass of chunked cross-attention share: sizes, the queries and keys of a
// task, packing, and position logits.
//
// Scores are key-major, S[key][query], and queries are the lanes of a vector. So keys and values are used in place (the
// products broadcast their elements or read their rows as B), only the few queries are transposed, and the softmax
// reduces within lanes.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "arena.h"
#include "chunked_cross_attention.h"
#include "dropout.h"
#include "pack.h"
#include "parallel.h"

namespace retro::RETRO_ISA {

constexpr int QUERY_BLOCK = 64;  // maximum number of queries of a unit; rows of S are 64 elements apart
constexpr int SLICE = 12;        // rows of a product that share operands in L1, a multiple of the tile's 6 rows
constexpr int BAND_SLICE = 6;    // the same for products with the band, where a smaller slice multiplies fewer zeros
// Maximum number of keys per block. The rows and scores of a block fit in L2, and the operands of each product in L1.
constexpr int KEY_BLOCK = 132;

struct Sizes {
  int64_t B, N, L, M;
  int H, D, K, R, G, E, table_rows;
  int64_t first_chunk, last_chunk;  // existing chunks that some query attends: [first, last)
  int max_displacement, band;       // the band has `band` columns; column t has displacement max_displacement - t
  int band_ld;
  int blocks;  // maximum number of units per chunk and head

  explicit Sizes(const CrossAttention& c)
      : B(c.query.size[0]), N(c.query.size[1]), L(c.key.size[1]), M(c.chunk_len), H(int(c.query.size[2])),
        D(int(c.query.size[3])), K(int(c.key.size[2])), R(int(c.key.size[3])), G(int(c.key.size[4])),
        E(c.rel_key ? int(c.rel_key.size[2]) : 0), table_rows(c.rel_key ? int(c.rel_key.size[1]) : 0) {
    first_chunk = std::clamp<int64_t>((c.query_start + 1) / M - 1, 0, L);
    last_chunk = std::clamp((c.query_start + N) / M, first_chunk, L);
    int64_t low = M, high = 0;  // range of the indices that queries have inside the attending chunks
    for (int64_t u : {first_chunk, last_chunk - 1}) {
      const int64_t first = first_row(c, u), begin = std::max<int64_t>(first, 0), end = std::min(first + M, N);
      if (begin >= end)
        continue;
      low = std::min(low, begin - first);
      high = std::max(high, end - first);
    }
    if (last_chunk - first_chunk >= 2) {
      low = 0;  // the first chunk has queries up to the last index, and the second chunk from index 0 on
      high = M;
    }
    const int64_t rows = std::max<int64_t>(high - low, 1);
    max_displacement = static_cast<int>(low + rows - 1);
    band = static_cast<int>(rows + R - 1);
    band_ld = pad(band) + LANES;  // because a unit may start at any column and reads whole vectors
    blocks = static_cast<int>((rows + QUERY_BLOCK - 1) / QUERY_BLOCK);
  }
  // Returns the row of the query that has index 0 in the chunk that attends `u`. It may be negative.
  static int64_t first_row(const CrossAttention& c, int64_t u) { return (u + 1) * c.chunk_len - 1 - c.query_start; }
};

// Up to QUERY_BLOCK consecutive queries of one head.
struct Unit {
  int64_t row;            // row of the first query in the query tensor
  int rows, index, head;  // number of queries; index of the first query inside the attending chunk
  int lanes() const { return pad(rows); }
};

// Calls f(batch entry, row, head) for every row that attends no chunk, because it comes before the rows of the first
// chunk or after the rows of the last one.
template <class Function> void each_idle_row(const CrossAttention& c, const Sizes& n, Function&& f) {
  const int64_t begin = std::clamp<int64_t>(Sizes::first_row(c, n.first_chunk), 0, n.N);
  const int64_t end = std::clamp<int64_t>(Sizes::first_row(c, n.last_chunk), begin, n.N);
  for (int64_t b = 0; b < n.B; ++b)
    for (int64_t row = 0; row < n.N; ++row)
      for (int h = 0; h < n.H && (row < begin || row >= end); ++h)
        f(b, row, h);
}

// Lists the units of the query heads [first, last) that attend chunk u.
inline void list_units(const CrossAttention& c, const Sizes& n, int64_t u, int first, int last,
                       std::vector<Unit>& units) {
  units.clear();
  const int64_t zero = Sizes::first_row(c, u), begin = std::max<int64_t>(zero, 0), end = std::min(zero + n.M, n.N);
  for (int h = first; h < last; ++h)
    for (int64_t row = begin; row < end; row += QUERY_BLOCK)
      units.push_back(
          {row, static_cast<int>(std::min<int64_t>(QUERY_BLOCK, end - row)), static_cast<int>(row - zero), h});
}

// The states of several units, which are adjacent in an arena.
template <class State> class States {
 public:
  States(const Sizes& n, int units, Arena& arena) {
    Arena one(nullptr);
    State(n, one);
    bytes_ = static_cast<int64_t>(one.used());
    first_ = arena.take<char>(bytes_ * units);
  }
  State of(const Sizes& n, int unit) const {
    Arena arena(first_ + bytes_ * unit);
    return State(n, arena);
  }

 private:
  char* first_;
  int64_t bytes_;
};

// The visible tokens of a chunk's neighbours, in ascending order. Masked tokens are never read, so they may be NaN.
struct Tokens {
  int32_t *neighbour, *token;
  int64_t *key, *value;  // offsets of the tokens' rows from the first row of the chunk
  int64_t b = 0, u = 0;
  int count = 0;

  Tokens(const Sizes& n, Arena& arena) {
    const int64_t most = static_cast<int64_t>(n.K) * n.R;
    arena.give(most, neighbour, token, key, value);
  }
  void list(const CrossAttention& c, const Sizes& n, int64_t of_b, int64_t of_u) {
    b = of_b;
    u = of_u;
    count = 0;
    const View& mask = c.neighbour_mask;
    for (int a = 0; a < n.K; ++a) {
      const bool whole = !mask || mask.rank == 3;
      if (mask && whole && !*mask.at<const uint8_t>(b, u, a))
        continue;
      for (int j = 0; j < n.R; ++j) {
        if (!whole && !*mask.at<const uint8_t>(b, u, a, j))
          continue;
        neighbour[count] = a;
        token[count] = j;
        key[count] = a * c.key.stride[2] + j * c.key.stride[3];
        value[count] = a * c.value.stride[2] + j * c.value.stride[3];
        ++count;
      }
    }
  }
  int index(const Sizes& n, int at) const { return neighbour[at] * n.R + token[at]; }
};

inline float gate_of(const CrossAttention& c, int64_t b, int64_t u, int a) {
  const View& g = c.neighbour_gate;
  return g ? scalar(g, b, u, a) : 1.f;
}

// Relative keys of one head in the order of band columns. Column t has displacement max_displacement - t. Displacements
// outside the table have zeros.
template <class Elem> struct RelativeKeys {
  Elem* rows_a;   // row-major A: [band][row_width(E)]
  Elem* columns;  // B with k = e: [kc(E)][band_ld]
  Elem* rows_b;   // B with k = t: [kc(band)][pad(E)]; for floats the same memory as rows_a
};

template <class T, class Elem>
void pack_relative(const CrossAttention& c, const Sizes& n, int head, const RelativeKeys<Elem>& to) {
  const int width = row_width<Elem>(n.E);
  const int h = c.rel_key.size[0] == 1 ? 0 : head;
  clear(to.rows_a, static_cast<int64_t>(n.band) * width);
  for (int t = 0; t < n.band; ++t) {
    const int64_t row = n.max_displacement - t - c.rel_start;
    if (row >= 0 && row < n.table_rows)
      pack_row(c.rel_key.at<const T>(h, row), nullptr, n.E, to.rows_a + t * width);
  }
  clear(to.columns, static_cast<int64_t>(kc_of<Elem>(n.E)) * n.band_ld);
  transpose(to.rows_a, width, n.band, kc_of<Elem>(n.E), to.columns, n.band_ld);
  pack_b(to.rows_a, n.band, n.E, to.rows_b);
}

// Packs a unit's rows of `from` (queries, relative queries or gradients), plus a bias, as row-major A:
// [rows][row_width(width)]. `as_floats` is scratch memory for the bias.
template <class T, class Elem>
void pack_unit(const View& from, const View& bias, int64_t b, const Unit& unit, int width, float* as_floats, Elem* to) {
  const float* const more = bias_of<T>(bias, unit.head, width, as_floats);
  for (int i = 0; i < unit.rows; ++i)
    pack_row(from.at<const T>(b, unit.row + i, unit.head), more, width, to + i * row_width<Elem>(width));
}

// Computes Z[j][i] = factor * (rq_i + v)·rel_key[row(i - j)] for the unit's rows i. This is the position term in the
// scores of token j, which all neighbours share.
//
// The product of the relative queries and the band is a small matrix C[i][t] with t = j - i + const. The transpose to
// key-major order reads its rows with a stride that is shorter by one element, which also removes the skew.
template <class Elem> void position_logits(const Sizes& n, const Unit& unit, const RelativeKeys<Elem>& rel,
                                           const Elem* rel_query, float factor, float* strip, float* z) {
  const InStage stage(POSITION_LOGITS);
  const int skip = n.max_displacement - (unit.index + unit.rows - 1);  // band column of the unit's largest displacement
  const int ld = n.band_ld;
  const Vec f = broadcast(factor);
  const int step = slice<Elem>(SLICE, TILE);
  for (int row = 0; row < unit.rows; row += step) {  // only R + rows - 1 columns are needed
    const int rows = std::min(step, unit.rows - row), begin = unit.rows - row - rows;
    gemm<true>(rows, pad(rows + n.R - 1) / LANES, kc_of<Elem>(n.E), rel_query + row * row_width<Elem>(n.E),
               row_width<Elem>(n.E), rel.columns + skip + begin, ld,
               [=](int r, int c, Vec x) { store(strip + (row + r) * ld + begin + c, x * f); });
  }
  transpose(strip + unit.rows - 1, ld - 1, unit.rows, n.R, z, QUERY_BLOCK);
}

inline uint64_t next_call() {
  static std::atomic<uint64_t> count{0};
  return ++count;
}

// Packed relative keys of the heads that a thread used last.
template <class Elem> class RelativeCache {
 public:
  // Returns the number of heads that the cache holds.
  static int count(const Sizes& n) {
    constexpr int64_t BYTES = 2 << 20;  // about a thread's L2 and its share of L3
    const int64_t each = std::max<int64_t>((rows(n) + columns(n)) * int64_t{sizeof(Elem)}, 1);
    return static_cast<int>(std::clamp<int64_t>(BYTES / each, 1, std::min(n.H, MOST)));
  }
  RelativeCache(const Sizes& n, Arena& arena) : count_(count(n)) {
    for (int i = 0; n.E && i < count_; ++i) {
      arena.give(rows(n), entry_[i].rows_a);
      arena.give(columns(n), entry_[i].columns);
      entry_[i].rows_b = kc_of<Elem>(2) == 2 ? entry_[i].rows_a
                                             : arena.take<Elem>(static_cast<int64_t>(kc_of<Elem>(n.band)) * pad(n.E));
    }
  }
  template <class T> const RelativeKeys<Elem>& get(const CrossAttention& c, const Sizes& n, uint64_t call, int head) {
    thread_local uint64_t owner = 0;
    thread_local int held[MOST];
    if (owner != call) {
      std::fill(held, held + MOST, -1);
      owner = call;
    }
    const int key = c.rel_key.size[0] == 1 ? 0 : head, slot = key % count_;
    if (held[slot] != key) {
      pack_relative<T>(c, n, head, entry_[slot]);
      held[slot] = key;
    }
    return entry_[slot];
  }

 private:
  static constexpr int MOST = 32;
  static int64_t rows(const Sizes& n) { return static_cast<int64_t>(n.band) * row_width<Elem>(n.E); }
  static int64_t columns(const Sizes& n) { return static_cast<int64_t>(kc_of<Elem>(n.E)) * n.band_ld; }
  int count_;
  RelativeKeys<Elem> entry_[MOST];
};

// Per key of a block: the factor of its scores, and the row of its position logits.
struct KeyFactors {
  float *gate, *scaled;  // gate; gate * scale * log2(e)
  int32_t* z_row;        // offset of the key's row of position logits

  explicit KeyFactors(Arena& arena) { arena.give(KEY_BLOCK, gate, scaled, z_row); }

  void fill(const CrossAttention& c, const Sizes& n, const Tokens& tokens, int at, int count, float scale2) const {
    for (int r = 0; r < count; ++r) {
      gate[r] = gate_of(c, tokens.b, tokens.u, tokens.neighbour[at + r]);
      scaled[r] = gate[r] * scale2;
      z_row[r] = n.E ? tokens.token[at + r] * QUERY_BLOCK : 0;
    }
  }
};

}  // namespace retro::RETRO_ISA
