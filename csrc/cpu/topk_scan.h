// Scores of a tile of keys and a few tiles of queries. Queries are the lanes of a register, keys are broadcast from
// memory, and every score has its own accumulator. The scores of a query tile are written only if one of them is above
// the current k-th score of its row.
//
// The terms of a score are always added in the order of the embedding's elements, so the tiles do not change its bits.
#pragma once
#include "gemm.h"

namespace retro::RETRO_ISA {

// Number of keys per part, which are multiplied together. Even if rows are 4096 bytes apart and share one set of L1, 6
// rows leave room for packed queries.
constexpr int PART = 6;
// Number of query tiles that are multiplied together. The registers hold accumulators for this many.
constexpr int TILES = LANES == 16 ? 4 : 2;
constexpr int KEY_TILE = 24;  // number of keys that are gathered together
// The same numbers for tile registers (tiles.h), where keys are the rows of A and packed queries are B.
constexpr int TILE_PART = TILE, TILE_KEYS = 3 * TILE;
constexpr int MOST_PART = RETRO_TILES ? TILE_PART : PART, MOST_KEYS = RETRO_TILES ? TILE_KEYS : KEY_TILE;
constexpr int64_t FOLD = 512;    // steps after which the sums are added to a second sum, to limit rounding errors
constexpr int64_t Q_AHEAD = 16;  // distance, in steps, at which packed queries are prefetched from L2
// Distance, in bytes, at which keys are prefetched. It hides the latency, and the prefetched keys fit in cache.
constexpr int64_t KEYS_AHEAD = 48 << 10;

// Type in which keys of storage type T are multiplied: bf16 (in pairs, without widening) or float.
template <class T> using KeyOf = std::conditional_t<MULTIPLIES_PAIRS && std::is_same_v<T, bf16>, bf16, float>;
// A step is one 32-bit word of a row: a float, or two bf16.
template <class Key> using Word = std::conditional_t<std::is_same_v<Key, bf16>, uint32_t, float>;
template <class Key> constexpr int WIDTH = sizeof(Word<Key>) / sizeof(Key);

template <class Key> RETRO_INLINE auto query_lanes(const uint32_t* packed) {
  return load(reinterpret_cast<const Word<Key>*>(packed));
}
template <class Key> RETRO_INLINE auto key_of(const Key* row, int64_t step) {
  Word<Key> word;
  std::memcpy(&word, row + step * WIDTH<Key>, sizeof word);
  return broadcast(word);
}

template <class Key> struct Tile {
  const Key* rows;
  int64_t stride;         // elements
  const char* ahead;      // memory to prefetch, or null
  const float* discount;  // [KEY_TILE] subtracted from a score before the score is compared
  bool force;             // passes every score on, because the comparison is not reliable
};

// Adds q_m . key_j over the steps [s, to) to acc[m][j].
template <class Key, int MQ, int NK> RETRO_INLINE void multiply(const uint32_t* q, int64_t q_tile, const Key* key,
                                                                int64_t stride, int64_t s, int64_t to,
                                                                const char*& ahead, Vec (&acc)[MQ][NK]) {
  // unrolled, so that the address of a row is loaded once for several products
  constexpr int UNROLL = LANES == 16 ? (MQ < 4 ? 4 / MQ : 1) : (MQ == 1 ? 2 : 1);
  constexpr int LINES = (NK * UNROLL * 4 + LINE - 1) / LINE;
  for (; s + UNROLL <= to; s += UNROLL) {
    decltype(query_lanes<Key>(q)) lanes[MQ][UNROLL];
#pragma GCC unroll 4
    for (int m = 0; m < MQ; ++m)
#pragma GCC unroll 4
      for (int u = 0; u < UNROLL; ++u) {
        lanes[m][u] = query_lanes<Key>(q + m * q_tile + (s + u) * LANES);
        __builtin_prefetch(q + m * q_tile + (s + u + Q_AHEAD) * LANES);
      }
#pragma GCC unroll 24
    for (int j = 0; j < NK; ++j)
#pragma GCC unroll 4
      for (int u = 0; u < UNROLL; ++u) {
        const auto k = key_of(key + j * stride, s + u);
#pragma GCC unroll 4
        for (int m = 0; m < MQ; ++m)
          acc[m][j] = fma(lanes[m][u], k, acc[m][j]);
      }
    if (ahead) {
#pragma GCC unroll 8
      for (int i = 0; i < LINES; ++i)
        __builtin_prefetch(ahead + i * LINE, 0, 3);
      ahead += LINES * LINE;
    }
  }
  for (; s < to; ++s)
    unrolled<MQ, NK>([&](int m, int j) {
      acc[m][j] = fma(query_lanes<Key>(q + m * q_tile + s * LANES), key_of(key + j * stride, s), acc[m][j]);
    });
}

#if RETRO_TILES
// Returns TILE keys, from word s on, as a tile: in place, or in `copy` if the rows end before the tile does.
RETRO_INLINE TileOperand key_tile(const Tile<bf16>& tile, int64_t s, int64_t dim, uint32_t* copy) {
  const int64_t left = dim - 2 * s;
  if (left >= 2 * TILE)
    return {tile.rows + 2 * s, tile.stride * int64_t{sizeof(bf16)}};
  for (int r = 0; r < TILE; ++r)
    _mm512_store_si512(copy + r * TILE, _mm512_maskz_loadu_epi16(~__mmask32{0} >> (2 * TILE - left),
                                                                 tile.rows + r * tile.stride + 2 * s));
  return {copy, ROW_BYTES};
}

// The same for packed queries, of which `words` words are left.
RETRO_INLINE TileOperand query_tile(const uint32_t* from, int64_t words, uint32_t* copy) {
  if (words >= TILE)
    return {from, ROW_BYTES};
  return copied(words, TILE, copy, [&](int64_t i) { return from + i * TILE; });
}

// Computes out[m][j][lane] = q_m . key_j for MQ query tiles and TILE_PART keys.
template <int MQ> RETRO_INLINE void multiply_in_tiles(const uint32_t* q, int64_t q_tile, const Tile<bf16>& tile,
                                                      int64_t dim, float* out) {
  alignas(64) uint32_t key_copy[TILE * TILE], query_copy[TILE * TILE];
  alignas(64) float sums[MQ * TILE_PART * LANES];
  const char* ahead = tile.ahead;
  for (int64_t begin = 0; begin < dim; begin += 2 * FOLD) {
    each_sum<MQ>([](auto m) { clear_tile<m>(); });
    for (int64_t s = begin / 2; 2 * s < std::min(dim, begin + 2 * FOLD); s += TILE) {
      load_tile<TILE_A>(key_tile(tile, s, dim, key_copy));
      each_sum<MQ>([&](auto m) {
        load_tile<TILE_B>(query_tile(q + s * LANES + m * q_tile, (dim + 1) / 2 - s, query_copy));
        multiply_tiles<m>();
      });
      for (int i = 0; ahead && i < TILE; ++i, ahead += LINE)
        __builtin_prefetch(ahead, 0, 3);
    }
    float* to = begin ? sums : out;
    each_sum<MQ>([&](auto m) { store_tile<m>(to + m * TILE_PART * LANES, LANES); });
    for (int i = 0; begin && i < MQ * TILE_PART * LANES; i += LANES)
      store(out + i, load(out + i) + load(sums + i));
  }
}
#endif

// Compares the scores of MQ query tiles and NK keys, score(m, j), with the thresholds. Bit m of the result is set if a
// score of tile m is above the threshold of its row.
template <int MQ, int NK, class Key, class Score>
RETRO_INLINE uint32_t hits_of(const Tile<Key>& tile, const float* threshold, const Score& score) {
  uint32_t hits = 0;
#pragma GCC unroll 4
  for (int m = 0; m < MQ; ++m) {
    Vec best = broadcast(-INFINITY);
#pragma GCC unroll 24
    for (int j = 0; j < NK; ++j)
      best = max(score(m, j) - broadcast(tile.discount[j]), best);  // max(NaN, x) is x
    if (tile.force || bits(gt(best, load(threshold + m * LANES))))
      hits |= 1u << m;
  }
  return hits;
}

// Scores MQ query tiles against PART keys, or TILE_PART keys in tile registers. Bit m of the result is set if a score
// of tile m is above the threshold of its row; the scores of such a tile are in out[m][j][lane].
template <class Key, int MQ> __attribute__((noinline)) uint32_t score(const uint32_t* q, int64_t q_tile,
                                                                      const Tile<Key>& tile, int64_t dim,
                                                                      const float* threshold, float* out) {
  constexpr int NK = PART;
#if RETRO_TILES
  if constexpr (WIDTH<Key> == 2)
    if (tiles_ready) {
      multiply_in_tiles<MQ>(q, q_tile, tile, dim, out);
      return hits_of<MQ, TILE_PART>(tile, threshold,
                                    [&](int m, int j) { return load(out + (m * TILE_PART + j) * LANES); });
    }
#endif
  const int64_t steps = dim / WIDTH<Key>;
  const char* ahead = tile.ahead;
  Vec acc[MQ][NK];
  unrolled<MQ, NK>([&](int m, int j) { acc[m][j] = zero(); });
  int64_t s = 0;
  for (; steps - s > FOLD; s += FOLD) {
    multiply<Key, MQ, NK>(q, q_tile, tile.rows, tile.stride, s, s + FOLD, ahead, acc);
    unrolled<MQ, NK>([&](int m, int j) {
      float* sum = out + (m * NK + j) * LANES;
      store(sum, s == 0 ? acc[m][j] : acc[m][j] + load(sum));
      acc[m][j] = zero();
    });
  }
  multiply<Key, MQ, NK>(q, q_tile, tile.rows, tile.stride, s, steps, ahead, acc);
  if constexpr (WIDTH<Key> == 2)
    if (dim % 2)  // the last element is read alone, because the memory after it may be NaN
      unrolled<MQ, NK>([&](int m, int j) {
        const Pairs k = broadcast(uint32_t{tile.rows[j * tile.stride + dim - 1].bits});
        acc[m][j] = fma(query_lanes<Key>(q + m * q_tile + steps * LANES), k, acc[m][j]);
      });
  if (s > 0)
    unrolled<MQ, NK>([&](int m, int j) { acc[m][j] = acc[m][j] + load(out + (m * NK + j) * LANES); });
  const uint32_t hits = hits_of<MQ, NK>(tile, threshold, [&](int m, int j) { return acc[m][j]; });
  unrolled<MQ, NK>([&](int m, int j) {
    if (hits >> m & 1)
      store(out + (m * NK + j) * LANES, acc[m][j]);
  });
  return hits;
}

// Lists of the k best keys for the queries of a tile, lane by lane and without branches. To insert one score takes as
// long as to insert one per lane.
struct LaneLists {
  static constexpr int64_t LARGEST_K = 16;  // for a larger k, it is faster to insert one score at a time
  float* best;                              // [k] of { scores [LANES], key indices as bits [LANES] }
  int64_t k;

