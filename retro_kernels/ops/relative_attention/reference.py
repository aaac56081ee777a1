"""Attention with relative-position logits, by its definition: the whole [N,S] matrix.

Dai et al., "Transformer-XL" (arXiv 1901.02860), section 3.3: (q_i + u).k_j + (q_i + v).R[i-j].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference_lib import attention, autograd


def forward(call) -> tuple[Tensor, Tensor]:
    narrow, call = call.query.dtype, attention.widened(call)
    b, n, h, _ = call.query.shape
    query, key, value = call.query, call.key, call.value
    displacement, visible = visibility(call)
    if call.key_mask is not None:
        # a masked key may be NaN
        hidden = ~call.key_mask[..., None, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    key, value = (x.repeat_interleave(h // key.shape[2], dim=2) for x in (key, value))

    # [B or 1,N,1,1]; 0 * NaN would be NaN, forward and backward
    hidden = ~visible.any(-1).squeeze(1)[..., None, None]
    content_query = query if call.content_bias is None else query + call.content_bias
    content_query = content_query.masked_fill(hidden, 0)
    logits = torch.einsum("bnhd,bshd->bhns", content_query, key)
    if call.rel_key is not None:
        rel_query = query if call.rel_query is None else call.rel_query
        if call.position_bias is not None:
            rel_query = rel_query + call.position_bias
        rel_query = rel_query.masked_fill(hidden, 0)
        logits = logits + attention.position_logits(rel_query, call.rel_key, displacement, call.rel_start)
    keep = None
    if call.dropout_p > 0:
        rows = torch.arange(n, device=query.device)
        keep = attention.dropout_keep(call.seed, call.dropout_p, b, h, rows, key.shape[1])
    out, lse = attention.softmax_attend(logits * call.scale, visible, value, keep, call.dropout_p)
    return out.to(narrow), lse


def visibility(call) -> tuple[Tensor, Tensor]:
    """Return the displacement of every pair, int [N,S] or [B,1,N,S], and visible, bool [B or 1,1,N,S]."""
    n, s, device = call.query.shape[1], call.key.shape[1], call.query.device
    position = attention.positions(n, call.query_offset, call.batch_offset, device).unsqueeze(-1)
    if position.dim() == 3:
        position = position.unsqueeze(1)  # [B,1,N,1]
    key = torch.arange(s, device=device)
    displacement = position - key
    visible = torch.ones(1, 1, n, s, dtype=torch.bool, device=device)
    if call.causal:
        visible = visible & (displacement >= call.causal_gap)
    if call.window is not None:
        visible = visible & (displacement < call.window)
    if call.window_block is not None:
        visible = visible & (key >= call.window_block * (position // call.window_block - 1))
    if call.key_mask is not None:
        visible = visible & call.key_mask[:, None, None, :]
    if call.query_segment is not None:
        visible = visible & (call.query_segment[:, None, :, None] == call.key_segment[:, None, None, :])
    return displacement, visible


backward = autograd.backward_of(forward)
