// Attention of single query rows, for example in a decode step. The kernel computes all heads of a row together.
//
// Keys are read in place instead of being packed, because packing a key costs more than using it once. A task processes
// one row and one range of its keys. It loads a few keys with all their heads before it moves to the next keys: the
// heads of a key are adjacent in memory, whereas consecutive keys of one head are about a page apart.
//
// The ranges depend only on the sizes, and their results are merged in a fixed order, so the output does not depend on
// the number of threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>

#include "arena.h"
#include "pack.h"
#include "parallel.h"

namespace retro::RETRO_ISA {

// Maximum number of queries per sequence for which keys are not packed. With 4 queries, the faster method depends on
// the sizes; with 8, packing is faster.
constexpr int64_t FEW_ROWS = 2;

template <class Call> bool few_rows(const Call& call) {
  return call.query.size[1] <= FEW_ROWS && !(call.dropout_p > 0);
}

// Forward pass: calls rows(t) for few rows, and otherwise pass(t, e, call, out, lse, b) for the whole batch, or for
// each batch entry b if the entries have their own positions. The type of t is the type of the tensors, and the type of
// e is the type of the operands of products.
template <class Call, class Rows, class Pass> void attention_forward(const Call& call, const View& positions,
                                                                     const View& out, const View& lse, Rows&& rows,
                                                                     Pass&& pass) {
  by_storage(call.query.type, [&](auto t, auto e) {
    if (few_rows(call))
      return rows(t);
    if (!positions)
      return pass(t, e, call, out, lse, 0);
    for (int64_t b = 0; b < call.query.size[0]; ++b)
      pass(t, e, entry(call, b), out.entry(b), lse.entry(b), b);
  });
}

// Backward pass: calls pass(t, e, call, out, lse, dout, dlse, grads, b) for the whole batch, or for each batch entry b
// if the entries have their own positions. For few rows the forward pass computed its scores from float operands, so
// the backward pass does the same. If it rounded the sum of a bf16 query and its bias to bf16, a probability could
// change by one percent.
template <class Call, class Grads, class Pass>
void attention_backward(const Call& call, const View& positions, const View& out, const View& lse, const View& dout,
                        const View& dlse, const Grads& grads, Pass&& pass) {
  const auto each = [&](auto t, auto e) {
    if (!positions)
      return pass(t, e, call, out, lse, dout, dlse, grads, 0);
    for (int64_t b = 0; b < call.query.size[0]; ++b)
      pass(t, e, entry(call, b), out.entry(b), lse.entry(b), dout.entry(b), dlse.entry(b), entry(grads, b), b);
  };
  by_storage(call.query.type, [&](auto t, auto e) { few_rows(call) ? each(t, float{}) : each(t, e); });
}

// Returns the natural log-sum-exp of a row. row_max is the largest score in base 2, and row_sum is the sum of
// 2^(score - row_max). The result is rounded only once, because at a value of 50 one ulp changes a probability by a
// relative 4e-6.
inline float log_sum_exp(float row_max, float row_sum) {
  constexpr double LN2_EXACT = 0.69314718055994531;
  return row_sum == 0 ? -INFINITY : static_cast<float>((row_max + std::log2(double{row_sum})) * LN2_EXACT);
}

// Upper bound of (score - lse2) in a backward pass. Without rounding errors the difference is at most 0. But at huge
// logits the rounding error of lse reaches millions, and the bound keeps the gradients finite.
constexpr float HIGHEST_EXCESS = 1.f;

// Values per row of a backward pass: the log-sum-exp in base 2, the factor of its rounding error, and its gradient. The
// mean of dP is at_max + delta.
struct RowValues {
  float *lse2, *inverse, *dlse, *at_max, *delta;

