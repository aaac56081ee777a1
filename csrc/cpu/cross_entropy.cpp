// Cross-entropy. A task processes one row. A first pass, which reads memory, finds the largest logit. The passes for
// the exponentials and for their scaling read L2. Each lane has several sums, so that the error does not grow with the
// vocabulary.
#include "cross_entropy.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "parallel.h"
#include "simd.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int AT_ONCE = 4;  // number of vectors per step, each of which has its own maximum and sum

// Calls f(i, which) for every whole vector of a row, and f(i, 0, count) for the rest of the row, if any. `which` counts
// modulo AT_ONCE and is a constant in the unrolled loop.
template <class Function> RETRO_INLINE void vectors(int64_t width, Function&& f) {
  int64_t i = 0;
  for (; i + AT_ONCE * LANES <= width; i += AT_ONCE * LANES)
#pragma GCC unroll 4
    for (int v = 0; v < AT_ONCE; ++v)
      f(i + v * LANES, v);
  for (; i + LANES <= width; i += LANES)
    f(i, 0);
  if (i < width)
    f(i, 0, static_cast<int>(width - i));
}

float largest(const float* row, int64_t width) {
  float top = row[0];
  Vec m[AT_ONCE] = {broadcast(top), broadcast(top), broadcast(top), broadcast(top)};
  vectors(width, [&](int64_t i, int v, auto... count) {
    if constexpr (sizeof...(count) == 0)
      m[v] = max(m[v], load(row + i));
    else
      for (int64_t j = i; j < width; ++j)
        top = std::max(top, row[j]);
  });
  return std::max(top, max_of(max(max(m[0], m[1]), max(m[2], m[3]))));
}

// Returns the sum of exp(x - top) over a row. If KEPT, the row is replaced by the exponentials.
template <bool KEPT> float exponentials(float* row, int64_t width, float top) {
  const Vec shift = broadcast(top);
  Vec s[AT_ONCE] = {zero(), zero(), zero(), zero()};
  float rest = 0.f;
  vectors(width, [&](int64_t i, int v, auto... count) {
    const Vec e = exp(load(row + i, count...) - shift);
    if (KEPT)
      store(row + i, e, count...);
    if constexpr (sizeof...(count) == 0) {
      s[v] = s[v] + e;
    } else {
      float lanes[LANES];
      store(lanes, e);
      for (int64_t j = i; j < width; ++j)
        rest += lanes[j - i];
    }
  });
  return sum((s[0] + s[1]) + (s[2] + s[3])) + rest;
}

float loss(float* row, int64_t width, int64_t target, float weight, bool gradient) {
  const float top = largest(row, width), at_target = row[target];
  const float total = gradient ? exponentials<true>(row, width, top) : exponentials<false>(row, width, top);
  if (gradient) {
    const Vec scale = broadcast(weight / total);
    vectors(width, [&](int64_t i, int, auto... count) { store(row + i, load(row + i, count...) * scale, count...); });
    row[target] -= weight;
  }
  // This order of the sum keeps log(total), which would be rounded away next to a large maximum.
  return weight * (std::log(total) + (top - at_target));
}

// Checks the targets. A target becomes an address, so the check is here, where callers cannot bypass it.
void check_targets(const View& targets, int64_t classes, int64_t ignore_index) {
  for (int64_t t = 0; t < targets.size[0]; ++t) {
    const int64_t target = *targets.at<const int64_t>(t);
    if (target == ignore_index || (target >= 0 && target < classes))
      continue;
    throw std::invalid_argument("target: expected 0 to V-1=" + std::to_string(classes - 1) +
                                " or ignore_index=" + std::to_string(ignore_index) + "; got " + std::to_string(target));
  }
}

}  // namespace

void softmax_losses(const View& logits, const View& targets, int64_t ignore_index, const View& weights,
                    const View& losses, bool gradient, int threads) {
  const int64_t classes = logits.size[1];
  check_targets(targets, classes, ignore_index);
  parallel_for(logits.size[0], threads, [&](int64_t t) {
    const int64_t target = *targets.at<const int64_t>(t);
    float *const row = logits.at<float>(t), *const to = losses.at<float>(t);
    if (target != ignore_index) {
      *to = loss(row, classes, target, *weights.at<const float>(t), gradient);
      return;
    }
    *to = 0.f;
    if (gradient)
      std::fill_n(row, classes, 0.f);
  });
}

}  // namespace retro::RETRO_ISA
