// Exact top-k. A task scans a range of keys for a group of queries, one tile of keys at a time (topk_scan.h). It keeps
// the k best keys of each query in a sorted list: lane by lane if k is small, otherwise in the outputs. If there are
// few queries and many keys, the keys are divided into ranges as well, and the partial lists are merged in the order of
// the keys. The ranges do not change the result, because (score descending, index ascending) is a total order, and
// because the bits of a score do not depend on the ranges.
//
// For l2 the scan computes 2 q.k - q.q - k.k, which suffers from cancellation, and compares it with the k-th score
// minus a bound on the rounding error. Keys above this threshold are scored again from the differences of their
// elements. So the lists have exact scores, and no key is lost.
#include "topk_chunks.h"

#include <algorithm>
#include <vector>

#include "pack.h"
#include "parallel.h"
#include "topk_scan.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int64_t GROUP_BYTES = 256 << 10;  // maximum size of a task's packed queries, which stay in a part of L2
constexpr int64_t PARTIAL_BYTES = 8 << 20;  // maximum size of all partial lists together
constexpr int64_t TASKS_PER_THREAD = 4;     // so that a slow thread does not delay the end much
constexpr int64_t LEAST_KEYS = 2048;        // keys per range; with fewer keys, filling the lists takes too long
constexpr float HUGE_SQUARE = 1e37f;        // products and differences cannot overflow if squared norms are below it
constexpr float TINY = 1e-34f;              // upper bound of the loss if 4096 subnormal products become 0

struct Call {
  const View &query, &key, &query_doc, &key_doc, &key_mask;
  bool l2, causal;
  int64_t shift, batch, queries, keys, dim, k;
};

// Returns the index of batch entry b in a tensor that all entries may share.
int64_t entry(const View& v, int64_t b) { return v.size[0] > 1 ? b : 0; }

int64_t integer(const View& v, int64_t b, int64_t i) { return retro::integer(v, entry(v, b), i); }

// Sorted lists of k scores and key indices, one list per row.
struct Lists {
  float* scores;
  int64_t* indices;
  int64_t k;

  Lists row(int64_t r) const { return {scores + r * k, indices + r * k, k}; }
  void clear(int64_t rows) const {
    std::fill_n(scores, rows * k, -INFINITY);
    std::fill_n(indices, rows * k, int64_t{-1});
  }
  float least() const { return scores[k - 1]; }
  // Inserts a score behind equal scores, because keys come in ascending order. NaN is never above least().
  bool insert(float score, int64_t index) const {
    if (!(score > least()))
      return false;
    int64_t at = k - 1;
    for (; at > 0 && scores[at - 1] < score; --at) {
      scores[at] = scores[at - 1];
      indices[at] = indices[at - 1];
    }
    scores[at] = score;
    indices[at] = index;
    return true;
  }
};

// Division of the work: each batch entry has `groups` groups of `tiles` query tiles, and each group scans `ranges`
// ranges of keys.
struct Plan {
  int64_t tiles, groups, ranges, range;

  Plan(const Call& p, int threads) {
    const int64_t all = ceil_div(p.queries, LANES), wanted = threads > 1 ? TASKS_PER_THREAD * threads : 1;
    tiles = std::clamp<int64_t>(GROUP_BYTES / (p.dim * LANES * 4), 1, all);
    while (tiles > 2 && p.batch * ceil_div(all, tiles) < wanted)
      --tiles;
    groups = ceil_div(all, tiles);
    const int64_t lists = p.batch * p.queries * p.k * static_cast<int64_t>(sizeof(float) + sizeof(int64_t));
    ranges = std::min({ceil_div(wanted, p.batch * groups), ceil_div(p.keys, LEAST_KEYS), PARTIAL_BYTES / lists});
    ranges = std::max<int64_t>(ranges, 1);
    range = ceil_div(ceil_div(p.keys, ranges), MOST_KEYS) * MOST_KEYS;
    ranges = ceil_div(p.keys, range);
  }
  int64_t tasks(const Call& p) const { return p.batch * groups * ranges; }
};

