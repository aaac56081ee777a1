"""Rotary positions: neighbouring entries of a head turn by an angle that grows with the position."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROTARY_BASE = 10_000.0  # longest wavelength / 2 pi: Su et al., arXiv 2104.09864, section 3.2.2


class Rotation(NamedTuple):
    """Cosines and sines [..., T, 1, D/2] of T positions: computed once, used by every layer that stands at them."""

    cos: Tensor
    sin: Tensor

    def repeat(self, count: int) -> Rotation:
        """The same positions `count` times over, [count*T, 1, D/2]."""
        return Rotation(*(t.repeat(count, 1, 1) for t in self))


def rotation(positions: Tensor, head_dim: int, dtype: torch.dtype = torch.float32) -> Rotation:
    """The rotation of positions int64 [...,T] for heads of `head_dim`:
    angle p * 10000^(-2i/D) for the pair of entries 2i, 2i+1.
    """
    frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    # float64: a document's positions outgrow float32's digits
    angle = (positions.unsqueeze(-1) * frequency).unsqueeze(-2)
    acc_dtype = torch.promote_types(dtype, torch.float32)
    return Rotation(angle.cos().to(acc_dtype), angle.sin().to(acc_dtype))


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """x [...,T,H,D] turned by the rotation of its T positions; q·k of two turned vectors depends on their displacement
    alone.

    >>> turn = rotation(torch.tensor([1]), 16)
    >>> x = torch.eye(16)[:1].view(1, 1, 16)
    >>> rotate(x, turn)[0, 0, :2]  # (cos 1, sin 1)
    tensor([0.5403, 0.8415])
    """
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * turn.cos - odd * turn.sin, even * turn.sin + odd * turn.cos), -1).flatten(-2).to(x.dtype)
