// Routines over arrays of tokens in C order. retro_model/data checks the shapes and values before a call. The results
// do not depend on `threads`.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../cpu/parallel.h"

namespace retro::text {

template <class T> struct Array {
  T* data;
  int64_t size[3];  // one per dimension; the remaining entries are not set

  T* row(int64_t i) const { return data + i * size[1]; }
};
using Tokens = Array<const int32_t>;
using Integers = Array<const int64_t>;

struct Span {
  const int32_t* data;
  int64_t size;
};

// Writes to out[c][i] the length of the longest run of tokens that starts at token i of chunk c and occurs in one of
// the chunk's K sources [n,K,R]. A chunk has lengths[c] tokens, followed by padding.
void prefixes(Tokens chunks, Integers lengths, Tokens sources, Array<int32_t> out, int threads);

// Computes MinHash signatures (Broder, 1997). out[d][p] is the smallest hash of document d's n-grams under hash
// function p. The hash functions are drawn from `seed`. Document d is tokens[offsets[d]] .. tokens[offsets[d + 1] - 1].
// A document shorter than `ngram` is a single n-gram. Every entry of an empty document is UINT32_MAX.
void signatures(Tokens tokens, Integers offsets, int64_t ngram, uint64_t seed, Array<uint32_t> out, int threads);

// Computes out[p], the Jaccard similarity |A and B| / |A or B| of the sets of n-grams of the documents in pair p.
// Tokens are compared, not only hashes. The similarity of two empty documents is 0.
void jaccards(Tokens tokens, Integers offsets, Integers pairs, int64_t ngram, Array<double> out, int threads);

// Computes out[q][c], the BM25 score of chunk c of one document. A token that occurs twice in the query counts twice:
//   idf * tf (k1 + 1) / (tf + k1 (1 - b + b size / mean size)),  idf = log((N - n + .5) / (n + .5))
// A negative idf becomes 0.25 * mean idf. A chunk has lengths[c] tokens and a query has sizes[q] tokens, followed by
// padding.
void bm25(Tokens chunks, Integers lengths, Tokens queries, Integers sizes, double k1, double b, Array<float> out,
          int threads);

}  // namespace retro::text
