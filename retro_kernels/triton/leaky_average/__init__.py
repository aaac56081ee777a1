"""Leaky average over time, as a scan: the triton backend of `retro_kernels.leaky_average`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..._problem import KERNEL_DTYPES, LeakyAverage
from ..._target import Target, current_target
from ...aot import Case
from .. import unsupported_tensors
from .plan import plan_backward, plan_forward

_MAX_BATCH = 65535  # CUDA's limit on the third grid dimension


def unsupported(call: LeakyAverage) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    if call.x.shape[0] > _MAX_BATCH:
        return f"B={call.x.shape[0]} exceeds {_MAX_BATCH}"
    # decay may stay float32 beside a narrower x
    return unsupported_tensors({"x": call.x, "initial": call.initial}) or unsupported_tensors({"decay": call.decay})


def forward(call: LeakyAverage) -> tuple[Tensor]:
    """y [B,N,H,D] in the type of x."""
    y, launches = plan_forward(call, current_target(call.x.device))
    for launch in launches:
        launch.run()
    return (y,)


def backward(call: LeakyAverage, outputs, grads, needs) -> list[Tensor | None]:
    """dx is the same scan run backwards over dy; d decay sums dx_t * y_{t-1} over the saved y, in two ordered stages."""
    inputs = (call.x, call.decay, call.initial)
    needs = [need and t is not None for need, t in zip(needs, inputs, strict=True)]
    if grads[0] is None or not any(needs):
        return [torch.zeros_like(t) if need else None for need, t in zip(needs, inputs, strict=True)]
    dx, partial, dinitial, launches = plan_backward(call, outputs[0], grads[0], needs, current_target(call.x.device))
    for launch in launches:
        launch.run()
    ddecay = None if partial is None else partial.sum((0, 1, 3)).to(call.decay.dtype)
    return [dx, ddecay, dinitial]


def aot_cases(target: Target) -> Iterator[Case]:
    """Every kernel of this op: one sequence that fills the machine by columns, one that needs chunks of time."""
    for name, (b, n, h, d) in {"wide": (16, 2048, 16, 64), "long": (1, 16384, 8, 128)}.items():
        for documents, dtype in itertools.product((False, True), KERNEL_DTYPES):
            x, initial = torch.empty((b, n, h, d), dtype=dtype, device="meta"), torch.empty((b, h, d), dtype=dtype, device="meta")
            segment = torch.empty((b, n), dtype=torch.int64, device="meta") if documents else None
            call = LeakyAverage(x, torch.empty(h, dtype=torch.float32, device="meta"), initial, segment)
            launches = plan_forward(call, target)[1] + plan_backward(call, x, x, (True, True, True), target)[-1]
            for launch in launches:
                yield Case(f"{name}, documents" if documents else name, str(dtype).removeprefix("torch."), launch)
