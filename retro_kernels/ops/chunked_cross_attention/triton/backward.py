"""Backward kernels of chunked cross-attention. No atomics: one program writes each output element.

Only one chunk of queries attends a neighbour. If there are as many key heads as query heads and a chunk fits one tile,
the program of a (batch, chunk, head) reads everything once and writes dQ, dK and dV. Otherwise it writes only dQ, and
`_cca_backward_key_kernel` writes dK and dV. `_cca_backward_table_kernel` writes dR.

The position logits of a (batch, chunk, time block, head) are kept in its own part of a scratch buffer: the band
[BLOCK_M, BAND_KEYS + BLOCK_M]. Column c of the band belongs to row c of the tile's part of the table. Query i and key j
use column i - j + BAND_KEYS - 1. With BLOCK_M = 2 and BAND_KEYS = 4:

    row 0:  column 0 1 2 3 4 5   key 3 2 1 0 - -
    row 1:  column 0 1 2 3 4 5   key - 3 2 1 0 -

Products with the table write and read whole lines of the band, and the skew is an address that is linear in i and j.
The program that wrote the logits loads them again, from L1 or L2, and replaces them by dS, summed over the neighbours.

A half type would round a logit of 1,000 by up to 0.5, and can't hold 100,000. A band of 16 bits therefore keeps the
square root of each logit's distance from the row's largest logit, as a share of the row's span: the logits with the
largest probabilities are the most precise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.gradients import load_queries, row_products
from ....triton_lib.loads import add_bias, load_keys, load_rows, wide
from ....triton_lib.position_logits import rel_rows, table_product
from ....triton_lib.products import opaque_zero, tile_product
from ....triton_lib.softmax import LOG2E
from .tile import SIZES, first_position, has_keys, load_gate, locate, tile_gradients, visible_keys


@triton.jit
def _skewed(j0, zero, BAND_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """int [BLOCK_M, BLOCK_N]: offsets in a band of the queries and the keys j0 .. j0 + BLOCK_N - 1."""
    i = (tl.arange(0, BLOCK_M) + zero)[:, None]
    return i * (BAND_KEYS + BLOCK_M + 1) + (BAND_KEYS - 1 - j0) - tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def _square(BAND_KEYS: tl.constexpr, BLOCK_M: tl.constexpr):
    """int [BLOCK_M, BLOCK_M]: offsets in a band of its first BLOCK_M columns."""
    local = tl.arange(0, BLOCK_M)
    return local[:, None] * (BAND_KEYS + BLOCK_M) + local[None, :]


@triton.jit
def _stored(c0, zero, BAND_KEYS: tl.constexpr, BLOCK_M: tl.constexpr):
    """bool [BLOCK_M, BLOCK_M]: elements from column c0 on that the band stores: eight neighbouring ones, the width of a
    vector, if one of them has a key. The others are 0.
    """
    i = (tl.arange(0, BLOCK_M) + zero)[:, None]
    c = c0 + (tl.arange(0, BLOCK_M) // 8 * 8)[None, :]
    return (c + 7 >= i) & (c < i + BAND_KEYS)


@triton.jit
def _band_block(
    c0, source, position_at,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BAND_KEYS: tl.constexpr, EVEN_BAND: tl.constexpr,
    INNER: tl.constexpr, OTHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_M]: logits of BLOCK_M columns of a band, from c0 on; OTHER without a key.

    source: the relative query and its address, the table's address, its row for column 0, its number of rows and their
    stride, the mask of query rows, R, and an opaque zero. INNER: each column has a key, or one past R.
    """
    rq, rq_from, rel_base, first, T, stride_rt, row_mask, R, zero = source
    logits = table_product(  # [BLOCK_M, BLOCK_M]
        rq, rq_from, position_at, rel_base, first + c0, T, stride_rt, zero, E, BLOCK_M, BLOCK_E, PRECISION
    )
    i, c = tl.arange(0, BLOCK_M)[:, None], c0 + tl.arange(0, BLOCK_M)[None, :]
    # rows past the end are 0 times the table, which is NaN if the table is infinite
    keep = row_mask[:, None] & (c >= 0)
    if not INNER:
        keep = keep & (c >= i) & (c < i + BAND_KEYS)
    if not EVEN_BAND:
        keep = keep & (c >= i + (BAND_KEYS - R))
    return tl.where(keep, logits, OTHER)


