// Position logits. Scratch memory holds one chunk of the band at a time (band.h). The forward pass copies the chunk to
// the skewed positions of the logits. The backward pass copies the gradients of the logits from there to the chunk.
#include "relative_logits.h"

#include <memory>

#include "parallel.h"
#include "partition.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int TASK_ROWS = 4 * BLOCK;  // queries per forward task, so that packing the relative keys takes little time

struct Logits {
  const RelativeLogits& c;
  const View& logits;  // [B,H,N,key_len], or their gradient
  int64_t B = c.query.size[0], N = c.query.size[1], S = c.key_len;
  int H = static_cast<int>(c.query.size[2]);
  Band n{c.rel_key, c.query_offset, c.rel_start, 1 - N, S};

  // Chunks [first_chunk(a), last_chunk(a)) have the logits of query block a.
  int64_t first_chunk(int64_t a) const { return -a - 1; }
  int64_t last_chunk(int64_t a) const { return floor_divide(S - 2 - a * BLOCK, BLOCK) + 1; }
  // Calls f(r, begin, end, zero) for each row. [begin, end) are the columns of chunk m whose key exists, and `zero` is
  // the key of column 0.
  template <class Function> void each_row(int64_t m, int64_t i, int rows, Function&& f) const {
    for (int r = 0; r < rows; ++r) {
      const int64_t zero = m * BLOCK + 1 + i + r;
      const int begin = static_cast<int>(std::clamp<int64_t>(-zero, 0, BLOCK));
      f(r, begin, static_cast<int>(std::clamp<int64_t>(S - zero, begin, BLOCK)), zero);
    }
  }
};

template <class Elem> struct Workspace {
  BandChunks<Elem> chunks;
  Elem *query, *query_b, *rounded;
  float *strip, *d_query, *bias;

  // For the query rows [first_row, last_row).
  Workspace(const Logits& l, int64_t first_row, int64_t last_row, bool gradients, Arena& arena)
      : chunks(l.n, l.first_chunk((last_row - 1) / BLOCK), l.last_chunk(first_row / BLOCK), gradients, arena) {
    const Band& n = l.n;
    arena.give(BLOCK * row_width<Elem>(n.E), query);
    arena.give(BLOCK * BLOCK, strip);
    arena.give(PAIRS<Elem> && gradients ? kc_of<Elem>(BLOCK) * n.E_pad : 0, query_b);
    arena.give(PAIRS<Elem> && gradients ? BLOCK * BLOCK / 2 : 0, rounded);
    arena.give(BLOCK * n.E_pad, d_query);
    arena.give(n.E_pad, bias);
  }
};

// T: type of the tensors in memory. Elem: type of the products' operands.
template <class T, class Elem> struct Forward : Logits {
  void task(int64_t b, int h, int64_t first_row, int64_t last_row) const {
    const TileScope tiles;
    auto w = in_scratch<Workspace<Elem>>(*this, first_row, last_row, false);
    w.chunks.reset();
    for (int64_t i = first_row; i < last_row; i += BLOCK) {
      const int rows = static_cast<int>(std::min<int64_t>(BLOCK, last_row - i));
      pack_queries<T>(c.query, c.position_bias, b, i, rows, h, n.E, w.bias, w.query);
      for (int64_t m = first_chunk(i / BLOCK); m < last_chunk(i / BLOCK); ++m) {
        band_logits<T>(n, w.chunks, h, m, rows, w.query, w.strip, BLOCK, Diagonals::of(m, i, 0, S));
        const InStage stage(STORE);
        each_row(m, i, rows, [&](int r, int begin, int end, int64_t zero) {
          convert_row(w.strip + r * BLOCK + begin, logits.at<T>(b, h, i + r) + zero + begin, end - begin);
        });
      }
    }
  }

  void run(int threads) const {
    const int64_t parts = (N + TASK_ROWS - 1) / TASK_ROWS;
    parallel_for(B * H * parts, threads, [&](int64_t t) {
      const int64_t first = t % parts * TASK_ROWS;
      task(t / parts / H, static_cast<int>(t / parts % H), first, std::min<int64_t>(N, first + TASK_ROWS));
    });
  }
};

