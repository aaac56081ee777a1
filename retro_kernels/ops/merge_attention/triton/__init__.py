"""The merge of partial attentions: the triton backend of `retro_kernels.merge_attention`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ....compile.aot import Case
from ....compile.target import Target
from ....core.arguments import KERNEL_DTYPES
from ....triton_lib import unsupported_tensors
from ....triton_lib.plan import cases_of, run_backward, run_forward
from ..call import MergeAttention
from . import launch

_MAX_BATCH = 65535  # CUDA's limit on the second grid dimension


def unsupported(call: MergeAttention) -> str | None:
    """Why this backend can't serve the call; None if it can."""
    if call.outs.shape[1] > _MAX_BATCH:
        return f"B={call.outs.shape[1]} exceeds {_MAX_BATCH}"
    return unsupported_tensors({"outs": call.outs})


def forward(call: MergeAttention) -> tuple[Tensor, ...]:
    """out [B,N,H,D] in the type of outs, lse [B,H,N] float32."""
    return run_forward(launch.forward, call)


def backward(call: MergeAttention, outputs, grads, needs) -> list[Tensor | None]:
    """Both gradients from one kernel, which reads each part twice."""
    return run_backward(launch.backward, call, outputs, grads, needs)


def aot_cases(target: Target) -> Iterator[Case]:
    """Every kernel of this op: presets' head widths, two parts and a decode step over many."""
    sizes = {"two parts d64": (2, 8, 2048, 64), "two parts d128": (2, 8, 2048, 128), "decode d128": (16, 8, 1, 128)}
    for name, (p, b, n, d) in sizes.items():
        for dtype in KERNEL_DTYPES:
            outs = torch.empty((p, b, n, 16, d), dtype=dtype, device="meta")
            call = MergeAttention(outs, torch.empty((p, b, 16, n), dtype=torch.float32, device="meta"))
            yield from cases_of(name, call, target, launch.forward, launch.backward)
