"""Kernels of the position logits alone. The skew is in the addresses and costs nothing.

Query i and table row t give the logit of key j = i + shift - t (shift = query_offset - rel_start). So the product of
BLOCK_M queries with BLOCK_N table rows is a parallelogram of the logits. Each of its rows is contiguous in memory: a
tile is stored to, and its gradient loaded from, addresses that move by one column from row to row. Every product is
exactly one logit, and no band is ever stored.

Rows are not aligned for vectors, so gradients are loaded one by one. They are loaded transposed: a tile in the order of
the table's rows would get their layout, 8 columns a thread, and each load would touch 17 sectors instead of 3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.loads import add_bias, load_rows, wide

#: sizes and positions to which kernels are not specialised
SIZES = ("N", "S", "T", "H", "shift", "blocks", "batches", "items", "items_per_split", "heads_per_table")


@triton.jit
def _table_rows(base, t, T, stride_t, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """[len(t), BLOCK_E]: rows t of the table, zero outside it."""
    inside = (t >= 0) & (t < T)
    return load_rows(base, tl.where(inside, t, 0), inside, stride_t, E, BLOCK_E)


@triton.jit(do_not_specialize=SIZES)
def _logits_forward_kernel(
    q_ptr, rel_ptr, position_ptr, out_ptr,
    stride_q, stride_r, stride_p,
    N, S, T, H, shift, blocks,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One parallelogram of the contiguous out [B,H,N,S]; keys ascend along its columns."""
    first = (tl.program_id(0) // blocks) * BLOCK_M
    block = tl.program_id(0) % blocks
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head64 = head.to(tl.int64)
    i = first + tl.arange(0, BLOCK_M)
    c = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = i < N
    q = load_rows(q_ptr + batch * stride_q.b + head64 * stride_q.h, i.to(tl.int64), row_mask, stride_q.n, E, BLOCK_E)
    q = add_bias(q, position_ptr + head64 * stride_p.h if position_ptr is not None else None, E, BLOCK_E)
    rel = _table_rows(rel_ptr + head64 * stride_r.h, first + BLOCK_M - 1 + shift - c, T, stride_r.t, E, BLOCK_E)
    logits = tl.dot(q, tl.trans(rel), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    j = (i - first - BLOCK_M + 1)[:, None] + c[None, :]
    at = out_ptr + ((batch * H + head) * N + i)[:, None] * S + j
    tl.store(at, logits.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (j >= 0) & (j < S))


@triton.jit(do_not_specialize=SIZES)
def _logits_query_kernel(
    grad_ptr, rel_ptr, dq_ptr, bias_ptr,
    stride_d, stride_r,
    N, S, T, H, shift, blocks,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [B,N,H,E] of BLOCK_M queries, and their sum, bias [B, ceil(N/BLOCK_M), H, E] float32."""
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head64 = head.to(tl.int64)
    first = tile * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)
    row_mask = i < N
    top = first + BLOCK_M - 1 + shift  # table row of the largest displacement
    begin = tl.cdiv(tl.maximum(top - T - BLOCK_N + 2, 0), BLOCK_N)  # only blocks of displacements that the table has
    end = tl.minimum(tl.maximum(top + BLOCK_N, 0) // BLOCK_N, blocks)
    base = rel_ptr + head64 * stride_r.h
    grad_base = grad_ptr + batch * stride_d.b + head64 * stride_d.h + i.to(tl.int64)[None, :] * stride_d.n
    dq = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for block in range(begin, end):
        c = block * BLOCK_N + tl.arange(0, BLOCK_N)
        j = c[:, None] + (i - first - BLOCK_M + 1)[None, :]
        grad = tl.load(grad_base + j, mask=row_mask[None, :] & (j >= 0) & (j < S), other=0.0)  # [BLOCK_N, BLOCK_M]
        rel = _table_rows(base, top - c, T, stride_r.t, E, BLOCK_E)
        dq += tl.dot(tl.trans(grad), rel, input_precision=PRECISION)
    e = tl.arange(0, BLOCK_E)
    if dq_ptr is not None:
        at = dq_ptr + ((batch * N + i) * H + head)[:, None] * E + e[None, :]
        tl.store(at, dq.to(dq_ptr.dtype.element_ty), mask=row_mask[:, None] & (e < E)[None, :])
    if bias_ptr is not None:
        slot = (batch * tl.num_programs(0) + tile) * H + head
        tl.store(bias_ptr + slot * E + e, tl.sum(dq, 0), mask=e < E)


@triton.jit(do_not_specialize=SIZES)
def _logits_table_kernel(
    grad_ptr, q_ptr, position_ptr, drel_ptr,
    stride_d, stride_q, stride_p,
    N, S, T, shift, items, items_per_split, heads_per_table,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """drel [splits, tables, T, E] float32: BLOCK_N rows of a table, summed over a split of its (batch, head) items."""
    first = tl.program_id(0) * BLOCK_N
    table, split = tl.program_id(1), tl.program_id(2)
    c = tl.arange(0, BLOCK_N)  # from the largest displacement down, so that keys ascend
    t = first + BLOCK_N - 1 - c
    # queries that have a key at some displacement of the block
    begin = tl.maximum(first - shift, 0)
    end = tl.minimum(first + BLOCK_N - 1 - shift + S, N)
    total = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for item in range(split * items_per_split, tl.minimum((split + 1) * items_per_split, items)):
        batch = (tl.full([], 0, tl.int64) + item) // heads_per_table
        head64 = wide(table * heads_per_table + item % heads_per_table)
        grad_base = grad_ptr + batch * stride_d.b + head64 * stride_d.h
        for start in range(begin, end, BLOCK_M):
            i = start + tl.arange(0, BLOCK_M)
            row_mask = i < end
            q = load_rows(
                q_ptr + batch * stride_q.b + head64 * stride_q.h, i.to(tl.int64), row_mask, stride_q.n, E, BLOCK_E
            )
            q = add_bias(q, position_ptr + head64 * stride_p.h if position_ptr is not None else None, E, BLOCK_E)
            j = c[:, None] + (i + shift - first - BLOCK_N + 1)[None, :]
            grad = tl.load(  # [BLOCK_N, BLOCK_M]
                grad_base + i.to(tl.int64)[None, :] * stride_d.n + j,
                mask=row_mask[None, :] & (j >= 0) & (j < S),
                other=0.0,
            )
            total += tl.dot(grad, q, input_precision=PRECISION)
    e = tl.arange(0, BLOCK_E)
    slot = (tl.full([], 0, tl.int64) + split) * tl.num_programs(1) + table
    tl.store(drel_ptr + (slot * T + t)[:, None] * E + e[None, :], total, mask=(t < T)[:, None] & (e < E)[None, :])
