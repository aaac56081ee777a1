"""Loads, stores, copies, barriers, warp exchanges, branches: their results, and the emulator's
reports of their misuse.
"""

import functools
import operator

import numpy as np
import pytest
import torch

import probe
from ptx_emulator.program import EmulationError, Program

COVERED = {
    "ld", "st", "cp", "bar", "barrier", "membar", "fence", "bra", "ret", "exit", "trap", "shfl", "vote", "redux",
    "ldmatrix", "stmatrix", "cvta", "createpolicy", "griddepcontrol",
}  # fmt: skip

SMEM = "\tmov.b32 %r200, smem;\n\tshl.b32 %r201, %r300, 2;\n\tadd.s32 %r202, %r200, %r201;\n"


def registers(threads=32, seed=0):
    return np.random.default_rng(seed).integers(0, 2**31, (threads, 8)).astype(np.uint64)


def test_vectors_and_signs():
    body = """
	ld.global.v2.b64 {%l1, %l2}, [%l33];
	ld.global.s32 %l3, [%l33+16];
	ld.global.u16 %r1, [%l33+16];
	cvta.to.global.u64 %l4, %l34;
	st.global.v2.b64 [%l4], {%l2, %l1};
	st.global.b64 [%l4+16], %l3;
	st.global.b32 [%l4+24], %r1;
	membar.cta;
	exit;
"""
    values = registers()
    values[:, 2] += 2**31
    out = probe.run(body, values)
    assert (out[:, 0] == values[:, 1]).all() and (out[:, 1] == values[:, 0]).all()
    assert (out[:, 2] == values[:, 2].astype(np.int32).astype(np.int64).astype(np.uint64)).all()
    assert (out[:, 3] == (values[:, 2] & 0xFFFF)).all()


POLICY = "\tcreatepolicy.fractional.L2::evict_first.b64 %l1, 1.0;\n"
HINTED = "\tcp.async.ca.shared.global.L2::cache_hint [%r202], [%l33], 4,{} %l1;\n\tcp.async.wait_all;\n"


@pytest.mark.parametrize(
    ("load", "kept"),
    [
        ("\tld.global.L1::evict_first.L2::cache_hint.b32 %r1, [%l33], %l1;", 0xFFFFFFFF),
        (SMEM + HINTED.format("") + "\tld.shared.b32 %r1, [%r202];", 0xFFFFFFFF),
        (SMEM + HINTED.format(" 2,") + "\tld.shared.b32 %r1, [%r202];", 0xFFFF),
    ],
)
def test_a_policy_of_caching_is_no_size(load, kept):
    values = registers()
    out = probe.run(f"{POLICY}{load}\n\tst.global.L2::cache_hint.b32 [%l34], %r1, %l1;", values, shared_bytes=128)
    assert (out[:, 0] == values[:, 0] & kept).all()


def test_a_predicate_guards_an_access():
    body = """
	setp.lt.s32 %p1, %r300, 4;
	mov.b32 %r1, 7;
	@%p1 st.global.b32 [%l34], %r1;
	@!%p1 ld.global.b64 %l1, [%l33];
"""
    out = probe.run(body, registers())
    assert (out[:4, 0] == 7).all() and (out[4:] == 0).all()


def exchange(barrier):
    return f"""{SMEM}
	st.shared.b32 [%r202], %r300;
	{barrier}
	xor.b32 %r1, %r201, 128;
	add.s32 %r2, %r200, %r1;
	ld.shared.b32 %r3, [%r2];
	st.global.b32 [%l34], %r3;
"""


def test_two_warps_exchange_behind_a_barrier():
    out = probe.run(exchange("bar.sync 0;"), threads=64, shared_bytes=256)
    assert (out[:, 0] == np.arange(64) ^ 32).all()
    assert (probe.run(exchange("barrier.sync.aligned 0;"), threads=64, shared_bytes=256) == out).all()
    same = SMEM + "\tmov.b32 %r1, 5;\n\tst.shared.b32 [%r200], %r1;"  # equal values from every warp: no race
    probe.run(same, threads=64, shared_bytes=256)


def copy(wait, read="ld.shared.b32 %r3, [%r202];", size="4"):
    return f"""{SMEM}
	mov.b32 %r9, {size};
	cp.async.ca.shared.global [ %r202 + 0 ], [ %l33 + 0 ], 0x4, %r9;
	cp.async.commit_group;
	cp.async.ca.shared.global [ %r202 + 256 ], [ %l33 + 8 ], 0x4;
	cp.async.commit_group;
	{wait}
	{read}
	st.global.b32 [%l34], %r3;
"""


