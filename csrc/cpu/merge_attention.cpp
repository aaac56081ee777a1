// Merge of attentions. A task processes a few tokens with all their heads, because the heads of a token are adjacent in
// memory. Every element of the outputs is written by one task, so the bits do not depend on the number of threads.
#include "merge_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "pack.h"
#include "parallel.h"
#include "simd.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int TOKENS = 32;        // maximum number of tokens per task, whose heads are processed together
constexpr int64_t FEW = 1 << 18;  // with fewer elements, one thread ends before others have started
constexpr float NONE = -1;        // weight of a part with lse -inf: it does not count, even if its out is NaN

// Weights of the parts, for the tokens [first, first + count) of batch entry b. Rows, which are the tokens of all
// heads, are the lanes of a vector.
class Weights {
 public:
  const int64_t b, first, parts;
  const int count;

  // Reads `lses` and writes the log-sum-exp to `lse`, unless that is null. The weights are divided by their sum:
  // exp(lse_p - lse) would contain the rounding error of a large lse as a common factor.
  Weights(const View& lses, const View& lse, int64_t b_, int64_t first_, int count_)
      : b(b_), first(first_), parts(lses.size[0]), count(count_), stride(pad(static_cast<int>(lses.size[2]) * count)),
        weights_(parts * stride, -INFINITY) {
    const int64_t heads = lses.size[2];
    for (int64_t p = 0; p < parts; ++p)
      for (int64_t h = 0; h < heads; ++h) {
        const float* from = lses.at<const float>(p, b, h, first);
        for (int t = 0; t < count; ++t)
          weights_[p * stride + h * count + t] = from[t * lses.stride[3]];
      }
    for (int64_t row = 0; row < heads * count; row += LANES) {
      float top[LANES], total[LANES];
      normalise(&weights_[row], top, total);
      for (int64_t i = row; lse && i < std::min<int64_t>(heads * count, row + LANES); ++i)
        *lse.at<float>(b, i / count, first + i % count) =
            static_cast<float>(std::log(double{total[i - row]}) + top[i - row]);
    }
  }
  // Returns the weight of part 0 for token `first` + t. The weights of the other parts follow, `stride` apart.
  const float* of(int64_t h, int t) const { return &weights_[h * count + t]; }

  const int64_t stride;

 private:
  // Replaces the lse of LANES rows by weights. Writes the largest lse, or 0 if no part counts, and the sum of the
  // weights before the division.
  void normalise(float* w, float* top, float* total) const {
    const Vec none = broadcast(-INFINITY);
    Vec most = none, sums = zero();
    for (int64_t p = 0; p < parts; ++p) {
      const Vec x = load(w + p * stride);
      most = select(gt(x, most), x, most);
    }
    most = select(gt(most, none), most, zero());  // avoid -inf - -inf
    for (int64_t p = 0; p < parts; ++p) {
      const Vec x = load(w + p * stride), e = exp(x - most);
      const Mask hidden = ge(none, x);  // false if x is NaN
      sums = sums + select(hidden, zero(), e);
      store(w + p * stride, select(hidden, broadcast(NONE), e));
    }
    for (int64_t p = 0; p < parts; ++p) {
      const Vec x = load(w + p * stride);
      store(w + p * stride, select(gt(zero(), x), x, x / sums));
    }
    store(top, most);
    store(total, sums);
  }

  std::vector<float> weights_;  // [parts][stride]
};

// Calls f(weights) for blocks of tokens, which are tasks. `outs` has the parts.
template <class Function>
void each_block(const View& outs, const View& lses, const View& lse, int threads, Function&& f) {
  const int64_t N = lses.size[3], blocks = ceil_div(N, TOKENS);
  const int64_t elements = lses.size[0] * lses.size[1] * N * lses.size[2] * outs.size[4];
  parallel_for(lses.size[1] * blocks, elements < FEW ? 1 : threads, [&](int64_t task) {
    const int64_t first = task % blocks * TOKENS;
    f(Weights(lses, lse, task / blocks, first, static_cast<int>(std::min<int64_t>(TOKENS, N - first))));
  });
}

