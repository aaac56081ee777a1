// BM25 over the chunks of one document.
#pragma once
#include <cstdint>
#include <vector>

namespace retro::text {

// Inverted index: the chunks that hold each token, and the score that one occurrence in a query adds:
//   idf * tf (k1 + 1) / (tf + k1 (1 - b + b size / mean size)),  idf = log((N - n + .5) / (n + .5))
// A negative idf becomes 0.25 * mean idf.
class Bm25 {
 public:
  // tokens: `chunks` rows of `width`, of which the first lengths[c] are real
  Bm25(const int32_t* tokens, const int64_t* lengths, int64_t chunks, int64_t width, double k1, double b);

  // out[c] = score of chunk c, c < chunks. A token that occurs twice in the query counts twice. sums: scratch.
  void score(const int32_t* query, int64_t size, std::vector<double>& sums, float* out) const;

 private:
  struct Posting {
    int32_t chunk;
    double weight;
  };

  int64_t chunks_;
  std::vector<int32_t> distinct_;  // sorted tokens
  std::vector<int64_t> begin_;     // start of each distinct token's postings, then the end of the last
  std::vector<Posting> postings_;
};

}  // namespace retro::text
