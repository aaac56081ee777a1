"""Features of sm_100 by the PTX ISA: tensor memory, its products, mbarriers, pairs of float32; reports of missing
waits.
"""

import re

import numpy as np
import pytest

import probe
from ptx_emulator.program import EmulationError
from test_products import OPERAND, TO_SHARED, descriptor, exact, matrices, outputs, place, raw

COVERED = {"elect", "mbarrier", "tcgen05"}

WARPS = 4
#: after the operands: the address from tcgen05.alloc, an mbarrier
SLOT, MBARRIER = 2 * OPERAND, 2 * OPERAND + 16
#: %r2: the first column; %r3: the address of this warp's lanes; %p9: warp 0; %p8: one thread of it
ALLOCATED = f"""
	mov.b32 %r200, smem;
	add.s32 %r201, %r200, {SLOT};
	add.s32 %r202, %r200, {MBARRIER};
	shr.u32 %r203, %r300, 5;
	setp.eq.u32 %p9, %r203, 0;
	setp.eq.u32 %p8, %r300, 0;
	@%p9 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r201], 64;
	@%p9 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
	bar.sync 0;
	ld.shared.b32 %r2, [%r201];
	shl.b32 %r204, %r203, 21;
	add.s32 %r3, %r2, %r204;
"""
GIVEN_BACK = "\n\tbar.sync 0;\n\t@%p9 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;\n"


def run(body: str, values=None, row: int = 8) -> np.ndarray:
    values = np.zeros((32 * WARPS, row), np.uint64) if values is None else values
    return probe.run(ALLOCATED + body + GIVEN_BACK, values, threads=32 * WARPS, shared_bytes=2 * OPERAND + 64)


def names(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + k}" for k in range(count)) + "}"


