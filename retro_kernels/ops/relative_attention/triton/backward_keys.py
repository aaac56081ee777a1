"""Backward of relative attention for keys and values: one program owns a block of them and walks over the queries that
see it.

Down a column of tiles every tile has queries of its own, so no band product can be shared; each tile makes both blocks
of its band.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.gradients import load_queries
from ....triton_lib.loads import load_keys, load_query, wide
from ....triton_lib.position_logits import position_logits
from ....triton_lib.positions import position_of
from ....triton_lib.products import rows_product
from ....triton_lib.softmax import LOG2E
from .forward import SIZES
from .gradient import tile_gradient
from .tile import TALL, load_segments, narrow, row_limits, scalar_position, seen_keys, table_span, visible_pairs


@triton.jit
def _walk_queries(
    begin, end, j0, k, v, dk, dv, weight, k_base, v_base, stride_ks, stride_vs,
    q_base, rq_base, do_base, lse_at, delta_at, content_at, position_at, rel_base, query_segment_at,
    mask_at, segment_at, seed_ptr,
    stride_qn, stride_rqn, stride_don, stride_rt, stride_qsn, stride_ms, stride_kss,
    j, seen, N, S, T, offset, causal_gap, window, shift, scale2, dropout_limit, dropout_scale, head, batch,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITION: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk (without the factor `scale`) and dv [BLOCK_N, BLOCK_D] after the queries [begin, end) of one head.

    SUMS: weight [16, BLOCK_N] too, in every row what the gradients of a key's logits sum up to.
    """
    FLAT: tl.constexpr = BLOCK_M < TALL or PRECISION == "tf32x3" or rel_base is None
    for start in range(begin, end, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        row_mask = i < N
        q, do, lse2, delta = load_queries(  # [BLOCK_M, BLOCK_D]
            q_base, do_base, content_at, lse_at, delta_at, i, row_mask, stride_qn, stride_don, D, BLOCK_D
        )
        zero = start >> 30  # N is far below 2**30
        if not FLAT:  # keys are columns, of which a thread has many: else they take registers throughout the loop
            j = j0 + zero + tl.arange(0, BLOCK_N)
            seen = seen_keys(j, S, mask_at, stride_ms)
        q_from, do_from = (q_base, i, row_mask, stride_qn), (do_base, i, row_mask, stride_don)
        logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if FLAT:
            logits = rows_product(  # [BLOCK_M, BLOCK_N], made transposed, as do and q meet it below
                q, q_from, content_at, k, k_base, j0, S, stride_ks, zero, D, BLOCK_N, BLOCK_D, PRECISION, True
            )
        if POSITION and E > 1:
            _, rq = load_query(rq_base, position_at, i, row_mask, stride_rqn, E, BLOCK_E)  # [BLOCK_M, BLOCK_E]
            base = start + shift - j0 - (BLOCK_N - 1)
            rq_from = (rq_base, i, row_mask, stride_rqn)
            rows = T if FLAT else tl.minimum(T, base + BLOCK_M + BLOCK_N - 1)  # those past the band are not read
            logits = logits + position_logits(  # [BLOCK_M, BLOCK_N]
                rq,
                rel_base,
                base,
                rows,
                stride_rt,
                zero,
                E,
                BLOCK_M,
                BLOCK_N,
                BLOCK_E,
                PRECISION,
                FLAT,
                rq_from,
                position_at,
            )
        elif POSITION:
            t = (i + shift)[:, None] - j[None, :]
            # [BLOCK_M, BLOCK_N]
            logits = logits + scalar_position(rq_base, position_at, rel_base, i, row_mask, t, T, stride_rqn, stride_rt)
        if not FLAT:
            # [BLOCK_M, BLOCK_N], added to the position logits in place
            logits = tl.dot(q, tl.trans(k), logits, input_precision=PRECISION)
        dp = rows_product(  # [BLOCK_M, BLOCK_N]
            do, do_from, None, v, v_base, j0, S, stride_vs, zero, D, BLOCK_N, BLOCK_D, PRECISION, FLAT
        )
        first_key, last_key = row_limits(i, S, offset, causal_gap, window, CAUSAL, WINDOW)
        # the logits of a row past the end are 0 times the table, NaN where that is infinite
        last_key = tl.where(row_mask, last_key, -1)
        query_segment = 0
        if segment_at is not None:
            query_segment = tl.load(query_segment_at + i * stride_qsn, mask=row_mask, other=0)
        visible = visible_pairs(
            j, seen, first_key, last_key, query_segment, segment_at, S, stride_kss, FLAT or mask_at is not None
        )
        kept, ds = tile_gradient(
            logits,
            dp,
            lse2,
            delta,
            visible,
            scale2,
            seed_ptr,
            dropout_limit,
            dropout_scale,
            j[None, :],
            i[:, None],
            head,
            batch,
        )
        dv += tl.dot(tl.trans(kept.to(do.dtype)), do, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
        if SUMS:  # rounded as for dk and dq; by the tensor cores, for rows lie across the warps
            ones = tl.full([16, BLOCK_M], 1.0, q.dtype)
            weight = tl.dot(ones, ds.to(q.dtype), weight, input_precision=PRECISION)  # [16, BLOCK_N]
    return dk, dv, weight


@triton.jit(do_not_specialize=SIZES)
def _relative_keys_kernel(
    q_ptr, k_ptr, v_ptr, rel_ptr, rq_ptr, content_ptr, position_ptr, mask_ptr, query_segment_ptr, key_segment_ptr,
    seed_ptr, batch_offset_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dcontent_ptr, dposition_ptr,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_ks, stride_kg, stride_vb, stride_vs, stride_vg,
    stride_rh, stride_rt, stride_rqb, stride_rqn, stride_rqh, stride_ch, stride_ph,
    stride_mb, stride_ms, stride_qsb, stride_qsn, stride_ksb, stride_kss, stride_batch_offset,
    stride_dob, stride_don, stride_doh,
    N, S, T, H, HEADS_PER_GROUP, offset, causal_gap, window, rel_start,
    scale: tl.float32, dropout_limit, dropout_scale: tl.float32,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv [B,S,G,D] of one key block and group, over all heads of the group in turn.

    dcontent [B, key blocks, H, D] float32 gets the part of these keys in the sum of all queries' content gradients,
    dposition, of the same shape, minus that: with the sums of the whole gradients, by `_relative_query_kernel`, what is
    left is the position bias's.
    """
    SUMS: tl.constexpr = dcontent_ptr is not None or dposition_ptr is not None
    groups = H // HEADS_PER_GROUP
    group = tl.program_id(0) % groups
    group64 = group.to(tl.int64)
    j0 = tl.program_id(0) // groups * BLOCK_N  # early blocks, which the most queries see if causal, go first
    batch = tl.program_id(1).to(tl.int64)
    j = j0 + tl.arange(0, BLOCK_N)
    mask_at = mask_ptr + batch * stride_mb if mask_ptr is not None else None
    query_segment_at = query_segment_ptr + batch * stride_qsb if query_segment_ptr is not None else None
    segment_at = key_segment_ptr + batch * stride_ksb if key_segment_ptr is not None else None
    seen = seen_keys(j, S, mask_at, stride_ms)
    k_base, v_base = k_ptr + batch * stride_kb + group64 * stride_kg, v_ptr + batch * stride_vb + group64 * stride_vg
    k = load_keys(k_base, j.to(tl.int64), seen, stride_ks, D, BLOCK_D, True)  # [BLOCK_N, BLOCK_D]
    v = load_keys(v_base, j.to(tl.int64), seen, stride_vs, D, BLOCK_D, True)

    offset = position_of(offset, batch_offset_ptr, stride_batch_offset, batch)
    begin, end = 0, N
    if CAUSAL:
        begin = tl.maximum(begin, j0 + causal_gap - offset)
    if WINDOW == "sliding":
        end = tl.minimum(end, j0 + BLOCK_N - 1 + window - offset)
    if WINDOW == "blocks":  # in 64 bits: two blocks may be longer than any position
        last_block = (j0 + BLOCK_N - 1).to(tl.int64) // window + 1
        end = tl.minimum(end, (last_block + 1) * window - offset).to(tl.int32)
    if mask_ptr is not None:
        end = tl.where(tl.max(seen.to(tl.int32), 0) > 0, end, begin)
    if key_segment_ptr is not None:
        _, smallest, largest = load_segments(segment_at, j, seen, j0, stride_kss)
        begin, end = narrow(begin, end, query_segment_at, stride_qsn, None, 0, smallest, largest)
    begin = begin // BLOCK_M * BLOCK_M
    end = tl.maximum(begin, end)
    shift = offset - rel_start
    table_begin, table_end = table_span(
        begin, end, j0 - shift - BLOCK_M + 1, T + j0 + BLOCK_N - 1 - shift, BLOCK_M, BOUNDED
    )

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for head in range(group * HEADS_PER_GROUP, (group + 1) * HEADS_PER_GROUP):
        head64 = wide(head)
        content_at = content_ptr + head64 * stride_ch if content_ptr is not None else None
        position_at = position_ptr + head64 * stride_ph if position_ptr is not None else None
        rq_base = rq_ptr + batch * stride_rqb + head64 * stride_rqh if rel_ptr is not None else None
        rel_base = rel_ptr + head64 * stride_rh if rel_ptr is not None else None
        statistics = (batch * H + head) * N
        weight = tl.zeros([16, BLOCK_N], tl.float32) if SUMS else 0.0
        for part in tl.static_range(3 if BOUNDED else 1):
            part_begin = table_begin if part == 0 else (begin if part == 1 else table_end)
            part_end = table_end if part == 0 else (table_begin if part == 1 else end)
            dk, dv, weight = _walk_queries(
                part_begin, part_end, j0, k, v, dk, dv, weight, k_base, v_base, stride_ks, stride_vs,
                q_ptr + batch * stride_qb + head64 * stride_qh, rq_base,
                do_ptr + batch * stride_dob + head64 * stride_doh,
                lse_ptr + statistics, delta_ptr + statistics, content_at, position_at, rel_base, query_segment_at,
                mask_at, segment_at, seed_ptr,
                stride_qn, stride_rqn, stride_don, stride_rt, stride_qsn, stride_ms, stride_kss,
                j, seen, N, S, T, offset, causal_gap, window, shift, scale * LOG2E, dropout_limit,
                dropout_scale, head, batch,
                D, E, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, CAUSAL, WINDOW, rel_ptr is not None and part == 0, SUMS,
                PRECISION,
            )  # fmt: skip
        if SUMS:
            blocks = tl.num_programs(0) // groups
            slot = ((batch * blocks + tl.program_id(0) // groups) * H + head) * D
            total = tl.sum(weight, 0) * (scale / 16)  # [BLOCK_N]
            row = j0 + (begin >> 30) + tl.arange(0, BLOCK_N)
            # a few columns at a time, read again: dk and dv fill the registers
            for first in range(0, D + (begin >> 30), 64):
                column = first + tl.arange(0, 64)
                at = k_base + row.to(tl.int64)[:, None] * stride_ks + column[None, :]
                keys = tl.load(at, mask=(row < S)[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)
                # a key that nobody sees may be NaN
                part_sum = tl.sum(tl.where(total[:, None] != 0.0, total[:, None] * keys, 0.0), 0)  # [64]
                if dcontent_ptr is not None:
                    tl.store(dcontent_ptr + slot + column, part_sum, mask=column < D)
                if dposition_ptr is not None:
                    tl.store(dposition_ptr + slot + column, -part_sum, mask=column < D)

    column = tl.arange(0, BLOCK_D)
    # places anew, past an addition of 0 that the compiler can't see
    # through: else they occupy registers throughout the loops
    pid = tl.program_id(0) + tl.minimum(groups, 0)
    group = pid % groups
    j = pid // groups * BLOCK_N + tl.arange(0, BLOCK_N)
    at = ((batch * S + j) * groups + group)[:, None] * D + column[None, :]
    inside = (j < S)[:, None] & (column < D)[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)
