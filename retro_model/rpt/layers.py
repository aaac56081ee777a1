"""The layers of RPT: the window of its attention, chunked cross-attention, the decoder layer."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

import retro_kernels as rk
from retro_model.layers import FeedForward, RMSNorm, RotaryAttention, Rotation

from .config import RPTConfig

NORM_EPS = 1e-6


class Memory(NamedTuple):
    """Input of the upper decoder: neighbours' states [B,L,K,2m,d] and their positions, which chunks they are (-1:
    none), gates [B,L,K].

    lead: tokens before the first one that reads, counted from where the memory begins.
    """

    states: Tensor
    turn: Rotation
    index: Tensor
    gate: Tensor
    lead: int = 0

    @property
    def neighbour_mask(self) -> Tensor:
        """bool [B,L,K], True = there is one."""
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
    """Causal attention to the token's own segment and the one before it, or to the last 2S tokens.

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
        """The update [B,N,d] of x [B,N,d]. part: where other processes hold the rest of the documents."""
        query, (key, value) = self.queries(x, turn), self.project(x, turn)
        return self.window(query, key, value) if part is None else part.window(self, query, key, value)

    def window(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The update of the last N of S tokens: query [B,N,H,D], key and value [B,S,H,D]; key 0 begins a segment."""
        seen = {"window": 2 * self.segment} if self.sliding else {"window_block": self.segment}
        return self.attend(query, key, value, causal=True, **seen)


class CrossAttention(RotaryAttention):
    """Chunked cross-attention: every token attends the neighbours of the last complete chunk before it, through their
    gates.

    Token t reads the neighbours of chunk u = (t+1)//m - 1, all K*2m states in one softmax; the first m-1 tokens read
    nothing. Its query has position ((t+1) % m) + m - 1, and the states of a neighbour have positions 0 .. 2m-1. Where
    the neighbour's first chunk equals chunk u, the copy of the token to be predicted is at the next position.

    Source: arXiv 2306.13421, section 3.1; Borgeaud et al., arXiv 2112.04426, section 2.4.
    """

    def __init__(self, config: RPTConfig, **options):
        super().__init__(
            config.d_model, config.num_heads, null_slot=config.null_slot, dropout=config.dropout, **options
        )
        self.chunk_len = config.chunk_len

    def forward(self, x: Tensor, memory: Memory, turn: Rotation) -> Tensor:
        """The update [B,N,d] of x [B,N,d]. turn: `positions` of these tokens."""
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
        """`forward` with keys and values [B,L,K,2m,H,D] that are projected already, as a cache holds them."""
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

    def positions(self, tokens: Tensor) -> Tensor:
        """Positions at which tokens int64 [...] of a sequence read."""
        return (tokens + 1) % self.chunk_len + self.chunk_len - 1


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
        """x [B,N,d] -> [B,N,d]. turn: of the tokens' positions; reader_turn: of their positions as readers of `memory`;
        part: where other processes hold the rest of the documents."""
        x = x + self.dropped(self.attention(self.attention_norm(x), turn, part))
        if self.cca is not None and memory is not None:
            x = x + self.dropped(self.cca(self.cca_norm(x), memory, reader_turn))
        return self.feed(x)

    def feed(self, x: Tensor) -> Tensor:
        """The last residual step."""
        return x + self.dropped(self.feed_forward(self.feed_forward_norm(x)))

    def dropped(self, update: Tensor) -> Tensor:
        """A residual update with dropout."""
        return F.dropout(update, self.dropout, self.training)