template <class T> class Scan {
  using Key = KeyOf<T>;
  static constexpr bool SAME = std::is_same_v<T, Key>;
  const bool in_tiles_ = WIDTH<Key> == 2 && tiles_ready;
  const int part_ = in_tiles_ ? TILE_PART : PART,
            keys_ = in_tiles_ ? TILE_KEYS : KEY_TILE;  // keys per product, keys per tile

 public:
  // Rows [first, last) of batch entry b; `lists` starts at row `first`.
  Scan(const Call& p, int64_t b, int64_t first, int64_t last, Lists lists)
      : p_(p), b_(b), kb_(entry(p.key, b)), first_(first), last_(last), lists_(lists) {
    tiles_ = ceil_div(last - first, LANES);
    words_ = ceil_div(p.dim, WIDTH<Key>);
    // stride of copied rows: one cache line longer, so that equal elements of two rows do not share a cache set
    stride_ = (words_ + LINE / 4) * WIDTH<Key>;
    const int64_t lanes = tiles_ * LANES;
    const int64_t lists_size = p.k <= LaneLists::LARGEST_K && p.keys < INT32_MAX ? LaneLists::floats(p.k) : 0;
    auto* memory = static_cast<char*>(
        scratch(4 * (lanes * words_ + 2 * lanes + tiles_ * lists_size + keys_ * (words_ + LINE / 4))));
    packed_ = reinterpret_cast<uint32_t*>(memory);
    threshold_ = reinterpret_cast<float*>(packed_ + lanes * words_);
    discount_ = threshold_ + lanes;
    best_ = lists_size ? discount_ + lanes : nullptr;
    copy_ = reinterpret_cast<Key*>(discount_ + lanes + tiles_ * lists_size);
    // The error of a sum of n products, times 4: twice for q.k, once for q.q, and once for k.k and the distance itself.
    const double n = static_cast<double>(std::min(p.dim, FOLD * WIDTH<Key>) + p.dim / FOLD + 8);
    kept_ = static_cast<float>(0.5 * (1 - 4 * n * 0x1p-24));
    pack();
  }

  // Lets the products prefetch the rows [first, last) of batch entry b, which this thread will probably pack next.
  void expect(int64_t b, int64_t first, int64_t last) {
    if (p_.query.stride[1] != p_.dim)
      return;
    soon_ = p_.query.at<const char>(0) + (b * p_.query.stride[0] + first * p_.dim) * int64_t{sizeof(T)};
    soon_end_ = soon_ + (last - first) * p_.dim * int64_t{sizeof(T)};
  }

  void run(int64_t begin, int64_t end) {
    lists_.clear(last_ - first_);
    for (int64_t t = 0; best_ && t < tiles_; ++t)
      best(t).clear(rows(t));
    scan(begin, end);
    for (int64_t t = 0; best_ && t < tiles_; ++t)
      for (int64_t lane = 0; lane < rows(t); ++lane)
        for (int64_t j = 0; j < p_.k; ++j) {
          const Lists to = lists_.row(t * LANES + lane);
          to.scores[j] = best(t).score(j, lane);
          to.indices[j] = best(t).index(j, lane);
        }
  }

 private:
  int64_t rows(int64_t t) const { return std::min<int64_t>(LANES, last_ - first_ - t * LANES); }  // of tile t
  LaneLists best(int64_t t) const { return {best_ + t * LaneLists::floats(p_.k), p_.k}; }

  void scan(int64_t begin, int64_t end) {
    if (p_.causal)
      end = std::min(end, last_ + p_.shift);  // the last row's limit, inclusive, is last - 1 + shift
    for (int64_t next = begin; next < end;) {
      next = gather(next, end);
      if (count_ == 0)
        return;
      for (int64_t t = 0; t < tiles_; t += TILES)
        sweep<TILES>(t, static_cast<int>(std::min<int64_t>(TILES, tiles_ - t)));
    }
  }

  void pack() {
    force_ = false;
    for (int64_t t = 0; t < tiles_; ++t) {
      int64_t stride;
      const Key* queries = query_rows(t, stride);
      const int count = static_cast<int>(rows(t));
      transpose(reinterpret_cast<const uint32_t*>(queries), stride / WIDTH<Key>, count, static_cast<int>(words_),
                packed_ + t * LANES * words_, LANES);
      for (int lane = 0; lane < LANES; ++lane) {
        const int64_t at = t * LANES + lane;
        // no score is above the threshold of a lane without a query
        threshold_[at] = lane < count ? -INFINITY : INFINITY;
        discount_[at] = 0;
        if (!p_.l2 || lane >= count)
          continue;
        const float square = squares(queries + lane * stride, p_.dim);
        discount_[at] = kept_ * square - TINY;
        force_ |= !(square < HUGE_SQUARE);
      }
    }
  }

  // The queries of tile t in the type in which they are multiplied, rows `stride` elements apart: in place or copied.
  const Key* query_rows(int64_t t, int64_t& stride) const {
    const int64_t first = first_ + t * LANES;
    if constexpr (SAME) {
      stride = p_.query.stride[1];
      const Key* queries = p_.query.at<const Key>(b_, first);
      const bool words = reinterpret_cast<uintptr_t>(queries) % sizeof(uint32_t) == 0;
      if (words && p_.dim % WIDTH<Key> == 0 && stride % WIDTH<Key> == 0)
        return queries;
    }
    stride = stride_;
    for (int64_t row = first; row < first + rows(t); ++row) {
      if (row + 1 < last_)
        prefetch_row(p_.query.at<const T>(b_, row + 1), p_.dim * int64_t{sizeof(T)});
      convert_row(p_.query.at<const T>(b_, row), copy_ + (row - first) * stride_, p_.dim);
    }
    return copy_;
  }

  // Puts the next unmasked keys of [begin, end) into the tile. Returns the key after them.
  int64_t gather(int64_t begin, int64_t end) {
    count_ = 0;
    int64_t j = begin;
    for (; j < end && count_ < keys_; ++j)
      if (!p_.key_mask || *p_.key_mask.at<const bool>(entry(p_.key_mask, b_), j))
        index_[count_++] = j;
    if (count_ == 0)
      return end;
    const bool adjacent = index_[count_ - 1] - index_[0] == count_ - 1;
    look_ahead(adjacent && j < end ? end - j : 0);
    tile_.rows = copy_;
    tile_.stride = stride_;
    if constexpr (SAME)
      if (adjacent && count_ == keys_) {
        tile_.rows = p_.key.at<const Key>(kb_, index_[0]);
        tile_.stride = p_.key.stride[1];
      }
    for (int i = 0; tile_.rows == copy_ && i < count_; ++i)
      convert_row(p_.key.at<const T>(kb_, index_[i]), copy_ + i * stride_, p_.dim);
    return measure(), j;
  }

  // Sets the address of the keys to prefetch, which are some tiles ahead, if enough of the `left` adjacent keys follow.
  void look_ahead(int64_t left) {
    const int64_t bytes = keys_ * p_.key.stride[1] * int64_t{sizeof(T)};  // bytes per tile
    const int64_t tiles = std::max<int64_t>(1, KEYS_AHEAD / std::max<int64_t>(1, bytes));
    ahead_ = left >= tiles * keys_ ? reinterpret_cast<const char*>(p_.key.at<const T>(kb_, index_[0])) + tiles * bytes
                                   : nullptr;
  }

  void measure() {
    tile_.force = p_.l2 && force_;
    for (int i = 0; i < keys_; ++i) {
      norm_[i] = i < count_ ? 0 : INFINITY;  // a row of the tile without a key is never chosen
      if (!p_.l2 || i >= count_)
        continue;
      const float square = squares(tile_.rows + i * tile_.stride, p_.dim);
      norm_[i] = kept_ * square;
      tile_.force |= !(square < HUGE_SQUARE);
    }
  }

  // Returns the first key that causality hides from every row of tile t.
  int64_t limit(int64_t t) const {
    return p_.causal ? std::min(last_, first_ + (t + 1) * LANES) + p_.shift : INT64_MAX;
  }

  // Scores the query tiles [t, t + count), at most MQ of them, against all keys of the tile.
  template <int MQ> void sweep(int64_t t, int count) {
    if constexpr (MQ > 1)
      if (count < MQ)
        return sweep<MQ - 1>(t, count);
    for (int from = 0; from < count_ && index_[from] < limit(t + MQ - 1); from += part_) {
      int blind = 0;  // number of leading query tiles from which causality hides these keys
      while (index_[from] >= limit(t + blind))
        ++blind;
      part<MQ>(t, blind, from);
    }
  }

  // Scores the query tiles [t + blind, t + MQ) against the part of the keys that begins at `from`.
  template <int MQ> void part(int64_t t, int blind, int from) {
    if constexpr (MQ > 1)
      if (blind)
        return part<MQ - 1>(t + 1, blind - 1, from);
    alignas(LINE) float out[MQ * MOST_PART * LANES];
    const int64_t q_tile = LANES * words_;
    Tile<Key> keys{tile_.rows + from * tile_.stride, tile_.stride, nullptr, norm_ + from, tile_.force};
    if (t == 0 && ahead_) {
      keys.ahead = ahead_ + from * p_.key.stride[1] * int64_t{sizeof(T)};
    } else if (soon_ < soon_end_) {  // one cache line per word of a row, as for keys
      keys.ahead = soon_;
      soon_ += words_ * LINE;
    }
    const uint32_t hits = score<Key, MQ>(packed_ + t * q_tile, q_tile, keys, p_.dim, threshold_ + t * LANES, out);
    for (int m = 0; m < MQ; ++m)
      if (hits >> m & 1)
        consider(t + m, from, std::min(part_, count_ - from), out + m * part_ * LANES);
  }

  __attribute__((noinline)) void consider(int64_t t, int from, int keys, const float* scores) {
    float* threshold = threshold_ + t * LANES;
    const uint32_t valid = (1u << rows(t)) - 1u;
    for (int j = 0; j < keys; ++j) {
      const Vec s = load(scores + j * LANES) - broadcast(norm_[from + j]);
      const Mask above = gt(s, load(threshold));
      uint32_t hits = (tile_.force ? ~0u : bits(above)) & valid;
      const int64_t key = index_[from + j];
      if (best_ && hits)
        offer_all(t, key, above, hits, scores + j * LANES);
      for (; !best_ && hits; hits &= hits - 1) {
        const int lane = __builtin_ctz(hits);
        const int64_t r = t * LANES + lane, row = first_ + r;
        const Lists list = lists_.row(r);
        if (candidate(row, key) && list.insert(exact(row, key, scores[j * LANES + lane]), key))
          threshold_[r] = p_.l2 ? 0.5f * list.least() + discount_[r] : list.least();
      }
    }
  }

  bool candidate(int64_t row, int64_t key) const {
    if (p_.causal && key > row + p_.shift)
      return false;
    return !p_.query_doc || integer(p_.query_doc, b_, row) != integer(p_.key_doc, b_, key);
  }
  float exact(int64_t row, int64_t key, float score) const {
    return p_.l2 ? -squared_distance(p_.query.at<const T>(b_, row), p_.key.at<const T>(kb_, key), p_.dim) : score;
  }

  // Offers the scores of a key to the lists of tile t. The lanes `hits` are the lanes `above` their threshold, or all
  // lanes if `force` is set.
  void offer_all(int64_t t, int64_t key, Mask above, uint32_t hits, const float* scores) {
    const int64_t row = first_ + t * LANES;
    Vec offered = select(above, load(scores), broadcast(-INFINITY));
    if (p_.l2 || p_.query_doc) {
      alignas(LINE) float some[LANES];
      store(some, broadcast(-INFINITY));
      for (; hits; hits &= hits - 1) {
        const int lane = __builtin_ctz(hits);
        if (candidate(row + lane, key))
          some[lane] = exact(row + lane, key, scores[lane]);
      }
      offered = load(some);
    } else if (const int64_t unseen = p_.causal ? key - row - p_.shift : 0; unseen > 0) {
      offered = select(first(static_cast<int>(unseen)), broadcast(-INFINITY), offered);
    }
    const LaneLists list = best(t);
    list.insert(offered, static_cast<int32_t>(key));
    const Vec least = list.least();
    store(threshold_ + t * LANES, p_.l2 ? fma(broadcast(0.5f), least, load(discount_ + t * LANES)) : least);
  }

  const Call& p_;
  int64_t b_, kb_, first_, last_;
  Lists lists_;
  int64_t tiles_, words_, stride_;
  bool force_;        // some query is too large for the comparison that l2 uses
  uint32_t* packed_;  // [tiles][words][LANES]
  float* threshold_;  // [tiles][LANES] a key is considered if q.k minus the key's discount is above it
  float* discount_;   // [tiles][LANES] for l2: half of q.q, minus the error bound
  float* best_;       // [tiles] lane lists, or null if k is too large for them
  Key* copy_;         // [keys_][stride]
  float kept_;        // for l2: one half, minus the relative error bound
  Tile<Key> tile_{};
  const char* ahead_ = nullptr;                       // keys to prefetch, or null
  const char *soon_ = nullptr, *soon_end_ = nullptr;  // queries of another task to prefetch
  int count_ = 0;
  int64_t index_[MOST_KEYS];
  float norm_[MOST_KEYS];
};

