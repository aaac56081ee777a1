// Backward pass: one pass over tiles, each recomputed once. A task has some query blocks of one key head's query heads.
// It sums dQ in scratch memory, and dK, dV and the sums over rows in partial buffers of its own, which are added
// afterwards in a fixed order. The tasks depend only on the sizes.
#include <cmath>
#include <memory>
#include <vector>

#include "partition.h"
#include "relative_attention_bwd.h"
#include "row_attention.h"

namespace retro::RETRO_ISA {
namespace {

// T: type of the tensors in memory. Elem: type of the products' operands.
template <class T, class Elem> struct Backward {
  const RelativeAttention& c;
  const View &out, &lse, &dout, &dlse;
  const RelativeAttentionGrads& grads;
  int64_t first_batch;
  AttentionSizes n{c};
  Partition partition{n.B, n.G, n.N};
  Dropout dropout{c.seed, c.dropout_p, first_batch};
  float scale = static_cast<float>(c.scale), scale2 = scale * LOG2E;
  bool any_key = grads.key || grads.value, any_query = grads.query || grads.content_bias;
  bool any_rel_query = n.band && (grads.rel_query || grads.position_bias || (!c.rel_query && grads.query));
  int64_t chunks = n.band.last - n.band.first, key_blocks = (n.S + BLOCK - 1) / BLOCK;
  // of a task's partial sums
  int64_t table_size = grads.rel_key ? (n.band.tables() > 1 ? n.share : 1) * chunks * n.band.E * BLOCK : 0;
  int64_t content_size = grads.content_bias ? n.share * n.D_pad : 0;
  int64_t sums_size = table_size + content_size + (grads.position_bias ? n.share * n.band.E_pad : 0);
  int64_t key_size =
      partition.parts > 1 && any_key ? key_blocks * BLOCK * n.D_pad : 0;  // 0: a task's own sums are whole
  std::unique_ptr<float[]> partial_keys{new float[partition.tasks * 2 * key_size]};
  std::unique_ptr<float[]> partial_sums{new float[partition.tasks * sums_size]};

  void pack(int64_t b, int64_t block, int g, RelativeWorkspace<Elem>& w) const {
    const int64_t k = block - w.visible.first_block;
    if (w.ready[k])
      return;
    w.ready[k] = 1;
    const int kc = kc_of<Elem>(n.D);
    Elem *const key = w.key + k * kc * BLOCK, *const key_b = w.key_b + k * n.D_pad * kc_of<Elem>(BLOCK),
                *none = nullptr;
    pack_keys<T>(c.value, n, w.visible, b, block, g, w.rows, w.value + k * kc * BLOCK, none, c.key, block);
    pack_keys<T>(c.key, n, w.visible, b, block, g, w.rows, key, key_b, c.value, block + 1);
  }

  // Probabilities of the scores, in w.weights; with dropout also the factor of each, in w.keep.
  template <bool MASKED>
  void probabilities(int64_t b, int64_t i, int rows, int64_t block, int blocks, int head,
                     RelativeWorkspace<Elem>& w) const {
    const int columns = blocks * BLOCK;
    for (int r = 0; r < rows; ++r) {
      const float* s = w.strip + n.start + r * n.row;
      float* p = w.weights + r * BLOCK * GROUP;
      Visibility::Row row{};
      if (MASKED)
        row = w.visible.row(i + r);
      for (int x = 0; x < columns; x += LANES) {
        const Vec excess = fma(load(s + x), broadcast(scale2), broadcast(-w.lse[r]));
        const Vec e = exp2(excess, HIGHEST_EXCESS) * broadcast(w.inverse[r]);
        store(p + x, MASKED ? row.hide(e, x, zero()) : e);
      }
      if (dropout)
        dropout.factors_of_row(block * BLOCK, i + r, head, b, columns, w.keep + r * BLOCK * GROUP);
    }
  }

  // Calls to(row, column, Vec) with dP = dO V^T of a tile.
  template <class To>
  void multiply_values(int rows, int64_t block, int blocks, const RelativeWorkspace<Elem>& w, To to) const {
    const int kc = kc_of<Elem>(n.D), lda = row_width<Elem>(n.D);
    for (int k = 0; k < blocks; ++k) {
      const Elem* values = w.value + (block + k - w.visible.first_block) * kc * BLOCK;
      gemm<true>(rows, BLOCK / LANES, kc, w.dout, lda, values, BLOCK,
                 [=](int r, int x, Vec dp) { to(r, x + k * BLOCK, dp); });
    }
  }

  // Gradients of the scores, p * (dP - mean of dP + d lse), which replace the scores; then applies dropout to the
  // weights for the values' gradient. If a row sees no other tile, the mean is computed from this one: where one or two
  // keys dominate, dP and its mean nearly cancel, and `delta`, from the rounded output, has another rounding error.
  void score_gradients(int64_t i, int rows, int64_t block, int blocks, RelativeWorkspace<Elem>& w) const {
    constexpr int LD = BLOCK * GROUP;
    float* strip = w.strip + n.start;
    const int ld = n.row;
    multiply_values(rows, block, blocks, w, [=](int r, int x, Vec dp) { store(strip + r * ld + x, dp); });
    const int columns = blocks * BLOCK;
    for (int r = 0; r < rows; ++r) {
      float *s = w.strip + n.start + r * n.row, *p = w.weights + r * LD;
      const float* keep = w.keep + r * LD;
      if (w.lse[r] == INFINITY) {
        clear(p, columns);
        clear(s, columns);
        continue;
      }
      for (int x = 0; dropout && x < columns; x += LANES)
        store(s + x, load(s + x) * load(keep + x));
      Vec at_max = broadcast(w.at_max[r]), rest = broadcast(w.delta[r]);
      if (w.visible.only(i + r, block, block + blocks)) {
        const WeightedMean mean(s, p, columns);
        at_max = mean.at_max;
        rest = mean.rest;
      }
      rest = rest - broadcast(w.dlse[r]);
      for (int x = 0; x < columns; x += LANES) {
        store(s + x, load(p + x) * (load(s + x) - at_max - rest));
        if (dropout)
          store(p + x, load(p + x) * load(keep + x));
      }
    }
  }

  // to[m][D_pad] += A B for B = [k][D_pad]
  template <class A> void add(int m, int k, const A& a, const Elem* b, float* to) const {
    gemm(m, n.D_pad / LANES, kc_of<Elem>(k), a, PackedB<Elem>{b, n.D_pad}, AddTo{to, n.D_pad});
  }

  // Scores of a tile, before scaling, onto the position logits in the strip.
  void make_scores(int64_t b, int rows, int64_t block, int blocks, int head, RelativeWorkspace<Elem>& w) const {
    const Elem* keys[GROUP];
    for (int k = 0; k < blocks; ++k) {
      pack(b, block + k, head / n.share, w);
      keys[k] = w.key + (block + k - w.visible.first_block) * kc_of<Elem>(n.D) * BLOCK;
    }
    multiply_keys(n, rows, blocks, w.query, keys, w.strip + n.start);
    w.visible.enter(block, blocks);
  }

  // The forward pass of few rows summed scores in another order than tiles do. So maximum, sum and mean of dP are
  // computed again from tiles, in place of `lse` and `delta`: otherwise probabilities would not add up to 1, and the
  // mean would belong to other probabilities.
  void sum_rows(int64_t b, int64_t i, int rows, int head, RelativeWorkspace<Elem>& w) const {
    RunningMean total[FEW_ROWS];
    int64_t at, end;
    w.visible.range(i, rows, at, end);
    for (int blocks; (blocks = w.visible.next(at, end, i, rows)); at += blocks) {
      slide<T>(n, w.chunks, head, i / BLOCK, rows, at, blocks, 0, w.rel_query, w.strip);
      make_scores(b, rows, at, blocks, head, w);
      multiply_values(rows, at, blocks, w, [&](int r, int x, Vec dp) { store(w.weights + r * BLOCK * GROUP + x, dp); });
      for (int r = 0; r < rows; ++r)
        total[r].add(w.strip + n.start + r * n.row, w.weights + r * BLOCK * GROUP, blocks * BLOCK, broadcast(scale2),
                     w.visible.row(i + r));
    }
    for (int r = 0; r < rows; ++r) {
      // at huge logits, the rounding error of the maximum is a factor that a float cannot represent
      if (w.lse[r] == INFINITY || !total[r].finite())
        continue;
      w.lse[r] = total[r].row_max;
      w.inverse[r] = 1.f / total[r].row_sum;
      w.at_max[r] = total[r].at_max;
      w.delta[r] = total[r].rest / total[r].row_sum;
    }
  }

  void tile(int64_t b, int64_t i, int rows, int64_t block, int blocks, int head, RelativeWorkspace<Elem>& w,
            const RelativeSums& sums) const {
    const int64_t first = block - w.visible.first_block;
    float* scores = w.strip + n.start;
    make_scores(b, rows, block, blocks, head, w);
    if (w.visible.all(block, blocks, i, rows))
      probabilities<false>(b, i, rows, block, blocks, head, w);
    else
      probabilities<true>(b, i, rows, block, blocks, head, w);
    score_gradients(i, rows, block, blocks, w);
    constexpr int LD = BLOCK * GROUP;
    const int columns = blocks * BLOCK;
    const int64_t at = first * BLOCK * n.D_pad;
    if (grads.value)
      add(columns, rows, to_column_major(w.weights, LD, rows, columns, w.pairs.weights, LD), w.dout_b, sums.value + at);
    if (grads.key)
      add(columns, rows, to_column_major(scores, n.row, rows, columns, w.pairs.strip, LD), w.query_b, sums.key + at);
    if (any_query)
      add(rows, columns, to_row_major(scores, n.row, rows, columns, w.pairs.strip, kc_of<Elem>(LD)),
          w.key_b + first * n.D_pad * kc_of<Elem>(BLOCK), w.d_query);
  }

  // Adds the first `count` chunks of the strip, which are complete, to the gradients of relative queries and keys.
  void band(int64_t chunk, int count, int rows, int head, RelativeWorkspace<Elem>& w, const RelativeSums& sums) const {
    const int table = n.band.tables() > 1 ? head % n.share : 0;
    for (int k = 0; k < count; ++k) {
      const int64_t m = chunk + k;
      float* d_table = grads.rel_key && n.band.holds(m)
                           ? sums.table + (table * chunks + m - n.band.first) * n.band.E * BLOCK
                           : nullptr;
      band_gradients<T>(n.band, w.chunks, head, m, rows, w.rel_query_b, w.strip + k * BLOCK, n.ld, w.pairs.strip,
                        any_rel_query ? w.d_rel_query : nullptr, d_table);
    }
  }

  void begin(int64_t b, int64_t i, int rows, int head, RelativeWorkspace<Elem>& w) const {
    pack_operands<T>(c, n, b, i, rows, head, w.bias, w.query, w.rel_query);
    clear(w.d_query, BLOCK * n.D_pad);
    clear(w.d_rel_query, BLOCK * n.band.E_pad);
    pack_queries<T>(dout, View(), b, i, rows, head, n.D, w.bias, w.dout);
    pack_queries<T>(out, View(), b, i, rows, head, n.D, w.bias, w.rows);
    const int lda = row_width<Elem>(n.D), rel_lda = row_width<Elem>(n.band.E);
    for (int r = 0; r < rows; r += DELTAS)
      deltas(n.D, r, std::min(DELTAS, rows - r), w);
    for (int r = 0; r < rows; ++r) {
      const float l = *lse.at<const float>(b, head, i + r);
      const bool empty = l == -INFINITY;
      base2(l, w.lse[r], w.inverse[r]);
      w.at_max[r] = 0.f;
      w.dlse[r] = dlse && !empty ? scalar(dlse, b, head, i + r) : 0.f;
      if (!empty)
        continue;
      // no weight; the gradients and query may be NaN
      w.lse[r] = INFINITY;
      w.inverse[r] = 1.f;
      w.delta[r] = 0.f;
      clear(w.dout + r * lda, lda);
      clear(w.query + r * lda, lda);
      clear(w.rel_query + r * rel_lda, rel_lda);
    }
    w.query_b = pack_b(w.query, rows, n.D, w.pairs.query);
    w.dout_b = pack_b(w.dout, rows, n.D, w.pairs.dout);
    if (n.band)
      w.rel_query_b = pack_b(w.rel_query, rows, n.band.E, w.pairs.rel_query);
  }

  void finish(int64_t b, int64_t i, int rows, int head, RelativeWorkspace<Elem>& w, const RelativeSums& sums) const {
    const Vec f = broadcast(scale);
    const int own = head % n.share;
    for (int r = 0; r < rows; ++r)  // a row that sees nothing: its gradient is 0 times keys that may be NaN
      if (w.lse[r] == INFINITY) {
        clear(w.d_query + r * n.D_pad, n.D_pad);
        clear(w.d_rel_query + r * n.band.E_pad, n.band.E_pad);
      }
    if (grads.content_bias)
      add_rows(sums.content + own * n.D_pad, w.d_query, rows, n.D_pad, f);
    if (grads.position_bias)
      add_rows(sums.position + own * n.band.E_pad, w.d_rel_query, rows, n.band.E_pad, f);
    for (int r = 0; r < rows; ++r) {
      float *dq = w.d_query + r * n.D_pad, *dr = w.d_rel_query + r * n.band.E_pad;
      if (grads.rel_query)
        scale_row(dr, scale, n.band.E, grads.rel_query.at<T>(b, i + r, head));
      if (grads.query)
        scale_row(dq, scale, n.D, grads.query.at<T>(b, i + r, head), n.band && !c.rel_query ? dr : nullptr);
    }
  }

  void block(int64_t b, int64_t i, int rows, int head, RelativeWorkspace<Elem>& w, const RelativeSums& sums) const {
    begin(b, i, rows, head, w);
    if (few_rows(c))
      sum_rows(b, i, rows, head, w);
    int64_t at, end, after = -1, a = i / BLOCK;
    int previous = 0;
    w.visible.range(i, rows, at, end);
    for (int blocks; (blocks = w.visible.next(at, end, i, rows)); at += blocks) {
      const bool slides = previous && at == after;
      slide<T>(n, w.chunks, head, a, rows, at, blocks, slides ? previous : 0, w.rel_query, w.strip);
      tile(b, i, rows, at, blocks, head, w, sums);
      previous = blocks;
      after = at + blocks;
      if (!n.band)
        continue;
      int64_t next = after;
      const bool last = !w.visible.next(next, end, i, rows) || next != after;
      for (int r = 0; r < rows; ++r) {  // columns of keys outside the tiles have position logits, not gradients
        float* row = w.strip + r * n.ld;
        if (!slides)
          std::fill(row, row + BLOCK - 1 - r, 0.f);
        if (last)
          std::fill(row + BLOCK - 1 - r + blocks * BLOCK, row + (blocks + 1) * BLOCK, 0.f);
      }
      band(at - a - 1, last ? blocks + 1 : blocks, rows, head, w, sums);
    }
    finish(b, i, rows, head, w, sums);
  }

  void write_keys(int64_t b, int g, int64_t first, int64_t last, const float* const* key, int parts,
                  int64_t stride) const {
    for (int which = 0; which < 2; ++which) {
      const View& to = which ? grads.value : grads.key;
      if (!to)
        continue;
      const Vec f = broadcast(which ? 1.f : scale);
      for (int64_t j = first; j < last; ++j)
        for (int d = 0; d < n.D; d += LANES) {
          Vec s = zero();
          for (int p = 0; p < parts; ++p)
            s = s + load(key[p] + which * stride + (j - first) * n.D_pad + d);
          store(to.at<T>(b, j, g) + d, s * f, n.D - d);
        }
    }
  }

  void task(int64_t t) const {
    const TileScope tiles;
    const Partition::Share mine = partition.share(t);
    const int64_t first_row = mine.first_row, last_row = mine.last_row, slot = mine.slot;
    const int g = mine.head;
    const bool alone = partition.parts == 1 && any_key;
    auto w = in_scratch<RelativeWorkspace<Elem>>(c, n, dropout, first_row, last_row, alone);
    const int64_t blocks = w.visible.last_block - w.visible.first_block, size = blocks * BLOCK * n.D_pad;
    RelativeSums sums;
    sums.key = alone ? w.own : partial_keys.get() + slot * 2 * key_size;
    sums.value = sums.key + (alone ? size : key_size);
    sums.table = partial_sums.get() + slot * sums_size;
    sums.content = sums.table + table_size;
    sums.position = sums.content + content_size;
    clear(sums.table, sums_size);
    if (n.band)
      w.chunks.reset();
    for (int64_t b = mine.first_batch; b < mine.last_batch; ++b) {
      w.visible.load(b);
      clear(w.ready, blocks);
      if (any_key) {
        clear(sums.key, size);
        clear(sums.value, size);
      }
      for (int head = g * n.share; head < (g + 1) * n.share; ++head) {
        if (n.band && n.band.tables() > 1 && n.share > 1)
          w.chunks.reset();
        for (int64_t i = first_row; i < last_row; i += BLOCK)
          block(b, i, static_cast<int>(std::min<int64_t>(BLOCK, last_row - i)), head, w, sums);
      }
      if (!alone)
        continue;
      const int64_t first = std::min(w.visible.first_block * BLOCK, n.S),
                    last = std::min(w.visible.last_block * BLOCK, n.S);
      const float* key = w.own;
      write_keys(b, g, 0, first, nullptr, 0, 0);
      write_keys(b, g, first, last, &key, 1, size);
      write_keys(b, g, last, n.S, nullptr, 0, 0);
    }
  }

  // dK, dV of a key block: adds the parts of the rows in order.
  void sum_parts(int64_t t) const {
    const int64_t at = t % key_blocks, b = t / key_blocks / n.G;
    const int g = static_cast<int>(t / key_blocks % n.G);
    std::vector<const float*> found;
    for (int64_t part = 0; part < partition.parts; ++part) {
      Arena none(nullptr);
      const Visibility seen(c, n, part * partition.part_rows, std::min(n.N, (part + 1) * partition.part_rows), none);
      if (at < seen.first_block || at >= seen.last_block)
        continue;
      found.push_back(partial_keys.get() + partition.slot(b, g, part) * 2 * key_size +
                      (at - seen.first_block) * BLOCK * n.D_pad);
    }
    write_keys(b, g, at * BLOCK, std::min(n.S, (at + 1) * BLOCK), found.data(), static_cast<int>(found.size()),
               key_size);
  }

  void run(int threads) const {
    parallel_for(partition.tasks, threads, [&](int64_t t) { task(t); });
    if (key_size)
      parallel_for(n.B * n.G * key_blocks, threads, [&](int64_t t) { sum_parts(t); });
    const float *tables = partial_sums.get(), *content = tables + table_size, *position = content + content_size;
    write_bias_gradient<float>(partition, n.share, content, sums_size, n.D, grads.content_bias);
    write_bias_gradient<float>(partition, n.share, position, sums_size, n.band.E, grads.position_bias);
    if (grads.rel_key)
      write_table_gradient<float>(partition, n.band, n.share, tables, sums_size, scale, grads.rel_key, threads);
  }
};

}  // namespace

void relative_attention_backward(const RelativeAttention& call, const View& out, const View& lse, const View& dout,
                                 const View& dlse, const RelativeAttentionGrads& grads, int threads) {
  attention_backward<Backward>(call, call.batch_offset, out, lse, dout, dlse, grads, threads);
}

}  // namespace retro::RETRO_ISA
