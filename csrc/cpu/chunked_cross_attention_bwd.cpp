// Backward, from the saved log-sum-exp: P = exp(S - lse), dS = P * (dP - delta), delta = rowsum(dO * O) - dlse.
//
// A task owns a fixed list of chunks of one key head ("slot") and walks it in order: dK and dV of a chunk are complete
// when it leaves it, and what chunks share (relative keys, biases) is summed per slot, then over slots in order. The
// slots follow from the sizes alone: so the bits don't depend on the threads.
#include <cmath>

#include "chunked_cross_attention_tile.h"
#include "row_attention.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int KEYS = 128;                      // keys of a block
constexpr int TASKS = 128;                     // wanted at least, for balance
constexpr int64_t SLOT_BYTES = int64_t{16} << 20;  // of all partial sums together; one slot is always there

// What a unit carries over the blocks of keys.
template <class E>
struct State {
  E *query, *query_rows, *query_lines, *grad, *grad_rows, *grad_lines;  // transposed, A by row, B with k = row
  float *z, *dz, *lse2, *delta, *dquery;

  State(const Sizes& n, Carver& carver) {
    const int width = row_width<E>(n.D);
    query = carver.take<E>(steps_of<E>(n.D) * ROWS), grad = carver.take<E>(steps_of<E>(n.D) * ROWS);
    query_rows = carver.take<E>(ROWS * width), grad_rows = carver.take<E>(ROWS * width);
    query_lines = PAIRS<E> ? carver.take<E>(ROWS * width) : query_rows;
    grad_lines = PAIRS<E> ? carver.take<E>(ROWS * width) : grad_rows;
    z = carver.take<float>((n.E ? n.R : 1) * ROWS), dz = carver.take<float>((n.E ? n.R : 1) * ROWS);
    lse2 = carver.take<float>(ROWS), delta = carver.take<float>(ROWS), dquery = carver.take<float>(ROWS * pad(n.D));
  }
};

template <class E>
struct Workspace {
  RelativeCache<E> relative;
  KeyFactors factors;
  int32_t* keys[2];  // of the chunk at hand, and of the next one
  E *k_rows, *k_lines, *v_rows, *p_rows, *ds_rows, *ds_pairs, *rel_rows, *rel_lines, *band_rows, *band_pairs;
  float *p, *ds, *x, *keep, *dk, *dv, *strip, *bias, *dgate, *drel_query;
  char* states;
  size_t state_bytes, bytes;

  Workspace(const Sizes& n, int units, bool gate, bool dropout, Carver carver) : relative(n, carver), factors(KEYS, carver) {
    const int width = row_width<E>(n.D), block = KEYS * ROWS;
    const auto pairs = [&](int64_t count) { return PAIRS<E> ? carver.take<E>(count) : nullptr; };
    for (int32_t*& list : keys) list = carver.take<int32_t>(static_cast<int64_t>(n.K) * n.R);
    k_rows = carver.take<E>(KEYS * width), v_rows = carver.take<E>(KEYS * width), k_lines = pairs(KEYS * width);
    p = carver.take<float>(block), ds = carver.take<float>(block);
    x = carver.take<float>(gate ? block : 0), keep = carver.take<float>(dropout ? block : 0);
    p_rows = PAIRS<E> ? pairs(block / 2) : reinterpret_cast<E*>(p);
    ds_rows = PAIRS<E> ? pairs(block / 2) : reinterpret_cast<E*>(ds);
    ds_pairs = PAIRS<E> ? pairs(block / 2) : reinterpret_cast<E*>(ds);
    dk = carver.take<float>(KEYS * pad(n.D)), dv = carver.take<float>(KEYS * pad(n.D));
    const int64_t band = n.E ? static_cast<int64_t>(ROWS) * n.band_ld : 0;
    strip = carver.take<float>(band + LANES * n.band_ld);
    rel_rows = carver.take<E>(ROWS * row_width<E>(n.E)), rel_lines = pairs(ROWS * row_width<E>(n.E));
    band_rows = PAIRS<E> ? pairs(band / 2) : reinterpret_cast<E*>(strip);
    band_pairs = PAIRS<E> ? pairs(band / 2) : reinterpret_cast<E*>(strip);
    bias = carver.take<float>(256), dgate = carver.take<float>(KEYS * LANES), drel_query = carver.take<float>(ROWS * pad(n.E));
    Carver one(nullptr);
    State<E>(n, one);
    state_bytes = one.used();
    states = carver.take<char>(static_cast<int64_t>(state_bytes) * units);
    bytes = carver.used();
  }
  State<E> state(const Sizes& n, int unit) const {
    Carver carver(states + state_bytes * unit);
    return State<E>(n, carver);
  }
};

