"""Exact top-k by its definition: the whole score matrix, masked and stably sorted."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference_lib import attention, autograd

L2_BLOCK = 1024  # keys whose differences [B,Q,L2_BLOCK,D] are in memory at once


def forward(call) -> tuple[Tensor, Tensor]:
    dtype = attention.accumulator(call.query)
    query, key = call.query.to(dtype), call.key.to(dtype)
    b, q, _ = query.shape
    if call.key_mask is not None:  # a masked key may be NaN
        key = key.masked_fill(~call.key_mask.unsqueeze(-1), 0)
    if call.metric == "l2":  # differences, because q.q - 2 q.k + k.k cancels
        blocks = [-(query.unsqueeze(2) - part.unsqueeze(1)).square().sum(-1) for part in key.split(L2_BLOCK, 1)]
        score = torch.cat(blocks, -1)
    else:
        score = torch.einsum("bqd,bsd->bqs", query, key.expand(b, -1, -1))
    candidate = candidates(call) & ~score.detach().isnan()
    score = score.masked_fill(~candidate, -torch.inf)
    # stable: equal scores keep the order of their indices
    order = torch.sort(score.detach(), dim=-1, descending=True, stable=True).indices[..., : call.k]
    top = score.gather(-1, order)
    indices = order.masked_fill(top.detach() == -torch.inf, -1)
    missing = call.k - top.shape[-1]
    if missing > 0:
        top = torch.cat([top, top.new_full((b, q, missing), -torch.inf)], -1)
        indices = torch.cat([indices, indices.new_full((b, q, missing), -1)], -1)
    return top.to(torch.promote_types(top.dtype, torch.float32)), indices


def candidates(call) -> Tensor:
    """Return bool [B,Q,S]: the candidates of each query."""
    b, q, _ = call.query.shape
    s, device = call.key.shape[1], call.query.device
    allowed = torch.ones(b, q, s, dtype=torch.bool, device=device)
    if call.causal_gap is not None:
        limit = torch.arange(q, device=device).view(-1, 1) + call.query_offset - call.causal_gap
        allowed = allowed & (torch.arange(s, device=device) <= limit)
    if call.query_doc is not None:
        allowed = allowed & (call.query_doc.unsqueeze(2) != call.key_doc.unsqueeze(1))
    if call.key_mask is not None:
        allowed = allowed & call.key_mask.unsqueeze(1)
    return allowed


backward = autograd.backward_of(forward)
