// Functions of the forward and backward pass of relative attention: sizes, visible keys, packed keys, a tile of scores.
//
// Scores are query-major with keys as lanes, and skewed in the strip of position logits (band.h):
// S[r][x] = strip[start + r*row + x].
#pragma once
#include "band.h"
#include "dropout.h"
#include "parallel.h"
#include "relative_attention.h"

namespace retro::RETRO_ISA {

constexpr int GROUP = 2;  // key blocks of a tile; a softmax step has GROUP * BLOCK keys

struct AttentionSizes {
  int64_t B, N, S;
  int H, G, D, D_pad, share;  // share: query heads of a key head
  int64_t offset, gap, window, block;
  bool causal;
  Band band;
  int64_t first_key, last_key;  // keys that some query sees, by causality and window
  // the strip
  int ld, row, start;

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
  // Keys [low, high) are visible to query row i by causality and window, both ascending with i; may be empty.
  int64_t low(int64_t i) const {
    if (window >= 0)
      return std::clamp<int64_t>(i + offset - window + 1, 0, S);
    if (block >= 0)
      return std::clamp<int64_t>(block * (floor_divide(i + offset, block) - 1), 0, S);
    return 0;
  }
  // Bound of the displacements inside the window; negative: no window.
  int64_t reach() const { return window >= 0 ? window : block >= 0 ? 2 * block : -1; }
  int64_t high(int64_t i) const { return causal ? std::clamp<int64_t>(i + offset - gap + 1, 0, S) : S; }
};

// Visibility of keys for the queries [first_row, last_row) of a batch entry by key mask and segments, in addition to
// causality and window.
class Visibility {
 public:
  Visibility(const RelativeAttention& c, const AttentionSizes& n, int64_t first_row, int64_t last_row, Arena& arena)
      : c_(c), n_(n), first_row_(first_row), rows_(last_row - first_row) {
    first_block = n.low(first_row) / BLOCK;
    last_block = std::max(first_block, (n.high(last_row - 1) + BLOCK - 1) / BLOCK);
    const int64_t blocks = last_block - first_block;
    filtered_ = c.key_mask || c.query_segment;
    seen_ = arena.take<uint8_t>(filtered_ ? blocks * BLOCK : 0);
    some_ = arena.take<uint8_t>(blocks);
    keys_ = arena.take<int64_t>(c.query_segment ? blocks * BLOCK + rows_ + 2 * blocks : 0);
    queries_ = keys_ + blocks * BLOCK;
    lowest_ = queries_ + rows_;
    highest_ = lowest_ + blocks;
    allowed_ = arena.take<float>(GROUP * BLOCK);
  }

  // Chunks of the band that the rows need.
  template <class Elem> BandChunks<Elem> chunks(bool with_rows_b, Arena& arena) const {
    const int64_t first = first_row_ / BLOCK, last = (first_row_ + rows_ - 1) / BLOCK;
    return {n_.band, first_block - last - 1, last_block - first, with_rows_b, arena};
  }

