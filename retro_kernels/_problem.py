"""One call of each op, as a value: every argument checked, every default filled in.

The public ops build these, backends consume them. They hold no behaviour beyond sizes that follow from shapes, so that
`ops`, the registration and all backends agree on names without importing each other. Letters: B batch, N queries,
M chunk length, L chunks, K neighbours, R neighbour tokens, H heads, G key/value heads, D head dimension, E width of the
relative keys, T their rows, S keys.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ChunkedCrossAttention(NamedTuple):
    """`rel_query` None means the query itself; `seed` is an int64 tensor [1] when dropout_p > 0."""

    query: Tensor  # [B,N,H,D]
    key: Tensor  # [B,L,K,R,G,D]
    value: Tensor  # [B,L,K,R,G,D]
    chunk_len: int
    rel_key: Tensor | None  # [H or 1,T,E]
    rel_query: Tensor | None  # [B,N,H,E]
    rel_start: int
    content_bias: Tensor | None  # [H,D]
    position_bias: Tensor | None  # [H,E]
    neighbour_mask: Tensor | None  # bool [B,L,K] or [B,L,K,R]
    neighbour_gate: Tensor | None  # [B,L,K]
    scale: float
    query_start: int
    dropout_p: float
    seed: Tensor | None

    #: inputs that take a gradient, in the order in which `backward` returns them
    DIFFERENTIABLE = ("query", "key", "value", "rel_key", "rel_query", "content_bias", "position_bias", "neighbour_gate")


class RelativeAttention(NamedTuple):
    """`rel_query` None means the query itself; `window` None means unbounded."""

    query: Tensor  # [B,N,H,D]
    key: Tensor  # [B,S,G,D]
    value: Tensor  # [B,S,G,D]
    rel_key: Tensor | None  # [H or 1,T,E]
    rel_query: Tensor | None  # [B,N,H,E]
    rel_start: int
    content_bias: Tensor | None  # [H,D]
    position_bias: Tensor | None  # [H,E]
    causal: bool
    causal_gap: int
    window: int | None
    query_offset: int
    key_mask: Tensor | None  # bool [B,S]
    query_segment: Tensor | None  # int [B,N]
    key_segment: Tensor | None  # int [B,S]
    scale: float
    dropout_p: float
    seed: Tensor | None

    DIFFERENTIABLE = ("query", "key", "value", "rel_key", "rel_query", "content_bias", "position_bias")


class RelativeLogits(NamedTuple):
    query: Tensor  # [B,N,H,E]
    rel_key: Tensor  # [H or 1,T,E]
    key_len: int
    rel_start: int
    position_bias: Tensor | None  # [H,E]
    query_offset: int

    DIFFERENTIABLE = ("query", "rel_key", "position_bias")


class TopkChunks(NamedTuple):
    query: Tensor  # [B,Q,D]
    key: Tensor  # [B or 1,S,D]
    k: int
    metric: str  # "dot" or "l2"
    causal_gap: int | None
    query_offset: int
    query_doc: Tensor | None  # int [B,Q]
    key_doc: Tensor | None  # int [B or 1,S]
    key_mask: Tensor | None  # bool [B or 1,S]

    DIFFERENTIABLE = ("query", "key")


class LeakyAverage(NamedTuple):
    x: Tensor  # [B,N,H,D]
    decay: Tensor  # [H]
    initial: Tensor | None  # [B,H,D]

    DIFFERENTIABLE = ("x", "decay", "initial")


def attending_rows(call: ChunkedCrossAttention, chunk: int) -> tuple[int, int]:
    """Rows [first, last) of the query that attend `chunk`: absolute positions (chunk+1)*M-1 .. (chunk+2)*M-2.

    >>> # M=4, query_start=0: chunk 0 is attended by tokens 3,4,5,6 (the last token of chunk 0 and three of chunk 1)
    """
    first = (chunk + 1) * call.chunk_len - 1 - call.query_start
    n = call.query.shape[1]
    return max(first, 0), max(min(first + call.chunk_len, n), 0)


def attended_chunks(query_len: int, chunk_len: int, query_start: int) -> tuple[int, int]:
    """Chunks [first, last) that the tokens query_start .. query_start+query_len-1 attend (at least an empty range)."""
    first = max((query_start + 1) // chunk_len - 1, 0)
    last = (query_start + query_len) // chunk_len if query_len > 0 else 0
    return first, max(last, first)
