"""Position logits alone, for a custom attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import operator
from ...core.call import serve
from .call import RelativeLogits


def relative_logits(
    query: Tensor,
    rel_key: Tensor,
    *,
    key_len: int,
    rel_start: int | None = None,
    position_bias: Tensor | None = None,
    query_offset: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Unscaled position logits: out[b,h,i,j] = (query_i + position_bias)·rel_key[i + query_offset - j - rel_start].

    The band [N, N+key_len-1] before the skew is never in memory. With N = key_len = 3, the row of rel_key by (i,j):

        2 1 0
        3 2 1
        4 3 2

    Args:
        query: [B,N,H,E], E from 1 to 256.
        rel_key: [H or 1,T,E]; row t is the encoding of displacement rel_start + t.
        key_len: S, number of keys.
        rel_start: displacement of row 0; a displacement outside the table gives 0. None: the smallest displacement,
            query_offset - (key_len-1); T must then be N+key_len-1.
        position_bias: [H,E], Transformer-XL's v.
        query_offset: position of query 0 counted from key 0.
        backend: "triton", "cuda", "cpu" or "reference"; None: the fastest that serves the call.

    Returns:
        [B,H,N,key_len] in the query's type.

    Differentiable in query, rel_key, position_bias, once.

    Raises:
        ValueError, TypeError: naming the argument, before any kernel runs.

    Source: Dai et al., "Transformer-XL", arXiv 1901.02860, section 3.3 and appendix B.
    """
    call = RelativeLogits(query, rel_key, key_len, rel_start, position_bias, query_offset)
    return serve("relative_logits", call, backend)


def _tangents(call: RelativeLogits, outs: tuple[Tensor], moved: RelativeLogits, backend) -> tuple[Tensor]:
    """Return the tangent: the logits are linear in query and position_bias together, and in rel_key."""

    def logits(query: Tensor, rel_key: Tensor, position_bias: Tensor | None) -> Tensor:
        rest = call._replace(query=query.contiguous(), rel_key=rel_key.contiguous(), position_bias=position_bias)
        return relative_logits(**rest._asdict(), backend=backend)

    parts = []
    if moved.query is not None or moved.position_bias is not None:
        query = torch.zeros_like(call.query) if moved.query is None else moved.query
        parts.append(logits(query, call.rel_key, moved.position_bias))
    if moved.rel_key is not None:
        parts.append(logits(call.query, moved.rel_key, call.position_bias))
    return (sum(parts[1:], parts[0]),)


operator.register("relative_logits", RelativeLogits, _tangents)
