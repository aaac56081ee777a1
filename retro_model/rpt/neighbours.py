"""Encoder of neighbours: a chunk and its successor attend each other, then the chunk that retrieved them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retro_model.base import checks
from retro_model.layers import RotaryAttention, rotation

from .layers import norm


class NeighbourEncoder(nn.Module):
    """Encoder of the states [B,L,K,2m,d] of retrieved neighbours.

        N = [e_j ; e_{j+1}];   N += BiAttn(norm N);   N += CrossAttn(norm N <- norm H_i)

    `pair` does the first two steps once a chunk, because they depend on no query; `augment` does the last step.

    Args:
        d_model, num_heads: d, H.
        null_slot, dropout, backend: as in `RotaryAttention`.

    Source: Rubin and Berant, arXiv 2306.13421, section 3.1 and its footnote 2, appendix B.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        null_slot: bool = False,
        dropout: float = 0.0,
        backend=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        where = {"device": device, "dtype": dtype}
        options = {"null_slot": null_slot, "dropout": dropout, "backend": backend, **where}
        self.dropout = dropout
        self.norm, self.attention = norm(d_model, **where), RotaryAttention(d_model, num_heads, **options)
        self.cross_query_norm, self.cross_key_norm = norm(d_model, **where), norm(d_model, **where)
        self.cross = RotaryAttention(d_model, num_heads, **options)

    def forward(self, states: Tensor, chunks: Tensor, index: Tensor) -> Tensor:
        """Return states [B,L,K,2m,d] of neighbours `index` [B,L,K]; those of -1 (none) are finite and arbitrary.

        Args:
            states: e [B,L,m,d] of the chunks.
            chunks: H [B,L,m,d], the lower decoder's states of the retrieving chunks.
        """
        sizes: dict[str, int] = {"d_model": self.attention.d_model}
        checks.shape("states", states, "B,L,m,d_model", sizes)
        checks.shape("chunks", chunks, "B,L,m,d_model", sizes)
        checks.shape("index", index, "B,L,K", sizes)
        b, chunk_count, m, d = states.shape
        if chunk_count > 1:
            pairs = self.pair(states[:, :-1], states[:, 1:])
        else:
            pairs = states.new_zeros(b, 1, 2 * m, d)
        row = torch.arange(b, device=index.device).view(b, 1, 1)
        return self.augment(pairs[row, index.clamp(0, pairs.shape[1] - 1)], chunks)

    def of(self, states: Tensor, chunks: Tensor, index: Tensor) -> Tensor:
        """`forward` with `states` [B,S,m,d] of more chunks than the retrieving ones. Encodes only retrieved chunks."""
        row = torch.arange(len(states), device=index.device).view(-1, 1, 1)
        first = index.clamp(0, states.shape[1] - 2)
        pairs = self.pair(*(states[row, first + step].flatten(1, 2) for step in range(2)))
        return self.augment(pairs.unflatten(1, index.shape[1:]), chunks)

    def pair(self, first: Tensor, second: Tensor) -> Tensor:
        """Return states [B,L,2m,d] of pairs of consecutive chunks' e, [B,L,m,d] each."""
        pairs = torch.cat([first, second], 2)
        x = pairs.flatten(0, 1)
        x = x + self._dropped(self.attention(self.norm(x), self._turn(x)))
        return x.view(pairs.shape)

    def augment(self, pairs: Tensor, chunks: Tensor) -> Tensor:
        """Return states of neighbours [B,L,K,2m,d] after attention to their retrieving chunks [B,L,m,d]."""
        x = pairs.flatten(0, 2)
        neighbours = pairs.shape[2]
        chunks = self.cross_key_norm(chunks).flatten(0, 1)
        # positions restart in every neighbour, so each is a batch entry; a chunk is projected once, then repeated
        key, value = (t.repeat_interleave(neighbours, 0) for t in self.cross.project(chunks, self._turn(chunks)))
        x = x + self._dropped(
            self.cross.attend(self.cross.queries(self.cross_query_norm(x), self._turn(x)), key, value)
        )
        return x.view(pairs.shape)

    def _turn(self, x: Tensor):
        return rotation(torch.arange(x.shape[1], device=x.device), self.attention.head_dim, x.dtype)

    def _dropped(self, update: Tensor) -> Tensor:
        return F.dropout(update, self.dropout, self.training)
