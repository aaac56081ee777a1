"""Triton kernels of no op, as Triton compiles them for each architecture."""

import pytest
import torch
import triton
import triton.language as tl

import ptx_emulator
from ptx_emulator import launches


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, sum_ptr, SIDE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, SUMS: tl.constexpr
):
    row, k = tl.arange(0, SIDE), tl.arange(0, BK)
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    total = tl.zeros((SIDE,), tl.float32)
    for start in range(0, K, BK):
        a = tl.load(a_ptr + row[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k)[:, None] * SIDE + row[None, :])
        acc = tl.dot(a, b, acc)
        if SUMS:
            total += tl.sum(a.to(tl.float32), 1)
    tl.store(c_ptr + row[:, None] * SIDE + row[None, :], acc)
    if SUMS:
        tl.store(sum_ptr + row, total)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_a_pipelined_product(arch, stages, sums):
    """The plainest pipelined loop: from two stages on, a product is in flight while the next copies arrive.

    If `a` is also summed on sm_90, there is a race: Triton 3.9 gives `a` one buffer less than `b`, and waits with one
    product pending, so that the copy of the next tile overwrites what this product reads (docs/decisions, 008). On
    sm_80 a product reads registers, and on sm_100 both operands have the same number of buffers.
    """
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=g).bfloat16() for size in ((64, 192), (192, 64)))
    c, total = torch.empty(64, 64), torch.empty(64)
    arguments = dict(a_ptr=a, b_ptr=b, c_ptr=c, sum_ptr=total, SIDE=64, K=192, BK=32, SUMS=sums)
    launch = launches.Launch(product_kernel, (1,), arguments, {"num_warps": 4, "num_stages": stages})
    if sums and arch == 90 and stages > 1:
        with pytest.raises(ptx_emulator.EmulationError, match="writes shared memory that a product in flight reads"):
            launches.run(launch, arch)
        return
    launches.run(launch, arch)
    assert (c - a.float() @ b.float()).abs().max() < 1e-3
    assert not sums or (total - a.float().sum(1)).abs().max() < 1e-3


@triton.jit
def square_kernel(a_ptr, b_ptr, c_ptr, SIDE: tl.constexpr, SUM: tl.constexpr):
    at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), out_dtype=SUM))


KINDS = {
    "int8": (torch.int8, torch.int32, tl.int32, 0),
    "e5m2": (torch.float8_e5m2, torch.float32, tl.float32, 1e-4),
    "e4m3": (torch.float8_e4m3fn, torch.float32, tl.float32, 1e-4),
    "sums of halves": (torch.float16, torch.float16, tl.float16, 0.2),
}


@pytest.mark.parametrize(
    ("arch", "kind"), [(80, "int8"), (80, "e5m2"), (80, "sums of halves"), *((90, k) for k in KINDS)]
)
def test_products_of_other_types(arch, kind):
    dtype, out, total, tolerance = KINDS[kind]
    g = torch.Generator().manual_seed(0)
    a, b = ((torch.randn(64, 64, generator=g) * 3).to(dtype) for _ in range(2))
    c = torch.empty(64, 64, dtype=out)
    with ptx_emulator.gpu(arch):
        square_kernel[(1,)](a, b, c, SIDE=64, SUM=total)
    assert (c.double() - a.double() @ b.double()).abs().max() <= tolerance


@triton.jit
def scaled_kernel(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, SIDE: tl.constexpr, K: tl.constexpr):
    i, k, s = tl.arange(0, SIDE), tl.arange(0, K), tl.arange(0, K // 32)
    a, b = tl.load(a_ptr + i[:, None] * K + k[None, :]), tl.load(b_ptr + k[:, None] * SIDE + i[None, :])
    scale_at = i[:, None] * (K // 32) + s[None, :]
    a_scale, b_scale = tl.load(a_scale_ptr + scale_at), tl.load(b_scale_ptr + scale_at)
    tl.store(c_ptr + i[:, None] * SIDE + i[None, :], tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, "e5m2"))


@pytest.mark.parametrize("arch", [90, 100])
def test_scaled_products(arch):
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 64, generator=g), torch.randn(64, 64, generator=g)
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e5m2)
    scales = [torch.randint(122, 132, (64, 2), dtype=torch.uint8, generator=g) for _ in range(2)]
    c = torch.empty(64, 64)
    with ptx_emulator.gpu(arch):
        scaled_kernel[(1,)](a, scales[0], b, scales[1], c, SIDE=64, K=64)
    factors = [(2.0 ** (scale.double() - 127)).repeat_interleave(32, 1) for scale in scales]
    want = (a.double() * factors[0]) @ (b.double() * factors[1].T)
    assert (c - want).abs().max() < 1e-2 * want.abs().max()


def test_tensor_cores_of_the_fifth_generation_refuse_bytes():
    with pytest.raises(ptx_emulator.PtxError, match="kind::i8"):
        test_products_of_other_types(100, "int8")
