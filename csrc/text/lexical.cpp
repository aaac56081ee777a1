// The inverted index of a block is rebuilt for each batch of queries. Building takes as long as a few queries, and no
// index of the whole store has to fit in memory.
#include "lexical.h"

#include <algorithm>

namespace retro::text {

namespace {

constexpr int64_t DENSE = 4;  // a token in more than 1/DENSE of the chunks gets a row of weights instead of a list

// Call f(token, times) for every distinct token of a row, in ascending order.
template <class Function>
void each_token(const int32_t* row, int64_t size, std::vector<int32_t>& sorted, Function&& f) {
  sorted.assign(row, row + size);
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0, next; i < sorted.size(); i = next) {
    for (next = i + 1; next < sorted.size() && sorted[next] == sorted[i];) ++next;
    f(sorted[i], static_cast<int64_t>(next - i));
  }
}

}  // namespace

void count_chunks(const int32_t* tokens, const int32_t* lengths, int64_t chunks, int64_t width, int64_t* counts) {
  std::vector<int32_t> sorted;
  for (int64_t c = 0; c < chunks; ++c)
    each_token(tokens + c * width, lengths[c], sorted, [&](int32_t token, int64_t) { ++counts[token]; });
}

LexicalBlock::LexicalBlock(const int32_t* tokens, const int32_t* lengths, int64_t chunks, int64_t width,
                           const float* idf, int64_t vocabulary, double k1, double b, double mean, int64_t first)
    : chunks_(chunks), first_(first) {
  std::vector<int64_t> counts(vocabulary, 0);
  count_chunks(tokens, lengths, chunks, width, counts.data());
  begin_.assign(vocabulary + 1, 0), row_.assign(vocabulary, -1);
  int64_t rows = 0;
  for (int64_t t = 0; t < vocabulary; ++t) {
    const bool dense = DENSE * counts[t] > chunks;
    if (dense) row_[t] = rows++;
    begin_[t + 1] = begin_[t] + (dense ? 0 : counts[t]);
  }
  rows_.assign(rows * chunks, 0);
  postings_.resize(begin_[vocabulary]);
  std::vector<int64_t> next(begin_.begin(), begin_.end() - 1);
  std::vector<int32_t> sorted;
  for (int64_t c = 0; c < chunks; ++c) {
    const double norm = k1 * (1 - b + b * lengths[c] / mean);
    each_token(tokens + c * width, lengths[c], sorted, [&](int32_t token, int64_t tf) {
      const float weight = idf[token] * tf / (tf + norm);
      if (row_[token] >= 0)
        rows_[row_[token] * chunks + c] = weight;
      else
        postings_[next[token]++] = {static_cast<int32_t>(c), weight};
    });
  }
}

void LexicalBlock::search(const int32_t* query, int64_t size, const int64_t* documents, int64_t excluded, int64_t k,
                          std::vector<float>& sums, float* best, int64_t* ids) const {
  sums.assign(chunks_, 0);
  float* sum = sums.data();
  std::vector<int32_t> sorted;
  each_token(query, size, sorted, [&](int32_t token, int64_t times) {
    const float factor = times;
    if (const int64_t row = row_[token]; row >= 0) {
      const float* weight = rows_.data() + row * chunks_;
      for (int64_t c = 0; c < chunks_; ++c) sum[c] += factor * weight[c];
      return;
    }
    for (int64_t p = begin_[token]; p < begin_[token + 1]; ++p) sum[postings_[p].chunk] += factor * postings_[p].weight;
  });
  for (int64_t c = 0; c < chunks_; ++c) {
    if (ids[k - 1] >= 0 && sums[c] <= best[k - 1]) continue;  // an equal score of a lower id stays
    if (documents[c] == excluded) continue;
    int64_t at = k - 1;
    for (; at > 0 && (ids[at - 1] < 0 || best[at - 1] < sums[c]); --at) best[at] = best[at - 1], ids[at] = ids[at - 1];
    best[at] = sums[c], ids[at] = first_ + c;
  }
}

}  // namespace retro::text