  void load(int64_t b) {
    const int64_t begin = first_block * BLOCK, blocks = last_block - first_block;
    for (int64_t k = 0; k < blocks; ++k) {
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
    for (int64_t block = 0; block < blocks; ++block) {
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

  bool exists(int64_t j) const { return j >= n_.first_key && j < n_.last_key; }  // some query may see it
  bool seen(int64_t j) const { return exists(j) && (!filtered_ || seen_[j - first_block * BLOCK]); }

  // Key blocks [begin, end) that the query rows [i, i+rows) may see.
  void range(int64_t i, int rows, int64_t& begin, int64_t& end) const {
    const int64_t low = n_.low(i), high = n_.high(i + rows - 1);
    begin = low / BLOCK;
    end = low < high ? (high + BLOCK - 1) / BLOCK : begin;
  }
  // Whether query row i may see a key of a key block by mask and segments.
  bool may_see(int64_t block, int64_t i) const {
    const int64_t k = block - first_block;
    if (!some_[k] || !c_.query_segment)
      return some_[k];
    const int64_t s = queries_[i - first_row_];
    return s >= lowest_[k] && s <= highest_[k];
  }
  bool hidden(int64_t block, int64_t i, int rows) const {
    for (int r = 0; r < rows; ++r)
      if (may_see(block, i + r))
        return false;
    return true;
  }
  // Whether query row i sees no key outside the key blocks [begin, end).
  bool only(int64_t i, int64_t begin, int64_t end) const {
    const int64_t low = n_.low(i), last = n_.high(i) > low ? (n_.high(i) + BLOCK - 1) / BLOCK : 0;
    for (int64_t block = low / BLOCK; block < last; ++block)
      if ((block < begin || block >= end) && may_see(block, i))
        return false;
    return true;
  }
  // Moves `block` to the next tile and returns its number of key blocks, up to GROUP; 0 if there is none before `end`.
  int next(int64_t& block, int64_t end, int64_t i, int rows) const {
    while (block < end && hidden(block, i, rows))
      ++block;
    int count = 0;
    while (count < GROUP && block + count < end && !hidden(block + count, i, rows))
      ++count;
    return count;
  }

  // Whether every query of the tile sees every key.
  bool all(int64_t block, int blocks, int64_t i, int rows) const {
    const int64_t begin = block * BLOCK, end = begin + blocks * BLOCK;
    return !filtered_ && n_.low(i + rows - 1) <= begin && n_.high(i) >= end;
  }
  // Prepares row(...) for a tile of these key blocks.
  void enter(int64_t block, int blocks) { block_ = block, blocks_ = blocks, known_ = false; }
  struct Row {
    int low, high;         // columns of the tile by causality and window
    const float* allowed;  // 1 or 0 by mask and segment, or null
    RETRO_INLINE Vec hide(Vec s, int x, Vec hidden) const {
      s = select(first(high - x), s, hidden);
      if (low > x)
        s = select(first(low - x), hidden, s);
      if (allowed)
        s = select(gt(retro::RETRO_ISA::load(allowed + x), zero()), s, hidden);
      return s;
    }
  };
  Row row(int64_t i) {
    const int64_t begin = block_ * BLOCK, width = blocks_ * BLOCK;
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

  int64_t first_block = 0, last_block = 0;  // key blocks that the rows may see by causality and window

 private:
  const RelativeAttention& c_;
  const AttentionSizes& n_;
  int64_t first_row_, rows_;
  bool filtered_, known_ = false;
  uint8_t *seen_, *some_;
  int64_t *keys_, *queries_, *lowest_, *highest_;  // segments of keys and queries, their range in a key block
  float* allowed_;
  int64_t block_ = 0, blocks_ = 0, segment_of_allowed_ = 0;
};

// Packs one key block of a head of `from` [B,rows,heads,D], zeros for keys that no query sees: unless null,
// `transposed` [kc(D)][BLOCK] and, as B with k = key, `rows_b` [kc(BLOCK)][D_pad]. `rows`: room for [BLOCK][row_width].
// `next` and its block are packed afterwards.
template <class T, class Elem>
void pack_keys(const View& from, const AttentionSizes& n, const Visibility& visible, int64_t b, int64_t block, int g,
               Elem* rows, Elem* transposed, Elem* rows_b, const View& next, int64_t next_block) {
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

// The operands of a block of query rows: query and, if there is a band, relative query, each plus its bias.
template <class T, class Elem>
void pack_operands(const RelativeAttention& c, const AttentionSizes& n, int64_t b, int64_t i, int rows, int head,
                   float* bias, Elem* query, Elem* rel_query) {
  pack_queries<T>(c.query, c.content_bias, b, i, rows, head, n.D, bias, query);
  const View& relative = c.rel_query ? c.rel_query : c.query;
  if (n.band)
    pack_queries<T>(relative, c.position_bias, b, i, rows, head, n.band.E, bias, rel_query);
}

// Moves the strip to the key blocks [block, block+blocks) of query block `a`. It has the `previous_blocks` before them,
// or nothing (0).
template <class T, class Elem>
void slide(const AttentionSizes& n, BandChunks<Elem>& chunks, int head, int64_t a, int rows, int64_t block, int blocks,
           int previous_blocks, const Elem* rel_query, float* strip) {
  if (!n.band)
    return;
  const int64_t chunk = block - a - 1;
  if (previous_blocks)
    for (int r = 0; r < rows; ++r)
      for (int x = 0; x < BLOCK; x += LANES)
        store(strip + r * n.ld + x, load(strip + r * n.ld + previous_blocks * BLOCK + x));
  else
    band_logits<T>(n.band, chunks, head, chunk, rows, rel_query, strip, n.ld);
  for (int k = 1; k <= blocks; ++k)
    band_logits<T>(n.band, chunks, head, chunk + k, rows, rel_query, strip + k * BLOCK, n.ld);
}

// Scores of a tile before scaling: adds the products with the transposed keys [kc(D)][BLOCK] of each block to the
// position logits.
template <class Elem>
void multiply_keys(const AttentionSizes& n, int rows, int blocks, const Elem* query, const Elem* const* keys,
                   float* scores) {
  const int kc = kc_of<Elem>(n.D), lda = row_width<Elem>(n.D);
  for (int k = 0; k < blocks; ++k) {
    float* s = scores + k * BLOCK;
    const int row = n.row;
    if (n.band)
      gemm<true>(rows, BLOCK / LANES, kc, query, lda, keys[k], BLOCK, AddTo{s, row});
    else
      gemm<true>(rows, BLOCK / LANES, kc, query, lda, keys[k], BLOCK,
                 [=](int r, int x, Vec v) { store(s + r * row + x, v); });
  }
}

}  // namespace retro::RETRO_ISA
