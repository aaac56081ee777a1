// Backward pass, from the saved log-sum-exp: P = exp(S - lse), dS = P * (dP - delta), delta = rowsum(dO * O) - dlse.
//
// A task has a fixed list of chunks of one key head (a slot) and walks over it in order. It completes dK and dV of each
// chunk in turn. The gradients that chunks share (relative keys, biases) are summed for each slot, then over slots in
// order. Slots depend only on the sizes, so the bits don't depend on the threads.
#include <cmath>

#include "chunked_cross_attention_bwd.h"
#include "row_attention.h"

namespace retro::RETRO_ISA {
namespace {

template <class T, class Elem> struct Backward {
  const CrossAttention& c;
  const View &out, &lse, &dout, &dlse;
  const CrossAttentionGrads& want;
  int64_t first_batch;
  Sizes n{c};
  Dropout dropout{c.seed, c.dropout_p, first_batch};
  ChunkedPartials partials{n, want};
  // [B*L, G, K]; double, because the terms of the tokens nearly cancel
  std::vector<double> gate_sums = std::vector<double>(want.neighbour_gate ? n.B * n.L * n.G * n.K : 0);
  uint64_t id = next_call();
  float scale = static_cast<float>(c.scale), scale2 = scale * LOG2E;
  bool want_rel_query = n.E && (want.position_bias || want.rel_query || (want.query && !c.rel_query));

  // Packs the gradient of out and the operands of the scores.
  void begin(int64_t b, const Unit& unit, ChunkedWorkspace<T, Elem>& w, const ChunkedState<Elem>& st) const {
    const int width = row_width<Elem>(n.D);
    pack_unit<T>(c.query, c.content_bias, b, unit, n.D, w.bias, st.query_a);
    pack_unit<T>(dout, View(), b, unit, n.D, w.bias, st.grad_a);
    transpose(st.query_a, width, unit.rows, kc_of<Elem>(n.D), st.query, QUERY_BLOCK);
    transpose(st.grad_a, width, unit.rows, kc_of<Elem>(n.D), st.grad, QUERY_BLOCK);
    pack_b(st.query_a, unit.rows, n.D, st.query_b);
    pack_b(st.grad_a, unit.rows, n.D, st.grad_b);
    clear(st.dquery, QUERY_BLOCK * pad(n.D));
    clear(st.dz, (n.E ? n.R : 1) * QUERY_BLOCK);
    for (int i = 0; i < QUERY_BLOCK; ++i) {
      const float l = i < unit.rows ? *lse.at<float>(b, unit.head, unit.row + i) : -INFINITY;
      const bool empty = l == -INFINITY;  // also lanes beyond the last row; their probabilities become 0
      base2(l, st.lse2[i], st.inverse[i]);
      if (empty) {
        st.lse2[i] = INFINITY;
        st.inverse[i] = 1.f;
      }
      st.at_max[i] = 0.f;
      st.delta[i] = empty ? 0.f
                          : row_product(out.at<const T>(b, unit.row + i, unit.head),
                                        dout.at<const T>(b, unit.row + i, unit.head), n.D);
      st.dlse[i] = empty || !dlse ? 0.f : *dlse.at<float>(b, unit.head, unit.row + i);
    }
    if (!n.E)
      return clear(st.z, QUERY_BLOCK);
    pack_unit<T>(c.rel_query ? c.rel_query : c.query, c.position_bias, b, unit, n.E, w.bias, w.rel_a);
    position_logits(n, unit, w.relative.template get<T>(c, n, id, unit.head), w.rel_a, scale2, w.strip, st.z);
  }

  // Calls to(at, score in base 2, (q + u)·k).
  template <class To>
  void scores(int count, const Ahead<T>& soon, const Unit& unit, const ChunkedWorkspace<T, Elem>& w,
              const ChunkedState<Elem>& st, To to) const {
    // local pointers, because the compiler must assume that a store of scores changes those of the workspace
    const float *const scaled = w.factors.scaled, *const z = st.z;
    const int32_t* const z_row = w.factors.z_row;
    sliced(count, soon, unit, w.keys.a(), st.query, [=](int r, int i, Vec x) {
      const Vec s = fma(x, broadcast(scaled[r]), load(z + z_row[r] + i));
      to(r * QUERY_BLOCK + i, s, x);
    });
  }

  // w.p = P and, for the gate's gradient, w.x = (q + u)·k.
  void probabilities(int count, const Ahead<T>& soon, const Unit& unit, const ChunkedWorkspace<T, Elem>& w,
                     const ChunkedState<Elem>& st) const {
    const bool gate = static_cast<bool>(want.neighbour_gate);
    float *const p = w.p, *const products = w.x;
    const float *const lse2 = st.lse2, *const inverse = st.inverse;
    scores(count, soon, unit, w, st, [=](int at, Vec s, Vec x) {
      const int i = at % QUERY_BLOCK;
      store(p + at, exp2(s - load(lse2 + i), HIGHEST_EXCESS) * load(inverse + i));
      if (gate)
        store(products + at, x);
    });
  }

  // The forward pass of few rows summed scores in another order than blocks do. So maximum, sum and mean of dP are
  // computed again from blocks, in place of `lse` and `delta`: otherwise probabilities would not add up to 1, and the
  // mean would belong to other probabilities.
  void sum_rows(const Tokens& tokens, int g, const Unit& unit, const ChunkedWorkspace<T, Elem>& w,
                const ChunkedState<Elem>& st) const {
    RunningMeans total;
    for (int first = 0; first < tokens.count; first += KEY_BLOCK) {
      const Piece<const T> keys(c, tokens, true, g, first);
      w.keys.take(keys);
      w.values.take(Piece<const T>(c, tokens, false, g, first));
      w.factors.fill(c, n, tokens, first, keys.count, scale2);
      scores(keys.count, {}, unit, w, st, [&](int at, Vec s, Vec) { store(w.p + at, s); });
      sliced(keys.count, {}, unit, w.values.a(), st.grad, [&](int r, int i, Vec y) {
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
      if (st.lse2[i] == INFINITY || !std::isfinite(row_max[i]))
        continue;
      st.lse2[i] = row_max[i];
      st.inverse[i] = 1.f / row_sum[i];
      st.at_max[i] = at_max[i];
      st.delta[i] = rest[i] / row_sum[i];
    }
  }

  // keys or values · queries or gradients, transposed. `asked`: rows to prefetch.
  template <class Rows, class Epilogue>
  void sliced(int count, const Ahead<T>& asked, const Unit& unit, const Rows& rows, const Elem* columns,
              Epilogue epilogue) const {
    const int vectors = unit.lanes() / LANES;
    const Ahead<T> soon = asked.beside(count, vectors);
    const int step = slice<Elem>(SLICE, count);
    for (int k = 0; k < count; k += step)
      gemm(std::min(step, count - k), vectors, kc_of<Elem>(n.D), rows.from(k), PackedB<Elem>{columns, QUERY_BLOCK},
           AskingTiles<Ahead<T>, Epilogue>{soon, k, epilogue});
  }

  // w.p becomes the factor of dO in dV, w.ds the factor of Q in dK, both with the gate; dz sums dS over neighbours.
  // dS = p * (dP - mean of dP + d lse). If `all` keys are in this block, the mean is computed from it: where one or two
  // keys dominate, dP and its mean nearly cancel, and `delta`, from the rounded output, has another rounding error.
  void score_grads(int count, const Ahead<T>& soon, const Unit& unit, const ChunkedWorkspace<T, Elem>& w,
                   const ChunkedState<Elem>& st, bool all) const {
    const bool gate = static_cast<bool>(want.neighbour_gate), drop = static_cast<bool>(dropout), relative = n.E > 0;
    float *const ps = w.p, *const dss = w.ds, *const keeps = w.keep, *const dz = st.dz;
    const float* const gates = w.factors.gate;
    const int32_t* const z_row = w.factors.z_row;
    sliced(count, soon, unit, w.values.a(), st.grad, [=](int r, int i, Vec y) { store(dss + r * QUERY_BLOCK + i, y); });
    const Vec s = broadcast(scale);
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
        const Vec g = broadcast(gates[r]), p = load(ps + at), y = load(dss + at),
                  kept = drop ? p * load(keeps + at) : p;
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

  // Unit `at` of `units` and keys [first, first + count) of the tokens. `soon_k`, `soon_v` and the rows of `next` in
  // the tensors that `begin` reads are prefetched.
  void block(const Tokens& tokens, int first, int count, const Piece<const T>& soon_k, const Piece<const T>& soon_v,
             const Unit& unit, int at, int units, const ChunkedWorkspace<T, Elem>& w, const ChunkedState<Elem>& st,
             int64_t next_b, const Unit& next) const {
    const int ld = pad(n.D), vectors = ld / LANES, lda = kc_of<Elem>(QUERY_BLOCK), kc = kc_of<Elem>(unit.rows);
    probabilities(count, Ahead<T>(soon_k, n), unit, w, st);
    if (dropout)
      for (int r = 0; r < count; ++r)
        dropout.factors(tokens.index(n, first + r), unit.row, unit.head, tokens.b, unit.lanes(),
                        w.keep + r * QUERY_BLOCK);
    score_grads(count, Ahead<T>(soon_v, n), unit, w, st, count == tokens.count);
    // pairs for the three remaining products; floats need no packing
    to_row_major(w.p, QUERY_BLOCK, count, unit.lanes(), w.p_a, lda);
    to_row_major(w.ds, QUERY_BLOCK, count, unit.lanes(), w.ds_a, lda);
    to_column_major(w.ds, QUERY_BLOCK, count, unit.lanes(), w.ds_t, QUERY_BLOCK);
    const auto grads = [&](float* sums, T* const* rows, Vec factor) {
      return GradTiles<T>{sums, rows, factor, ld, n.D, at > 0, at + 1 == units};
    };
    if (want.value)
      gemm<true>(count, vectors, kc, w.p_a, lda, st.grad_b, ld, grads(w.dv, w.value_grads, broadcast(1.f)));
    if (want.key)
      gemm<true>(count, vectors, kc, w.ds_a, lda, st.query_b, ld, grads(w.dk, w.key_grads, broadcast(scale)));
    if (!want.query && !want.content_bias)
      return;
    const auto ahead = [&](const View& of) { return Ahead<T>(of, next_b, next, next.head).beside(unit.rows, vectors); };
    const ThreeAhead<T, READ> soon{ahead(c.query), ahead(dout), ahead(out)};
    const AddTo add{st.dquery, ld};
    w.keys.as_b(count, at > 0, [&](const auto& keys) {
      gemm(unit.rows, vectors, kc_of<Elem>(count), ColumnMajor<Elem>{w.ds_t, QUERY_BLOCK}, keys,
           AskingTiles<ThreeAhead<T, READ>, AddTo>{soon, 0, add});
    });
  }

  // dBand[i][t] = sum of dS over the pairs with column t's displacement i - j; the transpose restores the skew. Then
  // its two products, a slice at a time, over its nonzero part: row i has the columns [last - i, last - i + R).
  void band_grads(int64_t b, const Unit& unit, const ChunkedWorkspace<T, Elem>& w, const ChunkedState<Elem>& st,
                  const RelativeKeys<Elem>& rel, float* slot) const {
    const int ld = n.band_ld, E_pad = pad(n.E), last = n.max_displacement - unit.index, lda = kc_of<Elem>(ld);
    constexpr int STEP = PAIRS<Elem> ? 2 : 1;
    clear(w.strip, static_cast<int64_t>(unit.rows) * ld);
    transpose(st.dz, QUERY_BLOCK, n.R, unit.rows, w.strip + last, ld - 1);
    to_row_major(w.strip, ld, unit.rows, ld, w.band_a, lda);
    to_column_major(w.strip, ld, unit.rows, ld, w.band_t, ld);
    const int slice_rows = slice<Elem>(BAND_SLICE, TILE);
    for (int i = 0; want_rel_query && i < unit.rows; i += slice_rows) {
      const int rows = std::min(slice_rows, unit.rows - i), begin = (last - i - rows + 1) / STEP,
                end = kc_of<Elem>(last - i + n.R);
      gemm<true>(rows, E_pad / LANES, end - begin, w.band_a + i * lda + begin, lda, rel.rows_b + begin * E_pad, E_pad,
                 [&](int r, int e, Vec x) { store(w.drel_query + (i + r) * E_pad + e, x); });
    }
    if (!want.rel_key)
      return;
    pack_unit<T>(c.rel_query ? c.rel_query : c.query, c.position_bias, b, unit, n.E, w.bias, w.rel_a);
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

  void finish(int64_t b, const Unit& unit, ChunkedWorkspace<T, Elem>& w, const ChunkedState<Elem>& st,
              float* slot) const {
    if (n.E && (want_rel_query || want.rel_key))
      band_grads(b, unit, w, st, w.relative.template get<T>(c, n, id, unit.head), slot);
    if (want.content_bias)
      add_rows(st.dquery, unit.rows, pad(n.D), slot + partials.rel);
    if (want.position_bias)
      add_rows(w.drel_query, unit.rows, pad(n.E), slot + partials.rel + partials.content);
    const bool same = n.E && !c.rel_query;
    for (int i = 0; i < unit.rows; ++i) {
      const float *content = st.dquery + i * pad(n.D), *position = w.drel_query + i * pad(n.E);
      if (want.query)
        scale_row(content, scale, n.D, want.query.at<T>(b, unit.row + i, unit.head), same ? position : nullptr);
      if (want.rel_query)
        scale_row(position, scale, n.E, want.rel_query.at<T>(b, unit.row + i, unit.head));
    }
  }

  // Clears the gradients of keys and values that no query sees: of all but the first `count` tokens.
  void clear_hidden(const Tokens& tokens, int g, int count) const {
    for (int at = 0, token = 0; token < n.K * n.R; ++token) {
      if (at < count && tokens.index(n, at) == token) {
        ++at;
        continue;
      }
      for (const View* grad : {&want.key, &want.value})
        if (*grad)
          clear(grad->at<T>(tokens.b, tokens.u, token / n.R, token % n.R, g), n.D);
    }
  }

  // `after` and its head `next`: probable next chunk of this thread.
  void chunk(const Tokens& here, int g, const Tokens& after, int next, int64_t slot, ChunkedWorkspace<T, Elem>& w) {
    const int64_t b = here.b, u = here.u;
    const int share = n.H / n.G;
    thread_local std::vector<Unit> units;
    list_units(c, n, u, g * share, (g + 1) * share, units);
    const int count = static_cast<int>(units.size()), keys = count ? here.count : 0;
    clear_hidden(here, g, keys);
    double* gate = want.neighbour_gate ? gate_sums.data() + ((b * n.L + u) * n.G + g) * n.K : nullptr;
    for (int i = 0; i < count; ++i)
      begin(b, units[i], w, w.states.of(n, i));
    for (int i = 0; i < count && few_rows(c); ++i)
      sum_rows(here, g, units[i], w, w.states.of(n, i));
    for (int first = 0; first < keys; first += KEY_BLOCK) {
      const bool more = first + KEY_BLOCK < keys;
      const auto soon = [&](bool of_keys) {
        if (more)
          return Piece<const T>(c, here, of_keys, g, first + KEY_BLOCK);
        return Piece<const T>(c, after, of_keys, next, 0);
      };
      const Piece<const T> k(c, here, true, g, first), soon_k = soon(true), soon_v = soon(false);
      w.keys.take(k);
      w.values.take(Piece<const T>(c, here, false, g, first));
      w.factors.fill(c, n, here, first, k.count, scale2);
      for (int r = 0; r < k.count; ++r) {
        const int a = here.neighbour[first + r], j = here.token[first + r];
        if (want.key)
          w.key_grads[r] = want.key.at<T>(b, u, a, j, g);
        if (want.value)
          w.value_grads[r] = want.value.at<T>(b, u, a, j, g);
      }
      clear(w.dgate, KEY_BLOCK * LANES);
      for (int i = 0; i < count; ++i) {
        Unit then = units[i];
        then.row += (after.u - u) * n.M;
        then.head += (next - g) * share;
        then.rows = more ? 0 : then.rows;
        block(here, first, k.count, soon_k, soon_v, units[i], i, count, w, w.states.of(n, i), after.b, then);
      }
      for (int r = 0; gate && r < k.count; ++r)
        gate[here.neighbour[first + r]] += sum(load(w.dgate + r * LANES));
    }
    for (int i = 0; i < count; ++i)
      finish(b, units[i], w, w.states.of(n, i), partials.of(n, slot, units[i].head));
  }

  // Adds the sums of the slots, and of heads that share relative keys, in a fixed order.
  void reduce(int head) {
    const auto bias = [&](const View& to, int width, int64_t offset) {
      for (int d = 0; to && d < width; ++d) {
        double x = 0;
        for (int64_t s = 0; s < partials.slots; ++s)
          x += partials.of(n, s, head)[offset + d];
        to.at<float>(head)[d] = static_cast<float>(x * c.scale);
      }
    };
    bias(want.content_bias, n.D, partials.rel);
    bias(want.position_bias, n.E, partials.rel + partials.content);
    if (!want.rel_key || head >= want.rel_key.size[0])
      return;
    const int last = want.rel_key.size[0] == 1 ? n.H : head + 1;
    for (int row = 0; row < n.table_rows; ++row) {
      const int64_t column = n.max_displacement - row - c.rel_start;
      double sums[LARGEST_D] = {};
      for (int h = head; column >= 0 && column < n.band && h < last; ++h)
        for (int64_t s = 0; s < partials.slots; ++s) {
          const float* of_slot = partials.of(n, s, h) + column * pad(n.E);
          for (int e = 0; e < n.E; ++e)
            sums[e] += of_slot[e];
        }
      for (int e = 0; e < n.E; ++e)
        want.rel_key.at<float>(head, row)[e] = static_cast<float>(sums[e] * c.scale);
    }
  }

  void run(int threads) {
    const int64_t items = n.B * n.L;
    parallel_for(n.G * partials.slots, threads, [&](int64_t task) {
      const TileScope tiles;
      const int64_t slot = task / n.G, first = slot * items / partials.slots,
                    last = (slot + 1) * items / partials.slots;
      const int g = static_cast<int>(task % n.G), most = n.blocks * (n.H / n.G);  // neighbouring heads share pages
      auto w = in_scratch<ChunkedWorkspace<T, Elem>>(n, most, static_cast<bool>(want.neighbour_gate),
                                                     static_cast<bool>(dropout));
      Tokens *here = &w.tokens[0], *after = &w.tokens[1];
      const auto list = [&](Tokens* to, int64_t item) { to->list(c, n, item / n.L, item % n.L); };
      list(here, first);
      for (int64_t item = first; item < last; ++item) {
        const bool more = item + 1 < last;
        list(after, more ? item + 1 : first);
        chunk(*here, g, *after, more ? g : g + threads, slot, w);
        std::swap(here, after);
      }
    });
    each_idle_row(c, n, [&](int64_t b, int64_t row, int h) {
      if (want.query)
        clear(want.query.at<T>(b, row, h), n.D);
      if (want.rel_query)
        clear(want.rel_query.at<T>(b, row, h), n.E);
    });
    parallel_for(n.H, threads, [&](int64_t head) { reduce(static_cast<int>(head)); });
    for (int64_t i = 0; want.neighbour_gate && i < items; ++i)
      for (int a = 0; a < n.K; ++a) {
        double x = 0;
        for (int g = 0; g < n.G; ++g)
          x += gate_sums[(i * n.G + g) * n.K + a];
        want.neighbour_gate.at<float>(i / n.L, i % n.L)[a] = static_cast<float>(x);
      }
  }
};

}  // namespace

void chunked_cross_attention_backward(const CrossAttention& call, const View& out, const View& lse, const View& dout,
                                      const View& dlse, const CrossAttentionGrads& grads, int threads) {
  attention_backward<Backward>(call, call.batch_start, out, lse, dout, dlse, grads, threads);
}

}  // namespace retro::RETRO_ISA
