"""Loads of rows, keys and biases. Elements outside a tensor, and invisible ones, are zero."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wide(index):
    """A loop index as int64. In the interpreter a loop index is a plain int, without `to`."""
    return tl.full([], 0, tl.int64) + index


@triton.jit
def load_rows(base, rows, inside, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[len(rows), BLOCK] from base + row * stride. Rows not inside and columns past WIDTH are zero."""
    column = tl.arange(0, BLOCK)
    pointers = base + rows[:, None] * stride + column[None, :]
    if BLOCK == WIDTH:
        x = tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        x = tl.load(pointers, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)
    return x


@triton.jit
def load_keys(
    base, j, visible, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, ONCE: tl.constexpr = False
):
    """[BLOCK_N, BLOCK_D] keys or values; invisible ones are zero. ONCE: they are read once, so L2 evicts them first."""
    EVICT: tl.constexpr = "evict_first" if ONCE else ""
    column = tl.arange(0, BLOCK_D)
    pointers = base + (j[:, None] * stride + column[None, :])
    if MASKED and BLOCK_D == D:
        x = tl.load(pointers, mask=visible[:, None], other=0.0, eviction_policy=EVICT)
    elif MASKED:
        x = tl.load(pointers, mask=visible[:, None] & (column < D)[None, :], other=0.0, eviction_policy=EVICT)
    elif BLOCK_D == D:
        x = tl.load(pointers, eviction_policy=EVICT)
    else:
        x = tl.load(pointers, mask=(column < D)[None, :], other=0.0, eviction_policy=EVICT)
    return x


@triton.jit
def add_bias(x, bias_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """x + bias in x's type, rounded like an eager sum."""
    if bias_ptr is not None:
        column = tl.arange(0, BLOCK)
        bias = tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0)
        x = (x.to(tl.float32) + bias.to(tl.float32)[None, :]).to(x.dtype)
    return x


@triton.jit
def load_query(q_ptr, bias_ptr, i, row_mask, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(rows, rows + bias) [BLOCK_M, BLOCK]. A row outside row_mask is zero, and its sum the bias."""
    q = load_rows(q_ptr, i.to(tl.int64), row_mask, stride, WIDTH, BLOCK)
    return q, add_bias(q, bias_ptr, WIDTH, BLOCK)
