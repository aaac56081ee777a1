"""Dropout of attention probabilities inside a kernel. Every backend drops the same entries."""

from __future__ import annotations

import triton
import triton.language as tl

_SIGN = 1 << 31


def threshold(p: float) -> int:
    """Return the kernel argument for dropout probability p: floor(p * 2**32), moved into the range of an int32.

    An argument of 2**31 or more would have another type, and Triton would compile another kernel.
    """
    return int(p * 2**32) - _SIGN


@triton.jit
def dropout_keep(seed, limit, key, query, head, batch):
    """Whether each probability is kept: the first word of Philox4x32-10 at counter (key, query, head, batch) is at
    least p * 2**32.

    seed: int64 scalar, loaded from memory so that each replay of a graph draws again. limit: threshold(p). key, query:
    int32 tensors that broadcast together. head, batch: scalars.
    """
    shape = key + query
    c0 = (key + query * 0).to(tl.uint32)
    c1 = (query + key * 0).to(tl.uint32)
    c2 = (shape * 0 + head).to(tl.uint32)
    c3 = (shape * 0 + batch).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, c0, c1, c2, c3)
    # an unsigned comparison is a signed one with the top bit of both sides flipped
    return (word ^ 0x80000000).to(tl.int32, bitcast=True) >= limit
