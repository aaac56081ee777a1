// Common substrings: with bit sets of positions where that is little
// work (a chunk and its neighbours), else by suffix automaton.
#include "match.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "suffix_automaton.h"

namespace retro::text {
namespace {

std::atomic<Method> method{Method::automatic};

constexpr int64_t WORD = 64;

// Typically a word operation is a nanosecond and a position
// costs few of them; a token of an automaton costs about 200 ns.
bool by_bits(Span a, Span b) {
  const Method chosen = method.load(std::memory_order_relaxed);
  if (chosen != Method::automatic) return chosen == Method::bits;
  return a.size <= 4096 && a.size * b.size <= 1 << 20;
}

// For every distinct token of a sequence the positions of another at which it stands, as bits.
class Occurrences {
 public:
  // of a's tokens in b
  void fill(Span a, Span b) {
    words_ = (b.size + WORD - 1) / WORD;
    int bits = 4;
    while (int64_t{1} << bits < 2 * a.size) ++bits;
    shift_ = 32 - bits, wrap_ = (size_t{1} << bits) - 1;
    slots_.assign(wrap_ + 1, {0, NONE});
    numbers_.resize(a.size);
    int32_t distinct = 0;
    for (int64_t i = 0; i < a.size; ++i) {
      Slot& slot = slots_[find(a.data[i])];
      if (slot.number == NONE) slot = {a.data[i], distinct++};
      numbers_[i] = slot.number;
    }
    masks_.assign(distinct * words_, 0);
    for (int64_t j = 0; j < b.size; ++j) {
      const int32_t number = slots_[find(b.data[j])].number;
      if (number != NONE) masks_[number * words_ + j / WORD] |= uint64_t{1} << j % WORD;
    }
    running_.resize(words_);
  }

  // Length of the longest prefix of a[i:] in b: bit j of `running_` stays set while the prefix so far ends at b[j].
  int32_t longest_from(int64_t i) {
    const int64_t size = static_cast<int64_t>(numbers_.size());
    const uint64_t* mask = masks_.data() + numbers_[i] * words_;
    uint64_t left = 0;
    for (int64_t w = 0; w < words_; ++w) left |= running_[w] = mask[w];
    int32_t length = 0;
    for (int64_t next = i + 1; left; ++next) {
      ++length;
      if (next == size) break;
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
    while (slots_[at].number != NONE && slots_[at].token != token) at = (at + 1) & wrap_;
    return at;
  }

  int64_t words_ = 0;
  int shift_ = 0;
  size_t wrap_ = 0;
  std::vector<Slot> slots_;  // open addressing by token
  std::vector<int32_t> numbers_;
  std::vector<uint64_t> masks_, running_;
};

Occurrences& occurrences(Span a, Span b) {
  thread_local Occurrences kept;
  kept.fill(a, b);
  return kept;
}

}  // namespace

void set_method(Method chosen) { method.store(chosen); }

Match longest_common_substring(Span a, Span b) {
  Match found{0, 0, 0};
  if (!by_bits(a, b)) {
    const SuffixAutomaton automaton(b, false);
    int32_t state = 0, length = 0;
    for (int64_t i = 0; i < a.size; ++i) {
      automaton.step(a.data[i], state, length);
      if (length > found.length) found = {length, i + 1 - length, automaton.first_end(state) + 1 - length};
    }
    return found;
  }
  Occurrences& where = occurrences(a, b);
  for (int64_t i = 0; i + found.length < a.size; ++i)
    if (const int32_t length = where.longest_from(i); length > found.length) found = {length, i, 0};
  const int32_t* wanted = a.data + found.start_a;
  found.start_b = std::search(b.data, b.data + b.size, wanted, wanted + found.length) - b.data;
  return found;
}

void raise_prefix_lengths(Span a, Span b, int32_t* out) {
  if (by_bits(a, b)) {
    Occurrences& where = occurrences(a, b);
    for (int64_t i = 0; i < a.size; ++i) out[i] = std::max(out[i], where.longest_from(i));
    return;
  }
  const SuffixAutomaton automaton(b, true);
  int32_t state = 0, length = 0;
  for (int64_t i = a.size - 1; i >= 0; --i) {
    automaton.step(a.data[i], state, length);
    out[i] = std::max(out[i], length);
  }
}

}  // namespace retro::text
