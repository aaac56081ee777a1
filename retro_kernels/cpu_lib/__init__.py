"""Vectorised, threaded C++ kernels; one module per op, of the same name as everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..core import arguments, native
from . import recycled


def unsupported_tensors(tensors: dict[str, Tensor | None]) -> str | None:
    """What every op of this backend refuses."""
    return arguments.unsupported_tensors(tensors, "cpu")


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An output whose elements a kernel will all write; a large one in memory that an earlier one gave back, else in
    huge pages, if the system has them: outputs come and go with every call."""
    if math.prod(shape) * dtype.itemsize < recycled.FROM:
        return torch.empty(shape, dtype=dtype)
    tensor = recycled.take(shape, dtype)
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype)
        native.extension("_cpu").advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
        recycled.keep(tensor)
    return tensor


def allocator(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
    """`empty` of that shape, for calls that repeat: by what torch's own compiler allocates with, at a third of the
    time."""
    direct = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
    like = torch.empty(shape, dtype=dtype, device="meta")
    if direct is None or like.nbytes >= recycled.FROM:
        return lambda: empty(shape, dtype)
    strides = like.stride()
    return lambda: direct(shape, strides, dtype)
