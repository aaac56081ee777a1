// Scratch memory holds one chunk of the band at a time (band.h). It is copied to the skewed positions of its logits, or
// from those of their gradients.
#include "relative_logits.h"

#include <memory>

#include "parallel.h"
#include "partition.h"

namespace retro::RETRO_ISA {
namespace {

constexpr int TASK_ROWS = 4 * BLOCK;  // queries of a forward task, so that packing the relative keys takes little time

template <class Elem>
struct Workspace {
  BandChunks<Elem> chunks;
  Elem *query, *query_b, *rounded;
  float *strip, *d_query, *bias;
  size_t bytes;

  Workspace(const Band& n, int64_t first, int64_t last, bool gradients, Arena arena) {
    chunks = BandChunks<Elem>(n, first, last, gradients, arena);
    query = arena.take<Elem>(BLOCK * row_width<Elem>(n.E)), strip = arena.take<float>(BLOCK * BLOCK);
    query_b = arena.take<Elem>(PAIRS<Elem> && gradients ? kc_of<Elem>(BLOCK) * n.E_pad : 0);
    rounded = arena.take<Elem>(PAIRS<Elem> && gradients ? BLOCK * BLOCK / 2 : 0);
    d_query = arena.take<float>(BLOCK * n.E_pad), bias = arena.take<float>(n.E_pad);
    bytes = arena.used();
  }
};

// T: type of the tensors in memory. Elem: type of the products' operands.
template <class T, class Elem>
struct Logits {
  const RelativeLogits& c;
  const View& logits;  // [B,H,N,key_len], or their gradient
  int64_t B = c.query.size[0], N = c.query.size[1], S = c.key_len;
  int H = static_cast<int>(c.query.size[2]);
  Band n{c.rel_key, c.query_offset, c.rel_start, 1 - N, S};

  Logits(const RelativeLogits& call, const View& l) : c(call), logits(l) {}

  // Chunks of the query rows of block a.
  int64_t first_chunk(int64_t a) const { return -a - 1; }
  int64_t last_chunk(int64_t a) const { return floor_divide(S - 2 - a * BLOCK, BLOCK) + 1; }
  // Columns [begin, end) of chunk m whose key exists for query row i; the key of column 0 is returned.
  int64_t keys(int64_t m, int64_t i, int& begin, int& end) const {
    const int64_t zero = m * BLOCK + 1 + i;
    begin = static_cast<int>(std::clamp<int64_t>(-zero, 0, BLOCK));
    end = static_cast<int>(std::clamp<int64_t>(S - zero, begin, BLOCK));
    return zero;
  }

  void load_queries(int64_t b, int64_t i, int rows, int h, Workspace<Elem>& w) const {
    const float* bias = bias_of<T>(c.position_bias, h, n.E, w.bias);
    for (int r = 0; r < rows; ++r)
      pack_row(c.query.at<const T>(b, i + r, h), bias, n.E, w.query + r * row_width<Elem>(n.E));
  }

  void store_chunk(int64_t b, int64_t i, int rows, int h, int64_t m, const float* strip) const {
    for (int r = 0; r < rows; ++r) {
      int begin, end;
      const int64_t zero = keys(m, i + r, begin, end);
      convert_row(strip + r * BLOCK + begin, logits.at<T>(b, h, i + r) + zero + begin, end - begin);
    }
  }

  void load_chunk(int64_t b, int64_t i, int rows, int h, int64_t m, float* strip) const {
    const int64_t step = logits.stride[3];
    for (int r = 0; r < rows; ++r) {
      int begin, end;
      const int64_t zero = keys(m, i + r, begin, end);
      float* to = strip + r * BLOCK;
      if (end - begin < BLOCK) clear(to, BLOCK);
      convert_row(logits.at<const T>(b, h, i + r) + zero * step + begin, to + begin, end - begin);
    }
  }

  void forward(int64_t b, int h, int64_t first_row, int64_t last_row) const {
    const TileScope tiles;
    const int64_t first = first_chunk((last_row - 1) / BLOCK), last = last_chunk(first_row / BLOCK);
    auto w = in_scratch<Workspace<Elem>>(n, first, last, false);
    w.chunks.reset();
    for (int64_t i = first_row; i < last_row; i += BLOCK) {
      const int rows = static_cast<int>(std::min<int64_t>(BLOCK, last_row - i));
      load_queries(b, i, rows, h, w);
      for (int64_t m = first_chunk(i / BLOCK); m < last_chunk(i / BLOCK); ++m) {
        band_logits<T>(n, w.chunks, h, m, rows, w.query, w.strip, BLOCK);
        store_chunk(b, i, rows, h, m, w.strip);
      }
    }
  }

