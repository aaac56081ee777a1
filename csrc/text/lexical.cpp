// Lexical search. The inverted index of a block is built again for each batch of queries. Building it takes as long as
// a few queries, and an index of the whole store does not have to fit in memory.
#include <vector>

#include "text.h"

namespace retro::text {
namespace {

constexpr int64_t DENSE = 4;  // a token in more than 1/DENSE of the chunks gets a row of weights instead of a list

// Calls f(token, times) for every distinct token of a row, in ascending order.
template <class Function> void each_token(Span row, Function&& f) {
  thread_local std::vector<int32_t> sorted;
  sorted.assign(row.data, row.data + row.size);
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0, next; i < sorted.size(); i = next) {
    for (next = i + 1; next < sorted.size() && sorted[next] == sorted[i];)
      ++next;
    f(sorted[i], static_cast<int64_t>(next - i));
  }
}

// Inverted index of a block: the chunks that contain each token, and the score that one occurrence of the token in a
// query adds.
class LexicalBlock {
 public:
  LexicalBlock(Tokens chunks, Tokens lengths, Array<const float> idf, double k1, double b, double mean)
      : chunks_(chunks.size[0]) {
    const int64_t vocabulary = idf.size[0];
    std::vector<int64_t> counts(vocabulary, 0);
    count_chunks(chunks, lengths, {counts.data(), {vocabulary}});
    begin_.assign(vocabulary + 1, 0);
    row_.assign(vocabulary, -1);
    int64_t rows = 0;
    for (int64_t t = 0; t < vocabulary; ++t) {
      const bool dense = DENSE * counts[t] > chunks_;
      if (dense)
        row_[t] = rows++;
      begin_[t + 1] = begin_[t] + (dense ? 0 : counts[t]);
    }
    rows_.assign(rows * chunks_, 0);
    postings_.resize(begin_[vocabulary]);
    std::vector<int64_t> next(begin_.begin(), begin_.end() - 1);
    for (int64_t c = 0; c < chunks_; ++c) {
      const double norm = k1 * (1 - b + b * lengths.data[c] / mean);
      each_token({chunks.row(c), lengths.data[c]}, [&](int32_t token, int64_t tf) {
        const float weight = idf.data[token] * tf / (tf + norm);
        if (row_[token] >= 0)
          rows_[row_[token] * chunks_ + c] = weight;
        else
          postings_[next[token]++] = {static_cast<int32_t>(c), weight};
      });
    }
  }

  // Returns the score of every chunk. The scores are valid until the thread's next call.
  const float* scores(Span query) const {
    thread_local std::vector<float> sums;
    sums.assign(chunks_, 0);
    float* sum = sums.data();
    each_token(query, [&](int32_t token, int64_t times) {
      const float factor = times;
      if (const int64_t row = row_[token]; row >= 0) {
        const float* weight = rows_.data() + row * chunks_;
        for (int64_t c = 0; c < chunks_; ++c)
          sum[c] += factor * weight[c];
        return;
      }
      for (int64_t p = begin_[token]; p < begin_[token + 1]; ++p)
        sum[postings_[p].chunk] += factor * postings_[p].weight;
    });
    return sum;
  }

 private:
  struct Posting {
    int32_t chunk;
    float weight;
  };

  int64_t chunks_;
  std::vector<int64_t> begin_;  // start of each token's postings, then the end of the last list
  std::vector<int64_t> row_;    // row of a frequent token in rows_, which replaces its postings; -1 for other tokens
  std::vector<float> rows_;     // [frequent tokens, chunks]
  std::vector<Posting> postings_;
};

}  // namespace

void count_chunks(Tokens chunks, Tokens lengths, Array<int64_t> counts) {
  for (int64_t c = 0; c < chunks.size[0]; ++c)
    each_token({chunks.row(c), lengths.data[c]}, [&](int32_t token, int64_t) { ++counts.data[token]; });
}

void lexical_search(Tokens chunks, Tokens lengths, Integers documents, int64_t first, Array<const float> idf, double k1,
                    double b, double mean, Tokens queries, Integers sizes, Integers excluded, Array<float> best,
                    Array<int64_t> ids, int threads) {
  const LexicalBlock block(chunks, lengths, idf, k1, b, mean);
  const int64_t last = ids.size[1] - 1;
  parallel_rows(queries.size[0], threads, [&](int64_t q) {
    const float* scores = block.scores({queries.row(q), sizes.data[q]});
    float* score = best.row(q);
    int64_t* id = ids.row(q);
    for (int64_t c = 0; c < chunks.size[0]; ++c) {
      if (id[last] >= 0 && scores[c] <= score[last])
        continue;  // an equal score with a lower id keeps its place
      if (documents.data[c] == excluded.data[q])
        continue;
      int64_t at = last;
      for (; at > 0 && (id[at - 1] < 0 || score[at - 1] < scores[c]); --at) {
        score[at] = score[at - 1];
        id[at] = id[at - 1];
      }
      score[at] = scores[c];
      id[at] = first + c;
    }
  });
}

}  // namespace retro::text
