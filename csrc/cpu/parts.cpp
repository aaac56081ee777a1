#include "parts.h"

#include <algorithm>
#include <atomic>

#include "arena.h"
#include "gemm.h"
#include "pack.h"
#include "parallel.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int SLICE = 12;  // rows of a product, a multiple of the tile's

std::atomic<float> sink{0};

// A tile stored where it belongs: the least that any product does with its sums.
struct Stored {
  float* to;
  int64_t ld;

  template <int MR, int NR>
  RETRO_INLINE void tile(int row, int column, const Vec (&x)[MR][NR]) const {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NR; ++v) store(to + (row + r) * ld + column + v * LANES, x[r][v]);
  }
};

template <class Elem>
void products(int m, int n, int k, bool by_columns, int64_t repeats) {
  const int kc = kc_of<Elem>(k);
  const auto carve = [&](Arena arena, Elem*& a, Elem*& b, float*& c) {
    a = arena.take<Elem>(int64_t{m + SLICE} * kc), b = arena.take<Elem>(int64_t{kc} * n);
    c = arena.take<float>(int64_t{m + SLICE} * n);
    return arena.used();
  };
  Elem *a, *b;
  float* c;
  const size_t bytes = carve(Arena(nullptr), a, b, c);
  void* memory = scratch(bytes);
  std::fill_n(static_cast<char*>(memory), bytes, 0);
  carve(Arena(memory), a, b, c);
  for (int64_t i = 0; i < repeats; ++i)
    for (int row = 0; row < m; row += SLICE) {
      const int rows = std::min(SLICE, m - row);
      const Stored stored{c + int64_t{row} * n, n};
      if (by_columns)
        gemm(rows, n / LANES, kc, ColumnMajor<Elem>{a + row, m}, PackedB<Elem>{b, n}, stored);
      else
        gemm(rows, n / LANES, kc, RowMajor<Elem>{a + int64_t{row} * kc, kc}, PackedB<Elem>{b, n}, stored);
    }
  sink.store(c[0], std::memory_order_relaxed);
}

template <class T>
void packing(int rows, int columns, int64_t repeats) {
  const int width = pad(columns);
  const auto carve = [&](Arena arena, T*& from, float*& packed, float*& turned) {
    from = arena.take<T>(int64_t{rows} * width), packed = arena.take<float>(int64_t{rows} * width);
    turned = arena.take<float>(int64_t{pad(rows)} * width);
    return arena.used();
  };
  T* from;
  float *packed, *turned;
  const size_t bytes = carve(Arena(nullptr), from, packed, turned);
  void* memory = scratch(bytes);
  std::fill_n(static_cast<char*>(memory), bytes, 0);
  carve(Arena(memory), from, packed, turned);
  for (int64_t i = 0; i < repeats; ++i) {
    for (int r = 0; r < rows; ++r) pack_row(from + r * width, nullptr, columns, packed + r * width);
    transpose(packed, width, rows, columns, turned, pad(rows));
  }
  sink.store(turned[0], std::memory_order_relaxed);
}

}  // namespace

void part_products(int type, int m, int n, int k, bool by_columns, int64_t repeats, int threads) {
  by_storage(static_cast<Type>(type), [&](auto, auto e) {
    parallel_for(threads, threads, [&](int64_t) { products<decltype(e)>(m, pad(n), k, by_columns, repeats); });
  });
}

void part_softmax(int n, int64_t repeats, int threads) {
  parallel_for(threads, threads, [&](int64_t) {
    auto* scores = static_cast<float*>(scratch(2 * pad(n) * sizeof(float)));
    float* to = scores + pad(n);
    std::fill_n(scores, pad(n), -1.f);
    Vec sum = zero();
    for (int64_t i = 0; i < repeats; ++i)
      for (int x = 0; x < n; x += LANES) {
        const Vec p = exp2(load(scores + x) - broadcast(1.f));
        sum = sum + p;
        store(to + x, p);
      }
    float first[LANES];
    store(first, sum);
    sink.store(first[0] + to[0], std::memory_order_relaxed);
  });
}

void part_packing(int type, int rows, int columns, int64_t repeats, int threads) {
  by_type(static_cast<Type>(type), [&](auto t) {
    parallel_for(threads, threads, [&](int64_t) { packing<decltype(t)>(rows, columns, repeats); });
  });
}

void part_reading(const View& x, int threads) {
  parallel_for(threads, threads, [&](int64_t task) {
    Vec sum[4] = {zero(), zero(), zero(), zero()};
    const int64_t begin = x.size[0] * task / threads, end = x.size[0] * (task + 1) / threads, columns = x.size[1];
    for (int64_t r = begin; r < end; ++r) {
      const float* row = x.at<const float>(r);
      for (int64_t c = 0; c + 4 * LANES <= columns; c += 4 * LANES)
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) sum[v] = sum[v] + load(row + c + v * LANES);
    }
    float first[LANES];
    store(first, sum[0] + sum[1] + sum[2] + sum[3]);
    sink.store(first[0], std::memory_order_relaxed);
  });
}

void part_handover(int64_t tasks, int threads) {
  parallel_for(tasks, threads, [](int64_t) {});
}

}  // namespace retro::RETRO_ISA
