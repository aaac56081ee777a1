// MinHash. The hash of an n-gram is a rolling polynomial over mixed tokens. Permutation p of a hash x is the high half
// of a_p * x + b_p.
#include <iterator>
#include <vector>

#include "text.h"

namespace retro::text {
namespace {

// splitmix64's finaliser (Steele, Lea, Flood, 2014): a bijection in which every input bit affects every output bit
uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

uint64_t token_hash(int32_t token) { return mix(static_cast<uint32_t>(token)); }

// Calls visit(start, hash) for every n-gram.
template <class Visit> void each_ngram(Span document, int64_t ngram, Visit&& visit) {
  constexpr uint64_t BASE = 0xD1342543DE82EF95ull;  // odd, so that no power of it vanishes
  const int64_t length = std::min(ngram, document.size);
  if (length == 0)
    return;
  uint64_t hash = mix(static_cast<uint64_t>(length)), leaving = 1;
  for (int64_t i = 0; i < length; ++i)
    leaving *= BASE;
  const uint64_t start = hash * leaving;  // hash of the length, which is added to the rolling sum
  hash = 0;
  for (int64_t i = 0; i < document.size; ++i) {
    hash = hash * BASE + token_hash(document.data[i]);
    if (i >= length)
      hash -= token_hash(document.data[i - length]) * leaving;
    if (i + 1 >= length)
      visit(i + 1 - length, mix(hash + start));
  }
}

struct Gram {
  uint64_t hash;
  const int32_t* tokens;
};

// Order of n-grams of one length. N-grams are equal only if their tokens are equal.
struct Before {
  int64_t length;
  bool operator()(const Gram& a, const Gram& b) const {
    if (a.hash != b.hash)
      return a.hash < b.hash;
    return std::lexicographical_compare(a.tokens, a.tokens + length, b.tokens, b.tokens + length);
  }
};

std::vector<Gram> distinct_ngrams(Span document, int64_t ngram) {
  std::vector<Gram> grams;
  each_ngram(document, ngram, [&](int64_t start, uint64_t hash) { grams.push_back({hash, document.data + start}); });
  const Before before{std::min(ngram, document.size)};
  std::sort(grams.begin(), grams.end(), before);
  const auto same = [&](const Gram& a, const Gram& b) { return !before(a, b); };  // for a that is not after b
  grams.erase(std::unique(grams.begin(), grams.end(), same), grams.end());
  return grams;
}

double jaccard(Span a, Span b, int64_t ngram) {
  const std::vector<Gram> left = distinct_ngrams(a, ngram), right = distinct_ngrams(b, ngram);
  if (left.empty() && right.empty())
    return 0;
  std::vector<Gram> common;
  const int64_t length = std::min(ngram, a.size);
  if (length == std::min(ngram, b.size))
    std::set_intersection(left.begin(), left.end(), right.begin(), right.end(), std::back_inserter(common),
                          Before{length});
  return static_cast<double>(common.size()) / static_cast<double>(left.size() + right.size() - common.size());
}

Span document(Tokens tokens, Integers offsets, int64_t d) {
  return {tokens.data + offsets.data[d], offsets.data[d + 1] - offsets.data[d]};
}

}  // namespace

void signatures(Tokens tokens, Integers offsets, int64_t ngram, uint64_t seed, Array<uint32_t> out, int threads) {
  parallel_for(out.size[0], threads, [&](int64_t d) {
    std::vector<uint64_t> hashes;
    each_ngram(document(tokens, offsets, d), ngram, [&](int64_t, uint64_t hash) { hashes.push_back(hash); });
    uint64_t state = mix(seed);
    for (int64_t p = 0; p < out.size[1]; ++p) {
      const uint64_t factor = (state = mix(state)) | 1, offset = state = mix(state);
      uint32_t least = UINT32_MAX;
      for (const uint64_t hash : hashes)
        least = std::min(least, static_cast<uint32_t>((hash * factor + offset) >> 32));
      out.row(d)[p] = least;
    }
  });
}

void jaccards(Tokens tokens, Integers offsets, Integers pairs, int64_t ngram, Array<double> out, int threads) {
  parallel_for(out.size[0], threads, [&](int64_t p) {
    const int64_t* pair = pairs.row(p);
    out.data[p] = jaccard(document(tokens, offsets, pair[0]), document(tokens, offsets, pair[1]), ngram);
  });
}

}  // namespace retro::text
