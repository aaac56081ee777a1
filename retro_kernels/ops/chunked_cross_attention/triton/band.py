"""Backward kernels of chunked cross-attention over positions: they write position logits to the band workspace and read
their gradient from it.

The workspace has one [BLOCK_M, band_keys] tile for each (item of the slab, head). Three steps use it:

1. `_cca_backward_logits_kernel` writes the position logits, which all neighbours share.
2. The kernels of `backward` replace them by dS, summed over the neighbours.
3. `_cca_backward_band_kernel` computes the gradient of the relative query from dS, and folds dS in place (see
   `position_logits`). From the folded dS `_cca_backward_rel_kernel` computes dR, a sum over all chunks in fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.loads import add_bias, load_rows, wide
from ....triton_lib.position_logits import band_block, position_logits, position_query_gradient, reverse_skew
from ....triton_lib.products import opaque_zero
from .tile import SIZES, first_position, has_keys, locate


@triton.jit
def _relative_query(
    q_ptr, rq_ptr, stride_qb, stride_qn, stride_qh, stride_rqb, stride_rqn, stride_rqh, batch, start, head
):
    """(address of the first row of the relative query, or of the query if there is none; stride of the rows)."""
    if rq_ptr is not None:
        base, stride = rq_ptr + batch * stride_rqb + wide(start) * stride_rqn + wide(head) * stride_rqh, stride_rqn
    else:
        base, stride = q_ptr + batch * stride_qb + wide(start) * stride_qn + wide(head) * stride_qh, stride_qn
    return base, stride


@triton.jit(do_not_specialize=SIZES)
def _cca_backward_logits_kernel(
    q_ptr,
    rel_ptr,
    rq_ptr,
    position_ptr,
    batch_start_ptr,
    band_ptr,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_rh,
    stride_rt,
    stride_rqb,
    stride_rqn,
    stride_rqh,
    stride_ph,
    stride_batch_start,
    N,
    M,
    R,
    H,
    L,
    T,
    rel_start,
    query_start,
    first_chunk,
    chunks,
    blocks,
    first_item,
    band_keys,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Position logits of one (chunk, time block, head) of a batch entry, for all keys of a neighbour."""
    head, slot, _, block, chunk, batch, first_row, start = locate(
        tl.program_id(0),
        H,
        M,
        first_item,
        first_chunk,
        chunks,
        blocks,
        query_start,
        batch_start_ptr,
        stride_batch_start,
        BLOCK_M,
    )
    head64 = head.to(tl.int64)
    local = tl.arange(0, BLOCK_M)
    n = start + local
    row_mask = (n >= 0) & (n < tl.minimum(first_row + M, N))
    rq_base, stride = _relative_query(
        q_ptr, rq_ptr, stride_qb, stride_qn, stride_qh, stride_rqb, stride_rqn, stride_rqh, batch, start, head
    )
    position_at = position_ptr + head64 * stride_ph if position_ptr is not None else None
    # [BLOCK_M, BLOCK_E]
    rq = add_bias(load_rows(rq_base, local, row_mask, stride, E, BLOCK_E), position_at, E, BLOCK_E)
    rq_from = (rq_base, local, row_mask, stride)
    rel_base = rel_ptr + head64 * stride_rh
    band_at = band_ptr + (slot.to(tl.int64) * H + head) * (BLOCK_M * band_keys)
    for j0 in range(0, tl.where(has_keys(chunk, L, batch_start_ptr is not None), R, 0), BLOCK_N):
        zero = opaque_zero(j0)
        base = block * BLOCK_M - j0 - (BLOCK_N - 1) - rel_start
        position = position_logits(  # [BLOCK_M, BLOCK_N]
            rq, rel_base, base, T, stride_rt, zero, E, BLOCK_M, BLOCK_N, BLOCK_E, PRECISION, False, rq_from, position_at
        )
        at = band_at + j0 + (local[:, None] * band_keys + tl.arange(0, BLOCK_N)[None, :])
        # rows past the end are 0 times the table, which is NaN if the table is infinite
        position = tl.where(row_mask[:, None], position, 0.0)
        tl.store(at, position.to(band_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=SIZES)
def _cca_backward_band_kernel(
    rel_ptr,
    batch_start_ptr,
    band_ptr,
    dq_ptr,
    drq_ptr,
    dposition_ptr,
    stride_rh,
    stride_rt,
    stride_batch_start,
    N,
    M,
    R,
    H,
    L,
    T,
    rel_start,
    query_start,
    first_chunk,
    chunks,
    blocks,
    first_item,
    band_keys,
    scale: tl.float32,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EVEN_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the relative query, in drq, or added to dq if the query is the relative query; folds the band."""
    head, slot, item, block, chunk, batch, first_row, start = locate(
        tl.program_id(0),
        H,
        M,
        first_item,
        first_chunk,
        chunks,
        blocks,
        query_start,
        batch_start_ptr,
        stride_batch_start,
        BLOCK_M,
    )
    head64 = head.to(tl.int64)
    local, width = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    rel_base = rel_ptr + head64 * stride_rh
    band_at = band_ptr + (slot.to(tl.int64) * H + head) * (BLOCK_M * band_keys)
    drq = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for j0 in range(0, tl.where(has_keys(chunk, L, batch_start_ptr is not None), R, 0), BLOCK_N):
        zero = opaque_zero(j0)
        j = j0 + tl.arange(0, BLOCK_N)
        at = band_at + j0 + (local[:, None] * band_keys + tl.arange(0, BLOCK_N)[None, :])
        if EVEN_KEYS:  # with a mask of columns elements would be loaded one by one
            ds = tl.load(at).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        else:
            ds = tl.load(at, mask=(j < R)[None, :], other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        folded = reverse_skew(ds, zero, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
        tl.debug_barrier()  # all threads have read the elements that the store replaces
        tl.store(at, folded.to(band_ptr.dtype.element_ty))
        base = block * BLOCK_M - j0 - (BLOCK_N - 1) - rel_start
        drq = position_query_gradient(  # [BLOCK_M, BLOCK_E]
            drq, folded, rel_base, base, T, stride_rt, zero, E, BLOCK_M, BLOCK_N, BLOCK_E, PRECISION
        )

    n = start + local
    row_mask = (n >= 0) & (n < tl.minimum(first_row + M, N))
    drq *= scale
    if dposition_ptr is not None:
        tl.store(dposition_ptr + (item.to(tl.int64) * H + head) * E + width, tl.sum(drq, 0), mask=width < E)
    inside = row_mask[:, None] & (width < E)[None, :]
    into = ((batch * N + wide(start)) * H + head) * E + (local[:, None] * (H * E) + width[None, :])
    if drq_ptr is not None:
        tl.store(drq_ptr + into, drq.to(drq_ptr.dtype.element_ty), mask=inside)
    else:
        drq += tl.load(dq_ptr + into, mask=inside, other=0.0).to(tl.float32)
        tl.store(dq_ptr + into, drq.to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _cca_backward_rel_kernel(
    q_ptr,
    rq_ptr,
    position_ptr,
    batch_start_ptr,
    band_ptr,
    part_ptr,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_rqb,
    stride_rqn,
    stride_rqh,
    stride_ph,
    stride_batch_start,
    N,
    M,
    H,
    L,
    query_start,
    first_chunk,
    chunks,
    blocks,
    first_item,
    last_item,
    items_per_split,
    key_blocks,
    band_keys,
    scale: tl.float32,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_N rows of one head's dR, summed over one split's chunks and added to the sums of earlier slabs in part_ptr.

    Row x of the partial sums [splits, H, rows, E] belongs to displacement x + 1 - key_blocks * BLOCK_N.
    """
    diagonal, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head64 = head.to(tl.int64)
    rows = tl.num_programs(0) * BLOCK_N
    local, c, width = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_E)
    into = ((split.to(tl.int64) * H + head) * rows + diagonal * BLOCK_N) * E + c[:, None] * E + width[None, :]
    inside = (c >= 0)[:, None] & (width < E)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    first = first_item + split * items_per_split
    last = tl.minimum(first + items_per_split, last_item)
    for item in range(first, last):
        block = item % blocks
        batch = wide(item // (blocks * chunks))
        own_start, own_chunk = first_position(query_start, first_chunk, M, batch_start_ptr, stride_batch_start, batch)
        chunk = own_chunk + (item // blocks) % chunks
        attends = has_keys(chunk, L, batch_start_ptr is not None)
        first_row = (chunk + 1) * M - 1 - own_start
        start = first_row + block * BLOCK_M
        n = start + local
        row_mask = (n >= 0) & (n < tl.where(attends, tl.minimum(first_row + M, N), 0))
        if rq_ptr is not None:
            rq_base = rq_ptr + batch * stride_rqb + wide(start) * stride_rqn + head64 * stride_rqh
            rq = load_rows(rq_base, local, row_mask, stride_rqn, E, BLOCK_E)  # [BLOCK_M, BLOCK_E]
        else:
            q_base = q_ptr + batch * stride_qb + wide(start) * stride_qn + head64 * stride_qh
            rq = load_rows(q_base, local, row_mask, stride_qn, E, BLOCK_E)  # [BLOCK_M, BLOCK_E]
        rq = add_bias(rq, position_ptr + head64 * stride_ph if position_ptr is not None else None, E, BLOCK_E)
        # the blocks of the band on this diagonal come from different key blocks, and select disjoint elements
        block_of = band_block(opaque_zero(item), BLOCK_M, BLOCK_N)
        ds = tl.zeros([BLOCK_M, BLOCK_N], band_ptr.dtype.element_ty)
        slot = (wide(item - first_item) * H + head) * (BLOCK_M * band_keys)
        for band in tl.static_range((BLOCK_M + BLOCK_N - 2) // BLOCK_N + 1):
            key_block = band + block * (BLOCK_M // BLOCK_N) + key_blocks - 1 - diagonal
            at = band_ptr + slot + key_block * BLOCK_N + (local[:, None] * band_keys + c[None, :])
            there = local < tl.where((key_block >= 0) & (key_block < key_blocks) & attends, BLOCK_M, 0)
            ds = tl.where(block_of == band, tl.load(at, mask=there[:, None], other=0.0), ds)  # [BLOCK_M, BLOCK_N]
        acc = tl.dot(tl.trans(ds), rq, acc, input_precision=PRECISION)  # [BLOCK_N, BLOCK_E]
    earlier = (c < tl.where(first_item > 0, BLOCK_N, 0))[:, None] & (width < E)[None, :]
    acc = acc * scale + tl.load(part_ptr + into, mask=earlier, other=0.0)
    tl.store(part_ptr + into, acc, mask=inside)
