// Forward: a task is some query blocks of the heads of one key head; it packs keys, values and relative keys when they
// are first needed, and carries the softmax over tiles of keys.
#include <cmath>

#include "relative_attention_tile.h"
#include "row_attention.h"

namespace retro::RETRO_ISA {
namespace {

// queries of a task: packing the keys then costs about 1% of multiplying them; fewer for idle threads
constexpr int TASK_ROWS = 4 * BLOCK;
constexpr int64_t FEW_TASKS = 16;  // below which the heads of a key head are split

template <class E>
struct Workspace {
  Visibility visible;
  BandChunks<E> chunks;
  E *key, *value;  // per key block: [steps(D)][BLOCK], [steps(BLOCK)][wide]
  E *rows, *query, *rel_query, *weights;
  float *strip, *out, *bias, *top, *sum, *alpha, *keep;
  int weight_ld;  // weights [BLOCK][keys], by row
  uint8_t* ready;
  int64_t slots;  // key blocks held packed
  size_t bytes;

  Workspace(const RelativeAttention& c, const AttentionSizes& n, int64_t first_row, int64_t last_row, int heads,
            Carver carver)
      : visible(c, n, first_row, last_row, carver) {
    const int64_t blocks = visible.last_block - visible.first_block;
    const int64_t first = first_row / BLOCK, last = (last_row - 1) / BLOCK;
    chunks = BandChunks<E>(n.band, visible.first_block - last - 1, visible.last_block - first, false, carver);
    slots = heads == 1 && first == last ? std::min<int64_t>(blocks, GROUP) : blocks;  // used once: they needn't be kept
    const int wide = std::max(n.wide, n.band.wide);
    key = carver.take<E>(slots * steps_of<E>(n.D) * BLOCK), value = carver.take<E>(slots * n.wide * steps_of<E>(BLOCK));
    ready = carver.take<uint8_t>(blocks);
    rows = carver.take<E>(BLOCK * row_width<E>(n.D));
    query = carver.take<E>(BLOCK * row_width<E>(n.D)), rel_query = carver.take<E>(BLOCK * row_width<E>(n.band.E));
    strip = carver.take<float>(BLOCK * n.ld);
    if constexpr (PAIRS<E>)
      weight_ld = steps_of<E>(GROUP * BLOCK), weights = carver.take<E>(BLOCK * weight_ld);
    else
      weight_ld = n.row, weights = strip + n.start;  // in place
    out = carver.take<float>(BLOCK * n.wide);
    bias = carver.take<float>(wide);
    top = carver.take<float>(BLOCK), sum = carver.take<float>(BLOCK * LANES), alpha = carver.take<float>(BLOCK);
    keep = carver.take<float>(GROUP * BLOCK);
    bytes = carver.used();
  }
};

template <class T, class E>
struct Forward {
  const RelativeAttention& c;
  const View &out, &lse;
  AttentionSizes n;
  Dropout dropout;
  float scale2 = static_cast<float>(c.scale) * LOG2E;  // scores are in base 2

  Forward(const RelativeAttention& call, const View& o, const View& l, int64_t entry)
      : c(call), out(o), lse(l), n(call), dropout(call.seed, call.dropout_p, entry) {}

  int64_t slot(const Workspace<E>& w, int64_t block) const { return (block - w.visible.first_block) % w.slots; }

  E* keys_of(const Workspace<E>& w, int64_t block) const { return w.key + slot(w, block) * steps_of<E>(n.D) * BLOCK; }
  E* values_of(const Workspace<E>& w, int64_t block) const {
    return w.value + slot(w, block) * n.wide * steps_of<E>(BLOCK);
  }

  void pack(int64_t b, int64_t block, int g, Workspace<E>& w) const {
    const int64_t k = block - w.visible.first_block;
    if (w.ready[k]) return;
    w.ready[k] = 1;
    pack_keys<T>(c.key, n, w.visible, b, block, g, w.rows, c.value, block);
    transpose(w.rows, row_width<E>(n.D), BLOCK, steps_of<E>(n.D), keys_of(w, block), BLOCK);
    E* rows = PAIRS<E> ? w.rows : values_of(w, block);
    pack_keys<T>(c.value, n, w.visible, b, block, g, rows, c.key, block + 1);
    pair_rows(rows, BLOCK, n.D, values_of(w, block));
  }

