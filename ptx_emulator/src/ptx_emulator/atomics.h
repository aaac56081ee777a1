// Atomic updates of global and shared memory, with and without the old value, and reductions of a warp. Lanes update
// one after another, in the order of their numbers: PTX leaves the order open.
#pragma once

#include "memory.h"

namespace ptx {

enum Update { UADD, UMIN, UMAX, UAND, UOR, UXOR, EXCHANGE, COMPARE };
constexpr int KEEPS_NAN = 16;  // added to UMIN and UMAX of floats

// The new value of one element: PTX ISA, "atom". `flush`: float32 in global memory loses subnormals
inline uint64_t updated(Machine& m, int how, int type, uint64_t old, uint64_t b, uint64_t c = 0, bool flush = false) {
  int bytes = BYTES[type];
  if (how == EXCHANGE)
    return zero_extended(b, bytes);
  if (how == COMPARE)
    return old == zero_extended(b, bytes) ? zero_extended(c, bytes) : old;
  if (int half = half_of(type); half != type)
    return updated(m, how, half, old & 0xffff, b & 0xffff) | updated(m, how, half, old >> 16, b >> 16 & 0xffff) << 16;
  if (type >= F16) {
    auto read = [&](uint64_t v) {
      double x = read_float(m, type, v);
      return flush && type == F32 ? double(flushed(float(x))) : x;
    };
    double x = read(old), y = read(b);
    bool nan = how >= KEEPS_NAN;
    double z = how == UADD ? x + y : how % KEEPS_NAN == UMIN ? least(x, y, nan) : most(x, y, nan);
    return write_float(m, type, z, flush);
  }
  return with_integer(m, type, [&](auto zero) {
    using T = decltype(zero);
    T x = as<T>(old), y = as<T>(b);
    switch (how) {
      case UADD: return bits(T(uint64_t(x) + uint64_t(y)));
      case UMIN: return bits(std::min(x, y));
      case UMAX: return bits(std::max(x, y));
      case UAND: return bits(T(x & y));
      case UOR: return bits(T(x | y));
      default: return bits(T(x ^ y));
    }
  });
}

inline void redux(Machine& m, Ins& i) {  // option 0: Update, option 1: of the magnitudes of floats
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]);
  m.each_part([&](int w) {
    bool first = true;
    uint64_t out = 0;
    m.each_of(w, [&](int t) {
      uint64_t v = i.option[1] ? a[t] & 0x7fffffff : a[t];
      out = std::exchange(first, false) ? v : updated(m, int(i.option[0]), i.type, out, v);
    });
    m.each_of(w, [&](int t) { d[t] = out; });
  });
}

// option 0: byte offset, option 1: Space, option 2: Update, option 3: elements, option 4: bits of the order
// destinations: the old values, or none
// sources: the address, the operand's elements, those that a comparison stores
inline void atom(Machine& m, Ins& i) {
  int each = BYTES[i.type], count = int(i.option[3]), bytes = each * count, how = int(i.option[2]);
  bool shared = is_shared(i.option[1]);
  uint64_t* address = m.reg(i.s[0]);
  m.each_part([&](int w) {
    std::vector<uint64_t> addresses;
    m.each_of(w, [&](int t) {
      uint64_t at = address[t] + uint64_t(i.option[0]);
      uint8_t* host = shared ? m.shared.data() + m.offset_of(at, bytes, t, i.option[1] == CLUSTER)
                             : m.touch(at, bytes, t, UPDATES, i.option[4]);
      if (shared)
        m.note<UPDATES>(host - m.shared.data(), bytes, t);
      addresses.push_back(at);
      bool changes = false;
      for (int k = 0; k < count; ++k) {
        uint64_t old = 0, b = m.reg(i.s[1 + k])[t], c = how == COMPARE ? m.reg(i.s[1 + count + k])[t] : 0;
        std::memcpy(&old, host + k * each, each);
        uint64_t made = updated(m, how, i.type, old, b, c, !shared);
        changes |= made != old;
        std::memcpy(host + k * each, &made, each);
        if (!i.d.empty())
          m.reg(i.d[k])[t] = held(old, i.type, i.width);
      }
      m.note_progress(changes, t);
    });
    count_request(i, i.option[1], addresses, bytes);
  });
  m.touched(shared ? 0 : i.option[4]);
}

}  // namespace ptx
