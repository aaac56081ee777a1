// Gradients of the chosen scores. dquery gathers the k keys of a query. dkey sorts the slots by key and gathers the
// queries of each key; a counting sort keeps a key's slots in ascending order. So there are no atomics, and the order
// of the sums does not depend on the threads.
#include <algorithm>
#include <vector>

#include "parallel.h"
#include "simd.h"
#include "topk_chunks.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int64_t TASK_ROWS = 16;
constexpr int COLUMNS = 4;  // vectors of a row held in registers

struct Call {
  const View &query, &key, &indices, &dscores;
  bool l2;
  int64_t queries, k;

  int64_t slots() const { return query.size[0] * queries * k; }
  int64_t batch_of(int64_t slot) const { return slot / (queries * k); }
  int64_t query_of(int64_t slot) const { return slot / k % queries; }
  // The row of `key` seen as one list over its batch entries, or -1.
  int64_t key_of(int64_t slot) const {
    const int64_t j = indices.at<const int64_t>()[slot];
    return j < 0 ? -1 : (key.size[0] > 1 ? batch_of(slot) * key.size[1] : 0) + j;
  }
  // d score / d row is the other row or, for l2, twice its difference from this one
  float weight(int64_t slot) const {
    return (l2 ? 2.f : 1.f) * dscores.at<const float>(batch_of(slot), query_of(slot))[slot % k];
  }
  template <class T>
  const T* query_row(int64_t slot) const {
    return query.at<const T>(batch_of(slot), query_of(slot));
  }
  template <class T>
  const T* key_row(int64_t row) const {
    return key.at<const T>(row / key.size[1], row % key.size[1]);
  }
};

template <class T>
struct Term {
  float weight;  // with a null row the term is skipped
  const T* row;
};

// to = sum_i weight_i * (row_i - base); base is 0 if null
template <class T, class Terms>
void combine(T* to, const T* base, int64_t dim, int64_t count, Terms&& terms) {
  const auto columns = [&](auto many, int64_t d, auto... n) {
    constexpr int COUNT = many;
    Vec sum[COUNT], origin[COUNT];
    for (int c = 0; c < COUNT; ++c) sum[c] = zero(), origin[c] = base ? load(base + d + c * LANES, n...) : zero();
    for (int64_t i = 0; i < count; ++i) {
      const Term<T> term = terms(i);
      if (!term.row) continue;
      const Vec w = broadcast(term.weight);
      for (int c = 0; c < COUNT; ++c) sum[c] = fma(w, load(term.row + d + c * LANES, n...) - origin[c], sum[c]);
    }
    for (int c = 0; c < COUNT; ++c) store(to + d + c * LANES, sum[c], n...);
  };
  int64_t d = 0;
  for (; d + COLUMNS * LANES <= dim; d += COLUMNS * LANES) columns(std::integral_constant<int, COLUMNS>{}, d);
  for (; d < dim; d += LANES) columns(std::integral_constant<int, 1>{}, d, static_cast<int>(dim - d));
}

template <class T>
void query_gradient(const Call& p, const View& dquery, int threads) {
  const int64_t rows = p.query.size[0] * p.queries;
  parallel_for((rows + TASK_ROWS - 1) / TASK_ROWS, threads, [&](int64_t task) {
    for (int64_t r = task * TASK_ROWS; r < std::min(rows, (task + 1) * TASK_ROWS); ++r) {
      const int64_t slot = r * p.k;
      combine(dquery.at<T>(r / p.queries, r % p.queries), p.l2 ? p.query_row<T>(slot) : nullptr, p.query.size[2], p.k,
              [&](int64_t i) {
                const int64_t key = p.key_of(slot + i);
                return key < 0 ? Term<T>{0, nullptr} : Term<T>{p.weight(slot + i), p.key_row<T>(key)};
              });
    }
  });
}

template <class T>
void key_gradient(const Call& p, const View& dkey, int threads) {
  const int64_t rows = p.key.size[0] * p.key.size[1], slots = p.slots();
  std::vector<int64_t> begin(rows + 1), sorted(slots);
  for (int64_t s = 0; s < slots; ++s)
    if (const int64_t key = p.key_of(s); key >= 0) ++begin[key];
  int64_t total = 0;
  for (int64_t& count : begin) total += count, count = total;  // the end of each row's slots ...
  for (int64_t s = slots - 1; s >= 0; --s)
    if (const int64_t key = p.key_of(s); key >= 0) sorted[--begin[key]] = s;  // ... is moved down to their begin
  parallel_for((rows + TASK_ROWS - 1) / TASK_ROWS, threads, [&](int64_t task) {
    for (int64_t r = task * TASK_ROWS; r < std::min(rows, (task + 1) * TASK_ROWS); ++r) {
      const int64_t* mine = sorted.data() + begin[r];
      combine(dkey.at<T>(r / p.key.size[1], r % p.key.size[1]), p.l2 ? p.key_row<T>(r) : nullptr, p.key.size[2],
              begin[r + 1] - begin[r], [&](int64_t i) { return Term<T>{p.weight(mine[i]), p.query_row<T>(mine[i])}; });
    }
  });
}

}  // namespace

void topk_chunks_backward(const View& query, const View& key, const View& indices, const View& dscores,
                          const View& dquery, const View& dkey, bool l2, int threads) {
  const Call p{query, key, indices, dscores, l2, query.size[1], indices.size[2]};
  by_type(query.type, [&](auto t) {
    if (dquery) query_gradient<decltype(t)>(p, dquery, threads);
    if (dkey) key_gradient<decltype(t)>(p, dkey, threads);
  });
}

}  // namespace retro::RETRO_ISA
