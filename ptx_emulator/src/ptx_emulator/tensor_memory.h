// Tensor memory of sm_100: loads, stores and products of it, and the mbarriers in shared memory that say when a product
// is done. A product computes at once, and its operands are in flight until a wait for the mbarrier of a later commit.
#pragma once

#include "matrix.h"

namespace ptx {

constexpr uint32_t LANES = 128, COLUMNS = 512;
inline uint32_t cell_of(uint32_t lane, uint32_t column) { return column * LANES + lane; }

inline void elect(Machine& m, Ins& i) {  // destinations: the lane, a predicate; the lowest lane is as good as any
  m.each_warp([&](int w) {
    for (int t = w * WARP; t < (w + 1) * WARP; ++t)
      m.reg(i.d[0])[t] = 0, m.reg(i.d[1])[t] = t == w * WARP;
  });
}

// ---- mbarriers: sources: the address; option 0: its offset

inline int64_t mbarrier_offset(Machine& m, Ins& i, int t, bool remote = false) {
  return m.offset_of(m.reg(i.s[0])[t] + uint64_t(i.option[0]), 8, t, remote);
}
inline Mbarrier& mbarrier_at(Machine& m, int64_t offset, int t) {
  auto found = m.tensor.barriers.find(offset);
  if (found == m.tensor.barriers.end())
    m.fault(text("no mbarrier was initialised at byte ", offset % m.stride, m.of_rank(offset / m.stride)), t);
  return found->second;
}
inline Mbarrier& mbarrier_of(Machine& m, Ins& i, int t, bool remote = false) {
  int64_t offset = mbarrier_offset(m, i, t, remote);
  Mbarrier& found = mbarrier_at(m, offset, t);
  m.note<READS>(offset, 8, t);
  return found;
}

inline void mbarrier_init(Machine& m, Ins& i) {  // sources: address, arrivals per phase
  m.each([&](int t) {
    int64_t offset = mbarrier_offset(m, i, t);
    if (m.tensor.barriers.count(offset))
      m.fault(text("initialises an mbarrier that is one, byte ", offset % m.stride), t);
    m.note<WRITES>(offset, 8, t);
    uint32_t count = uint32_t(m.reg(i.s[1])[t]);
    m.tensor.barriers[offset] = {count, count, m.tensor.agent(offset, m.ordering)};
  });
}
inline void mbarrier_inval(Machine& m, Ins& i) {
  m.each([&](int t) {
    for (const Arrival& one : mbarrier_of(m, i, t).commits) {
      const auto& products = m.tensor.products[std::max(one.warp, 0)].items;  // without those that another wait ended
      if (one.warp < 0 || (!products.empty() && products.front().number < one.end))
        m.fault("ends an mbarrier that a commit will arrive at", t);
    }
    int64_t offset = mbarrier_offset(m, i, t);
    m.note<WRITES>(offset, 8, t);
    m.each_granule(offset, 8, t, [](Granule& granule, int64_t, int) { granule.written = false; });
    m.tensor.barriers.erase(offset);
  });
}
inline void arrive(Mbarrier& barrier, uint32_t count) {
  barrier.pending -= count;
  if (barrier.pending == 0 && barrier.bytes == 0)
    barrier.phase ^= 1, barrier.pending = barrier.expected, barrier.complete = barrier.arrived;
}
// sources: address, arrivals, bytes that copies will bring; a destination takes the phase
// option 1: the address is in shared::cluster, option 2: later phases expect fewer arrivals
inline void mbarrier_arrive(Machine& m, Ins& i) {
  m.each([&](int t) {
    Mbarrier& barrier = mbarrier_of(m, i, t, i.option[1] != 0);
    uint32_t count = uint32_t(m.reg(i.s[1])[t]);
    for (int d : i.d)
      m.reg(d)[t] = barrier.phase;
    barrier.bytes += uint32_t(m.reg(i.s[2])[t]);
    if (count > barrier.pending)
      m.fault("arrives more often than its mbarrier expects", t);
    if (i.option[2])
      barrier.expected -= count;
    m.ordering.release(t / WARP, barrier.arrived);
    if (m.ctas > 1 && m.order != nullptr)
      m.order->as(m.ranks[t]).publish(barrier.published, false);
    arrive(barrier, count);
  });
}

// An mbarrier will be arrived at when the earlier cp.async of the thread are done. option 1: its count includes that
inline void copies_arrive(Machine& m, Ins& i) {
  m.each([&](int t) {
    Mbarrier& barrier = mbarrier_of(m, i, t);
    barrier.pending += i.option[1] == 0;
    Arrival arrival{-1, m.copies[t].made};
    arrival.thread = t;
    m.ordering.release(t / WARP, arrival.clock);
    barrier.commits.push_back(std::move(arrival));
  });
}

// st.async. options 0, 1: offsets of the two addresses; sources: address, mbarrier, values
inline void st_async(Machine& m, Ins& i) {
  int each = BYTES[i.type], bytes = each * int(i.s.size() - 2);
  m.each([&](int t) {
    int64_t offset = m.offset_of(m.reg(i.s[0])[t] + uint64_t(i.option[0]), bytes, t, true);
    int64_t at = m.offset_of(m.reg(i.s[1])[t] + uint64_t(i.option[1]), 8, t, true);
    if (offset / m.stride != at / m.stride)
      m.fault("st.async to one CTA with the mbarrier of another", t);
    Arrival arrival{-1, 0, offset, std::vector<uint8_t>(size_t(bytes))};
    for (size_t k = 2; k < i.s.size(); ++k)
      std::memcpy(&arrival.data[(k - 2) * each], &m.reg(i.s[k])[t], each);
    Mbarrier& barrier = mbarrier_at(m, at, t);
    m.note<READS>(at, 8, t);
    // it arrives before anything that a warp does after its wait
    m.each_granule(at, 8, t, [&](Granule&, int64_t g, int me) { m.reads.by[g] &= ~(uint64_t(1) << me); });
    m.note_copy(offset, bytes, t);
    barrier.commits.push_back(std::move(arrival));
  });
}

// Whether the phase of this parity is over. Commits and bulk copies arrive here, when they are waited for: who does not
// wait sees them in flight. Threads that find the phase open are blocked: the scheduler tries them again.
// sources: address, parity; option 1: do not block
inline void mbarrier_try_wait(Machine& m, Ins& i) {
  m.each([&](int t) {
    Mbarrier& barrier = mbarrier_of(m, i, t);
    while ((barrier.phase & 1) == (m.reg(i.s[1])[t] & 1) && !barrier.commits.empty()) {
      Arrival arrival = std::move(barrier.commits.front());
      barrier.commits.erase(barrier.commits.begin());
      auto over = [&](const auto& operation) { return operation.number < arrival.end; };
      if (arrival.thread >= 0) {
        finish(m.copies[arrival.thread].items, over, [&](const Copy& copy) {
          int64_t offset = m.offset_of(copy.address, copy.bytes, arrival.thread);
          std::copy_n(copy.data, copy.bytes, m.shared.begin() + offset);
          m.each_granule(offset, copy.bytes, t, [&](Granule& granule, int64_t, int) {
            granule.in_flight = false, granule.write_time = m.ordering.time;
          });
        });
      } else if (arrival.warp < 0) {
        Stamp stamp{barrier.agent, ++m.ordering.clock[barrier.agent]};
        arrival.sees(stamp);
        std::copy(arrival.data.begin(), arrival.data.end(), m.shared.begin() + arrival.offset);
        m.each_granule(arrival.offset, int(arrival.data.size()), t, [&](Granule& granule, int64_t g, int) {
          granule.in_flight = false;
          m.writes.by[g] = 0, granule.write_time = -2;  // who waits sees the bytes without another fence
          granule.copied = stamp;
        });
        barrier.bytes -= int64_t(arrival.data.size());
      } else {
        finish(m.tensor.products[arrival.warp].items, over, [&](const Product& p) {
          Stamp stamp{m.tensor.agent(-1 - arrival.warp, m.ordering), int32_t(p.number) + 1};
          for (uint32_t g : p.granules)
            --m.granules[g].async_reads, m.granules[g].product = stamp;
          for (uint32_t c : p.results)
            --m.tensor.cells[c].results, m.tensor.cells[c].product = stamp;
          for (uint32_t c : p.operands)
            --m.tensor.cells[c].operands, m.tensor.cells[c].product = stamp;
        });
      }
      Ordering::join(barrier.arrived, arrival.clock);
      arrive(barrier, arrival.warp >= 0 || arrival.thread >= 0);
    }
    bool done = (barrier.phase & 1) != (m.reg(i.s[1])[t] & 1);
    m.reg(i.d[0])[t] = done;
    if (done)
      m.ordering.acquire(t / WARP, barrier.complete);
    if (done && m.ctas > 1 && m.order != nullptr)
      m.order->as(m.ranks[t]).join(barrier.published);
    if (i.option[1])
      m.note_progress(done, t);
    if (!done)
      m.waits[t] = i.option[1] ? YIELDS : AT_MBARRIER, m.waits_at[t] = mbarrier_offset(m, i, t), m.blocks = true;
  });
}

// ---- columns of tensor memory: option 0 (alloc: 1): how many

inline void tensor_alloc(Machine& m, Ins& i) {  // source: where in shared memory the address goes; option 0: its offset
  auto& tensor = m.tensor;
  uint32_t wanted = uint32_t(i.option[1]);
  m.each_warp([&](int w) {
    uint32_t from = m.ranks[w * WARP] * COLUMNS;
    if (tensor.given_up >> m.ranks[w * WARP] & 1)
      m.fault("allocates tensor memory after it gave up the right to");
    if (wanted < 32 || wanted > COLUMNS || (wanted & (wanted - 1)))
      m.fault("columns are no power of two in 32..512");
    uint32_t first = from;
    for (auto [column, columns] : tensor.allocations)
      if (column < first + wanted && column >= from)
        first = column + columns;
    if (first + wanted > from + COLUMNS)
      m.fault("waits for tensor memory that this kernel holds");
    tensor.cells.resize(size_t(m.ctas) * LANES * COLUMNS);
    tensor.reads.resize(tensor.cells.size(), m.warps), tensor.writes.resize(tensor.cells.size(), m.warps);
    tensor.allocations[first] = wanted;
    for (uint32_t c = cell_of(0, first); c < cell_of(0, first + wanted); ++c)
      tensor.cells[c] = Cell{}, tensor.cells[c].allocated = true, tensor.reads.by[c] = tensor.writes.by[c] = 0;
    first -= from;
    m.write_shared(m.reg(i.s[0])[w * WARP] + uint64_t(i.option[0]), 4, w * WARP, &first);
  });
}
constexpr Handler tensor_relinquish = [](Machine& m, Ins&) {
  m.each_warp([&](int w) { m.tensor.given_up |= uint64_t(1) << m.ranks[w * WARP]; });
};

// The number of a cell in the tensor memory of a CTA
inline uint32_t allocated(Machine& m, uint32_t lane, uint32_t column, int rank) {
  uint32_t cell = cell_of(lane, column + uint32_t(rank) * COLUMNS);
  if (lane >= LANES || column >= COLUMNS || m.tensor.cells.empty() || !m.tensor.cells[cell].allocated)
    m.fault(text("tensor memory that was not allocated, lane ", lane, " column ", column));
  return cell;
}

inline std::string named(uint32_t cell) { return text(", lane ", cell % LANES, " column ", cell / LANES % COLUMNS); }

// The last three change a cell. A product reads A and writes its result.
enum CellUse { LOADS, PRODUCT_READS, STORES, PRODUCT_WRITES, GIVES_BACK };

inline void check_cell(Machine& m, uint32_t at, int warp, CellUse use) {
  if (!m.checks)
    return;
  const Cell& cell = m.tensor.cells[at];
  bool product = use == PRODUCT_READS || use == PRODUCT_WRITES, changes = use >= STORES;
  auto refuse = [&](const char* race, const char* what) {
    const char* verbs[] = {"reads", "a product reads", "writes", "a product writes", "gives back"};
    m.fault(text(race, verbs[use], " tensor memory ", what, named(at)));
  };
  if ((cell.results && use != PRODUCT_WRITES) || (cell.operands && changes && !product))
    refuse("", "of a product that was not waited for");
  if (cell.storing && use != STORES)
    refuse("", "whose store was not waited for");
  if (cell.loading && changes)
    refuse("", "whose load was not waited for");
  if (!product && !m.ordering.before(cell.product, warp))
    refuse("race: ", "of a product that another warp waited for");
  if (m.tensor.writes.unordered(at, warp, m.ordering))
    refuse("race: ", "that another warp wrote since the last barrier");
  if (changes && m.tensor.reads.unordered(at, warp, m.ordering))
    refuse("race: ", "that another warp read since the last barrier");
}

inline void tensor_dealloc(Machine& m, Ins& i) {
  m.each_warp([&](int w) {
    uint32_t first = uint32_t(m.reg(i.s[0])[w * WARP]) + m.ranks[w * WARP] * COLUMNS;
    auto found = m.tensor.allocations.find(first);
    if (found == m.tensor.allocations.end() || found->second != uint32_t(i.option[0]))
      m.fault("gives back tensor memory that was not allocated so");
    for (uint32_t c = cell_of(0, first); c < cell_of(0, first + found->second); ++c) {
      check_cell(m, c, w, GIVES_BACK);
      m.tensor.cells[c].allocated = false;
    }
    m.tensor.allocations.erase(found);
  });
}

// ---- ld and st. option 0: offset, option 1: columns to the second half (16x32bx2), option 2: Pattern; sources: the
// address, then the values of a store.
// Memory that was never written is NaN, and no fault: Triton loads the result of a product whose predicate was false,
// and drops it. A read of a loaded register before the wait is not reported: LLVM moves arithmetic there, and ptxas
// orders it.

enum Pattern { HALVES, ROWS, FRAGMENT };  // 16x32bx2, 32x32b, 16x256b

// (lane, column) of register r of a lane: PTX ISA, "Matrix fragments for shape ..."
inline std::pair<uint32_t, uint32_t> cell_in(int64_t pattern, uint32_t lane, uint32_t r, uint32_t split) {
  switch (pattern) {
    case HALVES: return {lane % 16, r + lane / 16 * split};
    case ROWS: return {lane, r};
    default: return {lane / 4 + 8 * (r / 2 % 2), r % 2 + 2 * (lane % 4) + 8 * (r / 4)};
  }
}

inline void transfer(Machine& m, Ins& i) {
  bool load = !i.d.empty();
  int count = int(load ? i.d.size() : i.s.size() - 1);
  m.each_warp([&](int w) {
    uint64_t* address = m.reg(i.s[0]) + w * WARP;
    for (int lane = 0; lane < WARP; ++lane)
      if (address[lane] != address[0])
        m.fault("an address of tensor memory differs within its warp", w * WARP + lane);
    int rank = m.ranks[w * WARP], own = m.number_of(w);
    uint32_t at = uint32_t(address[0]) + uint32_t(i.option[0]), first = at >> 16, column = at & 0xffff, me = 1u << own;
    if (first / WARP != uint32_t(own % 4) || first % (i.option[2] == ROWS ? 32 : 16))
      m.fault("lanes of tensor memory that this warp has no access to");
    for (int lane = 0; lane < WARP; ++lane)
      for (int r = 0; r < count; ++r) {
        auto [row, along] = cell_in(i.option[2], uint32_t(lane), uint32_t(r), uint32_t(i.option[1]));
        uint32_t place = allocated(m, first + row, column + along, rank);
        Cell& cell = m.tensor.cells[place];
        (load ? m.tensor.loads : m.tensor.stores)[w].push_back(place);
        check_cell(m, place, w, load ? LOADS : STORES);
        uint64_t& value = m.reg(load ? i.d[r] : i.s[r + 1])[w * WARP + lane];
        if (load) {
          value = cell.value;
          cell.loading |= me;
          m.tensor.reads.note(place, w, m.ordering);
        } else {
          cell.value = uint32_t(value);
          cell.storing |= me;
          m.tensor.reads.by[place] = m.tensor.writes.by[place] = 0;
          m.tensor.writes.note(place, w, m.ordering);
          cell.written = true;
        }
      }
  });
}

inline void tensor_wait(Machine& m, Ins& i) {  // option 0: for loads, else for stores
  m.each_warp([&](int w) {
    for (uint32_t c : std::exchange((i.option[0] ? m.tensor.loads : m.tensor.stores)[w], {}))
      (i.option[0] ? m.tensor.cells[c].loading : m.tensor.cells[c].storing) &= ~(1u << m.number_of(w));
  });
}

// ---- products

// PTX ISA, "Instruction descriptor" of kind::f16 and kind::tf32
struct Shape {
  int type, rows, columns, k;
  bool a_transposed, b_transposed;

