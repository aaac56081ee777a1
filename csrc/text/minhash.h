// MinHash signatures of documents as sets of token n-grams (Broder, 1997), and the exact Jaccard similarity of pairs.
#pragma once
#include <cstdint>

#include "match.h"

namespace retro::text {

// signature[p] = least hash of the document's n-grams under hash function p of `permutations`, drawn from `seed`. A
// document shorter than `ngram` is a single n-gram. Every entry of an empty document is UINT32_MAX.
void minhash(Span document, int64_t ngram, int64_t permutations, uint64_t seed, uint32_t* signature);

// |A n B| / |A u B| over the sets of n-grams, by comparing tokens; 0 if both are empty.
double jaccard(Span a, Span b, int64_t ngram);

}  // namespace retro::text
