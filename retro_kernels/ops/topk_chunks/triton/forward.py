"""The scan over the keys and the merge of its splits."""

from __future__ import annotations

import triton
import triton.language as tl

from .selection import FULL, absorb_packed, absorb_scores, empty_list, store_sorted

#: sizes and positions that must not become part of the compiled kernel
SIZES = ("Q", "S", "k", "causal_shift", "splits", "split_len")


@triton.jit
def _square_norm(rows_ptr, rows_ok, D, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_Q] sums of squares of the rows at `rows_ptr` [BLOCK_Q]."""
    total = tl.zeros([BLOCK_Q], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(rows_ptr[:, None] + d[None, :], mask=rows_ok[:, None] & (d[None, :] < D), other=0.0).to(tl.float32)
        total += tl.sum(x * x, 1)
    return total


@triton.jit
def _products(
    query_rows, q_ok, key_rows, s_ok, D,
    NORMS: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """q·k [BLOCK_Q, BLOCK_S] and, for NORMS, k·k [BLOCK_S]."""
    acc = tl.zeros([BLOCK_Q, BLOCK_S], tl.float32)
    key_norm = tl.zeros([BLOCK_S], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        if EVEN_D:
            q_mask = q_ok[:, None]
            k_mask = s_ok[None, :]
        else:
            q_mask = q_ok[:, None] & (d[None, :] < D)
            k_mask = s_ok[None, :] & (d[:, None] < D)
        query = tl.load(query_rows[:, None] + d[None, :], mask=q_mask, other=0.0)  # [BLOCK_Q, BLOCK_D]
        key = tl.load(key_rows[None, :] + d[:, None], mask=k_mask, other=0.0)  # [BLOCK_D, BLOCK_S]
        acc = tl.dot(query, key, acc, input_precision=PRECISION)
        if NORMS:
            wide = key.to(tl.float32)
            key_norm += tl.sum(wide * wide, 0)
    return acc, key_norm


@triton.jit
def _squared_differences(
    query_rows, q_ok, key_rows, s_ok, D, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):
    """||q-k||^2 [BLOCK_Q, BLOCK_S], exact near 0, where norms and products would cancel."""
    acc = tl.zeros([BLOCK_Q, BLOCK_S], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        query = tl.load(query_rows[:, None] + d[None, :], mask=q_ok[:, None] & (d[None, :] < D), other=0.0).to(
            tl.float32
        )
        key = tl.load(key_rows[:, None] + d[None, :], mask=s_ok[:, None] & (d[None, :] < D), other=0.0).to(tl.float32)
        gap = query[:, None, :] - key[None, :, :]
        acc += tl.sum(gap * gap, 2)
    return acc


@triton.jit(do_not_specialize=SIZES)
def _topk_chunks_scan_kernel(
    query_ptr, key_ptr, query_doc_ptr, key_doc_ptr, key_mask_ptr, scores_ptr, indices_ptr, partial_ptr,
    stride_q, stride_k, stride_qd, stride_kd, stride_m,
    Q, S, D, k, causal_shift, splits, split_len,
    IS_L2: tl.constexpr, DIRECT: tl.constexpr, HAS_CAUSAL: tl.constexpr, HAS_DOC: tl.constexpr, HAS_MASK: tl.constexpr,
    SPLIT: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """scores [B*Q,k] float32 and indices [B*Q,k] int64; if SPLIT, partial [B*Q,splits,k] packed int64 instead.

    Key j is a candidate of query i where j <= i + causal_shift. split_len: keys per split, a multiple of BLOCK_S.
    DIRECT: l2 by squared differences, not by norms and products.
    """
    # neighbouring programs scan the same keys for different queries, so all but the first read them from L2
    program = tl.program_id(0)
    q_blocks = tl.cdiv(Q, BLOCK_Q)
    # causal: the last queries have the most keys to scan, so they start first
    q_block = q_blocks - 1 - program % q_blocks
    split = (program // q_blocks) % splits
    batch = (program // q_blocks // splits).to(tl.int64)

    q = q_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_ok = q < Q
    query_rows = query_ptr + batch * stride_q.b + q.to(tl.int64) * stride_q.n  # [BLOCK_Q]
    key_base = key_ptr + batch * stride_k.b
    first = split * split_len
    end = tl.minimum(first + split_len, S)
    if HAS_CAUSAL:
        end = tl.minimum(end, tl.minimum(q_block * BLOCK_Q + BLOCK_Q, Q) + causal_shift)
    if IS_L2 and not DIRECT:
        query_norm = _square_norm(query_rows, q_ok, D, BLOCK_Q, BLOCK_D)
    if HAS_DOC:
        query_doc = tl.load(query_doc_ptr + batch * stride_qd.b + q.to(tl.int64) * stride_qd.n, mask=q_ok, other=0)

    # a row past Q has a list that nothing enters
    best = tl.where(q_ok[:, None], empty_list(k, BLOCK_Q, SLOTS), FULL)
    for start in range(first, end, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        s_ok = s < end
        key_rows = key_base + s.to(tl.int64) * stride_k.s  # [BLOCK_S]
        if DIRECT:
            score = -_squared_differences(query_rows, q_ok, key_rows, s_ok, D, BLOCK_Q, BLOCK_S, BLOCK_D)
        else:
            acc, key_norm = _products(
                query_rows, q_ok, key_rows, s_ok, D, IS_L2, EVEN_D, PRECISION, BLOCK_Q, BLOCK_S, BLOCK_D
            )
            score = acc
            if IS_L2:
                score = 2.0 * acc - (query_norm[:, None] + key_norm[None, :])
                # rounding may make a distance negative; a comparison keeps NaN
                score = tl.where(score > 0.0, 0.0, score)
        # one mask after the other: combined, they would need a tile of predicates in registers
        # score == score is false for NaN, which is not a candidate
        score = tl.where(score == score, score, float("-inf"))
        keep = s_ok
        if HAS_MASK:
            keep &= tl.load(key_mask_ptr + batch * stride_m.b + s.to(tl.int64) * stride_m.s, mask=s_ok, other=0) != 0
        score = tl.where(keep[None, :], score, float("-inf"))
        if HAS_CAUSAL:
            score = tl.where((s - causal_shift)[None, :] <= q[:, None], score, float("-inf"))
        if HAS_DOC:
            key_doc = tl.load(key_doc_ptr + batch * stride_kd.b + s.to(tl.int64) * stride_kd.s, mask=s_ok, other=0)
            score = tl.where(query_doc[:, None] != key_doc[None, :], score, float("-inf"))
        best = absorb_scores(best, score, s)

    row = batch * Q + q
    if SPLIT:
        slot = tl.arange(0, SLOTS)[None, :] - (SLOTS - k)
        offset = (row[:, None] * splits + split) * k + slot
        tl.store(partial_ptr + offset, best, mask=q_ok[:, None] & (slot >= 0))
    else:
        store_sorted(scores_ptr, indices_ptr, best, row, q_ok, k)


@triton.jit
def _topk_chunks_merge_kernel(
    partial_ptr, scores_ptr, indices_ptr,
    rows, count, k,
    SLOTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """scores and indices [rows,k] of the best of `count` candidates a row, partial [rows,count] packed int64."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row_ok = row < rows
    best = empty_list(k, BLOCK_Q, SLOTS)
    for start in range(0, count, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ok = row_ok[:, None] & (n[None, :] < count)
        packed = tl.load(partial_ptr + row[:, None] * count + n[None, :], mask=ok, other=-0x8000000000000000)
        best = absorb_packed(best, packed)
    store_sorted(scores_ptr, indices_ptr, best, row, row_ok, k)
