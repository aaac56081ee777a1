"""LambdaRank: the retriever learns to rank chunks as the reference language model does."""

from __future__ import annotations

import torch
from torch import Tensor


def lambda_rank(
    scores: Tensor,
    target_scores: Tensor,
    tau: float | Tensor,
    *,
    positives: int | None = None,
    scored_only: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the sum of lambda_jl * max(0, tau - (s_q(l) - s_q(j))) over pairs (l, j) with s_t(l) > max(0, s_t(j)).

        lambda_jl = |G_l - G_j| * |1/log2(1+r_l) - 1/log2(1+r_j)| / IDCG
        G = 2^max(s_t, 0) - 1,   IDCG = sum of sorted G / log2(1+rank)

    r is the rank from 1 by s_q among the retrievable chunks, equal scores by index. lambda has no gradient. l rows of l
    chunks with at most P positives cost P*l*l terms and one sort a row.

        >>> total, pairs = lambda_rank(torch.tensor([2, 1, 0.5, -1]), torch.tensor([-0.2, 0.5, -torch.inf, 1]), tau=1.0)
        >>> round(total.item(), 6), pairs.item()
        (2.485757, 5)

    Args:
        scores: s_q [...,n] of the retriever; -inf: not retrievable.
        target_scores: s_t [...,n]; -inf: unscored, with gain 0.
        tau: margin, in units of s_q.
        positives: P, upper bound of the positives in a row, 20 for 20 candidates; None: counted, and the host waits.
        scored_only: pairs of scored chunks only; False: j may be any retrievable chunk.

    Returns:
        The sum over all rows and the number of pairs (int64). The loss is their quotient.

    Differentiable in scores; computed in float32 or better.

    Raises:
        ValueError: shapes that differ.

    Source: Rubin and Berant, arXiv 2306.13421, section 3.3; Burges et al., 2006.
    """
    if scores.shape != target_scores.shape or not scores.dim():
        wanted, got = list(scores.shape), list(target_scores.shape)
        raise ValueError(f"target_scores: expected the scores' shape [...,n] = {wanted}; got {got}")
    acc_dtype = torch.promote_types(scores.dtype, torch.float32)
    scores, targets = (t.reshape(-1, scores.shape[-1]).to(acc_dtype) for t in (scores, target_scores))
    with torch.no_grad():
        there = scores != -torch.inf
        targets = targets.masked_fill(~there, -torch.inf)
        gain = torch.exp2(targets.clamp(min=0)) - 1
        discount = 1 / torch.log2(torch.arange(2, scores.shape[-1] + 2, dtype=acc_dtype, device=scores.device))
        order = scores.argsort(dim=-1, descending=True, stable=True)
        at_rank = torch.empty_like(scores).scatter_(-1, order, discount.expand_as(scores))
        ideal = (gain.sort(-1, descending=True).values * discount).sum(-1)
        most = int((targets > 0).sum(-1).max()) if positives is None and targets.numel() else positives or 0
        best, best_index = targets.topk(min(most, scores.shape[-1]), -1)  # [rows,P]
        loser = there & (targets > -torch.inf) if scored_only else there
        pair = (best > 0).unsqueeze(-1) & loser.unsqueeze(1) & (best.unsqueeze(-1) > targets.unsqueeze(1))  # [rows,P,n]
        weight = (gain.gather(-1, best_index).unsqueeze(-1) - gain.unsqueeze(1)).abs()
        weight = weight * (at_rank.gather(-1, best_index).unsqueeze(-1) - at_rank.unsqueeze(1)).abs()
        weight = (weight / ideal.clamp(min=torch.finfo(acc_dtype).tiny)[:, None, None]).masked_fill(~pair, 0)
    known = scores.masked_fill(~there, 0)  # an infinite score has weight 0, and inf * 0 is NaN
    margin = known.gather(-1, best_index).unsqueeze(-1) - known.unsqueeze(1)
    return (weight * (tau - margin).clamp(min=0)).sum(), pair.sum()