template <class T, class Elem> struct Backward : Logits {
  const View &dquery, &drel_key, &dbias;
  Partition partition{B, H, N};
  int64_t table_size = drel_key ? (n.last - n.first) * n.E * BLOCK : 0, sums_size = table_size + n.E_pad;
  std::unique_ptr<float[]> sums{new float[partition.tasks * sums_size]};  // per task: relative keys, then the bias

  void block(int64_t b, int64_t i, int rows, int h, Workspace<Elem>& w, float* table, float* bias) const {
    pack_queries<T>(c.query, c.position_bias, b, i, rows, h, n.E, w.bias, w.query);
    const Elem* query_b = pack_b(w.query, rows, n.E, w.query_b);
    clear(w.d_query, BLOCK * n.E_pad);
    for (int64_t m = first_chunk(i / BLOCK); m < last_chunk(i / BLOCK); ++m) {
      if (!n.holds(m))
        continue;
      each_row(m, i, rows, [&](int r, int begin, int end, int64_t zero) {
        float* to = w.strip + r * BLOCK;
        if (end - begin < BLOCK)
          clear(to, BLOCK);
        convert_row(logits.at<const T>(b, h, i + r) + zero * logits.stride[3] + begin, to + begin, end - begin);
      });
      band_gradients<T>(n, w.chunks, h, m, rows, query_b, w.strip, BLOCK, w.rounded,
                        dquery || dbias ? w.d_query : nullptr, drel_key ? table + (m - n.first) * n.E * BLOCK : nullptr,
                        Diagonals::of(m, i, 0, S));
    }
    for (int r = 0; r < rows; ++r)
      for (int e = 0; e < n.E; e += LANES) {
        const Vec g = load(w.d_query + r * n.E_pad + e);
        if (dquery)
          store(dquery.at<T>(b, i + r, h) + e, g, n.E - e);
        store(bias + e, load(bias + e) + g);
      }
  }

  void task(int64_t t) const {
    const TileScope tiles;
    const Partition::Share mine = partition.share(t);
    auto w = in_scratch<Workspace<Elem>>(*this, mine.first_row, mine.last_row, true);
    w.chunks.reset();
    float* table = sums.get() + mine.slot * sums_size;
    clear(table, sums_size);
    for (int64_t b = mine.first_batch; b < mine.last_batch; ++b)
      for (int64_t i = mine.first_row; i < mine.last_row; i += BLOCK)
        block(b, i, static_cast<int>(std::min<int64_t>(BLOCK, mine.last_row - i)), mine.head, w, table,
              table + table_size);
  }

  void run(int threads) const {
    parallel_for(partition.tasks, threads, [&](int64_t t) { task(t); });
    write_bias_gradient<T>(partition, 1, sums.get() + table_size, sums_size, n.E, dbias);
    if (drel_key)
      write_table_gradient<T>(partition, n, 1, sums.get(), sums_size, 1.f, drel_key, threads);
  }
};

}  // namespace

void relative_logits_forward(const RelativeLogits& call, const View& logits, int threads) {
  by_storage(call.query.type, [&](auto t, auto e) { Forward<decltype(t), decltype(e)>{{call, logits}}.run(threads); });
}

void relative_logits_backward(const RelativeLogits& call, const View& dlogits, const View& dquery, const View& drel_key,
                              const View& dposition_bias, int threads) {
  by_storage(call.query.type, [&](auto t, auto e) {
    Backward<decltype(t), decltype(e)>{{call, dlogits}, dquery, drel_key, dposition_bias}.run(threads);
  });
}

}  // namespace retro::RETRO_ISA