// The keys of a chunk that are seen.
struct Listed {
  int64_t b, u;
  const int32_t* keys;
  int count;
};

// Sums over chunks, one of each slot and head.
struct Partials {
  int64_t rel, content, position, each;  // sizes in floats
  std::vector<float> sums;

  Partials(const Sizes& n, const CrossAttentionGrads& want)
      : rel(want.rel_key ? static_cast<int64_t>(n.band) * pad(n.E) : 0), content(want.content_bias ? pad(n.D) : 0),
        position(want.position_bias ? pad(n.E) : 0), each(rel + content + position) {}
  float* of(const Sizes& n, int64_t slot, int head) { return sums.data() + (slot * n.H + head) * each; }
};

template <class T, class E>
struct Backward {
  const CrossAttention& c;
  const View &out, &lse, &dout, &dlse;
  const CrossAttentionGrads& want;
  Sizes n;
  Dropout dropout;
  Partials partials;
  int64_t slots;
  std::vector<float> gate_sums;  // [B*L, G, K]
  uint64_t id = next_call();
  float scale = static_cast<float>(c.scale), scale2 = static_cast<float>(c.scale) * LOG2E;
  bool want_rel_query;

  Backward(const CrossAttention& call, const View& o, const View& l, const View& go, const View& gl, const CrossAttentionGrads& w)
      : c(call), out(o), lse(l), dout(go), dlse(gl), want(w), n(call), dropout(call.seed, call.dropout_p), partials(n, w),
        gate_sums(w.neighbour_gate ? n.B * n.L * n.G * n.K : 0),
        want_rel_query(n.E && (w.position_bias || w.rel_query || (w.query && !call.rel_query))) {
    const int64_t room = SLOT_BYTES / std::max<int64_t>(n.H * partials.each * int64_t{sizeof(float)}, 1);
    slots = std::clamp<int64_t>(std::min<int64_t>((TASKS + n.G - 1) / n.G, room), 1, n.B * n.L);
    partials.sums.resize(slots * n.H * partials.each);
  }

  // Packs the gradient, and what the scores are made of.
  void begin(int64_t b, const Unit& unit, Workspace<E>& w, const State<E>& st) const {
    const int width = row_width<E>(n.D);
    pack_unit<T>(c.query, b, unit, bias_row(c.content_bias, unit.head, n.D, w.bias), n.D, st.query_rows);
    pack_unit<T>(dout, b, unit, nullptr, n.D, st.grad_rows);
    transpose(st.query_rows, width, unit.rows, steps_of<E>(n.D), st.query, ROWS);
    transpose(st.grad_rows, width, unit.rows, steps_of<E>(n.D), st.grad, ROWS);
    pair_rows(st.query_rows, unit.rows, n.D, st.query_lines), pair_rows(st.grad_rows, unit.rows, n.D, st.grad_lines);
    clear(st.dquery, ROWS * pad(n.D)), clear(st.dz, (n.E ? n.R : 1) * ROWS);
    for (int i = 0; i < ROWS; ++i) {
      const float l = i < unit.rows ? *lse.at<float>(b, unit.head, unit.row + i) : -INFINITY;
      const bool empty = l == -INFINITY;  // also the lanes beyond the last row: their probabilities become 0
      st.lse2[i] = empty ? INFINITY : l * LOG2E;
      st.delta[i] = empty ? 0.f : delta(b, unit.row + i, unit.head);
    }
    if (!n.E) return clear(st.z, ROWS);
    pack_unit<T>(c.rel_query ? c.rel_query : c.query, b, unit, bias_row(c.position_bias, unit.head, n.E, w.bias), n.E, w.rel_rows);
    position_logits(n, unit, w.relative.template get<T>(c, n, id, unit.head), w.rel_rows, scale2, w.strip, st.z);
  }

  float delta(int64_t b, int64_t row, int head) const {
    const T *o = out.at<const T>(b, row, head), *g = dout.at<const T>(b, row, head);
    Vec acc = zero();
    for (int d = 0; d < n.D; d += LANES) acc = fma(load(o + d, n.D - d), load(g + d, n.D - d), acc);
    return sum(acc) - (dlse ? *dlse.at<float>(b, head, row) : 0.f);
  }

