"""Position of a call's query 0: one for all batch entries, or a tensor with one each that the host never reads."""

from __future__ import annotations

import triton
import triton.language as tl

FARTHEST = tl.constexpr(1 << 29)  # bound to which positions from a tensor are clamped


@triton.jit
def position_of(first, batch_ptr, stride_batch, batch):
    """The position of a batch entry's query 0: the call's, plus the entry's own if it has one."""
    if batch_ptr is not None:
        own = tl.load(batch_ptr + batch * stride_batch)
        first += tl.minimum(tl.maximum(own, -FARTHEST), FARTHEST).to(tl.int32)
    return first
