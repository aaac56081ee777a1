"""Memory that shows a wrong access: guard bands round a tensor, strided views, and poison in unwritten memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

GUARD = 64  # NaN elements before and after a guarded tensor


def guarded(tensor: Tensor) -> Tensor:
    """Return the same values inside a larger buffer whose other elements are NaN (True for bool): reading past an end
    shows.
    """
    fill = torch.nan if tensor.is_floating_point() else 1
    buffer = torch.full((tensor.numel() + 2 * GUARD,), fill, dtype=tensor.dtype, device=tensor.device)
    view = buffer[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    view.copy_(tensor)
    return view


def sliced(tensor: Tensor) -> Tensor:
    """Return the same values as a strided view: rows twice as far apart, NaN between them, last dimension
    contiguous.
    """
    if tensor.dim() < 2:
        return tensor
    fill = torch.nan if tensor.is_floating_point() else 0
    padded = torch.full(
        (*tensor.shape[:-2], 2 * tensor.shape[-2], tensor.shape[-1] + 3), fill, dtype=tensor.dtype, device=tensor.device
    )
    view = padded[..., ::2, 1 : 1 + tensor.shape[-1]]
    view.copy_(tensor)
    return view


def spread(tensor: Tensor) -> Tensor:
    """Return the same values as a view whose last dimension is strided too. Elements between must not be read."""
    fill = torch.nan if tensor.is_floating_point() else 1
    padded = torch.full((*tensor.shape[:-1], 3 * tensor.shape[-1]), fill, dtype=tensor.dtype, device=tensor.device)
    padded[..., ::3] = tensor
    return padded[..., ::3]


def stepped(tensor: Tensor, step: int) -> Tensor:
    """Return the same values between NaN, every dimension of size 1 with stride `step`, where no element lies."""
    buffer = guarded(tensor)
    strides = [step if size == 1 else stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True)]
    return buffer.as_strided(buffer.shape, strides)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory from torch.empty and its kin, C++ callers included, holds NaN (or the greatest integer, or True)
    until it is written.

    It uses torch's deterministic mode, which alone fills memory, and restores that mode afterwards.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ops without a deterministic form warn; only the filling is wanted here
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = True
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = filled
