"""Relative position logits of one tile: products with a band of the table, skewed into place in registers.

Query i and key j of a tile (i < BLOCK_M, j < BLOCK_N) use table row base + c, where c = i - j + BLOCK_N - 1. The band
of products P[i, c] = rq_i . rel[base + c] is BLOCK_M + BLOCK_N - 1 wide, and row i uses c = i .. i + BLOCK_N - 1.

If BLOCK_M <= BLOCK_N, the band has two blocks of BLOCK_N columns, and `skewed` gathers from both. In other tiles each
row first selects its c of each residue modulo BLOCK_N (folding), and `reverse_skew` then permutes the row. With
BLOCK_M = BLOCK_N = 4, row i selects these c for residues 0 1 2 3, and they belong to these keys j:

    row 0:  c = 0 1 2 3   j = 3 2 1 0
    row 1:  c = 4 1 2 3   j = 0 3 2 1
    row 2:  c = 4 5 2 3   j = 1 0 3 2
    row 3:  c = 4 5 6 3   j = 2 1 0 3

Both serve the backward pass too. The permutation is its own inverse. Along a walk over keys, `skewed` of the gradients
of two neighbouring tiles is the complete gradient of the block of the band that they share.

The argument `zero` is 0, but the compiler can't prove it, because it is computed from a loop variable. Index tensors
that depend on it are not hoisted out of the loop, where they would occupy a hundred registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .products import block_from, deep_product, product


@triton.jit
def reverse_skew(x, zero, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """y[i, j] = x[i, (i - j - 1) mod BLOCK_N]; its own inverse.

    A row of 64 is gathered as two halves of 32, with one shuffle for each element instead of two. Before the gather,
    elements that move to the other half are swapped.
    """
    if BLOCK_N != 64:
        i = tl.arange(0, BLOCK_M)[:, None] + zero
        j = tl.arange(0, BLOCK_N)[None, :]
        return tl.gather(x, (i - j + BLOCK_N - 1) & (BLOCK_N - 1), 1)
    else:
        i = tl.arange(0, BLOCK_M)[:, None, None] + zero
        lane = tl.arange(0, 32)[None, None, :]
        halves = tl.reshape(x, [BLOCK_M, 2, 32])
        # y[half, l] reads c = (i - 32 * half - l - 1) mod 64, which is in lane s = (i - l - 1) mod 32. Its half differs
        # from y's half if (i - s - 1) // 32 is odd: lane s then swaps its halves before the gather.
        swap = ((i - lane + 63) >> 5) & 1
        halves = tl.where(swap == 1, tl.flip(halves, 1), halves)
        source = tl.broadcast_to((i - lane + 31) & 31, [BLOCK_M, 2, 32])
        return tl.reshape(tl.gather(halves, source, 2), [BLOCK_M, BLOCK_N])


@triton.jit
def skewed(lower, upper, zero, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """y[i, j] = [lower | upper][i, i - j + BLOCK_N - 1], for two neighbouring blocks of a band, BLOCK_M <= BLOCK_N.

    The source of the gather has one dimension, because Triton then lowers it to shared memory: one store and one load
    per element, at addresses that are constants apart. The address bits of rows and columns are interleaved so that
    the eight rows and eight columns of a warp's fragment are in different banks.
    """
    EIGHTS: tl.constexpr = BLOCK_N // 8
    both = tl.reshape(tl.join(lower, upper), [BLOCK_M // 8, 8, EIGHTS, 4, 2, 2])  # row, column and block
    # row and column in eights and within one
    ih = tl.arange(0, BLOCK_M // 8)[:, None, None, None] + zero
    il = (tl.arange(0, 8) + zero)[None, :, None, None]
    jh, jl = tl.arange(0, EIGHTS)[None, None, :, None], tl.arange(0, 8)[None, None, None, :]
    d = il - jl + 7  # the column is 8 * (ih - jh + EIGHTS - 1) + d
    if lower.dtype.primitive_bitwidth == 16:
        flat = tl.permute(both, (0, 5, 2, 1, 3, 4))
        within = d % 8 + il * 8
    else:
        flat = tl.permute(both, (0, 5, 2, 4, 1, 3))
        within = d % 2 * 32 + il * 4 + d % 8 // 2
    at = (within + d // 8 * 64) + (ih * (128 * EIGHTS + 64) + (EIGHTS - 1) * 64 - jh * 64)
    y = tl.gather(tl.reshape(flat, [2 * BLOCK_M * BLOCK_N]), tl.reshape(at, [BLOCK_M * BLOCK_N]), 0)
    return tl.reshape(y, [BLOCK_M, BLOCK_N])


@triton.jit
def band_block(zero, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """int [BLOCK_M, BLOCK_N]: the BLOCK_N-wide block of the band from which row i selects residue c."""
    i = tl.arange(0, BLOCK_M)[:, None] + zero
    c = tl.arange(0, BLOCK_N)[None, :]
    return (i - c + BLOCK_N - 1) // BLOCK_N


@triton.jit
def rel_rows(rel_ptr, first, rows, stride_t, E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr):
    """Table rows first .. first + BLOCK_N - 1 as [BLOCK_N, BLOCK_E]; a row outside [0, rows) is zero."""
    t = first + tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    inside = (t >= 0) & (t < rows)
    # a row outside the table may be outside the allocation: its address is clamped too
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
    """a times the rows first .. first + BLOCK_B - 1 of a table, [len(a), BLOCK_B].

    a_from None: a is read from registers, whatever the precision.
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
    # base: table row of the tile's smallest displacement, at i = 0 and j = BLOCK_N - 1
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
    BLOCKS: tl.constexpr = (BLOCK_M + BLOCK_N - 2) // BLOCK_N + 1
    block_of = band_block(zero, BLOCK_M, BLOCK_N)
    folded = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    lower = folded.to(rq.dtype)
    for block in tl.static_range(BLOCKS):
        first = base + block * BLOCK_N
        band = table_product(
            rq, rq_from, bias_ptr, rel_ptr, first, rows, stride_t, zero, E, BLOCK_N, BLOCK_E, PRECISION, TRANSPOSED
        )
        if BLOCKS > 2:
            folded = tl.where(block_of == block, band, folded)
        elif block == 0:
            lower = band.to(rq.dtype)
        else:
            folded = skewed(lower, band.to(rq.dtype), zero, BLOCK_M, BLOCK_N).to(tl.float32)
    if BLOCKS > 2:
        folded = reverse_skew(folded, zero, BLOCK_M, BLOCK_N)
    return folded
