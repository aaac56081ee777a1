"""The walk of `backward_query` for blocks of 64 queries and more, of half types: products of whole warp groups.

Queries are along the rows of every product, so a query's lse, delta, first and last key take two registers a thread,
and not a column each. Both blocks of the band are multiplied again for every tile, for logits and for gradients. Tensor
cores have time for it, while keeping the upper block and its partial gradient would take 48 registers, which these
tiles lack.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.loads import load_keys
from ....triton_lib.position_logits import band_block, position_logits, rel_rows, reverse_skew
from ....triton_lib.products import opaque_zero
from .gradient import tile_gradient
from .stored import store_tile
from .tile import scalar_position, seen_keys, visible_pairs


@triton.jit
def walk_tall(
    begin, end, start, operands, queries, keys, rq_base, position_at, rel_base, mask_at, segment_at, seed_ptr,
    strides, sizes, dropout, place, dq, drq, ds_ptr, p_ptr, slab, ring,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    POSITION: tl.constexpr, MERGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [BLOCK_M, BLOCK_D] and drq [BLOCK_M, BLOCK_E] after the keys [begin, end), without the factor `scale`. MERGED:
    dq is the sum of both. For the tuples see `_walk_gradient`; `operands` has no addresses here.
    """
    q, rq, do, lse2, delta = operands
    i, row_mask, first_key, last_key, query_segment = queries
    k_base, stride_ks, v_base, stride_vs = keys
    stride_rqn, stride_rt, stride_ms, stride_gs = strides
    S, T, shift, scale2 = sizes
    head, batch = place
    item, stride_ds = slab
    BAND: tl.constexpr = POSITION and E > 1
    BLOCKS: tl.constexpr = (BLOCK_M + BLOCK_N - 2) // BLOCK_N + 1  # blocks of the band
    for j0 in range(begin, end, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        zero = opaque_zero(j0)
        seen = seen_keys(j, S, mask_at, stride_ms)
        base = start + shift - j0 - (BLOCK_N - 1)
        rows = tl.minimum(T, base + BLOCK_M + BLOCK_N - 1)  # those past the band are not read
        t = (i + shift)[:, None] - j[None, :]
        if BAND:
            # [BLOCK_M, BLOCK_N]
            logits = position_logits(rq, rel_base, base, rows, stride_rt, zero, E, BLOCK_M, BLOCK_N, BLOCK_E, PRECISION)
        elif POSITION:
            # [BLOCK_M, BLOCK_N]
            logits = scalar_position(rq_base, position_at, rel_base, i, row_mask, t, T, stride_rqn, stride_rt)
        else:
            logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        k = load_keys(k_base, j.to(tl.int64), seen, stride_ks, D, BLOCK_D, True)  # [BLOCK_N, BLOCK_D]
        logits = tl.dot(q, tl.trans(k), logits, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        v = load_keys(v_base, j.to(tl.int64), seen, stride_vs, D, BLOCK_D, True)  # [BLOCK_N, BLOCK_D]
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        visible = visible_pairs(
            j, seen, first_key, last_key, query_segment, segment_at, S, stride_gs, mask_at is not None
        )
        here = j[None, :], i[:, None], head, batch
        kept, ds = tile_gradient(logits, dp, lse2, delta, visible, scale2, seed_ptr, dropout, here)
        narrowed = ds.to(k.dtype)
        dq = tl.dot(narrowed, k, dq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
        if BAND:
            folded = reverse_skew(narrowed, zero, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
            block_of = band_block(zero, BLOCK_M, BLOCK_N)
            for block in tl.static_range(BLOCKS):
                # [BLOCK_N, BLOCK_E]
                rel = rel_rows(rel_base, base + block * BLOCK_N, rows, stride_rt, E, BLOCK_N, BLOCK_E)
                part = tl.where(block_of == block, folded, 0.0)
                if MERGED:
                    dq = tl.dot(part, rel, dq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
                else:
                    drq = tl.dot(part, rel, drq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_E]
        elif POSITION:
            inside = (t >= 0) & (t < T)
            # [BLOCK_M, BLOCK_N]
            rel = tl.load(rel_base + tl.where(inside, t, 0) * stride_rt, mask=inside, other=0.0).to(tl.float32)
            drq += tl.sum(ds * rel, 1)[:, None]
        # at the end: after a store, Triton would load the table's rows again
        if p_ptr is not None:
            store_tile(p_ptr, item, kept, j0, stride_ds, ring, BLOCK_M, BLOCK_N)
        if ds_ptr is not None:
            store_tile(ds_ptr, item, narrowed, j0, stride_ds, ring, BLOCK_M, BLOCK_N)
    return dq, drq
