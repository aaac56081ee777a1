// Memory of chunked cross-attention's backward pass: of a unit, of a thread, and the sums over chunks.
#pragma once
#include <vector>

#include "chunked_cross_attention_rows.h"

namespace retro::RETRO_ISA {

// Returns x, and prevents the compiler from fusing a product into a sum, so that it has the same value in every use.
RETRO_INLINE Vec rounded(Vec x) {
#ifdef __x86_64__
  asm("" : "+x"(x));
#else
  asm("" : "+w"(x));
#endif
  return x;
}

inline void add_rows(const float* rows, int count, int width, float* to) {
  for (int i = 0; i < count; ++i)
    for (int d = 0; d < width; d += LANES)
      store(to + d, load(to + d) + load(rows + i * width + d));
}

template <class T> float row_product(const T* a, const T* b, int width) {
  Vec acc = zero();
  for (int d = 0; d < width; d += LANES)
    acc = fma(load(a + d, width - d), load(b + d, width - d), acc);
  return sum(acc);
}

// Running values of a vector of rows over blocks of keys: the greatest score (base 2), the sum of the weights
// 2^(score - greatest), dP at the greatest score (at_max), and the sum of weights times (dP - at_max).
struct RunningMeans {
  Vec row_max = broadcast(-INFINITY), row_sum = zero(), at_max = zero(), rest = zero();

