"""Messages of kernels, and functions that kernels call."""

import pytest
import torch
import triton.language as tl
from triton import jit
from triton.language.extra import libdevice

import ptx_emulator

COVERED = {"vprintf", "assertfail"}


@jit
def printing_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.device_print("x is", tl.load(x_ptr + tl.arange(0, BLOCK)))
    tl.device_print("number", tl.program_id(0), hex=True)


def test_device_print(capsys):
    with ptx_emulator.gpu(90):
        printing_kernel[(2,)](torch.arange(32.0) / 2, BLOCK=32, num_warps=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "pid (0, 0, 0) idx ( 3) x is: 1.500000"
    assert lines[-1] == "pid (1, 0, 0) idx () number: 0x00000001" and len(lines) == 2 * 2 * 32


@jit
def asserting_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.device_assert(tl.load(x_ptr + tl.arange(0, BLOCK)) < 3, "x is too large")


def test_a_device_assertion_is_an_exception():
    with ptx_emulator.gpu(80):
        asserting_kernel[(1,)](torch.zeros(4), BLOCK=4, debug=True)
        with pytest.raises(ptx_emulator.DeviceAssertion, match=r"x is too large.*test_messages.py:\d+"):
            asserting_kernel[(1,)](torch.arange(4.0), BLOCK=4, debug=True)
        asserting_kernel[(1,)](torch.arange(4.0), BLOCK=4, debug=False)
    assert issubclass(ptx_emulator.DeviceAssertion, AssertionError)


@jit
def functions_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.sin(x))
    tl.store(y_ptr + BLOCK + at, libdevice.tanh(x))
    tl.store(y_ptr + 2 * BLOCK + at, libdevice.log1p(tl.abs(x)))
    tl.store(y_ptr + 3 * BLOCK + at, tl.erf(x))
    tl.store(y_ptr + 4 * BLOCK + at, libdevice.pow(tl.abs(x), x * 0 + 1.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_of_libdevice(dtype):
    """Large arguments use the slow reduction of angles: local memory, carries and a call (float64)."""
    x = torch.randn(256, generator=torch.Generator().manual_seed(0)).to(dtype) * 1e6
    x[:128] /= 1e6
    y = torch.empty(5, 256, dtype=dtype)
    with ptx_emulator.gpu(90):
        functions_kernel[(1,)](x, y, BLOCK=256)
    want = torch.stack([x.sin(), x.tanh(), x.abs().log1p(), x.erf(), x.abs() ** 1.5])
    assert (y - want).abs().div(want.abs() + 1e-3).max() < (2e-6 if dtype == torch.float32 else 1e-12)


@jit(noinline=True)
def doubled(x, y):
    return x * 2 + y


@jit
def calling_kernel(x_ptr, y_ptr, n):
    for k in range(n):
        tl.store(y_ptr + k, doubled(tl.load(x_ptr + k), k) + doubled(k, 1.0))


@pytest.mark.parametrize("arch", [80, 100])
def test_a_function_that_is_called(arch):
    x, y = torch.randn(5), torch.empty(5)
    with ptx_emulator.gpu(arch):
        calling_kernel[(1,)](x, y, 5)
    assert torch.allclose(y, 2 * x + 3 * torch.arange(5.0) + 1)


@jit
def decimal_kernel(x_ptr, BLOCK: tl.constexpr):
    at = x_ptr + tl.arange(0, BLOCK)
    text: tl.constexpr = "{ .reg .pred p; setp.gt.f32 p, $1, 20.; mul.f32 $0, $1, -2.5e-1; @p mov.f32 $0, 1e2; }"
    tl.store(at, tl.inline_asm_elementwise(text, "=f,f", [tl.load(at)], tl.float32, True, 1))


@pytest.mark.parametrize("arch", [80, 100])
def test_decimal_floats_in_inline_assembly(arch):
    x = torch.tensor([19.0, 20.0, 20.5, -4.0] * 8)
    want = torch.where(x > 20, 100, -0.25 * x)
    with ptx_emulator.gpu(arch):
        decimal_kernel[(1,)](x, BLOCK=32, num_warps=1)
    assert torch.equal(x, want)
