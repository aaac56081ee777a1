"""Meaning of the instructions of one value, by the PTX ISA: opcode -> (target, sources, function of the operands'
bits).
"""

import functools
import math
import operator
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
    kept = min(length, max(bits - position, 0))
    field = value >> position & ((1 << kept) - 1)
    if signed and length and value >> min(position + length - 1, bits - 1) & 1:
        field |= (1 << bits) - (1 << kept)
    return field


def prmt(a, b, c):
    source, out = [(a | b << 32) >> 8 * k & 255 for k in range(8)], 0
    for k in range(4):
        pick = c >> 4 * k & 15
        byte = source[pick & 7]
        out |= (255 * (byte >> 7) if pick & 8 else byte) << 8 * k
    return out


def whole(function, read, write):
    """Return the function on bits. None: the result is undefined."""

    def on_bits(*bits):
        found = function(*map(read, bits))
        return None if found is None else write(found)

    return on_bits


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


#: type -> (letter of its registers, value of bits, bits of a value)
TYPES = {
    f"{prefix}{bits}": (letter, functools.partial(signed, bits=bits) if prefix == "s" else int, mask.__and__)
    for letter, bits, mask in (("h", 16, M16), ("r", 32, M32), ("l", 64, M64))
    for prefix in "bsu"
}
TYPES |= {"f32": ("r", f32, bits32), "f16": ("h", f16, bits16), "bf16": ("h", lambda v: float(bf16(v)), bits_bf16)}
TYPES["ftz.f32"] = ("r", lambda v: flushed(f32(v)), lambda v: bits32(flushed(np.float32(v))))


def each(opcode, kinds, operands, meaning, target=None):
    """Return the rows of an instruction that means the same for several types. target: "p", of a comparison."""
    rows = {}
    for kind in kinds.split():
        letter, read, write = TYPES[kind.removesuffix("x2")]
        if kind.endswith("x2"):
            letter, result = "r", both_halves(meaning, read, write)
        else:
            result = whole(meaning, read, int if target else write)
        rows[f"{opcode}.{kind}"] = (target or letter, operands * letter, result)
    return rows


