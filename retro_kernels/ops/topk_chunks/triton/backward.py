"""Gradients of the chosen scores: a gather for the queries, a sorted segment sum for the keys. No atomics."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _topk_chunks_dquery_kernel(
    grad_ptr, indices_ptr, query_ptr, key_ptr, dquery_ptr,
    stride_q, stride_k,
    Q, S, D, k,
    IS_L2: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dquery [B*Q,D] in the query's type, from grad [B*Q,k] float32 and indices [B*Q,k] int64."""
    row = tl.program_id(0).to(tl.int64)
    batch = row // Q
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    d_ok = d < D
    key_base = key_ptr + batch * stride_k.b
    acc = tl.zeros([BLOCK_D], tl.float32)
    if IS_L2:
        query = tl.load(query_ptr + batch * stride_q.b + (row % Q) * stride_q.n + d, mask=d_ok, other=0.0).to(
            tl.float32
        )
    for start in range(0, k, BLOCK_K):
        slot = start + tl.arange(0, BLOCK_K)
        index = tl.load(indices_ptr + row * k + slot, mask=slot < k, other=-1)
        valid = (index >= 0) & (index < S)
        grad = tl.load(grad_ptr + row * k + slot, mask=valid, other=0.0)
        key = tl.load(
            key_base + index[:, None] * stride_k.s + d[None, :], mask=valid[:, None] & d_ok[None, :], other=0.0
        ).to(tl.float32)
        if IS_L2:
            # differences, because separate sums cancel where both are large
            key = tl.where(valid[:, None], 2.0 * (key - query[None, :]), 0.0)
        acc += tl.sum(grad[:, None] * key, 0)
    tl.store(dquery_ptr + row * D + d, acc, mask=d_ok)


@triton.jit
def _topk_chunks_dkey_kernel(
    grad_ptr, target_ptr, slot_ptr, query_ptr, key_ptr, dkey_ptr,
    stride_q, stride_k,
    count, keys, Q, S, D, k,
    IS_L2: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dkey [keys,D] in the key's type, which holds zeros before, from grad [count] float32.

    target [count] int64, sorted: the key row b*S + j of each chosen slot, and `keys` for a slot that chose none. slot
    [count] int64: where in grad the entry came from. count: B*Q*k.
    """
    # one program for each sorted entry; it returns at once unless it starts a run of equal targets
    first = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + first)
    before = tl.load(target_ptr + first - 1, mask=first > 0, other=-1)
    if (target != before) & (target < keys):
        d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        d_ok = d < D
        acc = tl.zeros([BLOCK_D], tl.float32)
        if IS_L2:
            key = tl.load(
                key_ptr + (target // S) * stride_k.b + (target % S) * stride_k.s + d, mask=d_ok, other=0.0
            ).to(tl.float32)
        start = first
        more = 1
        while more > 0:
            n = start + tl.arange(0, BLOCK_N)
            mine = tl.load(target_ptr + n, mask=n < count, other=-1) == target
            slot = tl.load(slot_ptr + n, mask=mine, other=0)
            grad = tl.load(grad_ptr + slot, mask=mine, other=0.0)
            row = slot // k
            query_rows = query_ptr + (row // Q) * stride_q.b + (row % Q) * stride_q.n
            query = tl.load(query_rows[:, None] + d[None, :], mask=mine[:, None] & d_ok[None, :], other=0.0).to(
                tl.float32
            )
            if IS_L2:
                query = tl.where(mine[:, None], 2.0 * (query - key[None, :]), 0.0)
            acc += tl.sum(grad[:, None] * query, 0)
            start += BLOCK_N
            more = tl.min(mine.to(tl.int32), 0)
        tl.store(dkey_ptr + target * D + d, acc, mask=d_ok)
