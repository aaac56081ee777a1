// Scores of a tile of keys and a few tiles of queries. Queries are the lanes of a register, keys are broadcast from
// memory, and every score has one accumulator. Only tiles with a score above a row's current k-th are written.
//
// A score is always summed in the order of the embedding's elements, so its bits don't depend on the tiles.
#pragma once
#include "simd.h"

namespace retro::RETRO_ISA {

// Keys of a part. Even if rows are 4096 bytes apart and share one set of L1, 6 of them leave room for packed queries.
constexpr int PART = 6;
// query tiles at a time: as many as registers hold accumulators for
constexpr int TILES = LANES == 16 ? 4 : 2;
constexpr int KEY_TILE = 24;     // keys gathered at a time
constexpr int64_t FOLD = 512;    // steps after which sums are added to a second sum, to bound rounding errors
constexpr int64_t Q_AHEAD = 16;  // steps that packed queries are prefetched ahead from L2
constexpr int64_t KEYS_AHEAD =
    48 << 10;  // bytes that keys are prefetched ahead: they hide the latency and fit in cache

using NarrowKey = std::conditional_t<MULTIPLIES_PAIRS, bf16, float>;  // bf16: multiplied in pairs without widening

// Key: type in which keys of storage type T are multiplied.
template <class T>
struct Multiplied {
  using Key = float;
};
template <>
struct Multiplied<bf16> {
  using Key = NarrowKey;
};

// A step is one 32-bit word of a row: a float, or two bf16.
template <class Key>
struct Operand;

template <>
struct Operand<float> {
  static constexpr int WIDTH = 1;
  static RETRO_INLINE Vec lanes(const uint32_t* packed) { return load(reinterpret_cast<const float*>(packed)); }
  static RETRO_INLINE Vec key(const float* row, int64_t step) { return broadcast(row[step]); }
  static RETRO_INLINE Vec last(const float* row, int64_t dim) { return broadcast(row[dim - 1]); }
  static RETRO_INLINE Vec mad(Vec acc, Vec q, Vec k) { return fma(q, k, acc); }
};

template <>
struct Operand<bf16> {
  static constexpr int WIDTH = 2;
  static RETRO_INLINE Pairs lanes(const uint32_t* packed) { return load_pairs(packed); }
  static RETRO_INLINE Pairs key(const bf16* row, int64_t step) {
    uint32_t two;
    std::memcpy(&two, row + 2 * step, 4);
    return broadcast_pair(two);
  }
  // The last element if their number is odd: the memory after it may be NaN.
  static RETRO_INLINE Pairs last(const bf16* row, int64_t dim) { return broadcast_pair(row[dim - 1].bits); }
  static RETRO_INLINE Vec mad(Vec acc, Pairs q, Pairs k) { return dot(acc, q, k); }
};

template <class Key>
struct Tile {
  const Key* rows;
  int64_t stride;         // elements
  const char* ahead;      // memory to prefetch, or null
  const float* discount;  // [KEY_TILE] subtracted from a score before it is compared
  bool force;             // every score is passed on, because the comparison is not reliable
};

// acc[m][j] += q_m . key_j over the steps [s, to)
template <class Key, int MQ, int NK>
RETRO_INLINE void multiply(const uint32_t* q, int64_t q_tile, const Key* key, int64_t stride, int64_t s, int64_t to,
                           const char*& ahead, Vec (&acc)[MQ][NK]) {
  using O = Operand<Key>;
  // so that a row's address is loaded once for several products
  constexpr int UNROLL = LANES == 16 ? (MQ < 4 ? 4 / MQ : 1) : (MQ == 1 ? 2 : 1);
  constexpr int LINES = (NK * UNROLL * 4 + LINE - 1) / LINE;
  for (; s + UNROLL <= to; s += UNROLL) {
    decltype(O::lanes(q)) lanes[MQ][UNROLL];
#pragma GCC unroll 4
    for (int m = 0; m < MQ; ++m)
#pragma GCC unroll 4
      for (int u = 0; u < UNROLL; ++u) {
        lanes[m][u] = O::lanes(q + m * q_tile + (s + u) * LANES);
        __builtin_prefetch(q + m * q_tile + (s + u + Q_AHEAD) * LANES);
      }
#pragma GCC unroll 24
    for (int j = 0; j < NK; ++j)
#pragma GCC unroll 4
      for (int u = 0; u < UNROLL; ++u) {
        const auto k = O::key(key + j * stride, s + u);
#pragma GCC unroll 4
        for (int m = 0; m < MQ; ++m) acc[m][j] = O::mad(acc[m][j], lanes[m][u], k);
      }
    if (ahead) {
#pragma GCC unroll 8
      for (int i = 0; i < LINES; ++i) __builtin_prefetch(ahead + i * LINE, 0, 3);
      ahead += LINES * LINE;
    }
  }
  for (; s < to; ++s)
#pragma GCC unroll 24
    for (int j = 0; j < NK; ++j) {
      const auto k = O::key(key + j * stride, s);
#pragma GCC unroll 4
      for (int m = 0; m < MQ; ++m) acc[m][j] = O::mad(acc[m][j], O::lanes(q + m * q_tile + s * LANES), k);
    }
}

// Scores of MQ query tiles and PART keys. Bit m of the result: tile m has a score above its row's threshold, and its
// scores are in out[m][j][lane].
template <class Key, int MQ>
__attribute__((noinline)) uint32_t score(const uint32_t* q, int64_t q_tile, const Tile<Key>& tile, int64_t dim,
                                         const float* threshold, float* out) {
  using O = Operand<Key>;
  constexpr int NK = PART;
  const int64_t steps = dim / O::WIDTH;
  const char* ahead = tile.ahead;
  Vec acc[MQ][NK];
#pragma GCC unroll 4
  for (int m = 0; m < MQ; ++m)
#pragma GCC unroll 24
    for (int j = 0; j < NK; ++j) acc[m][j] = zero();
  int64_t s = 0;
  for (; steps - s > FOLD; s += FOLD) {
    multiply<Key, MQ, NK>(q, q_tile, tile.rows, tile.stride, s, s + FOLD, ahead, acc);
#pragma GCC unroll 4
    for (int m = 0; m < MQ; ++m)
#pragma GCC unroll 24
      for (int j = 0; j < NK; ++j) {
        float* sum = out + (m * NK + j) * LANES;
        store(sum, s == 0 ? acc[m][j] : acc[m][j] + load(sum));
        acc[m][j] = zero();
      }
  }
  multiply<Key, MQ, NK>(q, q_tile, tile.rows, tile.stride, s, steps, ahead, acc);
  if (steps * O::WIDTH != dim)
#pragma GCC unroll 24
    for (int j = 0; j < NK; ++j) {
      const auto k = O::last(tile.rows + j * tile.stride, dim);
#pragma GCC unroll 4
      for (int m = 0; m < MQ; ++m) acc[m][j] = O::mad(acc[m][j], O::lanes(q + m * q_tile + steps * LANES), k);
    }
  if (s > 0)
#pragma GCC unroll 4
    for (int m = 0; m < MQ; ++m)
#pragma GCC unroll 24
      for (int j = 0; j < NK; ++j) acc[m][j] = acc[m][j] + load(out + (m * NK + j) * LANES);
  uint32_t hits = 0;
#pragma GCC unroll 4
  for (int m = 0; m < MQ; ++m) {
    Vec best = broadcast(-INFINITY);
#pragma GCC unroll 24
    for (int j = 0; j < NK; ++j) best = max(acc[m][j] - broadcast(tile.discount[j]), best);  // max(NaN, x) is x
    if (!tile.force && !any(gt(best, load(threshold + m * LANES)))) continue;
    hits |= 1u << m;
#pragma GCC unroll 24
    for (int j = 0; j < NK; ++j) store(out + (m * NK + j) * LANES, acc[m][j]);
  }
  return hits;
}

// The k best keys of a tile's queries, lane by lane, without branches: one new score takes as long as 16.
struct LaneLists {
  static constexpr int64_t LARGEST_K = 16;  // for larger k, to insert one score at a time is faster
  float* best;                              // [k] of { scores [LANES], key indices as bits [LANES] }
  int64_t k;

