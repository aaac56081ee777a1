"""What the CPU backends of the ops share: fresh memory, refusals."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core import arguments, recycled, steps


def unsupported_tensors(tensors: dict[str, Tensor | None]) -> str | None:
    """What every op of this backend refuses."""
    return arguments.unsupported_tensors(tensors, "cpu")


def unsupported_but_float32(call) -> str | None:
    """What an op with kernels for float32 alone refuses."""
    for name in call.DIFFERENTIABLE:
        x = getattr(call, name)
        if x is not None and x.dtype != torch.float32:
            return f"{name} is {x.dtype}; have float32"
        if x is not None and x.device.type != "cpu":
            return f"{name} is on {x.device}, not on a cpu device"
    return None


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An output whose elements a kernel will all write."""
    if steps.active() is not None:
        return torch.empty(shape, dtype=dtype, device="meta")
    large = math.prod(shape) * dtype.itemsize >= recycled.FROM
    return recycled.empty(shape, dtype) if large else torch.empty(shape, dtype=dtype)
