// Functions that the forward and the backward pass of relative attention share: sizes, blocks of query rows, tiles of
// keys, visible keys, packing, and the scores of a tile.
//
// Scores are query-major: a row of scores belongs to one query, and its lanes are keys. They are stored in the strip of
// position logits, at skewed positions (band.h): S[r][x] = strip[start + r*row + x].
#pragma once
#include "band.h"
#include "dropout.h"
#include "parallel.h"
#include "relative_attention.h"

namespace retro::RETRO_ISA {

constexpr int GROUP = 2;  // maximum number of key blocks in a tile: one softmax step covers up to GROUP * BLOCK keys

// Query rows [i, i + count) of one batch entry and one head. i is a multiple of BLOCK, and count is at most BLOCK.
struct QueryRows {
  int64_t b, i;
  int count, head;
};

// Key blocks [block, block + blocks). The scores of these keys and one QueryRows are a tile.
struct KeyTile {
  int64_t block;
  int blocks;
  int columns() const { return blocks * BLOCK; }
};

struct AttentionSizes {
  int64_t B, N, S;
  int H, G, D, D_pad, share;  // share: query heads per key head
  int64_t offset, gap, window, block;
  bool causal;
  Band band;
  int64_t first_key, last_key;  // keys that causality and window let some query see
  int ld, row, start;  // the strip: its leading dimension, the row stride of its scores, and their first element

  explicit AttentionSizes(const RelativeAttention& c)
      : B(c.query.size[0]), N(c.query.size[1]), S(c.key.size[1]), H(int(c.query.size[2])), G(int(c.key.size[2])),
        D(int(c.query.size[3])), D_pad(pad(D)), share(H / G), offset(c.query_offset), gap(c.causal_gap),
        window(c.window), block(c.window_block), causal(c.causal),
        band(c.rel_key, c.query_offset, c.rel_start, std::max(1 - N, reach() >= 0 ? offset - reach() + 1 : 1 - N),
             std::min(S, causal ? offset - gap + 1 : S)) {
    first_key = low(0);
    last_key = std::max(first_key, high(N - 1));
    ld = BLOCK * (GROUP + (band ? 1 : 0)) + LANES;  // not a power of two
    row = band ? ld - 1 : ld;
    start = band ? BLOCK - 1 : 0;
  }
  // Causality and window let query row i see the keys [low(i), high(i)). Both bounds ascend with i. The range may be
  // empty.
  int64_t low(int64_t i) const {
    if (window >= 0)
      return std::clamp<int64_t>(i + offset - window + 1, 0, S);
    if (block >= 0)
      return std::clamp<int64_t>(block * (floor_divide(i + offset, block) - 1), 0, S);
    return 0;
  }
  int64_t high(int64_t i) const { return causal ? std::clamp<int64_t>(i + offset - gap + 1, 0, S) : S; }
  // Upper bound of the displacements inside the window; negative without a window.
  int64_t reach() const { return window >= 0 ? window : block >= 0 ? 2 * block : -1; }
};

// Says which keys the queries [first_row, last_row) see: by causality and window, key mask and segments.
class Visibility {
 public:
  Visibility(const RelativeAttention& c, const AttentionSizes& n, int64_t first_row, int64_t last_row, Arena& arena)
      : c_(c), n_(n), first_row_(first_row), rows_(last_row - first_row) {
    first_block = n.low(first_row) / BLOCK;
    last_block = std::max(first_block, (n.high(last_row - 1) + BLOCK - 1) / BLOCK);
    filtered_ = c.key_mask || c.query_segment;
    const int64_t segmented = c.query_segment ? 1 : 0;
    arena.give(filtered_ ? blocks() * BLOCK : 0, seen_);
    arena.give(segmented * blocks() * BLOCK, keys_);
    arena.give(segmented * rows_, queries_);
    arena.give(segmented * blocks(), lowest_, highest_);
    arena.give(blocks(), some_);
    arena.give(GROUP * BLOCK, allowed_);
  }

  int64_t blocks() const { return last_block - first_block; }
  // Chunks of the band that the rows need.
  template <class Elem> BandChunks<Elem> chunks(bool with_rows_b, Arena& arena) const {
    const int64_t first = first_row_ / BLOCK, last = (first_row_ + rows_ - 1) / BLOCK;
    return {n_.band, first_block - last - 1, last_block - first, with_rows_b, arena};
  }

  // Reads the key mask and the segments of batch entry b.
  void load(int64_t b) {
    const int64_t begin = first_block * BLOCK;
    for (int64_t k = 0; k < blocks(); ++k) {
      some_[k] = !c_.key_mask;
      for (int64_t j = k * BLOCK; filtered_ && j < (k + 1) * BLOCK; ++j) {
        seen_[j] = exists(begin + j) && (!c_.key_mask || *c_.key_mask.at<const uint8_t>(b, begin + j));
        some_[k] |= seen_[j];
      }
    }
    if (!c_.query_segment)
      return;
    const View &q = c_.query_segment, &k = c_.key_segment;
    for (int64_t i = 0; i < rows_; ++i)
      queries_[i] = integer(q, b, first_row_ + i);
    for (int64_t block = 0; block < blocks(); ++block) {
      int64_t low = INT64_MAX, high = INT64_MIN;
      for (int64_t j = block * BLOCK; j < (block + 1) * BLOCK; ++j) {
        keys_[j] = seen_[j] ? integer(k, b, begin + j) : 0;
        if (seen_[j]) {
          low = std::min(low, keys_[j]);
          high = std::max(high, keys_[j]);
        }
      }
      lowest_[block] = low;
      highest_[block] = high;
    }
  }

