"""Memory of an RPT, from the lower decoder's states to the upper decoder's input: encoder and gate of neighbours."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retro_model.base import checks
from retro_model.layers import RotaryAttention, initialise, rotation

from .config import RPTConfig
from .layers import Memory, Retrieved, norm
from .retriever import SelfRetriever, in_chunks


class NeighbourEncoder(nn.Module):
    """Encoder of the states [B,L,K,2m,d] of neighbours: a chunk and its successor attend each other, then chunk i.

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
        backend: str | None = None,
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
        """Return states [B,L,K,2m,d] of neighbours `index` [B,L,K]; the index -1 (none) gives finite, arbitrary states.

        Args:
            states: e [B,L,m,d] of the chunks.
            chunks: H [B,L,m,d], the lower decoder's states of the retrieving chunks.
        """
        sizes: dict[str, int] = {"d_model": self.attention.d_model}
        checks.shape("states", states, "B,L,m,d_model", sizes)
        checks.shape("chunks", chunks, "B,L,m,d_model", sizes)
        checks.shape("index", index, "B,L,K", sizes)
        b, chunk_count, m, d = states.shape
        several = chunk_count > 1
        pairs = self.pair(states[:, :-1], states[:, 1:]) if several else states.new_zeros(b, 1, 2 * m, d)
        row = torch.arange(b, device=index.device).view(b, 1, 1)
        return self.augment(pairs[row, index.clamp(0, pairs.shape[1] - 1)], chunks)

    def pair(self, first: Tensor, second: Tensor) -> Tensor:
        """Return states [B,L,2m,d] of pairs of consecutive chunks' e, [B,L,m,d] each."""
        pairs = torch.cat([first, second], 2)
        x = pairs.flatten(0, 1)
        return self._added(x, self.attention(self.norm(x), self._turn(x))).view(pairs.shape)

    def augment(self, pairs: Tensor, chunks: Tensor) -> Tensor:
        """Return states of neighbours [B,L,K,2m,d] after attention to their retrieving chunks [B,L,m,d]."""
        x = pairs.flatten(0, 2)
        chunks = self.cross_key_norm(chunks).flatten(0, 1)
        # positions restart in every neighbour, so each is a batch entry; a chunk is projected once, then repeated
        key, value = (t.repeat_interleave(pairs.shape[2], 0) for t in self.cross.project(chunks, self._turn(chunks)))
        query = self.cross.queries(self.cross_query_norm(x), self._turn(x))
        return self._added(x, self.cross.attend(query, key, value)).view(pairs.shape)

    def _turn(self, x: Tensor):
        return rotation(torch.arange(x.shape[1], device=x.device), self.attention.head_dim, x.dtype)

    def _added(self, x: Tensor, update: Tensor) -> Tensor:
        return x + F.dropout(update, self.dropout, self.training)


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
        backend: str | None = None,
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


class SelfMemory(nn.Module):
    """Base of models with `retriever`, `neighbours` and `gate`; each is None if the configuration has none."""

    def add_memory(self, config: RPTConfig, **options) -> None:
        """Make the parts. A model's constructor calls it, and sets `config`. options: backend, device and dtype."""
        self.retriever = self.neighbours = self.gate = None
        sizes, options = (config.d_model, config.num_heads), {"dropout": config.dropout, **options}
        if config.uses_neighbours:
            self.neighbours = NeighbourEncoder(*sizes, null_slot=config.null_slot, **options)
            self.gate = NeighbourGate(*sizes, floor=config.gate_floor, **options)
        if config.uses_neighbours and config.retriever:
            same = ("chunk_len", "excluded_chunks", "score_scale", "query_norm", "key_norm", "null_slot")
            self.retriever = SelfRetriever(*sizes, **{name: getattr(config, name) for name in same}, **options)

    @torch.no_grad()
    def reset_memory(self) -> None:
        """Set initial weights of the parts, null slots included; W_K equal to W_Q."""
        for part, passed in ((self.retriever, 1), (self.neighbours, 2), (self.gate, 1)):
            if part is not None:
                initialise(part, passed)
        if self.gate is not None:
            self.gate.reset_parameters()
        if self.retriever is not None:
            self.retriever.key.weight.copy_(self.retriever.query.weight)

    def remember(self, hidden: Tensor, index: Tensor | None, k: int, trunk_share=1.0) -> tuple[Memory, Retrieved]:
        """Retrieve, encode and gate the neighbours of every complete chunk of the lower decoder's states [B,N,d]."""
        chunks = in_chunks(hidden, self.config.chunk_len)
        states, scores = chunks, None
        if self.retriever is not None:
            states = self.retriever.encode(hidden)
            query, key = self.retriever.project(states, trunk_share)
            scores = self.retriever.scores(query, key)
            index = self.retriever.select(query, key, k, index)
        if not chunks.shape[1]:  # only the null slot is read
            index = index[:, :0]
        neighbours = self.neighbours(states, chunks, index)
        gate = self.gate(neighbours, index >= 0)
        turn = rotation(torch.arange(neighbours.shape[-2], device=hidden.device), self.config.head_dim, hidden.dtype)
        return Memory(neighbours, turn, index, gate), Retrieved(scores, index, gate)

    def reader_positions(self, position: Tensor) -> Tensor:
        """Return the positions of queries to neighbours, of tokens at `position` of a sequence."""
        return (position + 1) % self.config.chunk_len + self.config.chunk_len - 1
