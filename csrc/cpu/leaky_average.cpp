// A scan with float32 state: one pass over memory, the lanes h,d side by side, the state of a strip of lanes in L1.
//
// A task is a strip of one batch. Where there are too few lanes to occupy several threads, time is cut as well: each span
// first finds its own final state from zero, a short serial pass chains them, and a second scan starts from the right
// state. How the work is cut follows from the sizes alone, never from the number of threads.
#include "leaky_average.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int64_t STRIP = 1024;      // lanes of a task: 4 KiB of state, and long enough runs for the prefetcher
constexpr int64_t FEW_LANES = 4096;  // B*H*D below which time is cut too
constexpr int64_t SPAN = 1024;       // time steps of a cut
constexpr int64_t FOLD = 256;        // steps after which the running sum of d decay moves to a second one (rounding)

struct Sizes {
  int64_t batch, time, heads, dim, strip, spans, strips;

  explicit Sizes(const View& x) : batch(x.size[0]), time(x.size[1]), heads(x.size[2]), dim(x.size[3]) {
    const int64_t lanes = heads * dim;
    strip = std::max<int64_t>(1, std::min(heads, STRIP / std::max<int64_t>(dim, 1)));  // in heads
    // at least 4 strips in all, so that small batches still spread
    while (strip > 1 && batch * ((heads + strip - 1) / strip) < 4) strip = (strip + 1) / 2;
    strips = (heads + strip - 1) / strip;
    spans = batch * lanes < FEW_LANES && time >= 2 * SPAN ? (time + SPAN - 1) / SPAN : 1;
  }
  int64_t span_begin(int64_t s) const { return spans == 1 ? 0 : s * SPAN; }
  int64_t span_end(int64_t s) const { return spans == 1 ? time : std::min(time, (s + 1) * SPAN); }
};

// One step of a scan over `dim` lanes: state = in + decay * state, written to `out` unless null.
template <class T>
RETRO_INLINE void step(const T* in, T* out, float* state, float decay, int dim) {
  const Vec d = broadcast(decay);
  int i = 0;
  for (; i + LANES <= dim; i += LANES) {
    const Vec s = fma(d, load(state + i), load(in + i));
    store(state + i, s);
    if (out) store(out + i, s);
  }
  if (const int left = dim - i; left > 0) {
    const Vec s = fma(d, load(state + i, left), load(in + i, left));
    store(state + i, s, left);
    if (out) store(out + i, s, left);
  }
}

// acc += a * b over `dim` lanes
template <class T>
RETRO_INLINE void accumulate(float* acc, const float* a, const T* b, int dim) {
  int i = 0;
  for (; i + LANES <= dim; i += LANES) store(acc + i, fma(load(a + i), load(b + i), load(acc + i)));
  if (const int left = dim - i; left > 0)
    store(acc + i, fma(load(a + i, left), load(b + i, left), load(acc + i, left)), left);
}

struct Strip {
  int64_t b, first, last;  // batch and heads
  Strip(const Sizes& n, int64_t index) : b(index / n.strips) {
    first = index % n.strips * n.strip;
    last = std::min(n.heads, first + n.strip);
  }
};

// A row of heads that lies contiguously is scanned as one run when every head has the same decay; else head by head.
template <class T>
void scan_forward(const View& x, const View& decay, const View& y, const Sizes& n, Strip s, int64_t begin, int64_t end, float* state) {
  const int dim = static_cast<int>(n.dim);
  for (int64_t t = begin; t < end; ++t)
    for (int64_t h = s.first; h < s.last; ++h)
      step(x.at<const T>(s.b, t, h), y ? y.at<T>(s.b, t, h) : nullptr, state + (h - s.first) * dim,
           scalar(decay, h * decay.stride[0]), dim);
}

struct Backward {
  const View &y, &dy, &decay, &initial, &dx;
  float* partial;  // [B, heads, dim] sums over time of the gradient times the previous y; null: not needed
};

template <class T>
void scan_backward(const Backward& g, const Sizes& n, Strip s, int64_t begin, int64_t end, float* state, float* partial) {
  const int dim = static_cast<int>(n.dim);
  const int64_t lanes = (s.last - s.first) * dim;
  float* recent = state + lanes;
  std::fill(recent, recent + lanes, 0.f);
  for (int64_t t = end - 1; t >= begin; --t) {
    for (int64_t h = s.first; h < s.last; ++h) {
      float* mine = state + (h - s.first) * dim;
      step(g.dy.at<const T>(s.b, t, h), g.dx ? g.dx.at<T>(s.b, t, h) : nullptr, mine, scalar(g.decay, h * g.decay.stride[0]), dim);
      if (!partial) continue;
      const View& before = t > 0 ? g.y : g.initial;
      if (!before) continue;
      accumulate(recent + (h - s.first) * dim, mine, t > 0 ? before.at<const T>(s.b, t - 1, h) : before.at<const T>(s.b, h), dim);
    }
    if (partial && ((t - begin) % FOLD == 0)) {
      for (int64_t i = 0; i < lanes; ++i) partial[i] += recent[i];
      std::fill(recent, recent + lanes, 0.f);
    }
  }
}

