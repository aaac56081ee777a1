"""Linear maps on the CPU: products of float32 matrices in row-major or column-major order (csrc/cpu/linear.cpp)."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch
from torch import Tensor

from ...core import native, steps
from ...cpu_lib import empty, unsupported_but_float32

LEAST_MULTIPLY_ADDS = 2**21  # with fewer the call costs more than the faster product saves
LEAST_ROWS = 32  # with fewer the packed copy of the other matrix costs more than it saves

unsupported = unsupported_but_float32


def slower(call) -> str | None:
    if why := _processor():
        return why
    columns = call.weight.shape[0]
    rows = call.input.numel() // max(1, call.input.shape[-1])
    if min(rows, columns) < LEAST_ROWS or call.input.numel() * columns < LEAST_MULTIPLY_ADDS:
        return "the product is small"
    return None


@functools.cache
def _processor() -> str | None:
    """Why torch's products are as fast on this processor. torch's library uses AVX2 where it is not Intel's."""
    if platform.machine() not in ("x86_64", "AMD64") or not native.cpu_isa().startswith("avx512"):
        return "only the kernel for AVX-512 is known to be faster"
    try:
        intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        intel = "Intel" in platform.processor()
    return "torch's library uses AVX-512 on Intel's processors" if intel else None


def forward(call) -> tuple[Tensor]:
    out = empty((*call.input.shape[:-1], len(call.weight)), torch.float32)
    bias = None if call.bias is None else call.bias.contiguous()
    _multiply(_matrix(call.input), _turned(_matrix(call.weight)), bias, out)
    return (out,)


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    grad = _matrix(grads[0])
    results = [empty(x.shape, torch.float32) if need else None for x, need in zip(call[:2], needs)]
    if needs[0]:
        _multiply(grad, _matrix(call.weight), None, results[0])
    if needs[1]:
        _multiply(_turned(grad), _matrix(call.input), None, results[1])
    return [*results, grads[0].reshape(-1, len(call.weight)).sum(0) if needs[2] else None]


def _multiply(a: steps.Seen, b: steps.Seen, bias: Tensor | None, out: Tensor) -> None:
    steps.call("_cpu", "matmul", a, b, bias, _matrix(out), steps.THREADS)


def _matrix(x: Tensor) -> steps.Seen:
    """View x [...,K] as a matrix: in place if its rows or columns are contiguous, else as a copy."""
    return steps.Seen(x, x.shape, x.stride()) if x.dim() == 2 and 1 in x.stride() else steps.rows(x.contiguous())


def _turned(x: steps.Seen) -> steps.Seen:
    """Return the transpose."""
    return steps.Seen(x.tensor, x.shape[::-1], x.strides[::-1])
