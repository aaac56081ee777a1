"""Chunked cross-attention on the CPU (csrc/cpu/chunked_cross_attention_*.cpp).

Beside the outputs it uses scratch per thread (about 1 MiB at RETRO's sizes), no copy of a whole input.
"""

from __future__ import annotations

from torch import Tensor

from ...cpu_lib import attention
from ...cpu_lib import unsupported as unsupported

OP = "chunked_cross_attention"


def forward(call) -> tuple[Tensor, Tensor]:
    return attention.forward(OP, call)


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    """Sums over chunks (rel_key, biases) are float32, in an order fixed by the sizes."""
    return attention.backward(OP, call, outputs, grads, needs, call.batch_start)
