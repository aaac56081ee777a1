"""Every instruction of one value against the PTX ISA, on random and special values."""

import importlib
import math
import random

import numpy as np
import pytest
import torch

import probe
from meanings import FLOAT, INTEGER, M16, M32, M64, bf16, bits16, bits32, bits_bf16, f16, f32
from ptx_emulator import assemble
from ptx_emulator.parse import PtxError

_AWKWARD = [0, 1, 2, 31, 32, 33, 63, 64, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x8000, 0x7FFF, 0xFFFF]
_AWKWARD_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-40, -1e-42, 3e38, math.inf, -math.inf, math.nan]
_AWKWARD_FLOATS += [65504.0, 1e-7, 2.5, 3.5, 1.00390625]
ROUNDS = 8  # warps of values for each instruction


def values(sources: str, floating: bool, seed: int) -> np.ndarray:
    """Return [threads, len(sources)]: random values of all sizes and special ones."""
    draw = random.Random(seed)

    def pick(letter):
        size = probe.KINDS[letter][1]
        if floating:
            v = draw.choice(_AWKWARD_FLOATS) if draw.random() < 0.3 else draw.gauss(0, 1) * 2.0 ** draw.randint(-20, 20)
            raw = bits32(v)
            return raw if size > 2 else draw.choice([bits16(draw.gauss(0, 9)), bits_bf16(draw.gauss(0, 9)), 0, 0x8000])
        v = draw.choice(_AWKWARD) if draw.random() < 0.4 else draw.getrandbits(draw.choice([3, 6, 16, 31, 32, 64]))
        return v & ((1 << 8 * size) - 1)

    return np.array([[pick(letter) for letter in sources] for _ in range(probe.THREADS * ROUNDS)], np.uint64)


@pytest.mark.parametrize("opcode", [*INTEGER, *FLOAT])
def test_one_value(opcode):
    floating = opcode in FLOAT
    target, sources, meaning = (FLOAT if floating else INTEGER)[opcode]
    operands = values(sources, floating, seed=len(opcode))
    got = probe.one(opcode, target, sources, operands)
    checked = 0
    approximate = opcode.startswith(("ex2", "lg2", "rsqrt", "rcp", "sin", "cos", "tanh"))
    with np.errstate(all="ignore"):
        for row, result in zip(operands, got, strict=True):
            want = meaning(*(int(v) for v in row))
            if want is None:
                continue  # undefined
            checked += 1
            message = f"{opcode} of {[hex(int(v)) for v in row]}: got {int(result):#x}, want {want:#x}"
            same_nan = floating and target != "p" and _nan(want, opcode, target) and _nan(int(result), opcode, target)
            near = approximate and abs(int(result) - want) <= 2
            assert same_nan or near or int(result) == want, message
    assert checked > len(operands) // 2


def _nan(raw: int, opcode: str, target: str) -> bool:
    half = bf16 if "bf16" in opcode else f16
    if "x2" in opcode:
        return bool(np.isnan(half(raw & M16)) or np.isnan(half(raw >> 16)))
    return bool(np.isnan(half(raw) if target == "h" else f32(raw)))


