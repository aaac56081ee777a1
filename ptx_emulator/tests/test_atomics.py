"""atom and red: every operation on every PTX type, in global and shared memory, and reports of their misuse."""

import numpy as np
import pytest
import torch

import probe
from ptx_emulator.program import EmulationError

COVERED = {"atom", "red"}

INTEGER = {
    "add": lambda x, y: x + y,
    "min": min,
    "max": max,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "exch": lambda x, y: y,
}
FORMS = [
    *((how, kind) for how in ("add", "min", "max") for kind in ("u32", "s32", "u64", "s64")),
    *((how, kind) for how in ("and", "or", "xor", "exch") for kind in ("b32", "b64")),
]
THREADS = 64
SMEM = "\tmov.b32 %r200, smem;\n"


PLACES = {"shared": "%r200", "global": "%l31+8"}


def cell(space="shared", letter="r", bits=32, value=5, barrier="bar.sync 0;"):
    """One thread sets a cell to a value, behind a barrier; then the updates go to it."""
    return f"""
	mov.b32 %r200, smem;
	setp.eq.s32 %p9, %r300, 0;
	mov.b{bits} %{letter}8, {value};
	@%p9 st.{space}.b{bits} [{PLACES[space]}], %{letter}8;
	{barrier}
"""


def updates(how, kind, space, *, opcode="atom"):
    """64 threads update one cell that is 5, each with its own value. Return the old values and the cell."""
    bits, letter = int(kind[1:]), "l" if kind.endswith("64") else "r"
    place = PLACES[space]
    target = f"%{letter}2, " if opcode == "atom" else ""
    keep = f"\tst.global.b{bits} [%l34], %{letter}2;\n" if opcode == "atom" else ""
    body = f"""
{cell(space, letter, bits)}
	ld.global.b{bits} %{letter}1, [%l33];
	{opcode}.{space}.{"cta" if space == "shared" else "gpu"}.acq_rel.{how}.{kind} {target}[{place}], %{letter}1;
{keep}
	bar.sync 0;
	ld.{space}.b{bits} %{letter}3, [{place}];
	st.global.b{bits} [%l34+16], %{letter}3;
"""
    values = np.random.default_rng(3).integers(0, 2**63, (THREADS, 8)).astype(np.uint64) * 2 + 1
    out = probe.run(body, values, threads=THREADS, shared_bytes=8)
    return values[:, 0], out[:, 0], out[:, 2]


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("how", "kind"), FORMS)
def test_integers(how, kind, space):
    bits, signed = int(kind[1:]), kind[0] == "s"

    def read(v):
        v &= 2**bits - 1
        return v - 2**bits if signed and v >> (bits - 1) else v

    values, olds, ends = updates(how, kind, space)
    cell = 5
    for value, old in zip(values.tolist(), olds.tolist(), strict=True):
        assert read(int(old)) == read(cell)
        cell = INTEGER[how](read(cell), read(value)) & (2**bits - 1)
    assert all(int(end) & (2**bits - 1) == cell for end in ends[32:])


def test_red_leaves_no_old_value():
    values, _, ends = updates("add", "u32", "global", opcode="red")
    assert int(ends[-1]) == (5 + int((values & 0xFFFFFFFF).sum())) % 2**32


@pytest.mark.parametrize(("kind", "bits"), [("b16", 16), ("b32", 32), ("b64", 64)])
def test_compare_and_swap_takes_the_first_that_finds_what_it_expects(kind, bits):
    letter = {16: "h", 32: "r", 64: "l"}[bits]
    body = f"""
	cvt.u{bits}.u32 %{letter}1, %r300;
	add.s{bits} %{letter}2, %{letter}1, 1;
	atom.global.gpu.relaxed.cas.{kind} %{letter}3, [%l30+256], %{letter}1, %{letter}2;
	st.global.{kind} [%l34], %{letter}3;
"""
    if bits == 32:
        body = body.replace("cvt.u32.u32 %r1, %r300", "mov.b32 %r1, %r300")
    values = np.zeros((32, 8), np.uint64)
    out = probe.run(body, values)
    assert out[:, 0].tolist() == list(range(32)) and values[4, 0] == 32


