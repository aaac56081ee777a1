// Instructions on the bits of registers: logic, shifts, fields, permutations, counts.
#pragma once

#include "arithmetic.h"

namespace ptx {

constexpr Handler and_ = [](Machine& m, Ins& i) { integer_binary(m, i, [](auto a, auto b) { return a & b; }); };
constexpr Handler or_ = [](Machine& m, Ins& i) { integer_binary(m, i, [](auto a, auto b) { return a | b; }); };
constexpr Handler xor_ = [](Machine& m, Ins& i) { integer_binary(m, i, [](auto a, auto b) { return a ^ b; }); };
inline void not_(Machine& m, Ins& i) {
  of_bits(m, i, [&](uint64_t a, auto...) { return i.type == PRED ? !a : zero_extended(~a, i.width); });
}
inline void shl(Machine& m, Ins& i) {
  of_bits(m, i, [&](uint64_t a, uint64_t b, auto...) {
    return uint32_t(b) > 63 ? 0 : zero_extended(a << uint32_t(b), BYTES[i.type]);
  });
}

// A value of `type` without its low bits
inline uint64_t shifted(uint64_t value, uint32_t bits, int type) {
  value = extended(value, type);
  return is_signed(type) ? uint64_t(int64_t(value) >> std::min(bits, 63u)) : bits > 63 ? 0 : value >> bits;
}
inline void shr(Machine& m, Ins& i) {
  of_bits(m, i,
          [&](uint64_t a, uint64_t b, auto...) { return zero_extended(shifted(a, uint32_t(b), i.type), i.width); });
}
inline void bfe(Machine& m, Ins& i) {
  of_bits(m, i, [&](uint64_t a, uint64_t b, uint64_t c, auto...) -> uint64_t {
    int above = 64 - int(c & 0xff);  // bits of a register that are not in the field
    uint64_t field = shifted(a, b & 0xff, i.type);
    if (above <= 0)
      return zero_extended(field, BYTES[i.type]);
    if (above == 64)
      return 0;
    field <<= above;
    return zero_extended(is_signed(i.type) ? uint64_t(int64_t(field) >> above) : field >> above, BYTES[i.type]);
  });
}
inline void bfi(Machine& m, Ins& i) {
  of_bits(m, i, [&](uint64_t a, uint64_t b, uint64_t c, uint64_t e) {
    int pos = int(c & 0xff), len = int(e & 0xff);
    uint64_t field = len >= 64 ? ~uint64_t(0) : (uint64_t(1) << len) - 1;
    uint64_t keep = pos >= 64 ? 0 : field << pos;
    return zero_extended((b & ~keep) | ((pos >= 64 ? 0 : a << pos) & keep), BYTES[i.type]);
  });
}
inline void prmt(Machine& m, Ins& i) {
  of_bits(m, i, [](uint64_t a, uint64_t b, uint64_t c, auto...) {
    uint64_t all = (a & 0xffffffffu) | (b << 32), out = 0;
    for (int k = 0; k < 4; ++k) {
      unsigned pick = (c >> (4 * k)) & 0xf;
      uint64_t byte = (all >> (8 * (pick & 7))) & 0xff;
      if (pick & 8)
        byte = byte & 0x80 ? 0xff : 0;
      out |= byte << (8 * k);
    }
    return out;
  });
}
inline void lop3(Machine& m, Ins& i) {
  of_bits(m, i, [](uint64_t a, uint64_t b, uint64_t c, uint64_t table) {
    uint64_t out = 0;
    for (int k = 0; k < 32; ++k) {
      unsigned row = ((a >> k) & 1) << 2 | ((b >> k) & 1) << 1 | ((c >> k) & 1);
      out |= ((table >> row) & 1) << k;
    }
    return out;
  });
}
inline void shf(Machine& m, Ins& i) {  // option 0: left; option 1: clamp the amount at 32, else wrap it
  of_bits(m, i, [&](uint64_t a, uint64_t b, uint64_t c, auto...) {
    unsigned n = i.option[1] ? std::min(uint32_t(c), 32u) : uint32_t(c) & 31;
    uint64_t both = (b << 32) | (a & 0xffffffffu);
    return uint64_t(uint32_t(i.option[0] ? (both << n) >> 32 : both >> n));
  });
}
inline void popc(Machine& m, Ins& i) {
  of_bits(m, i, [&](uint64_t a, auto...) { return __builtin_popcountll(zero_extended(a, BYTES[i.type])); });
}
inline void clz(Machine& m, Ins& i) {
  int size = 8 * BYTES[i.type];
  of_bits(m, i, [&](uint64_t a, auto...) {
    uint64_t v = zero_extended(a, BYTES[i.type]);
    return v ? __builtin_clzll(v) - (64 - size) : size;
  });
}
inline void brev(Machine& m, Ins& i) {
  int size = 8 * BYTES[i.type];
  of_bits(m, i, [&](uint64_t a, auto...) {
    uint64_t out = 0;
    for (int k = 0; k < size; ++k)
      out |= ((a >> k) & 1) << (size - 1 - k);
    return out;
  });
}

}  // namespace ptx
