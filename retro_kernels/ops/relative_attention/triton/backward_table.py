"""Backward of relative attention for the relative keys: one program owns a block of table rows and walks down their
diagonal.

In coordinates (query i, table row t) it is the keys that lie on a band, j = i + shift - t: content logits and dP are
position-like products with the keys and the values as tables, position logits are a plain product, and d rel_key is a
plain transposed product. No gradient of size N x S is kept; the price is that both content products are made again,
with two blocks of keys a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.gradients import load_queries, load_statistics
from ....triton_lib.loads import load_query, load_rows, wide
from ....triton_lib.position_logits import position_logits, rel_rows, table_product
from ....triton_lib.positions import position_of
from ....triton_lib.products import product
from ....triton_lib.softmax import LOG2E
from .forward import SIZES
from .gradient import tile_gradient
from .tile import TALL, row_limits


@triton.jit
def _band_visible(
    i,
    j,
    t,
    N,
    S,
    T,
    shift,
    rel_start,
    causal_gap,
    window,
    mask_at,
    query_segment_at,
    segment_at,
    stride_ms,
    stride_qsn,
    stride_kss,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """bool [BLOCK_M, BLOCK_N] in coordinates (query, table row); j [BLOCK_M, BLOCK_N] is the key of each."""
    displacement = t + rel_start
    allowed = t < T
    if CAUSAL:
        allowed = allowed & (displacement >= causal_gap)
    if WINDOW == "sliding":
        allowed = allowed & (displacement < window)
    inside = (i < N)[:, None] & (j >= 0) & (j < S)
    if WINDOW == "blocks":
        first_key, _ = row_limits(i, S, shift + rel_start, causal_gap, window, CAUSAL, WINDOW)
        inside = inside & (j >= first_key[:, None])
    visible = inside & allowed[None, :]
    if mask_at is not None:
        visible = visible & (tl.load(mask_at + j * stride_ms, mask=inside, other=0) != 0)
    if segment_at is not None:
        key_segment = tl.load(segment_at + j * stride_kss, mask=inside, other=0)
        query_segment = tl.load(query_segment_at + i * stride_qsn, mask=i < N, other=0)
        visible = visible & (query_segment[:, None] == key_segment)
    return visible


@triton.jit
def _joined(
    first,
    N,
    S,
    offset,
    rel_start,
    causal_gap,
    window,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """(shift, begin, end): the queries that some displacement of the
    block of rows joins to a key; none where all of it is invisible.
    """
    shift = offset - rel_start
    begin = tl.maximum(first - shift, 0)
    end = tl.minimum(first + BLOCK_N - 1 - shift + S, N)
    if CAUSAL:
        end = tl.where(first + BLOCK_N - 1 + rel_start >= causal_gap, end, begin)
    if WINDOW == "sliding":
        end = tl.where(first + rel_start < window, end, begin)
    if WINDOW == "blocks":  # two blocks, halved: twice `window` may not fit 32 bits
        end = tl.where((first + rel_start) // 2 < window, end, begin)
    return shift, begin, end


@triton.jit
def _joined_documents(
    begin,
    end,
    first,
    shift,
    S,
    query_segment_at,
    segment_at,
    stride_qsn,
    stride_kss,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr = 1024,
):
    """The part of the queries [begin, end) that some displacement of the block joins to a key of their own document.

    Where the keys' segments ascend a document is among a query's keys iff it lies between their first and last segment.
    Where they do not, all queries stay.
    """
    begin = tl.minimum(begin, end)
    low, high, falls = end, begin, 0
    for start in range(begin - BLOCK_N, end, BLOCK):  # so much earlier begin the keys of the first query
        i = start + tl.arange(0, BLOCK)
        inside = (i >= begin) & (i < end)
        query = tl.load(query_segment_at + i * stride_qsn, mask=inside, other=0)
        near = tl.minimum(tl.maximum(i + shift - first, 0), S - 1)
        far = tl.minimum(tl.maximum(i + shift - first - (BLOCK_N - 1), 0), S - 1)
        largest, smallest = tl.load(segment_at + near * stride_kss), tl.load(segment_at + far * stride_kss)
        before = tl.load(segment_at + tl.maximum(near - 1, 0) * stride_kss)
        falls = tl.maximum(falls, tl.max(((before > largest) & (i < end)).to(tl.int32), 0))
        hit = inside & (query >= smallest) & (query <= largest)
        low = tl.minimum(low, tl.min(tl.where(hit, i, end), 0))
        high = tl.maximum(high, tl.max(tl.where(hit, i + 1, begin), 0))
    return tl.where(falls > 0, begin, low), tl.where(falls > 0, end, tl.maximum(low, high))


@triton.jit(do_not_specialize=(*SIZES, "items", "items_per_split", "heads_per_table"))
def _relative_table_kernel(
    q_ptr, k_ptr, v_ptr, rel_ptr, rq_ptr, content_ptr, position_ptr, mask_ptr, query_segment_ptr, key_segment_ptr,
    seed_ptr, batch_offset_ptr, do_ptr, lse_ptr, delta_ptr, drel_ptr,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_ks, stride_kg, stride_vb, stride_vs, stride_vg,
    stride_rh, stride_rt, stride_rqb, stride_rqn, stride_rqh, stride_ch, stride_ph,
    stride_mb, stride_ms, stride_qsb, stride_qsn, stride_ksb, stride_kss, stride_batch_offset,
    stride_dob, stride_don, stride_doh,
    N, S, T, H, HEADS_PER_GROUP, offset, causal_gap, window, rel_start, items, items_per_split, heads_per_table,
    scale: tl.float32, dropout_limit, dropout_scale: tl.float32,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """drel [splits, tables, T, E] float32: BLOCK_N rows of one table, over a split of its (batch, head) items."""
    FLAT: tl.constexpr = BLOCK_M < TALL or PRECISION == "tf32x3"
    first = tl.program_id(0) * BLOCK_N
    table, split = tl.program_id(1), tl.program_id(2)
    table64 = table.to(tl.int64)
    t = first + tl.arange(0, BLOCK_N)
    if batch_offset_ptr is None:
        shift, begin, end = _joined(first, N, S, offset, rel_start, causal_gap, window, BLOCK_N, CAUSAL, WINDOW)
    rel_at = rel_ptr + table64 * stride_rh
    rel = rel_rows(rel_at, first, T, stride_rt, E, BLOCK_N, BLOCK_E)  # [BLOCK_N, BLOCK_E]
    drel = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for item in range(split * items_per_split, tl.minimum((split + 1) * items_per_split, items)):
        batch = (tl.full([], 0, tl.int64) + item) // heads_per_table
        head = table * heads_per_table + item % heads_per_table
        group = head // HEADS_PER_GROUP
        head64, group64 = wide(head), wide(group)
        content_at = content_ptr + head64 * stride_ch if content_ptr is not None else None
        position_at = position_ptr + head64 * stride_ph if position_ptr is not None else None
        mask_at = mask_ptr + batch * stride_mb if mask_ptr is not None else None
        query_segment_at = query_segment_ptr + batch * stride_qsb if query_segment_ptr is not None else None
        segment_at = key_segment_ptr + batch * stride_ksb if key_segment_ptr is not None else None
        statistics = (batch * H + head) * N
        if batch_offset_ptr is not None:
            own = position_of(offset, batch_offset_ptr, stride_batch_offset, batch)
            shift, begin, end = _joined(first, N, S, own, rel_start, causal_gap, window, BLOCK_N, CAUSAL, WINDOW)
        here, until = begin, end
        if key_segment_ptr is not None:
            here, until = _joined_documents(
                begin, end, first, shift, S, query_segment_at, segment_at, stride_qsn, stride_kss, BLOCK_N
            )
        for start in range(here, until, BLOCK_M):
            i = start + tl.arange(0, BLOCK_M)
            row_mask = i < N
            q_base, rq_base = (
                q_ptr + batch * stride_qb + head64 * stride_qh,
                rq_ptr + batch * stride_rqb + head64 * stride_rqh,
            )
            do_base = do_ptr + batch * stride_dob + head64 * stride_doh
            q_from, do_from = (q_base, i, row_mask, stride_qn), (do_base, i, row_mask, stride_don)
            rq_from = (rq_base, i, row_mask, stride_rqn)
            if FLAT:
                q, do, lse2, delta = load_queries(  # [BLOCK_M, BLOCK_D]
                    q_base,
                    do_base,
                    content_at,
                    lse_ptr + statistics,
                    delta_ptr + statistics,
                    i,
                    row_mask,
                    stride_qn,
                    stride_don,
                    D,
                    BLOCK_D,
                )
                _, rq = load_query(rq_base, position_at, i, row_mask, stride_rqn, E, BLOCK_E)  # [BLOCK_M, BLOCK_E]
            else:  # the rest where it is needed
                _, q = load_query(q_base, content_at, i, row_mask, stride_qn, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
                lse2, delta = load_statistics(lse_ptr + statistics, delta_ptr + statistics, i, row_mask)
            zero = start >> 30  # N is far below 2**30
            base = start + shift - first - (BLOCK_N - 1)  # the key of i = 0 and the block's last row
            keys = S if FLAT else tl.minimum(S, base + BLOCK_M + BLOCK_N - 1)  # those past the band are not read
            k_base = k_ptr + batch * stride_kb + group64 * stride_kg
            v_base = v_ptr + batch * stride_vb + group64 * stride_vg
            content = position_logits(  # [BLOCK_M, BLOCK_N]
                q,
                k_base,
                base,
                keys,
                stride_ks,
                zero,
                D,
                BLOCK_M,
                BLOCK_N,
                BLOCK_D,
                PRECISION,
                FLAT,
                q_from,
                content_at,
            )
            if PRECISION == "tf32x3":
                position = table_product(  # [BLOCK_M, BLOCK_N]
                    rq, rq_from, position_at, rel_at, first, T, stride_rt, zero, E, BLOCK_N, BLOCK_E, PRECISION, True
                )
            elif FLAT:
                position = product(rq, rel, PRECISION, True)  # [BLOCK_M, BLOCK_N]
            else:
                position = 0.0
                # [BLOCK_M, BLOCK_E]
                _, rq = load_query(rq_base, position_at, i, row_mask, stride_rqn, E, BLOCK_E)
                do = load_rows(do_base, i.to(tl.int64), row_mask, stride_don, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
                # [BLOCK_M, BLOCK_N], added in place
                content = tl.dot(rq, tl.trans(rel), content, input_precision=PRECISION)
            dp = position_logits(  # [BLOCK_M, BLOCK_N]
                do, v_base, base, keys, stride_vs, zero, D, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, FLAT, do_from
            )
            # rows of the table are columns of tall tiles, of which a thread has many: not to be kept through the loop
            row = t if FLAT else first + zero + tl.arange(0, BLOCK_N)
            j = (i + shift)[:, None] - row[None, :]
            visible = _band_visible(
                i,
                j,
                row,
                N,
                S,
                T,
                shift,
                rel_start,
                causal_gap,
                window,
                mask_at,
                query_segment_at,
                segment_at,
                stride_ms,
                stride_qsn,
                stride_kss,
                CAUSAL,
                WINDOW,
            )
            _, ds = tile_gradient(
                content + position,
                dp,
                lse2,
                delta,
                visible,
                scale * LOG2E,
                seed_ptr,
                dropout_limit,
                dropout_scale,
                j,
                i[:, None],
                head,
                batch,
            )
            drel += tl.dot(tl.trans(ds.to(rq.dtype)), rq, input_precision=PRECISION)  # [BLOCK_N, BLOCK_E]
    e = tl.arange(0, BLOCK_E)
    slot = (tl.full([], 0, tl.int64) + split) * tl.num_programs(1) + table
    tl.store(
        drel_ptr + (slot * T + t)[:, None] * E + e[None, :], drel * scale, mask=(t < T)[:, None] & (e < E)[None, :]
    )
