// Atomic updates of global and shared memory, with and without the old value. Lanes update one after another, in the
// order of their numbers: PTX leaves the order open.
#pragma once

#include "memory.h"

namespace ptx {

// The new value of one element: PTX ISA, "atom". `flush`: float32 in global memory loses subnormals
inline uint64_t updated(Machine& m, int how, int type, uint64_t old, uint64_t b, uint64_t c, bool flush) {
  int bytes = BYTES[type];
  if (how == EXCHANGE)
    return zero_extended(b, bytes);
  if (how == COMPARE)
    return old == zero_extended(b, bytes) ? zero_extended(c, bytes) : old;
  if (int half = half_of(type); half != type) {
    uint64_t low = updated(m, how, half, old & 0xffff, b & 0xffff, 0, false);
    return low | updated(m, how, half, old >> 16, (b >> 16) & 0xffff, 0, false) << 16;
  }
  if (type >= F16) {
    auto read = [&](uint64_t v) {
      double x = read_float(m, type, v);
      return flush && type == F32 ? double(flushed(float(x))) : x;
    };
    return write_float(m, type, joined(how, read(old), read(b)), flush);
  }
  return with_integer(m, type, [&](auto zero) {
    using T = decltype(zero);
    return bits<T>(joined(how, as<T>(old), as<T>(b)));
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
