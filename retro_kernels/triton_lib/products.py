"""Products of two blocks of rows: from registers or, for float32 as three tf32 products, from memory in steps."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def opaque_zero(index):
    """0, in a form that the compiler cannot replace by 0. index: from 0 to far below 2**30.

    A loop whose bound contains this zero is not unrolled. An address that contains the zero of a loop's index is
    computed again in each iteration, so that it takes no registers between iterations.
    """
    return index >> 30


@triton.jit
def product(a, b, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr):
    """float32 a b^T [len(a), len(b)]. TRANSPOSED: computed as (b a^T)^T, which divides the rows of b among the warps:
    for few rows in a and many in b.
    """
    if TRANSPOSED:
        return tl.trans(tl.dot(b, tl.trans(a), input_precision=PRECISION))
    else:
        return tl.dot(a, tl.trans(b), input_precision=PRECISION)


@triton.jit
def block_from(pointer, first, rows, stride, BLOCK: tl.constexpr):
    """Rows first .. first + BLOCK - 1, zero outside [0, rows), for `deep_product`."""
    t = first + tl.arange(0, BLOCK)
    inside = (t >= 0) & (t < rows)
    return pointer, tl.where(inside, t, 0), inside, stride  # a row outside may be outside the allocation


@triton.jit
def deep_product(
    a_from, bias_ptr, b_from, zero,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """`product` of the rows a_from, plus a bias, and the rows b_from, read from memory a few columns at a time.

    a_from, b_from: (pointer, rows, row_mask, stride); rows outside row_mask are zero. bias_ptr: None or the bias; it is
    not in the tuple, because triton 3.6 allows no None there. For "tf32x3", which splits both operands in two: whole
    rows would fill every register.
    """
    a_ptr, i, row_mask, stride_a = a_from
    b_ptr, j, inside, stride_b = b_from
    STEP: tl.constexpr = BLOCK if BLOCK < 32 else 32
    WHOLE: tl.constexpr = WIDTH % STEP == 0
    a_at = a_ptr + i.to(tl.int64)[:, None] * stride_a
    b_at = b_ptr + j.to(tl.int64)[:, None] * stride_b
    if TRANSPOSED:
        acc = tl.zeros([j.shape[0], i.shape[0]], tl.float32)
    else:
        acc = tl.zeros([i.shape[0], j.shape[0]], tl.float32)
    for start in range(0, WIDTH + zero, STEP):  # `zero` prevents unrolling
        column = start + tl.arange(0, STEP)
        in_a, in_b = row_mask[:, None], inside[:, None]
        if not WHOLE:
            in_a, in_b = in_a & (column < WIDTH)[None, :], in_b & (column < WIDTH)[None, :]
        a = tl.load(a_at + column[None, :], mask=in_a, other=0.0)
        if bias_ptr is not None:
            a += tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0)[None, :]
        b = tl.load(b_at + column[None, :], mask=in_b, other=0.0)
        if TRANSPOSED:
            acc = tl.dot(b, tl.trans(a), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    if TRANSPOSED:
        acc = tl.trans(acc)
    return acc


@triton.jit
def tile_product(x, x_from, bias_ptr, y, y_from, zero, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """float32 x y^T; for "tf32x3" by `deep_product` of x_from and y_from."""
    if PRECISION == "tf32x3":
        return deep_product(x_from, bias_ptr, y_from, zero, D, BLOCK_D, PRECISION)
    else:
        return tl.dot(x, tl.trans(y), input_precision=PRECISION)


@triton.jit
def rows_product(
    x, x_from, bias_ptr, y, y_ptr, first, rows, stride, zero,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """`product` of x and y, the rows first .. first + BLOCK - 1 at y_ptr; for "tf32x3" by `deep_product`."""
    if PRECISION == "tf32x3":
        y_from = block_from(y_ptr, first, rows, stride, BLOCK)
        return deep_product(x_from, bias_ptr, y_from, zero, D, BLOCK_D, PRECISION, TRANSPOSED)
    else:
        return product(x, y, PRECISION, TRANSPOSED)
