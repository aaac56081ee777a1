// BM25 over the chunks of a whole store, a block of them at a time: the k best of each query so far go along.
#pragma once
#include <cstdint>
#include <vector>

namespace retro::text {

// counts[t] += number of the chunks that hold token t. tokens: `chunks` rows of `width`, the first lengths[c] real.
void count_chunks(const int32_t* tokens, const int32_t* lengths, int64_t chunks, int64_t width, int64_t* counts);

// The chunks of a block that hold each token, and the score that one occurrence in a query adds:
//   idf * tf / (tf + k1 (1 - b + b size / mean size))
class LexicalBlock {
 public:
  // idf: of every token of the vocabulary. first: the number of the block's first chunk.
  LexicalBlock(const int32_t* tokens, const int32_t* lengths, int64_t chunks, int64_t width, const float* idf,
               int64_t vocabulary, double k1, double b, double mean, int64_t first);

  // Merges the block's chunks, those of document `excluded` left out, into a query's k best: scores descending, equal
  // ones by the lower id. documents[c]: of the block's chunks. `sums`: scratch.
  void search(const int32_t* query, int64_t size, const int64_t* documents, int64_t excluded, int64_t k,
              std::vector<float>& sums, float* best, int64_t* ids) const;

 private:
  struct Posting {
    int32_t chunk;
    float weight;
  };

  int64_t chunks_, first_;
  std::vector<int64_t> begin_;  // of each token's postings, and the end of the last
  std::vector<int64_t> row_;    // of a frequent token in rows_, in place of postings; -1 for the others
  std::vector<float> rows_;     // [frequent tokens, chunks]
  std::vector<Posting> postings_;
};

}  // namespace retro::text
