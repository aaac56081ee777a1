"""Position of a call's query 0: one for all batch entries, or one an entry that only the device knows."""

from __future__ import annotations

import triton
import triton.language as tl

FARTHEST = tl.constexpr(1 << 29)  # positions given as a tensor count as within this


@triton.jit
def position_of(first, batch_ptr, stride_batch, batch):
    """The position of a batch entry's query 0: the call's, and the
    entry's own where it has one (read on the device alone).
    """
    if batch_ptr is not None:
        own = tl.load(batch_ptr + batch * stride_batch)
        first += tl.minimum(tl.maximum(own, -FARTHEST), FARTHEST).to(tl.int32)
    return first
