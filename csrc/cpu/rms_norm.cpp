// Root-mean-square norm. A row is read from memory once, and the second pass over the row reads L1. The gradient of the
// weight is summed within groups of rows, whose number the caller chooses, and then over the groups in order. So the
// bits do not depend on the threads.
#include "rms_norm.h"

#include <algorithm>

#include "parallel.h"
#include "simd.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int ROWS = 32;  // rows per task of the forward pass

void normalise(const float* x, const float* weight, int64_t width, float eps, float* y, float* rstd) {
  Vec squares = zero();
  vectors(width, [&](int64_t i, auto... count) {
    const Vec v = load(x + i, count...);
    squares = fma(v, v, squares);
  });
  *rstd = 1.f / std::sqrt(sum(squares) / static_cast<float>(width) + eps);
  const Vec scale = broadcast(*rstd);
  vectors(width, [&](int64_t i, auto... count) {
    store(y + i, load(x + i, count...) * scale * load(weight + i, count...), count...);
  });
}

// Computes dx = rstd * (g - xhat * mean(g * xhat)) with g = dy * weight and xhat = x * rstd. Adds dy * xhat to dweight.
// dx and dweight may be null.
void differentiate(const float* x, const float* weight, float rstd, const float* dy, int64_t width, float* dx,
                   float* dweight) {
  const Vec scale = broadcast(rstd);
  Vec along = zero();
  vectors(width, [&](int64_t i, auto... count) {
    const Vec product = load(dy + i, count...) * (load(x + i, count...) * scale);
    along = fma(product, load(weight + i, count...), along);
    if (dweight)
      store(dweight + i, load(dweight + i, count...) + product, count...);
  });
  if (!dx)
    return;
  const Vec mean = broadcast(sum(along) / static_cast<float>(width));
  vectors(width, [&](int64_t i, auto... count) {
    const Vec g = load(dy + i, count...) * load(weight + i, count...);
    store(dx + i, scale * (g - load(x + i, count...) * scale * mean), count...);
  });
}

}  // namespace

void rms_norm_forward(const View& x, const View& weight, const View& y, const View& rstd, double eps, int threads) {
  const int64_t rows = x.size[0], width = x.size[1];
  parallel_for((rows + ROWS - 1) / ROWS, threads, [&](int64_t task) {
    for (int64_t r = task * ROWS; r < std::min(rows, (task + 1) * ROWS); ++r)
      normalise(x.at<const float>(r), weight.at<const float>(), width, static_cast<float>(eps), y.at<float>(r),
                rstd.at<float>(r));
  });
}

void rms_norm_backward(const View& x, const View& weight, const View& rstd, const View& dy, const View& dx,
                       const View& dweight, const View& partial, int threads) {
  const int64_t rows = x.size[0], width = x.size[1], groups = partial.size[0], group = (rows + groups - 1) / groups;
  parallel_for(groups, threads, [&](int64_t task) {
    float* sums = dweight ? partial.at<float>(task) : nullptr;
    if (sums)
      std::fill(sums, sums + width, 0.f);
    for (int64_t r = task * group; r < std::min(rows, (task + 1) * group); ++r)
      differentiate(x.at<const float>(r), weight.at<const float>(), *rstd.at<const float>(r), dy.at<const float>(r),
                    width, dx ? dx.at<float>(r) : nullptr, sums);
  });
  if (!dweight)
    return;
  float* to = dweight.at<float>();
  vectors(width, [&](int64_t i, auto... count) {
    Vec total = zero();
    for (int64_t g = 0; g < groups; ++g)
      total = total + load(partial.at<const float>(g) + i, count...);
    store(to + i, total, count...);
  });
}

}  // namespace retro::RETRO_ISA