def test_asynchronous_copies():
    values = registers()
    low = values[:, 0] & 0xFFFFFFFF
    assert (probe.run(copy("cp.async.wait_group 1;"), values, shared_bytes=512)[:, 0] == low).all()
    assert (probe.run(copy("cp.async.wait_all;"), values, shared_bytes=512)[:, 0] == low).all()
    assert (probe.run(copy("cp.async.wait_group 0;", size="2"), values, shared_bytes=512)[:, 0] == low & 0xFFFF).all()
    assert (probe.run(copy("cp.async.wait_group 0;", size="0"), values, shared_bytes=512)[:, 0] == 0).all()
    own = "@%p1 mbarrier.arrive.shared.b64 _, [%r200+504];"
    for form, count, more in (".noinc", 32, ""), ("", 1, own):  # without .noinc, one arrival more is expected
        arrives = f"""setp.eq.u32 %p1, %r300, 0; @%p1 mbarrier.init.shared.b64 [%r200+504], {count}; bar.sync 0;
	mov.b32 %r8, 0; cp.async.mbarrier.arrive{form}.shared.b64 [%r200+504]; {more}"""
        wait = " W: mbarrier.try_wait.parity.shared.b64 %p2, [%r200+504], %r8; @!%p2 bra W;"
        assert (probe.run(copy(arrives + wait), values, shared_bytes=512)[:, 0] == low).all()
        with pytest.raises(EmulationError, match="reads shared memory that an asynchronous copy still writes"):
            probe.run(copy(arrives), values, shared_bytes=512)


OTHER = "xor.b32 %r1, %r201, 128;\n\tadd.s32 %r2, %r200, %r1;\n\tld.shared.b32 %r3, [%r2];"
SOME = "setp.lt.s32 %p1, %r300, 8; @%p1"
RACE = "race: reads what another warp wrote since the last barrier"
STORED = "writes shared memory that an asynchronous copy still writes"
FAULTS = [
    ("\tld.global.b64 %l1, [%l33+64];", "out of bounds of argument tensor 0: byte 2048 of 2048", 32),
    ("\tld.global.b64 %l1, [%l30+-8];", "out of bounds of argument tensor 0: byte -8", 32),
    ("\tst.global.b32 [%l34+2], %r300;", "misaligned global address: 4 bytes", 32),
    ("\tmov.b64 %l1, 64;\n\tld.global.b32 %r1, [%l1];", "outside every tensor", 32),
    (SMEM + "\tst.shared.b32 [%r200+512], %r300;", "out of bounds of shared memory: byte 512 of 512", 32),
    (SMEM + "\tst.shared.b32 [%r200+2], %r300;", "misaligned shared address", 32),
    ("\ttrap;", "trap", 32),
    (SMEM + "\tld.shared.b32 %r1, [%r202];", "reads uninitialised shared memory, byte 0", 32),
    *((exchange(barrier), RACE, 64) for barrier in ("", "bar.warp.sync -1;", "fence.acq_rel.cta;")),
    (exchange("bar.sync 0;") + "\tst.shared.b32 [%r202], %r3;", "race: writes what another warp read", 64),
    (SMEM + "\tst.shared.b32 [%r200], %r300;", "race: writes what another warp wrote", 64),
    (copy("cp.async.wait_group 2;"), "reads shared memory that an asynchronous copy still writes", 32),
    (copy("cp.async.wait_group 1;", read="ld.shared.b32 %r3, [%r202+256];"), "still writes", 32),
    (copy("", read="st.shared.b32 [%r202], %r300;"), STORED, 32),
    (copy("cp.async.wait_group 0;", read=OTHER), "race: reads what another warp wrote", 64),
    (f"{SOME} shfl.sync.bfly.b32 %r2, %r300, 15, 31, -1;", "reads a thread that does not take part", 32),
    (f"{SMEM} {SOME} ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r1}}, [%r200];", "divergence: 8 of 32 threads", 32),
]


@pytest.mark.parametrize(("body", "message", "threads"), FAULTS, ids=lambda value: str(value).split("\n")[-1])
def test_what_is_reported(body, message, threads):
    with pytest.raises(EmulationError, match=message):
        probe.run(body, threads=threads, shared_bytes=512)


def test_branches_part_and_meet_again():
    body = """
	mov.b32 %r1, 0;
	mov.b32 %r2, 0;
$L_loop:
	add.s32 %r1, %r1, 3;
	add.s32 %r2, %r2, 1;
	setp.le.s32 %p1, %r2, %r300;
	@%p1 bra $L_loop;
	and.b32 %r3, %r300, 1;
	setp.eq.b32 %p2, %r3, 0;
	@%p2 bra $L_even;
	add.s32 %r1, %r1, 1000;
	bra.uni $L_end;
$L_even:
	setp.gt.s32 %p3, %r300, 40;
	@%p3 ret;
$L_end:
	bar.sync 0;
	st.global.b32 [%l34], %r1;
"""
    out = probe.run(body, threads=64)[:, 0]
    for t in range(64):
        want = 0 if t % 2 == 0 and t > 40 else 3 * (t + 1) + 1000 * (t % 2)
        assert out[t] == want, t


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "source"),
    [
        ("bfly", 5, 31, lambda lane: lane ^ 5),
        ("up", 3, 0, lambda lane: lane - 3 if lane >= 3 else lane),
        ("down", 4, 31, lambda lane: lane + 4 if lane + 4 <= 31 else lane),
        ("idx", 9, 31, lambda lane: 9),
        ("bfly", 1, 31 | 24 << 8, lambda lane: lane ^ 1),
        ("down", 2, 0x181F & 0x1F1F, lambda lane: lane + 2 if lane + 2 <= (lane & 24 | 7) else lane),
    ],
)
def test_shuffles(mode, by, clamp, source):
    values = registers()
    body = f"""
	ld.global.b32 %r1, [%l33];
	shfl.sync.{mode}.b32 %r2|%p1, %r1, {by}, {clamp}, -1;
	st.global.b32 [%l34], %r2;
"""
    out = probe.run(body, values)[:, 0]
    assert [int(v) for v in out] == [int(values[source(lane), 0]) for lane in range(32)]