@triton.jit
def _encoded(logits, spread, dtype: tl.constexpr):
    """Return logits as elements of a band. In half types +inf becomes 0, -inf and NaN become 65535."""
    if dtype == tl.float32:
        return logits
    else:
        top, span = spread
        below = tl.minimum(tl.maximum(top[:, None] - logits, 0.0), span[:, None])
        root = tl.sqrt(below * (65534.0 * 65534.0 / span)[:, None]) + 0.5
        return tl.where(logits > float("-inf"), root, 65535.0).to(tl.uint16).to(dtype, bitcast=True)


@triton.jit
def _decoded(stored, span):
    """Return float32 logits from the elements of a band, in half types less the row's largest one."""
    if stored.dtype == tl.float32:
        return stored
    else:
        root = stored.to(tl.uint16, bitcast=True).to(tl.float32)
        logits = root * root * (span * (-1 / (65534.0 * 65534.0)))[:, None]
        return tl.where(root == 65535.0, float("-inf"), logits)


@triton.jit
def _write_logits(
    band_at, spread, c0, source, position_at,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BAND_KEYS: tl.constexpr, EVEN_BAND: tl.constexpr,
    INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_M columns of a band, from c0 on. spread: the largest finite logit of each row, and its distance from
    the smallest one.
    """
    OTHER: tl.constexpr = 0.0 if band_at.dtype.element_ty == tl.float32 else float("inf")  # encoded as 0
    logits = _band_block(  # [BLOCK_M, BLOCK_M]
        c0, source, position_at, E, BLOCK_M, BLOCK_E, BAND_KEYS, EVEN_BAND, INNER, OTHER, PRECISION
    )
    at = band_at + c0 + _square(BAND_KEYS, BLOCK_M)
    encoded = _encoded(logits, spread, band_at.dtype.element_ty)
    if INNER:
        tl.store(at, encoded)
    else:
        tl.store(at, encoded, mask=_stored(c0, 0, BAND_KEYS, BLOCK_M))


@triton.jit
def _relative_query(q_ptr, rq_ptr, stride_q, stride_rq, batch, start, head):
    """(address of the first row of the relative query, or of the query if there is none; stride of the rows)."""
    if rq_ptr is not None:
        base, stride = rq_ptr + batch * stride_rq.b + wide(start) * stride_rq.n + wide(head) * stride_rq.h, stride_rq.n
    else:
        base, stride = q_ptr + batch * stride_q.b + wide(start) * stride_q.n + wide(head) * stride_q.h, stride_q.n
    return base, stride


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
    q_ptr, k_ptr, v_ptr, rel_ptr, rq_ptr, content_ptr, position_ptr, mask_ptr, gate_ptr, seed_ptr, batch_start_ptr,
    band_ptr, span_ptr, ds_ptr, do_ptr, out_ptr, lse_ptr, dlse_ptr, delta_ptr,
    dq_ptr, drq_ptr, dk_ptr, dv_ptr, dgate_ptr, dcontent_ptr, dposition_ptr,
    stride_q, stride_k, stride_v, stride_r, stride_rq, stride_c, stride_p, stride_m, stride_g, stride_batch_start,
    stride_do, stride_dl,
    N, M, K, R, H, L, T, HEADS_PER_GROUP, rel_start, query_start, first_chunk, chunks, blocks, key_blocks,
    scale: tl.float32, dropout_limit, dropout_scale: tl.float32,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BAND_KEYS: tl.constexpr,
    MASK_TOKENS: tl.constexpr, EVEN_KEYS: tl.constexpr, EVEN_BAND: tl.constexpr, PRECISION: tl.constexpr,
    WRITE_KEYS: tl.constexpr, FEW_NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """One (chunk, time block, head) of a batch entry: dq, drq, partial sums of du, dv and dgate, and, if WRITE_KEYS, dk
    and dv. The band keeps dS, or the logits if ds_ptr takes dS.
    """
    head, item, block, chunk, batch, first_row, start = locate(
        tl.program_id(0), H, M, first_chunk, chunks, blocks, query_start, batch_start_ptr, stride_batch_start, BLOCK_M
    )
    group = head // HEADS_PER_GROUP
    head64, group64, chunk64 = head.to(tl.int64), group.to(tl.int64), chunk.to(tl.int64)
    attends = has_keys(chunk, L, batch_start_ptr is not None)
    MASKED: tl.constexpr = (mask_ptr is not None) or (not EVEN_KEYS)
    # keys, values and their gradients are used once, so L2 evicts them first and keeps the band
    ONCE: tl.constexpr = WRITE_KEYS and band_ptr is not None
    EVICT: tl.constexpr = "evict_first" if ONCE else ""

    start64 = start.to(tl.int64)
    local = tl.arange(0, BLOCK_M)
    n = start + local
    row_mask = (n >= 0) & (n < tl.minimum(first_row + M, N))
    q_base = q_ptr + batch * stride_q.b + start64 * stride_q.n + head64 * stride_q.h
    q = load_rows(q_base, local, row_mask, stride_q.n, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    top = tl.zeros([BLOCK_M], tl.float32)
    span = tl.zeros([BLOCK_M], tl.float32)
    if band_ptr is not None:
        band_at = band_ptr + (wide(item) * H + head) * (BLOCK_M * (BAND_KEYS + BLOCK_M))
        rel_base = rel_ptr + head64 * stride_r.h
        if attends:
            # the first kernel section: few registers are live before dO and the content query are loaded
            rq_base, rq_stride = _relative_query(q_ptr, rq_ptr, stride_q, stride_rq, batch, start, head)
            rq = q
            if rq_ptr is not None:
                rq = load_rows(rq_base, local, row_mask, rq_stride, E, BLOCK_E)  # [BLOCK_M, BLOCK_E]
            position_at = position_ptr + head64 * stride_p.h if position_ptr is not None else None
            rq = add_bias(rq, position_at, E, BLOCK_E)  # [BLOCK_M, BLOCK_E]
            rq_from = (rq_base, local, row_mask, rq_stride)
            first = block * BLOCK_M + 1 - BAND_KEYS - rel_start  # table row of column 0
            zero = opaque_zero(tl.program_id(0))
            source = rq, rq_from, rel_base, first, T, stride_r.t, row_mask, R, zero
            if band_ptr.dtype.element_ty != tl.float32:
                # The number of registers decides. One stage has stack on sm_90 or sm_120 in calls with options, and two
                # stages have it on sm_100 in calls without.
                OPTIONS: tl.constexpr = MASKED or (seed_ptr is not None) or not FEW_NEIGHBOURS
                STAGES: tl.constexpr = 2 if BLOCK_E == 128 and OPTIONS else 1
                NO_KEY: tl.constexpr = float("inf")  # counts as no finite logit
                low = top + float("inf")
                top -= float("inf")
                for c0 in tl.range(0, BAND_KEYS + BLOCK_M, BLOCK_M, num_stages=STAGES):
                    logits = _band_block(  # [BLOCK_M, BLOCK_M]
                        c0, source, position_at, E, BLOCK_M, BLOCK_E, BAND_KEYS, EVEN_BAND, False, NO_KEY, PRECISION
                    )
                    finite = tl.abs(logits) < float("inf")
                    top = tl.maximum(top, tl.max(tl.where(finite, logits, float("-inf")), 1))
                    low = tl.minimum(low, tl.min(tl.where(finite, logits, float("inf")), 1))
                top = tl.where(low < float("inf"), top, 0.0)
                span = tl.maximum(tl.minimum(top - low, 3e38), 1e-28)
                if span_ptr is not None:
                    span_at = span_ptr + (wide(item) * H + head) * (2 * BLOCK_M) + local
                    tl.store(span_at, top)
                    tl.store(span_at + BLOCK_M, span)
            spread = top, span
            for edge in tl.static_range(2):
                c = edge * BAND_KEYS
                _write_logits(
                    band_at, spread, c, source, position_at, E, BLOCK_M, BLOCK_E, BAND_KEYS, EVEN_BAND, False, PRECISION
                )
            for c0 in range(BLOCK_M, BAND_KEYS, BLOCK_M):
                _write_logits(
                    band_at, spread, c0, source, position_at, E, BLOCK_M, BLOCK_E, BAND_KEYS, EVEN_BAND, True, PRECISION
                )
            tl.debug_barrier()  # the loop loads logits that other threads stored

    content_at = content_ptr + head64 * stride_c.h if content_ptr is not None else None
    lse_at = (batch * H + head) * N + n
    dlse_at = batch * stride_dl.b + head64 * stride_dl.h + n.to(tl.int64) * stride_dl.n
    do_mask = row_mask
    if mask_ptr is not None or batch_start_ptr is not None:
        # the gradient of a row that attends nothing may be NaN
        do_mask = row_mask & (tl.load(lse_ptr + lse_at, mask=row_mask, other=float("-inf")) != float("-inf"))
    do_base = do_ptr + batch * stride_do.b + start64 * stride_do.n + head64 * stride_do.h
    do = load_rows(do_base, local, do_mask, stride_do.n, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    q_from, do_from = (q_base, local, row_mask, stride_q.n), (do_base, local, do_mask, stride_do.n)
    out_base = out_ptr + ((batch * N + start64) * H + head) * D
    out = load_rows(out_base, local, row_mask, H * D, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    out_from = (out_base, local, row_mask, H * D)
    # [BLOCK_M]
    delta = row_products(do, do_from, out, out_from, opaque_zero(tl.program_id(0)), D, BLOCK_M, BLOCK_D, PRECISION)
    lse2, delta = _row_statistics(lse_ptr, dlse_ptr, delta, lse_at, dlse_at, row_mask)
    if band_ptr is not None:
        lse2 -= top * (scale * LOG2E)  # the band's logits are less `top`
    if delta_ptr is not None:
        tl.store(delta_ptr + lse_at, delta, mask=row_mask)
    qc = add_bias(q, content_at, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]

    k_base = k_ptr + batch * stride_k.b + chunk64 * stride_k.l + group64 * stride_k.g
    v_base = v_ptr + batch * stride_v.b + chunk64 * stride_v.l + group64 * stride_v.g
    steps = tl.where(attends, key_blocks * K, 0)
    column = tl.arange(0, BLOCK_D)
    scale2 = scale * LOG2E
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    position = 0.0
    if band_ptr is not None:
        there = local < tl.where(attends, BLOCK_M, 0)
        offsets = _skewed(0, 0, BAND_KEYS, BLOCK_M, BLOCK_N)
        position = tl.load(band_at + offsets, mask=there[:, None], other=0.0)  # [BLOCK_M, BLOCK_N]
        # of two neighbours the sum is rounded once more, and takes half the registers
        SUM: tl.constexpr = band_ptr.dtype.element_ty if FEW_NEIGHBOURS else tl.float32
        ds_sum = tl.zeros([BLOCK_M, BLOCK_N], SUM)
    # neighbours vary fastest: they share position logits. One loop, because a nested one would drain its pipeline.
    for step in range(0, steps):
        zero = opaque_zero(step)  # pointers are recomputed in each step and take no registers
        a, j0 = step % K, step // K * BLOCK_N
        j = j0 + zero + tl.arange(0, BLOCK_N)
        mask_at = None
        if mask_ptr is not None:
            mask_at = mask_ptr + batch * stride_m.b + chunk64 * stride_m.l + wide(a) * stride_m.k
        visible = visible_keys(mask_at, stride_m.r, j, R, MASK_TOKENS)
        gate = None
        if gate_ptr is not None:
            gate = load_gate(
                gate_ptr + batch * stride_g.b + chunk64 * stride_g.l + wide(a) * stride_g.k, visible, MASKED
            )
        k_at = k_base + wide(a) * stride_k.k
        k = load_keys(k_at, j, visible, stride_k.r, D, BLOCK_D, MASKED, ONCE)  # [BLOCK_N, BLOCK_D]
        v_at = v_base + wide(a) * stride_v.k
        v = load_keys(v_at, j, visible, stride_v.r, D, BLOCK_D, MASKED, ONCE)  # [BLOCK_N, BLOCK_D]
        content = tile_product(  # [BLOCK_M, BLOCK_N]
            qc, q_from, content_at, k, (k_at, j, visible, stride_k.r), zero, D, BLOCK_D, PRECISION
        )
        # [BLOCK_M, BLOCK_N]
        dp_raw = tile_product(do, do_from, None, v, (v_at, j, visible, stride_v.r), zero, D, BLOCK_D, PRECISION)
        logits = _decoded(position, span) if band_ptr is not None else None
        shown, dropout = visible if MASKED else None, (dropout_limit, dropout_scale)
        here = a * R + j0 + tl.arange(0, BLOCK_N), n, head, batch
        p, ds = tile_gradients(content, dp_raw, logits, lse2, delta, shown, gate, scale2, seed_ptr, dropout, here)
        if band_ptr is not None:
            # The logits of the next step arrive during this step's products. No barrier separates loads of logits from
            # the store of dS in the same place, because dS depends on the logits.
            offsets = _skewed(j0 + BLOCK_N, zero, BAND_KEYS, BLOCK_M, BLOCK_N)
            there = local < tl.where((a == K - 1) & (step + 1 < steps), BLOCK_M, 0)
            position = tl.load(band_at + offsets, mask=there[:, None], other=position)
            ds_sum = (tl.where(a == 0, 0.0, ds_sum).to(tl.float32) + ds.to(SUM).to(tl.float32)).to(SUM)
        if dgate_ptr is not None:
            dgate = tl.sum(tl.sum(ds * content * scale + p * dp_raw, 1), 0)
            parts = blocks * H * key_blocks
            part = (block * H + head) * key_blocks + step // K
            tl.store(dgate_ptr + ((batch * L + chunk) * K + a) * parts + part, dgate)
        if gate_ptr is not None:
            p = p * gate
            ds = ds * gate
        ds16 = ds.to(k.dtype)
        dq = tl.dot(ds16, k, dq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
        if WRITE_KEYS:
            token = ((batch * L + chunk) * K + a) * R + j0
            head_anew = (tl.program_id(0) + zero) % H  # recomputed too: no register holds it throughout the loop
            into = (token * H + head_anew) * D + ((tl.arange(0, BLOCK_N) + zero)[:, None] * (H * D) + column[None, :])
            inside = (column < D)[None, :]
            if not EVEN_KEYS:
                inside = inside & (j < R)[:, None]
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
            tl.store(dv_ptr + into, dv.to(dv_ptr.dtype.element_ty), mask=inside, eviction_policy=EVICT)
            dk = tl.dot(tl.trans(ds16), qc, input_precision=PRECISION) * scale  # [BLOCK_N, BLOCK_D]
            tl.store(dk_ptr + into, dk.to(dk_ptr.dtype.element_ty), mask=inside, eviction_policy=EVICT)
        if band_ptr is not None and a == K - 1:
            into_band = band_at
            if ds_ptr is not None:
                into_band = ds_ptr + (wide(item) * H + head) * (BLOCK_M * (BAND_KEYS + BLOCK_M))
            tl.store(into_band + _skewed(j0, zero, BAND_KEYS, BLOCK_M, BLOCK_N), ds_sum.to(band_ptr.dtype.element_ty))

    # recomputed with a term of 0 that the compiler can't fold, so that no registers hold them throughout the loop
    pid = tl.program_id(0) + tl.minimum(blocks, 0)
    head, item, block, chunk, batch, first_row, start = locate(
        pid, H, M, first_chunk, chunks, blocks, query_start, batch_start_ptr, stride_batch_start, BLOCK_M
    )
    n = start + tl.arange(0, BLOCK_M)
    row_mask = (n >= 0) & (n < tl.minimum(first_row + M, N))
    row = (batch * N + n) * H + head  # int64
    if dcontent_ptr is not None:
        tl.store(dcontent_ptr + (wide(item) * H + head) * D + column, tl.sum(dq, 0) * scale, mask=column < D)
    if band_ptr is not None:
        drq = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        if has_keys(chunk, L, batch_start_ptr is not None):
            tl.debug_barrier()  # the products load dS that other threads stored
            zero = opaque_zero(pid)
            ds_at = (band_ptr if ds_ptr is None else ds_ptr) + (wide(item) * H + head) * (
                BLOCK_M * (BAND_KEYS + BLOCK_M)
            )
            ds_at += _square(BAND_KEYS, BLOCK_M)
            rel_base = rel_ptr + wide(head) * stride_r.h
            first = block * BLOCK_M + 1 - BAND_KEYS - rel_start
            rows = rel_rows(rel_base, first, T, stride_r.t, E, BLOCK_M, BLOCK_E)  # [BLOCK_M, BLOCK_E]
            ds16 = tl.load(ds_at, mask=_stored(0, zero, BAND_KEYS, BLOCK_M), other=0.0)  # [BLOCK_M, BLOCK_M]
            drq = tl.dot(ds16, rows, drq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_E]
            for c0 in range(BLOCK_M, BAND_KEYS, BLOCK_M):
                rows = rel_rows(rel_base, first + c0, T, stride_r.t, E, BLOCK_M, BLOCK_E)  # [BLOCK_M, BLOCK_E]
                drq += tl.dot(tl.load(ds_at + c0), rows, input_precision=PRECISION)  # [BLOCK_M, BLOCK_E]
            rows = rel_rows(rel_base, first + BAND_KEYS, T, stride_r.t, E, BLOCK_M, BLOCK_E)  # [BLOCK_M, BLOCK_E]
            ds16 = tl.load(ds_at + BAND_KEYS, mask=_stored(BAND_KEYS, zero, BAND_KEYS, BLOCK_M), other=0.0)
            drq += tl.dot(ds16, rows, input_precision=PRECISION)  # [BLOCK_M, BLOCK_E]
        width = tl.arange(0, BLOCK_E)
        if dposition_ptr is not None:
            tl.store(dposition_ptr + (wide(item) * H + head) * E + width, tl.sum(drq, 0) * scale, mask=width < E)
        if drq_ptr is not None:
            tl.store(
                drq_ptr + row[:, None] * E + width[None, :],
                (drq * scale).to(drq_ptr.dtype.element_ty),
                mask=row_mask[:, None] & (width < E)[None, :],
            )
        else:
            dq += drq
    tl.store(
        dq_ptr + row[:, None] * D + column[None, :],
        (dq * scale).to(dq_ptr.dtype.element_ty),
        mask=row_mask[:, None] & (column < D)[None, :],
    )


@triton.jit(do_not_specialize=SIZES)
def _cca_backward_key_kernel(
    q_ptr, k_ptr, v_ptr, content_ptr, mask_ptr, gate_ptr, seed_ptr, batch_start_ptr, band_ptr, span_ptr,
    do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_q, stride_k, stride_v, stride_c, stride_m, stride_g, stride_batch_start, stride_do,
    N, M, K, R, H, L, HEADS_PER_GROUP, query_start, first_chunk, chunks, blocks, key_blocks,
    scale: tl.float32, dropout_limit, dropout_scale: tl.float32,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BAND_KEYS: tl.constexpr,
    MASK_TOKENS: tl.constexpr, EVEN_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key block of a neighbour and key head: sums over the group's heads and a chunk's time blocks."""
    groups = H // HEADS_PER_GROUP
    pid = tl.program_id(0)
    group = pid % groups
    j0 = (pid // groups) % key_blocks * BLOCK_N
    a = (pid // groups) // key_blocks % K
    item = (pid // groups) // key_blocks // K * blocks  # the chunk's first time block
    batch = (item // (blocks * chunks)).to(tl.int64)
    query_start, first_chunk = first_position(query_start, first_chunk, M, batch_start_ptr, stride_batch_start, batch)
    chunk = first_chunk + item // blocks % chunks
    if not has_keys(chunk, L, batch_start_ptr is not None):
        return
    group64, chunk64 = group.to(tl.int64), chunk.to(tl.int64)
    MASKED: tl.constexpr = (mask_ptr is not None) or (not EVEN_KEYS)

    j = j0 + tl.arange(0, BLOCK_N)
    mask_at = None
    if mask_ptr is not None:
        mask_at = mask_ptr + batch * stride_m.b + chunk64 * stride_m.l + wide(a) * stride_m.k
    visible = visible_keys(mask_at, stride_m.r, j, R, MASK_TOKENS)
    gate = None
    if gate_ptr is not None:
        gate = load_gate(gate_ptr + batch * stride_g.b + chunk64 * stride_g.l + wide(a) * stride_g.k, visible, MASKED)
    k_base = k_ptr + batch * stride_k.b + chunk64 * stride_k.l + group64 * stride_k.g
    v_base = v_ptr + batch * stride_v.b + chunk64 * stride_v.l + group64 * stride_v.g
    k_at = k_base + wide(a) * stride_k.k
    k = load_keys(k_at, j, visible, stride_k.r, D, BLOCK_D, MASKED)  # [BLOCK_N, BLOCK_D]
    v_at = v_base + wide(a) * stride_v.k
    v = load_keys(v_at, j, visible, stride_v.r, D, BLOCK_D, MASKED)  # [BLOCK_N, BLOCK_D]
    k_from, v_from = (k_at, j, visible, stride_k.r), (v_at, j, visible, stride_v.r)

    first_row = (chunk + 1) * M - 1 - query_start
    local = tl.arange(0, BLOCK_M)
    scale2 = scale * LOG2E
    shown, dropout = visible if MASKED else None, (dropout_limit, dropout_scale)
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
        if mask_ptr is not None or batch_start_ptr is not None:
            row_mask &= tl.load(lse_ptr + (batch * H + head) * N + n, mask=row_mask, other=float("-inf")) != float(
                "-inf"
            )
        q_base = q_ptr + batch * stride_q.b + start64 * stride_q.n + head64 * stride_q.h
        do_base = do_ptr + batch * stride_do.b + start64 * stride_do.n + head64 * stride_do.h
        content_at = content_ptr + head64 * stride_c.h if content_ptr is not None else None
        statistics = (batch * H + head) * N + start64
        q_from, do_from = (q_base, local, row_mask, stride_q.n), (do_base, local, row_mask, stride_do.n)
        lse_at, delta_at = lse_ptr + statistics, delta_ptr + statistics
        # [BLOCK_M, BLOCK_D]
        qc, do, lse2, delta = load_queries(q_from, do_from, content_at, lse_at, delta_at, D, BLOCK_D)
        zero = opaque_zero(step)
        position = None
        if band_ptr is not None:
            band_at = band_ptr + (wide(item + block) * H + head) * (BLOCK_M * (BAND_KEYS + BLOCK_M))
            stored = tl.load(band_at + _skewed(j0, zero, BAND_KEYS, BLOCK_M, BLOCK_N))  # [BLOCK_M, BLOCK_N]
            span = 0.0
            if span_ptr is not None:
                span_at = span_ptr + (wide(item + block) * H + head) * (2 * BLOCK_M) + local
                lse2 -= tl.load(span_at) * scale2
                span = tl.load(span_at + BLOCK_M)
            position = _decoded(stored, span)  # [BLOCK_M, BLOCK_N]
        content = tile_product(qc, q_from, content_at, k, k_from, zero, D, BLOCK_D, PRECISION)  # [BLOCK_M, BLOCK_N]
        dp_raw = tile_product(do, do_from, None, v, v_from, zero, D, BLOCK_D, PRECISION)
        here = a * R + j, n, head, batch
        p, ds = tile_gradients(content, dp_raw, position, lse2, delta, shown, gate, scale2, seed_ptr, dropout, here)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
        dk = tl.dot(tl.trans(ds.to(qc.dtype)), qc, dk, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]

    column = tl.arange(0, BLOCK_D)
    token = ((batch * L + chunk) * K + a) * R + j0
    into = (token * groups + group) * D + (tl.arange(0, BLOCK_N)[:, None] * (groups * D) + column[None, :])
    inside = (j < R)[:, None] & (column < D)[None, :]
    tl.store(dk_ptr + into, (dk * (scale if gate is None else scale * gate)).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + into, (dv if gate is None else dv * gate).to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _cca_backward_table_kernel(
    q_ptr, rq_ptr, position_ptr, batch_start_ptr, band_ptr, part_ptr,
    stride_q, stride_rq, stride_p, stride_batch_start,
    N, M, H, L, query_start, first_chunk, chunks, blocks, items, items_per_split, scale: tl.float32,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BAND_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one head's dR, summed over one split's items.

    Row x of the partial sums [splits, H, rows, E] belongs to displacement x + 1 - BAND_KEYS.
    """
    diagonal, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head64 = head.to(tl.int64)
    rows = tl.num_programs(0) * BLOCK_M
    local, width = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    position_at = position_ptr + head64 * stride_p.h if position_ptr is not None else None
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    first = split * items_per_split
    for item in range(first, tl.minimum(first + items_per_split, items)):
        block = item % blocks
        batch = wide(item // (blocks * chunks))
        own_start, own_chunk = first_position(query_start, first_chunk, M, batch_start_ptr, stride_batch_start, batch)
        chunk = own_chunk + item // blocks % chunks
        first_row = (chunk + 1) * M - 1 - own_start
        start = first_row + block * BLOCK_M
        n = start + local
        c0 = (diagonal - block) * BLOCK_M  # first column of the band on this diagonal
        there = (c0 >= 0) & (c0 <= BAND_KEYS) & has_keys(chunk, L, batch_start_ptr is not None)
        row_mask = (n >= 0) & (n < tl.where(there, tl.minimum(first_row + M, N), 0))
        base, stride = _relative_query(q_ptr, rq_ptr, stride_q, stride_rq, batch, start, head)
        rq = add_bias(
            load_rows(base, local, row_mask, stride, E, BLOCK_E), position_at, E, BLOCK_E
        )  # [BLOCK_M, BLOCK_E]
        ds_at = band_ptr + (wide(item) * H + head) * (BLOCK_M * (BAND_KEYS + BLOCK_M))
        inside = _stored(c0, opaque_zero(item), BAND_KEYS, BLOCK_M) & row_mask[:, None]
        ds = tl.load(ds_at + c0 + _square(BAND_KEYS, BLOCK_M), mask=inside, other=0.0)  # [BLOCK_M, BLOCK_M]
        acc = tl.dot(tl.trans(ds), rq, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_E]
    into = ((split.to(tl.int64) * H + head) * rows + diagonal * BLOCK_M) * E + local[:, None] * E + width[None, :]
    tl.store(part_ptr + into, acc * scale, mask=(local >= 0)[:, None] & (width < E)[None, :])
