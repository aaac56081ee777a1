"""Leaky average on the CPU (csrc/cpu/leaky_average.cpp): one pass over memory with a float32 state."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu_lib import empty, native_call, unsupported_tensors


def unsupported(call) -> str | None:
    return unsupported_tensors({"x": call.x, "initial": call.initial}) or unsupported_tensors({"decay": call.decay})


def forward(call) -> tuple[Tensor]:
    y = empty(call.x.shape, call.x.dtype)
    native_call.call("leaky_average_forward", *call, y)
    return (y,)


def backward(call, outputs, grads, needs) -> list[Tensor | None]:
    """Return the gradients. The gradient of decay sums dx_t * y_{t-1} over the saved y, rounded to the type of x."""
    dx = empty(call.x.shape, call.x.dtype) if needs[0] else None
    ddecay = empty(call.decay.shape, torch.float32) if needs[1] else None
    dinitial = empty(call.initial.shape, call.x.dtype) if needs[2] else None
    tensors = (outputs[0], grads[0], call.decay, call.initial, call.segment, dx, ddecay, dinitial)
    native_call.call("leaky_average_backward", *tensors)
    return [dx, None if ddecay is None else ddecay.to(call.decay.dtype), dinitial]
