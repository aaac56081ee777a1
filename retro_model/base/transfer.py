"""Asynchronous copies from host to device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on `device`, without waiting for the copy.

    A copy to a GPU is asynchronous only from pinned memory, whose allocator keeps the block until the copy has ended.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def numbers(values: Sequence, device: torch.device | str) -> Tensor:
    """Return `torch.tensor(values, device=device)` without waiting for the copy."""
    return send(torch.tensor(values), device)