// The state with which each span starts, [spans, B, heads, dim], from what each adds: carry = added + decay^len * carry.
void chain(const Sizes& n, const View& decay, std::vector<float>& added, bool reverse) {
  const int64_t lanes = n.batch * n.heads * n.dim;
  for (int64_t k = 1; k < n.spans; ++k) {
    const int64_t s = reverse ? n.spans - 1 - k : k, from = reverse ? s + 1 : s - 1;
    // `added` is stored one place on: slot s holds the state that enters span s, slot `from` the one before it
    const double length = static_cast<double>(n.span_end(from) - n.span_begin(from));
    for (int64_t b = 0; b < n.batch; ++b)
      for (int64_t h = 0; h < n.heads; ++h) {
        const float power = static_cast<float>(std::pow(static_cast<double>(scalar(decay, h * decay.stride[0])), length));
        const int64_t at = (b * n.heads + h) * n.dim;
        for (int64_t i = at; i < at + n.dim; ++i) added[s * lanes + i] += power * added[from * lanes + i];
      }
  }
}

template <class T>
void start(const View& initial, const Sizes& n, Strip s, float* state) {
  const int dim = static_cast<int>(n.dim);
  for (int64_t h = s.first; h < s.last; ++h)
    for (int d = 0; d < dim; ++d) state[(h - s.first) * dim + d] = initial ? to_float(initial.at<const T>(s.b, h)[d]) : 0.f;
}

template <class T>
void forward(const View& x, const View& decay, const View& initial, const View& y, int threads) {
  const Sizes n(x);
  const int64_t lanes = n.batch * n.heads * n.dim, pieces = n.batch * n.strips;
  const View none;
  std::vector<float> carry(n.spans > 1 ? n.spans * lanes : 0);
  const auto carried = [&](int64_t span, Strip s) { return carry.data() + span * lanes + (s.b * n.heads + s.first) * n.dim; };
  if (n.spans > 1) {  // slot s+1 <- what span s adds from zero
    for (int64_t p = 0; p < pieces; ++p) start<T>(initial, n, Strip(n, p), carried(0, Strip(n, p)));
    parallel_for(pieces * (n.spans - 1), threads, [&](int64_t task) {
      const Strip s(n, task % pieces);
      const int64_t span = task / pieces;
      scan_forward<T>(x, decay, none, n, s, n.span_begin(span), n.span_end(span), carried(span + 1, s));
    });
    chain(n, decay, carry, false);
  }
  parallel_for(pieces * n.spans, threads, [&](int64_t task) {
    const Strip s(n, task % pieces);
    const int64_t span = task / pieces, width = (s.last - s.first) * n.dim;
    auto* state = static_cast<float*>(scratch(width * sizeof(float)));
    if (n.spans > 1)
      std::copy_n(carried(span, s), width, state);
    else
      start<T>(initial, n, s, state);
    scan_forward<T>(x, decay, y, n, s, n.span_begin(span), n.span_end(span), state);
  });
}

template <class T>
void backward(const Backward& g, const View& ddecay, const View& dinitial, int threads) {
  const Sizes n(g.dy);
  const int64_t lanes = n.batch * n.heads * n.dim, pieces = n.batch * n.strips;
  const View none;
  std::vector<float> carry(n.spans > 1 ? n.spans * lanes : 0), partial(ddecay ? n.spans * lanes : 0);
  const auto at = [&](std::vector<float>& v, int64_t span, Strip s) { return v.data() + span * lanes + (s.b * n.heads + s.first) * n.dim; };
  if (n.spans > 1) {  // slot s-1 <- what span s adds from zero
    parallel_for(pieces * (n.spans - 1), threads, [&](int64_t task) {
      const Strip s(n, task % pieces);
      const int64_t span = task / pieces + 1;
      float* state = at(carry, span - 1, s);
      for (int64_t t = n.span_end(span) - 1; t >= n.span_begin(span); --t)
        for (int64_t h = s.first; h < s.last; ++h)
          step<T>(g.dy.at<const T>(s.b, t, h), nullptr, state + (h - s.first) * n.dim, scalar(g.decay, h * g.decay.stride[0]),
                  static_cast<int>(n.dim));
    });
    chain(n, g.decay, carry, true);
  }
  parallel_for(pieces * n.spans, threads, [&](int64_t task) {
    const Strip s(n, task % pieces);
    const int64_t span = task / pieces, width = (s.last - s.first) * n.dim;
    auto* state = static_cast<float*>(scratch(2 * width * sizeof(float)));
    if (n.spans > 1)
      std::copy_n(at(carry, span, s), width, state);
    else
      std::fill_n(state, width, 0.f);
    scan_backward<T>(g, n, s, n.span_begin(span), n.span_end(span), state, ddecay ? at(partial, span, s) : nullptr);
    if (span > 0 || !dinitial) return;
    for (int64_t h = s.first; h < s.last; ++h)
      for (int64_t d = 0; d < n.dim; ++d)
        from_float(scalar(g.decay, h * g.decay.stride[0]) * state[(h - s.first) * n.dim + d], dinitial.at<T>(s.b, h) + d);
  });
  if (!ddecay) return;
  for (int64_t h = 0; h < n.heads; ++h) {
    double total = 0;
    for (int64_t k = 0; k < n.spans * n.batch; ++k)
      for (int64_t d = 0; d < n.dim; ++d) total += partial[(k * n.heads + h) * n.dim + d];
    *ddecay.at<float>(h) = static_cast<float>(total);
  }
}

}  // namespace

void leaky_average_forward(const View& x, const View& decay, const View& initial, const View& y, int threads) {
  by_type(x.type, [&](auto t) { forward<decltype(t)>(x, decay, initial, y, threads); });
}

void leaky_average_backward(const View& y, const View& dy, const View& decay, const View& initial, const View& dx,
                            const View& ddecay, const View& dinitial, int threads) {
  const Backward g{y, dy, decay, initial, dx, nullptr};
  by_type(dy.type, [&](auto t) { backward<decltype(t)>(g, ddecay, dinitial, threads); });
}

}  // namespace retro::RETRO_ISA
