// Instructions on numbers in registers: integers, floats, conversions, comparisons, selection.
#pragma once

#include <cfenv>
#include <limits>

#include "machine.h"

namespace ptx {

enum Rounding { NEAREST, ZERO, DOWN, UP, AWAY };

// f(T{}) with the C++ type of an integer `type`
template <class F> auto with_integer(Machine& m, int type, F f) -> decltype(f(uint8_t{})) {
  switch (type) {
    case U8:
    case PRED: return f(uint8_t{});
    case U16: return f(uint16_t{});
    case U32: return f(uint32_t{});
    case U64: return f(uint64_t{});
    case S8: return f(int8_t{});
    case S16: return f(int16_t{});
    case S32: return f(int32_t{});
    case S64: return f(int64_t{});
    default: m.fault("this type is not an integer");
  }
}

template <class F> void integer_binary(Machine& m, Ins& i, F f) {
  with_integer(m, i.type, [&](auto zero) {
    using T = decltype(zero);
    uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]), *b = m.reg(i.s[1]);
    m.each([&](int t) { d[t] = held(bits<T>(T(f(as<T>(a[t]), as<T>(b[t])))), i.type, i.width); });
  });
}

// The destination is f of the sources' bits; those that an instruction does not have are repeated
template <class F> void of_bits(Machine& m, Ins& i, F f) {
  auto source = [&](size_t k) { return m.reg(i.s[std::min(k, i.s.size() - 1)]); };
  uint64_t *d = m.reg(i.d[0]), *a = source(0), *b = source(1), *c = source(2), *e = source(3);
  m.each([&](int t) { d[t] = f(a[t], b[t], c[t], e[t]); });
}

inline bool halves(const Ins& i) { return i.type == U16X2 || i.type == S16X2; }

// f of both halves of a register, as integers
template <class F> void by_halves(Machine& m, Ins& i, F f) {
  auto one = [&](uint64_t x, uint64_t y) -> uint64_t {
    return i.type == U16X2 ? uint16_t(f(int(uint16_t(x)), int(uint16_t(y))))
                           : uint16_t(f(int(int16_t(x)), int(int16_t(y))));
  };
  of_bits(m, i, [&](uint64_t a, uint64_t b, auto...) { return one(a, b) | one(a >> 16, b >> 16) << 16; });
}

inline double read_float(Machine& m, int type, uint64_t v) {
  switch (type) {
    case F16: return from_f16(uint16_t(v));
    case BF16: return from_bf16(uint16_t(v));
    case F32: return as<float>(v);
    case F64: return as<double>(v);
    default: m.fault("this type is not a float");
  }
}

template <class T> uint64_t write_float(Machine& m, int type, T v, bool ftz) {
  switch (type) {
    case F16: return to_f16(v);
    case BF16: return to_bf16(v);
    case F32: return bits(ftz ? flushed(float(v)) : float(v));
    case F64: return bits(double(v));
    default: m.fault("this type is not a float");
  }
}

// A number of a pair or of a matrix; integers of eight bits are floats too
inline float element(Machine& m, int type, uint64_t v) {
  switch (type) {
    case E4M3: return from_e4m3(uint8_t(v));
    case E5M2: return from_e5m2(uint8_t(v));
    case S8: return int8_t(v);
    case U8: return uint8_t(v);
    case TF32: return as<float>(v & 0xffffe000u);  // the low 13 bits are not read
    default: return float(read_float(m, type, v));
  }
}

// The type of both halves of a packed type, or the type itself
inline int half_of(int type) { return type == F16X2 ? F16 : type == BF16X2 ? BF16 : type == F32X2 ? F32 : type; }

