"""Layers of RPT: window attention, chunked cross-attention, the decoder layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

import retro_kernels as rk
from retro_model.layers import FeedForward, RMSNorm, RotaryAttention, Rotation

from .config import RPTConfig

NORM_EPS = 1e-6


class Memory(NamedTuple):
    """Input of the upper decoder: neighbours' states [B,L,K,2m,d], their rotation, chunk numbers (-1: none), gates."""

    states: Tensor
    turn: Rotation
    index: Tensor
    gate: Tensor

    @property
    def neighbour_mask(self) -> Tensor:
        """bool [B,L,K], True = a neighbour."""
        return self.index >= 0

    def seen(self, cca: CrossAttention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return keys and values [B,L,K,2m,H,D] of a layer, masks and gates [B,L,K]."""
        return *cca.project(self.states, self.turn), self.neighbour_mask, self.gate


class Retrieved(NamedTuple):
    """Scores [B,L,L] of a forward pass (None without a retriever, or with a cache), index and gates [B,L,K]."""

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

    def forward(self, x: Tensor, turn: Rotation) -> Tensor:
        """Return the update [B,N,d] of x [B,N,d]."""
        return self.window(self.queries(x, turn), *self.project(x, turn))

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
        options |= {"null_slot": config.null_slot, "dropout": config.dropout}
        super().__init__(config.d_model, config.num_heads, **options)
        self.chunk_len = config.chunk_len

    def forward(self, x: Tensor, memory: Memory, turn: Rotation) -> Tensor:
        """Return the update [B,N,d] of x [B,N,d]. turn: of `SelfMemory.reader_positions`."""
        return self.read(x, turn, memory.seen(self), 0)

    def read(self, x: Tensor, turn: Rotation, seen: Sequence[Tensor], query_start: int) -> Tensor:
        """`forward` with projected keys and values [B,L,K,2m,H,D], masks and gates, as a cache holds them."""
        key, value, mask, gate = seen
        options = {"chunk_len": self.chunk_len, "neighbour_mask": mask, "neighbour_gate": gate.to(key.dtype)}
        query, op = self.queries(x, turn), rk.chunked_cross_attention
        return self.attend(query, key, value, op, query_start=query_start, **options)


class DecoderLayer(nn.Module):
    """Window attention, chunked cross-attention where `reads`, feed-forward; each a pre-norm residual."""

    def __init__(self, config: RPTConfig, *, reads: bool, backend: str | None = None, **where):
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = norm(config.d_model, **where)
        self.attention = WindowAttention(config, backend=backend, **where)
        self.cca_norm = self.cca = None
        if reads:
            self.cca_norm, self.cca = norm(config.d_model, **where), CrossAttention(config, backend=backend, **where)
        self.feed_forward_norm = norm(config.d_model, **where)
        form = {"gated": config.gated_ffn, "approximate": "tanh"}
        self.feed_forward = FeedForward(config.d_model, config.d_ff, **form, **where)

    def forward(self, x: Tensor, turn: Rotation, memory: Memory | None = None, reader_turn=None) -> Tensor:
        """x [B,N,d] -> [B,N,d]. turn: of the tokens' positions; reader_turn: of `reader_positions`."""
        x = self._added(x, self.attention(self.attention_norm(x), turn))
        if self.cca is not None and memory is not None:
            x = self._added(x, self.cca(self.cca_norm(x), memory, reader_turn))
        return self.feed(x)

    def feed(self, x: Tensor) -> Tensor:
        """Add the feed-forward layer's update."""
        return self._added(x, self.feed_forward(self.feed_forward_norm(x)))

    def _added(self, x: Tensor, update: Tensor) -> Tensor:
        return x + F.dropout(update, self.dropout, self.training)