// Writes the weighted sum of the parts to WIDE vectors of `to`, which the parts of `from` have `step` apart.
template <int WIDE, class T, class... Count> RETRO_INLINE void add_parts(const Weights& weights, const float* w,
                                                                         const T* from, int64_t step, T* to,
                                                                         Count... count) {
  Vec totals[WIDE];
  unrolled<1, WIDE>([&](int, int c) { totals[c] = zero(); });
  for (int64_t p = 0; p < weights.parts; ++p, w += weights.stride, from += step)
    if (*w != NONE)
      unrolled<1, WIDE>(
          [&](int, int c) { totals[c] = fma(broadcast(*w), load(from + c * LANES, count...), totals[c]); });
  unrolled<1, WIDE>([&](int, int c) { store(to + c * LANES, totals[c], count...); });
}

template <class T> void merge(const View& outs, const View& lses, const View& out, const View& lse, int threads) {
  constexpr int WIDE = 4;
  const int64_t heads = outs.size[3], width = outs.size[4], wide = width / (WIDE * LANES) * (WIDE * LANES);
  each_block(outs, lses, lse, threads, [&](const Weights& weights) {
    for (int t = 0; t < weights.count; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const float* w = weights.of(h, t);
        const T* from = outs.at<const T>(0, weights.b, weights.first + t, h);
        T* to = out.at<T>(weights.b, weights.first + t, h);
        for (int64_t d = 0; d < wide; d += WIDE * LANES)
          add_parts<WIDE>(weights, w, from + d, outs.stride[0], to + d);
        vectors(width - wide, [&](int64_t d, auto... count) {
          add_parts<1>(weights, w, from + wide + d, outs.stride[0], to + wide + d, count...);
        });
      }
  });
}

// dout_p = w_p dout and dlse_p = w_p (dlse + dout · out_p - dout · out), where dout · out is the weighted mean of the
// products dout · out_p, and 0 for parts that do not count.
template <class T> void differentiate(const View& outs, const View& lses, const View& dout, const View& dlse,
                                      const View& douts, const View& dlses, int threads) {
  const int64_t parts = outs.size[0], heads = outs.size[3], width = outs.size[4];
  each_block(outs, lses, View(), threads, [&](const Weights& weights) {
    std::vector<float> products(parts);
    const int64_t b = weights.b;
    for (int t = 0; t < weights.count; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t n = weights.first + t;
        const float* w = weights.of(h, t);
        const T* grad = dout ? dout.at<const T>(b, n, h) : nullptr;
        float mean = 0;
        for (int64_t p = 0; p < parts && dlses; ++p) {
          const T* x = outs.at<const T>(p, b, n, h);
          Vec product = zero();
          if (w[p * weights.stride] == NONE)
            continue;
          if (grad)
            vectors(width, [&](int64_t d, auto... count) {
              product = fma(load(grad + d, count...), load(x + d, count...), product);
            });
          products[p] = sum(product);
          mean += w[p * weights.stride] * products[p];
        }
        const float more = dlse ? *dlse.at<const float>(b, h, n) : 0.f;
        for (int64_t p = 0; p < parts; ++p) {
          const bool counts = w[p * weights.stride] != NONE;
          if (dlses)
            *dlses.at<float>(p, b, h, n) = counts ? w[p * weights.stride] * (products[p] - mean + more) : 0.f;
          if (!douts)
            continue;
          T* to = douts.at<T>(p, b, n, h);
          const Vec weight = broadcast(w[p * weights.stride]);
          vectors(width, [&](int64_t d, auto... count) {
            store(to + d, counts && grad ? weight * load(grad + d, count...) : zero(), count...);
          });
        }
      }
  });
}

}  // namespace

void merge_attention_forward(const View& outs, const View& lses, const View& out, const View& lse, int threads) {
  by_type(outs.type, [&](auto t) { merge<decltype(t)>(outs, lses, out, lse, threads); });
}

void merge_attention_backward(const View& outs, const View& lses, const View& dout, const View& dlse, const View& douts,
                              const View& dlses, int threads) {
  by_type(outs.type, [&](auto t) { differentiate<decltype(t)>(outs, lses, dout, dlse, douts, dlses, threads); });
}

}  // namespace retro::RETRO_ISA