  static int64_t floats(int64_t k) { return k * 2 * LANES; }
  // Lanes from `rows` on have no query; no score is above theirs.
  void clear(int64_t rows) const {
    for (int64_t j = 0; j < k; ++j) {
      store(best + j * 2 * LANES, select(first(static_cast<int>(rows)), broadcast(-INFINITY), broadcast(INFINITY)));
      store(best + j * 2 * LANES + LANES, broadcast(as_float(~0u)));
    }
  }
  RETRO_INLINE Vec least() const { return load(best + (k - 1) * 2 * LANES); }
  float score(int64_t j, int lane) const { return best[j * 2 * LANES + lane]; }
  int32_t index(int64_t j, int lane) const { return static_cast<int32_t>(as_bits(best[j * 2 * LANES + LANES + lane])); }
  // Inserts behind equal scores, because keys ascend. -inf and NaN are never inserted.
  RETRO_INLINE void insert(Vec score, int32_t index) const {
    Vec at = broadcast(as_float(static_cast<uint32_t>(index)));
    // false at first; once a lane's score has its place, the displaced scores move
    Mask moves = gt(score, broadcast(INFINITY));
    for (int64_t j = 0; j < k; ++j) {
      float* p = best + j * 2 * LANES;
      const Vec held = load(p), held_at = load(p + LANES);
      moves = either(moves, gt(score, held));
      store(p, select(moves, score, held)), store(p + LANES, select(moves, at, held_at));
      score = select(moves, held, score), at = select(moves, held_at, at);
    }
  }
};

// A row that is multiplied in pairs: the last element of an odd number gets a zero as its partner.
inline void convert_row(const bf16* from, bf16* to, int64_t dim) {
  std::memcpy(to, from, 2 * static_cast<size_t>(dim));
  if (dim % 2) to[dim].bits = 0;
}

// Several sums, so that additions don't wait for one another. Their number and order depend only on `dim`.
template <class Term>
RETRO_INLINE float reduce(int64_t dim, Term&& term) {
  Vec sum[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * LANES <= dim; i += 4 * LANES)
    for (int u = 0; u < 4; ++u) sum[u] = term(i + u * LANES, LANES, sum[u]);
  for (; i < dim; i += LANES) sum[0] = term(i, static_cast<int>(dim - i < LANES ? dim - i : LANES), sum[0]);
  return retro::RETRO_ISA::sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

template <class T>
RETRO_INLINE Vec some(const T* p, int n) {
  return n == LANES ? load(p) : load(p, n);
}

template <class T>
inline float squares(const T* row, int64_t dim) {
  return reduce(dim, [=](int64_t i, int n, Vec sum) {
    const Vec x = some(row + i, n);
    return fma(x, x, sum);
  });
}

template <class T>
inline float squared_distance(const T* a, const T* b, int64_t dim) {
  return reduce(dim, [=](int64_t i, int n, Vec sum) {
    const Vec x = some(a + i, n) - some(b + i, n);
    return fma(x, x, sum);
  });
}

}  // namespace retro::RETRO_ISA
