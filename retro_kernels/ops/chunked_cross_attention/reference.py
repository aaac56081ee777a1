"""Chunked cross-attention, by its definition: one softmax per query over all tokens of its chunk's neighbours.

Borgeaud et al., "Improving language models by retrieving from trillions of tokens" (arXiv 2112.04426), section 2.4 and
Listing 1; positions as in its appendix B.1.2, Transformer-XL's form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...reference_lib import attention, autograd


def forward(call) -> tuple[Tensor, Tensor]:
    narrow, call = call.query.dtype, attention.widened(call)
    out, lse = (_by_chunk if call.batch_start is None or call.key.shape[1] == 0 else _by_row)(call)
    return out.to(narrow), lse


def _by_chunk(call) -> tuple[Tensor, Tensor]:
    b, n, h, _ = call.query.shape
    out = torch.zeros_like(call.query)
    lse_type = torch.promote_types(out.dtype, torch.float32)
    lse = torch.full((b, h, n), -torch.inf, dtype=lse_type, device=out.device)
    outs, lses, covered = [], [], 0
    for chunk in range(call.key.shape[1]):
        first = (chunk + 1) * call.chunk_len - 1 - call.query_start
        rows = range(max(first, 0), min(first + call.chunk_len, n))
        if len(rows) == 0:
            continue
        if not outs:  # rows before the first complete chunk attend nothing
            outs, lses = [out[:, : rows.start]], [lse[:, :, : rows.start]]
        mine = _each(call, _OF_TOKEN, lambda x: x[:, rows.start : rows.stop])
        mine |= _each(call, _OF_CHUNK, lambda x: x[:, chunk])
        index = torch.arange(rows.start - first, rows.stop - first, device=out.device)  # i in the attending chunk
        chunk_out, chunk_lse = _attend(call._replace(**mine), index.view(-1, 1), _keep(call, rows))
        outs.append(chunk_out)
        lses.append(chunk_lse)
        covered = rows.stop
    if outs:
        assert covered == n  # a checked call has keys for all attended chunks
        out, lse = torch.cat(outs, 1), torch.cat(lses, 2)
    return out, lse


def _by_row(call) -> tuple[Tensor, Tensor]:
    """Serve batch entries with their own positions: each token becomes a batch entry with its chunk's neighbours."""
    b, n, h, d = call.query.shape
    chunks = call.key.shape[1]
    position = attention.positions(n, call.query_start, call.batch_start, call.query.device)  # [B,N]
    chunk = (position + 1) // call.chunk_len - 1
    exists = ((chunk >= 0) & (chunk < chunks)).flatten()
    at = (torch.arange(b, device=chunk.device).unsqueeze(1), chunk.clamp(0, chunks - 1))
    mine = _each(call, _OF_TOKEN, lambda x: x.flatten(0, 1).unsqueeze(1))
    mine |= _each(call, _OF_CHUNK, lambda x: x[at].flatten(0, 1))
    mask = mine["neighbour_mask"]
    mask = torch.ones_like(mine["key"][..., 0, 0], dtype=torch.bool) if mask is None else mask
    mine["neighbour_mask"] = mask & exists.view(-1, *[1] * (mask.dim() - 1))
    keep = _keep(call, range(n))
    keep = None if keep is None else keep.transpose(1, 2).flatten(0, 1).unsqueeze(2)  # [B*N,H,1,K*R]
    index = (position + 1) % call.chunk_len
    out, lse = _attend(call._replace(**mine), index.view(-1, 1, 1, 1), keep)
    return out.view(b, n, h, d), lse.view(b, n, h).transpose(1, 2)


#: arguments with one entry a token, and with one a chunk
_OF_TOKEN, _OF_CHUNK = ("query", "rel_query"), ("key", "value", "neighbour_mask", "neighbour_gate")


def _each(call, names: tuple[str, ...], function: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
    """Return `function` of each of the call's tensors."""
    return {name: None if (x := getattr(call, name)) is None else function(x) for name in names}


def _attend(call, index: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return out and lse of the queries of `call` against one chunk's neighbours [B,K,R,G,D]. index: i of each query,
    [n,1] or [B,1,n,1].
    """
    b, _, h, _ = call.query.shape
    neighbours, length, groups = call.key.shape[1:4]
    key, value = call.key, call.value
    visible = torch.ones(b, neighbours, length, dtype=torch.bool, device=key.device)
    if call.neighbour_mask is not None:
        mask = call.neighbour_mask
        visible = visible & (mask if mask.dim() == 3 else mask.unsqueeze(-1))
        # a masked token may be NaN
        hidden = ~visible[..., None, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    if call.neighbour_gate is not None:
        gate = call.neighbour_gate.masked_fill(~visible.any(-1), 0)[..., None, None, None]
        key, value = key * gate, value * gate
    key = key.flatten(1, 2).repeat_interleave(h // groups, dim=2)
    value = value.flatten(1, 2).repeat_interleave(h // groups, dim=2)

    content_query = call.query if call.content_bias is None else call.query + call.content_bias
    logits = torch.einsum("bnhd,bshd->bhns", content_query, key)
    if call.rel_key is not None:
        rel_query = call.query if call.rel_query is None else call.rel_query
        if call.position_bias is not None:
            rel_query = rel_query + call.position_bias
        displacement = index - torch.arange(length, device=key.device)
        position = attention.position_logits(rel_query, call.rel_key, displacement, call.rel_start)
        logits = logits + position.repeat(1, 1, 1, neighbours)  # the same rows serve all K neighbours
    visible = visible.view(b, 1, 1, neighbours * length)
    return attention.softmax_attend(logits * call.scale, visible, value, keep, call.dropout_p)


def _keep(call, rows: range) -> Tensor | None:
    """Return bool [B,H,len(rows),K*R]: the probabilities of these query rows that dropout keeps; None: all."""
    if call.dropout_p == 0:
        return None
    b, _, h, _ = call.query.shape
    queries = torch.arange(rows.start, rows.stop, device=call.query.device)
    return attention.dropout_keep(call.seed, call.dropout_p, b, h, queries, call.key.shape[2] * call.key.shape[3])


backward = autograd.backward_of(forward)
