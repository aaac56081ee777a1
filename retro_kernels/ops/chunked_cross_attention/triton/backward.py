"""Backward kernels of chunked cross-attention over keys and values. No atomics: one program writes each output element.

Only one chunk of queries attends a neighbour. If there are as many key heads as query heads and a chunk fits one tile,
the program of a (batch, chunk, head) reads everything once and writes dQ, dK and dV. Otherwise it writes only dQ, and
`_cca_backward_key_kernel` writes dK and dV.

Position logits are read from a bounded workspace, slab by slab: a "band" of [M, R] for each (batch, chunk, head). The
sum of dS over the neighbours replaces them. `band` has the kernels that write the logits and read the sums: with their
products in this kernel, every variant spilled (docs/decisions, 002).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.gradients import load_queries, row_products
from ....triton_lib.loads import add_bias, load_keys, load_rows, wide
from ....triton_lib.products import opaque_zero, tile_product
from ....triton_lib.softmax import LOG2E
from .tile import SIZES, first_position, has_keys, load_band, load_gate, locate, tile_gradients, visible_keys


@triton.jit
def _row_statistics(lse_ptr, dlse_ptr, delta, lse_at, dlse_at, row_mask):
    """(lse in base 2, delta less dlse). A row that attends nothing has lse +inf, which makes its probabilities 0."""
    lse = tl.load(lse_ptr + lse_at, mask=row_mask, other=float("-inf"))
    some = lse != float("-inf")
    if dlse_ptr is not None:
        delta = delta - tl.load(dlse_ptr + dlse_at, mask=row_mask, other=0.0)
    return tl.where(some, lse * LOG2E, float("inf")), tl.where(some, delta, 0.0)


@triton.jit(do_not_specialize=SIZES)
def _cca_backward_query_kernel(
    q_ptr, k_ptr, v_ptr, content_ptr, mask_ptr, gate_ptr, seed_ptr, batch_start_ptr, band_ptr,
    do_ptr, out_ptr, lse_ptr, dlse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, dgate_ptr, dcontent_ptr, ds_ptr,
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kl, stride_kk, stride_kr, stride_kg,
    stride_vb, stride_vl, stride_vk, stride_vr, stride_vg,
    stride_ch, stride_mb, stride_ml, stride_mk, stride_mr, stride_gb, stride_gl, stride_gk, stride_batch_start,
    stride_dob, stride_don, stride_doh, stride_dlb, stride_dlh, stride_dln,
    N, M, K, R, H, L, HEADS_PER_GROUP, query_start, first_chunk, chunks, blocks, first_item, key_blocks, band_keys,
    scale: tl.float32, dropout_limit, dropout_scale: tl.float32,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASK_TOKENS: tl.constexpr, EVEN_KEYS: tl.constexpr, PRECISION: tl.constexpr, WRITE_KEYS: tl.constexpr,
):  # fmt: skip
    """One (chunk, time block, head) of a batch entry: dq without its position part, partial sums of du and dgate, and,
    if WRITE_KEYS, dk and dv.
    """
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
    group = head // HEADS_PER_GROUP
    head64, group64, chunk64 = head.to(tl.int64), group.to(tl.int64), chunk.to(tl.int64)
    MASKED: tl.constexpr = (mask_ptr is not None) or (not EVEN_KEYS)
    # keys, values and their gradients are used once, so L2 evicts them first and keeps the band
    ONCE: tl.constexpr = WRITE_KEYS and band_ptr is not None
    EVICT: tl.constexpr = "evict_first" if ONCE else ""

    start64 = start.to(tl.int64)
    local = tl.arange(0, BLOCK_M)
    n = start + local
    row_mask = (n >= 0) & (n < tl.minimum(first_row + M, N))
    q_base = q_ptr + batch * stride_qb + start64 * stride_qn + head64 * stride_qh
    q = load_rows(q_base, local, row_mask, stride_qn, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    content_at = content_ptr + head64 * stride_ch if content_ptr is not None else None
    qc = add_bias(q, content_at, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    do_base = do_ptr + batch * stride_dob + start64 * stride_don + head64 * stride_doh
    do = load_rows(do_base, local, row_mask, stride_don, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    q_from, do_from = (q_base, local, row_mask, stride_qn), (do_base, local, row_mask, stride_don)
    out_base = out_ptr + ((batch * N + start64) * H + head) * D
    out = load_rows(out_base, local, row_mask, H * D, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    lse_at = (batch * H + head) * N + n
    dlse_at = batch * stride_dlb + head64 * stride_dlh + n.to(tl.int64) * stride_dln
    out_from = (out_base, local, row_mask, H * D)
    # [BLOCK_M]
    delta = row_products(do, do_from, out, out_from, opaque_zero(tl.program_id(0)), D, BLOCK_M, BLOCK_D, PRECISION)
    lse2, delta = _row_statistics(lse_ptr, dlse_ptr, delta, lse_at, dlse_at, row_mask)
    if delta_ptr is not None:
        tl.store(delta_ptr + lse_at, delta, mask=row_mask)

    k_base = k_ptr + batch * stride_kb + chunk64 * stride_kl + group64 * stride_kg
    v_base = v_ptr + batch * stride_vb + chunk64 * stride_vl + group64 * stride_vg
    last_key = tl.where(has_keys(chunk, L, batch_start_ptr is not None), R, 0)
    column = tl.arange(0, BLOCK_D)
    scale2 = scale * LOG2E
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for j0 in range(0, last_key, BLOCK_N):
        if band_ptr is not None:
            band_at = band_ptr + (slot.to(tl.int64) * H + head) * (BLOCK_M * band_keys) + j0
            ds_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for a in range(K):
            again = opaque_zero(a)  # pointers are recomputed for each neighbour and take no registers
            j = j0 + again + tl.arange(0, BLOCK_N)
            mask_at = None
            if mask_ptr is not None:
                mask_at = mask_ptr + batch * stride_mb + chunk64 * stride_ml + wide(a) * stride_mk
            visible = visible_keys(mask_at, stride_mr, j, R, MASK_TOKENS)
            gate = 1.0
            if gate_ptr is not None:
                gate = load_gate(
                    gate_ptr + batch * stride_gb + chunk64 * stride_gl + wide(a) * stride_gk, visible, MASKED
                )
            k_at = k_base + wide(a) * stride_kk
            k = load_keys(k_at, j, visible, stride_kr, D, BLOCK_D, MASKED, ONCE)  # [BLOCK_N, BLOCK_D]
            v_at = v_base + wide(a) * stride_vk
            v = load_keys(v_at, j, visible, stride_vr, D, BLOCK_D, MASKED, ONCE)  # [BLOCK_N, BLOCK_D]
            position = 0.0
            if band_ptr is not None:
                position = load_band(band_at, band_keys, again, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
            content = tile_product(  # [BLOCK_M, BLOCK_N]
                qc, q_from, content_at, k, (k_at, j, visible, stride_kr), again, D, BLOCK_D, PRECISION
            )
            # [BLOCK_M, BLOCK_N]
            dp_raw = tile_product(do, do_from, None, v, (v_at, j, visible, stride_vr), again, D, BLOCK_D, PRECISION)
            p, ds = tile_gradients(
                content,
                dp_raw,
                position,
                lse2,
                delta,
                visible,
                gate,
                scale2,
                seed_ptr,
                dropout_limit,
                dropout_scale,
                a * R + j,
                n,
                head,
                batch,
                band_ptr is not None,
                MASKED,
                gate_ptr is not None,
            )
            if band_ptr is not None:
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
            dq = tl.dot(ds16, k, dq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
            if WRITE_KEYS:
                token = ((batch * L + chunk) * K + a) * R + j0
                head_anew = (tl.program_id(0) + again) % H  # recomputed too: no register holds it throughout the loops
                into = (token * H + head_anew) * D + (
                    (tl.arange(0, BLOCK_N) + again)[:, None] * (H * D) + column[None, :]
                )
                inside = (column < D)[None, :]
                if not EVEN_KEYS:
                    inside = inside & (j < R)[:, None]
                dv = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
                tl.store(dv_ptr + into, dv.to(dv_ptr.dtype.element_ty), mask=inside, eviction_policy=EVICT)
                dk = tl.dot(tl.trans(ds16), qc, input_precision=PRECISION) * scale  # [BLOCK_N, BLOCK_D]
                tl.store(dk_ptr + into, dk.to(dk_ptr.dtype.element_ty), mask=inside, eviction_policy=EVICT)
        if band_ptr is not None:
            if ds_ptr is not None:
                band_at = ds_ptr + (slot.to(tl.int64) * H + head) * (BLOCK_M * band_keys) + j0
            else:
                tl.debug_barrier()  # all threads have read the logits that the store replaces
            at = band_at + (local[:, None] * band_keys + tl.arange(0, BLOCK_N)[None, :])
            tl.store(at, ds_sum.to(band_ptr.dtype.element_ty))

    # recomputed with a term of 0 that the compiler can't fold, so that no registers hold them throughout the loops
    head, slot, item, block, chunk, batch, first_row, start = locate(
        tl.program_id(0) + tl.minimum(blocks, 0),
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
    n = start + tl.arange(0, BLOCK_M)
    row_mask = (n >= 0) & (n < tl.minimum(first_row + M, N))
    row = (batch * N + n) * H + head  # int64
    tl.store(
        dq_ptr + row[:, None] * D + column[None, :],
        (dq * scale).to(dq_ptr.dtype.element_ty),
        mask=row_mask[:, None] & (column < D)[None, :],
    )
    if dcontent_ptr is not None:
        tl.store(dcontent_ptr + (item.to(tl.int64) * H + head) * D + column, tl.sum(dq, 0) * scale, mask=column < D)


@triton.jit(do_not_specialize=SIZES)
def _cca_backward_key_kernel(
    q_ptr, k_ptr, v_ptr, content_ptr, mask_ptr, gate_ptr, seed_ptr, batch_start_ptr, band_ptr,
    do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kl, stride_kk, stride_kr, stride_kg,
    stride_vb, stride_vl, stride_vk, stride_vr, stride_vg,
    stride_ch, stride_mb, stride_ml, stride_mk, stride_mr, stride_gb, stride_gl, stride_gk, stride_batch_start,
    stride_dob, stride_don, stride_doh,
    N, M, K, R, H, L, HEADS_PER_GROUP, query_start, first_chunk, chunks, blocks, first_item, key_blocks, band_keys,
    scale: tl.float32, dropout_limit, dropout_scale: tl.float32,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASK_TOKENS: tl.constexpr, EVEN_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key block of a neighbour and key head: sums over the group's heads and a chunk's time blocks."""
    groups = H // HEADS_PER_GROUP
    pid = tl.program_id(0)
    group = pid % groups
    j0 = (pid // groups) % key_blocks * BLOCK_N
    a = (pid // groups) // key_blocks % K
    slot = (pid // groups) // key_blocks // K * blocks  # of the chunk's first time block
    batch = ((first_item + slot) // (blocks * chunks)).to(tl.int64)
    query_start, first_chunk = first_position(query_start, first_chunk, M, batch_start_ptr, stride_batch_start, batch)
    chunk = first_chunk + (first_item + slot) // blocks % chunks
    if not has_keys(chunk, L, batch_start_ptr is not None):
        return
    group64, chunk64 = group.to(tl.int64), chunk.to(tl.int64)
    MASKED: tl.constexpr = (mask_ptr is not None) or (not EVEN_KEYS)

    j = j0 + tl.arange(0, BLOCK_N)
    mask_at = None
    if mask_ptr is not None:
        mask_at = mask_ptr + batch * stride_mb + chunk64 * stride_ml + wide(a) * stride_mk
    visible = visible_keys(mask_at, stride_mr, j, R, MASK_TOKENS)
    gate = 1.0
    if gate_ptr is not None:
        gate = load_gate(gate_ptr + batch * stride_gb + chunk64 * stride_gl + wide(a) * stride_gk, visible, MASKED)
    k_base = k_ptr + batch * stride_kb + chunk64 * stride_kl + group64 * stride_kg
    v_base = v_ptr + batch * stride_vb + chunk64 * stride_vl + group64 * stride_vg
    k_at = k_base + wide(a) * stride_kk
    k = load_keys(k_at, j, visible, stride_kr, D, BLOCK_D, MASKED)  # [BLOCK_N, BLOCK_D]
    v_at = v_base + wide(a) * stride_vk
    v = load_keys(v_at, j, visible, stride_vr, D, BLOCK_D, MASKED)  # [BLOCK_N, BLOCK_D]
    k_from, v_from = (k_at, j, visible, stride_kr), (v_at, j, visible, stride_vr)

    first_row = (chunk + 1) * M - 1 - query_start
    local = tl.arange(0, BLOCK_M)
    scale2 = scale * LOG2E
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for step in range(HEADS_PER_GROUP * blocks):
        head = group * HEADS_PER_GROUP + step // blocks
        head64 = wide(head)
        block = step % blocks
        start = first_row + block * BLOCK_M
        start64 = start.to(tl.int64)
        n = start + local
        row_mask = (n >= 0) & (n < tl.minimum(first_row + M, N))
        q_base = q_ptr + batch * stride_qb + start64 * stride_qn + head64 * stride_qh
        do_base = do_ptr + batch * stride_dob + start64 * stride_don + head64 * stride_doh
        content_at = content_ptr + head64 * stride_ch if content_ptr is not None else None
        statistics = (batch * H + head) * N + start64
        qc, do, lse2, delta = load_queries(  # [BLOCK_M, BLOCK_D]
            q_base,
            do_base,
            content_at,
            lse_ptr + statistics,
            delta_ptr + statistics,
            local,
            row_mask,
            stride_qn,
            stride_don,
            D,
            BLOCK_D,
        )
        q_from, do_from = (q_base, local, row_mask, stride_qn), (do_base, local, row_mask, stride_don)
        zero = opaque_zero(step)
        position = 0.0
        if band_ptr is not None:
            band_at = band_ptr + ((slot + block).to(tl.int64) * H + head) * (BLOCK_M * band_keys) + j0
            position = load_band(band_at, band_keys, zero, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
        content = tile_product(qc, q_from, content_at, k, k_from, zero, D, BLOCK_D, PRECISION)  # [BLOCK_M, BLOCK_N]
        dp_raw = tile_product(do, do_from, None, v, v_from, zero, D, BLOCK_D, PRECISION)
        p, ds = tile_gradients(
            content,
            dp_raw,
            position,
            lse2,
            delta,
            visible,
            gate,
            scale2,
            seed_ptr,
            dropout_limit,
            dropout_scale,
            a * R + j,
            n,
            head,
            batch,
            band_ptr is not None,
            MASKED,
            gate_ptr is not None,
        )
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
        dk = tl.dot(tl.trans(ds.to(qc.dtype)), qc, dk, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]

    column = tl.arange(0, BLOCK_D)
    token = ((batch * L + chunk) * K + a) * R + j0
    into = (token * groups + group) * D + (tl.arange(0, BLOCK_N)[:, None] * (groups * D) + column[None, :])
    inside = (j < R)[:, None] & (column < D)[None, :]
    tl.store(dk_ptr + into, (dk * (scale * gate)).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + into, (dv * gate).to(dv_ptr.dtype.element_ty), mask=inside)
