"""Forward kernel of chunked cross-attention: one pass over the keys or a split of them."""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.dropout import dropout_keep
from ....triton_lib.loads import add_bias, load_keys, load_rows, wide
from ....triton_lib.position_logits import position_logits
from ....triton_lib.products import opaque_zero, tile_product
from ....triton_lib.softmax import LOG2E, softmax_end, softmax_step
from .tile import SIZES, first_position, has_keys, load_gate, visible_keys


@triton.jit(do_not_specialize=SIZES)
def _cca_forward_kernel(
    q_ptr, k_ptr, v_ptr, rel_ptr, rq_ptr, content_ptr, position_ptr, mask_ptr, gate_ptr, seed_ptr,
    batch_start_ptr, out_ptr, lse_ptr,
    stride_q, stride_k, stride_v, stride_r, stride_rq, stride_c, stride_p, stride_m, stride_g, stride_batch_start,
    N, M, K, R, H, L, T, HEADS_PER_GROUP, rel_start, query_start, first_chunk, blocks,
    keys_per_split, neighbours_per_split, neighbour_splits,
    scale: tl.float32, dropout_limit, dropout_scale: tl.float32,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    MASK_TOKENS: tl.constexpr, EVEN_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One (chunk, time block, head), batch and split: out [split, B, N, H, D] and lse [split, B, H, N], both
    contiguous.
    """
    # heads vary fastest, so programs that run together read all heads of the same tokens
    pid = tl.program_id(0)
    head = pid % H
    block = (pid // H) % blocks
    batch, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    query_start, first_chunk = first_position(query_start, first_chunk, M, batch_start_ptr, stride_batch_start, batch)
    chunk = first_chunk + (pid // H) // blocks
    group = head // HEADS_PER_GROUP
    head64, group64, chunk64 = head.to(tl.int64), group.to(tl.int64), chunk.to(tl.int64)
    MASKED: tl.constexpr = (mask_ptr is not None) or (not EVEN_KEYS)

    # rows of the query that attend this chunk: [first_row, first_row + M) within [0, N)
    first_row = (chunk + 1) * M - 1 - query_start
    start = tl.maximum(first_row, 0) + block * BLOCK_M
    n = start + tl.arange(0, BLOCK_M)
    row_mask = n < tl.minimum(first_row + M, N)
    local = tl.arange(0, BLOCK_M)
    start64 = start.to(tl.int64)
    q_base = q_ptr + batch * stride_q.b + start64 * stride_q.n + head64 * stride_q.h
    q = load_rows(q_base, local, row_mask, stride_q.n, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    content_at = content_ptr + head64 * stride_c.h if content_ptr is not None else None
    qc = add_bias(q, content_at, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    q_from = (q_base, local, row_mask, stride_q.n)
    if rel_ptr is not None:
        rq, rq_base, rq_stride = q, q_base, stride_q.n
        if rq_ptr is not None:
            rq_base = rq_ptr + batch * stride_rq.b + start64 * stride_rq.n + head64 * stride_rq.h
            rq_stride = stride_rq.n
            rq = load_rows(rq_base, local, row_mask, rq_stride, E, BLOCK_E)  # [BLOCK_M, BLOCK_E]
        position_at = position_ptr + head64 * stride_p.h if position_ptr is not None else None
        rq = add_bias(rq, position_at, E, BLOCK_E)  # [BLOCK_M, BLOCK_E]
        rq_from = (rq_base, local, row_mask, rq_stride)
        rel_base = rel_ptr + head64 * stride_r.h

    k_base = k_ptr + batch * stride_k.b + chunk64 * stride_k.l + group64 * stride_k.g
    v_base = v_ptr + batch * stride_v.b + chunk64 * stride_v.l + group64 * stride_v.g
    first_key = (split // neighbour_splits) * keys_per_split
    first_neighbour = (split % neighbour_splits) * neighbours_per_split
    last_neighbour = tl.minimum(first_neighbour + neighbours_per_split, K)
    last_key = tl.minimum(first_key + keys_per_split, R)
    if not has_keys(chunk, L, batch_start_ptr is not None):
        last_key = first_key

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale2 = scale * LOG2E
    for j0 in range(first_key, last_key, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        if rel_ptr is not None:
            zero = opaque_zero(j0)
            base = start - first_row - j0 - (BLOCK_N - 1) - rel_start
            position = position_logits(  # [BLOCK_M, BLOCK_N]
                rq, rel_base, base, T, stride_r.t, zero,
                E, BLOCK_M, BLOCK_N, BLOCK_E, PRECISION, False, rq_from, position_at,
            )  # fmt: skip
        for a in range(first_neighbour, last_neighbour):
            again = opaque_zero(a)  # pointers are recomputed for each neighbour and take no registers
            j = j0 + again + tl.arange(0, BLOCK_N)
            mask_at = None
            if mask_ptr is not None:
                mask_at = mask_ptr + batch * stride_m.b + chunk64 * stride_m.l + wide(a) * stride_m.k
            visible = visible_keys(mask_at, stride_m.r, j, R, MASK_TOKENS)
            k_at = k_base + wide(a) * stride_k.k
            k = load_keys(k_at, j, visible, stride_k.r, D, BLOCK_D, MASKED)  # [BLOCK_N, BLOCK_D]
            logits = tile_product(
                qc, q_from, content_at, k, (k_at, j, visible, stride_k.r), again, D, BLOCK_D, PRECISION
            )
            if gate_ptr is not None:
                gate = load_gate(
                    gate_ptr + batch * stride_g.b + chunk64 * stride_g.l + wide(a) * stride_g.k, visible, MASKED
                )
                logits = logits * gate
            if rel_ptr is not None:
                logits = logits + position
            logits = logits * scale2
            if MASKED:
                logits = tl.where(visible[None, :], logits, float("-inf"))
            p, row_max, row_sum, acc = softmax_step(logits, row_max, row_sum, acc, MASKED)
            if seed_ptr is not None:
                keep = dropout_keep(tl.load(seed_ptr), dropout_limit, (a * R + j)[None, :], n[:, None], head, batch)
                p = tl.where(keep, p * dropout_scale, 0.0)
            if gate_ptr is not None:
                p = p * gate
            v = load_keys(
                v_base + wide(a) * stride_v.k, j, visible, stride_v.r, D, BLOCK_D, MASKED
            )  # [BLOCK_N, BLOCK_D]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]

    # recomputed with a term of 0 that the compiler can't fold, so that no registers hold them throughout the loops
    n = start + tl.minimum(blocks, 0) + tl.arange(0, BLOCK_M)
    row_mask = n < tl.minimum(first_row + M, N)
    row = n.to(tl.int64)
    acc, lse = softmax_end(row_max, row_sum, acc, False)
    part = split * tl.num_programs(1) + batch  # int64
    column = tl.arange(0, BLOCK_D)
    out_at = out_ptr + (part * N + row)[:, None] * (H * D) + head * D + column[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (column < D)[None, :])
    tl.store(lse_ptr + (part * H + head) * N + row, lse, mask=row_mask)