  // One step of the online softmax; leaves weights where the scores were.
  template <bool MASKED>
  void softmax(int64_t b, int64_t i, int rows, int64_t block, int blocks, int head, Workspace<E>& w) const {
    constexpr int MOST = GROUP * BLOCK / LANES;
    const int vectors = blocks * BLOCK / LANES;
    for (int r = 0; r < rows; ++r) {
      float* s = w.strip + n.start + r * n.row;
      Vec x[MOST], most = broadcast(-INFINITY);
      Visibility::Row row{};
      if (MASKED) row = w.visible.row(i + r);
      for (int v = 0; v < vectors; ++v) {
        x[v] = load(s + v * LANES) * broadcast(scale2);
        if (MASKED) x[v] = row.hide(x[v], v * LANES, broadcast(-INFINITY));
        most = max(most, x[v]);
      }
      const float old = w.top[r], now = std::max(old, max_of(most));
      const float top = now == -INFINITY ? 0.f : now;  // -inf minus -inf would be NaN
      const Vec alpha = exp2(broadcast(old - top));
      w.top[r] = now;
      store(w.alpha + r, alpha, 1);
      if (dropout)
        dropout.factors_of_row(uint32_t(block * BLOCK), uint32_t(i + r), uint32_t(head), uint32_t(b), blocks * BLOCK,
                               w.keep);
      Vec total = load(w.sum + r * LANES) * alpha;
      for (int v = 0; v < vectors; ++v) {
        Vec p = exp2(x[v] - broadcast(top));
        total = total + p;
        if (dropout) p = p * load(w.keep + v * LANES);
        if constexpr (PAIRS<E>)
          store(reinterpret_cast<bf16*>(w.weights + r * w.weight_ld) + v * LANES, p);
        else
          store(s + v * LANES, p);
      }
      store(w.sum + r * LANES, total);
    }
  }

  void tile(int64_t b, int64_t i, int rows, int64_t block, int blocks, int previous, int head, Workspace<E>& w) const {
    slide<T>(n, w.chunks, head, i / BLOCK, rows, block, blocks, previous, w.rel_query, w.strip);
    const E* keys[GROUP];
    for (int k = 0; k < blocks; ++k) {
      pack(b, block + k, head / n.share, w);
      keys[k] = keys_of(w, block + k);
    }
    multiply_keys(n, rows, blocks, w.query, keys, w.strip + n.start);
    w.visible.enter(block, blocks);
    if (w.visible.all(block, blocks, i, rows))
      softmax<false>(b, i, rows, block, blocks, head, w);
    else
      softmax<true>(b, i, rows, block, blocks, head, w);
    for (int k = 0; k < blocks; ++k) {
      const E *weights = w.weights + k * steps_of<E>(BLOCK), *values = values_of(w, block + k);
      gemm<true>(rows, n.wide / LANES, steps_of<E>(BLOCK), weights, w.weight_ld, values, n.wide,
                 [&](int r, int d, Vec x) {
                   float* to = w.out + r * n.wide + d;
                   store(to, k ? load(to) + x : fma(load(to), broadcast(w.alpha[r]), x));
                 });
    }
  }

  void attend(int64_t b, int64_t i, int rows, int head, Workspace<E>& w) const {
    pack_queries<T>(c.query, b, i, rows, head, bias_of<T>(c.content_bias, head, n.D, w.bias), n.D, w.query);
    if (n.band)
      pack_queries<T>(c.rel_query ? c.rel_query : c.query, b, i, rows, head,
                      bias_of<T>(c.position_bias, head, n.band.E, w.bias), n.band.E, w.rel_query);
    std::fill(w.top, w.top + BLOCK, -INFINITY);
    clear(w.sum, BLOCK * LANES), clear(w.out, BLOCK * n.wide);
    int64_t block, end, after = -1;
    int previous = 0;
    w.visible.range(i, rows, block, end);
    for (int blocks; (blocks = w.visible.next(block, end, i, rows));
         block += blocks, previous = blocks, after = block) {
      if (w.slots < w.visible.last_block - w.visible.first_block)
        clear(w.ready + block - w.visible.first_block, blocks);
      tile(b, i, rows, block, blocks, block == after ? previous : 0, head, w);
    }
    for (int r = 0; r < rows; ++r) {
      const float total = sum(load(w.sum + r * LANES)), inverse = total == 0 ? 0.f : 1.f / total;
      if (total == 0) clear(w.out + r * n.wide, n.wide);  // a value that nobody sees may be NaN
      T* to = out.at<T>(b, i + r, head);
      for (int d = 0; d < n.D; d += LANES) store(to + d, load(w.out + r * n.wide + d) * broadcast(inverse), n.D - d);
      *lse.at<float>(b, head, i + r) = total == 0 ? -INFINITY : (w.top[r] + std::log2(total)) * LN2;
    }
  }

