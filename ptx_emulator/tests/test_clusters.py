"""Clusters of CTAs: distributed shared memory, barrier.cluster, remote mbarriers, multicast, products of a pair."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton import jit
from triton.experimental.gluon import jit as gluon_jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell, hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import probe
import ptx_emulator
from ptx_emulator.parse import PtxError
from ptx_emulator.program import EmulationError

COVERED = {"mapa", "getctarank"}
SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned"
RELAXED = SYNC.replace("arrive", "arrive.relaxed")
START = "	mov.b32 %r1, smem; mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1; mad.lo.s32 %r4, %r300, 4, %r1;"
#: Threads store 1000 * rank + their number in shared and global memory, read the other CTA's numbers, and add to them.
EXCHANGE = f"""{START} setp.eq.u32 %p1, %r2, 0; mad.lo.s32 %r5, %r2, 1000, %r300; mad.lo.s32 %r6, %r2, -8192, 4096;
	cvt.s64.s32 %l1, %r6; add.s64 %l1, %l34, %l1; mov.b32 %r7, 0; BEGIN; st.shared.b32 [%r4], %r5;
	st.global.b32 [%l34+24], %r5; FIRST; mapa.shared::cluster.u32 %r8, %r4, %r3; READ; ld.global.b32 %r10, [%l1+24];
	SECOND; st.shared.b32 [%r4], %r7; {SYNC}; red.shared::cluster.add.u32 [%r8], %r5; {SYNC}; ld.shared.b32 %r11, [%r4];
	getctarank.shared::cluster.u32 %r12, %r8; st.global.v4.b32 [%l34], {{%r9, %r10, %r11, %r12}};"""
PARTS = {"BEGIN": "mov.b32 %r13, 0", "FIRST": SYNC, "READ": "ld.shared::cluster.b32 %r9, [%r8]", "SECOND": SYNC}
MISSING = r"""(?s)deadlock.*warp 1 of the CTA of rank 0 waits at the barrier of the cluster \(64 threads of all\) at .*
  warp 0 of the CTA of rank 1 .*, where it has not arrived .* at \? \(barrier.cluster.wait\)"""


def run(body: str, **parts) -> np.ndarray:
    for name, part in (PARTS | parts).items():
        body = body.replace(name, part)
    return probe.run(body, threads=64, shared_bytes=512, ctas=2)


def test_two_ctas_exchange_through_shared_memory():
    other = np.array([1000 * (1 - rank) + t for rank in range(2) for t in range(64)])
    got = run(EXCHANGE).view(np.uint32)[:, :4]
    assert (got == np.stack([other, other, other, np.repeat([1, 0], 64)], 1)).all()
    with pytest.raises(PtxError, match="cluster of 4 CTAs of 1024 threads"):
        probe.run("\tbar.sync 0;", ctas=4, threads=1024)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"FIRST": "bar.sync 0"}, "race: reads what warp 0 of the CTA of rank 1 wrote .*, byte 0 of the CTA of rank 1"),
        ({"FIRST": RELAXED}, "race: reads what warp 0 of the CTA of rank 1 wrote"),
        ({"FIRST": "bar.sync 0", "READ": "mov.b32 %r9, 0"}, "race between CTAs: reads a byte"),
        ({"SECOND": "bar.sync 0"}, "race: writes what warp 0 of the CTA of rank 1 read .*, byte 0 of the CTA of rank"),
        ({"FIRST": f"barrier.cluster.arrive; {SYNC}"}, "arrives at the barrier of the cluster twice"),
        ({"FIRST": "@%p1 barrier.cluster.arrive; barrier.cluster.wait"}, MISSING),
        ({"FIRST": "@!%p1 exit"}, "access to the shared memory of the CTA of rank 1, which has ended"),
        ({"BEGIN": "add.u32 %r3, %r2, 1"}, "mapa: the cluster has no CTA of rank 2"),
        ({"READ": "ld.shared.b32 %r9, [%r8]"}, "access to shared::cta with an address of the CTA of rank 1"),
    ],
)
def test_faults_name_the_rank(parts, message):
    with pytest.raises(EmulationError, match=message):
        run(EXCHANGE, **parts)


WAIT = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], %r8; @!%p2 bra"
#: Each CTA sends 64 words to the other, whose mbarrier expects 256 bytes, an arrival of its own and one of the sender.
SENT = f"""{START} setp.eq.u32 %p1, %r300, 0; mapa.shared::cluster.u32 %r5, %r4, %r3; mov.b32 %r8, 0;
	mapa.shared::cluster.u32 %r6, %r1, %r3; mad.lo.s32 %r7, %r2, 1000, %r300;
	@%p1 mbarrier.init.shared::cta.b64 [%r1], 2; @%p1 fence.mbarrier_init.release.cluster; FIRST; bar.sync 0;
	@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 256; @%p1 mbarrier.DROP.shared::cluster.b64 _, [%r6];
	st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r5+64], %r7, [%r6]; W: {WAIT} W;
	ld.shared.b32 %r9, [%r4+64]; mov.b32 %r8, 1; @%p1 mbarrier.arrive.shared.b64 _, [%r1]; V: {WAIT} V;
	bar.sync 0; @%p1 mbarrier.inval.shared::cta.b64 [%r1]; {SYNC}; st.global.b32 [%l34], %r9;"""


def test_asynchronous_stores_and_arrivals_at_the_other_cta():
    got = run(SENT, FIRST=RELAXED, DROP="arrive_drop.release.cluster")
    assert (got[:, 0] == [1000 * (1 - rank) + t for rank in range(2) for t in range(64)]).all()
    with pytest.raises(EmulationError, match=r"(?s)deadlock.*rank 1 waits at the mbarrier at byte 0 \(1 of 2 arrivals"):
        run(SENT, FIRST=RELAXED, DROP="arrive")  # the second phase expects two again


@jit
def product_kernel(a_ptr, b_ptr, c_ptr, sums_ptr, BLOCK: tl.constexpr):
    at, depth = tl.arange(0, BLOCK), tl.arange(0, 64)
    rows = tl.program_id(0) * BLOCK + at
    product = tl.dot(tl.load(a_ptr + rows[:, None] * 64 + depth), tl.load(b_ptr + at * 64 + depth[:, None]))
    tl.store(c_ptr + rows[:, None] * BLOCK + at[None, :], product)
    tl.store(sums_ptr + rows, tl.sum(product, 1))


@pytest.mark.parametrize(("arch", "ctas"), [(90, 2), (100, 2), (90, 4)])
def test_a_product_of_triton(arch, ctas):
    a, b, c, sums = torch.randn(256, 64).half(), torch.randn(128, 64).half(), torch.empty(256, 128), torch.empty(256)
    with ptx_emulator.gpu(arch) as log:
        product_kernel[(2,)](a, b, c, sums, BLOCK=128, num_ctas=ctas)
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sums, c.sum(1), rtol=1e-3, atol=1e-2)
    assert log.launches[0].options["num_ctas"] == ctas and log.launches[0].counters()["ctas"] == 2 * ctas
    assert {one.executed for one in log.launches[0].counted() if one.opcode.startswith("mapa")} == {2 * ctas}
    with pytest.raises(PtxError, match="product_kernel: no estimate of clusters"):
        log.launches[0].estimate("H200" if arch == 90 else "B200")


F32 = gl.constexpr(gl.float32)
CASES = [(90, [[1, 0]], [[0, 0]], 1), (100, [[1, 0]], [[0, 1]], 0), (100, [[1, 0], [2, 0]], [[0, 1], [0, 0]], 1)]


@gluon_jit
def multicast_kernel(a_desc, b_desc, c_ptr, PAIR: gl.constexpr, MULTICAST: gl.constexpr):
    """Product whose rows the CTAs share. PAIR: two CTAs make one product, each with half of the columns of b."""
    a = gl.allocate_shared_memory(gl.float16, a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(gl.float16, b_desc.block_shape, b_desc.layout)
    loaded, done = mbarrier.allocate_mbarrier(two_ctas=PAIR), mbarrier.allocate_mbarrier()
    mbarrier.init(loaded, count=1)
    mbarrier.init(done, count=blackwell.tcgen05_mma_barrier_count([a, b], MULTICAST, PAIR))
    M: gl.constexpr = a_desc.block_shape[0]
    split: gl.constexpr = a_desc.layout.cga_layout
    shape: gl.constexpr = blackwell.TensorMemoryLayout((128, 64), col_stride=1, cga_layout=split, two_ctas=True)
    rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16], cga_layout=split)
    total = blackwell.allocate_tensor_memory(F32, [M, 64], shape) if PAIR else gl.zeros([M, 64], F32, rows)
    for k in range(2):
        mbarrier.expect(loaded, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma.async_load(a_desc, [0, 64 * k], loaded, a, multicast=MULTICAST)
        tma.async_load(b_desc, [64 * k, 0], loaded, b, multicast=MULTICAST)
        mbarrier.wait(loaded, k, deps=[a, b])
        if PAIR:
            blackwell.tcgen05_mma(a, b, total, use_acc=k != 0, multicast=MULTICAST, mbarriers=[done])
            mbarrier.wait(done, k, deps=[a, b])
        else:
            total = hopper.warpgroup_mma_wait(0, deps=(hopper.warpgroup_mma(a, b, total, is_async=True),))
    mbarrier.invalidate(done)
    value = total.load() if PAIR else total
    layout: gl.constexpr = value.type.layout
    at = gl.arange(0, M, gl.SliceLayout(1, layout))[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    gl.store(c_ptr + at, value)


@pytest.mark.parametrize(("arch", "a_split", "b_split", "multicast"), CASES)
def test_products_of_gluon(arch, a_split, b_split, multicast):
    def described(tensor, block, split) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.float16, cga_layout=split)
        return TensorDescriptor.from_tensor(tensor, block, layout)

    rows, pair = (128 if arch == 100 else 64) * 2 ** len(a_split), arch == 100
    a, b, c = torch.randn(rows, 128).half(), torch.randn(128, 64).half(), torch.empty(rows, 64)
    blocks = described(a, [rows, 64], a_split), described(b, [64, 64], b_split)
    with ptx_emulator.gpu(arch) as log:
        multicast_kernel[(1,)](*blocks, c, pair, bool(multicast), num_ctas=2 ** len(a_split))
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-3)
    opcodes = " ".join(one.opcode for one in log.launches[0].counted() if one.executed)
    assert ("mma.cta_group::2" in opcodes) == pair and ("bytes.multicast::cluster" in opcodes) == multicast
