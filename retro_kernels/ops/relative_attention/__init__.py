"""Attention with relative-position logits."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from ... import checks
from ...core import operator
from ...core.call import serve
from . import packed
from .call import RelativeAttention


@overload
def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rel_key: Tensor | None = ...,
    rel_query: Tensor | None = ...,
    rel_start: int | None = ...,
    content_bias: Tensor | None = ...,
    position_bias: Tensor | None = ...,
    causal: bool = ...,
    causal_gap: int = ...,
    window: int | None = ...,
    window_block: int | None = ...,
    query_offset: int | Tensor | None = ...,
    key_mask: Tensor | None = ...,
    query_segment: Tensor | None = ...,
    key_segment: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rel_key: Tensor | None = ...,
    rel_query: Tensor | None = ...,
    rel_start: int | None = ...,
    content_bias: Tensor | None = ...,
    position_bias: Tensor | None = ...,
    causal: bool = ...,
    causal_gap: int = ...,
    window: int | None = ...,
    window_block: int | None = ...,
    query_offset: int | Tensor | None = ...,
    key_mask: Tensor | None = ...,
    query_segment: Tensor | None = ...,
    key_segment: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rel_key: Tensor | None = None,
    rel_query: Tensor | None = None,
    rel_start: int | None = None,
    content_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    causal: bool = False,
    causal_gap: int = 0,
    window: int | None = None,
    window_block: int | None = None,
    query_offset: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    query_segment: Tensor | None = None,
    key_segment: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention whose logits also depend on the displacement of query and key.

        logit[i,j] = scale * ((q_i + u)·k_j + (rq_i + v)·rel_key[i + query_offset - j - rel_start])

    Key j is visible to query i at position p = i + query_offset if it meets every condition whose argument is given:
    j <= p - causal_gap (causal), j > p - window, j >= window_block * (p // window_block - 1), key_mask[j],
    query_segment[i] == key_segment[j]. With N = S = 6, causal, x = visible:

        causal_gap=0      causal_gap=1      window=2          window_block=2
        x . . . . .       . . . . . .       x . . . . .       x . . . . .
        x x . . . .       x . . . . .       x x . . . .       x x . . . .
        x x x . . .       x x . . . .       . x x . . .       x x x . . .
        x x x x . .       x x x . . .       . . x x . .       x x x x . .
        x x x x x .       x x x x . .       . . . x x .       . . x x x .
        x x x x x x       x x x x x .       . . . . x x       . . x x x x

    Args:
        query: [B,N,H,D]; D a multiple of 8 from 16 to 256.
        key, value: [B,S,G,D], H % G == 0.
        rel_key: [H or 1,T,E]; row t is the projected encoding of displacement rel_start + t.
        rel_query: [B,N,H,E], a separate relative query; None: the query (E = D).
        rel_start: displacement of row 0; a displacement outside the table adds 0. None: the smallest displacement,
            query_offset - (S-1); T must then be N+S-1. Required where query_offset is a tensor.
        content_bias, position_bias: [H,D] and [H,E], Transformer-XL's u and v.
        causal, causal_gap, window: see above; causal_gap=1 is Memory Mosaics' strict mask.
        window_block: RPT's windows: a block of positions and the one before it; not together with window.
        query_offset: position of query 0 counted from key 0; None: S-N if causal, else 0. Or int64 [B] on the query's
            device, one for each batch entry. The host never reads it, so a decode step over a cache of fixed capacity
            can be captured once as a CUDA graph and replayed (causal=True hides keys beyond a position). Values are
            clamped to +-2**29.
        key_mask: bool [B,S], True = visible. A masked key may be NaN.
        query_segment, key_segment: integers [B,N] and [B,S], packed documents. If they ascend, a tile reads only the
            keys of its documents.
        cu_seqlens: int32 [documents+1], in place of segments for B = 1 and N = S: document d is tokens cu_seqlens[d] to
            cu_seqlens[d+1]. Values are checked on the CPU alone, in compiled and traced calls too. On a GPU, tokens
            outside all documents attend nothing, and boundaries that decrease give unspecified documents.
        scale: default D**-0.5.
        dropout_p: probability that an attention weight is dropped; `torch.manual_seed` makes it repeatable.
        return_lse: also return the log-sum-exp of the logits.
        backend: "triton", "cuda", "cpu" or "reference"; None: the fastest that serves the call.

    Returns:
        out [B,N,H,D] in the query's type, and with return_lse also lse [B,H,N] float32 (float64 for float64 inputs),
        natural logarithm. A query that sees nothing has out 0, lse -inf and zero gradients, even if the gradient of its
        out or lse is NaN.

    Differentiable in query, key, value, rel_key, rel_query, content_bias, position_bias (through out and lse), once.

    Copies: with biases and N > 1 the triton backend adds them to copies of the query. Its backward pass copies the
    gradient of out if a query may see no key. It stores probabilities and gradients of logits if there is a rel_key, at
    most 512 MiB at a time. To change that bound, set `retro_kernels.ops.relative_attention.triton.stored.STORED_BYTES`
    before the first gradient.

    Raises:
        ValueError, TypeError: naming the argument, before any kernel runs. All float tensors must have the query's type
            (under autocast they are cast), and every last dimension must be contiguous; nothing is broadcast.

    Source: Dai et al., "Transformer-XL", arXiv 1901.02860, section 3.3; window_block: Rubin and Berant, arXiv
    2306.13421, section 3.
    """
    if cu_seqlens is not None:
        for name, segment in (("query_segment", query_segment), ("key_segment", key_segment)):
            if segment is not None:
                raise ValueError(f"cu_seqlens: expected None where {name} is given; got a tensor")
        query_segment, key_segment = packed.segments(cu_seqlens, query, key)
    call = RelativeAttention(
        query, key, value, rel_key, rel_query, rel_start, content_bias, position_bias,
        causal, causal_gap, window, query_offset, key_mask, query_segment, key_segment,
        scale, dropout_p, None, window_block,
    )  # fmt: skip
    if return_lse.__class__ is not bool:
        checks.flag("return_lse", return_lse)
    out, lse = serve("relative_attention", call, backend)
    return (out, lse) if return_lse else out


operator.register("relative_attention", RelativeAttention)