// option 0: flush subnormal floats to zero; option 3: Rounding; x2 types: the halves one by one. The host rounds to
// double and then to the type: two roundings in one direction equal one.
template <class F> void float_op(Machine& m, Ins& i, F f) {
  constexpr int MODES[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  bool ftz = i.option[0];
  int type = half_of(i.type), wide = 8 * BYTES[type], count = int(i.s.size());
  uint64_t *d = m.reg(i.d[0]), *s[3];
  for (int k = 0; k < count; ++k)
    s[k] = m.reg(i.s[k]);
  std::fesetround(MODES[i.option[3]]);
  m.each([&](int t) {
    uint64_t out = 0;
    for (int half = 0; half < (type == i.type ? 1 : 2); ++half) {
      double x[3] = {};
      for (int k = 0; k < count; ++k) {
        x[k] = read_float(m, type, zero_extended(s[k][t] >> (wide * half), wide / 8));
        if (ftz && type == F32)
          x[k] = flushed(float(x[k]));
      }
      out |= write_float(m, type, f(x[0], x[1], x[2]), ftz) << (wide * half);
    }
    d[t] = out;
  });
  std::fesetround(FE_TONEAREST);
}

inline double least(double a, double b, bool nan) {
  if (a != a || b != b)
    return nan ? std::numeric_limits<double>::quiet_NaN() : (a != a ? b : a);
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
inline double most(double a, double b, bool nan) { return -least(-a, -b, nan); }

// f of two floats, or of two integers, whose low bits it gives. Float32 is rounded once from double: exact for +, - and
// *
template <class F> void binary(Machine& m, Ins& i, F f) {
  if (halves(i))
    return by_halves(m, i, f);
  if (i.type >= F16)
    return float_op(m, i, [&](double a, double b, double) { return f(a, b); });
  of_bits(m, i, [&](uint64_t a, uint64_t b, auto...) { return held(f(a, b), i.type, i.width); });
}
constexpr Handler add = [](Machine& m, Ins& i) { binary(m, i, [](auto a, auto b) { return a + b; }); };
constexpr Handler sub = [](Machine& m, Ins& i) { binary(m, i, [](auto a, auto b) { return a - b; }); };
constexpr Handler mul = [](Machine& m, Ins& i) { binary(m, i, [](auto a, auto b) { return a * b; }); };
inline void mul_hi(Machine& m, Ins& i) {
  int shift = 8 * BYTES[i.type];
  integer_binary(m, i, [&](auto a, auto b) { return uint64_t((__int128(a) * __int128(b)) >> shift); });
}
inline void fma(Machine& m, Ins& i) {
  if (i.type == F32 && !i.option[3])  // the most frequent, without a detour through double
    return of_bits(m, i, [&](uint64_t a, uint64_t b, uint64_t c, auto...) {
      float x = as<float>(a), y = as<float>(b), z = as<float>(c);
      return bits(i.option[0] ? flushed(std::fma(flushed(x), flushed(y), flushed(z))) : std::fma(x, y, z));
    });
  if (half_of(i.type) == F32)
    return float_op(m, i, [](double a, double b, double c) { return std::fma(float(a), float(b), float(c)); });
  float_op(m, i, [](double a, double b, double c) { return std::fma(a, b, c); });
}
// float32 of half operands but for the last. option 0: add, sub, fma
inline void mixed(Machine& m, Ins& i) {
  of_bits(m, i, [&](uint64_t a, uint64_t b, uint64_t c, auto...) {
    float x = float(read_float(m, i.type, a)), z = as<float>(c);
    if (i.option[0] == 2)
      return bits(std::fma(x, float(read_float(m, i.type, b)), z));
    return bits(i.option[0] ? x - z : x + z);
  });
}
inline void div(Machine& m, Ins& i) {
  if (i.type >= F16)
    return float_op(m, i, [](double a, double b, double) { return a / b; });
  // PTX does not specify the quotient by 0; by -1 it may need another bit
  integer_binary(m, i, [](auto a, auto b) { return b == 0 ? ~uint64_t(0) : uint64_t(__int128(a) / b); });
}
inline void rem(Machine& m, Ins& i) {
  integer_binary(m, i, [](auto a, auto b) { return b == 0 ? uint64_t(a) : uint64_t(__int128(a) % b); });
}
template <class Pick> void extreme(Machine& m, Ins& i, double (*of_floats)(double, double, bool), Pick pick) {
  if (halves(i))
    return by_halves(m, i, pick);
  if (i.type >= F16)
    return float_op(m, i, [&](double a, double b, double c) {
      bool nan = i.option[1] & 1;
      if (i.option[1] & 2)  // .xorsign.abs
        return std::copysign(of_floats(std::fabs(a), std::fabs(b), nan), std::signbit(a) != std::signbit(b) ? -1. : 1.);
      double two = of_floats(a, b, nan);
      return i.s.size() > 2 ? of_floats(two, c, nan) : two;
    });
  integer_binary(m, i, [&](auto a, auto b) {
    auto v = pick(a, b);
    return i.option[2] && v < 0 ? decltype(v)(0) : v;
  });
}
constexpr Handler min_ = [](Machine& m, Ins& i) { extreme(m, i, least, [](auto a, auto b) { return a < b ? a : b; }); };
constexpr Handler max_ = [](Machine& m, Ins& i) { extreme(m, i, most, [](auto a, auto b) { return a > b ? a : b; }); };
constexpr Handler neg = [](Machine& m, Ins& i) { binary(m, i, [](auto a, auto) { return -a; }); };
inline void abs_(Machine& m, Ins& i) {
  if (i.type >= F16)
    return float_op(m, i, [](double a, double, double) { return std::fabs(a); });
  of_bits(m, i, [&](uint64_t a, auto...) {
    return zero_extended(uint64_t(std::abs(sign_extended(a, BYTES[i.type]))), i.width);
  });
}
inline void mad(Machine& m, Ins& i) {  // low half
  of_bits(m, i, [&](uint64_t a, uint64_t b, uint64_t c, auto...) { return zero_extended(a * b + c, BYTES[i.type]); });
}
inline void wide(Machine& m, Ins& i) {  // mul.wide, mad.wide: twice the bits of the type
  of_bits(m, i, [&](uint64_t a, uint64_t b, uint64_t c, auto...) {
    return zero_extended(extended(a, i.type) * extended(b, i.type) + (i.s.size() > 2 ? c : 0), 2 * BYTES[i.type]);
  });
}

enum WithCarry { ADD_CARRY, SUB_CARRY, MAD_LOW_CARRY, MAD_HIGH_CARRY };

// option 0: WithCarry, option 1: the carry is added (or borrowed), option 2: it is set
inline void with_carry(Machine& m, Ins& i) {
  int bytes = BYTES[i.type];
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]), *b = m.reg(i.s[1]), *c = i.s.size() > 2 ? m.reg(i.s[2]) : nullptr;
  using Wide = unsigned __int128;
  Wide range = Wide(1) << (8 * bytes);
  bool high = i.option[0] == MAD_HIGH_CARRY, subtracts = i.option[0] == SUB_CARRY;
  m.each([&](int t) {
    Wide x = zero_extended(a[t], bytes), y = zero_extended(b[t], bytes), in = i.option[1] && m.carry[t];
    if (c) {
      Wide product = x * y;
      if (is_signed(i.type) && high)
        product = Wide(__int128(sign_extended(a[t], bytes)) * sign_extended(b[t], bytes));
      x = (high ? product >> (8 * bytes) : product) % range;
      y = zero_extended(c[t], bytes);
    }
    Wide sum = subtracts ? range + x - y - in : x + y + in;
    if (i.option[2])
      m.carry[t] = subtracts ? sum < range : sum >= range;
    d[t] = uint64_t(sum % range);
  });
}

