"""Backward kernels of chunked cross-attention. No atomics: every output element is written by one program, sums have a fixed order.

A neighbour is attended by one chunk of queries only, so with as many key heads as query heads and a chunk in one tile, the
program that owns (batch, chunk, head) writes dK and dV once and dQ beside them, reading everything once. Otherwise (grouped
heads, long chunks) it writes dQ alone and `_cca_backward_key_kernel` writes dK and dV.

dR, shared by all chunks, goes in two stages: the owner sums dS over its neighbours, folds it (see `_relative`) and leaves the
[M, R] tile in a bounded workspace; `_cca_backward_rel_kernel` multiplies it with the queries, chunks in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._cca_tile import LOG2E, add_bias, load_gate, load_keys, load_rows, tile_gradients, visible_keys, wide
from ._relative import band_block, position_logits, position_query_gradient, reverse_skew

#: sizes and positions that must not become part of the compiled kernel, not even whether they divide by 16
SIZES = (
    "N", "M", "K", "R", "H", "T", "L", "HEADS_PER_GROUP", "rel_start", "query_start", "first_chunk", "chunks", "blocks", "first_item",
    "last_item", "items_per_split", "key_blocks", "dropout_limit",
)  # fmt: skip


@triton.jit
def _row_statistics(lse_ptr, dlse_ptr, do, out, lse_at, dlse_at, live):
    """lse in base 2 (+inf for a row that attends nothing, so that its probabilities vanish) and delta = rowsum(dO*O) - dlse."""
    lse = tl.load(lse_ptr + lse_at, mask=live, other=float("-inf"))
    some = lse > float("-inf")
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta = delta - tl.load(dlse_ptr + dlse_at, mask=live, other=0.0)
    return tl.where(some, lse * LOG2E, float("inf")), tl.where(some, delta, 0.0)


@triton.jit(do_not_specialize=SIZES)
def _cca_backward_query_kernel(
    q_ptr, k_ptr, v_ptr, rel_ptr, rq_ptr, content_ptr, position_ptr, mask_ptr, gate_ptr, seed_ptr,
    do_ptr, out_ptr, lse_ptr, dlse_ptr, delta_ptr, dq_ptr, drq_ptr, dk_ptr, dv_ptr, dgate_ptr, dcontent_ptr, dposition_ptr, ds_ptr,
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kl, stride_kk, stride_kr, stride_kg,
    stride_vb, stride_vl, stride_vk, stride_vr, stride_vg,
    stride_rh, stride_rt, stride_rqb, stride_rqn, stride_rqh, stride_ch, stride_ph,
    stride_mb, stride_ml, stride_mk, stride_mr, stride_gb, stride_gl, stride_gk,
    stride_dob, stride_don, stride_doh, stride_dlb, stride_dlh, stride_dln,
    N, M, K, R, H, T, L, HEADS_PER_GROUP, rel_start, query_start, first_chunk, chunks, blocks, first_item, key_blocks,
    scale: tl.float32, dropout_limit, dropout_scale: tl.float32,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    MASK_TOKENS: tl.constexpr, EVEN_KEYS: tl.constexpr, PRECISION: tl.constexpr, WRITE_KEYS: tl.constexpr,
):  # fmt: skip
    """One (chunk, time block, head) of one batch element: dq (drq), partial du, dv and dgate, the folded dS; dk and dv if WRITE_KEYS."""
    pid = tl.program_id(0)
    head, slot = pid % H, pid // H
    item = first_item + slot
    block = item % blocks
    chunk = first_chunk + (item // blocks) % chunks
    batch = (item // (blocks * chunks)).to(tl.int64)
    chunk64 = chunk.to(tl.int64)
    group = head // HEADS_PER_GROUP
    MASKED: tl.constexpr = (mask_ptr is not None) or (not EVEN_KEYS)

    # tiles start at index 0 of the attending chunk, so that every chunk's band meets the table at the same rows
    first_row = (chunk + 1) * M - 1 - query_start
    start = first_row + block * BLOCK_M
    start64 = start.to(tl.int64)
    local = tl.arange(0, BLOCK_M)
    n = start + local
    live = (n >= 0) & (n < tl.minimum(first_row + M, N))
    q = load_rows(q_ptr + batch * stride_qb + start64 * stride_qn + head * stride_qh, local, live, stride_qn, D, BLOCK_D)
    qc = add_bias(q, content_ptr + head * stride_ch if content_ptr is not None else None, D, BLOCK_D)
    if rel_ptr is not None:
        rq = q
        if rq_ptr is not None:
            rq_base = rq_ptr + batch * stride_rqb + start64 * stride_rqn + head * stride_rqh
            rq = load_rows(rq_base, local, live, stride_rqn, E, BLOCK_E)
        rq = add_bias(rq, position_ptr + head * stride_ph if position_ptr is not None else None, E, BLOCK_E)
        rel_base = rel_ptr + head.to(tl.int64) * stride_rh
    do = load_rows(do_ptr + batch * stride_dob + start64 * stride_don + head * stride_doh, local, live, stride_don, D, BLOCK_D)
    out = load_rows(out_ptr + ((batch * N + start64) * H + head) * D, local, live, H * D, D, BLOCK_D)
    lse_at = (batch * H + head) * N + n
    dlse_at = batch * stride_dlb + head * stride_dlh + n.to(tl.int64) * stride_dln
    lse2, delta = _row_statistics(lse_ptr, dlse_ptr, do, out, lse_at, dlse_at, live)
    if delta_ptr is not None:
        tl.store(delta_ptr + lse_at, delta, mask=live)

    k_base = k_ptr + batch * stride_kb + chunk64 * stride_kl + group * stride_kg
    v_base = v_ptr + batch * stride_vb + chunk64 * stride_vl + group * stride_vg
    last_key = tl.where(chunk < 0, 0, R)  # tokens before the first complete chunk attend nothing
    column = tl.arange(0, BLOCK_D)
    scale2 = scale * LOG2E
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if rq_ptr is not None:
        drq = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    position_sum = tl.zeros([BLOCK_E], tl.float32)
    for j0 in range(0, last_key, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        position = 0.0
        if rel_ptr is not None:
            zero = j0 >> 30  # R is far below 2**30
            base = block * BLOCK_M - j0 - (BLOCK_N - 1) - rel_start
            position = position_logits(rq, rel_base, base, T, stride_rt, zero, E, BLOCK_M, BLOCK_N, BLOCK_E, PRECISION)
            ds_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for a in range(0, K):
            mask_at = None
            if mask_ptr is not None:
                mask_at = mask_ptr + batch * stride_mb + chunk64 * stride_ml + wide(a) * stride_mk
            visible = visible_keys(mask_at, stride_mr, j, R, MASK_TOKENS)
            gate = 1.0
            if gate_ptr is not None:
                gate = load_gate(gate_ptr + batch * stride_gb + chunk64 * stride_gl + wide(a) * stride_gk, visible, MASKED)
            k = load_keys(k_base + wide(a) * stride_kk, j, visible, stride_kr, D, BLOCK_D, MASKED)
            v = load_keys(v_base + wide(a) * stride_vk, j, visible, stride_vr, D, BLOCK_D, MASKED)
            p, ds, content, dp_raw = tile_gradients(
                qc, do, k, v, position, lse2, delta, visible, gate, scale2,
                seed_ptr, dropout_limit, dropout_scale, a * R + j, n, head, batch,
                rel_ptr is not None, MASKED, gate_ptr is not None, PRECISION,
            )  # fmt: skip
            if rel_ptr is not None:
                ds_sum += ds
            if dgate_ptr is not None:
                dgate = tl.sum(tl.sum(ds * content * scale + p * dp_raw, 1), 0)
                parts = blocks * H * key_blocks
                part = (block * H + head) * key_blocks + j0 // BLOCK_N
                tl.store(dgate_ptr + ((batch * L + chunk) * K + a) * parts + part, dgate)
            if gate_ptr is not None:
                p = p * gate
                ds = ds * gate
            ds16 = ds.to(k.dtype)
            dq = tl.dot(ds16, k, dq, input_precision=PRECISION)
            if WRITE_KEYS:
                token = ((batch * L + chunk) * K + a) * R + j0
                into = (token * H + head) * D + (tl.arange(0, BLOCK_N)[:, None] * (H * D) + column[None, :])
                inside = (j < R)[:, None] & (column < D)[None, :]
                dv = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)
                tl.store(dv_ptr + into, dv.to(dv_ptr.dtype.element_ty), mask=inside)
                dk = tl.dot(tl.trans(ds16), qc, input_precision=PRECISION) * scale
                tl.store(dk_ptr + into, dk.to(dk_ptr.dtype.element_ty), mask=inside)
        if rel_ptr is not None:
            folded = reverse_skew(ds_sum, zero, BLOCK_M, BLOCK_N)
            if ds_ptr is not None:
                at = ((slot.to(tl.int64) * H + head) * key_blocks + j0 // BLOCK_N) * (BLOCK_M * BLOCK_N)
                at += local[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                tl.store(ds_ptr + at, folded.to(ds_ptr.dtype.element_ty))
            part = position_query_gradient(folded, rel_base, base, T, stride_rt, zero, E, BLOCK_M, BLOCK_N, BLOCK_E, PRECISION)
            if rq_ptr is not None:
                drq += part
            else:
                dq += part
                if dposition_ptr is not None:
                    position_sum += tl.sum(part, 0)

    # rows anew, past an addition of 0 that the compiler can't see through: else they occupy registers throughout the loops
    n = start + tl.minimum(blocks, 0) + tl.arange(0, BLOCK_M)
    live = (n >= 0) & (n < tl.minimum(first_row + M, N))
    row = (batch * N + n) * H + head  # int64
    tl.store(
        dq_ptr + row[:, None] * D + column[None, :],
        (dq * scale).to(dq_ptr.dtype.element_ty),
        mask=live[:, None] & (column < D)[None, :],
    )
    width = tl.arange(0, BLOCK_E)
    if rq_ptr is not None:
        tl.store(
            drq_ptr + row[:, None] * E + width[None, :],
            (drq * scale).to(drq_ptr.dtype.element_ty),
            mask=live[:, None] & (width < E)[None, :],
        )
        position_sum = tl.sum(drq, 0)
    partial = item.to(tl.int64) * H + head
    if dposition_ptr is not None:
        tl.store(dposition_ptr + partial * E + width, position_sum * scale, mask=width < E)
    if dcontent_ptr is not None:
        content_sum = tl.sum(dq, 0)
        if rel_ptr is not None and rq_ptr is None:
            content_sum = content_sum - position_sum
        tl.store(dcontent_ptr + partial * D + column, content_sum * scale, mask=column < D)


@triton.jit(do_not_specialize=SIZES)
def _cca_backward_key_kernel(
    q_ptr, k_ptr, v_ptr, rel_ptr, rq_ptr, content_ptr, position_ptr, mask_ptr, gate_ptr, seed_ptr,
    do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kl, stride_kk, stride_kr, stride_kg,
    stride_vb, stride_vl, stride_vk, stride_vr, stride_vg,
    stride_rh, stride_rt, stride_rqb, stride_rqn, stride_rqh, stride_ch, stride_ph,
    stride_mb, stride_ml, stride_mk, stride_mr, stride_gb, stride_gl, stride_gk,
    stride_dob, stride_don, stride_doh,
    N, M, K, R, H, T, L, HEADS_PER_GROUP, rel_start, query_start, first_chunk, blocks, key_blocks,
    scale: tl.float32, dropout_limit, dropout_scale: tl.float32,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    MASK_TOKENS: tl.constexpr, EVEN_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key block of one neighbour and key head: a sum over the group's heads and the chunk's time blocks."""
    groups = H // HEADS_PER_GROUP
    pid = tl.program_id(0)
    group = pid % groups
    j0 = (pid // groups) % key_blocks * BLOCK_N
    a = (pid // groups) // key_blocks % K
    chunk = first_chunk + (pid // groups) // key_blocks // K
    chunk64, batch = chunk.to(tl.int64), tl.program_id(1).to(tl.int64)
    MASKED: tl.constexpr = (mask_ptr is not None) or (not EVEN_KEYS)

    j = j0 + tl.arange(0, BLOCK_N)
    mask_at = None
    if mask_ptr is not None:
        mask_at = mask_ptr + batch * stride_mb + chunk64 * stride_ml + wide(a) * stride_mk
    visible = visible_keys(mask_at, stride_mr, j, R, MASK_TOKENS)
    gate = 1.0
    if gate_ptr is not None:
        gate = load_gate(gate_ptr + batch * stride_gb + chunk64 * stride_gl + wide(a) * stride_gk, visible, MASKED)
    k_base = k_ptr + batch * stride_kb + chunk64 * stride_kl + group * stride_kg
    v_base = v_ptr + batch * stride_vb + chunk64 * stride_vl + group * stride_vg
    k = load_keys(k_base + wide(a) * stride_kk, j, visible, stride_kr, D, BLOCK_D, MASKED)
    v = load_keys(v_base + wide(a) * stride_vk, j, visible, stride_vr, D, BLOCK_D, MASKED)

    first_row = (chunk + 1) * M - 1 - query_start
    local = tl.arange(0, BLOCK_M)
    scale2 = scale * LOG2E
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for step in range(0, HEADS_PER_GROUP * blocks):
        head = group * HEADS_PER_GROUP + step // blocks
        block = step % blocks
        start = first_row + block * BLOCK_M
        start64 = start.to(tl.int64)
        n = start + local
        live = (n >= 0) & (n < tl.minimum(first_row + M, N))
        q = load_rows(q_ptr + batch * stride_qb + start64 * stride_qn + head * stride_qh, local, live, stride_qn, D, BLOCK_D)
        do = load_rows(do_ptr + batch * stride_dob + start64 * stride_don + head * stride_doh, local, live, stride_don, D, BLOCK_D)
        qc = add_bias(q, content_ptr + head * stride_ch if content_ptr is not None else None, D, BLOCK_D)
        position = 0.0
        if rel_ptr is not None:
            rq = q
            if rq_ptr is not None:
                rq_base = rq_ptr + batch * stride_rqb + start64 * stride_rqn + head * stride_rqh
                rq = load_rows(rq_base, local, live, stride_rqn, E, BLOCK_E)
            rq = add_bias(rq, position_ptr + head * stride_ph if position_ptr is not None else None, E, BLOCK_E)
            zero = step >> 30  # H is far below 2**30
            base = block * BLOCK_M - j0 - (BLOCK_N - 1) - rel_start
            rel_base = rel_ptr + head.to(tl.int64) * stride_rh
            position = position_logits(rq, rel_base, base, T, stride_rt, zero, E, BLOCK_M, BLOCK_N, BLOCK_E, PRECISION)
        lse_at = (batch * H + head) * N + n
        lse = tl.load(lse_ptr + lse_at, mask=live, other=float("-inf"))
        lse2 = tl.where(lse > float("-inf"), lse * LOG2E, float("inf"))
        delta = tl.load(delta_ptr + lse_at, mask=live, other=0.0)
        p, ds, _, _ = tile_gradients(
            qc, do, k, v, position, lse2, delta, visible, gate, scale2,
            seed_ptr, dropout_limit, dropout_scale, a * R + j, n, head, batch,
            rel_ptr is not None, MASKED, gate_ptr is not None, PRECISION,
        )  # fmt: skip
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(qc.dtype)), qc, dk, input_precision=PRECISION)

    column = tl.arange(0, BLOCK_D)
    token = ((batch * L + chunk) * K + a) * R + j0
    into = (token * groups + group) * D + (tl.arange(0, BLOCK_N)[:, None] * (groups * D) + column[None, :])
    inside = (j < R)[:, None] & (column < D)[None, :]
    tl.store(dk_ptr + into, (dk * (scale * gate)).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + into, (dv * gate).to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _cca_backward_rel_kernel(
    q_ptr, rq_ptr, position_ptr, ds_ptr, part_ptr,
    stride_qb, stride_qn, stride_qh, stride_rqb, stride_rqn, stride_rqh, stride_ph,
    N, M, H, query_start, first_chunk, chunks, blocks, first_item, last_item, items_per_split, key_blocks,
    scale: tl.float32,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of one head's dR, summed over one split's chunks and added to what earlier slabs left in part_ptr.

    Row x of the [splits, H, rows, E] partial belongs to displacement x + 1 - key_blocks * BLOCK_N.
    """
    diagonal, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tl.num_programs(0) * BLOCK_N
    local, c, width = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_E)
    into = ((split.to(tl.int64) * H + head) * rows + diagonal * BLOCK_N) * E + c[:, None] * E + width[None, :]
    inside = (c >= 0)[:, None] & (width < E)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    first = first_item + split * items_per_split
    last = tl.minimum(first + items_per_split, last_item)
    for item in range(first, last):
        block = item % blocks
        chunk = first_chunk + (item // blocks) % chunks
        batch = wide(item // (blocks * chunks))
        first_row = (chunk + 1) * M - 1 - query_start
        start = first_row + block * BLOCK_M
        n = start + local
        live = (n >= 0) & (n < tl.minimum(first_row + M, N))
        if rq_ptr is not None:
            rq_base = rq_ptr + batch * stride_rqb + wide(start) * stride_rqn + head * stride_rqh
            rq = load_rows(rq_base, local, live, stride_rqn, E, BLOCK_E)
        else:
            q_base = q_ptr + batch * stride_qb + wide(start) * stride_qn + head * stride_qh
            rq = load_rows(q_base, local, live, stride_qn, E, BLOCK_E)
        rq = add_bias(rq, position_ptr + head * stride_ph if position_ptr is not None else None, E, BLOCK_E)
        # the blocks of a band that fall on this diagonal come from different key blocks; their places in the tile are disjoint
        block_of = band_block(item >> 30, BLOCK_M, BLOCK_N)
        ds = tl.zeros([BLOCK_M, BLOCK_N], ds_ptr.dtype.element_ty)
        slot = (wide(item - first_item) * H + head) * key_blocks
        for band in tl.static_range((BLOCK_M + BLOCK_N - 2) // BLOCK_N + 1):
            key_block = band + block * (BLOCK_M // BLOCK_N) + key_blocks - 1 - diagonal
            at = ds_ptr + (slot + key_block) * (BLOCK_M * BLOCK_N) + local[:, None] * BLOCK_N + c[None, :]
            there = local < tl.where((key_block >= 0) & (key_block < key_blocks) & (chunk >= 0), BLOCK_M, 0)
            ds = tl.where(block_of == band, tl.load(at, mask=there[:, None], other=0.0), ds)
        acc = tl.dot(tl.trans(ds), rq, acc, input_precision=PRECISION)
    earlier = (c < tl.where(first_item > 0, BLOCK_N, 0))[:, None] & (width < E)[None, :]
    acc = acc * scale + tl.load(part_ptr + into, mask=earlier, other=0.0)
    tl.store(part_ptr + into, acc, mask=inside)
