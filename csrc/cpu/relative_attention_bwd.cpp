// Backward pass of relative attention, from the saved log-sum-exp:
//
//   P = exp(S - lse)    dS = P * (dO V^T - delta), delta = rowsum(dO * O) - dlse
//   dV = P^T dO         dK = dS^T Q         dQ = dS K        and the same for the band of position logits
//
// One pass over tiles of scores recomputes each tile once. A task has some blocks of query rows, for all query heads of
// one key head (partition.h). It sums dQ in scratch memory. It sums dK, dV and the sums over rows in partial buffers of
// its own, and afterwards the buffers of all tasks are added in a fixed order. The tasks depend only on the sizes.
//
// The stages follow in the order in which they run. `block` calls them for a block of query rows.
#include <cmath>
#include <memory>
#include <vector>

#include "partition.h"
#include "relative_attention_tile.h"
#include "row_attention.h"

namespace retro::RETRO_ISA {
namespace {

// Constants of the whole pass, and the partial sums of all tasks. T: type of the tensors in memory. Elem: type of the
// operands of products.
template <class T, class Elem> struct Context {
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

template <class Elem> struct Workspace : RowValues {
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
  float* own;  // dK and dV of the task if no other task adds to them
  // Sums over rows that a task writes: for biases [share][width], for relative keys [tables][chunks][E][BLOCK]. dK and
  // dV are sums of the current batch entry, [key blocks of the task][BLOCK][D_pad].
  struct {
    float *key, *value, *table, *content, *position;
  } sums{};
  static constexpr int LD = BLOCK * GROUP;

  template <class T> Workspace(const Context<T, Elem>& c, const Partition::Share& mine, Arena& arena)
      : RowValues(BLOCK, arena), visible(c.call, c.n, mine.first_row, mine.last_row, arena),
        chunks(visible.chunks<Elem>(true, arena)) {
    const AttentionSizes& n = c.n;
    const int64_t blocks = visible.blocks();
    const int lda = row_width<Elem>(n.D), rel_lda = row_width<Elem>(n.band.E);
    const auto paired = [&](int64_t count) { return arena.take<Elem>(PAIRS<Elem> ? count : 0); };
    arena.give(blocks * kc_of<Elem>(n.D) * BLOCK, key, value);
    arena.give(blocks * n.D_pad * kc_of<Elem>(BLOCK), key_b);
    arena.give(blocks, ready);
    arena.give(BLOCK * lda, rows, dout, query);
    arena.give(BLOCK * rel_lda, rel_query);
    pairs = {paired(BLOCK * lda), paired(BLOCK * rel_lda), paired(BLOCK * lda), paired(BLOCK * LD / 2),
             paired(BLOCK * LD / 2)};
    arena.give(BLOCK * n.ld, strip);
    arena.give(BLOCK * LD, weights);
    arena.give(c.dropout ? BLOCK * LD : 0, keep);
    arena.give(BLOCK * n.D_pad, d_query);
    arena.give(BLOCK * n.band.E_pad, d_rel_query);
    arena.give(std::max(n.D_pad, n.band.E_pad), bias);
    arena.give(c.alone ? 2 * blocks * BLOCK * n.D_pad : 0, own);
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
template <class Elem> void deltas(int width, int r, int count, const Workspace<Elem>& w) {
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
void add_rows(float* sum, const float* block, int rows, int ld, Vec f) {
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

// Starts a block of query rows. Reads query, relative query, dout, out, lse and dlse. Writes the operands of products,
// the values per row (RowValues), and zeros for dQ.
template <class T, class Elem> void begin(const Context<T, Elem>& c, const QueryRows& rows, Workspace<Elem>& w) {
  const InStage stage(PACK);
  const AttentionSizes& n = c.n;
  const int lda = row_width<Elem>(n.D), rel_lda = row_width<Elem>(n.band.E);
  pack_operands<T>(c.call, n, rows, w.bias, w.query, w.rel_query);
  pack_queries<T>(c.dout, View(), rows.b, rows.i, rows.count, rows.head, n.D, w.bias, w.dout);
  pack_queries<T>(c.out, View(), rows.b, rows.i, rows.count, rows.head, n.D, w.bias, w.rows);
  clear(w.d_query, BLOCK * n.D_pad);
  clear(w.d_rel_query, BLOCK * n.band.E_pad);
  for (int r = 0; r < rows.count; r += DELTAS)
    deltas(n.D, r, std::min(DELTAS, rows.count - r), w);
  for (int r = 0; r < rows.count; ++r) {
    const float l = *c.lse.template at<const float>(rows.b, rows.head, rows.i + r);
    const bool empty = l == -INFINITY;
    w.start(r, l, c.dlse && !empty ? scalar(c.dlse, rows.b, rows.head, rows.i + r) : 0.f, empty ? 0.f : w.delta[r]);
    if (!empty)
      continue;
    // The row sees no key. Its operands are cleared, because they may be NaN.
    clear(w.dout + r * lda, lda);
    clear(w.query + r * lda, lda);
    clear(w.rel_query + r * rel_lda, rel_lda);
  }
  w.query_b = pack_b(w.query, rows.count, n.D, w.pairs.query);
  w.dout_b = pack_b(w.dout, rows.count, n.D, w.pairs.dout);
  if (n.band)
    w.rel_query_b = pack_b(w.rel_query, rows.count, n.band.E, w.pairs.rel_query);
}

// Packs the keys and values of a key block, unless an earlier tile of the task did.
template <class T, class Elem>
void pack(const Context<T, Elem>& c, int64_t b, int64_t block, int g, Workspace<Elem>& w) {
  const AttentionSizes& n = c.n;
  const int64_t k = block - w.visible.first_block;
  if (w.ready[k])
    return;
  w.ready[k] = 1;
  const int kc = kc_of<Elem>(n.D);
  Elem *const key = w.key + k * kc * BLOCK, *const key_b = w.key_b + k * n.D_pad * kc_of<Elem>(BLOCK), *none = nullptr;
  pack_keys<T>(c.call.value, n, w.visible, b, block, g, w.rows, w.value + k * kc * BLOCK, none, c.call.key, block);
  pack_keys<T>(c.call.key, n, w.visible, b, block, g, w.rows, key, key_b, c.call.value, block + 1);
}

// Computes the scores of a tile before scaling. The strip holds the position logits before, the scores afterwards.
template <class T, class Elem>
void scores(const Context<T, Elem>& c, const QueryRows& rows, const KeyTile& tile, Workspace<Elem>& w) {
  const AttentionSizes& n = c.n;
  const auto keys_of = [&](int k) {
    pack(c, rows.b, tile.block + k, rows.head / n.share, w);
    return w.key + (tile.block + k - w.visible.first_block) * kc_of<Elem>(n.D) * BLOCK;
  };
  multiply_keys(n, rows.count, tile.blocks, w.query, keys_of, w.strip + n.start);
  w.visible.enter(tile);
}

// Computes dP = dO V^T of a tile and stores it to `to`, whose rows are `ld` apart.
template <class T, class Elem> void value_products(const Context<T, Elem>& c, int rows, const KeyTile& tile,
                                                   const Workspace<Elem>& w, float* to, int ld) {
  const InStage stage(VALUES);
  const int kc = kc_of<Elem>(c.n.D), lda = row_width<Elem>(c.n.D);
  for (int k = 0; k < tile.blocks; ++k) {
    const Elem* values = w.value + (tile.block + k - w.visible.first_block) * kc * BLOCK;
    gemm<true>(rows, BLOCK / LANES, kc, w.dout, lda, values, BLOCK,
               [=](int r, int x, Vec dp) { store(to + r * ld + k * BLOCK + x, dp); });
  }
}

// Replaces `lse` and `delta` of few rows. Their forward pass added the terms of a score in another order than `scores`
// does. So the probabilities would not add up to 1 with its log-sum-exp, and the mean of dP would belong to other
// probabilities with its output. This stage goes over all tiles once. It computes the maximum, the sum and the mean of
// dP from the scores that the next stages compute again.
template <class T, class Elem> void sum_rows(const Context<T, Elem>& c, const QueryRows& rows, Workspace<Elem>& w) {
  RunningMean total[FEW_ROWS];
  for (KeyTile tile = w.visible.first_tile(rows); tile.blocks; tile = w.visible.next_tile(tile, rows)) {
    slide<T>(c.n, w.chunks, rows, tile, 0, true, w.rel_query, w.strip);
    scores(c, rows, tile, w);
    value_products(c, rows.count, tile, w, w.weights, w.LD);
    for (int r = 0; r < rows.count; ++r)
      total[r].add(w.strip + c.n.start + r * c.n.row, w.weights + r * w.LD, tile.columns(), broadcast(c.scale2),
                   w.visible.row(rows.i + r));
  }
  for (int r = 0; r < rows.count; ++r) {
    // if logits are huge, the factor of the maximum's rounding error may be too large for a float
    if (!w.empty(r) && total[r].finite())
      w.set(r, total[r].row_max, total[r].row_sum, total[r].at_max, total[r].rest);
  }
}

// Reads the scores of a tile from the strip. Writes the probabilities to w.weights and, with dropout, the factor of
// each probability to w.keep.
template <bool MASKED, class T, class Elem>
void probabilities(const Context<T, Elem>& c, const QueryRows& rows, const KeyTile& tile, Workspace<Elem>& w) {
  const InStage stage(SOFTMAX);
  for (int r = 0; r < rows.count; ++r) {
    const float* s = w.strip + c.n.start + r * c.n.row;
    float* p = w.weights + r * w.LD;
    Visibility::Row row{};
    if (MASKED)
      row = w.visible.row(rows.i + r);
    for (int x = 0; x < tile.columns(); x += LANES) {
      const Vec excess = fma(load(s + x), broadcast(c.scale2), broadcast(-w.lse2[r]));
      const Vec e = exp2(min(broadcast(HIGHEST_EXCESS), excess)) * broadcast(w.inverse[r]);
      store(p + x, MASKED ? row.hide(e, x, zero()) : e);
    }
    if (c.dropout)
      c.dropout.factors_of_row(tile.block * BLOCK, rows.i + r, rows.head, rows.b, tile.columns(), w.keep + r * w.LD);
  }
}

// Computes dS = P * (dP - mean of dP + dlse), which replaces the scores in the strip. Then applies dropout to
// w.weights, for the gradient of the values. If a row sees no key outside this tile, the mean is computed from the
// tile: where one or two keys dominate, dP and its mean nearly cancel, and `delta` has the rounding error of the
// output.
template <class T, class Elem>
void score_grads(const Context<T, Elem>& c, const QueryRows& rows, const KeyTile& tile, Workspace<Elem>& w) {
  const InStage stage(SOFTMAX);
  const int columns = tile.columns();
  value_products(c, rows.count, tile, w, w.strip + c.n.start, c.n.row);
  for (int r = 0; r < rows.count; ++r) {
    float *s = w.strip + c.n.start + r * c.n.row, *p = w.weights + r * w.LD;
    const float* keep = w.keep + r * w.LD;
    if (w.empty(r)) {
      clear(p, columns);
      clear(s, columns);
      continue;
    }
    for (int x = 0; c.dropout && x < columns; x += LANES)
      store(s + x, load(s + x) * load(keep + x));
    Vec at_max = broadcast(w.at_max[r]), rest = broadcast(w.delta[r]);
    if (w.visible.only(rows.i + r, tile)) {
      const WeightedMean mean(s, p, columns);
      at_max = mean.at_max;
      rest = mean.rest;
    }
    rest = rest - broadcast(w.dlse[r]);
    for (int x = 0; x < columns; x += LANES) {
      store(s + x, load(p + x) * (load(s + x) - at_max - rest));
      if (c.dropout)
        store(p + x, load(p + x) * load(keep + x));
    }
  }
}

// Reads P (w.weights) and dS (the strip) of a tile. Adds P^T dO to dV, dS^T Q to dK and dS K to dQ.
template <class T, class Elem>
void operand_grads(const Context<T, Elem>& c, int rows, const KeyTile& tile, Workspace<Elem>& w) {
  const InStage stage(GRADIENTS);
  const AttentionSizes& n = c.n;
  const int64_t first = tile.block - w.visible.first_block, at = first * BLOCK * n.D_pad;
  const int columns = tile.columns();
  const float* const grad = w.strip + n.start;
  // to[m][D_pad] += A B for B = [k][D_pad]
  const auto add = [&](int m, int k, const auto& a, const Elem* b, float* to) {
    gemm(m, n.D_pad / LANES, kc_of<Elem>(k), a, PackedB<Elem>{b, n.D_pad}, AddTo{to, n.D_pad});
  };
  if (c.want.value)
    add(columns, rows, to_column_major(w.weights, w.LD, rows, columns, w.pairs.weights, w.LD), w.dout_b,
        w.sums.value + at);
  if (c.want.key)
    add(columns, rows, to_column_major(grad, n.row, rows, columns, w.pairs.strip, w.LD), w.query_b, w.sums.key + at);
  if (c.any_query)
    add(rows, columns, to_row_major(grad, n.row, rows, columns, w.pairs.strip, kc_of<Elem>(w.LD)),
        w.key_b + first * n.D_pad * kc_of<Elem>(BLOCK), w.d_query);
}

// Adds the chunks of the strip that are complete to the gradients of relative queries and relative keys. The strip
// holds dS, and position logits in the columns of keys outside of all tiles: before the tile unless it `follows` an
// adjacent one, and after it if it is the `last`. These columns are cleared. Unless the tile is the last, its last
// chunk is not complete, because the next tile adds to it.
template <class T, class Elem> void band_grads(const Context<T, Elem>& c, const QueryRows& rows, const KeyTile& tile,
                                               bool follows, bool last, Workspace<Elem>& w) {
  const InStage stage(BAND);
  const AttentionSizes& n = c.n;
  const int64_t begin = tile.block * BLOCK, end = begin + tile.columns();
  for (int r = 0; r < rows.count; ++r) {
    float* row = w.strip + r * n.ld;
    if (!follows)
      std::fill(row, row + BLOCK - 1 - r, 0.f);
    if (last)
      std::fill(row + BLOCK - 1 - r + tile.columns(), row + tile.columns() + BLOCK, 0.f);
  }
  const int table = n.band.tables() > 1 ? rows.head % n.share : 0;
  for (int k = 0; k < (last ? tile.blocks + 1 : tile.blocks); ++k) {
    const int64_t m = tile.block - rows.i / BLOCK - 1 + k;
    float* const d_table = c.want.rel_key && n.band.holds(m)
                               ? w.sums.table + (table * c.chunks + m - n.band.first) * n.band.E * BLOCK
                               : nullptr;
    band_gradients<T>(n.band, w.chunks, rows.head, m, rows.count, w.rel_query_b, w.strip + k * BLOCK, n.ld,
                      w.pairs.strip, c.any_rel_query ? w.d_rel_query : nullptr, d_table,
                      Diagonals::of(m, rows.i, follows ? begin - BLOCK : begin, last ? end : end + BLOCK));
  }
}

// Ends a block of query rows. Adds its dQ to the gradients of the biases, and writes the gradients of query and
// relative query.
template <class T, class Elem> void finish(const Context<T, Elem>& c, const QueryRows& rows, Workspace<Elem>& w) {
  const InStage stage(STORE);
  const AttentionSizes& n = c.n;
  const int own = rows.head % n.share;
  for (int r = 0; r < rows.count; ++r)
    if (w.empty(r)) {  // the row sees no key; its dQ is 0 times keys that may be NaN
      clear(w.d_query + r * n.D_pad, n.D_pad);
      clear(w.d_rel_query + r * n.band.E_pad, n.band.E_pad);
    }
  if (c.want.content_bias)
    add_rows(w.sums.content + own * n.D_pad, w.d_query, rows.count, n.D_pad, broadcast(c.scale));
  if (c.want.position_bias)
    add_rows(w.sums.position + own * n.band.E_pad, w.d_rel_query, rows.count, n.band.E_pad, broadcast(c.scale));
  for (int r = 0; r < rows.count; ++r) {
    const float *dq = w.d_query + r * n.D_pad, *dr = w.d_rel_query + r * n.band.E_pad;
    if (c.want.rel_query)
      scale_row(dr, c.scale, n.band.E, c.want.rel_query.template at<T>(rows.b, rows.i + r, rows.head));
    if (c.want.query)
      scale_row(dq, c.scale, n.D, c.want.query.template at<T>(rows.b, rows.i + r, rows.head),
                n.band && !c.call.rel_query ? dr : nullptr);
  }
}

// Runs all stages for a block of query rows.
template <class T, class Elem> void block(const Context<T, Elem>& c, const QueryRows& rows, Workspace<Elem>& w) {
  begin(c, rows, w);
  if (few_rows(c.call))
    sum_rows(c, rows, w);
  int previous = 0;  // number of key blocks of the previous tile if it is adjacent
  for (KeyTile tile = w.visible.first_tile(rows), next{}; tile.blocks; tile = next) {
    next = w.visible.next_tile(tile, rows);
    const bool last = !next.blocks || next.block != tile.block + tile.blocks;
    slide<T>(c.n, w.chunks, rows, tile, previous, last, w.rel_query, w.strip);
    scores(c, rows, tile, w);
    if (w.visible.all(tile, rows))
      probabilities<false>(c, rows, tile, w);
    else
      probabilities<true>(c, rows, tile, w);
    score_grads(c, rows, tile, w);
    operand_grads(c, rows.count, tile, w);
    if (c.n.band)
      band_grads(c, rows, tile, previous > 0, last, w);
    previous = last ? 0 : tile.blocks;
  }
  finish(c, rows, w);
}

// Writes dK and dV of the keys [first, last): the sum over `parts` buffers, in order. key[p] points to the buffer of
// dK, and dV follows `stride` elements later.
template <class T, class Elem> void write_keys(const Context<T, Elem>& c, int64_t b, int g, int64_t first, int64_t last,
                                               const float* const* key, int parts, int64_t stride) {
  const InStage stage(STORE);
  for (int which = 0; which < 2; ++which) {
    const View& to = which ? c.want.value : c.want.key;
    if (!to)
      continue;
    const Vec f = broadcast(which ? 1.f : c.scale);
    for (int64_t j = first; j < last; ++j)
      for (int d = 0; d < c.n.D; d += LANES) {
        Vec s = zero();
        for (int p = 0; p < parts; ++p)
          s = s + load(key[p] + which * stride + (j - first) * c.n.D_pad + d);
        store(to.at<T>(b, j, g) + d, s * f, c.n.D - d);
      }
  }
}

// Runs a task: all blocks of its rows. Writes its partial sums and, if no other task adds to them, dK and dV.
template <class T, class Elem> void task(const Context<T, Elem>& c, int64_t t) {
  const TileScope tiles;
  const AttentionSizes& n = c.n;
  const Partition::Share mine = c.partition.share(t);
  auto w = in_scratch<Workspace<Elem>>(c, mine);
  const int64_t size = w.visible.blocks() * BLOCK * n.D_pad;
  w.sums.key = c.alone ? w.own : c.partial_keys.get() + mine.slot * 2 * c.key_size;
  w.sums.value = w.sums.key + (c.alone ? size : c.key_size);
  w.sums.table = c.partial_sums.get() + mine.slot * c.sums_size;
  w.sums.content = w.sums.table + c.table_size;
  w.sums.position = w.sums.content + c.content_size;
  clear(w.sums.table, c.sums_size);
  if (n.band)
    w.chunks.reset();
  for (int64_t b = mine.first_batch; b < mine.last_batch; ++b) {
    w.visible.load(b);
    clear(w.ready, w.visible.blocks());
    if (c.any_key) {
      clear(w.sums.key, size);
      clear(w.sums.value, size);
    }
    for (int head = mine.head * n.share; head < (mine.head + 1) * n.share; ++head) {
      if (n.band && n.band.tables() > 1 && n.share > 1)
        w.chunks.reset();
      for (int64_t i = mine.first_row; i < mine.last_row; i += BLOCK)
        block(c, {b, i, static_cast<int>(std::min<int64_t>(BLOCK, mine.last_row - i)), head}, w);
    }
    if (!c.alone)
      continue;
    const int64_t first = std::min(w.visible.first_block * BLOCK, n.S);
    const int64_t last = std::min(w.visible.last_block * BLOCK, n.S);
    const float* key = w.own;
    write_keys(c, b, mine.head, 0, first, nullptr, 0, 0);
    write_keys(c, b, mine.head, first, last, &key, 1, size);
    write_keys(c, b, mine.head, last, n.S, nullptr, 0, 0);
  }
}

// Writes dK and dV of key block t: adds the partial sums of all tasks that see the block, in the order of their rows.
template <class T, class Elem> void sum_parts(const Context<T, Elem>& c, int64_t t) {
  const AttentionSizes& n = c.n;
  const int64_t at = t % c.key_blocks, b = t / c.key_blocks / n.G, part_rows = c.partition.part_rows;
  const int g = static_cast<int>(t / c.key_blocks % n.G);
  std::vector<const float*> found;
  for (int64_t part = 0; part < c.partition.parts; ++part) {
    Arena none(nullptr);
    const Visibility seen(c.call, n, part * part_rows, std::min(n.N, (part + 1) * part_rows), none);
    if (at < seen.first_block || at >= seen.last_block)
      continue;
    found.push_back(c.partial_keys.get() + c.partition.slot(b, g, part) * 2 * c.key_size +
                    (at - seen.first_block) * BLOCK * n.D_pad);
  }
  write_keys(c, b, g, at * BLOCK, std::min(n.S, (at + 1) * BLOCK), found.data(), static_cast<int>(found.size()),
             c.key_size);
}

// Runs the whole pass: all tasks, then the sums over their partial buffers.
template <class T, class Elem> void backward(const Context<T, Elem>& c, int threads) {
  const AttentionSizes& n = c.n;
  parallel_for(c.partition.tasks, threads, [&](int64_t t) { task(c, t); });
  if (c.key_size)
    parallel_for(n.B * n.G * c.key_blocks, threads, [&](int64_t t) { sum_parts(c, t); });
  const float *tables = c.partial_sums.get(), *content = tables + c.table_size, *position = content + c.content_size;
  write_bias_gradient<float>(c.partition, n.share, content, c.sums_size, n.D, c.want.content_bias);
  write_bias_gradient<float>(c.partition, n.share, position, c.sums_size, n.band.E, c.want.position_bias);
  if (c.want.rel_key)
    write_table_gradient<float>(c.partition, n.band, n.share, tables, c.sums_size, c.scale, c.want.rel_key, threads);
}

}  // namespace

void relative_attention_backward(const RelativeAttention& call, const View& out, const View& lse, const View& dout,
                                 const View& dlse, const RelativeAttentionGrads& grads, int threads) {
  attention_backward(call, call.batch_offset, out, lse, dout, dlse, grads, [&](auto t, auto e, const auto&... given) {
    backward(Context<decltype(t), decltype(e)>{given...}, threads);
  });
}

}  // namespace retro::RETRO_ISA
