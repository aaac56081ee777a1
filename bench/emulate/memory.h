// Loads, stores, asynchronous copies, and exchanges within a warp: shuffles, votes, reductions.
#pragma once

#include <algorithm>

#include "arithmetic.h"

namespace ptx {

enum Space { GLOBAL, SHARED, PARAMETERS };  // parameters are a region of their own, and not counted

// Distinct 32-byte sectors that a warp's request touches, and the fewest that its bytes need
inline void count_sectors(Ins& i, const std::vector<uint64_t>& addresses, int bytes) {
  if (addresses.empty()) return;
  std::vector<uint64_t> sectors, words;
  for (uint64_t a : addresses) {
    for (uint64_t s = a / 32; s <= (a + bytes - 1) / 32; ++s) sectors.push_back(s);
    words.push_back(a);
  }
  std::sort(sectors.begin(), sectors.end());
  std::sort(words.begin(), words.end());
  int64_t distinct = std::unique(words.begin(), words.end()) - words.begin();
  i.requests += 1;
  i.units += std::unique(sectors.begin(), sectors.end()) - sectors.begin();
  i.fewest += (distinct * bytes + 31) / 32;
}

// Wavefronts of a warp's shared request: per phase (128 bytes of lanes) the most distinct words that one bank serves
inline void count_wavefronts(Ins& i, const std::vector<int64_t>& offsets, int bytes) {
  if (offsets.empty()) return;
  size_t lanes = bytes <= 4 ? 32 : 128 / bytes;
  i.requests += 1;
  for (size_t first = 0; first < offsets.size(); first += lanes) {
    std::vector<int64_t> words;
    for (size_t k = first; k < std::min(first + lanes, offsets.size()); ++k)
      for (int64_t w = offsets[k] / 4; w <= (offsets[k] + bytes - 1) / 4; ++w) words.push_back(w);
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    int load[32] = {};
    for (int64_t w : words) ++load[w % 32];
    i.units += *std::max_element(load, load + 32);
    i.fewest += 1;
  }
}

// option 0: byte offset, option 1: Space; the sources are the address, then the values of a store
inline void access(Machine& m, Ins& i, bool load) {
  int each = BYTES[i.type], count = int(load ? i.d.size() : i.s.size() - 1), bytes = each * count;
  uint64_t* address = m.reg(i.s[0]);
  bool shared = i.option[1] == SHARED;
  std::vector<uint64_t> addresses;
  std::vector<int64_t> offsets;
  auto overwritten = [&](int thread, int end) {  // several lanes store to one place: the last one stays
    for (int t = thread + 1; t < end; ++t)
      if (m.mask[t] && address[t] == address[thread]) return true;
    return false;
  };
  for (int first = 0; first < m.threads; first += WARP) {
    addresses.clear();
    offsets.clear();
    for (int t = first; t < std::min(first + WARP, m.threads); ++t) {
      if (!m.mask[t]) continue;
      uint64_t at = address[t] + uint64_t(i.option[0]);
      uint8_t buffer[32] = {};
      if (!load)
        for (int k = 0; k < count; ++k) std::memcpy(buffer + k * each, &m.reg(i.s[k + 1])[t], each);
      if (shared) {
        if (load)
          m.read_shared(at, bytes, t, buffer);
        else if (!overwritten(t, std::min(first + WARP, m.threads)))
          m.write_shared(at, bytes, t, buffer);
        offsets.push_back(int64_t((at & 0xffffffffu) - SHARED_BASE));
      } else {
        uint8_t* host = m.global(at, bytes, t);
        if (load)
          std::memcpy(buffer, host, bytes);
        else
          std::memcpy(host, buffer, bytes);
        addresses.push_back(at);
      }
      if (load)
        for (int k = 0; k < count; ++k) {
          uint64_t value = 0;
          std::memcpy(&value, buffer + k * each, each);
          m.reg(i.d[k])[t] = held(value, i.type, i.width);
        }
    }
    if (shared)
      count_wavefronts(i, offsets, bytes);
    else if (i.option[1] == GLOBAL)
      count_sectors(i, addresses, bytes);
  }
}
inline void ld(Machine& m, Ins& i) { access(m, i, true); }
inline void st(Machine& m, Ins& i) { access(m, i, false); }

// cp.async: option 0 and 2: offsets of the two addresses, option 1: bytes; a third source: bytes to read, the rest is
// zero. The data arrive at a wait: a thread that does not wait reads the old contents, and is reported.
inline void cp_async(Machine& m, Ins& i) {
  uint64_t *to = m.reg(i.s[0]), *from = m.reg(i.s[1]), *size = i.s.size() > 2 ? m.reg(i.s[2]) : nullptr;
  int bytes = int(i.option[1]);
  std::vector<uint64_t> addresses;
  for (int first = 0; first < m.threads; first += WARP) {
    addresses.clear();
    for (int t = first; t < std::min(first + WARP, m.threads); ++t) {
      if (!m.mask[t]) continue;
      Copy copy{m.copy_group[t], (to[t] + uint64_t(i.option[0])) & 0xffffffffu, bytes, {}};
      int read = size ? int(std::min<uint64_t>(size[t] & 0xffffffffu, uint64_t(bytes))) : bytes;
      uint64_t source = from[t] + uint64_t(i.option[2]);
      if (read == bytes) {
        std::memcpy(copy.data, m.global(source, bytes, t), bytes);
        addresses.push_back(source);
      } else if (read > 0) {
        for (int k = 0; k < read; ++k) copy.data[k] = *m.global(source + k, 1, t);
      }
      int64_t offset = m.offset_of(copy.address, bytes, t);
      m.note_write(offset, bytes, t, nullptr);
      if (m.checks)
        for (int64_t g = offset / 2; g < (offset + bytes) / 2; ++g) m.granules[g].in_flight = true;
      m.copies[t].push_back(copy);
    }
    count_sectors(i, addresses, bytes);
  }
}
inline void cp_commit(Machine& m, Ins&) {
  m.each([&](int t) { ++m.copy_group[t]; });
}
// option 0: groups that may stay in flight; -1: wait for all, committed or not
inline void cp_wait(Machine& m, Ins& i) {
  m.each([&](int t) {
    auto& flying = m.copies[t];
    size_t kept = 0;
    for (const Copy& copy : flying) {
      if (i.option[0] >= 0 && copy.group >= m.copy_group[t] - i.option[0]) {
        flying[kept++] = copy;
        continue;
      }
      int64_t offset = int64_t(copy.address - SHARED_BASE);
      if (m.checks)
        for (int64_t g = offset / 2; g < (offset + copy.bytes) / 2; ++g) m.granules[g].in_flight = false;
      m.write_shared(copy.address, copy.bytes, t, copy.data);
    }
    flying.resize(kept);
  });
}

inline void bar_sync(Machine& m, Ins&) { m.barrier = true; }
inline void nothing(Machine&, Ins&) {}  // warps run in lockstep, memory is one: fences order nothing here
inline void warp_sync(Machine& m, Ins&) {
  m.each_warp([](int) {});
}
inline void proxy_fence(Machine& m, Ins&) {
  m.each_warp([&](int w) { m.proxy_time[w] = m.time; });
}
inline void ret(Machine& m, Ins&) { m.exits = true; }
inline void trap(Machine& m, Ins&) {
  m.each([&](int t) { m.fault("trap", t); });
}
inline void bra(Machine& m, Ins&) {  // the loop of `run` jumps; here it is only said who does
  m.taken = &m.mask;
}

enum Shuffle { FROM_LOWER, FROM_HIGHER, BUTTERFLY, INDEXED };

inline void shfl(Machine& m, Ins& i) {  // option 0: Shuffle
  uint64_t *d = m.reg(i.d[0]), *p = i.d.size() > 1 ? m.reg(i.d[1]) : nullptr;
  uint64_t *a = m.reg(i.s[0]), *b = m.reg(i.s[1]), *c = m.reg(i.s[2]), *members = m.reg(i.s[3]);
  m.each_warp(
      [&](int w) {
        uint64_t values[WARP];
        int first = w * WARP;
        for (int lane = 0; lane < WARP; ++lane) values[lane] = a[first + lane];
        for (int lane = 0; lane < WARP; ++lane) {
          int t = first + lane;
          if (!m.mask[t]) continue;
          if (!((members[t] >> lane) & 1)) m.fault("shfl.sync by a thread that its member mask leaves out", t);
          int by = int(b[t] & 31), clamp = int(c[t] & 31), segment = int((c[t] >> 8) & 31);
          int highest = (lane & segment) | (clamp & ~segment), lowest = lane & segment, from;
          bool valid;
          switch (i.option[0]) {
            case FROM_LOWER: from = lane - by, valid = from >= highest; break;
            case FROM_HIGHER: from = lane + by, valid = from <= highest; break;
            case BUTTERFLY: from = lane ^ by, valid = from <= highest; break;
            default: from = lowest | (by & ~segment), valid = from <= highest;
          }
          if (!valid) from = lane;
          if (!m.mask[first + from] || !((members[t] >> from) & 1))
            m.fault("shfl.sync reads a thread that does not take part", t);
          d[t] = values[from];
          if (p) p[t] = valid;
        }
      },
      false);
}

enum Vote { BALLOT, ANY, EVERY };

inline void vote(Machine& m, Ins& i) {  // option 0: Vote; option 1: the predicate is negated
  uint64_t *d = m.reg(i.d[0]), *p = m.reg(i.s[0]);
  m.each_warp(
      [&](int w) {
        uint32_t yes = 0, here = 0;
        for (int lane = 0; lane < WARP; ++lane)
          if (m.mask[w * WARP + lane]) {
            here |= 1u << lane;
            yes |= uint32_t((p[w * WARP + lane] != 0) != (i.option[1] != 0)) << lane;
          }
        for (int lane = 0; lane < WARP; ++lane)
          if (m.mask[w * WARP + lane])
            d[w * WARP + lane] = i.option[0] == BALLOT ? yes : i.option[0] == ANY ? yes != 0 : yes == here;
      },
      false);
}

enum Reduction { RMIN, RMAX, RADD, RAND, ROR, RXOR };

inline void redux(Machine& m, Ins& i) {  // option 0: Reduction
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]);
  if (i.type == F32)
    return m.each_warp(
        [&](int w) {
          double out = std::numeric_limits<double>::quiet_NaN();  // NaN leaves to the others
          for (int t = w * WARP; t < (w + 1) * WARP; ++t)
            if (m.mask[t])
              out = i.option[0] == RMIN ? least(out, as<float>(a[t]), false) : most(out, as<float>(a[t]), false);
          for (int t = w * WARP; t < (w + 1) * WARP; ++t)
            if (m.mask[t]) d[t] = out != out ? 0x7fffffff : bits(float(out));
        },
        false);
  with_integer(m, i.type, [&](auto zero) {
    using T = decltype(zero);
    m.each_warp(
        [&](int w) {
          T out{};
          bool first = true;
          for (int t = w * WARP; t < (w + 1) * WARP; ++t) {
            if (!m.mask[t]) continue;
            T v = as<T>(a[t]);
            switch (i.option[0]) {
              case RMIN: out = first ? v : std::min(out, v); break;
              case RMAX: out = first ? v : std::max(out, v); break;
              case RADD: out = T(out + v); break;
              case RAND: out = first ? v : T(out & v); break;
              case ROR: out = T(out | v); break;
              default: out = T(out ^ v);
            }
            first = false;
          }
          for (int t = w * WARP; t < (w + 1) * WARP; ++t)
            if (m.mask[t]) d[t] = bits<T>(out);
        },
        false);
  });
}

