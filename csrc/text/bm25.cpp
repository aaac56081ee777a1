// A query touches only the chunks that share a token with it.
#include "bm25.h"

#include <algorithm>
#include <cmath>

namespace retro::text {

constexpr double FLOOR = 0.25;  // a negative idf becomes FLOOR * mean idf, as in Python's rank_bm25

Bm25::Bm25(const int32_t* tokens, const int64_t* lengths, int64_t chunks, int64_t width, double k1, double b)
    : chunks_(chunks) {
  std::vector<std::pair<int32_t, int32_t>> at;  // (token, chunk)
  for (int64_t c = 0; c < chunks; ++c)
    for (int64_t i = 0; i < lengths[c]; ++i) at.emplace_back(tokens[c * width + i], static_cast<int32_t>(c));
  const double mean = chunks ? static_cast<double>(at.size()) / chunks : 1;
  std::sort(at.begin(), at.end());
  double total = 0;
  std::vector<double> idf;
  for (size_t i = 0; i < at.size();) {
    const int32_t token = at[i].first;
    distinct_.push_back(token), begin_.push_back(postings_.size());
    while (i < at.size() && at[i].first == token) {
      const size_t first = i;
      while (i < at.size() && at[i] == at[first]) ++i;
      const double tf = i - first;
      const double norm = k1 * (1 - b + b * lengths[at[first].second] / mean);
      postings_.push_back({at[first].second, tf * (k1 + 1) / (tf + norm)});
    }
    const double n = postings_.size() - begin_.back();
    idf.push_back(std::log(chunks - n + .5) - std::log(n + .5));
    total += idf.back();
  }
  begin_.push_back(postings_.size());
  const double least = distinct_.empty() ? 0 : FLOOR * total / distinct_.size();
  for (size_t t = 0; t < distinct_.size(); ++t)
    for (int64_t p = begin_[t]; p < begin_[t + 1]; ++p) postings_[p].weight *= idf[t] < 0 ? least : idf[t];
}

void Bm25::score(const int32_t* query, int64_t size, std::vector<double>& sums, float* out) const {
  sums.assign(chunks_, 0);
  for (int64_t i = 0; i < size; ++i) {
    const auto found = std::lower_bound(distinct_.begin(), distinct_.end(), query[i]);
    if (found == distinct_.end() || *found != query[i]) continue;
    const int64_t t = found - distinct_.begin();
    for (int64_t p = begin_[t]; p < begin_[t + 1]; ++p) sums[postings_[p].chunk] += postings_[p].weight;
  }
  std::copy(sums.begin(), sums.end(), out);
}

}  // namespace retro::text
