// Memory of relative attention's backward pass: of a task, its sums, and the mean of a row's dP.
#pragma once
#include <cmath>

#include "relative_attention_tile.h"

namespace retro::RETRO_ISA {

template <class Elem> struct RelativeWorkspace {
  Visibility visible;
  BandChunks<Elem> chunks;
  Elem *key, *key_b, *value;              // per key block: [kc(D)][BLOCK], [kc(BLOCK)][D_pad], [kc(D)][BLOCK]
  Elem *rows, *query, *rel_query, *dout;  // row-major A
  struct {
    Elem *query, *rel_query, *dout, *strip, *weights;
  } pairs;  // further layouts of pairs; floats need none
  const Elem *query_b, *rel_query_b, *dout_b;
  float *strip, *weights, *keep, *d_query, *d_rel_query, *bias, *lse, *inverse, *at_max, *delta,
      *dlse;  // the mean of a row's dP is at_max + delta
  uint8_t* ready;
  float* own;  // dK, dV of the task, if no other task adds to them

  RelativeWorkspace(const RelativeAttention& c, const AttentionSizes& n, const Dropout& dropout, int64_t first_row,
                    int64_t last_row, bool alone, Arena& arena)
      : visible(c, n, first_row, last_row, arena), chunks(visible.chunks<Elem>(true, arena)) {
    const int64_t blocks = visible.last_block - visible.first_block;
    const int lda = row_width<Elem>(n.D), rel_lda = row_width<Elem>(n.band.E);
    const auto paired = [&](int64_t count) { return arena.take<Elem>(PAIRS<Elem> ? count : 0); };
    key = arena.take<Elem>(blocks * kc_of<Elem>(n.D) * BLOCK);
    value = arena.take<Elem>(blocks * kc_of<Elem>(n.D) * BLOCK);
    key_b = arena.take<Elem>(blocks * n.D_pad * kc_of<Elem>(BLOCK));
    ready = arena.take<uint8_t>(blocks);
    rows = arena.take<Elem>(BLOCK * lda);
    dout = arena.take<Elem>(BLOCK * lda);
    query = arena.take<Elem>(BLOCK * lda);
    rel_query = arena.take<Elem>(BLOCK * rel_lda);
    pairs = {paired(BLOCK * lda), paired(BLOCK * rel_lda), paired(BLOCK * lda), paired(BLOCK * BLOCK * GROUP / 2),
             paired(BLOCK * BLOCK * GROUP / 2)};
    strip = arena.take<float>(BLOCK * n.ld);
    weights = arena.take<float>(BLOCK * BLOCK * GROUP);
    keep = arena.take<float>(dropout ? BLOCK * BLOCK * GROUP : 0);
    d_query = arena.take<float>(BLOCK * n.D_pad);
    d_rel_query = arena.take<float>(BLOCK * n.band.E_pad);
    bias = arena.take<float>(std::max(n.D_pad, n.band.E_pad));
    for (float** row : {&lse, &inverse, &at_max, &delta, &dlse})
      *row = arena.take<float>(BLOCK);
    own = arena.take<float>(alone ? 2 * blocks * BLOCK * n.D_pad : 0);
  }
};

// Sums of a task over its rows: biases [share], relative keys [tables of the task][chunks][E][BLOCK].
struct RelativeSums {
  float *key, *value;  // [key blocks of the task][BLOCK][D_pad], of the current batch entry
  float *table, *content, *position;
};

constexpr int DELTAS = 8;  // rows whose delta is summed at a time; divides BLOCK
// terms summed in sequence; with more, the rounding error outweighs the gain of the common order
constexpr int LONGEST_CHAIN = 128;

// delta = dout . out (in w.rows), summed in the order in which `gemm` sums dout . value: where a query sees one key,
// the two cancel exactly. Several rows at a time hide the latency of the sums. Heads wider than LONGEST_CHAIN are
// summed by lanes, because the error of delta affects every score of its row, that of dP only one.
template <class Elem> void deltas(int width, int r, int count, const RelativeWorkspace<Elem>& w) {
  const int kc = kc_of<Elem>(width), lda = row_width<Elem>(width);
  const Elem *a = w.dout + r * lda, *o = w.rows + r * lda;
  if (kc > LONGEST_CHAIN) {
    for (int k = 0; k < count; ++k) {
      Vec product = zero();
      for (int d = 0; d < kc; d += LANES)
        product = fma(load(a + k * lda + d), load(o + k * lda + d), product);
      w.delta[r + k] = sum(product);
    }
    return;
  }
  Vec total[DELTAS];
  std::fill(total, total + DELTAS, zero());
  for (int d = 0; d < kc; ++d)
    for (int k = 0; k < DELTAS; ++k)
      total[k] = fma(broadcast(a[k * lda + d]), broadcast(o[k * lda + d]), total[k]);
  for (int k = 0; k < count; ++k)
    store(w.delta + r + k, total[k], 1);
}

// sum += f * (the sum of the block's rows), so that the rounding error does not grow with the number of rows.
inline void add_rows(float* sum, const float* block, int rows, int ld, Vec f) {
  for (int d = 0; d < ld; d += LANES) {
    Vec total = zero();
    for (int r = 0; r < rows; ++r)
      total = total + load(block + r * ld + d);
    store(sum + d, fma(total, f, load(sum + d)));
  }
}

// Mean of a row's dP, weighted by p, in two parts: dP at the greatest p, and the difference from it.
struct WeightedMean {
  Vec at_max, rest;
  WeightedMean(const float* dp, const float* p, int columns) {
    Vec p_max = zero(), dp_max = broadcast(-INFINITY), total = zero(), weight = zero();
    for (int x = 0; x < columns; x += LANES)
      p_max = max(load(p + x), p_max);
    p_max = broadcast(max_of(p_max));
    for (int x = 0; x < columns; x += LANES)
      dp_max = max(select(ge(load(p + x), p_max), load(dp + x), dp_max), dp_max);
    at_max = broadcast(max_of(dp_max));
    for (int x = 0; x < columns; x += LANES) {
      const Vec w = load(p + x);
      total = fma(w, select(gt(w, zero()), load(dp + x) - at_max, w), total);
      weight = weight + w;
    }
    const float all = sum(weight);
    rest = broadcast(all == 0 ? 0.f : sum(total) / all);
  }
};

// Running values of a row over tiles: the greatest score (base 2), the sum of the weights 2^(score - greatest), dP at
// the greatest score (at_max), and the sum of weights times (dP - at_max).
struct RunningMean {
  float row_max = -INFINITY, row_sum = 0.f, at_max = 0.f, rest = 0.f;