#: shape -> (lane, column) in a warp's memory of register r of a lane
PLACES = {
    "32x32b.x8": (8, "", lambda lane, r: (lane, r)),
    "16x32bx2.x8": (8, ", 24", lambda lane, r: (lane % 16, r + (24 if lane >= 16 else 0))),
    "16x256b.x2": (8, "", lambda lane, r: (lane // 4 + 8 * (r // 2 % 2), r % 2 + 2 * (lane % 4) + 8 * (r // 4))),
}


@pytest.mark.parametrize("shape", PLACES)
@pytest.mark.parametrize("stores", [False, True])
def test_loads_and_stores_find_their_cells(shape, stores):
    """Every lane's 32 columns are written or read, one row a lane; the shape selects a part of them."""
    count, split, where = PLACES[shape]
    cells = np.arange(32 * WARPS * 32, dtype=np.uint32).reshape(32 * WARPS, 32)  # [lane, column]
    place, every, some = f"[%r3]{split}", names(20, 32), names(60, count)
    body = "\n".join(f"\tld.global.b32 %r{20 + c}, [%l33+{4 * c}];" for c in range(32))
    body += f"\n\ttcgen05.st.sync.aligned.32x32b.x32.b32 [%r3], {every};\n\ttcgen05.wait::st.sync.aligned;\n"
    if stores:
        for r in range(60, 60 + count):
            body += f"\tmul.lo.u32 %r{r}, %r300, 8;\n\tadd.s32 %r{r}, %r{r}, {100000 + r - 60};\n"
        body += f"\ttcgen05.st.sync.aligned.{shape}.b32 {place}, {some};\n\ttcgen05.wait::st.sync.aligned;\n"
        body += f"\ttcgen05.ld.sync.aligned.32x32b.x32.b32 {every}, [%r3];\n\ttcgen05.wait::ld.sync.aligned;\n"
    else:
        body += f"\ttcgen05.ld.sync.aligned.{shape}.b32 {some}, {place};\n\ttcgen05.wait::ld.sync.aligned;\n"
    body += outputs(20, 32) if stores else outputs(60, count)
    got = run(body, cells.view(np.uint64)).view(np.uint32)
    want = cells.copy() if stores else np.zeros_like(cells)
    for t in range(32 * WARPS):
        for r in range(count):
            lane, column = where(t % 32, r)
            if stores:
                want[t // 32 * 32 + lane, column] = 100000 + 8 * t + r
            else:
                want[t, r] = cells[t // 32 * 32 + lane, column]
    assert np.array_equal(got, want)


KINDS = {"f16": ("f16", 0), "bf16": ("f16", 1), "tf32": ("tf32", 2)}
COMMIT = "@%p8 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%r202];"
WAIT = """{ .reg .pred complete; waitLoop: mbarrier.try_wait.parity.shared::cta.b64 complete, [%r202], 0;
	@!complete bra.uni waitLoop; }"""


def mma(
    kind,
    rows,
    n=16,
    swizzle=128,
    a_in_tensor=False,
    b_transposed=False,
    twice=True,
    fence="fence.proxy.async.shared::cta;",
    barrier="bar.sync 0;",
    commit=COMMIT,
    wait=WAIT,
    after="",
    stored="tcgen05.wait::st.sync.aligned;",
    loaded="tcgen05.wait::ld.sync.aligned;",
):
    """Return (result, expected) of a @ b, [rows, n], accumulated twice: D in columns 0.. of tensor memory, A in columns
    32.. or in shared memory.
    """
    k = 8 if kind == "tf32" else 16
    a, b = matrices(kind, rows, n, k)
    a_bytes, a_leading, a_stride = place(a, swizzle, False)
    b_bytes, b_leading, b_stride = place(b.t().contiguous(), swizzle, b_transposed)
    words = np.zeros((128, 40), np.uint32)
    words[:, :32] = np.concatenate([a_bytes, b_bytes]).view(np.uint32).reshape(128, 32)
    lanes = np.arange(rows) if rows == 128 else np.arange(rows) // 16 * 32 + np.arange(rows) % 16
    words[lanes, 32:40] = np.ascontiguousarray(raw(a)).view(np.uint32).reshape(rows, 8)
    family, number = KINDS[kind]
    described = 1 << 4 | number << 7 | number << 10 | int(b_transposed) << 16 | n // 8 << 17 | rows // 16 << 24
    one = 1 << 46  # a constant of sm_100's descriptors
    first = "[%r8 + 32]" if a_in_tensor else "%l1"
    product = f"@%p8 tcgen05.mma.cta_group::1.kind::{family} [ %r8 + 0 ], {first}, %l2, %r9, "
    body = f"""
{TO_SHARED}
	ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%l33+128];
	ld.global.v4.b32 {{%r24, %r25, %r26, %r27}}, [%l33+144];
	tcgen05.st.sync.aligned.32x32b.x8.b32 [%r3 + 32], {names(20, 8)};
	{stored}
	@%p8 mbarrier.init.shared::cta.b64 [%r202], 1;
	mov.b32 %r8, %r2;
	mov.b32 %r9, {described};
	mov.b64 %l1, {descriptor(1024, a_leading, a_stride, swizzle, False) | one};
	mov.b64 %l2, {descriptor(1024 + OPERAND, b_leading, b_stride, swizzle, b_transposed) | one};
	mov.pred %p1, 0;
	mov.pred %p2, -1;
	{fence}
	{barrier}
	{product} %p1;
	{product + " %p2;" if twice else ""}
	{commit}
	{after}
	{wait}
	tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {names(40, n)}, [%r3];
	{loaded}
	bar.sync 0;
	@%p8 mbarrier.inval.shared::cta.b64 [%r202];
{outputs(40, n)}
"""
    got = run(body, words.view(np.uint64)).view(np.float32).reshape(128, 40)[lanes, :n]
    return got, (2 if twice else 1) * (exact(kind, a) @ exact(kind, b)).numpy()


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("a_in_tensor", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind, rows, a_in_tensor):
    got, want = mma(kind, rows, a_in_tensor=a_in_tensor, swizzle=16 if rows == 128 else 128 if kind != "tf32" else 32)
    assert np.abs(got - want).max() < 1e-4


@pytest.mark.parametrize("swizzle", [16, 32, 64, 128])
def test_products_with_b_transposed_and_one_alone(swizzle):
    got, want = mma("bf16", 64, n=32, swizzle=swizzle, b_transposed=True, twice=False)
    assert np.abs(got - want).max() < 1e-4


UNFINISHED = "reads tensor memory of a product that was not waited for"  # also of one issued after the commit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(fence=""), "no fence.proxy.async made visible"),
        (dict(barrier=""), "race: a product"),
        (dict(wait=""), UNFINISHED),
        (dict(after="@%p8 tcgen05.mma.cta_group::1.kind::f16 [%r8], %l1, %l2, %r9, %p2;"), UNFINISHED),
        (dict(commit=""), "deadlock: no warp can run"),
        (
            dict(wait=f"@%p9 bra $L1; bra.uni $L2; $L1: {WAIT} $L2:"),
            "race: reads tensor memory of a product that another warp",
        ),
        (dict(after="st.shared.b32 [%r7], %r5;"), "writes shared memory that a product in flight reads"),
        (dict(after="tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r20};"), "writes tensor memory of a product that"),
        (
            dict(after="bar.sync 0;", wait="@!%p9 bra $L2;\n" + WAIT + "\n$L2:\n\tst.shared.b32 [%r7], %r5;"),
            "race: writes what a product read that another warp waited for",
        ),
        (
            dict(after="tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3 + 32], {%r20};", a_in_tensor=True),
            "writes tensor memory of a product that was not waited for",
        ),
        (
            dict(after="bar.sync 0;\n\t@%p8 mbarrier.inval.shared::cta.b64 [%r202];"),
            "ends an mbarrier that a commit will arrive at",
        ),
        (dict(stored="", a_in_tensor=True), "a product reads tensor memory whose store was not waited for"),
        (dict(loaded=""), "gives back tensor memory whose load was not waited for"),
        (dict(after="mov.b32 %r3, %r2;"), "lanes of tensor memory that this warp has no access to"),
        (dict(after="add.s32 %r3, %r3, 60;"), "tensor memory that was not allocated"),
    ],
)
def test_what_is_reported_of_a_product_misused(change, message):
    with pytest.raises(EmulationError, match=re.escape(message)):
        mma("bf16", 64, **change)


def test_phases_of_an_mbarrier():
    """With two arrivals. By its parity the phase before the first is complete; inline blocks may share a label."""
    arrives = "@%p8 mbarrier.arrive.shared::cta.b64 _, [%r202];"
    waits = WAIT.replace(", 0;", ", {};")
    body = f"""
	@%p8 mbarrier.init.shared::cta.b64 [%r202], 2;
	bar.sync 0;
	{waits.replace("{};", "1;")}
	{arrives}
	{arrives}
	{waits.replace("{};", "0;")}
	@%p8 mbarrier.arrive.shared::cta.b64 _, [%r202], 2;
	{waits.replace("{};", "1;")}
	mov.b32 %r5, 7;
	st.global.b32 [%l34], %r5;
"""
    assert (run(body)[:, 0] == 7).all()
    with pytest.raises(EmulationError, match="deadlock: no warp can run"):
        run(body.replace("_, [%r202], 2;", "_, [%r202], 1;"))
    with pytest.raises(EmulationError, match="no mbarrier was initialised"):
        run(body.replace("@%p8 mbarrier.init", "@!%p9 mbarrier.inval").replace("[%r202], 2;\n\tbar", "[%r202];\n\tbar"))
    with pytest.raises(EmulationError, match="race: reads what another warp wrote"):
        run(body.replace("bar.sync 0;", ""))


def pairs_of_floats() -> np.ndarray:
    """Return uint64 [256, 8], each two float32: of all sizes, and special ones."""
    draw = np.random.default_rng(0)
    floats = (draw.normal(size=(256, 16)) * 2.0 ** draw.integers(-20, 20, (256, 16))).astype(np.float32)
    awkward = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, 1.0], np.float32)
    return np.where(draw.random((256, 16)) < 0.3, draw.choice(awkward, (256, 16)), floats).view(np.uint64)