  RowValues(int rows, Arena& arena) { arena.give(rows, lse2, inverse, dlse, at_max, delta); }
  // Converts a natural log-sum-exp, so that a probability is inverse * 2^(score - lse2). -inf belongs to a row that
  // sees no key, and makes its probabilities 0.
  void start(int row, float lse, float lse_gradient, float mean) const {
    const bool empty = lse == -INFINITY;
    const double exact = lse * 1.4426950408889634, rest = static_cast<float>(exact) - exact;
    lse2[row] = empty ? INFINITY : static_cast<float>(exact);
    inverse[row] = 1.f;
    if (!std::isnan(rest))
      inverse[row] = std::exp2(std::clamp(static_cast<float>(rest), -HIGHEST_EXCESS, HIGHEST_EXCESS));
    dlse[row] = lse_gradient;
    at_max[row] = 0.f;
    delta[row] = mean;
  }
  bool empty(int row) const { return lse2[row] == INFINITY; }
  // Takes the running values of a pass over all keys.
  void set(int row, float row_max, float row_sum, float at, float rest) const {
    lse2[row] = row_max;
    inverse[row] = 1.f / row_sum;
    at_max[row] = at;
    delta[row] = rest / row_sum;
  }
};

struct RowSizes {
  // A range has up to RANGE keys, or down to LEAST_RANGE if a row would otherwise have fewer than FEW ranges. MOST
  // limits the total number of ranges of all rows; ranges become longer where it would be exceeded.
  static constexpr int64_t RANGE = 256, LEAST_RANGE = 64, FEW = 4, MOST = 64;
  int64_t batch, rows;  // rows: number of rows per batch entry
  int H, G, D, E;       // E: width of the relative keys, or 0 without relative keys
  int64_t ranges, range;

  RowSizes(int64_t batch_, int64_t rows_, int64_t keys, int h, int g, int d, int e)
      : batch(batch_), rows(rows_), H(h), G(g), D(d), E(e) {
    const int64_t most = std::max<int64_t>(1, MOST / std::max<int64_t>(1, batch * rows));
    range = std::max(std::clamp(keys / FEW, LEAST_RANGE, RANGE), (keys + most - 1) / most);
    ranges = std::max<int64_t>(1, (keys + range - 1) / range);
  }
  int64_t state() const { return H * (2 + int64_t{pad(D)}); }
  // Number of heads to prefetch ahead. The rows of one head are too short for hardware prefetchers.
  int ahead() const { return std::clamp(512 / D, 1, G); }
};

// List of up to COUNT keys that are visible to a row. The caller fills it. All pointers refer to head 0.
template <class T> struct RowKeys {
  static constexpr int COUNT = 128;
  const View& rel_key;
  int count = 0;
  const T *key[COUNT], *value[COUNT], *relative[COUNT];
  float gate[COUNT], outside[COUNT];  // factor of key and value; 1 if outside the table, where `relative` adds 0

  explicit RowKeys(const View& table) : rel_key(table) {}
  // Adds a key. `row` is the row of rel_key for this key; it may be outside the table.
  void add(const T* k, const T* v, int64_t row, float g) {
    static const T NOTHING[LARGEST_D] = {};
    const bool inside = row >= 0 && row < rel_key.size[1];
    key[count] = k;
    value[count] = v;
    relative[count] = rel_key.size[1] ? rel_key.at<const T>(0, inside ? row : 0) : NOTHING;
    gate[count] = g;
    outside[count++] = inside ? 0.f : 1.f;
  }
  bool full() const { return count == COUNT; }
};

// Working state of one row: its queries [H][pad(width)] with biases added and scaled for base 2, and the running sums
// over one range of keys.
struct RowState {
  float *query, *rel_query, *scores;     // scores [H][COUNT]
  float *row_max{}, *row_sum{}, *out{};  // [H], [H], [H][pad(D)]

