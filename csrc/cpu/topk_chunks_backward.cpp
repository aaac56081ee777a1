// Gradients of the chosen scores. For dquery, a task gathers the k keys of each query. For dkey, a counting sort orders
// the slots by key and keeps the slots of one key in ascending order, and a task gathers the queries of each key. So
// the kernel needs no atomics, and the order of the sums does not depend on the threads.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel.h"
#include "simd.h"
#include "topk_chunks.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int64_t TASK_ROWS = 16;
constexpr int COLUMNS = 4;  // number of vectors of a row that are summed together in registers

// A slot is a flat index into `indices` [B,Q,k]. Rows of a tensor [B,N,D] are numbered across its batch entries.
template <class T> struct Backward {
  const View &query, &key, &indices, &dscores;
  bool l2;
  int threads;
  int64_t k = indices.size[2], slots = query.size[0] * query.size[1] * k;

  template <class Element> static Element* row(const View& of, int64_t r) {
    return of.at<Element>(r / of.size[1], r % of.size[1]);
  }
  // Returns the row of `key` that a slot refers to, or -1.
  int64_t key_of(int64_t slot) const {
    const int64_t j = indices.at<const int64_t>()[slot];
    return j < 0 || key.size[0] == 1 ? j : slot / (query.size[1] * k) * key.size[1] + j;
  }

  // Writes the gradient of `own`. Row r is a sum over its slots, slot_at(i) for i from begin(r) to begin(r + 1). Each
  // slot adds its dscore times the row other(slot), which may be null. For l2, it adds twice its dscore times the
  // difference of the row other(slot) and the own row.
  template <class Begin, class SlotAt, class Other>
  void write(const View& own, const View& to, Begin&& begin, SlotAt&& slot_at, Other&& other) const {
    const int64_t rows = own.size[0] * own.size[1], dim = own.size[2];
    const auto columns = [&](int64_t r, const T* base, T* into, auto many, int64_t d, auto... n) {
      constexpr int COUNT = many;
      Vec sum[COUNT], origin[COUNT];
      for (int c = 0; c < COUNT; ++c) {
        sum[c] = zero();
        origin[c] = base ? load(base + d + c * LANES, n...) : zero();
      }
      for (int64_t i = begin(r); i < begin(r + 1); ++i) {
        const int64_t slot = slot_at(i);
        const T* from = other(slot);
        if (!from)
          continue;
        const Vec w = broadcast((l2 ? 2.f : 1.f) * row<const float>(dscores, slot / k)[slot % k]);
        for (int c = 0; c < COUNT; ++c)
          sum[c] = fma(w, load(from + d + c * LANES, n...) - origin[c], sum[c]);
      }
      for (int c = 0; c < COUNT; ++c)
        store(into + d + c * LANES, sum[c], n...);
    };
    parallel_for(ceil_div(rows, TASK_ROWS), threads, [&](int64_t task) {
      for (int64_t r = task * TASK_ROWS; r < std::min(rows, (task + 1) * TASK_ROWS); ++r) {
        const T* base = l2 ? row<const T>(own, r) : nullptr;
        T* const into = row<T>(to, r);
        const std::integral_constant<int, COLUMNS> many;
        const std::integral_constant<int, 1> one;
        int64_t d = 0;
        for (; d + COLUMNS * LANES <= dim; d += COLUMNS * LANES)
          columns(r, base, into, many, d);
        for (; d < dim; d += LANES)
          columns(r, base, into, one, d, static_cast<int>(dim - d));
      }
    });
  }

  void of_query(const View& dquery) const {
    const auto chosen = [&](int64_t slot) {
      const int64_t r = key_of(slot);
      return r < 0 ? nullptr : row<const T>(key, r);
    };
    write(query, dquery, [&](int64_t r) { return r * k; }, [](int64_t i) { return i; }, chosen);
  }

  void of_key(const View& dkey) const {
    std::vector<int64_t> begin(key.size[0] * key.size[1] + 1), sorted(slots);
    for (int64_t s = 0; s < slots; ++s)
      if (const int64_t r = key_of(s); r >= 0)
        ++begin[r];
    int64_t total = 0;
    for (int64_t& count : begin) {
      total += count;
      count = total;  // the end of each row's slots, ...
    }
    for (int64_t s = slots - 1; s >= 0; --s)
      if (const int64_t r = key_of(s); r >= 0)
        sorted[--begin[r]] = s;  // ... which becomes their beginning
    write(
        key, dkey, [&](int64_t r) { return begin[r]; }, [&](int64_t i) { return sorted[i]; },
        [&](int64_t slot) { return row<const T>(query, slot / k); });
  }
};

// Checks the indices. An index becomes an address, so the check is here, where callers cannot bypass it.
void check_indices(const View& indices, int64_t keys) {
  const auto* const index = indices.at<const int64_t>();
  const int64_t count = indices.size[0] * indices.size[1] * indices.size[2];
  const auto wrong = [=](int64_t j) { return j < -1 || j >= keys; };
  if (const int64_t* found = std::find_if(index, index + count, wrong); found != index + count)
    throw std::invalid_argument("indices: expected -1 to S-1=" + std::to_string(keys - 1) + "; got " +
                                std::to_string(*found));
}

}  // namespace

void topk_chunks_backward(const View& query, const View& key, const View& indices, const View& dscores,
                          const View& dquery, const View& dkey, bool l2, int threads) {
  check_indices(indices, key.size[1]);
  by_type(query.type, [&](auto t) {
    const Backward<decltype(t)> gradient{query, key, indices, dscores, l2, threads};
    if (dquery)
      gradient.of_query(dquery);
    if (dkey)
      gradient.of_key(dkey);
  });
}

}  // namespace retro::RETRO_ISA