template <class T> void forward(const Call& p, const Lists& out, int threads) {
  const Plan plan(p, threads);
  const int64_t rows = p.batch * p.queries;
  std::vector<float> scores(plan.ranges > 1 ? plan.ranges * rows * p.k : 0);
  std::vector<int64_t> indices(scores.size());
  const Lists partial{scores.data(), indices.data(), p.k};
  struct Place {
    int64_t part, b, first, last;
  };
  const auto place = [&](int64_t task) {
    const int64_t group = plan.groups - 1 - task / plan.ranges % plan.groups;  // long causal rows first
    const int64_t first = group * plan.tiles * LANES;
    return Place{task % plan.ranges, task / (plan.ranges * plan.groups), first,
                 std::min(p.queries, first + plan.tiles * LANES)};
  };
  parallel_for(plan.tasks(p), threads, [&](int64_t task) {
    const TileScope tiles;
    const Place at = place(task);
    const int64_t row = at.b * p.queries + at.first, begin = at.part * plan.range;
    Scan<T> scan(p, at.b, at.first, at.last, plan.ranges > 1 ? partial.row(at.part * rows + row) : out.row(row));
    if (task + threads < plan.tasks(p)) {
      const Place next = place(task + threads);
      scan.expect(next.b, next.first, next.last);
    }
    scan.run(begin, std::min(p.keys, begin + plan.range));
  });
  if (plan.ranges == 1)
    return;
  parallel_for(rows, threads, [&](int64_t r) {  // merge the ranges in the order of the keys
    const Lists to = out.row(r);
    to.clear(1);
    for (int64_t at = r; at < plan.ranges * rows; at += rows)
      for (int64_t i = 0; i < p.k && to.insert(partial.row(at).scores[i], partial.row(at).indices[i]);)
        ++i;
  });
}

}  // namespace

void topk_chunks_forward(const View& query, const View& key, const View& query_doc, const View& key_doc,
                         const View& key_mask, const View& scores, const View& indices, bool l2, bool causal,
                         int64_t shift, int threads) {
  const Call p{query,         key,           query_doc,   key_doc,       key_mask,      l2, causal, shift,
               query.size[0], query.size[1], key.size[1], query.size[2], scores.size[2]};
  const Lists out{scores.at<float>(), indices.at<int64_t>(), p.k};
  by_type(query.type, [&](auto t) { forward<decltype(t)>(p, out, threads); });
}

}  // namespace retro::RETRO_ISA