  // scores and dP: [count][QUERY_BLOCK]
  void add(const float* scores, const float* dp, int count) {
    Vec new_max = row_max, new_at = at_max;
    for (int r = 0; r < count; ++r) {
      const Vec s = load(scores + r * QUERY_BLOCK);
      new_at = select(gt(s, new_max), load(dp + r * QUERY_BLOCK), new_at);
      new_max = max(s, new_max);
    }
    const Vec shift = select(gt(new_max, broadcast(-INFINITY)), new_max, zero());  // -inf minus -inf would be NaN
    const Vec alpha = exp2(row_max - shift);
    row_sum = row_sum * alpha;
    rest = fma(row_sum, at_max - new_at, rest * alpha);
    row_max = new_max;
    at_max = new_at;
    for (int r = 0; r < count; ++r) {
      const Vec weight = exp2(load(scores + r * QUERY_BLOCK) - shift);
      rest = fma(weight, load(dp + r * QUERY_BLOCK) - at_max, rest);
      row_sum = row_sum + weight;
    }
  }
};

// Epilogue for gradients of keys or values: adds to the sums of earlier units in `sums`; the last unit writes `rows`.
template <class T> struct GradTiles {
  float* sums;
  T* const* rows;
  Vec factor;
  int ld, width;
  bool more, last;

  template <int MR, int NR> RETRO_INLINE void tile(int row, int column, const Vec (&x)[MR][NR]) const {
    unrolled<MR, NR>([&](int r, int v) {
      const int at = column + v * LANES;
      float* sum = sums + (row + r) * ld + at;
      const Vec total = more ? x[r][v] + load(sum) : x[r][v];
      if (last)
        store(rows[row + r] + at, total * factor, width - at);
      else
        store(sum, total);
    });
  }
};

// State of a unit over the blocks of keys.
template <class Elem> struct ChunkedState {
  Elem *query, *query_a, *query_b, *grad, *grad_a, *grad_b;         // transposed, row-major A, B with k = row
  float *z, *dz, *lse2, *inverse, *at_max, *delta, *dlse, *dquery;  // the mean of dP is at_max + delta

  ChunkedState(const Sizes& n, Arena& arena) {
    const int width = row_width<Elem>(n.D);
    query = arena.take<Elem>(kc_of<Elem>(n.D) * QUERY_BLOCK);
    grad = arena.take<Elem>(kc_of<Elem>(n.D) * QUERY_BLOCK);
    query_a = arena.take<Elem>(QUERY_BLOCK * width);
    grad_a = arena.take<Elem>(QUERY_BLOCK * width);
    query_b = PAIRS<Elem> ? arena.take<Elem>(QUERY_BLOCK * width) : query_a;
    grad_b = PAIRS<Elem> ? arena.take<Elem>(QUERY_BLOCK * width) : grad_a;
    z = arena.take<float>((n.E ? n.R : 1) * QUERY_BLOCK);
    dz = arena.take<float>((n.E ? n.R : 1) * QUERY_BLOCK);
    for (float** row : {&lse2, &inverse, &at_max, &delta, &dlse})
      *row = arena.take<float>(QUERY_BLOCK);
    dquery = arena.take<float>(QUERY_BLOCK * pad(n.D));
  }
};

template <class T, class Elem> struct ChunkedWorkspace {
  RelativeCache<Elem> relative;
  Tokens tokens[2];  // of this chunk and of the next one
  BlockRows<T, Elem> keys, values;
  KeyFactors factors;
  T **key_grads, **value_grads;  // rows of a block
  Elem *p_a, *ds_a, *ds_t, *rel_a, *rel_b, *band_a, *band_t;
  float *p, *ds, *x, *keep, *dk, *dv, *strip, *bias, *dgate, *drel_query;
  States<ChunkedState<Elem>> states;

  ChunkedWorkspace(const Sizes& n, int units, bool gate, bool dropout, Arena& arena)
      : relative(n, arena), tokens{{n, arena}, {n, arena}}, keys(n, true, true, arena), values(n, true, false, arena),
        factors(arena), states(n, units, arena) {
    constexpr int block = KEY_BLOCK * QUERY_BLOCK;
    // pairs, or the floats that they would be made of
    const auto pairs = [&](int64_t count, float* floats) {
      return PAIRS<Elem> ? arena.take<Elem>(count) : reinterpret_cast<Elem*>(floats);
    };
    key_grads = arena.take<T*>(KEY_BLOCK);
    value_grads = arena.take<T*>(KEY_BLOCK);
    p = arena.take<float>(block);
    ds = arena.take<float>(block);
    x = arena.take<float>(gate ? block : 0);
    keep = arena.take<float>(dropout ? block : 0);
    p_a = pairs(block / 2, p);
    ds_a = pairs(block / 2, ds);
    ds_t = pairs(block / 2, ds);
    dk = arena.take<float>(KEY_BLOCK * pad(n.D));
    dv = arena.take<float>(KEY_BLOCK * pad(n.D));
    const int64_t band = n.E ? static_cast<int64_t>(QUERY_BLOCK) * n.band_ld : 0;
    strip = arena.take<float>(band + LANES * n.band_ld);
    rel_a = arena.take<Elem>(QUERY_BLOCK * row_width<Elem>(n.E));
    rel_b = pairs(QUERY_BLOCK * row_width<Elem>(n.E), nullptr);
    band_a = pairs(band / 2, strip);
    band_t = pairs(band / 2, strip);
    bias = arena.take<float>(LARGEST_D);
    dgate = arena.take<float>(KEY_BLOCK * LANES);
    drel_query = arena.take<float>(QUERY_BLOCK * pad(n.E));
  }
};

constexpr int TASKS = 128;                         // least number of tasks, for balance
constexpr int64_t SLOT_BYTES = int64_t{16} << 20;  // of all partial sums together, unless one slot takes more

// Sums over chunks, for each slot and head.
struct ChunkedPartials {
  int64_t rel, content, position, each, slots;  // sizes in floats, number
  std::vector<float> sums;

  ChunkedPartials(const Sizes& n, const CrossAttentionGrads& want)
      : rel(want.rel_key ? static_cast<int64_t>(n.band) * pad(n.E) : 0), content(want.content_bias ? pad(n.D) : 0),
        position(want.position_bias ? pad(n.E) : 0), each(rel + content + position) {
    const int64_t room = SLOT_BYTES / std::max<int64_t>(n.H * each * int64_t{sizeof(float)}, 1);
    slots = std::clamp<int64_t>(std::min<int64_t>((TASKS + n.G - 1) / n.G, room), 1, n.B * n.L);
    sums.resize(slots * n.H * each);
  }
  float* of(const Sizes& n, int64_t slot, int head) { return sums.data() + (slot * n.H + head) * each; }
};

}  // namespace retro::RETRO_ISA
