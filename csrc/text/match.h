// Common substrings of token sequences.
#pragma once
#include <cstdint>

namespace retro::text {

struct Span {
  const int32_t* data;
  int64_t size;
};

// out[i] = max(out[i], length of the longest prefix of a[i:] that occurs anywhere in b).
void raise_prefix_lengths(Span a, Span b, int32_t* out);

}  // namespace retro::text
