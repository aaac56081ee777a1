// A scan over time with a float32 state, in one pass over memory. The lanes are the elements h,d of a row. The states
// and decays of a strip of lanes stay in cache.
//
// A task is a strip of one batch entry. Strips are whole rows unless there are fewer batch entries than threads. The
// sum of a lane does not depend on its neighbours, so the strips do not change its bits. The state is cleared at the
// start of each segment.
//
// If there are too few lanes for several threads, time is divided into spans as well. The scan takes three steps for
// each group of spans that fits in cache. First, the spans compute their final states from zero states. Then a short
// serial pass chains these states. Finally, a second scan starts from the true states. The spans change the bits, but
// they depend only on the sizes.
#include "leaky_average.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int64_t WIDEST = 8192;    // maximum lanes per strip, so that states, decays and products fit in a part of L2
constexpr int64_t FEW_LANES = 256;  // if B*H*D is smaller, time is divided as well
constexpr int64_t SPAN = 1024;      // time steps per span
constexpr int STEPS = 4;            // time steps during which a state stays in its register
// Bytes of a call's tensors above which they are assumed to come from memory. L3 is 16 MiB or larger.
constexpr int64_t CACHED = 16 << 20;

struct Sizes {
  int64_t batch, time, heads, dim, strip, strips, spans;

  Sizes(const View& x, int threads) : batch(x.size[0]), time(x.size[1]), heads(x.size[2]), dim(x.size[3]) {
    spans = batch * heads * dim < FEW_LANES && time >= 2 * SPAN ? (time + SPAN - 1) / SPAN : 1;
    strips = 1;
    while (strips < heads && (idle(strips, threads) || heads * dim > strips * WIDEST))
      ++strips;
    strip = (heads + strips - 1) / std::max<int64_t>(strips, 1);  // in heads
    strips = strip ? (heads + strip - 1) / strip : 0;
  }
  // Returns whether threads would be idle, waiting for the last tasks, for more than an eighth of the time.
  bool idle(int64_t cut, int64_t threads) const {
    const int64_t tasks = batch * spans * cut, rounds = (tasks + threads - 1) / threads;
    return 8 * tasks < 7 * rounds * threads;
  }
  int64_t span_begin(int64_t s) const { return spans == 1 ? 0 : s * SPAN; }
  int64_t span_end(int64_t s) const { return spans == 1 ? time : std::min(time, (s + 1) * SPAN); }
};

struct Strip {
  int64_t b, first, last;  // batch entry; heads [first, last)
  Strip(const Sizes& n, int64_t index) : b(index / n.strips) {
    first = index % n.strips * n.strip;
    last = std::min(n.heads, first + n.strip);
  }
};

// Tokens of a batch entry at which the sum restarts, because the segment differs from the previous token's segment.
struct Restarts {
  const View& segment;
  int64_t b;

  bool at(int64_t t) const { return segment && t > 0 && of(t) != of(t - 1); }
  // Returns the first restart in (t, end), or `end` if there is none.
  int64_t next(int64_t t, int64_t end) const {
    if (!segment)
      return end;
    do
      ++t;
    while (t < end && !at(t));
    return t;
  }
  // Returns the last restart in [begin, t], or `begin` if there is none.
  int64_t last(int64_t t, int64_t begin) const {
    if (!segment)
      return begin;
    while (t > begin && !at(t))
      --t;
    return t;
  }
  bool any(int64_t begin, int64_t end) const { return at(begin) || next(begin, end) < end; }

 private:
  int64_t of(int64_t t) const { return integer(segment, b, t); }
};

// Rows of a strip in the order of a scan. `data` is null if the tensor is None.
template <class T> struct Walk {
  T* data = nullptr;
  int64_t step = 0, head = 0;  // elements from row to row, from head to head

  Walk() = default;
  Walk(const View& v, Strip s, int64_t t, int64_t direction)
      : data(v ? v.at<T>(s.b, t, s.first) : nullptr), step(direction * v.stride[1]), head(v.stride[2]) {}
  bool dense(int64_t dim) const { return !data || head == dim; }
  T* at(int64_t row, int64_t h) const { return data + row * step + h * head; }
};

// State of a scan for the lanes of a strip.
struct Lanes {
  float *state, *decay;
  // Sums of the products of the new states and another tensor, or null. `rest` is the rounding error of `total`. `cell`
  // adjacent lanes share one vector of sums.
  float *total = nullptr, *rest = nullptr;
  int64_t cell = LANES, totals = 0;  // totals: number of sums per head
  bool ahead = false;                // whether the next rows are prefetched

  Lanes from(int64_t head, int64_t dim) const {
    const int64_t lane = head * dim, at = head * totals;
    return {state + lane, decay + lane, total + at, rest + at, cell, totals, ahead};
  }
};

