"""Layers of RPT: window attention, chunked cross-attention, the decoder layer."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

import retro_kernels as rk
from retro_model.layers import FeedForward, RMSNorm, RotaryAttention, Rotation

from .config import RPTConfig

NORM_EPS = 1e-6


class Memory(NamedTuple):
    """Input of the upper decoder: neighbours' states [B,L,K,2m,d], their rotation, chunk numbers (-1: none) and gates.

    lead: tokens from the beginning of the memory's first chunk to the first token of the call.
    """

    states: Tensor
    turn: Rotation
    index: Tensor
    gate: Tensor
    lead: int = 0

    @property
    def neighbour_mask(self) -> Tensor:
        """bool [B,L,K], True = a neighbour."""
        return self.index >= 0


class Retrieved(NamedTuple):
    """Retrieval of a forward pass: scores [B,L,L] (None without a retriever, or with a cache), index and gates
    [B,L,K]."""

    scores: Tensor | None
    index: Tensor
    gate: Tensor


def norm(d_model: int, **where) -> RMSNorm:
    """Pre-norm used by every block."""
    return RMSNorm(d_model, eps=NORM_EPS, **where)


class WindowAttention(RotaryAttention):
    """Causal attention to a token's own segment and the one before it, or to the last 2S tokens.

    With S = 2, "segments", x = visible:

        x . . . . .
        x x . . . .
        x x x . . .
        x x x x . .
        . . x x x .
        . . x x x x

    Source: arXiv 2306.13421, section 3.4; Dai et al., arXiv 1901.02860.
    """

    def __init__(self, config: RPTConfig, **options):
        super().__init__(config.d_model, config.num_heads, dropout=config.dropout, **options)
        self.segment, self.sliding = config.segment, config.window == "sliding"

    def forward(self, x: Tensor, turn: Rotation, part=None) -> Tensor:
        """Return the update [B,N,d] of x [B,N,d]. part: see `RPT.forward`."""
        query, (key, value) = self.queries(x, turn), self.project(x, turn)
        return self.window(query, key, value) if part is None else part.window(self, query, key, value)

    def window(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the update of the last N of S tokens: query [B,N,H,D], key and value [B,S,H,D].

        Key 0 is the first token of a segment.
        """
        seen = {"window": 2 * self.segment} if self.sliding else {"window_block": self.segment}
        return self.attend(query, key, value, causal=True, **seen)


class CrossAttention(RotaryAttention):
    """Chunked cross-attention: every token attends the neighbours of its last complete chunk, weighted by their gates.

    Token t attends the neighbours of chunk u = (t+1)//m - 1, all K*2m states in one softmax; the first m-1 tokens
    attend nothing. Its query has position ((t+1) % m) + m - 1, and the states of a neighbour have positions 0 .. 2m-1.
    So if the neighbour's first chunk equals chunk u, the copy of the token to predict has the next position.

    Source: arXiv 2306.13421, section 3.1; Borgeaud et al., arXiv 2112.04426, section 2.4.
    """

    def __init__(self, config: RPTConfig, **options):
        super().__init__(
            config.d_model, config.num_heads, null_slot=config.null_slot, dropout=config.dropout, **options
        )
        self.chunk_len = config.chunk_len

    def forward(self, x: Tensor, memory: Memory, turn: Rotation) -> Tensor:
        """Return the update [B,N,d] of x [B,N,d]. turn: of `SelfMemory.reader_positions`."""
        key, value = self.project(memory.states, memory.turn)
        return self.read(x, turn, key, value, memory.neighbour_mask, memory.gate, memory.lead)

    def read(
        self,
        x: Tensor,
        turn: Rotation,
        key: Tensor,
        value: Tensor,
        neighbour_mask: Tensor,
        gate: Tensor,
        query_start: int = 0,
    ) -> Tensor:
        """`forward` with projected keys and values [B,L,K,2m,H,D], as a cache holds them."""
        return self.attend(
            self.queries(x, turn),
            key,
            value,
            rk.chunked_cross_attention,
            chunk_len=self.chunk_len,
            neighbour_mask=neighbour_mask,
            neighbour_gate=gate.to(key.dtype),
            query_start=query_start,
        )


class DecoderLayer(nn.Module):
    """Window attention, chunked cross-attention where `reads`, feed-forward; each a pre-norm residual."""

    def __init__(self, config: RPTConfig, *, reads: bool, backend: str | None = None, device=None, dtype=None):
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.dropout = config.dropout
        self.attention_norm = norm(config.d_model, **where)
        self.attention = WindowAttention(config, backend=backend, **where)
        self.cca_norm = self.cca = None
        if reads:
            self.cca_norm, self.cca = norm(config.d_model, **where), CrossAttention(config, backend=backend, **where)
        self.feed_forward_norm = norm(config.d_model, **where)
        self.feed_forward = FeedForward(
            config.d_model, config.d_ff, gated=config.gated_ffn, approximate="tanh", **where
        )

    def forward(
        self, x: Tensor, turn: Rotation, memory: Memory | None = None, reader_turn: Rotation | None = None, part=None
    ) -> Tensor:
        """x [B,N,d] -> [B,N,d]. turn: of the tokens' positions. reader_turn: of their `reader_positions`. part: see
        `RPT.forward`."""
        x = x + self.dropped(self.attention(self.attention_norm(x), turn, part))
        if self.cca is not None and memory is not None:
            x = x + self.dropped(self.cca(self.cca_norm(x), memory, reader_turn))
        return self.feed(x)

    def feed(self, x: Tensor) -> Tensor:
        """Add the feed-forward layer's update."""
        return x + self.dropped(self.feed_forward(self.feed_forward_norm(x)))

    def dropped(self, update: Tensor) -> Tensor:
        """Apply dropout to a residual update."""
        return F.dropout(update, self.dropout, self.training)
