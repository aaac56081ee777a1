"""Top-k by a product and torch.topk, whole or by blocks of keys, and FAISS's exact index."""

from __future__ import annotations

import torch
from torch import Tensor

from . import KEY_BLOCK


def _scores(query: Tensor, key: Tensor, metric: str) -> Tensor:
    if metric == "l2":
        return 2 * (query @ key.mT) - key.square().sum(-1)[:, None] - query.square().sum(-1)[..., None]
    return query @ key.mT


def _candidates(
    query: Tensor, first: int, keys: int, causal_gap, query_offset, query_doc, key_doc, key_mask
) -> Tensor | None:
    """bool [B or 1,Q,keys] for keys first .. first+keys-1, None where all are."""
    allowed = None
    if causal_gap is not None:
        limit = torch.arange(query.shape[1], device=query.device)[:, None] + (query_offset - causal_gap)
        allowed = (torch.arange(first, first + keys, device=query.device) <= limit)[None]
    if query_doc is not None:
        other = query_doc[:, :, None] != key_doc[:, None, first : first + keys]
        allowed = other if allowed is None else allowed & other
    if key_mask is not None:
        shown = key_mask[:, None, first : first + keys]
        allowed = shown if allowed is None else allowed & shown
    return allowed


def eager(query, key, k, *, metric="dot", causal_gap=None, query_offset=0, query_doc=None, key_doc=None, key_mask=None):
    """The whole score matrix in the inputs' type, then torch.topk."""
    scores = _scores(query, key, metric)
    allowed = _candidates(query, 0, key.shape[1], causal_gap, query_offset, query_doc, key_doc, key_mask)
    return _best(scores if allowed is None else scores.masked_fill(~allowed, -torch.inf), k)


def _best(scores: Tensor, k: int, indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
    top, where = scores.topk(k, dim=-1)
    where = where if indices is None else indices.gather(-1, where)
    return top.float(), where.masked_fill(top == -torch.inf, -1)


def blocked(
    query, key, k, *, metric="dot", causal_gap=None, query_offset=0, query_doc=None, key_doc=None, key_mask=None
):
    """The same by blocks of keys, each block's best merged into the running best."""
    best = indices = None
    for first in range(0, key.shape[1], KEY_BLOCK):
        block = key[:, first : first + KEY_BLOCK]
        scores = _scores(query, block, metric)
        allowed = _candidates(query, first, block.shape[1], causal_gap, query_offset, query_doc, key_doc, key_mask)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        top, where = scores.topk(min(k, block.shape[1]), dim=-1)
        where = where + first
        best = top if best is None else torch.cat([best, top], -1)
        indices = where if indices is None else torch.cat([indices, where], -1)
        top, order = best.topk(k, dim=-1)
        best, indices = top, indices.gather(-1, order)
    return best.float(), indices.masked_fill(best == -torch.inf, -1)


class Faiss:
    """IndexFlat over the keys; it is built once per key tensor, since a database is indexed once and searched often."""

    def __init__(self):
        self._key, self._index = None, None

    def __call__(self, query, key, k, *, metric="dot"):
        import faiss as library

        if self._key is not key:
            kind = library.IndexFlatIP if metric == "dot" else library.IndexFlatL2
            self._index, self._key = kind(key.shape[2]), key
            self._index.add(key[0].detach().numpy())
        library.omp_set_num_threads(torch.get_num_threads())
        scores, indices = self._index.search(query[0].detach().numpy(), k)
        scores = torch.from_numpy(scores)[None]
        return (scores if metric == "dot" else -scores), torch.from_numpy(indices)[None]


faiss = Faiss()
