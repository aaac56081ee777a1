// Suffix automaton over an integer alphabet (Blumer et al., 1985):
// every substring of a sequence, in linear time and memory.
#pragma once
#include <cstdint>
#include <vector>

#include "match.h"

namespace retro::text {

class SuffixAutomaton {
 public:
  // Of `source`, or of `source` read from its end.
  SuffixAutomaton(Span source, bool reversed) {
    size_t slots = 16;
    while (slots < static_cast<size_t>(source.size) * 9 / 2) slots *= 2;  // at most 3n edges: 2/3 full
    mask_ = slots - 1;
    edges_.assign(slots, Edge{NONE, 0, 0, NONE});
    states_.reserve(2 * source.size + 1);
    states_.push_back({0, NONE, NONE, NONE});
    for (int64_t i = 0; i < source.size; ++i) append(source.data[reversed ? source.size - 1 - i : i]);
  }

  // Reads one token more: the state and length of the longest suffix of what was read that occurs in the source.
  void step(int32_t token, int32_t& state, int32_t& length) const {
    for (;;) {
      const Edge& edge = edges_[slot(state, token)];
      if (edge.state != NONE) {
        state = edge.target, ++length;
        return;
      }
      if (states_[state].link == NONE) {
        length = 0;
        return;
      }
      state = states_[state].link, length = states_[state].length;
    }
  }

  // Where the first occurrence of the state's strings ends in the source.
  int32_t first_end(int32_t state) const { return states_[state].first_end; }

 private:
  static constexpr int32_t NONE = -1;

  struct State {
    int32_t length, link, first_end, edges;  // edges: slot of the newest, chained by Edge::next
  };
  struct Edge {
    int32_t state, token, target, next;
  };

  size_t slot(int32_t state, int32_t token) const {
    const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32 | static_cast<uint32_t>(token);
    size_t at = (key * 0x9E3779B97F4A7C15ull >> 20) & mask_;
    while (edges_[at].state != NONE && (edges_[at].state != state || edges_[at].token != token)) at = (at + 1) & mask_;
    return at;
  }

  void add_edge(int32_t state, int32_t token, int32_t target) {
    const size_t at = slot(state, token);
    edges_[at] = {state, token, target, states_[state].edges};
    states_[state].edges = static_cast<int32_t>(at);
  }

  void append(int32_t token) {
    const int32_t made = new_state({states_[last_].length + 1, 0, states_[last_].length, NONE});
    int32_t from = last_;
    last_ = made;
    for (; from != NONE; from = states_[from].link) {
      if (edges_[slot(from, token)].state != NONE) break;
      add_edge(from, token, made);
    }
    if (from == NONE) return;
    const int32_t next = edges_[slot(from, token)].target;
    if (states_[next].length == states_[from].length + 1) {
      states_[made].link = next;
      return;
    }
    const int32_t clone = new_state({states_[from].length + 1, states_[next].link, states_[next].first_end, NONE});
    for (int32_t at = states_[next].edges; at != NONE; at = edges_[at].next)
      add_edge(clone, edges_[at].token, edges_[at].target);
    for (; from != NONE; from = states_[from].link) {
      Edge& edge = edges_[slot(from, token)];
      if (edge.target != next) break;
      edge.target = clone;
    }
    states_[made].link = states_[next].link = clone;
  }

  int32_t new_state(State state) {
    states_.push_back(state);
    return static_cast<int32_t>(states_.size() - 1);
  }

  std::vector<State> states_;
  std::vector<Edge> edges_;  // open addressing by (state, token); nothing is ever removed
  size_t mask_ = 0;
  int32_t last_ = 0;
};

}  // namespace retro::text