  // w.p = P, and for the gate's gradient w.x = (q + u)·k
  void probabilities(int count, const Piece<const T>& soon, const Unit& unit, const Workspace<E>& w, const State<E>& st) const {
    const bool gate = static_cast<bool>(want.neighbour_gate);
    sliced(count, soon, unit, w.k_rows, st.query, [&](int r, int i, Vec x) {
      const Vec s = fma(x, broadcast(w.factors.scaled[r]), load(st.z + w.factors.z_row[r] + i));
      store(w.p + r * ROWS + i, exp2(s - load(st.lse2 + i)));
      if (gate) store(w.x + r * ROWS + i, x);
    });
  }

  // keys or values · queries or gradients, transposed; asks for the rows that will be packed next.
  template <class Emit>
  void sliced(int count, const Piece<const T>& soon, const Unit& unit, const E* rows, const E* columns, Emit emit) const {
    const int width = row_width<E>(n.D);
    for (int k = 0; k < count; k += SLICE) {
      prefetch(soon, n, k, k + SLICE);
      gemm<true>(std::min(SLICE, count - k), unit.lanes() / LANES, steps_of<E>(n.D), rows + k * width, width, columns, ROWS,
                 [&](int r, int i, Vec x) { emit(r + k, i, x); });
    }
  }

  // w.p becomes what multiplies dO in dV, w.ds what multiplies Q in dK: both with the gate; dz sums dS over the neighbours.
  void score_grads(int count, const Piece<const T>& soon, const Unit& unit, const Workspace<E>& w, const State<E>& st) const {
    const bool gate = static_cast<bool>(want.neighbour_gate), drop = static_cast<bool>(dropout), relative = n.E > 0;
    const Vec s = broadcast(scale);
    sliced(count, soon, unit, w.v_rows, st.grad, [&](int r, int i, Vec y) {
      const int at = r * ROWS + i;
      const Vec g = broadcast(w.factors.gate[r]), p = load(w.p + at), kept = drop ? p * load(w.keep + at) : p;
      const Vec dp = drop ? y * g * load(w.keep + at) : y * g, ds = p * (dp - load(st.delta + i));
      if (relative) {
        float* z = st.dz + w.factors.z_row[r] + i;
        store(z, load(z) + ds);
      }
      if (gate) {
        float* sums = w.dgate + r * LANES;
        store(sums, load(sums) + fma(kept, y, ds * s * load(w.x + at)));
      }
      store(w.p + at, kept * g), store(w.ds + at, ds * g);
    });
  }

  // The layouts of pairs that the three remaining products read; floats are used as they are.
  void to_operands(int count, const Unit& unit, const Workspace<E>& w) const {
    by_row(w.p, ROWS, count, unit.lanes(), w.p_rows, steps_of<E>(ROWS));
    by_row(w.ds, ROWS, count, unit.lanes(), w.ds_rows, steps_of<E>(ROWS));
    by_line(w.ds, ROWS, count, unit.lanes(), w.ds_pairs, ROWS);
  }

  void block(int64_t b, const Piece<const T>& k, const Piece<const T>& soon_k, const Piece<const T>& soon_v, const Unit& unit, const Workspace<E>& w,
             const State<E>& st) const {
    const int count = k.count, ld = pad(n.D), vectors = ld / LANES, across = steps_of<E>(ROWS), steps = steps_of<E>(unit.rows);
    probabilities(count, soon_k, unit, w, st);
    if (dropout)
      for (int r = 0; r < count; ++r)
        dropout.factors(static_cast<uint32_t>(k.list[r]), static_cast<uint32_t>(unit.row), static_cast<uint32_t>(unit.head),
                        static_cast<uint32_t>(b), unit.lanes(), w.keep + r * ROWS);
    score_grads(count, soon_v, unit, w, st);
    to_operands(count, unit, w);
    const auto add = [ld](float* to) {
      return [to, ld](int r, int d, Vec x) { store(to + r * ld + d, load(to + r * ld + d) + x); };
    };
    if (want.value) gemm<true>(count, vectors, steps, w.p_rows, across, st.grad_lines, ld, add(w.dv));
    if (want.key) gemm<true>(count, vectors, steps, w.ds_rows, across, st.query_lines, ld, add(w.dk));
    if (want.query || want.content_bias)
      gemm<false>(unit.rows, vectors, steps_of<E>(count), w.ds_pairs, ROWS, PAIRS<E> ? w.k_lines : w.k_rows, ld, add(st.dquery));
  }