  void run(int threads) const {
    const int64_t parts = (N + TASK_ROWS - 1) / TASK_ROWS;
    parallel_for(B * H * parts, threads, [&](int64_t t) {
      const int64_t first = t % parts * TASK_ROWS;
      forward(t / parts / H, static_cast<int>(t / parts % H), first, std::min<int64_t>(N, first + TASK_ROWS));
    });
  }
};

template <class T, class Elem>
struct LogitsBackward : Logits<T, Elem> {
  using Base = Logits<T, Elem>;
  using Base::B;
  using Base::H;
  using Base::n;
  using Base::N;

  const View &dquery, &drel_key, &dbias;
  Partition partition{B, H, N};
  int64_t chunks = n.last - n.first, table_size = drel_key ? chunks * n.E * BLOCK : 0;
  std::unique_ptr<float[]> tables{new float[partition.tasks * table_size + 1]},
      biases{new float[partition.tasks * n.E_pad]};

  LogitsBackward(const RelativeLogits& call, const View& dlogits, const View& dq, const View& dr, const View& dv)
      : Base(call, dlogits), dquery(dq), drel_key(dr), dbias(dv) {}

  void block(int64_t b, int64_t i, int rows, int h, Workspace<Elem>& w, float* table, float* bias) const {
    this->load_queries(b, i, rows, h, w);
    const Elem* query_b = pack_b(w.query, rows, n.E, w.query_b);
    clear(w.d_query, BLOCK * n.E_pad);
    for (int64_t m = this->first_chunk(i / BLOCK); m < this->last_chunk(i / BLOCK); ++m) {
      if (!n.holds(m)) continue;
      this->load_chunk(b, i, rows, h, m, w.strip);
      band_gradients<T>(n, w.chunks, h, m, rows, query_b, w.strip, BLOCK, w.rounded,
                        dquery || dbias ? w.d_query : nullptr,
                        drel_key ? table + (m - n.first) * n.E * BLOCK : nullptr);
    }
    for (int r = 0; r < rows; ++r)
      for (int e = 0; e < n.E; e += LANES) {
        const Vec g = load(w.d_query + r * n.E_pad + e);
        if (dquery) store(dquery.at<T>(b, i + r, h) + e, g, n.E - e);
        store(bias + e, load(bias + e) + g);
      }
  }

  void task(int64_t t) const {
    const TileScope tiles;
    const Partition::Share mine = partition.share(t);
    const int64_t first = this->first_chunk((mine.last_row - 1) / BLOCK),
                  last = this->last_chunk(mine.first_row / BLOCK);
    auto w = in_scratch<Workspace<Elem>>(n, first, last, true);
    float *table = tables.get() + mine.slot * table_size, *bias = biases.get() + mine.slot * n.E_pad;
    clear(table, table_size), clear(bias, n.E_pad);
    w.chunks.reset();
    for (int64_t b = mine.first_batch; b < mine.last_batch; ++b)
      for (int64_t i = mine.first_row; i < mine.last_row; i += BLOCK)
        block(b, i, static_cast<int>(std::min<int64_t>(BLOCK, mine.last_row - i)), mine.head, w, table, bias);
  }

  void run(int threads) const {
    parallel_for(partition.tasks, threads, [&](int64_t t) { task(t); });
    for (int h = 0; dbias && h < H; ++h)
      for (int e = 0; e < n.E; e += LANES) {
        Vec total = zero();
        partition.each_slot(h, [&](int64_t slot) { total = total + load(biases.get() + slot * n.E_pad + e); });
        store(dbias.at<T>(h) + e, total, n.E - e);
      }
    if (!drel_key) return;
    clear_unused_rows<T>(n, drel_key);
    parallel_for(n.tables() * chunks, threads, [&](int64_t t) {
      const int h = static_cast<int>(t / chunks);
      const int64_t size = n.E * BLOCK, offset = t % chunks * size;
      const int head = n.tables() > 1 ? h : -1;
      auto* total = static_cast<float*>(scratch((size + BLOCK * n.E_pad) * sizeof(float)));
      sum_table(partition, head, tables.get() + offset, table_size, size, total);
      write_table_gradient<T>(n, drel_key, h, n.first + t % chunks, total, 1.f, total + size);
    });
  }
};

}  // namespace

void relative_logits_forward(const RelativeLogits& call, const View& logits, int threads) {
  by_storage(call.query.type, [&](auto t, auto e) { Logits<decltype(t), decltype(e)>(call, logits).run(threads); });
}

void relative_logits_backward(const RelativeLogits& call, const View& dlogits, const View& dquery, const View& drel_key,
                              const View& dposition_bias, int threads) {
  by_storage(call.query.type, [&](auto t, auto e) {
    LogitsBackward<decltype(t), decltype(e)>(call, dlogits, dquery, drel_key, dposition_bias).run(threads);
  });
}

}  // namespace retro::RETRO_ISA
