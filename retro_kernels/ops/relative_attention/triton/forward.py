"""Forward kernel of relative attention: flash attention whose walk over the keys also walks along the relative keys."""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.dropout import dropout_keep
from ....triton_lib.loads import load_keys, load_query
from ....triton_lib.position_logits import band_block, reverse_skew, table_product
from ....triton_lib.positions import position_of
from ....triton_lib.products import opaque_zero, rows_product
from ....triton_lib.softmax import LOG2E, softmax_end, softmax_step
from .tile import (
    SIZES,
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
def _walk_keys(
    begin, end, start, operands, queries, keys, rq_base, content_at, position_at, rel_base, mask_at, segment_at,
    seed_ptr, strides, sizes, dropout, place, row_max, row_sum, acc,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    POSITION: tl.constexpr, EDGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Running maximum (base 2), sum and weighted values of a block of queries after the keys [begin, end). Without
    EDGES every query sees all of them.

    operands: query, relative query, and their addresses. queries: index, row mask, first and last key, and segment of
    each query. keys: address and row stride of the keys, then of the values. strides: between rows of the relative
    query, the table, the key mask and the segments. sizes: S, T, the table row of query 0 and key 0, and the scale for
    base 2. dropout: limit and scale. place: head and batch entry. A tuple with None is refused by Triton 3.6.
    """
    q, rq, q_from, rq_from = operands
    i, row_mask, first_key, last_key, query_segment = queries
    k_base, stride_ks, v_base, stride_vs = keys
    stride_rqn, stride_rt, stride_ms, stride_gs = strides
    S, T, shift, scale2 = sizes
    dropout_limit, dropout_scale = dropout
    head, batch = place
    WALK: tl.constexpr = POSITION and E > 1
    # Narrow heads have registers for a table product one tile ahead, between the content product and the softmax. Loops
    # of wide heads are not pipelined: k is loaded before the skew and v before the softmax, and they arrive meanwhile.
    AHEAD: tl.constexpr = WALK and not EDGES and BLOCK_D <= 64 and PRECISION != "tf32x3"
    EARLY: tl.constexpr = WALK and BLOCK_D > 64
    upper, uppermost = 0.0, 0.0
    if WALK:
        source = rq, rq_from, rel_base, T, stride_rt
        base = start + shift - begin - (BLOCK_N - 1)
        zero = opaque_zero(begin)
        upper = skewed_block(  # [BLOCK_M, BLOCK_N]
            source, position_at, base + BLOCK_N, zero, E, BLOCK_M, BLOCK_N, BLOCK_E, PRECISION
        )
        if BLOCK_M > BLOCK_N:
            uppermost = skewed_block(  # [BLOCK_M, BLOCK_N]
                source, position_at, base + 2 * BLOCK_N, zero, E, BLOCK_M, BLOCK_N, BLOCK_E, PRECISION
            )
        if AHEAD:
            block = table_product(  # [BLOCK_M, BLOCK_N]
                rq, rq_from, position_at, rel_base, base, T, stride_rt, zero, E, BLOCK_N, BLOCK_E, PRECISION
            )
    for j0 in range(begin, end, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        seen = seen_keys(j, S, mask_at, stride_ms)
        base = start + shift - j0 - (BLOCK_N - 1)
        zero = opaque_zero(j0)
        if WALK and not AHEAD:
            block = table_product(  # [BLOCK_M, BLOCK_N]
                rq, rq_from, position_at, rel_base, base, T, stride_rt, zero, E, BLOCK_N, BLOCK_E, PRECISION
            )
        if EARLY:
            k = load_keys(k_base, j.to(tl.int64), seen, stride_ks, D, BLOCK_D, EDGES)  # [BLOCK_N, BLOCK_D]
        if WALK:  # before the content product, so that the registers of the two are not live together
            lower = reverse_skew(block, zero, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
            position = walk_step(lower, upper, uppermost, zero, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
            if BLOCK_M > BLOCK_N:
                # a plain copy would be carried over two rounds, and Triton does not pipeline such loops
                uppermost = tl.where(band_block(zero, BLOCK_M, BLOCK_N) == 2, upper, 0.0)
            upper = lower
        if not EARLY:
            k = load_keys(k_base, j.to(tl.int64), seen, stride_ks, D, BLOCK_D, EDGES)  # [BLOCK_N, BLOCK_D]
        logits = rows_product(  # [BLOCK_M, BLOCK_N]
            q, q_from, content_at, k, k_base, j0, S, stride_ks, zero, D, BLOCK_N, BLOCK_D, PRECISION
        )
        if EARLY:
            v = load_keys(v_base, j.to(tl.int64), seen, stride_vs, D, BLOCK_D, EDGES)  # [BLOCK_N, BLOCK_D]
        if WALK:
            logits = logits + position
        elif POSITION:
            t = (i + shift)[:, None] - j[None, :]
            # [BLOCK_M, BLOCK_N]
            logits = logits + scalar_position(rq_base, position_at, rel_base, i, row_mask, t, T, stride_rqn, stride_rt)
        logits *= scale2
        if EDGES:
            visible = visible_pairs(j, seen, first_key, last_key, query_segment, segment_at, S, stride_gs)
            logits = tl.where(visible, logits, float("-inf"))
        if AHEAD:
            block = table_product(  # [BLOCK_M, BLOCK_N]
                rq, rq_from, position_at, rel_base, base - BLOCK_N, T, stride_rt, zero, E, BLOCK_N, BLOCK_E, PRECISION
            )
        p, row_max, row_sum, acc = softmax_step(logits, row_max, row_sum, acc, True)
        if seed_ptr is not None:
            keep = dropout_keep(tl.load(seed_ptr), dropout_limit, j[None, :], i[:, None], head, batch)
            p = tl.where(keep, p * dropout_scale, 0.0)
        if not EARLY:
            v = load_keys(v_base, j.to(tl.int64), seen, stride_vs, D, BLOCK_D, EDGES)  # [BLOCK_N, BLOCK_D]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=SIZES)
def _relative_forward_kernel(
    q_ptr, k_ptr, v_ptr, rel_ptr, rq_ptr, content_ptr, position_ptr, mask_ptr, query_segment_ptr, key_segment_ptr,
    seed_ptr, batch_offset_ptr, out_ptr, lse_ptr,
    stride_q, stride_k, stride_v, stride_r, stride_rq, stride_c, stride_p, stride_m, stride_query_segment,
    stride_key_segment, stride_batch_offset,
    N, S, T, H, HEADS_PER_GROUP, offset, causal_gap, window, rel_start, blocks, keys_per_split,
    scale: tl.float32, dropout_limit, dropout_scale: tl.float32,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One (query block, head), batch and split of the keys: out [split, B, N, H, D] and lse [split, B, H, N], both
    contiguous.
    """
    # heads vary fastest, so programs that run together share keys; if causal, the last blocks see the most keys, so
    # they start first
    head = tl.program_id(0) % H
    start = (blocks - 1 - tl.program_id(0) // H) * BLOCK_M
    batch, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    group = head // HEADS_PER_GROUP
    head64, group64 = head.to(tl.int64), group.to(tl.int64)
    i = start + tl.arange(0, BLOCK_M)
    row_mask = i < N
    offset = position_of(offset, batch_offset_ptr, stride_batch_offset, batch)
    first_key, last_key = row_limits(i, S, offset, causal_gap, window, CAUSAL, WINDOW)

    content_at = content_ptr + head64 * stride_c.h if content_ptr is not None else None
    position_at = position_ptr + head64 * stride_p.h if position_ptr is not None else None
    mask_at = mask_ptr + batch * stride_m.b if mask_ptr is not None else None
    query_segment_at = query_segment_ptr + batch * stride_query_segment.b if query_segment_ptr is not None else None
    segment_at = key_segment_ptr + batch * stride_key_segment.b if key_segment_ptr is not None else None
    q_base = q_ptr + batch * stride_q.b + head64 * stride_q.h
    rq_base = rq_ptr + batch * stride_rq.b + head64 * stride_rq.h if rel_ptr is not None else None
    rel_base = rel_ptr + head64 * stride_r.h if rel_ptr is not None else None
    _, q = load_query(q_base, content_at, i, row_mask, stride_q.n, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    rq = q
    if rel_ptr is not None and E > 1:
        _, rq = load_query(rq_base, position_at, i, row_mask, stride_rq.n, E, BLOCK_E)  # [BLOCK_M, BLOCK_E]
    q_from = (q_base, i, row_mask, stride_q.n)
    rq_from = (rq_base, i, row_mask, stride_rq.n) if rel_ptr is not None else q_from
    query_segment, smallest, largest = 0, 0, 0
    if key_segment_ptr is not None:
        query_segment, smallest, largest = load_segments(query_segment_at, i, row_mask, start, stride_query_segment.n)

    begin = tl.maximum(tl.min(first_key, 0), split * keys_per_split)
    end = tl.minimum(tl.max(tl.where(row_mask, last_key, -1), 0) + 1, (split + 1) * keys_per_split)
    if mask_ptr is not None or key_segment_ptr is not None:
        begin, end = narrow(begin, end, segment_at, stride_key_segment.s, mask_at, stride_m.s, smallest, largest)
    begin, end = whole_tiles(begin, end, BLOCK_N)
    shift = offset - rel_start
    table_begin, table_end = table_span(
        begin, end, start + shift - T - BLOCK_N + 2, start + BLOCK_M + shift, BLOCK_N, BOUNDED
    )

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    operands = q, rq, q_from, rq_from
    queries = i, row_mask, first_key, last_key, query_segment
    row_strides = stride_rq.n, stride_r.t, stride_m.s, stride_key_segment.s
    # parts: keys that the table reaches, keys before, keys after; SPLIT: keys that all queries see, then the others
    whole = tl.maximum(begin, tl.minimum(tl.min(last_key, 0) + 1, end) // BLOCK_N * BLOCK_N)
    for part in tl.static_range(3 if BOUNDED else 2 if SPLIT else 1):
        part_begin = table_begin if part == 0 else (begin if part == 1 else table_end)
        part_end = table_end if part == 0 else (table_begin if part == 1 else end)
        if SPLIT:
            part_begin = begin if part == 0 else whole
            part_end = whole if part == 0 else end
        k_base = k_ptr + batch * stride_k.b + group64 * stride_k.g
        v_base = v_ptr + batch * stride_v.b + group64 * stride_v.g
        keys, sizes = (k_base, stride_k.s, v_base, stride_v.s), (S, T, shift, scale * LOG2E)
        row_max, row_sum, acc = _walk_keys(
            part_begin, part_end, start, operands, queries, keys, rq_base, content_at, position_at, rel_base, mask_at,
            segment_at, seed_ptr, row_strides, sizes, (dropout_limit, dropout_scale), (head, batch),
            row_max, row_sum, acc,
            D, E, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, rel_ptr is not None and (SPLIT or part == 0),
            part == 1 or not SPLIT, PRECISION,
        )  # fmt: skip

    acc, lse = softmax_end(row_max, row_sum, acc, True)
    slot = split * tl.num_programs(1) + batch  # int64
    column = tl.arange(0, BLOCK_D)
    out_at = out_ptr + (slot * N + i)[:, None] * (H * D) + head * D + column[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (column < D)[None, :])
    tl.store(lse_ptr + (slot * H + head) * N + i, lse, mask=row_mask)
