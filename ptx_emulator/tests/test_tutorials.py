"""Kernels of the kinds that Triton's tutorials teach, on every architecture: values, and no report of the emulator.

Each of the functions in EVERY takes nothing, launches a kernel, and returns (result, expected, tolerance).
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import ptx_emulator
from ptx_emulator.estimate.calibration.kernels import add_kernel, layer_norm_kernel


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def vector_add():
    x, y, out = normal(1003), normal(1003, seed=1), torch.empty(1003)
    add_kernel[lambda meta: (triton.cdiv(1003, meta["BLOCK"]),)](x, y, out, 1003, BLOCK=256)
    return out, x + y, 0


@triton.jit
def _softmax_kernel(x_ptr, out_ptr, stride, rows, n, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """A program handles every n-th row, with the next row's load in flight."""
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        at = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + at, at < n, other=-float("inf"))
        e = tl.exp(x - tl.max(x, 0))
        tl.store(out_ptr + row * stride + at, e / tl.sum(e, 0), at < n)


def softmax():
    x = normal(13, 781)
    out = torch.empty_like(x)
    _softmax_kernel[(4,)](x, out, x.stride(0), 13, 781, BLOCK=1024, STAGES=3, num_warps=8)
    return out, x.softmax(1), 1e-6


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LEAKY: tl.constexpr
):
    """Tiles are in groups of two rows of tiles, so that concurrent programs share operands."""
    program, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = program // (2 * tiles_n) * 2
    height = min(tiles_m - first, 2)
    row, column = first + program % (2 * tiles_n) % height, program % (2 * tiles_n) // height
    rows = (row * BM + tl.arange(0, BM)) % M
    columns = (column * BN + tl.arange(0, BN)) % N
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        inside = start + k < K
        a = tl.load(a_ptr + rows[:, None] * K + (start + k)[None, :], inside[None, :], other=0.0)
        b = tl.load(b_ptr + (start + k)[:, None] * N + columns[None, :], inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
    if LEAKY:
        acc = tl.where(acc >= 0, acc, 0.01 * acc)
    rows, columns = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], acc.to(c_ptr.dtype.element_ty), inside)


def product():
    a, b = normal(96, 104, dtype=torch.float16), normal(104, 72, seed=1, dtype=torch.float16)
    out = torch.empty(96, 72, dtype=torch.float16)
    _product_kernel[(triton.cdiv(96, 64) * triton.cdiv(72, 64),)](
        a, b, out, 96, 72, 104, BM=64, BN=64, BK=32, LEAKY=True, num_stages=3, num_warps=4
    )
    return out.float(), torch.nn.functional.leaky_relu(a.float() @ b.float(), 0.01), 2e-2


@triton.jit
def _dropout_kernel(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, at) > p
    tl.store(out_ptr + at, tl.where(keep, tl.load(x_ptr + at, at < n) / (1 - p), 0.0), at < n)


def dropout():
    x, outs = torch.ones(4000), torch.empty(3, 4000)
    for out, seed in zip(outs, (123, 123, 512)):
        _dropout_kernel[(4,)](x, out, 4000, 0.25, seed, BLOCK=1024)
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert torch.equal(outs.unique(), torch.tensor([0.0, 1 / (1 - 0.25)]))
    return (outs == 0).float().mean(1), torch.full((3,), 0.25), 0.03


