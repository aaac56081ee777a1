"""Exact batched top-k over chunk embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import operator
from ...core.call import serve
from .call import TopkChunks


def topk_chunks(
    query: Tensor,
    key: Tensor,
    k: int,
    *,
    metric: str = "dot",
    causal_gap: int | None = None,
    query_offset: int = 0,
    query_doc: Tensor | None = None,
    key_doc: Tensor | None = None,
    key_mask: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the exact k best keys of every query, with the masks inside the scan.

    Key j is a candidate of query i if it meets every condition whose argument is given: j <= i + query_offset -
    causal_gap, query_doc[i] != key_doc[j], key_mask[j]. Of equal scores the lower index comes first. A key with a score
    of NaN or -inf is not a candidate.

        >>> scores, indices = topk_chunks(torch.tensor([[[1.0]]]), torch.tensor([[[3.0], [5.0], [5.0]]]), k=2)
        >>> indices.tolist()
        [[[1, 2]]]

    Args:
        query: [B,Q,D], D (the embedding width) from 1 to 4096.
        key: [B or 1,S,D].
        k: 1 to 128.
        metric: "dot": q·k, or "l2": -||q-k||^2. With "dot", a processor that multiplies pairs of bfloat16
            takes factors and products below 1.2e-38 as 0.
        causal_gap: least distance in chunks from a query back to its candidates; None: no causal limit.
        query_offset: position of query 0 counted from key 0; only with causal_gap.
        query_doc, key_doc: integers [B,Q] and [B or 1,S]; keys of the query's own document are left out.
        key_mask: bool [B or 1,S], True = candidate.
        backend: "triton", "cuda", "cpu" or "reference"; None: the fastest that serves the call.

    Returns:
        scores [B,Q,k] float32 (float64 for float64 inputs), descending, and indices [B,Q,k] int64. Slots beyond the
        number of candidates have score -inf and index -1.

    Differentiable in query and key through the scores of the chosen slots, once; a slot of -1 has zero gradient.

    Raises:
        ValueError, TypeError: naming the argument, before any kernel runs.

    Source: Rubin and Berant, arXiv 2306.13421, section 3.1 (causal, self-retrieval); Borgeaud et al., arXiv 2112.04426,
    section 2.3 (L2, without the query's own document).
    """
    call = TopkChunks(query, key, k, metric, causal_gap, query_offset, query_doc, key_doc, key_mask)
    return serve("topk_chunks", call, backend)


def _tangents(call: TopkChunks, outs: tuple[Tensor, Tensor], moved: TopkChunks, backend) -> tuple[Tensor, None]:
    """Return the tangents of the chosen slots' scores, from their gathered keys [B,Q,k,D]."""
    scores, indices = outs
    b, q, d = call.query.shape
    if call.key.shape[1] == 0:
        return torch.zeros_like(scores), None
    at = indices.clamp(min=0).reshape(b, q * call.k, 1).expand(-1, -1, d)

    def chosen(key: Tensor) -> Tensor:
        return key.to(scores.dtype).expand(b, -1, -1).gather(1, at).view(b, q, call.k, d)

    query, moved_query, moved_key = call.query.to(scores.dtype).unsqueeze(2), 0, 0
    if moved.query is not None:
        moved_query = moved.query.to(scores.dtype).unsqueeze(2)
    if moved.key is not None:
        moved_key = chosen(moved.key)
    if call.metric == "l2":
        terms = -2 * (query - chosen(call.key)) * (moved_query - moved_key)
    else:
        terms = moved_query * chosen(call.key) + query * moved_key
    return terms.sum(-1).masked_fill(indices < 0, 0), None


operator.register("topk_chunks", TopkChunks, _tangents)
