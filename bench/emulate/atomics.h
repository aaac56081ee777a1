// Atomic updates of global and shared memory, with and without the old value. Lanes update one after another, in the
// order of their numbers: PTX leaves the order open.
#pragma once

#include <algorithm>

#include "memory.h"

namespace ptx {

enum Atomic { AADD, AMIN, AMAX, AAND, AOR, AXOR, EXCHANGE, COMPARE, INCREMENT, DECREMENT };

// The new value of one element: PTX ISA, "atom". `flush`: float32 in global memory loses subnormals
inline uint64_t updated(Machine& m, int how, int type, uint64_t old, uint64_t b, uint64_t c, bool flush) {
  int bytes = BYTES[type];
  if (how == EXCHANGE) return zero_extended(b, bytes);
  if (how == COMPARE) return old == zero_extended(b, bytes) ? zero_extended(c, bytes) : old;
  if (type == F16X2 || type == BF16X2) {
    int half = type == F16X2 ? F16 : BF16;
    uint64_t low = updated(m, how, half, old & 0xffff, b & 0xffff, 0, false);
    return low | updated(m, how, half, old >> 16, (b >> 16) & 0xffff, 0, false) << 16;
  }
  if (type >= F16) {
    auto read = [&](uint64_t v) {
      double x = read_float(m, type, v);
      return flush && type == F32 ? double(flushed(float(x))) : x;
    };
    double x = read(old), y = read(b);
    double out = how == AADD ? x + y : how == AMIN ? least(x, y, false) : most(x, y, false);
    return write_float(m, type, out, flush);
  }
  uint64_t out = 0;
  with_integer(m, type, [&](auto zero) {
    using T = decltype(zero);
    T x = as<T>(old), y = as<T>(b);
    switch (how) {
      case AADD: out = bits<T>(T(uint64_t(x) + uint64_t(y))); break;
      case AMIN: out = bits<T>(std::min(x, y)); break;
      case AMAX: out = bits<T>(std::max(x, y)); break;
      case AAND: out = bits<T>(T(x & y)); break;
      case AOR: out = bits<T>(T(x | y)); break;
      case AXOR: out = bits<T>(T(x ^ y)); break;
      case INCREMENT: out = bits<T>(x >= y ? T(0) : T(x + 1)); break;
      default: out = bits<T>(x == 0 || x > y ? y : T(x - 1));
    }
  });
  return out;
}

// option 0: byte offset, option 1: Space, option 2: Atomic, option 3: elements; destinations: the old values, or none
// sources: the address, the operand's elements, those that a comparison stores
inline void atom(Machine& m, Ins& i) {
  int each = BYTES[i.type], count = int(i.option[3]), bytes = each * count, how = int(i.option[2]);
  bool shared = i.option[1] == SHARED;
  uint64_t* address = m.reg(i.s[0]);
  for (int first = 0; first < m.threads; first += WARP) {
    std::vector<uint64_t> addresses;
    std::vector<int64_t> offsets;
    for (int t = first; t < std::min(first + WARP, m.threads); ++t) {
      if (!m.mask[t]) continue;
      uint64_t at = address[t] + uint64_t(i.option[0]);
      uint8_t* host;
      if (shared) {
        int64_t offset = m.offset_of(at, bytes, t);
        m.note_atomic(offset, bytes, t);
        host = m.shared.data() + offset;
        offsets.push_back(offset);
      } else {
        host = m.global(at, bytes, t);
        addresses.push_back(at);
      }
      bool changes = false;
      for (int k = 0; k < count; ++k) {
        uint64_t old = 0, b = m.reg(i.s[1 + k])[t], c = how == COMPARE ? m.reg(i.s[1 + count + k])[t] : 0;
        std::memcpy(&old, host + k * each, each);
        uint64_t made = updated(m, how, i.type, old, b, c, !shared);
        changes |= made != old;
        std::memcpy(host + k * each, &made, each);
        if (!i.d.empty()) m.reg(i.d[k])[t] = held(old, i.type, i.width);
      }
      m.note_progress(changes, t);
    }
    if (shared)
      count_wavefronts(i, offsets, bytes);
    else
      count_sectors(i, addresses, bytes);
  }
}

}  // namespace ptx