@triton.jit
def _norm_backward_kernel(
    dx_ptr, dy_ptr, dw_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, lock_ptr, n, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows of one group add to one row of dw behind a lock; the first stores."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < n
    x, dy = tl.load(x_ptr + row * n + at, inside, other=0.0), tl.load(dy_ptr + row * n + at, inside, other=0.0)
    rstd = tl.load(rstd_ptr + row)
    normal_x = tl.where(inside, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
    wdy = tl.load(w_ptr + at, inside, other=0.0) * dy
    dx = (wdy - (normal_x * (tl.sum(normal_x * wdy, 0) / n) + tl.sum(wdy, 0) / n)) * rstd
    tl.store(dx_ptr + row * n + at, dx, inside)
    group = row % GROUPS
    lock, count = lock_ptr + group, lock_ptr + GROUPS + group
    part = dy * normal_x
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    if tl.load(count) == 0:
        tl.atomic_xchg(count, 1)
    else:
        part += tl.load(dw_ptr + group * n + at, inside)
    tl.store(dw_ptr + group * n + at, part, inside)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def layer_norm():
    x, w = normal(9, 200).requires_grad_(), normal(200, seed=1).requires_grad_()
    b, dy = normal(200, seed=2), normal(9, 200, seed=3)
    y, mean, rstd, dx = torch.empty(9, 200), torch.empty(9), torch.empty(9), torch.empty(9, 200)
    layer_norm_kernel[(9,)](x, w, b, y, mean, rstd, 200, 1e-5, BLOCK=256)
    dw, locks = torch.empty(4, 200), torch.zeros(8, dtype=torch.int32)
    _norm_backward_kernel[(9,)](dx, dy, dw, x, w, mean, rstd, locks, 200, GROUPS=4, BLOCK=256)
    want = torch.nn.functional.layer_norm(x, (200,), w, b)
    want.backward(dy)
    return torch.cat([y, dx, dw.sum(0, keepdim=True)]).detach(), torch.cat([want, x.grad, w.grad[None]]).detach(), 2e-5


@triton.jit
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, n, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr
):
    """Online softmax in base 2; one head per program of axis 1."""
    d, rows, head = tl.arange(0, D), tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1)
    q_ptr += head * n * D
    k_ptr += head * n * D
    v_ptr += head * n * D
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :], (rows < n)[:, None], other=0.0)
    most = tl.full((BM,), -float("inf"), tl.float32)
    total, acc = tl.zeros((BM,), tl.float32), tl.zeros((BM, D), tl.float32)
    end = min((tl.program_id(0) + 1) * BM, n) if CAUSAL else n
    for start in range(0, end, BN):
        columns = start + tl.arange(0, BN)
        k = tl.load(k_ptr + columns[None, :] * D + d[:, None], (columns < n)[None, :], other=0.0)
        s = tl.dot(q, k) * (scale * 1.44269504)
        allowed = (columns < n)[None, :]
        if CAUSAL:
            allowed = allowed & (rows[:, None] >= columns[None, :])
        s = tl.where(allowed, s, -1e30)
        new = tl.maximum(most, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        factor = tl.exp2(most - new)
        total = total * factor + tl.sum(p, 1)
        v = tl.load(v_ptr + columns[:, None] * D + d[None, :], (columns < n)[:, None], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None])
        most = new
    out_ptr += head * n * D
    tl.store(out_ptr + rows[:, None] * D + d[None, :], acc / total[:, None], (rows < n)[:, None])


def attention():
    q, k, v = (normal(2, 150, 64, seed=seed, dtype=torch.float16) for seed in range(3))
    out = torch.empty(2, 150, 64)
    _attention_kernel[(triton.cdiv(150, 64), 2)](
        q, k, v, out, 0.125, 150, D=64, BM=64, BN=32, CAUSAL=True, num_stages=3
    )
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    return out, want, 5e-3


