// Common substrings of token sequences.
#pragma once
#include <cstdint>

namespace retro::text {

struct Span {
  const int32_t* data;
  int64_t size;
};

struct Match {
  int64_t length, start_a, start_b;
};

// The longest substring common to both; of several the first in a, then the first in b. Length 0: both starts 0.
Match longest_common_substring(Span a, Span b);

// out[i] = max(out[i], length of the longest prefix of a[i:] that occurs anywhere in b).
void raise_prefix_lengths(Span a, Span b, int32_t* out);

// The two algorithms behind both, for tests: bit sets of the positions in b, or a suffix automaton of b.
enum class Method { automatic, bits, automaton };
void set_method(Method method);

}  // namespace retro::text
