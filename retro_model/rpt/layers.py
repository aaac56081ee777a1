"""The layers of RPT: attention with rotary positions, its window, chunked cross-attention, the decoder layer.

Attention goes through `retro_kernels`; queries and keys are turned before the call, which then needs no relative keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retro_kernels as rk

from .config import RPTConfig
from .rotary import Rotation, rotate

NORM_EPS = 1e-6


class Memory(NamedTuple):
    """What the upper decoder reads: neighbours' states [B,L,K,2m,d] and their positions, which chunks they are (-1:
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
    """What a forward pass retrieved: scores [B,L,L] (None without a
    retriever, or with a cache), index and gates [B,L,K].
    """

    scores: Tensor | None
    index: Tensor
    gate: Tensor


def norm(d_model: int, **where) -> nn.RMSNorm:
    """The norm that stands before everything here."""
    return nn.RMSNorm(d_model, eps=NORM_EPS, **where)


class Attention(nn.Module):
    """Multi-head attention with rotary positions and no biases; which keys a query sees is for the caller to say.

    Args:
        d_model, num_heads: d and H; d / H is a multiple of 8 from 16 to 256.
        null_slot: one learned key and value a head beside the others; it is not turned.
        dropout: probability, in training, of dropping an attention weight.
        backend: of `retro_kernels`; None: the fastest that serves a call.
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
        self.num_heads, self.head_dim = num_heads, d_model // num_heads
        self.dropout, self.backend = dropout, backend
        self.query, self.key, self.value, self.output = (
            nn.Linear(d_model, d_model, bias=False, **where) for _ in range(4)
        )
        self.null_key = self.null_value = None
        if null_slot:
            self.null_key, self.null_value = (
                nn.Parameter(torch.empty(self.num_heads, self.head_dim, **where)) for _ in range(2)
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A null slot that starts neutral: logit and value 0."""
        for slot in (self.null_key, self.null_value):
            if slot is not None:
                nn.init.zeros_(slot)

    def heads(self, projected: Tensor) -> Tensor:
        """[...,H,D] of [...,d]."""
        return projected.unflatten(-1, (self.num_heads, self.head_dim))

    def queries(self, x: Tensor, turn: Rotation) -> Tensor:
        """Queries [...,T,H,D] of x [...,T,d] at the positions of `turn`."""
        return rotate(self.heads(self.query(x)), turn)

    def project(self, context: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values [...,T,H,D] of a context [...,T,d] at the positions of `turn`."""
        return rotate(self.heads(self.key(context)), turn), self.heads(self.value(context))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, op: Callable = rk.relative_attention, **options
    ) -> Tensor:
        """The update [B,N,d] of queries [B,N,H,D] that see keys and values as `op` and its options say."""
        options |= {"dropout_p": self.dropout if self.training else 0.0, "backend": self.backend}
        if self.null_key is None:
            return self.output(op(query, key, value, **options).flatten(-2))
        out, lse = op(query, key, value, return_lse=True, **options)
        lse = lse.transpose(1, 2).unsqueeze(-1)  # [B,N,H,1]; -inf where only the null slot is seen
        null = (query * self.null_key).sum(-1, keepdim=True).to(lse.dtype) * self.head_dim**-0.5
        whole = torch.logaddexp(lse, null)
        out = out * (lse - whole).exp() + self.null_value * (null - whole).exp()
        return self.output(out.to(query.dtype).flatten(-2))

    def forward(
        self, x: Tensor, turn: Rotation, context: Tensor | None = None, context_turn: Rotation | None = None, **options
    ) -> Tensor:
        """The update [B,N,d] of x [B,N,d], which attends `context`
        [B,S,d] (None: x itself). options: those of the op.
        """
        key, value = self.project(x, turn) if context is None else self.project(context, context_turn)
        return self.attend(self.queries(x, turn), key, value, **options)


class WindowAttention(Attention):
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


class CrossAttention(Attention):
    """Chunked cross-attention: every token attends the neighbours of the last complete chunk before it, through their
    gates.

    Token t reads the neighbours of chunk u = (t+1)//m - 1, all K*2m states in one softmax; the first m-1 tokens read
    nothing. It stands at position ((t+1) % m) + m - 1, the states of a neighbour at 0 .. 2m-1: where the neighbour
    equals the chunk, the token to be predicted is one position further.

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
        """Where tokens int64 [...] of a sequence stand as readers."""
        return (tokens + 1) % self.chunk_len + self.chunk_len - 1


class FeedForward(nn.Module):
    """Two matrices with a GELU (tanh form) between them, or a SwiGLU of three."""

    def __init__(self, config: RPTConfig, *, device=None, dtype=None):
        super().__init__()
        d, inner, where = config.d_model, config.d_ff, {"device": device, "dtype": dtype}
        self.inner, self.output = nn.Linear(d, inner, bias=False, **where), nn.Linear(inner, d, bias=False, **where)
        self.gate = nn.Linear(d, inner, bias=False, **where) if config.gated_ffn else None

    def forward(self, x: Tensor) -> Tensor:
        """The update [...,d] of x [...,d]."""
        if self.gate is None:
            return self.output(F.gelu(self.inner(x), approximate="tanh"))
        return self.output(F.silu(self.gate(x)) * self.inner(x))


class DecoderLayer(nn.Module):
    """Window attention, chunked cross-attention where `reads`, feed-forward; each a pre-norm residual."""

    def __init__(self, config: RPTConfig, *, reads: bool, backend: str | None = None, device=None, dtype=None):
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.dropout = config.dropout
        self.attention_norm, self.attention = (
            norm(config.d_model, **where),
            WindowAttention(config, backend=backend, **where),
        )
        self.cca_norm = self.cca = None
        if reads:
            self.cca_norm, self.cca = norm(config.d_model, **where), CrossAttention(config, backend=backend, **where)
        self.feed_forward_norm, self.feed_forward = norm(config.d_model, **where), FeedForward(config, **where)

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
