"""Allocation of outputs and reasons to refuse a call, for the CPU backends of all ops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core import arguments
from . import recycled


def unsupported_tensors(tensors: dict[str, Tensor | None]) -> str | None:
    """Why no kernel of this backend can read the tensors; None if it can."""
    return arguments.unsupported_tensors(tensors, "cpu")


def unsupported(call) -> str | None:
    """Why the differentiable tensors of a call can't be served; None if they can."""
    return unsupported_tensors({name: getattr(call, name) for name in call.DIFFERENTIABLE})


def unsupported_but_float32(call) -> str | None:
    """Why kernels for float32 alone can't serve a call; None if they can."""
    for name in call.DIFFERENTIABLE:
        x = getattr(call, name)
        if x is not None and x.dtype != torch.float32:
            return f"{name} is {x.dtype}; have float32"
        if x is not None and x.device.type != "cpu":
            return f"{name} is on {x.device}, not on a cpu device"
    return None


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate an output; a kernel will write every element."""
    large = math.prod(shape) * dtype.itemsize >= recycled.FROM
    return recycled.empty(shape, dtype) if large else torch.empty(shape, dtype=dtype)