  void task(int64_t b, int64_t first_row, int64_t last_row, int first_head, int last_head) const {
    const Workspace<E> sized(c, n, first_row, last_row, last_head - first_head, Carver(nullptr));
    Workspace<E> w(c, n, first_row, last_row, last_head - first_head, Carver(scratch(sized.bytes)));
    w.visible.load(b);
    clear(w.ready, w.visible.last_block - w.visible.first_block);
    if (n.band) w.chunks.reset();
    for (int head = first_head; head < last_head; ++head) {
      if (n.band && n.band.tables() > 1) w.chunks.reset();
      for (int64_t i = first_row; i < last_row; i += BLOCK)
        attend(b, i, static_cast<int>(std::min<int64_t>(BLOCK, last_row - i)), head, w);
    }
  }

  void run(int threads) const {
    const auto parts_of = [&](int64_t rows) { return (n.N + rows - 1) / rows; };
    const int heads = n.B * n.G * parts_of(TASK_ROWS) < FEW_TASKS ? 1 : n.share;
    const int64_t groups = n.H / heads;
    int64_t rows = TASK_ROWS;  // a block of queries has the same bits in any task
    while (rows > BLOCK && n.B * groups * parts_of(rows) < threads) rows /= 2;
    const int64_t parts = parts_of(rows);
    parallel_for(parts * n.B * groups, threads, [&](int64_t t) {
      const int64_t part = parts - 1 - t / (n.B * groups);  // the last rows see most
      const int head = static_cast<int>(t % groups) * heads;
      task(t / groups % n.B, part * rows, std::min(n.N, (part + 1) * rows), head, head + heads);
    });
  }
};

// Few rows: a step of decoding.
template <class T>
struct Rows {
  const RelativeAttention& c;
  const View &out, &lse;
  AttentionSizes n{c};
  float scale2 = static_cast<float>(c.scale) * LOG2E;

  void queries(int64_t b, int64_t i, float* query, float* rel_query) const {
    row_queries<T>(c.query, c.content_bias, b, i, n.H, n.D, scale2, query);
    if (n.band)
      row_queries<T>(c.rel_query ? c.rel_query : c.query, c.position_bias, b, i, n.H, n.band.E, scale2, rel_query);
  }
  int64_t list(int64_t b, int64_t i, int64_t at, int64_t end, RowKeys<T>& keys) const {
    const View &q = c.query_segment, &k = c.key_segment;
    const int64_t segment = q ? integer(q, b * q.stride[0] + i * q.stride[1]) : 0;
    i += position_of(c.batch_offset, b);  // as the position from which the call counts
    const int64_t high = std::min(end, n.high(i));
    for (at = std::max(at, n.low(i)); at < high && !keys.full(); ++at) {
      if (c.key_mask && !*c.key_mask.at<const uint8_t>(b, at)) continue;
      if (q && integer(k, b * k.stride[0] + at * k.stride[1]) != segment) continue;
      keys.add(c.key.at<const T>(b, at), c.value.at<const T>(b, at), n.band.zero - (at - i), 1.f);
    }
    return at < high ? at : end;
  }
  void write(int64_t b, int64_t i, int h, const float* from, float log2_sum) const {
    write_row<T>(out, lse, b, i, h, n.D, from, log2_sum);
  }
  void run(int threads) const {
    attend_rows<T>(RowSizes(n.B, n.N, n.S, n.H, n.G, n.D, n.band.E), *this, c.key, c.value, c.rel_key, threads);
  }
};

}  // namespace

void relative_attention_forward(const RelativeAttention& call, const View& out, const View& lse, int threads) {
  by_storage(call.query.type, [&](auto t, auto e) {
    if (few_rows(call)) return Rows<decltype(t)>{call, out, lse}.run(threads);
    using Forward = Forward<decltype(t), decltype(e)>;
    if (!call.batch_offset) return Forward(call, out, lse, 0).run(threads);
    for (int64_t b = 0; b < call.query.size[0]; ++b) {  // tiles of each entry lie elsewhere
      const RelativeAttention one = entry(call, b);
      const View its_out = out.entry(b), its_lse = lse.entry(b);
      Forward(one, its_out, its_lse, b).run(threads);
    }
  });
}

}  // namespace retro::RETRO_ISA
