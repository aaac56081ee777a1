"""Dropout of attention probabilities inside a kernel: the very entries that every other backend drops."""

from __future__ import annotations

import triton
import triton.language as tl

_SIGN = 1 << 31


def threshold(p: float) -> int:
    """The kernel argument for dropout probability p: floor(p * 2**32), moved into the range of an int32.

    Triton would give an argument past 2**31 another type, hence another kernel.
    """
    return int(p * 2**32) - _SIGN


@triton.jit
def dropout_keep(seed, limit, key, query, head, batch):
    """Whether each probability is kept: first word of Philox4x32-10 at counter (key, query, head, batch), w >= p *
    2**32.

    seed int64 scalar (loaded from memory: a graph replay draws anew), limit = threshold(p), key and query int32 tensors
    that broadcast together, head and batch scalars.
    """
    shape = key + query
    c0 = (key + query * 0).to(tl.uint32)
    c1 = (query + key * 0).to(tl.uint32)
    c2 = (shape * 0 + head).to(tl.uint32)
    c3 = (shape * 0 + batch).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, c0, c1, c2, c3)
    # unsigned comparison, made signed by flipping the top bit of both sides
    return (word ^ 0x80000000).to(tl.int32, bitcast=True) >= limit