// Returns whether the rows of `tensors` tensors should be prefetched. Conversion of a half type keeps the processor
// busy, and it would request rows from memory too late. In cache, prefetching costs a tenth of the time.
template <class T> bool prefetches(const Sizes& n, int64_t tensors) {
  return sizeof(T) == 2 && tensors * n.batch * n.time * n.heads * n.dim * sizeof(T) > CACHED;
}

// Adds x to total + rest, where `rest` is the rounding error of the total. The error of a plain sum would grow over
// thousands of steps.
template <class... Left> RETRO_INLINE void add(float* total, float* rest, Vec x, Left... left) {
  const Vec before = load(total, left...), after = before + x, taken = after - before;
  store(total, after, left...);
  store(rest, load(rest, left...) + ((before - (after - taken)) + (x - taken)), left...);
}

// Computes COUNT steps, state = in + decay * state, for `n` lanes. Writes the states to `out`, unless it is null, and
// adds their products with `other` to the totals, unless it is null. If AHEAD, prefetches the rows of the next steps.
template <int COUNT, bool AHEAD, class T> RETRO_INLINE void steps(const T* in, int64_t in_step, T* out,
                                                                  int64_t out_step, const T* other, int64_t other_step,
                                                                  const Lanes& lanes, int64_t n) {
  const auto some = [&](int64_t i, auto... left) {
    if (AHEAD && i % (LINE / 2) == 0)
      for (int r = COUNT; r < 2 * COUNT; ++r) {
        __builtin_prefetch(in + r * in_step + i);
        if (other)
          __builtin_prefetch(other + r * other_step + i);
      }
    Vec state = load(lanes.state + i, left...), products = zero();
    const Vec decay = load(lanes.decay + i, left...);
#pragma GCC unroll 4
    for (int r = 0; r < COUNT; ++r) {
      state = fma(decay, state, load(in + r * in_step + i, left...));
      if (out)
        store(out + r * out_step + i, state, left...);
      if (other)
        products = fma(state, load(other + r * other_step + i, left...), products);
    }
    store(lanes.state + i, state, left...);
    return products;
  };
  int64_t i = 0, at = 0;
  for (; i + LANES <= n; at += LANES) {
    Vec products = zero();
    for (const int64_t end = i + lanes.cell; i < end; i += LANES)
      products = products + some(i);
    if (other)
      add(lanes.total + at, lanes.rest + at, products);
  }
  if (i == n)
    return;
  const int left = static_cast<int>(n - i);
  const Vec products = some(i, left);
  if (other)
    add(lanes.total + at, lanes.rest + at, products, left);
}

// Computes `count` steps for `heads` heads. Heads that are adjacent in every tensor are processed as one run of lanes.
template <bool AHEAD, class T> [[gnu::noinline]] void scan_ahead(const Walk<const T>& in, const Walk<T>& out,
                                                                 const Walk<const T>& other, int64_t count,
                                                                 int64_t heads, int64_t dim, const Lanes& lanes) {
  const bool dense = in.dense(dim) && out.dense(dim) && other.dense(dim);
  const int64_t runs = dense ? 1 : heads, width = dense ? heads * dim : dim;
  const auto some = [&](auto steps_at_once, int64_t t) {
    for (int64_t h = 0; h < runs; ++h)
      steps<steps_at_once, AHEAD>(in.at(t, h), in.step, out.data ? out.at(t, h) : nullptr, out.step,
                                  other.data ? other.at(t, h) : nullptr, other.step, lanes.from(h, dim), width);
  };
  int64_t t = 0;
  for (; t + STEPS <= count; t += STEPS)
    some(std::integral_constant<int, STEPS>{}, t);
  for (; t < count; ++t)
    some(std::integral_constant<int, 1>{}, t);
}

// Prefetches if lanes.ahead. The two loops are functions of their own: inside one function, both were slower.
template <class T> void scan(const Walk<const T>& in, const Walk<T>& out, const Walk<const T>& other, int64_t count,
                             int64_t heads, int64_t dim, const Lanes& lanes) {
  if (sizeof(T) == 2 && lanes.ahead)
    scan_ahead<sizeof(T) == 2>(in, out, other, count, heads, dim, lanes);
  else
    scan_ahead<false>(in, out, other, count, heads, dim, lanes);
}

// Writes the decay of each lane of a strip to `to`.
void spread_decay(const View& decay, const Sizes& n, Strip s, float* to) {
  for (int64_t h = s.first; h < s.last; ++h)
    std::fill_n(to + (h - s.first) * n.dim, n.dim, scalar(decay, h));
}

struct Backward {
  const View &y, &dy, &decay, &initial, &segment, &dx;
};

