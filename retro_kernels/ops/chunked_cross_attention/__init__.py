"""Chunked cross-attention over time-merged neighbours."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from ... import checks
from ...core import operator
from ...core.call import serve
from .call import ChunkedCrossAttention


@overload
def chunked_cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    chunk_len: int,
    rel_key: Tensor | None = ...,
    rel_query: Tensor | None = ...,
    rel_start: int | None = ...,
    content_bias: Tensor | None = ...,
    position_bias: Tensor | None = ...,
    neighbour_mask: Tensor | None = ...,
    neighbour_gate: Tensor | None = ...,
    scale: float | None = ...,
    query_start: int | Tensor = ...,
    dropout_p: float = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def chunked_cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    chunk_len: int,
    rel_key: Tensor | None = ...,
    rel_query: Tensor | None = ...,
    rel_start: int | None = ...,
    content_bias: Tensor | None = ...,
    position_bias: Tensor | None = ...,
    neighbour_mask: Tensor | None = ...,
    neighbour_gate: Tensor | None = ...,
    scale: float | None = ...,
    query_start: int | Tensor = ...,
    dropout_p: float = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def chunked_cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    chunk_len: int,
    rel_key: Tensor | None = None,
    rel_query: Tensor | None = None,
    rel_start: int | None = None,
    content_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    neighbour_mask: Tensor | None = None,
    neighbour_gate: Tensor | None = None,
    scale: float | None = None,
    query_start: int | Tensor = 0,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every token to the neighbours of the last complete chunk before it, in one softmax.

    The token at position p = query_start + n attends the K*R neighbour tokens of chunk u = (p+1)//M - 1. Its index
    among the tokens that attend chunk u is i = (p+1) % M. With M = chunk_len = 4 and query_start = 0:

        position p   0  1  2 | 3  4  5  6 | 7  8  9 10 | 11
        chunk u      -  -  - | 0  0  0  0 | 1  1  1  1 | 2
        index i      -  -  - | 0  1  2  3 | 0  1  2  3 | 0

        logit[i,(a,j)] = scale * ((q_i + u)·(g_a k_aj) + (rq_i + v)·rel_key[i-j - rel_start])
        out_i = sum over (a,j) of softmax(logit)[i,(a,j)] * g_a v_aj

    j counts from the start of each neighbour a; u is `content_bias`, v `position_bias`, g `neighbour_gate`.

    Args:
        query: [B,N,H,D]; D a multiple of 8 from 16 to 256. N need not be a multiple of chunk_len.
        key, value: [B,L,K,R,G,D], H % G == 0, L >= (query_start+N)//chunk_len (where query_start is an int).
        chunk_len: M, tokens of a chunk.
        rel_key: [H or 1,T,E]; row t is the projected encoding of displacement i-j = rel_start + t.
        rel_query: [B,N,H,E], a separate relative query; None: the query (E = D).
        rel_start: displacement of row 0; a displacement outside the table adds 0. None: -(R-1); T must then be M+R-1.
        content_bias, position_bias: [H,D] and [H,E], Transformer-XL's u and v.
        neighbour_mask: bool [B,L,K] or [B,L,K,R], True = attend. A masked token may be NaN.
        neighbour_gate: [B,L,K], scales a neighbour's keys and values.
        scale: default D**-0.5.
        query_start: position of query 0, for decoding against cached neighbours. Or int64 [B] on the query's device,
            one for each batch entry. The host never reads it, so a decode step can be captured once as a CUDA graph
            and replayed. Tokens of a chunk beyond L then attend nothing instead of raising an error. Values are clamped
            to +-2**29.
        dropout_p: probability that an attention weight is dropped; `torch.manual_seed` makes it repeatable.
        return_lse: also return the log-sum-exp of the logits.
        backend: "triton", "cuda", "cpu" or "reference"; None: the fastest that serves the call.

    Returns:
        out [B,N,H,D] in the query's type, and with return_lse also lse [B,H,N] float32 (float64 for float64 inputs),
        natural logarithm. A token that attends nothing has out 0, lse -inf and zero gradients, even if the gradient of
        its out or lse is NaN.

    Differentiable in query, key, value, rel_key, rel_query, content_bias, position_bias, neighbour_gate (through out
    and lse), once. Gradients are bitwise repeatable on one device.

    Memory: with rel_key the triton backend's backward allocates (M+R) elements of scratch per query and head; twice as
    many if G < H or if M exceeds a tile (64 in half types).

    Raises:
        ValueError, TypeError: naming the argument, before any kernel runs. All float tensors must have the query's type
            (under autocast they are cast), and every last dimension must be contiguous; nothing is broadcast.

    Source: Borgeaud et al., arXiv 2112.04426, section 2.4, Listing 1 and appendix B.1; gate: Rubin and Berant,
    arXiv 2306.13421, section 3.1; position logits: Dai et al., arXiv 1901.02860, section 3.3.
    """
    call = ChunkedCrossAttention(
        query, key, value, chunk_len, rel_key, rel_query, rel_start, content_bias, position_bias,
        neighbour_mask, neighbour_gate, scale, query_start, dropout_p, None,
    )  # fmt: skip
    if return_lse.__class__ is not bool:
        checks.flag("return_lse", return_lse)
    out, lse = serve("chunked_cross_attention", call, backend)
    return (out, lse) if return_lse else out


operator.register("chunked_cross_attention", ChunkedCrossAttention)