#: several instructions: (letter of the operands, text, results from the operands)
SEVERAL = {
    "halves and pairs of registers": (
        "r",
        """
	ld.global.b32 %r1, [%l33];
	mov.b32 {%h1, %h2}, %r1;
	mov.b32 %r2, {%h2, %h1};
	mov.b64 %l1, {%r1, %r2};
	mov.b32 {_, %h3}, %r1;
	cvt.u32.u16 %r3, %h3;
	st.global.b64 [%l34], %l1;
	st.global.b32 [%l34+8], %r3;
""",
        lambda v, *_: (v | v >> 16 << 32 | (v & M16) << 48, v >> 16),
    ),
    "lop3 and bfi": (
        "r",
        """
	ld.global.b32 %r1, [%l33];
	ld.global.b32 %r2, [%l33+8];
	ld.global.b32 %r3, [%l33+16];
	lop3.b32 %r4, %r1, %r2, %r3, 0xca;
	bfi.b32 %r5, %r1, %r2, 5, 9;
	st.global.b32 [%l34], %r4;
	st.global.b32 [%l34+8], %r5;
""",
        lambda a, b, c, *_: ((a & b) | (~a & M32 & c), b & ~(0x1FF << 5) | (a & 0x1FF) << 5),  # 0xca: a ? b : c
    ),
    "carries: two words as one of 64 bits": (
        "l",
        """
	ld.global.v2.b32 {%r1, %r2}, [%l33];
	ld.global.v2.b32 {%r3, %r4}, [%l33+8];
	add.cc.u32 %r5, %r1, %r3;
	addc.u32 %r6, %r2, %r4;
	st.global.v2.b32 [%l34], {%r5, %r6};
	sub.cc.u32 %r5, %r1, %r3;
	subc.u32 %r6, %r2, %r4;
	st.global.v2.b32 [%l34+8], {%r5, %r6};
	mad.lo.cc.u32 %r5, %r1, %r3, %r2;
	madc.hi.u32 %r6, %r1, %r3, 0;
	st.global.v2.b32 [%l34+16], {%r5, %r6};
""",
        lambda x, y, *_: ((x + y) & M64, (x - y) & M64, (x & M32) * (y & M32) + (x >> 32)),
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_instructions(name):
    letter, body, meaning = SEVERAL[name]
    operands = values(8 * letter, False, len(name))[: probe.THREADS]
    for row, got in zip(operands.tolist(), probe.run(body, operands).tolist(), strict=True):
        want = meaning(*row)
        assert tuple(got[: len(want)]) == want, row


def test_a_bfloat16_is_rounded_once():
    """Next to a tie, a float in between would be the tie."""
    values = [1 + odd * 2.0**-8 + beside for odd in (1, 3) for beside in (-(2.0**-40), 0, 2.0**-40)]
    got = probe.one("cvt.rn.bf16.f64", "h", "l", np.array(values).view(np.uint64)[:, None])
    assert got.tolist() == [0x3F80, 0x3F80, 0x3F81, 0x3F81, 0x3F82, 0x3F82]


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_floats_of_eight_bits(kind, dtype):
    """Every value in both directions; a value that is too large becomes the largest."""
    body = f"""
	ld.global.v2.b32 {{%r1, %r2}}, [%l33];
	cvt.rn.satfinite.{kind}x2.f32 %h1, %r1, %r2;
	cvt.rn.f16x2.{kind}x2 %r3, %h1;
	cvt.u32.u16 %r4, %h1;
	st.global.v2.b32 [%l34], {{%r3, %r4}};
"""
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).float()
    every = torch.cat([every, torch.randn(512, generator=torch.Generator().manual_seed(0)) * 50])
    pairs = torch.stack([every, every.flip(0)], 1)
    operands = np.zeros((len(pairs), 8), np.uint64)
    operands[:, 0] = pairs.contiguous().numpy().view(np.uint64)[:, 0]
    out = probe.run(body, operands, threads=len(pairs))[:, 0]
    most = torch.finfo(dtype).max
    want = pairs.clamp(-most, most).to(dtype)
    codes = torch.from_numpy((out >> np.uint64(32)).astype(np.int64))
    halves = torch.from_numpy(out.astype(np.uint32).view(np.float16).reshape(-1, 2).copy()).float()
    for column, shift in ((0, 8), (1, 0)):
        known = ~pairs[:, column].isnan()
        got = ((codes >> shift) & 255).to(torch.uint8)
        assert torch.equal(got[known], want[:, column].view(torch.uint8)[known])
        assert torch.equal(halves[known, 1 - column], want[known, column].float())


@pytest.mark.parametrize(
    "text",
    [
        "ex2.approx.f64 %l1, %l2;",
        "mov.u32 %r1, %clock;",
        "add.sat.s32 %r1, %r2, %r3;",
        "cvt.rn.e4m3x2.f32 %h1, %r2, %r3;",
        "mma.sync.aligned.m16n8k32.row.col.s32.s4.s4.s32 {%r1}, {%r2}, {%r3}, {%r1};",
        "bar.arrive 1;",
        "cvta.shared.u64 %l1, %l2;",
        "setp.lt.f16x2 %p1, %r1, %r2;",
        "setp.lt.and.s32 %p1, %r1, %r2, %p2;",
        "setp.lt.s32 %p1|%p2, %r1, %r2;",
        "cvt.rz.bf16x2.f32 %r1, %r2, %r3;",
        "atom.global.min.f32 %r1, [%l31], %r2;",
        "atom.global.add.sat.u32 %r1, [%l31], %r2;",
        "atom.shared::cluster.min.f32 %r1, [%l31], %r2;",
        "tcgen05.mma.cta_group::1.kind::i8 [%r1], %l1, %l2, %r2, %p1;",
        "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r1}, [%r2];",
        "tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {%r1, %r2}, [%r2];",
        "tcgen05.cp.cta_group::1.128x256b [%r1], %l1;",
        "mbarrier.try_wait.parity.shared::cluster.b64 %p1, [%r1], 0;",
        "elect.sync %r1|%p1, 15;",
        "mapa.u64 %l1, %l2, %r1;",
        ".reg .b128 %rq<2>;",  # of clusterlaunchcontrol
        "barrier.cluster.sync;",
        "max.s32 %r1, %r2, %r3, %r4;",
        "redux.sync.add.f32 %r1, %r2, -1;",
    ],
)
def test_unknown_forms_are_refused(text):
    with pytest.raises(PtxError, match="not emulated"):
        probe.run(f"\t{text}")


def test_every_opcode_has_a_test():
    """By root: instructions of one value are above, the others in neighbouring modules."""
    names = ("atomics", "clusters", "memory", "messages", "products", "tensor_map", "tensor_memory", "warps")
    covered = [importlib.import_module(f"test_{name}").COVERED for name in names]
    here = {opcode.split(".")[0] for opcode in [*INTEGER, *FLOAT]} | {"lop3", "bfi", "addc", "subc", "madc"}
    assert set(assemble.FORMS) - here == set().union(*covered)