// Adds the totals of each head's lanes to partial[h].
void add_totals(const Lanes& lanes, int64_t heads, int64_t dim, double* partial) {
  for (int64_t h = 0; h < heads; ++h) {
    const Lanes mine = lanes.from(h, dim);
    for (int64_t i = 0; i < lanes.totals; ++i)  // the rounding error of an infinite total is NaN
      partial[h] += static_cast<double>(mine.total[i]) + (std::isfinite(mine.total[i]) ? mine.rest[i] : 0.f);
  }
}

// Adds the product of the first step's gradient and the initial state to partial[h].
template <class T> void add_initial(const View& initial, Strip s, int64_t dim, const float* state, double* partial) {
  for (int64_t h = 0; h < s.last - s.first; ++h)
    for (int64_t d = 0; d < dim; ++d)
      partial[h] += static_cast<double>(state[h * dim + d]) * to_float(initial.at<const T>(s.b, s.first + h)[d]);
}

// Scans a span from its last step to its first, which turns dy into dx. Unless it is null, adds the products of dx and
// the previous y to `partial`, which has one sum per head. `space` is scratch memory for three rows of the strip.
template <class T> void scan_backward(const Backward& g, const Sizes& n, Strip s, int64_t span, float* state,
                                      double* partial, float* space) {
  const int64_t begin = n.span_begin(span), end = n.span_end(span);
  const int64_t heads = s.last - s.first, width = heads * n.dim;
  // Number of lanes whose products share a sum. The lanes belong to one head, and they are few, so that the error of a
  // float32 sum stays small.
  const int64_t cell = n.dim % (4 * LANES) == 0 ? 4 * LANES : n.dim % (2 * LANES) == 0 ? 2 * LANES : LANES;
  const int64_t totals = n.dim / cell * LANES + n.dim % cell;
  const Lanes lanes{state, space, space + width, space + 2 * width, cell, totals, prefetches<T>(n, 3)};
  const Restarts restarts{g.segment, s.b};
  spread_decay(g.decay, n, s, lanes.decay);
  for (int64_t t = end - 1, run = begin; t >= begin;) {
    if (t == end - 1 || t < run)
      run = restarts.last(t, begin);
    const bool starts = run == 0 || restarts.at(run);  // before it is the initial state, or no state
    const bool first = partial && starts && t == run;
    const int64_t count = first ? 1 : t + 1 - run - (partial && starts ? 1 : 0);
    if (partial)
      std::fill_n(lanes.total, 2 * width, 0.f);
    const Walk<const T> before = partial && !first ? Walk<const T>(g.y, s, t - 1, -1) : Walk<const T>();
    scan<T>(Walk<const T>(g.dy, s, t, -1), Walk<T>(g.dx, s, t, -1), before, count, heads, n.dim, lanes);
    t -= count;
    if (first && run == 0 && g.initial)
      add_initial<T>(g.initial, s, n.dim, state, partial);
    else if (partial)
      add_totals(lanes, heads, n.dim, partial);
    if (t < run && restarts.at(run))
      std::fill_n(state, width, 0.f);
  }
}

// Computes carry[to], the states with which span `to` starts, [B, heads, dim]. It holds the final states that span
// `from` reaches from zero states, and this function adds the decayed states with which span `from` starts.
void chain(const Sizes& n, const View& decay, const View& segment, std::vector<float>& carry, int64_t from,
           int64_t to) {
  const int64_t lanes = n.batch * n.heads * n.dim;
  const double length = static_cast<double>(n.span_end(from) - n.span_begin(from));
  for (int64_t b = 0; b < n.batch; ++b) {
    if (Restarts{segment, b}.any(n.span_begin(from), n.span_end(from)))
      continue;
    for (int64_t h = 0; h < n.heads; ++h) {
      const float power = static_cast<float>(std::pow(static_cast<double>(scalar(decay, h)), length));
      const int64_t at = (b * n.heads + h) * n.dim;
      for (int64_t i = at; i < at + n.dim; ++i)
        carry[to * lanes + i] += power * carry[from * lanes + i];
    }
  }
}

