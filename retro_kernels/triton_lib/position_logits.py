"""Relative position logits of one tile: products with a band of the table, skewed into place without leaving the
registers.

Query i and key j of a tile (i < BLOCK_M, j < BLOCK_N) meet table row base + c, where c = i - j + BLOCK_N - 1. The band
of products P[i, c] = rq_i . rel[base + c] is BLOCK_M + BLOCK_N - 1 wide, but row i only uses c = i .. i + BLOCK_N - 1:
one c of every residue modulo BLOCK_N. So the band folds, by selection, into [BLOCK_M, BLOCK_N], and what is left is a
permutation of each row. With BLOCK_M = BLOCK_N = 4, the c that row i keeps of residue 0 1 2 3, and the j that it
serves:

    row 0:  c = 0 1 2 3   j = 3 2 1 0
    row 1:  c = 4 1 2 3   j = 0 3 2 1
    row 2:  c = 4 5 2 3   j = 1 0 3 2
    row 3:  c = 4 5 6 3   j = 2 1 0 3

`zero` is a scalar that is 0 but that the compiler can't know to be: made from a loop variable, it keeps the index
tensors from being hoisted out of the loop, where they would occupy a hundred registers.

The permutation is its own inverse, so forward and backward share `reverse_skew`. Folding first halves the shuffles of a
gather from the whole band, and no tile is ever wider than BLOCK_N.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .products import block_from, deep_product, product


@triton.jit
def reverse_skew(x, zero, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """y[i, j] = x[i, (i - j - 1) mod BLOCK_N]; its own inverse.

    A row of 64 is shuffled as two halves of 32, one shuffle an element instead of two, once the halves stand as they
    must.
    """
    if BLOCK_N != 64:
        i = tl.arange(0, BLOCK_M)[:, None] + zero
        j = tl.arange(0, BLOCK_N)[None, :]
        return tl.gather(x, (i - j + BLOCK_N - 1) & (BLOCK_N - 1), 1)
    else:
        i = tl.arange(0, BLOCK_M)[:, None, None] + zero
        lane = tl.arange(0, 32)[None, None, :]
        halves = tl.reshape(x, [BLOCK_M, 2, 32])
        # target (half, l) reads column c = (i - 32 * half - l - 1) mod 64, which stands at lane (i - l - 1) mod 32:
        # seen from the source lane s, half h of c serves target half h or 1 - h by the parity of (i - s - 1) // 32
        swap = ((i - lane + 63) >> 5) & 1
        halves = tl.where(swap == 1, tl.flip(halves, 1), halves)
        source = tl.broadcast_to((i - lane + 31) & 31, [BLOCK_M, 2, 32])
        return tl.reshape(tl.gather(halves, source, 2), [BLOCK_M, BLOCK_N])


@triton.jit
def band_block(zero, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """int [BLOCK_M, BLOCK_N]: from which BLOCK_N-wide block of the
    band row i takes residue c, ceil((i - c) / BLOCK_N).
    """
    i = tl.arange(0, BLOCK_M)[:, None] + zero
    c = tl.arange(0, BLOCK_N)[None, :]
    return (i - c + BLOCK_N - 1) // BLOCK_N


@triton.jit
def rel_rows(rel_ptr, first, rows, stride_t, E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr):
    """Table rows first .. first + BLOCK_N - 1 as [BLOCK_N, BLOCK_E]; a row outside [0, rows) is zero."""
    t = first + tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    inside = (t >= 0) & (t < rows)
    # a row outside the table may lie outside the allocation: clamp the address as well as masking the load
    pointers = rel_ptr + (tl.where(inside, t, 0)[:, None] * stride_t + e[None, :])
    if BLOCK_E == E:
        rel = tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        rel = tl.load(pointers, mask=inside[:, None] & (e < E)[None, :], other=0.0)
    return rel


@triton.jit
def table_product(
    a,
    a_from,
    bias_ptr,
    rel_ptr,
    first,
    rows,
    stride_t,
    zero,
    WIDTH: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):
    """a times the rows first .. first + BLOCK_B - 1 of a table, [len(a),
    BLOCK_B]; a_from None: from registers whatever the precision.
    """
    DEEP: tl.constexpr = a_from is not None and PRECISION == "tf32x3"
    if DEEP:
        b_from = block_from(rel_ptr, first, rows, stride_t, BLOCK_B)
        band = deep_product(a_from, bias_ptr, b_from, zero, WIDTH, BLOCK, PRECISION, TRANSPOSED)
    else:
        band = product(a, rel_rows(rel_ptr, first, rows, stride_t, WIDTH, BLOCK_B, BLOCK), PRECISION, TRANSPOSED)
    return band


@triton.jit
def position_logits(
    rq,  # [BLOCK_M, BLOCK_E]
    # base: the table row of the tile's smallest displacement, that of i = 0, j = BLOCK_N - 1
    rel_ptr,
    base,
    rows,
    stride_t,
    zero,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
    rq_from=None,
    bias_ptr=None,
):
    """float32 [BLOCK_M, BLOCK_N]: rq_i . rel[base + i - j + BLOCK_N - 1], unscaled; rows outside the table give 0."""
    block_of = band_block(zero, BLOCK_M, BLOCK_N)
    folded = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.static_range((BLOCK_M + BLOCK_N - 2) // BLOCK_N + 1):
        first = base + block * BLOCK_N
        band = table_product(
            rq, rq_from, bias_ptr, rel_ptr, first, rows, stride_t, zero, E, BLOCK_N, BLOCK_E, PRECISION, TRANSPOSED
        )
        folded = tl.where(block_of == block, band, folded)
    return reverse_skew(folded, zero, BLOCK_M, BLOCK_N)


@triton.jit
def position_query_gradient(
    acc,  # float32 [BLOCK_M, BLOCK_E]: what the sum is added to
    folded,  # float32 [BLOCK_M, BLOCK_N]: reverse_skew of the gradient of the tile's position logits
    rel_ptr,
    base,
    rows,
    stride_t,
    zero,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_E]: acc plus the sum over j of gradient[i, j] *
    rel[base + i - j + BLOCK_N - 1], the gradient of rq.
    """
    block_of = band_block(zero, BLOCK_M, BLOCK_N)
    for block in tl.static_range((BLOCK_M + BLOCK_N - 2) // BLOCK_N + 1):
        rel = rel_rows(rel_ptr, base + block * BLOCK_N, rows, stride_t, E, BLOCK_N, BLOCK_E)
        part = tl.where(block_of == block, folded, 0.0).to(rel.dtype)
        acc += tl.dot(part, rel, input_precision=PRECISION)
    return acc
