// Loads, stores, asynchronous copies, and exchanges within a warp: shuffles, votes, reductions.
#pragma once

#include <algorithm>

#include "arithmetic.h"

namespace ptx {

enum Space { GLOBAL, SHARED, PARAMETERS, LOCALS, CLUSTER };  // parameters are a region of their own, and not counted
inline bool is_shared(int64_t space) { return space == SHARED || space == CLUSTER; }

inline int64_t distinct(std::vector<uint64_t>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return int64_t(values.size());
}

// Count the distinct 32-byte sectors that a warp's request touches, and the minimum that its bytes need
inline void count_sectors(Ins& i, std::vector<uint64_t> addresses, int bytes) {
  if (addresses.empty())
    return;
  std::vector<uint64_t> sectors;
  for (uint64_t a : addresses)
    for (uint64_t s = a / 32; s <= (a + bytes - 1) / 32; ++s)
      sectors.push_back(s);
  i.requests += 1;
  i.units += distinct(sectors);
  i.fewest += (distinct(addresses) * bytes + 31) / 32;
}

// Wavefronts of a warp's shared request: per phase (128 bytes of lanes) the most distinct words that one bank serves
inline void count_wavefronts(Ins& i, const std::vector<uint64_t>& addresses, int bytes) {
  size_t lanes = bytes <= 4 ? 32 : 128 / bytes;
  i.requests += 1;
  for (size_t first = 0; first < addresses.size(); first += lanes) {
    std::vector<uint64_t> words;
    for (size_t k = first; k < std::min(first + lanes, addresses.size()); ++k)
      for (uint64_t w = addresses[k] / 4; w <= (addresses[k] + bytes - 1) / 4; ++w)
        words.push_back(w);
    distinct(words);
    int load[32] = {};
    for (uint64_t w : words)
      ++load[w % 32];
    i.units += *std::max_element(load, load + 32);
    i.fewest += 1;
  }
}

inline void count_request(Ins& i, int64_t space, const std::vector<uint64_t>& addresses, int bytes) {
  if (is_shared(space))
    count_wavefronts(i, addresses, bytes);
  if (space == GLOBAL)
    count_sectors(i, addresses, bytes);
}

// Whether a later thread stores to the same place: the last one stays
inline bool overwritten(const Machine& m, const uint64_t* address, int thread, int end) {
  for (int t = thread + 1; t < end; ++t)
    if (m.mask[t] && address[t] == address[thread])
      return true;
  return false;
}

// A load, which has destinations, or a store. option 0: byte offset, option 1: Space, option 2: bits of the order; the
// sources are the address, then the values of a store
inline void access(Machine& m, Ins& i) {
  bool load = !i.d.empty();
  int each = BYTES[i.type], count = int(load ? i.d.size() : i.s.size() - 1), bytes = each * count;
  uint64_t* address = m.reg(i.s[0]);
  bool shared = is_shared(i.option[1]), remote = i.option[1] == CLUSTER;
  std::vector<uint64_t> addresses;
  m.each_part([&](int w) {
    addresses.clear();
    m.each_of(w, [&](int t) {
      uint64_t at = address[t] + uint64_t(i.option[0]);
      uint8_t buffer[32] = {};
      addresses.push_back(at);
      if (load) {
        if (shared)
          m.read_shared(at, bytes, t, buffer, remote);
        else
          std::memcpy(buffer, m.touch(at, bytes, t, READS, i.option[2]), bytes);
        for (int k = 0; k < count; ++k) {
          uint64_t value = 0;
          std::memcpy(&value, buffer + k * each, each);
          m.reg(i.d[k])[t] = held(value, i.type, i.width);
        }
      } else {
        for (int k = 0; k < count; ++k)
          std::memcpy(buffer + k * each, &m.reg(i.s[k + 1])[t], each);
        if (!shared)
          std::memcpy(m.touch(at, bytes, t, WRITES, i.option[2], buffer), buffer, bytes);
        else if (!overwritten(m, address, t, (w + 1) * WARP))
          m.write_shared(at, bytes, t, buffer, remote);
      }
    });
    count_request(i, i.option[1], addresses, bytes);
  });
  m.touched(shared ? 0 : i.option[2]);
}

// cp.async: option 0 and 2: offsets of the two addresses, option 1: bytes; a third source: bytes to read, the rest is
// zero. The data arrive at a wait: a thread that does not wait reads the old contents, and is reported.
inline void cp_async(Machine& m, Ins& i) {
  uint64_t *to = m.reg(i.s[0]), *from = m.reg(i.s[1]), *size = i.s.size() > 2 ? m.reg(i.s[2]) : nullptr;
  int bytes = int(i.option[1]);
  m.each_part([&](int w) {
    std::vector<uint64_t> addresses;
    m.each_of(w, [&](int t) {
      Copy copy{m.copies[t].group, m.copies[t].made++, (to[t] + uint64_t(i.option[0])) & 0xffffffffu, bytes, {}};
      int read = size ? int(std::min<uint64_t>(size[t] & 0xffffffffu, uint64_t(bytes))) : bytes;
      uint64_t source = from[t] + uint64_t(i.option[2]);
      if (read == bytes) {
        std::memcpy(copy.data, m.touch(source, bytes, t, READS), bytes);
        addresses.push_back(source);
      } else {
        for (int k = 0; k < read; ++k)
          copy.data[k] = *m.touch(source + k, 1, t, READS);
      }
      m.note_copy(m.offset_of(copy.address, bytes, t), bytes, t);
      m.copies[t].items.push_back(copy);
    });
    count_sectors(i, addresses, bytes);
  });
}
constexpr Handler cp_commit = [](Machine& m, Ins&) { m.each([&](int t) { ++m.copies[t].group; }); };
inline void cp_wait(Machine& m, Ins& i) {  // option 0: groups that may stay in flight, as in Flying::wait
  m.each([&](int t) {
    m.copies[t].wait(i.option[0], [&](const Copy& copy) {
      m.each_granule(m.offset_of(copy.address, copy.bytes, t), copy.bytes, t,
                     [](Granule& granule, int64_t, int) { granule.in_flight = false; });
      m.write_shared(copy.address, copy.bytes, t, copy.data);
    });
  });
}

// Threads have arrived as often as the barrier wants: the waiting threads go on
inline void open(Machine& m, int rank, int number) {
  Barrier done = std::exchange(m.barriers[rank * BARRIERS + number], {});
  int last = -1;  // warp
  for (int t = rank * m.per_cta; t < (rank + 1) * m.per_cta; ++t)
    if (m.waits[t] == number) {
      if (t / WARP != last)
        m.ordering.acquire(last = t / WARP, done.released);
      m.waits[t] = NOTHING;
    }
}

// option 0: arrive and do not wait, option 1: sources have a count; sources: number, [count]
inline void bar(Machine& m, Ins& i) {
  int last = -1, living = 0, counted = -1;  // last: warp; counted: the CTA whose living threads these are
  m.each_part([&](int w) {
    int rank = m.ranks[w * WARP];
    if (rank != counted)
      living = m.living(counted = rank);
    m.each_of(w, [&](int t) {
      uint64_t number = uint32_t(m.reg(i.s[0])[t]), count = i.option[1] ? uint32_t(m.reg(i.s[1])[t]) : 0;
      if (number >= uint64_t(BARRIERS))
        m.fault(text("barrier ", number, ": expected 0 to 15"), t);
      if (i.option[1] && (count == 0 || count % WARP || count > uint64_t((m.per_cta + WARP - 1) / WARP * WARP)))
        m.fault(text("barrier ", number, ": expected a multiple of 32 threads, at most those of the CTA; got ", count),
                t);
      Barrier& barrier = m.barriers[rank * BARRIERS + number];
      if (barrier.arrived && barrier.wanted != int(count))
        m.fault(text("barrier ", number, " is given another number of threads than by earlier arrivals: ", count,
                     " and ", barrier.wanted),
                t);
      barrier.wanted = int(count);
      if (barrier.arrived++ == 0 || last != w)
        m.ordering.release(last = w, barrier.released);
      if (!i.option[0])
        m.waits[t] = int8_t(number);
      if (barrier.arrived == (count ? int(count) : living))
        open(m, rank, int(number));
    });
  });
  m.each([&](int t) { m.blocks |= m.waits[t] != NOTHING; });
}
inline void nothing(Machine&, Ins&) {}   // warps run in lockstep, memory is one
inline void fence(Machine& m, Ins& i) {  // option 0: its scope reaches beyond the CTA
  if (!i.option[0])
    return;
  m.each_cta([](Order& own) { own.fence(); });
  if (m.ctas > 1)
    m.each_part([&](int w) { m.ordering.release(w, m.fenced[w]); });
}

// ---- a cluster's CTAs: addresses of shared::cluster, barrier.cluster

inline void mapa(Machine& m, Ins& i) {  // sources: an address of the own CTA, a rank
  m.each([&](int t) {
    uint64_t rank = uint32_t(m.reg(i.s[1])[t]), low = m.reg(i.s[0])[t] & ((1u << RANK_BIT) - 1);
    if (rank >= uint64_t(m.ctas))
      m.fault(text("mapa: the cluster has no CTA of rank ", rank), t);
    m.reg(i.d[0])[t] = low | rank << RANK_BIT;
  });
}

// All living threads have arrived: those who wait go on when they are tried again
inline bool open_cluster(Machine& m) {
  ClusterBarrier& barrier = m.cluster;
  for (int t = 0; t < m.threads; ++t)
    if (m.alive[t] && barrier.joined[t] != barrier.phase + 1)
      return false;
  ++barrier.phase;
  barrier.complete = std::move(barrier.released), barrier.released = {};
  barrier.learnt = barrier.published;
  return true;
}

template <class F> void each_aligned(Machine& m, bool aligned, F f) { aligned ? m.each_warp(f) : m.each_part(f); }

// option 0: aligned, option 1: relaxed. A relaxed arrival releases only the writes before an earlier fence. Writes
// after the barrier never disturb a read that has ended.
inline void cluster_arrive(Machine& m, Ins& i) {
  ClusterBarrier& barrier = m.cluster;
  bool relaxed = i.option[1] != 0;
  uint64_t arriving = 0;
  each_aligned(m, i.option[0] != 0, [&](int w) {
    arriving |= uint64_t(1) << w;
    relaxed ? Ordering::join(barrier.released, m.fenced[w]) : m.ordering.release(w, barrier.released);
    m.each_of(w, [&](int t) {
      if (barrier.joined[t])
        m.fault("arrives at the barrier of the cluster twice and did not wait between", t);
      barrier.joined[t] = barrier.phase + 1;
    });
  });
  for (size_t g = 0; relaxed && g < m.reads.by.size(); ++g)
    m.reads.by[g] &= ~arriving;
  m.each_cta([&](Order& own) { own.publish(barrier.published, relaxed); });
  open_cluster(m);
}

inline void cluster_wait(Machine& m, Ins& i) {  // option 0: aligned
  ClusterBarrier& barrier = m.cluster;
  each_aligned(m, i.option[0] != 0, [&](int w) {
    bool done = false;
    m.each_of(w, [&](int t) {
      if (barrier.joined[t] && barrier.joined[t] <= barrier.phase)
        barrier.joined[t] = 0, done = true;
      else
        m.waits[t] = AT_CLUSTER, m.blocks = true;
    });
    if (done)
      m.ordering.acquire(w, barrier.complete);
  });
  m.each_cta([&](Order& own) { own.join(barrier.learnt); });
}

constexpr Handler warp_sync = [](Machine& m, Ins&) { m.each_warp([](int) {}); };
constexpr Handler proxy_fence = [](Machine& m, Ins&) {
  m.each_warp([&](int w) { m.ordering.proxy_time[w] = m.ordering.time; });
};
inline void ret(Machine& m, Ins&) { m.exits = true; }
constexpr Handler trap = [](Machine& m, Ins&) { m.each([&](int t) { m.fault("trap", t); }); };
inline void bra(Machine& m, Ins&) { m.branches = true; }  // the loop of `run` jumps; here it is only said who does

enum Shuffle { FROM_LOWER, FROM_HIGHER, BUTTERFLY, INDEXED };

inline void shfl(Machine& m, Ins& i) {  // option 0: Shuffle
  uint64_t *d = m.reg(i.d[0]), *p = i.d.size() > 1 ? m.reg(i.d[1]) : nullptr;
  uint64_t *a = m.reg(i.s[0]), *b = m.reg(i.s[1]), *c = m.reg(i.s[2]), *members = m.reg(i.s[3]);
  m.each_part([&](int w) {
    uint64_t values[WARP];
    std::copy_n(a + w * WARP, WARP, values);
    m.each_of(w, [&](int t) {
      int lane = t % WARP, by = int(b[t] & 31), clamp = int(c[t] & 31), segment = int((c[t] >> 8) & 31);
      if (!((members[t] >> lane) & 1))
        m.fault("shfl.sync by a thread that its member mask leaves out", t);
      int highest = (lane & segment) | (clamp & ~segment), from;
      switch (i.option[0]) {
        case FROM_LOWER: from = lane - by; break;
        case FROM_HIGHER: from = lane + by; break;
        case BUTTERFLY: from = lane ^ by; break;
        default: from = (lane & segment) | (by & ~segment);
      }
      bool valid = i.option[0] == FROM_LOWER ? from >= highest : from <= highest;
      if (!valid)
        from = lane;
      if (!m.mask[w * WARP + from] || !((members[t] >> from) & 1))
        m.fault("shfl.sync reads a thread that does not take part", t);
      d[t] = values[from];
      if (p)
        p[t] = valid;
    });
  });
}

enum Vote { BALLOT, ANY, EVERY };

inline void vote(Machine& m, Ins& i) {  // option 0: Vote; option 1: the predicate is negated
  uint64_t *d = m.reg(i.d[0]), *p = m.reg(i.s[0]);
  m.each_part([&](int w) {
    uint32_t yes = 0, here = 0;
    m.each_of(w, [&](int t) {
      here |= 1u << t % WARP;
      yes |= uint32_t((p[t] != 0) != (i.option[1] != 0)) << t % WARP;
    });
    m.each_of(w, [&](int t) { d[t] = i.option[0] == BALLOT ? yes : i.option[0] == ANY ? yes != 0 : yes == here; });
  });
}

// ldmatrix, stmatrix: matrices of 8 rows of 16 bytes; lanes 8k to 8k+7 give the rows of matrix k. option 0: offset,
// option 1: transposed
inline void matrix_rows(Machine& m, Ins& i) {
  bool load = !i.d.empty();
  uint64_t* address = m.reg(i.s[0]);
  int count = int(load ? i.d.size() : i.s.size() - 1);
  m.each_warp([&](int w) {
    int first = w * WARP;
    std::vector<uint64_t> addresses;
    for (int k = 0; k < count; ++k) {
      uint64_t* moved = m.reg(load ? i.d[k] : i.s[k + 1]) + first;
      uint16_t rows[8][8];
      auto element = [&](int lane, int e) -> uint16_t& {
        int row = lane / 4, column = 2 * (lane % 4) + e;
        return i.option[1] ? rows[column][row] : rows[row][column];
      };
      for (int lane = 0; lane < WARP && !load; ++lane)
        for (int e = 0; e < 2; ++e)
          element(lane, e) = uint16_t(moved[lane] >> (16 * e));
      for (int t = first + 8 * k; t < first + 8 * k + 8; ++t) {
        uint64_t at = address[t] + uint64_t(i.option[0]);
        if (load)
          m.read_shared(at, 16, t, rows[t % 8]);
        else if (!overwritten(m, address, t, first + 8 * count))
          m.write_shared(at, 16, t, rows[t % 8]);
        addresses.push_back(at);
      }
      for (int lane = 0; lane < WARP && load; ++lane)
        moved[lane] = element(lane, 0) | uint32_t(element(lane, 1)) << 16;
    }
    count_wavefronts(i, addresses, 16);
  });
}

}  // namespace ptx
