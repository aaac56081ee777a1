// Data that the stages of chunked cross-attention's backward pass share: the context, the state of a unit, the memory
// of a thread, and the sums over chunks.
#pragma once
#include <vector>

#include "chunked_cross_attention_rows.h"

namespace retro::RETRO_ISA {

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

// Running values of a vector of rows over blocks of keys: the largest score (base 2), the sum of the weights
// 2^(score - largest), dP at the largest score (at_max), and the sum of weights times (dP - at_max).
struct RunningMeans {
  Vec row_max = broadcast(-INFINITY), row_sum = zero(), at_max = zero(), rest = zero();

  // Adds a block of keys. `scores` and `dp` are [count][QUERY_BLOCK].
  void add(const float* scores, const float* dp, int count) {
    Vec new_max = row_max, new_at = at_max;
    for (int r = 0; r < count; ++r) {
      const Vec s = load(scores + r * QUERY_BLOCK);
      new_at = select(gt(s, new_max), load(dp + r * QUERY_BLOCK), new_at);
      new_max = max(s, new_max);
    }
    const Vec shift = select(gt(new_max, broadcast(-INFINITY)), new_max, zero());  // avoid -inf - -inf
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

// Epilogue of the products for the gradients of keys or values. Adds a tile to the sums of earlier units in `sums`, if
// there are any (`more`). The `last` unit writes the total times `factor` to `rows`, the others write it to `sums`.
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

// State that a unit keeps from one block of keys to the next.
template <class Elem> struct ChunkedState {
  Elem *query, *query_a, *query_b;  // transposed, as row-major A, as B with k = row
  Elem *grad, *grad_a, *grad_b;     // dout in the same layouts
  float *z, *dz;                    // position logits and their gradients, [R][QUERY_BLOCK]
  float *lse2, *inverse, *dlse;     // per row: lse in base 2, the factor of its rounding error, its gradient
  float *at_max, *delta;            // per row: the mean of dP is at_max + delta
  float* dquery;                    // [QUERY_BLOCK][pad(D)]

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
  Tokens tokens[2];  // visible tokens of this chunk and of the next one
  BlockRows<T, Elem> keys, values;
  KeyFactors factors;
  T **key_grads, **value_grads;  // per key of a block: its row in dK and dV
  float *p, *ds, *x, *keep;      // probabilities, gradients of scores, (q + u)·k, dropout; [KEY_BLOCK][QUERY_BLOCK]
  Elem *p_a, *ds_a, *ds_t;       // p and ds as operands A, and ds transposed
  float *dk, *dv;                // dK and dV of a block, [KEY_BLOCK][pad(D)]
  float *strip, *drel_query;     // the band or its gradient, by query; gradient of the relative queries
  Elem *rel_a, *rel_b, *band_a, *band_t;  // relative queries and the band as operands
  float *bias, *dgate;                    // scratch memory of a bias; gradients of the gate [KEY_BLOCK][LANES]
  States<ChunkedState<Elem>> states;

  // units: maximum number of units per chunk and key head.
  ChunkedWorkspace(const Sizes& n, int units, bool gate, bool dropout, Arena& arena)
      : relative(n, arena), tokens{{n, arena}, {n, arena}}, keys(n, true, true, arena), values(n, true, false, arena),
        factors(arena), states(n, units, arena) {
    constexpr int block = KEY_BLOCK * QUERY_BLOCK;
    // memory of pairs; floats are used in place
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

constexpr int TASKS = 128;  // minimum number of tasks, so that threads end at about the same time
// Maximum size, in bytes, of all partial sums together, unless a single slot takes more.
constexpr int64_t SLOT_BYTES = int64_t{16} << 20;

// Sums over chunks, per slot and head.
struct ChunkedPartials {
  int64_t rel, content, position, each;  // number of floats: relative keys, biases, all of one slot and head
  int64_t slots;
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

// Constants of the whole pass, and the partial sums of all tasks. T: type of the tensors in memory. Elem: type of the
// operands of products.
template <class T, class Elem> struct ChunkedContext {
  const CrossAttention& call;
  const View &out, &lse, &dout, &dlse;
  const CrossAttentionGrads& want;
  int64_t first_batch;
  Sizes n{call};
  Dropout dropout{call.seed, call.dropout_p, first_batch};
  uint64_t id = next_call();
  float scale = static_cast<float>(call.scale), scale2 = scale * LOG2E;
  bool want_rel_query = n.E && (want.position_bias || want.rel_query || (want.query && !call.rel_query));
  ChunkedPartials partials{n, want};
  // [B*L, G, K]; double, because the terms of the tokens nearly cancel
  std::vector<double> gate_sums = std::vector<double>(want.neighbour_gate ? n.B * n.L * n.G * n.K : 0);
};

}  // namespace retro::RETRO_ISA