def same(got: np.ndarray, want: np.ndarray) -> bool:
    nan = np.isnan(want)
    return bool((np.isnan(got) == nan).all() and (got.view(np.uint32) == want.view(np.uint32))[~nan].all())


@pytest.mark.parametrize("opcode", ["add", "sub", "mul", "fma.rn"])
def test_pairs_of_float32(opcode):
    values = pairs_of_floats()
    got = probe.one(f"{opcode}.f32x2", "l", "lll" if opcode == "fma.rn" else "ll", values[:, :3])
    a, b, c = (np.ascontiguousarray(values[:, k]).view(np.float32) for k in range(3))
    with np.errstate(all="ignore"):
        wide = a.astype(np.float64) * b + c  # rounded once, but for ties, of which there are none here
        want = {"add": a + b, "sub": a - b, "mul": a * b, "fma.rn": wide.astype(np.float32)}[opcode]
    assert same(np.ascontiguousarray(got).view(np.float32), want)


@pytest.mark.parametrize(("opcode", "meaning"), [("max.f32", np.fmax), ("min.f32", np.fmin)])
def test_of_three_and_of_a_warp(opcode, meaning):
    """A NaN is ignored if another operand is a number."""
    values = np.ascontiguousarray(pairs_of_floats()[:, :3] & 0xFFFFFFFF)
    a, b, c = (values[:, k].astype(np.uint32).view(np.float32) for k in range(3))
    zeros = (a == 0) | (b == 0) | (c == 0)  # the sign is undefined
    got = probe.one(opcode, "r", "rrr", values).astype(np.uint32).view(np.float32)
    assert same(got[~zeros], meaning(meaning(a, b), c)[~zeros])
    rows = np.zeros((256, 8), np.uint64)
    rows[:, 0] = values[:, 0]
    number = np.maximum if "max" in opcode else np.minimum
    for form, join in (("", meaning), (".abs", meaning), (".NaN", number), (".abs.NaN", number)):
        redux = f"redux.sync.{opcode.replace('.', form + '.')} %r2, %r1, -1;"
        reduced = probe.run(f"\tld.global.b32 %r1, [%l33];\n\t{redux}\n\tst.global.b32 [%l34], %r2;", rows, threads=256)
        given = (abs(a) if "abs" in form else a).reshape(8, 32)
        assert same(reduced[:, 0].astype(np.uint32).view(np.float32), np.repeat(join.reduce(given, axis=1), 32))


def test_one_lane_is_elected():
    out = probe.run("\telect.sync %r5|%p1, -1;\n\tselp.b32 %r6, 1, 0, %p1;\n\tst.global.v2.b32 [%l34], {%r5, %r6};")
    assert [int(v) >> 32 for v in out[:, 0]] == [1] + [0] * 31 and not (out[:, 0] & 0xFFFFFFFF).any()


def test_tensor_memory_is_given_back():
    with pytest.raises(EmulationError, match="that was not given back"):
        probe.run(ALLOCATED, threads=128, shared_bytes=2 * OPERAND + 64)
    with pytest.raises(EmulationError, match="after it gave up the right"):
        run("\t@%p9 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r201], 64;")
