"""Chunked cross-attention, by its definition: one softmax per query over all tokens of its chunk's neighbours.

Borgeaud et al., "Improving language models by retrieving from trillions of tokens" (arXiv 2112.04426), section 2.4 and
Listing 1; positions as in its appendix B.1.2, Transformer-XL's form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _attention, _autograd


def forward(call) -> tuple[Tensor, Tensor]:
    """out [B,N,H,D] in the query's type, lse [B,H,N] float32 (float64 for float64 inputs)."""
    narrow, call = call.query.dtype, _attention.widened(call)
    b, n, h, _ = call.query.shape
    out = torch.zeros_like(call.query)
    lse = torch.full((b, h, n), -torch.inf, dtype=out.dtype, device=out.device)
    outs, lses, covered = [], [], 0
    for chunk in range(call.key.shape[1]):
        first = (chunk + 1) * call.chunk_len - 1 - call.query_start
        rows = range(max(first, 0), min(first + call.chunk_len, n))
        if len(rows) == 0:
            continue
        if not outs:  # rows before the first complete chunk attend nothing
            outs, lses = [out[:, : rows.start]], [lse[:, :, : rows.start]]
        chunk_out, chunk_lse = _attend(call, chunk, rows, first)
        outs.append(chunk_out)
        lses.append(chunk_lse)
        covered = rows.stop
    if outs:
        assert covered == n  # holds for every call that passed validation: the keys cover all attended chunks
        out, lse = torch.cat(outs, 1), torch.cat(lses, 2)
    return out.to(narrow), lse


def _attend(call, chunk: int, rows: range, first: int) -> tuple[Tensor, Tensor]:
    """Rows `rows` of the query against the K*R tokens of chunk `chunk`'s neighbours."""
    b, _, h, _ = call.query.shape
    neighbours, length, groups = call.key.shape[2:5]
    query = call.query[:, rows.start : rows.stop]
    key, value = call.key[:, chunk], call.value[:, chunk]
    visible = torch.ones(b, neighbours, length, dtype=torch.bool, device=query.device)
    if call.neighbour_mask is not None:
        mask = call.neighbour_mask[:, chunk]
        visible = visible & (mask if mask.dim() == 3 else mask.unsqueeze(-1))
        # what a masked token holds must not matter, NaN included
        hidden = ~visible[..., None, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    if call.neighbour_gate is not None:
        gate = call.neighbour_gate[:, chunk]
        gate = gate.masked_fill(~visible.any(-1), 0)[..., None, None, None]
        key, value = key * gate, value * gate
    key = key.flatten(1, 2).repeat_interleave(h // groups, dim=2)
    value = value.flatten(1, 2).repeat_interleave(h // groups, dim=2)

    content_query = query if call.content_bias is None else query + call.content_bias
    logits = torch.einsum("bnhd,bshd->bhns", content_query, key)
    index = torch.arange(rows.start - first, rows.stop - first, device=query.device)  # i in the attending chunk
    if call.rel_key is not None:
        rel_query = query if call.rel_query is None else call.rel_query[:, rows.start : rows.stop]
        if call.position_bias is not None:
            rel_query = rel_query + call.position_bias
        displacement = index.view(-1, 1) - torch.arange(length, device=query.device)
        position = _attention.position_logits(rel_query, call.rel_key, displacement, call.rel_start)
        logits = logits + position.repeat(1, 1, 1, neighbours)  # the same rows serve all K neighbours

    keep = None
    if call.dropout_p > 0:
        queries = torch.arange(rows.start, rows.stop, device=query.device)
        keep = _attention.dropout_keep(call.seed, call.dropout_p, b, h, queries, neighbours * length)
    return _attention.softmax_attend(logits * call.scale, visible.view(b, 1, 1, neighbours * length), value, keep, call.dropout_p)


def unsupported(call) -> None:
    """Why the reference cannot serve a call: it always can."""
    return None


backward = _autograd.backward_of(forward)