def test_votes_and_reductions():
    values = registers()
    body = """
	ld.global.b32 %r1, [%l33];
	and.b32 %r2, %r1, 1;
	setp.eq.b32 %p1, %r2, 1;
	vote.sync.ballot.b32 %r3, %p1, -1;
	vote.sync.any.pred %p2, !%p1, -1;
	vote.sync.all.pred %p3, %p1, -1;
	selp.b32 %r4, 1, 0, %p2;
	selp.b32 %r5, 1, 0, %p3;
	griddepcontrol.wait;
	griddepcontrol.launch_dependents;
	redux.sync.max.s32 %r6, %r1, -1;
	redux.sync.min.u32 %r7, %r1, -1;
	redux.sync.add.s32 %r8, %r1, -1;
	redux.sync.xor.b32 %r9, %r1, -1;
	st.global.v4.b32 [%l34], {%r3, %r4, %r5, %r6};
	st.global.v4.b32 [%l34+16], {%r7, %r8, %r9, %r9};
"""
    out = probe.run(body, values)[0].view(np.uint32)
    v = [int(x) & 0xFFFFFFFF for x in values[:, 0]]
    xor = functools.reduce(operator.xor, v)
    assert int(out[0]) == sum((x & 1) << k for k, x in enumerate(v))
    assert list(out[1:3]) == [int(any(not x & 1 for x in v)), int(all(x & 1 for x in v))]
    assert [int(x) for x in out[3:7]] == [max(v), min(v), sum(v) & 0xFFFFFFFF, xor]


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_to_and_from_shared_memory(transposed):
    """stmatrix and ldmatrix by their layout: lane l holds row l/4, columns 2(l%4) and the next."""
    trans = ".trans" if transposed else ""
    rows = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    body = f"""{SMEM}
	shl.b32 %r1, %r300, 4;
	add.s32 %r2, %r200, %r1;
	ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%l33];
	st.shared.v4.b32 [%r2], {{%r10, %r11, %r12, %r13}};
	bar.sync 0;
	ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r2];
	st.global.v4.b32 [%l34], {{%r20, %r21, %r22, %r23}};
	bar.sync 0;
	stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r2], {{%r20, %r21, %r22, %r23}};
	bar.sync 0;
	ld.shared.v4.b32 {{%r30, %r31, %r32, %r33}}, [%r2];
	st.global.v4.b32 [%l34+16], {{%r30, %r31, %r32, %r33}};
"""
    values = np.zeros((32, 8), np.uint64)
    values.view(np.uint16).reshape(32, 32)[:, :8] = rows.reshape(32, 8)  # thread 8k + r addresses row r of matrix k
    out = probe.run(body, values, shared_bytes=512).view(np.uint16).reshape(32, 32)
    for lane in range(32):
        for k in range(4):
            row, column = lane // 4, 2 * (lane % 4)
            want = rows[k, column : column + 2, row] if transposed else rows[k, row, column : column + 2]
            assert list(out[lane, 2 * k : 2 * k + 2]) == list(want)
        assert list(out[lane, 8:16]) == list(rows.reshape(32, 8)[lane])  # the inverse


def test_counters():
    """Sectors and wavefronts by hand: 32 adjacent floats are 4 sectors; 64 bytes apart 32; a stride of 32 words is one
    bank.
    """
    text = probe.module(
        SMEM
        + """
	ld.global.b32 %r1, [%l33];
	mul.wide.u32 %l1, %r300, 4;
	add.s64 %l2, %l30, %l1;
	ld.global.b32 %r2, [%l2];
	st.shared.b32 [%r202], %r1;
	shl.b32 %r3, %r300, 7;
	add.s32 %r4, %r200, %r3;
	st.shared.b32 [%r4], %r1;
"""
    )
    program = Program(text)
    data = torch.zeros(32, 8, dtype=torch.int64).numpy()  # aligned to a sector, unlike NumPy's own arrays
    probe.execute(program, data, data, shared_bytes=4096, checks=False)
    counted = [(c.opcode, c.requests, c.units, c.fewest) for c in program.counts() if c.requests]
    assert counted == [
        ("ld.global.b32", 1, 32, 4),
        ("ld.global.b32", 1, 4, 4),
        ("st.shared.b32", 1, 1, 1),
        ("st.shared.b32", 1, 32, 1),
    ]