@triton.jit
def _grouped_kernel(a_ptrs, b_ptrs, c_ptrs, sizes_ptr, groups, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Products of several sizes in one launch; addresses are read from memory."""
    tile, done = tl.program_id(0), 0
    for group in range(groups):
        M, N, K = tl.load(sizes_ptr + 3 * group), tl.load(sizes_ptr + 3 * group + 1), tl.load(sizes_ptr + 3 * group + 2)
        tiles_n = tl.cdiv(N, BN)
        tiles = tl.cdiv(M, BM) * tiles_n
        while (tile >= done) & (tile < done + tiles):
            a_ptr = tl.load(a_ptrs + group).to(tl.pointer_type(tl.float16))
            b_ptr = tl.load(b_ptrs + group).to(tl.pointer_type(tl.float16))
            c_ptr = tl.load(c_ptrs + group).to(tl.pointer_type(tl.float16))
            rows = (tile - done) // tiles_n * BM + tl.arange(0, BM)
            columns = (tile - done) % tiles_n * BN + tl.arange(0, BN)
            k = tl.arange(0, BK)
            acc = tl.zeros((BM, BN), tl.float32)
            for start in range(0, K, BK):
                a = tl.load(a_ptr + rows[:, None] * K + (start + k)[None, :])
                b = tl.load(b_ptr + (start + k)[:, None] * N + columns[None, :])
                acc = tl.dot(a, b, acc)
            tl.store(c_ptr + rows[:, None] * N + columns[None, :], acc.to(tl.float16))
            tile += tl.num_programs(0)
        done += tiles


def grouped():
    sizes = [(64, 32, 64), (32, 64, 32), (64, 64, 96)]
    a = [normal(m, k, seed=m + k, dtype=torch.float16) for m, _, k in sizes]
    b = [normal(k, n, seed=n + k + 1, dtype=torch.float16) for _, n, k in sizes]
    c = [torch.empty(m, n, dtype=torch.float16) for m, n, _ in sizes]
    addresses = [torch.tensor([matrix.data_ptr() for matrix in matrices]) for matrices in (a, b, c)]
    _grouped_kernel[(4,)](*addresses, torch.tensor(sizes, dtype=torch.int32), 3, BM=32, BN=32, BK=32)
    want = [x.float() @ y.float() for x, y in zip(a, b)]
    return torch.cat([x.flatten() for x in c]).float(), torch.cat([x.flatten() for x in want]), 5e-2


@triton.jit
def _persistent_kernel(
    a_desc, b_desc, c_desc, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MAKES: tl.constexpr
):
    """As many programs as fit on the GPU; operands and result by tensor descriptors, b as [N, K].

    MAKES: the kernel makes the descriptors from pointers.
    """
    if MAKES:
        a_desc = tl.make_tensor_descriptor(a_desc, [M, K], [K, 1], [BM, BK])
        b_desc = tl.make_tensor_descriptor(b_desc, [N, K], [K, 1], [BN, BK])
        c_desc = tl.make_tensor_descriptor(c_desc, [M, N], [N, 1], [BM, BN])
    tiles_n = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * tiles_n
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, column = tile // tiles_n * BM, tile % tiles_n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for start in tl.range(0, K, BK, num_stages=3):
            a, b = a_desc.load([row, start]), b_desc.load([column, start])
            acc = tl.dot(a, b.T, acc)
        c_desc.store([row, column], acc.to(tl.float16))


def persistent(makes=False):
    a, b = normal(100, 72, dtype=torch.float16), normal(88, 72, seed=1, dtype=torch.float16)
    out = torch.empty(100, 88, dtype=torch.float16)
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
    blocks = (a, [64, 32]), (b, [64, 32]), (out, [64, 64])
    given = [tensor if makes else TensorDescriptor.from_tensor(tensor, block) for tensor, block in blocks]
    _persistent_kernel[(3,)](*given, 100, 88, 72, BM=64, BN=64, BK=32, MAKES=makes)
    return out.float(), a.float() @ b.float().T, 5e-2


def makes_descriptors():
    return persistent(makes=True)


EVERY = (vector_add, softmax, product, dropout, layer_norm, attention, grouped, persistent, makes_descriptors)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("launch", EVERY, ids=lambda one: one.__name__)
def test_values(launch, arch):
    with ptx_emulator.gpu(arch) as log:
        got, want, tolerance = launch()
    assert (got - want).abs().max() <= tolerance
    if launch in (persistent, makes_descriptors):
        (one,) = log.launches
        assert any("bulk.tensor" in counted.opcode for counted in one.counted()) == (arch > 80)