// f of float32, rounded by the host; f of a double and of the halves is computed in the same way
template <class F> void unary(Machine& m, Ins& i, F f) {
  if (i.type == F64)
    return float_op(m, i, [&](double a, double, double) { return f(a); });
  float_op(m, i, [&](double a, double, double) { return double(f(float(a))); });
}
constexpr Handler ex2 = [](Machine& m, Ins& i) { unary(m, i, [](auto a) { return std::exp2(a); }); };
constexpr Handler lg2 = [](Machine& m, Ins& i) { unary(m, i, [](auto a) { return std::log2(a); }); };
constexpr Handler rcp = [](Machine& m, Ins& i) { unary(m, i, [](auto a) { return 1 / a; }); };
constexpr Handler sqrt_ = [](Machine& m, Ins& i) { unary(m, i, [](auto a) { return std::sqrt(a); }); };
constexpr Handler rsqrt = [](Machine& m, Ins& i) { unary(m, i, [](auto a) { return 1 / std::sqrt(a); }); };
constexpr Handler sin_ = [](Machine& m, Ins& i) { unary(m, i, [](auto a) { return std::sin(a); }); };
constexpr Handler cos_ = [](Machine& m, Ins& i) { unary(m, i, [](auto a) { return std::cos(a); }); };
constexpr Handler tanh_ = [](Machine& m, Ins& i) { unary(m, i, [](auto a) { return std::tanh(a); }); };
inline void copysign_(Machine& m, Ins& i) {  // the sign of the first, the rest of the second
  float_op(m, i, [](double a, double b, double) { return std::copysign(b, a); });
}

