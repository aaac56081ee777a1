"""Online softmax in base 2, for both attentions' forward kernels."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # log2(e): the hardware's exponential has base 2
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_step(logits, row_max, row_sum, acc, MASKED: tl.constexpr):
    """(p, row_max, row_sum, acc) after a tile of logits in base 2; earlier sums are scaled to the new maximum.

    MASKED: all logits of a row may be -inf.
    """
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    shift = new_max
    if MASKED:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
    p = tl.exp2(logits - shift[:, None])  # [BLOCK_M, BLOCK_N]
    alpha = tl.exp2(row_max - shift)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    return p, new_max, row_sum, acc


@triton.jit
def softmax_end(row_max, row_sum, acc, HIDDEN: tl.constexpr):
    """(weighted mean of the values, log-sum-exp). HIDDEN: acc may be NaN in a row that sees no key; it becomes 0."""
    some = row_sum != 0  # NaN must stay NaN
    divisor = tl.where(some, row_sum, 1.0)
    acc = acc / divisor[:, None]
    if HIDDEN:
        acc = tl.where(some[:, None], acc, 0.0)
    return acc, tl.where(some, (row_max + tl.log2(divisor)) * LN2, float("-inf"))
