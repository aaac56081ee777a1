"""Copies from host to device that make the host wait for nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on `device`. A copy to a GPU is asynchronous only from pinned memory; the allocator of pinned memory
    keeps the block until the copy has ended."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def numbers(values: Sequence, device: torch.device | str) -> Tensor:
    """`torch.tensor(values, device=device)` for a GPU at work: that one waits until the copy has ended."""
    return send(torch.tensor(values), device)
