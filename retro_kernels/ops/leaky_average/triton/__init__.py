"""Leaky average over time, as a scan: the triton backend of `retro_kernels.leaky_average`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ....compile.aot import Case
from ....compile.target import Target
from ....core.arguments import KERNEL_DTYPES
from ....triton_lib import unsupported_tensors
from ....triton_lib.plan import cases_of, run_backward, run_forward
from ..call import LeakyAverage
from . import launch

_MAX_BATCH = 65535  # CUDA's limit on the third grid dimension


def unsupported(call: LeakyAverage) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    if call.x.shape[0] > _MAX_BATCH:
        return f"B={call.x.shape[0]} exceeds {_MAX_BATCH}"
    # decay may stay float32 beside a narrower x
    return unsupported_tensors({"x": call.x, "initial": call.initial}) or unsupported_tensors({"decay": call.decay})


def forward(call: LeakyAverage) -> tuple[Tensor, ...]:
    """y [B,N,H,D] in the type of x."""
    return run_forward(launch.forward, call)


def backward(call: LeakyAverage, outputs, grads, needs) -> list[Tensor | None]:
    """dx is the same scan run backwards over dy; d decay sums dx_t *
    y_{t-1} over the saved y, in two ordered stages.
    """
    return run_backward(launch.backward, call, outputs, grads, needs)


def aot_cases(target: Target) -> Iterator[Case]:
    """Every kernel of this op: one sequence that fills the machine by columns, one that needs chunks of time."""
    for name, (b, n, h, d) in {"wide": (16, 2048, 16, 64), "long": (1, 16384, 8, 128)}.items():
        for documents, dtype in itertools.product((False, True), KERNEL_DTYPES):
            x, initial = (
                torch.empty((b, n, h, d), dtype=dtype, device="meta"),
                torch.empty((b, h, d), dtype=dtype, device="meta"),
            )
            segment = torch.empty((b, n), dtype=torch.int64, device="meta") if documents else None
            call = LeakyAverage(x, torch.empty(h, dtype=torch.float32, device="meta"), initial, segment)
            yield from cases_of(
                f"{name}, documents" if documents else name, call, target, launch.forward, launch.backward
            )