  // Whether causality and window let some query see key j.
  bool exists(int64_t j) const { return j >= n_.first_key && j < n_.last_key; }
  // The same, and the key mask does not hide key j.
  bool seen(int64_t j) const { return exists(j) && (!filtered_ || seen_[j - first_block * BLOCK]); }

  // Whether query row i sees no key outside the tile.
  bool only(int64_t i, const KeyTile& tile) const {
    const int64_t low = n_.low(i), last = n_.high(i) > low ? (n_.high(i) + BLOCK - 1) / BLOCK : 0;
    for (int64_t block = low / BLOCK; block < last; ++block)
      if ((block < tile.block || block >= tile.block + tile.blocks) && may_see(block, i))
        return false;
    return true;
  }
  // Whether every query row sees every key of the tile.
  bool all(const KeyTile& tile, const QueryRows& rows) const {
    const int64_t begin = tile.block * BLOCK, end = begin + tile.columns();
    return !filtered_ && n_.low(rows.i + rows.count - 1) <= begin && n_.high(rows.i) >= end;
  }

  // Returns the first tile of keys that some of the rows may see; it has no blocks if there is none.
  KeyTile first_tile(const QueryRows& rows) const { return next_tile({n_.low(rows.i) / BLOCK, 0}, rows); }
  // Returns the tile that follows `tile`, without the key blocks that are hidden from all rows.
  KeyTile next_tile(const KeyTile& tile, const QueryRows& rows) const {
    const int64_t high = n_.high(rows.i + rows.count - 1);
    const int64_t end = n_.low(rows.i) < high ? (high + BLOCK - 1) / BLOCK : 0;
    KeyTile next{tile.block + tile.blocks, 0};
    while (next.block < end && hidden(next.block, rows))
      ++next.block;
    while (next.blocks < GROUP && next.block + next.blocks < end && !hidden(next.block + next.blocks, rows))
      ++next.blocks;
    return next;
  }

  // Prepares row(...) for a tile.
  void enter(const KeyTile& tile) {
    tile_ = tile;
    known_ = false;
  }
  struct Row {
    int low, high;         // columns of the tile that causality and window let the row see
    const float* allowed;  // per column: 0 if the mask or the segments hide it, else 1; null if neither is given
    // Replaces the lanes of hidden columns, from column x on, by the lanes of `hidden`.
    RETRO_INLINE Vec hide(Vec s, int x, Vec hidden) const {
      s = select(first(high - x), s, hidden);
      if (low > x)
        s = select(first(low - x), hidden, s);
      if (allowed)
        s = select(gt(retro::RETRO_ISA::load(allowed + x), zero()), s, hidden);
      return s;
    }
  };
  // Visible columns of the tile for query row i. `allowed` is valid until the next call.
  Row row(int64_t i) {
    const int64_t begin = tile_.block * BLOCK, width = tile_.columns();
    const int low = static_cast<int>(std::clamp<int64_t>(n_.low(i) - begin, 0, width));
    const int high = static_cast<int>(std::clamp<int64_t>(n_.high(i) - begin, 0, width));
    if (!filtered_)
      return {low, high, nullptr};
    const int64_t segment = c_.query_segment ? queries_[i - first_row_] : 0;
    if (!known_ || segment != segment_of_allowed_) {
      const int64_t at = begin - first_block * BLOCK;
      for (int64_t x = 0; x < width; ++x)
        allowed_[x] = seen_[at + x] && (!c_.query_segment || keys_[at + x] == segment) ? 1.f : 0.f;
      known_ = true;
      segment_of_allowed_ = segment;
    }
    return {low, high, allowed_};
  }

  int64_t first_block = 0, last_block = 0;  // key blocks that causality and window let some of the rows see

 private:
  // Whether the mask lets query row i see some key of the block, and its segment is in the range of the block's.
  bool may_see(int64_t block, int64_t i) const {
    const int64_t k = block - first_block;
    if (!some_[k] || !c_.query_segment)
      return some_[k];
    const int64_t s = queries_[i - first_row_];
    return s >= lowest_[k] && s <= highest_[k];
  }
  bool hidden(int64_t block, const QueryRows& rows) const {
    for (int r = 0; r < rows.count; ++r)
      if (may_see(block, rows.i + r))
        return false;
    return true;
  }