  Shape(Machine& m, uint32_t d, bool tf32, int pair) {  // pair: CTAs, each of which has a part of the rows
    uint32_t a = (d >> 7) & 7, b = (d >> 10) & 7;
    if ((d & 0xf) || ((d >> 4) & 3) != 1 || a != b || (d & 0xe0806040u) || ((d >> 13) & 3) || (tf32 ? a != 2 : a > 1))
      m.fault(text("an instruction descriptor that is not emulated: ", d));
    type = tf32 ? TF32 : a ? BF16 : F16;
    k = tf32 ? 8 : 16;
    rows = int((d >> 24) & 31) * 16 / pair, columns = int((d >> 17) & 63) * 8;
    a_transposed = (d >> 15) & 1, b_transposed = (d >> 16) & 1;
    if (pair > 1 && rows != 128)
      m.fault("cta_group::2 with other than 256 rows is not emulated");
    if ((rows != 64 && rows != 128) || columns % (rows / 8 * pair) || columns < 8 || columns > 256)
      m.fault(text("a product of ", rows * pair, " rows and ", columns, " columns"));
    if (tf32 && (a_transposed || b_transposed))
      m.fault("a transposed operand of tf32 is not emulated");
  }
};

// The cell of A or of the result in a row and a column from `address` on, which a product takes. 64 rows lie 16 to a
// quarter of the lanes, in its lower or upper half
inline uint32_t operand(Machine& m, const Shape& shape, uint32_t address, int row, int column, int warp, bool reads,
                        bool writes, int rank) {
  uint32_t first = address >> 16;
  if (first != 0 && !(shape.rows == 64 && first == 16))
    m.fault("a matrix in tensor memory does not begin at this lane");
  uint32_t lane = shape.rows == 128 ? uint32_t(row) : first + uint32_t(32 * (row / 16) + row % 16);
  uint32_t at = allocated(m, lane, (address & 0xffff) + uint32_t(column), rank);
  if (m.checks && reads && !m.tensor.cells[at].written)
    m.fault("a product reads uninitialised tensor memory" + named(at));
  check_cell(m, at, warp, writes ? PRODUCT_WRITES : PRODUCT_READS);
  return at;
}

// sources: address of the result, A's address or descriptor, B's descriptor, instruction descriptor, whether to add
// option 0: offset of the result, option 1: A is in tensor memory, option 2: its offset, option 3: CTAs. Each CTA of a
// pair has half of the rows of A and of the result, and half of the columns of B, at the same places of its memory.
inline void tensor_mma(Machine& m, Ins& i) {
  m.each([&](int t) {
    int pair = int(i.option[3]), lead = m.ranks[t] / pair * pair;
    if (lead + pair > m.ctas)
      m.fault("cta_group::2 without a second CTA in the cluster", t);
    Shape shape(m, uint32_t(m.reg(i.s[3])[t]), i.type == TF32, pair);
    int warp = t / WARP, columns = shape.columns, part = columns / pair;
    Product product{0, m.tensor.products[warp].made++};
    auto matrix = [&](int source, int rank, int rows, bool transposed, bool turned) {
      uint64_t d = m.reg(i.s[source])[t];
      if ((d >> 61) & 1 || (d >> 52) & 1)
        m.fault("a layout of shared memory that is not emulated", t);
      Operands shared{m, shape.k, warp, 1, t, product.granules, rank};
      return shared.matrix(Descriptor(m, d), shape.type, rows, transposed, turned);
    };
    std::vector<float> b(size_t(shape.k) * columns);
    for (int rank = lead; rank < lead + pair; ++rank) {
      std::vector<float> own = matrix(2, rank, part, shape.b_transposed, true);
      for (int x = 0; x < shape.k; ++x)
        std::copy_n(&own[x * part], part, &b[x * columns + (rank - lead) * part]);
    }
    bool adds = m.reg(i.s[4])[t] != 0;
    uint32_t d = uint32_t(m.reg(i.s[0])[t]) + uint32_t(i.option[0]);
    for (int rank = lead; rank < lead + pair; ++rank) {
      std::vector<float> a(size_t(shape.rows) * shape.k), sums(size_t(shape.rows) * columns);
      if (i.option[1]) {
        uint32_t at = uint32_t(m.reg(i.s[1])[t]) + uint32_t(i.option[2]);
        for (int row = 0; row < shape.rows; ++row)
          for (int x = 0; x < 8; ++x) {
            product.operands.push_back(operand(m, shape, at, row, x, warp, true, false, rank));
            Cell& cell = m.tensor.cells[product.operands.back()];
            ++cell.operands;
            for (int e = 0; e < shape.k / 8; ++e)
              a[row * shape.k + x * shape.k / 8 + e] = packed(m, shape.type, cell.value, e);
          }
      } else {
        a = matrix(1, rank, shape.rows, shape.a_transposed, false);
      }
      multiply(a.data(), b.data(), sums.data(), shape.rows, shape.k, columns);
      for (int row = 0; row < shape.rows; ++row)
        for (int column = 0; column < columns; ++column) {
          product.results.push_back(operand(m, shape, d, row, column, warp, adds, true, rank));
          Cell& cell = m.tensor.cells[product.results.back()];
          ++cell.results;
          cell.written = true;
          float sum = sums[row * columns + column];
          cell.value = uint32_t(bits(adds ? as<float>(cell.value) + sum : sum));
        }
    }
    m.tensor.products[warp].items.push_back(std::move(product));
  });
}

// f(rank, the place of `offset` in its CTA) for each CTA of a mask
template <class F> void each_of_mask(Machine& m, uint64_t mask, int64_t offset, int t, F f) {
  if (mask >> m.ctas)
    m.fault("a mask with a CTA that the cluster does not have", t);
  for (; mask; mask &= mask - 1)
    f(__builtin_ctzll(mask), offset % m.stride + __builtin_ctzll(mask) * m.stride);
}

// sources: an mbarrier, [mask]. All earlier products of this thread arrive at it; option 1: in each CTA of the mask.
inline void tensor_commit(Machine& m, Ins& i) {
  m.each([&](int t) {
    Arrival arrival{t / WARP, m.tensor.products[t / WARP].made};
    int64_t offset = mbarrier_offset(m, i, t, true);
    uint64_t mask = i.option[1] ? m.reg(i.s[1])[t] & 0xffff : uint64_t(1) << offset / m.stride;
    // these reads precede the release, so that a warp that has waited may end the mbarrier
    each_of_mask(m, mask, offset, t, [&](int, int64_t at) { m.note<READS>(at, 8, t); });
    m.ordering.release(t / WARP, arrival.clock);
    // every mbarrier that it arrives at orders the products, whichever is waited for first
    arrival.sees({m.tensor.agent(-1 - arrival.warp, m.ordering), int32_t(arrival.end)});
    each_of_mask(m, mask, offset, t, [&](int, int64_t at) { mbarrier_at(m, at, t).commits.push_back(arrival); });
  });
}

}  // namespace ptx
