// BM25 over the chunks of one document. Only the chunks that share a token with a query are read for the query.
#include <cmath>
#include <vector>

#include "text.h"

namespace retro::text {
namespace {

constexpr double FLOOR = 0.25;  // a negative idf becomes FLOOR * mean idf, as in Python's rank_bm25

// Inverted index: the chunks that contain each token, and the score that one occurrence of the token in a query adds.
class Bm25 {
 public:
  Bm25(Tokens chunks, Integers lengths, double k1, double b) : chunks_(chunks.size[0]) {
    std::vector<std::pair<int32_t, int32_t>> at;  // (token, chunk)
    for (int64_t c = 0; c < chunks_; ++c)
      for (int64_t i = 0; i < lengths.data[c]; ++i)
        at.emplace_back(chunks.row(c)[i], static_cast<int32_t>(c));
    const double mean = chunks_ ? static_cast<double>(at.size()) / chunks_ : 1;
    std::sort(at.begin(), at.end());
    double total = 0;
    std::vector<double> idf;
    for (size_t i = 0; i < at.size();) {
      const int32_t token = at[i].first;
      distinct_.push_back(token);
      begin_.push_back(postings_.size());
      while (i < at.size() && at[i].first == token) {
        const size_t first = i;
        while (i < at.size() && at[i] == at[first])
          ++i;
        const double tf = i - first;
        const double norm = k1 * (1 - b + b * lengths.data[at[first].second] / mean);
        postings_.push_back({at[first].second, tf * (k1 + 1) / (tf + norm)});
      }
      const double n = postings_.size() - begin_.back();
      idf.push_back(std::log(chunks_ - n + .5) - std::log(n + .5));
      total += idf.back();
    }
    begin_.push_back(postings_.size());
    const double least = distinct_.empty() ? 0 : FLOOR * total / distinct_.size();
    for (size_t t = 0; t < distinct_.size(); ++t)
      for (int64_t p = begin_[t]; p < begin_[t + 1]; ++p)
        postings_[p].weight *= idf[t] < 0 ? least : idf[t];
  }

  void score(Span query, float* out) const {
    thread_local std::vector<double> sums;
    sums.assign(chunks_, 0);
    for (int64_t i = 0; i < query.size; ++i) {
      const auto found = std::lower_bound(distinct_.begin(), distinct_.end(), query.data[i]);
      if (found == distinct_.end() || *found != query.data[i])
        continue;
      const int64_t t = found - distinct_.begin();
      for (int64_t p = begin_[t]; p < begin_[t + 1]; ++p)
        sums[postings_[p].chunk] += postings_[p].weight;
    }
    std::copy(sums.begin(), sums.end(), out);
  }

 private:
  struct Posting {
    int32_t chunk;
    double weight;
  };

  int64_t chunks_;
  std::vector<int32_t> distinct_;  // sorted tokens
  std::vector<int64_t> begin_;     // start of each distinct token's postings, then the end of the last list
  std::vector<Posting> postings_;
};

}  // namespace

void bm25(Tokens chunks, Integers lengths, Tokens queries, Integers sizes, double k1, double b, Array<float> out,
          int threads) {
  const Bm25 index(chunks, lengths, k1, b);
  parallel_for(queries.size[0], threads, [&](int64_t q) { index.score({queries.row(q), sizes.data[q]}, out.row(q)); });
}

}  // namespace retro::text