  // dBand[i][t] = sum of dS where i - j is column t's displacement: the transpose un-does the skew. Then its two products.
  void band_grads(int64_t b, const Unit& unit, const Workspace<E>& w, const State<E>& st, const RelativeKeys<E>& rel, float* slot) const {
    const int ld = n.band_ld, wide = pad(n.E), skip = n.top - (unit.index + unit.rows - 1);
    clear(w.strip, static_cast<int64_t>(unit.rows) * ld);
    transpose(st.dz, ROWS, n.R, unit.rows, w.strip + skip + unit.rows - 1, ld - 1);
    by_row(w.strip, ld, unit.rows, ld, w.band_rows, steps_of<E>(ld));
    by_line(w.strip, ld, unit.rows, ld, w.band_pairs, ld);
    if (want_rel_query)
      gemm<true>(unit.rows, wide / LANES, steps_of<E>(n.band), w.band_rows, steps_of<E>(ld), rel.lines, wide,
                 [&](int i, int e, Vec x) { store(w.drel_query + i * wide + e, x); });
    if (!want.rel_key) return;
    pack_unit<T>(c.rel_query ? c.rel_query : c.query, b, unit, bias_row(c.position_bias, unit.head, n.E, w.bias), n.E, w.rel_rows);
    const E* lines = pair_rows(w.rel_rows, unit.rows, n.E, w.rel_lines);
    gemm<false>(n.band, wide / LANES, steps_of<E>(unit.rows), w.band_pairs, ld, lines, wide,
                [&](int t, int e, Vec x) { store(slot + t * wide + e, load(slot + t * wide + e) + x); });
  }

  static void add_rows(const float* rows, int count, int width, float* to) {
    for (int i = 0; i < count; ++i)
      for (int d = 0; d < width; d += LANES) store(to + d, load(to + d) + load(rows + i * width + d));
  }

  void finish(int64_t b, const Unit& unit, Workspace<E>& w, const State<E>& st, float* slot) const {
    if (n.E && (want_rel_query || want.rel_key)) band_grads(b, unit, w, st, w.relative.template get<T>(c, n, id, unit.head), slot);
    if (want.content_bias) add_rows(st.dquery, unit.rows, pad(n.D), slot + partials.rel);
    if (want.position_bias) add_rows(w.drel_query, unit.rows, pad(n.E), slot + partials.rel + partials.content);
    const bool same = n.E && !c.rel_query;
    for (int i = 0; i < unit.rows; ++i) {
      const float *content = st.dquery + i * pad(n.D), *position = w.drel_query + i * pad(n.E);
      if (want.query) {
        T* to = want.query.at<T>(b, unit.row + i, unit.head);
        for (int d = 0; d < n.D; d += LANES) {
          const Vec x = same ? load(content + d) + load(position + d) : load(content + d);
          store(to + d, x * broadcast(scale), n.D - d);
        }
      }
      if (want.rel_query) write_row(position, scale, n.E, want.rel_query.at<T>(b, unit.row + i, unit.head));
    }
  }

  static void write_row(const float* from, float factor, int width, T* to) {
    for (int d = 0; d < width; d += LANES) store(to + d, load(from + d) * broadcast(factor), width - d);
  }

  // Gradients of the keys and values that nothing sees.
  void clear_hidden(int64_t b, int64_t u, int g, const int32_t* keys, int count) const {
    for (int at = 0, token = 0; token < n.K * n.R; ++token) {
      if (at < count && keys[at] == token) {
        ++at;
        continue;
      }
      for (const View* grad : {&want.key, &want.value})
        if (*grad) clear(grad->at<T>(b, u, token / n.R, token % n.R, g), n.D);
    }
  }

  void chunk(const Listed& here, const Listed& after, int g, int64_t slot, Workspace<E>& w) {
    const int64_t b = here.b, u = here.u;
    const int share = n.H / n.G;
    thread_local std::vector<Unit> units;
    list_units(c, n, u, g * share, (g + 1) * share, units);
    const int count = static_cast<int>(units.size());
    const int keys = count ? here.count : 0;
    clear_hidden(b, u, g, here.keys, keys);
    float* gate = want.neighbour_gate ? gate_sums.data() + ((b * n.L + u) * n.G + g) * n.K : nullptr;
    for (int i = 0; i < count; ++i) begin(b, units[i], w, w.state(n, i));
    for (int first = 0; first < keys; first += KEYS) {
      const auto piece = [&](const View& of, const Listed& list, int at) {
        return Piece<const T>{&of, list.b, list.u, g, std::min(KEYS, list.count - at), list.keys + at};
      };
      const Piece<const T> k = piece(c.key, here, first);
      pack(k, n, w.k_rows), pack(piece(c.value, here, first), n, w.v_rows), w.factors.fill(c, n, k, scale2);
      const bool more = first + KEYS < keys;
      const Listed& next = more ? here : after;
      const int at = more ? first + KEYS : 0;
      pair_rows(w.k_rows, k.count, n.D, w.k_lines);
      clear(w.dk, KEYS * pad(n.D)), clear(w.dv, KEYS * pad(n.D)), clear(w.dgate, KEYS * LANES);
      for (int i = 0; i < count; ++i) block(b, k, piece(c.key, next, at), piece(c.value, next, at), units[i], w, w.state(n, i));
      for (int r = 0; r < k.count; ++r) {
        const int a = k.list[r] / n.R, j = k.list[r] % n.R;
        if (want.key) write_row(w.dk + r * pad(n.D), scale, n.D, want.key.at<T>(b, u, a, j, g));
        if (want.value) write_row(w.dv + r * pad(n.D), 1.f, n.D, want.value.at<T>(b, u, a, j, g));
        if (gate) gate[a] += sum(load(w.dgate + r * LANES));
      }
    }
    for (int i = 0; i < count; ++i) finish(b, units[i], w, w.state(n, i), partials.of(n, slot, units[i].head));
  }

