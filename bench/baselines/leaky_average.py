"""Leaky average as matrix products: blocks of a Toeplitz matrix with a carried state, and the one [N,N] matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common import CompiledTwin

BLOCK = 128  # time steps a product


def _toeplitz(decay: Tensor, n: int) -> Tensor:
    """[H,n,n]: decay**(t-s) for s <= t, else 0."""
    steps = torch.arange(n, device=decay.device)
    power = steps[:, None] - steps
    return decay[:, None, None].pow(power.clamp_min(0).to(decay.dtype)).tril()


def eager(x, decay, *, initial=None) -> Tensor:
    """Blocks of 128 steps: a triangular product inside each, the last state carried to the next."""
    n = x.shape[1]
    matrix = _toeplitz(decay, min(n, BLOCK))
    steps = torch.arange(1, matrix.shape[1] + 1, device=x.device, dtype=decay.dtype)
    fading = decay[None, :].pow(steps[:, None])[..., None]  # [n,H,1]
    state, blocks = initial, []
    for block in x.split(BLOCK, 1):
        length = block.shape[1]
        y = torch.einsum("hts,bshd->bthd", matrix[:, :length, :length], block)
        if state is not None:
            y = y + fading[:length] * state[:, None]
        state = y[:, -1]
        blocks.append(y)
    return torch.cat(blocks, 1)


def toeplitz(x, decay, *, initial=None) -> Tensor:
    """The whole [N,N] matrix a head: O(N^2)."""
    y = torch.einsum("hts,bshd->bthd", _toeplitz(decay, x.shape[1]), x)
    if initial is not None:
        steps = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=decay.dtype)
        y = y + decay[None, :].pow(steps[:, None])[..., None] * initial[:, None]
    return y


eager_compiled = CompiledTwin(eager)
