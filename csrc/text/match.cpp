// Common substrings: cell by cell where that is little work (a chunk and its neighbours), by a suffix automaton otherwise.
#include "match.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "suffix_automaton.h"

namespace retro::text {
namespace {

std::atomic<Method> method{Method::automatic};

// A cell is a fraction of a nanosecond, a token of an automaton about 200 ns to build and 50 ns to read.
bool by_cells(Span a, Span b) {
  const Method chosen = method.load(std::memory_order_relaxed);
  if (chosen != Method::automatic) return chosen == Method::cells;
  return a.size * b.size <= 256 * (a.size + 4 * b.size);
}

// run[j] of row i: length of the longest common prefix of a[i:] and b[j:]; best(i, length): the largest of row i.
template <class Best>
void scan_cells(Span a, Span b, Best&& best) {
  thread_local std::vector<int32_t> kept;
  kept.assign(b.size + 1, 0);
  int32_t* run = kept.data();
  const int32_t* tokens = b.data;
  const int64_t size = b.size;
  for (int64_t i = a.size - 1; i >= 0; --i) {
    const int32_t token = a.data[i];
    int32_t longest = 0;
    for (int64_t j = 0; j < size; ++j) {  // in place: run[j + 1] is still the row below
      const int32_t length = tokens[j] == token ? run[j + 1] + 1 : 0;
      run[j] = length;
      longest = std::max(longest, length);
    }
    best(i, longest);
  }
}

}  // namespace

void set_method(Method chosen) { method.store(chosen); }

Match longest_common_substring(Span a, Span b) {
  Match found{0, 0, 0};
  if (!by_cells(a, b)) {
    const SuffixAutomaton automaton(b, false);
    int32_t state = 0, length = 0;
    for (int64_t i = 0; i < a.size; ++i) {
      automaton.step(a.data[i], state, length);
      if (length > found.length) found = {length, i + 1 - length, automaton.first_end(state) + 1 - length};
    }
    return found;
  }
  scan_cells(a, b, [&](int64_t i, int32_t length) {
    if (length && length >= found.length) found = {length, i, 0};
  });
  const int32_t* wanted = a.data + found.start_a;
  found.start_b = std::search(b.data, b.data + b.size, wanted, wanted + found.length) - b.data;
  return found;
}

void raise_prefix_lengths(Span a, Span b, int32_t* out) {
  if (by_cells(a, b)) {
    scan_cells(a, b, [&](int64_t i, int32_t length) { out[i] = std::max(out[i], length); });
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
