"""Functions of the backward kernels: delta, and the gradient of one tile's logits.

With delta = rowsum(dO * O) - dlse:  P = exp(logits - lse), dS = P * (dP - delta).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....triton_lib.gradients import dropped, row_products, weight_of
from ....triton_lib.loads import load_rows
from ....triton_lib.products import opaque_zero


@triton.jit(do_not_specialize=("N", "H"))
def _relative_delta_kernel(
    out_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr,
    stride_o, stride_do, stride_dl,
    N, H,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """delta [B,H,N] of BLOCK_M queries; 0 for a query that sees nothing."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head64 = head.to(tl.int64)
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = i < N
    out_base = out_ptr + batch * stride_o.b + head64 * stride_o.h
    do_base = do_ptr + batch * stride_do.b + head64 * stride_do.h
    out = load_rows(out_base, i.to(tl.int64), row_mask, stride_o.n, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    do = load_rows(do_base, i.to(tl.int64), row_mask, stride_do.n, D, BLOCK_D)
    out_from, do_from = (out_base, i, row_mask, stride_o.n), (do_base, i, row_mask, stride_do.n)
    zero = opaque_zero(tl.program_id(0))
    # [BLOCK_M], summed in the order of dP
    delta = row_products(out, out_from, do, do_from, zero, D, BLOCK_M, BLOCK_D, PRECISION)
    if dlse_ptr is not None:
        dlse_at = dlse_ptr + batch * stride_dl.b + head64 * stride_dl.h + i.to(tl.int64) * stride_dl.n
        delta -= tl.load(dlse_at, mask=row_mask, other=0.0)
    at = (batch * H + head) * N + i
    lse = tl.load(lse_ptr + at, mask=row_mask, other=0.0)
    tl.store(delta_ptr + at, tl.where(lse == float("-inf"), 0.0, delta), mask=row_mask)


@triton.jit
def tile_gradient(logits, dp, lse2, delta, visible, scale2, seed_ptr, dropout, place):
    """(probabilities that the values were multiplied by, gradient of the scaled logits) of one tile. For `dropout` and
    `place` see `dropped`.
    """
    p = tl.where(visible, weight_of(logits * scale2 - lse2[:, None]), 0.0)
    kept, dp = dropped(p, dp, seed_ptr, dropout, place)
    # an invisible key may be NaN, and 0 * NaN is NaN
    return kept, tl.where(visible, p * (dp - delta[:, None]), 0.0)