  const RelativeAttention& c_;
  const AttentionSizes& n_;
  int64_t first_row_, rows_;
  bool filtered_;               // whether there is a key mask or segments
  uint8_t *seen_, *some_;       // per key: whether it is not masked; per key block: whether some key is not masked
  int64_t *keys_, *queries_;    // segments of keys and queries
  int64_t *lowest_, *highest_;  // per key block: range of its segments
  float* allowed_;              // of `Row`, for the segment below
  bool known_ = false;          // whether allowed_ is valid for tile_
  int64_t segment_of_allowed_ = 0;
  KeyTile tile_{};
};

// Packs key block `block` of key head g of `from` [B,rows,heads,D], with zeros for keys that no query sees. Unless they
// are null, writes `transposed` [kc(D)][BLOCK] and `rows_b`, an operand B with k = key, [kc(BLOCK)][D_pad]. `rows` is
// scratch memory of [BLOCK][row_width]. Prefetches `next` and its block, which the caller packs afterwards.
template <class T, class Elem> void pack_keys(const View& from, const AttentionSizes& n, const Visibility& visible,
                                              int64_t b, int64_t block, int g, Elem* rows, Elem* transposed,
                                              Elem* rows_b, const View& next, int64_t next_block) {
  const InStage stage(PACK);
  const int width = row_width<Elem>(n.D);
  Elem* const to = rows_b && !PAIRS<Elem> ? rows_b : rows;
  for (int r = 0; r < BLOCK; ++r) {
    const int64_t j = block * BLOCK + r;
    const bool inside = r + ROWS_AHEAD < BLOCK;
    const int64_t soon = inside ? j + ROWS_AHEAD : next_block * BLOCK + r + ROWS_AHEAD - BLOCK;
    if (visible.exists(soon))
      prefetch_row((inside ? from : next).at<const T>(b, soon, g), n.D * sizeof(T));
    if (visible.seen(j))
      pack_row(from.at<const T>(b, j, g), nullptr, n.D, to + r * width);
    else
      clear(to + r * width, width);
  }
  if (transposed)
    transpose(to, width, BLOCK, kc_of<Elem>(n.D), transposed, BLOCK);
  if (rows_b)
    pack_b(to, BLOCK, n.D, rows_b);
}

// Packs the operands of query rows: queries and, if there is a band, relative queries, each plus its bias.
template <class T, class Elem> void pack_operands(const RelativeAttention& c, const AttentionSizes& n,
                                                  const QueryRows& rows, float* bias, Elem* query, Elem* rel_query) {
  const InStage stage(PACK);
  pack_queries<T>(c.query, c.content_bias, rows.b, rows.i, rows.count, rows.head, n.D, bias, query);
  const View& relative = c.rel_query ? c.rel_query : c.query;
  if (n.band)
    pack_queries<T>(relative, c.position_bias, rows.b, rows.i, rows.count, rows.head, n.band.E, bias, rel_query);
}

// Moves the strip to a tile: afterwards the strip holds the position logits of the tile. `previous` is the number of
// key blocks of the previous tile if the two are adjacent, so that one chunk of the strip is used again; otherwise 0.
// `last` says that the next tile is not adjacent, so that it does not use the last chunk.
template <class T, class Elem> void slide(const AttentionSizes& n, BandChunks<Elem>& chunks, const QueryRows& rows,
                                          const KeyTile& tile, int previous, bool last, const Elem* rel_query,
                                          float* strip) {
  if (!n.band)
    return;
  const InStage stage(POSITION_LOGITS);
  const int64_t chunk = tile.block - rows.i / BLOCK - 1, begin = tile.block * BLOCK, end = begin + tile.columns();
  if (previous)
    for (int r = 0; r < rows.count; ++r)
      for (int x = 0; x < BLOCK; x += LANES)
        store(strip + r * n.ld + x, load(strip + r * n.ld + previous * BLOCK + x));
  else
    band_logits<T>(n.band, chunks, rows.head, chunk, rows.count, rel_query, strip, n.ld,
                   Diagonals::of(chunk, rows.i, begin, end));
  for (int k = 1; k <= tile.blocks; ++k)
    band_logits<T>(n.band, chunks, rows.head, chunk + k, rows.count, rel_query, strip + k * BLOCK, n.ld,
                   Diagonals::of(chunk + k, rows.i, begin, last ? end : end + BLOCK));
}

// Computes the scores of a tile before scaling: adds the products of queries and keys to the position logits.
// keys_of(k) returns the transposed keys [kc(D)][BLOCK] of block k, which it packs at their first use.
template <class Elem, class KeysOf>
void multiply_keys(const AttentionSizes& n, int rows, int blocks, const Elem* query, KeysOf&& keys_of, float* scores) {
  const InStage stage(SCORES);
  const int kc = kc_of<Elem>(n.D), lda = row_width<Elem>(n.D), row = n.row;
  for (int k = 0; k < blocks; ++k) {
    const Elem* const keys = keys_of(k);
    float* s = scores + k * BLOCK;
    if (n.band)
      gemm<true>(rows, BLOCK / LANES, kc, query, lda, keys, BLOCK, AddTo{s, row});
    else
      gemm<true>(rows, BLOCK / LANES, kc, query, lda, keys, BLOCK,
                 [=](int r, int x, Vec v) { store(s + r * row + x, v); });
  }
}

}  // namespace retro::RETRO_ISA