  bool finite() const { return std::isfinite(row_max) && row_sum > 0 && std::isfinite(row_sum) && std::isfinite(rest); }
  // Adds a tile. `scores` are not yet scaled by `scale2`; weights replace them.
  void add(float* scores, const float* dp, int columns, Vec scale2, const Visibility::Row& row) {
    Vec tile_max = broadcast(row_max), total = zero();
    for (int x = 0; x < columns; x += LANES)
      tile_max = max(row.hide(load(scores + x) * scale2, x, broadcast(-INFINITY)), tile_max);
    const float new_max = max_of(tile_max);
    if (new_max == -INFINITY)
      return;
    for (int x = 0; x < columns; x += LANES) {
      const Vec weight = row.hide(exp2(fma(load(scores + x), scale2, broadcast(-new_max))), x, zero());
      store(scores + x, weight);
      total = total + weight;
    }
    const WeightedMean mean(dp, scores, columns);
    const float all = sum(total), alpha = std::exp2(row_max - new_max);
    float at, more;
    store(&at, mean.at_max, 1);
    store(&more, mean.rest, 1);
    row_sum *= alpha;
    rest *= alpha;
    if (new_max == row_max) {  // the maximum is in an earlier tile
      rest += all * (at - at_max + more);
    } else {
      rest += row_sum * (at_max - at) + all * more;
      at_max = at;
    }
    row_sum += all;
    row_max = new_max;
  }
};

}  // namespace retro::RETRO_ISA
