"""Top-k over a database larger than memory: blocks of keys one after another, and a running result."""

from __future__ import annotations

import torch
from torch import Tensor

from . import topk_chunks

#: key elements that `topk_rescore` gathers at once
RESCORE_ELEMENTS = 2**24


def topk_merge(
    a_scores: Tensor, a_indices: Tensor, b_scores: Tensor, b_indices: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Return the k best of two lists of candidates, by (higher score, lower index).

        >>> first = torch.tensor([[2.0, 1.0]]), torch.tensor([[7, 3]])
        >>> topk_merge(*first, torch.tensor([[2.0]]), torch.tensor([[5]]), k=2)
        (tensor([[2., 2.]]), tensor([[5, 7]]))

    Args:
        a_scores, a_indices: [...,ka], in any order; an empty slot is -inf and -1.
        b_scores, b_indices: [...,kb], of other keys than a's.
        k: number of slots.

    Returns:
        scores [...,k] descending and indices [...,k]; -inf and -1 where candidates run out.

    Differentiable in the scores.
    """
    return _best(torch.cat([a_scores, b_scores], -1), torch.cat([a_indices, b_indices], -1), k)


def topk_rescore(query: Tensor, key: Tensor, indices: Tensor, k: int, *, metric: str = "dot") -> tuple[Tensor, Tensor]:
    """Return the k best of the candidates `indices`, scored again in float32 by the definition.

    For a database that is searched in bfloat16, take 2k candidates with `topk_chunks`, then rescore them against the
    float32 rows. "l2" is the sum of squared differences, which is exact near 0. A candidate whose score is NaN or -inf
    is dropped.

    Args:
        query: [B,Q,D].
        key: [B or 1,S,D], of any type.
        indices: [B,Q,c] int64, -1 for none.
        k: number of slots.

    Returns:
        scores [B,Q,k] float32 and indices [B,Q,k], as from `topk_chunks`.

    Memory: O(B*Q*c) and a bounded block of gathered keys.

    Differentiable in query and key.
    """
    b, q, d = query.shape
    nonnegative, shared = indices.clamp(min=0), key.shape[0] == 1
    rows = max(1, RESCORE_ELEMENTS // max(1, b * indices.shape[-1] * d))
    parts = []
    for start in range(0, q, rows):
        part = nonnegative[:, start : start + rows]
        batch = torch.zeros_like(part) if shared else torch.arange(b, device=part.device).view(-1, 1, 1).expand_as(part)
        near, here = key[batch, part].float(), query[:, start : start + rows, None].float()
        parts.append(-(here - near).square().sum(-1) if metric == "l2" else (here * near).sum(-1))
    scores = torch.cat(parts, 1) if parts else query.new_zeros(indices.shape, dtype=torch.float32)
    scores = scores.masked_fill((indices < 0) | scores.detach().isnan(), -torch.inf)
    return _best(scores, indices, k)


class TopkStream:
    """`topk_chunks` over keys in blocks. The result after all blocks equals the result of one call over all keys.

        stream = TopkStream(query, k=16, metric="l2")
        for block in blocks:  # [B or 1,s,D], in the order of the index
            stream.update(block)
        scores, indices = stream.result()

    Indices count from the first key of the first block. keep: number of candidates that are kept, by default k; take
    more for `topk_rescore`. The other options are the options of `topk_chunks`.
    """

    def __init__(
        self,
        query: Tensor,
        k: int,
        *,
        keep: int | None = None,
        metric: str = "dot",
        causal_gap: int | None = None,
        query_offset: int = 0,
        query_doc: Tensor | None = None,
        backend: str | None = None,
    ) -> None:
        self.query, self.k, self.keep = query, k, k if keep is None else keep
        if self.keep < k:
            raise ValueError(f"keep: expected at least k={k}; got {keep}")
        self.query_offset, self.seen = query_offset, 0
        self._options = {"metric": metric, "causal_gap": causal_gap, "query_doc": query_doc, "backend": backend}
        self._scores: Tensor | None = None
        self._indices: Tensor | None = None

    def update(self, key: Tensor, *, key_doc: Tensor | None = None, key_mask: Tensor | None = None) -> None:
        """Add the next block of keys: key [B or 1,s,D], key_doc [B or 1,s], key_mask [B or 1,s]."""
        # key j of this block is key j + seen of the stream
        offset = 0 if self._options["causal_gap"] is None else self.query_offset - self.seen
        options = self._options | {"query_offset": offset, "key_doc": key_doc, "key_mask": key_mask}
        scores, indices = topk_chunks(self.query, key, self.keep, **options)
        indices = torch.where(indices < 0, indices, indices + self.seen)
        if self._scores is not None:
            scores, indices = topk_merge(self._scores, self._indices, scores, indices, self.keep)
        self._scores, self._indices, self.seen = scores, indices, self.seen + key.shape[1]

    def candidates(self) -> tuple[Tensor, Tensor]:
        """scores and indices [B,Q,keep] so far. Raises ValueError before the first block."""
        if self._scores is None:
            raise ValueError("TopkStream: expected a call of update() before candidates() and result()")
        return self._scores, self._indices

    def result(self) -> tuple[Tensor, Tensor]:
        """scores and indices [B,Q,k] so far."""
        scores, indices = self.candidates()
        return scores[..., : self.k], indices[..., : self.k]


def _best(scores: Tensor, indices: Tensor, k: int) -> tuple[Tensor, Tensor]:
    missing = k - scores.shape[-1]
    if missing > 0:
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
        indices = torch.nn.functional.pad(indices, (0, missing), value=-1)
    # by index first, then stably by score: equal scores keep the order of their indices
    order = indices.sort(dim=-1, stable=True).indices
    by_score = scores.detach().gather(-1, order).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    order = order.gather(-1, by_score)
    scores, indices = scores.gather(-1, order), indices.gather(-1, order)
    return scores, indices.masked_fill(scores.detach() == -torch.inf, -1)
