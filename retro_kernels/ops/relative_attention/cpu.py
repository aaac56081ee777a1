"""Relative attention on the CPU (csrc/cpu/relative_attention_*.cpp).

Beside the outputs a thread packs the keys, values and relative keys that its task sees, of one key head at a time, into
scratch: O((N+S)*(D+E)) a thread, never N*S. One or two queries read their keys as they lie.
"""

from __future__ import annotations

from torch import Tensor

from ...cpu_lib import attention
from ...cpu_lib import unsupported as unsupported

OP = "relative_attention"


def forward(call) -> tuple[Tensor, Tensor]:
    return attention.forward(OP, call)


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    """float32 partial sums: dK and dV of one key head a task, d
    rel_key of the heads of a task; see `Partition` in csrc.
    """
    return attention.backward(OP, call, outputs, grads, needs, call.batch_offset)