INTEGER = {
    **each("add", "s16 s32 s64 s16x2", 2, operator.add),
    **each("sub", "s16 s32 s64", 2, operator.sub),
    **each("mul.lo", "s16 s32 s64", 2, operator.mul),
    **each("mul.hi", "s32 u32", 2, lambda a, b: a * b >> 32),
    **each("mul.hi", "s64 u64", 2, lambda a, b: a * b >> 64),
    **each("mad.lo", "s32 s64", 3, lambda a, b, c: a * b + c),
    **each("div", "s32 u32 s64", 2, lambda a, b: quotient(a, b) if b else None),
    **each("rem", "s32 u32 s64", 2, lambda a, b: a - b * quotient(a, b) if b else None),
    **each("min", "s32 u32 s64 s16x2", 2, min),
    **each("max", "s32 u32 s64 u16x2", 2, max),
    **each("min.relu", "s32", 2, lambda a, b: max(min(a, b), 0)),
    **each("max.relu", "s32", 2, lambda a, b: max(a, b, 0)),
    **each("neg", "s32 s64", 1, operator.neg),
    **each("abs", "s32 s64", 1, abs),
    **each("and", "b32 b64", 2, operator.and_),
    **each("or", "b16 b32", 2, operator.or_),
    **each("xor", "b32 b64", 2, operator.xor),
    **each("not", "b32 b64", 1, operator.invert),
    **each("mov", "b32", 1, int),
    **each("setp.eq", "b16", 2, operator.eq, "p"),
    **each("setp.lt", "s32 u32", 2, operator.lt, "p"),
    **each("setp.gt", "s64", 2, operator.gt, "p"),
    **each("setp.lo", "u32", 2, operator.lt, "p"),
    **each("setp.ls", "u32", 2, operator.le, "p"),
    **each("setp.hi", "u32", 2, operator.gt, "p"),
    **each("setp.hs", "u32", 2, operator.ge, "p"),
    "mul.wide.s32": ("l", "rr", lambda a, b: s32(a) * s32(b) & M64),
    "mul.wide.u32": ("l", "rr", lambda a, b: a * b),
    "mad.wide.s32": ("l", "rrl", lambda a, b, c: (s32(a) * s32(b) + c) & M64),
    "mad.wide.u32": ("l", "rrl", lambda a, b, c: (a * b + c) & M64),
    "and.pred": ("p", "pp", lambda a, b: int(bool(a & M32) and bool(b & M32))),
    "or.pred": ("p", "pp", lambda a, b: int(bool(a & M32) or bool(b & M32))),
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
    "xor.pred": ("p", "pp", lambda a, b: int(bool(a & M32) != bool(b & M32))),
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
    **each("add", "f32 ftz.f32 f16 bf16 f16x2 bf16x2", 2, operator.add),
    **each("sub", "f32 ftz.f32 bf16x2", 2, operator.sub),
    **each("mul", "f32 ftz.f32 f16 bf16x2", 2, operator.mul),
    **each("fma.rn", "f32 ftz.f32 bf16 bf16x2", 3, lambda a, b, c: np.float64(a) * np.float64(b) + np.float64(c)),
    **each("div.full", "f32", 2, operator.truediv),
    **each("min", "f32 ftz.f32", 2, np.fmin),
    **each("max", "f32", 2, np.fmax),
    **each("min", "f16", 2, least),
    **each("max", "bf16 f16x2", 2, most),
    **each("min.NaN", "f32", 2, np.minimum),
    **each("max.NaN", "f32", 2, np.maximum),
    **each("neg", "f32 ftz.f32 bf16", 1, operator.neg),
    **each("abs", "f32 ftz.f32 f16x2", 1, abs),
    **each("ex2.approx", "f32 ftz.f32", 1, np.exp2),
    **each("lg2.approx", "f32 ftz.f32", 1, np.log2),
    **each("rcp.rn", "f32", 1, lambda a: np.float32(1) / a),
    **each("rcp.approx", "ftz.f32", 1, lambda a: np.float32(1) / a),
    **each("sqrt.rn", "f32", 1, np.sqrt),
    **each("sqrt.approx", "ftz.f32", 1, np.sqrt),
    **each("rsqrt.approx", "f32 ftz.f32", 1, lambda a: np.float32(1) / np.sqrt(a)),
    **each("sin.approx", "f32", 1, np.sin),
    **each("cos.approx", "ftz.f32", 1, np.cos),
    **each("tanh.approx", "f32", 1, np.tanh),
    **each("setp.eq", "ftz.f32", 2, operator.eq, "p"),
    **each("setp.ne", "f32", 2, lambda a, b: a < b or a > b, "p"),
    **each("setp.lt", "f32", 2, operator.lt, "p"),
    **each("setp.le", "bf16", 2, operator.le, "p"),
    **each("setp.gt", "f16", 2, operator.gt, "p"),
    **each("setp.equ", "f32", 2, lambda a, b: not (a < b or a > b), "p"),
    **each("setp.neu", "f32", 2, operator.ne, "p"),
    **each("setp.ltu", "f32", 2, lambda a, b: not a >= b, "p"),
    **each("setp.leu", "f32", 2, lambda a, b: not a > b, "p"),
    **each("setp.gtu", "f32", 2, lambda a, b: not a <= b, "p"),
    **each("setp.geu", "f32", 2, lambda a, b: not a < b, "p"),
    **each("setp.num", "f32", 2, lambda a, b: a == a and b == b, "p"),
    **each("setp.nan", "f32", 2, lambda a, b: a != a or b != b, "p"),
    "add.rz.f32": ("r", "rr", lambda a, b: directed(f32(a), 1.0, f32(b), direction=0)),
    "sub.rm.f32": ("r", "rr", lambda a, b: directed(f32(a), 1.0, -f32(b), direction=-1)),
    "mul.rp.f32": ("r", "rr", lambda a, b: directed(f32(a), f32(b), 0.0, direction=1)),
    "fma.rm.f32": ("r", "rrr", lambda a, b, c: directed(f32(a), f32(b), f32(c), direction=-1)),
    "copysign.f32": ("r", "rr", lambda a, b: b & 0x7FFFFFFF | a & 0x80000000),
    "max.xorsign.abs.f32": ("r", "rr", lambda a, b: bits32(np.fmax(abs(f32(a)), abs(f32(b)))) | (a ^ b) & 1 << 31),
    "min.xorsign.abs.f32": ("r", "rr", lambda a, b: bits32(np.fmin(abs(f32(a)), abs(f32(b)))) | (a ^ b) & 1 << 31),
    "cvt.rni.s32.f32": ("r", "r", lambda a: integral(f32(a), round, 31)),
    "cvt.rmi.s32.f32": ("r", "r", lambda a: integral(f32(a), math.floor, 31)),
    "cvt.rpi.s64.f32": ("l", "r", lambda a: integral(f32(a), math.ceil, 63)),
    "cvt.rzi.u32.f32": ("r", "r", lambda a: unsigned(f32(a), 32)),
    "cvt.rmi.f32.f32": ("r", "r", lambda a: bits32(np.floor(f32(a)))),
    "cvt.rpi.f32.f32": ("r", "r", lambda a: bits32(np.ceil(f32(a)))),
    "cvt.rzi.ftz.f32.f32": ("r", "r", lambda a: bits32(np.trunc(flushed(f32(a))))),
    "cvt.sat.f32.f32": ("r", "r", lambda a: bits32(min(max(f32(a), 0), 1) + 0.0 if not np.isnan(f32(a)) else 0)),
    "cvt.rzi.s32.f32": ("r", "r", lambda a: integral(f32(a), math.trunc, 31)),
    "cvt.rn.bf16.f32": ("h", "r", lambda a: bits_bf16(f32(a))),
    "cvt.rn.f16.f32": ("h", "r", lambda a: bits16(f32(a))),
    "cvt.rn.bf16x2.f32": ("r", "rr", lambda a, b: bits_bf16(f32(a)) << 16 | bits_bf16(f32(b))),
    "cvt.rn.f16x2.f32": ("r", "rr", lambda a, b: bits16(f32(a)) << 16 | bits16(f32(b))),
    "cvt.rna.tf32.f32": ("r", "r", lambda a: (a + 0x1000) & 0xFFFFE000 if math.isfinite(f32(a)) else a),
    "cvt.f32.bf16": ("r", "h", lambda a: bits32(bf16(a))),
    "cvt.f32.f16": ("r", "h", lambda a: bits32(f16(a))),
    "add.rn.f32.bf16": ("r", "hr", lambda a, c: bits32(bf16(a) + f32(c))),
    "sub.f32.f16": ("r", "hr", lambda a, c: bits32(np.float32(f16(a)) - f32(c))),
    "fma.rn.f32.f16": ("r", "hhr", lambda a, b, c: bits32(float(f16(a)) * float(f16(b)) + float(f32(c)))),
}
