"""Meaning of the instructions of one value, by the PTX ISA: opcode -> (target, sources, function of the operands'
bits).
"""

import functools
import math
import struct
from fractions import Fraction

import numpy as np
import torch

M16, M32, M64 = 2**16 - 1, 2**32 - 1, 2**64 - 1


def signed(v, bits):
    return v - 2**bits if v & 2 ** (bits - 1) else v


s16, s32, s64 = (functools.partial(signed, bits=bits) for bits in (16, 32, 64))


def f32(v):
    return np.float32(struct.unpack("<f", struct.pack("<I", v & M32))[0])


def bits32(v):
    return struct.unpack("<I", struct.pack("<f", np.float32(v)))[0]


def f16(v):
    return np.frombuffer(struct.pack("<H", v & M16), np.float16)[0]


def bits16(v):
    return int(np.float16(v).view(np.uint16))


def bf16(v):
    return f32((v & M16) << 16)


def bits_bf16(v):
    return int(torch.tensor(float(v), dtype=torch.float64).to(torch.bfloat16).view(torch.int16).item()) & M16


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def flushed(v):
    return np.float32(math.copysign(0.0, v)) if abs(v) < np.float32(2.0**-126) else v


def fused(a, b, c):
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def bfe(value, position, length, bits, signed):
    position, length = position & 255, length & 255
    field = sum(((value >> (position + k)) & 1 if position + k < bits else 0) << k for k in range(min(length, bits)))
    if signed and length:
        sign = (value >> min(position + length - 1, bits - 1)) & 1
        for k in range(bits):
            if k >= length or position + k >= bits:
                field = field & ~(1 << k) | (sign << k)
    return field


def prmt(a, b, c):
    source, out = [(a | b << 32) >> 8 * k & 255 for k in range(8)], 0
    for k in range(4):
        pick = c >> 4 * k & 15
        byte = source[pick & 7]
        out |= (255 * (byte >> 7) if pick & 8 else byte) << 8 * k
    return out


def both_halves(function, read, write):
    return lambda *v: write(function(*(read(x & M16) for x in v))) | write(function(*(read(x >> 16) for x in v))) << 16


def least(a, b):
    """NaN only if both are NaN; -0 is less than +0."""
    return (a if np.signbit(a) else b) if a == b else np.fmin(a, b)


def most(a, b):
    return (b if np.signbit(a) else a) if a == b else np.fmax(a, b)


def integral(v, how, bits):
    """Convert a float to a signed integer of bits + 1 bits: NaN becomes 0, larger values the largest."""
    if np.isnan(v):
        return 0
    whole = how(float(v)) if math.isfinite(v) else (1 << 70 if v > 0 else -(1 << 70))
    return max(-(1 << bits), min((1 << bits) - 1, whole)) & ((2 << bits) - 1)


def unsigned(v, bits):
    return 0 if np.isnan(v) or v <= 0 else min((1 << bits) - 1, int(v) if math.isfinite(v) else 1 << 70)


