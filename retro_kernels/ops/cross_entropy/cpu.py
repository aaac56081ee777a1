"""Cross-entropy of float32 logits on the CPU, one task for each row (csrc/cpu/cross_entropy.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu_lib import empty, native_call, unsupported_but_float32

unsupported = unsupported_but_float32


def forward(call) -> tuple[Tensor]:
    losses = empty(call.target.shape, torch.float32)
    _run(call.input.contiguous(), call, torch.ones_like(losses), losses, gradient=False)
    return (losses,)


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    dx = empty(call.input.shape, torch.float32)
    dx.copy_(call.input)
    _run(dx, call, grads[0].contiguous(), empty(call.target.shape, torch.float32), gradient=True)
    return [dx]


def _run(logits: Tensor, call, weights: Tensor, losses: Tensor, gradient: bool) -> None:
    """Call the kernel, which raises ValueError for a target that is out of range."""
    target, ignored = call.target.contiguous(), call.ignore_index
    native_call.call("softmax_losses", logits, target, ignored, weights, losses, gradient)
