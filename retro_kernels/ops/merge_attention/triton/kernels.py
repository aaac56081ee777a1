"""Merge of partial attentions, and its gradient. A program has one (token, head) and batch, and visits every part."""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.softmax import LOG2E


@triton.jit
def _load(x_ptr, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_D] in float32; zeros unless `inside`, even if memory holds NaN."""
    column = tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    return tl.where(inside, x, 0.0)


@triton.jit(do_not_specialize=("H", "parts"))
def _merge_attention_forward_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr,
    stride_x, stride_l,
    H, parts,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n, head = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    lses_at = lses_ptr + batch * stride_l.b + head * stride_l.h + n * stride_l.n
    outs_at = outs_ptr + batch * stride_x.b + n * stride_x.n + head * stride_x.h
    row = (batch * (tl.num_programs(0) // H) + n) * H + head
    top, total, acc = float("-inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)
    for part in range(0, parts):
        at = tl.full([], 0, tl.int64) + part
        lse = tl.load(lses_at + at * stride_l.p)
        x = _load(outs_at + at * stride_x.p, lse != float("-inf"), D, BLOCK_D)  # [BLOCK_D]
        new_top = tl.maximum(top, lse)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, kept = tl.exp2((lse - shift) * LOG2E), tl.exp2((top - shift) * LOG2E)
        total = total * kept + weight
        acc = acc * kept + x * weight  # [BLOCK_D]
        top = new_top
    some = total != 0  # NaN must stay NaN
    safe = tl.where(some, total, 1.0)
    column = tl.arange(0, BLOCK_D)
    tl.store(out_ptr + row * D + column, (acc / safe).to(out_ptr.dtype.element_ty), mask=column < D)
    lse_at = lse_ptr + (batch * H + head) * (tl.num_programs(0) // H) + n
    tl.store(lse_at, tl.where(some, top + tl.log(safe), float("-inf")))


@triton.jit(do_not_specialize=("H", "parts"))
def _merge_attention_backward_kernel(
    outs_ptr, lses_ptr, lse_ptr, dout_ptr, dlse_ptr, douts_ptr, dlses_ptr,
    stride_x, stride_l, stride_do, stride_dl,
    H, parts,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """d out_p = w_p d out, d lse_p = w_p (d out . out_p - sum_r w_r d out . out_r + d lse).

    w_p is exp(lse_p - lse) divided by the sum over the parts, because the rounding error of a large lse is a factor of
    all weights.
    """
    n, head = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    N = tl.num_programs(0) // H
    lses_at = lses_ptr + batch * stride_l.b + head * stride_l.h + n * stride_l.n
    outs_at = outs_ptr + batch * stride_x.b + n * stride_x.n + head * stride_x.h
    lse = tl.load(lse_ptr + (batch * H + head) * N + n)
    lse = tl.where(lse == float("-inf"), float("inf"), lse)  # then every weight is zero
    some = lse != float("inf")
    dout = tl.zeros([BLOCK_D], tl.float32)
    if dout_ptr is not None:
        dout = _load(
            dout_ptr + batch * stride_do.b + n * stride_do.n + head * stride_do.h, some, D, BLOCK_D
        )  # [BLOCK_D]
    total, mean = 0.0, 0.0
    for part in range(0, parts):
        at = tl.full([], 0, tl.int64) + part
        lse_p = tl.load(lses_at + at * stride_l.p)
        x = _load(outs_at + at * stride_x.p, lse_p != float("-inf"), D, BLOCK_D)  # [BLOCK_D]
        weight = tl.exp2((lse_p - lse) * LOG2E)
        total += weight
        mean += weight * tl.sum(dout * x, 0)
    inverse = 1.0 / tl.where(some, total, 1.0)
    rest = -mean * inverse
    if dlse_ptr is not None:
        rest += tl.load(dlse_ptr + batch * stride_dl.b + head * stride_dl.h + n * stride_dl.n, mask=some, other=0.0)
    column = tl.arange(0, BLOCK_D)
    for part in range(0, parts):
        at = tl.full([], 0, tl.int64) + part
        lse_p = tl.load(lses_at + at * stride_l.p)
        x = _load(outs_at + at * stride_x.p, lse_p != float("-inf"), D, BLOCK_D)  # [BLOCK_D]
        weight = tl.exp2((lse_p - lse) * LOG2E) * inverse
        row = (at * tl.num_programs(1) + batch) * N * H
        grad = (dout * weight).to(douts_ptr.dtype.element_ty)
        tl.store(douts_ptr + (row + n * H + head) * D + column, grad, mask=column < D)
        tl.store(dlses_ptr + row + head * N + n, weight * (tl.sum(dout * x, 0) + rest))