// ldmatrix, stmatrix: matrices of 8 rows of 16 bytes; lanes 8k to 8k+7
// give the rows of matrix k. option 0: offset, option 1: transposed
inline void matrix_rows(Machine& m, Ins& i, bool load) {
  uint64_t* address = m.reg(i.s[0]);
  int count = int(load ? i.d.size() : i.s.size() - 1);
  m.each_warp([&](int w) {
    int first = w * WARP;
    std::vector<int64_t> offsets;
    auto overwritten = [&](int lane) {  // several rows of a store have one place: the last one stays
      for (int other = lane + 1; other < 8 * count; ++other)
        if (address[first + other] == address[first + lane]) return true;
      return false;
    };
    for (int k = 0; k < count; ++k) {
      uint16_t rows[8][8];
      for (int lane = 0; lane < WARP && !load; ++lane) {
        uint32_t two = uint32_t(m.reg(i.s[k + 1])[first + lane]);
        for (int e = 0; e < 2; ++e) {
          int row = lane / 4, column = 2 * (lane % 4) + e;
          (i.option[1] ? rows[column][row] : rows[row][column]) = uint16_t(two >> (16 * e));
        }
      }
      for (int row = 0; row < 8; ++row) {
        int t = first + 8 * k + row;
        uint64_t at = address[t] + uint64_t(i.option[0]);
        if (load)
          m.read_shared(at, 16, t, rows[row]);
        else if (!overwritten(8 * k + row))
          m.write_shared(at, 16, t, rows[row]);
        offsets.push_back(int64_t((at & 0xffffffffu) - SHARED_BASE));
      }
      for (int lane = 0; lane < WARP && load; ++lane) {
        uint32_t two = 0;
        for (int e = 0; e < 2; ++e) {
          int row = lane / 4, column = 2 * (lane % 4) + e;
          two |= uint32_t(i.option[1] ? rows[column][row] : rows[row][column]) << (16 * e);
        }
        m.reg(i.d[k])[first + lane] = two;
      }
    }
    count_wavefronts(i, offsets, 16);
  });
}
inline void ldmatrix(Machine& m, Ins& i) { matrix_rows(m, i, true); }
inline void stmatrix(Machine& m, Ins& i) { matrix_rows(m, i, false); }

}  // namespace ptx