// The bytes of the sources, one after another, go to the destinations: one value, several that it packs or unpacks
inline void mov(Machine& m, Ins& i) {
  if (i.d.size() == 1 && i.s.size() == 1)
    return of_bits(m, i, [&](uint64_t a, auto...) { return i.type == PRED ? a != 0 : zero_extended(a, i.width); });
  int from = BYTES[i.type] / int(i.s.size()), to = BYTES[i.type] / int(i.d.size());
  m.each([&](int t) {
    uint64_t value = 0;
    for (size_t k = 0; k < i.s.size(); ++k)
      value |= zero_extended(m.reg(i.s[k])[t], from) << (8 * from * k);
    for (size_t k = 0; k < i.d.size(); ++k)
      m.reg(i.d[k])[t] = zero_extended(value >> (8 * to * k), to);
  });
}
inline void selp(Machine& m, Ins& i) {
  of_bits(m, i, [&](uint64_t a, uint64_t b, uint64_t p, auto...) { return zero_extended(p ? a : b, i.width); });
}

enum Comparison { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };

template <class T> bool compares(int how, T a, T b) {
  bool unordered = a != a || b != b;
  if (how >= NUM)
    return unordered == (how == NAN_);
  if (unordered)
    return how >= EQU;
  switch (how % EQU) {
    case EQ: return a == b;
    case NE: return a != b;
    case LT: return a < b;
    case LE: return a <= b;
    case GT: return a > b;
    default: return a >= b;
  }
}

inline void setp(Machine& m, Ins& i) {  // option 0: Comparison
  int how = int(i.option[0]);
  if (i.type >= F16)
    return of_bits(m, i, [&](uint64_t a, uint64_t b, auto...) {
      return compares(how, read_float(m, i.type, a), read_float(m, i.type, b));
    });
  with_integer(m, i.type, [&](auto zero) {
    using T = decltype(zero);
    of_bits(m, i, [&](uint64_t a, uint64_t b, auto...) { return compares(how, as<T>(a), as<T>(b)); });
  });
}

inline double to_integral(double v, int how) {
  return how == ZERO ? std::trunc(v) : how == DOWN ? std::floor(v) : how == UP ? std::ceil(v) : std::nearbyint(v);
}

// type2 -> type; option 0: ftz, option 1: Rounding, option 2: saturate to [0, 1]
inline void cvt(Machine& m, Ins& i) {
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]);
  bool ftz = i.option[0];
  int from = i.type2, to = i.type;
  if (to == TF32) {  // 10 bits of mantissa; ties away from zero
    return m.each([&](int t) { d[t] = std::isfinite(as<float>(a[t])) ? ((a[t] + 0x1000) & 0xffffe000u) : a[t]; });
  }
  m.each([&](int t) {
    uint64_t out;
    if (from >= F16 && to >= F16) {
      double v = read_float(m, from, a[t]);
      if (i.option[2])
        v = v > 0 ? std::min(v, 1.0) : 0.0;
      if (i.option[3])
        v = to_integral(v, int(i.option[1]));  // .rni and the like between floats
      else if (i.option[1] != NEAREST && BYTES[to] < BYTES[from])
        m.fault("only rounding to nearest between floats is emulated");
      out = write_float(m, to, v, ftz);
    } else if (from >= F16) {
      double v = to_integral(read_float(m, from, a[t]), int(i.option[1]));
      out = with_integer(m, to, [&](auto zero) {
        using Limits = std::numeric_limits<decltype(zero)>;
        if (v >= std::ldexp(1.0, Limits::digits))
          return bits(Limits::max());
        if (v <= double(Limits::min()))
          return bits(Limits::min());
        return bits(v != v ? zero : decltype(zero)(v));
      });
    } else {
      uint64_t v = extended(a[t], from);
      if (to < F16)
        out = zero_extended(v, BYTES[to]);
      else
        out = is_signed(from) ? write_float(m, to, int64_t(v), ftz) : write_float(m, to, v, ftz);
    }
    d[t] = to < F16 ? held(out, to, i.width) : out;
  });
}

// Two floats at once. type2 -> type, elements of the pairs; float32 come in two sources, the first above
inline void cvt_pair(Machine& m, Ins& i) {
  uint64_t *d = m.reg(i.d[0]), *a = m.reg(i.s[0]), *b = m.reg(i.s.back());
  int from = 8 * BYTES[i.type2], to = 8 * BYTES[i.type];
  auto converted = [&](uint64_t v) -> uint64_t {
    float x = element(m, i.type2, v);
    return i.type == E4M3 ? to_e4m3(x) : i.type == E5M2 ? to_e5m2(x) : write_float(m, i.type, x, false);
  };
  m.each([&](int t) {
    uint64_t low = i.s.size() > 1 ? b[t] : a[t], high = i.s.size() > 1 ? a[t] : a[t] >> from;
    d[t] = converted(high) << to | converted(low);
  });
}

}  // namespace ptx
