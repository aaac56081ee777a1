"""Tensor-core products against NumPy, by the PTX ISA's fragment layouts; reports of a misused wgmma."""

import numpy as np
import pytest
import torch

import probe
from ptx_emulator.program import EmulationError

COVERED = {"mma", "wgmma"}

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}


def matrices(kind, m, n, k, seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(m, k, generator=g).to(TYPES[kind]), torch.randn(k, n, generator=g).to(TYPES[kind])
    return a, b


def raw(t):
    half = t.element_size() == 2
    return t.view(torch.int16 if half else torch.int32).numpy().view(np.uint16 if half else np.uint32)


def exact(kind, t):
    """Return the values that a product reads: tf32 drops 13 bits."""
    return torch.from_numpy((raw(t) & 0xFFFFE000).view(np.float32)).double() if kind == "tf32" else t.double()


def pairs(bits, row, column):
    return int(bits[row, column]) | int(bits[row, column + 1]) << 16


def a_fragment(kind, a, lane, registers):
    bits, row, t = raw(a), lane // 4, lane % 4
    if kind == "tf32":
        return [int(bits[row + 8 * (r & 1), t + 4 * (r >> 1)]) for r in range(registers)]
    return [pairs(bits, row + 8 * (r & 1), 2 * t + 8 * (r >> 1)) for r in range(registers)]


def b_fragment(kind, b, lane, registers):
    bits, column, t = raw(b.t().contiguous()), lane // 4, lane % 4
    if kind == "tf32":
        return [int(bits[column, t + 4 * r]) for r in range(registers)]
    return [pairs(bits, column, 2 * t + 8 * r) for r in range(registers)]


@pytest.mark.parametrize(("kind", "k"), [("f16", 16), ("bf16", 16), ("f16", 8), ("bf16", 8), ("tf32", 8)])
def test_mma(kind, k):
    a, b = matrices(kind, 16, 8, k)
    na = k // 2 if kind == "tf32" else k // 4
    names = [f"%r{10 + r}" for r in range(na + na // 2)]
    values = np.zeros((32, 8), np.uint64)
    words = values.view(np.uint32).reshape(32, 16)
    for lane in range(32):
        words[lane, : len(names)] = a_fragment(kind, a, lane, na) + b_fragment(kind, b, lane, na // 2)
    loads = "\n".join(f"\tld.global.b32 {name}, [%l33+{4 * r}];" for r, name in enumerate(names))
    body = f"""
{loads}
	mov.b32 %r1, 0f3F800000;
	mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{ %r2, %r3, %r4, %r5 }},
		{{ {", ".join(names[:na])} }}, {{ {", ".join(names[na:])} }}, {{ %r1, %r1, %r1, %r1 }};
	st.global.v4.b32 [%l34], {{%r2, %r3, %r4, %r5}};
"""
    out = probe.run(body, values).view(np.float32).reshape(32, 16)
    want = 1 + exact(kind, a) @ exact(kind, b)
    for lane in range(32):
        for r in range(4):
            assert abs(out[lane, r] - want[lane // 4 + 8 * (r >> 1), 2 * (lane % 4) + (r & 1)]) < 1e-4


OPERAND = 8192  # bytes of shared memory for each operand: 64 rows of 128


def place(matrix, swizzle, transposed):
    """Return (bytes, leading, stride) of a matrix [rows, k] in the layout of a descriptor with that swizzle.

    PTX ISA, "Strides" and "Swizzling": rows in groups of 8 by k; `transposed`: k in groups of 8 by rows. The pattern
    permutes the 16-byte pieces of each row of a group.
    """
    bits = raw(matrix)
    rows, k = bits.shape
    size = bits.dtype.itemsize
    out = np.zeros(OPERAND, np.uint8)
    contiguous = swizzle // size  # adjacent elements
    outer, inner = (k, rows) if transposed else (rows, k)
    stride = swizzle * 8  # to the next 8 of the outer direction
    leading = stride * (outer // 8)  # to the next piece of the inner direction
    for o in range(outer):
        for i in range(inner):
            piece, within = divmod(i, contiguous)
            at = piece * leading + o // 8 * stride + o % 8 * swizzle + within * size
            at ^= ((at >> 7) & (swizzle // 16 - 1)) << 4
            value = bits[i, o] if transposed else bits[o, i]
            out[at : at + size] = np.frombuffer(value.tobytes(), np.uint8)
    return out, leading, stride


#: each thread copies its 128 bytes of the operands; %r7 is their address
TO_SHARED = "\tmov.b32 %r7, smem;\n\tshl.b32 %r6, %r300, 7;\n\tadd.s32 %r7, %r7, %r6;\n"
for at in range(0, 128, 16):
    TO_SHARED += f"\tld.global.v4.b32 {{%r11, %r12, %r13, %r14}}, [%l33+{at}];\n"
    TO_SHARED += f"\tst.shared.v4.b32 [%r7+{at}], {{%r11, %r12, %r13, %r14}};\n"


def outputs(first: int, count: int) -> str:
    """Return the stores of registers to a thread's output."""
    return "\n".join(f"\tst.global.b32 [%l34+{4 * r}], %r{first + r};" for r in range(count))


def descriptor(start, leading, stride, swizzle, transposed):
    if swizzle == 16 and transposed:
        leading, stride = stride, leading  # without a swizzle the two swap roles
    mode = {16: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    return (start >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | mode << 62


def wgmma(
    kind,
    n,
    k,
    swizzle,
    *,
    a_transposed=False,
    b_transposed=False,
    a_in_registers=False,
    adds="%p1",
    fence="fence.proxy.async.shared::cta;",
    barrier="bar.sync 0;",
    reg_fence="wgmma.fence.sync.aligned;",
    wait="wgmma.wait_group.sync.aligned 0;",
    after="",
    before="",
):
    """Return [64, n] of a wgmma whose operands 128 threads write into shared memory."""
    a, b = matrices(kind, 64, n, k)
    a_bytes, a_leading, a_stride = place(a, swizzle, a_transposed)
    b_bytes, b_leading, b_stride = place(b.t().contiguous(), swizzle, b_transposed)
    both = np.concatenate([a_bytes, b_bytes])
    values = both.view(np.uint64).reshape(128, 16)
    smem = 1024
    desc_a = descriptor(smem, a_leading, a_stride, swizzle, a_transposed)
    desc_b = descriptor(smem + OPERAND, b_leading, b_stride, swizzle, b_transposed)
    d = [f"%r{50 + r}" for r in range(n // 2)]
    of_a = f", {int(a_transposed)}" if not a_in_registers else ""
    flags = "" if kind == "tf32" else f"{of_a}, {int(b_transposed)}"
    operand, fragments = "%l1", ""
    if a_in_registers:  # behind the operands, as each thread's fragment
        operand = "{%r40, %r41, %r42, %r43}"
        fragments = "\tld.global.v4.b32 {%r40, %r41, %r42, %r43}, [%l33+128];\n"
        words = np.zeros((128, 18), np.uint64)
        words[:, :16] = values
        for thread in range(128):
            rows = a[16 * (thread // 32) :]
            words.view(np.uint32)[thread, 32:36] = a_fragment(kind, rows, thread % 32, 4)
        values = words
    zeros = "\n".join(f"\tmov.b32 {name}, 0f3F800000;" for name in d)
    body = f"""
	mov.b32 %r5, smem;
{TO_SHARED}
{fragments}
{zeros}
	mov.b64 %l1, {desc_a};
	mov.b64 %l2, {desc_b};
	mov.pred %p1, -1;
	{fence}
	{barrier}
	{reg_fence}
	{before}
	wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind} {{{",".join(d)}}}, {operand}, %l2, {adds}, 1, 1{flags};
	wgmma.commit_group.sync.aligned;
	{after}
	{wait}
{outputs(50, n // 2)}
"""
    out = probe.run(body, values, threads=128, shared_bytes=2 * OPERAND).view(np.float32).reshape(128, -1)[:, : n // 2]
    want = (1 + exact(kind, a) @ exact(kind, b)).numpy()
    got = np.zeros((64, n))
    for t in range(128):
        for r in range(n // 2):
            got[16 * (t // 32) + t % 32 // 4 + 8 * (r >> 1 & 1), 8 * (r // 4) + 2 * (t % 4) + (r & 1)] = out[t, r]
    return got, want


KINDS = (("f16", 16), ("bf16", 16), ("tf32", 8))
#: types, columns, depth and options; of the latter Triton uses a in registers and b transposed
WGMMAS = [
    *((kind, 16, k, {"a_in_registers": from_registers}) for from_registers in (False, True) for kind, k in KINDS),
    *(("bf16", n, 16, {"b_transposed": True}) for n in (8, 16, 32)),
    ("bf16", 16, 16, {"a_transposed": True}),
    *(("f16", 16, 16, {"adds": adds}) for adds in "01"),
]


@pytest.mark.parametrize("swizzle", [16, 32, 64, 128])
@pytest.mark.parametrize(("kind", "n", "k", "options"), WGMMAS)
def test_wgmma(kind, n, k, options, swizzle):
    got, want = wgmma(kind, n, k, swizzle, **options)
    assert np.abs(got - (want - (options.get("adds") == "0"))).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(fence=""), "no fence.proxy.async made visible"),
        (dict(barrier=""), "race: a product reads what was written since the last barrier"),
        (dict(reg_fence="", before="add.f32 %r50, %r50, %r50;"), "an accumulator was written after the last wgmma.fe"),
        (dict(wait=""), "reads a register of a wgmma that was not waited for"),
        (dict(wait="wgmma.wait_group.sync.aligned 1;"), "reads a register of a wgmma that was not waited for"),
        (dict(after="mov.b32 %r50, 0;"), "writes a register of a wgmma that was not waited for"),
        (dict(after="st.shared.b32 [%r7], %r5;"), "writes shared memory that a product in flight reads"),
        (dict(before="add.f32 %r51, %r51, %r51;"), "an accumulator was written after the last wgmma.fence"),
        (dict(before="setp.lt.s32 %p1, %r300, 5;"), "a descriptor differs within its warpgroup"),
        (
            dict(before="add.s32 %r40, %r40, 0;", a_in_registers=True),
            "a register of A was written after the last wgmma",
        ),
        (dict(after="add.s32 %r40, %r40, 0;", a_in_registers=True), "a register of a wgmma that was not waited for"),
    ],
)
def test_what_is_reported_of_a_wgmma(change, message):
    with pytest.raises(EmulationError, match=message):
        wgmma("f16", 16, 16, 32, **change)


def two_products(last):
    """Two groups in flight; a wait for all but one releases the first; then `last`."""
    second = ",".join(f"%r{90 + r}" for r in range(8))
    flags = "%l1, %l2, 0, 1, 1, 0, 0;"
    after = f"""
	wgmma.wait_group.sync.aligned 1;
	wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {{{second}}}, {flags}
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 1;
	{last}
"""
    return wgmma("f16", 16, 16, 32, after=after, wait="")


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("add.f32 %r50, %r50, 0f00000000;", "ends with a wgmma that was not waited for"),
        ("add.f32 %r90, %r90, %r90;", "a register of a wgmma that was not waited for"),
        ("st.shared.b32 [%r7], %r5;", "writes shared memory that a product in flight reads"),
    ],
)
def test_a_wait_that_leaves_a_group_in_flight_keeps_what_it_holds(last, message):
    with pytest.raises(EmulationError, match=message):
        two_products(last)


def test_a_wait_that_leaves_a_group_in_flight_releases_those_before_it_and_a_wait_for_all_releases_several():
    got, want = two_products("add.f32 %r50, %r50, 0f00000000;\n\twgmma.wait_group.sync.aligned 0;")
    assert np.abs(got - want).max() < 1e-4
    released = "add.f32 %r90, %r90, %r90;\n\tbar.sync 0;\n\tst.shared.b32 [%r7], %r5;"
    two_products(f"wgmma.wait_group.sync.aligned 0;\n\t{released}")
