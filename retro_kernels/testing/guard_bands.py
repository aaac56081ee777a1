"""Memory that reveals a wrong access: guard bands around a tensor, strided views, and poison in unwritten memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

GUARD = 64  # NaN elements before and after a guarded tensor


def guarded(tensor: Tensor) -> Tensor:
    """Return the same values inside a larger buffer whose other elements are NaN (1 for integers, True for bool), so
    that a read past an end changes the result.
    """
    fill = torch.nan if tensor.is_floating_point() else 1
    buffer = torch.full((tensor.numel() + 2 * GUARD,), fill, dtype=tensor.dtype, device=tensor.device)
    view = buffer[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    view.copy_(tensor)
    return view


def sliced(tensor: Tensor) -> Tensor:
    """Return the same values as a strided view: rows twice as far apart with NaN between, last dimension contiguous."""
    if tensor.dim() < 2:
        return tensor
    fill = torch.nan if tensor.is_floating_point() else 0
    shape = (*tensor.shape[:-2], 2 * tensor.shape[-2], tensor.shape[-1] + 3)
    padded = torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)
    view = padded[..., ::2, 1 : 1 + tensor.shape[-1]]
    view.copy_(tensor)
    return view


def spread(tensor: Tensor) -> Tensor:
    """Return the same values as a view whose last dimension is strided too, with NaN (or 1) between."""
    fill = torch.nan if tensor.is_floating_point() else 1
    padded = torch.full((*tensor.shape[:-1], 3 * tensor.shape[-1]), fill, dtype=tensor.dtype, device=tensor.device)
    padded[..., ::3] = tensor
    return padded[..., ::3]


def stepped(tensor: Tensor, step: int) -> Tensor:
    """Return the same values between guard bands, with stride `step` in every dimension of size 1."""
    buffer = guarded(tensor)
    strides = [step if size == 1 else stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True)]
    return buffer.as_strided(buffer.shape, strides)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, unwritten memory of torch.empty and similar functions, also called from C++, holds NaN (or the greatest
    integer, or True).

    Only torch's deterministic mode fills memory, so it is on inside and restored afterwards.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ops without a deterministic form warn
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = True
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = filled
