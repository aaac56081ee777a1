// Merge of attentions. A task processes a few tokens with all their heads, because the heads of a token are adjacent in
// memory. Every element of the outputs is written by one task, so the bits do not depend on the number of threads.
#include "merge_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int64_t TOKENS = 32;  // tokens per task; several, because neighbouring values of lse share cache lines

// The parts that count for one row. A part with lse -inf does not count, even if its out is NaN.
struct Parts {
  std::vector<int64_t> index;
  std::vector<float> weight;  // padded to whole vectors

  explicit Parts(int64_t parts) : index(parts), weight(ceil_div(parts, LANES) * LANES) {}

  // Lists the parts and returns the log-sum-exp. The weights are divided by their sum: exp(lse_p - lse) would contain
  // the rounding error of a large lse as a common factor.
  float list(const View& lses, int64_t b, int64_t h, int64_t n) {
    index.clear();
    std::fill(weight.begin(), weight.end(), -INFINITY);
    float top = -INFINITY;
    for (int64_t p = 0; p < lses.size[0]; ++p) {
      const float x = *lses.at<const float>(p, b, h, n);
      if (x == -INFINITY)
        continue;
      top = x > top || std::isnan(x) ? x : top;
      weight[index.size()] = x;
      index.push_back(p);
    }
    if (index.empty())
      return -INFINITY;
    const int64_t count = static_cast<int64_t>(index.size());
    Vec sums = zero();
    for (int64_t i = 0; i < count; i += LANES) {
      const Vec x = exp(load(&weight[i]) - broadcast(top));
      store(&weight[i], x);
      sums = sums + x;
    }
    const float total = sum(sums);
    for (int64_t i = 0; i < count; i += LANES)
      store(&weight[i], load(&weight[i]) / broadcast(total));
    return static_cast<float>(std::log(double{total}) + top);
  }
};

// Calls f(parts, b, n) for every token, with the thread's own list of parts.
template <class Function> void each_token(const View& lses, int threads, Function&& f) {
  const int64_t N = lses.size[3], tokens = lses.size[1] * N;
  parallel_for(ceil_div(tokens, TOKENS), threads, [&](int64_t task) {
    Parts parts(lses.size[0]);
    for (int64_t t = task * TOKENS; t < std::min(tokens, (task + 1) * TOKENS); ++t)
      f(parts, t / N, t % N);
  });
}

template <class T> void merge(const View& outs, const View& lses, const View& out, const View& lse, int threads) {
  const int64_t heads = outs.size[3], width = outs.size[4];
  each_token(lses, threads, [&](Parts& parts, int64_t b, int64_t n) {
    for (int64_t h = 0; h < heads; ++h) {
      *lse.at<float>(b, h, n) = parts.list(lses, b, h, n);
      T* to = out.at<T>(b, n, h);
      vectors(width, [&](int64_t d, auto... count) {
        Vec total = zero();
        for (size_t i = 0; i < parts.index.size(); ++i)
          total = fma(broadcast(parts.weight[i]), load(outs.at<const T>(parts.index[i], b, n, h) + d, count...), total);
        store(to + d, total, count...);
      });
    }
  });
}

// dout_p = w_p dout and dlse_p = w_p (dlse + dout · out_p - dout · out), where dout · out is the weighted mean of the
// products dout · out_p, and 0 for parts that do not count.
template <class T> void differentiate(const View& outs, const View& lses, const View& dout, const View& dlse,
                                      const View& douts, const View& dlses, int threads) {
  const int64_t heads = outs.size[3], width = outs.size[4];
  each_token(lses, threads, [&](Parts& parts, int64_t b, int64_t n) {
    std::vector<float> products(outs.size[0]);
    for (int64_t h = 0; h < heads; ++h) {
      parts.list(lses, b, h, n);
      const T* grad = dout ? dout.at<const T>(b, n, h) : nullptr;
      const size_t counted = parts.index.size();
      float mean = 0;
      for (size_t i = 0; i < counted && dlses; ++i) {
        Vec product = zero();
        const T* x = outs.at<const T>(parts.index[i], b, n, h);
        if (grad)
          vectors(width, [&](int64_t d, auto... count) {
            product = fma(load(grad + d, count...), load(x + d, count...), product);
          });
        products[i] = sum(product);
        mean += parts.weight[i] * products[i];
      }
      size_t i = 0;
      for (int64_t p = 0; p < outs.size[0]; ++p) {
        const bool counts = i < counted && parts.index[i] == p;
        if (dlses)
          *dlses.at<float>(p, b, h, n) =
              counts ? parts.weight[i] * (products[i] - mean + (dlse ? *dlse.at<const float>(b, h, n) : 0.f)) : 0.f;
        if (douts) {
          T* to = douts.at<T>(p, b, n, h);
          const Vec weight = broadcast(counts ? parts.weight[i] : 0.f);
          vectors(width, [&](int64_t d, auto... count) {
            store(to + d, counts && grad ? weight * load(grad + d, count...) : zero(), count...);
          });
        }
        i += counts;
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
