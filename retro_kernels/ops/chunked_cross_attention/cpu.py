"""Chunked cross-attention on the CPU (csrc/cpu/chunked_cross_attention_*.cpp).

Each thread uses scratch memory (about 1 MiB at RETRO's sizes). No input is copied as a whole.
"""

from __future__ import annotations

from torch import Tensor

from ...cpu_lib import attention
from ...cpu_lib import unsupported as unsupported

OP = "chunked_cross_attention"


def forward(call) -> tuple[Tensor, Tensor]:
    return attention.forward(OP, call)


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    return attention.backward(OP, call, outputs, grads, needs, call.batch_start)
