"""Backward of relative attention with relative keys, along the columns of the stored tiles. One program owns a block of
keys, or of table rows, and walks over the queries that see it.

    dK = dS^T Q     dV = P^T dO     dR = dS'^T RQ

dS'[i, t] is the element of dS of query i and of the key at the displacement of table row t. So a tile of dS' is a
parallelogram of dS, and the kernel loads it by skewed addresses. Its rows are not aligned for vectors, so elements are
loaded one by one, and transposed: then neighbours in a warp are neighbours in memory (`relative_logits` has the same
product).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.loads import load_rows, wide
from ....triton_lib.positions import position_of
from ....triton_lib.products import opaque_zero
from .stored import joined, stored_keys
from .tile import SIZES, row_limits


@triton.jit(do_not_specialize=SIZES)
def _relative_columns_kernel(
    tile_ptr, span_ptr, x_ptr, k_ptr, batch_offset_ptr, out_ptr, dcontent_ptr, dposition_ptr,
    stride_ds, stride_x, stride_k, stride_batch_offset, stride_first, stride_second, stride_out,
    N, S, X, H, offset, causal_gap, window, rel_start, first_block, heads, ring, count,
    per_first, per_second, per_item, items, last_item, again,
    factor: tl.float32,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, SKEWED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[.., X, WIDTH]: BLOCK_N rows of the product of the stored tiles with the queries' rows x. A row of out belongs
    to a key or, if SKEWED, to a table row.

    The product is summed over `items` items (batch * heads + head) of the slab, `per_item` apart, that share an output.
    QUERY_BLOCK, KEY_BLOCK: the tile that was stored (KEY_BLOCK is 1 if SKEWED). again: 1 if the output of earlier slabs
    is added. x, k and the outputs begin with the slab's first entry and head.

    dcontent [B, key blocks, H, D] float32 gets these keys' part of the sum of all queries' content gradients, and
    dposition, of the same shape, its negative. Added to the sums of the whole gradients (`_relative_query_kernel`), it
    leaves the position bias's gradient.
    """
    # where all queries see all keys, no masks are needed, and addresses are constants apart: a fifth of the work. Wider
    # types and heads lack the registers.
    INNER: tl.constexpr = SKEWED and span_ptr is None and ring is None and BLOCK <= 128 and PRECISION != "tf32x3"
    SUMS: tl.constexpr = dcontent_ptr is not None or dposition_ptr is not None
    x0 = tl.program_id(0) * BLOCK_N
    first, second = tl.program_id(1), tl.program_id(2)
    c = tl.arange(0, BLOCK_N)
    x = x0 + BLOCK_N - 1 - c if SKEWED else x0 + c  # from the largest displacement down, so that keys ascend
    row0 = first_block * QUERY_BLOCK
    total = tl.zeros([BLOCK_N, BLOCK], tl.float32)
    number = first * per_first + second * per_second
    for one in range(tl.minimum(items, last_item - first * items)):
        item = number + one * per_item
        own_batch, own_head = item // heads, item % heads
        slot = wide(item) * count
        own = position_of(offset, batch_offset_ptr, stride_batch_offset, own_batch)
        span_at = span_ptr + 2 * slot if span_ptr is not None else None
        tile_at = tile_ptr + slot * QUERY_BLOCK * stride_ds
        nearest = own - rel_start - x0 - (BLOCK_N - 1) if SKEWED else x0  # key of the first column, less i if SKEWED
        limits = S, own, causal_gap, window
        begin, end = joined(row0, nearest, limits, span_at, count, BLOCK_N, QUERY_BLOCK, SKEWED, CAUSAL, WINDOW)
        x_base = x_ptr + wide(own_batch) * stride_x.b + wide(own_head) * stride_x.h
        weight = tl.zeros([BLOCK_N, 16], tl.float32) if SUMS else 0.0  # in every column the sums of the keys' dS
        for start in range(begin * QUERY_BLOCK, end * QUERY_BLOCK, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            row_mask = row < tl.minimum(end * QUERY_BLOCK, N - row0)
            i = row0 + row
            rows = load_rows(x_base, i.to(tl.int64), row_mask, stride_x.n, WIDTH, BLOCK)  # [BLOCK_M, BLOCK]
            low, high = stored_keys(i, row, row_mask, limits, span_at, QUERY_BLOCK, KEY_BLOCK, CAUSAL, WINDOW)
            seen = False
            if INNER:
                i0 = row0 + start
                least, _ = row_limits(i0 + (BLOCK_M - 1), S, own, causal_gap, window, CAUSAL, WINDOW)
                _, most = row_limits(i0, S, own, causal_gap, window, CAUSAL, WINDOW)
                seen = (nearest + i0 >= least) & (nearest + i0 + (BLOCK_M + BLOCK_N - 2) <= most)
                seen = seen & (start + BLOCK_M <= tl.minimum(end * QUERY_BLOCK, N - row0))
            if seen:
                local = tl.arange(0, BLOCK_M) + opaque_zero(start)  # the offsets take no registers throughout the loop
                skewed = c[:, None] + (local * (stride_ds + 1))[None, :]
                tile = tl.load(tile_at + (start * (stride_ds + 1) + row0 + nearest) + skewed)  # [BLOCK_N, BLOCK_M]
            else:
                if SKEWED:
                    j = (c + nearest)[:, None] + i[None, :]
                    held = (j >= low[None, :]) & (j < high[None, :])
                else:
                    j = x[:, None]
                    tile0 = x // KEY_BLOCK * KEY_BLOCK  # one mask for a whole tile, so that loads are wide
                    held = (tile0[:, None] >= low[None, :]) & (tile0[:, None] < high[None, :])
                column = j if ring is None else j & ring
                # [BLOCK_N, BLOCK_M]
                tile = tl.load(tile_at + ((row * stride_ds)[None, :] + column), mask=held, other=0.0)
            total = tl.dot(tile, rows, total, input_precision=PRECISION)  # [BLOCK_N, BLOCK]
            if SUMS:  # by a product: another use of the tile would not wait for its asynchronous copies
                ones = tl.full([BLOCK_M, 16], 1.0, tile.dtype)
                weight = tl.dot(tile, ones, weight, input_precision=PRECISION)  # [BLOCK_N, 16]
        if SUMS:
            sums = ((wide(own_batch) * tl.num_programs(0) + tl.program_id(0)) * H + own_head) * WIDTH
            k_base = k_ptr + wide(own_batch) * stride_k.b + wide(second) * stride_k.g
            of_keys = tl.sum(weight, 1) * (factor / 16)  # [BLOCK_N]
            # few columns at a time, because the sums fill the registers
            for column0 in range(0, WIDTH + opaque_zero(begin), 64):
                column = column0 + tl.arange(0, 64)
                at = k_base + x.to(tl.int64)[:, None] * stride_k.s + column[None, :]
                keys = tl.load(at, mask=(x < X)[:, None] & (column < WIDTH)[None, :], other=0.0).to(tl.float32)
                # a key that no query sees may be NaN
                part = tl.sum(tl.where(of_keys[:, None] != 0.0, of_keys[:, None] * keys, 0.0), 0)  # [64]
                inside, earlier = column < WIDTH, column < WIDTH * tl.minimum(first_block, 1)
                if dcontent_ptr is not None:
                    before = tl.load(dcontent_ptr + sums + column, mask=earlier, other=0.0)
                    tl.store(dcontent_ptr + sums + column, before + part, mask=inside)
                if dposition_ptr is not None:
                    before = tl.load(dposition_ptr + sums + column, mask=earlier, other=0.0)
                    tl.store(dposition_ptr + sums + column, before - part, mask=inside)
    w = tl.arange(0, BLOCK)
    inside, earlier = (x < X)[:, None] & (w < WIDTH)[None, :], (x < X * again)[:, None] & (w < WIDTH)[None, :]
    at = out_ptr + wide(first) * stride_first + wide(second) * stride_second
    at += x.to(tl.int64)[:, None] * stride_out + w[None, :]
    total = total * factor + tl.load(at, mask=earlier, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=inside)
