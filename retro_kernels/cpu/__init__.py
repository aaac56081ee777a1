"""Vectorised, threaded C++ kernels; one module per op, of the same name as everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import _native, _problem
from . import _recycled

# From here on malloc maps memory afresh unless it has as much free (M_MMAP_THRESHOLD's largest value in glibc), so each
# call pays a page fault for every 4 KiB it writes: a quarter of chunked cross-attention's backward pass in float32.
HUGE_PAGES_FROM = 32 << 20


def unavailable() -> str | None:
    """Why this machine can't run the backend at all; None if it can."""
    return _native.unavailable("_cpu")


def unsupported_tensors(tensors: dict[str, Tensor | None]) -> str | None:
    """What every op of this backend refuses."""
    return _problem.unsupported_tensors(tensors, "cpu")


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An output whose elements a kernel will all write; a large one in huge pages, if the system has them."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes >= HUGE_PAGES_FROM:
        _native.extension("_cpu").advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def gradient(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`empty`; a large one in memory that an earlier one gave back: gradients come and go with every call."""
    if math.prod(shape) * dtype.itemsize < _recycled.FROM:
        return empty(shape, dtype)
    tensor = _recycled.take(shape, dtype)
    if tensor is None:
        tensor = empty(shape, dtype)
        _recycled.keep(tensor)
    return tensor


def allocator(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
    """`empty` of that shape, for calls that repeat: by what torch's own compiler allocates with, at a third of the
    time."""
    direct = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
    like = torch.empty(shape, dtype=dtype, device="meta")
    if direct is None or like.nbytes >= HUGE_PAGES_FROM:
        return lambda: empty(shape, dtype)
    strides = like.stride()
    return lambda: direct(shape, strides, dtype)
