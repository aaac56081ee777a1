// BM25 over the chunks of a store, one block at a time. The caller keeps the k best of each query between blocks.
#pragma once
#include <cstdint>
#include <vector>

namespace retro::text {

// counts[t] += number of chunks that hold token t. tokens: `chunks` rows of `width`; the first lengths[c] are real.
void count_chunks(const int32_t* tokens, const int32_t* lengths, int64_t chunks, int64_t width, int64_t* counts);

// Inverted index of a block: the chunks that hold each token, and the score that one occurrence in a query adds:
//   idf * tf / (tf + k1 (1 - b + b size / mean size))
class LexicalBlock {
 public:
  // idf: of every token of the vocabulary. first: the number of the block's first chunk.
  LexicalBlock(const int32_t* tokens, const int32_t* lengths, int64_t chunks, int64_t width, const float* idf,
               int64_t vocabulary, double k1, double b, double mean, int64_t first);

  // Merge the block's chunks into a query's k best, except those of document `excluded`. Order: score descending, then
  // id ascending. documents[c]: document of the block's chunk c. sums: scratch.
  void search(const int32_t* query, int64_t size, const int64_t* documents, int64_t excluded, int64_t k,
              std::vector<float>& sums, float* best, int64_t* ids) const;

 private:
  struct Posting {
    int32_t chunk;
    float weight;
  };

  int64_t chunks_, first_;
  std::vector<int64_t> begin_;  // start of each token's postings, then the end of the last
  std::vector<int64_t> row_;    // row of a frequent token in rows_, which replaces its postings; -1 for other tokens
  std::vector<float> rows_;     // [frequent tokens, chunks]
  std::vector<Posting> postings_;
};

}  // namespace retro::text
