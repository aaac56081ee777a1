"""Triton kernels that are nobody's op, as Triton compiles them for each architecture."""

import pytest
import torch
import triton
import triton.language as tl

from bench.emulate import launches
from retro_kernels.triton_lib.launch import Launch
from tests.conftest import COMPILED, INTERPRETER

if INTERPRETER or COMPILED:
    pytest.skip("kernels are interpreted, or emulated by conftest already", allow_module_level=True)


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, columns, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    rows += tl.program_id(0) * BM
    columns += tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        a = tl.load(a_ptr + rows[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k)[:, None] * N + columns[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], acc)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_a_pipelined_product(arch, stages):
    """The plainest loop there is: from two stages on a product stays in flight while the next copies arrive."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=g).bfloat16() for size in ((64, 160), (160, 64)))
    c = torch.empty(64, 64)
    sizes = dict(M=64, N=64, K=160, BM=64, BN=64, BK=32)
    launches.run(Launch(product_kernel, (1, 1), dict(a_ptr=a, b_ptr=b, c_ptr=c, **sizes), num_stages=stages), arch)
    assert (c - a.float() @ b.float()).abs().max() < 1e-3