INTEGER = {
    "add.s32": ("r", "rr", lambda a, b: (a + b) & M32),
    "add.s64": ("l", "ll", lambda a, b: (a + b) & M64),
    "sub.s32": ("r", "rr", lambda a, b: (a - b) & M32),
    "sub.s64": ("l", "ll", lambda a, b: (a - b) & M64),
    "mul.lo.s32": ("r", "rr", lambda a, b: a * b & M32),
    "mul.lo.s64": ("l", "ll", lambda a, b: a * b & M64),
    "mul.hi.u32": ("r", "rr", lambda a, b: a * b >> 32),
    "mul.hi.s32": ("r", "rr", lambda a, b: (s32(a) * s32(b) >> 32) & M32),
    "mul.wide.s32": ("l", "rr", lambda a, b: s32(a) * s32(b) & M64),
    "mul.wide.u32": ("l", "rr", lambda a, b: a * b),
    "mad.lo.s32": ("r", "rrr", lambda a, b, c: (a * b + c) & M32),
    "mad.lo.s64": ("l", "lll", lambda a, b, c: (a * b + c) & M64),
    "mad.wide.s32": ("l", "rrl", lambda a, b, c: (s32(a) * s32(b) + c) & M64),
    "mad.wide.u32": ("l", "rrl", lambda a, b, c: (a * b + c) & M64),
    "div.s32": ("r", "rr", lambda a, b: quotient(s32(a), s32(b)) & M32 if b else None),
    "div.u32": ("r", "rr", lambda a, b: a // b if b else None),
    "div.s64": ("l", "ll", lambda a, b: quotient(s64(a), s64(b)) & M64 if b else None),
    "rem.s32": ("r", "rr", lambda a, b: (s32(a) - s32(b) * quotient(s32(a), s32(b))) & M32 if b else None),
    "rem.s64": ("l", "ll", lambda a, b: (s64(a) - s64(b) * quotient(s64(a), s64(b))) & M64 if b else None),
    "min.s32": ("r", "rr", lambda a, b: min(s32(a), s32(b)) & M32),
    "max.s32": ("r", "rr", lambda a, b: max(s32(a), s32(b)) & M32),
    "min.u32": ("r", "rr", min),
    "max.u32": ("r", "rr", max),
    "min.s64": ("l", "ll", lambda a, b: min(s64(a), s64(b)) & M64),
    "max.s64": ("l", "ll", lambda a, b: max(s64(a), s64(b)) & M64),
    "min.relu.s32": ("r", "rr", lambda a, b: max(min(s32(a), s32(b)), 0)),
    "max.relu.s32": ("r", "rr", lambda a, b: max(s32(a), s32(b), 0)),
    "min.s16x2": ("r", "rr", lambda a, b: min(a & M16, b & M16, key=s16) | min(a >> 16, b >> 16, key=s16) << 16),
    "max.u16x2": ("r", "rr", lambda a, b: max(a & M16, b & M16) | max(a >> 16, b >> 16) << 16),
    "add.s16x2": ("r", "rr", lambda a, b: (a + b) & M16 | ((a >> 16) + (b >> 16) & M16) << 16),
    "neg.s32": ("r", "r", lambda a: -a & M32),
    "abs.s32": ("r", "r", lambda a: abs(s32(a)) & M32),
    "and.b32": ("r", "rr", lambda a, b: a & b),
    "and.b64": ("l", "ll", lambda a, b: a & b),
    "and.pred": ("p", "pp", lambda a, b: int(bool(a & M32) and bool(b & M32))),
    "or.b16": ("h", "hh", lambda a, b: a | b),
    "or.pred": ("p", "pp", lambda a, b: int(bool(a & M32) or bool(b & M32))),
    "xor.b32": ("r", "rr", lambda a, b: a ^ b),
    "not.b32": ("r", "r", lambda a: ~a & M32),
    "not.pred": ("p", "p", lambda a: int(not a & M32)),
    "shl.b32": ("r", "rr", lambda a, b: a << b & M32 if b < 32 else 0),
    "shl.b64": ("l", "lr", lambda a, b: a << b & M64 if b < 64 else 0),
    "shr.u32": ("r", "rr", lambda a, b: a >> b if b < 32 else 0),
    "shr.s32": ("r", "rr", lambda a, b: s32(a) >> min(b, 31) & M32),
    "shr.s64": ("l", "lr", lambda a, b: s64(a) >> min(b, 63) & M64),
    "bfe.u32": ("r", "rrr", lambda a, b, c: bfe(a, b, c, 32, False)),
    "bfe.s32": ("r", "rrr", lambda a, b, c: bfe(a, b, c, 32, True)),
    "bfe.u64": ("l", "lrr", lambda a, b, c: bfe(a, b, c, 64, False)),
    "prmt.b32": ("r", "rrr", prmt),
    "popc.b32": ("r", "r", lambda a: a.bit_count()),
    "clz.b32": ("r", "r", lambda a: 32 - a.bit_length()),
    "clz.b64": ("r", "l", lambda a: 64 - a.bit_length()),
    "brev.b32": ("r", "r", lambda a: int(f"{a:032b}"[::-1], 2)),
    "shf.l.wrap.b32": ("r", "rrr", lambda a, b, c: (((b << 32 | a) << (c & 31)) >> 32) & M32),
    "shf.l.clamp.b32": ("r", "rrr", lambda a, b, c: (((b << 32 | a) << min(c, 32)) >> 32) & M32),
    "shf.r.wrap.b32": ("r", "rrr", lambda a, b, c: ((b << 32 | a) >> (c & 31)) & M32),
    "shf.r.clamp.b32": ("r", "rrr", lambda a, b, c: ((b << 32 | a) >> min(c, 32)) & M32),
    "selp.b32": ("r", "rrp", lambda a, b, c: a if c & M32 else b),
    "selp.b64": ("l", "llp", lambda a, b, c: a if c & M32 else b),
    "setp.lt.s32": ("p", "rr", lambda a, b: int(s32(a) < s32(b))),
    "setp.lt.u32": ("p", "rr", lambda a, b: int(a < b)),
    "setp.hs.u32": ("p", "rr", lambda a, b: int(a >= b)),
    "setp.gt.s64": ("p", "ll", lambda a, b: int(s64(a) > s64(b))),
    "setp.eq.b16": ("p", "hh", lambda a, b: int(a == b)),
    "setp.lo.u32": ("p", "rr", lambda a, b: int(a < b)),
    "setp.ls.u32": ("p", "rr", lambda a, b: int(a <= b)),
    "setp.hi.u32": ("p", "rr", lambda a, b: int(a > b)),
    "mov.b32": ("r", "r", lambda a: a),
    "mul.hi.u64": ("l", "ll", lambda a, b: a * b >> 64),
    "mul.hi.s64": ("l", "ll", lambda a, b: (s64(a) * s64(b) >> 64) & M64),
    "mul.lo.s16": ("h", "hh", lambda a, b: a * b & M16),
    "add.s16": ("h", "hh", lambda a, b: (a + b) & M16),
    "sub.s16": ("h", "hh", lambda a, b: (a - b) & M16),
    "rem.u32": ("r", "rr", lambda a, b: a % b if b else None),
    "neg.s64": ("l", "l", lambda a: -a & M64),
    "abs.s64": ("l", "l", lambda a: abs(s64(a)) & M64),
    "xor.pred": ("p", "pp", lambda a, b: int(bool(a & M32) != bool(b & M32))),
    "or.b32": ("r", "rr", lambda a, b: a | b),
    "xor.b64": ("l", "ll", lambda a, b: a ^ b),
    "not.b64": ("l", "l", lambda a: ~a & M64),
    "shr.u64": ("l", "lr", lambda a, b: a >> b if b < 64 else 0),
    "bfe.s64": ("l", "lrr", lambda a, b, c: bfe(a, b, c, 64, True)),
    "popc.b64": ("r", "l", lambda a: a.bit_count()),
    "brev.b64": ("l", "l", lambda a: int(f"{a:064b}"[::-1], 2)),
    "cvt.s64.s32": ("l", "r", lambda a: s32(a) & M64),
    "cvt.u64.u32": ("l", "r", lambda a: a),
    "cvt.u32.u64": ("r", "l", lambda a: a & M32),
    "cvt.u16.u32": ("h", "r", lambda a: a & M16),
    "cvt.s32.s16": ("r", "h", lambda a: (a - 2**16 if a & 2**15 else a) & M32),
    "cvt.s32.s8": ("r", "h", lambda a: ((a & 255) - 256 if a & 128 else a & 255) & M32),
    "cvt.rn.f32.s32": ("r", "r", lambda a: bits32(s32(a))),
    "cvt.rn.f32.u32": ("r", "r", bits32),
}


def toward(a, b, c, direction):
    """Return a * b + c, computed exactly and rounded to float32 in a direction: -1, 1, or 0 for toward zero."""
    values = [float(v) for v in (a, b, c)]
    if not all(map(math.isfinite, values)):
        return np.float32(np.float64(values[0]) * values[1] + values[2])
    exact = Fraction(values[0]) * Fraction(values[1]) + Fraction(values[2])
    if exact == 0:
        return None  # the sign of zero
    near = np.float32(values[0] * values[1] + values[2])
    direction = direction or (-1 if exact > 0 else 1)
    candidates = [np.nextafter(near, np.float32(way)) for way in (-np.inf, np.inf)] + [near]
    fitting = [v for v in candidates if math.isinf(v) or (Fraction(float(v)) - exact) * direction >= 0]
    best = min(fitting, key=lambda v: abs(Fraction(float(v)) - exact) if math.isfinite(v) else Fraction(2**200))
    return best


def directed(*operands, direction):
    found = toward(*operands, direction)
    return None if found is None else bits32(found)


FLOAT = {
    "add.rz.f32": ("r", "rr", lambda a, b: directed(f32(a), 1.0, f32(b), direction=0)),
    "sub.rm.f32": ("r", "rr", lambda a, b: directed(f32(a), 1.0, -f32(b), direction=-1)),
    "mul.rp.f32": ("r", "rr", lambda a, b: directed(f32(a), f32(b), 0.0, direction=1)),
    "fma.rm.f32": ("r", "rrr", lambda a, b, c: directed(f32(a), f32(b), f32(c), direction=-1)),
    "sin.approx.f32": ("r", "r", lambda a: bits32(np.sin(f32(a)))),
    "cos.approx.ftz.f32": ("r", "r", lambda a: bits32(np.cos(flushed(f32(a))))),
    "tanh.approx.f32": ("r", "r", lambda a: bits32(np.tanh(f32(a)))),
    "copysign.f32": ("r", "rr", lambda a, b: b & 0x7FFFFFFF | a & 0x80000000),
    "add.f32": ("r", "rr", lambda a, b: bits32(f32(a) + f32(b))),
    "add.ftz.f32": ("r", "rr", lambda a, b: bits32(flushed(flushed(f32(a)) + flushed(f32(b))))),
    "sub.ftz.f32": ("r", "rr", lambda a, b: bits32(flushed(flushed(f32(a)) - flushed(f32(b))))),
    "fma.rn.ftz.f32": ("r", "rrr", lambda *bits: bits32(flushed(fused(*(flushed(f32(v)) for v in bits))))),
    "min.ftz.f32": ("r", "rr", lambda a, b: bits32(np.fmin(flushed(f32(a)), flushed(f32(b))))),
    "min.NaN.f32": ("r", "rr", lambda a, b: bits32(np.minimum(f32(a), f32(b)))),
    "max.xorsign.abs.f32": ("r", "rr", lambda a, b: bits32(np.fmax(abs(f32(a)), abs(f32(b)))) | (a ^ b) & 1 << 31),
    "min.xorsign.abs.f32": ("r", "rr", lambda a, b: bits32(np.fmin(abs(f32(a)), abs(f32(b)))) | (a ^ b) & 1 << 31),
    "neg.ftz.f32": ("r", "r", lambda a: bits32(-flushed(f32(a)))),
    "abs.ftz.f32": ("r", "r", lambda a: bits32(abs(flushed(f32(a))))),
    "ex2.approx.f32": ("r", "r", lambda a: bits32(np.exp2(f32(a)))),
    "lg2.approx.f32": ("r", "r", lambda a: bits32(np.log2(f32(a)))),
    "rcp.rn.f32": ("r", "r", lambda a: bits32(np.float32(1) / f32(a))),
    "rsqrt.approx.ftz.f32": ("r", "r", lambda a: bits32(np.float32(1) / np.sqrt(flushed(f32(a))))),
    "sqrt.approx.ftz.f32": ("r", "r", lambda a: bits32(np.sqrt(flushed(f32(a))))),
    "min.f16": ("h", "hh", lambda a, b: bits16(least(f16(a), f16(b)))),
    "max.bf16": ("h", "hh", lambda a, b: bits_bf16(most(bf16(a), bf16(b)))),
    "max.f16x2": ("r", "rr", both_halves(most, f16, bits16)),
    "neg.bf16": ("h", "h", lambda a: bits_bf16(-bf16(a))),
    "abs.f16x2": ("r", "r", both_halves(abs, f16, bits16)),
    "sub.bf16x2": ("r", "rr", both_halves(lambda a, b: float(a) - float(b), bf16, bits_bf16)),
    "mul.f16": ("h", "hh", lambda a, b: bits16(f16(a) * f16(b))),
    "mul.bf16x2": ("r", "rr", both_halves(lambda a, b: float(a) * float(b), bf16, bits_bf16)),
    "setp.eq.ftz.f32": ("p", "rr", lambda a, b: int(flushed(f32(a)) == flushed(f32(b)))),
    "setp.equ.f32": ("p", "rr", lambda a, b: int(not (f32(a) < f32(b) or f32(a) > f32(b)))),
    "setp.ltu.f32": ("p", "rr", lambda a, b: int(not f32(a) >= f32(b))),
    "setp.leu.f32": ("p", "rr", lambda a, b: int(not f32(a) > f32(b))),
    "setp.gtu.f32": ("p", "rr", lambda a, b: int(not f32(a) <= f32(b))),
    "setp.gt.f16": ("p", "hh", lambda a, b: int(f16(a) > f16(b))),
    "setp.le.bf16": ("p", "hh", lambda a, b: int(bf16(a) <= bf16(b))),
    "cvt.rni.s32.f32": ("r", "r", lambda a: integral(f32(a), round, 31)),
    "cvt.rmi.s32.f32": ("r", "r", lambda a: integral(f32(a), math.floor, 31)),
    "cvt.rpi.s64.f32": ("l", "r", lambda a: integral(f32(a), math.ceil, 63)),
    "cvt.rzi.u32.f32": ("r", "r", lambda a: unsigned(f32(a), 32)),
    "cvt.rmi.f32.f32": ("r", "r", lambda a: bits32(np.floor(f32(a)))),
    "cvt.rpi.f32.f32": ("r", "r", lambda a: bits32(np.ceil(f32(a)))),
    "cvt.rzi.ftz.f32.f32": ("r", "r", lambda a: bits32(np.trunc(flushed(f32(a))))),
    "cvt.sat.f32.f32": ("r", "r", lambda a: bits32(min(max(f32(a), 0), 1) + 0.0 if not np.isnan(f32(a)) else 0)),
    "sub.f32": ("r", "rr", lambda a, b: bits32(f32(a) - f32(b))),
    "mul.f32": ("r", "rr", lambda a, b: bits32(f32(a) * f32(b))),
    "mul.ftz.f32": ("r", "rr", lambda a, b: bits32(flushed(flushed(f32(a)) * flushed(f32(b))))),
    "fma.rn.f32": ("r", "rrr", lambda *bits: bits32(fused(*map(f32, bits)))),
    "div.full.f32": ("r", "rr", lambda a, b: bits32(f32(a) / f32(b))),
    "min.f32": ("r", "rr", lambda a, b: bits32(np.fmin(f32(a), f32(b)))),
    "max.f32": ("r", "rr", lambda a, b: bits32(np.fmax(f32(a), f32(b)))),
    "max.NaN.f32": ("r", "rr", lambda a, b: bits32(np.maximum(f32(a), f32(b)))),
    "neg.f32": ("r", "r", lambda a: bits32(-f32(a))),
    "abs.f32": ("r", "r", lambda a: bits32(abs(f32(a)))),
    "ex2.approx.ftz.f32": ("r", "r", lambda a: bits32(flushed(np.exp2(flushed(f32(a)))))),
    "lg2.approx.ftz.f32": ("r", "r", lambda a: bits32(np.log2(flushed(f32(a))))),
    "rcp.approx.ftz.f32": ("r", "r", lambda a: bits32(flushed(np.float32(1) / flushed(f32(a))))),
    "sqrt.rn.f32": ("r", "r", lambda a: bits32(np.sqrt(f32(a)))),
    "rsqrt.approx.f32": ("r", "r", lambda a: bits32(np.float32(1) / np.sqrt(f32(a)))),
    "setp.lt.f32": ("p", "rr", lambda a, b: int(f32(a) < f32(b))),
    "setp.ne.f32": ("p", "rr", lambda a, b: int(f32(a) != f32(b) and not np.isnan(f32(a) + f32(b)))),
    "setp.neu.f32": ("p", "rr", lambda a, b: int(f32(a) != f32(b))),
    "setp.geu.f32": ("p", "rr", lambda a, b: int(not f32(a) < f32(b))),
    "setp.num.f32": ("p", "rr", lambda a, b: int(not (np.isnan(f32(a)) or np.isnan(f32(b))))),
    "setp.nan.f32": ("p", "rr", lambda a, b: int(np.isnan(f32(a)) or np.isnan(f32(b)))),
    "cvt.rzi.s32.f32": ("r", "r", lambda a: integral(f32(a), math.trunc, 31)),
    "cvt.rn.bf16.f32": ("h", "r", lambda a: bits_bf16(f32(a))),
    "cvt.rn.f16.f32": ("h", "r", lambda a: bits16(f32(a))),
    "cvt.rn.bf16x2.f32": ("r", "rr", lambda a, b: bits_bf16(f32(a)) << 16 | bits_bf16(f32(b))),
    "cvt.rn.f16x2.f32": ("r", "rr", lambda a, b: bits16(f32(a)) << 16 | bits16(f32(b))),
    "cvt.rna.tf32.f32": ("r", "r", lambda a: (a + 0x1000) & 0xFFFFE000 if math.isfinite(f32(a)) else a),
    "cvt.f32.bf16": ("r", "h", lambda a: bits32(bf16(a))),
    "cvt.f32.f16": ("r", "h", lambda a: bits32(f16(a))),
    "add.f16": ("h", "hh", lambda a, b: bits16(f16(a) + f16(b))),
    "add.bf16": ("h", "hh", lambda a, b: bits_bf16(float(bf16(a)) + float(bf16(b)))),
    "add.rn.f32.bf16": ("r", "hr", lambda a, c: bits32(bf16(a) + f32(c))),
    "sub.f32.f16": ("r", "hr", lambda a, c: bits32(np.float32(f16(a)) - f32(c))),
    "fma.rn.f32.f16": ("r", "hhr", lambda a, b, c: bits32(float(f16(a)) * float(f16(b)) + float(f32(c)))),
    "add.f16x2": ("r", "rr", both_halves(lambda a, b: a + b, f16, bits16)),
    "add.bf16x2": ("r", "rr", both_halves(lambda a, b: float(a) + float(b), bf16, bits_bf16)),
    "fma.rn.bf16": ("h", "hhh", lambda a, b, c: bits_bf16(float(bf16(a)) * float(bf16(b)) + float(bf16(c)))),
    "fma.rn.bf16x2": ("r", "rrr", both_halves(lambda a, b, c: float(a) * float(b) + float(c), bf16, bits_bf16)),
}
