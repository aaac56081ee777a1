"""Exact top-k by one scan over the keys: scores of a tile on the tensor cores, each row's list of k in registers.

A program holds BLOCK_Q queries and walks key tiles in ascending order. A tile's scores are masked where they stand and
compared with each row's k-th score; only a tile with a survivor costs more than that. Keys past the causal limit of the
tile's last query are never read. Where queries are too few to fill the device the keys are split, every split leaves its
k candidates, and a second kernel merges them.

Selection is exact and its order total: (higher score, lower index). Nothing depends on the number of splits, because a
candidate's score is one dot product, summed in one order, wherever it is computed.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from . import _topk_plan as plan
from ._topk_backward import _topk_chunks_dkey_kernel, _topk_chunks_dquery_kernel
from ._topk_forward import _topk_chunks_merge_kernel, _topk_chunks_scan_kernel
from ._topk_select import MAX_KEYS


def reason(call) -> str | None:
    query, key = call.query, call.key
    if query.dtype not in plan.DTYPES:
        return f"triton serves float32, float16 and bfloat16; got {query.dtype}"
    if not 1 <= call.k <= plan.MAX_K:
        return f"triton serves k from 1 to {plan.MAX_K}; got k={call.k}"
    if key.shape[1] + query.shape[1] > MAX_KEYS:
        return f"triton serves Q+S up to {MAX_KEYS}; got Q={query.shape[1]}, S={key.shape[1]}"
    return None


def forward(call) -> tuple[Tensor, Tensor]:
    query = call.query
    b, q, _ = query.shape
    scores = query.new_empty((b, q, call.k), dtype=torch.float32)
    indices = query.new_empty((b, q, call.k), dtype=torch.int64)
    if call.key.shape[1] == 0 or scores.numel() == 0:
        return scores.fill_(-torch.inf), indices.fill_(-1)
    chosen = plan.scan(call, plan.target_of(query))
    partial = query.new_empty((b * q, chosen.splits, call.k), dtype=torch.int64) if chosen.splits > 1 else None
    arguments, constants = scan_arguments(call, chosen, scores, indices, partial)
    grid = (b * triton.cdiv(q, chosen.block_q) * chosen.splits,)
    with plan.device_of(query):
        _topk_chunks_scan_kernel[grid](*arguments, **constants, **chosen.launch())
        if partial is not None:
            merge = plan.merge(call, chosen, plan.target_of(query))
            _topk_chunks_merge_kernel[(triton.cdiv(b * q, merge.block_q),)](
                partial, scores, indices, b * q, chosen.splits * call.k, call.k,
                SLOTS=chosen.slots, BLOCK_Q=merge.block_q, BLOCK_N=merge.block_n, **merge.launch(),
            )  # fmt: skip
    return scores, indices


def scan_arguments(call, chosen, scores, indices, partial) -> tuple[tuple, dict]:
    """Positional arguments and constants of the scan: also what an ahead-of-time build derives its signature from."""
    query, key = call.query, call.key
    s, d = key.shape[1], key.shape[2]
    shift = 0 if call.causal_gap is None else call.query_offset - call.causal_gap
    # beyond these nothing changes, and the sum with a query's number fits int32
    shift = min(max(shift, -query.shape[1] - 1), s)
    mask = None if call.key_mask is None else call.key_mask.view(torch.uint8)
    arguments = (
        query, key, call.query_doc, call.key_doc, mask, scores, indices, partial,
        *query.stride()[:2], *_rows(key), *_pair(call.query_doc), *_pair(call.key_doc), *_pair(mask),
        query.shape[1], s, d, call.k, shift, chosen.splits, chosen.split_len,
    )  # fmt: skip
    constants = dict(
        IS_L2=call.metric == "l2",
        HAS_CAUSAL=call.causal_gap is not None,
        HAS_DOC=call.query_doc is not None,
        HAS_MASK=mask is not None,
        SPLIT=chosen.splits > 1,
        EVEN_D=d % chosen.block_d == 0,
        PRECISION=plan.precision(query.dtype),
        SLOTS=chosen.slots,
        BLOCK_Q=chosen.block_q,
        BLOCK_S=chosen.block_s,
        BLOCK_D=chosen.block_d,
    )
    return arguments, constants


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    query, key = call.query, call.key
    grad = grads[0]
    if grad is None:
        return [torch.zeros_like(t) if needed else None for t, needed in zip((query, key), needs, strict=True)]
    indices, grad = outputs[1].contiguous(), grad.to(torch.float32).contiguous()
    with plan.device_of(query):
        dquery = _dquery(call, indices, grad) if needs[0] else None
        dkey = _dkey(call, indices, grad) if needs[1] else None
    return [dquery, dkey]


def _dquery(call, indices: Tensor, grad: Tensor) -> Tensor:
    """dquery_i = sum over slots of ds * key (l2: ds * 2 (key - query_i)), in the order of the slots."""
    query, key = call.query, call.key
    b, q, d = query.shape
    dquery = query.new_empty((b, q, d))
    if key.shape[1] == 0 or dquery.numel() == 0:
        return dquery.zero_()
    tile = plan.gather(d)
    _topk_chunks_dquery_kernel[(b * q, triton.cdiv(d, tile.block_d))](
        grad, indices, query, key, dquery, *query.stride()[:2], *_rows(key), q, d, call.k,
        IS_L2=call.metric == "l2", BLOCK_K=min(tile.block_n, plan.slots(call.k)), BLOCK_D=tile.block_d, **tile.launch(),
    )  # fmt: skip
    return dquery


def _dkey(call, indices: Tensor, grad: Tensor) -> Tensor:
    """dkey_j = sum over the slots that chose j of ds * query (l2: ds * 2 (query - key_j)), in the order of the slots.

    The slots are sorted by the key they chose, stably, so that a key's slots are one run in a fixed order. Extra memory:
    O(B*Q*k), beside the gradient.
    """
    query, key = call.query, call.key
    b, q, d = query.shape
    kb, s, _ = key.shape
    dkey = key.new_zeros((kb, s, d))
    if dkey.numel() == 0 or indices.numel() == 0:
        return dkey
    first_row = torch.arange(kb, device=key.device).view(-1, 1, 1) * s
    target = torch.where(indices < 0, kb * s, indices + first_row).flatten()
    target, slot = torch.sort(target, stable=True)
    tile = plan.gather(d)
    _topk_chunks_dkey_kernel[(target.numel(), triton.cdiv(d, tile.block_d))](
        grad, target, slot, query, key, dkey, *query.stride()[:2], *_rows(key), target.numel(), kb * s, q, s, d, call.k,
        IS_L2=call.metric == "l2", BLOCK_N=tile.block_n, BLOCK_D=tile.block_d, **tile.launch(),
    )  # fmt: skip
    return dkey


def _rows(key: Tensor) -> tuple[int, int]:
    """Strides over batch and rows; one key set for all batches is a batch stride of 0."""
    return (0 if key.shape[0] == 1 else key.stride(0)), key.stride(1)


def _pair(tensor: Tensor | None) -> tuple[int, int]:
    if tensor is None:
        return 0, 0
    return (0 if tensor.shape[0] == 1 else tensor.stride(0)), tensor.stride(1)