// Calls scan(span, strip, state, space, whole) for every span, in the order of the scan. `state` is the state with
// which the span starts; start(strip, state) sets the first one. `space` is scratch memory for `vectors` rows of the
// strip. The spans of a group are scanned twice: the first scan has `whole` false, because only the final states are
// needed, and the second one has `whole` true.
template <class Start, class Scan> void in_spans(const Sizes& n, const View& decay, const View& segment, bool reverse,
                                                 int64_t vectors, int threads, Start&& start, Scan&& scan) {
  const int64_t lanes = n.batch * n.heads * n.dim, most = n.strip * n.dim;
  const int64_t pieces = n.batch * n.strips, group = threads > 1 ? 2 * threads : 1;
  const auto span = [&](int64_t k) { return reverse ? n.spans - 1 - k : k; };
  const auto space = [&] { return static_cast<float*>(scratch((vectors + 1) * most * sizeof(float))); };
  std::vector<float> carry(n.spans > 1 ? n.spans * lanes : 0);
  const auto carried = [&](int64_t k, Strip s) {
    return carry.data() + span(k) * lanes + (s.b * n.heads + s.first) * n.dim;
  };
  for (int64_t p = 0; n.spans > 1 && p < pieces; ++p)
    start(Strip(n, p), carried(0, Strip(n, p)));
  for (int64_t k = 0; k < n.spans; k += group) {
    const int64_t last = std::min(n.spans - 1, k + group), end = std::min(n.spans, k + group);
    parallel_for(pieces * (last - k), threads, [&](int64_t t) {
      const Strip s(n, t % pieces);
      scan(span(k + t / pieces), s, carried(k + t / pieces + 1, s), space(), false);
    });
    for (int64_t next = k + 1; next <= last; ++next)
      chain(n, decay, segment, carry, span(next - 1), span(next));
    parallel_for(pieces * (end - k), threads, [&](int64_t t) {
      const Strip s(n, t % pieces);
      float* state = space();
      if (n.spans > 1)
        std::copy_n(carried(k + t / pieces, s), (s.last - s.first) * n.dim, state);
      else
        start(s, state);
      scan(span(k + t / pieces), s, state, state + most, true);
    });
  }
}

template <class T>
void forward(const View& x, const View& decay, const View& initial, const View& segment, const View& y, int threads) {
  const Sizes n(x, threads);
  const auto start = [&](Strip s, float* state) {
    for (int64_t h = s.first; h < s.last; ++h)
      for (int64_t d = 0; d < n.dim; ++d)
        *state++ = initial ? to_float(initial.at<const T>(s.b, h)[d]) : 0.f;
  };
  const auto each = [&](int64_t span, Strip s, float* state, float* decays, bool whole) {
    const int64_t end = n.span_end(span), heads = s.last - s.first;
    const Restarts restarts{segment, s.b};
    spread_decay(decay, n, s, decays);
    Lanes lanes{state, decays};
    lanes.ahead = prefetches<T>(n, 2);
    for (int64_t t = n.span_begin(span), next; t < end; t = next) {
      next = restarts.next(t, end);
      if (restarts.at(t))
        std::fill_n(state, heads * n.dim, 0.f);
      const Walk<T> to = whole ? Walk<T>(y, s, t, 1) : Walk<T>();
      scan<T>(Walk<const T>(x, s, t, 1), to, {}, next - t, heads, n.dim, lanes);
    }
  };
  in_spans(n, decay, segment, false, 1, threads, start, each);
}

template <class T> void backward(const Backward& g, const View& ddecay, const View& dinitial, int threads) {
  const Sizes n(g.dy, threads);
  std::vector<double> partial(ddecay ? n.spans * n.batch * n.heads : 0);
  const View none;
  const Backward unseen{g.y, g.dy, g.decay, g.initial, g.segment, none};
  const auto start = [&](Strip s, float* state) { std::fill_n(state, (s.last - s.first) * n.dim, 0.f); };
  const auto each = [&](int64_t span, Strip s, float* state, float* space, bool whole) {
    double* mine = whole && ddecay ? partial.data() + (span * n.batch + s.b) * n.heads + s.first : nullptr;
    scan_backward<T>(whole ? g : unseen, n, s, span, state, mine, space);
    if (!whole || span > 0 || !dinitial)
      return;
    for (int64_t h = s.first; h < s.last; ++h)
      for (int64_t d = 0; d < n.dim; ++d)
        from_float(scalar(g.decay, h) * state[(h - s.first) * n.dim + d], dinitial.at<T>(s.b, h) + d);
  };
  in_spans(n, g.decay, g.segment, true, 3, threads, start, each);
  if (!ddecay)
    return;
  for (int64_t h = 0; h < n.heads; ++h) {
    double total = 0;
    for (int64_t k = 0; k < n.spans * n.batch; ++k)
      total += partial[k * n.heads + h];
    *ddecay.at<float>(h) = static_cast<float>(total);
  }
}

}  // namespace

void leaky_average_forward(const View& x, const View& decay, const View& initial, const View& segment, const View& y,
                           int threads) {
  by_type(x.type, [&](auto t) { forward<decltype(t)>(x, decay, initial, segment, y, threads); });
}

void leaky_average_backward(const View& y, const View& dy, const View& decay, const View& initial, const View& segment,
                            const View& dx, const View& ddecay, const View& dinitial, int threads) {
  const Backward g{y, dy, decay, initial, segment, dx};
  by_type(dy.type, [&](auto t) { backward<decltype(t)>(g, ddecay, dinitial, threads); });
}

}  // namespace retro::RETRO_ISA
