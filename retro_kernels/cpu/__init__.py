"""Vectorised, threaded C++ kernels; one module per op, of the same name as everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import _native, _problem
from . import _recycled


def unavailable() -> str | None:
    """Why this machine can't run the backend at all; None if it can."""
    return _native.unavailable("_cpu")


def unsupported_tensors(tensors: dict[str, Tensor | None]) -> str | None:
    """What every op of this backend refuses."""
    return _problem.unsupported_tensors(tensors, "cpu")


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An output whose elements a kernel will all write; a large one in memory that an earlier one gave back, else in
    huge pages, if the system has them: outputs come and go with every call."""
    if math.prod(shape) * dtype.itemsize < _recycled.FROM:
        return torch.empty(shape, dtype=dtype)
    tensor = _recycled.take(shape, dtype)
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype)
        _native.extension("_cpu").advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
        _recycled.keep(tensor)
    return tensor


def allocator(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
    """`empty` of that shape, for calls that repeat: by what torch's own compiler allocates with, at a third of the
    time."""
    direct = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
    like = torch.empty(shape, dtype=dtype, device="meta")
    if direct is None or like.nbytes >= _recycled.FROM:
        return lambda: empty(shape, dtype)
    strides = like.stride()
    return lambda: direct(shape, strides, dtype)
