"""Warps that part: named barriers, producers and consumers over mbarriers, deadlocks, warp specialisation."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton import jit
from triton.tools.tensor_descriptor import TensorDescriptor

import probe
import ptx_emulator
from ptx_emulator.parse import PtxError
from ptx_emulator.program import EmulationError

COVERED = {"setmaxnreg"}

#: Warp 0 stores a word per thread in each of four rounds, warp 1 sums them up, warp 2 ends. Four parts order them.
PING_PONG = """ setp.ge.u32 %p6, %r300, 64; @%p6 exit;
	mov.b32 %r200, smem; and.b32 %r201, %r300, 31; mad.lo.s32 %r202, %r201, 4, %r200; mov.b32 %r7, 2;
	setp.lt.u32 %p1, %r300, 32; setp.eq.u32 %p2, %r300, 0; mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b32 %r4, 0;
	@%p2 mbarrier.init.shared::cta.b64 [%r200+256], 32; @%p2 mbarrier.init.shared::cta.b64 [%r200+264], 32;
	bar.sync 0; @!%p1 bar.arrive 2, 64; // the buffer is empty
LOOP: xor.b32 %r5, %r4, 1; selp.b32 %r6, 0, 1, %p1; T:	.branchtargets EMPTY, CONSUMER; brx.idx %r6, T;
EMPTY: EMPTY_WAIT; add.s32 %r3, %r300, %r1; st.shared.b32 [%r202], %r3; FULL_ARRIVE; bra NEXT;
CONSUMER: FULL_WAIT; ld.shared.b32 %r3, [%r202]; add.s32 %r2, %r2, %r3; EMPTY_ARRIVE;
NEXT: add.s32 %r1, %r1, 1; and.b32 %r4, %r1, 1; setp.lt.s32 %p3, %r1, 4; @%p3 bra LOOP;
	@%p1 bar.sync 2, 64; st.global.b32 [%l34], %r2;"""
NAMED = ("bar.sync %r7, 64", "bar.arrive 1, 64", "barrier.cta.sync 1, 64", "bar.arrive %r7, 64")
WAIT = "mbarrier.{0}.parity.shared::cta.b64 %p4, [%r200+{1}], {2};\n@!%p4 bra {3}".format
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r200+{}]".format
MBARRIERS = (WAIT("try_wait", 264, "%r5", "EMPTY"), ARRIVE(256), WAIT("try_wait", 256, "%r4", "CONSUMER"), ARRIVE(264))
TESTS = tuple(part.replace("try_wait", "test_wait") for part in MBARRIERS)


def run(parts) -> np.ndarray:
    body = PING_PONG
    for name, part in zip(("EMPTY_WAIT", "FULL_ARRIVE", "FULL_WAIT", "EMPTY_ARRIVE"), parts, strict=True):
        body = body.replace(name, part)
    return probe.run(body, np.zeros((96, 8), np.uint64), threads=96, shared_bytes=512)[:, 0]


@pytest.mark.parametrize("parts", [NAMED, MBARRIERS, TESTS])
def test_a_producer_and_a_consumer(parts):
    assert (run(parts)[32:64] == 4 * np.arange(32, 64) - 4 * 32 + 6).all()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("nop", "bar.sync 1, 64", NAMED[2], "nop"), "race: (reads|writes) what another warp"),
        ((*NAMED[:2], "bar.sync 1, 96", NAMED[3]), "barrier 1 is given another number of threads|deadlock"),
        ((*NAMED[:2], "bar.sync 1, 48", NAMED[3]), "barrier 1: expected a multiple of 32 threads.*got 48"),
        ((*NAMED[:3], "nop"), r"(?s)deadlock.*warp 0 waits at barrier 2 \(.*warp 2 has ended"),
        ((*MBARRIERS[:3], "nop"), r"(?s)warp 0 waits at the mbarrier at byte 264 \(32 of.*warp 1 .*byte 256.* at \?"),
        ((MBARRIERS[0].replace("%r5", "%r4"), *MBARRIERS[1:]), "(?s)deadlock.*warp 0 .*byte 264.*warp 1 .*byte 256"),
    ],
)
def test_faults_name_the_warps(parts, message):
    with pytest.raises(EmulationError, match=message):
        run([part.replace("nop", "mov.b32 %r6, 0") for part in parts])


def test_a_deadlock_names_the_threads_of_a_warp_that_parted():
    with pytest.raises(EmulationError, match=r"warp 0, threads 0 to 7, waits at barrier 1 .*\n  .* 8 to 31, has ended"):
        probe.run("	setp.lt.u32 %p3, %r300, 8;\n	@%p3 bar.sync 1, 64;", threads=64)


def test_numbers_of_registers():
    probe.run("	setmaxnreg.dec.sync.aligned.u32 24;")
    with pytest.raises(PtxError, match="setmaxnreg: expected a multiple of 8 from 24 to 256"):
        probe.run("	setmaxnreg.inc.sync.aligned.u32 20;")


@jit
def product_kernel(a_desc, b_desc, c_ptr, K, M: tl.constexpr, N: tl.constexpr, POWER: tl.constexpr):
    total = tl.zeros((M, N), tl.float32)
    for k in tl.range(0, K, 64, warp_specialize=True, num_stages=2):
        if POWER == 1:
            total = tl.dot(a_desc.load([0, k]), b_desc.load([0, k]).T, total)
        else:  # the producer waits for each product, and the warps that add its square
            part = tl.dot(a_desc.load([0, k]), b_desc.load([0, k]).T)
            total += part * part
    tl.store(c_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], total)


@pytest.mark.parametrize("power", [1, 2])
def test_a_product_of_specialised_warps(power):
    a, b, c = torch.randn(128, 256).half(), torch.randn(64, 256).half(), torch.empty(128, 64)
    descriptors = [TensorDescriptor.from_tensor(x, [len(x), 64]) for x in (a, b)]
    with ptx_emulator.gpu(100) as log:
        product_kernel[(1,)](*descriptors, c, 256, M=128, N=64, POWER=power)
    assert "setmaxnreg.dec.sync.aligned.u32" in {one.opcode for one in log.launches[0].counted()}
    parts = zip(a.float().split(64, 1), b.float().split(64, 1), strict=True)
    torch.testing.assert_close(c, sum((x @ y.T) ** power for x, y in parts), rtol=1e-3, atol=1e-3)
