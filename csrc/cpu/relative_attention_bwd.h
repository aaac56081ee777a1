// Data that the stages of relative attention's backward pass share: the context, the memory of a task, and means of dP.
#pragma once
#include <cmath>
#include <memory>

#include "partition.h"
#include "relative_attention_tile.h"
#include "row_attention.h"

namespace retro::RETRO_ISA {

// Sums over rows that a task writes: for biases [share][width], for relative keys [tables][chunks][E][BLOCK]. dK and dV
// are sums of the current batch entry, [key blocks of the task][BLOCK][D_pad].
struct RelativeSums {
  float *key, *value, *table, *content, *position;
};

// Constants of the whole pass, and the partial sums of all tasks. T: type of the tensors in memory. Elem: type of the
// operands of products.
template <class T, class Elem> struct RelativeContext {
  const RelativeAttention& call;
  const View &out, &lse, &dout, &dlse;
  const RelativeAttentionGrads& want;
  int64_t first_batch;
  AttentionSizes n{call};
  Partition partition{n.B, n.G, n.N};
  Dropout dropout{call.seed, call.dropout_p, first_batch};
  float scale = static_cast<float>(call.scale), scale2 = scale * LOG2E;
  bool any_key = want.key || want.value, any_query = want.query || want.content_bias;
  bool any_rel_query = n.band && (want.rel_query || want.position_bias || (!call.rel_query && want.query));
  int64_t chunks = n.band.last - n.band.first, key_blocks = (n.S + BLOCK - 1) / BLOCK;
  bool alone = partition.parts == 1 && any_key;  // whether no other task adds to the dK and dV of a task
  // Sizes, in elements, of one task's partial sums.
  int64_t table_size = want.rel_key ? (n.band.tables() > 1 ? n.share : 1) * chunks * n.band.E * BLOCK : 0;
  int64_t content_size = want.content_bias ? n.share * n.D_pad : 0;
  int64_t sums_size = table_size + content_size + (want.position_bias ? n.share * n.band.E_pad : 0);
  int64_t key_size = partition.parts > 1 && any_key ? key_blocks * BLOCK * n.D_pad : 0;
  std::unique_ptr<float[]> partial_keys{new float[partition.tasks * 2 * key_size]};
  std::unique_ptr<float[]> partial_sums{new float[partition.tasks * sums_size]};
};

template <class Elem> struct RelativeWorkspace {
  Visibility visible;
  BandChunks<Elem> chunks;
  Elem *key, *key_b, *value;              // per key block: [kc(D)][BLOCK], [kc(BLOCK)][D_pad], [kc(D)][BLOCK]
  uint8_t* ready;                         // per key block: whether it is packed
  Elem *rows, *query, *rel_query, *dout;  // row-major A
  struct {
    Elem *query, *rel_query, *dout, *strip, *weights;
  } pairs;  // further layouts of pairs; floats do not need them
  const Elem *query_b, *rel_query_b, *dout_b;
  float *strip, *weights, *keep;  // scores or their gradients; probabilities and their dropout factors, [BLOCK][LD]
  float *d_query, *d_rel_query, *bias;
  float *lse, *inverse, *dlse;  // per row: log-sum-exp in base 2, the factor of its rounding error, its gradient
  float *at_max, *delta;        // per row: the mean of dP is at_max + delta
  float* own;                   // dK and dV of the task if no other task adds to them
  RelativeSums sums{};
  static constexpr int LD = BLOCK * GROUP;

  template <class T> RelativeWorkspace(const RelativeContext<T, Elem>& c, const Partition::Share& mine, Arena& arena)
      : visible(c.call, c.n, mine.first_row, mine.last_row, arena), chunks(visible.chunks<Elem>(true, arena)) {
    const AttentionSizes& n = c.n;
    const int64_t blocks = visible.blocks();
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
    pairs = {paired(BLOCK * lda), paired(BLOCK * rel_lda), paired(BLOCK * lda), paired(BLOCK * LD / 2),
             paired(BLOCK * LD / 2)};
    strip = arena.take<float>(BLOCK * n.ld);
    weights = arena.take<float>(BLOCK * LD);
    keep = arena.take<float>(c.dropout ? BLOCK * LD : 0);
    d_query = arena.take<float>(BLOCK * n.D_pad);
    d_rel_query = arena.take<float>(BLOCK * n.band.E_pad);
    bias = arena.take<float>(std::max(n.D_pad, n.band.E_pad));
    for (float** row : {&lse, &inverse, &at_max, &delta, &dlse})
      *row = arena.take<float>(BLOCK);
    own = arena.take<float>(c.alone ? 2 * blocks * BLOCK * n.D_pad : 0);
  }
};

constexpr int DELTAS = 8;  // number of rows whose delta is summed at a time; divides BLOCK
// Maximum number of terms that are summed in sequence. The rounding error of a longer sum outweighs the gain of the
// common order.
constexpr int LONGEST_CHAIN = 128;

// Computes delta = dout · out for the rows [r, r + count); w.rows holds `out`. The terms are added in the order in
// which `gemm` adds the terms of dout · value, so that delta and dP cancel exactly if a query sees a single key.
// Several rows at a time hide the latency of the additions. The sums of heads wider than LONGEST_CHAIN are divided
// among lanes, because an error of delta affects every score of its row, whereas an error of dP affects one score.
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

// Adds f times the sum of a block's rows to `sum`. The rows of the block are added up first, because a running sum over
// all rows would have a larger rounding error.
inline void add_rows(float* sum, const float* block, int rows, int ld, Vec f) {
  for (int d = 0; d < ld; d += LANES) {
    Vec total = zero();
    for (int r = 0; r < rows; ++r)
      total = total + load(block + r * ld + d);
    store(sum + d, fma(total, f, load(sum + d)));
  }
}

// Mean of a row's dP, weighted by p, in two parts: dP at the largest p, and the mean's difference from it.
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

// Running values of a row over tiles: the largest score (base 2), the sum of the weights 2^(score - largest), dP at the
// largest score (at_max), and the sum of weights times (dP - at_max).
struct RunningMean {
  float row_max = -INFINITY, row_sum = 0.f, at_max = 0.f, rest = 0.f;

  bool finite() const { return std::isfinite(row_max) && row_sum > 0 && std::isfinite(row_sum) && std::isfinite(rest); }
  // Adds a tile. Scales `scores` by scale2, and replaces them by weights.
  void add(float* scores, const float* dp, int columns, Vec scale2, const Visibility::Row& row) {
    Vec tile_max = broadcast(row_max), total = zero();
    for (int x = 0; x < columns; x += LANES)
      tile_max = max(row.hide(load(scores + x) * scale2, x, broadcast(-INFINITY)), tile_max);
    const float new_max = max_of(tile_max);
    if (new_max == -INFINITY)
      return;
    for (int x = 0; x < columns; x += LANES) {
      const Vec excess = min(broadcast(HIGHEST_EXCESS), fma(load(scores + x), scale2, broadcast(-new_max)));
      const Vec weight = row.hide(exp2(excess), x, zero());
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