  RowState(const RowSizes& n, int count, Arena& arena)
      : query(arena.take<float>(n.H * pad(n.D))), rel_query(arena.take<float>(n.H * pad(n.E))),
        scores(arena.take<float>(n.H * count)) {}
};

// Loads two vectors of a row. For bf16, x holds the even and y the odd elements, because this takes half the operations
// of loading two adjacent vectors. Vectors that are multiplied with such a row must have the same order. The caller
// loads the remainder of a row in order, if it is shorter than two vectors.
template <class T> RETRO_INLINE void load_two(const T* p, Vec& x, Vec& y) {
  if constexpr (std::is_same_v<T, bf16>) {
    const Pairs both = load(reinterpret_cast<const uint32_t*>(p));
    x = even_of(both);
    y = odd_of(both);
  } else {
    x = load(p);
    y = load(p + LANES);
  }
}
template <class T> RETRO_INLINE void store_two(T* p, Vec x, Vec y) {
  if constexpr (std::is_same_v<T, bf16>)
    store(reinterpret_cast<uint32_t*>(p), to_pairs(x, y));
  else {
    store(p, x);
    store(p + LANES, y);
  }
}

// Returns the dot products of `a` with LANES rows of length n. Lane u holds the product with rows[u].
template <class T> RETRO_INLINE Vec dots(const float* a, const T* const* rows, int64_t offset, int n) {
  Vec x[LANES];
  int d = 0;
#pragma GCC unroll 16
  for (int u = 0; u < LANES; ++u)
    x[u] = zero();
  for (; d + 2 * LANES <= n; d += 2 * LANES) {
    const Vec q = load(a + d), r = load(a + d + LANES);
#pragma GCC unroll 16
    for (int u = 0; u < LANES; ++u) {
      Vec k, l;
      load_two(rows[u] + offset + d, k, l);
      x[u] = fma(r, l, fma(q, k, x[u]));
    }
  }
  for (; d < n; d += LANES)
    for (int u = 0; u < LANES; ++u)
      x[u] = fma(load(a + d), load(rows[u] + offset + d, n - d), x[u]);
  return sums(x);
}

// Prefetches head g of COUNT rows. If g is past the last head, it prefetches the first heads of the `next` rows
// instead, or nothing if `next` is null.
template <int COUNT, class T>
RETRO_INLINE void ask_ahead(const RowSizes& n, const T* const* rows, const T* const* next, int64_t head, int g) {
  if (g >= n.G) {
    rows = next;
    g -= n.G;
  }
  if (!rows)
    return;
#pragma GCC unroll 16
  for (int u = 0; u < COUNT; ++u)
    prefetch_row<CLOSE>(rows[u] + g * head, n.D * int64_t{sizeof(T)});
}

// Adds the weighted sum of COUNT values to out[h], for every head h. `next` points to the following COUNT rows, which
// are prefetched; it may be null.
template <int COUNT, class T> RETRO_INLINE void add_values(const RowSizes& n, const T* const* values,
                                                           const T* const* next, int64_t head, const float* weights,
                                                           float* out) {
  const int share = n.H / n.G, ahead = n.ahead();
  for (int h = 0; h < n.H; ++h, weights += RowKeys<T>::COUNT, out += pad(n.D)) {
    const int64_t offset = h / share * head;
    if (h % share == 0)
      ask_ahead<COUNT>(n, values, next, head, h / share + ahead);
    Vec p[COUNT];
#pragma GCC unroll 8
    for (int u = 0; u < COUNT; ++u)
      p[u] = broadcast(weights[u]);
    int d = 0;
    for (; d + 2 * LANES <= n.D; d += 2 * LANES) {
      Vec x = load(out + d), y = load(out + d + LANES);
#pragma GCC unroll 8
      for (int u = 0; u < COUNT; ++u) {
        Vec v, w;
        load_two(values[u] + offset + d, v, w);
        x = fma(p[u], v, x);
        y = fma(p[u], w, y);
      }
      store(out + d, x);
      store(out + d + LANES, y);
    }
    for (; d < n.D; d += LANES) {
      Vec total = load(out + d);
#pragma GCC unroll 8
      for (int u = 0; u < COUNT; ++u)
        total = fma(p[u], load(values[u] + offset + d, n.D - d), total);
      store(out + d, total);
    }
  }
}

// Processes the listed keys for one row: computes the scores, updates the running maximum and sum, and adds the
// weighted values. head_key and head_value are the strides, in elements, from one key head to the next.
template <class T>
void attend_row(const RowSizes& n, RowKeys<T>& keys, int64_t head_key, int64_t head_value, const RowState& w) {
  constexpr int COUNT = RowKeys<T>::COUNT;
  const int share = n.H / n.G, D_pad = pad(n.D), count = pad(keys.count);
  std::fill(keys.key + keys.count, keys.key + count, keys.key[keys.count - 1]);
  std::fill(keys.relative + keys.count, keys.relative + count, keys.relative[keys.count - 1]);
  std::fill(keys.outside + keys.count, keys.outside + count, 1.f);
  std::fill(keys.gate + keys.count, keys.gate + count, 1.f);
  const int ahead = n.ahead();
  for (int x = 0; x < count; x += LANES) {
    const T* const* next = x + LANES < count ? keys.key + x + LANES : nullptr;
    for (int h = 0; h < n.H; ++h) {
      if (h % share == 0)
        ask_ahead<LANES>(n, keys.key + x, next, head_key, h / share + ahead);
      store(w.scores + h * COUNT + x,
            dots(w.query + h * D_pad, keys.key + x, h / share * head_key, n.D) * load(keys.gate + x));
    }
  }
  const View& table = keys.rel_key;
  const int64_t head = table.size[1] && table.size[0] > 1 ? table.stride[0] : 0;
  for (int h = 0; n.E && h < n.H; ++h)
    for (int x = 0; x < count; x += LANES) {
      const int soon = x + LANES < count ? x + LANES : 0, soon_h = soon ? h : h + 1;
      for (int u = 0; soon_h < n.H && u < LANES; ++u)
        prefetch_row<CLOSE>(keys.relative[soon + u] + soon_h * head, n.E * int64_t{sizeof(T)});
      float* s = w.scores + h * COUNT + x;
      const Vec logits = dots(w.rel_query + h * pad(n.E), keys.relative + x, h * head, n.E);
      store(s, load(s) + select(gt(load(keys.outside + x), zero()), zero(), logits));
    }
  for (int h = 0; h < n.H; ++h) {
    float *s = w.scores + h * COUNT, *out = w.out + h * D_pad;
    Vec block_max = broadcast(-INFINITY), total = zero();
    if (const int left = keys.count % LANES) {
      float* last = s + count - LANES;
      store(last, select(first(left), load(last), block_max));
    }
    for (int x = 0; x < count; x += LANES)
      block_max = max(load(s + x), block_max);
    // avoid -inf - -inf, which would be NaN
    const float new_max = std::max(w.row_max[h], max_of(block_max)), row_max = new_max == -INFINITY ? 0.f : new_max;
    const Vec alpha = exp2(broadcast(w.row_max[h] - row_max));
    for (int x = 0; x < count; x += LANES) {
      const Vec p = exp2(load(s + x) - broadcast(row_max));
      total = total + p;
      store(s + x, p * load(keys.gate + x));
    }
    for (int d = 0; d < D_pad; d += LANES)
      store(out + d, load(out + d) * alpha);
    w.row_max[h] = new_max;
    store(w.row_sum + h, fma(load(w.row_sum + h, 1), alpha, broadcast(sum(total))), 1);
  }
  constexpr int MANY = 8;
  int x = 0;
  for (; x + MANY <= keys.count; x += MANY)
    add_values<MANY, T>(n, keys.value + x, x + 2 * MANY <= keys.count ? keys.value + x + MANY : nullptr, head_value,
                        w.scores + x, w.out);
  for (; x < keys.count; ++x)
    add_values<1, T>(n, keys.value + x, nullptr, head_value, w.scores + x, w.out);
}

// Merges the results of all ranges for head h into `out`, and returns the log-sum-exp. The states of consecutive ranges
// are `stride` floats apart.
inline float merge_ranges(const RowSizes& n, int h, const float* state, int64_t stride, float* out) {
  const int D_pad = pad(n.D);
  const auto max_of_range = [&](int64_t r) { return state[r * stride + h]; };
  const auto sum_of_range = [&](int64_t r) { return state[r * stride + n.H + h]; };
  float row_max = -INFINITY, row_sum = 0;
  for (int64_t r = 0; r < n.ranges; ++r)
    row_max = std::max(row_max, max_of_range(r));
  clear(out, D_pad);
  for (int64_t r = 0; r < n.ranges; ++r) {
    if (sum_of_range(r) == 0)
      continue;
    const Vec alpha = exp2(broadcast(max_of_range(r) - row_max));
    const float* from = state + r * stride + 2 * n.H + static_cast<int64_t>(h) * D_pad;
    for (int d = 0; d < D_pad; d += LANES)
      store(out + d, fma(load(from + d), alpha, load(out + d)));
    float one;
    store(&one, alpha, 1);
    row_sum += sum_of_range(r) * one;
  }
  const Vec inverse = broadcast(row_sum == 0 ? 0.f : 1.f / row_sum);
  for (int d = 0; d < D_pad; d += LANES)
    store(out + d, load(out + d) * inverse);
  return log_sum_exp(row_max, row_sum);
}

// Computes to[h] = factor * (from[b][i][h] + bias[h]) for every head h, in the element order of `load_two`. The padding
// beyond `width` is set to zero.
template <class T> void row_queries(const View& from, const View& bias, int64_t b, int64_t i, int heads, int width,
                                    float factor, float* to) {
  const Vec f = broadcast(factor);
  for (int h = 0; h < heads; ++h, to += pad(width)) {
    const T *row = from.at<const T>(b, i, h), *more = bias ? bias.at<const T>(h) : nullptr;
    int d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) {
      Vec x, y, v = zero(), w = zero();
      load_two(row + d, x, y);
      if (more)
        load_two(more + d, v, w);
      store(to + d, (x + v) * f);
      store(to + d + LANES, (y + w) * f);
    }
    for (; d < width; d += LANES) {
      const Vec x = load(row + d, width - d);
      store(to + d, (more ? x + load(more + d, width - d) : x) * f);
    }
  }
}

