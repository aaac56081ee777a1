"""Backward of relative attention for keys and values, without relative keys. One program owns a block of keys and walks
over the queries that see it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.gradients import load_queries
from ....triton_lib.loads import load_keys, wide
from ....triton_lib.positions import position_of
from ....triton_lib.products import opaque_zero, rows_product
from ....triton_lib.softmax import LOG2E
from .gradient import tile_gradient
from .tile import PLAIN_SIZES, load_segments, narrow, row_limits, seen_keys, visible_pairs


@triton.jit(do_not_specialize=PLAIN_SIZES)
def _relative_keys_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, query_segment_ptr, key_segment_ptr, seed_ptr, batch_offset_ptr, do_ptr, lse_ptr,
    delta_ptr, dk_ptr, dv_ptr,
    stride_q, stride_k, stride_v, stride_m, stride_query_segment, stride_key_segment, stride_batch_offset,
    stride_do,
    N, S, H, HEADS_PER_GROUP, offset, causal_gap, window,
    scale: tl.float32, dropout_limit, dropout_scale: tl.float32,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv [B,S,G,D] of one key block and group, over all heads of the group in turn."""
    groups = H // HEADS_PER_GROUP
    group = tl.program_id(0) % groups
    group64 = group.to(tl.int64)
    j0 = tl.program_id(0) // groups * BLOCK_N  # if causal, the most queries see the first blocks, so they start first
    batch = tl.program_id(1).to(tl.int64)
    j = j0 + tl.arange(0, BLOCK_N)
    mask_at = mask_ptr + batch * stride_m.b if mask_ptr is not None else None
    query_segment_at = query_segment_ptr + batch * stride_query_segment.b if query_segment_ptr is not None else None
    segment_at = key_segment_ptr + batch * stride_key_segment.b if key_segment_ptr is not None else None
    seen = seen_keys(j, S, mask_at, stride_m.s)
    k_base = k_ptr + batch * stride_k.b + group64 * stride_k.g
    v_base = v_ptr + batch * stride_v.b + group64 * stride_v.g
    k = load_keys(k_base, j.to(tl.int64), seen, stride_k.s, D, BLOCK_D, True)  # [BLOCK_N, BLOCK_D]
    v = load_keys(v_base, j.to(tl.int64), seen, stride_v.s, D, BLOCK_D, True)

    offset = position_of(offset, batch_offset_ptr, stride_batch_offset, batch)
    begin, end = 0, N
    if CAUSAL:
        begin = tl.maximum(begin, j0 + causal_gap - offset)
    if WINDOW == "sliding":
        end = tl.minimum(end, j0 + BLOCK_N - 1 + window - offset)
    if WINDOW == "blocks":  # in 64 bits, because two blocks may exceed 32
        last_block = (j0 + BLOCK_N - 1).to(tl.int64) // window + 1
        end = tl.minimum(end, (last_block + 1) * window - offset).to(tl.int32)
    if mask_ptr is not None:
        end = tl.where(tl.max(seen.to(tl.int32), 0) > 0, end, begin)
    if key_segment_ptr is not None:
        _, smallest, largest = load_segments(segment_at, j, seen, j0, stride_key_segment.s)
        begin, end = narrow(begin, end, query_segment_at, stride_query_segment.n, None, 0, smallest, largest)
    begin = begin // BLOCK_M * BLOCK_M
    end = tl.maximum(begin, end)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for head in range(group * HEADS_PER_GROUP, (group + 1) * HEADS_PER_GROUP):
        head64 = wide(head)
        q_base = q_ptr + batch * stride_q.b + head64 * stride_q.h
        do_base = do_ptr + batch * stride_do.b + head64 * stride_do.h
        lse_at, delta_at = lse_ptr + (batch * H + head) * N, delta_ptr + (batch * H + head) * N
        for start in range(begin, end, BLOCK_M):
            i = start + tl.arange(0, BLOCK_M)
            row_mask = i < N
            q_from, do_from = (q_base, i, row_mask, stride_q.n), (do_base, i, row_mask, stride_do.n)
            # [BLOCK_M, BLOCK_D]
            q, do, lse2, delta = load_queries(q_from, do_from, None, lse_at, delta_at, D, BLOCK_D)
            zero = opaque_zero(start)
            logits = rows_product(  # [BLOCK_M, BLOCK_N], transposed like its products with do and q below
                q, q_from, None, k, k_base, j0, S, stride_k.s, zero, D, BLOCK_N, BLOCK_D, PRECISION, True
            )
            dp = rows_product(  # [BLOCK_M, BLOCK_N]
                do, do_from, None, v, v_base, j0, S, stride_v.s, zero, D, BLOCK_N, BLOCK_D, PRECISION, True
            )
            first_key, last_key = row_limits(i, S, offset, causal_gap, window, CAUSAL, WINDOW)
            last_key = tl.where(row_mask, last_key, -1)
            query_segment = 0
            if segment_at is not None:
                query_segment = tl.load(query_segment_at + i * stride_query_segment.n, mask=row_mask, other=0)
            visible = visible_pairs(j, seen, first_key, last_key, query_segment, segment_at, S, stride_key_segment.s)
            scale2, dropout = scale * LOG2E, (dropout_limit, dropout_scale)
            here = j[None, :], i[:, None], head, batch
            kept, ds = tile_gradient(logits, dp, lse2, delta, visible, scale2, seed_ptr, dropout, here)
            dv += tl.dot(tl.trans(kept.to(do.dtype)), do, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]

    column = tl.arange(0, BLOCK_D)
    # recomputed with a term of 0 that the compiler can't fold, so that no registers hold them throughout the loops
    pid = tl.program_id(0) + tl.minimum(groups, 0)
    group = pid % groups
    j = pid // groups * BLOCK_N + tl.arange(0, BLOCK_N)
    at = ((batch * S + j) * groups + group)[:, None] * D + column[None, :]
    inside = (j < S)[:, None] & (column < D)[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)