  // Rows before the first complete chunk.
  void nothing(int64_t b) const {
    const int64_t end = std::clamp<int64_t>(Sizes::first_row(c, n.first_chunk), 0, n.N);
    for (int64_t row = 0; row < end; ++row)
      for (int h = 0; h < n.H; ++h) {
        if (want.query) clear(want.query.at<T>(b, row, h), n.D);
        if (want.rel_query) clear(want.rel_query.at<T>(b, row, h), n.E);
      }
  }

  // Slots, and heads that share relative keys, in a fixed order.
  void reduce(int head) {
    const auto total = [&](int h, int64_t offset) {
      double x = 0;
      for (int64_t s = 0; s < slots; ++s) x += partials.of(n, s, h)[offset];
      return x;
    };
    for (int d = 0; want.content_bias && d < n.D; ++d)
      want.content_bias.at<float>(head)[d] = static_cast<float>(total(head, partials.rel + d) * c.scale);
    for (int e = 0; want.position_bias && e < n.E; ++e)
      want.position_bias.at<float>(head)[e] = static_cast<float>(total(head, partials.rel + partials.content + e) * c.scale);
    if (!want.rel_key || head >= want.rel_key.size[0]) return;
    const int last = want.rel_key.size[0] == 1 ? n.H : head + 1;
    for (int row = 0; row < n.T; ++row) {
      const int64_t column = n.top - row - c.rel_start;
      const bool inside = column >= 0 && column < n.band;
      for (int e = 0; e < n.E; ++e) {
        double x = 0;
        for (int h = head; inside && h < last; ++h) x += total(h, column * pad(n.E) + e);
        want.rel_key.at<float>(head, row)[e] = static_cast<float>(x * c.scale);
      }
    }
  }

  void run(int threads) {
    const int64_t items = n.B * n.L;
    parallel_for(n.G * slots, threads, [&](int64_t task) {
      const int64_t slot = task / n.G, first = slot * items / slots, last = (slot + 1) * items / slots;
      const int g = static_cast<int>(task % n.G), most = n.blocks * (n.H / n.G);  // neighbouring heads share pages
      const auto sized = [&](void* base) { return Workspace<E>(n, most, static_cast<bool>(want.neighbour_gate), static_cast<bool>(dropout), Carver(base)); };
      Workspace<E> w = sized(scratch(sized(nullptr).bytes));
      const auto list = [&](int64_t item) {
        const int64_t b = item / n.L, u = item % n.L;
        return item < last ? Listed{b, u, w.keys[item % 2], list_keys(c, n, b, u, w.keys[item % 2])} : Listed{0, 0, nullptr, 0};
      };
      Listed here = list(first);
      for (int64_t item = first; item < last; ++item) {
        const Listed after = list(item + 1);
        chunk(here, after, g, slot, w);
        here = after;
      }
    });
    for (int64_t b = 0; b < n.B; ++b) nothing(b);
    parallel_for(n.H, threads, [&](int64_t head) { reduce(static_cast<int>(head)); });
    for (int64_t i = 0; want.neighbour_gate && i < items; ++i)
      for (int a = 0; a < n.K; ++a) {
        float x = 0;
        for (int g = 0; g < n.G; ++g) x += gate_sums[(i * n.G + g) * n.K + a];
        want.neighbour_gate.at<float>(i / n.L, i % n.L)[a] = x;
      }
  }
};

}  // namespace

void chunked_cross_attention_backward(const CrossAttention& call, const View& out, const View& lse, const View& dout,
                                      const View& dlse, const CrossAttentionGrads& grads, int threads) {
  by_scores(call, [&](auto t, auto e) { Backward<decltype(t), decltype(e)>(call, out, lse, dout, dlse, grads).run(threads); });
}

}  // namespace retro::RETRO_ISA
