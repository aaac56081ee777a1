// `retro_model._text`: int32 tokens in C order, checked by retro_model/data/text.py; every call runs without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <vector>

#include "../cpu/parallel.h"
#include "bm25.h"
#include "lexical.h"
#include "match.h"
#include "minhash.h"

namespace py = pybind11;
using namespace retro;
using namespace retro::text;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

constexpr int64_t CHUNKS_A_TASK = 32;

// out[c][i]: length of the longest prefix of chunk c from token i that occurs in one of its K sources.
void prefixes(const Array<int32_t>& chunks, const Array<int64_t>& lengths, const Array<int32_t>& sources,
              Array<int32_t> out, int threads) {
  const int64_t n = chunks.shape(0), width = chunks.shape(1), sources_each = sources.shape(1),
                source_width = sources.shape(2);
  const int32_t *chunk = chunks.data(), *source = sources.data();
  const int64_t* length = lengths.data();
  int32_t* result = out.mutable_data();
  py::gil_scoped_release released;
  parallel_for((n + CHUNKS_A_TASK - 1) / CHUNKS_A_TASK, threads, [&](int64_t task) {
    for (int64_t c = task * CHUNKS_A_TASK; c < std::min(n, (task + 1) * CHUNKS_A_TASK); ++c) {
      std::fill_n(result + c * width, width, 0);
      for (int64_t k = 0; k < sources_each; ++k)
        raise_prefix_lengths({chunk + c * width, length[c]},
                             {source + (c * sources_each + k) * source_width, source_width}, result + c * width);
    }
  });
}

void signatures(const Array<int32_t>& tokens, const Array<int64_t>& offsets, int64_t ngram, uint64_t seed,
                Array<uint32_t> out, int threads) {
  const int64_t documents = out.shape(0), permutations = out.shape(1);
  const int32_t* token = tokens.data();
  const int64_t* offset = offsets.data();
  uint32_t* result = out.mutable_data();
  py::gil_scoped_release released;
  parallel_for(documents, threads, [&](int64_t d) {
    minhash({token + offset[d], offset[d + 1] - offset[d]}, ngram, permutations, seed, result + d * permutations);
  });
}

void jaccards(const Array<int32_t>& tokens, const Array<int64_t>& offsets, const Array<int64_t>& pairs, int64_t ngram,
              Array<double> out, int threads) {
  const int32_t* token = tokens.data();
  const int64_t *offset = offsets.data(), *pair = pairs.data(), count = pairs.shape(0);
  double* result = out.mutable_data();
  py::gil_scoped_release released;
  const auto document = [&](int64_t d) { return Span{token + offset[d], offset[d + 1] - offset[d]}; };
  parallel_for(count, threads,
               [&](int64_t p) { result[p] = jaccard(document(pair[2 * p]), document(pair[2 * p + 1]), ngram); });
}

void bm25(const Array<int32_t>& chunks, const Array<int64_t>& lengths, const Array<int32_t>& queries,
          const Array<int64_t>& sizes, double k1, double b, Array<float> out, int threads) {
  const int64_t n = chunks.shape(0), count = queries.shape(0), width = queries.shape(1);
  const int32_t *chunk = chunks.data(), *query = queries.data();
  const int64_t *length = lengths.data(), *size = sizes.data(), chunk_width = chunks.shape(1);
  float* result = out.mutable_data();
  py::gil_scoped_release released;
  const Bm25 index(chunk, length, n, chunk_width, k1, b);
  parallel_for((count + CHUNKS_A_TASK - 1) / CHUNKS_A_TASK, threads, [&](int64_t task) {
    std::vector<double> sums;
    for (int64_t q = task * CHUNKS_A_TASK; q < std::min(count, (task + 1) * CHUNKS_A_TASK); ++q)
      index.score(query + q * width, size[q], sums, result + q * n);
  });
}

void count_chunks_of(const Array<int32_t>& tokens, const Array<int32_t>& lengths, Array<int64_t> counts) {
  const int64_t chunks = tokens.shape(0), width = tokens.shape(1);
  const int32_t *token = tokens.data(), *length = lengths.data();
  int64_t* count = counts.mutable_data();
  py::gil_scoped_release released;
  count_chunks(token, length, chunks, width, count);
}

// Merge one block of chunks into the k best of every query, `best` and `ids` [queries,k].
void lexical_search(const Array<int32_t>& tokens, const Array<int32_t>& lengths, const Array<int64_t>& documents,
                    int64_t first, const Array<float>& idf, double k1, double b, double mean,
                    const Array<int32_t>& queries, const Array<int64_t>& sizes, const Array<int64_t>& excluded,
                    Array<float> best, Array<int64_t> ids, int threads) {
  const int64_t count = queries.shape(0), width = queries.shape(1), k = ids.shape(1), chunks = tokens.shape(0);
  const int64_t chunk_width = tokens.shape(1), vocabulary = idf.shape(0);
  const int32_t *token = tokens.data(), *length = lengths.data(), *query = queries.data();
  const int64_t *document = documents.data(), *size = sizes.data(), *excludes = excluded.data();
  const float* weight = idf.data();
  float* score = best.mutable_data();
  int64_t* id = ids.mutable_data();
  py::gil_scoped_release released;
  const LexicalBlock block(token, length, chunks, chunk_width, weight, vocabulary, k1, b, mean, first);
  parallel_for((count + CHUNKS_A_TASK - 1) / CHUNKS_A_TASK, threads, [&](int64_t task) {
    std::vector<float> sums;
    for (int64_t q = task * CHUNKS_A_TASK; q < std::min(count, (task + 1) * CHUNKS_A_TASK); ++q)
      block.search(query + q * width, size[q], document, excludes[q], k, sums, score + q * k, id + q * k);
  });
}

}  // namespace

PYBIND11_MODULE(_text, module) {
  module.doc() = "Token-sequence routines; called through retro_model.data.text";
  module.attr("abi") = 1;  // `ABI` of retro_model/data/text.py; the two change together
  using py::arg;
  module.def("prefixes", &prefixes, arg("chunks").noconvert(), arg("lengths").noconvert(), arg("sources").noconvert(),
             arg("out").noconvert(), arg("threads"));
  module.def("signatures", &signatures, arg("tokens").noconvert(), arg("offsets").noconvert(), arg("ngram"),
             arg("seed"), arg("out").noconvert(), arg("threads"));
  module.def("jaccards", &jaccards, arg("tokens").noconvert(), arg("offsets").noconvert(), arg("pairs").noconvert(),
             arg("ngram"), arg("out").noconvert(), arg("threads"));
  module.def("bm25", &bm25, arg("chunks").noconvert(), arg("lengths").noconvert(), arg("queries").noconvert(),
             arg("sizes").noconvert(), arg("k1"), arg("b"), arg("out").noconvert(), arg("threads"));
  module.def("count_chunks", &count_chunks_of, arg("tokens").noconvert(), arg("lengths").noconvert(),
             arg("counts").noconvert());
  module.def("lexical_search", &lexical_search, arg("tokens").noconvert(), arg("lengths").noconvert(),
             arg("documents").noconvert(), arg("first"), arg("idf").noconvert(), arg("k1"), arg("b"), arg("mean"),
             arg("queries").noconvert(), arg("sizes").noconvert(), arg("excluded").noconvert(), arg("best").noconvert(),
             arg("ids").noconvert(), arg("threads"));
}
