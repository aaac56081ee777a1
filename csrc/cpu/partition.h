// Division of a backward pass over [batch, row, head] into tasks. Each task has its own sums, which are added in a
// fixed order. The division depends only on the sizes, so results don't depend on the number of threads.
#pragma once
#include <algorithm>
#include <cstdint>

#include "band.h"

namespace retro::RETRO_ISA {

struct Partition {
  static constexpr int64_t FEW = 16;  // with fewer tasks the rows of a head are cut into parts
  // with more tasks several batch entries share a task's sums, which bounds their memory
  static constexpr int64_t MANY = 64;

  int64_t batch, rows, heads;
  int64_t part_rows, parts;  // of the rows
  int64_t batches, groups;   // of the batch
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
  // Index of the sums of (batch entry, head, part).
  int64_t slot(int64_t b, int64_t head, int64_t part) const { return (b / batches * heads + head) * parts + part; }
  Share share(int64_t task) const {
    // the last rows see the most keys, so they start first
    const int64_t part = parts - 1 - task / (groups * heads), group = task / heads % groups, head = task % heads;
    const int64_t begin = group * batches;
    return {slot(begin, head, part),
            begin,
            std::min(batch, begin + batches),
            part * part_rows,
            std::min(rows, (part + 1) * part_rows),
            static_cast<int>(head)};
  }
  // Calls f(slot) for every slot of a head, in order; head < 0: of all heads.
  template <class Function>
  void each_slot(int64_t head, Function&& f) const {
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t h = std::max<int64_t>(head, 0); h < (head < 0 ? heads : head + 1); ++h)
        for (int64_t part = 0; part < parts; ++part) f(slot(group * batches, h, part));
  }
};

// total[0..size) = the sum of from[slot * stride ..] over the slots of a head, in order; `size` is whole vectors.
inline void sum_table(const Partition& partition, int64_t head, const float* from, int64_t stride, int64_t size,
                      float* total) {
  clear(total, size);
  partition.each_slot(head, [&](int64_t slot) {
    for (int64_t x = 0; x < size; x += LANES) store(total + x, load(total + x) + load(from + slot * stride + x));
  });
}

}  // namespace retro::RETRO_ISA
