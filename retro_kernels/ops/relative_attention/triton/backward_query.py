"""Backward of relative attention along the queries; keys and table have their own kernels.

With delta = rowsum(dO * O) - dlse:  P = exp(logits - lse), dS = P * (dP - delta), dq = scale * dS k, and so on. There
are no atomics: each program owns the elements it writes, and sums over query blocks (the biases) are stored apart and
added afterwards.

Tiles are flat, few queries by many keys, so that all accumulators fit the registers. Products are computed transposed,
because a warp group multiplies 64 rows at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.gradients import load_queries, load_statistics
from ....triton_lib.loads import load_keys, load_query
from ....triton_lib.position_logits import band_block, position_logits, rel_rows, reverse_skew
from ....triton_lib.positions import position_of
from ....triton_lib.products import opaque_zero, rows_product
from ....triton_lib.softmax import LOG2E
from .gradient import tile_gradient
from .stored import store_tile
from .tile import (
    SIZES,
    TALL,
    load_segments,
    narrow,
    row_limits,
    scalar_position,
    seen_keys,
    skewed_block,
    table_span,
    visible_pairs,
    walk_step,
    whole_tiles,
)


@triton.jit
def _walk_gradient(
    begin, end, start, operands, addresses, queries, keys, rq_base, content_at, position_at, rel_base, mask_at,
    segment_at, seed_ptr, strides, sizes, dropout, place, dq, drq, ds_ptr, p_ptr, slab, ring,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    POSITION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [BLOCK_D, BLOCK_M] and drq [BLOCK_E, BLOCK_M] after the keys [begin, end), both transposed and without the
    factor `scale`.

    A block of the band gets gradients from two tiles: first it is the lower block of one, then the upper block of the
    next. `held` keeps the gradient of the first.

    operands: query, relative query, dO, lse in base 2, and delta. addresses: of the first three. slab: item and row
    stride of the stored tiles. For the other tuples see `_walk_keys`.
    """
    q, rq, do, lse2, delta = operands
    q_from, rq_from, do_from = addresses
    i, row_mask, first_key, last_key, query_segment = queries
    k_base, stride_ks, v_base, stride_vs = keys
    stride_rqn, stride_rt, stride_ms, stride_gs = strides
    S, T, shift, scale2 = sizes
    head, batch = place
    item, stride_ds = slab
    WALK: tl.constexpr = POSITION and E > 1
    upper, held = 0.0, 0.0
    if WALK:
        source = rq, rq_from, rel_base, T, stride_rt
        base = start + shift - begin - (BLOCK_N - 1)
        upper = skewed_block(  # [BLOCK_M, BLOCK_N]
            source, position_at, base + BLOCK_N, opaque_zero(begin), E, BLOCK_M, BLOCK_N, BLOCK_E, PRECISION, True
        )
        held = tl.zeros([BLOCK_M, BLOCK_N], rq.dtype)
    for j0 in range(begin, end, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        seen = seen_keys(j, S, mask_at, stride_ms)
        k = load_keys(k_base, j.to(tl.int64), seen, stride_ks, D, BLOCK_D, True)  # [BLOCK_N, BLOCK_D]
        zero = opaque_zero(j0)
        v = load_keys(v_base, j.to(tl.int64), seen, stride_vs, D, BLOCK_D, True)  # [BLOCK_N, BLOCK_D]
        logits = rows_product(  # [BLOCK_M, BLOCK_N]
            q, q_from, content_at, k, k_base, j0, S, stride_ks, zero, D, BLOCK_N, BLOCK_D, PRECISION, True
        )
        base = start + shift - j0 - (BLOCK_N - 1)
        t = (i + shift)[:, None] - j[None, :]
        if WALK:
            lower = skewed_block(  # [BLOCK_M, BLOCK_N]
                source, position_at, base, zero, E, BLOCK_M, BLOCK_N, BLOCK_E, PRECISION, True
            )
            logits = logits + walk_step(lower, upper, 0.0, zero, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
            upper = lower
        elif POSITION:
            # [BLOCK_M, BLOCK_N]
            logits = logits + scalar_position(rq_base, position_at, rel_base, i, row_mask, t, T, stride_rqn, stride_rt)
        dp = rows_product(  # [BLOCK_M, BLOCK_N]
            do, do_from, None, v, v_base, j0, S, stride_vs, zero, D, BLOCK_N, BLOCK_D, PRECISION, True
        )
        visible = visible_pairs(j, seen, first_key, last_key, query_segment, segment_at, S, stride_gs)
        here = j[None, :], i[:, None], head, batch
        kept, ds = tile_gradient(logits, dp, lse2, delta, visible, scale2, seed_ptr, dropout, here)
        if ds_ptr is not None:
            store_tile(ds_ptr, item, ds, j0, stride_ds, ring, BLOCK_M, BLOCK_N)
        if p_ptr is not None:
            store_tile(p_ptr, item, kept, j0, stride_ds, ring, BLOCK_M, BLOCK_N)
        dq += tl.dot(tl.trans(k), tl.trans(ds.to(k.dtype)), input_precision=PRECISION)  # [BLOCK_D, BLOCK_M]
        if WALK:
            folded = reverse_skew(ds, zero, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
            narrowed = folded.to(rq.dtype)
            rel = rel_rows(rel_base, base + BLOCK_N, T, stride_rt, E, BLOCK_N, BLOCK_E)  # [BLOCK_N, BLOCK_E]
            whole = tl.where(band_block(zero, BLOCK_M, BLOCK_N) == 0, held, narrowed)
            drq += tl.dot(tl.trans(rel), tl.trans(whole), input_precision=PRECISION)  # [BLOCK_E, BLOCK_M]
            held = narrowed
        elif POSITION:
            inside = (t >= 0) & (t < T)
            # [BLOCK_M, BLOCK_N]
            rel = tl.load(rel_base + tl.where(inside, t, 0) * stride_rt, mask=inside, other=0.0).to(tl.float32)
            drq += tl.sum(ds * rel, 1)[None, :]
    if WALK:  # noqa: SIM102, WALK is decided at compile time
        if end > begin:
            last = begin + (end - begin - 1) // BLOCK_N * BLOCK_N
            # [BLOCK_N, BLOCK_E]
            rel = rel_rows(rel_base, start + shift - last - (BLOCK_N - 1), T, stride_rt, E, BLOCK_N, BLOCK_E)
            rest = tl.where(band_block(0, BLOCK_M, BLOCK_N) == 0, held, 0.0).to(rq.dtype)
            drq += tl.dot(tl.trans(rel), tl.trans(rest), input_precision=PRECISION)  # [BLOCK_E, BLOCK_M]
    return dq, drq


@triton.jit
def _walk_tall(
    begin, end, start, operands, queries, keys, rq_base, position_at, rel_base, mask_at, segment_at, seed_ptr,
    strides, sizes, dropout, place, dq, drq, ds_ptr, p_ptr, slab, ring,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    POSITION: tl.constexpr, MERGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [BLOCK_M, BLOCK_D] and drq [BLOCK_M, BLOCK_E] after the keys [begin, end), without the factor `scale`. MERGED:
    dq is the sum of both. For the tuples see `_walk_gradient`; `operands` has no addresses here.

    The walk for blocks of 64 queries and more, of half types: products of whole warp groups. Queries are along the rows
    of every product, so a query's lse, delta, first and last key take two registers a thread, and not a column each.
    Both blocks of the band are multiplied again for every tile, for logits and for gradients. Tensor cores have time
    for it, while keeping the upper block and its partial gradient would take 48 registers, which these tiles lack.
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


@triton.jit(do_not_specialize=SIZES)
def _relative_query_kernel(
    q_ptr, k_ptr, v_ptr, rel_ptr, rq_ptr, content_ptr, position_ptr, mask_ptr, query_segment_ptr, key_segment_ptr,
    seed_ptr, batch_offset_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, drq_ptr, dcontent_ptr, dposition_ptr, dtotal_ptr,
    ds_ptr, p_ptr, span_ptr,
    stride_q, stride_k, stride_v, stride_r, stride_rq, stride_c, stride_p, stride_m, stride_query_segment,
    stride_key_segment, stride_batch_offset, stride_do, stride_ds,
    N, S, T, H, HEADS_PER_GROUP, offset, causal_gap, window, rel_start, blocks,
    first_batch, first_block, first_head, heads, ring,
    scale: tl.float32, dropout_limit, dropout_scale: tl.float32,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [B,N,H,D] of one query block and head; drq [B,N,H,E], which is added to dq if the relative query is the query.

    dcontent [B, blocks, H, D] and dposition [B, blocks, H, E] float32 get the sums over the block's queries, dtotal
    the sum of both.

    One launch serves a slab: `heads` heads, and the batch entries and query blocks of its grid. ds gets the gradient of
    the slab's logits and p its probabilities (`stored.py`). span gets the number of keys before the first and after the
    last that a block of queries walks over.
    """
    FLAT: tl.constexpr = BLOCK_M < TALL or PRECISION == "tf32x3" or rel_ptr is None
    # whether the two parts of the query's gradient, or their sums, are needed
    APART: tl.constexpr = drq_ptr is not None or dcontent_ptr is not None or dposition_ptr is not None
    MERGED: tl.constexpr = not FLAT and E > 1 and not APART
    head = first_head + tl.program_id(0) % heads
    count = tl.num_programs(0) // heads  # blocks of the slab
    block = first_block + count - 1 - tl.program_id(0) // heads
    start = block * BLOCK_M
    batch = tl.program_id(1).to(tl.int64) + first_batch
    group = head // HEADS_PER_GROUP
    head64, group64 = head.to(tl.int64), group.to(tl.int64)
    i = start + tl.arange(0, BLOCK_M)
    row_mask = i < N
    offset = position_of(offset, batch_offset_ptr, stride_batch_offset, batch)
    first_key, last_key = row_limits(i, S, offset, causal_gap, window, CAUSAL, WINDOW)
    last_key = tl.where(row_mask, last_key, -1)  # a row past the end sees no key, because its logits may be NaN
    content_at = content_ptr + head64 * stride_c.h if content_ptr is not None else None
    position_at = position_ptr + head64 * stride_p.h if position_ptr is not None else None
    mask_at = mask_ptr + batch * stride_m.b if mask_ptr is not None else None
    query_segment_at = query_segment_ptr + batch * stride_query_segment.b if query_segment_ptr is not None else None
    segment_at = key_segment_ptr + batch * stride_key_segment.b if key_segment_ptr is not None else None
    rq_base = rq_ptr + batch * stride_rq.b + head64 * stride_rq.h if rel_ptr is not None else None
    rel_base = rel_ptr + head64 * stride_r.h if rel_ptr is not None else None
    q_base = q_ptr + batch * stride_q.b + head64 * stride_q.h
    do_base = do_ptr + batch * stride_do.b + head64 * stride_do.h
    statistics = (batch * H + head) * N
    q_from, do_from = (q_base, i, row_mask, stride_q.n), (do_base, i, row_mask, stride_do.n)
    lse_at, delta_at = lse_ptr + statistics, delta_ptr + statistics
    # [BLOCK_M, BLOCK_D]
    q, do, lse2, delta = load_queries(q_from, do_from, content_at, lse_at, delta_at, D, BLOCK_D)
    rq = q
    if rel_ptr is not None and E > 1:
        _, rq = load_query(rq_base, position_at, i, row_mask, stride_rq.n, E, BLOCK_E)  # [BLOCK_M, BLOCK_E]
    rq_from = (rq_base, i, row_mask, stride_rq.n) if rel_ptr is not None else q_from
    query_segment, smallest, largest = 0, 0, 0
    if key_segment_ptr is not None:
        query_segment, smallest, largest = load_segments(query_segment_at, i, row_mask, start, stride_query_segment.n)

    begin = tl.min(first_key, 0)
    end = tl.max(last_key, 0) + 1
    if mask_ptr is not None or key_segment_ptr is not None:
        begin, end = narrow(begin, end, segment_at, stride_key_segment.s, mask_at, stride_m.s, smallest, largest)
    begin, end = whole_tiles(begin, end, BLOCK_N)
    shift = offset - rel_start
    table_begin, table_end = table_span(
        begin, end, start + shift - T - BLOCK_N + 2, start + BLOCK_M + shift, BLOCK_N, BOUNDED
    )
    item = 0
    if ds_ptr is not None or p_ptr is not None:
        item = (tl.program_id(1) * heads + tl.program_id(0) % heads) * count + block - first_block
        if span_ptr is not None:
            tl.store(span_ptr + 2 * item, begin)
            tl.store(span_ptr + 2 * item + 1, S - end)
    if FLAT:
        dq = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
        drq = tl.zeros([BLOCK_E, BLOCK_M], tl.float32)
    else:
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        drq = dq if MERGED else tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    operands = q, rq, do, lse2, delta
    queries = i, row_mask, first_key, last_key, query_segment
    row_strides = stride_rq.n, stride_r.t, stride_m.s, stride_key_segment.s
    for part in tl.static_range(3 if BOUNDED else 1):
        part_begin = table_begin if part == 0 else (begin if part == 1 else table_end)
        part_end = table_end if part == 0 else (table_begin if part == 1 else end)
        k_base = k_ptr + batch * stride_k.b + group64 * stride_k.g
        v_base = v_ptr + batch * stride_v.b + group64 * stride_v.g
        keys, sizes = (k_base, stride_k.s, v_base, stride_v.s), (S, T, shift, scale * LOG2E)
        if FLAT:
            dq, drq = _walk_gradient(
                part_begin, part_end, start, operands, (q_from, rq_from, do_from), queries, keys, rq_base, content_at,
                position_at, rel_base, mask_at, segment_at, seed_ptr, row_strides, sizes,
                (dropout_limit, dropout_scale), (head, batch), dq, drq, ds_ptr, p_ptr, (item, stride_ds), ring,
                D, E, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, rel_ptr is not None and part == 0, PRECISION,
            )  # fmt: skip
        else:
            dq, drq = _walk_tall(
                part_begin, part_end, start, operands, queries, keys, rq_base, position_at, rel_base, mask_at,
                segment_at, seed_ptr, row_strides, sizes, (dropout_limit, dropout_scale), (head, batch), dq, drq,
                ds_ptr, p_ptr, (item, stride_ds), ring,
                D, E, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, rel_ptr is not None and part == 0, MERGED, PRECISION,
            )  # fmt: skip
    if FLAT:
        dq, drq = tl.trans(dq), tl.trans(drq)
    column, wide = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    # recomputed with a term of 0 that the compiler can't fold, so that no registers hold them throughout the loops
    pid = tl.program_id(0) + tl.minimum(H, 0)
    head = first_head + pid % heads
    block = first_block + tl.num_programs(0) // heads - 1 - pid // heads
    batch = (tl.program_id(1) + tl.minimum(H, 0)).to(tl.int64) + first_batch
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = i < N
    lse2, _ = load_statistics(lse_ptr + (batch * H + head) * N, delta_ptr, i, row_mask)
    some = lse2 != float("inf")  # where a query sees nothing, dq is 0 times keys that may be NaN
    dq = tl.where(some[:, None], dq, 0.0) * scale
    if not MERGED:
        drq = tl.where(some[:, None], drq, 0.0) * scale
    slot = (batch * blocks + block) * H + head
    if dcontent_ptr is not None:
        tl.store(dcontent_ptr + slot * D + column, tl.sum(dq, 0), mask=column < D)
    if dposition_ptr is not None:
        tl.store(dposition_ptr + slot * E + wide, tl.sum(drq, 0), mask=wide < E)
    row = (batch * N + i) * H + head
    if drq_ptr is not None:
        tl.store(
            drq_ptr + row[:, None] * E + wide[None, :],
            drq.to(drq_ptr.dtype.element_ty),
            mask=row_mask[:, None] & (wide < E)[None, :],
        )
    elif rel_ptr is not None and not MERGED:
        dq += drq  # the relative query is the query, and E = D
    if dtotal_ptr is not None:
        tl.store(dtotal_ptr + slot * D + column, tl.sum(dq, 0), mask=column < D)
    tl.store(
        dq_ptr + row[:, None] * D + column[None, :],
        dq.to(dq_ptr.dtype.element_ty),
        mask=row_mask[:, None] & (column < D)[None, :],
    )
