// Common substrings, found with bit sets of positions. They take (number of distinct tokens of a) * (size of b) bits.
#include <vector>

#include "text.h"

namespace retro::text {
namespace {

constexpr int64_t WORD = 64;

// For each distinct token of a, the bit set of its positions in b.
class Occurrences {
 public:
  void fill(Span a, Span b) {
    words_ = (b.size + WORD - 1) / WORD;
    int bits = 4;
    while (int64_t{1} << bits < 2 * a.size)
      ++bits;
    shift_ = 32 - bits;
    wrap_ = (size_t{1} << bits) - 1;
    slots_.assign(wrap_ + 1, {0, NONE});
    numbers_.resize(a.size);
    int32_t distinct = 0;
    for (int64_t i = 0; i < a.size; ++i) {
      Slot& slot = slots_[find(a.data[i])];
      if (slot.number == NONE)
        slot = {a.data[i], distinct++};
      numbers_[i] = slot.number;
    }
    masks_.assign(distinct * words_, 0);
    for (int64_t j = 0; j < b.size; ++j) {
      const int32_t number = slots_[find(b.data[j])].number;
      if (number != NONE)
        masks_[number * words_ + j / WORD] |= uint64_t{1} << j % WORD;
    }
    running_.resize(words_);
  }

  // Returns the length of the longest prefix of a[i:] that occurs in b. Bit j of `running_` is set if the prefix read
  // so far occurs in b and ends at b[j].
  int32_t longest_from(int64_t i) {
    const int64_t size = static_cast<int64_t>(numbers_.size());
    const uint64_t* mask = masks_.data() + numbers_[i] * words_;
    uint64_t left = 0;
    for (int64_t w = 0; w < words_; ++w)
      left |= running_[w] = mask[w];
    int32_t length = 0;
    for (int64_t next = i + 1; left; ++next) {
      ++length;
      if (next == size)
        break;
      mask = masks_.data() + numbers_[next] * words_;
      uint64_t carry = left = 0;
      for (int64_t w = 0; w < words_; ++w) {
        const uint64_t moved = running_[w] << 1 | carry;
        carry = running_[w] >> (WORD - 1);
        left |= running_[w] = moved & mask[w];
      }
    }
    return length;
  }

 private:
  static constexpr int32_t NONE = -1;
  struct Slot {
    int32_t token, number;
  };

  size_t find(int32_t token) const {
    size_t at = static_cast<uint32_t>(token) * 0x9E3779B9u >> shift_;
    while (slots_[at].number != NONE && slots_[at].token != token)
      at = (at + 1) & wrap_;
    return at;
  }

  int64_t words_ = 0;
  int shift_ = 0;
  size_t wrap_ = 0;
  std::vector<Slot> slots_;  // open addressing by token
  std::vector<int32_t> numbers_;
  std::vector<uint64_t> masks_, running_;
};

}  // namespace

void prefixes(Tokens chunks, Integers lengths, Tokens sources, Array<int32_t> out, int threads) {
  const int64_t count = sources.size[1], width = sources.size[2];
  parallel_for(chunks.size[0], threads, [&](int64_t c) {
    thread_local Occurrences where;  // keeps its memory from call to call
    std::fill_n(out.row(c), out.size[1], 0);
    for (int64_t k = 0; k < count; ++k) {
      where.fill({chunks.row(c), lengths.data[c]}, {sources.data + (c * count + k) * width, width});
      for (int64_t i = 0; i < lengths.data[c]; ++i)
        out.row(c)[i] = std::max(out.row(c)[i], where.longest_from(i));
    }
  });
}

}  // namespace retro::text
