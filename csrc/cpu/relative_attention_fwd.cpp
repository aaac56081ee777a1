// Forward pass of relative attention. A task computes the output of some blocks of query rows, for the query heads of
// one key head. It walks over tiles of keys with an online softmax, and packs keys, values and relative keys at their
// first use.
#include <cmath>

#include "relative_attention_tile.h"
#include "row_attention.h"

namespace retro::RETRO_ISA {
namespace {

// Number of query rows per task, so that packing the keys takes about 1% of the time of multiplying them. It is reduced
// if threads would be idle.
constexpr int TASK_ROWS = 4 * BLOCK;
constexpr int64_t FEW_TASKS = 16;  // with fewer tasks, each query head gets tasks of its own

template <class Elem> struct Workspace {
  Visibility visible;
  BandChunks<Elem> chunks;
  Elem *key, *value;  // per key block: [kc(D)][BLOCK], [kc(BLOCK)][D_pad]
  Elem *rows, *query, *rel_query, *weights;
  float *strip, *out, *bias, *row_max, *row_sum, *alpha, *dropout;
  int weight_ld;  // leading dimension of `weights` [BLOCK][keys]
  uint8_t* ready;
  int64_t slots;  // number of key blocks that stay packed

  Workspace(const RelativeAttention& c, const AttentionSizes& n, int64_t first_row, int64_t last_row, int heads,
            Arena& arena)
      : visible(c, n, first_row, last_row, arena), chunks(visible.chunks<Elem>(false, arena)) {
    const int64_t blocks = visible.blocks();
    const bool once =
        heads == 1 && first_row / BLOCK == (last_row - 1) / BLOCK;  // then each block is used once and does not stay
    slots = once ? std::min<int64_t>(blocks, GROUP) : blocks;
    arena.give(slots * kc_of<Elem>(n.D) * BLOCK, key);
    arena.give(slots * n.D_pad * kc_of<Elem>(BLOCK), value);
    arena.give(blocks, ready);
    arena.give(BLOCK * row_width<Elem>(n.D), rows, query);
    arena.give(BLOCK * row_width<Elem>(n.band.E), rel_query);
    arena.give(BLOCK * n.ld, strip);
    if constexpr (PAIRS<Elem>) {
      weight_ld = kc_of<Elem>(GROUP * BLOCK);
      arena.give(BLOCK * weight_ld, weights);
    } else {
      weight_ld = n.row;
      weights = strip + n.start;  // in place
    }
    arena.give(BLOCK * n.D_pad, out);
    arena.give(std::max(n.D_pad, n.band.E_pad), bias);
    arena.give(BLOCK, row_max, alpha);
    arena.give(BLOCK * LANES, row_sum);
    arena.give(GROUP * BLOCK, dropout);
  }
};

// Values that the stages of a pass share.
template <class T, class Elem> struct Context {
  const RelativeAttention& call;
  const View &out, &lse;
  int64_t first_batch;
  AttentionSizes n{call};
  Dropout dropout{call.seed, call.dropout_p, first_batch};
  float scale2 = static_cast<float>(call.scale) * LOG2E;  // scores are in base 2
};

// Return the packed keys, or values, of a block.
template <class T, class Elem> Elem* keys_of(const Context<T, Elem>& c, const Workspace<Elem>& w, int64_t block) {
  return w.key + (block - w.visible.first_block) % w.slots * kc_of<Elem>(c.n.D) * BLOCK;
}

template <class T, class Elem> Elem* values_of(const Context<T, Elem>& c, const Workspace<Elem>& w, int64_t block) {
  return w.value + (block - w.visible.first_block) % w.slots * c.n.D_pad * kc_of<Elem>(BLOCK);
}

// Packs the keys and values of a block, unless they stay packed from an earlier tile.
template <class T, class Elem>
void pack(const Context<T, Elem>& c, int64_t b, int64_t block, int g, Workspace<Elem>& w) {
  const AttentionSizes& n = c.n;
  const int64_t k = block - w.visible.first_block;
  if (w.ready[k])
    return;
  w.ready[k] = 1;
  Elem* const none = nullptr;
  pack_keys<T>(c.call.key, n, w.visible, b, block, g, w.rows, keys_of(c, w, block), none, c.call.value, block);
  pack_keys<T>(c.call.value, n, w.visible, b, block, g, w.rows, none, values_of(c, w, block), c.call.key, block + 1);
}

// One step of the online softmax: updates the running maximum and sum of each row, and replaces the scores by
// weights.
template <bool MASKED, class T, class Elem>
void softmax(const Context<T, Elem>& c, const QueryRows& rows, const KeyTile& tile, Workspace<Elem>& w) {
  const InStage stage(SOFTMAX);
  const AttentionSizes& n = c.n;
  constexpr int VECTORS = GROUP * BLOCK / LANES;
  const int vectors = tile.columns() / LANES;
  for (int r = 0; r < rows.count; ++r) {
    float* s = w.strip + n.start + r * n.row;
    Vec x[VECTORS], tile_max = broadcast(-INFINITY);
    Visibility::Row row{};
    if (MASKED)
      row = w.visible.row(rows.i + r);
    for (int v = 0; v < vectors; ++v) {
      x[v] = load(s + v * LANES) * broadcast(c.scale2);
      if (MASKED)
        x[v] = row.hide(x[v], v * LANES, broadcast(-INFINITY));
      tile_max = max(tile_max, x[v]);
    }
    const float old_max = w.row_max[r], new_max = std::max(old_max, max_of(tile_max));
    const float row_max = new_max == -INFINITY ? 0.f : new_max;  // avoid -inf - -inf
    const Vec alpha = exp2(broadcast(old_max - row_max));
    w.row_max[r] = new_max;
    store(w.alpha + r, alpha, 1);
    if (c.dropout)
      c.dropout.factors_of_row(tile.block * BLOCK, rows.i + r, rows.head, rows.b, tile.columns(), w.dropout);
    Vec row_sum = rounded(load(w.row_sum + r * LANES) * alpha);
    for (int v = 0; v < vectors; ++v) {
      Vec p = exp2(x[v] - broadcast(row_max));
      row_sum = row_sum + p;
      if (c.dropout)
        p = p * load(w.dropout + v * LANES);
      if constexpr (PAIRS<Elem>)
        store(reinterpret_cast<bf16*>(w.weights + r * w.weight_ld) + v * LANES, p);
      else
        store(s + v * LANES, p);
    }
    store(w.row_sum + r * LANES, row_sum);
  }
}

// Processes a tile: scores, softmax, and the products of weights and values, which are added to w.out.
template <class T, class Elem> void tile(const Context<T, Elem>& c, const QueryRows& rows, const KeyTile& tile,
                                         int previous, bool last, Workspace<Elem>& w) {
  const AttentionSizes& n = c.n;
  slide<T>(n, w.chunks, rows, tile, previous, last, w.rel_query, w.strip);
  const auto keys = [&](int k) {
    pack(c, rows.b, tile.block + k, rows.head / n.share, w);
    return keys_of(c, w, tile.block + k);
  };
  multiply_keys(n, rows.count, tile.blocks, w.query, keys, w.strip + n.start);
  w.visible.enter(tile);
  if (w.visible.all(tile, rows))
    softmax<false>(c, rows, tile, w);
  else
    softmax<true>(c, rows, tile, w);
  const InStage stage(VALUES);
  for (int k = 0; k < tile.blocks; ++k) {
    const Elem *weights = w.weights + k * kc_of<Elem>(BLOCK), *values = values_of(c, w, tile.block + k);
    gemm<true>(rows.count, n.D_pad / LANES, kc_of<Elem>(BLOCK), weights, w.weight_ld, values, n.D_pad,
               [&](int r, int d, Vec x) {
                 float* to = w.out + r * n.D_pad + d;
                 store(to, k ? load(to) + x : fma(load(to), broadcast(w.alpha[r]), x));
               });
  }
}

// Computes out and lse of a block of query rows.
template <class T, class Elem> void attend(const Context<T, Elem>& c, const QueryRows& rows, Workspace<Elem>& w) {
  const AttentionSizes& n = c.n;
  pack_operands<T>(c.call, n, rows, w.bias, w.query, w.rel_query);
  std::fill(w.row_max, w.row_max + BLOCK, -INFINITY);
  clear(w.row_sum, BLOCK * LANES);
  clear(w.out, BLOCK * n.D_pad);
  int previous = 0;  // number of key blocks of the previous tile if it is adjacent
  for (KeyTile at = w.visible.first_tile(rows), next{}; at.blocks; at = next) {
    if (w.slots < w.visible.blocks())
      clear(w.ready + at.block - w.visible.first_block, at.blocks);
    next = w.visible.next_tile(at, rows);
    const bool last = !next.blocks || next.block != at.block + at.blocks;
    tile(c, rows, at, previous, last, w);
    previous = last ? 0 : at.blocks;
  }
  const InStage stage(STORE);
  for (int r = 0; r < rows.count; ++r) {
    const float row_sum = sum(load(w.row_sum + r * LANES)), inverse = row_sum == 0 ? 0.f : 1.f / row_sum;
    if (row_sum == 0)
      clear(w.out + r * n.D_pad, n.D_pad);  // because hidden values may be NaN
    scale_row(w.out + r * n.D_pad, inverse, n.D, c.out.template at<T>(rows.b, rows.i + r, rows.head));
    *c.lse.template at<float>(rows.b, rows.head, rows.i + r) = log_sum_exp(w.row_max[r], row_sum);
  }
}

// Runs a task: query rows [first_row, last_row) of the heads [first_head, last_head).
template <class T, class Elem>
void task(const Context<T, Elem>& c, int64_t b, int64_t first_row, int64_t last_row, int first_head, int last_head) {
  const TileScope tiles;
  const AttentionSizes& n = c.n;
  auto w = in_scratch<Workspace<Elem>>(c.call, n, first_row, last_row, last_head - first_head);
  w.visible.load(b);
  clear(w.ready, w.visible.blocks());
  if (n.band)
    w.chunks.reset();
  for (int head = first_head; head < last_head; ++head) {
    if (n.band && n.band.tables() > 1)
      w.chunks.reset();
    for (int64_t i = first_row; i < last_row; i += BLOCK)
      attend(c, {b, i, static_cast<int>(std::min<int64_t>(BLOCK, last_row - i)), head}, w);
  }
}

// Runs the whole pass.
template <class T, class Elem> void forward(const Context<T, Elem>& c, int threads) {
  const AttentionSizes& n = c.n;
  const auto parts_of = [&](int64_t rows) { return (n.N + rows - 1) / rows; };
  const int heads = n.B * n.G * parts_of(TASK_ROWS) < FEW_TASKS ? 1 : n.share;
  const int64_t groups = n.H / heads;
  int64_t rows = TASK_ROWS;  // the bits of a block of queries do not depend on its task
  while (rows > BLOCK && n.B * groups * parts_of(rows) < threads)
    rows /= 2;
  const int64_t parts = parts_of(rows);
  parallel_for(parts * n.B * groups, threads, [&](int64_t t) {
    const int64_t part = parts - 1 - t / (n.B * groups);  // the last rows see the most keys, so they start first
    const int head = static_cast<int>(t % groups) * heads;
    task(c, t / groups % n.B, part * rows, std::min(n.N, (part + 1) * rows), head, head + heads);
  });
}

// Forward pass of few rows: a decode step.
template <class T> void forward_rows(const RelativeAttention& c, const View& out, const View& lse, int threads) {
  const AttentionSizes n(c);
  const auto list = [&](int64_t b, int64_t i, int64_t at, int64_t end, RowKeys<T>& keys) {
    const View &q = c.query_segment, &k = c.key_segment;
    const int64_t segment = q ? integer(q, b, i) : 0;
    i += position_of(c.batch_offset, b);  // the call's own offset is in `n`
    const int64_t high = std::min(end, n.high(i));
    for (at = std::max(at, n.low(i)); at < high && !keys.full(); ++at) {
      if (c.key_mask && !*c.key_mask.at<const uint8_t>(b, at))
        continue;
      if (q && integer(k, b, at) != segment)
        continue;
      keys.add(c.key.at<const T>(b, at), c.value.at<const T>(b, at), n.band.zero - (at - i), 1.f);
    }
    return at < high ? at : end;
  };
  attend_rows<T>(RowSizes(n.B, n.N, n.S, n.H, n.G, n.D, n.band.E), c, out, lse, threads, list);
}
}  // namespace

void relative_attention_forward(const RelativeAttention& call, const View& out, const View& lse, int threads) {
  const auto rows = [&](auto t) { forward_rows<decltype(t)>(call, out, lse, threads); };
  attention_forward(call, call.batch_offset, out, lse, rows, [&](auto t, auto e, const auto&... given) {
    forward(Context<decltype(t), decltype(e)>{given...}, threads);
  });
}

}  // namespace retro::RETRO_ISA