  static int64_t floats(int64_t k) { return k * 2 * LANES; }
  // Empties the lists. The lanes from `rows` on have no query, and their lists hold inf, so that no score is inserted.
  void clear(int64_t rows) const {
    for (int64_t j = 0; j < k; ++j) {
      store(best + j * 2 * LANES, select(first(static_cast<int>(rows)), broadcast(-INFINITY), broadcast(INFINITY)));
      store(best + j * 2 * LANES + LANES, broadcast(as_float(~0u)));
    }
  }
  RETRO_INLINE Vec least() const { return load(best + (k - 1) * 2 * LANES); }
  float score(int64_t j, int64_t lane) const { return best[j * 2 * LANES + lane]; }
  int32_t index(int64_t j, int64_t lane) const {
    return static_cast<int32_t>(as_bits(best[j * 2 * LANES + LANES + lane]));
  }
  // Inserts a score per lane behind equal scores, because keys come in ascending order. -inf and NaN are not inserted.
  RETRO_INLINE void insert(Vec score, int32_t index) const {
    Vec at = broadcast(as_float(static_cast<uint32_t>(index)));
    // False at first. Once the score of a lane has found its place, the following scores of the lane move down.
    Mask moves = gt(score, broadcast(INFINITY));
    for (int64_t j = 0; j < k; ++j) {
      float* p = best + j * 2 * LANES;
      const Vec held = load(p), held_at = load(p + LANES);
      moves = either(moves, gt(score, held));
      store(p, select(moves, score, held));
      store(p + LANES, select(moves, at, held_at));
      score = select(moves, held, score);
      at = select(moves, held_at, at);
    }
  }
};

// Copies a row that is multiplied in pairs. If the number of elements is odd, the last one gets a zero as its partner.
inline void convert_row(const bf16* from, bf16* to, int64_t dim) {
  std::memcpy(to, from, 2 * static_cast<size_t>(dim));
  if (dim % 2)
    to[dim].bits = 0;
}

// Adds terms in several sums, so that additions do not wait for each other. Their number and order depend only on
// `dim`.
template <class Term> RETRO_INLINE float reduce(int64_t dim, Term&& term) {
  Vec sum[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * LANES <= dim; i += 4 * LANES)
    for (int u = 0; u < 4; ++u)
      sum[u] = term(i + u * LANES, LANES, sum[u]);
  for (; i < dim; i += LANES)
    sum[0] = term(i, static_cast<int>(dim - i < LANES ? dim - i : LANES), sum[0]);
  return retro::RETRO_ISA::sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

template <class T> RETRO_INLINE Vec some(const T* p, int n) { return n == LANES ? load(p) : load(p, n); }

template <class T> inline float squares(const T* row, int64_t dim) {
  return reduce(dim, [=](int64_t i, int n, Vec sum) {
    const Vec x = some(row + i, n);
    return fma(x, x, sum);
  });
}

template <class T> inline float squared_distance(const T* a, const T* b, int64_t dim) {
  return reduce(dim, [=](int64_t i, int n, Vec sum) {
    const Vec x = some(a + i, n) - some(b + i, n);
    return fma(x, x, sum);
  });
}

}  // namespace retro::RETRO_ISA
