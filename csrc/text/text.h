// Routines over arrays of tokens in C order; retro_model/data checks shapes and values. No result depends on `threads`.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../cpu/parallel.h"

namespace retro::text {

template <class T> struct Array {
  T* data;
  int64_t size[3];  // as many as there are dimensions

  T* row(int64_t i) const { return data + i * size[1]; }
};
using Tokens = Array<const int32_t>;
using Integers = Array<const int64_t>;

struct Span {
  const int32_t* data;
  int64_t size;
};

// Call f(i) for each i below `count`, a few in each task.
template <class Function> void parallel_rows(int64_t count, int threads, Function&& f) {
  constexpr int64_t ROWS_A_TASK = 32;
  parallel_for((count + ROWS_A_TASK - 1) / ROWS_A_TASK, threads, [&](int64_t task) {
    for (int64_t i = task * ROWS_A_TASK; i < std::min(count, (task + 1) * ROWS_A_TASK); ++i)
      f(i);
  });
}

// out[c][i]: length of the longest run from token i of chunk c that occurs in one of its K sources [n,K,R]. The first
// lengths[c] tokens of a chunk are real.
void prefixes(Tokens chunks, Integers lengths, Tokens sources, Array<int32_t> out, int threads);

// MinHash signatures (Broder, 1997). out[d][p]: least hash of document d's n-grams under hash function p, drawn from
// `seed`. Document d is tokens[offsets[d]] .. tokens[offsets[d + 1] - 1]. A document shorter than `ngram` is a single
// n-gram. Every entry of an empty document is UINT32_MAX.
void signatures(Tokens tokens, Integers offsets, int64_t ngram, uint64_t seed, Array<uint32_t> out, int threads);

// out[p]: |A n B| / |A u B| over the sets of n-grams of a pair of documents, by comparing tokens; 0 if both are empty.
void jaccards(Tokens tokens, Integers offsets, Integers pairs, int64_t ngram, Array<double> out, int threads);

// out[q][c]: BM25 score of chunk c of one document. A token that occurs twice in the query counts twice.
//   idf * tf (k1 + 1) / (tf + k1 (1 - b + b size / mean size)),  idf = log((N - n + .5) / (n + .5))
// A negative idf becomes 0.25 * mean idf. The first lengths[c] tokens of a chunk and sizes[q] of a query are real.
void bm25(Tokens chunks, Integers lengths, Tokens queries, Integers sizes, double k1, double b, Array<float> out,
          int threads);

// counts[t] += number of chunks that hold token t.
void count_chunks(Tokens chunks, Tokens lengths, Array<int64_t> counts);

// Merge one block of a store's chunks into the k best of every query, `best` and `ids` [queries,k], except those of
// document excluded[q]. Order: score descending, then id ascending. Each occurrence of a token in the query adds
//   idf * tf / (tf + k1 (1 - b + b size / mean))
// documents[c]: document of the block's chunk c. first: number of the block's first chunk. idf: of the vocabulary.
void lexical_search(Tokens chunks, Tokens lengths, Integers documents, int64_t first, Array<const float> idf, double k1,
                    double b, double mean, Tokens queries, Integers sizes, Integers excluded, Array<float> best,
                    Array<int64_t> ids, int threads);

}  // namespace retro::text
