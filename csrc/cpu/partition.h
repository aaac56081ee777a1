// Division of a backward pass over [batch, row, head] into tasks. Each task has sums of its own, and afterwards the
// sums of all tasks are added in a fixed order. The division depends only on the sizes, so the results do not depend on
// the number of threads.
#pragma once
#include <algorithm>
#include <cstdint>

#include "band.h"
#include "parallel.h"

namespace retro::RETRO_ISA {

struct Partition {
  static constexpr int64_t FEW = 16;  // with fewer tasks, the rows of a head are divided into parts
  // Maximum number of tasks. Several batch entries share the sums of one task if there would be more, which limits the
  // memory of the sums.
  static constexpr int64_t MANY = 64;

  int64_t batch, rows, heads;
  int64_t part_rows, parts;  // rows per part, parts per head
  int64_t batches, groups;   // batch entries per group, groups
  int64_t tasks;

  Partition(int64_t batch_, int64_t heads_, int64_t rows_) : batch(batch_), rows(rows_), heads(heads_) {
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK, wanted = (FEW + batch * heads - 1) / (batch * heads);
    part_rows = (blocks + std::min(wanted, blocks) - 1) / std::min(wanted, blocks) * BLOCK;
    parts = (rows + part_rows - 1) / part_rows;
    const int64_t most = (MANY + heads - 1) / heads;
    batches = (batch + most - 1) / most;
    groups = (batch + batches - 1) / batches;
    tasks = groups * heads * parts;
  }

  struct Share {
    int64_t slot, first_batch, last_batch, first_row, last_row;
    int head;
  };
  // Returns the index of the sums (the slot) of a batch entry, head and part.
  int64_t slot(int64_t b, int64_t head, int64_t part) const { return (b / batches * heads + head) * parts + part; }
  Share share(int64_t task) const {
    // the last rows see the most keys, so they start first
    const int64_t part = parts - 1 - task / (groups * heads), group = task / heads % groups, head = task % heads;
    const int64_t begin = group * batches, end = std::min(batch, begin + batches), row = part * part_rows;
    return {slot(begin, head, part), begin, end, row, std::min(rows, row + part_rows), static_cast<int>(head)};
  }
  // Calls f(slot) for every slot of a head, in order. A negative head stands for all heads.
  template <class Function> void each_slot(int64_t head, Function&& f) const {
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t h = std::max<int64_t>(head, 0); h < (head < 0 ? heads : head + 1); ++h)
        for (int64_t part = 0; part < parts; ++part)
          f(slot(group * batches, h, part));
  }
};

// Writes the gradient of a bias: to[h] is the sum over slots of the row of head h. The sums of a slot start at
// partial[slot * stride] and have one row per query head of the key head, [share][pad(width)].
template <class T> void write_bias_gradient(const Partition& partition, int share, const float* partial, int64_t stride,
                                            int width, const View& to) {
  for (int h = 0; to && h < partition.heads * share; ++h)
    for (int d = 0; d < width; d += LANES) {
      Vec total = zero();
      partition.each_slot(
          h / share, [&](int64_t slot) { total = total + load(partial + slot * stride + h % share * pad(width) + d); });
      store(to.at<T>(h) + d, total, width - d);
    }
}

// Writes the gradient of the relative keys: `factor` times the sum over slots. The sums of a slot have the shape
// [tables of its heads][chunks][E][BLOCK].
template <class T> void write_table_gradient(const Partition& partition, const Band& n, int share, const float* partial,
                                             int64_t stride, float factor, const View& to, int threads) {
  for (int h = 0; h < n.tables(); ++h)
    for (int64_t row = 0; row < n.table_rows; ++row)  // rows outside all chunks
      if (!n.holds(floor_divide(n.zero - row - 1, BLOCK)))
        clear(to.at<T>(h, row), n.E);
  const bool each = n.tables() > 1;
  const int64_t chunks = n.last - n.first, size = n.E * BLOCK;
  parallel_for(n.tables() * chunks, threads, [&](int64_t t) {
    const int h = static_cast<int>(t / chunks);
    const float* from = partial + ((each ? h % share : 0) * chunks + t % chunks) * size;
    auto* total = static_cast<float*>(scratch((size + BLOCK * n.E_pad) * sizeof(float)));
    clear(total, size);
    partition.each_slot(each ? h / share : -1, [&](int64_t slot) {
      for (int64_t x = 0; x < size; x += LANES)
        store(total + x, load(total + x) + load(from + slot * stride + x));
    });
    float* rows = total + size;
    transpose(total, BLOCK, n.E, BLOCK, rows, n.E_pad);
    for (int x = 0; x < BLOCK; ++x)
      if (const int64_t row = n.zero - ((n.first + t % chunks) * BLOCK + 1 + x); row >= 0 && row < n.table_rows)
        scale_row(rows + x * n.E_pad, factor, n.E, to.at<T>(h, row));
  });
}

}  // namespace retro::RETRO_ISA
