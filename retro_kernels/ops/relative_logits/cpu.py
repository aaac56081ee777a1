"""Position logits on the CPU (csrc/cpu/relative_logits.cpp). Scratch memory holds one chunk of the band at a time."""

from __future__ import annotations

from torch import Tensor

from ...cpu_lib import empty, native_call
from ...cpu_lib import unsupported as unsupported


def forward(call) -> tuple[Tensor]:
    b, n, h, _ = call.query.shape
    logits = empty((b, h, n, call.key_len), call.query.dtype)
    native_call.call("relative_logits_forward", call, logits)
    return (logits,)


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    inputs = (call.query, call.rel_key, call.position_bias)
    wanted = [empty(x.shape, x.dtype) if need else None for x, need in zip(inputs, needs, strict=True)]
    native_call.call("relative_logits_backward", call, grads[0], *wanted)
    return wanted
