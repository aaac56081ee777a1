"""Rotary positions: pairs of a head's entries turn by an angle that grows with the position."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import retro_kernels as rk
from retro_model.base import checks

from .attention import Attention, local

ROTARY_BASE = 10_000.0  # longest wavelength / 2 pi: Su et al., arXiv 2104.09864, section 3.2.2


class Rotation(NamedTuple):
    """Cosines and sines [..., T, 1, D/2] of T positions: computed once for all layers."""

    cos: Tensor
    sin: Tensor

    def repeat(self, count: int) -> Rotation:
        """Return the positions repeated `count` times, [count*T, 1, D/2]."""
        return Rotation(*(t.repeat(count, 1, 1) for t in self))


def rotation(positions: Tensor, head_dim: int, dtype: torch.dtype = torch.float32) -> Rotation:
    """Return the rotation of positions int64 [...,T]: entries 2i, 2i+1 of a head turn by p * 10000^(-2i/D)."""
    frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    # float64: float32 has too few digits for positions in a long document
    angle = (positions.unsqueeze(-1) * frequency).unsqueeze(-2)
    acc_dtype = torch.promote_types(dtype, torch.float32)
    return Rotation(angle.cos().to(acc_dtype), angle.sin().to(acc_dtype))


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """Return x [...,T,H,D] turned by the rotation of its T positions.

    The product q·k of two turned vectors depends on their displacement alone.

    >>> turn = rotation(torch.tensor([1]), 16)
    >>> x = torch.eye(16)[:1].view(1, 1, 16)
    >>> rotate(x, turn)[0, 0, :2]  # (cos 1, sin 1)
    tensor([0.5403, 0.8415])
    """
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * turn.cos - odd * turn.sin, even * turn.sin + odd * turn.cos), -1).flatten(-2).to(x.dtype)


class RotaryAttention(Attention):
    """Multi-head attention with rotary positions and without biases. The caller says which keys a query sees.

        logit[i,j] = rotate(q_i)·rotate(k_j) / sqrt(D)

    Queries and keys are turned before the op, which needs no relative keys.

    Example:
        layer, turn = RotaryAttention(64, num_heads=4), rotation(torch.arange(100), 16)
        y = x + layer(norm(x), turn, causal=True)  # x [B,100,64]

    Args:
        d_model, num_heads: d and H; d / H is a multiple of 8 from 16 to 256.
        null_slot: add one learned key and value to each head; they are not turned.
        dropout, backend: as in `RelativeAttention`.

    Source: Su et al., arXiv 2104.09864; for the null slot RPT's public code.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        null_slot: bool = False,
        dropout: float = 0.0,
        backend: str | None = None,
        device=None,
        dtype=None,
    ):
        if checks.integer("d_model", d_model, low=1) % checks.integer("num_heads", num_heads, low=1):
            raise ValueError(f"num_heads: expected a divisor of d_model={d_model}; got {num_heads}")
        options = {"dropout": dropout, "backend": backend, "device": device, "dtype": dtype}
        super().__init__(d_model, num_heads, d_model // num_heads, **options)
        self.null_key = self.null_value = None
        if null_slot:
            self.head_parameters = ("null_key", "null_value")
            for name in self.head_parameters:
                setattr(self, name, nn.Parameter(self.query.weight.new_zeros(num_heads, self.head_dim)))

    def queries(self, x: Tensor, turn: Rotation) -> Tensor:
        """Return queries [...,T,H,D] of x [...,T,d] at the positions of `turn`."""
        return rotate(self.heads_of(x), turn)

    def project(self, context: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
        """Return keys and values [...,T,H,D] of a context [...,T,d] at the positions of `turn`."""
        key, value = super().project(context)
        return rotate(key, turn), value

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, op: Callable = rk.relative_attention, **options
    ) -> Tensor:
        """Return the update [B,N,d] of queries [B,N,H,D]; `op` and its options say which keys they see."""
        options |= self.options()
        if self.null_key is None:
            return self.output(op(query, key, value, **options).flatten(-2))
        out, lse = op(query, key, value, return_lse=True, **options)
        lse = lse.transpose(1, 2).unsqueeze(-1)  # [B,N,H,1]; -inf where only the null slot is seen
        null = (query * local(self.null_key)).sum(-1, keepdim=True).to(lse.dtype) * self.head_dim**-0.5
        whole = torch.logaddexp(lse, null)
        out = out * (lse - whole).exp() + local(self.null_value) * (null - whole).exp()
        return self.output(out.to(query.dtype).flatten(-2))

    def forward(
        self, x: Tensor, turn: Rotation, context: Tensor | None = None, context_turn: Rotation | None = None, **options
    ) -> Tensor:
        """Return the update [B,N,d] of x [B,N,d], which attends `context` [B,S,d] (None: x). options: of the op."""
        key, value = self.project(x, turn) if context is None else self.project(context, context_turn)
        return self.attend(self.queries(x, turn), key, value, **options)