@pytest.mark.parametrize("space", ["global", "shared"])
def test_sums_of_floats_round_after_every_update(space):
    body = f"""
{cell(space, value=0)}
	ld.global.b32 %r1, [%l33];
	atom.{space}.add.f32 %r2, [{PLACES[space]}], %r1;
	st.global.b32 [%l34], %r2;
"""
    numbers = np.random.default_rng(1).standard_normal(32).astype(np.float32)
    numbers[7] = np.float32(1e-41)  # subnormal: flushed in global memory alone
    values = np.zeros((32, 8), np.uint64)
    values[:, 0] = numbers.view(np.uint32)
    out = probe.run(body, values, shared_bytes=4)[:, 0].astype(np.uint32).view(np.float32)
    total = np.float32(0)
    for old, number in zip(out, numbers, strict=True):
        assert old == total
        total = np.float32(total + number)
    numbers[:] = np.float32(1e-41)
    values[:, 0] = numbers.view(np.uint32)
    out = probe.run(body, values, shared_bytes=4)[:, 0].astype(np.uint32).view(np.float32)
    assert (out[-1] == 0) == (space == "global")


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("packed", [False, True])
def test_sums_of_halves(kind, dtype, packed):
    register, width = ("%r1", "b32") if packed else ("%h1", "b16")
    result = register.replace("1", "2")
    body = f"""
	ld.global.{width} {register}, [%l33];
	atom.global.add.noftz.{kind}{"x2" if packed else ""} {result}, [%l31+8], {register};
	st.global.{width} [%l34], {result};
"""
    g = torch.Generator().manual_seed(0)
    numbers = torch.randn(32, 4, generator=g).to(dtype)
    values = np.zeros((32, 8), np.uint64)
    values[:, 0] = numbers.view(torch.int64).numpy()[:, 0].view(np.uint64)
    out = torch.from_numpy(probe.run(body, values).view(np.int64)).view(dtype).reshape(32, 32)
    total = torch.zeros(2, dtype=dtype)
    for lane in range(32):
        assert torch.equal(out[lane, : 1 + packed], total[: 1 + packed])
        total = total + numbers[lane, :2]


def test_a_vector_updates_each_element():
    body = """
	ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%l33];
	atom.global.gpu.relaxed.add.v4.f32 {%r5, %r6, %r7, %r8}, [%l34], {%r1, %r2, %r3, %r4};
	red.global.add.v2.f32 [%l34], {%r3, %r4};
"""
    numbers = np.arange(32 * 16, dtype=np.float32).reshape(32, 16)
    out = probe.run(body, numbers.view(np.uint64)).view(np.float32).reshape(32, 16)
    assert (out[:, 2:4] == numbers[:, 2:4]).all() and (out[:, :2] == numbers[:, :2] + numbers[:, 2:4]).all()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("", "", "race: updates what another warp wrote since the last barrier"),
        ("bar.sync 0;", "ld.shared.b32 %r2, [%r200];", "race: reads what another warp wrote since the last barrier"),
        ("bar.sync 0;\n\tld.shared.b32 %r2, [%r200];", "", "race: updates what another warp read"),
        ("bar.sync 0;", "st.shared.b32 [%r200], %r300;", "race: writes what another warp wrote"),
    ],
)
def test_an_update_races_with_plain_accesses(first, second, message):
    with pytest.raises(EmulationError, match=message):
        probe.run(
            f"{cell(barrier=first)}\tatom.shared.add.u32 %r1, [%r200], 1;\n\t{second}", threads=64, shared_bytes=4
        )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("atom.shared.add.u32 %r1, [%r200], 1;", "updates uninitialised shared memory, byte 0"),
        ("atom.shared.add.u32 %r1, [%r200+2], 1;", "misaligned shared address"),
        ("atom.global.add.u32 %r1, [%l30+-4], 1;", "out of bounds of argument tensor 0: byte -4"),
        ("$L: atom.global.cas.b32 %r1, [%l31], 1, 2;\n\tsetp.ne.s32 %p1, %r1, 1;\n\t@%p1 bra $L;", "no progress"),
    ],
)
def test_what_is_reported(body, message):
    with pytest.raises(EmulationError, match=message):
        probe.run(SMEM + "\t" + body, shared_bytes=8)
