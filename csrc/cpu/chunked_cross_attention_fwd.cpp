// Forward pass of chunked cross-attention. A task computes the output of one chunk for the query heads of one key head,
// or for some of them. It walks over blocks of keys with an online softmax.
//
// For each block of keys and each unit of queries, the stages `scores`, `softmax` and `values` run in this order,
// between `begin` and `finish` of the unit.
#include <cmath>

#include "chunked_cross_attention_rows.h"
#include "row_attention.h"

namespace retro::RETRO_ISA {
namespace {

// State that a unit carries from one block of keys to the next.
template <class Elem> struct State {
  Elem* query;                     // B with k = d: [kc(D)][QUERY_BLOCK]
  float* z;                        // position logits [R][QUERY_BLOCK]
  float *row_max, *row_sum, *out;  // running maximum and sum [QUERY_BLOCK], running output [rows][pad(D)]

  State(const Sizes& n, Arena& arena) {
    arena.give(kc_of<Elem>(n.D) * QUERY_BLOCK, query);
    arena.give((n.E ? n.R : 1) * QUERY_BLOCK, z);
    arena.give(QUERY_BLOCK, row_max, row_sum);
    arena.give(QUERY_BLOCK * pad(n.D), out);
  }
};

template <class T, class Elem> struct Workspace {
  RelativeCache<Elem> relative;
  Tokens tokens, after;  // visible tokens of this task and of the next one
  BlockRows<T, Elem> keys, values;
  KeyFactors factors;
  Elem *rows, *p;
  float *s, *strip, *bias, *alpha, *dropout;
  States<State<Elem>> states;

  Workspace(const Sizes& n, int units, Arena& arena)
      : relative(n, arena), tokens(n, arena), after(n, arena), keys(n, true, false, arena),
        values(n, false, true, arena), factors(arena), states(n, units, arena) {
    arena.give(QUERY_BLOCK * std::max(row_width<Elem>(n.D), row_width<Elem>(n.E)), rows);
    arena.give(KEY_BLOCK * QUERY_BLOCK, s);
    p = PAIRS<Elem> ? arena.take<Elem>(kc_of<Elem>(KEY_BLOCK) * QUERY_BLOCK)
                    : reinterpret_cast<Elem*>(s);  // floats: in place
    arena.give(n.E ? static_cast<int64_t>(QUERY_BLOCK) * n.band_ld + LANES * n.band_ld : 0, strip);
    arena.give(LARGEST_D, bias);
    arena.give(QUERY_BLOCK, alpha);
    arena.give(2 * QUERY_BLOCK, dropout);
  }
};

// Epilogue that turns products of keys and queries into scores: it multiplies row r by scaled[r] and adds the row's
// position logits. It also updates the maximum of the block.
template <class T> struct ScoreTiles {
  const Ahead<T>& soon;
  int at;  // row 0 of the epilogue is row `at` of the whole product
  const float* scaled;
  const int32_t* z_row;
  const float* z;
  float* to;
  Vec* block_max;

  template <int MR, int NR> RETRO_INLINE void tile(int row, int column, const Vec (&x)[MR][NR]) const {
    soon.ask(at + row, MR, column, NR);
    Vec most[NR];
#pragma GCC unroll 4
    for (int v = 0; v < NR; ++v)
      most[v] = block_max[column / LANES + v];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const Vec factor = broadcast(scaled[row + r]);
      const float* add = z + z_row[row + r] + column;
#pragma GCC unroll 4
      for (int v = 0; v < NR; ++v) {
        const Vec s = fma(x[r][v], factor, load(add + v * LANES));
        store(to + (row + r) * QUERY_BLOCK + column + v * LANES, s);
        most[v] = max(most[v], s);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < NR; ++v)
      block_max[column / LANES + v] = most[v];
  }
};

// Epilogue that multiplies the running output by alpha, and adds the products of weights and values.
template <class Soon> struct ValueTiles {
  const Soon& soon;
  int at;
  const float* alpha;
  float* to;
  int64_t ld;

  template <int MR, int NR> RETRO_INLINE void tile(int row, int column, const Vec (&x)[MR][NR]) const {
    soon.ask(at + row, MR, column, NR);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const Vec factor = broadcast(alpha[row + r]);
      float* out = to + (row + r) * ld + column;
#pragma GCC unroll 4
      for (int v = 0; v < NR; ++v)
        store(out + v * LANES, fma(load(out + v * LANES), factor, x[r][v]));
    }
  }
};

// Values that the stages of a pass share.
template <class T, class Elem> struct Context {
  const CrossAttention& call;
  const View &out, &lse;
  int64_t first_batch;
  Sizes n{call};
  Dropout dropout{call.seed, call.dropout_p, first_batch};
  uint64_t id = next_call();
  float scale2 = static_cast<float>(call.scale) * LOG2E;  // scores are in base 2
};

// Starts a unit: packs its queries, computes its position logits, and clears its running values.
template <class T, class Elem> __attribute__((noinline)) void begin(const Context<T, Elem>& c, int64_t b,
                                                                    const Unit& unit, Workspace<T, Elem>& w,
                                                                    const State<Elem>& st) {
  const InStage stage(PACK);
  const Sizes& n = c.n;
  pack_unit<T>(c.call.query, c.call.content_bias, b, unit, n.D, w.bias, w.rows);
  transpose(w.rows, row_width<Elem>(n.D), unit.rows, kc_of<Elem>(n.D), st.query, QUERY_BLOCK);
  std::fill(st.row_max, st.row_max + QUERY_BLOCK, -INFINITY);
  clear(st.row_sum, QUERY_BLOCK);
  clear(st.out, QUERY_BLOCK * pad(n.D));
  if (!n.E)
    return clear(st.z, QUERY_BLOCK);
  pack_unit<T>(c.call.rel_query ? c.call.rel_query : c.call.query, c.call.position_bias, b, unit, n.E, w.bias, w.rows);
  position_logits(n, unit, w.relative.template get<T>(c.call, n, c.id, unit.head), w.rows, c.scale2, w.strip, st.z);
}

// Computes the scores of a block of keys and a unit in w.s, and their maximum over the keys. Prefetches `asked`.
template <class T, class Elem>
__attribute__((noinline)) void scores(const Context<T, Elem>& c, int count, const Ahead<T>& asked, const Unit& unit,
                                      const Workspace<T, Elem>& w, const State<Elem>& st, Vec* block_max) {
  const InStage stage(SCORES);
  const Sizes& n = c.n;
  const auto keys = w.keys.a();
  const Ahead<T> soon = asked.beside(count, unit.lanes() / LANES);
  const int step = slice<Elem>(SLICE, count);
  for (int k = 0; k < count; k += step)
    gemm(std::min(step, count - k), unit.lanes() / LANES, kc_of<Elem>(n.D), keys.from(k),
         PackedB<Elem>{st.query, QUERY_BLOCK},
         ScoreTiles<T>{soon, k, w.factors.scaled + k, w.factors.z_row + k, st.z, w.s + k * QUERY_BLOCK, block_max});
}

// One step of the online softmax, for the keys [at, at + count) of the tokens. Reads the scores, updates the running
// maximum and sum, and writes the weights to w.p and the factor of the running output to w.alpha.
template <class T, class Elem> __attribute__((noinline)) void softmax(const Context<T, Elem>& c, int at, int count,
                                                                      const Unit& unit, const Workspace<T, Elem>& w,
                                                                      const State<Elem>& st, const Vec* block_max) {
  const InStage stage(SOFTMAX);
  constexpr int VECTORS = QUERY_BLOCK / LANES;
  Vec row_max[VECTORS], row_sum[VECTORS];
  const int vectors = unit.lanes() / LANES;
  for (int v = 0; v < vectors; ++v) {
    const Vec old_max = load(st.row_max + v * LANES), new_max = max(old_max, block_max[v]);
    row_max[v] = select(gt(new_max, broadcast(-INFINITY)), new_max, zero());  // avoid -inf - -inf
    const Vec alpha = exp2(old_max - row_max[v]);
    store(st.row_max + v * LANES, new_max);
    store(w.alpha + v * LANES, alpha);
    row_sum[v] = load(st.row_sum + v * LANES) * alpha;
  }
  constexpr int STEP = PAIRS<Elem> ? 2 : 1;  // keys that one element of A holds
  const float *const s = w.s, *const gate = w.factors.gate, *const drop_factors = w.dropout;
  Elem* const to = w.p;
  // Writes the weights of key r, and of key r + 1 if operands are pairs, as operands of the product with the values.
  const auto weights = [=](auto drop, int r, int v, Vec shift, Vec& sum) {
    const auto one = [&](int key) {
      Vec p = exp2(load(s + key * QUERY_BLOCK + v * LANES) - shift);
      sum = sum + p;
      p = p * broadcast(gate[key]);
      if constexpr (drop)
        p = p * load(drop_factors + (key - r) * QUERY_BLOCK + v * LANES);
      return p;
    };
    if constexpr (STEP == 1) {
      store(to + r * QUERY_BLOCK + v * LANES, one(r));
    } else {
      const Vec even = one(r), odd = r + 1 < count ? one(r + 1) : zero();
      store(to + r / 2 * QUERY_BLOCK + v * LANES, to_pairs(even, odd));
    }
  };
  if (c.dropout) {
    for (int r = 0; r < count; r += STEP) {
      for (int k = 0; k < STEP && r + k < count; ++k)
        c.dropout.factors(w.tokens.index(c.n, at + r + k), unit.row, unit.head, w.tokens.b, unit.lanes(),
                          w.dropout + k * QUERY_BLOCK);
      for (int v = 0; v < vectors; ++v)
        weights(std::true_type{}, r, v, row_max[v], row_sum[v]);
    }
  } else {
    for (int v = 0; v < vectors; ++v) {  // the keys of one vector of queries, so that sums stay in registers
      const Vec shift = row_max[v];
      Vec sum = row_sum[v];
      for (int r = 0; r < count; r += STEP)
        weights(std::false_type{}, r, v, shift, sum);
      row_sum[v] = sum;
    }
  }
  for (int v = 0; v < vectors; ++v)
    store(st.row_sum + v * LANES, row_sum[v]);
}

// Adds the products of weights and values to the running output, and prefetches `asked`. `packed` tells whether an
// earlier unit has packed the values. At the last block of keys, `then` is the next unit, of batch entry b, whose
// queries are prefetched together with the rows of the output; otherwise it is null.
template <class T, class Elem> __attribute__((noinline)) void values(const Context<T, Elem>& c, int count,
                                                                     const Ahead<T>& asked, const Unit& unit,
                                                                     const Workspace<T, Elem>& w, const State<Elem>& st,
                                                                     bool packed, const Unit* then, int64_t b) {
  const InStage stage(VALUES);
  const Sizes& n = c.n;
  const int ld = pad(n.D), vectors = ld / LANES, rows = unit.rows;
  Ahead<T> queries;
  Ahead<T, WRITE> outputs;
  if (then) {
    queries = Ahead<T>(c.call.query, b, *then, then->head).beside(rows, vectors);
    outputs = Ahead<T, WRITE>(c.out, w.tokens.b, unit, unit.head).beside(rows, vectors);
  }
  const ThreeAhead<T, WRITE> soon{asked.beside(rows, vectors), queries, outputs};
  const int step = slice<Elem>(SLICE, rows);
  for (int row = 0; row < rows; row += step)
    w.values.as_b(count, packed || row > 0, [&](const auto& values) {
      gemm(std::min(step, rows - row), vectors, kc_of<Elem>(count), ColumnMajor<Elem>{w.p + row, QUERY_BLOCK}, values,
           ValueTiles<ThreeAhead<T, WRITE>>{soon, row, w.alpha + row, st.out + row * ld, ld});
    });
}

// Ends a unit: writes its rows of out and lse.
template <class T, class Elem>
__attribute__((noinline)) void finish(const Context<T, Elem>& c, int64_t b, const Unit& unit, const State<Elem>& st) {
  const InStage stage(STORE);
  const Sizes& n = c.n;
  for (int i = 0; i < unit.rows; ++i) {
    const float row_sum = st.row_sum[i], inverse = row_sum == 0 ? 0.f : 1.f / row_sum;
    scale_row(st.out + i * pad(n.D), inverse, n.D, c.out.template at<T>(b, unit.row + i, unit.head));
    *c.lse.template at<float>(b, unit.head, unit.row + i) = log_sum_exp(st.row_max[i], row_sum);
  }
}

// Query heads of one key head, for one chunk.
struct Heads {
  int64_t b, u;
  int first, last;
};

// Runs a task. `next` is the task that this thread probably runs next; its first rows are prefetched.
template <class T, class Elem> void task(const Context<T, Elem>& c, const Heads& here, const Heads& next) {
  const TileScope tiles;
  const Sizes& n = c.n;
  const int share = n.H / n.G, g = here.first / share;
  thread_local std::vector<Unit> units;
  list_units(c.call, n, here.u, here.first, here.last, units);
  const int count = static_cast<int>(units.size());
  if (!count)
    return;
  // room for the most units that a task may have: the cache of relative keys then has the same address in every task
  const int most = n.blocks * (here.last - here.first);
  auto w = in_scratch<Workspace<T, Elem>>(n, most);
  const bool stays = next.b == here.b && next.u == here.u;
  w.tokens.list(c.call, n, here.b, here.u);
  if (!stays)
    w.after.list(c.call, n, next.b, next.u);
  for (int i = 0; i < count; ++i)
    begin(c, here.b, units[i], w, w.states.of(n, i));
  for (int at = 0; at < w.tokens.count; at += KEY_BLOCK) {
    const bool end = at + KEY_BLOCK >= w.tokens.count;
    const Piece<const T> k(c.call, w.tokens, true, g, at), v(c.call, w.tokens, false, g, at),
        soon = end ? Piece<const T>(c.call, stays ? w.tokens : w.after, true, next.first / share, 0)
                   : Piece<const T>(c.call, w.tokens, true, g, at + KEY_BLOCK);
    w.keys.take(k);
    w.values.take(v);
    w.factors.fill(c.call, n, w.tokens, at, k.count, c.scale2);
    for (int i = 0; i < count; ++i) {
      const State<Elem> st = w.states.of(n, i);
      Vec block_max[QUERY_BLOCK / LANES];
      for (Vec& t : block_max)
        t = broadcast(-INFINITY);
      scores(c, k.count, Ahead<T>(v, n), units[i], w, st, block_max);
      softmax(c, at, k.count, units[i], w, st, block_max);
      Unit then = units[i];
      then.row += (next.u - here.u) * n.M;
      then.head += next.first - here.first;
      values(c, k.count, Ahead<T>(soon, n), units[i], w, st, i > 0, end ? &then : nullptr, next.b);
    }
  }
  for (int i = 0; i < count; ++i)
    finish(c, here.b, units[i], w.states.of(n, i));
}

// Runs the whole pass.
template <class T, class Elem> void forward(const Context<T, Elem>& c, int threads) {
  const Sizes& n = c.n;
  const int64_t chunks = n.last_chunk - n.first_chunk, whole = n.B * chunks * n.G;
  const int share = n.H / n.G;  // query heads per key head; they are split if there are too few tasks for the threads
  int split = 1;
  while (split < share && whole * split < 2 * threads)
    ++split;
  while (share % split)
    ++split;
  const int heads = share / split, parts = n.G * split;
  const int64_t tasks = whole * split;
  // The order of tasks: first as many parts of the heads as the cache of relative keys holds, because neighbouring
  // heads share memory pages. Then the same parts of the next chunks. After all chunks, the next parts.
  const int64_t width = std::clamp(RelativeCache<Elem>::count(n) / heads, 1, parts), full = width * chunks * n.B;
  const auto heads_of = [&](int64_t t) {
    const int64_t first = t / full * width, here = std::min(width, parts - first), item = t % full / here;
    const int head = static_cast<int>(first + t % full % here) * heads;
    return Heads{item / chunks, n.first_chunk + item % chunks, head, head + heads};
  };
  parallel_for(tasks, threads, [&](int64_t t) { task(c, heads_of(t), heads_of(std::min(t + threads, tasks - 1))); });
  each_idle_row(c.call, n, [&](int64_t b, int64_t row, int h) {
    clear(c.out.template at<T>(b, row, h), n.D);
    *c.lse.template at<float>(b, h, row) = -INFINITY;
  });
}

// Forward pass of few rows: a decode step.
template <class T> void forward_rows(const CrossAttention& c, const View& out, const View& lse, int threads) {
  const Sizes n(c);
  const int64_t tokens = int64_t{n.K} * n.R;
  const auto list = [&](int64_t b, int64_t i, int64_t at, int64_t end, RowKeys<T>& keys) {
    const int64_t next = c.query_start + position_of(c.batch_start, b) + i + 1, u = next / n.M - 1;
    if (u < 0 || u >= n.L)
      return end;
    const int64_t high = std::min(end, tokens);
    const View& mask = c.neighbour_mask;
    for (; at < high && !keys.full(); ++at) {
      const int64_t a = at / n.R, j = at % n.R;
      if (mask && !*(mask.rank == 3 ? mask.at<const uint8_t>(b, u, a) : mask.at<const uint8_t>(b, u, a, j)))
        continue;
      keys.add(c.key.at<const T>(b, u, a, j), c.value.at<const T>(b, u, a, j), next % n.M - j - c.rel_start,
               gate_of(c, b, u, static_cast<int>(a)));
    }
    return at < high ? at : end;
  };
  attend_rows<T>(RowSizes(n.B, n.N, tokens, n.H, n.G, n.D, n.E), c, out, lse, threads, list);
}
}  // namespace

void chunked_cross_attention_forward(const CrossAttention& call, const View& out, const View& lse, int threads) {
  const auto rows = [&](auto t) { forward_rows<decltype(t)>(call, out, lse, threads); };
  attention_forward(call, call.batch_start, out, lse, rows, [&](auto t, auto e, const auto&... given) {
    forward(Context<decltype(t), decltype(e)>{given...}, threads);
  });
}

}  // namespace retro::RETRO_ISA
