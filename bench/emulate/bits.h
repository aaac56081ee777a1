// Instructions on the bits of registers: logic, shifts, fields, permutations, counts.
#pragma once

#include <algorithm>

#include "arithmetic.h"

namespace ptx {

inline void and_(Machine& m, Ins& i) {
  integer_binary(m, i, [](auto a, auto b) { return a & b; });
}
inline void or_(Machine& m, Ins& i) {
  integer_binary(m, i, [](auto a, auto b) { return a | b; });
}
inline void xor_(Machine& m, Ins& i) {
  integer_binary(m, i, [](auto a, auto b) { return a ^ b; });
}
inline void not_(Machine& m, Ins& i) {
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]);
  m.each([&](int t) { d[t] = i.type == PRED ? !a[t] : zero_extended(~a[t], i.width); });
}
inline void shl(Machine& m, Ins& i) {
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]), *b = m.reg(i.s[1]);
  unsigned size = 8 * BYTES[i.type];
  m.each([&](int t) { d[t] = uint32_t(b[t]) >= size ? 0 : zero_extended(a[t] << uint32_t(b[t]), BYTES[i.type]); });
}
inline void shr(Machine& m, Ins& i) {
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]), *b = m.reg(i.s[1]);
  int bytes = BYTES[i.type];
  unsigned size = 8 * bytes;
  m.each([&](int t) {
    unsigned n = std::min(uint32_t(b[t]), size);
    if (is_signed(i.type))
      d[t] = zero_extended(uint64_t(sign_extended(a[t], bytes) >> std::min(n, size - 1)), i.width);
    else
      d[t] = n >= size ? 0 : zero_extended(a[t], bytes) >> n;
  });
}
inline void bfe(Machine& m, Ins& i) {
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]), *b = m.reg(i.s[1]), *c = m.reg(i.s[2]);
  int bytes = BYTES[i.type], top = 8 * bytes - 1;
  m.each([&](int t) {
    int pos = int(b[t] & 0xff), len = int(c[t] & 0xff);
    uint64_t value = zero_extended(a[t], bytes);
    bool sign = is_signed(i.type) && len > 0 && ((value >> std::min(pos + len - 1, top)) & 1);
    uint64_t out = sign ? ~uint64_t(0) : 0;
    for (int k = 0; k < len && k <= top && pos + k <= top; ++k) {
      uint64_t bit = (value >> (pos + k)) & 1;
      out = (out & ~(uint64_t(1) << k)) | (bit << k);
    }
    d[t] = zero_extended(out, bytes);
  });
}
inline void bfi(Machine& m, Ins& i) {
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]), *b = m.reg(i.s[1]), *c = m.reg(i.s[2]), *e = m.reg(i.s[3]);
  int bytes = BYTES[i.type];
  m.each([&](int t) {
    int pos = int(c[t] & 0xff), len = int(e[t] & 0xff);
    uint64_t field = len >= 64 ? ~uint64_t(0) : (uint64_t(1) << len) - 1;
    uint64_t keep = pos >= 64 ? 0 : field << pos;
    d[t] = zero_extended((b[t] & ~keep) | ((pos >= 64 ? 0 : a[t] << pos) & keep), bytes);
  });
}
inline void prmt(Machine& m, Ins& i) {
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]), *b = m.reg(i.s[1]), *c = m.reg(i.s[2]);
  m.each([&](int t) {
    uint64_t all = (a[t] & 0xffffffffu) | (b[t] << 32), out = 0;
    for (int k = 0; k < 4; ++k) {
      unsigned pick = (c[t] >> (4 * k)) & 0xf;
      uint64_t byte = (all >> (8 * (pick & 7))) & 0xff;
      if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
      out |= byte << (8 * k);
    }
    d[t] = out;
  });
}
inline void lop3(Machine& m, Ins& i) {
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]), *b = m.reg(i.s[1]), *c = m.reg(i.s[2]), *table = m.reg(i.s[3]);
  m.each([&](int t) {
    uint64_t out = 0;
    for (int k = 0; k < 32; ++k) {
      unsigned row = ((a[t] >> k) & 1) << 2 | ((b[t] >> k) & 1) << 1 | ((c[t] >> k) & 1);
      out |= ((table[t] >> row) & 1) << k;
    }
    d[t] = out;
  });
}
inline void shf(Machine& m, Ins& i) {  // option 0: left; option 1: clamp the amount at 32, else wrap it
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]), *b = m.reg(i.s[1]), *c = m.reg(i.s[2]);
  m.each([&](int t) {
    unsigned n = i.option[1] ? std::min(uint32_t(c[t]), 32u) : uint32_t(c[t]) & 31;
    uint64_t both = (b[t] << 32) | (a[t] & 0xffffffffu);
    d[t] = i.option[0] ? ((n ? both << n : both) >> 32) & 0xffffffffu : (both >> n) & 0xffffffffu;
  });
}
inline void popc(Machine& m, Ins& i) {
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]);
  m.each([&](int t) { d[t] = uint64_t(__builtin_popcountll(zero_extended(a[t], BYTES[i.type]))); });
}
inline void clz(Machine& m, Ins& i) {
  int size = 8 * BYTES[i.type];
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]);
  m.each([&](int t) {
    uint64_t v = zero_extended(a[t], BYTES[i.type]);
    d[t] = v ? uint64_t(__builtin_clzll(v) - (64 - size)) : uint64_t(size);
  });
}
inline void brev(Machine& m, Ins& i) {
  int size = 8 * BYTES[i.type];
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]);
  m.each([&](int t) {
    uint64_t out = 0;
    for (int k = 0; k < size; ++k) out |= ((a[t] >> k) & 1) << (size - 1 - k);
    d[t] = out;
  });
}

}  // namespace ptx
