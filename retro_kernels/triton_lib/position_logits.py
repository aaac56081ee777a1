"""Relative position logits of one tile: products with a band of the table, skewed into place in registers.

Query i and key j of a tile (i < BLOCK_M, j < BLOCK_N) use table row base + c, where c = i - j + BLOCK_N - 1. The band
of products P[i, c] = rq_i . rel[base + c] is BLOCK_M + BLOCK_N - 1 wide. Row i uses only c = i .. i + BLOCK_N - 1: one
c of each residue modulo BLOCK_N. Two steps turn the band into logits. First, each row selects its c of each residue
(folding), which gives [BLOCK_M, BLOCK_N]. Second, each row is permuted (`reverse_skew`). With BLOCK_M = BLOCK_N = 4,
row i selects these c for residues 0 1 2 3, and they belong to these keys j:

    row 0:  c = 0 1 2 3   j = 3 2 1 0
    row 1:  c = 4 1 2 3   j = 0 3 2 1
    row 2:  c = 4 5 2 3   j = 1 0 3 2
    row 3:  c = 4 5 6 3   j = 2 1 0 3

The permutation is its own inverse, so forward and backward share it. A gather from the whole band would move twice as
many elements, and tiles wider than BLOCK_N. The two steps commute: a walk that keeps blocks of the band permutes each
block once, and selects by the same `band_block` afterwards.

The argument `zero` is 0, but the compiler can't prove it, because it is computed from a loop variable. Index tensors
that depend on it are not hoisted out of the loop, where they would occupy a hundred registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .products import block_from, deep_product, product


@triton.jit
def reverse_skew(x, zero, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """y[i, j] = x[i, (i - j - 1) mod BLOCK_N]; its own inverse."""
    if x.dtype.primitive_bitwidth == 32:
        y = flat_skew(x, zero, BLOCK_M, BLOCK_N)
    else:  # by the estimate, shuffles of half types take less time than loads from shared memory
        y = row_skew(x, zero, BLOCK_M, BLOCK_N)
    return y


@triton.jit
def flat_skew(x, zero, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`reverse_skew` of numbers of 32 bits, as a gather from one dimension.

    Triton lowers it to shared memory: one store and one load per element, instead of shuffles between two layout
    conversions. The addresses interleave bits of row and column, so that the eight rows and eight columns of a warp's
    fragment are in different banks.
    """
    EIGHTS: tl.constexpr = BLOCK_N // 8
    # rows are 16 * iw + 8 * ih + il, columns of y are 8 * jh + jl
    iw = (tl.arange(0, BLOCK_M // 16) + zero)[:, None, None, None, None]
    ih = tl.arange(0, 2)[None, :, None, None, None]
    il = (tl.arange(0, 8) + zero)[None, None, :, None, None]
    jh = tl.arange(0, EIGHTS)[None, None, None, :, None]
    jl = tl.arange(0, 8)[None, None, None, None, :]
    c = il - jl + 7  # the column of x is 8 * (2 * iw + ih - jh - 1) + c, modulo BLOCK_N
    # one addition and one mask per element, because the terms of ih and jh are constants
    eight = ((2 * iw + c // 8) * 64 + ((ih - jh - 1) & (EIGHTS - 1)) * 64) & (BLOCK_N * 8 - 1)
    at = eight + (c % 2 * 32 + il * 4 + c % 8 // 2 + iw * (16 * BLOCK_N)) + ih * (8 * BLOCK_N)
    fragments = tl.permute(tl.reshape(x, [BLOCK_M // 16, 2, 8, EIGHTS, 4, 2]), (0, 1, 3, 5, 2, 4))
    flat = tl.reshape(fragments, [BLOCK_M * BLOCK_N])
    return tl.reshape(tl.gather(flat, tl.reshape(at, [BLOCK_M * BLOCK_N]), 0), [BLOCK_M, BLOCK_N])


@triton.jit
def row_skew(x, zero, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`reverse_skew` as a gather along rows.

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
def band_block(zero, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """int [BLOCK_M, BLOCK_N]: the BLOCK_N-wide block of the band from which row i selects residue c. After the
    permutation c is the key j.
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
    # a row outside the table may be outside the allocation: its address is clamped too
    pointers = rel_ptr + (tl.where(inside, t, 0)[:, None] * stride_t + e[None, :])
    if BLOCK_E == E:
        rel = tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        rel = tl.load(pointers, mask=inside[:, None] & (e < E)[None, :], other=0.0)
    return rel


@triton.jit
def table_product(
    a, a_from, bias_ptr, rel_ptr, first, rows, stride_t, zero,
    WIDTH: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
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
    rq, rel_ptr, base, rows, stride_t, zero,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr = False, rq_from=None, bias_ptr=None,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N]: rq_i . rel[base + i - j + BLOCK_N - 1], unscaled; rows outside the table give 0.

    rq: [BLOCK_M, BLOCK_E]. base: row of the table for the tile's smallest displacement, at i = 0 and j = BLOCK_N - 1.
    """
    block_of = band_block(zero, BLOCK_M, BLOCK_N)
    folded = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.static_range((BLOCK_M + BLOCK_N - 2) // BLOCK_N + 1):
        first = base + block * BLOCK_N
        band = table_product(
            rq, rq_from, bias_ptr, rel_ptr, first, rows, stride_t, zero, E, BLOCK_N, BLOCK_E, PRECISION, TRANSPOSED
        )
        folded = tl.where(block_of == block, band, folded)
    return reverse_skew(folded, zero, BLOCK_M, BLOCK_N)
