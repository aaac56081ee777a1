// Compare each function of one instruction set's vector type with plain C++ on each lane.
#include "cpu/simd.h"

#include <cmath>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>

namespace retro::RETRO_ISA {
namespace {

void expect(bool right, const char* what, int lane = -1) {
  if (!right)
    throw std::runtime_error(std::string(what) + " is wrong in lane " + std::to_string(lane));
}
bool same(float a, float b) { return as_bits(a) == as_bits(b) || (a != a && b != b); }

struct Lanes {
  float of[LANES];
  explicit Lanes(Vec x) { store(of, x); }
};

constexpr float INF = std::numeric_limits<float>::infinity(), NAN_ = std::numeric_limits<float>::quiet_NaN();
// Values that round up, down and to even in both half types, that overflow, and subnormal, infinite and NaN values.
const float EDGES[] = {0.f,        -0.f,       1.f,        -1.5f,   0x1.01p0f,        0x1.03p0f, 0x1.010002p0f,
                       0x1.002p0f, 0x1.006p0f, 65504.f,    65519.f, 65520.f,          0x1p-14f,  0x1.8p-24f,
                       0x1p-25f,   0x1p-130f,  -0x1p-149f, 3e38f,   -0x1.fffffep127f, INF,       -INF,
                       NAN_,       0.1f,       -7.3f};
constexpr int COUNT = sizeof EDGES / sizeof *EDGES;

Vec edges_from(int at) {
  float x[LANES];
  for (int i = 0; i < LANES; ++i)
    x[i] = EDGES[(at + i) % COUNT];
  return load(x);
}

// Load and store whole vectors and the first n lanes. The elements behind must not change.
template <class T> void check_memory(const char* type) {
  constexpr int GUARDED = LANES + 2;
  for (int at = 0; at < COUNT; ++at)
    for (int n = -1; n <= LANES + 1; ++n) {
      T want[GUARDED], got[GUARDED];
      for (int i = 0; i < GUARDED; ++i)
        from_float(7.f, got + i);
      std::memcpy(want, got, sizeof got);
      for (int i = 0; i < LANES && i < n; ++i)
        from_float(EDGES[(at + i) % COUNT], want + i);
      n > LANES ? store(got, edges_from(at)) : store(got, edges_from(at), n);
      for (int i = 0; i < GUARDED; ++i)
        expect(same(to_float(got[i]), to_float(want[i])), type, i);
      const Lanes back(n > LANES ? load(want) : load(want, n));
      for (int i = 0; i < LANES; ++i)
        expect(same(back.of[i], i < n ? to_float(want[i]) : 0.f), type, i);
    }
}

void check_arithmetic() {
  for (int at = 0; at < COUNT; ++at)
    for (int by = 0; by < COUNT; ++by) {
      const Vec a = edges_from(at), b = edges_from(by);
      const Lanes x(a), y(b), sum(a + b), product(a * b), fused(fma(a, b, a)), more(max(a, b)), less(min(a, b));
      const Lanes chosen(select(ge(a, b), a, b)), both(select(either(gt(a, b), gt(b, a)), a, zero()));
      uint32_t greater = 0;
      for (int i = 0; i < LANES; ++i) {
        const float p = x.of[i], q = y.of[i];
        greater |= static_cast<uint32_t>(p > q) << i;
        expect(same(sum.of[i], p + q) && same(product.of[i], p * q), "arithmetic", i);
        expect(same(fused.of[i], std::fma(p, q, p)), "fma", i);
        expect(same(more.of[i], p > q ? p : q) && same(less.of[i], p < q ? p : q), "max or min", i);
        expect(same(chosen.of[i], p >= q ? p : q), "ge or select", i);
        expect(same(both.of[i], p > q || q > p ? p : 0.f), "gt or either", i);
      }
      expect(bits(gt(a, b)) == greater, "bits");
    }
  for (int n = -1; n <= LANES + 1; ++n)
    expect(bits(first(n)) == (n < 0 ? 0u : n >= LANES ? (1u << LANES) - 1 : (1u << n) - 1), "first", n);
}

// Powers are within two units in the last place of the exact value. Limits are 0, infinity or NaN.
void check_powers() {
  for (float x = -160.f; x < 88.f; x += 0.37f) {
    Vec power;
    const Lanes e(exp(broadcast(x))), two(exp2(broadcast(x))), rounded(power_of_two(broadcast(x), power));
    const double exact_e = std::exp(static_cast<double>(x)), exact_two = std::exp2(static_cast<double>(x));
    for (int i = 0; i < LANES; ++i) {
      const bool below = x < -87.3f && e.of[i] == 0.f;
      expect(below || std::abs(e.of[i] - exact_e) <= 2.4e-7 * exact_e + 3e-45, "exp", i);
      const bool vanishes = x < -125.f && two.of[i] == 0.f;
      expect(vanishes || std::abs(two.of[i] - exact_two) <= 2.4e-7 * exact_two + 3e-45, "exp2", i);
      expect(same(rounded.of[i], std::nearbyint(x)), "power_of_two", i);
    }
  }
  for (const float x : {-INF, NAN_}) {
    const float want = x == x ? 0.f : NAN_;
    expect(same(Lanes(exp(broadcast(x))).of[0], want) && same(Lanes(exp2(broadcast(x))).of[0], want), "exp or exp2");
  }
}

void check_across() {
  Vec rows[LANES];
  float x[LANES], total = 0;
  for (int r = 0; r < LANES; ++r) {
    for (int c = 0; c < LANES; ++c)
      x[c] = static_cast<float>(r * LANES + c);
    rows[r] = load(x);
  }
  for (int c = 0; c < LANES; ++c)
    total += x[c];
  expect(sum(rows[LANES - 1]) == total && max_of(rows[LANES - 1]) == x[LANES - 1], "sum or max_of");
  Vec copied[LANES];
  for (int r = 0; r < LANES; ++r)
    copied[r] = rows[r];
  const Lanes of_rows(sums(copied));
  for (int r = 0; r < LANES; ++r)
    expect(of_rows.of[r] == sum(rows[r]), "sums", r);
  transpose(rows);
  for (int r = 0; r < LANES; ++r)
    for (int c = 0; c < LANES; ++c)
      expect(Lanes(rows[r]).of[c] == static_cast<float>(c * LANES + r), "transpose", c);
}

// Pairs of small integers have exact products.
void check_pairs() {
  bf16 even[LANES], odd[LANES];
  uint32_t both[LANES], kept[LANES];
  for (int i = 0; i < LANES; ++i) {
    from_float(static_cast<float>(i + 1), even + i), from_float(static_cast<float>(3 * i - 5), odd + i);
    both[i] = even[i].bits | static_cast<uint32_t>(odd[i].bits) << 16;
  }
  for (int n = 0; n <= LANES; ++n) {
    const Pairs some = interleave(even, odd, n);
    const Lanes low(even_of(some)), high(odd_of(some)), same_low(even_of(load(both))),
        same_high(odd_of(to_pairs(load(even), load(odd))));
    for (int i = 0; i < LANES; ++i) {
      expect(low.of[i] == (i < n ? to_float(even[i]) : 0.f) && high.of[i] == (i < n ? to_float(odd[i]) : 0.f),
             "interleave", i);
      expect(same_low.of[i] == to_float(even[i]) && same_high.of[i] == to_float(odd[i]), "load or to_pairs", i);
    }
  }
  store(kept, load(both));
  const Lanes all(dot(broadcast(0.5f), load(kept), load(both)));
  const Lanes one(dot(zero(), broadcast(kept[1]), load(both)));
  for (int i = 0; i < LANES; ++i) {
    const float a = to_float(even[i]), b = to_float(odd[i]);
    expect(all.of[i] == 0.5f + a * a + b * b && one.of[i] == to_float(even[1]) * a + to_float(odd[1]) * b, "dot", i);
  }
}

}  // namespace

void check_primitives() {
  check_memory<float>("float");
  check_memory<bf16>("bfloat16");
  check_memory<fp16>("float16");
  check_arithmetic();
  check_powers();
  check_across();
  check_pairs();
}

}  // namespace retro::RETRO_ISA
