// Backward pass of chunked cross-attention, from the saved log-sum-exp:
//
//   P = exp(S - lse)    dS = P * (dO V^T - delta), delta = rowsum(dO * O) - dlse
//   dV = P^T dO         dK = dS^T Q         dQ = dS K        and the same for the band of position logits
//
// A task walks over a fixed list of chunks of one key head (a slot), in order. For each chunk it goes over blocks of
// keys and, for each block, over the units of queries that attend the chunk. So it completes dK and dV of one chunk
// after another. The gradients that chunks share (relative keys, biases) are summed per slot, and then over slots in a
// fixed order. The slots depend only on the sizes, so the bits do not depend on the number of threads.
//
// The stages follow in the order in which they run. `chunk` calls them for a chunk and a key head.
#include <cmath>
#include <vector>

#include "chunked_cross_attention_rows.h"
#include "row_attention.h"

namespace retro::RETRO_ISA {
namespace {

void add_rows(const float* rows, int count, int width, float* to) {
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
template <class Elem> struct State : RowValues {
  Elem *query, *query_a, *query_b;  // transposed, as row-major A, as B with k = row
  Elem *grad, *grad_a, *grad_b;     // dout in the same layouts
  float *z, *dz;                    // position logits and their gradients, [R][QUERY_BLOCK]
  float* dquery;                    // [QUERY_BLOCK][pad(D)]

  State(const Sizes& n, Arena& arena) : RowValues(QUERY_BLOCK, arena) {
    const int width = row_width<Elem>(n.D);
    arena.give(kc_of<Elem>(n.D) * QUERY_BLOCK, query, grad);
    arena.give(QUERY_BLOCK * width, query_a, grad_a);
    query_b = PAIRS<Elem> ? arena.take<Elem>(QUERY_BLOCK * width) : query_a;
    grad_b = PAIRS<Elem> ? arena.take<Elem>(QUERY_BLOCK * width) : grad_a;
    arena.give((n.E ? n.R : 1) * QUERY_BLOCK, z, dz);
    arena.give(QUERY_BLOCK * pad(n.D), dquery);
  }
};

template <class T, class Elem> struct Workspace {
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
  States<State<Elem>> states;

  // units: maximum number of units per chunk and key head.
  Workspace(const Sizes& n, int units, bool gate, bool dropout, Arena& arena)
      : relative(n, arena), tokens{{n, arena}, {n, arena}}, keys(n, true, true, arena), values(n, true, false, arena),
        factors(arena), states(n, units, arena) {
    constexpr int block = KEY_BLOCK * QUERY_BLOCK;
    // memory of pairs; floats are used in place
    const auto pairs = [&](int64_t count, float* floats) {
      return PAIRS<Elem> ? arena.take<Elem>(count) : reinterpret_cast<Elem*>(floats);
    };
    arena.give(KEY_BLOCK, key_grads, value_grads);
    arena.give(block, p, ds);
    arena.give(gate ? block : 0, x);
    arena.give(dropout ? block : 0, keep);
    p_a = pairs(block / 2, p);
    ds_a = pairs(block / 2, ds);
    ds_t = pairs(block / 2, ds);
    arena.give(KEY_BLOCK * pad(n.D), dk, dv);
    const int64_t band = n.E ? static_cast<int64_t>(QUERY_BLOCK) * n.band_ld : 0;
    arena.give(band + LANES * n.band_ld, strip);
    arena.give(QUERY_BLOCK * row_width<Elem>(n.E), rel_a);
    rel_b = pairs(QUERY_BLOCK * row_width<Elem>(n.E), nullptr);
    band_a = pairs(band / 2, strip);
    band_t = pairs(band / 2, strip);
    arena.give(LARGEST_D, bias);
    arena.give(KEY_BLOCK * LANES, dgate);
    arena.give(QUERY_BLOCK * pad(n.E), drel_query);
  }
};

constexpr int TASKS = 128;  // minimum number of tasks, so that threads end at about the same time
// Maximum size, in bytes, of all partial sums together, unless a single slot takes more.
constexpr int64_t SLOT_BYTES = int64_t{16} << 20;

// Sums over chunks, per slot and head.
struct Partials {
  int64_t rel, content, position, each;  // number of floats: relative keys, biases, all of one slot and head
  int64_t slots;
  std::vector<float> sums;

  Partials(const Sizes& n, const CrossAttentionGrads& want)
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
template <class T, class Elem> struct Context {
  const CrossAttention& call;
  const View &out, &lse, &dout, &dlse;
  const CrossAttentionGrads& want;
  int64_t first_batch;
  Sizes n{call};
  Dropout dropout{call.seed, call.dropout_p, first_batch};
  uint64_t id = next_call();
  float scale = static_cast<float>(call.scale), scale2 = scale * LOG2E;
  bool want_rel_query = n.E && (want.position_bias || want.rel_query || (want.query && !call.rel_query));
  Partials partials{n, want};
  // [B*L, G, K]; double, because the terms of the tokens nearly cancel
  std::vector<double> gate_sums = std::vector<double>(want.neighbour_gate ? n.B * n.L * n.G * n.K : 0);
};

// Clears dK and dV of the tokens that no query sees: all tokens but the first `count` of the list.
template <class T, class Elem> void clear_hidden(const Context<T, Elem>& c, const Tokens& tokens, int g, int count) {
  const Sizes& n = c.n;
  for (int at = 0, token = 0; token < n.K * n.R; ++token) {
    if (at < count && tokens.index(n, at) == token) {
      ++at;
      continue;
    }
    for (const View* grad : {&c.want.key, &c.want.value})
      if (*grad)
        clear(grad->at<T>(tokens.b, tokens.u, token / n.R, token % n.R, g), n.D);
  }
}

// Starts a unit. Reads its rows of query, relative query, dout, out, lse and dlse. Writes its state: the operands of
// products, the values per row, the position logits, and zeros for the sums over blocks of keys.
template <class T, class Elem>
void begin(const Context<T, Elem>& c, int64_t b, const Unit& unit, Workspace<T, Elem>& w, const State<Elem>& st) {
  const InStage stage(PACK);
  const Sizes& n = c.n;
  const int width = row_width<Elem>(n.D);
  pack_unit<T>(c.call.query, c.call.content_bias, b, unit, n.D, w.bias, st.query_a);
  pack_unit<T>(c.dout, View(), b, unit, n.D, w.bias, st.grad_a);
  transpose(st.query_a, width, unit.rows, kc_of<Elem>(n.D), st.query, QUERY_BLOCK);
  transpose(st.grad_a, width, unit.rows, kc_of<Elem>(n.D), st.grad, QUERY_BLOCK);
  pack_b(st.query_a, unit.rows, n.D, st.query_b);
  pack_b(st.grad_a, unit.rows, n.D, st.grad_b);
  clear(st.dquery, QUERY_BLOCK * pad(n.D));
  clear(st.dz, (n.E ? n.R : 1) * QUERY_BLOCK);
  for (int i = 0; i < QUERY_BLOCK; ++i) {
    const int64_t row = unit.row + i;
    const float l = i < unit.rows ? *c.lse.template at<float>(b, unit.head, row) : -INFINITY;
    const bool empty = l == -INFINITY;  // true also for lanes beyond the last row
    const float dlse = empty || !c.dlse ? 0.f : *c.dlse.template at<float>(b, unit.head, row);
    const auto *const out = c.out.template at<const T>(b, row, unit.head),
                      *dout = c.dout.template at<const T>(b, row, unit.head);
    st.start(i, l, dlse, empty ? 0.f : row_product(out, dout, n.D));
  }
  if (!n.E)
    return clear(st.z, QUERY_BLOCK);
  pack_unit<T>(c.call.rel_query ? c.call.rel_query : c.call.query, c.call.position_bias, b, unit, n.E, w.bias, w.rel_a);
  const RelativeKeys<Elem>& rel = w.relative.template get<T>(c.call, n, c.id, unit.head);
  position_logits(n, unit, rel, w.rel_a, c.scale2, w.strip, st.z);
}

// Multiplies `rows`, the keys or values of a block, by `columns`, the transposed queries or gradients of a unit. Passes
// the products to the epilogue, and meanwhile prefetches `ahead`.
template <class T, class Elem, class Rows, class Epilogue>
void multiply(const Context<T, Elem>& c, int count, const Ahead<T>& ahead, const Unit& unit, const Rows& rows,
              const Elem* columns, Epilogue epilogue) {
  const int vectors = unit.lanes() / LANES, step = slice<Elem>(SLICE, count);
  const Ahead<T> soon = ahead.beside(count, vectors);
  for (int k = 0; k < count; k += step)
    gemm(std::min(step, count - k), vectors, kc_of<Elem>(c.n.D), rows.from(k), PackedB<Elem>{columns, QUERY_BLOCK},
         AskingTiles<Ahead<T>, Epilogue>{soon, k, epilogue});
}

// Computes the scores of a block of keys and a unit. Calls to(at, score in base 2, (q + u)·k) per vector of queries,
// where `at` is the vector's place in an array [KEY_BLOCK][QUERY_BLOCK].
template <class T, class Elem, class To> void scores(const Context<T, Elem>& c, int count, const Ahead<T>& ahead,
                                                     const Unit& unit, const Workspace<T, Elem>& w,
                                                     const State<Elem>& st, To to) {
  const InStage stage(SCORES);
  // local pointers, because the compiler must assume that a store of scores changes the pointers in the workspace
  const float *const scaled = w.factors.scaled, *const z = st.z;
  const int32_t* const z_row = w.factors.z_row;
  multiply(c, count, ahead, unit, w.keys.a(), st.query, [=](int r, int i, Vec x) {
    const Vec s = fma(x, broadcast(scaled[r]), load(z + z_row[r] + i));
    to(r * QUERY_BLOCK + i, s, x);
  });
}

// Computes `lse2` and `delta` again, in calls of few rows. The forward pass of such a call adds the terms of a score in
// another order than `scores`, so the two are rounded differently. The probabilities of this pass would not add up to 1
// with the log-sum-exp of the forward pass. This stage therefore reads all blocks of keys once, and takes the maximum,
// the sum and the mean of dP from `scores`.
template <class T, class Elem> void sum_rows(const Context<T, Elem>& c, const Tokens& tokens, int g, const Unit& unit,
                                             const Workspace<T, Elem>& w, const State<Elem>& st) {
  RunningMeans total;
  for (int first = 0; first < tokens.count; first += KEY_BLOCK) {
    const Piece<const T> keys(c.call, tokens, true, g, first);
    w.keys.take(keys);
    w.values.take(Piece<const T>(c.call, tokens, false, g, first));
    w.factors.fill(c.call, c.n, tokens, first, keys.count, c.scale2);
    scores(c, keys.count, {}, unit, w, st, [&](int at, Vec s, Vec) { store(w.p + at, s); });
    multiply(c, keys.count, {}, unit, w.values.a(), st.grad, [&](int r, int i, Vec y) {
      store(w.ds + r * QUERY_BLOCK + i, rounded(y * broadcast(w.factors.gate[r])));
    });
    total.add(w.p, w.ds, keys.count);
  }
  float row_max[LANES], row_sum[LANES], at_max[LANES], rest[LANES];
  store(row_max, total.row_max);
  store(row_sum, total.row_sum);
  store(at_max, total.at_max);
  store(rest, total.rest);
  for (int i = 0; i < unit.rows; ++i) {
    if (!st.empty(i) && std::isfinite(row_max[i]))
      st.set(i, row_max[i], row_sum[i], at_max[i], rest[i]);
  }
}

// Writes the probabilities of a block of keys to w.p and, for the gate's gradient, (q + u)·k to w.x.
template <class T, class Elem> void probabilities(const Context<T, Elem>& c, int count, const Ahead<T>& ahead,
                                                  const Unit& unit, const Workspace<T, Elem>& w,
                                                  const State<Elem>& st) {
  const bool gate = static_cast<bool>(c.want.neighbour_gate);
  float *const p = w.p, *const products = w.x;
  const float *const lse2 = st.lse2, *const inverse = st.inverse;
  scores(c, count, ahead, unit, w, st, [=](int at, Vec s, Vec x) {
    const int i = at % QUERY_BLOCK;
    store(p + at, exp2(min(broadcast(HIGHEST_EXCESS), s - load(lse2 + i))) * load(inverse + i));
    if (gate)
      store(products + at, x);
  });
}

// Replaces the probabilities in w.p by the factors of dO in dV, and writes the factors of Q in dK to w.ds; both include
// the gate. Adds dS over the neighbours to st.dz, and the gate's gradients to w.dgate.
//
// dS = P * (dP - mean of dP + dlse). If the block has `all` keys of the chunk, the mean is computed from the block:
// where one or two keys dominate, dP and its mean nearly cancel, and `delta` has the rounding error of the output.
template <class T, class Elem> void score_grads(const Context<T, Elem>& c, int count, const Ahead<T>& ahead,
                                                const Unit& unit, const Workspace<T, Elem>& w, const State<Elem>& st,
                                                bool all) {
  const InStage stage(SOFTMAX);
  const bool gate = static_cast<bool>(c.want.neighbour_gate), drop = static_cast<bool>(c.dropout);
  const bool relative = c.n.E > 0;
  float *const ps = w.p, *const dss = w.ds, *const keeps = w.keep, *const dz = st.dz;
  const float* const gates = w.factors.gate;
  const int32_t* const z_row = w.factors.z_row;
  {
    const InStage product(VALUES);
    multiply(c, count, ahead, unit, w.values.a(), st.grad,
             [=](int r, int i, Vec y) { store(dss + r * QUERY_BLOCK + i, y); });
  }
  const Vec s = broadcast(c.scale);
  for (int i = 0; i < unit.lanes(); i += LANES) {
    const auto dp_of = [=](int at, Vec g) {
      return rounded(drop ? load(dss + at) * g * load(keeps + at) : load(dss + at) * g);
    };
    Vec at_max = load(st.at_max + i), rest = load(st.delta + i);
    if (all) {
      at_max = zero();
      Vec p_max = zero(), total = zero(), weight = zero();
      for (int r = 0; r < count; ++r) {
        const int at = r * QUERY_BLOCK + i;
        const Vec p = load(ps + at);
        const Mask greater = gt(p, p_max);
        at_max = select(greater, dp_of(at, broadcast(gates[r])), at_max);
        p_max = select(greater, p, p_max);
      }
      for (int r = 0; r < count; ++r) {
        const int at = r * QUERY_BLOCK + i;
        const Vec p = load(ps + at);
        total = fma(p, dp_of(at, broadcast(gates[r])) - at_max, total);
        weight = weight + p;
      }
      rest = select(gt(weight, zero()), total / weight, total);
    }
    rest = rest - load(st.dlse + i);
    for (int r = 0; r < count; ++r) {
      const int at = r * QUERY_BLOCK + i;
      const Vec g = broadcast(gates[r]), p = load(ps + at), y = load(dss + at), kept = drop ? p * load(keeps + at) : p;
      const Vec ds = p * (dp_of(at, g) - at_max - rest);
      if (relative) {
        float* z = dz + z_row[r] + i;
        store(z, load(z) + ds);
      }
      if (gate) {
        float* sums = w.dgate + r * LANES;
        store(sums, load(sums) + fma(kept, y, ds * s * load(w.x + at)));
      }
      store(ps + at, kept * g);
      store(dss + at, ds * g);
    }
  }
}

// Reads w.p and w.ds. Adds the gradients of values and keys of a block to the sums of earlier units, or writes them if
// this is the last of `units` (unit number `at`). Adds dQ to st.dquery, and meanwhile prefetches the rows of `next` in
// the tensors that `begin` reads.
template <class T, class Elem> void operand_grads(const Context<T, Elem>& c, int count, const Unit& unit, int at,
                                                  int units, const Workspace<T, Elem>& w, const State<Elem>& st,
                                                  int64_t next_b, const Unit& next) {
  const InStage stage(GRADIENTS);
  const int ld = pad(c.n.D), vectors = ld / LANES, lda = kc_of<Elem>(QUERY_BLOCK), kc = kc_of<Elem>(unit.rows);
  // pairs for the three products; floats need no packing
  to_row_major(w.p, QUERY_BLOCK, count, unit.lanes(), w.p_a, lda);
  to_row_major(w.ds, QUERY_BLOCK, count, unit.lanes(), w.ds_a, lda);
  to_column_major(w.ds, QUERY_BLOCK, count, unit.lanes(), w.ds_t, QUERY_BLOCK);
  for (int r = 0; PAIRS<Elem> && unit.rows % 2 && r < count; ++r)  // lanes beyond the last row may be NaN
    for (Elem* pairs : {w.p_a, w.ds_a})
      reinterpret_cast<bf16*>(pairs + r * lda)[unit.rows] = bf16{};
  const auto grads = [&](float* sums, T* const* rows, Vec factor) {
    return GradTiles<T>{sums, rows, factor, ld, c.n.D, at > 0, at + 1 == units};
  };
  if (c.want.value)
    gemm<true>(count, vectors, kc, w.p_a, lda, st.grad_b, ld, grads(w.dv, w.value_grads, broadcast(1.f)));
  if (c.want.key)
    gemm<true>(count, vectors, kc, w.ds_a, lda, st.query_b, ld, grads(w.dk, w.key_grads, broadcast(c.scale)));
  if (!c.want.query && !c.want.content_bias)
    return;
  const auto ahead = [&](const View& of) { return Ahead<T>(of, next_b, next, next.head).beside(unit.rows, vectors); };
  const ThreeAhead<T, READ> soon{ahead(c.call.query), ahead(c.dout), ahead(c.out)};
  const AddTo add{st.dquery, ld};
  w.keys.as_b(count, at > 0, [&](const auto& keys) {
    gemm(unit.rows, vectors, kc_of<Elem>(count), ColumnMajor<Elem>{w.ds_t, QUERY_BLOCK}, keys,
         AskingTiles<ThreeAhead<T, READ>, AddTo>{soon, 0, add});
  });
}

// Reads st.dz. Writes the gradient of the relative queries to w.drel_query, and adds the gradient of the relative keys
// to `slot`.
//
// The gradient of the band at row i and column t is the sum of dS over the pairs with column t's displacement i - j. A
// transpose of dz restores the skew. The two products go over a slice of rows at a time, and over the nonzero part of
// the band only: row i has the columns [last - i, last - i + R).
template <class T, class Elem> void band_grads(const Context<T, Elem>& c, int64_t b, const Unit& unit,
                                               const Workspace<T, Elem>& w, const State<Elem>& st,
                                               const RelativeKeys<Elem>& rel, float* slot) {
  const InStage stage(BAND);
  const Sizes& n = c.n;
  const int ld = n.band_ld, E_pad = pad(n.E), last = n.max_displacement - unit.index, lda = kc_of<Elem>(ld);
  constexpr int STEP = PAIRS<Elem> ? 2 : 1;
  clear(w.strip, static_cast<int64_t>(unit.rows) * ld);
  transpose(st.dz, QUERY_BLOCK, n.R, unit.rows, w.strip + last, ld - 1);
  to_row_major(w.strip, ld, unit.rows, ld, w.band_a, lda);
  to_column_major(w.strip, ld, unit.rows, ld, w.band_t, ld);
  const int slice_rows = slice<Elem>(BAND_SLICE, TILE);
  for (int i = 0; c.want_rel_query && i < unit.rows; i += slice_rows) {
    const int rows = std::min(slice_rows, unit.rows - i);
    const int begin = (last - i - rows + 1) / STEP, end = kc_of<Elem>(last - i + n.R);
    gemm<true>(rows, E_pad / LANES, end - begin, w.band_a + i * lda + begin, lda, rel.rows_b + begin * E_pad, E_pad,
               [&](int r, int e, Vec x) { store(w.drel_query + (i + r) * E_pad + e, x); });
  }
  if (!c.want.rel_key)
    return;
  pack_unit<T>(c.call.rel_query ? c.call.rel_query : c.call.query, c.call.position_bias, b, unit, n.E, w.bias, w.rel_a);
  const Elem* rel_b = pack_b(w.rel_a, unit.rows, n.E, w.rel_b);
  for (int t = 0; t < n.band; t += slice_rows) {
    const int columns = std::min(slice_rows, n.band - t), begin = std::max(last - t - columns + 1, 0) / STEP;
    const int end = kc_of<Elem>(std::clamp(last - t + n.R, 0, unit.rows));
    if (begin >= end)
      continue;
    gemm<false>(columns, E_pad / LANES, end - begin, w.band_t + begin * ld + t, ld, rel_b + begin * E_pad, E_pad,
                AddTo{slot + t * E_pad, E_pad});
  }
}

// Ends a unit. Adds its gradients of relative keys and biases to the sums of the slot, and writes the gradients of
// query and relative query.
template <class T, class Elem> void finish(Context<T, Elem>& c, int64_t b, int64_t slot, const Unit& unit,
                                           Workspace<T, Elem>& w, const State<Elem>& st) {
  const InStage stage(STORE);
  const Sizes& n = c.n;
  float* const sums = c.partials.of(n, slot, unit.head);
  if (n.E && (c.want_rel_query || c.want.rel_key))
    band_grads(c, b, unit, w, st, w.relative.template get<T>(c.call, n, c.id, unit.head), sums);
  if (c.want.content_bias)
    add_rows(st.dquery, unit.rows, pad(n.D), sums + c.partials.rel);
  if (c.want.position_bias)
    add_rows(w.drel_query, unit.rows, pad(n.E), sums + c.partials.rel + c.partials.content);
  const bool same = n.E && !c.call.rel_query;
  for (int i = 0; i < unit.rows; ++i) {
    const float *content = st.dquery + i * pad(n.D), *position = w.drel_query + i * pad(n.E);
    if (c.want.query)
      scale_row(content, c.scale, n.D, c.want.query.template at<T>(b, unit.row + i, unit.head),
                same ? position : nullptr);
    if (c.want.rel_query)
      scale_row(position, c.scale, n.E, c.want.rel_query.template at<T>(b, unit.row + i, unit.head));
  }
}

// Prepares the block of keys from token `first` on for all units, and returns its number of keys.
template <class T, class Elem>
int take_keys(const Context<T, Elem>& c, const Tokens& tokens, int g, int first, Workspace<T, Elem>& w) {
  const InStage stage(PACK);
  const Piece<const T> keys(c.call, tokens, true, g, first);
  w.keys.take(keys);
  w.values.take(Piece<const T>(c.call, tokens, false, g, first));
  w.factors.fill(c.call, c.n, tokens, first, keys.count, c.scale2);
  for (int r = 0; r < keys.count; ++r) {
    const int a = tokens.neighbour[first + r], j = tokens.token[first + r];
    if (c.want.key)
      w.key_grads[r] = c.want.key.template at<T>(tokens.b, tokens.u, a, j, g);
    if (c.want.value)
      w.value_grads[r] = c.want.value.template at<T>(tokens.b, tokens.u, a, j, g);
  }
  clear(w.dgate, KEY_BLOCK * LANES);
  return keys.count;
}

// Runs all stages for a chunk and key head g. `after` and its key head `next` are what this thread probably processes
// next; their rows are prefetched.
template <class T, class Elem> void chunk(Context<T, Elem>& c, const Tokens& here, int g, const Tokens& after, int next,
                                          int64_t slot, Workspace<T, Elem>& w) {
  const Sizes& n = c.n;
  const int share = n.H / n.G;
  thread_local std::vector<Unit> units;
  list_units(c.call, n, here.u, g * share, (g + 1) * share, units);
  const int count = static_cast<int>(units.size()), keys = count ? here.count : 0;
  clear_hidden(c, here, g, keys);
  double* gate = c.want.neighbour_gate ? c.gate_sums.data() + ((here.b * n.L + here.u) * n.G + g) * n.K : nullptr;
  for (int i = 0; i < count; ++i)
    begin(c, here.b, units[i], w, w.states.of(n, i));
  for (int i = 0; i < count && few_rows(c.call); ++i)
    sum_rows(c, here, g, units[i], w, w.states.of(n, i));
  for (int first = 0; first < keys; first += KEY_BLOCK) {
    const bool more = first + KEY_BLOCK < keys;
    const auto soon = [&](bool of_keys) {
      const Piece<const T> piece(c.call, more ? here : after, of_keys, more ? g : next, more ? first + KEY_BLOCK : 0);
      return Ahead<T>(piece, n);
    };
    const Ahead<T> soon_k = soon(true), soon_v = soon(false);
    const int block = take_keys(c, here, g, first, w);
    for (int i = 0; i < count; ++i) {
      const State<Elem> st = w.states.of(n, i);
      Unit then = units[i];
      then.row += (after.u - here.u) * n.M;
      then.head += (next - g) * share;
      then.rows = more ? 0 : then.rows;
      probabilities(c, block, soon_k, units[i], w, st);
      for (int r = 0; c.dropout && r < block; ++r)
        c.dropout.factors(here.index(n, first + r), units[i].row, units[i].head, here.b, units[i].lanes(),
                          w.keep + r * QUERY_BLOCK);
      score_grads(c, block, soon_v, units[i], w, st, block == here.count);
      operand_grads(c, block, units[i], i, count, w, st, after.b, then);
    }
    for (int r = 0; gate && r < block; ++r)
      gate[here.neighbour[first + r]] += sum(load(w.dgate + r * LANES));
  }
  for (int i = 0; i < count; ++i)
    finish(c, here.b, slot, units[i], w, w.states.of(n, i));
}

// Runs a task: the chunks of one slot and one key head.
template <class T, class Elem> void task(Context<T, Elem>& c, int64_t index, int threads) {
  const TileScope tiles;
  const Sizes& n = c.n;
  const int64_t items = n.B * n.L, slots = c.partials.slots, slot = index / n.G;
  const int64_t first = slot * items / slots, last = (slot + 1) * items / slots;
  const int g = static_cast<int>(index % n.G), most = n.blocks * (n.H / n.G);  // neighbouring heads share pages
  auto w =
      in_scratch<Workspace<T, Elem>>(n, most, static_cast<bool>(c.want.neighbour_gate), static_cast<bool>(c.dropout));
  Tokens *here = &w.tokens[0], *after = &w.tokens[1];
  const auto list = [&](Tokens* to, int64_t item) { to->list(c.call, n, item / n.L, item % n.L); };
  list(here, first);
  for (int64_t item = first; item < last; ++item) {
    const bool more = item + 1 < last;
    list(after, more ? item + 1 : first);
    chunk(c, *here, g, *after, more ? g : g + threads, slot, w);
    std::swap(here, after);
  }
}

// Clears the gradients of queries that attend no chunk.
template <class T, class Elem> void clear_idle(const Context<T, Elem>& c) {
  each_idle_row(c.call, c.n, [&](int64_t b, int64_t row, int h) {
    if (c.want.query)
      clear(c.want.query.template at<T>(b, row, h), c.n.D);
    if (c.want.rel_query)
      clear(c.want.rel_query.template at<T>(b, row, h), c.n.E);
  });
}

// Writes the gradients of a head's biases and relative keys: adds the sums of the slots, and of the heads that share
// relative keys, in a fixed order.
template <class T, class Elem> void reduce(Context<T, Elem>& c, int head) {
  const Sizes& n = c.n;
  Partials& partials = c.partials;
  const auto bias = [&](const View& to, int width, int64_t offset) {
    for (int d = 0; to && d < width; ++d) {
      double x = 0;
      for (int64_t s = 0; s < partials.slots; ++s)
        x += partials.of(n, s, head)[offset + d];
      to.at<float>(head)[d] = static_cast<float>(x * c.call.scale);
    }
  };
  bias(c.want.content_bias, n.D, partials.rel);
  bias(c.want.position_bias, n.E, partials.rel + partials.content);
  if (!c.want.rel_key || head >= c.want.rel_key.size[0])
    return;
  const int last = c.want.rel_key.size[0] == 1 ? n.H : head + 1;
  for (int row = 0; row < n.table_rows; ++row) {
    const int64_t column = n.max_displacement - row - c.call.rel_start;
    double sums[LARGEST_D] = {};
    for (int h = head; column >= 0 && column < n.band && h < last; ++h)
      for (int64_t s = 0; s < partials.slots; ++s) {
        const float* of_slot = partials.of(n, s, h) + column * pad(n.E);
        for (int e = 0; e < n.E; ++e)
          sums[e] += of_slot[e];
      }
    for (int e = 0; e < n.E; ++e)
      c.want.rel_key.template at<float>(head, row)[e] = static_cast<float>(sums[e] * c.call.scale);
  }
}

// Writes the gradient of the gate: adds the sums of the key heads.
template <class T, class Elem> void reduce_gate(const Context<T, Elem>& c) {
  const Sizes& n = c.n;
  for (int64_t i = 0; c.want.neighbour_gate && i < n.B * n.L; ++i)
    for (int a = 0; a < n.K; ++a) {
      double x = 0;
      for (int g = 0; g < n.G; ++g)
        x += c.gate_sums[(i * n.G + g) * n.K + a];
      c.want.neighbour_gate.template at<float>(i / n.L, i % n.L)[a] = static_cast<float>(x);
    }
}

// Runs the whole pass.
template <class T, class Elem> void backward(Context<T, Elem>&& c, int threads) {
  parallel_for(c.n.G * c.partials.slots, threads, [&](int64_t t) { task(c, t, threads); });
  clear_idle(c);
  parallel_for(c.n.H, threads, [&](int64_t head) { reduce(c, static_cast<int>(head)); });
  reduce_gate(c);
}

}  // namespace

void chunked_cross_attention_backward(const CrossAttention& call, const View& out, const View& lse, const View& dout,
                                      const View& dlse, const CrossAttentionGrads& grads, int threads) {
  attention_backward(call, call.batch_start, out, lse, dout, dlse, grads, [&](auto t, auto e, const auto&... given) {
    backward(Context<decltype(t), decltype(e)>{given...}, threads);
  });
}

}  // namespace retro::RETRO_ISA
