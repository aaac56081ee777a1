"""Judge top-k results by the float64 scores of the chosen keys.

Two formulations may order near-equal keys differently, so indices are not compared one by one. `scores` is the error of
the returned scores against the float64 scores of the same keys. `chosen` is the error of those float64 scores against
the best ones. An index that is repeated, out of order or no candidate counts as an infinite error, and so does -1 where
a candidate was left.
"""

from typing import Any

import torch
from torch import Tensor


def true_scores(arguments: dict[str, Any], indices: Tensor) -> Tensor:
    """Return the float64 scores [B,Q,k] of the chosen keys, -inf for -1. Differentiable in query and key."""
    query, key = arguments["query"].double(), arguments["key"].double()
    index = indices.clamp(0, key.shape[1] - 1)
    batch = torch.arange(query.shape[0], device=query.device) % key.shape[0]
    picked = key[batch[:, None, None], index]  # [B,Q,k,D]
    if arguments.get("metric", "dot") == "l2":
        scores = -(query[:, :, None] - picked).square().sum(-1)
    else:
        scores = torch.einsum("bqd,bqkd->bqk", query, picked)
    return scores.masked_fill(indices < 0, -torch.inf)


def compare(
    arguments: dict[str, Any], rows: Tensor, outputs: tuple[Tensor, ...], best: tuple[Tensor, ...]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return {"scores": (found, expected), "chosen": (found, expected)} at the queries `rows`."""
    arguments = arguments | {n: arguments[n][:, rows] for n in ("query", "query_doc") if arguments.get(n) is not None}
    scores, indices = outputs
    truth = true_scores(arguments, indices)
    invalid = torch.full_like(truth, torch.nan)
    valid = _valid(arguments, rows, indices) & (scores[..., 1:] <= scores[..., :-1]).all(-1)
    valid = valid & ((indices < 0) == (best[1] < 0)).all(-1)
    return {
        "scores": (torch.where(valid[..., None], scores.double(), invalid), truth),
        "chosen": (truth, best[0].double()),
    }


def _valid(arguments: dict[str, Any], rows: Tensor, indices: Tensor) -> Tensor:
    """Return bool [B,Q]: whether a query's indices are in range, unique, and candidates."""
    keys = arguments["key"].shape[1]
    taken = indices >= 0
    good = (indices >= -1) & (indices < keys)
    ordered = torch.where(taken, indices, -1 - torch.arange(indices.shape[-1], device=indices.device)).sort(-1).values
    unique = (ordered[..., 1:] != ordered[..., :-1]).all(-1)
    index = indices.clamp(0, keys - 1)
    if arguments.get("causal_gap") is not None:
        limit = rows[:, None] + arguments.get("query_offset", 0) - arguments["causal_gap"]
        good = good & (~taken | (indices <= limit))
    if arguments.get("query_doc") is not None:
        own = _gather(arguments["key_doc"], index) == arguments["query_doc"][:, :, None]
        good = good & (~taken | ~own)
    if arguments.get("key_mask") is not None:
        good = good & (~taken | _gather(arguments["key_mask"], index))
    return good.all(-1) & unique


def _gather(per_key: Tensor, index: Tensor) -> Tensor:
    """Gather the values per_key [B or 1,S] at the chosen indices [B,Q,k]."""
    return per_key.expand(index.shape[0], -1)[:, None].expand(-1, index.shape[1], -1).gather(-1, index)


def gradients(arguments: dict[str, Any], grad_outputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the float64 gradients of query and key through the chosen keys."""
    query, key = (arguments[name].double().detach().requires_grad_() for name in ("query", "key"))
    indices = outputs[1]
    with torch.enable_grad():
        scores = true_scores(arguments | {"query": query, "key": key}, indices)
        weighted = torch.where(indices < 0, 0.0, scores.masked_fill(indices < 0, 0) * grad_outputs[0].double()).sum()
    return list(torch.autograd.grad(weighted, (query, key)))