// Computes attention for every row of the call. The callback list(b, i, at, end, keys) appends the keys in [at, end)
// that are visible to row i of batch entry b until `keys` is full, and returns the index of the next key to consider.
template <class T, class Call, class List>
void attend_rows(const RowSizes& n, const Call& c, const View& out, const View& lse, int threads, List&& list) {
  const int64_t head_key = c.key.stride[c.key.rank - 2], head_value = c.value.stride[c.value.rank - 2];
  const float scale2 = static_cast<float>(c.scale) * LOG2E;
  std::unique_ptr<float[]> states(new float[n.batch * n.rows * n.ranges * n.state()]);
  const auto state = [&](int64_t b, int64_t i, int64_t range) {
    return states.get() + ((b * n.rows + i) * n.ranges + range) * n.state();
  };
  parallel_for(n.batch * n.ranges * n.rows, threads, [&](int64_t task) {
    // consecutive tasks are rows that share the same range of keys
    const int64_t i = task % n.rows, range = task / n.rows % n.ranges, b = task / n.rows / n.ranges;
    auto w = in_scratch<RowState>(n, RowKeys<T>::COUNT);
    w.row_max = state(b, i, range);
    w.row_sum = w.row_max + n.H;
    w.out = w.row_sum + n.H;
    std::fill_n(w.row_max, n.H, -INFINITY);
    clear(w.row_sum, n.state() - n.H);
    row_queries<T>(c.query, c.content_bias, b, i, n.H, n.D, scale2, w.query);
    if (n.E)
      row_queries<T>(c.rel_query ? c.rel_query : c.query, c.position_bias, b, i, n.H, n.E, scale2, w.rel_query);
    RowKeys<T> keys(c.rel_key);
    for (int64_t at = range * n.range, end = at + n.range; at < end;) {
      keys.count = 0;
      at = list(b, i, at, end, keys);
      if (keys.count)
        attend_row(n, keys, head_key, head_value, w);
    }
  });
  parallel_for(n.batch * n.rows, threads, [&](int64_t row) {
    const int64_t b = row / n.rows, i = row % n.rows;
    auto* from = static_cast<float*>(scratch(pad(n.D) * sizeof(float)));
    for (int h = 0; h < n.H; ++h) {
      *lse.at<float>(b, h, i) = merge_ranges(n, h, state(b, i, 0), n.state(), from);
      T* const to = out.at<T>(b, i, h);
      int d = 0;
      for (; d + 2 * LANES <= n.D; d += 2 * LANES)
        store_two(to + d, load(from + d), load(from + d + LANES));
      for (; d < n.D; d += LANES)
        store(to + d, load(from + d), n.D - d);
    }
  });
}

}  // namespace retro::RETRO_ISA
