"""Relative attention on the CPU (csrc/cpu/relative_attention_*.cpp).

A thread packs the keys, values and relative keys that its task sees, of one key head at a time, into scratch memory of
O((N+S)*(D+E)), never N*S. One or two queries read their keys in place.
"""

from __future__ import annotations

from torch import Tensor

from ...cpu_lib import attention
from ...cpu_lib import unsupported as unsupported

OP = "relative_attention"


def forward(call) -> tuple[Tensor, Tensor]:
    return attention.forward(OP, call)


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    return attention.backward(OP, call, outputs, grads, needs, call.batch_offset)
