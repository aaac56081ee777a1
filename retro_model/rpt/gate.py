"""Neighbour gate: a weight for each neighbour that the upper decoder reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retro_model.base import checks
from retro_model.layers import RotaryAttention, rotation

from .layers import norm


class NeighbourGate(nn.Module):
    """Gate in [floor, 1] for each neighbour, from its mean state and the mean states of earlier neighbours.

        c = mean of a neighbour's states over its tokens, in the order (chunk, rank);   c += CausalAttn(norm c)
        g = max(floor, sigmoid(w·norm(c) / d))

    w is of order d^-0.5 and the product is divided by d, so g starts at about 1/2. Multiply the states by g, or pass it
    as `rk.chunked_cross_attention(neighbour_gate=)`. A norm after the product would cancel it.

    Example:
        gate = NeighbourGate(512, num_heads=8)
        g = gate(states, mask)  # states [B,L,K,R,512], mask bool [B,L,K] -> [B,L,K]

    Args:
        d_model, num_heads: d, H of its attention.
        floor: eta, the least gate; 1: no gate.
        dropout, backend: as in `RotaryAttention`.

    Source: Rubin and Berant, arXiv 2306.13421, section 3.1.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        floor: float = 0.1,
        dropout: float = 0.0,
        backend=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.floor, self.dropout = floor, dropout
        self.norm = norm(d_model, **where)
        self.attention = RotaryAttention(d_model, num_heads, dropout=dropout, backend=backend, **where)
        self.out_norm = norm(d_model, **where)
        self.weight = nn.Parameter(torch.empty(d_model, **where))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set w to N(0, 1/d)."""
        nn.init.normal_(self.weight, std=len(self.weight) ** -0.5)

    def forward(self, states: Tensor, neighbour_mask: Tensor, first: int = 0, extend: Callable | None = None) -> Tensor:
        """Return g [B,L,K] of states [B,L,K,R,d].

        Args:
            neighbour_mask: bool [B,L,K]; the others do not attend a neighbour under False.
            first: number of neighbours of earlier chunks.
            extend: prepends them: (keys, values, masks) [B,L*K,...] -> [B,first+L*K,...]; None: there are none.
        """
        sizes: dict[str, int] = {"d_model": len(self.weight)}
        checks.shape("states", states, "B,L,K,R,d_model", sizes)
        checks.shape("neighbour_mask", neighbour_mask, "B,L,K", sizes)
        pooled = states.mean(-2).flatten(1, 2)
        position = torch.arange(first, first + pooled.shape[1], device=pooled.device)
        turn, normed = rotation(position, self.attention.head_dim, pooled.dtype), self.norm(pooled)
        seen = *self.attention.project(normed, turn), neighbour_mask.flatten(1)
        key, value, key_mask = seen if extend is None else extend(*seen)
        update = self.attention.attend(self.attention.queries(normed, turn), key, value, causal=True, key_mask=key_mask)
        pooled = pooled + F.dropout(update, self.dropout, self.training)
        logit = self.out_norm(pooled) @ self.weight.to(pooled.dtype) / pooled.shape[-1]
        return torch.sigmoid(logit).clamp(min=self.floor).view(neighbour_mask.shape)
