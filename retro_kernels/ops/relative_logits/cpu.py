"""Position logits on the CPU (csrc/cpu/relative_logits.cpp): the band lives in scratch, a chunk at a time."""

from __future__ import annotations

from torch import Tensor

from ...core import steps
from ...cpu_lib import empty
from ...cpu_lib import unsupported as unsupported


def forward(call) -> tuple[Tensor]:
    b, n, h, _ = call.query.shape
    logits = empty((b, h, n, call.key_len), call.query.dtype)
    steps.call("_cpu", "relative_logits_forward", call, logits, steps.THREADS)
    return (logits,)


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    wanted = [
        empty(tensor.shape, tensor.dtype) if need and (tensor := getattr(call, name)) is not None else None
        for name, need in zip(call.DIFFERENTIABLE, needs, strict=True)
    ]
    steps.call("_cpu", "relative_logits_backward", call, grads[0], *wanted, steps.THREADS)
    return wanted
