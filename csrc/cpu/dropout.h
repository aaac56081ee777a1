// Dropout of attention probabilities. The random words come from Philox4x32-10 (Salmon et al., 2011), and are equal in
// all backends.
#pragma once
#include "simd.h"

namespace retro::RETRO_ISA {

struct Dropout {
  uint32_t seed_low = 0, seed_high = 0;
  uint64_t threshold = 0;  // a probability is kept if its word >= threshold
  float kept = 1.f;        // factor of a kept probability
  uint32_t first_batch;    // index, in the whole call, of the first batch entry

  Dropout(const View& seed, double p, int64_t entry = 0)
      : kept(static_cast<float>(1.0 / (1.0 - p))), first_batch(static_cast<uint32_t>(entry)) {
    if (!(p > 0))
      return;
    const auto value = static_cast<uint64_t>(*seed.at<int64_t>());
    seed_low = static_cast<uint32_t>(value);
    seed_high = static_cast<uint32_t>(value >> 32);
    threshold = static_cast<uint64_t>(p * 4294967296.0);
  }
  explicit operator bool() const { return threshold > 0; }

  // Writes to[i] = kept or 0 for the query rows row..row+n-1 and one key. The compiler vectorises the loop over i.
  void factors(int64_t key, int64_t row, int head, int64_t batch, int n, float* to) const {
    const uint32_t k = uint32_t(key), first = uint32_t(row), h = uint32_t(head), b = first_batch + uint32_t(batch);
    for (int i = 0; i < n; ++i)
      to[i] = factor(k, first + uint32_t(i), h, b);
  }
  // Writes to[i] = kept or 0 for the keys key..key+n-1 and one query row.
  void factors_of_row(int64_t key, int64_t row, int head, int64_t batch, int n, float* to) const {
    const uint32_t first = uint32_t(key), r = uint32_t(row), h = uint32_t(head), b = first_batch + uint32_t(batch);
    for (int i = 0; i < n; ++i)
      to[i] = factor(first + uint32_t(i), r, h, b);
  }

 private:
  RETRO_INLINE float factor(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) const {
    constexpr uint32_t A = 0xD2511F53u, B = 0xCD9E8D57u, WEYL_A = 0x9E3779B9u, WEYL_B = 0xBB67AE85u;
    uint32_t k0 = seed_low, k1 = seed_high;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = static_cast<uint64_t>(c0) * A, b = static_cast<uint64_t>(c2) * B;
      c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
      c1 = static_cast<uint32_t>(b);
      c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
      c3 = static_cast<uint32_t>(a);
      k0 += WEYL_A;
      k1 += WEYL_B;
    }
    return c0 >= threshold ? kept : 0.f;
  }
};

}  // namespace retro::RETRO_ISA
