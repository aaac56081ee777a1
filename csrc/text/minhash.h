// MinHash signatures of documents as sets of token n-grams (Broder, 1997), and the exact Jaccard similarity of pairs.
#pragma once
#include <cstdint>

#include "match.h"

namespace retro::text {

// Least hash of the document's n-grams under each of `permutations` hash functions drawn from `seed`. A document
// shorter than `ngram` is one n-gram, itself; an empty one has none and all its hashes are the largest number.
void minhash(Span document, int64_t ngram, int64_t permutations, uint64_t seed, uint32_t* signature);

// |A n B| / |A u B| over the sets of n-grams, by comparing tokens; 0 where both are empty.
double jaccard(Span a, Span b, int64_t ngram);

}  // namespace retro::text
