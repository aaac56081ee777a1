"""Backward of relative attention for the relative keys: one program owns a block of table rows and walks down their
diagonal of the stored dS.

A product of BLOCK_M queries with BLOCK_N table rows is a parallelogram of dS: the skew is in the addresses. No row of
it begins where a vector may, so its elements are loaded one by one, and transposed, so that neighbours in a warp are
neighbours in memory (as in `relative_logits`, whose table has the same product).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.loads import load_query, wide
from ....triton_lib.positions import position_of
from .stored import SLAB
from .tile import row_limits


@triton.jit
def _joined(
    start,
    far,
    S,
    offset,
    causal_gap,
    window,
    span_at,
    count,
    BLOCK_N: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr = 128,
):
    """[first, last) of the slab's query blocks that one of BLOCK_N displacements joins to a key that they see.

    start: the slab's first query. far: the largest of the displacements. One that no query sees, longer than the window
    or every document, costs this search alone.
    """
    first, last = count, 0
    for begin in range(0, count, BLOCK):
        block = begin + tl.arange(0, BLOCK)
        i = start + block * QUERY_BLOCK
        low, _ = row_limits(i, S, offset, causal_gap, window, CAUSAL, WINDOW)
        _, high = row_limits(i + QUERY_BLOCK - 1, S, offset, causal_gap, window, CAUSAL, WINDOW)
        if span_at is not None:
            low = tl.maximum(low, tl.load(span_at + 2 * block, mask=block < count, other=0))
            high = tl.minimum(high, S - 1 - tl.load(span_at + 2 * block + 1, mask=block < count, other=0))
        nearest = i + offset - far  # the least key that the block meets there
        hit = (block < count) & (low <= high) & (low < nearest + QUERY_BLOCK + BLOCK_N - 1) & (high >= nearest)
        first = tl.minimum(first, tl.min(tl.where(hit, block, count), 0))
        last = tl.maximum(last, tl.max(tl.where(hit, block + 1, 0), 0))
    return first, last


#: sizes and positions that must not become part of the compiled kernel
SIZES = (
    "N",
    "S",
    "T",
    "offset",
    "causal_gap",
    "window",
    "rel_start",
    *SLAB,
    "count",
    "items",
    "items_per_split",
    "per_table",
    "first_table",
    "tables",
    "again",
)


@triton.jit(do_not_specialize=SIZES)
def _relative_table_kernel(
    ds_ptr,
    span_ptr,
    rq_ptr,
    position_ptr,
    batch_offset_ptr,
    drel_ptr,
    stride_ds,
    stride_rqb,
    stride_rqn,
    stride_rqh,
    stride_ph,
    stride_batch_offset,
    N,
    S,
    T,
    offset,
    causal_gap,
    window,
    rel_start,
    first_batch,
    first_block,
    first_head,
    heads,
    ring,
    count,
    items,
    items_per_split,
    per_table,
    first_table,
    tables,
    again,
    scale: tl.float32,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """drel [splits, tables, T, E] float32: BLOCK_N rows of one table, over a split of the slab's (batch, head) items.

    per_table: heads of the slab that share a table. again: 1 if what earlier slabs left there is added to.
    """
    first = tl.program_id(0) * BLOCK_N
    table, split = tl.program_id(1), tl.program_id(2)
    c = tl.arange(0, BLOCK_N)  # from the largest displacement down, so that keys ascend
    t = first + BLOCK_N - 1 - c
    row0 = first_block * QUERY_BLOCK
    total = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for item in range(split * items_per_split, tl.minimum((split + 1) * items_per_split, items)):
        own_batch, own_head = item // per_table, table * per_table + item % per_table
        batch, head64 = wide(first_batch) + own_batch, wide(first_head) + own_head
        slot = (wide(own_batch) * heads + own_head) * count
        own = position_of(offset, batch_offset_ptr, stride_batch_offset, batch)
        span_at = span_ptr + 2 * slot if span_ptr is not None else None
        ds_at = ds_ptr + slot * QUERY_BLOCK * stride_ds
        far = rel_start + first + BLOCK_N - 1
        begin, end = _joined(
            row0, far, S, own, causal_gap, window, span_at, count, BLOCK_N, QUERY_BLOCK, CAUSAL, WINDOW
        )
        position_at = position_ptr + head64 * stride_ph if position_ptr is not None else None
        rq_base = rq_ptr + batch * stride_rqb + head64 * stride_rqh
        for start in range(begin * QUERY_BLOCK, end * QUERY_BLOCK, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            row_mask = row < tl.minimum(end * QUERY_BLOCK, N - row0)
            i = row0 + row
            # [BLOCK_M, BLOCK_E]
            _, rq = load_query(rq_base, position_at, i, row_mask, stride_rqn, E, BLOCK_E)
            first_key, last_key = row_limits(i, S, own, causal_gap, window, CAUSAL, WINDOW)
            last_key = tl.where(row_mask, last_key, -1)
            if span_ptr is not None:
                block = row // QUERY_BLOCK
                first_key = tl.maximum(first_key, tl.load(span_at + 2 * block, mask=row_mask, other=0))
                last_key = tl.minimum(last_key, S - 1 - tl.load(span_at + 2 * block + 1, mask=row_mask, other=0))
            j = c[:, None] + (i + own - far)[None, :]
            held = (j >= first_key[None, :]) & (j <= last_key[None, :])
            column = j if ring is None else j & ring
            # [BLOCK_N, BLOCK_M]
            ds = tl.load(ds_at + ((row * stride_ds)[None, :] + column), mask=held, other=0.0)
            total += tl.dot(ds, rq, input_precision=PRECISION)  # [BLOCK_N, BLOCK_E]
    e = tl.arange(0, BLOCK_E)
    inside, earlier = (t < T)[:, None] & (e < E)[None, :], (t < T * again)[:, None] & (e < E)[None, :]
    slot = (wide(split) * tables + first_table + table) * T
    at = drel_ptr + (slot + t)[:, None] * E + e[None, :]
    total = total * scale + tl.load(at, mask=earlier, other=0.0)
    tl.store(at, total, mask=inside)
